"""An element's expression as kernels evaluate it: rewritten for what they have at hand, and split into slopes.

A divergence says what it is; how a kernel finds that best is derived here, from the expression alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kullback.divergences import DESCRIBED, DIVERGENCES
from kullback.forms import pair, softmax_of
from kullback.formula import (
    Program,
    Symbol,
    Value,
    absolute,
    node,
    select_near,
    small_expm1,
    variable,
    where,
)
from kullback.problem import formula, has_corner


def lowered(kind: str, form: str, target_form: str) -> Mapping[str, Value]:
    """`Formula.element` for kernels: a mass of a logit is a power, and so is what is made of such masses."""
    lower = rewriter(_lower)
    return {name: lower(value) for name, value in formula(kind, form, target_form).element.items()}


def near_element(kind: str) -> Mapping[str, Value]:
    """`lowered` for an element of logits in a row that is near.

    Its log-ratio is small, and nothing is chosen by its size. By the ratio and one mass the difference of masses is
    found, so that what that mass is off by is a factor of both. Where `has_sum_in_masses`, masses are to be multiplied
    by 1 - Σ d_log_q, and the sum divided by it: then the gradient of logits takes an operation less.
    """
    element = dict(_near_element(kind))
    if has_sum_in_masses(kind):  # p·(slope·(1 - sum) - sum), since q is p·(1 + slope)
        element["input"] = element["d_log_q"] - element["p"] * softmax_of("input").grad_sum
    return element


def has_sum_in_masses(kind: str) -> bool:
    """Whether d_log_q is q - p, and so has p as a factor."""
    element = _near_element(kind)
    slope, excess = (quotient(element[name], element["p"]) for name in ("d_log_q", "q_minus_p"))
    return slope is not None and slope is excess


@functools.cache
def _near_element(kind: str) -> Mapping[str, Value]:
    lower = rewriter(_lower_near)
    return {name: lower(value) for name, value in formula(kind, "logits", "logits").element.items()}


@functools.cache
def with_corner() -> str:
    """The one described kind that has a corner: kernels find its sum and its slope apart."""
    (kind,) = filter(has_corner, DESCRIBED)
    return kind


@functools.cache
def described_terms() -> Program:
    """Of an element of logits the terms of DESCRIBED kinds; q - p; and the slope of the term that has a corner.

    That is its derivative where log p grows as log q shrinks, as they do when an excess of q is shared.
    """
    both = pair("logits", "logits", variable("x"), variable("y"))
    elements = {kind: DIVERGENCES[kind](both, *DIVERGENCES[kind].defaults.values()) for kind in DESCRIBED}
    terms = {kind: element.term for kind, element in elements.items()}
    corner, lower = elements[with_corner()], rewriter(_lower)
    terms |= {"q_minus_p": both.q_minus_p, "slope": corner.d_log_p - corner.d_log_q}
    return Program({name: lower(value) for name, value in terms.items()})


def rewriter(rule: Callable[[str, tuple[Value, ...]], Value]) -> Callable[[Value], Value]:
    """The rule applied to each node of an expression, operands first."""

    @functools.cache
    def rewrite(x: Value) -> Value:
        if not isinstance(x, Symbol) or x.op == "variable":
            return x
        return rule(x.op, tuple(map(rewrite, x.args)))

    return rewrite


def _lower(op: str, args: tuple[Value, ...]) -> Value:
    match op, args:
        case "sqrt", (x,) if _are_logit_masses(x):
            return node("logit_sqrt", *x.args)
        case "geometric_mean", (p, q, log_p, log_q, ratio, a):
            if _are_logit_masses(p, q):
                return node("logit_geometric_mean", *p.args, *q.args, ratio, a)
            larger, log_larger = where(ratio < 0.0, q, p), where(ratio < 0.0, log_q, log_p)
            return node("mass_times_exp", larger, log_larger, where(ratio < 0.0, a * ratio, (a - 1.0) * ratio))
        case "log_geometric_mean", (p, q, log_p, log_q, ratio, a):
            if _are_logit_masses(p, q):
                return node("logit_log_geometric_mean", *p.args, *q.args, ratio, a)
            return where(ratio < 0.0, log_q, log_p) + where(ratio < 0.0, a * ratio, (a - 1.0) * ratio)
        case "exp", (Symbol(op="sub", args=(Symbol(op="logit_log_geometric_mean", args=log_mean), log_total)),):
            return node("logit_tilted_mass", *log_mean, log_total)
        case "mass_difference", (p, q, ratio):
            # p·expm1(-ratio) loses nothing where p and q are near; where they are far it may be 0·inf. Of the larger,
            # so that exchanging them changes the sign and not a bit.
            less = small_expm1(-absolute(ratio))
            return select_near(ratio, 0.5, where(ratio < 0.0, -(q * less), p * less), q - p)
        case "mixture", (a, p, b, q) if not _are_logit_masses(p, q):
            return a * p + b * q
        case "logit_difference", (y, y_scale, x, x_scale, high, low):
            return node("logit_ratio", y, variable("target_max"), y_scale, x, variable("input_max"), x_scale, high, low)
        case "log_fraction", (part, whole, value):
            return node("logit_log_fraction", *part.args, whole, value) if _are_logit_masses(part) else value
    return node(op, *args)


def _lower_near(op: str, args: tuple[Value, ...]) -> Value:
    match op, args:
        case "mass_difference", (p, _, ratio):
            of_p = p * ratio
            return of_p * node("small_exp_slope", ratio) - of_p
        case "mul", (mass, Symbol(op="small_exp_remainder", args=(d,))):  # so that a sum of them has one product each
            return mass * d * node("small_exp_slope", d)
        case "select_near", (_, _, near, _):
            return near
    return _lower(op, args)


def _are_logit_masses(*masses: Value) -> bool:
    return all(isinstance(mass, Symbol) and mass.op == "logit_mass" for mass in masses)


class Slopes(NamedTuple):
    """The partial derivatives over their masses, in a row that is far, by what differs between its elements.

    d_log_q / q = factor_q · rest_q + offset_q
    d_log_p / p = factor_p · (rest_p + coupling · rest_q) + offset_p
    """

    rest_p: Value
    rest_q: Value
    factor_p: Value
    offset_p: Value
    factor_q: Value
    offset_q: Value
    coupling: Value


@functools.cache
def slopes_of(kind: str) -> Slopes | None:
    """Of a kind between logits; None where a derivative has not its mass as a factor."""
    element = lowered(kind, "logits", "logits")
    of_p, of_q = quotient(element["d_log_p"], element["p"]), quotient(element["d_log_q"], element["q"])
    if of_p is None or of_q is None:
        return None
    terms_q, offset_q = _terms(of_q)
    rest_q, factor_q = next(iter(terms_q.items())) if len(terms_q) == 1 else (of_q, 1.0)
    offset_q = offset_q if len(terms_q) == 1 else 0.0
    terms_p, offset_p = _terms(of_p)
    coupled = terms_p.pop(rest_q, 0.0) if len(terms_p) > 1 else 0.0
    if len(terms_p) == 1:
        rest_p, factor_p = next(iter(terms_p.items()))
    else:
        rest_p, factor_p, offset_p, coupled = of_p, 1.0, 0.0, 0.0
    coupling = 0.0 if _is_number(coupled, 0.0) else coupled / factor_p
    return Slopes(rest_p, rest_q, factor_p, offset_p, factor_q, offset_q, coupling)


@functools.cache
def slopes_are_logs(kind: str) -> bool:
    """Whether each derivative is a multiple of a logarithm of its mass's part of a mixture, and so small near p = q."""
    found = slopes_of(kind)
    rests = () if found is None else (found.rest_p, found.rest_q)
    return bool(rests) and all(getattr(rest, "op", None) == "logit_log2_fraction" for rest in rests)


