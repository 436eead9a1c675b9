"""Divergences of DTensors whose rows lie on several devices: each device finds its own rows'."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from kullback import autograd
from kullback.problem import Problem
from kullback.tracing import PLAIN
from kullback.work import Operands

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Without importing what takes a second: a tensor of that type is there only if its module is."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class Driver(Protocol):
    """What differentiates rows: this module, or autograd.py."""

    def total(
        self, problem: Problem, operands: Operands, scale: float, dtype: torch.dtype, inplace: bool = False
    ) -> Tensor: ...

    def per_row(self, problem: Problem, operands: Operands, dtype: torch.dtype) -> Tensor: ...


def driver(input: Tensor, target: Tensor) -> Driver:
    return sys.modules[__name__] if is_dtensor(input) or is_dtensor(target) else autograd


def total(problem: Problem, operands: Operands, scale: float, dtype: torch.dtype, inplace: bool = False) -> Tensor:
    """scale · Σ row_weight · loss, 0-d, of which each device holds its rows' part."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    input = _checked(operands)
    assert not inplace, "refused of what is traced"
    found = autograd.total(problem, _local(operands), scale, dtype)
    placements = [Partial() if isinstance(of_rows, Shard) else of_rows for of_rows in input.placements]
    result: Tensor = DTensor.from_local(found, input.device_mesh, placements, run_check=False)
    return result


def per_row(problem: Problem, operands: Operands, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row, `input.shape[:-1]`, where the row is."""
    from torch.distributed.tensor import DTensor

    input = _checked(operands)
    shape = input.shape[:-1]
    stride = [*itertools.accumulate([1, *reversed(shape)], lambda a, b: a * b)][-2::-1]
    found = autograd.per_row(problem, _local(operands), dtype)
    result: Tensor = DTensor.from_local(
        found, input.device_mesh, input.placements, run_check=False, shape=shape, stride=tuple(stride)
    )
    return result


def _local(operands: Operands) -> Operands:
    return Operands._make(tensor.to_local() if is_dtensor(tensor) else tensor for tensor in operands)


def _checked(operands: Operands) -> DTensor:
    """The input, once it is known that the operands lie alike and that every row is whole."""
    given = {name: tensor for name, tensor in zip(Operands._fields, operands, strict=True) if tensor is not None}
    for name, tensor in given.items():
        if not is_dtensor(tensor):
            raise TypeError(f"input, target and row_weight must all be DTensors, or none; {name} is none")
    input = given["input"]
    assert is_dtensor(input)
    for name, tensor in given.items():
        assert is_dtensor(tensor)
        if tensor.device_mesh != input.device_mesh or tensor.placements != input.placements:
            raise ValueError(
                f"{name} must lie as the input does, {input.placements}; got {tensor.placements}: "
                f"{name}.redistribute(input.device_mesh, input.placements)"
            )
    for placement in input.placements:
        if not (placement.is_replicate() or any(placement.is_shard(dim) for dim in range(input.dim() - 1))):
            raise ValueError(
                "DTensors must be replicated, or sharded along a dimension of rows (not the last, the vocabulary); got "
                f"{input.placements}: redistribute them"
            )
    return input
