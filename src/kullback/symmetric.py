"""Memory that GPUs of one host see of each other: kernels exchange numbers of rows there while rows are on chip."""

from __future__ import annotations

import datetime
import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from kullback.work import Peers

PACKETS = 20  # of 64 bits, for a row and a rank: in two halves an estimate's two and two exchanges' four (ranks.cuh)
MAX_RANKS = 8


class PacketBuffer(NamedTuple):
    """A group's, on this rank."""

    peers: Peers
    launches: Tensor  # 0-d int64: those so far
    kept: tuple[object, ...]  # what the addresses are of


_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, PacketBuffer] = weakref.WeakKeyDictionary()


def enable_symmetric_memory(
    group: dist.ProcessGroup, *, rows: int = 1 << 15, timeout: datetime.timedelta = datetime.timedelta(minutes=10)
) -> None:
    """From now on, let this group's kernels exchange what they need of a row's slices over NVLink, as they read them.

    Divergences of logits with `group` then read each slice once and write its gradient, as on one GPU; by collectives
    they read it twice or three times. All ranks must call this, once, as for `new_group`. It serves Hopper and later
    GPUs that see each other's memory: those of one host. A call falls back on collectives, on all ranks alike, where
    it has labels, more than `rows` rows, or float64.

    It asks more of callers than collectives do:

    - Every rank's slice has to fit its GPU's shared memory: from 2049 tokens of 16 bits (1025 of float32) on, and not
      more than eight multiprocessors hold. Slices have one layout in memory, such as contiguous.
    - Calls of a group are in the same order on all ranks, on one stream each. Kernels that wait for other GPUs, such as
      NCCL's, should not run beside them on another stream: each could wait for multiprocessors that the other has.

    A rank that waits longer than `timeout` for another stops with a device-side assertion.

    >>> import torch.distributed as dist, kullback
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> try:
    ...     kullback.enable_symmetric_memory(dist.group.WORLD)
    ... except RuntimeError as error:
    ...     print(error)
    group has no symmetric memory; rank 0 says: it serves GPUs of compute capability 9.0 or later
    >>> dist.destroy_process_group()

    Raises:
        RuntimeError: on all ranks, if on one there is no such memory; the message says why.
        ValueError: for more than 8 ranks; for no rows, or no time.
    """
    if group.size() > MAX_RANKS:
        raise ValueError(f"group must have at most {MAX_RANKS} ranks, those of one host; got {group.size()}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if timeout <= datetime.timedelta():
        raise ValueError(f"timeout must be positive, got {timeout}")
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    _agree(group, None if is_hopper else "it serves GPUs of compute capability 9.0 or later")
    buffer, failure = None, None
    try:
        buffer = _allocated(group, rows, timeout)
    except (ImportError, RuntimeError) as error:
        failure = str(error) or repr(error)
    _agree(group, failure)  # and none sends before all have emptied theirs
    assert buffer is not None
    _buffers[group] = buffer


def _agree(group: dist.ProcessGroup, failure: str | None) -> None:
    """All ranks raise where one fails: none is left waiting for it."""
    failures: list[str | None] = [None] * group.size()
    dist.all_gather_object(failures, failure, group=group)
    for rank, reason in enumerate(failures):
        if reason is not None:
            raise RuntimeError(f"group has no symmetric memory; rank {rank} says: {reason}")


def packet_buffer_of(group: dist.ProcessGroup) -> PacketBuffer | None:
    """The group's, if it is enabled."""
    return _buffers.get(group)


def _allocated(group: dist.ProcessGroup, rows: int, timeout: datetime.timedelta) -> PacketBuffer:
    from torch.distributed import _symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    packets = symmetric_memory.empty(PACKETS * rows * group.size(), dtype=torch.int64, device=device)
    packets.zero_()
    torch.cuda.synchronize()
    handle = symmetric_memory.rendezvous(packets, group)
    launches = torch.zeros((), dtype=torch.int64, device=device)
    return packet_buffer(handle.buffer_ptrs_dev, launches, group.rank(), group.size(), rows, timeout, packets, handle)


def packet_buffer(
    addresses: int,
    launches: Tensor,
    rank: int,
    ranks: int,
    rows: int,
    timeout: datetime.timedelta,
    *kept: object,
) -> PacketBuffer:
    """`addresses`: where the addresses of the ranks' packets lie."""
    limit = min(int(timeout.total_seconds() * 1e9) >> 20, 1 << 31)
    return PacketBuffer(Peers(addresses, launches.data_ptr(), rank, ranks, rows, limit), launches, kept)
