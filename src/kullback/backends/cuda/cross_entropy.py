"""Labels alone on a GPU: rows that are compared with themselves, each read once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kullback.backends.arguments import address, print_entry, struct_fields, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import device, plan
from kullback.backends.cuda.launch import NO_WORKSPACE, Launcher, workspace
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.printer import print_macros, type_macros
from kullback.problem import IGNORED
from kullback.state import Mode, fill
from kullback.work import Rows

OPERANDS, SETUP = (struct_fields(text(HERE / "cross_entropy.cuh"), name) for name in ("Operands", "Setup"))
Arguments = table([*OPERANDS, *SETUP])


class Variant(NamedTuple):
    """All that the code of a kernel depends on, but its threads and the architecture."""

    x: torch.dtype
    weight: torch.dtype
    loss: torch.dtype
    wants_input: bool = True
    capped: bool = False
    smoothing: bool = False


def takes(work: Rows) -> bool:
    """Whether this kernel is for the rows: their divergence is 0, and so are its derivatives."""
    problem, x, y = work.problem, work.input, work.target
    return (
        problem.has_auxiliary
        and x.data_ptr() == y.data_ptr()
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and work.labels is not None
        and work.verb in ("loss", "gradient")
        and work.d_target is None
        and work.figures is None
        and (work.d_input is None or work.d_input.dtype == x.dtype)
        and problem.input == problem.target
        and not problem.shard.group  # else a row is more than this rank's slice
        and work.peers is None
        and problem.formula.finish_is_linear
        and has_place(x)
    )


def has_place(x: torch.Tensor) -> bool:
    """Whether a device's chips hold such rows."""
    chip = device.chip(x.get_device())
    return all(plan.slices(x.size(-1), x.dtype, chip, gradient) is not None for gradient in (False, True))


def source(variant: Variant, placed: plan.Slices) -> str:
    """The whole CUDA file."""
    macros: dict[str, int | str] = {
        **type_macros(variant.x, variant.x, variant.weight, variant.loss),
        "IS_LOGITS": 1,
        "IS_PROBS": 0,
        "IS_CAPPED": variant.capped,
        "HAS_SMOOTHING": variant.smoothing,
        "WANT_SUM": 1,
        "WANT_INPUT": variant.wants_input,
        "WANT_TARGET": 0,
        "THREADS": placed.threads,
        "WIDTH": plan.width(variant.x, variant.x),
        "IGNORED": f"({IGNORED})",
        "EXCHANGE_SLOTS": plan.EXCHANGE_SLOTS,
    }
    bounds = f"__launch_bounds__({placed.threads}, {placed.blocks})"
    entry = print_entry("kullback_cross_entropy", bounds, {"Operands": OPERANDS, "Setup": SETUP})
    return print_macros(macros) + inlined("cuda/cross_entropy.cuh", {}) + entry


@functools.cache
@remember_failures
def _launcher(variant: Variant, placed: plan.Slices, index: int) -> Launcher:
    code = source(variant, placed)
    return Launcher(code, "kullback_cross_entropy", index, placed.threads, placed.cluster, placed.shared)


def run(work: Rows) -> None:
    x, side, weights = work.input, work.problem.input, work.problem.weights
    index = x.get_device()
    row_weight, labels = (None if t is None else t.contiguous() for t in work.operands.of_rows)
    output = work.total if work.loss is None else work.loss
    weight_dtype = torch.float64 if row_weight is None else row_weight.dtype
    loss_dtype = torch.float32 if output is None else output.dtype
    if work.found is not None:  # of a row and itself; the kernel adds log-sum-exps
        fill(work.found, d_loss=1, mode=Mode.SAFE)
    placed = plan.slices(x.size(1), x.dtype, device.chip(index), work.d_input is not None)
    assert placed is not None
    flags = work.d_input is not None, side.softcap != 0, weights.smoothing != 0
    launcher = _launcher(Variant(x.dtype, weight_dtype, loss_dtype, *flags), placed, index)
    space = NO_WORKSPACE if work.total is None else workspace(index, launcher.blocks * placed.cluster)
    launcher(
        x.size(0),
        *Arguments(
            x=x.data_ptr(),
            row_weight=address(row_weight),
            labels=address(labels),
            found=address(work.found),
            loss=address(work.loss),
            total=address(work.total),
            d_input=address(work.d_input),
            partial=space.partial,
            ticket=space.ticket,
            rows=x.size(0),
            vocab=x.size(1),
            x_stride=x.stride(0),
            d_input_stride=0 if work.d_input is None else work.d_input.stride(0),
            scale=work.scale,
            inv_temperature=1 / side.temperature,
            softcap=side.softcap,
            label_weight=weights.label,
            z_weight=weights.z,
            label_smoothing=weights.smoothing,
            slice_vectors=placed.vectors,
            tile_vectors=placed.tile_vectors,
            tiles=placed.tiles,
            stages=placed.stages,
        ),
    )
