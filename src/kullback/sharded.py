"""Divergences of DTensors: each device finds its own rows', or its part of what shares their vocabulary."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from kullback import autograd
from kullback.problem import Problem
from kullback.problem import Shard as Sharded
from kullback.tracing import PLAIN
from kullback.work import OF_ROWS, Operands

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Without importing what takes a second: a tensor of that type is there only if its module is."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shares_vocab(tensor: Tensor) -> bool:
    """Whether it is a DTensor of which each device has a slice of every row."""
    return is_dtensor(tensor) and any(_is_shard(placement, tensor.dim() - 1) for placement in tensor.placements)


def check_alike(**given: Tensor | None) -> None:
    """That all that are given are DTensors, or none."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return
    are = {name: isinstance(tensor, module.DTensor) for name, tensor in given.items() if tensor is not None}
    for name, is_one in are.items():
        if not is_one and any(are.values()):
            raise TypeError(f"{', '.join(are)} must all be DTensors, or none; {name} is none")


def check_normalizer(normalizer: float | Tensor | None, input: Tensor) -> None:
    """That it is no DTensor beside plain tensors."""
    if isinstance(normalizer, Tensor) and is_dtensor(normalizer) and not is_dtensor(input):
        raise TypeError("normalizer must be a number or a plain tensor where input is no DTensor; got a DTensor")


def whole(normalizer: float | Tensor | None) -> float | Tensor | None:
    """What a sum of local losses is divided by."""
    return normalizer.full_tensor() if is_dtensor(normalizer) else normalizer


class Driver(Protocol):
    """What differentiates rows: this module, or autograd.py."""

    def total(
        self, problem: Problem, operands: Operands, scale: float, dtype: torch.dtype, inplace: bool = False
    ) -> Tensor: ...

    def per_row(self, problem: Problem, operands: Operands, dtype: torch.dtype) -> Tensor: ...


def driver(input: Tensor, target: Tensor, group: ProcessGroup | None = None) -> Driver:
    if not (is_dtensor(input) or is_dtensor(target)):
        return autograd
    _refuse(group)
    return sys.modules[__name__]


def _refuse(group: ProcessGroup | None) -> None:
    if group is not None:
        raise ValueError("group must not be given with DTensors, whose mesh tells it; got one")


def total(problem: Problem, operands: Operands, scale: float, dtype: torch.dtype, inplace: bool = False) -> Tensor:
    """scale · Σ row_weight · loss, 0-d, of which each device holds its rows' part."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    input, shared = _checked(operands)
    assert not inplace, "refused of what is traced"
    found = autograd.total(*_local(problem, operands, input, shared), scale, dtype)
    placements = [
        Partial() if isinstance(of_rows, Shard) else of_rows for of_rows in _of_rows(input.placements, shared)
    ]
    result: Tensor = DTensor.from_local(found, input.device_mesh, placements, run_check=False)
    return result


def per_row(problem: Problem, operands: Operands, dtype: torch.dtype) -> Tensor:
    """row_weight · loss of each row, `input.shape[:-1]`, where the row is."""
    from torch.distributed.tensor import DTensor

    input, shared = _checked(operands)
    shape = input.shape[:-1]
    found = autograd.per_row(*_local(problem, operands, input, shared), dtype)
    placements = _of_rows(input.placements, shared)
    result: Tensor = DTensor.from_local(
        found, input.device_mesh, placements, run_check=False, shape=shape, stride=_contiguous(shape)
    )
    return result


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor."""
    return tuple([*itertools.accumulate([1, *reversed(shape)], operator.mul)][-2::-1])


