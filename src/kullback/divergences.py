"""Every divergence: one function each, and beside it all else that is to be said of it.

A function receives one element of a row, as a `Pair`, and returns its term and the term's partial
derivatives in log p and log q. These stay finite where derivatives in p and q overflow. Every term is
1-homogeneous in (p, q), so the two partials sum to the term (Euler); a test holds each function to it.

`pair.centred` says that both rows are normalised (logits). Then c·(p - q), which sums to zero, may be
taken off each term. With c = f'(1) every term is >= 0 and an error in a normaliser enters squared
(docs/mathematics.md). Otherwise the sum is the definition as written, normalised or not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from kullback.formula import (
    Value,
    absolute,
    bennett,
    exp,
    exp_remainder,
    expm1,
    fraction,
    geometric_mean,
    half_sign,
    log,
    log1p,
    log_fraction,
    log_geometric_mean,
    log_mix,
    log_quotient,
    mass_times,
    mixture,
    ratio_or_zero,
    select_near,
    select_normal,
    small_bennett,
    small_exp_remainder,
    small_expm1,
    sqrt,
    where,
)


class Pair(NamedTuple):
    """One element of a row: p of the target, q of the input."""

    p: Value
    q: Value
    log_p: Value
    log_q: Value
    ratio: Value  # log p - log q; 0 where p = q = 0
    q_minus_p: Value  # without cancellation
    # For a kind that is finished with the logarithm of the row's Σ p^a q^(1-a): that, where it is far from 0; else 0
    tilted_lse: Value
    centred: bool


class Finish(NamedTuple):
    """What becomes of a row's sum, and its derivative in that sum."""

    loss: Value
    derivative: Value


def identity(total: Value) -> Finish:
    return Finish(total, 1.0)


class Element(NamedTuple):
    """Of one element, or summed over a row."""

    term: Value
    d_log_p: Value
    d_log_q: Value
    finish: Callable[[Value], Finish] = identity


class Moments(NamedTuple):
    """Sums of a row that follow from those of its parts, in whatever unit each part has its masses.

    A kind that is a function of them is summed while the row's normalisers are still being found.
    """

    p_log_ratio: Value  # Σ p log(p/q)
    q_log_ratio: Value  # Σ q log(p/q)
    chernoff: Callable[[Value], Value]  # a -> Σ p^a q^(1-a), Chernoff's coefficient; a kind asks for one a


class Parameter(NamedTuple):
    """A kind's own number."""

    name: str
    default: float
    domain: str  # in words, and
    admits: Callable[[float], bool]  # as a test


class Divergence(NamedTuple):
    """All that is known of a kind. `@Divergence`, or `@partial(Divergence, ...)` with what else there is to say."""

    element: Callable[..., Element]  # of a Pair and, where there is one, the parameter
    parameter: Parameter | None = None
    # The sums of term, d_log_p and d_log_q of a normalised row, as centred, where they follow from its moments
    moments: Callable[..., Element] | None = None
    # A row's sum is at most about so many times c₂·Σ q log(q/p), with term = c₂·log²(p/q) + … near p = q. By it kernels
    # foresee which rows are close; None: they find out.
    reverse_kl_factor: float | None = None
    least_mean_slope: float = -math.inf  # of what Σ d_log_q is, over all normalised rows

    @property
    def name(self) -> str:
        return self.element.__name__

    @property
    def defaults(self) -> dict[str, float]:
        """The parameter by its name, with its default; empty where there is none."""
        return {} if self.parameter is None else {self.parameter.name: self.parameter.default}

    @property
    def default(self) -> float:
        """The parameter's, or 0 where there is none: what a Problem has."""
        return 0.0 if self.parameter is None else self.parameter.default

    @property
    def definition(self) -> str:
        """In p and q, and with no more than a line."""
        return (inspect.getdoc(self.element) or self.name).splitlines()[0]

    def __call__(self, x: Pair, *parameter: Value) -> Element:
        return self.element(x, *parameter)


@partial(Divergence, moments=lambda m: Element(m.p_log_ratio, m.p_log_ratio, 0.0))
def kl(x: Pair) -> Element:
    """Σ p log(p/q)"""
    if x.centred:  # p·(ratio + e^-ratio - 1) = p·ratio + q - p
        near = x.p * small_exp_remainder(x.ratio)
        term = select_near(x.ratio, 0.5, near, mass_times(x.p, x.ratio) + x.q_minus_p)
        return Element(term, mass_times(x.p, x.ratio), x.q_minus_p)
    term = mass_times(x.p, x.ratio)
    return Element(term, term + x.p, -x.p)


