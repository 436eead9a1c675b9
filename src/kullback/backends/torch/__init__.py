"""The verbs in row-chunked torch: any device, any dtype, no toolchain.

A chunk is as large as its temporaries fit the cache. Probabilities and log-probabilities are
computed in float32 (float64 where an input is), logits in float64: their differences are what counts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kullback.backends.torch.entries import entries as entries
from kullback.backends.torch.entries import is_rounding, none_of
from kullback.forms import FORMS
from kullback.formula import TENSOR, Value
from kullback.rows import (
    STATE_FIELDS,
    Gradients,
    LogSumExp,
    Problem,
    State,
    Sums,
    Wanted,
    accumulator,
    held_dtype,
)

# Measured best on a CPU with 2 MiB of cache a core: 128K to 512K elements are within 8 %.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24

# Where no mass is 0 or negative and none infinite the guards have nothing to guard. Where one is, these give NaN
# or an infinity, but for the quotient of two negative masses.
TAME: Mapping[str, Callable[..., Any]] = {
    **TENSOR,
    "mass_times": torch.mul,
    "ratio_or_zero": operator.truediv,
    "part_of": operator.truediv,
    "sqrt": torch.sqrt,
    "log_quotient": lambda p, q: torch.div(p, q).log_(),
    "log_difference": operator.sub,
}


def why_not(problem: Problem, x: Tensor, y: Tensor) -> str | None:
    return None


def accumulate(
    problem: Problem, x: Tensor, y: Tensor, coefficient: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss of each row times its coefficient, [rows], and the packed row states."""
    loss = x.new_empty(x.size(0), dtype=dtype)
    states = []
    for rows in _chunks(x):
        chunk = Chunk(problem, x[rows], y[rows])
        value, _ = chunk.finish(chunk.state())
        loss[rows] = chunk.weighted(value, coefficient, rows)
        if problem.needs_norms:
            states.append(chunk.pack())
    fields = STATE_FIELDS if problem.needs_norms else 0
    packed = torch.cat(states, dim=1) if states else x.new_empty(fields, x.size(0), dtype=torch.float64)
    return loss, packed


def total(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    coefficient: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    gradients: Gradients,
) -> Tensor:
    """scale · Σ coefficient · loss, 0-d; writes its gradients in x and y where wanted."""
    result = torch.zeros((), dtype=accumulator(x), device=x.device)
    for rows in _chunks(x):
        chunk = Chunk(problem, x[rows], y[rows])
        state = chunk.state()
        value, slope = chunk.finish(state)
        result += chunk.weighted(value, coefficient, rows).sum()
        if any(gradient is not None for gradient in gradients):
            chunk.write(gradients, rows, chunk.weighted(slope * scale, coefficient, rows))
    return (result * scale).to(dtype)


def gradient(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    gradients: Gradients,
) -> None:
    """Write gradients of Σ cotangent · loss; from the row states, or without them."""
    for rows in _chunks(x):
        known = None if state is None else State.unpack(state[:, rows])
        chunk = Chunk(problem, x[rows], y[rows], known)
        slope: Tensor | float = 1.0
        if not problem.formula.finish_is_linear:
            _, slope = chunk.finish(chunk.state())
        chunk.write(gradients, rows, chunk.weighted(slope, cotangent, rows))


def gather(
    problem: Problem, x: Tensor, ids: Tensor, rest: bool, target: Tensor | None = None, negligible: float = 0.0
) -> Tensor:
    """x at the ids, none where one is -1, and with `rest` all other elements in one; as they count.

    A rest of the target that is no more than negligible is made none where x has none.
    """
    nothing = none_of(problem.form)
    held = x.new_empty(x.size(0), ids.size(1) + rest, dtype=held_dtype(x.dtype))
    for rows in _chunks(x):
        values, columns = _counted(problem, x[rows]), ids[rows]
        held[rows, : ids.size(1)] = values.gather(1, columns.clamp(min=0)).masked_fill_(columns < 0, nothing)
        if rest:
            others = values.masked_fill(_marked(columns, x.size(1)), nothing)
            held[rows, -1] = others.sum(1) if problem.form == "probs" else others.logsumexp(1)
    if target is not None:
        target[:, -1:].masked_fill_(is_rounding(held, target, negligible, problem.form), -math.inf)
    return held


def scatter(problem: Problem, x: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, out: Tensor) -> None:
    """Write the gradient in x of what has gradient d_held in `held`, which `gather` found; zeros where that is 0."""
    k, vocab = ids.shape[1], x.size(1)
    for rows in _chunks(x):
        values, columns = _counted(problem, x[rows]), ids[rows]
        # A last column takes what belongs to no word.
        gradient = values.new_zeros(values.size(0), vocab + 1)
        if held.size(1) > k:
            rest, d_rest = held[rows, k:], d_held[rows, k:]
            if problem.form == "probs":
                gradient[:] = d_rest
            else:
                shares = torch.exp(values - torch.where(rest == -math.inf, 0.0, rest))
                gradient[:, :vocab] = torch.where(d_rest == 0, 0, shares * d_rest)
        gradient.scatter_(1, torch.where(columns < 0, vocab, columns), d_held[rows, :k])
        gradient = gradient[:, :vocab]
        if problem.form == "logits":
            cap, temperature = problem.caps[0], problem.temperatures[0]
            slope = cap_slope(values * temperature, cap) / temperature
            gradient = torch.where(gradient == 0, 0, gradient * slope)
        out[rows] = gradient


