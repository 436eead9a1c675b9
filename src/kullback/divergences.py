"""Every divergence: one function each.

A function receives one element of a row, as a `Pair`, and returns its term and the term's partial
derivatives in log p and log q. These stay finite where derivatives in p and q overflow. Every term is
1-homogeneous in (p, q), so the two partials sum to the term (Euler); a test holds each function to it.

`pair.centred` says that both rows are normalised (logits). Then c·(p - q), which sums to zero, may be
taken off each term: with c = f'(1) every term is >= 0 and an error in a normaliser enters squared
(docs/mathematics.md). Otherwise the sum is the definition as written, normalised or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kullback.formula import (
    Value,
    absolute,
    bregman,
    expm1,
    gap,
    half_sign,
    log,
    log1p,
    log_blend,
    log_part,
    log_quotient,
    mass_times,
    mixture,
    near,
    overlap,
    part_of,
    ratio_or_zero,
    small_bregman,
    small_gap,
    sqrt,
    where,
)


class Pair(NamedTuple):
    """One element of a row: p of the target, q of the input."""

    p: Value
    q: Value
    ratio: Value  # log p - log q; 0 where p = q = 0
    excess: Value  # q - p, without cancellation
    centred: bool


class Finish(NamedTuple):
    """What becomes of a row's sum, and the derivative of that."""

    loss: Value
    slope: Value


def identity(total: Value) -> Finish:
    return Finish(total, 1.0)


class Element(NamedTuple):
    term: Value
    d_log_p: Value
    d_log_q: Value
    finish: Callable[[Value], Finish] = identity
    slope_p: Value = 0.0  # d_log_p / p - lean · slope_q, of kinds without moments: kernels may sum and keep these
    slope_q: Value = 0.0  # d_log_q / q
    lean: Value = 0.0  # of the parameters


class Moments(NamedTuple):
    """Sums of a row that follow from those of its parts, in whatever unit each part has its masses.

    A kind that is a function of them is summed by kernels while the row's norms are still being found.
    """

    cross_p: Value  # Σ p log(p/q)
    cross_q: Value  # Σ q log(p/q)
    overlap: Callable[[Value], Value]  # a -> Σ p^a q^(1-a); a kind asks for one a


def kl(x: Pair) -> Element:
    """Σ p log(p/q)"""
    if x.centred:  # p·(ratio + e^-ratio - 1) = p·ratio + excess
        term = near(x.ratio, 0.5, x.p * small_gap(x.ratio), mass_times(x.p, x.ratio) + x.excess)
        return Element(term, mass_times(x.p, x.ratio), x.excess)
    term = mass_times(x.p, x.ratio)
    return Element(term, term + x.p, -x.p)


def reverse_kl(x: Pair) -> Element:
    """Σ q log(q/p)"""
    swapped = kl(Pair(x.q, x.p, -x.ratio, -x.excess, x.centred))
    return Element(swapped.term, swapped.d_log_q, swapped.d_log_p)


def jeffreys(x: Pair) -> Element:
    """Σ (p - q) log(p/q)"""
    return Element(
        -x.excess * x.ratio,
        mass_times(x.p, x.ratio) - x.excess,
        x.excess - mass_times(x.q, x.ratio),
    )


def jensen_shannon(x: Pair, weight: Value = 0.5) -> Element:
    """w Σ p log(p/m) + (1-w) Σ q log(q/m), m = w·p + (1-w)·q"""
    other = 1.0 - weight
    m = mixture(weight, x.p, other, x.q)
    relative = part_of(-x.excess, m)  # (p - q) / m
    # One logarithm for both shares: of the larger, whose part of the mixture is never small.
    if x.centred:
        is_less = x.ratio < 0.0
        larger = -log_blend(x.ratio, weight, other)
        p_share = log_part(x.p, m, larger + where(is_less, x.ratio, 0.0))
        # Finite also where q is 0, as p's is where p is: exchanging them changes nothing.
        q_share = log_part(x.q, m, larger - where(is_less, 0.0, where(x.ratio < 1e38, x.ratio, 1e38)))
        p_term = divergence_from(m, x.p, p_share, other * relative)
        q_term = divergence_from(m, x.q, q_share, -(weight * relative))
        term = weight * p_term + other * q_term
    else:
        p_over = at_least(other * relative, -1.0)  # p/m - 1
        q_over = at_least(-(weight * relative), -1.0)  # q/m - 1
        is_less = x.excess > 0.0
        larger = log_quotient(where(is_less, x.q, x.p), m)
        p_share = near(p_over, 0.25, log1p(p_over), where(is_less, larger + x.ratio, larger))
        q_share = near(q_over, 0.25, log1p(q_over), where(is_less, larger, larger - x.ratio))
        term = m * (weight * bregman(p_over) + other * bregman(q_over))
    d_log_p, d_log_q = weight * mass_times(x.p, p_share), other * mass_times(x.q, q_share)
    return Element(term, d_log_p, d_log_q, slope_p=weight * p_share, slope_q=other * q_share)


