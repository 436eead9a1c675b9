"""Driver: rows whose tokens lie on several ranks, each of which has a slice of every row.

    statistics(slice)          all-gather   merge_stats
    accumulate(slice, stats)   all-gather   merge_sums     of a kind without moments
    finish, gradient(slice, state)

Ranks send each other packed numbers of rows. Every one merges all of them in rank order, or kernels do by one butterfly
(ranks.cuh). So the loss is the same to the bit everywhere, whichever arrived first. A gradient needs nothing from
others once the row's state is known.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from kullback import backends
from kullback.collectives import all_gather, check, is_checking, resolved
from kullback.dtypes import compute_dtype, kept_dtype
from kullback.entropy import entropy_of, entropy_parts
from kullback.forms import FORMS
from kullback.labels import in_slice, label_logits, losses
from kullback.outcomes import drop_rounding, reference, sum_of
from kullback.problem import WHOLE, Problem, Shard
from kullback.state import (
    RowState,
    RowStats,
    RowSums,
    fields,
    finish,
    merge_stats,
    merge_sums,
    packed,
    state_fields,
    sums_of,
    unpacked,
)
from kullback.symmetric import PacketBuffer, packet_buffer_of
from kullback.work import Gather, Rows, Scatter, as_rows, row_vector, weighted


def shard(group: dist.ProcessGroup) -> Shard:
    """Of rows that a group shares."""
    return Shard(group.group_name)


def slice_of(
    group: dist.ProcessGroup | None, width: int, first_token: int | None, total_vocab: int | None
) -> tuple[Shard, int]:
    """As `shard`, with which tokens are here, and how many all ranks have together.

    What is not said the ranks tell each other, and the host waits for it.
    """
    if group is None:
        return WHOLE, width
    if is_checking():
        check(group, f"slices whose first_token is {'not ' if first_token is None else ''}given")
    if first_token is not None and total_vocab is not None:
        return Shard(group.group_name, first_token, -(-total_vocab // group.size())), total_vocab
    if torch.compiler.is_compiling():
        raise ValueError("first_token and total_vocab must be given in compiled code, which cannot ask other ranks")
    widths: list[Any] = [None] * group.size()
    dist.all_gather_object(widths, width, group=group)
    return Shard(group.group_name, sum(widths[: group.rank()]), max(widths)), sum(widths)


def run(work: Rows | Gather | Scatter) -> None:
    """Do the work on rows as they are, or, where ranks share them, together with the other ranks."""
    if not work.problem.shard.group:
        backends.run(work)
    elif isinstance(work, Rows):
        _rows(work)
    elif isinstance(work, Gather):
        _gather(work)
    else:
        _scatter(work)


def _rows(work: Rows) -> None:
    rows, buffer = math.prod(work.input.shape[:-1]), packet_buffer_of(resolved(work.problem.shard.group))
    if buffer is not None and work.verb == "loss" and 0 < rows <= buffer.peers.rows and backends.asks_peers(work):
        _in_one_launch(work, rows, buffer)
        return
    problem, known = work.problem, work.known
    if work.verb == "loss" or (known is None and state_fields(problem)):
        loss, state = _whole_rows(work)
        if work.figures is not None:
            x = problem.narrow(as_rows(work.input))
            parts = entropy_parts(problem, x, state.input_lse, compute_dtype(work.input, work.target))
            work.figures[0] = state.input_lse
            work.figures[1] = entropy_of(all_gather(parts, resolved(problem.shard.group)).sum(0))
            if work.row_weight is not None:
                work.figures.masked_fill_(row_vector(work.row_weight, loss.size(0)) == 0, 0.0)
        known = _pack(problem, state) if state_fields(problem) else None
        if work.row_weight is not None:
            loss = weighted(loss, row_vector(work.row_weight, loss.size(0)).to(loss.dtype))
        if work.loss is not None:
            work.loss.copy_(loss)
        if work.total is not None:
            work.total.copy_(loss.sum() * work.scale)
        if work.found is not None and known is not None:
            work.found.copy_(known)
    if any(work.wants):
        own = work.operands._replace(labels=_own_labels(work))
        gradient = work._replace(verb="gradient", operands=own, known=known)
        backends.run(gradient._replace(found=None, loss=None, total=None, figures=None))


def _in_one_launch(work: Rows, rows: int, buffer: PacketBuffer) -> None:
    """By a kernel that asks other ranks. A rank whose part it cannot take raises: others may be waiting in theirs."""
    parts = work.split()
    device, own = buffer.launches.device, work.input.device
    reason: str | None
    if device != own:
        reason = f"input is on {own}, and the group was enabled on {device}"
    elif len(parts) > 1:
        reason = "batch dimensions must have one stride"
    else:
        reason = backends.why_not_with_peers(parts[0])
    _check_work(work, rows, reason or "in one launch")
    if reason:
        raise ValueError(f"a slice is not what enable_symmetric_memory asks for: {reason}")
    loss = work.input.new_empty(rows, dtype=torch.float64)
    buffer.launches.add_(1)
    backends.run(parts[0]._replace(loss=loss, total=None, peers=buffer.peers), only="cuda")
    # Each rank adds losses in the same order, however many blocks it has.
    if work.loss is not None:
        work.loss.copy_(loss)
    if work.total is not None:
        work.total.copy_(loss.sum() * work.scale)


def _whole_rows(work: Rows) -> tuple[Tensor, RowState]:
    """Each row's loss, and what the gradient of a slice needs."""
    problem, operands, group = work.problem, work.operands, resolved(work.problem.shard.group)
    rows = math.prod(operands.input.shape[:-1])
    _check_work(work, rows)
    stats = packed(rows, len(fields(RowStats, problem.formula.has_tilted_lse)), operands.input)
    logit = stats.new_zeros(rows)
    if problem.has_logits:
        backends.run(Rows(problem, operands, "statistics", found=stats))
        labels = _own_labels(work)
        if labels is not None:
            dtype = compute_dtype(operands.input, operands.target)
            logit = label_logits(problem.input, problem.narrow(as_rows(operands.input)), labels, dtype)
        known = all_gather(torch.cat([stats, logit.unsqueeze(0)]) if problem.has_auxiliary else stats, group)
        merged = merge_stats(problem, [unpacked(RowStats, piece[: len(stats)]) for piece in known])
        stats = _pack(problem, merged)
        if problem.has_auxiliary:
            logit = known[:, -1].sum(0)
    else:
        merged = unpacked(RowStats, stats.zero_())
    if problem.has_moments:
        loss, state = finish(problem, merged, sums_of(merged))
    else:
        sums = packed(rows, len(RowSums._fields), operands.input)
        backends.run(Rows(problem, operands, "accumulate", known=stats, found=sums))
        loss, state = finish(problem, merged, merge_sums([RowSums(*piece) for piece in all_gather(sums, group)]))
    if problem.has_auxiliary:
        labels = None if operands.labels is None else row_vector(operands.labels, rows)
        loss = losses(problem, loss, merged.input_lse, labels, logit, torch.zeros_like(logit))
    return loss, state


