"""CUDA kernels for logits where there is no GPU: their own code on a CPU, rows off the chip.

tests/test_emulated_on_chip.py has rows on it; what a GPU adds is run on one.
"""

import math
import subprocess
import sys
from math import inf

import pytest
import torch

import kullback
from tests import kinds, oracle, samples
from tests.kinds import KINDS, SMOOTH
from tests.samples import EVERY_7TH, apart, at, dead, equal, far, masked, peaked, sample, shifted, spiked
from tests.tolerances import BF16_CACHED, BF16_GRADIENT, FLOAT_GRADIENT, LOSS, gradient, relative_error

pytestmark = pytest.mark.parametrize("backend", ["emulated"], indirect=True)


def truth_of(x, y, kind, weight=None, **options):
    """Losses, their sum's gradients."""
    leaves = [t.detach().double().requires_grad_() for t in (x, y)]
    losses = oracle.divergence(*leaves, kind, **options, **kinds.parameters(kind))
    losses = losses if weight is None else losses * weight
    return losses.detach(), torch.autograd.grad(losses.sum(), leaves)


@pytest.mark.parametrize(
    ("kind", "dtype", "vocab"),  # a long row and a short one in turn, and both of three kinds
    [
        (kind, dtype, vocab)
        for i, kind in enumerate(KINDS)
        for j, (dtype, vocab) in enumerate([(torch.float32, 2503), (torch.bfloat16, 61)])
        if i % 2 == j or kind in ("kl", "jensen_shannon", "renyi")
    ],
)
def test_every_kind(backend, generator, kind, dtype, vocab):
    """A sum, and each row's with its backward."""
    rows = samples.batch(
        generator,
        vocab,
        dtype,
        far=far(2.0),
        close=apart(1e-2),
        equal=equal,
        masked=masked(far(2.0), both=EVERY_7TH),
        dead=dead,
        more=apart(1.0),
    )
    weight = rows.weight(close=2.0, masked=0.5, dead=0.0, more=3.0)
    counts = weight != 0
    truth, expected = truth_of(rows.x[counts], rows.y[counts], kind, weight[counts])
    equals = rows.names.index("equal")
    for reduction in ("sum", "none"):
        ours = [t.clone().requires_grad_() for t in (rows.x, rows.y)]
        loss = kullback.divergence(*ours, kind, row_weight=weight, reduction=reduction, **kinds.parameters(kind))
        assert kullback.backend_info().name == "cuda"
        assert relative_error(loss.sum(), truth.sum()) < LOSS
        for mine, other in zip(torch.autograd.grad(loss.sum(), ours), expected, strict=True):
            assert relative_error(mine[counts], other) < (1e-5 if dtype == torch.float32 else BF16_GRADIENT)
            assert mine[~counts].count_nonzero() == 0
            assert mine[equals].count_nonzero() == 0


@pytest.mark.parametrize("wants", [(True, False), (True, True)], ids=["one gradient", "both gradients"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("kl", torch.bfloat16), ("jensen_shannon", torch.bfloat16), ("total_variation", torch.float32)]
)
@pytest.mark.parametrize("vocab", [5, 130, 320, 777])
def test_more_short_rows_than_groups(backend, generator, kind, dtype, vocab, wants):
    """8, 16 and 32 lanes share a row, and copy the next before. Some are close, and some without weight hold NaN."""
    rows = 200
    x, y = (3 * torch.randn(rows, vocab, generator=generator) for _ in range(2))
    x[1::3] = y[1::3] + 0.5 * x[1::3]
    x[2::9] = y[2::9] * (1 + 1e-3)
    x, y = x.to(dtype), y.to(dtype)
    weight = torch.rand(rows, generator=generator)
    weight[::7] = 0
    x[::7], y[::14] = torch.nan, torch.inf
    counts = weight != 0
    truth, expected = truth_of(x[counts], y[counts], kind, weight[counts])
    ours = [t.clone().requires_grad_(wanted) for t, wanted in zip((x, y), wants, strict=True)]
    loss = kullback.divergence(*ours, kind, row_weight=weight, reduction="sum", **kinds.parameters(kind))
    assert relative_error(loss, truth.sum()) < LOSS
    leaves = [t for t, wanted in zip(ours, wants, strict=True) if wanted]
    for mine, other in zip(torch.autograd.grad(loss, leaves), expected, strict=False):
        assert relative_error(mine[counts], other) < (1e-5 if dtype == torch.float32 else BF16_CACHED)
        assert mine[~counts].count_nonzero() == 0


