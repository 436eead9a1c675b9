"""torch.library operators, once for all divergences: schemas, implementations, fakes and vmap rules. No autograd.

An operator takes the fields of `Operands` (work.py) as its tensors, and a problem as its key and its scalars
(problem.py). These are numbers, or a tensor where they are a compiler's symbols. Arity is fixed: a gradient that is not
wanted is an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor

from kullback import collecting, parallel
from kullback.dtypes import accumulator
from kullback.problem import Problem, decode
from kullback.state import packed, state_fields
from kullback.tracing import is_symbolic
from kullback.work import Operands, Rows

library = torch.library.Library("kullback", "DEF")

Scalars: TypeAlias = Sequence[float]
R = TypeVar("R")
T = TypeVar("T", bound=NamedTuple)


def schema_of(record: type[NamedTuple]) -> str:
    """A record of tensors as an operator takes it: field by field. Legacy vmap knows no lists of tensors."""
    kinds = get_type_hints(record)
    return ", ".join(f"{'Tensor' if kinds[name] is Tensor else 'Tensor?'} {name}" for name in record._fields)


def of_fields(record: type[T], function: Callable[..., R]) -> Callable[..., R]:
    """The function of a record of tensors as a function of its fields."""
    count = len(record._fields)

    def flat(*arguments: Any) -> R:
        return function(record._make(arguments[:count]), *arguments[count:])

    return flat


SCALARS = "float[] scalars, Tensor? symbols"
ROWS = f"{schema_of(Operands)}, str problem, {SCALARS}"
library.define(f"value({ROWS}, float scale, ScalarType dtype) -> Tensor")
library.define(f"per_row({ROWS}, ScalarType dtype) -> (Tensor, Tensor)")
library.define(f"gradient({ROWS}, Tensor? state, bool[] wants) -> (Tensor, Tensor)")


def as_arguments(scalars: tuple[float, ...]) -> tuple[Scalars, Tensor | None]:
    """Scalars as operators take them. Dynamo compiles anew for each value of a number that an operator is given."""
    if not any([is_symbolic(scalar) for scalar in scalars]):  # noqa: C419 # Dynamo of torch 2.8 traces no generator here
        return scalars, None
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    return (), torch.cat([one * scalar for scalar in scalars])


def as_numbers(scalars: Scalars, symbols: Tensor | None) -> tuple[float, ...]:
    """The scalars again, inside of an operator."""
    return tuple(scalars if symbols is None else symbols.tolist())


def gradient_like(tensor: Tensor, problem: Problem, inplace: bool = False) -> Tensor:
    """Memory for the tensor's gradient, 0 beyond the vocabulary that counts; `inplace`: the tensor's own."""
    gradient = tensor.detach() if inplace else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if 0 < problem.vocab < gradient.size(-1):
        gradient[..., problem.vocab :] = 0
    return gradient


def _run(work: Rows) -> None:
    """A loss of rows, and its statistics where somebody collects them."""
    begun = collecting.begin(work.problem, work.operands)
    if begun is None:
        parallel.run(work)
        return
    parallel.run(work._replace(figures=begun.figures))
    collecting.end([begun])


def sum_losses(
    problem: Problem,
    operands: Operands,
    scale: float,
    dtype: torch.dtype,
    wants: Sequence[bool] = (False, False),
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """scale · Σ row_weight · loss, and its wanted gradients; `inplace`: the input's in the place of its values."""
    total = operands.input.new_empty_strided((), (), dtype=dtype)  # half of new_empty's time
    d_input = gradient_like(operands.input, problem, inplace) if wants[0] else None
    d_target = gradient_like(operands.target, problem) if wants[1] else None
    _run(Rows(problem, operands, scale=scale, total=total, d_input=d_input, d_target=d_target))
    return total, d_input, d_target


