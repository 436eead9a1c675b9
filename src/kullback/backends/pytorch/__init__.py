"""The verbs in torch, in chunks: any device, any dtype, no toolchain.

A chunk is some rows, or, of longer ones, pieces of a row: on a CPU as many as their temporaries fit the cache.
Arithmetic is in float32, and in float64 where an input is; what is known of a row is float64 where the device has it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import labels as auxiliary
from kullback.backends.pytorch import describe, topk
from kullback.backends.pytorch.piece import Piece, are_far
from kullback.dtypes import accumulator, compute_dtype
from kullback.entropy import entropy_of, entropy_parts
from kullback.problem import Problem, capped, inverse_temperature
from kullback.state import RowState, RowStats, RowSums, finish, merge_stats, merge_sums, state_of, sums_of, unpacked
from kullback.work import Describe, Gather, Labels, Operands, Rows, Scale, Scatter, Work, weighted

CPU_CHUNK = 1 << 19
DEVICE_CHUNK = 1 << 24  # for each byte of a logit, since eager PyTorch's temporaries are as wide as logits
LEAST_FAR_SHARE = 0.5  # of the first rows: with less of them, more time is lost than won


def why_not(work: Work) -> str | None:
    return None


def run(work: Work) -> None:
    if isinstance(work, Rows):
        _rows(work)
    elif isinstance(work, Scale):
        if work.gradient.device.type != "cpu" or work.factor.item() != 1:
            work.gradient.mul_(work.factor)
    elif isinstance(work, Gather):
        topk.gather(work)
    elif isinstance(work, Scatter):
        topk.scatter(work)
    elif isinstance(work, Describe):
        for part in _parts(work.input.size(0), max(1, _chunk(work.input) // max(1, work.input.size(1)))):
            describe.write(work.narrow(part), run)
    elif isinstance(work, Labels):
        _labels(work)
    else:
        topk.write_entries(work)


def _labels(work: Labels) -> None:
    if work.input is None or work.logits is None:
        auxiliary.assert_tokens(work.labels, work.vocab)
    else:
        found = auxiliary.label_logits(work.side, work.input, work.labels)
        work.logits.copy_(found).masked_fill_(work.labels < 0, torch.nan)


@functools.cache
def _keep_freed_memory() -> None:
    """Let the next chunk use the memory of this one's temporaries.

    glibc returns the free end of its heap to the system when it exceeds a threshold. That is twice the largest block,
    of 32 MB at most, that it has mapped and freed. Each chunk would fault pages in again: up to 4 x the time. Freeing
    one block of nearly that size raises the threshold.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


class Found(NamedTuple):
    """What one pass learns of rows."""

    stats: RowStats
    sums: RowSums
    expected: tuple[Tensor, ...]  # as of `Chunk.expected`; empty where losses are divergences alone

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """Each of all rows."""
        return (*self.stats, *self.sums, *self.expected)

    @classmethod
    def joined(cls, parts: Sequence[Found]) -> Found:
        """Of the rows of all parts."""
        numbers = [torch.cat(each) for each in zip(*(part.numbers for part in parts), strict=True)]
        numbers = [each.to(accumulator(each)) for each in numbers]
        first, last = len(RowStats._fields), len(RowStats._fields) + len(RowSums._fields)
        return cls(RowStats._make(numbers[:first]), RowSums._make(numbers[first:last]), tuple(numbers[last:]))