def skew_kl(x: Pair, alpha: Value = 0.1) -> Element:
    """Σ p log(p/m), m = a·p + (1-a)·q"""
    other = 1.0 - alpha
    m = mixture(alpha, x.p, other, x.q)
    relative = part_of(x.excess, m)  # (q - p) / m
    over = -(other * relative)  # p/m - 1
    if x.centred:
        share = near(over, 0.25, log1p(over), log_part(x.p, m, log(part_of(x.p, m))))
        term = divergence_from(m, x.p, share, over)
        slope_q = other * other * relative
        d_log_p, d_log_q = mass_times(x.p, share - alpha * over), slope_q * x.q
        return Element(term, d_log_p, d_log_q, slope_p=share, slope_q=slope_q, lean=alpha / (other + 1e-30))
    over = at_least(over, -1.0)
    # A mixture of subnormal masses may round to 0.
    apart = where(absolute(m) < 1e-45, 0.0, log_quotient(x.p, m))
    plain = mass_times(x.p, near(over, 0.25, log1p(over), apart))
    q_share = other * part_of(x.q, m)  # of q in m
    return Element(plain, plain + x.p * q_share, -(x.p * q_share))


def total_variation(x: Pair) -> Element:
    """½ Σ |p - q|; the gradient at ties is 0"""
    half = half_sign(x.excess)
    return Element(0.5 * absolute(x.excess), -(half * x.p), half * x.q, slope_p=-half, slope_q=half)


def hellinger(x: Pair) -> Element:
    """½ Σ (√p - √q)²"""
    root_p, root_q = sqrt(x.p), sqrt(x.q)
    difference = near(x.ratio, 0.5, ratio_or_zero(x.excess, root_p + root_q), root_q - root_p)
    return Element(0.5 * difference * difference, -(0.5 * root_p * difference), 0.5 * root_q * difference)


def chi2(x: Pair) -> Element:
    """Σ (p - q)²/q"""
    relative = ratio_or_zero(x.excess, x.q)
    return Element(
        x.excess * relative,
        -(2.0 * mass_times(x.p, relative)),
        2.0 * x.excess - x.excess * relative,
    )


def alpha(x: Pair, alpha: Value = 0.5) -> Element:
    """(1 - Σ p^a q^(1-a)) / (a(1-a)), Amari's"""
    other = 1.0 - alpha
    if x.centred:
        shortfall = alpha_shortfall(x, alpha)
        scale = 1.0 / (alpha * other)
        return Element(scale * shortfall.term, scale * shortfall.d_log_p, scale * shortfall.d_log_q)
    scale = 1.0 / (alpha * other)
    term = -(scale * overlap(x.p, x.q, x.ratio, alpha))
    return Element(term, alpha * term, other * term, lambda total: Finish(scale + total, 1.0))


def renyi(x: Pair, alpha: Value = 0.5) -> Element:
    """log(Σ p^a q^(1-a)) / (a-1)"""
    other = 1.0 - alpha
    if x.centred:
        shortfall = alpha_shortfall(x, alpha)
        return Element(
            *shortfall[:3],
            lambda total: Finish(-log1p(-total) / other, 1.0 / (other * (1.0 - total))),
        )
    term = overlap(x.p, x.q, x.ratio, alpha)
    return Element(
        term,
        alpha * term,
        other * term,
        lambda total: Finish(-log(total) / other, -1.0 / (other * total)),
    )