def row_losses(problem: Problem, operands: Operands, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """row_weight · loss of each row, `input.shape[:-1]`, and the rows' states."""
    shape = operands.input.shape[:-1]
    loss = operands.input.new_empty(math.prod(shape), dtype=dtype)
    state = packed(loss.size(0), state_fields(problem), loss)
    _run(Rows(problem, operands, loss=loss, found=state if state.size(0) else None))
    return loss.view(shape), state


def write_gradients(
    problem: Problem, operands: Operands, state: Tensor | None, wants: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of Σ row_weight · loss, from the rows' states or without them."""
    d_input = gradient_like(operands.input, problem) if wants[0] else None
    d_target = gradient_like(operands.target, problem) if wants[1] else None
    known = None if state is None or not state.numel() else state
    parallel.run(Rows(problem, operands, "gradient", known=known, d_input=d_input, d_target=d_target))
    return d_input, d_target


def _value(
    operands: Operands, problem: str, scalars: Scalars, symbols: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    return sum_losses(decode(problem, as_numbers(scalars, symbols)), operands, scale, dtype)[0]


def _per_row(
    operands: Operands, problem: str, scalars: Scalars, symbols: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return row_losses(decode(problem, as_numbers(scalars, symbols)), operands, dtype)


def _gradient(
    operands: Operands,
    problem: str,
    scalars: Scalars,
    symbols: Tensor | None,
    state: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    d_input, d_target = write_gradients(decode(problem, as_numbers(scalars, symbols)), operands, state, wants)
    empty = operands.input.new_empty(0), operands.target.new_empty(0)
    return empty[0] if d_input is None else d_input, empty[1] if d_target is None else d_target


def _fake_value(operands: Operands, problem: str, *arguments: Any) -> Tensor:
    return operands.input.new_empty((), dtype=arguments[-1])


def _fake_per_row(operands: Operands, problem: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    rows = operands.input.shape[:-1]
    state = packed(math.prod(rows), state_fields(decode(problem)), operands.input)
    return operands.input.new_empty(rows, dtype=arguments[-1]), state


def _fake_gradient(operands: Operands, problem: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    d_input, d_target = (t.new_empty(t.shape if w else (0,)) for t, w in zip(operands[:2], arguments[-1], strict=True))
    return d_input, d_target


for name, function, fake in (
    ("value", _value, _fake_value),
    ("per_row", _per_row, _fake_per_row),
    ("gradient", _gradient, _fake_gradient),
):
    library.impl(name, of_fields(Operands, function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kullback::{name}", of_fields(Operands, fake), lib=library)

value = torch.ops.kullback.value.default
per_row = torch.ops.kullback.per_row.default
gradient = torch.ops.kullback.gradient.default


# vmap: a batch of problems is one problem of more rows.


class BatchInfo(Protocol):
    """What torch.library tells a vmap rule."""

    batch_size: int


Dims: TypeAlias = tuple[int | None, ...]


def batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _batched(info: BatchInfo, dims: Dims, operands: Operands) -> Operands:
    """[batch, ..., vocab]; of each operand of rows a vector for each problem of the batch, or one number for each."""
    x, y = (batch_first(t, dim, info.batch_size) for t, dim in zip(operands[:2], dims, strict=False))

    def row_vectors(tensor: Tensor, dim: int | None) -> Tensor:
        tensor = batch_first(tensor, dim, info.batch_size)
        return tensor.reshape(*tensor.shape, *[1] * (x.dim() - 1 - tensor.dim())).expand(x.shape[:-1])

    of_rows = zip(operands.of_rows, dims[2:], strict=False)
    return Operands(x, y, *(None if t is None else row_vectors(t, dim) for t, dim in of_rows))


def _vmap_value(
    info: BatchInfo,
    dims: Dims,
    operands: Operands,
    problem: str,
    scalars: Scalars,
    symbols: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    given = _batched(info, dims, operands)
    loss = per_row(*given, problem, scalars, symbols, accumulator(given.input))[0]
    return (loss.view(info.batch_size, math.prod(loss.shape[1:])).sum(-1) * scale).to(dtype), 0


def _vmap_per_row(
    info: BatchInfo, dims: Dims, operands: Operands, *arguments: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    loss, state = per_row(*_batched(info, dims, operands), *arguments)
    return (loss, state.view(state.size(0), info.batch_size, math.prod(loss.shape[1:]))), (0, 1)


def _vmap_gradient(
    info: BatchInfo,
    dims: Dims,
    operands: Operands,
    problem: str,
    scalars: Scalars,
    symbols: Tensor | None,
    state: Tensor | None,
    wants: Sequence[bool],
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    # The states of one problem would not fit a batch of upstream gradients: they are found anew.
    results = gradient(*_batched(info, dims, operands), problem, scalars, symbols, None, list(wants))
    d_input, d_target = (d if want else d.new_empty(info.batch_size, 0) for d, want in zip(results, wants, strict=True))
    return (d_input, d_target), (0, 0)


def _register_vmap(name: str, rule: Callable[..., object]) -> None:
    def flat(info: BatchInfo, dims: Dims, *arguments: Any) -> object:
        count = len(Operands._fields)
        return rule(info, dims, Operands._make(arguments[:count]), *arguments[count:])

    torch.library.register_vmap(f"kullback::{name}", flat, lib=library)


for name, rule in (("value", _vmap_value), ("per_row", _vmap_per_row), ("gradient", _vmap_gradient)):
    _register_vmap(name, rule)