def _own_labels(work: Rows) -> Tensor | None:
    """Where they stand in this rank's slice."""
    x, labels = work.input, work.labels
    if labels is None:
        return None
    width = work.problem.vocab or x.size(-1)
    return in_slice(row_vector(labels, math.prod(x.shape[:-1])), work.problem.shard.first_token, width)


def _pack(problem: Problem, record: RowStats | RowState) -> Tensor:
    return torch.stack(record[: len(fields(type(record), problem.formula.has_tilted_lse))])


def _gather(work: Gather) -> None:
    """Each id's logit is on one rank; of the tail each has a part. Ranks send what they have of the k + 1."""
    problem, x, k = work.problem, work.input, work.ids.size(1)
    group = resolved(problem.shard.group)
    _check_work(work, x.size(0))
    form = problem.input.form
    ids = in_slice(work.ids, problem.shard.first_token, work.input.size(1))
    own = x.new_full((x.size(0), work.gathered.size(1) + 1), FORMS[form].nothing, dtype=kept_dtype(x.dtype))
    own[:, -1] = _reference(problem, x, ids)
    if x.size(1):
        found = torch.empty_like(own[:, :-1], memory_format=torch.contiguous_format)
        backends.run(Gather(problem, x, ids, found))
        own[:, :-1] = found
    parts = all_gather(own, group).to(work.gathered.dtype)
    values = parts[..., :-1] + parts[..., -1:] / problem.input.temperature
    work.gathered[:, :k] = values[..., :k].amax(0)
    if work.others:
        work.gathered[:, k] = sum_of(values[..., k], form, 0)
    drop_rounding(work)


def _scatter(work: Scatter) -> None:
    problem, x = work.problem, work.input
    if not x.size(1):
        return
    ids, gathered = in_slice(work.ids, problem.shard.first_token, x.size(1)), work.gathered
    reference = _reference(problem, x, ids).to(gathered.dtype).unsqueeze(1) / problem.input.temperature
    gathered, d_gathered = (t.to(kept_dtype(x.dtype)) for t in (gathered - reference, work.d_gathered))
    backends.run(work._replace(ids=ids, gathered=gathered, d_gathered=d_gathered))


def _reference(problem: Problem, x: Tensor, ids: Tensor) -> Tensor:
    """[rows]: what backends take from a row's logits, the largest at its ids (`Gather`); 0 where they take nothing."""
    if problem.input.form != "logits" or problem.input.softcap or not x.size(1):
        return x.new_zeros(x.size(0))
    return reference(x, ids).squeeze(1)


def exchanges_in_kernels(group: str) -> bool:
    """Whether kernels of these ranks wait for each other, beside which no collective may run."""
    return bool(group) and packet_buffer_of(resolved(group)) is not None


def _check_work(work: Rows | Gather, rows: int, how: str = "by collectives") -> None:
    if not is_checking():
        return
    tensors = {name: tensor for name, tensor in work._asdict().items() if isinstance(tensor, Tensor)}
    if isinstance(work, Rows):
        tensors |= {name: tensor for name, tensor in work.operands._asdict().items() if tensor is not None}
    count = f"{rows} rows"
    if isinstance(work, Gather):
        count += f" of {work.ids.size(1)} entries and {work.others} more"
    shared = dataclasses.replace(work.problem, vocab=0, shard=work.problem.shard._replace(first_token=0))
    dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    check(resolved(work.problem.shard.group), f"{shared}, {count}, {how}, {dtypes}")
