"""What a row is at a few of its elements: kernels that read it once."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kullback.backends import torch as torch_path
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher, text
from kullback.printer import TYPES
from kullback.rows import Entries, Problem, held_dtype

UNROLL = 4  # vectors in flight a thread
ENTRY_THREADS = 128  # of a row's entries
MOST_ENTRIES = 1024  # of a row, since each looks at all of them where one is repeated; more are sorted
MOST_WORDS = 3 << 18  # a bit of shared memory each: 96 KiB, which every architecture has


def source(x: torch.dtype, form: str, capped: bool) -> str:
    """The whole CUDA file of both kernels."""
    values = {
        "X": TYPES[x],
        "IS_LOGITS": int(form == "logits"),
        "IS_PROBS": int(form == "probs"),
        "IS_CAPPED": int(capped),
        "THREADS": plan.THREADS,
        "WIDTH": plan.width(x, x),
        "UNROLL": UNROLL,
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(x == torch.float64)}",
            *(f"#define {name} {value}" for name, value in values.items()),
            text("math.cuh"),
            text("../logarithm.h"),
            text("elementary.cuh"),
            text("../numerics.h"),
            text("vector.cuh"),
            text("support.cuh"),
        ]
    )


@functools.cache
def _launcher(verb: str, x: torch.dtype, form: str, capped: bool, index: int, shared: int) -> Launcher:
    return Launcher(source(x, form, capped), f"kullback_{verb}", index, shared=shared)


def gather(
    problem: Problem, x: Tensor, ids: Tensor, rest: bool, target: Tensor | None = None, negligible: float = 0.0
) -> Tensor:
    """x at the ids, none where one is -1, and with `rest` all other elements in one; as they count.

    A rest of the target that is no more than negligible is made none where x has none.
    """
    dtype = held_dtype(x.dtype)
    if x.size(1) > MOST_WORDS or (target is not None and target.dtype != dtype):
        return torch_path.gather(problem, x, ids, rest, target, negligible)
    held = x.new_empty(x.size(0), ids.size(1) + rest, dtype=dtype)
    _run("gather", problem, x, ids, held, (target,), (), (negligible,))
    return held


def scatter(problem: Problem, x: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, out: Tensor) -> None:
    """Write the gradient in x of what has gradient d_held in `held`, which `gather` found; zeros where that is 0."""
    if x.size(1) > MOST_WORDS:
        return torch_path.scatter(problem, x, ids, held, d_held, out)
    return _run("scatter", problem, x, ids, held, (d_held, out), (out.stride(0),), ())


def _run(
    verb: str,
    problem: Problem,
    x: Tensor,
    ids: Tensor,
    held: Tensor,
    others: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    numbers: tuple[float, ...],
) -> None:
    rows, vocab = x.shape
    if not rows:
        return
    ids = ids.contiguous()
    capped = problem.form == "logits" and problem.capped[0]
    launcher = _launcher(verb, x.dtype, problem.form, capped, x.device.index, _marks(vocab))
    launcher(
        rows,
        x.data_ptr(),
        ids.data_ptr(),
        held.data_ptr(),
        *(0 if tensor is None else tensor.data_ptr() for tensor in others),
        rows,
        vocab,
        ids.size(1),
        held.size(1),
        x.stride(0),
        *strides,
        1 / problem.temperatures[0],
        problem.caps[0],
        *numbers,
    )


def _marks(words: int) -> int:
    """Bytes of a bit for each word; and of a few more, by which a vector's bits may be shifted."""
    return (words + 31) // 32 * 4 + 4


def entries_source(values: torch.dtype, form: str) -> str:
    """The whole CUDA file of `entries`."""
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(values == torch.float64)}",
            f"#define X {TYPES[values]}",
            f"#define FROM_LOGITS {int(form == 'logits')}",
            f"#define FROM_PROBS {int(form == 'probs')}",
            f"#define THREADS {ENTRY_THREADS}",
            "#define WIDTH 1",
            text("math.cuh"),
            text("vector.cuh"),
            text("entries.cuh"),
        ]
    )


@functools.cache
def _entries_launcher(values: torch.dtype, form: str, index: int, shared: int) -> Launcher:
    return Launcher(entries_source(values, form), "kullback_entries", index, ENTRY_THREADS, shared=shared)


def entries(
    problem: Problem, values: Tensor, indices: Tensor, skipped: Tensor | None, of: Entries
) -> tuple[Tensor, Tensor]:
    """Distinct ids and the target there: what the torch path's function says."""
    if of.words > MOST_WORDS or indices.size(-1) > MOST_ENTRIES:
        return torch_path.entries(problem, values, indices, skipped, of)
    *shape, k = indices.shape
    rows = math.prod(shape)
    dtype = held_dtype(values.dtype)
    has_rest = of.tail != "renormalize"
    target = values.new_empty(*shape, k + has_rest, dtype=dtype)
    values, indices = values.contiguous(), indices.long().contiguous()
    skipped = None if skipped is None else skipped.contiguous()
    ids = torch.empty_like(indices)
    if rows:
        temperature = problem.temperatures[1]
        launcher = _entries_launcher(values.dtype, of.form, values.device.index, _marks(of.words))
        launcher(
            rows,
            values.data_ptr(),
            indices.data_ptr(),
            0 if skipped is None else skipped.data_ptr(),
            ids.data_ptr(),
            target.data_ptr(),
            rows,
            of.words,
            k,
            target.size(-1),
            temperature,
            int(of.tail == "bucket"),
            int(of.normalises(temperature)),
            torch.finfo(dtype).eps / 2,
        )
    return ids, target