class Local(torch.autograd.Function):
    """`to_local`, whose gradient has the shape of the whole tensor, and is contiguous.

    torch's has the stride of equal parts. Where parts are unlike that is not the leaf's, and autograd copies the
    gradient; torch 2.11 makes that copy Replicate(), by a gather.
    """

    @staticmethod
    def forward(ctx: autograd.Context, tensor: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements, ctx.shape = tensor.device_mesh, tensor.placements, tensor.shape
        local: Tensor = tensor.to_local()
        return local.view_as(local)  # a tensor of autograd's own, not the one inside the DTensor

    @staticmethod
    def backward(ctx: autograd.Context, grad_out: Tensor | None) -> Tensor | None:
        from torch.distributed.tensor import DTensor

        if grad_out is None:
            return None
        result: Tensor = DTensor.from_local(
            grad_out.contiguous(),
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=_contiguous(ctx.shape),
        )
        return result


def _of_rows(placements: Sequence[Placement], shared: int | None) -> list[Placement]:
    """Where what has a number for each row lies, of rows that lie so: with all that share their vocabulary."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if dim == shared else placement for dim, placement in enumerate(placements)]


def _local(problem: Problem, operands: Operands, input: DTensor, shared: int | None) -> tuple[Problem, Operands]:
    """What this device has, and the problem of it."""
    own: list[Any] = [Local.apply(tensor) if is_dtensor(tensor) else tensor for tensor in operands]
    local = Operands(*own)  # Dynamo of torch 2.8 does not follow _make
    if shared is None:
        return problem, local
    mesh = input.device_mesh
    first_token, width = _slice(input.size(-1), mesh, shared)
    valid_width = min(max(problem.vocab - first_token, 0), width) if problem.vocab else width
    if valid_width == 0:
        local = local._replace(input=local.input[..., :0], target=local.target[..., :0])
    of_slice = _of_slice if torch.compiler.is_compiling() else _cached_of_slice
    group = mesh.get_group(shared).group_name
    return of_slice(problem, Sharded(group, first_token), valid_width if valid_width < width else 0), local


def _of_slice(problem: Problem, shard: Sharded, vocab: int) -> Problem:
    """The problem of a slice of which so much counts."""
    return dataclasses.replace(problem, vocab=vocab, shard=shard)


_cached_of_slice = functools.lru_cache(maxsize=1024)(_of_slice)


def _slice(vocab: int, mesh: DeviceMesh, dim: int) -> tuple[int, int]:
    """This device's first token, and how many it has: as many as each other has, but for the last ones."""
    step = -(-vocab // mesh.size(dim))
    place = mesh.get_coordinate()  # Dynamo of torch 2.8 knows no get_local_rank
    assert place is not None  # as of a DTensor that this device has a part of
    first_token = min(place[dim] * step, vocab)
    return first_token, min(step, vocab - first_token)


def _checked(operands: Operands) -> tuple[DTensor, int | None]:
    """The input and the dimension of its mesh that shares the vocabulary, if one does, once it is known how all lie."""
    given = {name: tensor for name, tensor in zip(Operands._fields, operands, strict=True) if tensor is not None}
    check_alike(**given)
    input = given["input"]
    assert is_dtensor(input)
    vocab_dim = input.dim() - 1
    shares = [dim for dim, placement in enumerate(input.placements) if _is_shard(placement, vocab_dim)]
    for placement in input.placements:
        if not (placement.is_replicate() or any(_is_shard(placement, dim) for dim in range(input.dim()))) or shares[1:]:
            raise ValueError(
                "DTensors must be replicated, sharded along a dimension of rows or, on one dimension of their mesh, "
                f"along the last, the vocabulary; got {input.placements}: redistribute them"
            )
    shared = shares[0] if shares else None
    for name, tensor in given.items():
        assert is_dtensor(tensor)
        wanted = tuple(_of_rows(input.placements, shared)) if name in OF_ROWS else input.placements
        if tensor.device_mesh != input.device_mesh or tensor.placements != wanted:
            raise ValueError(
                f"{name} must lie as the input does, {wanted}; got {tensor.placements}: "
                f"{name}.redistribute(input.device_mesh, {wanted})"
            )
    if shared is not None and given["target"].shape != input.shape:
        raise ValueError(
            "DTensors that are sharded along the vocabulary must have the same one, or their slices are of unlike "
            f"tokens; got {list(input.shape)} and {list(given['target'].shape)}"
        )
    return input, shared


def _is_shard(placement: Placement, dim: int) -> bool:
    """Of contiguous parts along that dimension: what FSDP2 puts beneath tensor parallelism is not of these."""
    from torch.distributed.tensor import Shard

    return isinstance(placement, Shard) and placement.dim == dim


# Where only some tensors have tokens: entries of a top-k teacher, or hidden states and heads.


class Layout(NamedTuple):
    """How the tensors of a call lie on a mesh, of which one dimension shares the vocabulary."""

    mesh: DeviceMesh
    shared: int  # that dimension
    first_token: int
    total_vocab: int
    valid_vocab: int | None  # of this device's slice
    sequence_dim: int | None  # of the rows, along which they are sharded

    @property
    def place(self) -> tuple[ProcessGroup, int, int, int | None]:
        """The arguments of a slice: group, first_token, total_vocab, valid_vocab."""
        return self.mesh.get_group(self.shared), self.first_token, self.total_vocab, self.valid_vocab


def localised(
    of_tokens: Mapping[str, tuple[Tensor | None, int]],
    of_rows: Mapping[str, Tensor | None],
    valid_vocab: int | None,
    group: ProcessGroup | None,
) -> tuple[dict[str, Tensor], Layout]:
    """This device's part of each tensor that is given, all of them DTensors, and how they lie.

    `of_tokens` come with their dimension of tokens; of the others the first says how rows lie.
    """
    from torch.distributed.tensor import Replicate, Shard

    _refuse(group)
    given = {**{name: tensor for name, (tensor, _) in of_tokens.items()}, **of_rows}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    head, (one, vocab_dim) = next(iter(of_tokens.items()))
    hidden = next(iter(of_rows.values()))
    assert is_dtensor(one)
    assert is_dtensor(hidden)
    mesh, vocab_dim = one.device_mesh, vocab_dim % one.dim()
    shares = [dim for dim, placement in enumerate(one.placements) if _is_shard(placement, vocab_dim)]
    if len(shares) != 1:
        raise ValueError(
            f"{head} must be sharded along its dimension {vocab_dim}, the vocabulary, on one dimension of its mesh; "
            f"got {one.placements}"
        )
    (shared,) = shares
    own = hidden.placements[shared] if hidden.device_mesh == mesh else None
    sequence_dim = next((dim for dim in range(hidden.dim() - 1) if own is not None and _is_shard(own, dim)), None)
    for name, tensor in tensors.items():
        assert is_dtensor(tensor)
        wanted: list[Placement] = [Replicate()] * mesh.ndim
        if name in of_tokens:
            wanted[shared] = Shard(of_tokens[name][1] % tensor.dim())
        elif sequence_dim is not None:
            wanted[shared] = Shard(sequence_dim)
        if tensor.device_mesh != mesh or list(tensor.placements) != wanted:
            raise ValueError(f"{name} must lie on {mesh} as {wanted}; got {tensor.placements} on {tensor.device_mesh}")
        if name in of_tokens and tensor.size(of_tokens[name][1]) != one.size(vocab_dim):
            raise ValueError(
                f"{name} must have the vocabulary of {head}, {one.size(vocab_dim)} tokens, or slices are of unlike "
                f"ones; got {tensor.size(of_tokens[name][1])}"
            )
    if sequence_dim is not None and hidden.size(sequence_dim) % mesh.size(shared):
        raise ValueError(
            f"rows that are sharded along dimension {sequence_dim} must be as many on each of {mesh.size(shared)} "
            f"devices; got {hidden.size(sequence_dim)}"
        )
    first_token, width = _slice(one.size(vocab_dim), mesh, shared)
    total = one.size(vocab_dim) if valid_vocab is None else valid_vocab
    first_token = min(first_token, total)
    valid_width = min(width, total - first_token)
    layout = Layout(mesh, shared, first_token, total, valid_width if valid_width < width else None, sequence_dim)
    return {name: Local.apply(tensor) for name, tensor in tensors.items()}, layout


def as_dtensor(loss: Tensor, layout: Layout) -> Tensor:
    """A loss, or losses of rows, where the rows lie."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements: list[Placement] = [Replicate()] * layout.mesh.ndim
    if loss.dim() and layout.sequence_dim is not None:
        placements[layout.shared] = Shard(layout.sequence_dim)
    result: Tensor = DTensor.from_local(loss, layout.mesh, placements, run_check=False)
    return result
