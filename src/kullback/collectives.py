"""What ranks tell one another: tensors, rows of which each has some, and, if asked, what they are about to do.

Collectives named for tensors are called single from torch 2.13 on, which warns of the older names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from kullback.problem import Problem

_checks: ContextVar[bool] = ContextVar("kullback checking ranks", default=False)


@contextlib.contextmanager
def checking_ranks() -> Iterator[None]:
    """Let ranks that share a vocabulary compare what they are about to do: where they differ, all raise ValueError.

    Compared are the kind and its numbers, rows and how many entries they have, dtypes, gradients that are wanted, and
    plans. It costs an exchange of objects before every one of numbers, for which the host waits: for the first steps of
    a run. It holds for this thread, or task, alone.

    >>> import kullback
    >>> with kullback.checking_ranks():
    ...     pass  # losses with a `group`
    """
    token = _checks.set(True)
    try:
        yield
    finally:
        _checks.reset(token)


def is_checking() -> bool:
    """Whether ranks are to be compared; in compiled code they cannot be."""
    return not torch.compiler.is_compiling() and _checks.get()


def compare(problem: Problem, what: str, *of: object) -> None:
    """Where ranks are to be checked, that all say the same of what they are about to do."""
    if problem.shard.group and is_checking():
        check(resolved(problem.shard.group), " ".join(map(str, (what, *of))))


def check(group: dist.ProcessGroup, mine: str) -> None:
    """That all are about to do the same."""
    asked: list[Any] = [None] * group.size()
    dist.all_gather_object(asked, mine, group=group)
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise ValueError(f"ranks must ask for the same; got {asked[0]} of rank 0 and {other} of rank {rank}")


def resolved(group: str) -> dist.ProcessGroup:
    """The group of that name: operators take no objects."""
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return found


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: everyone's, in rank order."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.view(-1), tensor.reshape(-1), group=group)
    return gathered


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of everyone's sum, of [ranks, ...]."""
    part = tensor.new_empty(tensor.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, tensor.contiguous().flatten(0, 1), group=group)
    return part


class Sum(Protocol):
    """One that has begun."""

    def wait(self) -> object: ...


def begin_sum(tensor: Tensor, group: str) -> Sum:
    """Begin to put everyone's sum in the tensor's place, beside what is computed until it is waited for."""
    begun: Sum = dist.all_reduce(tensor, group=resolved(group), async_op=True)
    return begun


def all_gather_rows(tensor: Tensor, dim: int, group: dist.ProcessGroup, sums: bool = False) -> Tensor:
    """Everyone's rows, along one of their dimensions; `sums`: of whose gradient each rank has a part."""
    if is_checking():
        wants = "with" if tensor.requires_grad and torch.is_grad_enabled() else "without"
        check(group, f"{list(tensor.shape)} {tensor.dtype}, gathered along dimension {dim}, {wants} a gradient")
    return AllGatherRows.apply(tensor, dim, group, sums)  # type: ignore[no-any-return]


def own_rows(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's of the rows that all have; the gradient of all is wanted on each."""
    return OwnRows.apply(tensor, dim, group)  # type: ignore[no-any-return]


class AllGatherRows(torch.autograd.Function):
    """`all_gather_rows`.

    What is made of them is the same on all ranks, and so is its gradient, of which each takes its rows'. With `sums`
    each has a part of the gradient, and the sum of these is scattered.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.sums = dim, group, sums
        return _all_rows(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None, None]:
        parts = _parts(grad_out, ctx.dim, ctx.group)
        own = reduce_scatter(parts, ctx.group) if ctx.sums else parts[ctx.group.rank()]
        return own, None, None, None


class OwnRows(torch.autograd.Function):
    """`own_rows`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _parts(tensor, dim, group)[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(grad_out, ctx.dim, ctx.group), None, None


def _all_rows(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Of everyone's parts, in rank order."""
    return all_gather(tensor, group).movedim(0, dim).flatten(dim, dim + 1)


def _parts(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: each one's rows."""
    parts: Tensor = tensor.unflatten(dim, (group.size(), -1)).movedim(dim, 0)
    return parts
