"""The C backend's elementary functions, in units in the last place, against many digits; and its 16-bit types."""

import ctypes
import re

import mpmath
import numpy as np
import pytest
import torch

from kullback.backends import cache
from kullback.backends.c import compile
from kullback.backends.printer import INFIX
from kullback.formula import TENSOR

FUNCTIONS = ("exp", "log", "expm1", "log1p")
# In ulps: of exp and log as a libm has them; the others are what their users need.
BUDGET = {"exp": 1.0, "log": 1.0, "expm1": 4.0, "log1p": 3.0}
CAP = 30


@pytest.fixture(scope="module", params=["float", "double"])
def library(request):
    double = request.param == "double"
    text = "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(double)}",
            compile.library(),
            (compile.HERE / "fast.h").read_text() if not double else "#define ex2(x) exp2(x)",
            "void apply_exp2(const real *x, real *y, int64_t n)",
            "{ for (int64_t i = 0; i < n; i++) y[i] = ex2(x[i]); }",
            "void apply_mass_exp(const real *x, real *y, int64_t n)",
            "{ for (int64_t i = 0; i < n; i++) y[i] = mass_exp(x[i]); }",
            *(
                f"void apply_{name}(const real *x, real *y, int64_t n)"
                f"{{ for (int64_t i = 0; i < n; i++) y[i] = safe_{name}(x[i]); }}"
                for name in FUNCTIONS
            ),
            f"void apply_softcap(const real *x, real *y, int64_t n)"
            f"{{ for (int64_t i = 0; i < n; i++) y[i] = softcapped(x[i], {CAP}); }}",
            f"void apply_softcap_grad(const real *x, real *y, int64_t n)"
            f"{{ for (int64_t i = 0; i < n; i++) y[i] = softcap_grad(softcapped(x[i], {CAP}), {CAP}); }}",
            "void halves(const float *x, uint16_t *b, uint16_t *h, int64_t n)",
            "{ for (int64_t i = 0; i < n; i++) b[i] = store_bfloat16((real)x[i]), h[i] = store_float16((real)x[i]); }",
            "void wholes(const uint16_t *x, float *b, float *h, int64_t n)",
            "{ for (int64_t i = 0; i < n; i++) b[i] = (float)load_bfloat16(x[i]), h[i] = (float)load_float16(x[i]); }",
        ]
    )
    command = compile.compiler()
    path = cache.cached(compile.key(command, text), ".so", lambda: compile._compile(command, text))
    return ctypes.CDLL(str(path)), np.float64 if double else np.float32


@pytest.mark.parametrize("prefix", ["safe_", "in_range_", "fast_"])
def test_every_operation_exists_under_every_prefix(prefix):
    """A kind may use any of the vocabulary in any form."""
    text = compile.library() + (compile.HERE / "fast.h").read_text()
    printed_as_operators = INFIX.keys() | {"lt", "where", "select_near"}
    lowered = {"geometric_mean", "log_geometric_mean", "log_fraction", "mass_difference", "logit_difference"}
    of_logits = {"mixture", "logit_mass"} if prefix == "in_range_" else set()
    wanted = TENSOR.keys() - printed_as_operators - lowered - of_logits
    assert wanted <= set(re.findall(rf"(?:#define |INLINE real ){prefix}(\w+)", text))


def apply(library, name, x):
    code, dtype = library
    x = np.ascontiguousarray(x, dtype)
    y = np.empty_like(x)
    getattr(code, f"apply_{name}")(
        x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size)
    )
    return x, y


def arguments(name, dtype, rng):
    tiny = np.finfo(dtype).tiny
    if name == "log":
        powers = np.exp2(rng.uniform(np.log2(tiny) - 20, 127 if dtype == np.float32 else 1000, 20000))
        return np.concatenate([powers, rng.uniform(0.5, 2, 20000)])
    if name == "log1p":
        return np.concatenate([rng.uniform(-0.999, 1, 20000), 10 ** rng.uniform(-20, 20, 5000)])
    low, high = (-103, 88.7) if dtype == np.float32 else (-744, 709)
    small = 10 ** rng.uniform(-20, 0, 5000) * rng.choice([-1, 1], 5000)
    return np.concatenate([rng.uniform(low, high, 20000), small])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ulps(library, name):
    dtype = library[1]
    x, y = apply(library, name, arguments(name, dtype, np.random.default_rng(0)))
    if dtype == np.float32:
        truth = getattr(np, name)(x.astype(np.longdouble))
    else:
        sampled = np.random.default_rng(1).choice(x.size, 3000, replace=False)
        x, y = x[sampled], y[sampled]
        mpmath.mp.dps = 40
        truth = np.array([getattr(mpmath, name)(mpmath.mpf(float(v))) for v in x])
    spacing = np.spacing(np.abs(truth.astype(dtype))).astype(np.float64)
    errors = (
        np.array(
            [
                abs(float(t - mpmath.mpf(float(v)))) if dtype == np.float64 else abs(float(t - v))
                for t, v in zip(truth, y, strict=True)
            ]
        )
        / spacing
    )
    assert errors.max() <= BUDGET[name], (name, x[errors.argmax()])


