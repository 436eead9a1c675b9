"""Kernels for rows of which a side is logits: normalised, summed and differentiated while they are on chip."""

from __future__ import annotations

import functools
import itertools
import re
import struct
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kullback.backends.arguments import address, after_tensors, print_entry, struct_fields, table
from kullback.backends.build import remember_failures
from kullback.backends.cuda import device, plan
from kullback.backends.cuda.launch import NO_WORKSPACE, Launcher, workspace
from kullback.backends.cuda.logits.series import RADIUS, TERMS, series
from kullback.backends.cuda.source import HERE, inlined, text
from kullback.backends.lowering import slopes_of
from kullback.backends.near import (
    FLOAT_RADIUS,
    MOST_FLOAT_TERMS,
    MOST_TERMS,
    NARROW,
    WIDE,
    Near,
    NearShape,
    OverRoot,
    OverRootShape,
    Reach,
    near,
    over_root,
)
from kullback.backends.printer import TYPES, print_functor, print_layout, print_macros, print_slopes, type_macros
from kullback.divergences import DIVERGENCES
from kullback.problem import Problem, element_at, formula, has_corner, moments_of
from kullback.work import Rows, Verb

SIZES = {  # of arrays among the arguments
    "SERIES_TERMS": TERMS,
    "MOST_TERMS": MOST_TERMS,
    "MOST_FINE_TERMS": MOST_FLOAT_TERMS,
}
ARGUMENTS = re.sub(r"\b[A-Z_]+_TERMS\b", lambda name: str(SIZES[name[0]]), text(HERE / "logits" / "arguments.cuh"))
OPERANDS, SETUP, RANKS = (struct_fields(ARGUMENTS, name) for name in ("Operands", "Setup", "Ranks"))
Sizes, Setup = table(after_tensors(OPERANDS)), table(SETUP)


SUMMARY_DOUBLES = 4  # of what is kept of a row until all have been read
SLOPE_FACTOR = 64.0  # of slopes that are cached as float16, so that those of close rows are not too short


Dtypes: TypeAlias = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]  # of input, target and their gradients


class Variant(NamedTuple):
    """All that the code of one kernel depends on, but its shape and the architecture."""

    kind: str
    form: str
    target_form: str
    x: torch.dtype
    y: torch.dtype
    dx: torch.dtype  # of the gradients: that of x, or of 16 bits
    dy: torch.dtype
    weight: torch.dtype
    loss: torch.dtype
    verb: Verb
    known: bool  # whether the rows' states are
    has_outputs: bool  # whether losses, or numbers of rows, are wanted; else gradients alone
    keeps_numbers: bool  # whether the latter are
    writes_losses: bool  # whether each row's loss is
    wants: tuple[bool, bool]
    capped: tuple[bool, bool]
    auxiliary: bool = False  # whether a row's loss is more than its divergence
    smoothing: bool = False  # whether its label is smoothed
    figures: bool = False  # whether the input's log-sum-exps and entropies are wanted
    has_peers: bool = False  # whether each rank has a slice of the rows, and exchanges numbers in the kernel
    near: NearShape = NearShape()  # the polynomials of rows that are near
    narrow: NearShape = NearShape()  # and of those of which few tokens are far out
    fine: OverRootShape = OverRootShape()  # and where gradients have float32


