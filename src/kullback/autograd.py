"""autograd.Functions around the operators, once for all divergences (docs/decisions/0005 and 0007)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from kullback import backends, library
from kullback.backends.pytorch.differentiable import gradient_by_formula
from kullback.dtypes import accumulator, kept_dtype
from kullback.problem import Problem, decode
from kullback.tracing import distinct, is_traced
from kullback.work import Operands, Scale, weighted

Context: TypeAlias = Any  # of an autograd.Function: torch gives it no type
Gradients: TypeAlias = tuple[Tensor | None, ...]
P = ParamSpec("P")
R = TypeVar("R")


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
    return grad_out.to(kept_dtype(grad_out.dtype))


def applied(function: Any, *arguments: Any) -> Any:
    """What the Function returns. While a program is exported its operator alone, which is differentiated likewise.

    Of a Function a strict export keeps the forward, and what is within has no gradient.
    """
    return function.forward(*arguments) if torch.compiler.is_exporting() else function.apply(*arguments)


def weighing(operands: Operands, row_weight: Tensor) -> Operands:
    """With another row weight. (Dynamo of torch 2.8 knows of a NamedTuple no methods, properties or slices.)"""
    return Operands(operands.input, operands.target, row_weight, *tuple(operands)[3:])


def of_rows(operands: Operands) -> tuple[Tensor | None, ...]:
    """Those that have a number for each row."""
    return tuple(operands)[2:]


def on_operands(forward: Callable[P, R]) -> Callable[P, R]:
    """Name the operands one by one: Dynamo counts a forward's parameters to tell whether it takes a context."""
    signature = inspect.signature(forward)
    *leading, _ = signature.parameters.values()
    operands = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in Operands._fields]
    setattr(forward, "__signature__", signature.replace(parameters=[*leading, *operands]))  # noqa: B010 # for mypy
    return forward


class Gradient(torch.autograd.Function):
    """The gradients of Σ row_weight · loss, themselves differentiable (by the formula, unfused)."""

    generate_vmap_rule = True

    @staticmethod
    @on_operands
    def forward(
        problem: Problem,
        wants: tuple[bool, bool],
        state: Tensor | None,
        skipped: Tensor | None,
        *operands: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scalars = library.as_arguments(problem.scalars)
        result: tuple[Tensor, Tensor] = library.gradient(*operands, problem.key, *scalars, state, wants)
        return result

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.problem, ctx.wants, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Context, *grad_out: Tensor) -> Gradients:
        if ctx.problem.shard.group:
            raise RuntimeError("a divergence whose vocabulary ranks share cannot be differentiated twice")

        skipped, *differentiable, labels = ctx.saved_tensors

        def formula(*operands: Tensor) -> tuple[Tensor, ...]:
            return gradient_by_formula(ctx.problem, Operands._make((*operands, labels)), ctx.wants, skipped)

        pull_back = torch.func.vjp(formula, *differentiable)[1]
        gradients = pull_back(tuple(g for g, wanted in zip(grad_out, ctx.wants, strict=True) if wanted))
        return None, None, None, None, *gradients, None


def _pull_back(ctx: Context, state: Tensor | None, given: Operands, grad_out: Tensor) -> Gradients:
    """Gradients of the weighted sum of rows' losses, in a second launch; differentiable again where autograd asks.

    grad_out: upstream of rows' losses, times their weights.
    """
    operands = weighing(given, grad_out)
    wants = ctx.needs_input_grad[-len(operands)], ctx.needs_input_grad[1 - len(operands)]
    with backends.restored(ctx.backend):
        if not is_differentiated_again(*(t for t in of_rows(operands) if t is not None)):
            return library.write_gradients(ctx.problem, operands, state, wants)
        skipped = None if given.row_weight is None else given.row_weight.detach() == 0
        gradients = Gradient.apply(ctx.problem, wants, state, skipped, *distinct(operands))
    return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, wants, strict=True))


class Total(torch.autograd.Function):
    """scale · Σ row_weight · loss; the gradients are found in backward. What traces and transforms can follow."""

    generate_vmap_rule = True

    @staticmethod
    @on_operands
    def forward(problem: Problem, scale: float, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        loss: Tensor = library.value(*operands, problem.key, *library.as_arguments(problem.scalars), scale, dtype)
        return loss

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor | None) -> None:
        ctx.problem, ctx.scale, _, *operands = inputs
        ctx.backend = backends.forced()
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        operands = Operands(*ctx.saved_tensors)
        grad_out = weighted(grad_out.to(accumulator(operands.input)) * ctx.scale, operands.row_weight)
        gradients = _pull_back(ctx, None, operands, grad_out)
        return None, None, None, *gradients, *(None for _ in of_rows(operands))


