"""Driver: many figures of each row. For evaluation: nothing is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import backends
from kullback.dtypes import accumulator, compute_dtype, kept_dtype
from kullback.problem import IGNORED, Problem, Side, capped, inverse_temperature
from kullback.work import NUMBERS, TOKENS, Describe

CHUNK = 1 << 26  # elements of a copy


class RowStatistics(NamedTuple):
    """Figures of rows, `input.shape[:-1]` each, in nats; what needs a target or labels is None without.

    Those that are no tokens, ranks or answers are float32, or float64 where an input is.

    Attributes:
        kl: Σ p log(p/q), p of the target and q of the input.
        reverse_kl: Σ q log(q/p).
        jensen_shannon: with a beta of ½.
        total_variation: ½ Σ abs(p - q).
        entropy: -Σ q log q, of the input.
        target_entropy: -Σ p log p.
        cross_entropy: -Σ p log q.
        lse: log-sum-exp of the input's logits as they count, over the temperature.
        target_lse: the same of the target's.
        top_token: int64, the input's likeliest token; of equals the first.
        target_top_token: the same of the target.
        agreement: bool, whether these are the same.
        target_top_probability: what the target gives its own.
        label_log_prob: log q of the label; NaN in a row without one.
        target_label_log_prob: log p of the label, likewise.
        label_rank: int64, how many tokens have more mass than the label in the input; -1 in a row without one, and in
            one that holds NaN.
        target_label_rank: the same in the target.
    """

    kl: Tensor | None
    reverse_kl: Tensor | None
    jensen_shannon: Tensor | None
    total_variation: Tensor | None
    entropy: Tensor
    target_entropy: Tensor | None
    cross_entropy: Tensor | None
    lse: Tensor
    target_lse: Tensor | None
    top_token: Tensor
    target_top_token: Tensor | None
    agreement: Tensor | None
    target_top_probability: Tensor | None
    label_log_prob: Tensor | None
    target_label_log_prob: Tensor | None
    label_rank: Tensor | None
    target_label_rank: Tensor | None


class TopKRowStatistics(NamedTuple):
    """Figures of rows beside a teacher that is known at k of their tokens, `input.shape[:-1]` each, in nats.

    Those that are no tokens, ranks or answers are float32, or float64 where an input is.

    Attributes:
        kl: Σ p log(p/q), with the tail as it was asked for.
        reverse_kl: Σ q log(q/p), likewise.
        mass: the input's at the teacher's tokens.
        target_mass: the sum of the teacher's entries as they are.
        overlap: which share of the teacher's tokens are among as many first ones of the input, where equal ones all
            are; NaN without any, and in a row that holds NaN.
        entropy: -Σ q log q of the whole input.
        lse: log-sum-exp of the input's logits as they count, over the temperature.
        top_token: int64, the input's likeliest token.
        agreement: bool, whether it is the likeliest of the teacher's.
        label_log_prob: log q of the label; NaN in a row without one; None without labels.
        label_rank: int64, how many tokens have more mass than the label; -1 in a row without one, and in one that holds
            NaN; None without labels.
    """

    kl: Tensor
    reverse_kl: Tensor
    mass: Tensor
    target_mass: Tensor
    overlap: Tensor
    entropy: Tensor
    lse: Tensor
    top_token: Tensor
    agreement: Tensor
    label_log_prob: Tensor | None
    label_rank: Tensor | None


def overlap(input: Tensor, ids: Tensor) -> Tensor:
    """Which share of the ids, [..., k] and distinct or -1, are among as many of the row's largest elements.

    One is if fewer elements are larger: equal ones all are, whichever a sort would choose.
    """
    count = (ids >= 0).sum(-1, keepdim=True)
    first = input.topk(min(ids.size(-1), input.size(-1))).values
    least = first.gather(-1, (count - 1).clamp(0, first.size(-1) - 1))
    are_among = (input.gather(-1, ids.clamp(min=0)) >= least) & (ids >= 0)
    return are_among.sum(-1).to(kept_dtype(input.dtype)) / count.squeeze(-1)


def of_rows(
    problem: Problem,
    values_of: Callable[[slice], Sequence[Tensor]],
    shape: torch.Size,
    tokens: int,
    labels: Tensor | None,
    has_target: bool,
    copies: bool,
) -> RowStatistics:
    """Of rows of that shape. `values_of` gives some rows of the input first and of the target last, in their forms.

    `copies`: whether that takes memory, so that it is done a chunk at a time.
    """
    given = None if labels is None else labels.reshape(-1)
    forms = [side.form for side in problem.sides]
    own, other = (side._replace(form="logits") for side in problem.sides)
    problem = dataclasses.replace(problem, input=own, target=other)
    parts = []
    count = shape.numel()
    for rows in _chunks(count, max(1, CHUNK // tokens) if copies else max(1, count)):
        values, ids = as_one(values_of(rows)), None if given is None else given[rows]
        sides = [as_logits(of_side, form) for of_side, form in zip(values, forms, strict=False)]
        parts.append(_of_chunk(problem, sides[0], sides[-1] if has_target else None, ids))
    return _joined(parts, shape)


def _of_chunk(problem: Problem, x: Tensor, y: Tensor | None, labels: Tensor | None) -> RowStatistics:
    """Of rows [rows, vocab] of logits."""
    names = (NUMBERS[:2], TOKENS[:2]) if y is None else (NUMBERS, TOKENS)
    dtypes = (accumulator(x), torch.int64)
    written = [x.new_empty((len(n), x.size(0)), dtype=dtype) for n, dtype in zip(names, dtypes, strict=True)]
    if x.size(0):
        backends.run(Describe(problem, x, y, labels, *written))
    found = {name: row for of, rows in zip(names, written, strict=True) for name, row in zip(of, rows, strict=True)}
    sides = [("", problem.input, x)]
    if y is not None:
        sides.append(("target_", problem.target, y))
        found["cross_entropy"] = found["target_entropy"] + found["kl"]
        are_numbers = ~(found["entropy"] + found["target_entropy"]).isnan()  # of -inf alone it is none
        found["agreement"] = are_numbers & (found["top_token"] == found["target_top_token"])
        top = found["target_top_token"]
        found["target_top_probability"] = _log_probs(problem.target, y, found["target_lse"], top).exp()
    if labels is not None:
        counts = labels != IGNORED
        for name, side, logits in sides:
            lse, rank, entropy = (found[f"{name}{each}"] for each in ("lse", "label_rank", "entropy"))
            log_prob = _log_probs(side, logits, lse, torch.where(counts, labels, 0))
            found[f"{name}label_log_prob"] = torch.where(counts, log_prob, torch.nan)
            found[f"{name}label_rank"] = torch.where(counts & ~entropy.isnan(), rank, -1)
    else:
        found = {name: numbers for name, numbers in found.items() if not name.endswith("rank")}
    dtype = compute_dtype(x, x if y is None else y)
    numbers = map(found.get, RowStatistics._fields)
    return RowStatistics(*(n.to(dtype) if n is not None and n.is_floating_point() else n for n in numbers))  # type: ignore[arg-type]


def _log_probs(side: Side, logits: Tensor, lse: Tensor, tokens: Tensor) -> Tensor:
    """Of a token of each row, whose log-sum-exp is known. No more than 0: a cap may be an ulp of the kernel's off."""
    own = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    own = capped(own.to(compute_dtype(own, own)), side.softcap)
    return (own.to(lse.dtype) * inverse_temperature(side, logits.dtype == torch.float64) - lse).clamp_(max=0)


def as_one(sides: Sequence[Tensor]) -> Sequence[Tensor]:
    """All in float64 if one is, as their log-sum-exps are."""
    return [side.double() for side in sides] if any(side.dtype == torch.float64 for side in sides) else sides


def as_logits(values: Tensor, form: str) -> Tensor:
    """Whose softmax is the row, normalised. No logarithm is rounded to 16 bits."""
    return values.to(kept_dtype(values.dtype)).log() if form == "probs" else values


def _chunks(rows: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, max(rows, 1), step))  # of no rows one chunk


def _joined(parts: list[RowStatistics], shape: torch.Size) -> RowStatistics:
    """Of all rows, in their shape."""
    fields = (
        None if numbers[0] is None else torch.cat([n for n in numbers if n is not None]).view(shape)
        for numbers in zip(*parts, strict=True)
    )
    return RowStatistics(*fields)  # type: ignore[arg-type]
