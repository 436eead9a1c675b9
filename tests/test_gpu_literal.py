"""Kernels for elements that stand alone, and what all kernels owe, on a GPU."""

import itertools

import pytest
import torch

import kullback
from tests import kinds, oracle
from tests.conftest import no_synchronisation
from tests.kinds import KINDS
from tests.samples import sample
from tests.tolerances import BF16_CACHED, FLOAT_GRADIENT, LOSS, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_run(kind, generator):
    for form, target_form in itertools.product(("probs", "log_probs"), repeat=2):
        x, y = (sample(f, (3, 50), generator).cuda().requires_grad_() for f in (form, target_form))
        loss = kullback.divergence(x, y, kind, form=form, target_form=target_form)
        loss.backward()
        info = kullback.backend_info()
        assert (info.name, info.refused) == ("cuda", {})


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
    ],
)
@pytest.mark.parametrize("vocab", [2056, 8192, 32000, 50257, 128256, 262144])
def test_logits_on_chip(vocab, dtypes):
    """More rows than are in flight at once, some without weight, close ones and masked ones among them."""
    rows = 300 if vocab < 100_000 else 70
    y = torch.randn(rows, vocab, device="cuda") * 2
    noise = torch.linspace(1e-2, 1.5, rows, device="cuda")[:, None]
    x = (y + noise * torch.randn_like(y)).to(dtypes[0])
    y = y.to(dtypes[1])
    x[5::7, 100:200] = y[5::7, 100:200] = float("-inf")
    weight = torch.rand(rows, device="cuda")
    weight[::9] = 0
    x[::9] = float("nan")
    for kind in ("kl", "jensen_shannon"):
        a = x.detach().requires_grad_()
        options = {"row_weight": weight, **kinds.parameters(kind)}
        loss = kullback.divergence(a, y, kind, **options)
        assert kullback.backend_info().name == "cuda"
        loss.backward()
        again = kullback.divergence(a, y, kind, **options)
        (gradient,) = torch.autograd.grad(again, a)
        assert torch.equal(again, loss)
        assert torch.equal(gradient, a.grad)
        read = weight != 0
        b = x[read].double().requires_grad_()
        truth = oracle.divergence(b, y[read].double(), kind, **kinds.parameters(kind))
        truth = (truth * weight[read].double()).sum() / weight.sum().double()
        truth.backward()
        assert relative_error(loss, truth) <= LOSS
        assert (a.grad[~read] == 0).all()
        assert relative_error(a.grad[read], b.grad) <= (FLOAT_GRADIENT if dtypes[0] == torch.float32 else BF16_CACHED)


def test_no_host_synchronisation(generator):
    x, y = (sample("probs", (64, 1000), generator).cuda().requires_grad_() for _ in range(2))
    weight = torch.rand(64, device="cuda")
    count = torch.tensor(7.0, device="cuda")
    run = lambda: [
        kullback.divergence(x, y, form="probs", row_weight=weight, normalizer=count).backward(),
        kullback.divergence(x, y, "renyi", form="probs").backward(),
        kullback.kl_div(x, y, "none", form="probs").sum().backward(),
    ]
    run()
    with no_synchronisation():
        run()


def test_graph_capture_and_replay_with_new_data(generator):
    x = torch.rand(128, 1000, device="cuda").softmax(-1).requires_grad_()
    y = torch.rand(128, 1000, device="cuda").softmax(-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            kullback.divergence(x, y, form="probs").backward()
            x.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = kullback.divergence(x, y, form="probs")
        loss.backward()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.rand(128, 1000, device="cuda").softmax(-1))
            y.copy_(torch.rand(128, 1000, device="cuda").softmax(-1))
        graph.replay()
        a = x.detach().clone().requires_grad_()
        expected = kullback.divergence(a, y, form="probs")
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(x.grad, a.grad)


def test_runs_on_the_current_stream(generator):
    x, y = (torch.rand(512, 4096, device="cuda").softmax(-1) for _ in range(2))
    expected = kullback.kl_div(x, y, "sum", form="probs")
    late = torch.full_like(x, 0.5)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        result = kullback.kl_div(late, y, "sum", form="probs")
    stream.synchronize()
    assert torch.equal(result, expected)


def test_runs_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        torch.cuda.set_device(0)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    x, y = (torch.rand(16, 100, device=device).softmax(-1) for _ in range(2))
    result = kullback.kl_div(x, y, "sum", form="probs")
    assert result.device == device
    torch.testing.assert_close(result, torch.nn.functional.kl_div(x.log(), y, reduction="sum"))


@pytest.mark.parametrize("rows", [65537, 1 << 20])
def test_many_rows(rows):
    x, y = (torch.rand(rows, 16, device="cuda").softmax(-1) for _ in range(2))
    losses = kullback.divergence(x, y, form="probs", reduction="none")
    truth = oracle.divergence(x, y, "kl", "probs")
    torch.testing.assert_close(losses.double(), truth, rtol=1e-4, atol=1e-7)
    assert torch.equal(losses[-5:], kullback.divergence(x[-5:], y[-5:], form="probs", reduction="none"))


def test_more_than_two_to_the_31_elements():
    rows, vocab = 16760, 128256  # 2.15e9
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    for part in torch.arange(rows, device="cuda").split(1024):
        for t in (x, y):
            t[part] = torch.randn(len(part), vocab, device="cuda").softmax(-1).bfloat16()
    x.requires_grad_()
    losses = kullback.divergence(x, y, form="probs", reduction="none")
    losses.sum().backward()
    for at in (slice(0, 3), slice(rows - 3, rows)):
        a = x.detach()[at].clone().requires_grad_()
        alone = kullback.divergence(a, y[at].clone(), form="probs", reduction="none")
        alone.sum().backward()
        assert torch.equal(losses[at], alone)
        assert torch.equal(x.grad[at], a.grad)
    total = kullback.divergence(x.detach(), y, form="probs", reduction="sum")
    torch.testing.assert_close(total.double(), losses.double().sum(), rtol=1e-5, atol=0)


def test_a_hundred_runs_under_load_are_equal_to_the_bit():
    x, y = (torch.rand(257, 151_936, device="cuda").softmax(-1) for _ in range(2))
    noise, other = torch.rand(4096, 4096, device="cuda"), torch.cuda.Stream()
    first = None
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        a = x.detach().requires_grad_()
        loss = kullback.kl_div(a, y, "batchmean", form="probs")
        loss.backward()
        rows = kullback.divergence(x, y, "renyi", form="probs", reduction="none")
        if first is None:
            first = loss.detach(), a.grad, rows
        assert all(torch.equal(p, q) for p, q in zip((loss, a.grad, rows), first, strict=True))
