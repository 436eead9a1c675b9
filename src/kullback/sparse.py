"""Driver: a teacher known at k words of a row.

The student is looked at on these words and, as one more outcome, on all the rest: k + 1 numbers, of which any
divergence is a small problem like another. To gather them reads the student's row once; their gradient is written in
one pass. A row of logits gives k logits and the log-sum-exp of the others, so that the softmax of the k + 1 is that of
the row with its other words in one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback import backends
from kullback.ops import PROBLEM, as_rows, batch_first, library, problem_of
from kullback.rows import NUMBERS, Problem, held_dtype

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
    """Of a teacher's entries, for a student in `form`. Those of one id are summed, those of id -1 left out.

    `skipped` are rows that do not count, whatever their entries.
    """
    temperature = problem.temperatures[1]
    epsilon = torch.finfo(values.dtype).eps
    absent = indices < 0 if skipped is None else (indices < 0) | skipped.unsqueeze(-1)
    ids, first = distinct(torch.where(absent, -1, indices))
    values = torch.where(absent, 1.0, values.to(held_dtype(values.dtype)))
    log_p = log(values) if target_form == "probs" else values
    log_p = _sum_of_equal(torch.where(absent, -math.inf, log_p), first)
    log_p = torch.where(ids < 0, -math.inf, log_p)
    known = log_p / temperature
    as_logits = form == "logits" and tail != "zero"
    if tail == "renormalize":
        as_logits, target = True, one_outcome(known, ids)
    elif target_form == "logits":  # nothing is known of the others
        nothing = (ids < 0).all(-1, keepdim=True)
        known = torch.where(nothing, -math.inf, torch.where(nothing, 0.0, known).log_softmax(-1))
        target = torch.cat([known, torch.full_like(known[..., :1], -math.inf)], -1)
    else:
        rest = _log_rest(log_p, words - (ids >= 0).sum(-1, keepdim=True), temperature)
        target = torch.cat([known, rest], -1)
        if not as_logits and (temperature != 1 or tail == "bucket"):  # entries may sum to more than 1, as stored
            target = target.log_softmax(-1)
        if tail == "zero":
            target = torch.cat([target[..., :-1], torch.full_like(rest, -math.inf)], -1)
    log_words = math.log(max(words - ids.size(-1), 1))
    negligible = log_words + (math.log(4 * epsilon) - log_words) / temperature
    problem = dataclasses.replace(problem, target_form="logits" if as_logits else "log_probs")
    return Support(ids, target, problem, negligible)


def _log_rest(log_p: Tensor, words: Tensor, temperature: float) -> Tensor:
    """log of what so many other words have together: of equal shares, the choice of largest entropy, tempered."""
    least = torch.finfo(log_p.dtype).eps / 2  # what rounding leaves of 1 - 1
    mass = (1 - log_p.double().exp().sum(-1, keepdim=True)).clamp(min=least)
    log_words = words.clamp(min=1).double().log()
    rest = log_words + (mass.log() - log_words) / temperature
    return torch.where(words > 0, rest, -math.inf).to(log_p.dtype)


def without_rounding(held: Tensor, target: Tensor, negligible: float, nothing: float = -math.inf) -> Tensor:
    """The target without a rest that may be rounding, where the student has none: it would be p > 0 where q = 0."""
    rest = target[..., -1:]
    none = (held[..., -1:] == nothing) & (rest <= negligible)
    return torch.cat([target[..., :-1], torch.where(none, -math.inf, rest)], -1)


def one_outcome(held: Tensor, ids: Tensor) -> Tensor:
    """A row of no ids has no distribution to renormalise: it is given one outcome, the same to both models."""
    nothing = (ids < 0).all(-1, keepdim=True)
    return torch.where(nothing & (torch.arange(ids.size(-1), device=ids.device) == 0), 0.0, held)


def log(p: Tensor) -> Tensor:
    """log p, with a gradient of 0 where p is 0."""
    return torch.where(p == 0, -math.inf, torch.where(p == 0, 1.0, p).log())


def _sum_of_equal(log_p: Tensor, first: Tensor) -> Tensor:
    """log Σ p over entries of the same id, at the first of them; entries that stand alone as they are."""
    lowest = torch.full_like(log_p, -math.inf)
    top = lowest.scatter_reduce(-1, first, log_p.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    count = torch.zeros_like(log_p).scatter_add(-1, first, torch.ones_like(log_p))
    total = torch.zeros_like(log_p).scatter_add(-1, first, (log_p - top.gather(-1, first)).exp())
    return torch.where(count > 1, log(total) + top, log_p)


def on_support(input: Tensor, support: Support) -> tuple[Tensor, Tensor, Problem]:
    """The student and the teacher at the teacher's words, and the problem of the two."""
    form, has_rest = support.problem.form, support.target.size(-1) > support.ids.size(-1)
    held: Tensor = Gather.apply(input, support.ids, support.problem, has_rest)
    if not has_rest:
        held = one_outcome(log(held), support.ids) if form == "probs" else held
        return held, support.target, small(support.problem)
    nothing = 0.0 if form == "probs" else -math.inf
    target = without_rounding(held, support.target, support.negligible, nothing)
    return held, target, small(support.problem, form)


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids with repetitions made -1, and for each entry the position where its id stands first."""
    order = ids.argsort(dim=-1, stable=True)
    ordered = ids.gather(-1, order)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    positions = torch.arange(ids.size(-1), device=ids.device).expand_as(ids)
    leader = torch.where(begins, positions, 0).cummax(-1).values
    first = positions.scatter(-1, order, order.gather(-1, leader))
    return torch.where(first == positions, ids, -1), first