def source(variant: Variant, shape: plan.LogitsShape) -> str:
    """The whole CUDA file of a kernel for logits."""
    kind, forms = DIVERGENCES[variant.kind], (variant.form, variant.target_form)
    factor, least = kind.reverse_kl_factor, kind.least_mean_slope
    macros: dict[str, int | str] = {
        **type_macros(variant.x, variant.y, variant.weight, variant.loss),
        **SIZES,
        "DX": TYPES[variant.dx],
        "DY": TYPES[variant.dy],
        "INPUT_IS_LOGITS": forms[0] == "logits",
        "TARGET_IS_LOGITS": forms[1] == "logits",
        "INPUT_IS_CAPPED": variant.capped[0],
        "TARGET_IS_CAPPED": variant.capped[1],
        "HAS_AUXILIARY": variant.auxiliary,
        "HAS_SMOOTHING": variant.smoothing,
        "WANT_FIGURES": variant.figures,
        "HAS_PEERS": variant.has_peers,
        "FITS_SERIES": fits_series(variant.kind, *forms),
        "SERIES_RADIUS": f"{RADIUS}f",
        "HAS_CORNER": has_corner(variant.kind),
        "NEAR_TERMS": variant.near.terms,
        "NEAR_TERM_STEP": variant.near.term_step,
        "NEAR_SLOPE_TERMS": variant.near.slope_terms,
        "NEAR_SLOPE_STEP": variant.near.slope_step,
        "NEAR_RADIUS": f"{WIDE.radius}f",
        "NARROW_TERMS": variant.narrow.terms,
        "NARROW_SLOPE_TERMS": variant.narrow.slope_terms,
        "NARROW_RADIUS": f"{NARROW.radius}f",
        "SLOPE_FACTOR": f"{SLOPE_FACTOR}f",
        "FINE_TERMS": variant.fine.terms,
        "FINE_TERM_STEP": variant.fine.term_step,
        "FINE_DIFFERENCES": variant.fine.differences,
        "FINE_DIFFERENCE_STEP": variant.fine.difference_step,
        "FINE_RADIUS": f"{FLOAT_RADIUS}f",
        "CACHES_DERIVATIVES": caches_derivatives(variant),
        "HAS_REVERSE_KL_FACTOR": factor is not None,
        "REVERSE_KL_FACTOR": f"{factor or 0.0}f",
        "LEAST_MEAN_SLOPE": f"{least}f" if abs(least) < float("inf") else "(-REAL_INFINITY)",
        "VERB": f"VERB_{variant.verb.upper()}",
        "KNOWN": variant.known,
        "WANT_SUM": variant.has_outputs,
        "KEEPS_NUMBERS": variant.keeps_numbers,
        "WRITES_LOSSES": variant.writes_losses,
        "SUMMARY_DOUBLES": SUMMARY_DOUBLES,
        "WANT_INPUT": variant.wants[0],
        "WANT_TARGET": variant.wants[1],
        **shape.macros,
    }
    both = forms == ("logits", "logits")
    functor = print_functor(variant.kind, *forms, ("safe_", "fast_", "stable_") if both else ("safe_",))
    slopes = print_slopes(variant.kind) if both else ""
    layout = print_layout(formula(variant.kind, *forms).has_tilted_lse)
    printed = f'#include "cuda/logits/fast_math.cuh"\nnamespace kullback {{\n{layout}{functor}{slopes}}}\n'
    bounds = f"__launch_bounds__({shape.threads}, {shape.min_blocks})"
    structs = {"Operands": OPERANDS, "Setup": SETUP} | ({"Ranks": RANKS} if variant.has_peers else {})
    entry = print_entry("kullback_logits", bounds, structs)
    return print_macros(macros) + inlined("cuda/logits/kernel.cuh", {"cuda/functor.cuh": printed}) + entry


def caches_derivatives(variant: Variant) -> bool:
    """Whether a mass and a derivative fit in place of two logits, where one gradient follows from them."""
    is_loss = variant.verb == "loss" and not variant.known and not variant.smoothing
    return is_loss and variant.wants == (True, False) and variant.x == variant.y == variant.dx == torch.float32


def fits_series(kind: str, form: str, target_form: str) -> bool:
    """Whether the kind is a series near p = q, for its default parameter; other parameters may lie too far out."""
    return form == target_form == "logits" and series(kind, DIVERGENCES[kind].default) is not None


def why_not(work: Rows) -> str | None:
    """Why these kernels cannot take the rows, or None."""
    x, y = work.operands[:2]
    if x.dtype is torch.float64 or y.dtype is torch.float64:
        return "logits in float64 have no CUDA kernel"
    if x.numel() > 1 << 30 and max(x.shape) > 1 << 30:
        return f"{list(x.shape)} has a side longer than 2**30"
    return None


