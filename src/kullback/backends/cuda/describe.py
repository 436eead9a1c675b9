"""Every figure of rows of logits on a GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kullback.backends.arguments import address, parameters, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.printer import print_macros, print_near_terms, print_order, print_terms, type_macros
from kullback.work import Describe

UNROLL = 2  # vectors in flight a thread, of each side, where both are summed together
MAX_VOCAB = 1 << 30  # places are counted in 32 bits
SHORT, FEW_THREADS, THREADS = 4096, 64, 128  # of rows of so many tokens; of others
MOST_THREADS = 768  # of a multiprocessor: bounds the registers
MOST_WIDE, MOST_DOUBLE = 512, 256  # of sides that differ or are capped; where arithmetic is in double

Arguments = table(parameters(text(HERE / "describe.cuh"), "kullback_describe"))


class Variant(NamedTuple):
    """All that the code of a kernel depends on, but the architecture."""

    x: torch.dtype
    y: torch.dtype
    capped: tuple[bool, bool] = (False, False)
    has_target: bool = True
    has_one_temperature: bool = True
    threads: int = THREADS  # of a row


def why_not(work: Describe) -> str | None:
    """Why this kernel cannot do the work, or None."""
    vocab = work.input.size(1)
    return f"the kernel takes {MAX_VOCAB} tokens at most; got {vocab}" if vocab > MAX_VOCAB else None


def source(variant: Variant) -> str:
    """The whole CUDA file."""
    x, y, capped = variant.x, variant.y, variant.capped
    double = torch.float64 in (x, y)
    is_wide = x != y or any(capped) or not variant.has_one_temperature
    most = MOST_DOUBLE if double else MOST_WIDE if is_wide else MOST_THREADS
    macros: dict[str, int | str] = {
        **type_macros(x, y),
        "THREADS": variant.threads,
        "WIDTH": plan.width(x, y),
        "UNROLL": UNROLL,
        "MIN_BLOCKS": most // variant.threads,
        "INPUT_IS_CAPPED": capped[0],
        "TARGET_IS_CAPPED": capped[1],
        "HAS_TARGET": variant.has_target,
        "ONE_TEMPERATURE": variant.has_one_temperature,
    }
    prefixes = ("safe_",) if double else ("safe_", "light_")
    terms = print_terms(prefixes) + print_near_terms() + print_order()
    printed = f'#include "cuda/light.cuh"\nnamespace kullback {{\n{terms}}}\n'
    return print_macros(macros) + inlined("cuda/describe.cuh", {"cuda/terms.cuh": printed})


@functools.cache
@remember_failures
def _launcher(variant: Variant, index: int) -> Launcher:
    return Launcher(source(variant), "kullback_describe", index, variant.threads)


def run(work: Describe) -> None:
    (input, target), x = work.problem.sides, work.input
    y = x if work.target is None else work.target
    labels = None if work.labels is None else work.labels.contiguous()
    capped = input.softcap != 0, target.softcap != 0
    has_one_temperature = input.temperature == target.temperature
    threads = FEW_THREADS if x.size(1) <= SHORT else THREADS
    variant = Variant(x.dtype, y.dtype, capped, work.target is not None, has_one_temperature, threads)
    index = x.get_device()
    _launcher(variant, index)(
        x.size(0),
        *Arguments(
            x=x.data_ptr(),
            y=y.data_ptr(),
            labels=address(labels),
            numbers=work.numbers.data_ptr(),
            tokens=work.tokens.data_ptr(),
            rows=x.size(0),
            vocab=x.size(1),
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            input_inv_temperature=1 / input.temperature,
            target_inv_temperature=1 / target.temperature,
            input_softcap=input.softcap,
            target_softcap=target.softcap,
        ),
    )
