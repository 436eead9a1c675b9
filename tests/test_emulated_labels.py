"""CUDA kernels of labels where there is no GPU: their own code on a CPU."""

import math
from math import inf

import pytest
import torch

import kullback
from kullback.backends import pytorch
from kullback.backends.cuda import cross_entropy, plan
from kullback.backends.cuda import labels as of_labels
from kullback.problem import Problem, Shard, Side, Weights
from kullback.work import Labels, Operands, Rows
from tests import emulation, oracle
from tests.samples import sample
from tests.tolerances import LOSS, gradient, relative_error

pytestmark = pytest.mark.parametrize("backend", ["emulated"], indirect=True)

# Rows without a vector, of a warp, of two tiles of which the last is shorter; on chips of less memory, of clusters
CASES = [
    (3, plan.HOPPER),
    (250, plan.HOPPER),
    (2601, plan.Chip(32 << 10)),
    (5003, plan.Chip(20 << 10)),
    (9001, plan.Chip(24 << 10)),
]


OTHERS = [(torch.float32, 30.0), (torch.bfloat16, None), (torch.float16, 30.0)]


@pytest.fixture
def kernel_runs(monkeypatch):
    """The works of the kernel: what another does would be right all the same."""
    runs, run = [], cross_entropy.run

    def watched(work):
        runs.append(work)
        run(work)

    monkeypatch.setattr(cross_entropy, "run", watched)
    return runs


@pytest.mark.parametrize(("vocab", "chip"), CASES)
@pytest.mark.parametrize(
    ("dtype", "softcap"),
    [
        (torch.float32, None),
        (torch.bfloat16, 30.0),
        (torch.float16, None),
        *(pytest.param(*other, marks=pytest.mark.full) for other in OTHERS),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_values_and_gradients(backend, monkeypatch, generator, kernel_runs, vocab, chip, dtype, softcap, smoothing):
    """More rows than clusters: an ignored one, one that is not read, one of a sole token, a sure one, one far from 0.

    Both reductions, from memory that is in phase with the gradient's and from memory that is not.
    """
    emulation.on_chip(monkeypatch, chip)
    x, labels = sample("logits", (9, vocab), generator, dtype), torch.randint(0, vocab, (9,), generator=generator)
    labels[0], labels[1], labels[2] = 0, vocab - 1, -100
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 3.0])
    x[4], x[4, labels[4]], x[5, labels[5]] = -1e4 if smoothing else -inf, -200.0, 60.0
    x[6] += 100
    leaf = x.double().requires_grad_()
    counted = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
    truth = weight * oracle.labelled(torch.zeros(9), counted, labels, 0.0, 0.7, 0.01, smoothing, 1.5)
    x[3] = math.nan
    around, upstream = torch.full((9, vocab + 11), math.nan, dtype=dtype), torch.linspace(1, 2, 9)
    options = {"label_weight": 0.7, "z_weight": 0.01, "temperature": 1.5, "softcap": softcap, "row_weight": weight}
    options["label_smoothing"] = smoothing
    for first in (0, 3):
        ours = around[:, first : first + vocab].copy_(x).detach().requires_grad_()
        losses = kullback.divergence(ours, None, labels=labels, **options, reduction="none")
        assert relative_error(losses, truth) < LOSS
        total = kullback.divergence(ours, None, labels=labels, **options, reduction="sum")
        assert relative_error(total, truth.sum()) < LOSS
        for loss, of_rows in ((losses, upstream), (total, None)):
            weighted = truth.sum() if of_rows is None else (truth * of_rows).sum()
            (expected,) = torch.autograd.grad(weighted, leaf, retain_graph=True)
            (found,) = torch.autograd.grad(loss, ours, of_rows)
            assert relative_error(found, expected.nan_to_num()) < gradient(dtype)
            assert found[2:4].count_nonzero() == 0
    assert {work.verb for work in kernel_runs} == {"loss", "gradient"}
    assert len(kernel_runs) == 2 * (4 if dtype == torch.float16 else 3)


def test_masked_labels_lose_infinitely(backend, monkeypatch, generator, kernel_runs):
    emulation.on_chip(monkeypatch)
    x = sample("logits", (2, 700), generator, torch.float32)
    x[0, 13] = -inf
    losses = kullback.divergence(x, None, labels=torch.tensor([13, 14]), reduction="none")
    assert losses[0] == inf
    assert losses[1].isfinite()
    losses = kullback.divergence(x, None, labels=torch.tensor([13, 14]), label_smoothing=0.1, reduction="none")
    assert losses.tolist() == [inf, pytest.approx(losses[1].item())]
    assert len(kernel_runs) == 2


