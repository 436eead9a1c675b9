"""A top-k teacher in plain C: its entries, and what a row is at its ids."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kullback.backends.arguments import address
from kullback.backends.build import remember_failures
from kullback.backends.c.compile import HERE, arguments_of, function, library
from kullback.backends.printer import TYPES, print_macros
from kullback.outcomes import drop_rounding, no_token
from kullback.work import Entries, Gather, Scatter

TOPK, ENTRIES = ((HERE / name).read_text(encoding="utf-8") for name in ("topk.c", "entries.c"))
Arguments, Structure = arguments_of(TOPK)
EntriesArguments, EntriesStructure = arguments_of(ENTRIES)


def source(x: torch.dtype, form: str, capped: bool) -> str:
    """The whole C file of both kernels."""
    macros: dict[str, int | str] = {
        "X": TYPES[x],
        "LOAD_X": f"load_{TYPES[x]}",
        "STORE_X": f"store_{TYPES[x]}",
        "IS_LOGITS": form == "logits",
        "IS_PROBS": form == "probs",
        "IS_CAPPED": capped,
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(x == torch.float64)}",
            library(),
            print_macros(macros),
            TOPK,
        ]
    )


@functools.cache
@remember_failures
def kernel(name: str, x: torch.dtype, form: str, capped: bool) -> Callable[[ctypes.Structure], None]:
    return function(source(x, form, capped), f"kullback_{name}", Structure)


def entries_source(values: torch.dtype, form: str) -> str:
    """The whole C file of `kullback_entries`."""
    macros: dict[str, int | str] = {
        "X": TYPES[values],
        "LOAD_X": f"load_{TYPES[values]}",
        "FROM_LOGITS": form == "logits",
        "FROM_PROBS": form == "probs",
    }
    return "\n".join(
        [
            f"#define REAL_IS_DOUBLE {int(values == torch.float64)}",
            library(),
            print_macros(macros),
            ENTRIES,
        ]
    )


@functools.cache
@remember_failures
def entries_kernel(values: torch.dtype, form: str) -> Callable[[ctypes.Structure], None]:
    return function(entries_source(values, form), "kullback_entries", EntriesStructure)


def entries(work: Entries) -> None:
    of, temperature = work.of, work.problem.target.temperature
    values, indices = work.values.contiguous(), work.indices.long().contiguous()
    skipped = None if work.skipped is None else work.skipped.contiguous()
    wrong = torch.full((), -1, dtype=torch.int64, device="cpu")
    run = entries_kernel(values.dtype, of.form)
    run(
        EntriesStructure(
            *EntriesArguments(
                values=values.data_ptr(),
                indices=indices.data_ptr(),
                skipped=address(skipped),
                ids=work.ids.data_ptr(),
                target=work.target.data_ptr(),
                wrong=wrong.data_ptr(),
                rows=indices.numel() // max(1, indices.size(-1)),
                vocab=of.vocab,
                k=indices.size(-1),
                width=work.target.size(-1),
                temperature=temperature,
                least=torch.finfo(work.target.dtype).eps / 2,
                keeps_tail=int(of.tail == "bucket"),
                normalises=int(of.normalises(temperature)),
                threads=torch.get_num_threads(),
            )
        )
    )
    if wrong >= 0:
        raise no_token(of.vocab, indices.view(-1)[wrong].item())


def gather(work: Gather) -> None:
    _run("gather", work, None, None)
    drop_rounding(work)


def scatter(work: Scatter) -> None:
    _run("scatter", work, work.d_gathered, work.d_input)


def _run(name: str, work: Gather | Scatter, d_gathered: Tensor | None, d_input: Tensor | None) -> None:
    side, x, ids = work.problem.input, work.input, work.ids.contiguous()
    run = kernel(name, x.dtype, side.form, side.form == "logits" and side.softcap != 0)
    run(
        Structure(
            *Arguments(
                x=x.data_ptr(),
                ids=ids.data_ptr(),
                gathered=work.gathered.data_ptr(),
                d_gathered=address(d_gathered),
                d_input=address(d_input),
                rows=x.size(0),
                vocab=x.size(1),
                k=ids.size(1),
                width=work.gathered.size(1),
                x_stride=x.stride(0),
                d_input_stride=0 if d_input is None else d_input.stride(0),
                temperature=side.temperature,
                softcap=side.softcap,
                threads=torch.get_num_threads(),
            )
        )
    )
