"""What is known of rows, or of pieces of rows, between one pass over them and the next.

    statistics(piece)         -> RowStats     merge_stats: of pieces, those of their union
    accumulate(piece, stats)  -> RowSums      merge_sums
    finish(stats, sums)       -> loss, RowState
    gradient(piece, state)

Whoever has the whole row gets loss, state and gradients from one launch. Pieces of a row (of a chunk, of a rank) go
through the four steps, and give the whole row's result. All numbers are float64 where the device has it, [rows] each;
kernels read and write them packed, [fields, rows].
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kullback.divergences import Pair, log_of_rest, tilted_scale
from kullback.dtypes import accumulator
from kullback.formula import geometric_mean, log_difference, log_geometric_mean, select_near
from kullback.problem import Problem


class Mode(enum.IntEnum):
    """Which arithmetic serves a row: the one that summed it has to differentiate it."""

    FAST = 0  # nothing for p = q, no guards
    STABLE = 1  # near p = q by series or polynomials, no guards
    SAFE = 2  # series and guards: serves any row


class RowStats(NamedTuple):
    """What one pass over a row, or over a piece of one, learns of it.

    The sums are of a kind that has moments, between two sides of logits, each normalised by itself; else 0.
    """

    input_lse: Tensor  # log-sum-exp of the logits as they count (capped, over the temperature); 0 of another form
    target_lse: Tensor
    term: Tensor
    d_log_p: Tensor
    d_log_q: Tensor
    mode: Tensor
    tilted_lse: Tensor  # log Σ p^a q^(1-a), of a kind that is finished with it and where it is far from 0; else 0


class RowSums(NamedTuple):
    """Sums over a row, or over a piece of one, with masses normalised by the whole row. Pieces add up."""

    term: Tensor
    d_log_p: Tensor
    d_log_q: Tensor
    q_minus_p: Tensor  # 0, but for the error of the normalisers
    mode: Tensor  # the larger one of pieces


class RowState(NamedTuple):
    """All that a row's gradient needs beside the row."""

    input_lse: Tensor
    target_lse: Tensor
    log_z_diff: Tensor  # target_lse - input_lse, as the sums were found with it
    d_log_p: Tensor  # the row's sums
    d_log_q: Tensor
    d_loss: Tensor  # derivative of the row's loss in its sum of terms
    mode: Tensor
    tilted_lse: Tensor  # as the sums were found with it


Record = TypeVar("Record", RowStats, RowState)


def fields(record: type[RowStats | RowState], has_tilted_lse: bool) -> tuple[str, ...]:
    """Those that are kept of a row: tilted_lse, the last one, of the kinds that have it."""
    return record._fields if has_tilted_lse else record._fields[:-1]


def state_fields(problem: Problem) -> int:
    """How many numbers of a row its gradient needs beside the row."""
    if not problem.has_logits and problem.formula.finish_is_linear:
        return 0
    return len(fields(RowState, problem.formula.has_tilted_lse))


def packed(rows: int, count: int, like: Tensor) -> Tensor:
    """Memory for so many numbers of each row."""
    return like.new_empty((count, rows), dtype=accumulator(like))


def fill(states: Tensor, **numbers: float) -> None:
    """One packed state for all rows: these fields, and 0 in all others."""
    states.zero_()
    for name, number in numbers.items():
        states[RowState._fields.index(name)] = number


def unpacked(record: type[Record], known: Tensor) -> Record:
    """The fields again; 0 for one that is not kept."""
    numbers = list(known)
    if len(numbers) < len(record._fields):
        numbers.append(known.new_zeros(known.size(1)))
    return record._make(numbers)


def merge_stats(problem: Problem, pieces: Sequence[RowStats]) -> RowStats:
    """Of the pieces' union: the divergence between the pieces' masses, and within each what it weighs.

    KL(P‖Q) = Σ P_k log(P_k/Q_k) + Σ P_k KL(p_k‖q_k), the chain rule; likewise of Σ p^a q^(1-a), with P_k^a Q_k^(1-a).
    """
    if len(pieces) == 1:
        return pieces[0]
    each = RowStats._make(map(torch.stack, zip(*pieces, strict=True)))
    input_lse, target_lse = each.input_lse.logsumexp(0), each.target_lse.logsumexp(0)
    if not problem.has_moments:
        return pieces[0]._replace(input_lse=input_lse, target_lse=target_lse, mode=each.mode.amax(0))
    if problem.formula.has_tilted_lse:
        return _merge_tilted(problem, each, input_lse, target_lse)
    masses = _pair(each.target_lse - target_lse, each.input_lse - input_lse)
    between = problem.divergence(masses, *problem.parameters.values())
    a = problem.chernoff_exponent
    of_p, of_q = masses.p, masses.q
    if a is not None:
        of_p = of_q = geometric_mean(*masses[:5], a)
    # A piece without a side's mass is all said by the masses. A mass that is too small for a number has a logarithm.
    lacks = (masses.log_p == -math.inf) | (masses.log_q == -math.inf) | of_p.isinf()

    def total(outer: Tensor, inner: Tensor) -> Tensor:
        return (outer + torch.where(lacks, 0.0, inner)).sum(0)

    def times(mass: Tensor, sums: Tensor) -> Tensor:
        return torch.where(mass == 0, 0.0, mass * sums)

    # of_p·d_log_p + of_q·d_log_q, without the cancellation between them
    term = times(of_p, each.term)
    if a is None:
        term = term + times(of_q - of_p, each.d_log_q)
    # Infinite by whichever side is so at an element, if that side's mass is a number: as one row has it.
    d_log_p, d_log_q = times(of_p, each.d_log_p), times(of_q, each.d_log_q)
    parts = d_log_p + d_log_q
    term = torch.where(each.term == math.inf, torch.where(parts.isnan(), math.inf, parts), term)
    return RowStats(
        input_lse,
        target_lse,
        total(between.term, term),
        total(between.d_log_p, d_log_p),
        total(between.d_log_q, d_log_q),
        torch.where((masses.p == 0) | (masses.q == 0), float(Mode.SAFE), each.mode).amax(0),
        torch.zeros_like(input_lse),
    )


