"""What becomes of losses of rows: every reduction, weight and normalizer, as one writes it in torch."""

import pytest
import torch

import kullback
from kullback import library
from kullback.problem import Problem, Side
from kullback.work import Operands

WEIGHTS = {"none": None, "plain": (1.0, 0.0, 0.4, 2.0), "with a gradient": (1.0, 0.0, 0.4, 2.0), "all 0": (0.0,) * 4}
NORMALIZERS = {"none": None, "number": 2.5, "tensor": 2.5, "with a gradient": 2.5, "0": 0.0, "0 with a gradient": 0.0}


def tensor(values, name):
    if values is None or name == "number":
        return values
    return torch.tensor(values, dtype=torch.float64).requires_grad_(name.endswith("with a gradient"))


def written_out(losses, weight, reduction, normalizer):
    weighted = losses if weight is None else torch.where(weight == 0, 0.0, losses) * weight
    if reduction == "none":
        return weighted
    if reduction == "sum":
        return weighted.sum()
    count = len(losses) if weight is None else weight.sum()
    divisor = torch.as_tensor(count if normalizer is None else normalizer)
    return weighted.sum() / (divisor if divisor != 0 else 1)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_only_a_mean_has_a_normalizer(reduction):
    with pytest.raises(ValueError, match="normalizer"):
        kullback.divergence(torch.zeros(4, 3), torch.zeros(4, 3), reduction=reduction, normalizer=1.0)


@pytest.mark.parametrize(
    ("reduction", "normalizer"), [("none", "none"), ("sum", "none"), *(("mean", name) for name in NORMALIZERS)]
)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_as_written_out(reduction, weight, normalizer, backend, device, generator):
    x, y = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    w, n = tensor(WEIGHTS[weight], weight), tensor(NORMALIZERS[normalizer], normalizer)
    to = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t
    log_p = y.log_softmax(-1)
    expected = written_out((log_p.exp() * (log_p - x.log_softmax(-1))).sum(-1), w, reduction, n)
    ours = kullback.divergence(to(x), to(y), reduction=reduction, row_weight=to(w), normalizer=to(n))
    torch.testing.assert_close(ours.cpu(), expected)
    leaves = [t for t in (x, w, n) if isinstance(t, torch.Tensor) and t.requires_grad]
    both = (torch.autograd.grad(3 * loss.sum(), leaves, allow_unused=True) for loss in (ours, expected))
    for a, b, leaf in zip(*both, leaves, strict=True):
        a, b = (torch.zeros_like(leaf) if g is None else g.cpu() for g in (a, b))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("option", ["row_weight", "normalizer"])
def test_forward_mode_keeps_the_tangent_of_what_weighs_rows(option, generator):
    x, y = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    given = torch.rand(4 if option == "row_weight" else (), generator=generator, dtype=torch.float64)
    loss = lambda value: kullback.divergence(x, y, **{option: value})
    expected = torch.func.jvp(loss, (given,), (torch.ones_like(given),))[1]
    with torch.autograd.forward_ad.dual_level():
        found = loss(torch.autograd.forward_ad.make_dual(given, torch.ones_like(given)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(found).tangent, expected)


def test_a_sum_that_its_dtype_lacks_is_infinite():
    """Of float64 rows, as those of a top-k teacher over ranks are, with a float32 loss."""
    x, y = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[30.0, 0.0, 0.0]], dtype=torch.float64)
    problem = Problem("alpha", Side("logits"), Side("logits"), 200.0)
    with kullback.backend("c"):
        assert library.sum_losses(problem, Operands(x, y), 1.0, torch.float64)[0] > 1e39
        assert library.sum_losses(problem, Operands(x, y), 1.0, torch.float32)[0] == torch.inf


@pytest.mark.parametrize("backend", ["c", "torch"], indirect=True)
def test_a_total_that_is_added_to_others_keeps_a_doubles_digits(backend, generator):
    """Of a chunk of hidden states, or of a rank's rows: a float would round each."""
    x, y = torch.randn(2, 4, 300, generator=generator)
    problem = Problem("kl", Side("logits"), Side("logits"))
    total, _, _ = library.sum_losses(problem, Operands(x, y), 1 / 3, torch.float64)
    assert total.item() != total.float().item()
