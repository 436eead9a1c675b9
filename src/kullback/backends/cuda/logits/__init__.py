"""Kernels for rows of which a side is logits: normalised, summed and differentiated while they are on chip."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher, text, workspace
from kullback.printer import TYPES, print_functor, print_slopes
from kullback.rows import Gradients, Problem, Wanted
from kullback.series import POWERS, REACH, Series

# Of the kernel, in the order in which each knows of those before it
ROOMS = ("warp", "problem", "ring", "exchange", "survey", "elements", "slopes", "gradients", "powers", "row", "kernel")


@dataclass(frozen=True)
class Variant:
    """All that the code of one kernel depends on, but the architecture."""

    kind: str
    form: str
    target_form: str
    x: torch.dtype
    y: torch.dtype
    weight: torch.dtype
    loss: torch.dtype
    want_sum: bool
    want: Wanted
    capped: tuple[bool, bool]
    shape: plan.LogitsShape


def source(variant: Variant) -> str:
    """The whole CUDA file of a kernel for logits."""
    forms = variant.form, variant.target_form
    problem = Problem(variant.kind, *forms)
    types = {"X": variant.x, "Y": variant.y, "WEIGHT": variant.weight, "LOSS": variant.loss}
    values = {
        **{name: TYPES[dtype] for name, dtype in types.items()},
        "INPUT_IS_LOGITS": int(forms[0] == "logits"),
        "TARGET_IS_LOGITS": int(forms[1] == "logits"),
        "INPUT_IS_CAPPED": int(variant.capped[0]),
        "TARGET_IS_CAPPED": int(variant.capped[1]),
        "IS_SMOOTH": int(problem.is_smooth),
        "POWERS": POWERS,
        "REACH": f"{REACH}f",
        "WANT_SUM": int(variant.want_sum),
        "WANT_INPUT": int(variant.want[0]),
        "WANT_TARGET": int(variant.want[1]),
        **variant.shape.macros,
    }
    prefixes = ("k_", "apart_", "close_") if forms == ("logits", "logits") else ("k_",)
    return "\n".join(
        [
            "#define REAL_IS_DOUBLE 0",
            *(f"#define {name} {value}" for name, value in values.items()),
            text("math.cuh"),
            text("../logarithm.h"),
            text("elementary.cuh"),
            text("../numerics.h"),
            text("vector.cuh"),
            text("logits/apart.cuh"),
            print_functor(problem, prefixes),
            print_slopes(problem) if forms == ("logits", "logits") else "",
            text("logits/cluster.cuh") if variant.shape.resident else "",
            *(text(f"logits/{name}.cuh") for name in ROOMS),
        ]
    )


def why_not(x: Tensor, y: Tensor) -> str | None:
    """Why these kernels cannot take the tensors, or None."""
    if x.dtype is torch.float64 or y.dtype is torch.float64:
        return "logits in float64 have no CUDA kernel"
    if x.numel() > 1 << 30 and max(x.shape) > 1 << 30:
        return f"{list(x.shape)} has a side longer than 2**30"
    return None


def run(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    scale: float,
    gradients: Gradients,
    known_state: Tensor | None,
    state: Tensor | None,
    losses: Tensor | None,
    total: Tensor | None,
) -> None:
    """Launch on rows of the tensors; what is None is not computed."""
    rows, vocab = x.shape
    index = x.get_device()
    weight = None if weight is None else weight.contiguous()
    output = total if losses is None else losses
    d_x, d_y = gradients
    addresses = [0 if t is None else t.data_ptr() for t in (x, y, d_x, d_y)]
    strides = [0 if t is None else t.stride()[0] for t in (x, y, d_x, d_y)]  # stride(0) takes twice as long
    launcher, numbers = _prepared(
        index,
        vocab,
        problem,
        x.dtype,
        y.dtype,
        torch.float64 if weight is None else weight.dtype,
        torch.float32 if output is None else output.dtype,
        output is not None,
        (d_x is not None, d_y is not None),
        known_state is not None,
        known_state is None and _has_clusters(index) and _in_phase(addresses, strides, rows, x.dtype, y.dtype),
    )
    partial, ticket = (0, 0) if total is None else workspace(index, launcher.blocks)
    launcher(
        rows,
        *addresses,
        *[0 if t is None else t.data_ptr() for t in (weight, known_state, state, losses, total)],
        partial,
        ticket,
        rows,
        vocab,
        *strides,
        scale,
        *numbers,
    )


@functools.lru_cache(maxsize=1024)
def _prepared(
    index: int,
    vocab: int,
    problem: Problem,
    x: torch.dtype,
    y: torch.dtype,
    weight: torch.dtype,
    loss: torch.dtype,
    want_sum: bool,
    want: Wanted,
    known: bool,
    fits: bool,
) -> tuple[Launcher, tuple[float, ...]]:
    """The kernel, and those of its arguments that are the same in every call of such tensors."""
    placed = layout(problem, vocab, x, y, want, known, fits)
    fields = problem.kind, problem.form, problem.target_form, x, y, weight, loss, want_sum, want, problem.capped
    temperatures = problem.temperatures
    numbers = 1 / temperatures[0], 1 / temperatures[1], *problem.caps, problem.parameter, *_packed(problem.series)
    ring = placed.slots, placed.slot_vectors, placed.share, placed.pieces, placed.mail, placed.barriers
    return _launcher(index, placed, *fields), (*numbers, *ring)


def _packed(series: Series | None) -> tuple[int, ...]:
    """Two floats in an integer each: kernels read halves where they lie, and numbers converted would take registers."""
    if series is None:
        return (0,) * POWERS
    return tuple(struct.unpack("<q", struct.pack("<ff", *factors))[0] for factors in zip(*series, strict=True))


def layout(
    problem: Problem, vocab: int, x: torch.dtype, y: torch.dtype, want: Wanted, known: bool, fits: bool
) -> plan.Layout:
    """As of plan.logits, which knows no formula."""
    both_logits = problem.form == problem.target_form == "logits"
    # A float16 gradient has more digits than a mass that is kept, and a slope is kept in float16.
    keeps = both_logits and x == torch.bfloat16 and y.itemsize == 2 and want == (True, False)
    keeps = keeps and problem.has_slope and problem.longest_slope < torch.finfo(torch.float16).max
    light = problem.is_crossed and not any(problem.capped)
    return plan.logits(vocab, x, y, all(want), known, fits, keeps, light)


@functools.cache
def _launcher(index: int, placed: plan.Layout, *fields: Any) -> Launcher:
    shape = placed.shape
    code = source(Variant(*(*fields, shape)))
    return Launcher(code, "kullback_logits", index, shape.threads, placed.cluster, placed.shared)


@functools.cache
def _has_clusters(index: int) -> bool:
    """Whether the device can keep rows on chip: clusters, bulk copies, and the shared memory of the plan."""
    properties: Any = torch.cuda.get_device_properties(index)
    return bool(properties.major >= 9 and properties.shared_memory_per_block_optin >= plan.SHARED)


def _in_phase(addresses: list[int], strides: list[int], rows: int, x_dtype: torch.dtype, y_dtype: torch.dtype) -> bool:
    """Whether in every row vectors of input, target and their gradients (0: none) begin at the same element."""
    x, y, d_x, d_y = addresses
    x_step, y_step, d_x_step, d_y_step = strides
    if (x | y | d_x | d_y) % 64 == 0 and (x_step | y_step | d_x_step | d_y_step) % 8 == 0:
        return True  # as usual: all rows begin with a vector, whatever its width
    width = plan.width(x_dtype, y_dtype)
    first, step = x // x_dtype.itemsize % width, x_step % width
    for address, stride, dtype in zip(addresses, strides, (x_dtype, y_dtype) * 2, strict=True):
        element, rest = divmod(address, dtype.itemsize)
        if address and (rest or element % width != first or (rows > 1 and stride % width != step)):
            return False
    return True