@partial(Divergence, moments=lambda m: Element(-m.q_log_ratio, 0.0, -m.q_log_ratio))
def reverse_kl(x: Pair) -> Element:
    """Σ q log(q/p)"""
    swapped = kl(Pair(x.q, x.p, x.log_q, x.log_p, -x.ratio, -x.q_minus_p, x.tilted_lse, x.centred))
    return Element(swapped.term, swapped.d_log_q, swapped.d_log_p)


@partial(Divergence, moments=lambda m: Element(m.p_log_ratio - m.q_log_ratio, m.p_log_ratio, -m.q_log_ratio))
def jeffreys(x: Pair) -> Element:
    """Σ (p - q) log(p/q)"""
    return Element(
        mass_times(-x.q_minus_p, x.ratio),
        mass_times(x.p, x.ratio) - x.q_minus_p,
        x.q_minus_p - mass_times(x.q, x.ratio),
    )


LEAST_SHARE = 1.2e-38  # of a mixture: less of a mass may be nothing
SHARE = Parameter(
    "beta",
    0.5,
    "between 0 and 1, and not so near that float32 takes it for either",
    lambda beta: LEAST_SHARE < beta < 1 - 3e-8,
)


def _mixed_of(m: Moments, beta: Value) -> Element:
    forward, reverse = beta * m.p_log_ratio, -((1.0 - beta) * m.q_log_ratio)
    return Element(forward + reverse, forward, reverse)


@partial(Divergence, parameter=SHARE, moments=_mixed_of)
def mixed_kl(x: Pair, beta: Value) -> Element:
    """b·KL(p‖q) + (1-b)·KL(q‖p)"""
    forward, reverse, other = kl(x), reverse_kl(x), 1.0 - beta
    sums = (beta * f + other * r for f, r in zip(forward[:3], reverse[:3], strict=True))
    return Element(*sums)


@partial(
    Divergence,
    parameter=SHARE,
    reverse_kl_factor=3.0,  # never more than 2.8 where b is 1/2, so that exchanging p and q changes no row's mode
    least_mean_slope=0.0,  # Σ d_log_q is (1-b)·KL(q‖m)
)
def jensen_shannon(x: Pair, beta: Value) -> Element:
    """b·KL(p‖m) + (1-b)·KL(q‖m), m = b·p + (1-b)·q"""
    other = 1.0 - beta
    m = mixture(beta, x.p, other, x.q)
    relative = fraction(-x.q_minus_p, m)  # (p - q) / m
    # One logarithm for both: of the larger, whose part of the mixture is never small.
    if x.centred:
        is_less = x.ratio < 0.0
        larger = -log_mix(x.ratio, beta, other)
        log_p_over_m = log_fraction(x.p, m, larger + where(is_less, x.ratio, 0.0))
        # Finite also where q is 0, as p's is where p is: exchanging them changes nothing.
        log_q_over_m = log_fraction(x.q, m, larger - where(is_less, 0.0, where(x.ratio < 1e38, x.ratio, 1e38)))
        p_term = divergence_from(m, x.p, log_p_over_m, other * relative)
        q_term = divergence_from(m, x.q, log_q_over_m, -(beta * relative))
        term = beta * p_term + other * q_term
    else:
        p_over = at_least(other * relative, -1.0)  # p/m - 1
        q_over = at_least(-(beta * relative), -1.0)  # q/m - 1
        is_less = x.q_minus_p > 0.0
        larger = log_quotient(where(is_less, x.q, x.p), m)
        log_p_over_m = select_near(p_over, 0.25, log1p(p_over), where(is_less, larger + x.ratio, larger))
        log_q_over_m = select_near(q_over, 0.25, log1p(q_over), where(is_less, larger, larger - x.ratio))
        term = m * (beta * bennett(p_over) + other * bennett(q_over))
    return Element(term, beta * mass_times(x.p, log_p_over_m), other * mass_times(x.q, log_q_over_m))


