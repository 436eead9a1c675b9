"""Driver: a teacher known at k tokens of a row.

The student's row is gathered at these tokens. All its other tokens make one more outcome, the tail. A divergence of
these k + 1 numbers is a small problem like another. Gathering reads the row once, and the gradient is scattered back
in one pass. A row of logits gives k logits and the log-sum-exp of the others. The softmax of the k + 1 is that of the
row with its other tokens in one. A smoothed label wants the mean of all logits, which is gathered behind the tail.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kullback import autograd, backends, collecting, collectives, parallel
from kullback import labels as auxiliary
from kullback.autograd import Context, Gradients, is_differentiated_again, widened
from kullback.backends.pytorch import topk as in_torch
from kullback.dtypes import UNSIGNED, as_ids, kept_dtype
from kullback.gathered import (
    Gathered,
    Teacher,
    at_ids,
    at_support,
    gather,
    gather_rows,
    is_of_support,
    labelled_rows,
    log_sum,
    offset_of,
    others_of,
    rest_of,
    shares,
    with_labels,
    without_empty_rows,
    without_label,
    without_unread_rows,
)
from kullback.labels import at_labels, weighted_of_masses
from kullback.library import SCALARS, BatchInfo, Dims, Scalars, as_arguments, as_numbers, batch_first
from kullback.library import library as operators
from kullback.outcomes import log_or_nothing, one_outcome, without_rounding
from kullback.problem import DIVERGENCE_ALONE, IGNORED, Problem, Side, Weights, decode, gathered_dtype
from kullback.tracing import is_traced
from kullback.work import Entries, Operands, Rows, Scatter, TopK, as_rows, in_memory, row_vector, weighted

operators.define(f"gather(Tensor input, Tensor ids, str problem, {SCALARS}, int others) -> Tensor")
operators.define(
    f"scatter(Tensor input, Tensor ids, Tensor gathered, Tensor d_gathered, str problem, {SCALARS}) -> Tensor"
)

operators.define(
    f"entries(Tensor values, Tensor indices, Tensor? skipped, str problem, {SCALARS}, "
    "str form, str tail, bool as_logits, SymInt vocab) -> (Tensor, Tensor)"
)


def entries_of(form: str, tail: str, input_form: str, vocab: int) -> TopK:
    """What a teacher's entries are, for a student in that form. Those of "support" are read as of "zero"."""
    return TopK(form, tail, tail == "renormalize" or (input_form == "logits" and tail != "zero"), vocab)


def teacher(
    problem: Problem, values: Tensor, indices: Tensor, of: TopK, row_weight: Tensor | None
) -> tuple[Teacher, Tensor]:
    """A teacher of these entries, and the target: [..., k (+ 1)], logits to be normalised or log-probabilities.

    Rows of weight 0 do not count, whatever their entries.
    """
    skipped = None if row_weight is None else row_weight.detach() == 0
    collectives.compare(problem, "entries:", of)
    if indices.dtype in UNSIGNED:
        indices = as_ids(indices)
    read = of._replace(tail="zero", as_logits=False) if of.tail == "support" else of
    if is_traced(values, indices) or (values.requires_grad and torch.is_grad_enabled()):
        ids, target = autograd.applied(ReadEntries, values, indices, skipped, problem, read)
    else:
        ids, target = read_entries(problem, values, indices, skipped, read)
    if of.tail == "support":
        target = target[..., :-1]
    k, vocab = operator.index(ids.size(-1)), operator.index(of.vocab)  # a compiler must not take symbols' logarithm
    log_vocab = math.log(max(vocab - k, 1))
    negligible = log_vocab + (math.log(4 * torch.finfo(values.dtype).eps) - log_vocab) / problem.target.temperature
    form = "logits" if read.as_logits else "log_probs"
    side = Side(form, problem.target.temperature, problem.target.softcap)
    has_tail = target.size(-1) > ids.size(-1)
    return Teacher(ids, dataclasses.replace(problem, target=side), negligible, has_tail), target


def entries_like(values: Tensor, indices: Tensor, of: TopK) -> tuple[Tensor, Tensor]:
    """Memory for distinct ids and a target."""
    shape = *indices.shape[:-1], indices.size(-1) + int(of.tail != "renormalize")
    target = values.new_empty(shape, dtype=kept_dtype(values.dtype))
    return indices.new_empty(indices.shape, dtype=torch.int64), target


