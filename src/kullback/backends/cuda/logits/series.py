"""Divergences near p = q: power series in the log-ratio, from which kernels sum rows that are close.

With r = log(p/q) an element's term is √(p·q) · (c₂·r² + c₃·r³ + ...), and its derivatives are such series, too.
√(p·q) and the powers of r serve every kind that is smooth at p = q.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.divergences import Element
from kullback.problem import element_at

RADIUS = 0.5  # of r
TERMS = 7
TOLERANCE = 1e-6  # of what it stands for, relative; at most, at the end of its radius


class Series(NamedTuple):
    """Factors of r, r², ... r^TERMS. The derivatives' sum is the term, whose first factor is 0, by Euler.

    Exchanging p and q changes r's sign alone: of a symmetric kind term is even and the difference odd, to the bit.
    """

    term: tuple[float, ...]
    difference: tuple[float, ...]  # d_log_q - d_log_p


@functools.lru_cache(maxsize=1024)
def series(kind: str, parameter: float) -> Series | None:
    """Near-minimax fits in float64; None where so many terms do not reach: parameters far out, a corner at p = q."""
    term = _fit(lambda r: element_at(kind, parameter, r).term, 2)
    difference = _fit(lambda r: _difference(element_at(kind, parameter, r)), 1)
    return None if term is None or difference is None else Series((0.0, *term), difference)


def _difference(element: Element) -> Tensor:
    found: Tensor = element.d_log_q - element.d_log_p
    return found


def _fit(values_of: Callable[[Tensor], Tensor], first: int) -> tuple[float, ...] | None:
    """Factors of r^first to r^TERMS: near-minimax. None where they are not good enough.

    They are the coefficients of the truncated Chebyshev series of the values over r^first, by quadrature at the nodes.
    """
    nodes = torch.cos(math.pi * (torch.arange(32, dtype=torch.float64, device="cpu") + 0.5) / 32)  # Chebyshev's
    values = values_of(RADIUS * nodes) / nodes**first
    count = TERMS + 1 - first
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
    factors /= RADIUS**exponents
    ratio = torch.linspace(0.01, RADIUS, 50, dtype=torch.float64, device="cpu")
    for r in (ratio, -ratio):
        found, wanted = (r.unsqueeze(-1) ** exponents) @ factors, values_of(r)
        if not bool(((found - wanted).abs() <= TOLERANCE * wanted.abs()).all()):
            return None
    return tuple(factors.tolist())
