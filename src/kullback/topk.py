"""Driver: a teacher known at k tokens of a row.

The student's row is gathered at these tokens. All its other tokens make one more outcome, the tail. A divergence of
these k + 1 numbers is a small problem like another. Gathering reads the row once, and the gradient is scattered back
in one pass. A row of logits gives k logits and the log-sum-exp of the others: the softmax of the k + 1 is that of the
row with its other tokens in one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import autograd, backends, library
from kullback.autograd import Context, Gradients, is_differentiated_again, weighted, widened
from kullback.backends.pytorch import topk as in_torch
from kullback.library import PROBLEM, BatchInfo, Dims, batch_first, state_fields
from kullback.library import library as operators
from kullback.problem import Problem, Side, decode, kept_dtype
from kullback.state import packed
from kullback.tracing import is_traced
from kullback.work import Entries, Gather, Rows, Scatter, TopK, as_rows, row_vector

operators.define(f"gather(Tensor input, Tensor ids, {PROBLEM}, bool tail) -> Tensor")
operators.define(f"scatter(Tensor input, Tensor ids, Tensor gathered, Tensor d_gathered, {PROBLEM}) -> Tensor")


class Teacher(NamedTuple):
    """A teacher at its tokens."""

    ids: Tensor  # [..., k], distinct; -1 where there is none
    target: Tensor  # [..., k (+ 1)], as logits (to be normalised) or log-probabilities; with one more the tail
    problem: Problem  # of the student, as `Gather` reads it, and the target
    negligible: float  # a tail of the target that is no more may be what rounding left of 1 - 1

    @property
    def has_tail(self) -> bool:
        return self.target.size(-1) > self.ids.size(-1)


def entries_of(form: str, tail: str, input_form: str, vocab: int) -> TopK:
    """What a teacher's entries are, for a student in that form."""
    return TopK(form, tail, tail == "renormalize" or (input_form == "logits" and tail != "zero"), vocab)


def teacher(problem: Problem, values: Tensor, indices: Tensor, of: TopK, row_weight: Tensor | None) -> Teacher:
    """Of its entries; rows of weight 0 do not count, whatever their entries."""
    skipped = None if row_weight is None else row_weight.detach() == 0
    if is_traced(values, indices) or (values.requires_grad and torch.is_grad_enabled()):
        ids, target = in_torch.entries(problem, values, indices, skipped, of)
    else:
        ids = indices.new_empty(indices.shape, dtype=torch.int64)
        shape = *indices.shape[:-1], indices.size(-1) + (of.tail != "renormalize")
        target = values.new_empty(shape, dtype=kept_dtype(values.dtype))
        backends.run(Entries(problem, values, indices, skipped, of, ids, target))
    log_vocab = math.log(max(of.vocab - ids.size(-1), 1))
    negligible = log_vocab + (math.log(4 * torch.finfo(values.dtype).eps) - log_vocab) / problem.target.temperature
    side = problem.target._replace(form="logits" if of.as_logits else "log_probs")
    return Teacher(ids, target, dataclasses.replace(problem, target=side), negligible)


def at_ids(problem: Problem, form: str = "logits") -> Problem:
    """The problem of the k + 1 outcomes: temperature and softcap have been applied to them."""
    return Problem(problem.kind, Side(form), Side(problem.target.form), problem.parameter)


def gather(problem: Problem, input: Tensor, ids: Tensor, has_tail: bool) -> Tensor:
    """The input's rows at the ids and, with a tail, all others in one: [rows, k (+ 1)], as they count."""
    gathered = input.new_empty(input.size(0), ids.size(1) + has_tail, dtype=kept_dtype(input.dtype))
    backends.run(Gather(problem, input, ids, gathered))
    return gathered if has_tail else in_torch.one_outcome(gathered, ids)


def run_at_ids(work: Rows, ids: Tensor, negligible: float) -> None:
    """The work on logits for a teacher known at the ids: gather there, work on that, scatter the gradient back."""
    problem, x, y = work.problem, work.input, work.target
    has_tail = y.size(-1) > ids.size(-1)
    gathered = gather(problem, x, ids, has_tail)
    if has_tail:
        y = in_torch.without_rounding(gathered, y, negligible, problem.input.form)
    d_gathered = None if work.d_input is None else torch.empty_like(gathered)
    backends.run(work._replace(problem=at_ids(problem), input=gathered, target=y, d_input=d_gathered))
    if work.d_input is not None and d_gathered is not None:
        backends.run(Scatter(problem, x, ids, gathered, d_gathered, work.d_input))


