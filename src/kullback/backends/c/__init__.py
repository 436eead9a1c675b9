"""The verbs in plain C, compiled by the system's compiler at first use and kept in the cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kullback.backends.build import BuildError
from kullback.backends.c.compile import HERE, function, library
from kullback.backends.c.compile import compiler as compiler
from kullback.backends.c.support import gather as gather
from kullback.backends.c.support import scatter as scatter
from kullback.backends.torch import entries as entries
from kullback.printer import TYPES, print_functor, tame_ranges
from kullback.rows import STATE_FIELDS, Gradients, Problem, Wanted

# A flat problem's rows are its own choice; this many elements make a row's set-up cost nothing.
FLAT_VOCAB = 1 << 14


@dataclass(frozen=True)
class Variant:
    """All that the C code of one kernel depends on."""

    kind: str
    form: str
    target_form: str
    x: torch.dtype
    y: torch.dtype
    weight: torch.dtype
    loss: torch.dtype
    want: Wanted
    capped: tuple[bool, bool] = (False, False)


POINTERS = ("x", "y", "input_gradient", "target_gradient", "weight", "loss", "state", "known_state", "partial")


STRIDES = ("x_stride", "y_stride", "input_gradient_stride", "target_gradient_stride")
NUMBERS = ("scale", "input_temperature", "target_temperature", "input_cap", "target_cap", "parameter")


class Arguments(ctypes.Structure):
    """`Arguments` of rows.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in ("rows", "vocab", *STRIDES, "elements")]
        + [(name, ctypes.c_double) for name in NUMBERS]
        + [("threads", ctypes.c_int32)]
    )


def why_not(problem: Problem, x: Tensor, y: Tensor) -> str | None:
    """Why this path cannot take the problem, or None."""
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    try:
        compiler()
    except BuildError as error:
        return str(error)
    return None


def source(variant: Variant) -> str:
    """The whole C file of a kernel."""
    problem = Problem(variant.kind, variant.form, variant.target_form)
    double = torch.float64 in (variant.x, variant.y)
    apart = problem.form == problem.target_form == "logits" and not double
    prefixes = ("k_", *(("apart_",) if apart else () if problem.needs_norms else ("tame_",)))
    x, y, weight, loss = (TYPES[dtype] for dtype in (variant.x, variant.y, variant.weight, variant.loss))
    values = {
        "X": x,
        "Y": y,
        "WEIGHT": weight,
        "LOSS": loss,
        "LOAD_X": f"load_{x}",
        "LOAD_Y": f"load_{y}",
        "STORE_X": f"store_{x}",
        "STORE_Y": f"store_{y}",
        "STORE_LOSS": f"store_{loss}",
        "WANT_INPUT": int(variant.want[0]),
        "WANT_TARGET": int(variant.want[1]),
        **tame_ranges(variant.form, variant.target_form),
        "INPUT_IS_LOGITS": int(variant.form == "logits"),
        "TARGET_IS_LOGITS": int(variant.target_form == "logits"),
        "HAS_APART": int(apart),
        "INPUT_IS_CAPPED": int(variant.capped[0]),
        "TARGET_IS_CAPPED": int(variant.capped[1]),
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(double)}",
            library(),
            *(f"#define {name} {value}" for name, value in values.items()),
            (HERE / "apart.h").read_text() if apart else "",
            print_functor(problem, prefixes),
            (HERE / "rows.c").read_text(),
        ]
    )


@functools.cache
def kernel(*fields: Any) -> Callable[[Arguments], None]:
    """The loaded kernel of the variant of these fields, compiled where the cache lacks it."""
    variant = Variant(*fields)
    run = function(source(variant), "kullback_rows", Arguments)
    return lambda arguments: run(ctypes.byref(arguments))


def accumulate(
    problem: Problem, x: Tensor, y: Tensor, coefficient: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss of each row times its coefficient, [rows], and the packed row states."""
    loss = x.new_empty(x.size(0), dtype=dtype)
    fields = STATE_FIELDS if problem.needs_norms else 0
    state = x.new_empty(fields, x.size(0), dtype=torch.float64)
    _run(problem, x, y, weight=coefficient, loss=loss, state=state if fields else None)
    return loss, state


def total(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    coefficient: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    gradients: Gradients,
) -> Tensor:
    """scale · Σ coefficient · loss, 0-d; writes its gradients in x and y where wanted."""
    partial = _run(problem, x, y, weight=coefficient, scale=scale, gradients=gradients, total=True)
    assert partial is not None
    return (partial.sum() * scale).to(dtype)


def gradient(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    gradients: Gradients,
) -> None:
    """Write gradients of Σ cotangent · loss; from the row states, or without them."""
    known = state if problem.needs_norms else None
    _run(problem, x, y, weight=cotangent, gradients=gradients, known_state=known)


def _run(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    *,
    weight: Tensor | None = None,
    scale: float = 1.0,
    loss: Tensor | None = None,
    state: Tensor | None = None,
    known_state: Tensor | None = None,
    gradients: Gradients = (None, None),
    total: bool = False,
) -> Tensor | None:
    """Call the kernel; returns the partial sums if `total`."""
    rows, vocab = x.shape
    partial = None
    if x.numel() == 0 and not problem.needs_norms and problem.formula.finish_is_identity:
        for tensor in (loss, *gradients):
            if tensor is not None:
                tensor.zero_()
        return torch.zeros(1, dtype=torch.float64) if total else None
    elements = rows * vocab
    flat = (
        total
        and weight is None
        and problem.formula.finish_is_identity
        and not problem.needs_norms
        and all(tensor is None or tensor.is_contiguous() for tensor in (x, y, *gradients))
    )
    strides = [0 if tensor is None else tensor.stride(0) for tensor in (x, y, *gradients)]
    if flat:
        vocab = FLAT_VOCAB
        rows = -(-elements // vocab)
        strides = [vocab] * 4
    elif vocab == 1 and not problem.needs_norms:
        x, y = x.contiguous(), y.contiguous()
        strides[:2] = [1, 1]
    if total:
        unit = max(1, (1 << 16) // max(1, vocab))
        partial = torch.empty(-(-rows // unit), dtype=torch.float64)
    if weight is not None:
        weight = weight.contiguous()
    run = kernel(
        problem.kind,
        problem.form,
        problem.target_form,
        x.dtype,
        y.dtype,
        torch.float64 if weight is None else weight.dtype,
        torch.float64 if loss is None else loss.dtype,
        (gradients[0] is not None, gradients[1] is not None),
        problem.capped,
    )
    run(
        Arguments(
            x.data_ptr(),
            y.data_ptr(),
            *(
                None if tensor is None else tensor.data_ptr()
                for tensor in (*gradients, weight, loss, state, known_state, partial)
            ),
            rows,
            vocab,
            *strides,
            elements,
            scale,
            *problem.temperatures,
            *problem.caps,
            problem.parameter,
            torch.get_num_threads(),
        )
    )
    return partial
