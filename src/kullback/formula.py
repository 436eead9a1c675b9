"""Arithmetic that means the same on symbols and on tensors.

A divergence is written with the operators below. Called on symbols it builds an expression, which
`printer` prints as C and `Program.run` evaluates on tensors; called on tensors it computes at once,
differentiably. The vocabulary is closed: what is not in `TENSOR` cannot be written, printed or run.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


class Symbol:
    """A node of an expression. Nodes are interned: equal expressions are the same object."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        self.op = op
        self.args = args

    def __add__(self, other: Value) -> Value:
        return _apply("add", self, other)

    def __radd__(self, other: Value) -> Value:
        return _apply("add", other, self)

    def __sub__(self, other: Value) -> Value:
        return _apply("sub", self, other)

    def __rsub__(self, other: Value) -> Value:
        return _apply("sub", other, self)

    def __mul__(self, other: Value) -> Value:
        return _apply("mul", self, other)

    def __rmul__(self, other: Value) -> Value:
        return _apply("mul", other, self)

    def __truediv__(self, other: Value) -> Value:
        return _apply("div", self, other)

    def __rtruediv__(self, other: Value) -> Value:
        return _apply("div", other, self)

    def __neg__(self) -> Value:
        return _apply("neg", self)

    def __lt__(self, other: Value) -> Value:
        return _apply("lt", self, other)

    def __gt__(self, other: Value) -> Value:
        return _apply("lt", other, self)


Value: TypeAlias = Any  # Symbol | Tensor | float: one formula serves all three


@functools.cache
def node(op: str, *args: Any) -> Symbol:
    """The one node of that operation on those operands."""
    return Symbol(op, args)


def variable(name: str) -> Symbol:
    """The symbol of that name."""
    return node("variable", name)


def _apply(op: str, *args: Value) -> Value:
    if any(isinstance(a, Symbol) for a in args):
        return node(op, *(a if isinstance(a, Symbol) else float(a) for a in args))
    return TENSOR[op](*args)


def exp(x: Value) -> Value:
    return _apply("exp", x)


def expm1(x: Value) -> Value:
    return _apply("expm1", x)


def small_expm1(x: Value) -> Value:
    """exp(x) - 1 where |x| <= 1/2 is known: no exponential."""
    return _apply("small_expm1", x)


def log(x: Value) -> Value:
    return _apply("log", x)


def log1p(x: Value) -> Value:
    return _apply("log1p", x)


def sqrt(x: Value) -> Value:
    return _apply("sqrt", x)


def absolute(x: Value) -> Value:
    return _apply("abs", x)


def half_sign(x: Value) -> Value:
    """½ for x > 0, -½ for x < 0, else 0."""
    return _apply("half_sign", x)


def where(condition: Value, x: Value, y: Value) -> Value:
    return _apply("where", condition, x, y)


def select_near(x: Value, bound: float, near: Value, far: Value) -> Value:
    """`near` where |x| < bound, else `far`: two ways to one value, each right where the other loses digits.

    A kernel that knows a whole row to be far leaves `near` out.
    """
    return _apply("select_near", x, bound, near, far)


def mass_times(mass: Value, x: Value) -> Value:
    """mass · x, where 0 · ±inf = 0. NaN stays NaN."""
    return _apply("mass_times", mass, x)


def ratio_or_zero(x: Value, y: Value) -> Value:
    """x / y, where 0 / 0 = 0."""
    return _apply("ratio_or_zero", x, y)


def fraction(part: Value, whole: Value) -> Value:
    """part / whole, and 0 where the whole is 0: a mixture of subnormal masses may round to nothing."""
    return _apply("fraction", part, whole)


def mixture(a: Value, p: Value, b: Value, q: Value) -> Value:
    """a·p + b·q. A kernel may add as little as lets it have a logarithm and a reciprocal."""
    return _apply("mixture", a, p, b, q)


def select_normal(mass: Value, normal: Value, underflown: Value) -> Value:
    """`normal` where the mass is a normal number, else `underflown`, which may be had for other masses too."""
    return _apply("select_normal", mass, normal, underflown)


def geometric_mean(p: Value, q: Value, log_p: Value, log_q: Value, ratio: Value, a: Value) -> Value:
    """p^a q^(1-a), of p, q, their logarithms and ratio = log(p/q); also where a mass underflows and this does not."""
    return _apply("geometric_mean", p, q, log_p, log_q, ratio, a)