def read_entries(
    problem: Problem, values: Tensor, indices: Tensor, skipped: Tensor | None, of: TopK
) -> tuple[Tensor, Tensor]:
    """Distinct ids and the target there, as `Entries` has them."""
    ids, target = entries_like(values, indices, of)
    backends.run(Entries(problem, in_memory(values), in_memory(indices), skipped, of, ids, target))
    return ids, target


def run_at_ids(work: Rows, ids: Tensor, negligible: float) -> None:
    """The work on logits for a teacher known at the ids: gather there, work on that, scatter the gradient back.

    A gradient of fewer bits than the logits is rounded from one that takes their place.
    """
    problem, x = work.problem, work.input
    if work.figures is not None:
        work.figures.copy_(collecting.figures_of(problem, x, work.row_weight))
        work = work._replace(figures=None)
    if problem.has_auxiliary:
        ids, gathered, d_gathered = _run_auxiliary(work, ids, negligible)
    else:
        has_tail = work.target.size(-1) > ids.size(-1)
        gathered = gather(problem, x, ids, int(has_tail or is_of_support(problem, has_tail)))
        d_gathered = _run_on_gathered(work, ids, gathered, negligible)
    if work.d_input is not None and d_gathered is not None:
        is_narrow = work.d_input.dtype != x.dtype
        out = x if is_narrow else work.d_input
        parallel.run(Scatter(problem, x, ids, gathered, d_gathered, out))
        if is_narrow:
            work.d_input.copy_(x)


def _run_on_gathered(work: Rows, ids: Tensor, gathered: Tensor, negligible: float) -> Tensor | None:
    """The work on the divergence of what was gathered; returns its gradient there, if one is wanted."""
    problem, y = work.problem, work.target
    has_tail = y.size(-1) > ids.size(-1)
    of_support = is_of_support(problem, has_tail)
    if has_tail:
        y = without_rounding(gathered, y, negligible, problem)
    values = at_support(gathered, ids, "logits") if of_support else gathered
    d_values = None if work.d_input is None else torch.empty_like(values)
    small = at_ids(problem, "log_probs" if of_support else "logits")
    backends.run(work._replace(problem=small, operands=Operands(values, y, work.row_weight), d_input=d_values))
    if not of_support or d_values is None:
        return d_values
    masses = without_empty_rows(gathered, ids < 0).softmax(-1)  # back through the softmax
    return torch.nn.functional.pad(d_values, (0, 1)) - masses * d_values.sum(-1, keepdim=True)