def _rows(work: Rows) -> None:
    x = work.input
    if x.device.type == "cpu":
        _keep_freed_memory()
    step = max(1, _chunk(x) // max(1, x.size(1)))
    if not _needs_sums(work):
        for part in _parts(x.size(0), step):
            _without_sums(_at(work, part))
    elif x.size(0) == 0:
        work.write_nothing()
    else:
        found = _far_rows(work, step) if _may_be_far(work) else None
        if found is None:
            found = Found.joined([_pass(_at(work, part)) for part in _parts(x.size(0), step)])
        _finish(work, found)


def _far_rows(work: Rows, step: int) -> Found | None:
    """Of rows that are taken for far; those that are not are done again. None where few of the first are far."""
    passes, rows = [], work.input.size(0)
    first = max(1, step // 4)
    for part in (slice(0, min(first, rows)), *_parts(rows, step, first)):
        passes.append(_pass(_at(work, part), is_far=True))
        # The device is waited for here, and when all are done.
        if part.start == 0 and _are_served(_at(work, part), passes[0]).float().mean() < LEAST_FAR_SHARE:
            return None
    found = Found.joined(passes)
    others = torch.nonzero(~_are_served(work, found)).squeeze(1)
    for start in range(0, len(others), step):
        _correct(work, found, others[start : start + step])
    return found


def _are_served(work: Rows, found: Found) -> Tensor:
    """Rows that are far, or that nobody reads."""
    is_far = are_far(work.problem, found.stats, found.sums)
    return is_far if work.row_weight is None else is_far | (work.row_weight == 0)


def _correct(work: Rows, found: Found, rows: Tensor) -> None:
    """Do these rows again, which were taken for far."""
    others = _at(work, rows)
    of_others = _pass(others)
    for number, its in zip(found.numbers, of_others.numbers, strict=True):
        number[rows] = its.to(number.dtype)
    for out, of_rows in ((work.d_input, others.d_input), (work.d_target, others.d_target)):
        if out is not None and of_rows is not None:
            out[rows] = of_rows
    if work.figures is not None and others.figures is not None:
        work.figures[:, rows] = others.figures


def _is_whole(work: Rows) -> bool:
    return work.verb in ("loss", "gradient") and work.known is None


def _needs_sums(work: Rows) -> bool:
    problem = work.problem
    return _is_whole(work) and (work.has_outputs or problem.has_logits or not problem.formula.finish_is_linear)


def _may_be_far(work: Rows) -> bool:
    """Whether rows that need sums are first taken for far, and looked at later: where they are still there then.

    Not where states are kept: the arithmetic that summed a row has to differentiate it (`Mode`).
    """
    problem, x, y = work.problem, work.input, work.target
    is_one_piece = 0 < x.size(1) <= _chunk(x)
    if not (work.found is None and problem.is_normalised and is_one_piece and looks_late(x.device)):
        return False
    written_over = (
        out is not None and out.data_ptr() == of.data_ptr() for out, of in ((work.d_input, x), (work.d_target, y))
    )
    return compute_dtype(x, y) == torch.float32 and not any(written_over)


def can_be_read(device: torch.device) -> bool:
    """Whether the host can have numbers of it now: not where there are none, nor while a graph is captured."""
    return device.type != "meta" and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def looks_late(device: torch.device) -> bool:
    """Whether sums are looked at when all have been found. On a CPU each is at once."""
    return device.type != "cpu" and can_be_read(device)


def _at(work: Rows, rows: slice | Tensor) -> Rows:
    """Some of its rows: views, or, of rows that have numbers, copies."""
    known, found, figures = (None if t is None else t[:, rows] for t in (work.known, work.found, work.figures))
    d_input, d_target = (None if t is None else t[rows] for t in (work.d_input, work.d_target))
    operands = Operands._make(None if t is None else t[rows] for t in work.operands)
    return work._replace(
        operands=operands, known=known, found=found, figures=figures, d_input=d_input, d_target=d_target
    )


def _without_sums(work: Rows) -> None:
    """Statistics, sums of rows whose statistics are known, or gradients of rows whose states are, or that want none."""
    problem, known = work.problem, work.known
    chunk = Chunk(problem, work.input, work.target, _is_whole(work))
    if work.verb == "statistics":
        _keep(work.found, chunk.statistics(with_moments=True))
    elif work.verb == "accumulate" and known is not None:
        _keep(work.found, chunk.accumulate(unpacked(RowStats, known)))
    else:
        _write(work, chunk, None if known is None else unpacked(RowState, known))


def _pass(work: Rows, is_far: bool = False) -> Found:
    """Write what is wanted of each row, but for losses and states, which follow from what is returned."""
    problem, x = work.problem, work.input
    is_loss_alone = work.found is None and not any(work.wants)
    chunk = Chunk(problem, x, work.target, is_whole=True, is_loss_alone=is_loss_alone, is_far=is_far)
    expected = chunk.expected(work.labels) if problem.has_auxiliary else ()  # before gradients take their place
    stats, sums = chunk.sums()
    if work.figures is not None:
        _keep(work.figures, (chunk.lse(stats.input_lse), chunk.entropy(stats.input_lse)))
    # Rows are finished together, but where a gradient waits for it.
    one = x.new_ones((), dtype=accumulator(x))
    is_linear = problem.formula.finish_is_linear
    state = state_of(stats, sums, one.expand_as(sums.term)) if is_linear else finish(problem, stats, sums)[1]
    _write(work, chunk, state)
    return Found(stats, sums, expected)


def _write(work: Rows, chunk: Chunk, state: RowState | None) -> None:
    """The wanted gradients."""
    if not any(work.wants):
        return
    problem, weight, scale = work.problem, work.row_weight, work.scale * work.problem.weights.divergence
    grad_out: Tensor | float = scale if weight is None else weight * scale
    upstream = None
    if problem.has_auxiliary and state is not None:
        sum_q, d_loss = auxiliary.shifted(problem, state.d_log_q, state.d_loss, state.input_lse, work.labels)
        state = state._replace(d_log_q=sum_q, d_loss=d_loss)
        upstream = weighted(torch.full_like(sum_q, work.scale), weight)
    if state is not None and not problem.formula.finish_is_linear:
        grad_out = weighted(state.d_loss * scale, weight)
    chunk.write(work, state, grad_out, None if weight is None else weight == 0, upstream)


def _finish(work: Rows, found: Found) -> None:
    """Of all rows: losses, their sum, and states."""
    loss, state = finish(work.problem, found.stats, found.sums)
    if found.expected:
        loss = auxiliary.losses(work.problem, loss, state.input_lse, work.labels, *found.expected)
    loss = weighted(loss, work.row_weight)
    if work.figures is not None and work.row_weight is not None:
        work.figures.masked_fill_(work.row_weight == 0, 0)  # not read
    if work.loss is not None:
        work.loss.copy_(loss)
    _keep(work.found, state)
    if work.total is not None:
        work.total.copy_(loss.sum() * work.scale)


def _keep(found: Tensor | None, numbers: Sequence[Tensor]) -> None:
    if found is not None:
        found[:] = torch.stack([number.to(found.dtype) for number in numbers[: found.size(0)]])


def _chunk(x: Tensor) -> int:
    return CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK * min(x.itemsize, 4)


def _parts(count: int, step: int, start: int = 0) -> Iterator[slice]:
    return (slice(first, min(first + step, count)) for first in range(start, count, step))


class Chunk:
    """A few rows; of longer ones a piece at a time."""

    def __init__(self, problem: Problem, x: Tensor, y: Tensor, is_whole: bool, **of_whole: bool) -> None:
        """`of_whole`: what a `Piece` of whole rows is told."""
        self.problem, self.x, self.y = problem, x, y
        self.slices = list(_parts(x.size(1), max(1, _chunk(x) // max(1, x.size(0))))) or [slice(0, 0)]
        self.whole = Piece(problem, x, y, is_whole, **of_whole) if len(self.slices) == 1 else None

    def pieces(self) -> Iterator[Piece]:
        """Made anew for each pass, so that one of a long row is in memory at a time."""
        if self.whole is not None:
            yield self.whole
        else:
            for part in self.slices:
                yield Piece(self.problem, self.x[:, part], self.y[:, part], is_whole=False)

    def statistics(self, with_moments: bool) -> RowStats:
        return merge_stats(self.problem, [piece.statistics(with_moments) for piece in self.pieces()])

    def accumulate(self, stats: RowStats) -> RowSums:
        return merge_sums([piece.accumulate(stats)[1] for piece in self.pieces()])

    def sums(self) -> tuple[RowStats, RowSums]:
        """Of the whole rows. Pieces of a kind that has moments need no second pass; a row in one has one anyway."""
        if self.whole is not None:
            return self.whole.accumulate(self.statistics(with_moments=False))
        stats = self.statistics(self.problem.has_moments)
        return stats, sums_of(stats) if self.problem.has_moments else self.accumulate(stats)

    def lse(self, found: Tensor) -> Tensor:
        """The input's, which is -inf where all logits are: their softmax is no number."""
        is_none = found.isnan()
        if found.device.type == "cpu" and not is_none.any():
            return found
        return torch.where(is_none & (self.x.amax(-1) == -math.inf), -math.inf, found)

    def entropy(self, lse: Tensor) -> Tensor:
        """Of the input, whose log-sum-exp is known."""
        dtype = compute_dtype(self.x, self.y)
        parts = (entropy_parts(self.problem, self.x[:, part], lse, dtype) for part in self.slices)
        return entropy_of(sum(parts, lse.new_zeros((2, lse.size(0)))))

    def expected(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of each row the logit of its label, and the mean of its logits where labels are smoothed."""
        nothing = self.x.new_zeros(self.x.size(0), dtype=accumulator(self.x))
        dtype = compute_dtype(self.x, self.y)
        logit = nothing if labels is None else auxiliary.label_logits(self.problem.input, self.x, labels, dtype)
        if not self.problem.weights.smoothing:
            return logit, nothing
        side = self.problem.input
        sums = (capped(self.x[:, part].to(nothing.dtype), side.softcap).sum(-1) for part in self.slices)
        scale = inverse_temperature(side, dtype == torch.float64)
        return logit, sum(sums, nothing) * (scale / max(1, self.x.size(1)))

    def write(
        self,
        work: Rows,
        state: RowState | None,
        grad_out: Tensor | float,
        skipped: Tensor | None,
        upstream: Tensor | None,
    ) -> None:
        """Fill these rows of the wanted gradients; one that is `skipped` gets zeros, whatever it holds.

        `upstream`: of the losses of rows that are more than divergences.
        """
        labels, tokens = work.labels, self.x.size(1)
        for piece, part in zip(self.pieces(), self.slices, strict=True):
            outputs = [None if d is None else d[:, part] for d in (work.d_input, work.d_target)]
            marks = None
            if upstream is not None and self.problem.weights.label:
                width = part.stop - part.start
                marks = auxiliary.marks(self.problem, labels, upstream, tokens, part.start, width)
            piece.write(outputs, state, grad_out, skipped, marks)
