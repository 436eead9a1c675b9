"""Megatron-LM's `topk_kl_div`, against its formula in float64."""

import pytest
import torch

import kullback
from kullback.integrations.megatron import SENTINEL, topk_kl_div
from tests.ranks import Ranks, spawn
from tests.tolerances import relative_error

TOKENS, BATCH, VOCAB, K = 5, 3, 104, 8
LOSS, GRADIENT = 1e-6, 1e-5


def made(dtype=torch.float32):
    """The student's logits, and a teacher's entries, of which a few are none."""
    generator = torch.Generator().manual_seed(2)
    student = 3 * torch.randn(TOKENS, BATCH, VOCAB, generator=generator)
    teacher = 0.5 * student + 2 * torch.randn(TOKENS, BATCH, VOCAB, generator=generator)
    values, ids = teacher.log_softmax(-1).topk(K)
    values[0, 0, 5:], ids[0, 0, 5:] = SENTINEL, VOCAB - 1  # ids that do not survive being packed
    values[1, 2, 1:], ids[1, 2, 1:] = SENTINEL, 0
    return student.to(dtype), values, ids


def textbook(student, values, ids, ghost):
    """Σ p (log p - log q) of entries that are some, and of what either side leaves of 1."""
    log_q, is_entry = student.log_softmax(-1).gather(-1, ids), values != SENTINEL
    log_p = values.double()
    losses = (log_p.exp() * (log_p - log_q)).masked_fill(~is_entry, 0.0).sum(-1)
    if ghost:
        p, q = (1 - (x.exp() * is_entry).sum(-1) for x in (log_p, log_q))
        losses = losses + p * (p.log() - q.log())
    return losses.T


def upstream():
    return torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.5


def truth(student, values, ids, ghost):
    wide = student.detach().double().requires_grad_()
    losses = textbook(wide, values, ids, ghost)
    return losses.detach(), torch.autograd.grad(losses, wide, upstream())[0]


@pytest.mark.parametrize("ghost", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_theirs(dtype, ghost):
    student, values, ids = made(dtype)
    before = student.clone()
    losses, exact = truth(student, values, ids, ghost)
    leaf = student.requires_grad_()
    found = topk_kl_div(leaf, values, ids, 1, 0, None, add_ghost_token=ghost)
    assert kullback.backend_info().name in ("c", "cuda")
    (gradient,) = torch.autograd.grad(found, leaf, upstream().float())
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert relative_error(found, losses) < LOSS
    assert gradient.dtype == dtype
    assert relative_error(gradient, exact) < (GRADIENT if dtype == torch.float32 else 4e-3)
    assert torch.equal(student, before)


def test_ids_are_integers():
    student, values, ids = made()
    for dtype in (torch.float16, torch.bool):
        with pytest.raises(TypeError, match=f"teacher_topk_indices must be of an integer dtype; got {dtype}"):
            topk_kl_div(student, values, ids.to(dtype), 1, 0, None)


def test_stored_float16_entries():
    """They are read as the numbers they are."""
    student, values, ids = made()
    losses, _ = truth(student, values.half().float(), ids, True)
    assert relative_error(topk_kl_div(student, values.half(), ids.to(torch.uint16), 1, 0, None, True), losses) < LOSS


def test_ghosts_of_nothing():
    """A ghost of the teacher's is at least 6e-8, and Megatron's 1e-8; float32 tells either from 1e-7 no better."""
    student, values, ids = made()
    values = torch.where(values == SENTINEL, SENTINEL, values.log_softmax(-1))
    losses = textbook(student.double(), values, ids, False)
    nats = 20.0  # log of a student's ghost over such a teacher's
    assert (topk_kl_div(student, values, ids, 1, 0, None, True) - losses).abs().max() < (1.2e-7 + 6e-8) * nats


def check_ranks(ranks: Ranks):
    for dtype in (torch.float32, torch.bfloat16):
        for ghost in (True, False):
            student, values, ids = made(dtype)
            losses, exact = truth(student, values, ids, ghost)
            leaf = ranks.slice(student).requires_grad_()
            part = topk_kl_div(leaf, values, ids, ranks.world, ranks.rank, ranks.group, add_ghost_token=ghost)
            (gradient,) = torch.autograd.grad(part, leaf, upstream().float())
            whole = sum(ranks.everyone(part.detach()))  # as LossFuncCallable adds them
            assert relative_error(whole, losses) < LOSS, (dtype, ghost)
            bound = GRADIENT if dtype == torch.float32 else 4e-3
            assert relative_error(gradient, ranks.slice(exact)) < bound, (dtype, ghost)
    student, values, ids = made()
    student[0, 0, ids[0, 0, 0]] = -torch.inf  # a token that the teacher has
    whole, leaf = student.clone().requires_grad_(), ranks.slice(student).requires_grad_()
    (expected,) = torch.autograd.grad(topk_kl_div(whole, values, ids, 1, 0, None, True).sum(), whole)
    part = topk_kl_div(leaf, values, ids, ranks.world, ranks.rank, ranks.group, True)
    (gradient,) = torch.autograd.grad(part.sum(), leaf)
    torch.testing.assert_close(gradient, ranks.slice(expected), rtol=1e-5, atol=1e-7, equal_nan=True)
    assert part[0, 0] == torch.inf
    assert part.isfinite().sum() == part.numel() - 1


def test_ranks_that_share_the_vocabulary(tmp_path):
    spawn(check_ranks, 2, tmp_path)
