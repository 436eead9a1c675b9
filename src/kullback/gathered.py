"""A student's rows at a top-k teacher's tokens and at labels: a small problem, and the way back from its gradient.

With labels the token of each is one more outcome. Its part of the teacher's tail is that which it has of the student's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import labels as auxiliary
from kullback import library, parallel
from kullback.dtypes import kept_dtype
from kullback.forms import FORMS
from kullback.outcomes import one_outcome, reference, without_rounding
from kullback.problem import IGNORED, Problem, Side, Weights, gathered_dtype
from kullback.work import Gather, Operands, as_rows, row_vector, weighted


class Teacher(NamedTuple):
    """Where a teacher is known, and how it and the student are to be read. Its entries are an operand."""

    ids: Tensor  # [..., k], distinct; -1 where there is none
    problem: Problem  # of the student, as `Gather` reads it, and the target
    negligible: float  # a tail of the target that is no more may be what rounding left of 1 - 1
    has_tail: bool  # whether the target has one outcome more than ids


class Gathered(NamedTuple):
    """Rows at a teacher's tokens, [rows, k], and their labels: a small problem, and the way back from its gradient."""

    ids: Tensor  # [rows, k], or with a label's place behind them
    columns: Tensor  # [rows, ids and others], as of `Gather`
    problem: Problem
    operands: Operands  # [rows, ids and the tail]; labels are places among the ids
    rest: Rest | None

    def total(self, scale: float, dtype: torch.dtype, wants: bool) -> tuple[Tensor, Tensor | None]:
        """scale · Σ row_weight · loss, and its gradient in the columns."""
        total, d_outcomes, _ = library.sum_losses(self.problem, self.operands, scale, dtype, (wants, False))
        if self.rest is not None:
            total = (total + self.rest.losses(self.operands.row_weight).sum() * scale).to(dtype)
        return total, None if d_outcomes is None else self.d_columns(d_outcomes, self.operands.row_weight, scale)

    def per_row(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """row_weight · loss of each, and their states."""
        losses, state = library.row_losses(self.problem, self.operands, dtype)
        if self.rest is not None:
            losses = (losses + self.rest.losses(self.operands.row_weight)).to(dtype)
        return losses, state

    def gradient(self, state: Tensor) -> Tensor:
        """Of Σ row_weight · loss, in the columns."""
        d_outcomes, _ = library.write_gradients(self.problem, self.operands, state, (True, False))
        assert d_outcomes is not None
        return self.d_columns(d_outcomes, self.operands.row_weight)

    def d_columns(self, d_outcomes: Tensor, row_weight: Tensor | None, scale: float = 1.0) -> Tensor:
        """The gradient in the columns of scale · Σ row_weight · loss, of the problem's."""
        if self.rest is None:
            return d_outcomes
        upstream = d_outcomes.new_ones(d_outcomes.size(0)) if row_weight is None else row_weight.to(d_outcomes.dtype)
        return self.rest.add_gradient(d_outcomes, upstream if scale == 1 else upstream * scale)


class Rest(NamedTuple):
    """What z-loss and the part of labels that is spread over all tokens add to losses of gathered rows."""

    problem: Problem  # with no other weights
    outcomes: Tensor  # [rows, n]
    lse: Tensor  # [rows]
    mean: Tensor  # [rows, 1], or without smoothing [rows, 0]
    offset: Tensor | float  # as of `offset_of`
    labels: Tensor | None  # [rows]

    def losses(self, row_weight: Tensor | None) -> Tensor:
        none, mean = torch.zeros_like(self.lse), self.mean.sum(-1)
        losses = auxiliary.losses(self.problem, none, self.lse, self.labels, none, mean, self.offset)
        return weighted(losses, row_weight)

    def add_gradient(self, d_outcomes: Tensor, upstream: Tensor) -> Tensor:
        """[rows, n + 0 or 1]: that of outcomes with its own, and that of the mean."""
        factor = auxiliary.mass_factor(self.problem, self.lse + self.offset, self.labels)
        is_read = (upstream != 0) & (self.lse != -math.inf)
        more = (factor * upstream).unsqueeze(-1) * self.outcomes.softmax(-1)
        d_outcomes = d_outcomes + torch.where(is_read.unsqueeze(-1), more, 0.0)
        spread = torch.where(auxiliary.counts(self.labels, upstream), upstream * self.problem.weights.label, 0.0)
        return torch.cat([d_outcomes, -spread.unsqueeze(-1).expand_as(self.mean)], -1)


def gather_rows(teacher: Teacher, operands: Operands) -> Gathered:
    """The student and the teacher at the teacher's tokens, and at labels."""
    problem = teacher.problem
    x = problem.narrow(as_rows(operands.input))
    ids, target = (t.reshape(-1, t.size(-1)) for t in (teacher.ids, operands.target))
    row_weight, labels = (None if t is None else row_vector(t, x.size(0)) for t in operands.of_rows)
    if problem.has_auxiliary:
        return labelled_rows(problem, x, ids, target, row_weight, labels, teacher.negligible)
    gathered = x.new_empty(x.size(0), ids.size(1) + 1, dtype=gathered_dtype(problem, x))
    parallel.run(Gather(problem, x, ids, gathered, target, teacher.negligible))
    small = at_ids(problem, problem.input.form)
    return Gathered(ids, gathered, small, Operands(gathered, target, row_weight), None)


def labelled_rows(
    problem: Problem,
    x: Tensor,
    ids: Tensor,
    target: Tensor | None,
    row_weight: Tensor | None,
    labels: Tensor | None,
    negligible: float,
) -> Gathered:
    """Rows of logits at the ids and at labels; without a target of [rows, k + 1] for what labels and z add alone.

    Then, and if a divergence counts nothing, outcomes are their own target: a divergence of 0, with gradients of 0.
    """
    wide, places = with_labels(ids, labels)
    columns = gather(problem, x, wide, others_of(problem))
    outcomes = columns[:, : wide.size(1) + 1]
    divergence, label, _, smoothing = problem.weights
    if target is None or divergence == 0:
        small, target, divergence = Problem("kl", Side("logits"), Side("logits"), is_gathered=True), outcomes, 1.0
    else:
        small, target = at_ids(problem), sharing_its_tail(outcomes, target, negligible, problem)
    small = dataclasses.replace(small, weights=Weights(divergence, label * (1 - smoothing)))
    rest = rest_of(problem, x, wide, columns, labels)
    return Gathered(wide, columns, small, Operands(outcomes, target, row_weight, places), rest)


def rest_of(problem: Problem, x: Tensor, ids: Tensor, columns: Tensor, labels: Tensor | None) -> Rest | None:
    """Of rows that were gathered at ids and labels; None where it is nothing."""
    _, label, z, smoothing = problem.weights
    if not (z or label * smoothing):
        return None
    outcomes, mean = columns.tensor_split([ids.size(1) + 1], -1)
    of_rest = dataclasses.replace(problem, weights=Weights(1.0, label * smoothing, z, 1.0))
    return Rest(of_rest, outcomes, outcomes.logsumexp(-1), mean, offset_of(problem, x, ids), labels)


def gather(problem: Problem, input: Tensor, ids: Tensor, others: int) -> Tensor:
    """The input's rows at the ids and so many numbers more (`Gather.others`): [rows, k + others], as they count."""
    gathered = input.new_empty(input.size(0), ids.size(1) + others, dtype=gathered_dtype(problem, input))
    parallel.run(Gather(problem, input, ids, gathered))
    return gathered if others else one_outcome(gathered, ids)


def others_of(problem: Problem) -> int:
    """What is gathered beside the ids of losses that are more than divergences: of smoothed labels the mean, too."""
    return 2 if problem.weights.smoothing and problem.weights.label else 1


def with_labels(ids: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[..., k + 1]: rows' ids and labels, -1 where there is none or it is among them; and where labels stand there."""
    if labels is None:
        return torch.cat([ids, torch.full_like(ids[..., :1], -1)], -1), None
    own = labels.unsqueeze(-1)
    wide = torch.cat([ids, torch.where((own < 0) | (ids == own).any(-1, keepdim=True), -1, own)], -1)
    places = (wide == own).to(torch.int8).argmax(-1)
    return wide, torch.where(labels < 0, IGNORED, places)


def without_label(teacher: Teacher, gathered: Tensor) -> Tensor:
    """As the teacher's ids alone would have been gathered: the label that is none of them is part of the tail."""
    k = teacher.ids.size(-1)
    if not (teacher.has_tail or is_of_support(teacher.problem, teacher.has_tail)):
        return one_outcome(gathered[..., :k], teacher.ids)
    return torch.cat([gathered[..., :k], log_sum(gathered[..., k:])], -1)


def sharing_its_tail(outcomes: Tensor, target: Tensor, negligible: float, problem: Problem) -> Tensor:
    """The target, [rows, k + 1], with a label's token taken out of its tail, in the shares that the outcomes have.

    All kinds are sums of terms for which D(c·p, c·q) = c·D(p, q), or follow from one. So equal shares of both change
    neither the divergence nor, held where they are, its gradient.
    """
    k = target.size(-1) - 1
    both, label, tail = shares(outcomes[..., k:])
    together = torch.cat([outcomes[..., :k], both], -1)
    target = without_rounding(together, target, negligible, problem)
    return torch.cat([target[..., :k], target[..., k:] + label, target[..., k:] + tail], -1)


def shares(outcomes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a label and the others have together, and each one's share of it, which is all of nothing the others'."""
    label, tail = outcomes[..., :1], outcomes[..., 1:]
    both = torch.logaddexp(label, tail)
    nothing = both == -math.inf
    return both, torch.where(nothing, -math.inf, label - both), torch.where(nothing, 0.0, tail - both)


def log_sum(values: Tensor) -> Tensor:
    """Log-sum-exp of few, with a gradient of 0 where all are -inf."""
    nothing = (values == -math.inf).all(-1, keepdim=True)
    return torch.where(nothing, -math.inf, torch.where(nothing, 0.0, values).logsumexp(-1, keepdim=True))


def offset_of(problem: Problem, input: Tensor, ids: Tensor) -> Tensor | float:
    """What gathered logits as they count are less than those of the row, where that is asked for."""
    if not problem.weights.z or problem.input.softcap or problem.shard.group:
        return 0.0
    values = problem.narrow(input.detach())
    largest = reference(values, ids).squeeze(-1)
    return largest.to(kept_dtype(values.dtype)) / problem.input.temperature


def at_ids(problem: Problem, form: str = "logits") -> Problem:
    """The problem of the k + 1 outcomes: temperature and softcap have been applied to them."""
    return Problem(problem.kind, Side(form), Side(problem.target.form), problem.parameter, is_gathered=True)


def is_of_support(problem: Problem, has_tail: bool) -> bool:
    """Whether a teacher's entries are all that is summed: no tail, and masses that need not sum to 1."""
    return not has_tail and problem.target.form != "logits"


def at_support(gathered: Tensor, ids: Tensor, form: str) -> Tensor:
    """The student at the ids alone, of what was gathered with its tail: masses of its row, or their logarithms."""
    absent = ids < 0
    if form == "logits":
        gathered = without_empty_rows(gathered, absent).log_softmax(-1)
    return torch.where(absent, FORMS[form].nothing, gathered[..., :-1])


def without_empty_rows(gathered: Tensor, absent: Tensor) -> Tensor:
    """Anything else for rows without ids, which are not to be counted: they may hold what is no number."""
    return torch.where(absent.all(-1, keepdim=True), 0.0, gathered)


def without_unread_rows(gathered: Tensor, row_weight: Tensor | None) -> Tensor:
    """Anything else for rows of weight 0, which are not read: 0 times what they hold may be no number."""
    return gathered if row_weight is None else torch.where((row_weight == 0).unsqueeze(-1), 0.0, gathered)