def test_powers_of_2(library):
    """Of rows that are apart: masses below the least normal number are 0, and 0 is 1 to the bit."""
    x, y = apply(library, "exp2", np.concatenate([np.random.default_rng(0).uniform(-126, 127, 20000), [0.0, 100.0]]))
    truth = np.exp2(x.astype(np.longdouble))
    assert (np.abs(y - truth) <= 1.5 * np.spacing(truth.astype(library[1]))).all()
    assert y[-2] == 1
    if library[1] == np.float32:
        assert (apply(library, "exp2", [-127.5, -1e30, -np.inf])[1] == 0).all()


def test_masses(library):
    """Of exponents that are not above 0, but for a rounding: 0 is 1 to the bit, and what would be subnormal is 0."""
    x, y = apply(library, "mass_exp", np.concatenate([np.random.default_rng(0).uniform(-87.3, 1e-5, 40000), [0.0]]))
    truth = np.exp(x.astype(np.longdouble))
    assert (np.abs(y - truth) <= 1.5 * np.spacing(truth.astype(library[1]))).all()
    assert y[-1] == 1
    _, y = apply(library, "mass_exp", [-np.inf, -1e30, np.nan])
    np.testing.assert_array_equal(y, [0, 0, np.nan])
    if library[1] == np.float32:
        assert (apply(library, "mass_exp", np.linspace(-1000, -87.7, 1000))[1] == 0).all()


def test_softcaps(library):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-CAP, CAP, 40000), rng.uniform(-12 * CAP, 12 * CAP, 20000), 10 ** rng.uniform(-20, 1, 5000)]
    )
    x, y = apply(library, "softcap", x)
    truth = CAP * np.tanh(x.astype(np.longdouble) / CAP)
    errors = (y - truth) / np.spacing(np.abs(truth).astype(library[1]))
    usual = 0.6 if library[1] == np.float32 else 0.9
    assert np.abs(errors).max() <= 3.5
    assert np.sqrt((errors**2).mean()) <= usual
    np.testing.assert_array_equal(apply(library, "softcap", -x)[1], -y)
    _, slopes = apply(library, "softcap_grad", x)
    assert np.abs(slopes - (1 - (truth / CAP) ** 2)).max() <= 4 * np.finfo(library[1]).eps
    assert (slopes >= 0).all()


def test_special_arguments(library):
    inf, nan = np.inf, np.nan
    tables = {
        "log": [(0, -inf), (-0.0, -inf), (inf, inf), (-1, nan), (-inf, nan), (nan, nan), (1, 0)],
        "exp": [(-inf, 0), (inf, inf), (nan, nan), (0, 1), (-800, 0), (800, inf)],
        "expm1": [(-inf, -1), (inf, inf), (nan, nan), (0, 0)],
        "log1p": [(-1, -inf), (inf, inf), (nan, nan), (-2, nan), (0, 0)],
        "softcap": [(-inf, -CAP), (inf, CAP), (-1e30, -CAP), (1e4, CAP), (nan, nan), (0, 0)],
        "softcap_grad": [(-inf, 0), (inf, 0), (1e30, 0), (nan, nan), (0, 1)],
    }
    for name, table in tables.items():
        _, y = apply(library, name, [x for x, _ in table])
        np.testing.assert_array_equal(y, np.array([v for _, v in table], library[1]), err_msg=name)


def test_subnormal_results(library):
    dtype = library[1]
    x = np.linspace(-103, -88, 200) if dtype == np.float32 else np.linspace(-744, -709, 200)
    x, y = apply(library, "exp", x)
    truth = np.exp(x.astype(np.longdouble)).astype(dtype)
    assert (np.abs(y - truth) <= np.finfo(dtype).smallest_subnormal).all()


def test_every_half_and_bfloat16(library):
    code = library[0]
    bits = np.arange(1 << 16, dtype=np.uint16)
    brain, half = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.float32)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    code.wholes(pointer(bits), pointer(brain), pointer(half), ctypes.c_int64(bits.size))
    np.testing.assert_array_equal(half, bits.view(np.float16).astype(np.float32))
    words = torch.from_numpy(bits.view(np.int16))
    np.testing.assert_array_equal(brain, words.view(torch.bfloat16).float().numpy())


def test_rounding_to_half_and_bfloat16(library):
    code = library[0]  # a store from double rounds to float first: the argument here is one already
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    edges = np.array([65519.99, 65520, 65535, 2**-24, 2**-25, 2**-14, np.inf, np.nan, 0, 1 + 2**-8], np.float32)
    x = np.concatenate([x, edges, -edges])
    brain, half = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    code.halves(pointer(x), pointer(brain), pointer(half), ctypes.c_int64(x.size))
    tensor = torch.from_numpy(x)
    for ours, dtype in ((brain, torch.bfloat16), (half, torch.float16)):
        ours = torch.from_numpy(ours.view(np.int16)).view(dtype)
        torch.testing.assert_close(ours, tensor.to(dtype), rtol=0, atol=0, equal_nan=True)
