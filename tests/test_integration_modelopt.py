"""ModelOpt's `KDTrainer._liger_kd_loss`, against the formula of Liger's fused loss in float64."""

import contextlib
import types

import pytest
import torch

import kullback
from kullback.integrations.modelopt import liger_kd_loss
from tests.tolerances import relative_error

BATCH, TOKENS, WIDTH, ITS_WIDTH, VOCAB = 3, 9, 16, 24, 211
LOSS, GRADIENT = 1e-6, 1e-5


class Trainer:
    """What ModelOpt's trainer has around the loss."""

    _liger_kd_loss = liger_kd_loss

    def __init__(self, head, its_head, target, beta, temperature):
        self.accelerator = types.SimpleNamespace(unwrap_model=lambda model: model)
        self.model, self.teacher = (types.SimpleNamespace(lm_head=lm_head) for lm_head in (head, its_head))
        self._last_teacher_outputs = types.SimpleNamespace(logits=target)
        self._liger_jsd_beta, self._liger_temperature = beta, temperature
        self.gathered = []

    def _get_unwrapped_teacher(self):
        return self.teacher

    def _get_lm_head(self, model):
        return model.lm_head

    def _sharded_liger_compute(self, compute):
        self.gathered.append("student")
        return compute()

    def _teacher_liger_enabled(self, compute, lm_head):
        with self._ds_gather([lm_head.weight]):
            return compute()

    @contextlib.contextmanager
    def _ds_gather(self, parameters):
        """As ZeRO-3 does: outside it they have no elements."""
        self.gathered += parameters
        pieces = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = getattr(parameter, "whole", parameter.data)
        yield
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece


def textbook(hidden, weight, target, its_weight, labels, beta, temperature):
    """beta · KL(p ‖ m) + (1 - beta) · KL(q ‖ m) of p and q at the temperature, m = beta p + (1 - beta) q; or an end."""
    p = (target[:, :-1] @ its_weight.T / temperature).softmax(-1)
    q = (hidden[:, :-1] @ weight.T / temperature).softmax(-1)
    m = beta * p + (1 - beta) * q
    kl = lambda a, b: (a * (a / b).log()).sum(-1)
    rows = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
    counts = labels[:, 1:] != -100
    return rows[counts].sum() / counts.sum()


def made(dtype, bias=False):
    generator = torch.Generator().manual_seed(3)
    head, its_head = (torch.nn.Linear(width, VOCAB, bias=bias).to(dtype) for width in (WIDTH, ITS_WIDTH))
    for each in (head, its_head):
        for parameter in each.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.6).to(dtype)
    hidden, target = (torch.randn(BATCH, TOKENS, width, generator=generator) for width in (WIDTH, ITS_WIDTH))
    labels = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    labels[0, :4], labels[2, 7:] = -100, -100
    return head, its_head, hidden.to(dtype), target.to(dtype), labels


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_theirs(dtype, beta):
    head, its_head, hidden, target, labels = made(dtype)
    wide, weight = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    expected = textbook(wide, weight, target.double(), its_head.weight.double(), labels, beta, 1.7)
    exact = torch.autograd.grad(expected, (wide, weight))
    given = hidden.float().requires_grad_()  # as a norm leaves them
    trainer = Trainer(head, its_head, target.float(), beta, 1.7)
    loss = trainer._liger_kd_loss(types.SimpleNamespace(logits=given), labels, num_items_in_batch=7)
    assert kullback.backend_info().name in ("c", "cuda")
    first, *others = trainer.gathered
    assert (first, [id(each) for each in others]) == ("student", [id(its_head.weight)])
    assert trainer._last_teacher_outputs is None
    assert relative_error(loss, expected) < LOSS
    for found, other in zip(torch.autograd.grad(loss, (given, head.weight)), exact, strict=True):
        assert relative_error(found, other) < (GRADIENT if dtype == torch.float32 else 1e-2)


def test_heads_are_read_where_they_are_gathered():
    head, its_head, hidden, target, labels = made(torch.float32)
    expected = Trainer(head, its_head, target, 0.5, 1.0)._liger_kd_loss(types.SimpleNamespace(logits=hidden), labels)
    whole = head.weight.data

    class Sharded(Trainer):
        def _sharded_liger_compute(self, compute):
            head.weight.data = whole
            return compute()

    head.weight.data = whole.new_empty(0)
    found = Sharded(head, its_head, target, 0.5, 1.0)._liger_kd_loss(types.SimpleNamespace(logits=hidden), labels)
    assert torch.equal(found, expected)


def test_biases_count_and_the_teacher_learns_nothing():
    """Of a teacher that ZeRO-3 has in pieces, too."""
    head, its_head, hidden, target, labels = made(torch.float32, bias=True)
    one = torch.ones(BATCH, TOKENS, 1)
    logits = lambda states, of: (torch.cat([states, one], -1), torch.cat([of.weight, of.bias[:, None]], 1))
    sides = [t.detach().double() for t in (*logits(hidden, head), *logits(target, its_head))]
    for parameter in its_head.parameters():
        parameter.whole, parameter.data = parameter.data, parameter.data.new_empty(0)
    trainer = Trainer(head, its_head, target, 0.5, 1.0)
    loss = trainer._liger_kd_loss(types.SimpleNamespace(logits=hidden), labels)
    assert relative_error(loss, textbook(*sides, labels, 0.5, 1.0)) < LOSS
    loss.backward()
    assert head.bias.grad is not None
    assert its_head.weight.grad is None
    assert its_head.bias.grad is None


def test_a_batch_without_tokens_is_nothing():
    head, its_head, hidden, target, labels = made(torch.float32)
    trainer = Trainer(head, its_head, target, 0.0, 1.0)
    assert trainer._liger_kd_loss(types.SimpleNamespace(logits=hidden), torch.full_like(labels, -100)) == 0
