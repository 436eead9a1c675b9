"""The verbs in torch, in chunks: any device, any dtype, no toolchain.

A chunk is as large as its temporaries fit the cache: some rows, or, of longer ones, pieces of a row. Probabilities and
log-probabilities are computed in float32 (float64 where an input is), logits in float64: their differences are what
counts.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kullback.backends.lowering import rewriter
from kullback.backends.pytorch import topk
from kullback.forms import FORMS, SIDES
from kullback.formula import TENSOR, Program, Value, node
from kullback.problem import Problem, Side, accumulator, formula
from kullback.state import (
    Mode,
    RowState,
    RowStats,
    RowSums,
    far_tilted_lse,
    finish,
    merge_stats,
    merge_sums,
    sums_of,
    unpacked,
)
from kullback.work import Gather, Operands, Rows, Scale, Scatter, Work

# Measured best on a CPU with 2 MiB of cache a core: 128K to 512K elements are within 8 %.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24


def _geometric_mean(p: Tensor, q: Tensor, ratio: Tensor, a: Value) -> Tensor:
    is_less = ratio < 0
    return torch.where(is_less, q, p) * torch.where(is_less, a * ratio, (a - 1.0) * ratio).exp_()


# Where no mass is 0 or negative and none infinite the guards have nothing to guard. Where one is, these give NaN
# or an infinity, but for the quotient of two negative masses.
IN_RANGE: Mapping[str, Callable[..., Any]] = {
    **TENSOR,
    "mass_times": torch.mul,
    "ratio_or_zero": operator.truediv,
    "in_range_geometric_mean": _geometric_mean,
    "fraction": operator.truediv,
    "sqrt": torch.sqrt,
    "log_quotient": lambda p, q: torch.div(p, q).log_(),
    "log_difference": operator.sub,
}


@functools.cache
def in_range_program(kind: str, form: str, target_form: str, outputs: tuple[str, ...]) -> Program:
    """The outputs without what is there for masses that underflow: what nothing asks for then is not computed."""
    rewrite = rewriter(_without_underflow)
    element = formula(kind, form, target_form).element
    return Program({name: rewrite(element[name]) for name in outputs})


def _without_underflow(op: str, args: tuple[Value, ...]) -> Value:
    match op, args:
        case "select_normal", (_, normal, _):
            return normal
        case "geometric_mean", (p, q, _, _, ratio, a):
            return node("in_range_geometric_mean", p, q, ratio, a)
    return node(op, *args)


def why_not(work: Work) -> str | None:
    return None


def run(work: Work) -> None:
    if isinstance(work, Rows):
        _rows(work)
    elif isinstance(work, Scale):
        if work.gradient.device.type != "cpu" or work.factor.item() != 1:
            work.gradient.mul_(work.factor)
    elif isinstance(work, Gather):
        topk.gather(work)
    elif isinstance(work, Scatter):
        topk.scatter(work)
    else:
        topk.write_entries(work)


def _rows(work: Rows) -> None:
    problem = work.problem
    total = work.input.new_zeros((), dtype=accumulator(work.input))
    for part in _parts(work.input.size(0), max(1, _chunk(work.input) // max(1, work.input.size(1)))):
        chunk = Chunk(problem, work.input[part], work.target[part])
        known = None if work.known is None else work.known[:, part]
        weight = None if work.row_weight is None else work.row_weight[part]
        if work.verb == "statistics":
            _keep(work.found, part, chunk.statistics())
            continue
        if work.verb == "accumulate" and known is not None:
            _keep(work.found, part, chunk.accumulate(unpacked(RowStats, known)))
            continue
        state = None
        if work.verb == "gradient" and known is not None:
            state = unpacked(RowState, known)
        elif work.has_outputs or problem.has_logits or not problem.formula.finish_is_linear:
            stats = chunk.statistics()
            loss, state = finish(problem, stats, sums_of(stats) if problem.has_moments else chunk.accumulate(stats))
            loss = weighted(loss, weight)
            total = total + loss.sum()
            if work.loss is not None:
                work.loss[part] = loss
            _keep(work.found, part, state)
        if any(work.wants):
            grad_out: Tensor | float = work.scale if weight is None else weight * work.scale
            if state is not None:
                grad_out = weighted(state.d_loss * work.scale, weight)
            chunk.write(work, part, state, grad_out)
    if work.total is not None:
        work.total.copy_(total * work.scale)


def _keep(found: Tensor | None, part: slice, numbers: Sequence[Tensor]) -> None:
    if found is not None:
        found[:, part] = torch.stack([number.to(found.dtype) for number in numbers[: found.size(0)]])


def _chunk(x: Tensor) -> int:
    return CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK


def _parts(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


class Chunk:
    """A few rows; of longer ones a piece at a time."""

    def __init__(self, problem: Problem, x: Tensor, y: Tensor) -> None:
        self.problem, self.x, self.y = problem, x, y
        self.slices = list(_parts(x.size(1), max(1, _chunk(x) // max(1, x.size(0))))) or [slice(0, 0)]
        self.whole = Piece(problem, x, y) if len(self.slices) == 1 else None

    def pieces(self) -> Iterator[Piece]:
        """Made anew for each pass, so that one of a long row is in memory at a time."""
        if self.whole is not None:
            yield self.whole
        else:
            for part in self.slices:
                yield Piece(self.problem, self.x[:, part], self.y[:, part])

    def statistics(self) -> RowStats:
        return merge_stats(self.problem, [piece.statistics() for piece in self.pieces()])

    def accumulate(self, stats: RowStats) -> RowSums:
        return merge_sums([piece.accumulate(stats) for piece in self.pieces()])

    def write(self, work: Rows, rows: slice, state: RowState | None, grad_out: Tensor | float) -> None:
        """Fill these rows of the wanted gradients; a row of grad_out 0 gets zeros, whatever it holds."""
        for piece, part in zip(self.pieces(), self.slices, strict=True):
            outputs = [None if d is None else d[rows, part] for d in (work.d_input, work.d_target)]
            piece.write(outputs, state, grad_out)


class Piece:
    """Some elements of some rows, as they count, and what is known of their rows."""

    def __init__(self, problem: Problem, x: Tensor, y: Tensor) -> None:
        self.problem = problem
        dtype = _compute_dtype(problem, x, y)
        sides = zip((x, y), problem.sides, strict=True)
        self.x, self.y = (capped(values.to(dtype), side.softcap) for values, side in sides)
        # Kernels hold the inverse of a temperature in float32; here it is the same number.
        double = torch.float64 in (x.dtype, y.dtype)
        self.scales = [inverse_temperature(side, double) for side in problem.sides]
        self.variables: dict[str, Value] = {"x": self.x, "y": self.y, **problem.parameters}
        # float64 keeps the guarded formula, whose log_quotient is exact near p = q and takes twice as long.
        in_range = dtype == torch.float32 and _may_be_in_range(self.y, problem.target)
        self.operations = IN_RANGE if in_range else TENSOR

    def statistics(self) -> RowStats:
        nothing = self.x.new_zeros(self.x.size(0))
        sides = zip(self.problem.sides, (self.x, self.y), self.scales, strict=True)
        lse = [log_sum_exp(values * scale) if side.form == "logits" else nothing for side, values, scale in sides]
        stats = RowStats._make([*lse, nothing, nothing, nothing, nothing + Mode.SAFE, nothing])
        if not self.problem.has_moments:
            return stats
        if self.problem.formula.has_tilted_lse:
            self.normalise(stats)
            log_tilted = self.run(["log_tilted"], lambda result: result)["log_tilted"]
            stats = stats._replace(tilted_lse=far_tilted_lse(log_sum_exp(log_tilted)))
        sums = self.accumulate(stats)
        if self.problem.formula.has_tilted_lse:  # against an infinite one an infinite mass would be NaN
            is_finite = stats.tilted_lse < math.inf
            sums = RowSums._make(torch.where(is_finite, total, 0.0) for total in sums)
        return stats._replace(term=sums.term, d_log_p=sums.d_log_p, d_log_q=sums.d_log_q)

    def accumulate(self, stats: RowStats) -> RowSums:
        """All three sums only where a gradient of logits will ask for them."""
        self.normalise(stats)
        names = ("term", "d_log_p", "d_log_q") if self.problem.has_logits else ("term",)
        sums = self.run(names, lambda result: result.sum(-1).to(accumulator(result)))
        nothing = torch.zeros_like(sums["term"])
        found = (sums.get(name, nothing) for name in ("term", "d_log_p", "d_log_q"))
        return RowSums._make([*found, nothing, nothing + Mode.SAFE])

    def normalise(self, known: RowStats | RowState) -> None:
        """Bind the row variables of the sides of logits; the other side's stay unused."""
        sides = zip(SIDES, self.problem.sides, (known.input_lse, known.target_lse), self.scales, strict=True)
        for name, side, lse, scale in sides:
            if side.form == "logits":
                lse = lse.to(self.x.dtype).unsqueeze(-1)
                self.variables |= {
                    f"{name}_inv_temperature": torch.full_like(lse, scale),
                    f"{name}_max": lse / scale,
                    f"{name}_inv_sum_exp": torch.ones_like(lse),
                    f"{name}_log_sum_exp": torch.zeros_like(lse),
                }
        if self.problem.is_normalised:
            log_z_diff = known.log_z_diff if isinstance(known, RowState) else known.target_lse - known.input_lse
            high, tilted_lse = (number.to(self.x.dtype).unsqueeze(-1) for number in (log_z_diff, known.tilted_lse))
            self.variables |= {
                "log_z_diff_high": high,
                "log_z_diff_low": torch.zeros_like(high),
                "tilted_lse": tilted_lse,
            }

    def run(self, outputs: Sequence[str], reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The outputs, reduced: without guards first, and again with them if their sum is not finite."""
        # Kept until the next chunk is there: glibc gives memory freed all at once back to the system, and the next
        # chunk's temporaries would be faulted in again (measured: up to 2.5 x the time).
        problem = self.problem
        if self.operations is IN_RANGE:
            program = in_range_program(problem.kind, problem.input.form, problem.target.form, tuple(outputs))
        else:
            program = problem.program(*outputs)
        self.results = program.run(self.variables, self.operations)
        reduced = {name: reduce(result) for name, result in self.results.items()}
        if self.operations is IN_RANGE and not all(math.isfinite(value.sum().item()) for value in reduced.values()):
            self.operations = TENSOR
            return self.run(outputs, reduce)
        return reduced

    def write(self, outputs: Sequence[Tensor | None], state: RowState | None, grad_out: Tensor | float) -> None:
        if self.problem.has_logits and state is not None:
            self.normalise(state)
            for name, total in (("input", state.d_log_q), ("target", state.d_log_p)):
                self.variables[f"{name}_grad_sum"] = total.to(self.x.dtype).unsqueeze(-1)
        names = [name for name, out in zip(SIDES, outputs, strict=True) if out is not None]
        results = self.run(names, lambda result: result)
        column = grad_out.to(self.x.dtype).unsqueeze(-1) if isinstance(grad_out, Tensor) else grad_out
        sides = zip(SIDES, outputs, self.problem.sides, self.scales, (self.x, self.y), strict=True)
        for name, out, side, scale, values in sides:
            if out is not None:
                result = results[name]
                if side.softcap:
                    result = result * softcap_grad(values, side.softcap)
                if self.operations is TENSOR and isinstance(column, Tensor):
                    result = torch.where(column == 0, 0, result)
                torch.mul(result, column * scale, out=out)


def weighted(value: Tensor, weight: Tensor | None) -> Tensor:
    """value · weight, and 0 where that is 0, whatever the value."""
    return value if weight is None else torch.where(weight == 0, 0, value) * weight


def inverse_temperature(side: Side, double: bool) -> float:
    """What a side's elements are multiplied by; 1 unless they are logits."""
    if side.form != "logits":
        return 1.0
    inverse = 1 / side.temperature
    return inverse if double else torch.tensor(inverse, dtype=torch.float32, device="cpu").item()


def capped(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x


def softcap_grad(capped: Tensor, softcap: float) -> Tensor | float:
    """d capped(x) / dx, from the capped value."""
    return 1 - (capped / softcap).square() if softcap else 1.0


def log_sum_exp(values: Tensor) -> Tensor:
    """Of each row of scaled logits; -inf of an empty one, and NaN of one that holds NaN."""
    return values.logsumexp(-1) if values.size(-1) else values.new_full(values.shape[:-1], -math.inf)


def _compute_dtype(problem: Problem, x: Tensor, y: Tensor) -> torch.dtype:
    if problem.has_logits:
        return accumulator(x)
    return torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)


def _may_be_in_range(values: Tensor, side: Side) -> bool:
    """Whether the guards can be left out until a sum says otherwise."""
    if values.device.type != "cpu" or values.numel() == 0:  # on a device the answer would cost a wait
        return False
    lower, _ = FORMS[side.form].in_range or (-math.inf, 0)
    return values.amin().item() > lower


def _stopped_by_zero(operation: Callable[..., Value]) -> Callable[..., Value]:
    """The operation, no derivative of which, be it infinite, passes on an upstream gradient of 0.

    `torch.where` sends that to the branch that it did not take.
    """

    def run(*operands: Value) -> Value:
        shape = torch.broadcast_shapes(*(t.shape for t in operands if isinstance(t, Tensor)))
        views = [t.expand(shape) if isinstance(t, Tensor) and t.requires_grad else t for t in operands]
        result = operation(*views)
        if isinstance(result, Tensor) and result.requires_grad:
            upstream: dict[str, Tensor] = {}
            result.register_hook(lambda grad: upstream.update(grad=grad))
            for view in views:
                if isinstance(view, Tensor) and view.requires_grad:
                    view.register_hook(lambda grad: torch.where(upstream["grad"] == 0, 0.0, grad))
        return result

    return run


STOPPED_BY_ZERO = {name: _stopped_by_zero(operation) for name, operation in TENSOR.items()}


def gradient_by_formula(problem: Problem, operands: Operands, wants: tuple[bool, bool]) -> tuple[Tensor, ...]:
    """The wanted gradients of Σ row_weight · loss as one differentiable expression, nothing chunked.

    Rows are [..., vocab]; the weight is the upstream gradient. For double backward.
    """
    x, y, grad_out = operands
    assert grad_out is not None
    dtype = _compute_dtype(problem, x, y)
    skipped = (grad_out == 0).unsqueeze(-1)  # not read: 1 is harmless in every form
    values = {
        name: capped(torch.where(skipped, 1.0, problem.narrow(t).to(dtype)), side.softcap)
        for name, t, side in zip(SIDES, (x, y), problem.sides, strict=True)
    }
    variables: dict[str, Value] = {"x": values["input"], "y": values["target"], **problem.parameters}
    lse: dict[str, Tensor] = {}
    for name, side in zip(SIDES, problem.sides, strict=True):
        if side.form == "logits":
            scaled = values[name] / side.temperature
            top = scaled.detach().amax(-1, keepdim=True)
            sum_exp = torch.exp(scaled - top).sum(-1, keepdim=True)
            lse[name] = top + sum_exp.log()
            variables |= {
                f"{name}_inv_temperature": torch.full_like(top, 1 / side.temperature),
                f"{name}_max": top * side.temperature,
                f"{name}_inv_sum_exp": 1 / sum_exp,
                f"{name}_log_sum_exp": sum_exp.log(),
            }
    if problem.is_normalised:
        variables["log_z_diff_high"] = lse["target"] - lse["input"]
        variables["log_z_diff_low"] = torch.zeros_like(variables["log_z_diff_high"])
    tilted_lse = torch.zeros_like(grad_out, dtype=dtype)
    variables["tilted_lse"] = tilted_lse.unsqueeze(-1)
    if problem.formula.has_tilted_lse:
        log_tilted = problem.program("log_tilted").run(variables)["log_tilted"].detach()
        tilted_lse = far_tilted_lse(log_sum_exp(log_tilted))
        variables["tilted_lse"] = tilted_lse.unsqueeze(-1)
    sums = problem.program("term", "d_log_p", "d_log_q").run(variables, STOPPED_BY_ZERO)
    variables["input_grad_sum"] = sums["d_log_q"].sum(-1, keepdim=True)
    variables["target_grad_sum"] = sums["d_log_p"].sum(-1, keepdim=True)
    total = {"total": sums["term"].sum(-1), "tilted_lse": tilted_lse}
    d_loss = problem.formula.finish.run({**total, **problem.parameters})["derivative"]
    upstream = (grad_out.to(dtype) * d_loss).unsqueeze(-1)
    names = [name for name, wanted in zip(SIDES, wants, strict=True) if wanted]
    results = problem.program(*names).run(variables, STOPPED_BY_ZERO)
    gradients = []
    for name, tensor, side in zip(SIDES, (x, y), problem.sides, strict=True):
        if name in results:
            scale = inverse_temperature(side, double=True)
            gradient = results[name] * (upstream * scale) * softcap_grad(values[name], side.softcap)
            padding = tensor.size(-1) - gradient.size(-1)
            gradients.append(torch.nn.functional.pad(gradient, (0, padding)).to(tensor.dtype))
    return tuple(gradients)
