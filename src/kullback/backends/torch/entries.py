"""A sparse teacher's entries in torch: differentiable, and in any transform."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kullback.observed import hides_gradients
from kullback.rows import Entries, Problem, held_dtype


def entries(
    problem: Problem, values: Tensor, indices: Tensor, skipped: Tensor | None, of: Entries
) -> tuple[Tensor, Tensor]:
    """Ids that are distinct, or -1, and the target there and, but for a renormalised one, at all other words in one.

    Entries of one id are summed, those of id -1 left out. `skipped` are rows that do not count, whatever their entries.
    """
    temperature = problem.temperatures[1]
    indices = _words(indices, of.words, skipped)
    absent = indices < 0
    ids, first = _distinct(indices)
    values = torch.where(absent, 1.0, values.to(held_dtype(values.dtype)))
    log_p = log_or_nothing(values) if of.form == "probs" else values
    log_p = _sum_of_equal(torch.where(absent, -math.inf, log_p), first)
    log_p = torch.where(ids < 0, -math.inf, log_p)
    known = log_p / temperature
    if of.tail == "renormalize":
        return ids, one_outcome(known, ids)
    if of.form == "logits":  # nothing is known of the others
        nothing = (ids < 0).all(-1, keepdim=True)
        known = torch.where(nothing, -math.inf, torch.where(nothing, 0.0, known).log_softmax(-1))
        return ids, torch.cat([known, torch.full_like(known[..., :1], -math.inf)], -1)
    rest = _log_rest(log_p, of.words - (ids >= 0).sum(-1, keepdim=True), temperature)
    target = torch.cat([known, rest], -1)
    if of.normalises(temperature):
        target = target.log_softmax(-1)
    if of.tail == "zero":
        target = torch.cat([target[..., :-1], torch.full_like(rest, -math.inf)], -1)
    return ids, target


def _words(indices: Tensor, words: int, skipped: Tensor | None) -> Tensor:
    """The ids as int64, -1 in rows that do not count.

    Checked on a GPU by an assertion on the device, as an index out of range is found in torch: nothing waits for it. In
    a transform, where no element can be looked at, those out of range are left out.
    """
    indices = indices.long()
    if skipped is not None:
        indices = torch.where(skipped.unsqueeze(-1), -1, indices)
    right = (indices >= -1) & (indices < words)
    meaning = f"target_indices must lie from 0 to {words - 1}, or be -1"
    if hides_gradients():
        return torch.where(right, indices, -1)
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(right.all(), meaning)
    elif not right.all():
        raise ValueError(f"{meaning}; got {indices[~right][0].item()}")
    return indices


def _log_rest(log_p: Tensor, words: Tensor, temperature: float) -> Tensor:
    """log of what so many other words have together: of equal shares, the choice of largest entropy, tempered."""
    least = torch.finfo(log_p.dtype).eps / 2  # what rounding leaves of 1 - 1
    mass = (1 - log_p.double().exp().sum(-1, keepdim=True)).clamp(min=least)
    log_words = words.clamp(min=1).double().log()
    rest = log_words + (mass.log() - log_words) / temperature
    return torch.where(words > 0, rest, -math.inf).to(log_p.dtype)


def none_of(form: str) -> float:
    """What an element counts as that holds no mass."""
    return 0.0 if form == "probs" else -math.inf


def is_rounding(held: Tensor, target: Tensor, negligible: float, form: str) -> Tensor:
    """Where the student has no rest and the target's may be what rounding left of 1 - 1: it would be p > 0 at q = 0."""
    return (held[..., -1:] == none_of(form)) & (target[..., -1:] <= negligible)


def one_outcome(held: Tensor, ids: Tensor) -> Tensor:
    """A row of no ids has no distribution to renormalise: it is given one outcome, the same to both models."""
    nothing = (ids < 0).all(-1, keepdim=True)
    return torch.where(nothing & (torch.arange(ids.size(-1), device=ids.device) == 0), 0.0, held)


def log_or_nothing(p: Tensor) -> Tensor:
    """log p, with a gradient of 0 where p is 0."""
    return torch.where(p == 0, -math.inf, torch.where(p == 0, 1.0, p).log())


def _sum_of_equal(log_p: Tensor, first: Tensor) -> Tensor:
    """log Σ p over entries of the same id, at the first of them; entries that stand alone as they are."""
    lowest = torch.full_like(log_p, -math.inf)
    top = lowest.scatter_reduce(-1, first, log_p.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    count = torch.zeros_like(log_p).scatter_add(-1, first, torch.ones_like(log_p))
    total = torch.zeros_like(log_p).scatter_add(-1, first, (log_p - top.gather(-1, first)).exp())
    return torch.where(count > 1, log_or_nothing(total) + top, log_p)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids with repetitions made -1, and for each entry the position where its id stands first."""
    order = ids.argsort(dim=-1, stable=True)
    ordered = ids.gather(-1, order)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    positions = torch.arange(ids.size(-1), device=ids.device).expand_as(ids)
    leader = torch.where(begins, positions, 0).cummax(-1).values
    first = positions.scatter(-1, order, order.gather(-1, leader))
    return torch.where(first == positions, ids, -1), first