@partial(
    Divergence,
    parameter=Parameter(
        "alpha", 0.1, "more than 0, as float32 has it, and less than 1", lambda alpha: LEAST_SHARE < alpha < 1
    ),
    reverse_kl_factor=3.0,
    least_mean_slope=0.0,  # Σ d_log_q is 1 - Σ p·q/m, and p·q/m at most (1-a)·p + a·q
)
def skew_kl(x: Pair, alpha: Value) -> Element:
    """KL(p ‖ a·p + (1-a)·q)"""
    other = 1.0 - alpha
    m = mixture(alpha, x.p, other, x.q)
    relative = fraction(x.q_minus_p, m)  # (q - p) / m
    over = -(other * relative)  # p/m - 1
    if x.centred:
        log_p_over_m = select_near(over, 0.25, log1p(over), log_fraction(x.p, m, log(fraction(x.p, m))))
        term = divergence_from(m, x.p, log_p_over_m, over)
        return Element(term, mass_times(x.p, log_p_over_m - alpha * over), other * other * relative * x.q)
    over = at_least(over, -1.0)
    plain = mass_times(x.p, select_near(over, 0.25, log1p(over), log_quotient(x.p, m)))
    q_share = other * fraction(x.q, m)  # of q in m
    return Element(plain, plain + x.p * q_share, -(x.p * q_share))


@Divergence
def total_variation(x: Pair) -> Element:
    """½ Σ abs(p - q)

    The gradient at ties is 0.
    """
    half = half_sign(x.q_minus_p)
    return Element(0.5 * absolute(x.q_minus_p), -(half * x.p), half * x.q)


def _hellinger_of(m: Moments) -> Element:
    shortfall = 1.0 - m.chernoff(0.5)
    return Element(shortfall, 0.5 * shortfall, 0.5 * shortfall)


@partial(Divergence, moments=_hellinger_of)
def hellinger(x: Pair) -> Element:
    """½ Σ (√p - √q)²"""
    root_p, root_q = sqrt(x.p), sqrt(x.q)
    difference = select_near(x.ratio, 0.5, ratio_or_zero(x.q_minus_p, root_p + root_q), root_q - root_p)
    return Element(0.5 * difference * difference, -(0.5 * root_p * difference), 0.5 * root_q * difference)


def _chi2_of(m: Moments) -> Element:
    surplus = m.chernoff(2.0) - 1.0
    return Element(surplus, 2.0 * surplus, -surplus)


@partial(Divergence, moments=_chi2_of)
def chi2(x: Pair) -> Element:
    """Σ (p - q)²/q"""
    power = geometric_mean(x.p, x.q, x.log_p, x.log_q, x.ratio, 2.0)  # p²/q, which may be a number where q is none
    relative = ratio_or_zero(x.q_minus_p, x.q)
    shortfall = mass_times(x.p, relative)  # p - p²/q
    return Element(
        select_normal(x.q, x.q_minus_p * relative, power - x.p + x.q_minus_p),
        select_normal(x.q, -(2.0 * shortfall), 2.0 * (power - x.p)),
        select_normal(x.q, x.q_minus_p + shortfall, x.q - power),
    )


LEAST_ORDER, MOST_ORDER = 1e-30, 1e6  # of products with log-ratios float32 keeps too little beyond
ORDERS = f"between {LEAST_ORDER:g} and {MOST_ORDER:g}{{}}, and not so near to 1 that float32 takes it for that"


def is_order(alpha: float) -> bool:
    return LEAST_ORDER <= abs(alpha) <= MOST_ORDER and not 1 - 3e-8 <= alpha <= 1 + 6e-8


def _alpha_of(m: Moments, alpha: Value) -> Element:
    other = 1.0 - alpha
    shortfall = 1.0 - m.chernoff(alpha)
    return Element(shortfall / (alpha * other), shortfall / other, shortfall / alpha)


@partial(
    Divergence,
    parameter=Parameter("alpha", 0.5, ORDERS.format(" in size"), is_order),
    moments=_alpha_of,
)
def alpha(x: Pair, alpha: Value) -> Element:
    """(1 - Σ p^a q^(1-a)) / (a(1-a))

    Amari's.
    """
    other = 1.0 - alpha
    scale = 1.0 / (alpha * other)
    if x.centred:
        return tilted_shortfall(x, alpha, lambda log_c: Finish(-(scale * expm1(log_c)), exp(x.tilted_lse)))
    term = -(scale * geometric_mean(x.p, x.q, x.log_p, x.log_q, x.ratio, alpha))
    return Element(term, alpha * term, other * term, lambda total: Finish(scale + total, 1.0))


