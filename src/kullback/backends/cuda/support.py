"""What a row is at a few of its elements: kernels that read it once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kullback.backends import torch as torch_path
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher, text
from kullback.printer import TYPES
from kullback.rows import Problem, held_dtype

UNROLL = 4  # vectors in flight a thread
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


def gather(problem: Problem, x: Tensor, ids: Tensor, rest: bool) -> Tensor:
    """x at the ids, none where one is -1, and with `rest` all other elements in one; as they count."""
    if x.size(1) > MOST_WORDS:
        return torch_path.gather(problem, x, ids, rest)
    held = x.new_empty(x.size(0), ids.size(1) + rest, dtype=held_dtype(x.dtype))
    _run("gather", problem, x, ids, (held,), ())
    return held


def scatter(problem: Problem, x: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, out: Tensor) -> None:
    """Write the gradient in x of what has gradient d_held in `held`, which `gather` found; zeros where that is 0."""
    if x.size(1) > MOST_WORDS:
        return torch_path.scatter(problem, x, ids, held, d_held, out)
    return _run("scatter", problem, x, ids, (held, d_held, out), (out.stride(0),))


def _run(
    verb: str, problem: Problem, x: Tensor, ids: Tensor, tensors: tuple[Tensor, ...], strides: tuple[int, ...]
) -> None:
    rows, vocab = x.shape
    if not rows:
        return
    ids = ids.contiguous()
    capped = problem.form == "logits" and problem.capped[0]
    # A bit for each element and a word more, which a vector's bits may be taken from.
    shared = (vocab + 31) // 32 * 4 + 4
    launcher = _launcher(verb, x.dtype, problem.form, capped, x.device.index, shared)
    launcher(
        rows,
        x.data_ptr(),
        ids.data_ptr(),
        *(tensor.data_ptr() for tensor in tensors),
        rows,
        vocab,
        ids.size(1),
        tensors[0].size(1),
        x.stride(0),
        *strides,
        1 / problem.temperatures[0],
        problem.caps[0],
    )