def _run_auxiliary(work: Rows, ids: Tensor, negligible: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses that are more than divergences: the ids, with labels; what was gathered there; and its gradient."""
    problem, x, k = work.problem, work.input, ids.size(-1)
    has_tail = work.target.size(-1) > k
    rows = labelled_rows(problem, x, ids, work.target if has_tail else None, work.row_weight, work.labels, negligible)
    outcomes = rows.operands.input
    losses = outcomes.new_empty(x.size(0)) if work.loss is not None or work.total is not None else None
    d_outcomes = None if work.d_input is None else torch.empty_like(outcomes, memory_format=torch.contiguous_format)
    d_shared = torch.empty_like(rows.operands.target) if has_tail and work.d_target is not None else None
    small = work._replace(problem=rows.problem, operands=rows.operands, loss=losses, total=None)
    small = small._replace(d_input=d_outcomes, d_target=d_shared)
    # Without a tail the rows' states are those of the divergence, below, and so is the target's gradient.
    backends.run(small if has_tail else small._replace(known=None, found=None))
    if d_shared is not None and work.d_target is not None:
        work.d_target[:, :k] = d_shared[:, :k]
        torch.sum(d_shared[:, k:], -1, keepdim=True, out=work.d_target[:, k:])
    if not has_tail:
        outcomes = without_unread_rows(outcomes, work.row_weight)
        ours = torch.empty_like(losses) if losses is not None else None
        teacher = Teacher(ids, problem, negligible, has_tail)
        of_divergence = work._replace(scale=work.scale * problem.weights.divergence, loss=ours, total=None)
        d_teacher = _run_on_gathered(of_divergence, ids, without_label(teacher, outcomes), negligible)
        if losses is not None and ours is not None:
            losses += ours * problem.weights.divergence
        if d_outcomes is not None and d_teacher is not None:
            d_outcomes[:, :k] += d_teacher[:, :k]
            if d_teacher.size(-1) > k:  # the tail's, shared between the label and the others
                d_outcomes[:, k:] += d_teacher[:, k:] * torch.cat(shares(outcomes[:, k:])[1:], -1).exp()
    if losses is not None:
        if rows.rest is not None:
            losses += rows.rest.losses(work.row_weight)
        if work.loss is not None:
            work.loss.copy_(losses)
        if work.total is not None:
            work.total.copy_(losses.sum() * work.scale)
    if d_outcomes is None:
        return rows.ids, rows.columns, None
    return rows.ids, rows.columns, rows.d_columns(d_outcomes, work.row_weight, work.scale)


def _gather(input: Tensor, ids: Tensor, problem: str, scalars: Scalars, symbols: Tensor | None, others: int) -> Tensor:
    decoded = decode(problem, as_numbers(scalars, symbols))
    gathered = gather(decoded, decoded.narrow(as_rows(input)), ids.reshape(-1, ids.size(-1)), others)
    return gathered.view(*ids.shape[:-1], gathered.size(-1))


def _scatter(
    input: Tensor,
    ids: Tensor,
    gathered: Tensor,
    d_gathered: Tensor,
    problem: str,
    scalars: Scalars,
    symbols: Tensor | None,
) -> Tensor:
    return scatter(decode(problem, as_numbers(scalars, symbols)), input, ids, gathered, d_gathered)


def scatter(problem: Problem, input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor) -> Tensor:
    """The gradient in the input, [..., vocab], from that in what was gathered of it."""
    d_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    rows, out = problem.narrow(as_rows(input)), as_rows(d_input)
    if rows.size(1) < input.size(-1):
        out[:, rows.size(1) :] = 0
    ids, gathered, d_gathered = (in_memory(t).reshape(-1, t.size(-1)).contiguous() for t in (ids, gathered, d_gathered))
    parallel.run(Scatter(problem, rows, ids, gathered, d_gathered, problem.narrow(out)))
    return d_input


def _entries(
    values: Tensor,
    indices: Tensor,
    skipped: Tensor | None,
    problem: str,
    scalars: Scalars,
    symbols: Tensor | None,
    *of: Any,
) -> tuple[Tensor, Tensor]:
    return read_entries(decode(problem, as_numbers(scalars, symbols)), values, indices, skipped, TopK(*of))


operators.impl("entries", _entries, "CompositeExplicitAutograd")
operators.impl("gather", _gather, "CompositeExplicitAutograd")
operators.impl("scatter", _scatter, "CompositeExplicitAutograd")


@torch.library.register_fake("kullback::entries", lib=operators)
def _(values: Tensor, indices: Tensor, skipped: Tensor | None, problem: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    return entries_like(values, indices, TopK._make(arguments[2:]))


@torch.library.register_fake("kullback::gather", lib=operators)
def _(input: Tensor, ids: Tensor, problem: str, scalars: Scalars, symbols: Tensor | None, others: int) -> Tensor:
    dtype = gathered_dtype(decode(problem), input)
    return input.new_empty((*ids.shape[:-1], ids.size(-1) + others), dtype=dtype)


@torch.library.register_fake("kullback::scatter", lib=operators)
def _(input: Tensor, *arguments: Any) -> Tensor:
    return input.new_empty(input.shape)


# vmap: a batch of rows is more rows.


@torch.library.register_vmap("kullback::entries", lib=operators)
def _(
    info: BatchInfo, in_dims: Dims, values: Tensor, indices: Tensor, skipped: Tensor | None, *arguments: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    tensors = zip((values, indices, skipped), in_dims, strict=False)
    batched = (None if t is None else batch_first(t, dim, info.batch_size) for t, dim in tensors)
    return torch.ops.kullback.entries.default(*batched, *arguments), (0, 0)


@torch.library.register_vmap("kullback::gather", lib=operators)
def _(info: BatchInfo, in_dims: Dims, input: Tensor, ids: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    input, ids = (batch_first(t, dim, info.batch_size) for t, dim in zip((input, ids), in_dims, strict=False))
    return torch.ops.kullback.gather.default(input, ids, *arguments), 0


@torch.library.register_vmap("kullback::scatter", lib=operators)
def _(
    info: BatchInfo,
    in_dims: Dims,
    input: Tensor,
    ids: Tensor,
    gathered: Tensor,
    d_gathered: Tensor,
    *arguments: Any,
) -> tuple[Tensor, int]:
    tensors = (input, ids, gathered, d_gathered)
    batched = [batch_first(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims, strict=False)]
    return torch.ops.kullback.scatter.default(*batched, *arguments), 0


class ReadEntries(torch.autograd.Function):
    """`read_entries`, differentiable in the values."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor, indices: Tensor, skipped: Tensor | None, problem: Problem, of: TopK
    ) -> tuple[Tensor, Tensor]:
        scalars = as_arguments(problem.scalars)
        result: tuple[Tensor, Tensor] = torch.ops.kullback.entries.default(
            values, indices, skipped, problem.key, *scalars, *of
        )
        return result

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        values, indices, skipped, ctx.problem, ctx.of = inputs
        ctx.save_for_backward(values, indices, skipped)
        ctx.mark_non_differentiable(output[0])

    @staticmethod
    def backward(ctx: Context, _: Tensor, grad_out: Tensor) -> Gradients:
        values, indices, skipped = ctx.saved_tensors

        def formula(values: Tensor) -> Tensor:
            return in_torch.entries(ctx.problem, values, indices, skipped, ctx.of)[1]

        return torch.func.vjp(formula, values)[1](grad_out)[0], None, None, None, None


