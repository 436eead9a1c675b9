"""(vocab, dtypes, what is wanted) -> launch shape. Pure: needs no GPU, and never looks at the rows' number."""

from __future__ import annotations

import functools
import math
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


def width(x: torch.dtype, y: torch.dtype) -> int:
    """Elements of a 16-byte access to the narrower type."""
    return VECTOR_BYTES // min(x.itemsize, y.itemsize)


def lanes(vocab: int) -> int:
    """Threads for a row: about enough that each has a vector or two to read."""
    for limit, count in ((1, 1), (64, 8), (2048, 32)):
        if vocab <= limit:
            return count
    return THREADS


def shape(lanes: int, flat: bool, x: torch.dtype, y: torch.dtype, gradients: int) -> Shape:
    """The launch shape of a kernel that writes so many gradients, `lanes` threads a row."""
    # Measured on an H200 (benchmarks/tune.py): four reads of each tensor in flight a thread and four
    # blocks reach the read ceiling; where gradients are written too, one vector at a time is best.
    doubles = torch.float64 in (x, y)
    unroll = 1 if gradients or doubles or x.itemsize != y.itemsize else 4
    # What four blocks leave a thread (64 registers) holds one gradient; a row's own finish, a second
    # gradient or float64 would spill.
    min_blocks = 4 if flat and gradients < 2 and not doubles else 2
    return Shape(flat, lanes, width(x, y), unroll, min_blocks)


@dataclass(frozen=True)
class LogitsShape:
    """The compile-time shape of a kernel for logits."""

    known: bool  # whether the rows' states are known, and only gradients wanted
    resident: bool  # whether rows stay on chip
    lanes: int  # threads of a block that share a row
    groups: int  # rows that a block has in hand
    width: int  # elements of a 16-byte access
    min_blocks: int  # of a multiprocessor: bounds the registers
    held: int = 0  # vectors of a row that a thread keeps in registers: all that it has
    keeps_slopes: bool = False  # whether masses and slopes take the place of a row that was summed by them
    to_y: int = 0  # bytes from the input's part of shared memory to the target's

    @property
    def threads(self) -> int:
        return self.lanes * self.groups + (32 if self.resident else 0)

    @property
    def macros(self) -> dict[str, int]:
        return {
            "KNOWN": int(self.known),
            "RESIDENT": int(self.resident),
            "LANES": self.lanes,
            "GROUPS": self.groups,
            "MAX_CLUSTER": MAX_CLUSTER,
            "MAILBOXES": MAILBOXES,
            "LETTER_BYTES": LETTER_BYTES,
            "WIDTH": self.width,
            "MIN_BLOCKS": self.min_blocks,
            "HELD": self.held,
            "KEEPS_SLOPES": int(self.keeps_slopes),
            "TO_Y": self.to_y,
        }


@dataclass(frozen=True)
class Layout:
    """How rows of a vocabulary are laid over blocks; of this only `shape` is compiled."""

    shape: LogitsShape
    cluster: int = 1  # blocks that share a row
    slots: int = 0  # of the ring
    slot_vectors: int = 0  # of each tensor, in a slot
    share: int = 0  # vectors of a row in a block, at most
    pieces: int = 0  # slots that they take
    mail: int = 0  # offset of it in shared memory, behind the target's slots
    barriers: int = 0  # and of these, behind the mail
    shared: int = 0  # bytes of dynamic shared memory a block


SHARED = 227 << 10  # bytes of shared memory that a block can have where rows stay on chip
STATIC_BYTES = 256  # of these, at most, for what a kernel declares
ALIGNMENT = 8  # of either tensor's part of shared memory, in vectors
BARRIER_BYTES, TOPS_BYTES = 8, 8
MOST_SLOTS = 20  # that have barriers, and likely tops
MAILBOXES, LETTER_BYTES = 2, 16
SLOT_BYTES = 13 << 10  # of a slot, at least, where a row has as many
MAX_CLUSTER = 8  # the largest that every device admits


