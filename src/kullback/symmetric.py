"""Memory that GPUs of one host see of each other: kernels exchange numbers of rows there while rows are on chip."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from kullback.checks import check_process_group
from kullback.work import Peers

PACKETS = 20  # of 64 bits, for a row and a rank: in two halves an estimate's two and two exchanges' four (ranks.cuh)
NOTHING_SENT = -1  # a packet whose flag no exchange has
MAX_RANKS = 8

T = TypeVar("T")


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
    they read it twice or three times. All ranks must call this, once, as for `new_group`: a CUDA graph keeps the memory
    of the call before it. It serves Hopper and later GPUs that see each other's memory: those of one host. On each it
    takes 160 bytes for a row and a rank.

    Losses of logits on both sides go that way, but for those with labels, of more than `rows` rows, or in float64.
    These fall back on collectives, as does a second backward of a graph that was retained.

    It asks more of callers than collectives do:

    - Every rank's slice has to fit its GPU's shared memory: from 2049 tokens of 16 bits (1025 of float32) on, and not
      more than eight multiprocessors hold. Input, target and gradients have one layout in memory, such as contiguous.
      A rank whose slice has not raises `ValueError`, and the others wait for it.
    - All ranks want the same gradients.
    - Calls of a group are in the same order on all ranks, on one stream each. Kernels that wait for other GPUs, such as
      NCCL's, must not run beside them on another stream: each could wait for multiprocessors that the other has.

    A rank that waits longer than `timeout` for another stops with a device-side assertion, or, in a launch's last rows,
    with a launch failure. Within `kullback.checking_ranks` what differs is found before, and all ranks raise.

    Args:
        group: of up to 8 ranks, those of one host.
        rows: how many rows a call that exchanges may have; the same on all ranks.
        timeout: how long a rank waits for another.

    Raises:
        TypeError: for no group that this rank is in, no integer or no timedelta.
        RuntimeError: on all ranks, if on one there is no such memory; the message says why.
        ValueError: for more than 8 ranks; for no rows, or not the same on all ranks; for no time.

    >>> import torch.distributed as dist, kullback
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> try:
    ...     kullback.enable_symmetric_memory(dist.group.WORLD)
    ... except RuntimeError as error:
    ...     print(error)
    group has no symmetric memory; rank 0 says: it serves GPUs of compute capability 9.0 or later
    >>> dist.destroy_process_group()
    """
    check_process_group(group)
    if group.size() > MAX_RANKS:
        raise ValueError(f"group must have at most {MAX_RANKS} ranks, those of one host; got {group.size()}")
    asked: list[Any] = [None] * group.size()
    dist.all_gather_object(asked, (rows, timeout), group=group)  # before all checks: all ranks raise, or none
    of_ranks, timeouts = zip(*asked, strict=True)
    for count in of_ranks:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"rows must be an integer; got {type(count).__name__}")
    for time in timeouts:
        if not isinstance(time, datetime.timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta; got {type(time).__name__}")
    if len(set(of_ranks)) > 1:
        raise ValueError(f"rows must be the same on all ranks; got {', '.join(map(str, of_ranks))}")
    most = (1 << 32) // (PACKETS * group.size()) - 1
    if not 1 <= rows <= most:
        raise ValueError(f"rows must be from 1 to {most}; got {rows}")
    if min(timeouts) <= datetime.timedelta():
        raise ValueError(f"timeout must be positive; got {min(timeouts)}")
    packets = _attempted(group, lambda: _packets(rows * group.size()))
    _buffers[group] = _attempted(group, lambda: _exchanged(packets, group, rows, timeout))


def _attempted(group: dist.ProcessGroup, attempt: Callable[[], T]) -> T:
    """Its result, once it has succeeded on all ranks; where one fails, all raise, and none waits in what comes next."""
    found, failure = None, None
    failures: list[str | None] = [None] * group.size()
    try:
        found = attempt()
    except (ImportError, RuntimeError) as error:
        failure = str(error) or repr(error)
    dist.all_gather_object(failures, failure, group=group)
    for rank, reason in enumerate(failures):
        if reason is not None:
            raise RuntimeError(f"group has no symmetric memory; rank {rank} says: {reason}")
    assert found is not None
    return found


def packet_buffer_of(group: dist.ProcessGroup) -> PacketBuffer | None:
    """The group's, if it is enabled."""
    return _buffers.get(group)


def _packets(count: int) -> Tensor:
    """Room for so many rows' of a rank, with flags of nothing that is ever sent (ranks.cuh)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        raise RuntimeError("it serves GPUs of compute capability 9.0 or later")
    from torch.distributed import _symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    packets: Tensor = symmetric_memory.empty(PACKETS * count, dtype=torch.int64, device=device)
    packets.fill_(NOTHING_SENT)
    torch.cuda.synchronize()
    return packets


def _exchanged(packets: Tensor, group: dist.ProcessGroup, rows: int, timeout: datetime.timedelta) -> PacketBuffer:
    """Once the ranks know where each other's packets are."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(packets, group)
    launches = torch.zeros((), dtype=torch.int64, device=packets.device)
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