@partial(
    Divergence,
    parameter=Parameter("alpha", 0.5, ORDERS.format(""), lambda alpha: alpha > 0 and is_order(alpha)),
    moments=_alpha_of,
)
def renyi(x: Pair, alpha: Value) -> Element:
    """log(Σ p^a q^(1-a)) / (a-1)"""
    other = 1.0 - alpha
    if x.centred:
        return tilted_shortfall(x, alpha, lambda log_c: Finish(-log_c / other, alpha * exp(x.tilted_lse - log_c)))
    term = geometric_mean(x.p, x.q, x.log_p, x.log_q, x.ratio, alpha)
    return Element(
        term,
        alpha * term,
        other * term,
        lambda total: Finish(-log(total) / other, -1.0 / (other * total)),
    )


def tilted_shortfall(x: Pair, alpha: Value, finish: Callable[[Value], Finish]) -> Element:
    """(a·p + (1-a)·q - w) / (a(1-a)), w = p^a q^(1-a) / exp(tilted_lse), and a finish of log Σ p^a q^(1-a)."""
    other, scale = 1.0 - alpha, tilted_scale(alpha)
    w = exp(log_geometric_mean(x.p, x.q, x.log_p, x.log_q, x.ratio, alpha) - x.tilted_lse)
    over_p, over_q = -(other * x.ratio) - x.tilted_lse, alpha * x.ratio - x.tilted_lse  # log(w/p), log(w/q)
    p_less = select_near(over_p, 0.5, -(x.p * small_expm1(over_p)), x.p - w)
    q_less = select_near(over_q, 0.5, -(x.q * small_expm1(over_q)), x.q - w)
    d_log_p, d_log_q = (1.0 / other) * p_less, (1.0 / alpha) * q_less
    # Exchanging p and q, and a and 1-a, changes nothing: with the smaller order as a divisor near 0 this would cancel.
    is_of_q = alpha * alpha < 0.25
    mass, ratio = where(is_of_q, x.q, x.p), where(is_of_q, -x.ratio, x.ratio)
    own, opposite = where(is_of_q, other, alpha), where(is_of_q, alpha, other)
    near = mass * ((1.0 / own) * exp_remainder(ratio) - 1.0 / scale * exp_remainder(opposite * ratio))
    return Element(
        select_near(absolute(x.ratio) + absolute(x.tilted_lse), 0.5, near, d_log_p + d_log_q),
        d_log_p,
        d_log_q,
        lambda total: finish(x.tilted_lse + log_of_rest(scale * total)),
    )


def tilted_scale(alpha: Value) -> Value:
    """By which a sum of `tilted_shortfall` is multiplied to be 1 - Σ p^a q^(1-a), over exp(tilted_lse)."""
    return alpha * (1.0 - alpha)


def log_of_rest(shortfall: Value) -> Value:
    """log(1 - shortfall) of Σ p^a q^(1-a), where that is near 1, or 0.

    Else the shortfall is against tilted_lse, which is 0 only where the sum is 0 or its logarithm below ½ in size.
    """
    return log1p(-where(shortfall > 0.9, 1.0, shortfall))


def divergence_from(m: Value, mass: Value, log_over_m: Value, over: Value) -> Value:
    """mass·log(mass/m) + m - mass >= 0, of the logarithm and mass/m - 1"""
    return select_near(over, 1 / 3, m * small_bennett(over), mass_times(mass, log_over_m) + (m - mass))


def at_least(x: Value, bound: float) -> Value:
    """max(x, bound) that lets NaN through."""
    return where(x < bound, bound, x)


DIVERGENCES = {
    kind.name: kind
    for kind in (
        kl,
        reverse_kl,
        jeffreys,
        mixed_kl,
        jensen_shannon,
        skew_kl,
        total_variation,
        hellinger,
        chi2,
        alpha,
        renyi,
    )
}

# Those that `row_statistics` tells of, with the defaults of their parameters
DESCRIBED = tuple(kind.name for kind in (kl, reverse_kl, jensen_shannon, total_variation))

# The names of DIVERGENCES, for editors to complete. Functions take `Kind | str`: a name from a configuration is a str.
Kind: TypeAlias = Literal[
    "kl",
    "reverse_kl",
    "jeffreys",
    "mixed_kl",
    "jensen_shannon",
    "skew_kl",
    "total_variation",
    "hellinger",
    "chi2",
    "alpha",
    "renyi",
]
