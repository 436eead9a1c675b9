"""Driver: a teacher known at k words of a row.

The student is looked at on these words and, as one more outcome, on all the rest: k + 1 numbers, of which any
divergence is a small problem like another. To gather them reads the student's row once; their gradient is written in
one pass. A row of logits gives k logits and the log-sum-exp of the others, so that the softmax of the k + 1 is that of
the row with its other words in one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback import backends, ops
from kullback.backends.torch.entries import entries, is_rounding, log_or_nothing, one_outcome
from kullback.observed import is_observed
from kullback.ops import PROBLEM, as_rows, batch_first, library, problem_of, row_vector, weighted
from kullback.rows import NUMBERS, Entries, Problem, held_dtype

library.define(f"gather(Tensor input, Tensor ids, {PROBLEM}, bool rest) -> Tensor")
library.define(f"scatter(Tensor input, Tensor ids, Tensor held, Tensor d_held, {PROBLEM}) -> Tensor")


def small(problem: Problem, form: str = "logits") -> Problem:
    """The problem of the k + 1 outcomes: temperature and softcap have been applied to them."""
    return dataclasses.replace(problem, form=form, numbers=(*NUMBERS, *problem.numbers[len(NUMBERS) :]))


def gather(problem: Problem, x: Tensor, ids: Tensor, rest: bool) -> Tensor:
    """x at the ids and, with `rest`, all others in one: [rows, k (+ 1)], as they count (tempered, capped)."""
    held: Tensor = backends.call("gather", problem, x, ids, rest)
    return held if rest else one_outcome(held, ids)


def scatter(problem: Problem, x: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, out: Tensor) -> None:
    """Write the gradient in x of what has gradient d_held in `held`, which `gather` found. `out` may be x."""
    backends.call("scatter", problem, x, ids, held, d_held, out)


def _gather(input: Tensor, ids: Tensor, divergence: str, numbers: Any, rest: bool) -> Tensor:
    problem = problem_of(divergence, tuple(numbers))
    rows = problem.valid(as_rows(input))
    held = gather(problem, rows, ids.reshape(-1, ids.size(-1)), rest)
    return held.view(*ids.shape[:-1], held.size(-1))


def _scatter(input: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, divergence: str, numbers: Any) -> Tensor:
    problem = problem_of(divergence, tuple(numbers))
    d_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    rows, out = problem.valid(as_rows(input)), as_rows(d_input)
    if rows.size(1) < input.size(-1):
        out[:, rows.size(1) :] = 0
    flat = [t.reshape(-1, t.size(-1)).contiguous() for t in (ids, held, d_held)]
    scatter(problem, rows, flat[0], flat[1], flat[2], problem.valid(out))
    return d_input


library.impl("gather", _gather, "CompositeExplicitAutograd")
library.impl("scatter", _scatter, "CompositeExplicitAutograd")


@torch.library.register_fake("kullback::gather", lib=library)
def _(input: Tensor, ids: Tensor, divergence: str, numbers: Any, rest: bool) -> Tensor:
    return input.new_empty((*ids.shape[:-1], ids.size(-1) + rest), dtype=held_dtype(input.dtype))


@torch.library.register_fake("kullback::scatter", lib=library)
def _(input: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, divergence: str, numbers: Any) -> Tensor:
    return input.new_empty(input.shape)


# vmap: a batch of rows is more rows.


def _batched(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [batch_first(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims[: len(tensors)], strict=True)]


@torch.library.register_vmap("kullback::gather", lib=library)
def _(info: Any, in_dims: tuple[int | None, ...], input: Tensor, ids: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    return torch.ops.kullback.gather.default(*_batched(info, in_dims, (input, ids)), *arguments), 0


@torch.library.register_vmap("kullback::scatter", lib=library)
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    ids: Tensor,
    held: Tensor,
    d_held: Tensor,
    *arguments: Any,
) -> tuple[Tensor, int]:
    tensors = _batched(info, in_dims, (input, ids, held, d_held))
    return torch.ops.kullback.scatter.default(*tensors, *arguments), 0


class Gather(torch.autograd.Function):
    """`gather` of [..., vocab]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, ids: Tensor, problem: Problem, rest: bool) -> Tensor:
        held: Tensor = torch.ops.kullback.gather.default(input, ids, problem.spelling, problem.numbers, rest)
        return held

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, ids, ctx.problem, _ = inputs
        ctx.save_for_backward(input, ids, output)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return Scatter.apply(*ctx.saved_tensors, upstream, ctx.problem), None, None, None


