"""What torch runs of a formula: programs over tensors that are found once for a piece of rows, and their operations."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback.backends.lowering import rewriter
from kullback.formula import TENSOR, Program, Symbol, Value, node, variable
from kullback.problem import formula


class Way(enum.Enum):
    """How the elements of a row are evaluated."""

    EXACT = enum.auto()  # as the formula is written: near p = q and at 0 too
    PARTIALS = enum.auto()  # the same, but for terms: a row's sum of them is that of its partial derivatives, by Euler
    FAST = enum.auto()  # nothing for p = q, 0 or infinity: sums tell where that was wrong
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
    """0 where the mass is, unless x is finite and so is the product: one pass over it, and none for a mask of x."""
    return torch.mul(mass, x).masked_fill_(torch.eq(mass, 0), 0.0)


def _add_product(a: Value, b: Value, c: Value, sign: int = 1) -> Value:
    """a ± b·c in one operation; parameters are numbers."""
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
    "log_geometric_mean": _log_geometric_mean,
    "log_mix": _log_mix,
    "add_product": _add_product,
    "sub_product": functools.partial(_add_product, sign=-1),
}

# Where no mass is 0 or negative and none infinite the guards have nothing to guard. Where one is, these give NaN
# or an infinity, but for the quotient of two negative masses.
UNGUARDED: Mapping[str, Callable[..., Any]] = {
    **GUARDED,
    "mass_times": torch.mul,
    "ratio_or_zero": operator.truediv,
    "in_range_geometric_mean": _geometric_mean,
    "fraction": operator.truediv,
    "sqrt": torch.sqrt,
    "log_quotient": lambda p, q: torch.div(p, q).log_(),
    "log_difference": operator.sub,
}

OPERATIONS = {Way.EXACT: GUARDED, Way.PARTIALS: GUARDED, Way.FAST: UNGUARDED, Way.IN_RANGE: UNGUARDED}


def _rule(way: Way) -> Callable[[str, tuple[Value, ...]], Value]:
    """Masses of logits, their log-ratio and their difference are variables; a sum with a product is one operation."""
    is_unguarded = OPERATIONS[way] is UNGUARDED

    def rule(op: str, args: tuple[Value, ...]) -> Value:
        match op, args:
            case "logit_mass", (logit, *_):
                return variable("q" if logit is variable("x") else "p")
            case "logit_difference", _:
                return variable("ratio")
            case "mass_difference", (_, _, ratio) if ratio is variable("ratio"):
                return variable("q_minus_p")
            case (("add" | "sub"), (Symbol() as a, Symbol(op="mul", args=(Symbol() as b, Symbol() as c)))):
                # Not of two products, one of which would be rounded and the other not: exchanging p and q shows.
                return node(op, *args) if a.op == "mul" else node(f"{op}_product", a, b, c)
            case "select_near", (_, _, _, far) if way is Way.FAST:
                return far
            case "where", (Symbol(op="lt", args=(x, 1e38)), finite, 1e38) if is_unguarded and x is finite:
                return finite
            case "select_normal", (_, normal, _) if is_unguarded:
                return normal
            case "geometric_mean", (p, q, _, _, ratio, a) if is_unguarded:
                return node("in_range_geometric_mean", p, q, ratio, a)
        return node(op, *args)

    return rule


@functools.cache
def program(kind: str, form: str, target_form: str, way: Way, outputs: tuple[str, ...]) -> Program:
    """What computes these outputs of an element, and nothing else."""
    rewrite = rewriter(_rule(way))
    element = formula(kind, form, target_form).element
    return Program({name: rewrite(element[name]) for name in outputs})


class Traits(NamedTuple):
    """What the formula of a kind between logits says of its sums."""

    adds_partials: (
        bool  # whether its terms, where p and q are far, are written as the sums of their partial derivatives
    )
    least_fast_sum: float  # rows of less want the exact formula


@functools.cache
def traits(kind: str) -> Traits:
    element = formula(kind, "logits", "logits").element
    rewrite = rewriter(_rule(Way.FAST))
    term, *partials = (rewrite(element[name]) for name in ("term", "d_log_p", "d_log_q"))
    adds_partials = isinstance(term, Symbol) and term.op == "add" and {*term.args} == {*partials}

    def selects(*outputs: str) -> bool:
        steps = Program({name: element[name] for name in outputs}).steps
        return any(step.op == "select_near" for step in steps)

    # A partial derivative is off by a rounding of a mass where it wants a select; without, by one of itself.
    if selects("d_log_p", "d_log_q"):
        least = 0.04
    elif selects("term"):
        least = 1e-3 if adds_partials else 0.02
    else:
        least = 1e-6  # what normalisers are off by enters squared, 1e-14, and is taken off smaller sums
    return Traits(adds_partials, least)
