"""The verbs as CUDA kernels, compiled by NVRTC at first use, cached as cubins, launched by cuda.core."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kullback.backends import build
from kullback.backends.build import BuildError
from kullback.backends.cuda import plan
from kullback.printer import print_functor, tame_ranges
from kullback.rows import Problem, Wanted, gradient_outputs

HERE = Path(__file__).parent
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
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


if torch.version.cuda is not None and importlib.util.find_spec("cuda") is not None:
    # Half of a first call's time otherwise. Where it is missing, `unavailable` says so.
    with contextlib.suppress(ImportError):
        importlib.import_module("cuda.core")


def why_not(problem: Problem, x: Tensor, y: Tensor) -> str | None:
    """Why this path cannot take the problem, or None."""
    if x.device.type != "cuda":
        return f"tensors are on {x.device.type}"
    return unavailable(x.device.index) or ("logits have no CUDA kernel yet" if problem.needs_norms else None)


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
            (HERE.parent / "logarithm.h").read_text(),
            text("elementary.cuh"),
            (HERE.parent / "numerics.h").read_text(),
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


def text(name: str) -> str:
    """A template of this folder."""
    return (HERE / name).read_text()


def compile_cubin(text: str, arch: str, ptxas: tuple[str, ...] = (), log: Any = None) -> bytes:
    """Machine code for an architecture such as "sm_90a". Needs no GPU."""
    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(arch=arch, std="c++17", ptxas_options=list(ptxas) or None)
    program = core.Program(text, "c++", options)
    try:
        return bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core raises its own kinds for each stage
        raise BuildError(f"NVRTC did not compile a kernel for {arch}: {error}") from error
    finally:
        program.close()


def architecture(index: int) -> str:
    """The compilation target of a device; from Hopper on with its own instructions."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _kernel(text: str, name: str, arch: str) -> Any:
    core = importlib.import_module("cuda.core")
    bindings = importlib.import_module("cuda.bindings")
    key = repr((text, arch, core.__version__, bindings.__version__))
    path = build.cached(key, ".cubin", lambda: compile_cubin(text, arch))
    return core.ObjectCode.from_cubin(build.read(path)).get_kernel(name)


class Launcher:
    """A kernel on a device, and how many of its blocks fill it."""

    def __init__(self, text: str, name: str, index: int) -> None:
        core = importlib.import_module("cuda.core")
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # the device's context, made current by torch
            core.Device(index).set_current()
            self.kernel = _kernel(text, name, architecture(index))
            resident = self.kernel.occupancy.max_active_blocks_per_multiprocessor(plan.THREADS, 0)
        self.index = index
        self.launch = core.launch
        self.blocks = resident * torch.cuda.get_device_properties(index).multi_processor_count
        self.config = functools.cache(lambda blocks: core.LaunchConfig(grid=blocks, block=plan.THREADS))

    def __call__(self, blocks: int, *arguments: int | float) -> None:
        stream = _stream(self.index, raw_stream(self.index))
        config = self.config(max(1, min(blocks, self.blocks)))
        if current_device() == self.index:
            self.launch(stream, config, self.kernel, *arguments)
        else:
            with torch.cuda.device(self.index):
                self.launch(stream, config, self.kernel, *arguments)


# torch.cuda.current_device and current_stream(index).cuda_stream; building a Stream object takes longer than a launch.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)


@functools.cache
def _stream(index: int, handle: int) -> Any:
    return importlib.import_module("cuda.core").Stream.from_handle(handle)


@functools.cache
def _launcher(index: int, flat: bool, lanes: int, *fields: Any) -> tuple[Launcher, plan.Shape]:
    """The kernel of that shape; `fields` are those of `Variant` before `shape`."""
    *_, x, y, _, _, _, want = fields
    shape = plan.shape(lanes, flat, x, y, sum(want))
    return Launcher(source(Variant(*(*fields, shape))), "kullback_rows", index), shape


@functools.cache
def _scaler(x: torch.dtype, factor: torch.dtype, index: int) -> Launcher:
    return Launcher(scale_source(x, factor), "kullback_scale", index)


_workspaces: dict[tuple[int, int], Tensor] = {}


def _workspace(index: int, blocks: int) -> Tensor:
    """Partial sums and, last, the ticket (zero between launches): one for each stream.

    A graph being captured gets its own, since it may be replayed on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(blocks + 1, dtype=torch.float64, device=torch.device("cuda", index))
    key = (index, raw_stream(index))
    workspace = _workspaces.get(key)
    if workspace is None or workspace.numel() <= blocks:
        workspace = torch.zeros(blocks + 1, dtype=torch.float64, device=torch.device("cuda", index))
        _workspaces[key] = workspace
    return workspace


def accumulate(
    problem: Problem, x: Tensor, y: Tensor, coefficient: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss of each row times its coefficient, [rows]; literal forms need no row state."""
    loss = x.new_empty(x.size(0), dtype=dtype)
    _run(problem, x, y, weight=coefficient, losses=loss)
    return loss, x.new_empty((0, x.size(0)), dtype=torch.float64)


def total(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    coefficient: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    want: Wanted,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """scale · Σ coefficient · loss, 0-d, and its gradients in x and y where wanted."""
    gradients = gradient_outputs(x, y, want)
    result = x.new_empty((), dtype=dtype)
    _run(problem, x, y, weight=coefficient, scale=scale, gradients=gradients, total=result)
    return result, *gradients


def gradient(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    state: Tensor | None,
    cotangent: Tensor,
    want: Wanted,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of Σ cotangent · loss."""
    gradients = gradient_outputs(x, y, want)
    _run(problem, x, y, weight=cotangent, gradients=gradients)
    return gradients


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
    gradients: tuple[Tensor | None, Tensor | None] = (None, None),
    losses: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    rows, vocab = x.shape
    if rows == 0:
        if total is not None:
            total.fill_(0.0 * scale)
        return
    formula = problem.formula
    uniform = weight is None or weight.stride(0) == 0  # a 0-d upstream gradient, expanded over the rows
    flat = (
        uniform
        and formula.finish_is_linear
        and (losses is None if total is None else weight is None and formula.finish_is_identity)
        and x.is_contiguous()
        and y.is_contiguous()
    )
    if weight is not None:
        weight = weight[:1] if flat else weight.contiguous()
    x_stride, y_stride = x.stride(0), y.stride(0)
    if flat:
        rows, vocab = 1, rows * vocab
    index = x.device.index
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
        (gradients[0] is not None, gradients[1] is not None),
    )
    if flat:
        blocks = -(-vocab // (plan.THREADS * shape.width * shape.unroll))
    else:
        blocks = -(-rows * shape.lanes // plan.THREADS)
    partial = ticket = 0
    if total is not None:
        workspace = _workspace(index, launcher.blocks)
        partial = workspace.data_ptr()
        ticket = partial + 8 * (workspace.numel() - 1)
    launcher(
        blocks,
        x.data_ptr(),
        y.data_ptr(),
        *[0 if t is None else t.data_ptr() for t in (*gradients, weight, losses, total)],
        partial,
        ticket,
        rows,
        vocab,
        x_stride,
        y_stride,
        scale,
        problem.numbers[2] if len(problem.numbers) > 2 else 0.0,
    )
