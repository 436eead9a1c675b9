"""(vocab, dtypes, what is wanted) -> launch shape. Pure: needs no GPU, and never looks at the rows' number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

VECTOR_BYTES = 16
THREADS = 256


@dataclass(frozen=True)
class Shape:
    """The compile-time shape of a kernel."""

    flat: bool  # one row, shared by the grid
    lanes: int  # threads that share a row
    width: int  # elements of a 16-byte access
    unroll: int  # accesses in flight a thread, of each tensor
    min_blocks: int  # of a multiprocessor: bounds the registers

    @property
    def macros(self) -> dict[str, int]:
        return {
            "FLAT": int(self.flat),
            "LANES": self.lanes,
            "THREADS": THREADS,
            "WIDTH": self.width,
            "UNROLL": self.unroll,
            "MIN_BLOCKS": self.min_blocks,
        }


def lanes(vocab: int) -> int:
    """Threads for a row: about enough that each has a vector or two to read."""
    for limit, count in ((1, 1), (64, 8), (2048, 32)):
        if vocab <= limit:
            return count
    return THREADS


def shape(lanes: int, flat: bool, x: torch.dtype, y: torch.dtype, gradients: int) -> Shape:
    """The launch shape of a kernel that writes so many gradients, `lanes` threads a row."""
    width = VECTOR_BYTES // min(x.itemsize, y.itemsize)
    # Measured on an H200 (benchmarks/tune.py): four reads of each tensor in flight a thread and four
    # blocks reach the read ceiling; where gradients are written too, one vector at a time is best.
    doubles = torch.float64 in (x, y)
    unroll = 1 if gradients or doubles or x.itemsize != y.itemsize else 4
    # What four blocks leave a thread (64 registers) holds one gradient; a row's own finish, a second
    # gradient or float64 would spill.
    min_blocks = 4 if flat and gradients < 2 and not doubles else 2
    return Shape(flat, lanes, width, unroll, min_blocks)
