"""How a row encodes a distribution: probs, log_probs or logits, each side on its own.

A form says what mass and log-mass an element has, and how a gradient in log-mass becomes one in the
element. Only logits need to know the row (its `Softmax`); only they are normalised by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kullback.divergences import Pair
from kullback.formula import (
    Value,
    exp,
    log,
    log_difference,
    log_quotient,
    logit_difference,
    logit_mass,
    mass_difference,
    ratio_or_zero,
    variable,
)


class Softmax(NamedTuple):
    """What an element of a row of logits has to know of the row."""

    inv_temperature: Value
    max: Value  # of the logits; any number near it serves
    inv_sum_exp: Value  # 1 / Σ exp((x - max)·inv_temperature)
    log_sum_exp: Value  # the logarithm of that sum
    grad_sum: Value  # Σ of the row's gradient in log-mass; known once the row has been summed


class Form(NamedTuple):
    """`mass` and `log_mass` of an element; `pull_back(element, mass, gradient in log-mass, softmax)`.

    A gradient of logits is that of the logit over its temperature: whoever multiplies by the upstream gradient has the
    temperature in the same factor.
    """

    mass: Callable[[Value, Softmax], Value]
    log_mass: Callable[[Value, Softmax], Value]
    pull_back: Callable[[Value, Value, Value, Softmax], Value]
    in_range: tuple[float, float] | None  # elements in this open interval need no guard against 0 and infinity
    nothing: float  # an element without mass
    normalised: bool = False


FORMS: dict[str, Form] = {
    "probs": Form(
        mass=lambda x, softmax: x,
        log_mass=lambda x, softmax: log(x),
        pull_back=lambda x, mass, gradient, softmax: ratio_or_zero(gradient, x),
        in_range=(1e-30, 1e6),  # and the quotient of two is a normal float32
        nothing=0.0,
    ),
    "log_probs": Form(
        mass=lambda x, softmax: exp(x),
        log_mass=lambda x, softmax: x,
        pull_back=lambda x, mass, gradient, softmax: gradient,
        in_range=(-69.0, 69.0),
        nothing=-math.inf,
    ),
    "logits": Form(
        mass=lambda x, softmax: logit_mass(x, softmax.max, softmax.inv_temperature, softmax.inv_sum_exp),
        log_mass=lambda x, softmax: (x - softmax.max) * softmax.inv_temperature - softmax.log_sum_exp,
        pull_back=lambda x, mass, gradient, softmax: gradient - mass * softmax.grad_sum,
        in_range=None,  # a finite logit may have no mass
        nothing=-math.inf,
        normalised=True,
    ),
}

SIDES = ("input", "target")
# What an expression may name of a row. log_z_diff is the log-sum-exp of the target's logits less that of the input's,
# as a sum of two numbers; tilted_lse is `Pair`'s.
ROW_VARIABLES = (
    *(f"{side}_{field}" for side in SIDES for field in Softmax._fields),
    "log_z_diff_high",
    "log_z_diff_low",
    "tilted_lse",
)


def softmax_of(side: str) -> Softmax:
    """The row's variables of a side."""
    return Softmax(*(variable(f"{side}_{field}") for field in Softmax._fields))


def pair(form: str, target_form: str, x: Value, y: Value) -> Pair:
    """The element (x of the input, y of the target) as masses."""
    own, other = map(softmax_of, SIDES)
    q = FORMS[form].mass(x, own)
    p = FORMS[target_form].mass(y, other)
    log_q, log_p = FORMS[form].log_mass(x, own), FORMS[target_form].log_mass(y, other)
    if form == target_form == "probs":
        return Pair(p, q, log_p, log_q, log_quotient(p, q), q - p, 0.0, centred=False)
    if form == target_form == "logits":
        high, low = variable("log_z_diff_high"), variable("log_z_diff_low")
        ratio = logit_difference(y, other.inv_temperature, x, own.inv_temperature, high, low)
    else:
        ratio = log_difference(log_p, log_q)
    q_minus_p = mass_difference(p, q, ratio)
    centred = FORMS[form].normalised and FORMS[target_form].normalised
    return Pair(p, q, log_p, log_q, ratio, q_minus_p, variable("tilted_lse"), centred)
