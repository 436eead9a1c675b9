"""A top-k teacher on a GPU: its entries, and kernels that read a row once for what it is at its ids."""

from __future__ import annotations

import functools

import torch

from kullback.backends.arguments import address, parameters, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.printer import print_macros, type_macros
from kullback.dtypes import kept_dtype
from kullback.work import Entries, Gather, Scatter

THREADS = 256  # of a block
UNROLL = 4  # vectors in flight a thread
ENTRY_THREADS = 128  # of a row's entries
MAX_ENTRIES = 1024  # of a row, since each looks at all of them where one is repeated
MAX_VOCAB = 63 << 13  # a bit of shared memory for each token: 63 KiB, which every architecture has

GatherArguments, ScatterArguments = (
    table(parameters(text(HERE / "topk.cuh"), kernel)) for kernel in ("kullback_gather", "kullback_scatter")
)
EntriesArguments = table(parameters(text(HERE / "entries.cuh"), "kullback_entries"))


def why_not(work: Entries | Gather | Scatter) -> str | None:
    """Why these kernels cannot do the work, or None."""
    vocab = work.of.vocab if isinstance(work, Entries) else work.input.size(1)
    if vocab > MAX_VOCAB:
        return f"top-k kernels have a bit for each of {MAX_VOCAB} tokens at most; got {vocab}"
    if isinstance(work, Entries) and work.indices.size(-1) > MAX_ENTRIES:
        return f"the kernel takes {MAX_ENTRIES} entries of a row at most; got {work.indices.size(-1)}"
    if isinstance(work, Gather) and work.target is not None and work.target.dtype != kept_dtype(work.input.dtype):
        return "the teacher's entries and the student's row differ in dtype"
    return None


def source(x: torch.dtype, form: str, capped: bool, has_mean: bool = False) -> str:
    """The whole CUDA file of `gather` and `scatter`."""
    macros: dict[str, int | str] = {
        **type_macros(x, x),
        "IS_LOGITS": form == "logits",
        "IS_PROBS": form == "probs",
        "IS_CAPPED": capped,
        "HAS_MEAN": has_mean,
        "THREADS": THREADS,
        "WIDTH": plan.width(x, x),
        "UNROLL": UNROLL,
    }
    return print_macros(macros) + inlined("cuda/topk.cuh", {})


@functools.cache
@remember_failures
def _launcher(name: str, x: torch.dtype, form: str, capped: bool, has_mean: bool, index: int, shared: int) -> Launcher:
    return Launcher(source(x, form, capped, has_mean), f"kullback_{name}", index, THREADS, shared=shared)


def _prepared(name: str, work: Gather | Scatter, shared: int) -> Launcher:
    side, x = work.problem.input, work.input
    capped = side.form == "logits" and side.softcap != 0
    return _launcher(name, x.dtype, side.form, capped, work.others > 1, x.device.index, shared)


def gather(work: Gather) -> None:
    side, x, ids = work.problem.input, work.input, work.ids.contiguous()
    if x.size(0):
        _prepared("gather", work, _marks(x.size(1)))(
            x.size(0),
            *GatherArguments(
                x=x.data_ptr(),
                ids=ids.data_ptr(),
                gathered=work.gathered.data_ptr(),
                target=address(work.target),
                rows=x.size(0),
                vocab=x.size(1),
                k=ids.size(1),
                width=work.gathered.size(1),
                x_stride=x.stride(0),
                inv_temperature=1 / side.temperature,
                softcap=side.softcap,
                negligible=work.negligible,
                is_tempered=int(work.problem.target.temperature != 1),
            ),
        )


def scatter(work: Scatter) -> None:
    side, x, ids = work.problem.input, work.input, work.ids.contiguous()
    if x.size(0):
        _prepared("scatter", work, 0)(
            x.size(0),
            *ScatterArguments(
                x=x.data_ptr(),
                ids=ids.data_ptr(),
                gathered=work.gathered.data_ptr(),
                d_gathered=work.d_gathered.data_ptr(),
                d_input=work.d_input.data_ptr(),
                rows=x.size(0),
                vocab=x.size(1),
                k=ids.size(1),
                width=work.gathered.size(1),
                x_stride=x.stride(0),
                d_input_stride=work.d_input.stride(0),
                inv_temperature=1 / side.temperature,
                softcap=side.softcap,
            ),
        )


def _marks(vocab: int) -> int:
    """Bytes of a bit for each token; and of a few more, by which a vector's bits may be shifted."""
    return (vocab + 31) // 32 * 4 + 4


def entries_source(values: torch.dtype, form: str) -> str:
    """The whole CUDA file of `entries`."""
    macros: dict[str, int | str] = {
        **type_macros(values, values),
        "FROM_LOGITS": form == "logits",
        "FROM_PROBS": form == "probs",
        "IS_LOGITS": 0,
        "THREADS": ENTRY_THREADS,
        "WIDTH": 1,
    }
    return print_macros(macros) + inlined("cuda/entries.cuh", {})


@functools.cache
@remember_failures
def _entries_launcher(values: torch.dtype, form: str, index: int, shared: int) -> Launcher:
    return Launcher(entries_source(values, form), "kullback_entries", index, ENTRY_THREADS, shared=shared)


def entries(work: Entries) -> None:
    of, temperature = work.of, work.problem.target.temperature
    values, indices = work.values.contiguous(), work.indices.long().contiguous()
    skipped = None if work.skipped is None else work.skipped.contiguous()
    rows, k = indices.numel() // max(1, indices.size(-1)), indices.size(-1)
    if rows:
        launcher = _entries_launcher(values.dtype, of.form, values.device.index, _marks(of.vocab))
        launcher(
            rows,
            *EntriesArguments(
                entries=values.data_ptr(),
                indices=indices.data_ptr(),
                skipped=address(skipped),
                distinct=work.ids.data_ptr(),
                target=work.target.data_ptr(),
                rows=rows,
                vocab=of.vocab,
                k=k,
                width=work.target.size(-1),
                temperature=temperature,
                keeps_tail=int(of.tail == "bucket"),
                normalises=int(of.normalises(temperature)),
                least=torch.finfo(work.target.dtype).eps / 2,
            ),
        )
