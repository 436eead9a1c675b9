"""Driver: many figures of each row. For evaluation: nothing is differentiated.

Rows are taken a chunk at a time, which a CPU's cache holds. Divergences are the backends'; the rest is torch's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import backends
from kullback.backends import pytorch
from kullback.backends.pytorch.piece import Piece
from kullback.divergences import DIVERGENCES
from kullback.problem import IGNORED, Problem
from kullback.work import Operands, Rows

KINDS = ("kl", "reverse_kl", "jensen_shannon", "total_variation")


class RowStatistics(NamedTuple):
    """Figures of rows, `input.shape[:-1]` each, in nats; what needs a target or labels is None without."""

    kl: Tensor | None
    reverse_kl: Tensor | None
    jensen_shannon: Tensor | None  # beta = ½
    total_variation: Tensor | None
    entropy: Tensor  # of the input
    target_entropy: Tensor | None
    cross_entropy: Tensor | None  # -Σ p log q
    lse: Tensor  # log-sum-exp of the input's logits, over the temperature
    target_lse: Tensor | None
    top_token: Tensor  # int64, the first of equals
    target_top_token: Tensor | None
    agreement: Tensor | None  # bool: whether these are the same
    target_top_probability: Tensor | None
    label_log_prob: Tensor | None  # log q of the label; NaN in a row without one, and so below
    target_label_log_prob: Tensor | None
    label_rank: Tensor | None  # int64, how many tokens have more mass than the label; -1 in a row without one
    target_label_rank: Tensor | None


def of_rows(
    problem: Problem,
    logits_of: Callable[[slice], Sequence[Tensor]],
    shape: torch.Size,
    tokens: int,
    device: torch.device,
    labels: Tensor | None,
    has_target: bool,
) -> RowStatistics:
    """Of rows of that shape. `logits_of` gives some rows' logits, of the input first and of the target last."""
    given = None if labels is None else labels.reshape(-1)
    parts = []
    for rows in _chunks(shape.numel(), tokens, device):
        sides, own = logits_of(rows), None if given is None else given[rows]
        parts.append(_of_chunk(problem, sides[0], sides[-1], own, has_target))
    return _joined(parts, shape)


def _of_chunk(problem: Problem, x: Tensor, y: Tensor, labels: Tensor | None, has_target: bool) -> RowStatistics:
    """Of rows [rows, vocab] of logits."""
    piece = Piece(_of_kind(problem, "kl"), x, y, is_whole=True)
    stats = piece.statistics(with_moments=False)
    q, p, values, scales = piece.elements["q"], piece.elements["p"], piece.values, piece.elements.scales
    found = {"entropy": torch.special.entr(q).sum(-1), "lse": stats.input_lse, "top_token": values["input"].argmax(-1)}
    if labels is not None:
        found |= _of_labels("", values["input"], scales["input"], stats.input_lse, labels)
    if has_target:
        for kind in KINDS:
            found[kind] = q.new_empty(q.size(0))
            backends.run(Rows(_of_kind(problem, kind), Operands(x, y), loss=found[kind]))
        found["target_entropy"] = torch.special.entr(p).sum(-1)
        found["cross_entropy"] = found["target_entropy"] + found["kl"]
        found["target_lse"] = stats.target_lse
        found["target_top_token"] = values["target"].argmax(-1)
        are_numbers = ~(stats.input_lse + stats.target_lse).isnan()
        found["agreement"] = are_numbers & (found["top_token"] == found["target_top_token"])
        found["target_top_probability"] = p.amax(-1)
        if labels is not None:
            found |= _of_labels("target_", values["target"], scales["target"], stats.target_lse, labels)
    numbers = map(found.get, RowStatistics._fields)
    return RowStatistics(*(n.to(q.dtype) if n is not None and n.is_floating_point() else n for n in numbers))  # type: ignore[arg-type]


def _of_kind(problem: Problem, kind: str) -> Problem:
    """Of rows that `as_logits` has made logits."""
    parameter = next(iter(DIVERGENCES[kind].defaults.values()), 0.0)
    input, target = (side._replace(form="logits") for side in problem.sides)
    return dataclasses.replace(problem, kind=kind, parameter=parameter, input=input, target=target)


def _of_labels(side: str, logits: Tensor, scale: float, lse: Tensor, labels: Tensor) -> dict[str, Tensor]:
    counts = labels != IGNORED
    column = torch.where(counts, labels, 0).unsqueeze(-1)
    own = logits.gather(-1, column)
    rank = (logits > own).sum(-1)  # by logits: masses underflow
    own = own.squeeze(-1).to(lse.dtype)
    return {
        f"{side}label_log_prob": torch.where(counts, own * scale - lse, torch.nan),
        f"{side}label_rank": torch.where(counts & ~lse.isnan(), rank, -1),
    }


def as_logits(values: Tensor, form: str) -> Tensor:
    """Whose softmax is the row, normalised."""
    return values.log() if form == "probs" else values


def _chunks(rows: int, vocab: int, device: torch.device) -> Iterator[slice]:
    """Of as many rows as the torch backend takes at once."""
    elements = pytorch.CPU_CHUNK if device.type == "cpu" else pytorch.DEVICE_CHUNK
    step = max(1, elements // max(1, vocab))
    return (slice(start, start + step) for start in range(0, max(rows, 1), step))  # of no rows one chunk


def _joined(parts: list[RowStatistics], shape: torch.Size) -> RowStatistics:
    """Of all rows, in their shape."""
    fields = (
        None if numbers[0] is None else torch.cat([n for n in numbers if n is not None]).view(shape)
        for numbers in zip(*parts, strict=True)
    )
    return RowStatistics(*fields)  # type: ignore[arg-type]
