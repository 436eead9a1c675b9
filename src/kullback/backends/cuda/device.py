"""What a device has for rows that stay on it."""

from __future__ import annotations

import contextlib
import functools

import torch

from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher

PROBE = 'extern "C" __global__ void probe() {}'


@functools.cache
def chip(index: int) -> plan.Chip:
    properties = torch.cuda.get_device_properties(index)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # not in torch's stubs
    if properties.major < 9:
        return plan.NO_CHIP
    known = plan.HOPPER if properties.major == 9 else plan.BLACKWELL if properties.major < 12 else plan.SMALL_BLACKWELL
    return known._replace(block_bytes=shared)


@functools.cache
def admitted(index: int, chip: plan.Chip) -> plan.Chip:
    """With the clusters that are to be had, as far as that can be found out.

    A part of a device may have no sixteen multiprocessors side by side.
    """
    with contextlib.suppress(Exception):  # what fails here fails for the kernel too, and says so
        if Launcher(PROBE, "probe", index, cluster=chip.cluster, shared=chip.block_bytes).blocks:
            return chip
    return chip._replace(cluster=plan.PORTABLE_CLUSTER)
