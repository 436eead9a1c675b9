"""The verbs as CUDA kernels, compiled by NVRTC at first use, cached as cubins, launched by cuda.core."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kullback.backends.build import BuildError as BuildError
from kullback.backends.cuda import logits, plan
from kullback.backends.cuda.launch import Launcher as Launcher
from kullback.backends.cuda.launch import compile_cubin as compile_cubin
from kullback.backends.cuda.launch import text as text
from kullback.backends.cuda.launch import workspace
from kullback.backends.cuda.support import entries as entries
from kullback.backends.cuda.support import gather as gather
from kullback.backends.cuda.support import scatter as scatter
from kullback.printer import TYPES, print_functor, tame_ranges
from kullback.rows import STATE_FIELDS, Gradients, Problem, Wanted

OLDEST = (8, 0)


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
    shape: plan.Shape


def why_not(problem: Problem, x: Tensor, y: Tensor) -> str | None:
    """Why this path cannot take the problem, or None."""
    if not x.is_cuda:
        return f"tensors are on {x.device.type}"
    return unavailable(x.get_device()) or (logits.why_not(x, y) if problem.needs_norms else None)


@functools.cache
def unavailable(index: int) -> str | None:
    """Why kernels cannot be made for this device, or None."""
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "the package cuda-core is not installed"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        return f"compute capability {capability} is older than {OLDEST}"
    return None


def source(variant: Variant) -> str:
    """The whole CUDA file of a row kernel."""
    problem = Problem(variant.kind, variant.form, variant.target_form)
    types = {"X": variant.x, "Y": variant.y, "WEIGHT": variant.weight, "LOSS": variant.loss}
    values = {
        **{name: TYPES[dtype] for name, dtype in types.items()},
        "WANT_SUM": int(variant.want_sum),
        "WANT_INPUT": int(variant.want[0]),
        "WANT_TARGET": int(variant.want[1]),
        **tame_ranges(variant.form, variant.target_form),
        **variant.shape.macros,
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(torch.float64 in (variant.x, variant.y))}",
            *(f"#define {name} {value}" for name, value in values.items()),
            text("math.cuh"),
            text("../logarithm.h"),
            text("elementary.cuh"),
            text("../numerics.h"),
            text("vector.cuh"),
            print_functor(problem, ("k_", "tame_")),
            text("fold.cuh"),
            text("rows.cuh"),
        ]
    )


def scale_source(x: torch.dtype, factor: torch.dtype) -> str:
    """The whole CUDA file of `scale_`."""
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(x == torch.float64)}",
            f"#define X {TYPES[x]}",
            f"#define LOSS {TYPES[factor]}",
            f"#define THREADS {plan.THREADS}",
            f"#define WIDTH {plan.VECTOR_BYTES // x.itemsize}",
            text("math.cuh"),
            text("vector.cuh"),
            text("scale.cuh"),
        ]
    )


@functools.cache
def _launcher(index: int, flat: bool, lanes: int, *fields: Any) -> tuple[Launcher, plan.Shape]:
    """The kernel of that shape; `fields` are those of `Variant` before `shape`."""
    *_, x, y, _, _, _, want = fields
    shape = plan.shape(lanes, flat, x, y, sum(want))
    return Launcher(source(Variant(*(*fields, shape))), "kullback_rows", index), shape


@functools.cache
def _scaler(x: torch.dtype, factor: torch.dtype, index: int) -> Launcher:
    return Launcher(scale_source(x, factor), "kullback_scale", index)


def accumulate(
    problem: Problem, x: Tensor, y: Tensor, coefficient: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss of each row times its coefficient, [rows], and the row states; literal forms need none."""
    loss = x.new_empty(x.size(0), dtype=dtype)
    state = x.new_empty((STATE_FIELDS if problem.needs_norms else 0, x.size(0)), dtype=torch.float64)
    _run(problem, x, y, weight=coefficient, losses=loss, state=state)
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
    result = x.new_empty((), dtype=dtype)
    _run(problem, x, y, weight=coefficient, scale=scale, gradients=gradients, total=result)
    return result


def gradient(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    gradients: Gradients,
) -> None:
    """Write gradients of Σ cotangent · loss."""
    _run(problem, x, y, weight=cotangent, gradients=gradients, known_state=state)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, without a pass over it where the factor is 1, decided on the device."""
    if gradient.numel():
        launcher = _scaler(gradient.dtype, factor.dtype, gradient.device.index)
        blocks = -(-gradient.numel() * gradient.itemsize // (plan.THREADS * plan.VECTOR_BYTES))
        launcher(blocks, gradient.data_ptr(), factor.data_ptr(), gradient.numel())


def _run(
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
    rows, vocab = x.shape
    if rows == 0:
        if total is not None:
            total.fill_(0.0 * scale)
        return
    if vocab == 0 and problem.needs_norms:  # kernels look at a row's first logits
        for tensor in (total, losses, state):
            if tensor is not None:
                tensor.zero_()
        return
    if problem.needs_norms:
        logits.run(problem, x, y, weight, scale, gradients, known_state, state, losses, total)
        return
    formula = problem.formula
    d_x, d_y = gradients
    uniform = weight is None or weight.stride(0) == 0  # a 0-d upstream gradient, expanded over the rows
    flat = (
        uniform
        and formula.finish_is_linear
        and (losses is None if total is None else weight is None and formula.finish_is_identity)
        and x.is_contiguous()
        and y.is_contiguous()
        and (d_x is None or d_x.is_contiguous())
        and (d_y is None or d_y.is_contiguous())
    )
    if weight is not None:
        weight = weight[:1] if flat else weight.contiguous()
    strides = [0 if t is None else t.stride()[0] for t in (x, y, d_x, d_y)]  # stride(0) takes twice as long
    if flat:
        rows, vocab = 1, rows * vocab
    index = x.get_device()
    output = total if losses is None else losses
    launcher, shape = _launcher(
        index,
        flat,
        plan.THREADS if flat else plan.lanes(vocab),
        problem.kind,
        problem.form,
        problem.target_form,
        x.dtype,
        y.dtype,
        torch.float64 if weight is None else weight.dtype,
        torch.float32 if output is None else output.dtype,
        output is not None,
        (d_x is not None, d_y is not None),
    )
    if flat:
        blocks = -(-vocab // (plan.THREADS * shape.width * shape.unroll))
    else:
        blocks = -(-rows * shape.lanes // plan.THREADS)
    partial = ticket = 0
    if total is not None:
        partial, ticket = workspace(index, launcher.blocks)
    launcher(
        blocks,
        x.data_ptr(),
        y.data_ptr(),
        *[0 if t is None else t.data_ptr() for t in (d_x, d_y, weight, losses, total)],
        partial,
        ticket,
        rows,
        vocab,
        *strides,
        scale,
        problem.parameter,
    )
