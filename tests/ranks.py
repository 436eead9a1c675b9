"""Several ranks for a test: processes of one machine, on gloo, or on NCCL with a GPU each."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch import distributed as dist


class Ranks(NamedTuple):
    """What a check is told of the rank that runs it."""

    rank: int
    world: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def slice(self, tensor: Tensor, dim: int = -1, cuts: list[int] | None = None) -> Tensor:
        """This rank's part of it, a leaf; `cuts`: where parts begin, but the first."""
        parts = tensor.tensor_split(self.world if cuts is None else cuts, dim)
        return parts[self.rank].detach().clone().to(self.device)

    def uneven(self, vocab: int) -> list[int]:
        """Cuts: the first rank has most."""
        return [vocab // 2 + i * (vocab // 2 // self.world) for i in range(self.world - 1)]

    def everyone(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's."""
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor)
        return parts


def _run(rank: int, checks: Callable[[Ranks], None], store: Path, world: int, backend: str) -> None:
    faulthandler.enable()  # NCCL aborts a process that waits too long: it then says in which check
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # of names that collectives had
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    checks(Ranks(rank, world, device))
    leave()


def leave() -> None:
    """End this rank's process, once all its checks have passed."""
    dist.barrier()  # a process that ends while another still waits may abort it
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's that lets go of a tensor while the interpreter ends would abort it


def spawn(checks: Callable[[Ranks], None], world: int, folder: Path, backend: str = "gloo") -> None:
    folder.mkdir(exist_ok=True)
    mp.spawn(_run, (checks, folder / f"store of {world}", world, backend), world)


COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_gather_object",
)


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Names of the collectives called inside, and the bytes that each rank gives."""
    calls: list[tuple[str, int]] = []
    real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name: str, *arguments: object, **options: object) -> object:
        given = arguments[1] if "gather" in name or "scatter" in name else arguments[0]
        plain = name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
        calls.append((plain, given.nbytes if isinstance(given, Tensor) else 0))
        return real[name](*arguments, **options)

    try:
        for name in real:
            setattr(dist, name, functools.partial(counting, name))
        yield calls
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