class Scatter(torch.autograd.Function):
    """`scatter` to [..., vocab], which is the end of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, problem: Problem) -> Tensor:
        gradient: Tensor = torch.ops.kullback.scatter.default(
            input, ids, held, d_held, problem.spelling, problem.numbers
        )
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("topk_divergence cannot be differentiated twice")


class Support(NamedTuple):
    """A teacher at its words."""

    ids: Tensor  # distinct; -1 where there is none
    target: Tensor  # [..., k (+ 1)], as logits (to be normalised) or log-probabilities
    problem: Problem  # of what `gather` finds and the target, but for the numbers that `gather` applies
    negligible: float  # a rest of the target that is no more may be what rounding left of 1 - 1


def support(
    values: Tensor,
    indices: Tensor,
    target_form: str,
    tail: str,
    form: str,
    problem: Problem,
    words: int,
    skipped: Tensor | None,
) -> Support:
    """Of a teacher's entries, for a student in `form`; `skipped` are rows that do not count."""
    of = Entries(target_form, tail, tail == "renormalize" or (form == "logits" and tail != "zero"), words)
    if is_observed(values, indices) or (values.requires_grad and torch.is_grad_enabled()):
        ids, target = entries(problem, values, indices, skipped, of)
    else:
        ids, target = backends.call("entries", problem, values, indices, skipped, of)
    temperature = problem.temperatures[1]
    log_words = math.log(max(words - ids.size(-1), 1))
    negligible = log_words + (math.log(4 * torch.finfo(values.dtype).eps) - log_words) / temperature
    problem = dataclasses.replace(problem, target_form="logits" if of.as_logits else "log_probs")
    return Support(ids, target, problem, negligible)


def without_rounding(held: Tensor, target: Tensor, negligible: float, form: str = "logits") -> Tensor:
    """The target without a rest that may be rounding."""
    rest = torch.where(is_rounding(held, target, negligible, form), -math.inf, target[..., -1:])
    return torch.cat([target[..., :-1], rest], -1)


def on_support(input: Tensor, support: Support) -> tuple[Tensor, Tensor, Problem]:
    """The student and the teacher at the teacher's words, and the problem of the two."""
    form, has_rest = support.problem.form, support.target.size(-1) > support.ids.size(-1)
    held: Tensor = Gather.apply(input, support.ids, support.problem, has_rest)
    if not has_rest:
        held = one_outcome(log_or_nothing(held), support.ids) if form == "probs" else held
        return held, support.target, small(support.problem)
    target = without_rounding(held, support.target, support.negligible, form)
    return held, target, small(support.problem, form)


class Rows(NamedTuple):
    """Student and teacher at the teacher's words, [rows, k + 1]."""

    held: Tensor
    target: Tensor
    problem: Problem

    @classmethod
    def gathered(cls, input: Tensor, support: Support) -> Rows:
        problem = support.problem
        ids, target = (t.reshape(-1, t.size(-1)) for t in (support.ids, support.target))
        arguments = problem.valid(as_rows(input)), ids, True, target, support.negligible
        held = backends.call("gather", problem, *arguments)
        return cls(held, target, small(problem, problem.form))

    def call(self, verb: str, coefficient: Tensor | None, *arguments: Any) -> Any:
        weight = row_vector(coefficient, self.held)
        return backends.call(verb, self.problem, self.held, self.target, weight, *arguments)


