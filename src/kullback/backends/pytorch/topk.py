"""A top-k teacher in torch: its entries, differentiable and in any transform; and what a row is at its ids."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kullback.dtypes import accumulator, kept_dtype
from kullback.forms import FORMS
from kullback.outcomes import (
    IDS,
    drop_rounding,
    log_or_nothing,
    logs_of,
    no_token,
    one_outcome,
    reference,
    sum_of,
)
from kullback.problem import Problem, capped, softcap_grad
from kullback.tracing import in_functorch
from kullback.work import Entries, Gather, Scatter, TopK

CHUNK = 1 << 18  # elements whose temporaries fit the cache of a CPU


def write_entries(work: Entries) -> None:
    ids, target = entries(work.problem, work.values, work.indices, work.skipped, work.of)
    work.ids.copy_(ids)
    work.target.copy_(target)


def entries(
    problem: Problem, values: Tensor, indices: Tensor, skipped: Tensor | None, of: TopK
) -> tuple[Tensor, Tensor]:
    """Ids that are distinct, or -1, and the target there and, but for a renormalised one, in the tail.

    Entries of one id are summed, those of id -1 left out. `skipped` are rows that do not count, whatever their entries.
    """
    temperature = problem.target.temperature
    indices = _checked(indices, of.vocab, skipped)
    absent = indices < 0
    ids, first = _distinct(indices)
    values = torch.where(absent, 1.0, values.to(kept_dtype(values.dtype)))
    log_p = logs_of(values, of.form)
    log_p = _sum_of_equal(torch.where(absent, -math.inf, log_p), first)
    log_p = torch.where(ids < 0, -math.inf, log_p)
    known = log_p / temperature
    if of.tail == "renormalize":
        return ids, one_outcome(known, ids)
    if of.form == "logits":  # nothing is known of the others
        nothing = (ids < 0).all(-1, keepdim=True)
        known = torch.where(nothing, -math.inf, torch.where(nothing, 0.0, known).log_softmax(-1))
        return ids, torch.cat([known, torch.full_like(known[..., :1], -math.inf)], -1)
    tail = _log_tail(log_p, of.vocab - (ids >= 0).sum(-1, keepdim=True), temperature)
    target = torch.cat([known, tail], -1)
    if of.normalises(temperature):
        target = target.log_softmax(-1)
    if of.tail == "zero":
        target = torch.cat([target[..., :-1], torch.full_like(tail, -math.inf)], -1)
    return ids, target


def gather(work: Gather) -> None:
    for rows in _chunks(work.input):
        work.gathered[rows] = gathered(work.problem, work.input[rows], work.ids[rows], work.others)
    drop_rounding(work)


def gathered(problem: Problem, x: Tensor, ids: Tensor, others: int) -> Tensor:
    """[rows, k + others]: what rows are at their ids; what all others have together; and the mean of all."""
    form, values = problem.input.form, _tempered(problem, _counted(problem, x, ids))
    nothing = FORMS[form].nothing
    at_ids = torch.where(ids < 0, nothing, values.gather(-1, ids.clamp(min=0)))
    if not others:
        return at_ids
    rest = torch.where(_marked(ids, values.size(-1)), nothing, values)
    columns = [at_ids, sum_of(rest, form, -1).unsqueeze(-1)]
    if others > 1:
        total = values.sum(-1, keepdim=True, dtype=accumulator(values))
        columns.append((total / values.size(-1)).to(values.dtype))
    return torch.cat(columns, -1)


def scatter(work: Scatter) -> None:
    for rows in _chunks(work.input):
        others = work.gathered[rows, work.ids.size(1) :]
        work.d_input[rows] = scattered(work.problem, work.input[rows], work.ids[rows], others, work.d_gathered[rows])


def scattered(problem: Problem, x: Tensor, ids: Tensor, others: Tensor, d_gathered: Tensor) -> Tensor:
    """The gradient in rows, from that in what was gathered of them, of which `others` are not at ids."""
    side, vocab = problem.input, x.size(-1)
    counted = _counted(problem, x, ids)
    values = _tempered(problem, counted)
    gradient = torch.zeros_like(values)
    at_ids, d_tail, d_mean = d_gathered.tensor_split([ids.size(-1), ids.size(-1) + 1], -1)
    if others.size(-1):
        tail = others[..., :1]
        shares: Tensor | float = (
            1.0 if side.form == "probs" else torch.exp(values - torch.where(tail == -math.inf, 0.0, tail))
        )
        gradient = _passed_on(d_tail, shares).expand_as(values)
    # A last column takes what belongs to no token.
    columns = torch.where(ids < 0, vocab, ids)
    gradient = torch.nn.functional.pad(gradient, (0, 1)).scatter(-1, columns, at_ids)[..., :vocab]
    if d_mean.size(-1):
        gradient = gradient + d_mean / vocab
    if side.form != "logits":
        return gradient
    return _passed_on(gradient, softcap_grad(counted, side.softcap) / side.temperature)


def _passed_on(upstream: Tensor, factor: Tensor | float) -> Tensor:
    """Their product, 0 where the upstream gradient is 0 and the factor is no finite number."""
    if not isinstance(factor, Tensor):
        return upstream * factor
    return torch.where((upstream == 0) & ~factor.isfinite(), 0.0, upstream * factor)


def scattered_again(
    problem: Problem, x: Tensor, ids: Tensor, d_gathered: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `scattered` in the rows, which the tail is of too, and in `d_gathered`."""
    k = ids.size(-1)

    def formula(x: Tensor, d_gathered: Tensor) -> Tensor:
        others = gathered(problem, x, ids, d_gathered.size(-1) - k)[..., k:]
        return scattered(problem, x, ids, others, d_gathered)

    return torch.func.vjp(formula, x, d_gathered)[1](upstream)  # type: ignore[no-any-return]


