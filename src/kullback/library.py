"""torch.library operators, once for all divergences: schemas, implementations, fakes and vmap rules. No autograd.

An operator takes a problem as its key and its scalars (problem.py). Arity is fixed: a gradient that is not wanted is
an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kullback import backends
from kullback.problem import Problem, accumulator, decode
from kullback.state import RowState, packed
from kullback.work import Rows

PROBLEM = "str problem, float[] scalars"

library = torch.library.Library("kullback", "DEF")
library.define(
    f"value(Tensor input, Tensor target, Tensor? row_weight, float scale, {PROBLEM}, ScalarType dtype) -> Tensor"
)
library.define(
    f"per_row(Tensor input, Tensor target, Tensor? row_weight, {PROBLEM}, ScalarType dtype) -> (Tensor, Tensor)"
)
library.define(
    f"gradient(Tensor input, Tensor target, Tensor? state, Tensor grad_out, {PROBLEM}, "
    "bool of_input, bool of_target) -> (Tensor, Tensor)"
)


def gradient_like(tensor: Tensor, problem: Problem, wanted: bool, inplace: bool = False) -> Tensor | None:
    """Memory for the tensor's gradient, 0 beyond the vocabulary that counts; `inplace`: the tensor's own."""
    if not wanted:
        return None
    gradient = tensor.detach() if inplace else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if 0 < problem.vocab < gradient.size(-1):
        gradient[..., problem.vocab :] = 0
    return gradient


def state_fields(problem: Problem) -> int:
    """How many numbers of a row its gradient needs beside the row."""
    return len(RowState._fields) if problem.has_logits or not problem.formula.finish_is_linear else 0


def sum_losses(
    problem: Problem,
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    wants: tuple[bool, bool] = (False, False),
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """scale · Σ row_weight · loss and its wanted gradients; `inplace`: the input's in the place of its logits."""
    total = input.new_empty((), dtype=dtype)
    d_input = gradient_like(input, problem, wants[0], inplace)
    d_target = gradient_like(target, problem, wants[1])
    backends.run(
        Rows(
            problem,
            input,
            target,
            row_weight=row_weight,
            scale=scale,
            total=total,
            d_input=d_input,
            d_target=d_target,
        )
    )
    return total, d_input, d_target


def write_gradients(
    problem: Problem,
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    grad_out: Tensor,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of Σ grad_out · loss, from the rows' states or without them."""
    d_input, d_target = (gradient_like(t, problem, want) for t, want in zip((input, target), wants, strict=True))
    known = None if state is None or not state.numel() else state
    rows = Rows(problem, input, target, "gradient", grad_out, known=known, d_input=d_input, d_target=d_target)
    backends.run(rows)
    return d_input, d_target


def _value(
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    scale: float,
    problem: str,
    scalars: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    return sum_losses(decode(problem, tuple(scalars)), input, target, row_weight, scale, dtype)[0]


def _per_row(
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    problem: str,
    scalars: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    decoded, rows = decode(problem, tuple(scalars)), math.prod(input.shape[:-1])
    loss, state = input.new_empty(rows, dtype=dtype), packed(rows, state_fields(decoded), input)
    found = state if state.size(0) else None
    backends.run(Rows(decoded, input, target, row_weight=row_weight, loss=loss, found=found))
    return loss.view(input.shape[:-1]), state


def _gradient(
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    grad_out: Tensor,
    problem: str,
    scalars: Sequence[float],
    of_input: bool,
    of_target: bool,
) -> tuple[Tensor, Tensor]:
    decoded = decode(problem, tuple(scalars))
    d_input, d_target = write_gradients(decoded, input, target, state, grad_out, (of_input, of_target))
    return input.new_empty(0) if d_input is None else d_input, target.new_empty(0) if d_target is None else d_target


library.impl("value", _value, "CompositeExplicitAutograd")
library.impl("per_row", _per_row, "CompositeExplicitAutograd")
library.impl("gradient", _gradient, "CompositeExplicitAutograd")

value = torch.ops.kullback.value.default
per_row = torch.ops.kullback.per_row.default
gradient = torch.ops.kullback.gradient.default


@torch.library.register_fake("kullback::value", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    scale: float,
    problem: str,
    scalars: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    return input.new_empty((), dtype=dtype)


@torch.library.register_fake("kullback::per_row", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    problem: str,
    scalars: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows = input.shape[:-1]
    state = packed(math.prod(rows), state_fields(decode(problem, tuple(scalars))), input)
    return input.new_empty(rows, dtype=dtype), state


@torch.library.register_fake("kullback::gradient", lib=library)
def _(
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    grad_out: Tensor,
    problem: str,
    scalars: Sequence[float],
    of_input: bool,
    of_target: bool,
) -> tuple[Tensor, Tensor]:
    return (
        input.new_empty(input.shape if of_input else (0,)),
        target.new_empty(target.shape if of_target else (0,)),
    )


# vmap: a batch of problems is one problem of more rows.

Dims = tuple[int | None, ...]


class BatchInfo(Protocol):
    """What torch.library tells a vmap rule."""

    batch_size: int


def batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _row_vectors(tensor: Tensor, dim: int | None, rows: torch.Size) -> Tensor:
    """A row vector for each problem of the batch, or one number for each, as [batch, *rows]."""
    tensor = batch_first(tensor, dim, rows[0])
    return tensor.reshape(*tensor.shape, *[1] * (len(rows) - tensor.dim())).expand(rows)


@torch.library.register_vmap("kullback::per_row", lib=library)
def _(
    info: BatchInfo,
    in_dims: Dims,
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    problem: str,
    scalars: Sequence[float],
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    x = batch_first(input, in_dims[0], info.batch_size)
    y = batch_first(target, in_dims[1], info.batch_size)
    if row_weight is not None:
        row_weight = _row_vectors(row_weight, in_dims[2], x.shape[:-1])
    loss, state = per_row(x, y, row_weight, problem, scalars, dtype)
    return (loss, state.view(state.size(0), info.batch_size, math.prod(x.shape[1:-1]))), (0, 1)


@torch.library.register_vmap("kullback::value", lib=library)
def _(
    info: BatchInfo,
    in_dims: Dims,
    input: Tensor,
    target: Tensor,
    row_weight: Tensor | None,
    scale: float,
    problem: str,
    scalars: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    x = batch_first(input, in_dims[0], info.batch_size)
    y = batch_first(target, in_dims[1], info.batch_size)
    if row_weight is not None:
        row_weight = _row_vectors(row_weight, in_dims[2], x.shape[:-1])
    loss = per_row(x, y, row_weight, problem, scalars, accumulator(x))[0]
    return (loss.view(info.batch_size, math.prod(x.shape[1:-1])).sum(-1) * scale).to(dtype), 0


@torch.library.register_vmap("kullback::gradient", lib=library)
def _(
    info: BatchInfo,
    in_dims: Dims,
    input: Tensor,
    target: Tensor,
    state: Tensor | None,
    grad_out: Tensor,
    problem: str,
    scalars: Sequence[float],
    of_input: bool,
    of_target: bool,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    x = batch_first(input, in_dims[0], info.batch_size)
    y = batch_first(target, in_dims[1], info.batch_size)
    grad_out = _row_vectors(grad_out, in_dims[3], x.shape[:-1])
    # The states of one problem would not fit a batch of upstream gradients: they are found anew.
    d_input, d_target = gradient(x, y, None, grad_out, problem, scalars, of_input, of_target)
    return (
        d_input if of_input else d_input.new_empty(info.batch_size, 0),
        d_target if of_target else d_target.new_empty(info.batch_size, 0),
    ), (0, 0)
