"""What torch runs of a formula: programs over tensors that are found once for a piece of rows, and their operations."""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback.backends.lowering import rewriter
from kullback.forms import FORMS, SIDES, softmax_of
from kullback.formula import TENSOR, Program, Symbol, Value, node, variable
from kullback.problem import Problem, formula, has_corner


class Way(enum.Enum):
    """How the elements of a row are evaluated."""

    EXACT = enum.auto()  # as the formula is written: near p = q and at 0 too
    PARTIALS = enum.auto()  # of normalised rows, by cheaper guards; terms add up as partial derivatives, by Euler
    FAST = enum.auto()  # nothing for p = q, 0 or infinity: sums tell where that was wrong
    FAR = enum.auto()  # the same, with log-ratios and q - p as they are rounded: in fewest operations
    IN_RANGE = enum.auto()  # literal rows without 0 or infinity: no guards


def _geometric_mean(p: Tensor, q: Tensor, ratio: Tensor, a: Value) -> Tensor:
    is_less = ratio < 0
    return torch.where(is_less, q, p) * torch.where(is_less, a * ratio, (a - 1.0) * ratio).exp_()


def _log_geometric_mean(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, ratio: Tensor, a: float) -> Tensor:
    """From the larger logarithm, which is the smaller number."""
    of_q, of_p = a * ratio, (a - 1.0) * ratio
    power = torch.minimum(of_q, of_p) if 0 < a < 1 else torch.where(ratio < 0, of_q, of_p)
    return power.add_(torch.maximum(log_p, log_q))


def _log_mix(ratio: Tensor, a: float, b: float) -> Tensor:
    """Where neither weight is nearly 1, so that no logarithm is of nearly 0."""
    if max(a, b) > 0.9:
        return TENSOR["log_mix"](ratio, a, b)  # type: ignore[no-any-return]
    less = ratio.abs().neg_().expm1_()
    return (a * less if a == b else torch.where(ratio < 0, a * less, b * less)).log1p_()


def _mass_times(mass: Tensor, x: Tensor) -> Tensor:
    """Of no NaN where the mass is 0, as `_ratio_or_zero`: they would be hidden."""
    return torch.mul(mass, x).masked_fill_(torch.eq(mass, 0), 0.0)


def _ratio_or_zero(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y).masked_fill_(torch.eq(x, 0), 0.0)


def _fraction(part: Tensor, whole: Tensor) -> Tensor:
    return torch.div(part, whole).masked_fill_(torch.eq(whole, 0), 0.0)


def _add_product(a: Value, b: Value, c: Value, sign: int = 1) -> Value:
    """a ± b·c in one operation; parameters are numbers."""
    if isinstance(c, float) and c == 0:
        return a
    tensors = [factor for factor in (b, c) if isinstance(factor, Tensor)]
    if not isinstance(a, Tensor) or not tensors:
        return a + sign * (b * c)
    if len(tensors) == 2:
        return torch.addcmul(a, b, c, value=sign)
    return torch.add(a, tensors[0], alpha=sign * (c if tensors[0] is b else b))


# Nothing is differentiated here: branches that are not taken need not be harmless.
GUARDED: Mapping[str, Callable[..., Any]] = {
    **TENSOR,
    "abs": torch.abs,
    "clamp": torch.clamp,
    "sqrt": torch.sqrt,
    "fraction": _fraction,
    "log_geometric_mean": _log_geometric_mean,
    "log_mix": _log_mix,
    "add_product": _add_product,
    "sub_product": functools.partial(_add_product, sign=-1),
}

# A row that holds NaN has no other masses: none is hidden by one of 0.
NORMALISED: Mapping[str, Callable[..., Any]] = {
    **GUARDED,
    "mass_times": _mass_times,
    "ratio_or_zero": _ratio_or_zero,
}

# Where no mass is 0 or negative and none infinite the guards have nothing to guard. Where one is, these give NaN
# or an infinity, but for the quotient of two negative masses.
UNGUARDED: Mapping[str, Callable[..., Any]] = {
    **GUARDED,
    "mass_times": torch.mul,
    "ratio_or_zero": operator.truediv,
    "in_range_geometric_mean": _geometric_mean,
    "fraction": operator.truediv,
    "log_quotient": lambda p, q: torch.div(p, q).log_(),
    "log_difference": operator.sub,
}

OPERATIONS = {
    Way.EXACT: GUARDED,
    Way.PARTIALS: NORMALISED,
    Way.FAST: UNGUARDED,
    Way.FAR: UNGUARDED,
    Way.IN_RANGE: UNGUARDED,
}


LOG_MASSES = {
    FORMS["logits"].log_mass(variable(element), softmax_of(side)): variable(name)
    for element, side, name in (("x", "input", "log_q"), ("y", "target", "log_p"))
}


