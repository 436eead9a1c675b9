"""gradient *= factor as a kernel that reads the factor on the device."""

from __future__ import annotations

import functools

import torch

from kullback.backends.arguments import parameters, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.printer import print_macros, type_macros
from kullback.work import Scale

Arguments = table(parameters(text(HERE / "scale.cuh"), "kullback_scale"))


def source(x: torch.dtype, factor: torch.dtype) -> str:
    """The whole CUDA file."""
    macros: dict[str, int | str] = {
        **type_macros(x, x, loss=factor),
        "THREADS": plan.THREADS,
        "WIDTH": plan.VECTOR_BYTES // x.itemsize,
    }
    return print_macros(macros) + inlined("cuda/scale.cuh", {})


@functools.cache
@remember_failures
def _launcher(x: torch.dtype, factor: torch.dtype, index: int) -> Launcher:
    return Launcher(source(x, factor), "kullback_scale", index)


def run(work: Scale) -> None:
    gradient, factor = work
    count = gradient.numel()
    if not gradient.is_contiguous():  # as of rows of a wider tensor, which the kernel has no strides for
        gradient.mul_(factor)
    elif count:
        launcher = _launcher(gradient.dtype, factor.dtype, gradient.get_device())
        blocks = -(-count * gradient.itemsize // (plan.THREADS * plan.VECTOR_BYTES))
        launcher(blocks, *Arguments(gradient=gradient.data_ptr(), factor=factor.data_ptr(), count=count))