def log_geometric_mean(p: Value, q: Value, log_p: Value, log_q: Value, ratio: Value, a: Value) -> Value:
    """log(p^a q^(1-a)), of p, q, their logarithms and ratio = log(p/q). Kernels find it from masses of logits alone."""
    return _apply("log_geometric_mean", p, q, log_p, log_q, ratio, a)


def mass_difference(p: Value, q: Value, ratio: Value) -> Value:
    """q - p of ratio = log(p/q), without cancellation. Kernels find it by an exponential less 1."""
    return _apply("mass_difference", p, q, ratio)


def log_quotient(p: Value, q: Value) -> Value:
    """log(p / q) of two masses; 0 where both are 0, NaN where one is negative. Never over- or underflows."""
    return _apply("log_quotient", p, q)


def log_difference(log_p: Value, log_q: Value) -> Value:
    """log_p - log_q; 0 where both are the same infinity."""
    return _apply("log_difference", log_p, log_q)


def log_fraction(part: Value, whole: Value, value: Value) -> Value:
    """log(part / whole), which is `value`. A kernel that has the part's exponent at hand may take that instead."""
    return _apply("log_fraction", part, whole, value)


def log_mix(ratio: Value, a: Value, b: Value) -> Value:
    """log((a·p + b·q) / max(p, q)) of ratio = log(p/q), where a + b = 1: never large, as accurate as the ratio."""
    return _apply("log_mix", ratio, a, b)


def logit_mass(x: Value, maximum: Value, inv_temperature: Value, inv_sum_exp: Value) -> Value:
    """exp((x - maximum)·inv_temperature)·inv_sum_exp: an element of a softmax."""
    return _apply("logit_mass", x, maximum, inv_temperature, inv_sum_exp)


def logit_difference(y: Value, y_scale: Value, x: Value, x_scale: Value, high: Value, low: Value) -> Value:
    """(y·y_scale - x·x_scale) - (high + low), the rounding of the first difference kept.

    0 where both logits are -inf. In float32 this is two-difference arithmetic (Knuth), so that
    nearly equal logits far from zero lose nothing.
    """
    return _apply("logit_difference", y, y_scale, x, x_scale, high, low)


def exp_remainder(d: Value) -> Value:
    """exp(-d) - 1 + d >= 0, to full relative accuracy; d²/2 for small d."""
    return _apply("exp_remainder", d)


def small_exp_remainder(d: Value) -> Value:
    """`exp_remainder` where |d| < 1/2 is known: no exponential."""
    return _apply("small_exp_remainder", d)


def bennett(z: Value) -> Value:
    """Bennett's function (1 + z)·log(1 + z) - z >= 0 for z >= -1, to full relative accuracy; z²/2 for small z."""
    return _apply("bennett", z)


def small_bennett(z: Value) -> Value:
    """`bennett` where |z| < 1/3 is known: no logarithm."""
    return _apply("small_bennett", z)


def _half_sign(x: Tensor) -> Tensor:
    return 0.5 * torch.sign(x)


def _abs(x: Tensor) -> Tensor:
    """Its derivative at 0 is 1: formulas that split at 0 count that to the positive side."""
    return torch.where(x < 0, -x, x)


def _select_near(x: Tensor, bound: float, near: Tensor, far: Tensor) -> Tensor:
    return torch.where(torch.abs(x) < bound, near, far)


def _logit_mass(x: Tensor, maximum: Tensor, inv_temperature: Tensor, inv_sum_exp: Tensor) -> Tensor:
    return torch.exp((x - maximum) * inv_temperature) * inv_sum_exp


def _select_normal(mass: Tensor, normal: Tensor, underflown: Tensor) -> Tensor:
    return torch.where(mass < torch.finfo(mass.dtype).tiny, underflown, normal)


def _geometric_mean(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, ratio: Tensor, a: Value) -> Tensor:
    # From the larger of p and q, whose logarithm is the smaller number.
    is_less = ratio < 0.0
    log_larger, power = torch.where(is_less, log_q, log_p), torch.where(is_less, a * ratio, (a - 1.0) * ratio)
    return _mass_times_exp(torch.where(is_less, q, p), log_larger, power)


def _mass_times_exp(mass: Tensor, log_mass: Tensor, x: Tensor) -> Tensor:
    """mass · exp(x), also where the mass underflows or the exponential overflows."""
    limits = torch.finfo(mass.dtype)
    by_logs = (mass < limits.tiny) | (x > math.log(limits.max))
    factor = torch.exp(torch.where(by_logs, log_mass + x, x))
    return factor * torch.where(by_logs, 1.0, mass)


