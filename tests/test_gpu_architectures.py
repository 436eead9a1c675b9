"""What older and smaller devices run, on the one that is here: as PTX of their virtual architecture, or by their plan.

PTX of compute capability 12.0 runs on no device before it. Its kernels are those of 9.0 with less shared memory.
"""

import pytest
import torch

import kullback
from kullback.backends.cuda import device, launch, literal, logits, plan, scale, topk
from tests import kinds, oracle, samples
from tests.kinds import KINDS
from tests.samples import masked, sample
from tests.tolerances import LOSS, gradient, relative_error

pytestmark = pytest.mark.gpu

DEVICES = {
    "7.5": ("compute_75", plan.NO_CHIP),
    "8.0": ("compute_80", plan.NO_CHIP),
    "12.0": ("compute_90", plan.SMALL_BLACKWELL),
    "12.0, streamed": ("compute_90", plan.NO_CHIP),
}


@pytest.fixture(params=DEVICES)
def another_device(request, monkeypatch):
    arch, chip = DEVICES[request.param]
    modules = device, literal, logits, scale, topk, launch
    caches = [value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")]
    monkeypatch.setattr(launch, "architecture", lambda index: arch)
    monkeypatch.setattr(device, "chip", lambda index: chip)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


# float16 differs from bfloat16 in its conversions, which two kinds show.
CASES = [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)]
CASES += [(kind, torch.float16) for kind in ("kl", "jensen_shannon")]


@pytest.mark.parametrize("vocab", [1000, 32001])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_logits(kind, dtype, vocab, another_device):
    rows = samples.batch(
        torch.Generator().manual_seed(3),
        vocab,
        dtype,
        far=samples.far(2.0),
        apart=samples.apart(0.3),
        close=samples.apart(0.02),
        masked=masked(samples.apart(0.5), both=samples.EVERY_7TH),
        equal=samples.equal,
    )
    x = rows.x.double().requires_grad_()
    truth = oracle.divergence(x, rows.y.double(), kind, **kinds.parameters(kind))
    upstream = 4096.0 if dtype == torch.float16 else 1.0  # as a loss scaler's, or gradients of close rows underflow
    expected = torch.autograd.grad(truth[:4].sum(), x)[0] * upstream
    for reduction in ("none", "sum"):
        ours = rows.x.cuda().requires_grad_()
        loss = kullback.divergence(ours, rows.y.cuda(), kind, reduction=reduction, **kinds.parameters(kind))
        assert kullback.backend_info().name == "cuda"
        found = torch.autograd.grad(loss.sum() * upstream, ours)[0]
        if reduction == "none":
            for row in range(4):
                assert relative_error(loss[row], truth[row]) < 3 * LOSS, rows.names[row]
            assert loss[4] == 0
        for row in range(4):
            assert relative_error(found[row], expected[row]) < 2 * gradient(dtype), rows.names[row]


@pytest.mark.parametrize("form", ["probs", "log_probs"])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "renyi"])
def test_literal_rows(kind, form, another_device, generator):
    x, y = (sample(form, (33, 3001), generator) for _ in range(2))
    truth = oracle.divergence(x, y, kind, form, **kinds.parameters(kind))
    loss = kullback.divergence(x.cuda(), y.cuda(), kind, form=form, reduction="none", **kinds.parameters(kind))
    assert kullback.backend_info().name == "cuda"
    assert relative_error(loss, truth) < LOSS


def test_topk_teachers(another_device, generator):
    logits_, teacher = sample("logits", (17, 5000), generator), sample("log_probs", (17, 5000), generator)
    values, ids = teacher.topk(32)
    expected = kullback.topk_divergence(logits_.double(), values.double(), ids)
    student = logits_.cuda().requires_grad_()
    loss = kullback.topk_divergence(student, values.cuda(), ids.cuda())
    loss.backward()
    assert relative_error(loss, expected) < LOSS
    assert student.grad.isfinite().all()
