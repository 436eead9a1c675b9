"""kl_div as a drop-in for torch's, by torch's own samples among others; scipy's table and golden values."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import kullback
from tests.kinds import LONG_IN_C
from tests.samples import sample

REDUCTIONS = ("none", "mean", "sum", "batchmean")
OPINFO = next(op for op in op_db if op.name == "nn.functional.kl_div")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(), (5,), (4, 7), (1, 1), (2, 3, 35), (3, 1271), (2, 3, 2, 2, 5), (2, 50257)]


def plain(x, y, reduction, form, log_target):
    """torch's, whose mean of "batchmean" is that of a batch of one where there is no batch."""
    x = x.log() if form == "probs" else x
    if reduction == "batchmean" and x.dim() == 0:
        reduction = "sum"
    return F.kl_div(x, y, reduction=reduction, log_target=log_target)


FORMS = [*itertools.product(("log_probs", "probs"), (False, True))]  # the input's; whether the target is a logarithm
OTHERS = (torch.float64, torch.bfloat16, torch.float16)
EACH = [*itertools.product([torch.float32], FORMS), *zip(OTHERS, FORMS, strict=False)]
name = lambda value: str(value).removeprefix("torch.")


@pytest.mark.parametrize(("dtype", "forms"), EACH, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_torch(shape, dtype, forms, backend, device, generator):
    check_beside_torch(shape, dtype, *forms, device, generator)


@LONG_IN_C
@pytest.mark.parametrize(
    ("dtype", "forms"), [pair for pair in itertools.product(DTYPES, FORMS) if pair not in EACH], ids=name
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_torch_in_other_dtypes(shape, dtype, forms, backend, device, generator):
    check_beside_torch(shape, dtype, *forms, device, generator)


def check_beside_torch(shape, dtype, form, log_target, device, generator):
    for reduction in REDUCTIONS:
        x = sample(form, shape or (1,), generator, dtype).reshape(shape).to(device)
        y = sample("log_probs" if log_target else "probs", shape or (1,), generator, dtype)
        y = y.reshape(shape).to(device)
        if dtype == torch.float16:  # zeros, where torch has NaN, are the truth table's
            x, y = (t if t.min() < 0 else t.clamp_min(1e-5) for t in (x, y))
        for scale in (1.0, 3.0, 0.01):  # unnormalised just the same
            a = (x + math.log(scale) if form == "log_probs" else x * scale).requires_grad_()
            b = (y + math.log(scale) if log_target else y * scale).requires_grad_()
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            ours = kullback.kl_div(a, b, reduction, log_target, form=form)
            truth = plain(a.double(), b.double(), reduction, form, log_target)
            theirs = plain(a.detach(), b.detach(), reduction, form, log_target)
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            gradients = torch.autograd.grad(ours.sum(), (a, b))
            expected = torch.autograd.grad(truth.sum(), (a, b))
            eps = torch.finfo(dtype).eps
            error, budget = (t.double() - truth.detach() for t in (ours, theirs))
            # twice torch's error, or what rounding each term to this dtype costs; float64 has no wider sums: theirs
            # round as a random walk, in an order that is the processor's (4.5 eps were seen of 210 terms)
            walk = a.numel() ** 0.5 if dtype == torch.float64 and reduction != "none" else 0
            floor = (4 + walk) * eps * (truth.abs().max() + float(b.detach().double().abs().max()))
            assert error.abs().max() <= 2 * budget.abs().max() + floor
            for g, e in zip(gradients, expected, strict=True):
                # the target's gradient is the difference of two logarithms of size ten or so
                torch.testing.assert_close(g, e.to(g), rtol=8 * eps, atol=32 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_torch_opinfo_samples(dtype, backend, device):
    ours = copy.copy(OPINFO)
    ours.op = lambda input, target, **kw: kullback.kl_div(input, target, **kw)
    samples = list(OPINFO.sample_inputs(device, dtype, requires_grad=dtype == torch.float64))
    assert len(samples) == 16
    for s in samples:
        # compared by hand: assert_close of a 16-bit sum would ask for torch's rounding
        expected = OPINFO.op(s.input.double(), *(a.double() for a in s.args), **s.kwargs)
        result = ours.op(s.input, *s.args, **s.kwargs)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
        apart = s.noncontiguous()
        torch.testing.assert_close(ours.op(apart.input, *apart.args, **apart.kwargs), result)
        if dtype == torch.float64:
            inputs = (s.input, *s.args)
            function = lambda *i, kw=s.kwargs: ours.op(*i, **kw)
            assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)
            assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_torch_module_inputs(backend, device):
    info = next(m for m in module_db if m.module_cls is torch.nn.KLDivLoss)
    inputs = info.module_inputs_func(info, device=device, dtype=torch.float32, requires_grad=False, training=True)
    assert len(inputs) == 10
    for given in inputs:
        build, call = given.constructor_input, given.forward_input
        ours = kullback.KLDivLoss(*build.args, **build.kwargs)(*call.args, **call.kwargs)
        theirs = torch.nn.KLDivLoss(*build.args, **build.kwargs)(*call.args, **call.kwargs)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_empty_as_torch(backend, device):
    for shape, reduction in itertools.product([(0, 5), (3, 0), (0,)], REDUCTIONS):
        x = torch.zeros(shape, device=device, requires_grad=True)
        ours = kullback.kl_div(x, torch.zeros(shape, device=device), reduction)
        theirs = F.kl_div(x, torch.zeros(shape, device=device), reduction=reduction)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours.sum().backward()
        assert x.grad.shape == x.shape


def test_broadcasts_as_torch(backend, device, generator):
    for shape, other in [
        ((3, 5), (5,)),
        ((1, 5), (3, 5)),
        ((5,), (3, 5)),
        ((2, 5, 7), (1, 5, 7)),
        ((3, 5), ()),
    ]:
        x = sample("log_probs", shape or (1,), generator).reshape(shape).to(device).requires_grad_()
        y = sample("probs", other or (1,), generator).reshape(other).to(device).requires_grad_()
        for reduction in REDUCTIONS:
            ours = kullback.kl_div(x, y, reduction)
            theirs = F.kl_div(x, y, reduction=reduction)
            torch.testing.assert_close(ours, theirs)
            for a, b in zip(
                torch.autograd.grad(ours.sum(), (x, y)),
                torch.autograd.grad(theirs.sum(), (x, y)),
                strict=True,
            ):
                torch.testing.assert_close(a, b)


NEXT = [*zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True)]


@pytest.mark.parametrize(("a", "b"), NEXT, ids=name)
def test_mixed_dtypes(a, b, backend, device, generator):
    check_two_dtypes(a, b, device, generator)


@LONG_IN_C
@pytest.mark.parametrize(("a", "b"), [pair for pair in itertools.permutations(DTYPES, 2) if pair not in NEXT], ids=name)
def test_mixed_dtypes_of_others(a, b, backend, device, generator):
    check_two_dtypes(a, b, device, generator)


def check_two_dtypes(a, b, device, generator):
    x = sample("probs", (3, 37), generator, a).to(device).requires_grad_()
    y = sample("probs", (3, 37), generator, b).to(device).requires_grad_()
    loss = kullback.kl_div(x, y, "batchmean", form="probs")
    assert loss.dtype == torch.promote_types(a, b)
    gradients = torch.autograd.grad(loss, (x, y))
    assert [g.dtype for g in gradients] == [a, b]
    truth = F.kl_div(x.double().log(), y.double(), reduction="batchmean")
    assert abs(loss.double() - truth) <= 4 * torch.finfo(loss.dtype).eps * truth.abs() + 1e-6


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_0d_tensor_promotes_no_other(backend, device, reduction):
    a, b = torch.zeros(3, dtype=torch.bfloat16, device=device), torch.tensor(0.5, device=device)
    for pair in ((a, b), (b, a)):
        assert kullback.kl_div(*pair, reduction=reduction).dtype == F.kl_div(*pair, reduction=reduction).dtype


def test_torch_is_nan_where_nothing_times_infinity_is_nothing(backend, device):
    """The one difference: 0 · log 0."""
    y = torch.tensor([[0.0, 1.0]], device=device)
    x = torch.tensor([[-math.inf, 0.0]], device=device)
    assert torch.isnan(F.kl_div(x, y, reduction="sum"))
    assert kullback.kl_div(x, y, "sum").item() == 0


# scipy/special/tests/test_basic.py, TestRelEntr: the domain, and values by mpmath
GOLDEN = [
    (0.9456657713430001, 0.9456657713430094, -9.325873406851269e-15),
    (1e-4, 1.0, 1e-4 * math.log(1e-4)),
    (1.0, 1e-4, -math.log(1e-4)),
    (4.0, 2.22e-308, 2839.139983229607),
    (0.0, 0.5, 0.0),
    (0.0, 0.0, 0.0),
    (0.5, 0.0, math.inf),
]


@pytest.mark.parametrize(("p", "q", "expected"), GOLDEN)
def test_scipy_golden_values(p, q, expected, backend, device):
    special = pytest.importorskip("scipy.special")
    x, y = (torch.tensor([v], dtype=torch.float64, device=device) for v in (q, p))
    ours = kullback.kl_div(x, y, "sum", form="probs").item()
    assert ours == pytest.approx(expected, rel=1e-13, abs=0)
    assert ours == pytest.approx(float(special.rel_entr(p, q)), rel=1e-12, abs=0)


def test_scipy_random(backend, device, generator):
    special = pytest.importorskip("scipy.special")
    x, y = (torch.rand(1000, generator=generator, dtype=torch.float64) * 10 for _ in range(2))
    x, y = x * 10.0 ** torch.randint(-100, 100, (1000,), generator=generator), y
    ours = kullback.kl_div(x.to(device), y.to(device), "none", form="probs").cpu()
    torch.testing.assert_close(ours, torch.from_numpy(special.rel_entr(y.numpy(), x.numpy())), rtol=1e-12, atol=0)


def test_optax_golden_values():
    log_q = torch.tensor(
        [
            [-2.9957, -3.5066, -3.9120, -1.2040, -0.6931, -2.3026],
            [-1.6094, -1.6094, -1.6094, -2.3026, -1.8971, -1.8971],
        ]
    )
    p = torch.tensor([[0.2, 0.2, 0.2, 0.1, 0.15, 0.15], [0.05, 0.03, 0.02, 0.3, 0.5, 0.0]])
    rows = kullback.divergence(log_q, p, form="log_probs", target_form="probs", reduction="none")
    torch.testing.assert_close(rows, torch.tensor([0.8875577, 0.7592807]), rtol=0, atol=1e-4)