class SparseTotal(torch.autograd.Function):
    """scale · Σ coefficient · loss on a teacher's words; of the gradient the few numbers that it follows from."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, support: Support, coefficient: Tensor | None, scale: float, dtype: torch.dtype
    ) -> Tensor:
        rows = Rows.gathered(input, support)
        d_held = torch.empty_like(rows.held)
        loss: Tensor = rows.call("total", coefficient, scale, dtype, (d_held, None))
        ctx.problem = support.problem
        ctx.save_for_backward(input, support.ids, rows.held, d_held)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *saved, d_held = ctx.saved_tensors
        # 0 in rows that do not count, even if the upstream gradient is infinite
        d_held = torch.where(d_held == 0, 0.0, d_held * upstream.to(d_held.dtype))
        return _spread(ctx, saved, d_held, upstream), None, None, None, None


class SparsePerRow(torch.autograd.Function):
    """coefficient · loss of each row on a teacher's words."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, support: Support, coefficient: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = Rows.gathered(input, support)
        losses, state = rows.call("accumulate", coefficient, dtype)
        ctx.problem, ctx.small = support.problem, rows.problem
        ctx.save_for_backward(input, support.ids, rows.held, rows.target, state, coefficient)
        return losses.view(input.shape[:-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, ids, held, target, state, coefficient = ctx.saved_tensors
        cotangent = upstream.reshape(-1).to(torch.promote_types(upstream.dtype, torch.float32))
        if coefficient is not None:
            cotangent = weighted(cotangent, coefficient.reshape(-1))
        small: Problem = ctx.small
        if torch.is_grad_enabled() or is_observed(upstream):
            d_held = ops.Gradient.apply(held, target, state, cotangent, small, (True, False))[0]
        else:
            d_held, known = torch.empty_like(held), state if state.numel() else None
            backends.call("gradient", small, held, target, known, cotangent.contiguous(), (d_held, None))
        return _spread(ctx, (input, ids, held), d_held, upstream), None, None, None


def _spread(ctx: Any, saved: Sequence[Tensor], d_held: Tensor, upstream: Tensor) -> Tensor:
    """The gradient in the input, from that in what was held of it."""
    input, ids, held = saved
    if torch.is_grad_enabled() or is_observed(upstream):
        return Scatter.apply(input, ids, held, d_held, ctx.problem)  # type: ignore[no-any-return]
    return _scatter(input, ids, held, d_held, ctx.problem.spelling, ctx.problem.numbers)


def _is_plain(input: Tensor, support: Support) -> bool:
    """Whether nothing looks at the call, and of the teacher no gradient is wanted."""
    has_rest = support.target.size(-1) > support.ids.size(-1)
    return has_rest and not is_observed(input, support.target) and not support.target.requires_grad


def total(input: Tensor, support: Support, coefficient: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · Σ coefficient · loss, 0-d."""
    if not _is_plain(input, support):
        held, target, problem = on_support(input, support)
        return ops.total(held, target, coefficient, scale, problem, dtype)
    if torch.is_grad_enabled() and input.requires_grad:
        return SparseTotal.apply(input, support, coefficient, scale, dtype)  # type: ignore[no-any-return]
    return Rows.gathered(input, support).call("total", coefficient, scale, dtype, (None, None))  # type: ignore[no-any-return]


def per_row(input: Tensor, support: Support, coefficient: Tensor | None, dtype: torch.dtype) -> Tensor:
    """coefficient · loss of each row."""
    if not _is_plain(input, support):
        held, target, problem = on_support(input, support)
        return ops.per_row(held, target, coefficient, problem, dtype)
    if torch.is_grad_enabled() and input.requires_grad:
        return SparsePerRow.apply(input, support, coefficient, dtype)  # type: ignore[no-any-return]
    losses: Tensor = Rows.gathered(input, support).call("accumulate", coefficient, dtype)[0]
    return losses.view(input.shape[:-1])
