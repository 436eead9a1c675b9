"""(vocab, dtypes, what is wanted) -> launch shape. Pure: needs no GPU, and never looks at the rows' number."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

VECTOR_BYTES = 16
THREADS = 256
PORTABLE_CLUSTER = 8  # blocks: the largest cluster that every device admits
MAX_CLUSTER = 16


@dataclass(frozen=True)
class Shape:
    """The compile-time shape of a kernel."""

    flat: bool  # one row, shared by the grid
    lanes: int  # threads that share a row
    width: int  # elements of a 16-byte access
    unroll: int  # accesses in flight a thread, of each tensor
    min_blocks: int  # of a multiprocessor: bounds the registers

    @property
    def macros(self) -> dict[str, int | str]:
        return {
            "FLAT": self.flat,
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
    # Measured on an H200: four reads of each tensor in flight a thread and four
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

    resident: bool  # whether rows stay on chip
    threads_per_row: int  # of a block
    groups: int  # rows that a block works on at once
    width: int  # elements of a 16-byte access
    min_blocks: int  # of a multiprocessor: bounds the registers
    slots: int = 0  # short rows that a row group has room for on chip: one or two,
    slot_vectors: int = 0  # of so many vectors
    caches_slopes: bool = False  # whether masses and slopes take the place of a row that was summed by them
    y_offset: int = 0  # bytes from the input's part of shared memory to the target's
    max_cluster: int = PORTABLE_CLUSTER  # blocks that share a row, at most: code for fewer is the same
    has_lead: bool = False  # whether the vocabulary is not whole lines of memory, so that rows begin within them

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.groups + (32 if self.resident else 0)

    @property
    def macros(self) -> dict[str, int | str]:
        return {
            "RESIDENT": self.resident,
            "THREADS_PER_ROW": self.threads_per_row,
            "LOGICAL_WARP": min(self.threads_per_row, 32),
            "GROUPS": self.groups,
            "MAX_CLUSTER": self.max_cluster,
            "EXCHANGE_SLOTS": EXCHANGE_SLOTS,
            "PARTIAL_BYTES": PARTIAL_BYTES,
            "HAS_LEAD": self.has_lead,
            "HEADER_BYTES": HEADER_BYTES,
            "WIDTH": self.width,
            "MIN_BLOCKS": self.min_blocks,
            "SLOTS": self.slots,
            "SLOT_VECTORS": self.slot_vectors,
            "CACHES_SLOPES": self.caches_slopes,
            "Y_OFFSET": self.y_offset,
        }


@dataclass(frozen=True)
class Layout:
    """How rows of a vocabulary are laid over blocks; of this only `shape` is compiled."""

    shape: LogitsShape
    cluster: int = 1  # blocks that share a row
    stages: int = 0  # of the pipeline
    stage_vectors: int = 0  # that one has room for
    tile_vectors: int = 0  # of each tensor, in a stage
    slice_vectors: int = 0  # of a row in a block, at most
    row_tiles: int = 0  # stages that they take
    exchange_offset: int = 0  # in shared memory, behind the target's stages
    header_offset: int = 0  # of the stages' headers, behind that and its barriers
    shared: int = 0  # bytes of dynamic shared memory a block


class Chip(NamedTuple):
    """What a device has for rows that stay on it."""

    block_bytes: int = 0  # shared memory that a block can have; 0 where there are no clusters or bulk copies
    cluster: int = PORTABLE_CLUSTER  # the largest that it admits
    warps: int = 16  # of row groups, at most: of more the compiler spills registers there;
    caching_warps: int = 16  # and where masses and derivatives take the place of float32 logits


NO_CHIP = Chip()
NO_COPIES = Chip(cluster=0)  # where tensors are out of phase: no row is on any chip, not even a short one
HOPPER = Chip(227 << 10, MAX_CLUSTER, warps=24, caching_warps=24)  # 9.0
BLACKWELL, SMALL_BLACKWELL = Chip(227 << 10, MAX_CLUSTER, caching_warps=15), Chip(99 << 10)  # 10.0, and 12.0
RESERVED_BYTES = 1 << 10  # of a multiprocessor's, for each block
STATIC_BYTES = 256  # of these, at most, for what a kernel declares
ALIGNMENT = 8  # in vectors, of either tensor's part of shared memory, of tiles and of slices: lines of 128 bytes
BARRIER_BYTES = 8
HEADER_BYTES = 48  # of a stage: barriers, a row's estimated maxima, its label
MAX_STAGES = 15
EXCHANGE_SLOTS, PARTIAL_BYTES = 2, 16
MIN_TILE_BYTES = 13 << 10  # where a row has as many


# Threads that share a row, and rows that a block works on: the first choice that keeps enough rows on chip is taken.
# With the producer warp, 16 warps leave a thread 128 registers, 17 leave it 96, and 25 leave it 72.
ROW_GROUPS = ((64, 7), (128, 4), (128, 3), (256, 3), (256, 2), (224, 2))
WAITING_ROW_GROUPS = ((160, 3), (224, 2))  # where a row waits for other devices: two more are worked on meanwhile
CLUSTERS = (1, 2, 4, PORTABLE_CLUSTER, MAX_CLUSTER)
# Of rows that are short: so many vectors, at most, are shared by so many lanes. Rows that share a warp wait for each
# other's ways through the code: where all go one way, longer rows may.
SHORT_LANES, ONE_WAY_LANES = ((32, 8), (48, 16), (math.inf, 32)), ((64, 8), (112, 16), (math.inf, 32))
# Of a block, at most. With what a kernel declares, every device has 48 KiB of shared memory without being asked.
SHORT_THREADS, SHORT_BYTES = 256, 46 << 10
MOST_SHORT_VECTORS = 256
MANY_REGISTERS = 15 * 32  # threads of row groups, at most, that leave room for a second gradient,
SOME_REGISTERS = 16 * 32  # and for what else takes more than most kernels do
FEW_TILES = 3  # of rows that more threads than those share (docs/lab-notebook.md)


# Of one tensor's rows that are read once: threads that read a slice, and blocks of a multiprocessor, as many as fit.
# Without a gradient more rows at once hide latency; with one fewer are faster, of more threads.
SHORT_SLICE_BLOCKS = (32, 12), (96, 6)
MANY_SLICE_BLOCKS, FEW_SLICE_BLOCKS = (*SHORT_SLICE_BLOCKS, (224, 3)), (*SHORT_SLICE_BLOCKS, (224, 2), (480, 1))
ONE_WARP_VECTORS = 256  # that a warp may have for itself
SLICE_TILES = 2


class Slices(NamedTuple):
    """How one tensor's rows are laid over the blocks of a cluster."""

    cluster: int  # blocks that share a row
    vectors: int  # of a row in a block, at most
    tiles: int  # that they take
    tile_vectors: int
    stages: int  # tiles that a block holds
    threads: int  # of a block, with those of the producer
    blocks: int  # of a multiprocessor: bounds the registers
    shared: int  # bytes of dynamic shared memory a block