def _log_geometric_mean(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor, ratio: Tensor, a: Value) -> Tensor:
    is_less = ratio < 0.0
    return torch.where(is_less, log_q, log_p) + torch.where(is_less, a * ratio, (a - 1.0) * ratio)


def _mass_times(mass: Tensor, x: Tensor) -> Tensor:
    nothing = torch.eq(mass, 0) & torch.isinf(x)
    return torch.mul(mass, torch.where(nothing, 0.0, x))


def _ratio_or_zero(x: Tensor, y: Tensor) -> Tensor:
    nothing = torch.eq(x, 0) & torch.eq(y, 0)
    return torch.div(x, torch.where(nothing, 1.0, y))


def _fraction(part: Tensor, whole: Tensor) -> Tensor:
    nothing = torch.eq(whole, 0)
    return torch.where(nothing, 0.0, part) / torch.where(nothing, 1.0, whole)


def _mass_difference(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
    """By the hyperbolic tangent, which is exact near 0 and ±1 at infinity."""
    return torch.mul(torch.add(p, q), torch.tanh(torch.mul(ratio, -0.5)))


def _sqrt(x: Tensor) -> Tensor:
    """Its derivative at 0 is taken as 0, where autograd would make inf · 0 of it."""
    nothing = torch.eq(x, 0)
    return torch.where(nothing, 0.0, torch.sqrt(torch.where(nothing, 1.0, x)))


def _log_quotient(p: Tensor, q: Tensor) -> Tensor:
    tiny = torch.finfo(p.dtype).tiny
    both_zero = torch.eq(p, 0) & torch.eq(q, 0)
    quotient = torch.div(p, torch.where(both_zero, 1.0, q))
    direct = (torch.minimum(p, q) > tiny) & (quotient > tiny) & (quotient < 1 / tiny)
    # Near 1 the quotient's rounding would be all that is left; the difference is exact. The argument of
    # each branch is kept harmless where another is taken: autograd would otherwise multiply its zero by an
    # infinite derivative.
    close = direct & (quotient > 0.5) & (quotient < 2.0)
    near = torch.log1p(torch.where(close, p - q, 0.0) / torch.where(close, q, 1.0))
    middle = torch.log(torch.where(direct, quotient, 1.0))
    safe = direct | both_zero
    far = torch.log(torch.where(safe, 1.0, p)) - torch.log(torch.where(safe, 1.0, q))
    return torch.where(close, near, torch.where(direct, middle, far))


def _log_difference(log_p: Tensor, log_q: Tensor) -> Tensor:
    same = torch.eq(log_p, log_q) & torch.isinf(log_p)
    return torch.where(same, 0.0, log_p) - torch.where(same, 0.0, log_q)


def _logit_difference(y: Tensor, y_scale: Tensor, x: Tensor, x_scale: Tensor, high: Tensor, low: Tensor) -> Tensor:
    # Where this is asked for tensors are float64, and the plain difference is exact enough: float32's ratio is
    # found by the backend (backends/pytorch/piece.py).
    log_p, log_q = y * y_scale, x * x_scale
    nothing = (log_p < -1e38) & (log_q < -1e38)  # no masses, and of scaled numbers one may be infinite
    return torch.where(nothing, 0.0, _log_difference(log_p, log_q) - (high + low))


def _log_mix(ratio: Tensor, a: Value, b: Value) -> Tensor:
    a, b = (torch.as_tensor(weight, dtype=ratio.dtype, device=ratio.device) for weight in (a, b))
    other = torch.where(ratio < 0, a, b)  # the weight of the smaller
    less = other * torch.expm1(-_abs(ratio))
    close = torch.abs(less) < 0.5
    far = torch.where(ratio < 0, b, a) + other * torch.exp(-_abs(ratio))
    return torch.where(close, torch.log1p(torch.where(close, less, 0.0)), torch.log(far))


def _polynomial(x: Tensor, coefficients: Sequence[float], largest: float) -> Tensor:
    """Of |x| up to `largest`. Powers that are nothing beside a rounding are left out."""
    least = abs(coefficients[0]) * torch.finfo(x.dtype).eps / 8
    *others, last = (c for power, c in enumerate(coefficients) if abs(c) * largest**power > least)
    result = torch.full_like(x, last)
    for coefficient in reversed(others):
        result = torch.add(torch.mul(result, x), coefficient)
    return result


_EXP_REMAINDER = [(-1.0) ** k / math.factorial(k) for k in range(2, 18)]


def _exp_remainder(d: Tensor) -> Tensor:
    small = torch.abs(d) < 0.5
    near = torch.where(small, d, 0.0)
    far = torch.where(small, 1.0, d)
    return torch.where(small, near * near * _polynomial(near, _EXP_REMAINDER, 0.5), far + torch.expm1(-far))


_ATANH = [2.0 / k for k in range(3, 33, 2)]


def _bennett(z: Tensor) -> Tensor:
    small = torch.abs(z) < 0.375
    far = torch.where(small | torch.eq(z, -1.0), 1.0, z)
    direct = torch.where(torch.eq(z, -1.0), 1.0, (1.0 + far) * torch.log1p(far) - far)
    return torch.where(small, _small_bennett(z), direct)


def _small_bennett(z: Tensor) -> Tensor:
    near = torch.where(torch.abs(z) < 0.375, z, 0.0)
    s = near / (2.0 + near)
    tail = s * s * s * _polynomial(s * s, _ATANH, 0.0533)  # log1p(z) - 2s, with s = z / (2 + z)
    return (2.0 * s * s + (1.0 + s) * tail) / (1.0 - s)


def _where(condition: Tensor | bool, x: Value, y: Value) -> Value:
    """A parameter's comparison is a number's."""
    if isinstance(condition, Tensor):
        return torch.where(condition, x, y)
    return x if condition else y


TENSOR: Mapping[str, Callable[..., Any]] = {
    # Python's operators: torch's would make float32 tensors of two numbers.
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "lt": operator.lt,
    "abs": _abs,
    "half_sign": _half_sign,
    "where": _where,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "small_expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": _sqrt,
    "select_near": _select_near,
    "mass_times": _mass_times,
    "ratio_or_zero": _ratio_or_zero,
    "fraction": _fraction,
    "mass_difference": _mass_difference,
    "mixture": lambda a, p, b, q: a * p + b * q,
    "select_normal": _select_normal,
    "geometric_mean": _geometric_mean,
    "log_geometric_mean": _log_geometric_mean,
    "log_quotient": _log_quotient,
    "log_difference": _log_difference,
    "log_fraction": lambda part, whole, value: value,
    "log_mix": _log_mix,
    "logit_mass": _logit_mass,
    "logit_difference": _logit_difference,
    "exp_remainder": _exp_remainder,
    "small_exp_remainder": _exp_remainder,
    "bennett": _bennett,
    "small_bennett": _small_bennett,
}


@dataclass(frozen=True)
class Step:
    """One operation: its operands are numbers, variable names or indices of earlier steps."""

    op: str
    operands: tuple[float | str | int, ...]
    last_use: tuple[int, ...]  # steps whose value nobody needs after this one


class Program:
    """Named outputs of an expression in evaluation order; only what the outputs need is kept."""

    def __init__(self, outputs: Mapping[str, Value]) -> None:
        order: dict[Symbol, int] = {}
        steps: list[tuple[str, tuple[float | str | int, ...]]] = []

        def visit(node: Symbol) -> int | str:
            if node.op == "variable":
                return str(node.args[0])
            if node not in order:
                operands = tuple(visit(a) if isinstance(a, Symbol) else a for a in node.args)
                order[node] = len(steps)
                steps.append((node.op, operands))
            return order[node]

        self.outputs: dict[str, float | str | int] = {
            name: visit(value) if isinstance(value, Symbol) else float(value) for name, value in outputs.items()
        }
        kept = {index for index in self.outputs.values() if isinstance(index, int)}
        last: dict[int, int] = {}
        for index, (_, operands) in enumerate(steps):
            for operand in operands:
                if isinstance(operand, int) and operand not in kept:
                    last[operand] = index
        self.steps = [
            Step(op, operands, tuple(i for i, end in last.items() if end == index))
            for index, (op, operands) in enumerate(steps)
        ]

    def run(
        self,
        variables: Mapping[str, Value],
        operations: Mapping[str, Callable[..., Any]] = TENSOR,
    ) -> dict[str, Value]:
        """Evaluate on tensors. `operations` may hold cheaper ones, where the data allow them."""
        values: list[Value] = []

        def look_up(operand: float | str | int) -> Value:
            if isinstance(operand, str):
                return variables[operand]
            return values[operand] if isinstance(operand, int) else operand

        for step in self.steps:
            values.append(operations[step.op](*map(look_up, step.operands)))
            for index in step.last_use:
                values[index] = None
        return {name: look_up(operand) for name, operand in self.outputs.items()}