PROTECTED = """
import ctypes, mmap, pytest, torch, kullback
from tests import emulation
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 4 * page)
x = torch.frombuffer(memory, dtype=torch.bfloat16).view(4, page // 2).normal_()
third = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 2 * page
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(third), page, 0) == 0  # PROT_NONE
with emulation.emulated(pytest.MonkeyPatch()), kullback.backend("cuda"):
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    print(kullback.divergence(x, torch.randn(x.shape).bfloat16(), row_weight=weight, reduction="none")[2].item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page of memory")
def test_a_short_row_without_weight_is_not_read(backend):
    done = subprocess.run([sys.executable, "-c", PROTECTED], capture_output=True, text=True)
    assert done.stdout == "0.0\n", (done.returncode, done.stderr)


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl", "total_variation"])
@pytest.mark.parametrize("vocab", [130, 777])
def test_short_rows_whose_slopes_are_nearly_their_mean(backend, generator, kind, vocab):
    """Sides on other tokens: halves would hold slopes, and lose what they differ by. Each row by itself."""
    noise = torch.randn(6, 2, vocab, generator=generator)
    half = torch.arange(vocab) < vocab // 2
    x, y = noise[:, 0] + 8 * half, noise[:, 1] + 8 * ~half
    x[3:], y[3:] = 4 * noise[3:, 0], 4 * noise[3:, 1]
    x, y = x.bfloat16(), y.bfloat16()
    _, (expected, _) = truth_of(x, y, kind)
    leaf = x.clone().requires_grad_()
    (mine,) = torch.autograd.grad(kullback.divergence(leaf, y, kind, reduction="sum", **kinds.parameters(kind)), leaf)
    for row in range(len(x)):
        assert relative_error(mine[row], expected[row]) < BF16_CACHED


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
@pytest.mark.parametrize(("mask", "mass"), [(-100, 5e-4), (-1000, 5e-6), (-3e38, 1e-4)])
def test_short_rows_of_a_sure_student_with_masked_tokens(backend, kind, mask, mass):
    """Its slopes are one but for the masked token's, whose log-ratio would move what is predicted for all."""
    x, y = torch.full((2, 1, 777), -25.0)
    x[0, 3], x[0, 100] = 0.0, math.log(mass)
    y[0, 3], y[0, 7], y[0, 100] = -0.35, -1.22, mask
    x, y = x.bfloat16(), y.bfloat16()
    _, (expected, _) = truth_of(x, y, kind)
    leaf = x.clone().requires_grad_()
    (mine,) = torch.autograd.grad(kullback.divergence(leaf, y, kind, reduction="sum", **kinds.parameters(kind)), leaf)
    assert relative_error(mine, expected) < 1e-2  # a half of 24 bits' slope


@pytest.mark.few_kinds
@pytest.mark.parametrize(("kind", "dtype"), [(kind, torch.bfloat16) for kind in SMOOTH] + [("kl", torch.float32)])
def test_close_rows_and_elements_that_are_not(backend, generator, kind, dtype):
    """Close in most tokens; far in few of them; in all but the one that has the mass; masked in many, or on one side.

    More than 32 vectors for each thread, the last row's last element in none; the gradient also over the logits.
    """
    vocab = 70003 if dtype == torch.bfloat16 else 35001
    close = apart(0.02)
    zoo = {
        "close": close,
        "spiked": spiked(0.02, 2.0, 97),
        "peaked": at(apart(1.0), x={7: 30}, y={7: 30}),
        "masked": masked(close, both=slice(9, 4000)),
        "shifted": shifted(1e-3, 40.0),
        "lacking": at(close, y={11: -inf}) if kind in ("kl", "jensen_shannon", "skew_kl") else close,
    }
    rows = samples.batch(generator, vocab, dtype, spread=3.0, **zoo)
    truth, expected = truth_of(rows.x, rows.y, kind)
    params = kinds.parameters(kind)
    losses = kullback.divergence(rows.x, rows.y, kind, reduction="none", **params)
    assert (losses >= 0).all()
    shows = truth > 1e-7
    assert shows.sum() >= len(zoo) - 1
    for mine, other in zip(losses[shows], truth[shows], strict=True):
        assert relative_error(mine, other) < LOSS
    for reduction in ("sum", "none"):
        ours = [t.clone().requires_grad_() for t in (rows.x, rows.y)]
        loss = kullback.divergence(*ours, kind, reduction=reduction, **params).sum()
        assert relative_error(loss, truth.sum()) < LOSS
        for mine, other in zip(torch.autograd.grad(loss, ours), expected, strict=True):
            for row in shows.nonzero().flatten().tolist():
                assert relative_error(mine[row], other[row]) < gradient(dtype), rows.names[row]
    written = []
    for inplace in (False, True):
        leaf = rows.x.clone().requires_grad_()
        kullback.divergence(leaf * 1, rows.y, kind, reduction="sum", inplace=inplace, **params).backward()
        written.append(leaf.grad)
    assert torch.equal(*written)


