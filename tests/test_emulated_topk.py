"""CUDA kernels of a top-k teacher where there is no GPU: their own code on a CPU."""

import itertools
import math
from math import inf

import pytest
import torch

import kullback
from kullback import backends
from kullback.backends import pytorch
from kullback.backends.cuda import topk
from kullback.problem import Problem, Side
from kullback.work import Entries, Gather, Scatter, TopK
from tests import emulation
from tests.samples import sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("others", [1, 2])
def test_a_kernel_reads_nothing_that_it_is_not_given(monkeypatch, generator, dtype, softcap, others):
    """Views of odd starts and strides, more rows than blocks, in the student's place; NaN all round."""
    problem = Problem("kl", Side("logits", 1.5, softcap), Side("logits"))
    around = torch.full((9, 300), math.nan, dtype=dtype)
    x = around[1:8, 5:262]
    x.copy_(sample("logits", x.shape, generator, dtype))
    ids = torch.stack([torch.randperm(257, generator=generator)[:9] for _ in range(7)])
    ids[2, 4], ids[3] = -1, -1
    d_gathered = torch.randn(7, 9 + others, generator=generator)
    d_gathered[4], d_gathered[5, 9] = 0, 0
    expected, d_input = torch.empty(d_gathered.shape), torch.empty(x.shape, dtype=dtype)
    pytorch.run(Gather(problem, x, ids, expected))
    pytorch.run(Scatter(problem, x, ids, expected, d_gathered, d_input))
    gathered = torch.empty(d_gathered.shape)
    with emulation.emulated(monkeypatch):
        topk.gather(Gather(problem, x, ids, gathered))
        topk.scatter(Scatter(problem, x, ids, gathered, d_gathered, x))
    torch.testing.assert_close(gathered, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x, d_input, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)
    around[1:8, 5:262] = math.nan
    assert around.isnan().all()


def test_the_mean_of_tokens_that_are_masked_by_the_lowest_number(monkeypatch):
    """Their sum is no number that float32 has."""
    x = torch.full((1, 4103), torch.finfo(torch.float32).min)
    x[0, :100] = 1
    gathered = torch.empty(1, 3)
    with emulation.emulated(monkeypatch):
        topk.gather(Gather(Problem("kl", Side("logits"), Side("logits")), x, torch.tensor([[7]]), gathered))
    torch.testing.assert_close(gathered[:, 2].double(), (x.double() - 1).mean(-1), rtol=1e-6, atol=0)


TAILS = {"log_probs": ("bucket", "renormalize", "zero"), "probs": ("bucket", "renormalize", "zero")}
TAILS["logits"] = ("renormalize", "zero")  # a bucket is refused by the checks


@pytest.mark.parametrize(("form", "tail"), [(form, tail) for form, tails in TAILS.items() for tail in tails])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entries(monkeypatch, generator, form, tail, dtype):
    """Repeated and absent ids, rows that do not count, rows of none, all tokens, entries of no mass; a temperature."""
    vocab, rows, k = 140, 9, 137  # more entries than threads, more rows than blocks
    x = sample("logits", (rows, vocab), generator, torch.float32)
    values = x.log_softmax(-1)[:, :k] if form != "logits" else x[:, :k]
    values = (values.exp() if form == "probs" else values).to(dtype)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    ids[0, 5:9], ids[1, ::3], ids[2] = ids[0, 2], -1, -1
    ids[3, 100:] = ids[3, 20]
    values[4, 7] = 0 if form == "probs" else -inf
    values[5, :] = math.nan
    skipped = torch.zeros(rows, dtype=torch.bool)
    skipped[5], ids[5, 3] = True, vocab + 7
    target_dtype = torch.promote_types(dtype, torch.float32)
    for temperature, as_logits in ((1.0, False), (2.5, False), (0.7, tail != "zero")):
        of = TopK(form, tail, tail == "renormalize" or as_logits, vocab)
        problem = Problem("kl", Side("log_probs"), Side("log_probs", temperature))
        results = []
        for run in (pytorch.run, topk.entries):
            distinct, target = torch.empty_like(ids), torch.empty(rows, k + (tail != "renormalize"), dtype=target_dtype)
            with emulation.emulated(monkeypatch):
                run(Entries(problem, values, ids, skipped, of, distinct, target))
            results.append((distinct, target))
        (distinct, target), (expected_ids, expected) = results[1], results[0]
        assert torch.equal(distinct, expected_ids)
        close = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(target, expected, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("backend", ["emulated"], indirect=True)
def test_topk_divergence(backend, generator):
    """Both reductions, with a tail that the student has not."""
    x = sample("logits", (5, 257), generator, torch.float32).requires_grad_()
    with torch.no_grad():
        x[1, 9:] = -inf
    values, ids = (x.detach() + torch.randn(x.shape, generator=generator)).log_softmax(-1).topk(9)
    assert math.isfinite(values[1].exp().sum())
    weight = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0])
    for reduction, kind in (("sum", "jensen_shannon"), ("none", "reverse_kl")):
        found = []
        for name in ("cuda", "torch"):
            with kullback.backend(name):
                loss = kullback.topk_divergence(x, values, ids, kind, row_weight=weight, reduction=reduction)
                found.append((loss, *torch.autograd.grad(loss.sum(), x)))
            assert {*backends.backend_info().parts.values()} == {name}
        for mine, other in itertools.zip_longest(*found):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7, equal_nan=True)
