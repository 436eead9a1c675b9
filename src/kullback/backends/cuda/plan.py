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


def shape(vocab: int, flat: bool, x: torch.dtype, y: torch.dtype, gradients: int) -> Shape:
    """The launch shape for rows of that length."""
    width = VECTOR_BYTES // min(x.itemsize, y.itemsize)
    wide = max(x.itemsize, y.itemsize) * width // VECTOR_BYTES  # 16-byte accesses a vector of the wider one
    unroll = 1 if wide > 1 else 2
    # What 4 blocks leave a thread (64 registers) holds one gradient; a row's own finish or a second
    # gradient would spill.
    slim = flat and gradients < 2 and torch.float64 not in (x, y)
    min_blocks = 4 if slim else 2
    return Shape(flat, THREADS if flat else lanes(vocab), width, unroll, min_blocks)