def _merge_tilted(problem: Problem, each: RowStats, input_lse: Tensor, target_lse: Tensor) -> RowStats:
    """`merge_stats` of a kind that is finished with log Σ p^a q^(1-a); its sums are all one, but for a factor."""
    a = problem.chernoff_exponent
    assert a is not None
    scale = tilted_scale(a)
    masses = _pair(each.target_lse - target_lse, each.input_lse - input_lse)
    lacks = (masses.p == 0) | (masses.q == 0)
    log_of = log_geometric_mean(masses.p, masses.q, masses.log_p, masses.log_q, masses.ratio, a)
    log_parts = log_of + torch.where(log_of.isinf(), 0.0, each.tilted_lse + log_of_rest(scale * each.term))
    tilted_lse = far_tilted_lse(log_parts.logsumexp(0))
    between = problem.divergence(masses, *problem.parameters.values())
    of_far = (log_of.exp() - log_parts.exp()) / scale

    def total(of_pieces: Tensor, own: Tensor, factor: float) -> Tensor:
        within = torch.where(each.tilted_lse == 0, log_of.exp() * own, factor * of_far)
        return torch.where(tilted_lse == 0, (of_pieces + torch.where(lacks, 0.0, within)).sum(0), 0.0)

    return RowStats(
        input_lse,
        target_lse,
        total(between.term, each.term, 1.0),
        total(between.d_log_p, each.d_log_p, a),
        total(between.d_log_q, each.d_log_q, 1 - a),
        torch.where(lacks, float(Mode.SAFE), each.mode).amax(0),
        tilted_lse,
    )


FAR_TILTED_LSE = 0.5


def far_tilted_lse(log_chernoff: Tensor) -> Tensor:
    """Of log Σ p^a q^(1-a): what a row's sums are taken against."""
    is_far = (log_chernoff.abs() >= FAR_TILTED_LSE) & (log_chernoff > -math.inf)
    return torch.where(is_far, log_chernoff, 0.0)


def _pair(log_p: Tensor, log_q: Tensor) -> Pair:
    p, q, ratio = log_p.exp(), log_q.exp(), log_difference(log_p, log_q)
    q_minus_p = select_near(ratio, 0.5, p * torch.expm1(-ratio), q - p)
    return Pair(p, q, log_p, log_q, ratio, q_minus_p, torch.zeros_like(ratio), centred=True)


def merge_sums(pieces: Sequence[RowSums]) -> RowSums:
    """Of the pieces' union."""
    sums = RowSums._make(functools.reduce(operator.add, parts) for parts in zip(*pieces, strict=True))
    return sums._replace(mode=functools.reduce(torch.maximum, (piece.mode for piece in pieces)))


def sums_of(stats: RowStats) -> RowSums:
    """The sums of a row whose kind has moments."""
    return RowSums(stats.term, stats.d_log_p, stats.d_log_q, torch.zeros_like(stats.term), stats.mode)


def finish(problem: Problem, stats: RowStats, sums: RowSums) -> tuple[Tensor, RowState]:
    """Each row's loss, and what its gradient needs."""
    term = sums.term
    if problem.is_normalised:
        # Normalisers that are off by δ between them show as an excess of q over p. Its first two orders are taken off.
        off = torch.log1p(sums.q_minus_p)
        correction = problem.curvature * off**2 - off * sums.d_log_q
        is_near = term.isfinite() & correction.isfinite() & (stats.tilted_lse == 0)
        term = torch.where(is_near, (term + correction).clamp(min=0), term)
    done = problem.formula.finish.run({"total": term, "tilted_lse": stats.tilted_lse, **problem.parameters})
    derivative = done["derivative"]
    d_loss = derivative if isinstance(derivative, Tensor) else term.new_full((), derivative)
    return done["loss"], state_of(stats, sums, d_loss.expand_as(term))


def state_of(stats: RowStats, sums: RowSums, d_loss: Tensor) -> RowState:
    lse = stats.input_lse, stats.target_lse
    return RowState(*lse, lse[1] - lse[0], sums.d_log_p, sums.d_log_q, d_loss, sums.mode, stats.tilted_lse)
