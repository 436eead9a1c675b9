"""Kernels for rows whose elements stand alone: probabilities and log-probabilities."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kullback.backends.arguments import after_tensors, parameters, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import NO_WORKSPACE, Launcher, workspace
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.printer import print_functor, print_layout, print_macros, ranges, type_macros
from kullback.state import fill
from kullback.work import Rows, Verb

PARAMETERS = parameters(text(HERE / "literal.cuh"), "kullback_literal")
Sizes = table(after_tensors(PARAMETERS, ("row_weight",)))


class Variant(NamedTuple):
    """All that the code of one kernel depends on, but its shape and the architecture."""

    kind: str
    form: str
    target_form: str
    x: torch.dtype
    y: torch.dtype
    weight: torch.dtype
    loss: torch.dtype
    verb: Verb
    known: bool  # whether the rows' states are
    has_outputs: bool  # whether losses, or numbers of rows, are wanted; else gradients alone
    wants: tuple[bool, bool]


def source(variant: Variant, shape: plan.Shape) -> str:
    """The whole CUDA file."""
    forms = variant.form, variant.target_form
    macros: dict[str, int | str] = {
        **type_macros(variant.x, variant.y, variant.weight, variant.loss),
        "VERB": f"VERB_{variant.verb.upper()}",
        "KNOWN": variant.known,
        "WANT_SUM": variant.has_outputs,
        "WANT_INPUT": variant.wants[0],
        "WANT_TARGET": variant.wants[1],
        **ranges(*forms),
        **shape.macros,
    }
    functor = print_functor(variant.kind, *forms, ("safe_", "in_range_"))
    printed = f'#include "cuda/math.cuh"\nnamespace kullback {{\n{print_layout()}{functor}}}\n'
    return print_macros(macros) + inlined("cuda/literal.cuh", {"cuda/functor.cuh": printed})


@functools.cache
@remember_failures
def _launcher(index: int, flat: bool, lanes: int, *fields: Any) -> tuple[Launcher, plan.Shape]:
    """The kernel of a `Variant` of these fields: a call that finds it again makes no record."""
    variant = Variant(*fields)
    shape = plan.shape(lanes, flat, variant.x, variant.y, sum(variant.wants))
    return Launcher(source(variant, shape), "kullback_literal", index), shape


def run(work: Rows) -> None:
    problem, (x, y, weight, _), verb, scale, *others, _ = work
    known, found, loss, total, d_input, d_target, _ = others
    if found is not None and verb == "loss" and problem.formula.finish_is_linear:
        fill(found, d_loss=1)  # the same state for all rows: the kernel writes none
    rows, vocab = x.shape
    flat = _is_flat(work)
    is_known = verb == "gradient" and known is not None
    if weight is not None:
        weight = weight[:1] if flat else weight.contiguous()
    if flat:
        rows, vocab = 1, rows * vocab
    index = x.get_device()
    output = total if loss is None else loss
    launcher, shape = _launcher(
        index,
        flat,
        plan.THREADS if flat else plan.lanes(vocab),
        problem.kind,
        problem.input.form,
        problem.target.form,
        x.dtype,
        y.dtype,
        torch.float64 if weight is None else weight.dtype,
        torch.float32 if output is None else output.dtype,
        verb,
        is_known,
        output is not None or found is not None,
        (d_input is not None, d_target is not None),
    )
    if flat:
        blocks = -(-vocab // (plan.THREADS * shape.width * shape.unroll))
    else:
        blocks = -(-rows * shape.lanes // plan.THREADS)
    space = NO_WORKSPACE if total is None else workspace(index, launcher.blocks)
    addresses = [0 if t is None else t.data_ptr() for t in (x, y, weight, *others[:-1])]
    strides = [0 if t is None else t.stride()[0] for t in (x, y, d_input, d_target)]  # stride(0) takes twice as long
    launcher(
        blocks,
        *addresses,
        *Sizes(
            partial=space.partial,
            ticket=space.ticket,
            rows=rows,
            vocab=vocab,
            x_stride=strides[0],
            y_stride=strides[1],
            d_input_stride=strides[2],
            d_target_stride=strides[3],
            scale=scale,
            parameter=problem.parameter,
        ),
    )


def _is_flat(work: Rows) -> bool:
    """Whether all rows are as one, shared by the grid."""
    formula, operands, weight = work.problem.formula, work.operands, work.operands.row_weight
    if work.found is not None or work.known is not None or not formula.finish_is_linear:
        return False
    if weight is not None and weight.stride(0) != 0:  # a 0-d upstream gradient is expanded over the rows
        return False
    if work.has_outputs and not (work.loss is None and weight is None and formula.finish_is_identity):
        return False
    for tensor in (operands.input, operands.target, work.d_input, work.d_target):  # a generator takes longer
        if tensor is not None and not tensor.is_contiguous():
            return False
    return True