class GatherRows(torch.autograd.Function):
    """`gather` of [..., vocab]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, ids: Tensor, problem: Problem, others: int) -> Tensor:
        scalars = as_arguments(problem.scalars)
        gathered: Tensor = torch.ops.kullback.gather.default(input, ids, problem.key, *scalars, others)
        return gathered

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Problem, int], output: Tensor) -> None:
        input, ids, ctx.problem, _ = inputs
        ctx.backend = backends.forced()
        ctx.save_for_backward(input, ids, output)

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        with backends.restored(ctx.backend):
            return ScatterRows.apply(*ctx.saved_tensors, grad_out, ctx.problem), None, None, None


class ScatterRows(torch.autograd.Function):
    """`scatter` to [..., vocab]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, ids: Tensor, gathered: Tensor, d_gathered: Tensor, problem: Problem) -> Tensor:
        gradient: Tensor = torch.ops.kullback.scatter.default(
            input, ids, gathered, d_gathered, problem.key, *as_arguments(problem.scalars)
        )
        return gradient

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Problem], output: Tensor) -> None:
        *tensors, ctx.problem = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        """By a formula that has what was gathered in it."""
        problem, (input, ids, gathered, d_gathered) = ctx.problem, ctx.saved_tensors
        if problem.shard.group:
            raise RuntimeError("a divergence whose vocabulary ranks share cannot be differentiated twice")
        rows, upstream = problem.narrow(input), problem.narrow(grad_out)
        # Rows that hold no numbers and did not count have no gradient of any order.
        are_none = gathered.isnan() | (gathered == math.inf)
        is_garbage = are_none.any(-1, keepdim=True) | (gathered == -math.inf).all(-1, keepdim=True)
        is_unread = is_garbage & (d_gathered == 0).all(-1, keepdim=True)
        rows = torch.where(is_unread, 0.0, rows)
        d_rows, d_d_gathered = in_torch.scattered_again(problem, rows, ids, d_gathered, upstream)
        d_input = torch.nn.functional.pad(d_rows, (0, input.size(-1) - d_rows.size(-1)))
        return d_input, None, None, d_d_gathered, None


