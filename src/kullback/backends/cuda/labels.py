"""Labels on a GPU: a look at each in one launch, where torch would take seven."""

from __future__ import annotations

import functools

import torch

from kullback.backends.arguments import address, parameters, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.printer import print_macros, type_macros
from kullback.problem import IGNORED
from kullback.work import Labels

Arguments = table(parameters(text(HERE / "labels.cuh"), "kullback_labels"))


def source(x: torch.dtype) -> str:
    """The whole CUDA file."""
    macros: dict[str, int | str] = {
        **type_macros(x, x),
        "THREADS": plan.THREADS,
        "WIDTH": 1,
        "IGNORED": f"({IGNORED})",
    }
    return print_macros(macros) + inlined("cuda/labels.cuh", {})


@functools.cache
@remember_failures
def _launcher(x: torch.dtype, index: int) -> Launcher:
    return Launcher(source(x), "kullback_labels", index)


def run(work: Labels) -> None:
    labels, x, rows = work.labels.contiguous(), work.input, work.labels.numel()
    assert labels.dtype == torch.int64  # as kernels read them
    if rows:
        _launcher(torch.float32 if x is None else x.dtype, labels.get_device())(
            -(-rows // plan.THREADS),
            *Arguments(
                labels=labels.data_ptr(),
                x=address(x),
                logits=address(work.logits),
                rows=rows,
                vocab=work.vocab,
                x_stride=0 if x is None else x.stride(0),
                inv_temperature=1 / work.side.temperature,
                softcap=work.side.softcap,
            ),
        )