class EagerTotal(torch.autograd.Function):
    """Total whose gradients are written in the pass that finds the value, and scaled in backward.

    For calls that nothing traces: the backend is called without an operator between, whose dispatch would take as
    long as the launch. A second backward finds the gradients anew.
    """

    @staticmethod
    def forward(ctx: Context, problem: Problem, scale: float, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        ctx.problem, ctx.scale, ctx.backend = problem, scale, backends.forced()
        ctx.save_for_backward(*operands)
        wants = ctx.needs_input_grad[3:5]
        total, *ctx.written = library.sum_losses(problem, Operands._make(operands), scale, dtype, wants)
        return total

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        if ctx.written is None or torch.is_grad_enabled() or is_traced(grad_out):
            return Total.backward(ctx, grad_out)
        saved = ctx.saved_tensors  # raises where an input was modified since
        return *_hand_over(ctx, grad_out), *(None,) * (len(saved) - 2)


class InPlaceTotal(torch.autograd.Function):
    """EagerTotal whose gradient takes the place of the input's logits: there is one backward, and none of it."""

    @staticmethod
    def forward(ctx: Context, problem: Problem, scale: float, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        given, ctx.backend = Operands._make(operands), backends.forced()
        ctx.count = len(operands)
        wants = ctx.needs_input_grad[3:5]
        total, *ctx.written = library.sum_losses(problem, given, scale, dtype, wants, inplace=True)
        # Whoever saved the logits is told by autograd that they are gone; whoever writes there again tells us.
        torch.autograd.graph.increment_version(given.input)
        ctx.version = given.input._version
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        if ctx.written is None:
            raise RuntimeError("the gradient was written over the logits (inplace=True) and has been handed over")
        if ctx.written[0]._version != ctx.version:
            raise RuntimeError("the logits' memory, which holds the gradient (inplace=True), was modified since")
        return *_hand_over(ctx, grad_out), *(None,) * (ctx.count - 2)


def _hand_over(ctx: Context, grad_out: Tensor) -> Gradients:
    """The written gradients times the upstream one: not lent, since autograd may keep them."""
    written, ctx.written = ctx.written, None
    for gradient in written:
        if gradient is not None:
            backends.run(Scale(gradient, grad_out), ctx.backend)
    return None, None, None, *written


class PerRow(torch.autograd.Function):
    """row_weight · loss of each row, and the row states that its gradient starts from."""

    generate_vmap_rule = True

    @staticmethod
    @on_operands
    def forward(problem: Problem, dtype: torch.dtype, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        given = Operands(*operands)  # type: ignore[arg-type]
        if not is_traced(given.input, given.target):
            return library.row_losses(problem, given, dtype)
        scalars = library.as_arguments(problem.scalars)
        result: tuple[Tensor, Tensor] = library.per_row(*operands, problem.key, *scalars, dtype)
        return result

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.problem, _, *operands = inputs
        ctx.backend = backends.forced()
        ctx.save_for_backward(output[1], *operands)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the states would take as much memory as they

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor | None, _: Tensor | None) -> Gradients:
        state, *saved = ctx.saved_tensors
        operands = Operands(*saved)
        if grad_out is None:
            return None, None, *(None for _ in operands)
        grad_out = weighted(widened(grad_out), operands.row_weight)
        gradients = _pull_back(ctx, state, operands, grad_out)
        return None, None, *gradients, *(None for _ in of_rows(operands))


class EagerPerRow(torch.autograd.Function):
    """PerRow for calls that nothing traces: what transforms want of a function takes as long as two launches."""

    @staticmethod
    def forward(ctx: Context, problem: Problem, dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
        losses, state = library.row_losses(problem, Operands._make(operands), dtype)
        ctx.problem, ctx.backend = problem, backends.forced()
        ctx.save_for_backward(state, *operands)
        return losses

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        return PerRow.backward(ctx, grad_out, None)


# An operator that is called by itself, as in an exported program, is differentiated as the functions above are.


def differentiated(name: str, operator: Callable[..., R], function: Callable[..., R]) -> None:
    """Give an operator of that name a function for where gradients are wanted."""

    def kernel(*arguments: Any) -> R:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            return function(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.library.impl(name, kernel, "Autograd")


def _value(
    operands: Operands,
    key: str,
    scalars: library.Scalars,
    symbols: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    problem = decode(key, library.as_numbers(scalars, symbols))
    return Total.apply(problem, scale, dtype, *operands)  # type: ignore[no-any-return]


def _per_row(
    operands: Operands, key: str, scalars: library.Scalars, symbols: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return PerRow.apply(decode(key, library.as_numbers(scalars, symbols)), dtype, *operands)  # type: ignore[no-any-return]


differentiated("value", library.value, library.of_fields(Operands, _value))
differentiated("per_row", library.per_row, library.of_fields(Operands, _per_row))


def total(problem: Problem, operands: Operands, scale: float, dtype: torch.dtype, inplace: bool = False) -> Tensor:
    """scale · Σ row_weight · loss, 0-d. In eager autograd the gradients are written in the same pass."""
    x, y = operands.input, operands.target
    is_shared, traced = bool(problem.shard.group), is_traced(x, y)
    if traced and not is_shared:
        return applied(Total, problem, scale, dtype, *distinct(operands))  # type: ignore[no-any-return]
    wants = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    waits = wants and waits_for_scaler(x, y)
    if (is_shared and (traced or waits)) or (waits and x.device.type == "cpu" and problem.has_logits):
        # With the rows' states: a gradient without them would ask all ranks again, or read rows three times more.
        return (per_row(problem, operands, accumulator(x)).sum() * scale).to(dtype)
    if wants:
        function = Total if waits else InPlaceTotal if inplace and x.requires_grad else EagerTotal
        return function.apply(problem, scale, dtype, *operands)  # type: ignore[no-any-return]
    return library.sum_losses(problem, operands, scale, dtype)[0]


def per_row(problem: Problem, operands: Operands, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row, `input.shape[:-1]`."""
    x, y = operands.input, operands.target
    if is_traced(x, y):
        return applied(PerRow, problem, dtype, *distinct(operands))[0]  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return EagerPerRow.apply(problem, dtype, *operands)  # type: ignore[no-any-return]
    return library.row_losses(problem, operands, dtype)[0]