def _operator(apply: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A Function of `count` tensors and a problem, as an operator has them."""

    def function(*arguments: Any) -> Any:
        key, scalars, symbols, *others = arguments[count:]
        return apply(*arguments[:count], decode(key, as_numbers(scalars, symbols)), *others)

    return function


autograd.differentiated("gather", torch.ops.kullback.gather.default, _operator(GatherRows.apply, 2))
autograd.differentiated("scatter", torch.ops.kullback.scatter.default, _operator(ScatterRows.apply, 4))
autograd.differentiated(
    "entries",
    torch.ops.kullback.entries.default,
    _operator(lambda *given: ReadEntries.apply(*given[:4], TopK._make(given[4:])), 3),
)


def on_gathered(teacher: Teacher, operands: Operands) -> tuple[Problem, Operands]:
    """The student and the teacher at the teacher's tokens, and the problem of the two: for any transform."""
    has_tail = teacher.has_tail or is_of_support(teacher.problem, teacher.has_tail)
    gathered: Tensor = autograd.applied(GatherRows, operands.input, teacher.ids, teacher.problem, int(has_tail))
    return _of_gathered(teacher, operands, gathered)


def _of_gathered(teacher: Teacher, operands: Operands, gathered: Tensor) -> tuple[Problem, Operands]:
    """The problem and its operands, of what was gathered: with a tail where the target has one, or is all there is."""
    form, target = teacher.problem.input.form, operands.target
    row_weight = operands.row_weight
    if is_of_support(teacher.problem, teacher.has_tail):
        values = at_support(gathered, teacher.ids, form)
        small = at_ids(teacher.problem, "log_probs" if form == "logits" else form)
        return small, Operands(values, target, row_weight)
    if not teacher.has_tail:
        gathered = one_outcome(log_or_nothing(gathered), teacher.ids) if form == "probs" else gathered
        return at_ids(teacher.problem), Operands(gathered, target, row_weight)
    target = without_rounding(gathered, target, teacher.negligible, teacher.problem)
    return at_ids(teacher.problem, form), Operands(gathered, target, row_weight)


def of_gathered(
    teacher: Teacher, target: Tensor, gathered: Tensor, kinds: Sequence[str], dtype: torch.dtype
) -> list[Tensor]:
    """Of each kind the losses of rows, of the student's [rows, k + 1] that were gathered once."""
    rows = teacher._replace(ids=as_rows(teacher.ids))
    small, operands = _of_gathered(rows, Operands(gathered, as_rows(target)), without_label(rows, gathered))
    losses = (autograd.per_row(dataclasses.replace(small, kind=kind), operands, dtype) for kind in kinds)
    return [of_kind.view(teacher.ids.shape[:-1]) for of_kind in losses]


def of_labels(
    problem: Problem,
    weights: Weights,
    input: Tensor,
    labels: Tensor,
    row_weight: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`weighted_of_masses` of rows [..., vocab], whichever rank has the labels' tokens, and the gradient of each."""
    values = problem.narrow(input)
    collectives.compare(problem, "labels by", weights)
    if problem.shard.group:
        ids = torch.where(labels == IGNORED, -1, labels).unsqueeze(-1)
        own = autograd.applied(GatherRows, input, ids, problem, 0).squeeze(-1)
    else:
        own = at_labels(values, labels)
    return weighted_of_masses(weights, values, own, problem.input.form, labels, row_weight, dtype)


def auxiliary_rows(teacher: Teacher, operands: Operands, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row, of a loss that is more than a divergence: of operators."""
    problem, input, row_weight, labels = teacher.problem, operands.input, operands.row_weight, operands.labels
    if problem.input.form != "logits":
        if problem.weights.divergence == 0:
            losses = input.new_zeros(input.shape[:-1], dtype=dtype)
        else:
            alone = teacher._replace(problem=dataclasses.replace(problem, weights=DIVERGENCE_ALONE))
            losses = per_row(alone, Operands(input, operands.target, row_weight), dtype) * problem.weights.divergence
        if labels is None:
            return losses
        return losses + of_labels(problem, problem.weights, input, labels, row_weight, dtype)
    wide, places = with_labels(teacher.ids, labels)
    gathered = autograd.applied(GatherRows, input, wide, problem, others_of(problem))
    gathered = without_unread_rows(gathered, row_weight)
    outcomes, mean = gathered.tensor_split([wide.size(-1) + 1], -1)
    lse = log_sum(outcomes).squeeze(-1)
    none = torch.where(torch.zeros_like(lse, dtype=torch.bool), lse, 0.0)  # the input's, should all weights be 0
    logit = none if places is None else outcomes.gather(-1, places.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    offset = offset_of(problem, input, wide)
    more = weighted(auxiliary.losses(problem, none, lse, labels, logit, mean.sum(-1), offset), row_weight)
    if problem.weights.divergence == 0:
        return more
    small = _of_gathered(teacher, operands, without_label(teacher, outcomes))
    return autograd.per_row(*small, dtype) * problem.weights.divergence + more


class TopKTotal(torch.autograd.Function):
    """scale · Σ row_weight · loss at a teacher's tokens; of the gradient the few numbers that it follows from."""

    @staticmethod
    def forward(ctx: Context, teacher: Teacher, scale: float, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        given = Operands._make(operands)
        rows = gather_rows(teacher, given)
        total, d_columns = rows.total(scale, dtype, True)
        ctx.teacher, ctx.scale, ctx.dtype, ctx.backend = teacher, scale, dtype, backends.forced()
        ctx.save_for_backward(rows.ids, rows.columns, d_columns, *operands)
        return total

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        ids, columns, d_columns, *saved = ctx.saved_tensors
        teacher, operands = ctx.teacher, Operands(*saved)
        if is_differentiated_again(grad_out):
            d_input = _differentiable(ctx, operands, grad_out * ctx.scale)
        else:
            # 0 in rows that do not count, even if the upstream gradient is infinite
            d_columns = torch.where(d_columns == 0, 0.0, d_columns * grad_out.to(d_columns.dtype))
            with backends.restored(ctx.backend):
                d_input = scatter(teacher.problem, operands.input, ids, columns, d_columns)
        return None, None, None, d_input, *(None for _ in saved[1:])


class TopKPerRow(torch.autograd.Function):
    """row_weight · loss of each row at a teacher's tokens."""

    @staticmethod
    def forward(ctx: Context, teacher: Teacher, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        given = Operands._make(operands)
        rows = gather_rows(teacher, given)
        losses, state = rows.per_row(dtype)
        ctx.teacher, ctx.problem, ctx.dtype, ctx.backend = teacher, rows.problem, dtype, backends.forced()
        ctx.save_for_backward(state, rows.ids, rows.columns, rows.operands.target, rows.operands.labels, *operands)
        return losses.view(given.input.shape[:-1])

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        state, ids, columns, target, places, *saved = ctx.saved_tensors
        operands, problem = Operands(*saved), ctx.teacher.problem
        if is_differentiated_again(grad_out):
            d_input = _differentiable(ctx, operands, grad_out)
        else:
            row_weight, labels = (None if t is None else row_vector(t, ids.size(0)) for t in operands.of_rows)
            upstream = weighted(widened(grad_out.reshape(-1)), row_weight)
            small = Operands(columns[:, : target.size(1)], target, upstream, places)
            with backends.restored(ctx.backend):
                rest = rest_of(problem, as_rows(operands.input), ids, columns, labels)
                d_columns = Gathered(ids, columns, ctx.problem, small, rest).gradient(state)
                d_input = scatter(problem, operands.input, ids, columns, d_columns)
        return None, None, d_input, *(None for _ in saved[1:])


def _differentiable(ctx: Context, operands: Operands, grad_out: Tensor) -> Tensor:
    """The gradient in the input, differentiable or traced: of losses that are found again by operators."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), backends.restored(ctx.backend):
        losses = _composed(ctx.teacher, operands, ctx.dtype)
        grad_out = grad_out.expand(losses.shape)
        return torch.autograd.grad(losses, operands.input, grad_out, create_graph=create_graph)[0]


def _composed(teacher: Teacher, operands: Operands, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row, of operators."""
    if teacher.problem.has_auxiliary:
        return auxiliary_rows(teacher, operands, dtype)
    return autograd.per_row(*on_gathered(teacher, operands), dtype)


def _is_plain(operands: Operands, teacher: Teacher) -> bool:
    """Whether nothing traces the call, of the teacher no gradient is wanted, and kernels have all of the loss."""
    if teacher.problem.has_auxiliary and teacher.problem.input.form != "logits":
        return False
    return teacher.has_tail and not is_traced(operands.input, operands.target) and not operands.target.requires_grad


def total(teacher: Teacher, operands: Operands, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · Σ row_weight · loss, 0-d."""
    if not _is_plain(operands, teacher):
        if teacher.problem.has_auxiliary:
            return (_composed(teacher, operands, dtype).sum() * scale).to(dtype)
        return autograd.total(*on_gathered(teacher, operands), scale, dtype)
    if torch.is_grad_enabled() and operands.input.requires_grad:
        return TopKTotal.apply(teacher, scale, dtype, *operands)  # type: ignore[no-any-return]
    return gather_rows(teacher, operands).total(scale, dtype, False)[0]


def per_row(teacher: Teacher, operands: Operands, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row."""
    if not _is_plain(operands, teacher):
        return _composed(teacher, operands, dtype).to(dtype)
    if torch.is_grad_enabled() and operands.input.requires_grad:
        return TopKPerRow.apply(teacher, dtype, *operands)  # type: ignore[no-any-return]
    return gather_rows(teacher, operands).per_row(dtype)[0].view(operands.input.shape[:-1])
