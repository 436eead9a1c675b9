"""Kernels for rows of which a side is logits: normalised, summed and differentiated while they are on chip."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher, text, workspace
from kullback.printer import TYPES, print_functor
from kullback.rows import Gradients, Problem, Wanted


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
    types = {"X": variant.x, "Y": variant.y, "WEIGHT": variant.weight, "LOSS": variant.loss}
    values = {
        **{name: TYPES[dtype] for name, dtype in types.items()},
        "INPUT_IS_LOGITS": int(forms[0] == "logits"),
        "TARGET_IS_LOGITS": int(forms[1] == "logits"),
        "INPUT_IS_CAPPED": int(variant.capped[0]),
        "TARGET_IS_CAPPED": int(variant.capped[1]),
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
            text("apart.cuh"),
            print_functor(Problem(variant.kind, *forms), prefixes),
            text("cluster.cuh") if variant.shape.resident else "",
            text("logits.cuh"),
        ]
    )


def why_not(x: Tensor, y: Tensor) -> str | None:
    """Why these kernels cannot take the tensors, or None."""
    if torch.float64 in (x.dtype, y.dtype):
        return "logits in float64 have no CUDA kernel"
    if max(x.shape) > 1 << 30:
        return f"{list(x.shape)} has a side longer than 2**30"
    return None


def run(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    *,
    weight: Tensor | None = None,
    scale: float = 1.0,
    gradients: Gradients = (None, None),
    known_state: Tensor | None = None,
    state: Tensor | None = None,
    losses: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Launch on rows of the tensors; what is None is not computed."""
    rows, vocab = x.shape
    index = x.device.index
    weight = None if weight is None else weight.contiguous()
    output = total if losses is None else losses
    fits = known_state is None and _has_clusters(index) and _in_phase(x, y, gradients)
    want = gradients[0] is not None, gradients[1] is not None
    placed = plan.logits(vocab, x.dtype, y.dtype, all(want), known_state is not None, fits)
    launcher = _launcher(
        index,
        placed,
        problem.kind,
        problem.form,
        problem.target_form,
        x.dtype,
        y.dtype,
        torch.float64 if weight is None else weight.dtype,
        torch.float32 if output is None else output.dtype,
        output is not None,
        want,
        problem.capped,
    )
    partial, ticket = (0, 0) if total is None else workspace(index, launcher.blocks)
    input_temperature, target_temperature = problem.temperatures
    launcher(
        rows,
        x.data_ptr(),
        y.data_ptr(),
        *[0 if t is None else t.data_ptr() for t in (*gradients, weight, known_state, state, losses, total)],
        partial,
        ticket,
        rows,
        vocab,
        *[0 if t is None else t.stride(0) for t in (x, y, *gradients)],
        scale,
        1 / input_temperature,
        1 / target_temperature,
        *problem.caps,
        problem.parameter,
        placed.slots,
        placed.slot_vectors,
        placed.share,
        placed.pieces,
        placed.mail,
        placed.barriers,
    )


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


def _in_phase(x: Tensor, y: Tensor, gradients: Gradients) -> bool:
    """Whether in every row vectors of all tensors begin at the same element."""
    width = plan.width(x.dtype, y.dtype)
    tensors = [x, y, *(g for g in gradients if g is not None)]
    phases = {t.data_ptr() // t.itemsize % width for t in tensors}
    aligned = all(t.data_ptr() % t.itemsize == 0 for t in tensors)
    steps = {t.stride(0) % width for t in tensors} if x.size(0) > 1 else {0}
    return aligned and len(phases) == 1 and len(steps) == 1