def run(work: Rows) -> None:
    problem, (x, y, *of_rows), verb, scale, *others, peers = work
    known, found, loss, total, d_input, d_target, figures = others
    rows, vocab = x.shape
    index = x.get_device()
    weight, labels = (None if t is None else t.contiguous() for t in of_rows)
    output = total if loss is None else loss
    addresses = [0 if t is None else t.data_ptr() for t in (x, y, weight, labels, *others)]
    dtypes, strides, is_in_phase = _laid_out(x, y, d_input, d_target)
    has_known = known is not None
    launcher, setup, warps = _prepared(
        index,
        vocab,
        problem,
        dtypes,
        torch.float64 if weight is None else weight.dtype,
        torch.float32 if output is None else output.dtype,
        verb,
        has_known,
        output is not None or found is not None,
        found is not None,
        loss is not None,
        (d_input is not None, d_target is not None),
        figures is not None,
        peers is not None,
        plan.NO_COPIES if not is_in_phase else plan.NO_CHIP if has_known else device.chip(index),
    )
    space = NO_WORKSPACE if total is None else workspace(index, launcher.blocks * plan.MAX_CLUSTER)
    exponents = None if figures is None else x.new_empty(rows * warps, dtype=torch.float32)
    summaries = None if figures is None else x.new_empty(rows * SUMMARY_DOUBLES, dtype=torch.float64)
    launcher(
        rows,
        *addresses,
        *Sizes(
            exponents=address(exponents),
            summaries=address(summaries),
            partial=space.partial,
            ticket=space.ticket,
            rows=rows,
            vocab=vocab,
            x_stride=strides[0],
            y_stride=strides[1],
            d_input_stride=strides[2],
            d_target_stride=strides[3],
            scale=scale,
        ),
        *setup,
        *(() if peers is None else peers),
    )


def why_not_on_chip(work: Rows) -> str | None:
    """Why a launch cannot read the rows once, and meanwhile exchange numbers of them with other ranks, or None."""
    x = work.input
    dtypes, strides, is_in_phase = _laid_out(x, work.target, work.d_input, work.d_target)
    if not is_in_phase:
        return f"rows of input, target and gradients must be alike in memory; got strides {strides} (0: no gradient)"
    placed = layout(work.problem, x.size(1), *dtypes[:2], work.wants, False, device.chip(x.get_device()), True)
    if placed.shape.resident:
        return None
    return f"{x.size(1)} tokens are too few or too many to stay on chip"


