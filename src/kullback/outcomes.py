"""Rows at a few tokens, the outcomes: what holds no mass there, sums, and a tail that is nothing but rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kullback.forms import FORMS
from kullback.problem import Problem
from kullback.work import Gather

IDS = "target_indices must lie from 0 to {}, or be -1"


def no_token(vocab: int, index: float) -> ValueError:
    return ValueError(f"{IDS.format(vocab - 1)}; got {index}")


def sum_of(values: Tensor, form: str, dim: int) -> Tensor:
    """What outcomes of that form have together."""
    return values.sum(dim) if form == "probs" else values.logsumexp(dim)


def logs_of(values: Tensor, form: str) -> Tensor:
    """Their logarithms: of probabilities with a gradient of 0 where they are 0."""
    return log_or_nothing(values) if form == "probs" else values


def log_or_nothing(p: Tensor) -> Tensor:
    """log p, with a gradient of 0 where p is 0."""
    return torch.where(p == 0, -math.inf, torch.where(p == 0, 1.0, p).log())


def reference(values: Tensor, ids: Tensor) -> Tensor:
    """The largest of a row's logits at its ids: an offset that all of a row have would take the digits of its tail."""
    if ids.size(-1) == 0:
        return torch.zeros_like(values[..., :1])
    largest = values.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -math.inf).amax(-1, keepdim=True)
    return torch.where(largest.isfinite(), largest, 0.0)


def one_outcome(gathered: Tensor, ids: Tensor) -> Tensor:
    """A row of no ids has no distribution to renormalise: it is given one outcome, the same to both models."""
    nothing = (ids < 0).all(-1, keepdim=True)
    return torch.where(nothing & (torch.arange(ids.size(-1), device=ids.device) == 0), 0.0, gathered)


def without_rounding(gathered: Tensor, target: Tensor, negligible: float, problem: Problem) -> Tensor:
    """The target without what is nothing but rounding in its tail.

    A tail that is no more than `negligible` may be what rounding left of 1 - 1. None is taken where the student has
    none: it would be p > 0 at q = 0. At a temperature such a tail has grown beyond measure, and no more is taken than
    the student has: of all teachers with these entries, one that is nearest.
    """
    form, tail, own = problem.input.form, target[..., -1:], gathered[..., -1:].detach()
    likely = torch.where(own == FORMS[form].nothing, -math.inf, tail)
    if problem.target.temperature == 1:
        return torch.cat([target[..., :-1], torch.where(tail <= negligible, likely, tail)], -1)
    values = gathered.detach()
    logs = logs_of(values, form)
    known = target[..., :-1].detach().logsumexp(-1, keepdim=True)
    share = logs[..., -1:] - logs[..., :-1].logsumexp(-1, keepdim=True) + known
    likely = torch.where(own == FORMS[form].nothing, -math.inf, torch.minimum(tail, share.to(tail.dtype)))
    # What the tail loses goes to the entries: the row has the mass that it had.
    gain = torch.logaddexp(known, tail.detach()) - torch.logaddexp(known, likely.detach())
    return torch.where((tail <= negligible) & (tail > likely), torch.cat([target[..., :-1], likely], -1) + gain, target)


def drop_rounding(work: Gather) -> None:
    """Leave in the target's tail what is more than rounding."""
    if work.target is not None:
        work.target.copy_(without_rounding(work.gathered, work.target, work.negligible, work.problem))
