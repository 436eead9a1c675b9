"""The verbs in plain C, compiled by the system's compiler at first use and kept in the cache."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.backends import pytorch
from kullback.backends.arguments import address
from kullback.backends.build import remember_failures
from kullback.backends.c import describe, topk
from kullback.backends.c.compile import (
    HERE,
    NO_COMPILER,
    arguments_of,
    compiler_name,
    function,
    library,
    softmaxes,
)
from kullback.backends.lowering import slopes_are_logs
from kullback.backends.near import FLOAT_RADIUS, OverRootShape, over_root
from kullback.backends.printer import TYPES, print_functor, print_layout, print_macros, ranges
from kullback.problem import formula, has_corner, moments_of
from kullback.work import VERBS, Describe, Entries, Gather, Rows, Scatter, Work

# A flat problem's rows are its own choice; this many elements make a row's set-up cost nothing.
FLAT_VOCAB = 1 << 14


class Variant(NamedTuple):
    """All that the C code of one kernel depends on."""

    kind: str
    form: str
    target_form: str
    x: torch.dtype
    y: torch.dtype
    dx: torch.dtype  # of the gradients
    dy: torch.dtype
    weight: torch.dtype
    loss: torch.dtype
    wants: tuple[bool, bool]
    capped: tuple[bool, bool]
    fine: OverRootShape | None = None


SWEEP, NEAR, FINE, ROWS = (
    (HERE / name).read_text(encoding="utf-8") for name in ("sweep.h", "near.h", "fine.h", "rows.c")
)
Arguments, Structure = arguments_of(ROWS)


def why_not(work: Work) -> str | None:
    """Why this backend cannot do the work, or None."""
    device = work.first_tensor.device
    if device.type != "cpu":
        return f"tensors are on {device.type}"
    return None if compiler_name() else NO_COMPILER


def run(work: Work) -> None:
    if isinstance(work, Rows):
        _rows(work)
    elif isinstance(work, Gather):
        topk.gather(work)
    elif isinstance(work, Scatter):
        topk.scatter(work)
    elif isinstance(work, Describe):
        describe.run(work)
    elif isinstance(work, Entries):
        topk.entries(work)
    else:  # Labels and Scale, which are an operation each
        pytorch.run(work)


def source(variant: Variant) -> str:
    """The whole C file of a kernel."""
    forms = variant.form, variant.target_form
    double = torch.float64 in (variant.x, variant.y)
    has_fast = forms == ("logits", "logits") and not double
    prefixes = ("safe_", *(("fast_",) if has_fast else () if "logits" in forms else ("in_range_",)))
    x, y, dx, dy = (TYPES[dtype] for dtype in (variant.x, variant.y, variant.dx, variant.dy))
    weight, loss = TYPES[variant.weight], TYPES[variant.loss]
    macros: dict[str, int | str] = {
        "X": x,
        "Y": y,
        "WEIGHT": weight,
        "LOSS": loss,
        "LOAD_X": f"load_{x}",
        "LOAD_Y": f"load_{y}",
        "DX": dx,
        "DY": dy,
        "STORE_DX": f"store_{dx}",
        "STORE_DY": f"store_{dy}",
        "STORE_LOSS": f"store_{loss}",
        "WANT_INPUT": variant.wants[0],
        "WANT_TARGET": variant.wants[1],
        **ranges(*forms),
        "INPUT_IS_LOGITS": variant.form == "logits",
        "TARGET_IS_LOGITS": variant.target_form == "logits",
        "HAS_FAST": has_fast,
        "KEEPS_SLOPES": has_fast
        and moments_of(variant.kind) is None
        and (variant.wants, variant.dx) == ((True, False), torch.float32),
        "HAS_FINE": variant.fine is not None,
        "HAS_CORNER": has_corner(variant.kind),
        "SLOPES_ARE_LOGS": has_fast and slopes_are_logs(variant.kind),
        "INPUT_IS_CAPPED": variant.capped[0],
        "TARGET_IS_CAPPED": variant.capped[1],
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(double)}",
            library(),
            print_macros(macros),
            (HERE / "fast.h").read_text(encoding="utf-8") if has_fast else "",
            print_functor(variant.kind, *forms, prefixes),
            print_layout(formula(variant.kind, *forms).has_tilted_lse),
            softmaxes(variant.form == "logits", variant.target_form == "logits"),
            SWEEP,
            "" if variant.fine is None else _fine(variant.fine),
            ROWS,
        ]
    )


def _fine(shape: OverRootShape) -> str:
    macros: dict[str, int | str] = {
        "FINE_TERMS": shape.terms,
        "FINE_TERM_STEP": shape.term_step,
        "FINE_DIFFERENCES": shape.differences,
        "FINE_DIFFERENCE_STEP": shape.difference_step,
        "FINE_RADIUS": f"{FLOAT_RADIUS}f",
    }
    return print_macros(macros) + NEAR + FINE


@functools.lru_cache(maxsize=1024)
def _fine_of(kind: str, parameter: float) -> tuple[OverRootShape, Tensor] | None:
    """The shape that a kernel is compiled for, and its factors: the terms', then the differences'."""
    found = over_root(kind, parameter)
    if found is None:
        return None
    factors = torch.tensor(found.term + found.difference, dtype=torch.float32, device="cpu")
    return found.shape, factors


@functools.cache
@remember_failures
def kernel(variant: Variant) -> Callable[[ctypes.Structure], None]:
    """The loaded kernel, compiled where the cache lacks it."""
    return function(source(variant), "kullback_rows", Structure)


def _rows(work: Rows) -> None:
    problem, x, y = work.problem, work.input, work.target
    if work.has_nothing_to_read:
        work.write_nothing()
        return
    rows, vocab = x.shape
    weight, labels = (None if t is None else t.contiguous() for t in work.operands.of_rows)
    strides = [0 if tensor is None else tensor.stride(0) for tensor in (x, y, work.d_input, work.d_target)]
    elements = rows * vocab
    if _is_flat(work):
        vocab = FLAT_VOCAB
        rows = -(-elements // vocab)
        strides = [vocab] * 4
    elif vocab == 1 and not problem.has_logits:
        x, y = x.contiguous(), y.contiguous()
        strides[:2] = [1, 1]
    loss, total = work.loss, ctypes.c_double()
    if vocab > 1:  # numbers of rows are few beside elements; and one kernel serves all their dtypes
        weight = None if weight is None else weight.to(torch.float64)
        loss = None if loss is None else torch.empty_like(loss, dtype=torch.float64)
    is_double = torch.float64 in (x.dtype, y.dtype)
    fine = _fine_of(problem.kind, problem.parameter) if problem.is_normalised and not is_double else None
    run = kernel(
        Variant(
            problem.kind,
            problem.input.form,
            problem.target.form,
            x.dtype,
            y.dtype,
            (x if work.d_input is None else work.d_input).dtype,
            (y if work.d_target is None else work.d_target).dtype,
            torch.float64 if weight is None else weight.dtype,
            torch.float64 if loss is None else loss.dtype,
            work.wants if any(work.wants) else (True, False),  # which serves a loss alone, too
            (problem.input.softcap != 0, problem.target.softcap != 0),
            None if fine is None else fine[0],
        )
    )
    run(
        Structure(
            *Arguments(
                x=x.data_ptr(),
                y=y.data_ptr(),
                row_weight=address(weight),
                labels=address(labels),
                known=address(work.known),
                found=address(work.found),
                loss=address(loss),
                total=None if work.total is None else ctypes.addressof(total),
                d_input=address(work.d_input),
                d_target=address(work.d_target),
                figures=address(work.figures),
                fine=None if fine is None else fine[1].data_ptr(),
                rows=rows,
                vocab=vocab,
                elements=elements,
                x_stride=strides[0],
                y_stride=strides[1],
                d_input_stride=strides[2],
                d_target_stride=strides[3],
                scale=work.scale,
                input_temperature=problem.input.temperature,
                target_temperature=problem.target.temperature,
                input_softcap=problem.input.softcap,
                target_softcap=problem.target.softcap,
                parameter=problem.parameter,
                divergence_weight=problem.weights.divergence,
                label_weight=problem.weights.label,
                z_weight=problem.weights.z,
                label_smoothing=problem.weights.smoothing,
                verb=VERBS.index(work.verb),
                threads=torch.get_num_threads(),
            )
        )
    )
    if work.total is not None:
        try:
            work.total.fill_(total.value)
        except RuntimeError:  # its dtype has no such number
            work.total.fill_(math.copysign(math.inf, total.value))
    if work.loss is not None and loss is not None and loss is not work.loss:
        work.loss.copy_(loss)


def _is_flat(work: Rows) -> bool:
    """Whether all rows' elements may be summed as if of one."""
    tensors = work.input, work.target, work.d_input, work.d_target
    return (
        work.total is not None
        and work.loss is None
        and work.row_weight is None
        and work.found is None
        and not work.problem.has_logits
        and formula(work.problem.kind, work.problem.input.form, work.problem.target.form).finish_is_identity
        and all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    )