def test_a_constant_does_not_show_in_close_rows(backend, generator):
    """Numbers that float16 holds with the constant too."""
    y = torch.randint(-128, 128, (16, 2504), generator=generator) / 16
    x = y + torch.randint(-3, 4, (16, 2504), generator=generator) / 16
    x, y = x.half(), y.half()
    plain, shifted = (kullback.divergence(x + c, y + c, reduction="none") for c in (0, 100))
    assert relative_error(shifted / plain, torch.ones(16)) < 1e-6


@pytest.mark.parametrize("alpha", [0.999, 0.9999, 1.0001])
def test_close_rows_of_renyi_near_kl(backend, generator, alpha):
    """What is summed is small with 1 - alpha, and divided by that again."""
    y = 3 * torch.randn(2, 2504, generator=generator)
    x = y + 0.1 * torch.randn(2, 2504, generator=generator)
    leaf = x.double().requires_grad_()
    truth = oracle.divergence(leaf, y.double(), "renyi", alpha=alpha)
    ours = x.clone().requires_grad_()
    losses = kullback.divergence(ours, y, "renyi", reduction="none", alpha=alpha)
    assert relative_error(losses, truth) < 3e-6
    assert relative_error(torch.autograd.grad(losses.sum(), ours)[0], torch.autograd.grad(truth.sum(), leaf)[0]) < 3e-6


@pytest.mark.parametrize(
    ("kind", "options", "params"),
    [("kl", {"temperature": 1.0, "target_temperature": 1.05}, {}), ("alpha", {}, {"alpha": 5.0})],
    ids=["two temperatures", "a parameter far out"],
)
def test_close_rows_that_a_series_does_not_reach(backend, generator, kind, options, params):
    y = 3 * torch.randn(3, 2503, generator=generator)
    x = y + 0.02 * torch.randn(3, 2503, generator=generator)
    leaf = x.double().requires_grad_()
    truth = oracle.divergence(leaf, y.double(), kind, **options, **params)
    ours = x.clone().requires_grad_()
    losses = kullback.divergence(ours, y, kind, reduction="none", **options, **params)
    assert relative_error(losses, truth) < LOSS
    (mine,), (expected,) = torch.autograd.grad(losses.sum(), ours), torch.autograd.grad(truth.sum(), leaf)
    assert relative_error(mine, expected) < FLOAT_GRADIENT


@pytest.mark.parametrize(
    ("kind", "form", "dtype", "vocab"),
    [
        ("kl", "probs", torch.float32, 2503),
        ("kl", "log_probs", torch.bfloat16, 61),
        ("jensen_shannon", "log_probs", torch.float32, 2503),
        ("jensen_shannon", "probs", torch.float64, 300),
        ("renyi", "probs", torch.bfloat16, 61),
        ("renyi", "log_probs", torch.float64, 300),
    ],
)
def test_elements_that_stand_alone(backend, generator, kind, form, dtype, vocab):
    x, y = (sample(form, (5, vocab), generator, dtype) for _ in range(2))
    x[1, 3] = y[1, 3] = 0 if form == "probs" else -inf
    leaves = [t.double().requires_grad_() for t in (x, y)]
    params = kinds.parameters(kind)
    truth = oracle.divergence(*leaves, kind, form, **params)
    expected = torch.autograd.grad(truth.sum(), leaves)
    ours = [t.clone().requires_grad_() for t in (x, y)]
    for reduction in ("sum", "none"):
        loss = kullback.divergence(*ours, kind, form=form, reduction=reduction, **params)
        assert relative_error(loss.sum(), truth.sum()) < LOSS
        for mine, other in zip(torch.autograd.grad(loss.sum(), ours), expected, strict=True):
            kept = other.isfinite()
            assert relative_error(mine[kept], other[kept]) < (1e-5 if dtype != torch.bfloat16 else BF16_GRADIENT)


