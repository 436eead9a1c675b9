"""Driver: hidden states x head. Rows are projected a chunk at a time, and their logits are never all in memory.

    logits    = hidden @ weight.T + bias        a chunk of rows, of the student and of the teacher
    verbs                                       the logits' gradient takes their place
    d_hidden  = d_logits @ weight               a few chunks of rows, whose logits' gradients are kept together
    d_weight += d_logits.T @ hidden             in float32

A sum writes its gradients in the pass that finds it, four products in all, and keeps nothing else. Losses of single
rows keep the rows' states, and backward projects again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback import backends, sparse
from kullback.observed import is_observed
from kullback.ops import PROBLEM, as_rows, library, problem_of, weighted
from kullback.rows import STATE_FIELDS, Problem, accumulator

# All logits that are in memory at once. The float32 sum of a head's gradient is read and written once for what is kept
# together, and the fewer rows that product has the slower it is; one that only projects does well with a thousand:
# docs/performance.md.
CHUNK_BYTES = 1500 << 20
PASSING = 5  # of these bytes, at most one in so many is for a side whose logits are not kept, beside one whose are
ALIGNED = 64  # elements: rows of logits begin where tensor cores and vectors want them to, whatever the vocabulary
TILE = 128  # rows of a chunk are a multiple of this, where they are more: what tensor cores take at once


class Projection(NamedTuple):
    """Hidden states and a head; without one, the values themselves."""

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def words(self) -> int:
        return self.hidden.size(-1) if self.weight is None else self.weight.size(0)

    def of_words(self, count: int) -> Projection:
        """To the first so many words, nothing copied."""
        if count == self.words:
            return self
        if self.weight is None:
            return Projection(self.hidden[..., :count])
        return Projection(self.hidden, self.weight[:count], None if self.bias is None else self.bias[:count])

    def rows(self) -> Projection:
        shape = self.hidden.shape
        return self._replace(hidden=self.hidden.reshape(math.prod(shape[:-1]), shape[-1]))


class Operands(NamedTuple):
    """Both models' rows; and where the teacher is a sparse one, what `sparse.Support` says of it."""

    student: Projection
    teacher: Projection
    ids: Tensor | None = None
    negligible: float = 0.0

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Operands:
        """From what operators take."""
        return cls(Projection(*flat[:3]), Projection(*flat[3:6]), *flat[6:])

    @property
    def flat(self) -> tuple[Any, ...]:
        return *self.student, *self.teacher, self.ids, self.negligible

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Of which of the first six a gradient is."""
        enabled = torch.is_grad_enabled()
        return tuple(enabled and t is not None and t.requires_grad for t in self.flat[:6])


TENSORS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? target_weight, Tensor? target_bias, "
    "Tensor? ids, float negligible"
)
library.define(
    f"linear_total({TENSORS}, Tensor? coefficient, float scale, {PROBLEM}, ScalarType dtype, int chunk_rows, "
    "bool[] want) -> Tensor[]"
)
library.define(
    f"linear_per_row({TENSORS}, Tensor? coefficient, {PROBLEM}, ScalarType dtype, int chunk_rows) -> (Tensor, Tensor)"
)
library.define(
    f"linear_gradient({TENSORS}, Tensor state, Tensor cotangent, {PROBLEM}, int chunk_rows, bool[] want) -> Tensor[]"
)


class Side:
    """One model's rows, a chunk at a time: projected, or as they are given; and what is pulled back through them."""

    def __init__(
        self,
        projection: Projection,
        want: Sequence[bool],
        held: int,
        coefficient: Tensor | None,
    ) -> None:
        hidden, weight, self.bias = projection
        self.weight = weight
        self.hidden = hidden if weight is not None else as_rows(hidden)  # products read any layout, paths do not
        self.want = want  # the gradient of each of these
        self.coefficient = coefficient
        self.held = held  # rows whose logits are in memory: a chunk's, or several chunks'
        self.is_first_product = True
        self.d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if want[0] else None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        if weight is None:
            return
        width = math.ceil(weight.size(0) / ALIGNED) * ALIGNED
        buffer = hidden.new_empty(min(held, hidden.size(0)), width)
        buffer[:, weight.size(0) :] = 0  # products may read what they do not use
        self.logits = buffer[:, : weight.size(0)]
        if want[1]:
            new = torch.empty_like if hidden.size(0) else torch.zeros_like
            self.d_weight = new(weight, dtype=self.sum_dtype, memory_format=torch.contiguous_format)
        if want[2]:
            self.d_bias = hidden.new_zeros(weight.size(0), dtype=torch.promote_types(hidden.dtype, torch.float32))

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the head's gradient while products are added to it."""
        wide = torch.promote_types(self.hidden.dtype, torch.float32)
        return self.hidden.dtype if self.held >= self.hidden.size(0) else wide

    def values(self, rows: slice) -> Tensor:
        """The chunk's logits, in memory that a later chunk's will take; or what was given."""
        hidden = self.hidden[rows]
        if self.weight is None:
            return hidden
        first = rows.start % self.held
        out = self.logits[first : first + hidden.size(0)]
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def place(self, rows: slice, values: Tensor) -> Tensor | None:
        """Where the chunk's gradient is to be written: over the logits."""
        if self.weight is None:
            return None if self.d_hidden is None else self.d_hidden[rows]
        return values if any(self.want) else None

    def pull_back(self, chunk: slice) -> None:
        """From the logits' gradients that are held, once the chunk completes them, to hidden states and head."""
        if self.weight is None or not any(self.want):
            return
        end = min(chunk.stop, self.hidden.size(0))
        rows = slice(chunk.start // self.held * self.held, end)
        if end % self.held and end < self.hidden.size(0):
            return
        d_logits = self.logits[: end - rows.start]
        if self.d_hidden is not None:
            torch.mm(d_logits, self.weight, out=self.d_hidden[rows])
        if self.d_weight is not None:
            self.add_product(self.d_weight, d_logits, self.read(rows))
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=self.d_bias.dtype)

    def read(self, rows: slice) -> Tensor:
        """Hidden states, 0 where the row does not count: 0 times what stands there may be NaN."""
        hidden = self.hidden[rows]
        if self.coefficient is None:
            return hidden
        return torch.where((self.coefficient[rows] != 0).unsqueeze(-1), hidden, 0)

    def add_product(self, total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
        """total += d_logits.T @ hidden, where the total may be wider than they; the first product is put there."""
        beta = 0 if self.is_first_product else 1
        self.is_first_product = False
        if total.dtype == hidden.dtype:
            total.addmm_(d_logits.t(), hidden, beta=beta)
        elif total.device.type == "cuda":
            torch.addmm(total, d_logits.t(), hidden, beta=beta, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(d_logits.t().to(total.dtype), hidden.to(total.dtype), beta=beta)

    def gradients(self) -> list[Tensor]:
        """Those that were wanted, in the dtypes of what they are gradients of."""
        found = (self.d_hidden, self.hidden), (self.d_weight, self.weight), (self.d_bias, self.bias)
        return [gradient.to(of.dtype) for gradient, of in found if gradient is not None and of is not None]


class Pass:
    """The chunks of a problem, both sides projected."""

    def __init__(
        self,
        operands: Operands,
        problem: Problem,
        coefficient: Tensor | None,
        chunk_rows: int,
        want: Sequence[bool] = (False,) * 6,
    ) -> None:
        self.step, of_student, of_teacher = (chunk_rows,) * 3 if chunk_rows else chunks_of(operands, want)
        self.problem, self.ids, self.negligible = problem, operands.ids, operands.negligible
        self.sides = (
            Side(operands.student, want[:3], of_student, coefficient),
            Side(operands.teacher, want[3:], of_teacher, coefficient),
        )

    def run(self, verb: str, *arguments: Any, of_rows: Sequence[Tensor | None] = (), writes: bool = True) -> list[Any]:
        """The verb's results of each chunk, `of_rows` cut to its rows; gradients are pulled back as they come."""
        results = []
        for start in range(0, self.sides[0].hidden.size(0), self.step):
            rows = slice(start, start + self.step)
            x, y = (side.values(rows) for side in self.sides)
            parts = [None if t is None else t[..., rows].contiguous() for t in of_rows]
            places = [side.place(rows, t) for side, t in zip(self.sides, (x, y), strict=True)]
            call = self._call if self.ids is None else functools.partial(self._on_support, self.ids[rows])
            results.append(call(verb, x, y, [*parts, *arguments], places, writes))
            for side in self.sides:
                side.pull_back(rows)
        return results

    def _call(
        self, verb: str, x: Tensor, y: Tensor, arguments: list[Any], places: list[Tensor | None], writes: bool
    ) -> Any:
        return backends.call(verb, self.problem, x, y, *arguments, *((tuple(places),) if writes else ()))

    def _on_support(
        self,
        ids: Tensor,
        verb: str,
        x: Tensor,
        y: Tensor,
        arguments: list[Any],
        places: list[Tensor | None],
        writes: bool,
    ) -> Any:
        """The same of x at the ids, and its gradient from there."""
        has_rest = y.size(-1) > ids.size(-1)
        held = sparse.gather(self.problem, x, ids, has_rest)
        if has_rest:
            y = sparse.without_rounding(held, y, self.negligible)
        d_x, d_y = places
        d_held = None if d_x is None else torch.empty_like(held)
        gradients = ((d_held, d_y),) if writes else ()
        result = backends.call(verb, sparse.small(self.problem), held, y, *arguments, *gradients)
        if d_x is not None and d_held is not None:
            sparse.scatter(self.problem, x, ids, held, d_held, d_x)
        return result

    def gradients(self) -> list[Tensor]:
        return [gradient for side in self.sides for gradient in side.gradients()]


def chunks_of(operands: Operands, want: Sequence[bool]) -> tuple[int, int, int]:
    """Rows of a chunk, and of the student's and the teacher's logits that are held: whole chunks, in CHUNK_BYTES.

    Those of a head whose gradient is wanted are held for several chunks, if the other side's pass.
    """
    rows = operands.student.hidden.size(0)
    heads = operands.student.weight, operands.teacher.weight
    sizes = [0 if weight is None else weight.size(0) * weight.itemsize for weight in heads]
    keeps = [size > 0 and wanted for size, wanted in zip(sizes, (want[1], want[4]), strict=True)]
    kept = sum(size for size, keep in zip(sizes, keeps, strict=True) if keep)
    passing = sum(sizes) - kept
    if kept and passing:
        most = _even(CHUNK_BYTES // (PASSING * passing))
        several = max(1, (CHUNK_BYTES // most - passing) // kept)
    else:
        most, several = _even(CHUNK_BYTES // max(1, kept + passing)), 1
    blocks = math.ceil(rows / (most * several))
    each = math.ceil(rows / max(1, blocks))
    several = math.ceil(each / most)
    step = max(1, math.ceil(each / max(1, several)))
    step = min(most, step if step < TILE else math.ceil(step / TILE) * TILE)
    student, teacher = (step * several if keep else step for keep in keeps)
    return step, student, teacher


def _even(rows: int) -> int:
    """At most so many, of whole tiles if there is one."""
    return max(1, rows if rows < TILE else rows // TILE * TILE)


def _total(*arguments: Any) -> list[Tensor]:
    *flat, coefficient, scale, divergence, numbers, dtype, chunk_rows, want = arguments
    operands, problem = Operands.of(flat), problem_of(divergence, tuple(numbers))
    sum_dtype = accumulator(operands.student.hidden)
    chunks = Pass(operands, problem, coefficient, chunk_rows, want)
    losses = chunks.run("total", scale, sum_dtype, of_rows=(coefficient,))
    loss = torch.stack(losses).sum() if losses else operands.student.hidden.new_zeros((), dtype=sum_dtype)
    return [loss.to(dtype), *chunks.gradients()]


def _per_row(*arguments: Any) -> tuple[Tensor, Tensor]:
    *flat, coefficient, divergence, numbers, dtype, chunk_rows = arguments
    operands, problem = Operands.of(flat), problem_of(divergence, tuple(numbers))
    chunks = Pass(operands, problem, coefficient, chunk_rows)
    parts = chunks.run("accumulate", dtype, of_rows=(coefficient,), writes=False)
    if not parts:
        return _no_rows(operands.student.hidden, 0, dtype)
    losses, states = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(states, -1)


def _no_rows(like: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return like.new_empty(rows, dtype=dtype), like.new_empty(STATE_FIELDS, rows, dtype=torch.float64)


def _gradient(*arguments: Any) -> list[Tensor]:
    *flat, state, cotangent, divergence, numbers, chunk_rows, want = arguments
    operands, problem = Operands.of(flat), problem_of(divergence, tuple(numbers))
    chunks = Pass(operands, problem, cotangent, chunk_rows, want)
    chunks.run("gradient", of_rows=(state, cotangent))
    return chunks.gradients()


for name, implementation in (("linear_total", _total), ("linear_per_row", _per_row), ("linear_gradient", _gradient)):
    library.impl(name, implementation, "CompositeExplicitAutograd")


def _fake_gradients(tensors: Sequence[Tensor | None], want: Sequence[bool]) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, wanted in zip(tensors, want, strict=True) if wanted and t is not None]


@torch.library.register_fake("kullback::linear_total", lib=library)
def _(*arguments: Any) -> list[Tensor]:
    *_, dtype, _, want = arguments
    return [arguments[0].new_empty((), dtype=dtype), *_fake_gradients(arguments[:6], want)]


@torch.library.register_fake("kullback::linear_per_row", lib=library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _no_rows(arguments[0], arguments[0].size(0), arguments[-2])


@torch.library.register_fake("kullback::linear_gradient", lib=library)
def _(*arguments: Any) -> list[Tensor]:
    return _fake_gradients(arguments[:6], arguments[-1])


OPERATORS = {
    _total: torch.ops.kullback.linear_total.default,
    _per_row: torch.ops.kullback.linear_per_row.default,
    _gradient: torch.ops.kullback.linear_gradient.default,
}


def _run(find: Callable[..., Any], tensors: Sequence[Any], *arguments: Any) -> Any:
    """Plainly; or as an operator, where something traces or overrides the call."""
    observed = is_observed(*(t for t in tensors if isinstance(t, Tensor)))
    return (OPERATORS[find] if observed else find)(*tensors, *arguments)


class Task(NamedTuple):
    """What is asked of operands, but for the row weights."""

    problem: Problem
    negligible: float
    dtype: torch.dtype
    chunk_rows: int  # 0: as many as fit CHUNK_BYTES
    want: tuple[bool, ...]

    def spread(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Those that were wanted, each in its place; none of the ids."""
        remaining = iter(gradients)
        return [*(next(remaining) if wanted else None for wanted in self.want), None]


class LinearTotal(torch.autograd.Function):
    """scale · Σ coefficient · loss, and the gradients of all that wants one, found in the same pass."""

    @staticmethod
    def forward(ctx: Any, task: Task, coefficient: Tensor | None, scale: float, *tensors: Tensor | None) -> Tensor:
        problem = task.problem
        loss, *gradients = _run(
            *(_total, (*tensors, task.negligible), coefficient, scale),
            *(problem.spelling, problem.numbers, task.dtype, task.chunk_rows, list(task.want)),
        )
        ctx.task = task
        ctx.save_for_backward(*gradients)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        gradients = ctx.saved_tensors
        if is_observed(upstream) or _keeps_graph():
            gradients = [(gradient * upstream).to(gradient.dtype) for gradient in gradients]
        else:
            for gradient in gradients:
                backends.scale_(gradient, upstream)
        return None, None, None, *ctx.task.spread(gradients)


ONCE = "linear_divergence has no gradients of gradients; those of divergence(F.linear(input, weight), ...) are there"
# Private; where it is missing, gradients are copied as if another backward were to come.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class LinearPerRow(torch.autograd.Function):
    """coefficient · loss of each row; backward projects again and starts from the rows' states."""

    @staticmethod
    def forward(ctx: Any, task: Task, coefficient: Tensor | None, *tensors: Tensor | None) -> Tensor:
        problem = task.problem
        losses, state = _run(
            *(_per_row, (*tensors, task.negligible), coefficient),
            *(problem.spelling, problem.numbers, task.dtype, task.chunk_rows),
        )
        ctx.task = task
        ctx.save_for_backward(coefficient, state, *tensors)
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        task: Task = ctx.task
        coefficient, state, *tensors = ctx.saved_tensors
        cotangent = upstream.float() if upstream.dtype in (torch.float16, torch.bfloat16) else upstream
        if coefficient is not None:
            cotangent = weighted(cotangent, coefficient)
        gradients = _run(
            *(_gradient, (*tensors, task.negligible), state, cotangent),
            *(task.problem.spelling, task.problem.numbers, task.chunk_rows, list(task.want)),
        )
        return None, None, *task.spread(gradients)


def total(
    operands: Operands,
    coefficient: Tensor | None,
    scale: float,
    problem: Problem,
    dtype: torch.dtype,
    chunk_rows: int,
) -> Tensor:
    """scale · Σ coefficient · loss, 0-d."""
    *tensors, negligible = operands.flat
    task = Task(problem, negligible, dtype, chunk_rows, operands.wanted)
    if any(task.want) and torch.float16 in (operands.student.hidden.dtype, operands.teacher.hidden.dtype):
        # Not written before a loss scaler's factor is known, which keeps them from underflow.
        return (per_row(operands, coefficient, problem, dtype, chunk_rows).sum() * scale).to(dtype)
    return LinearTotal.apply(task, coefficient, scale, *tensors)  # type: ignore[no-any-return]


def per_row(
    operands: Operands, coefficient: Tensor | None, problem: Problem, dtype: torch.dtype, chunk_rows: int
) -> Tensor:
    """coefficient · loss of each row."""
    # What inference mode made cannot be saved for backward; a copy made outside of it can.
    *tensors, negligible = operands.flat
    task = Task(problem, negligible, dtype, chunk_rows, operands.wanted)
    if any(task.want) and not torch.compiler.is_compiling():
        tensors = [t.clone() if isinstance(t, Tensor) and t.is_inference() else t for t in tensors]
    return LinearPerRow.apply(task, coefficient, *tensors)  # type: ignore[no-any-return]