def _gather(input: Tensor, ids: Tensor, problem: str, scalars: Sequence[float], tail: bool) -> Tensor:
    decoded = decode(problem, tuple(scalars))
    gathered = gather(decoded, decoded.narrow(as_rows(input)), ids.reshape(-1, ids.size(-1)), tail)
    return gathered.view(*ids.shape[:-1], gathered.size(-1))


def _scatter(
    input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor, problem: str, scalars: Sequence[float]
) -> Tensor:
    return scatter(decode(problem, tuple(scalars)), input, ids, gathered, d_gathered)


def scatter(problem: Problem, input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor) -> Tensor:
    """The gradient in the input, [..., vocab], from that in what was gathered of it."""
    d_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    rows, out = problem.narrow(as_rows(input)), as_rows(d_input)
    if rows.size(1) < input.size(-1):
        out[:, rows.size(1) :] = 0
    ids, gathered, d_gathered = (t.reshape(-1, t.size(-1)).contiguous() for t in (ids, gathered, d_gathered))
    backends.run(Scatter(problem, rows, ids, gathered, d_gathered, problem.narrow(out)))
    return d_input


operators.impl("gather", _gather, "CompositeExplicitAutograd")
operators.impl("scatter", _scatter, "CompositeExplicitAutograd")


@torch.library.register_fake("kullback::gather", lib=operators)
def _(input: Tensor, ids: Tensor, problem: str, scalars: Sequence[float], tail: bool) -> Tensor:
    return input.new_empty((*ids.shape[:-1], ids.size(-1) + int(tail)), dtype=kept_dtype(input.dtype))


@torch.library.register_fake("kullback::scatter", lib=operators)
def _(
    input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor, problem: str, scalars: Sequence[float]
) -> Tensor:
    return input.new_empty(input.shape)


# vmap: a batch of rows is more rows.


@torch.library.register_vmap("kullback::gather", lib=operators)
def _(
    info: BatchInfo, in_dims: Dims, input: Tensor, ids: Tensor, problem: str, scalars: Sequence[float], tail: bool
) -> tuple[Tensor, int]:
    input, ids = (batch_first(t, dim, info.batch_size) for t, dim in zip((input, ids), in_dims, strict=False))
    return torch.ops.kullback.gather.default(input, ids, problem, scalars, tail), 0


@torch.library.register_vmap("kullback::scatter", lib=operators)
def _(
    info: BatchInfo,
    in_dims: Dims,
    input: Tensor,
    ids: Tensor,
    gathered: Tensor,
    d_gathered: Tensor,
    problem: str,
    scalars: Sequence[float],
) -> tuple[Tensor, int]:
    tensors = (input, ids, gathered, d_gathered)
    batched = [batch_first(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims, strict=False)]
    return torch.ops.kullback.scatter.default(*batched, problem, scalars), 0


class GatherRows(torch.autograd.Function):
    """`gather` of [..., vocab]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, ids: Tensor, problem: Problem, tail: bool) -> Tensor:
        gathered: Tensor = torch.ops.kullback.gather.default(input, ids, problem.key, problem.scalars, tail)
        return gathered

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Problem, bool], output: Tensor) -> None:
        input, ids, ctx.problem, _ = inputs
        ctx.save_for_backward(input, ids, output)

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        return ScatterRows.apply(*ctx.saved_tensors, grad_out, ctx.problem), None, None, None


class ScatterRows(torch.autograd.Function):
    """`scatter` to [..., vocab], which is the end of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor, problem: Problem) -> Tensor:
        gradient: Tensor = torch.ops.kullback.scatter.default(
            input, ids, gathered, d_gathered, problem.key, problem.scalars
        )
        return gradient

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Problem], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        raise RuntimeError("topk_divergence cannot be differentiated twice")


def on_gathered(input: Tensor, teacher: Teacher) -> tuple[Problem, Tensor, Tensor]:
    """The student and the teacher at the teacher's tokens, and the problem of the two: for any transform."""
    form = teacher.problem.input.form
    gathered: Tensor = GatherRows.apply(input, teacher.ids, teacher.problem, teacher.has_tail)
    if not teacher.has_tail:
        gathered = in_torch.one_outcome(in_torch.log_or_nothing(gathered), teacher.ids) if form == "probs" else gathered
        return at_ids(teacher.problem), gathered, teacher.target
    target = in_torch.without_rounding(gathered, teacher.target, teacher.negligible, form)
    return at_ids(teacher.problem, form), gathered, target


