"""autograd.Functions around the operators, once for all divergences (docs/decisions/0005 and 0007)."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from kullback import backends, library
from kullback.backends.pytorch import gradient_by_formula
from kullback.problem import Problem, accumulator
from kullback.tracing import is_traced
from kullback.work import Scale

Context: TypeAlias = Any  # of an autograd.Function: torch gives it no type
Gradients: TypeAlias = tuple[Tensor | None, ...]


def is_differentiated_again(*tensors: Tensor) -> bool:
    """Of a backward: whether its own derivative, or a trace of it, may be wanted."""
    return torch.is_grad_enabled() or is_traced(*tensors)


def waits_for_scaler(*tensors: Tensor) -> bool:
    """Whether gradients must not be written before the upstream one is known.

    A loss scaler's factor is what keeps those of float16 from underflow.
    """
    return any(tensor.dtype == torch.float16 for tensor in tensors)


def widened(grad_out: Tensor) -> Tensor:
    """An upstream gradient in float32 at least: kernels know no others."""
    return grad_out.to(torch.promote_types(grad_out.dtype, torch.float32))


def weighted(grad_out: Tensor, row_weight: Tensor | None) -> Tensor:
    """grad_out · row_weight, and 0 where that is 0: the gradient of a row that does not count may be infinite."""
    return grad_out if row_weight is None else torch.where(row_weight == 0, 0.0, grad_out * row_weight)


class Gradient(torch.autograd.Function):
    """The gradients of Σ grad_out · loss, themselves differentiable (by the formula, unfused)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        state: Tensor | None,
        grad_out: Tensor,
        problem: Problem,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = library.gradient(
            input, target, state, grad_out, problem.key, problem.scalars, wants[0], wants[1]
        )
        return result

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        input, target, _, grad_out, ctx.problem, ctx.wants = inputs
        ctx.save_for_backward(input, target, grad_out)

    @staticmethod
    def backward(ctx: Context, *grad_out: Tensor) -> Gradients:
        input, target, first = ctx.saved_tensors

        def formula(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, ...]:
            return gradient_by_formula(ctx.problem, x, y, g, ctx.wants)

        pull_back = torch.func.vjp(formula, input, target, first)[1]
        d_input, d_target, d_first = pull_back(tuple(g for g, w in zip(grad_out, ctx.wants, strict=True) if w))
        return d_input, d_target, None, d_first, None, None


def _pull_back(
    ctx: Context, input: Tensor, target: Tensor, state: Tensor | None, grad_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a row sum, in a second launch; differentiable again where autograd asks."""
    wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    if is_differentiated_again(grad_out):
        d_input, d_target = Gradient.apply(input, target, state, grad_out, ctx.problem, wants)
        return d_input if wants[0] else None, d_target if wants[1] else None
    with backends.restored(ctx.backend):
        return library.write_gradients(ctx.problem, input, target, state, grad_out, wants)


class Total(torch.autograd.Function):
    """scale · Σ row_weight · loss; the gradients are found in backward. What traces and transforms can follow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        row_weight: Tensor | None,
        scale: float,
        problem: Problem,
        dtype: torch.dtype,
    ) -> Tensor:
        loss: Tensor = library.value(input, target, row_weight, scale, problem.key, problem.scalars, dtype)
        return loss

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor | None) -> None:
        input, target, row_weight, ctx.scale, ctx.problem, _ = inputs
        ctx.backend = backends.forced()
        ctx.save_for_backward(input, target, row_weight)

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        input, target, row_weight = ctx.saved_tensors
        grad_out = weighted(grad_out.to(accumulator(input)) * ctx.scale, row_weight)
        return *_pull_back(ctx, input, target, None, grad_out), None, None, None, None