@pytest.mark.parametrize("kind", ["kl", "renyi"])
def test_rows_without_tokens(backend, kind):
    x, y = torch.empty(3, 0, dtype=torch.bfloat16, requires_grad=True), torch.empty(3, 0, dtype=torch.bfloat16)
    for reduction in ("sum", "none"):
        loss = kullback.divergence(x, y, kind, reduction=reduction)
        assert kullback.backend_info().name == "cuda"
        assert not loss.any()
        (found,) = torch.autograd.grad(loss.sum(), x)
        assert found.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 1 / 7, 0.2, 5.0])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_maxima_at_any_temperature(backend, generator, kind, temperature, dtype):
    """First logits that are the row's largest, its least, and any."""
    y = sample("logits", (9, 2507), generator, dtype)
    x = (y.float() + torch.randn(y.shape, generator=generator) * temperature).to(dtype)
    for t in (x, y):
        t[0, 0], t[1, 0], t[2, 0] = t[0].max() + 1, t[1].min(), -inf
    x[3, 0], y[4, 0] = x[3].max() + 9, y[4].max() + 9
    truth, (expected, _) = truth_of(x, y, kind, temperature=temperature)
    ours = x.clone().requires_grad_()
    losses = kullback.divergence(ours, y, kind, temperature=temperature, reduction="none", **kinds.parameters(kind))
    for mine, other in zip(losses, truth, strict=True):
        assert other < 1e-7 or relative_error(mine, other) < LOSS
    assert relative_error(torch.autograd.grad(losses.sum(), ours)[0], expected) < BF16_GRADIENT


def test_an_alpha_that_float32_takes_for_1(backend, generator):
    x, y = torch.randn(2, 3, 500, generator=generator).bfloat16()
    x.requires_grad_()
    loss = kullback.divergence(x, y, "skew_kl", alpha=1 - 1e-9)
    loss.backward()
    assert 0 <= loss.item() < 1e-7
    assert x.grad.abs().max() < 1e-7


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
def test_rows_far_below_zero(backend, generator, kind):
    """Exponents are measured from the row's log-sum-exp, not from 0; an infinite logit among them."""
    y = -7000 + 8 * torch.randn(3, 4096, generator=generator)
    x = y + 4 * torch.randint(-1, 2, y.shape, generator=generator)
    x[1, 5] = y[1, 5] = y[2, 9] = -inf
    x, y = x.half(), y.half()
    truth, expected = truth_of(x, y, kind)
    ours = [t.clone().requires_grad_() for t in (x, y)]
    losses = kullback.divergence(*ours, kind, reduction="none", **kinds.parameters(kind))
    assert relative_error(losses, truth) < LOSS
    for mine, theirs in zip(torch.autograd.grad(losses.sum(), ours), expected, strict=True):
        assert relative_error(mine, theirs) < 2e-3  # 11 bits, of masses and of gradients
        assert mine[1, 5] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["masked", "first token", "last token"])
def test_jensen_shannon_is_symmetric_near_its_bound(backend, generator, dtype, case):
    """To the bit, though what tells rows that are close from others, Σ q log(q/p), is not."""
    vocab = 4097
    y, noise = 3 * torch.randn(2, 8, vocab, generator=generator)
    x = y + torch.linspace(0.1, 0.5, 8)[:, None] * noise
    x[:, 5] = y[:, 5] = -inf
    if case == "first token":
        x[:, 0], y[:, 0] = -16, 3
    if case == "last token":
        x[:, -1], y[:, -1] = 12, 11
    x, y = x.to(dtype), y.to(dtype)
    one, other = (kullback.divergence(*pair, "jensen_shannon", reduction="none") for pair in ((x, y), (y, x)))
    assert torch.equal(one, other)


@pytest.mark.parametrize("above", [8.0, 16.0, 30.0])
def test_a_token_that_has_the_row(backend, generator, above):
    """Float32 gradients of the others are as small as what is left of 1."""
    rows = samples.batch(
        generator,
        2503,
        torch.float32,
        spread=3.0,
        far=peaked(apart(1.0), 61, above),
        close=peaked(apart(1e-2), 122, above),
    )
    for kind in ("kl", "jensen_shannon"):
        _, (expected, _) = truth_of(rows.x, rows.y, kind)
        ours = rows.x.clone().requires_grad_()
        losses = kullback.divergence(ours, rows.y, kind, reduction="none", **kinds.parameters(kind))
        (mine,) = torch.autograd.grad(losses.sum(), ours)
        for row, token in enumerate((61, 122)):
            expected[row, token] = 0.0  # float64's is a difference of numbers next to 1
            expected[row, token] = -expected[row].sum()
            assert relative_error(mine[row], expected[row]) < 4e-6
        assert (losses >= 0).all()
