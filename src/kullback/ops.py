"""torch.library operators and autograd, once for all divergences.

Raw operators without autograd stand inside `autograd.Function`s: the route that composes with compile,
export, func transforms, vmap and autocast alike (docs/decisions/0005).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback import backends
from kullback.backends.torch import gradient_by_formula
from kullback.observed import is_observed
from kullback.rows import STATE_FIELDS, Gradients, Problem, Wanted, accumulator

PROBLEM = "str divergence, float[] numbers"  # Problem.spelling and Problem.numbers

library = torch.library.Library("kullback", "DEF")
library.define(
    f"value(Tensor input, Tensor target, Tensor? coefficient, float scale, {PROBLEM}, ScalarType dtype) -> Tensor"
)
library.define(
    f"per_row(Tensor input, Tensor target, Tensor? coefficient, {PROBLEM}, ScalarType dtype) -> (Tensor, Tensor)"
)
library.define(
    f"gradient(Tensor input, Tensor target, Tensor? state, Tensor cotangent, {PROBLEM}, "
    "bool of_input, bool of_target) -> (Tensor, Tensor)"
)


@functools.lru_cache(maxsize=1024)
def problem_of(divergence: str, numbers: tuple[float, ...]) -> Problem:
    kind, form, target_form = divergence.split()
    return Problem(kind, form, target_form, numbers)


def as_rows(tensor: Tensor) -> Tensor:
    """[rows, vocab] with a row's elements side by side; a copy only where the layout has no such view."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dim() == 2 and tensor.is_contiguous():
        return tensor
    if tensor.dim() != 2:
        tensor = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.size(-1))
    return tensor if tensor.stride(1) == 1 or tensor.size(1) == 1 else tensor.contiguous()