class EagerTotal(torch.autograd.Function):
    """Total whose gradients are written in the pass that finds the value, and scaled in backward.

    For calls that nothing traces: the backend is called without an operator between, whose dispatch would take as
    long as the launch. A second backward finds the gradients anew.
    """

    @staticmethod
    def forward(
        ctx: Context,
        input: Tensor,
        target: Tensor,
        row_weight: Tensor | None,
        scale: float,
        problem: Problem,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(input, target, row_weight)
        ctx.scale, ctx.problem, ctx.backend = scale, problem, backends.forced()
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        total, *ctx.written = library.sum_losses(problem, input, target, row_weight, scale, dtype, wants)
        return total

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        if ctx.written is None or is_differentiated_again(grad_out):
            return Total.backward(ctx, grad_out)
        ctx.saved_tensors  # noqa: B018 # raises where an input was modified since
        return _hand_over(ctx, grad_out)


class InPlaceTotal(torch.autograd.Function):
    """EagerTotal whose gradient takes the place of the input's logits: there is one backward, and none of it."""

    @staticmethod
    def forward(
        ctx: Context,
        input: Tensor,
        target: Tensor,
        row_weight: Tensor | None,
        scale: float,
        problem: Problem,
        dtype: torch.dtype,
    ) -> Tensor:
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.backend = backends.forced()
        total, *ctx.written = library.sum_losses(problem, input, target, row_weight, scale, dtype, wants, inplace=True)
        # Whoever saved the logits is told by autograd that they are gone; whoever writes there again tells us.
        torch.autograd.graph.increment_version(input)
        ctx.version = input._version
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        if ctx.written is None:
            raise RuntimeError("the gradient was written over the logits (inplace=True) and has been handed over")
        if ctx.written[0]._version != ctx.version:
            raise RuntimeError("the logits' memory, which holds the gradient (inplace=True), was modified since")
        return _hand_over(ctx, grad_out)


def _hand_over(ctx: Context, grad_out: Tensor) -> Gradients:
    """The written gradients times the upstream one: not lent, since autograd may keep them."""
    written, ctx.written = ctx.written, None
    with backends.restored(ctx.backend):
        for gradient in written:
            if gradient is not None:
                backends.run(Scale(gradient, grad_out))
    return *written, None, None, None, None


class PerRow(torch.autograd.Function):
    """row_weight · loss of each row, and the row states that its gradient starts from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        row_weight: Tensor | None,
        problem: Problem,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = library.per_row(input, target, row_weight, problem.key, problem.scalars, dtype)
        return result

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        input, target, row_weight, ctx.problem, _ = inputs
        ctx.save_for_backward(input, target, row_weight, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the states would take as much memory as they
        ctx.backend = backends.forced()

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor | None, _: Tensor | None) -> Gradients:
        if grad_out is None:
            return (None,) * 5
        input, target, row_weight, state = ctx.saved_tensors
        grad_out = weighted(widened(grad_out), row_weight)
        return *_pull_back(ctx, input, target, state, grad_out), None, None, None


def total(
    problem: Problem,
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    inplace: bool = False,
) -> Tensor:
    """scale · Σ row_weight · loss, 0-d. In eager autograd the gradients are written in the same pass."""
    if inplace and torch.is_grad_enabled() and input.requires_grad:
        return InPlaceTotal.apply(input, target, row_weight, scale, problem, dtype)  # type: ignore[no-any-return]
    if is_traced(input, target):
        return Total.apply(input, target, row_weight, scale, problem, dtype)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and (input.requires_grad or target.requires_grad):
        function = Total if waits_for_scaler(input, target) else EagerTotal
        return function.apply(input, target, row_weight, scale, problem, dtype)  # type: ignore[no-any-return]
    return library.sum_losses(problem, input, target, row_weight, scale, dtype)[0]


def per_row(problem: Problem, input: Tensor, target: Tensor, row_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row, `input.shape[:-1]`."""
    return PerRow.apply(input, target, row_weight, problem, dtype)[0]  # type: ignore[no-any-return]