@functools.lru_cache(maxsize=1024)
@remember_failures
def _prepared(
    index: int,
    vocab: int,
    problem: Problem,
    dtypes: Dtypes,
    weight: torch.dtype,
    loss: torch.dtype,
    verb: Verb,
    has_known: bool,
    has_outputs: bool,
    keeps_numbers: bool,
    writes_losses: bool,
    wants: tuple[bool, bool],
    has_figures: bool,
    has_peers: bool,
    chip: plan.Chip,
) -> tuple[Launcher, tuple[int | float, ...], int]:
    """The kernel, those of its arguments that all calls of such tensors share, and how many warps share a row."""
    place = functools.partial(layout, problem, vocab, *dtypes[:2], wants, has_known)
    placed = place(chip, has_peers, has_figures)
    if placed.cluster > plan.PORTABLE_CLUSTER:
        placed = place(device.admitted(index, chip), has_peers, has_figures)
    capped = problem.input.softcap != 0, problem.target.softcap != 0
    kind, form, target_form = problem.kind, problem.input.form, problem.target.form
    known = has_known and verb == "gradient"
    has_auxiliary = problem.has_auxiliary and verb in ("loss", "gradient")
    # The parameter as kernels hold it: 1 - alpha of renyi is divided by again.
    (parameter,) = struct.unpack("<f", struct.pack("<f", problem.parameter))
    is_coarse = has_16_bits(dtypes, wants, keeps_numbers)
    wide, narrow = (near_of(problem, parameter, verb, is_coarse, reach) for reach in (WIDE, NARROW))
    fine = fine_of(problem, parameter, is_coarse)
    variant = Variant(
        kind,
        form,
        target_form,
        *dtypes,
        weight,
        loss,
        verb,
        known,
        has_outputs,
        keeps_numbers,
        writes_losses,
        wants,
        capped,
        has_auxiliary,
        has_auxiliary and problem.weights.smoothing != 0,
        has_figures,
        has_peers,
        NearShape() if wide is None else wide.shape,
        NearShape() if narrow is None else narrow.shape,
        OverRootShape() if fine is None else fine.shape,
    )
    setup = Setup(
        input_inv_temperature=1 / problem.input.temperature,
        target_inv_temperature=1 / problem.target.temperature,
        input_softcap=problem.input.softcap,
        target_softcap=problem.target.softcap,
        divergence_weight=problem.weights.divergence,
        label_weight=problem.weights.label,
        z_weight=problem.weights.z,
        label_smoothing=problem.weights.smoothing,
        parameter=problem.parameter,
        **_packed("series", TERMS, series(kind, parameter) if problem.is_normalised else None),
        **_packed("near", MOST_TERMS, _as_cached(kind, wide)),
        **_packed("narrow", MOST_TERMS, _as_cached(kind, narrow)),
        **_packed("fine", MOST_FLOAT_TERMS, fine),
        stages=placed.stages,
        stage_vectors=placed.stage_vectors,
        tile_vectors=placed.tile_vectors,
        slice_vectors=placed.slice_vectors,
        row_tiles=placed.row_tiles,
        exchange_offset=placed.exchange_offset,
        header_offset=placed.header_offset,
    )
    return _launcher(index, placed, variant), setup, placed.cluster * max(1, placed.shape.threads_per_row // 32)


def has_16_bits(dtypes: Dtypes, wants: tuple[bool, bool], keeps_numbers: bool) -> bool:
    """Whether logits have, or all gradients, now or later: exponents may then be rounded by more."""
    gradients = [dtype for dtype, is_wanted in zip(dtypes[2:], wants, strict=True) if is_wanted]
    return all(t.itemsize == 2 for t in dtypes[:2]) or (not keeps_numbers and all(t.itemsize == 2 for t in gradients))


def near_of(problem: Problem, parameter: float, verb: Verb, is_coarse: bool, reach: Reach) -> Near | None:
    """Of losses whose sums follow from slopes, or of a tilted distribution; logits or gradients have 16 bits."""
    moments = moments_of(problem.kind)
    serves = slopes_of(problem.kind) is not None if moments is None else is_tilted(problem.kind)
    if not (is_coarse and serves and problem.is_normalised and verb == "loss"):
        return None
    wide = near(problem.kind, parameter)
    if reach == WIDE or wide is None:
        return wide
    return None if is_tilted(problem.kind) else near(problem.kind, parameter, reach)


def fine_of(problem: Problem, parameter: float, is_coarse: bool) -> OverRoot | None:
    """Of logits whose gradients show what shorter polynomials are off by."""
    has_logits = problem.input.form == problem.target.form == "logits"
    serves = has_logits and problem.is_normalised and not is_coarse
    return over_root(problem.kind, parameter) if serves else None


def _as_cached(kind: str, polynomials: Near | None) -> Near | None:
    """With the slope as it is cached; one of a kind with a corner is a sign."""
    if polynomials is None or has_corner(kind):
        return polynomials
    return polynomials._replace(slope=tuple(SLOPE_FACTOR * factor for factor in polynomials.slope))


def _packed(name: str, count: int, factors: tuple[tuple[float, ...], tuple[float, ...]] | None) -> dict[str, int]:
    """Two floats in an integer each: kernels read halves where they lie, and numbers converted would take registers."""
    pairs = itertools.zip_longest(*(factors or ((), ())), fillvalue=0.0)
    found = [struct.unpack("<q", struct.pack("<ff", *pair))[0] for pair in pairs]
    return {f"{name}_{i}": value for i, value in enumerate([*found, *[0] * (count - len(found))])}


def layout(
    problem: Problem,
    vocab: int,
    x: torch.dtype,
    y: torch.dtype,
    wants: tuple[bool, bool],
    has_known: bool,
    chip: plan.Chip,
    has_peers: bool = False,
    has_figures: bool = False,
) -> plan.Layout:
    """As of plan.logits, which knows no formula."""
    # A mass is cached as x, and a float16 gradient has more digits; a slope in float16, or as y in float32. Nothing can
    # be taken off their product, since a softcap's derivative is in the mass.
    is_kept = (x == torch.bfloat16 and y.itemsize == 2) or x == y == torch.float32
    caches = is_kept and wants == (True, False) and not problem.weights.smoothing and caches_slopes(problem)
    capped = problem.input.softcap != 0 or problem.target.softcap != 0
    wanted = plan.Wanted(
        vocab,
        x,
        y,
        both=all(wants),
        has_normalisers=has_known,
        caches_slopes=caches,
        labelled=problem.has_auxiliary,
        capped=capped,
        waits=has_peers,
        goes_one_way=has_corner(problem.kind) or sums_are_means(problem.kind),
        takes_registers=problem.weights.smoothing != 0
        or (is_tilted(problem.kind) and (problem.has_auxiliary or has_figures or capped)),
    )
    return plan.logits(wanted, chip)


def is_tilted(kind: str) -> bool:
    """Whether losses follow from the log-sum-exp of a tilted distribution."""
    return formula(kind, "logits", "logits").has_tilted_lse


def sums_are_means(kind: str) -> bool:
    """Whether all sums of a row follow from means of its log-ratios, of which few are too small for that."""
    moments = moments_of(kind)
    return moments is not None and moments.exponent is None


def caches_slopes(problem: Problem) -> bool:
    """Whether float16 holds a row's slopes: their mean is predicted, or they are signs; and none is too large."""
    slopes = slopes_of(problem.kind) if problem.is_normalised and not problem.has_moments else None
    if slopes is None:
        return False
    is_sign = getattr(slopes.rest_q, "op", None) == "step"
    if not is_sign and problem.divergence.reverse_kl_factor is None:
        return False
    # Beyond e^±30 a slope grows with the log-ratio at most.
    element = element_at(
        problem.kind, problem.parameter, torch.tensor([-30.0, 30.0], dtype=torch.float64, device="cpu")
    )
    masses = torch.tensor([15.0, -15.0], dtype=torch.float64, device="cpu").exp()
    longest = torch.finfo(torch.float16).max / SLOPE_FACTOR
    return float((element.d_log_q / masses).abs().max()) < longest


@functools.cache
def _launcher(index: int, placed: plan.Layout, variant: Variant) -> Launcher:
    shape = placed.shape
    return Launcher(source(variant, shape), "kullback_logits", index, shape.threads, placed.cluster, placed.shared)


def _laid_out(x: Tensor, y: Tensor, d_x: Tensor | None, d_y: Tensor | None) -> tuple[Dtypes, list[int], bool]:
    """Dtypes, the strides of rows (0: no tensor), and whether rows are in phase."""
    tensors = (x, y, d_x, d_y)
    dtypes = x.dtype, y.dtype, (x if d_x is None else d_x).dtype, (y if d_y is None else d_y).dtype
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    strides = [0 if t is None else t.stride()[0] for t in tensors]  # stride(0) takes twice as long
    return dtypes, strides, _in_phase(addresses, strides, x.size(0), dtypes)


def _in_phase(addresses: list[int], strides: list[int], rows: int, dtypes: Dtypes) -> bool:
    """Whether in every row vectors of input, target and their gradients (0: none) begin at the same element."""
    x, y, d_x, d_y = addresses
    x_step, y_step, d_x_step, d_y_step = strides
    if (x | y | d_x | d_y) % 64 == 0:  # as usual: the first row begins with a vector, whatever its width,
        if (x_step | y_step | d_x_step | d_y_step) % 8 == 0:  # and so do all rows; or they go on alike
            return True
        if x_step == y_step and (not d_x or d_x_step == x_step) and (not d_y or d_y_step == x_step):
            return True
    width = plan.width(*dtypes[:2])
    first, step = x // dtypes[0].itemsize % width, x_step % width
    for start, stride, dtype in zip((x, y, d_x, d_y), strides, dtypes, strict=True):
        element, rest = divmod(start, dtype.itemsize)
        if start and (rest or element % width != first or (rows > 1 and stride % width != step)):
            return False
    return True
