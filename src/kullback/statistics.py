"""Driver: many figures of each row. For evaluation: nothing is differentiated.

Rows are taken a chunk at a time, which a CPU's cache holds. Divergences, entropies and log-sum-exps are the backends';
the rest is torch's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import backends
from kullback.backends import pytorch
from kullback.backends.pytorch.piece import capped, compute_dtype, inverse_temperature
from kullback.divergences import DIVERGENCES
from kullback.problem import IGNORED, Problem, Side, accumulator
from kullback.work import Operands, Rows

KINDS = ("jensen_shannon", "total_variation")


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


class TopKRowStatistics(NamedTuple):
    """Figures of rows beside a teacher that is known at k of their tokens, `input.shape[:-1]` each, in nats."""

    kl: Tensor  # with the tail as it was asked for
    reverse_kl: Tensor
    mass: Tensor  # of the input at the teacher's tokens
    target_mass: Tensor  # of the teacher's entries as they are
    overlap: Tensor  # which share of the teacher's tokens are among as many first ones of the input; NaN without any
    entropy: Tensor  # of the input
    lse: Tensor
    top_token: Tensor  # int64
    agreement: Tensor  # bool: whether it is the first of the teacher's
    label_log_prob: Tensor | None
    label_rank: Tensor | None


def overlap(input: Tensor, ids: Tensor) -> Tensor:
    """Which share of the ids, [..., k] and distinct or -1, are among as many of the row's largest elements."""
    count = (ids >= 0).sum(-1)
    places = torch.arange(ids.size(-1), device=ids.device)
    own = input.topk(min(ids.size(-1), input.size(-1))).indices
    own = torch.where(places[: own.size(-1)] < count.unsqueeze(-1), own, -2).sort(-1).values
    found = torch.searchsorted(own, ids.contiguous()).clamp(max=own.size(-1) - 1)
    return (own.gather(-1, found) == ids).sum(-1) / count


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
    """Of rows [rows, vocab] of logits. The two directions of kl find what is said of one side on their way."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    kl = _of_kind(problem, "kl")
    own, other = kl.sides
    divergence, (lse, entropy) = _run(kl, x, y, with_figures=True)
    found = {"entropy": entropy, "lse": lse} | _of_tokens("", own, x, lse, labels)
    if has_target:
        swapped, (target_lse, target_entropy) = _run(dataclasses.replace(kl, input=other, target=own), y, x, True)
        found |= {"kl": divergence, "reverse_kl": swapped, "target_entropy": target_entropy, "target_lse": target_lse}
        found |= {kind: _run(_of_kind(problem, kind), x, y, with_figures=False)[0] for kind in KINDS}
        found["cross_entropy"] = target_entropy + divergence
        found |= _of_tokens("target_", other, y, target_lse, labels)
        are_numbers = ~(lse + target_lse).isnan()
        found["agreement"] = are_numbers & (found["top_token"] == found["target_top_token"])
        top = _capped(y.gather(-1, found["target_top_token"].unsqueeze(-1)).squeeze(-1), other)
        found["target_top_probability"] = (_scaled(top, other, target_lse) - target_lse).exp()
    numbers = map(found.get, RowStatistics._fields)
    return RowStatistics(*(n.to(dtype) if n is not None and n.is_floating_point() else n for n in numbers))  # type: ignore[arg-type]


def _run(problem: Problem, x: Tensor, y: Tensor, with_figures: bool) -> tuple[Tensor, Tensor]:
    """The divergences of rows, and figures of the input."""
    loss, figures = (x.new_zeros(shape, dtype=accumulator(x)) for shape in (x.shape[:1], (2, x.size(0))))
    backends.run(Rows(problem, Operands(x, y), loss=loss, figures=figures if with_figures else None))
    return loss, figures


def _of_kind(problem: Problem, kind: str) -> Problem:
    """Of rows that `as_logits` has made logits."""
    parameter = next(iter(DIVERGENCES[kind].defaults.values()), 0.0)
    input, target = (side._replace(form="logits") for side in problem.sides)
    return dataclasses.replace(problem, kind=kind, parameter=parameter, input=input, target=target)


def _of_tokens(name: str, side: Side, logits: Tensor, lse: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """One side's first token, and what its label is to it."""
    values = _capped(logits, side)  # ranks by logits: masses underflow
    found = {f"{name}top_token": values.argmax(-1)}
    if labels is not None:
        counts = labels != IGNORED
        own = values.gather(-1, torch.where(counts, labels, 0).unsqueeze(-1))
        rank = (values > own).sum(-1)
        log_prob = _scaled(own.squeeze(-1), side, lse) - lse
        found[f"{name}label_log_prob"] = torch.where(counts, log_prob, torch.nan)
        found[f"{name}label_rank"] = torch.where(counts & ~lse.isnan(), rank, -1)
    return found


def _capped(logits: Tensor, side: Side) -> Tensor:
    return capped(logits.to(compute_dtype(logits, logits)), side.softcap) if side.softcap else logits


def _scaled(logits: Tensor, side: Side, lse: Tensor) -> Tensor:
    """Over the temperature, as log-sum-exps have it."""
    return logits.to(lse.dtype) * inverse_temperature(side, logits.dtype == torch.float64)


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