@functools.cache
def slices(vocab: int, x: torch.dtype, chip: Chip, gradient: bool) -> Slices | None:
    """For rows of which a softmax is all that is wanted, by the smallest clusters that hold them; or None."""
    if not chip.block_bytes or x is torch.float64:
        return None
    for cluster in (c for c in CLUSTERS if c <= PORTABLE_CLUSTER):
        vectors = math.ceil(vocab // width(x, x) / cluster)
        choice: tuple[tuple[int, int], ...] = FEW_SLICE_BLOCKS if gradient else MANY_SLICE_BLOCKS
        if cluster == PORTABLE_CLUSTER:
            choice += FEW_SLICE_BLOCKS
        for threads, blocks in choice:
            if threads == 32 and vectors > ONE_WARP_VECTORS:
                continue
            tile = max(1, math.ceil(vectors / SLICE_TILES / threads)) * threads
            tiles, stage_bytes = math.ceil(vectors / tile), tile * VECTOR_BYTES + 2 * BARRIER_BYTES
            exchange_bytes = EXCHANGE_SLOTS * (cluster * threads // 32 * PARTIAL_BYTES + BARRIER_BYTES)
            room = chip.block_bytes // blocks - RESERVED_BYTES - STATIC_BYTES - exchange_bytes
            stages = min(room // stage_bytes, 2 * max(tiles, 1))
            if stages >= max(tiles, 1):
                shared = stages * stage_bytes + exchange_bytes
                return Slices(cluster, vectors, tiles, tile, stages, threads + 32, blocks, shared)
    return None


class Wanted(NamedTuple):
    """What the layout of rows of logits follows from, beside the device."""

    vocab: int
    x: torch.dtype
    y: torch.dtype
    both: bool = False  # both gradients
    has_normalisers: bool = False  # they are known, so that a row is read once
    caches_slopes: bool = False  # masses and slopes take the place of rows on chip
    labelled: bool = False  # rows may have labels
    capped: bool = False  # logits are
    waits: bool = False  # a row waits for other devices
    goes_one_way: bool = False  # most rows do, whatever they hold
    takes_registers: bool = False  # what is done with a row does

    @property
    def per_vector(self) -> int:
        return width(self.x, self.y)

    @property
    def vectors(self) -> int:
        """Whole ones of a row."""
        return self.vocab // self.per_vector

    @property
    def vector_bytes(self) -> int:
        """Of both tensors."""
        return self.per_vector * (self.x.itemsize + self.y.itemsize)


@functools.cache
def logits(wanted: Wanted, chip: Chip) -> Layout:
    """How such rows are laid over blocks. `chip`: NO_COPIES where tensors are out of phase."""
    if wanted.vocab <= MOST_SHORT_VECTORS * wanted.per_vector:
        return _short(wanted, chip != NO_COPIES)
    resident = _resident(wanted, chip)
    return resident or Layout(LogitsShape(False, 256, 1, wanted.per_vector, 2), slice_vectors=wanted.vectors)


def _resident(wanted: Wanted, chip: Chip) -> Layout | None:
    """Rows that stay on chip, over the smallest clusters that hold enough of them; or None."""
    if not chip.block_bytes:
        return None
    per_vector, vector_bytes, waits = wanted.per_vector, wanted.vector_bytes, wanted.waits
    largest = PORTABLE_CLUSTER if waits else chip.cluster  # ranks lay rows alike, whatever their devices
    warps = chip.caching_warps if wanted.caches_slopes and wanted.x == torch.float32 else chip.warps
    most_threads = MANY_REGISTERS if wanted.both else SOME_REGISTERS if wanted.takes_registers else 32 * warps
    # Rows that do not begin with lines lie on chip as in memory, by as much of a line later.
    lead = ALIGNMENT if wanted.vocab % (ALIGNMENT * per_vector) else 0
    header_bytes = MAX_STAGES * HEADER_BYTES
    row_groups = [of for of in (WAITING_ROW_GROUPS if waits else ROW_GROUPS) if math.prod(of) <= most_threads]
    for cluster, (threads, groups) in itertools.product((c for c in CLUSTERS if c <= largest), row_groups):
        slice_vectors = math.ceil(wanted.vectors / cluster / ALIGNMENT) * ALIGNMENT
        exchange_bytes = groups * EXCHANGE_SLOTS * PARTIAL_BYTES * cluster * threads // 32
        exchange_bytes += groups * EXCHANGE_SLOTS * BARRIER_BYTES
        # Vectors of either tensor, for all vocabularies of such clusters: the distance is in the code's addresses.
        rest = chip.block_bytes - STATIC_BYTES - exchange_bytes - header_bytes
        room = rest // (ALIGNMENT * vector_bytes) * ALIGNMENT
        stages, tile_vectors, row_tiles = _pipeline(slice_vectors, vector_bytes, threads, room, lead)
        # A barrier's phase is one bit: no group may wait for a round that is two ahead of what its stages have had.
        safe = (groups - 1) * row_tiles < stages and row_tiles <= stages
        if threads * groups > SOME_REGISTERS and (cluster != 2 or row_tiles > FEW_TILES):
            continue
        # Three rows on chip hide latencies best. But clusters of 4 and more leave multiprocessors idle whose
        # neighbours are taken, the larger the more: there two are better, of threads enough.
        enough = 2 if cluster >= PORTABLE_CLUSTER or (cluster, threads) == (2, 256) else 3  # rows on chip
        if safe and (enough * row_tiles <= stages or cluster == largest):
            y_offset = room * per_vector * wanted.x.itemsize
            shape = LogitsShape(
                True,
                threads,
                groups,
                per_vector,
                1,
                caches_slopes=wanted.caches_slopes,
                y_offset=y_offset,
                max_cluster=max(cluster, PORTABLE_CLUSTER),
                has_lead=lead > 0,
            )
            stage_vectors = tile_vectors + lead
            exchange_offset = y_offset + stages * stage_vectors * per_vector * wanted.y.itemsize
            header_offset = exchange_offset + exchange_bytes
            shared = header_offset + header_bytes
            in_memory = exchange_offset, header_offset, shared
            return Layout(shape, cluster, stages, stage_vectors, tile_vectors, slice_vectors, row_tiles, *in_memory)
    return None


def _short(wanted: Wanted, copies: bool) -> Layout:
    """Rows of which a block works on many, each by some lanes of a warp, which copy it to the chip if they can."""
    vectors, both, is_half = wanted.vectors, wanted.both, wanted.x == torch.float16
    choice = ONE_WAY_LANES if wanted.goes_one_way else SHORT_LANES
    lanes = 32 if wanted.waits else next(lanes for most, lanes in choice if vectors <= most)
    slot = lanes * max(1, math.ceil(vectors / lanes)) if copies else 0
    slots = 2 if lanes == 32 or vectors <= 4 * lanes else 1  # else two would leave room for fewer warps
    groups = SHORT_THREADS // lanes
    while slots * groups * slot * wanted.vector_bytes > SHORT_BYTES:
        groups //= 2
    # What converts both tensors in ways of their own, or caps them, takes more registers. Rows that share a warp take
    # some, too.
    wide = wanted.x != wanted.y or (both and (wanted.capped or is_half))
    warps = 16 if wide else 20 if lanes < 32 and (both or wanted.capped or wanted.labelled or is_half) else 24
    shape = LogitsShape(
        False,
        lanes,
        groups,
        wanted.per_vector,
        min_blocks=32 * warps // (groups * lanes),
        slots=slots,
        slot_vectors=slot,
        caches_slopes=wanted.caches_slopes and not wanted.has_normalisers and slot > 0,
        y_offset=slots * groups * slot * wanted.per_vector * wanted.x.itemsize,
    )
    return Layout(shape, slice_vectors=vectors, shared=slots * groups * slot * wanted.vector_bytes)


def _pipeline(slice_vectors: int, vector_bytes: int, threads: int, room: int, lead: int) -> tuple[int, int, int]:
    """Stages, vectors of a tile, and stages that a row takes: the most rows on chip, in the fewest tiles.

    Tiles keep threads as busy as the whole row does. More than one, where a row is as long as two stages, so that the
    next row's first can come early.
    """
    pipelines = []
    most = max(slice_vectors * vector_bytes // MIN_TILE_BYTES, 1)
    for tiles in range(min(2, most), most + 1):
        even = math.ceil(slice_vectors / tiles / ALIGNMENT) * ALIGNMENT
        for vectors in (even, math.ceil(even / threads) * threads):
            last = slice_vectors - (tiles - 1) * vectors
            turns = (tiles - 1) * math.ceil(vectors / threads) + math.ceil(last / threads)
            if last > 0 and turns == math.ceil(slice_vectors / threads):
                pipelines.append((min(room // (vectors + lead), MAX_STAGES), vectors, tiles))
    return max(pipelines, key=lambda pipeline: (pipeline[0] / pipeline[2], -pipeline[2]))
