"""Near rows: an element's term and slope as polynomials of its log-ratio r = log(p/q), fitted from the formula alone.

Over √(p·q) a term is a function of r. A polynomial of r loses nothing however small that is. Errors may grow as r²
does, since few tokens of such rows are far out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.backends.lowering import with_corner
from kullback.divergences import DESCRIBED, DIVERGENCES
from kullback.problem import element_at, has_corner


class Reach(NamedTuple):
    """How far out polynomials serve, and how many terms they may have.

    There are few choices, since kernels are compiled for each.
    """

    radius: float  # of |r|
    counts: tuple[int, ...]
    slope_counts: tuple[int, ...]


WIDE, NARROW = Reach(2.5, (8, 10), (6, 8)), Reach(1.0, (6,), (6,))
MOST_TERMS = WIDE.counts[-1]
# Relative errors at the end of their radius. A slope is rounded to 16 bits, or its sum to such a gradient: fewer terms
# are to reach the first, all of them the second.
NEAR_TOLERANCE, SLOPE_TOLERANCE, MOST_SLOPE_TOLERANCE = 1.1e-5, 1e-3, 6e-3
LEAST_TOLERANCE = 0.02  # of it at r = 0


class NearShape(NamedTuple):
    """What kernels are compiled for: how many powers from the first on, and from one that is wanted to the next."""

    terms: int = 0
    term_step: int = 0  # 0: there are none
    slope_terms: int = 0
    slope_step: int = 0  # behind the first


class Near(NamedTuple):
    """Polynomials of r = log(p/q) of rows that are near: factors of so many powers of r, of which some may be 0.

    A kind that has a corner at p = q is symmetric: its term is one of |r|, and its slope has a size.
    """

    term: tuple[float, ...]  # over √(p·q), from r² on; from |r| on
    slope: tuple[float, ...]  # d_log_q / q, from r on; with a corner twice what it is where p is more than q

    @property
    def shape(self) -> NearShape:
        term_step, slope_step = 1 if any(self.term[1::2]) else 2, 1 if any(self.slope[2::2]) else 2
        return NearShape(len(self.term), term_step, max(len(self.slope), 2), slope_step)


@functools.lru_cache(maxsize=1024)
def near(kind: str, parameter: float, reach: Reach = WIDE) -> Near | None:
    """None where so many terms do not reach, or of a kind with a corner whose slope is more than a sign."""

    def slope(ratio: Tensor) -> Tensor:
        found: Tensor = element_at(kind, parameter, ratio).d_log_q * torch.exp(ratio / 2)
        return found

    radius, counts, slope_counts = reach
    of_term = shortest_fit(*term_over_root(kind, parameter), NEAR_TOLERANCE, counts, radius)
    if not has_corner(kind):
        of_slope = shortest_fit(slope, 1, SLOPE_TOLERANCE, slope_counts, radius)
        of_slope = of_slope or near_fit(slope, 1, slope_counts[-1], MOST_SLOPE_TOLERANCE, radius)
        return None if of_term is None or of_slope is None else Near(of_term, of_slope)
    ratio = torch.linspace(0.01, radius, 50, dtype=torch.float64, device="cpu")
    size = slope(ratio[-1:])
    is_sign = bool(((slope(ratio) - size).abs() < 1e-12).all() and ((slope(-ratio) + size).abs() < 1e-12).all())
    return Near(of_term, (2 * size.item(),)) if of_term is not None and is_sign else None


FLOAT_RADIUS, FLOAT_TOLERANCE = 2.0, 3e-7
FLOAT_TERMS, FLOAT_DIFFERENCES = (8, 13, 15), (11, 15, 17)
MOST_FLOAT_TERMS = FLOAT_DIFFERENCES[-1]


class OverRootShape(NamedTuple):
    """What kernels are compiled for: how many powers of both, and from one that is wanted to the next."""

    terms: int = 0  # 0: there are none
    term_step: int = 0
    differences: int = 0
    difference_step: int = 0


class OverRoot(NamedTuple):
    """Polynomials of r over √(p·q), as exact as float32: a term from r² on, and d_log_q - d_log_p from r on.

    d_log_q + d_log_p is the term, since terms are homogeneous. Of a symmetric kind the term is even and the difference
    odd, so that exchanging p and q changes no bit of what they give.
    """

    term: tuple[float, ...]
    difference: tuple[float, ...]

    @property
    def shape(self) -> OverRootShape:
        term_step, difference_step = (1 if any(factors[1::2]) else 2 for factors in self)
        return OverRootShape(len(self.term), term_step, len(self.difference), difference_step)


@functools.lru_cache(maxsize=1024)
def over_root(kind: str, parameter: float) -> OverRoot | None:
    """None of a kind with a corner, or where so many powers do not reach."""
    if has_corner(kind):
        return None

    def difference_of(ratio: Tensor) -> Tensor:
        element = element_at(kind, parameter, ratio)
        found: Tensor = element.d_log_q - element.d_log_p
        return found

    term = shortest_fit(*term_over_root(kind, parameter), FLOAT_TOLERANCE, FLOAT_TERMS, FLOAT_RADIUS)
    difference = shortest_fit(difference_of, 1, FLOAT_TOLERANCE, FLOAT_DIFFERENCES, FLOAT_RADIUS)
    return None if term is None or difference is None else OverRoot(term, difference)


def term_over_root(kind: str, parameter: float) -> tuple[Callable[[Tensor], Tensor], int]:
    """A term over √(p·q) by log-ratio, and the first power that it has; with a corner it is one of |r|, made odd."""

    def term(ratio: Tensor) -> Tensor:
        found: Tensor = element_at(kind, parameter, ratio).term
        return found

    return (lambda r: term(r.abs()) * r.sign(), 1) if has_corner(kind) else (term, 2)


def near_fit(
    values_of: Callable[[Tensor], Tensor], first: int, count: int, tolerance: float, radius: float = WIDE.radius
) -> tuple[float, ...] | None:
    """Factors of r^first and of what follows, by least squares of relative errors; None where they do not reach."""
    half = torch.linspace(1 / 400, 1, 400, dtype=torch.float64, device="cpu")
    at = torch.cat([half, -half])
    exponents = torch.arange(first, first + count, device="cpu")
    wanted, allowed = values_of(radius * at), tolerance * (LEAST_TOLERANCE + at.square())
    if not bool((wanted.isfinite() & (wanted != 0)).all()):
        return None
    powers = at.unsqueeze(-1) ** exponents
    weights = 1 / ((wanted.abs() + wanted.roll(len(half)).abs()) * allowed)  # the same for r and -r
    factors = least_squares(powers * weights.unsqueeze(-1), wanted * weights)
    factors = torch.where(factors.abs() < 1e-9 * factors.abs().max(), 0.0, factors)  # an even or odd function stays one
    if not bool((((powers @ factors) - wanted).abs() <= allowed * wanted.abs()).all()):
        return None
    return tuple((factors / radius**exponents).tolist())


def least_squares(columns: Tensor, wanted: Tensor) -> Tensor:
    """By modified Gram-Schmidt, the right side as one column more (Björck 1967).

    LAPACK's threads wait longer for each other than so few columns take.
    """
    rest = torch.cat([columns, wanted.unsqueeze(-1)], -1)
    rows = []
    for _ in range(columns.size(1)):
        length = rest[:, 0].square().sum().sqrt()
        unit = rest[:, :1] / length
        along = (unit * rest[:, 1:]).sum(0)
        rows.append([length.item(), *along.tolist()])
        rest = rest[:, 1:] - unit * along
    found: list[float] = []
    for length, *along, last in reversed(rows):
        found.insert(0, (last - sum(a * f for a, f in zip(along, found, strict=True))) / length)
    return torch.tensor(found, dtype=columns.dtype, device=columns.device)


def shortest_fit(
    values_of: Callable[[Tensor], Tensor],
    first: int,
    tolerance: float,
    counts: Iterable[int],
    radius: float = WIDE.radius,
) -> tuple[float, ...] | None:
    """Of so many factors as first reach; None if none do."""
    found = (near_fit(values_of, first, count, tolerance, radius) for count in counts)
    return next((factors for factors in found if factors is not None), None)


class Polynomial(NamedTuple):
    """Σ factor · r^k, from the first power on."""

    is_of_size: bool  # of |r| in place of r
    first: int
    factors: tuple[float, ...]


@functools.cache
def described_polynomials() -> dict[str, Polynomial]:
    """Of each term of described kinds (`lowering.described_terms`), over √(p·q)."""

    def fitted(values_of: Callable[[Tensor], Tensor], first: int) -> tuple[float, ...]:
        factors = shortest_fit(values_of, first, NEAR_TOLERANCE, range(1, MOST_TERMS + 1))
        assert factors is not None, "no polynomial reaches"
        return factors

    def of_kind(kind: str) -> Polynomial:
        term, first = term_over_root(kind, DIVERGENCES[kind].default)
        return Polynomial(has_corner(kind), first, fitted(term, first))

    return {kind: of_kind(kind) for kind in DESCRIBED} | {
        "q_minus_p": Polynomial(False, 1, fitted(lambda r: -2 * torch.sinh(r / 2), 1)),
        "slope": Polynomial(True, 0, (_described_slope(),)),
    }


def _described_slope() -> float:
    """Of the term that has a corner, beside it, where p is more than q (`lowering.described_terms`).

    By it a rounding is multiplied, and what is left of a term where that counts is near the corner.
    """
    element = element_at(with_corner(), 0.0, torch.tensor([1e-9], dtype=torch.float64, device="cpu"))
    return round(float(element.d_log_p - element.d_log_q), 6)