def _counted(problem: Problem, x: Tensor) -> Tensor:
    """As they count: logits capped and tempered."""
    values = x.to(held_dtype(x.dtype))
    return capped(values, problem.caps[0]) / problem.temperatures[0] if problem.form == "logits" else values


def _marked(ids: Tensor, vocab: int) -> Tensor:
    """Which of a row's elements are among its ids."""
    marks = ids.new_zeros((ids.size(0), vocab + 1), dtype=torch.bool)
    return marks.scatter_(1, torch.where(ids < 0, vocab, ids), True)[:, :vocab]


class Chunk:
    """A few rows, and what is known of them."""

    def __init__(self, problem: Problem, x: Tensor, y: Tensor, state: State | None = None) -> None:
        self.problem = problem
        dtype = _compute_dtype(problem, x, y)
        self.x, self.y = (capped(t.to(dtype), cap) for t, cap in zip((x, y), problem.caps, strict=True))
        self.variables: dict[str, Any] = {"x": self.x, "y": self.y, **problem.parameters}
        # float64 keeps the guarded formula, whose log_quotient is exact near p = q and takes twice as long.
        tame = dtype == torch.float32 and _may_be_tame(self.y, problem.target_form)
        self.operations = TAME if tame else TENSOR
        self.sums: Sums | None = None
        if problem.needs_norms:
            self.set_norms(state)
        if state is not None:
            self.sums = state.sums

    def set_norms(self, state: State | None) -> None:
        """Bind the row variables of the logits sides; the other side's stay unused."""
        log_totals: list[Tensor | float] = []
        self.norms = []
        sides = zip(
            ("input", "target"),
            (self.x, self.y),
            (self.problem.form, self.problem.target_form),
            self.problem.temperatures,
            strict=True,
        )
        for index, (side, values, form, temperature) in enumerate(sides):
            if form != "logits":
                empty = values.new_zeros(values.size(0))
                self.norms.append(LogSumExp(empty, empty))
                log_totals.append(0.0)
                continue
            norm = normalize(values / temperature) if state is None else state[index]
            norm = LogSumExp(*(part.to(values.dtype) for part in norm))
            self.norms.append(norm)
            log_total = norm.total.log()
            log_totals.append(norm.top + log_total)
            self.variables |= {
                f"{side}_scale": torch.full_like(norm.top, 1 / temperature).unsqueeze(-1),
                f"{side}_top": (norm.top * temperature).unsqueeze(-1),
                f"{side}_inverse_total": norm.total.reciprocal().unsqueeze(-1),
                f"{side}_log_total": log_total.unsqueeze(-1),
            }
        if self.problem.form == self.problem.target_form:
            shift = log_totals[1] - log_totals[0]
            self.variables["shift_high"] = shift.unsqueeze(-1)  # type: ignore[union-attr]
            self.variables["shift_low"] = torch.zeros_like(self.variables["shift_high"])

    def state(self) -> Sums:
        """The row sums; all three only where a gradient of logits will ask for them."""
        if self.sums is None:
            names = ("term", "d_log_p", "d_log_q") if self.problem.needs_norms else ("term",)
            sums = self.run(names, lambda result: result.sum(-1).to(accumulator(result)))
            nothing = torch.zeros_like(sums["term"])
            self.sums = Sums(*(sums.get(name, nothing) for name in Sums._fields))
        return self.sums

    def run(self, outputs: Sequence[str], reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The outputs, reduced: without guards first, and again with them if their sum is not finite."""
        # Kept until the next chunk is there: glibc gives memory freed all at once back to the system, and the next
        # chunk's temporaries would be faulted in again (measured: up to 2.5 x the time).
        self.results = self.problem.program(*outputs).run(self.variables, self.operations)
        reduced = {name: reduce(result) for name, result in self.results.items()}
        if self.operations is TAME and not all(math.isfinite(value.sum().item()) for value in reduced.values()):
            self.operations = TENSOR
            return self.run(outputs, reduce)
        return reduced

    def finish(self, sums: Sums) -> tuple[Tensor, Tensor | float]:
        """Row losses and their derivatives in the row sums."""
        done = self.problem.formula.finish.run({"total": sums.term, **self.problem.parameters})
        return done["loss"], done["slope"]

    def weighted(self, value: Value, coefficient: Tensor | None, rows: slice) -> Value:
        """value · coefficient, and 0 where that is 0, whatever the value."""
        if coefficient is None:
            return value
        weight = coefficient[rows]
        return (torch.where(weight == 0, 0, value) if isinstance(value, Tensor) else value) * weight

    def write(self, gradients: Gradients, rows: slice, cotangent: Tensor | float) -> None:
        """Fill these rows of the wanted gradients; a row of cotangent 0 gets zeros, whatever it holds."""
        if self.problem.needs_norms:
            sums = self.state()
            for side, total in (("input", sums.d_log_q), ("target", sums.d_log_p)):
                self.variables[f"{side}_sum_gradient"] = total.to(self.x.dtype).unsqueeze(-1)
        names = [n for n, out in zip(("input", "target"), gradients, strict=True) if out is not None]
        results = self.run(names, lambda result: result)
        column = cotangent.to(self.x.dtype).unsqueeze(-1) if isinstance(cotangent, Tensor) else cotangent
        sides = zip(
            ("input", "target"), gradients, self.problem.slopes, self.problem.caps, (self.x, self.y), strict=True
        )
        for name, out, slope, cap, values in sides:
            if out is not None:
                result = results[name]
                if cap:
                    result = result * cap_slope(values, cap)
                if self.operations is TENSOR and isinstance(column, Tensor):
                    result = torch.where(column == 0, 0, result)
                torch.mul(result, column * slope, out=out[rows])

    def pack(self) -> Tensor:
        """As `State.unpack` takes it."""
        parts = [part for norm in self.norms for part in norm]
        return torch.stack([part.to(torch.float64) for part in (*parts, *self.state())])


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def cap_slope(capped: Tensor, cap: float) -> Tensor | float:
    """d capped(x) / dx, from the capped value."""
    return 1 - (capped / cap).square() if cap else 1.0


def normalize(values: Tensor) -> LogSumExp:
    """The LogSumExp of each row of scaled logits."""
    if values.size(-1) == 0:
        empty = values.new_zeros(values.size(0))
        return LogSumExp(empty - torch.inf, empty)
    top = values.amax(-1)
    return LogSumExp(top, torch.exp(values - top.unsqueeze(-1)).sum(-1))


def _chunks(x: Tensor) -> Iterator[slice]:
    rows, vocab = x.shape
    size = CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK
    step = max(1, size // max(1, vocab))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _compute_dtype(problem: Problem, x: Tensor, y: Tensor) -> torch.dtype:
    if problem.needs_norms:
        return accumulator(x)
    return torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)


def _may_be_tame(target: Tensor, form: str) -> bool:
    """Whether the guards can be left out until a sum says otherwise."""
    if target.device.type != "cpu" or target.numel() == 0:  # on a device the answer would cost a wait
        return False
    lower, _ = FORMS[form].tame or (-math.inf, 0)
    return target.amin().item() > lower


def gradient_by_formula(problem: Problem, x: Tensor, y: Tensor, cotangent: Tensor, want: Wanted) -> tuple[Tensor, ...]:
    """The wanted gradients of Σ cotangent · loss as one differentiable expression, nothing chunked.

    Inputs are [..., vocab], the cotangent a number or of the rows' shape. For double backward.
    """
    dtype = _compute_dtype(problem, x, y)
    skipped = (cotangent == 0).unsqueeze(-1)  # not read: 1 is harmless in every form
    values = {
        side: capped(torch.where(skipped, 1.0, problem.valid(t).to(dtype)), cap)
        for side, t, cap in zip(("input", "target"), (x, y), problem.caps, strict=True)
    }
    variables: dict[str, Any] = {
        "x": values["input"],
        "y": values["target"],
        **problem.parameters,
    }
    log_totals: dict[str, Tensor] = {}
    forms = {"input": problem.form, "target": problem.target_form}
    for (side, form), temperature in zip(forms.items(), problem.temperatures, strict=True):
        if form == "logits":
            scaled = values[side] / temperature
            top = scaled.detach().amax(-1, keepdim=True)
            sum_exp = torch.exp(scaled - top).sum(-1, keepdim=True)
            log_totals[side] = top + sum_exp.log()
            variables |= {
                f"{side}_scale": torch.full_like(top, 1 / temperature),
                f"{side}_top": top * temperature,
                f"{side}_inverse_total": 1 / sum_exp,
                f"{side}_log_total": sum_exp.log(),
            }
    if len(log_totals) == 2:
        variables["shift_high"] = log_totals["target"] - log_totals["input"]
        variables["shift_low"] = torch.zeros_like(variables["shift_high"])
    sums = problem.program("term", "d_log_p", "d_log_q").run(variables)
    variables["input_sum_gradient"] = sums["d_log_q"].sum(-1, keepdim=True)
    variables["target_sum_gradient"] = sums["d_log_p"].sum(-1, keepdim=True)
    slope = problem.formula.finish.run({"total": sums["term"].sum(-1), **problem.parameters})["slope"]
    upstream = (cotangent.to(dtype) * slope).unsqueeze(-1)
    names = [name for name, wanted in zip(("input", "target"), want, strict=True) if wanted]
    results = problem.program(*names).run(variables)
    gradients = []
    for name, tensor, slope, cap in zip(("input", "target"), (x, y), problem.slopes, problem.caps, strict=True):
        if name in results:
            gradient = results[name] * (upstream * slope) * cap_slope(values[name], cap)
            padding = tensor.size(-1) - gradient.size(-1)
            gradients.append(torch.nn.functional.pad(gradient, (0, padding)).to(tensor.dtype))
    return tuple(gradients)