# Threads that share a row and rows that a block has in hand, where a short share is to be had for many rows, and where
# a row takes all the ring. With the warp that fetches, 16 warps leave a thread 128 registers, 17 leave it 96.
TEAMS = ((64, 7), (128, 4), (128, 3), (256, 2), (224, 2))
MAX_HELD = 4  # vectors of a row that a thread has registers for
MANY_REGISTERS = 15 * 32  # threads of teams, at most, that leave room for a second gradient


@functools.cache
def logits(
    vocab: int,
    x: torch.dtype,
    y: torch.dtype,
    both: bool,
    known: bool,
    fits: bool,
    keeps_slopes: bool = False,
    light: bool = False,
) -> Layout:
    """The layout for rows of so many logits.

    `both`: whether both gradients are wanted; `known`: whether only gradients, of rows whose states are known; `fits`:
    whether the device and the tensors admit rows on chip;
    `keeps_slopes`: whether masses and slopes are to take the place of rows on chip; `light`: whether the formula
    leaves registers for a row.
    """
    per_vector = width(x, y)
    short = vocab <= 256 * per_vector
    vector_bytes = per_vector * (x.itemsize + y.itemsize)
    vectors = vocab // per_vector
    for cluster in (1, 2, 4, MAX_CLUSTER) if fits and not short else ():
        share = math.ceil(vectors / cluster)
        for lanes, groups in (team for team in TEAMS if not both or team[0] * team[1] <= MANY_REGISTERS):
            mail_bytes = groups * MAILBOXES * LETTER_BYTES * cluster * lanes // 32
            barriers_bytes = (2 * MOST_SLOTS + groups * MAILBOXES) * BARRIER_BYTES + MOST_SLOTS * TOPS_BYTES
            # Vectors of either tensor, for all vocabularies of such clusters: the distance is in the code's addresses.
            room = (SHARED - STATIC_BYTES - mail_bytes - barriers_bytes) // (ALIGNMENT * vector_bytes) * ALIGNMENT
            slots, slot_vectors, pieces = _ring(share, vector_bytes, lanes, room)
            # Each group's last row is done when it waits for its next: so much of the ring has been turned over,
            # and the turn that it waits for is not two ahead, which its barriers could not tell from none.
            safe = (groups - 1) * pieces < slots and pieces <= slots
            if safe and (3 * pieces <= slots or cluster == MAX_CLUSTER):
                to_y = room * per_vector * x.itemsize
                shape = LogitsShape(False, True, lanes, groups, per_vector, 1, keeps_slopes=keeps_slopes, to_y=to_y)
                mail = to_y + slots * slot_vectors * per_vector * y.itemsize
                barriers = mail + mail_bytes
                shared = barriers + barriers_bytes
                return Layout(shape, cluster, slots, slot_vectors, share, pieces, mail, barriers, shared)
    # What converts both tensors in ways of their own takes more registers.
    if vectors <= MAX_HELD * 32 and light and not both and not known:  # 20 warps leave a thread 96 registers, 16 128
        shape = LogitsShape(known, False, 32, 4, per_vector, 5 if x == y else 4, held=MAX_HELD)
    elif short:
        wide = x != y or (both and x == torch.float16)
        shape = LogitsShape(known, False, 32, 8, per_vector, 2 if wide else 3)
    else:
        shape = LogitsShape(known, False, 256, 1, per_vector, 2)
    return Layout(shape, share=vectors)


def _ring(share: int, vector_bytes: int, lanes: int, room: int) -> tuple[int, int, int]:
    """Slots, vectors of each, and slots that a row takes: the most rows on chip, in the fewest pieces.

    Pieces keep threads as busy as the whole row does. More than one, where a row is as long as two slots, so that the
    next row's first can come early.
    """
    rings = []
    most = max(share * vector_bytes // SLOT_BYTES, 1)
    for pieces in range(min(2, most), most + 1):
        even = math.ceil(share / pieces)
        for vectors in (even, math.ceil(even / lanes) * lanes):
            last = share - (pieces - 1) * vectors
            turns = (pieces - 1) * math.ceil(vectors / lanes) + math.ceil(last / lanes)
            if last > 0 and turns == math.ceil(share / lanes):
                rings.append((min(room // vectors, MOST_SLOTS), vectors, pieces))
    return max(rings, key=lambda ring: (ring[0] / ring[2], -ring[2]))