def quotient(x: Value, mass: Value) -> Value | None:
    """x / mass where the mass is a factor of x, else None."""
    if x is mass:
        return 1.0
    if not isinstance(x, Symbol):
        return None
    match x.op, x.args:
        case "mul", (a, b):
            of_a = quotient(a, mass)
            if of_a is not None:
                return _product(of_a, b)
            of_b = quotient(b, mass)
            return None if of_b is None else _product(a, of_b)
        case "mass_times", (a, b) if a is mass:
            return b
        case "neg", (a,):
            of_a = quotient(a, mass)
            return None if of_a is None else -of_a
        case ("add" | "sub") as op, (a, b):
            of_a, of_b = quotient(a, mass), quotient(b, mass)
            return None if of_a is None or of_b is None else node(op, of_a, of_b)
        case ("select_near" | "where") as op, (*condition, a, b):
            of_a, of_b = quotient(a, mass), quotient(b, mass)
            return None if of_a is None or of_b is None else node(op, *condition, of_a, of_b)
    return None


def _terms(x: Value) -> tuple[dict[Symbol, Value], Value]:
    """x in a row that is far, as Σ factor · term + offset: factors and offset are the same for all its elements."""
    terms: dict[Symbol, Value] = {}
    offsets: list[Value] = []

    def visit(x: Value, factor: Value) -> None:
        if _is_common(x):
            offsets.append(_product(factor, x))
            return
        match x.op, x.args:
            case "add", (a, b):
                visit(a, factor)
                visit(b, factor)
            case "sub", (a, b):
                visit(a, factor)
                visit(b, _negative(factor))
            case "neg", (a,):
                visit(a, _negative(factor))
            case "mul", (a, b) if _is_common(a):
                visit(b, _product(factor, a))
            case "mul", (a, b) if _is_common(b):
                visit(a, _product(factor, b))
            case "select_near", (_, _, _, far):
                visit(far, factor)
            case "logit_log_fraction", args:
                add(node("logit_log2_fraction", *args), _product(factor, math.log(2)))
            case "half_sign", (a,):
                add(node("step", a), factor)
                offsets.append(_product(factor, -0.5))
            case _:
                add(x, factor)

    def add(term: Symbol, factor: Value) -> None:
        terms[term] = terms[term] + factor if term in terms else factor

    visit(x, 1.0)
    return terms, functools.reduce(_sum, offsets, 0.0)


def _is_common(x: Value) -> bool:
    """Whether it is the same for all elements of a row."""
    if not isinstance(x, Symbol):
        return True
    return x.args[0] not in ("x", "y") if x.op == "variable" else all(map(_is_common, x.args))


def _is_number(x: Value, number: float) -> bool:
    return not isinstance(x, Symbol) and x == number


def _product(a: Value, b: Value) -> Value:
    if _is_number(a, 0.0) or _is_number(b, 0.0):
        return 0.0
    if _is_number(a, 1.0) or _is_number(b, 1.0):
        return b if _is_number(a, 1.0) else a
    if _is_number(a, -1.0) or _is_number(b, -1.0):
        return _negative(b if _is_number(a, -1.0) else a)
    return a * b


def _sum(a: Value, b: Value) -> Value:
    if _is_number(a, 0.0) or _is_number(b, 0.0):
        return b if _is_number(a, 0.0) else a
    return a + b


def _negative(x: Value) -> Value:
    return x.args[0] if isinstance(x, Symbol) and x.op == "neg" else -x