def gathered_rows(input: Tensor, teacher: Teacher, row_weight: Tensor | None) -> Rows:
    """The same as a record, [rows, k + 1]: for a plain call and a teacher that has a tail."""
    problem = teacher.problem
    ids, target = (t.reshape(-1, t.size(-1)) for t in (teacher.ids, teacher.target))
    x = problem.narrow(as_rows(input))
    gathered = x.new_empty(x.size(0), ids.size(1) + 1, dtype=kept_dtype(x.dtype))
    backends.run(Gather(problem, x, ids, gathered, target, teacher.negligible))
    weight = row_vector(row_weight, x.size(0))
    return Rows(at_ids(problem, problem.input.form), gathered, target, row_weight=weight)


class TopKTotal(torch.autograd.Function):
    """scale · Σ row_weight · loss at a teacher's tokens; of the gradient the few numbers that it follows from."""

    @staticmethod
    def forward(
        ctx: Context, input: Tensor, teacher: Teacher, row_weight: Tensor | None, scale: float, dtype: torch.dtype
    ) -> Tensor:
        rows = gathered_rows(input, teacher, row_weight)
        total, d_gathered = input.new_empty((), dtype=dtype), torch.empty_like(rows.input)
        backends.run(rows._replace(scale=scale, total=total, d_input=d_gathered))
        ctx.problem, ctx.backend = teacher.problem, backends.forced()
        ctx.save_for_backward(input, teacher.ids, rows.input, d_gathered)
        return total

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        input, ids, gathered, d_gathered = ctx.saved_tensors
        # 0 in rows that do not count, even if the upstream gradient is infinite
        d_gathered = torch.where(d_gathered == 0, 0.0, d_gathered * grad_out.to(d_gathered.dtype))
        return _scattered(ctx, input, ids, gathered, d_gathered), None, None, None, None


class TopKPerRow(torch.autograd.Function):
    """row_weight · loss of each row at a teacher's tokens."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, teacher: Teacher, row_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = gathered_rows(input, teacher, row_weight)
        loss, state = rows.input.new_empty(rows.input.size(0), dtype=dtype), None
        if fields := state_fields(rows.problem):
            state = packed(loss.size(0), fields, loss)
        backends.run(rows._replace(loss=loss, found=state))
        ctx.problem, ctx.gathered_problem, ctx.backend = teacher.problem, rows.problem, backends.forced()
        ctx.save_for_backward(input, teacher.ids, rows.input, rows.target, state, row_weight)
        return loss.view(input.shape[:-1])

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        input, ids, gathered, target, state, row_weight = ctx.saved_tensors
        row_weight = None if row_weight is None else row_weight.reshape(-1)
        grad_out = weighted(widened(grad_out.reshape(-1)), row_weight)
        problem, wants = ctx.gathered_problem, (True, False)
        if is_differentiated_again(grad_out):
            d_gathered = autograd.Gradient.apply(gathered, target, state, grad_out, problem, wants)[0]
        else:
            with backends.restored(ctx.backend):
                d_gathered = library.write_gradients(problem, gathered, target, state, grad_out, wants)[0]
        return _scattered(ctx, input, ids, gathered, d_gathered), None, None, None


def _scattered(ctx: Context, input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor) -> Tensor:
    """The gradient in the input, from that in what was gathered of it."""
    if is_differentiated_again(d_gathered):
        return ScatterRows.apply(input, ids, gathered, d_gathered, ctx.problem)  # type: ignore[no-any-return]
    with backends.restored(ctx.backend):
        return scatter(ctx.problem, input, ids, gathered, d_gathered)


def _is_plain(input: Tensor, teacher: Teacher) -> bool:
    """Whether nothing traces the call, and of the teacher no gradient is wanted."""
    return teacher.has_tail and not is_traced(input, teacher.target) and not teacher.target.requires_grad


def total(input: Tensor, teacher: Teacher, row_weight: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · Σ row_weight · loss, 0-d."""
    if not _is_plain(input, teacher):
        return autograd.total(*on_gathered(input, teacher), row_weight, scale, dtype)
    if torch.is_grad_enabled() and input.requires_grad:
        return TopKTotal.apply(input, teacher, row_weight, scale, dtype)  # type: ignore[no-any-return]
    total = input.new_empty((), dtype=dtype)
    backends.run(gathered_rows(input, teacher, row_weight)._replace(scale=scale, total=total))
    return total


def per_row(input: Tensor, teacher: Teacher, row_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row."""
    if not _is_plain(input, teacher):
        return autograd.per_row(*on_gathered(input, teacher), row_weight, dtype)
    if torch.is_grad_enabled() and input.requires_grad:
        return TopKPerRow.apply(input, teacher, row_weight, dtype)  # type: ignore[no-any-return]
    loss = input.new_empty(math.prod(input.shape[:-1]), dtype=dtype)
    backends.run(gathered_rows(input, teacher, row_weight)._replace(loss=loss))
    return loss.view(input.shape[:-1])
