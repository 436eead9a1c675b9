"""How a row encodes a distribution: probs, log_probs or logits, each side on its own.

A form says what mass and log-mass an element has, and how a gradient in log-mass becomes one in the
element. Only logits need to know the row (its `Norm`); only they are normalised by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kullback.divergences import Pair
from kullback.formula import (
    Value,
    absolute,
    exp,
    log,
    log_difference,
    log_quotient,
    logit_difference,
    logit_mass,
    near,
    ratio_or_zero,
    small_expm1,
    where,
)


class Norm(NamedTuple):
    """A row of logits: its maximum, the sum of exp(scale·(x - top)) inverted, and the logarithm of that sum."""

    scale: Value  # 1 / temperature
    top: Value
    inverse_total: Value
    log_total: Value
    sum_gradient: Value  # Σ of the row's gradient in log-mass; known once the row has been summed


class Form(NamedTuple):
    """`mass` and `log_mass` of an element; `pull_back(element, mass, gradient in log-mass, norm)`.

    A gradient of logits is that of the logit times its scale: whoever multiplies by the upstream gradient has the scale
    in the same factor.
    """

    mass: Callable[[Value, Norm], Value]
    log_mass: Callable[[Value, Norm], Value]
    pull_back: Callable[[Value, Value, Value, Norm], Value]
    tame: tuple[float, float] | None  # elements in this open interval need no guard against 0 and infinity
    normalised: bool = False


FORMS: dict[str, Form] = {
    "probs": Form(
        mass=lambda x, norm: x,
        log_mass=lambda x, norm: log(x),
        pull_back=lambda x, mass, gradient, norm: ratio_or_zero(gradient, x),
        tame=(1e-30, 1e6),  # and the quotient of two is a normal float32
    ),
    "log_probs": Form(
        mass=lambda x, norm: exp(x),
        log_mass=lambda x, norm: x,
        pull_back=lambda x, mass, gradient, norm: gradient,
        tame=(-69.0, 69.0),
    ),
    "logits": Form(
        mass=lambda x, norm: logit_mass(x, norm.top, norm.scale, norm.inverse_total),
        log_mass=lambda x, norm: (x - norm.top) * norm.scale - norm.log_total,
        pull_back=lambda x, mass, gradient, norm: gradient - mass * norm.sum_gradient,
        tame=None,  # a finite logit may have no mass
        normalised=True,
    ),
}


class Shift(NamedTuple):
    """log-normaliser of the target less that of the input, as a sum of two numbers."""

    high: Value
    low: Value


def pair(form: str, target_form: str, x: Value, y: Value, norm: Norm, target_norm: Norm, shift: Shift) -> Pair:
    """The element (x of the input, y of the target) as masses."""
    q = FORMS[form].mass(x, norm)
    p = FORMS[target_form].mass(y, target_norm)
    if form == target_form == "probs":
        return Pair(p, q, log_quotient(p, q), q - p, centred=False)
    if form == target_form == "logits":
        ratio = logit_difference(y, target_norm.scale, x, norm.scale, shift.high, shift.low)
    else:
        ratio = log_difference(FORMS[target_form].log_mass(y, target_norm), FORMS[form].log_mass(x, norm))
    # p·expm1(-ratio) loses nothing where p and q are near; where they are far it may be 0·inf. Of the larger, so that
    # exchanging them changes the sign and not a bit.
    less = small_expm1(-absolute(ratio))
    excess = near(ratio, 0.5, where(ratio < 0.0, -(q * less), p * less), q - p)
    centred = FORMS[form].normalised and FORMS[target_form].normalised
    return Pair(p, q, ratio, excess, centred)