def _rule(way: Way) -> Callable[[str, tuple[Value, ...]], Value]:
    """Logits' masses, their logarithms, ratio and difference are variables; a sum with a product is one operation."""
    is_unguarded = OPERATIONS[way] is UNGUARDED

    def rule(op: str, args: tuple[Value, ...]) -> Value:
        match op, args:
            case "sub", _ if node(op, *args) in LOG_MASSES:
                return LOG_MASSES[node(op, *args)]
            case "logit_mass", (logit, *_):
                return variable("q" if logit is variable("x") else "p")
            case "logit_difference", _:
                return variable("ratio")
            case "mass_difference", (_, _, ratio) if ratio is variable("ratio"):
                return variable("q_minus_p")
            case (("add" | "sub"), (Symbol() as a, Symbol(op="mul", args=(Symbol() as b, Symbol() as c)))):
                # Not of two products, one of which would be rounded and the other not: exchanging p and q shows.
                return node(op, *args) if a.op == "mul" else node(f"{op}_product", a, b, c)
            case "select_near", (_, _, _, far) if way in (Way.FAST, Way.FAR):
                return far
            case "select_near", (_, _, Symbol(op="ratio_or_zero") as near, _) if way is Way.PARTIALS:
                return near  # where nothing cancels it holds far, too: kinds are tested so
            case "where", (Symbol(op="lt", args=(x, bound)), other, most) if x is other and bound == most:
                return x if is_unguarded and bound == 1e38 else node("clamp", x, -math.inf, most)
            case "where", (Symbol(op="lt", args=(x, 0.0)), 0.0, other) if x is other:
                return node("clamp", x, 0.0, math.inf)
            case "where", (Symbol(op="lt", args=(x, 0.0)), 0.0, Symbol(op="clamp", args=(of, _, most))) if x is of:
                return node("clamp", x, 0.0, most)
            case "log_fraction", (_, _, value):
                return value
            case "select_normal", (_, normal, _) if is_unguarded:
                return normal
            case "geometric_mean", (p, q, _, _, ratio, a) if is_unguarded:
                return node("in_range_geometric_mean", p, q, ratio, a)
        return node(op, *args)

    return rule


PARTIALS = ("d_log_p", "d_log_q")


@functools.cache
def program(kind: str, form: str, target_form: str, way: Way, outputs: tuple[str, ...]) -> Program:
    """What computes these outputs of an element, and nothing else.

    `log_tilted` is a variable where it is not asked for, and so are partial derivatives where gradients alone are.
    """
    rewrite = rewriter(_rule(way))
    element = formula(kind, form, target_form).element
    known = ["log_tilted"] if "log_tilted" not in outputs else []
    if {*outputs} <= {*SIDES}:
        known += PARTIALS
    variables = {rewrite(element[name]): variable(name) for name in known}

    def reuse(x: Value) -> Value:
        if not isinstance(x, Symbol):
            return x
        if x in variables:
            return variables[x]
        return x if x.op == "variable" else node(x.op, *map(reuse, x.args))

    return Program({name: reuse(rewrite(element[name])) for name in outputs})


SMALL_SHARE = 0.02  # with less one partial derivative is the difference of numbers that are larger by so much


def adds_partials(kind: str, parameter: float, way: Way) -> bool:
    """Whether a row's sum of terms is found as that of partial derivatives. Where there is a corner they cancel."""
    if way in (Way.PARTIALS, Way.FAR):
        is_small = 0 < parameter < SMALL_SHARE or 1 - SMALL_SHARE < parameter < 1  # 0 of a kind that has none
        return not has_corner(kind) and not is_small
    return way is Way.FAST and traits(kind).is_sum_of_partials


def least_far_sum(problem: Problem) -> float:
    """`least_fast_sum` where log-ratios are rounded: where these, or signs, are summed, errors of masses show."""
    shows = traits(problem.kind).is_sum_of_partials or has_corner(problem.kind)
    return max(least_fast_sum(problem), 0.1 if shows else 0.02)


class Traits(NamedTuple):
    """What the formula of a kind between logits says of its sums."""

    is_sum_of_partials: bool  # whether its terms, where p and q are far, are written as those of partial derivatives
    least_fast_sum: float  # as of `least_fast_sum`, where nothing divides it


def least_fast_sum(problem: Problem) -> float:
    """Rows of less want the exact formula."""
    least, order = traits(problem.kind).least_fast_sum, problem.chernoff_exponent
    if order is None:
        return least
    return least * max(1.0, 0.5 / min(abs(order), abs(1 - order)))  # 1 - Σ p^a q^(1-a) is divided by a and by 1 - a


@functools.cache
def traits(kind: str) -> Traits:
    element = formula(kind, "logits", "logits").element
    rewrite = rewriter(_rule(Way.FAST))
    term, *partials = (rewrite(element[name]) for name in ("term", *PARTIALS))
    is_sum = isinstance(term, Symbol) and term.op == "add" and {*term.args} == {*partials}

    def selects(*outputs: str) -> bool:
        steps = Program({name: element[name] for name in outputs}).steps
        return any(step.op == "select_near" for step in steps)

    # A partial derivative is off by a rounding of a mass where it wants a select; without, by one of itself.
    if selects(*PARTIALS):
        least = 0.04
    elif selects("term"):
        least = 1e-3 if is_sum else 0.02
    else:
        least = 1e-6  # what normalisers are off by enters squared, 1e-14, and is taken off smaller sums
    return Traits(is_sum, least)
