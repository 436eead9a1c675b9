"""What a row is at a few of its elements, in plain C."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kullback.backends.c.compile import HERE, function, library
from kullback.backends.torch.entries import is_rounding
from kullback.printer import TYPES
from kullback.rows import Problem, held_dtype


class Arguments(ctypes.Structure):
    """`Arguments` of support.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "ids", "held", "d_held", "out")]
        + [(name, ctypes.c_int64) for name in ("rows", "vocab", "k", "width", "x_stride", "out_stride")]
        + [(name, ctypes.c_double) for name in ("temperature", "cap")]
        + [("threads", ctypes.c_int32)]
    )


def source(x: torch.dtype, form: str, capped: bool) -> str:
    """The whole C file of both kernels."""
    values = {
        "X": TYPES[x],
        "LOAD_X": f"load_{TYPES[x]}",
        "STORE_X": f"store_{TYPES[x]}",
        "IS_LOGITS": int(form == "logits"),
        "IS_PROBS": int(form == "probs"),
        "IS_CAPPED": int(capped),
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(x == torch.float64)}",
            library(),
            *(f"#define {name} {value}" for name, value in values.items()),
            (HERE / "support.c").read_text(),
        ]
    )


@functools.cache
def _kernel(verb: str, x: torch.dtype, form: str, capped: bool) -> Callable[..., None]:
    run = function(source(x, form, capped), f"kullback_{verb}", Arguments)
    return lambda *arguments: run(ctypes.byref(Arguments(*arguments)))


def gather(
    problem: Problem, x: Tensor, ids: Tensor, rest: bool, target: Tensor | None = None, negligible: float = 0.0
) -> Tensor:
    """x at the ids, none where one is -1, and with `rest` all other elements in one; as they count.

    A rest of the target that is no more than negligible is made none where x has none.
    """
    held = x.new_empty(x.size(0), ids.size(1) + rest, dtype=held_dtype(x.dtype))
    _run("gather", problem, x, ids, held, None, None)
    if target is not None:
        target[:, -1:].masked_fill_(is_rounding(held, target, negligible, problem.form), -math.inf)
    return held


def scatter(problem: Problem, x: Tensor, ids: Tensor, held: Tensor, d_held: Tensor, out: Tensor) -> None:
    """Write the gradient in x of what has gradient d_held in `held`, which `gather` found; zeros where that is 0."""
    _run("scatter", problem, x, ids, held, d_held, out)


def _run(
    verb: str, problem: Problem, x: Tensor, ids: Tensor, held: Tensor, d_held: Tensor | None, out: Tensor | None
) -> None:
    ids = ids.contiguous()
    _kernel(verb, x.dtype, problem.form, problem.capped[0] and problem.form == "logits")(
        *(None if t is None else t.data_ptr() for t in (x, ids, held, d_held, out)),
        *x.shape,
        ids.size(1),
        held.size(1),
        x.stride(0),
        0 if out is None else out.stride(0),
        problem.temperatures[0],
        problem.caps[0],
        torch.get_num_threads(),
    )
