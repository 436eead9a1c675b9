"""Hidden states × head and top-k teachers on a GPU: memory, repeats, graphs, no syncs, ids that are no tokens."""

import subprocess
import sys

import pytest
import torch

import kullback
from tests.conftest import captured, no_synchronisation
from tests.tolerances import relative_error

pytestmark = pytest.mark.gpu

VOCAB = 50257  # rows of logits that are not aligned by themselves


def operands(rows, hidden=256, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device="cuda", generator=generator).to(dtype)
    h, w, t, v = draw(rows, hidden), 0.2 * draw(VOCAB, hidden), draw(rows, hidden), 0.2 * draw(VOCAB, hidden)
    return h.requires_grad_(), w.requires_grad_(), t, v


def topk(rows, k=64):
    generator = torch.Generator("cuda").manual_seed(1)
    x = 3 * torch.randn(rows, VOCAB, device="cuda", generator=generator)
    values, ids = (x + torch.randn(x.shape, device="cuda", generator=generator)).log_softmax(-1).topk(k)
    return x.bfloat16().requires_grad_(), values, ids


def results(*tensors, ids=None, **options):
    """Loss and gradients: of a mean, and of each row's."""
    leaves = [t for t in tensors if t.requires_grad]
    found = []
    for reduction in ("mean", "none"):
        if ids is None:
            loss = kullback.linear_divergence(*tensors, reduction=reduction, **options)
        else:
            loss = kullback.topk_divergence(*tensors, ids, reduction=reduction, **options)
        found += [loss, *torch.autograd.grad(loss.sum(), leaves)]
    return found


@pytest.mark.parametrize("chunk_rows", [None, 100])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_repeats_are_equal_to_the_bit(chunk_rows, kind):
    tensors = operands(513)
    first = results(*tensors, kind=kind, chunk_rows=chunk_rows)
    info = kullback.backend_info()
    assert (info.name, info.refused) == ("cuda", {})
    for _ in range(10):
        assert all(
            torch.equal(a, b) for a, b in zip(first, results(*tensors, kind=kind, chunk_rows=chunk_rows), strict=True)
        )


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero"])
def test_topk_repeats_are_equal_to_the_bit(tail):
    x, values, ids = topk(513)
    first = results(x, values, ids=ids, tail=tail)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, results(x, values, ids=ids, tail=tail), strict=True))


def test_memory_does_not_grow_with_the_rows(monkeypatch):
    monkeypatch.setattr(kullback.linear, "bytes_of_chunks", lambda device: 1 << 28)
    peaks = []
    for rows in (4096, 16384):
        h, w, t, v = operands(rows)
        loss = kullback.linear_divergence(h, w, t, v)
        torch.autograd.grad(loss, (h, w))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(kullback.linear_divergence(h, w, t, v), (h, w))
        returned = sum(g.numel() * g.itemsize for g in gradients)
        peaks.append(torch.cuda.max_memory_allocated() - before - returned)
    assert abs(peaks[1] - peaks[0]) < 64 << 20
    assert peaks[1] < (1 << 28) + 4 * w.numel() + (64 << 20)  # the chunk, the head's sum in float32


def test_no_host_synchronisation():
    count = torch.tensor(400.0, device="cuda")
    linear, (x, values, ids) = operands(300), topk(300)
    mask = torch.rand(300, device="cuda") > 0.3

    def all_of_it():
        results(*linear, row_weight=mask, chunk_rows=128)
        kullback.linear_divergence(*linear, row_weight=mask, normalizer=count).backward()
        results(x, values, ids=ids, row_weight=mask)
        kullback.linear_divergence(*linear[:2], values, target_indices=ids, chunk_rows=100).backward()

    all_of_it()
    with no_synchronisation():
        all_of_it()


def test_a_graph_replays_with_new_data():
    h, w, t, v = operands(256)
    x, values, ids = topk(256)

    def step():
        loss = kullback.linear_divergence(h, w, t, v) + kullback.topk_divergence(x, values, ids)
        return loss.detach(), *torch.autograd.grad(loss, (h, w, x))  # no graph outlives the stream it was made on

    graph, found = captured(step)
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
        x.copy_(x.flip(0))
        ids.copy_(ids.flip(1))
    graph.replay()
    for ours, theirs in zip(found, step(), strict=True):
        assert relative_error(ours, theirs) < 1e-6


def test_ids_that_are_no_tokens_stop_the_device():
    code = (
        "import torch, kullback\n"
        "x = torch.randn(4, 100, device='cuda')\n"
        "ids = torch.full((4, 2), 100, device='cuda')\n"
        "kullback.topk_divergence(x, torch.full((4, 2), -1.0, device='cuda'), ids)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "assert" in done.stderr