def test_smoothed_labels_far_from_zero_and_masked(backend, monkeypatch, generator, kernel_runs):
    """A first logit of -inf is nothing to sum the others against."""
    emulation.on_chip(monkeypatch)
    x, labels = torch.randn(3, 2601, generator=generator), torch.tensor([0, 2600, 5])
    x[:2] += torch.tensor([3e4, -3e4]).unsqueeze(-1)
    x[2, 0] = -inf
    losses = kullback.divergence(x, None, labels=labels, label_smoothing=0.2, reduction="none")
    truth = oracle.labelled(torch.zeros(3), x, labels, smoothing=0.2)
    assert relative_error(losses[:2], truth[:2]) < LOSS
    assert losses[2] == inf
    assert len(kernel_runs) == 1


def test_states_serve_another_kernel(backend, monkeypatch, generator, kernel_runs):
    """Where saved tensors are copied, a backward sees two tensors and not one."""
    emulation.on_chip(monkeypatch)
    x = sample("logits", (4, 700), generator, torch.float32).requires_grad_()
    labels, leaf = torch.tensor([3, 0, -100, 699]), x.detach().double().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        losses = kullback.divergence(x, None, labels=labels, z_weight=0.1, reduction="none")
        (found,) = torch.autograd.grad(losses.sum(), x)
    truth = oracle.labelled(torch.zeros(4), leaf, labels, z=0.1).sum()
    assert relative_error(found, torch.autograd.grad(truth, leaf)[0]) < gradient(torch.float32)
    assert len(kernel_runs) == 1


def test_slices_of_rows_are_no_rows(backend, monkeypatch, generator, kernel_runs):
    """A rank's gradient is by the whole row's normaliser, though both sides are one tensor."""
    emulation.on_chip(monkeypatch)
    x = sample("logits", (4, 1400), generator, torch.float32)
    labels, leaf = torch.tensor([3, 900, -100, 699]), x.double().requires_grad_()
    lse, nothing = x.double().logsumexp(-1), torch.zeros(4, dtype=torch.float64)
    side, weights = Side("logits"), Weights(label=1.0)
    problem = Problem("total_variation", side, side, shard=Shard("0", 0, 700), weights=weights)
    ours, found = x[:, :700], torch.empty(4, 700)
    own = torch.where(labels < 700, labels, -1)
    known = torch.stack([lse, lse, nothing, nothing, nothing, nothing + 1, nothing + 2])
    kullback.backends.run(Rows(problem, Operands(ours, ours, None, own), "gradient", known=known, d_input=found))
    truth = torch.autograd.grad(oracle.labelled(torch.zeros(4), leaf, labels).sum(), leaf)[0]
    assert relative_error(found, truth[:, :700]) < gradient(torch.float32)
    assert not kernel_runs


def test_rows_without_a_view_go_the_other_way(backend, monkeypatch, generator, kernel_runs):
    """They would be copied twice."""
    emulation.on_chip(monkeypatch)
    whole = sample("logits", (3, 5, 700), generator, torch.float32)
    for x in (whole[:, :-1], whole[0].t().contiguous().t()):
        labels = torch.randint(0, 700, x.shape[:-1], generator=generator)
        loss = kullback.divergence(x, None, labels=labels)
        truth = oracle.labelled(torch.zeros(labels.numel()), x.reshape(-1, 700), labels.reshape(-1)).mean()
        assert relative_error(loss, truth) < LOSS
        assert not kernel_runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("side", [Side("logits"), Side("logits", 1.7, 5.0)], ids=str)
def test_logits_of_labels(backend, generator, dtype, side):
    """Of rows of a larger tensor, more than a block's; NaN where there is no label."""
    x = sample("logits", (300, 41), generator, dtype)[:, 3:40]
    labels = torch.randint(0, 37, (300,), generator=generator)
    labels[5] = -100
    expected, found = (torch.empty(300, dtype=torch.float64) for _ in range(2))
    pytorch.run(Labels(labels, 37, side, x, expected))
    of_labels.run(Labels(labels, 37, side, x, found))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert found.isnan().nonzero().tolist() == [[5]]
    of_labels.run(Labels(labels, 37))
