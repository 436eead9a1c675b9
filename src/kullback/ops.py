"""torch.library operators and autograd, once for all divergences.

Raw operators without autograd stand inside `autograd.Function`s: the route that composes with compile,
export, func transforms, vmap and autocast alike (docs/decisions/0005).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kullback import backends
from kullback.backends import cuda
from kullback.backends.torch import gradient_by_formula
from kullback.rows import STATE_FIELDS, Problem

PROBLEM = "str kind, str form, str target_form, float[] numbers"
Wanted = tuple[bool, bool]

library = torch.library.Library("kullback", "DEF")
library.define(
    f"total(Tensor input, Tensor target, Tensor? coefficient, float scale, {PROBLEM}, "
    "ScalarType dtype, bool input_gradient, bool target_gradient) -> (Tensor, Tensor, Tensor)"
)
library.define(
    f"per_row(Tensor input, Tensor target, Tensor? coefficient, {PROBLEM}, ScalarType dtype)"
    " -> (Tensor, Tensor)"
)
library.define(
    f"gradient(Tensor input, Tensor target, Tensor? state, Tensor cotangent, {PROBLEM}, "
    "bool input_gradient, bool target_gradient) -> (Tensor, Tensor)"
)
library.define("scale_(Tensor(a!) gradient, Tensor factor) -> ()")


@functools.lru_cache(maxsize=1024)
def _problem(kind: str, form: str, target_form: str, numbers: tuple[float, ...]) -> Problem:
    return Problem(kind, form, target_form, numbers)


def _as_rows(tensor: Tensor) -> Tensor:
    """[rows, vocab] with elements of a row side by side; a copy only where the layout has no such view."""
    vocab = tensor.size(-1)
    if tensor.dim() != 2:
        tensor = tensor.reshape(math.prod(tensor.shape[:-1]), vocab)
    return tensor if tensor.stride(1) == 1 or vocab == 1 else tensor.contiguous()


def _row_vector(tensor: Tensor | None, rows: int) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.expand(rows) if tensor.dim() == 0 else tensor.reshape(rows)


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if gradient is None else gradient.view(like.shape)


def _total(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
    input_gradient: bool,
    target_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x, y = _as_rows(input), _as_rows(target)
    loss, input_result, target_result = backends.call(
        "total",
        _problem(kind, form, target_form, tuple(numbers)),
        x,
        y,
        _row_vector(coefficient, x.size(0)),
        scale,
        dtype,
        (input_gradient, target_gradient),
    )
    return loss, _or_empty(input_result, input), _or_empty(target_result, target)


def _per_row(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    x, y = _as_rows(input), _as_rows(target)
    problem = _problem(kind, form, target_form, tuple(numbers))
    loss, state = backends.call(
        "accumulate", problem, x, y, _row_vector(coefficient, x.size(0)), dtype
    )
    return loss.view(input.shape[:-1]), state


def _gradient(
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    input_gradient: bool,
    target_gradient: bool,
) -> tuple[Tensor, Tensor]:
    x, y = _as_rows(input), _as_rows(target)
    upstream = _row_vector(cotangent, x.size(0))
    problem = _problem(kind, form, target_form, tuple(numbers))
    known = state if state is not None and state.numel() else None
    input_result, target_result = backends.call(
        "gradient", problem, x, y, known, upstream, (input_gradient, target_gradient)
    )
    return _or_empty(input_result, input), _or_empty(target_result, target)


def _scale_(gradient: Tensor, factor: Tensor) -> None:
    if gradient.device.type == "cuda":
        cuda.scale_(gradient, factor)
    elif gradient.device.type != "cpu" or factor.item() != 1:
        gradient.mul_(factor)


for name, implementation in (
    ("total", _total),
    ("per_row", _per_row),
    ("gradient", _gradient),
    ("scale_", _scale_),
):
    library.impl(name, implementation, "CompositeExplicitAutograd")


@torch.library.register_fake("kullback::total", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
    input_gradient: bool,
    target_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape if input_gradient else (0,)),
        target.new_empty(target.shape if target_gradient else (0,)),
    )


@torch.library.register_fake("kullback::per_row", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows = input.shape[:-1]
    fields = STATE_FIELDS if "logits" in (form, target_form) else 0
    return input.new_empty(rows, dtype=dtype), input.new_empty(
        (fields, math.prod(rows)), dtype=torch.float64
    )


@torch.library.register_fake("kullback::gradient", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    input_gradient: bool,
    target_gradient: bool,
) -> tuple[Tensor, Tensor]:
    return (
        input.new_empty(input.shape if input_gradient else (0,)),
        target.new_empty(target.shape if target_gradient else (0,)),
    )


@torch.library.register_fake("kullback::scale_", lib=library)
def _(gradient: Tensor, factor: Tensor) -> None:
    return None


def _batched(
    tensors: Sequence[Tensor | None], dims: Sequence[int | None], size: int
) -> list[Tensor | None]:
    """Each tensor with the batch as its first dimension."""
    return [
        None if t is None else t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]


@torch.library.register_vmap("kullback::per_row", lib=library)
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    *problem: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    size = info.batch_size
    x, y, weight = _batched((input, target, coefficient), in_dims[:3], size)
    assert x is not None
    if weight is not None:
        weight = weight.expand(x.shape[:-1])
    loss, state = torch.ops.kullback.per_row(x, y, weight, *problem)
    return (loss, state.view(state.size(0), size, -1)), (0, 1)


@torch.library.register_vmap("kullback::total", lib=library)
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    kind: str,
    form: str,
    target_form: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
    input_gradient: bool,
    target_gradient: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
    size = info.batch_size
    x, y, weight = _batched((input, target, coefficient), in_dims[:3], size)
    assert x is not None
    assert y is not None
    problem = (kind, form, target_form, numbers)
    rows = x.shape[:-1]
    if weight is None:
        weight = x.new_ones((), dtype=torch.float64)
    weight = weight.view(*weight.shape, *[1] * (len(rows) - weight.dim())).expand(rows)
    loss, state = torch.ops.kullback.per_row(x, y, weight, *problem, torch.float64)
    gradients = torch.ops.kullback.gradient(
        x, y, state, weight * scale, *problem, input_gradient, target_gradient
    )
    padded = (g if g.numel() else g.new_empty(size, 0) for g in gradients)
    return ((loss.view(size, -1).sum(-1) * scale).to(dtype), *padded), (0, 0, 0)  # type: ignore[return-value]


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
    size = info.batch_size
    x, y, upstream = _batched((input, target, cotangent), (*in_dims[:2], in_dims[3]), size)
    assert x is not None
    assert upstream is not None
    rows = x.shape[:-1]
    upstream = upstream.view(*upstream.shape, *[1] * (len(rows) - upstream.dim())).expand(rows)
    # The state of unbatched inputs would have to be repeated: it is found anew.
    gradients = torch.ops.kullback.gradient(x, y, None, upstream, *arguments)
    return tuple(g if g.numel() else g.new_empty(size, 0) for g in gradients), (0, 0)


def _wanted(ctx: Any) -> Wanted:
    return ctx.needs_input_grad[0], ctx.needs_input_grad[1]


def _only(gradients: Sequence[Tensor], want: Wanted) -> tuple[Tensor | None, Tensor | None]:
    return (gradients[0] if want[0] else None, gradients[1] if want[1] else None)


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
        result: tuple[Tensor, Tensor] = torch.ops.kullback.gradient(
            input,
            target,
            state,
            cotangent,
            problem.kind,
            problem.form,
            problem.target_form,
            problem.numbers,
            *want,
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, target, _, cotangent, ctx.problem, ctx.want = inputs
        ctx.save_for_backward(input, target, cotangent)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, target, cotangent = ctx.saved_tensors
        want: Wanted = ctx.want

        def formula(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, ...]:
            return gradient_by_formula(ctx.problem, x, y, g, want)

        _, pull_back = torch.func.vjp(formula, input, target, cotangent)
        wanted = tuple(u for u, w in zip(upstream, want, strict=True) if w)
        d_input, d_target, d_cotangent = pull_back(wanted)
        return d_input, d_target, None, d_cotangent, None, None


class Total(torch.autograd.Function):
    """scale · Σ coefficient · loss, with the gradients already written where `write` asks for them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        coefficient: Tensor | None,
        scale: float,
        problem: Problem,
        dtype: torch.dtype,
        write: Wanted,
    ) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.kullback.total(
            input,
            target,
            coefficient,
            scale,
            problem.kind,
            problem.form,
            problem.target_form,
            problem.numbers,
            dtype,
            *write,
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, target, coefficient, ctx.scale, ctx.problem, _, write = inputs
        ctx.save_for_backward(input, target, coefficient)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.written = output[1:] if any(write) else None

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if upstream is None:
            return (None,) * 7
        input, target, coefficient = ctx.saved_tensors
        want = _wanted(ctx)
        if ctx.written is not None and not torch.is_grad_enabled():
            # Handed over, not lent: autograd may keep it. A second backward computes it anew.
            gradients, ctx.written = ctx.written, None
            for gradient, wanted in zip(gradients, want, strict=True):
                if wanted:
                    torch.ops.kullback.scale_(gradient, upstream)
        else:
            cotangent = upstream.to(accumulator(input)) * ctx.scale
            if coefficient is not None:
                cotangent = cotangent * coefficient
            gradients = Gradient.apply(input, target, None, cotangent, ctx.problem, want)
        return *_only(gradients, want), None, None, None, None, None


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
        result: tuple[Tensor, Tensor] = torch.ops.kullback.per_row(
            input,
            target,
            coefficient,
            problem.kind,
            problem.form,
            problem.target_form,
            problem.numbers,
            dtype,
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, target, coefficient, ctx.problem, _ = inputs
        ctx.save_for_backward(input, target, coefficient, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if upstream is None:
            return (None,) * 5
        input, target, coefficient, state = ctx.saved_tensors
        want = _wanted(ctx)
        if upstream.dtype in (torch.float16, torch.bfloat16):
            upstream = upstream.float()
        if coefficient is not None:
            upstream = upstream * coefficient
        gradients = Gradient.apply(input, target, state, upstream, ctx.problem, want)
        return *_only(gradients, want), None, None, None


_functorch_is_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def total(
    input: Tensor,
    target: Tensor,
    coefficient: Tensor | None,
    scale: float,
    problem: Problem,
    dtype: torch.dtype,
) -> Tensor:
    """scale · Σ coefficient · loss, 0-d. In eager autograd the gradients are written in the same pass."""
    if not (torch.is_grad_enabled() and (input.requires_grad or target.requires_grad)):
        loss: Tensor = torch.ops.kullback.total(
            input,
            target,
            coefficient,
            scale,
            problem.kind,
            problem.form,
            problem.target_form,
            problem.numbers,
            dtype,
            False,
            False,
        )[0]
        return loss
    # What traces or transforms wants operators without memory of each other.
    write = not torch.compiler.is_compiling() and not _functorch_is_active()
    return Total.apply(  # type: ignore[no-any-return]
        input,
        target,
        coefficient,
        scale,
        problem,
        dtype,
        (write and input.requires_grad, write and target.requires_grad),
    )[0]


def per_row(
    input: Tensor, target: Tensor, coefficient: Tensor | None, problem: Problem, dtype: torch.dtype
) -> Tensor:
    """coefficient · loss of each row, `input.shape[:-1]`."""
    return PerRow.apply(input, target, coefficient, problem, dtype)[0]  # type: ignore[no-any-return]


def accumulator(tensor: Tensor) -> torch.dtype:
    """The dtype of row coefficients and cotangents: float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