def row_vector(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    """A number for each row of `like`."""
    if tensor is None:
        return None
    rows = like.size(0)
    return tensor.expand(rows) if tensor.dim() == 0 else tensor.reshape(rows)


SLAB_BYTES = 1 << 24  # of a tensor that copying costs more than a launch does


class Slab(NamedTuple):
    """What a path is called with once."""

    input: Tensor
    target: Tensor
    coefficient: Tensor | None  # of each row, or one number
    d_input: Tensor | None = None
    d_target: Tensor | None = None

    def split(self) -> list[Slab]:
        """Itself; or, where a large tensor such as logits[:, :-1] has no view as rows, those of each first index."""
        x, y, c = self.input, self.target, self.coefficient
        large = x.dim() > 2 and x.numel() * x.itemsize >= SLAB_BYTES * max(x.size(0), 1)
        if not large or x.stride(-1) != 1 or y.stride(-1) != 1 or (_is_rows(x) and _is_rows(y)):
            return [self]
        whole = [x, y, None if c is None else c.expand(x.shape[:-1]), self.d_input, self.d_target]
        parts = [itertools.repeat(t, x.size(0)) if t is None else t.unbind() for t in whole]
        return [part for slab in map(Slab, *parts) for part in slab.split()]

    def rows(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None, Gradients]:
        """As a path wants them."""
        d_x = None if self.d_input is None else problem.valid(as_rows(self.d_input))
        d_y = None if self.d_target is None else problem.valid(as_rows(self.d_target))
        x, y = problem.valid(as_rows(self.input)), problem.valid(as_rows(self.target))
        return x, y, row_vector(self.coefficient, x), (d_x, d_y)


def _is_rows(tensor: Tensor) -> bool:
    """Whether the leading dimensions are one, of a common step."""
    leading = [(size, step) for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(leading))


def _output(like: Tensor, problem: Problem, wanted: bool, inplace: bool = False) -> Tensor | None:
    """A gradient for the tensor, 0 beyond the valid vocabulary; `inplace`: in the tensor's own memory."""
    if not wanted:
        return None
    gradient = like.detach() if inplace else torch.empty_like(like, memory_format=torch.contiguous_format)
    valid = problem.valid(gradient).size(-1)
    if valid < gradient.size(-1):
        gradient[..., valid:] = 0
    return gradient


def _total(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    problem: Problem,
    dtype: torch.dtype,
    want: Wanted,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum and its wanted gradients; `inplace`: the input's in the place of its logits."""
    d_input, d_target = _output(input, problem, want[0], inplace), _output(target, problem, want[1])
    slabs = Slab(input, target, coefficient, d_input, d_target).split()
    part, losses = dtype if len(slabs) == 1 else accumulator(input), []
    for slab in slabs:
        x, y, weight, gradients = slab.rows(problem)
        losses.append(backends.call("total", problem, x, y, weight, scale, part, gradients))
    return losses[0] if len(slabs) == 1 else torch.stack(losses).sum().to(dtype), d_input, d_target


def _value(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    divergence: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    problem = problem_of(divergence, tuple(numbers))
    return _total(input, target, coefficient, scale, problem, dtype, (False, False))[0]


def _per_row(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    divergence: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    problem = problem_of(divergence, tuple(numbers))
    parts = []
    for slab in Slab(input, target, coefficient).split():
        x, y, weight, _ = slab.rows(problem)
        parts.append(backends.call("accumulate", problem, x, y, weight, dtype))
    loss, state = parts[0] if len(parts) == 1 else (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return loss.view(input.shape[:-1]), state


def _gradient(
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    divergence: str,
    numbers: Sequence[float],
    of_input: bool,
    of_target: bool,
) -> tuple[Tensor, Tensor]:
    problem = problem_of(divergence, tuple(numbers))
    d_input, d_target = _output(input, problem, of_input), _output(target, problem, of_target)
    first = 0
    for slab in Slab(input, target, cotangent, d_input, d_target).split():
        x, y, upstream, gradients = slab.rows(problem)
        known = None
        if state is not None and state.numel():
            known = state[:, first : first + x.size(0)].contiguous()
            first += x.size(0)
        backends.call("gradient", problem, x, y, known, upstream, gradients)
    return input.new_empty(0) if d_input is None else d_input, target.new_empty(0) if d_target is None else d_target


for name, implementation in (
    ("value", _value),
    ("per_row", _per_row),
    ("gradient", _gradient),
):
    library.impl(name, implementation, "CompositeExplicitAutograd")

value = torch.ops.kullback.value.default
row_losses = torch.ops.kullback.per_row.default
gradients_of = torch.ops.kullback.gradient.default


def _fake_gradients(input: Tensor, target: Tensor, of_input: bool, of_target: bool) -> tuple[Tensor, Tensor]:
    return (
        input.new_empty(input.shape if of_input else (0,)),
        target.new_empty(target.shape if of_target else (0,)),
    )


@torch.library.register_fake("kullback::value", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    divergence: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    return input.new_empty((), dtype=dtype)


@torch.library.register_fake("kullback::per_row", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    divergence: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows = input.shape[:-1]
    fields = STATE_FIELDS if "logits" in divergence else 0
    state = input.new_empty((fields, math.prod(rows)), dtype=torch.float64)
    return input.new_empty(rows, dtype=dtype), state


@torch.library.register_fake("kullback::gradient", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    divergence: str,
    numbers: Sequence[float],
    of_input: bool,
    of_target: bool,
) -> tuple[Tensor, Tensor]:
    return _fake_gradients(input, target, of_input, of_target)


# vmap: a batch of problems is one problem of more rows.


def batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _batch_of_row_vectors(tensor: Tensor, dim: int | None, rows: torch.Size) -> Tensor:
    """A row vector for each problem of the batch, or one number for each, as [batch, *rows]."""
    tensor = batch_first(tensor, dim, rows[0])
    return tensor.reshape(*tensor.shape, *[1] * (len(rows) - tensor.dim())).expand(rows)


@torch.library.register_vmap("kullback::per_row", lib=library)
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    *arguments: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    x = batch_first(input, in_dims[0], info.batch_size)
    y = batch_first(target, in_dims[1], info.batch_size)
    if coefficient is not None:
        coefficient = _batch_of_row_vectors(coefficient, in_dims[2], x.shape[:-1])
    loss, state = row_losses(x, y, coefficient, *arguments)
    rows = math.prod(x.shape[1:-1])
    return (loss, state.view(state.size(0), info.batch_size, rows)), (0, 1)


@torch.library.register_vmap("kullback::value", lib=library)
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    divergence: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    x = batch_first(input, in_dims[0], info.batch_size)
    y = batch_first(target, in_dims[1], info.batch_size)
    if coefficient is not None:
        coefficient = _batch_of_row_vectors(coefficient, in_dims[2], x.shape[:-1])
    loss = row_losses(x, y, coefficient, divergence, numbers, accumulator(x))[0]
    rows = math.prod(x.shape[1:-1])
    return (loss.view(info.batch_size, rows).sum(-1) * scale).to(dtype), 0


@torch.library.register_vmap("kullback::gradient", lib=library)
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    *arguments: Any,
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    x = batch_first(input, in_dims[0], info.batch_size)
    y = batch_first(target, in_dims[1], info.batch_size)
    upstream = _batch_of_row_vectors(cotangent, in_dims[3], x.shape[:-1])
    # The states of one problem would not fit a batch of upstream gradients: they are found anew.
    gradients = gradients_of(x, y, None, upstream, *arguments)
    wanted = arguments[-2:]
    return tuple(g if w else g.new_empty(info.batch_size, 0) for g, w in zip(gradients, wanted, strict=True)), (0, 0)


class Gradient(torch.autograd.Function):
    """The gradients of Σ cotangent · loss, themselves differentiable (by the formula, unfused)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        state: Tensor | None,
        cotangent: Tensor,
        problem: Problem,
        want: Wanted,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = gradients_of(
            input, target, state, cotangent, problem.spelling, problem.numbers, *want
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, target, _, cotangent, ctx.problem, ctx.want = inputs
        ctx.save_for_backward(input, target, cotangent)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, target, cotangent = ctx.saved_tensors
        want: Wanted = ctx.want

        def formula(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, ...]:
            return gradient_by_formula(ctx.problem, x, y, g, want)

        pull_back = torch.func.vjp(formula, input, target, cotangent)[1]
        wanted = tuple(u for u, w in zip(upstream, want, strict=True) if w)
        d_input, d_target, d_cotangent = pull_back(wanted)
        return d_input, d_target, None, d_cotangent, None, None


def _pull_back(
    ctx: Any,
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a row sum, in a second launch; differentiable again where autograd asks."""
    want = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
    if torch.is_grad_enabled() or is_observed():
        gradients = Gradient.apply(input, target, state, cotangent, ctx.problem, want)
    else:
        gradients = Gradient.forward(input, target, state, cotangent, ctx.problem, want)
    return (gradients[0] if want[0] else None, gradients[1] if want[1] else None)


class Total(torch.autograd.Function):
    """scale · Σ coefficient · loss; the gradients are found in backward. What traces and transforms can follow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        coefficient: Tensor | None,
        scale: float,
        problem: Problem,
        dtype: torch.dtype,
    ) -> Tensor:
        loss: Tensor = value(input, target, coefficient, scale, problem.spelling, problem.numbers, dtype)
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, target, coefficient, ctx.scale, ctx.problem, _ = inputs
        ctx.save_for_backward(input, target, coefficient)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, target, coefficient = ctx.saved_tensors
        cotangent = upstream.to(accumulator(input)) * ctx.scale
        if coefficient is not None:
            cotangent = cotangent * coefficient
        gradients = _pull_back(ctx, input, target, None, cotangent)
        return *gradients, None, None, None, None


def _hand_over(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The written gradients times the upstream one: not lent, since autograd may keep them."""
    written, ctx.written = ctx.written, None
    for gradient in written:
        if gradient is not None:
            backends.scale_(gradient, upstream)
    return *written, None, None, None, None


class EagerTotal(torch.autograd.Function):
    """Total whose gradients are written in the pass that finds the value, and scaled in backward.

    For calls that nothing observes: the path is called without an operator between, whose dispatch would take as
    long as the launch. A second backward finds the gradients anew.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        Total.setup_context(ctx, inputs, None)
        loss, *ctx.written = _total(*(*inputs, ctx.needs_input_grad[:2]))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.written is None or torch.is_grad_enabled() or is_observed(upstream):
            return Total.backward(ctx, upstream)
        ctx.saved_tensors  # noqa: B018 # raises where an input was modified since
        return _hand_over(ctx, upstream)


class InPlaceTotal(torch.autograd.Function):
    """EagerTotal whose gradient takes the place of the input's logits: there is one backward, and none of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        loss, *ctx.written = _total(*(*inputs, ctx.needs_input_grad[:2], True))
        # Whoever saved the logits is told by autograd that they are gone; whoever writes there again tells us.
        torch.autograd.graph.increment_version(inputs[0])
        ctx.version = inputs[0]._version
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.written is None:
            raise RuntimeError("the gradient was written over the logits (inplace=True) and has been handed over")
        if ctx.written[0]._version != ctx.version:
            raise RuntimeError("the logits' memory, which holds the gradient (inplace=True), was modified since")
        return _hand_over(ctx, upstream)


def weighted(upstream: Tensor, coefficient: Tensor) -> Tensor:
    """upstream · coefficient, and 0 where that is 0: the gradient of a row that does not count may be infinite."""
    return torch.where(coefficient == 0, 0.0, upstream * coefficient)


class PerRow(torch.autograd.Function):
    """coefficient · loss of each row, and the row states that its gradient starts from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        coefficient: Tensor | None,
        problem: Problem,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = row_losses(input, target, coefficient, problem.spelling, problem.numbers, dtype)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, target, coefficient, ctx.problem, _ = inputs
        ctx.save_for_backward(input, target, coefficient, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the states would take as much memory as they

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 5
        input, target, coefficient, state = ctx.saved_tensors
        if upstream.dtype in (torch.float16, torch.bfloat16):
            upstream = upstream.float()
        if coefficient is not None:
            upstream = weighted(upstream, coefficient)
        return *_pull_back(ctx, input, target, state, upstream), None, None, None


def total(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    problem: Problem,
    dtype: torch.dtype,
    inplace: bool = False,
) -> Tensor:
    """scale · Σ coefficient · loss, 0-d. In eager autograd the gradients are written in the same pass."""
    if inplace and torch.is_grad_enabled() and input.requires_grad:
        return InPlaceTotal.apply(input, target, coefficient, scale, problem, dtype)  # type: ignore[no-any-return]
    if is_observed(input, target):
        return Total.apply(input, target, coefficient, scale, problem, dtype)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and (input.requires_grad or target.requires_grad):
        # float16 gradients are not written before the upstream gradient is known: a loss scaler's factor
        # is what keeps them from underflow.
        function = Total if torch.float16 in (input.dtype, target.dtype) else EagerTotal
        return function.apply(input, target, coefficient, scale, problem, dtype)  # type: ignore[no-any-return]
    return _total(input, target, coefficient, scale, problem, dtype, (False, False))[0]


def per_row(input: Tensor, target: Tensor, coefficient: Tensor | None, problem: Problem, dtype: torch.dtype) -> Tensor:
    """coefficient · loss of each row, `input.shape[:-1]`."""
    return PerRow.apply(input, target, coefficient, problem, dtype)[0]  # type: ignore[no-any-return]
