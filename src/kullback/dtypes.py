"""Which dtype numbers are found, summed and given in."""

from __future__ import annotations

import torch
from torch import Tensor

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # as stores keep ids; torch has few operations on these
WITHOUT_FLOAT64 = {"mps"}  # types of devices


def as_ids(given: Tensor) -> Tensor:
    """As int64. What is beyond that is the largest, no token: a negative number may mean something."""
    ids = given.long()
    return ids.masked_fill(ids < 0, torch.iinfo(torch.int64).max) if given.dtype == torch.uint64 else ids


def accumulator(tensor: Tensor) -> torch.dtype:
    """The dtype of sums, row weights and upstream gradients: float64 where the device has it."""
    return torch.float32 if tensor.device.type in WITHOUT_FLOAT64 else torch.float64


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of results and of the few numbers that are gathered from a row: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def compute_dtype(x: Tensor, y: Tensor) -> torch.dtype:
    """Of a row's elements, and of what is found of each: float32 at least."""
    return kept_dtype(torch.promote_types(x.dtype, y.dtype))