def _chunks(x: Tensor) -> Iterator[slice]:
    step = max(1, (CHUNK if x.device.type == "cpu" else CHUNK << 6) // max(1, x.size(1)))
    return (slice(start, start + step) for start in range(0, x.size(0), step))


def _counted(problem: Problem, x: Tensor, ids: Tensor) -> Tensor:
    """As they count, but for the temperature: logits capped; those without a cap less the row's reference."""
    values, side = x.to(kept_dtype(x.dtype)), problem.input
    if side.form != "logits":
        return values
    return capped(values, side.softcap) if side.softcap else values - reference(values.detach(), ids)


def _tempered(problem: Problem, counted: Tensor) -> Tensor:
    return counted / problem.input.temperature if problem.input.form == "logits" else counted


def _marked(ids: Tensor, vocab: int) -> Tensor:
    """Which of a row's elements are among its ids."""
    marks = ids.new_zeros((*ids.shape[:-1], vocab + 1), dtype=torch.bool)
    return marks.scatter(-1, torch.where(ids < 0, vocab, ids), True)[..., :vocab]


def _checked(indices: Tensor, vocab: int, skipped: Tensor | None) -> Tensor:
    """The ids as int64, -1 in rows that do not count.

    Checked on a GPU by an assertion on the device, as an index out of range is found in torch: nothing waits for it. In
    a transform, where no element can be looked at, those out of range are left out.
    """
    indices = indices.long()
    if skipped is not None:
        indices = torch.where(skipped.unsqueeze(-1), -1, indices)
    right = (indices >= -1) & (indices < vocab)
    if in_functorch():
        return torch.where(right, indices, -1)
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(right.all(), IDS.format(vocab - 1))
    elif not right.all():
        raise no_token(vocab, indices[~right][0].item())
    return indices


def _log_tail(log_p: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log of what so many other tokens have together: of equal shares, the choice of largest entropy, tempered."""
    least = torch.finfo(log_p.dtype).eps / 2  # what rounding leaves of 1 - 1
    wide = accumulator(log_p)
    mass = (1 - log_p.to(wide).exp().sum(-1, keepdim=True)).clamp(min=least)
    log_tokens = tokens.clamp(min=1).to(wide).log()
    tail = log_tokens + (mass.log() - log_tokens) / temperature
    return torch.where(tokens > 0, tail, -math.inf).to(log_p.dtype)


def _sum_of_equal(log_p: Tensor, first: Tensor) -> Tensor:
    """log Σ p over entries of the same id, at the first of them; entries that stand alone as they are."""
    lowest = torch.full_like(log_p, -math.inf)
    top = lowest.scatter_reduce(-1, first, log_p.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    count = torch.zeros_like(log_p).scatter_add(-1, first, torch.ones_like(log_p))
    total = torch.zeros_like(log_p).scatter_add(-1, first, (log_p - top.gather(-1, first)).exp())
    return torch.where(count > 1, log_or_nothing(total) + top, log_p)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids with repetitions made -1, and for each entry the position where its id stands first."""
    order = ids.argsort(dim=-1, stable=True)
    ordered = ids.gather(-1, order)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    positions = torch.arange(ids.size(-1), device=ids.device).expand_as(ids)
    leader = torch.where(begins, positions, 0).cummax(-1).values
    first = positions.scatter(-1, order, order.gather(-1, leader))
    return torch.where(first == positions, ids, -1), first
