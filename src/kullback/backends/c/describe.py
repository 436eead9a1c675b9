"""Every figure of rows of logits, in plain C: a row is read from memory once."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from kullback.backends.arguments import address
from kullback.backends.build import remember_failures
from kullback.backends.c.compile import HERE, arguments_of, function, library, softmaxes
from kullback.backends.printer import TYPES, print_macros, print_near_terms, print_order, print_terms
from kullback.work import Describe

DESCRIBE = (HERE / "describe.c").read_text(encoding="utf-8")
Arguments, Structure = arguments_of(DESCRIBE)


def source(x: torch.dtype, y: torch.dtype, capped: tuple[bool, bool], has_target: bool) -> str:
    """The whole C file."""
    double = torch.float64 in (x, y)
    macros: dict[str, int | str] = {
        "X": TYPES[x],
        "Y": TYPES[y],
        "LOAD_X": f"load_{TYPES[x]}",
        "LOAD_Y": f"load_{TYPES[y]}",
        "LOADS_X": f"load_{TYPES[x]}s",
        "LOADS_Y": f"load_{TYPES[y]}s",
        "INPUT_IS_CAPPED": capped[0],
        "TARGET_IS_CAPPED": capped[1],
        "HAS_TARGET": has_target,
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(double)}",
            library(),
            print_macros(macros),
            (HERE / ("close.h" if double else "fast.h")).read_text(encoding="utf-8"),
            print_terms(("safe_", "close_" if double else "fast_")),
            "" if double else print_near_terms() + (HERE / "near.h").read_text(encoding="utf-8"),
            print_order(),
            softmaxes(True, has_target, "tokens.h"),
            DESCRIBE,
        ]
    )


@functools.cache
@remember_failures
def kernel(
    x: torch.dtype, y: torch.dtype, capped: tuple[bool, bool], has_target: bool
) -> Callable[[ctypes.Structure], None]:
    return function(source(x, y, capped, has_target), "kullback_describe", Structure)


def run(work: Describe) -> None:
    (input, target), x = work.problem.sides, work.input
    y = x if work.target is None else work.target
    labels = None if work.labels is None else work.labels.contiguous()
    describe = kernel(x.dtype, y.dtype, (input.softcap != 0, target.softcap != 0), work.target is not None)
    describe(
        Structure(
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
                input_temperature=input.temperature,
                target_temperature=target.temperature,
                input_softcap=input.softcap,
                target_softcap=target.softcap,
                threads=torch.get_num_threads(),
            )
        )
    )
