"""Divergences near p = q: power series in the log-ratio, from which kernels sum rows that are close.

With r = log(p/q) an element's term is √(p·q) · (c₂·r² + c₃·r³ + ...), and so are its derivatives: √(p·q) and the powers
of r serve every kind that is smooth at p = q.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.divergences import Element
from kullback.problem import element_at, has_corner

RADIUS = 0.5  # of r
TERMS = 7
NEAR_RADIUS, NEAR_TERMS, NEAR_SLOPE_TERMS = 2.5, 10, 8
TOLERANCE = 1e-6  # of what it stands for, relative; at most, at the end of its radius
# At the end of their radius, and so much of it at r = 0. A slope is rounded to 16 bits, or its sum to such a gradient.
NEAR_TOLERANCE, SLOPE_TOLERANCE, LEAST_SHARE = 5e-5, 6e-3, 0.02


class Series(NamedTuple):
    """Factors of r, r², ... r^TERMS. The derivatives' sum is the term, whose first factor is 0, by Euler.

    Exchanging p and q changes r's sign alone: of a symmetric kind term is even and the difference odd, to the bit.
    """

    term: tuple[float, ...]
    difference: tuple[float, ...]  # d_log_q - d_log_p


@functools.lru_cache(maxsize=1024)
def series(kind: str, parameter: float) -> Series | None:
    """Near-minimax fits in float64; None where so many terms do not reach: parameters far out, a corner at p = q."""
    term = _fit(lambda r: element_at(kind, parameter, r).term, 2, TERMS - 1, RADIUS, TOLERANCE)
    difference = _fit(lambda r: _difference(element_at(kind, parameter, r)), 1, TERMS, RADIUS, TOLERANCE)
    return None if term is None or difference is None else Series((0.0, *term), difference)


class Near(NamedTuple):
    """Polynomials of r = log(p/q) of rows that are near: factors of so many powers of r, of which some may be 0.

    A kind that has a corner at p = q is symmetric: its term is one of |r|, and its slope has a size.
    """

    term: tuple[float, ...]  # over √(p·q), from r² on; from |r| on
    slope: tuple[float, ...]  # d_log_q / q, from r on; with a corner twice what it is where p is more than q

    @property
    def step(self) -> int:
        """From one power that is wanted to the next."""
        return 1 if any(self.term[1::2]) or any(self.slope[2::2]) else 2


@functools.lru_cache(maxsize=1024)
def near(kind: str, parameter: float) -> Near | None:
    """None where so many terms do not reach, or of a kind with a corner whose slope is more than a sign."""

    def slope(ratio: Tensor) -> Tensor:
        found: Tensor = element_at(kind, parameter, ratio).d_log_q * torch.exp(ratio / 2)
        return found

    def term(ratio: Tensor) -> Tensor:
        found: Tensor = element_at(kind, parameter, ratio).term
        return found

    if not has_corner(kind):
        of_term = near_fit(term, 2, NEAR_TERMS, NEAR_TOLERANCE)
        of_slope = near_fit(slope, 1, NEAR_SLOPE_TERMS, SLOPE_TOLERANCE)
        return None if of_term is None or of_slope is None else Near(of_term, of_slope)
    of_term = near_fit(lambda r: term(r.abs()) * r.sign(), 1, NEAR_TERMS, NEAR_TOLERANCE)
    ratio = torch.linspace(0.01, NEAR_RADIUS, 50, dtype=torch.float64, device="cpu")
    size = slope(ratio[-1:])
    is_sign = bool(((slope(ratio) - size).abs() < 1e-12).all() and ((slope(-ratio) + size).abs() < 1e-12).all())
    return Near(of_term, (2 * size.item(),)) if of_term is not None and is_sign else None


def near_fit(
    values_of: Callable[[Tensor], Tensor], first: int, count: int, tolerance: float
) -> tuple[float, ...] | None:
    """As `_fit`, where few tokens are far out: by least squares, of relative errors that may grow as r² does."""
    half = torch.linspace(1 / 400, 1, 400, dtype=torch.float64, device="cpu")
    at = torch.cat([half, -half])
    exponents = torch.arange(first, first + count, device="cpu")
    wanted, allowed = values_of(NEAR_RADIUS * at), tolerance * (LEAST_SHARE + at.square())
    if not bool((wanted.isfinite() & (wanted != 0)).all()):
        return None
    powers = at.unsqueeze(-1) ** exponents
    weights = 1 / ((wanted.abs() + wanted.roll(len(half)).abs()) * allowed)  # the same for r and -r
    factors = torch.linalg.lstsq(powers * weights.unsqueeze(-1), (wanted * weights).unsqueeze(-1)).solution.squeeze(-1)
    factors = torch.where(factors.abs() < 1e-9 * factors.abs().max(), 0.0, factors)  # as in `_fit`
    if not bool((((powers @ factors) - wanted).abs() <= allowed * wanted.abs()).all()):
        return None
    return tuple((factors / NEAR_RADIUS**exponents).tolist())


def _difference(element: Element) -> Tensor:
    found: Tensor = element.d_log_q - element.d_log_p
    return found


def _fit(
    values_of: Callable[[Tensor], Tensor], first: int, count: int, radius: float, tolerance: float
) -> tuple[float, ...] | None:
    """Factors of r^first and of the powers that follow, so many: near-minimax. None where they are not good enough.

    They are the coefficients of the truncated Chebyshev series of the values over r^first, by quadrature at the nodes.
    """
    nodes = torch.cos(math.pi * (torch.arange(32, dtype=torch.float64, device="cpu") + 0.5) / 32)  # Chebyshev's
    values = values_of(radius * nodes) / nodes**first
    polynomials = torch.eye(count, dtype=torch.float64, device="cpu")  # Chebyshev's, by their coefficients
    for k in range(2, count):
        polynomials[k] = 2 * polynomials[k - 1].roll(1) - polynomials[k - 2]
    monomials = torch.stack([nodes**k for k in range(count)])
    projected = polynomials @ (monomials @ values) * (2 / nodes.numel())
    projected[0] /= 2
    factors = projected @ polynomials
    # An even or odd function stays one, so that exchanging p and q changes no bit.
    factors = torch.where(factors.abs() < 1e-11 * factors.abs().max(), 0.0, factors)
    exponents = torch.arange(first, first + count, device="cpu")
    factors /= radius**exponents
    ratio = torch.linspace(0.01, radius, 50, dtype=torch.float64, device="cpu")
    for r in (ratio, -ratio):
        found, wanted = (r.unsqueeze(-1) ** exponents) @ factors, values_of(r)
        if not bool(((found - wanted).abs() <= tolerance * wanted.abs()).all()):
            return None
    return tuple(factors.tolist())
