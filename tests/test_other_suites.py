"""What TRL asks of `generalized_jsd_loss` and Liger of its KL and JSD, asked of ours in their place."""

import pytest
import torch
import torch.nn.functional as F

import kullback


def generalized_jsd_loss(student, teacher, labels=None, beta=0.5, temperature=1.0, reduction="batchmean"):
    """TRL's signature: beta weighs the teacher; 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher)."""
    kind = {0: "kl", 1: "reverse_kl"}.get(beta, "jensen_shannon")
    options = {} if kind != "jensen_shannon" else {"beta": beta}
    mask = None if labels is None else labels != -100
    if reduction == "batchmean":
        return kullback.divergence(student, teacher, kind, temperature=temperature, row_weight=mask, **options)
    return kullback.divergence(
        student, teacher, kind, temperature=temperature, row_weight=mask, reduction=reduction, **options
    )


@pytest.fixture
def logits(generator, device):
    return tuple(torch.randn(2, 3, 5, generator=generator).to(device) for _ in range(2))


class TestGeneralizedJensenShannon:
    def test_equal_distributions(self, backend, device, logits):
        ones = torch.ones(1, 1, 5, device=device)
        assert generalized_jsd_loss(ones, ones).item() == 0
        for beta in (0, 0.5, 1):
            assert generalized_jsd_loss(logits[0], logits[0], beta=beta).item() == 0

    def test_beta_at_its_ends(self, backend, device):
        student = torch.tensor([[[0.1, 0.9]]], device=device).log()
        teacher = torch.tensor([[[0.9, 0.1]]], device=device).log()
        for beta, (q, p) in ((0, (student, teacher)), (1, (teacher, student))):
            expected = F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")
            torch.testing.assert_close(generalized_jsd_loss(student, teacher, beta=beta), expected)

    def test_shapes_of_reductions(self, backend, logits):
        losses = generalized_jsd_loss(*logits, reduction="none")
        assert losses.shape == (2, 3)
        total, mean = (generalized_jsd_loss(*logits, reduction=r) for r in ("sum", "mean"))
        assert total.dim() == mean.dim() == 0
        torch.testing.assert_close(total, losses.sum())
        torch.testing.assert_close(mean, losses.mean())

    def test_beta_between(self, backend, logits):
        for beta in (0, 0.1, 0.5, 0.9, 1):
            assert generalized_jsd_loss(*logits, beta=beta) >= 0

    def test_temperature(self, backend, logits):
        assert generalized_jsd_loss(*logits, temperature=2.0) < generalized_jsd_loss(*logits, temperature=1.0)
        scaled = generalized_jsd_loss(*(t / 2.0 for t in logits))
        torch.testing.assert_close(generalized_jsd_loss(*logits, temperature=2.0), scaled)

    def test_masked_labels(self, backend, device, logits):
        labels = torch.tensor([[1, -100, 2], [-100, -100, 3]], device=device)
        losses = generalized_jsd_loss(*logits, reduction="none")
        torch.testing.assert_close(generalized_jsd_loss(*logits, labels=labels), losses[labels != -100].mean())

    def test_symmetry(self, backend, logits):
        student, teacher = logits
        assert torch.equal(generalized_jsd_loss(student, teacher), generalized_jsd_loss(teacher, student))
        torch.testing.assert_close(
            generalized_jsd_loss(student, teacher, beta=0.1), generalized_jsd_loss(teacher, student, beta=0.9)
        )
        assert generalized_jsd_loss(student, teacher, beta=0) != generalized_jsd_loss(teacher, student, beta=0)


SHAPES = [(1, 64, 320), (3, 7, 1271), (1, 5, 32000)]  # of batch, length, vocabulary
TOLERANCES = {torch.float32: (1e-6, 1e-8), torch.bfloat16: (1e-2, 1e-8)}  # tighter than Liger's own


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "none"])
@pytest.mark.parametrize("log_target", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_liger_kl_div(shape, reduction, log_target, dtype, backend, device, generator):
    batch, length, vocab = shape
    x = torch.randn(batch * length, vocab, generator=generator).log_softmax(-1).to(device)
    y = torch.randn(batch * length, vocab, generator=generator).softmax(-1).to(device)
    results = []
    for loss, kind in ((torch.nn.KLDivLoss, torch.float64), (kullback.KLDivLoss, dtype)):
        a = x.to(dtype).to(kind).requires_grad_()
        b = y.to(dtype).to(kind) if not log_target else y.log().to(dtype).to(kind)
        value = loss(reduction=reduction, log_target=log_target)(a, b)
        value.sum().backward()
        results.append((value.double(), a.grad.double()))
    rtol, atol = TOLERANCES[dtype]
    for ours, truth in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, truth, rtol=rtol, atol=max(atol, atol * truth.abs().max().item()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_liger_jsd(shape, beta, dtype, backend, device, generator):
    """Liger takes log-probabilities; its reference is the mean of the rows' divergences."""
    batch, length, vocab = shape
    x, y = (
        torch.randn(batch * length, vocab, generator=generator).log_softmax(-1).to(device).to(dtype) for _ in range(2)
    )
    a = x.clone().requires_grad_()
    value = kullback.divergence(a, y, "jensen_shannon", form="log_probs", beta=beta)
    value.backward()
    b = x.double().requires_grad_()
    q, p = b.exp(), y.double().exp()
    m = beta * p + (1 - beta) * q
    truth = (beta * (p * (y.double() - m.log())).sum(-1) + (1 - beta) * (q * (b - m.log())).sum(-1)).mean()
    truth.backward()
    torch.testing.assert_close(value.double(), truth, rtol=2e-6, atol=0)
    rtol, _ = TOLERANCES[dtype]
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=rtol, atol=rtol * b.grad.abs().max().item())