def kl_of(m: Moments) -> Element:
    return Element(m.cross_p, m.cross_p, 0.0)


def reverse_kl_of(m: Moments) -> Element:
    return Element(-m.cross_q, 0.0, -m.cross_q)


def jeffreys_of(m: Moments) -> Element:
    return Element(m.cross_p - m.cross_q, m.cross_p, -m.cross_q)


def hellinger_of(m: Moments) -> Element:
    shortfall = 1.0 - m.overlap(0.5)
    return Element(shortfall, 0.5 * shortfall, 0.5 * shortfall)


def chi2_of(m: Moments) -> Element:
    surplus = m.overlap(2.0) - 1.0
    return Element(surplus, 2.0 * surplus, -surplus)


def alpha_of(m: Moments, alpha: Value = 0.5) -> Element:
    other = 1.0 - alpha
    shortfall = 1.0 - m.overlap(alpha)
    return Element(shortfall / (alpha * other), shortfall / other, shortfall / alpha)


def renyi_of(m: Moments, alpha: Value = 0.5) -> Element:
    shortfall = 1.0 - m.overlap(alpha)
    return Element(shortfall, alpha * shortfall, (1.0 - alpha) * shortfall)


def alpha_shortfall(x: Pair, alpha: Value) -> Element:
    """a·p + (1-a)·q - p^a q^(1-a): what the overlap lacks to the weighted mean."""
    other = 1.0 - alpha
    both = overlap(x.p, x.q, x.ratio, alpha)
    term = near(
        x.ratio,
        0.5,
        x.p * (other * gap(x.ratio) - gap(other * x.ratio)),
        alpha * x.p + other * x.q - both,
    )
    d_log_p = near(x.ratio, 0.5, -(x.p * expm1(-(other * x.ratio))), x.p - both)
    d_log_q = near(x.ratio, 0.5, -(x.q * expm1(alpha * x.ratio)), x.q - both)
    return Element(term, alpha * d_log_p, other * d_log_q)


def divergence_from(m: Value, mass: Value, share: Value, over: Value) -> Value:
    """mass·log(mass/m) + m - mass >= 0, of the logarithm and mass/m - 1"""
    return near(over, 1 / 3, m * small_bregman(over), mass_times(mass, share) + (m - mass))


def at_least(x: Value, bound: float) -> Value:
    """max(x, bound) that lets NaN through."""
    return where(x < bound, bound, x)


class Divergence(NamedTuple):
    element: Callable[..., Element]
    parameters: Mapping[str, float] = MappingProxyType({})  # names and defaults
    domain: str = ""  # of the parameter, in words, and
    admits: Callable[[float], bool] = lambda value: True  # as a test
    # The sums of term, d_log_p and d_log_q over a normalised row, as centred, where they follow from its moments
    of_moments: Callable[..., Element] | None = None


DIVERGENCES: dict[str, Divergence] = {
    "kl": Divergence(kl, of_moments=kl_of),
    "reverse_kl": Divergence(reverse_kl, of_moments=reverse_kl_of),
    "jeffreys": Divergence(jeffreys, of_moments=jeffreys_of),
    "jensen_shannon": Divergence(
        jensen_shannon,
        {"weight": 0.5},
        "between 0 and 1, and not so near that float32 takes it for either",
        lambda w: 1.2e-38 < w < 1 - 3e-8,
    ),
    "skew_kl": Divergence(skew_kl, {"alpha": 0.1}, "at least 0 and less than 1", lambda a: 0 <= a < 1),
    "total_variation": Divergence(total_variation),
    "hellinger": Divergence(hellinger, of_moments=hellinger_of),
    "chi2": Divergence(chi2, of_moments=chi2_of),
    "alpha": Divergence(alpha, {"alpha": 0.5}, "finite, not 0 and not 1", lambda a: a not in (0, 1), alpha_of),
    "renyi": Divergence(renyi, {"alpha": 0.5}, "positive and not 1", lambda a: a > 0 and a != 1, renyi_of),
}
