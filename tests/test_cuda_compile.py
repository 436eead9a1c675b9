"""Every kernel compiles for every architecture without a GPU: no spilled register, none over its budget.

The budget is what was committed: `python -m tests.test_cuda_compile` writes it anew.
"""

import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from kullback.backends import cuda
from kullback.backends.cuda import logits, plan, support
from kullback.divergences import DIVERGENCES
from kullback.rows import NUMBERS, Problem
from tests import oracle

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
BUDGET = Path(__file__).with_name("registers.json")
PAIRS = [*itertools.product(("probs", "log_probs"), repeat=2)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NONE, INPUT, BOTH = (False, False), (True, False), (True, True)
# what is asked for: (flat, lanes, sum, gradients); the last is one that no smaller variant spills before
MODES = {
    "total": (True, plan.THREADS, True, NONE),
    "total and gradient": (True, plan.THREADS, True, INPUT),
    "rows": (False, plan.THREADS, True, NONE),
    "short rows": (False, 32, True, NONE),
    "single elements": (False, 1, True, NONE),
    "gradients of rows": (False, plan.THREADS, False, BOTH),
    "gradients of short rows": (False, 8, False, BOTH),
    "rows and both gradients": (False, plan.THREADS, True, BOTH),
}


def variant(kind, form, target_form, dtype, mode, target_dtype=None):
    flat, lanes, want_sum, want = MODES[mode]
    y = target_dtype or dtype
    shape = plan.shape(lanes, flat, dtype, y, sum(want))
    loss = torch.promote_types(dtype, torch.float32)
    return cuda.Variant(kind, form, target_form, dtype, y, torch.float64, loss, want_sum, want, shape)


def registers(source, arch):
    log = io.StringIO()
    cuda.compile_cubin(source, arch, ("-v", "-warn-spills", "-Werror"), log)
    return max(map(int, re.findall(r"Used (\d+) registers", log.getvalue())))


def name(arch, kind, form, target_form, dtype, mode, target_dtype=None):
    dtypes = str(dtype)[6:] if target_dtype is None else f"{str(dtype)[6:]}/{str(target_dtype)[6:]}"
    return f"{arch} {kind} {form}/{target_form} {dtypes} {mode}"


def quick():
    """A covering choice: every architecture with every kind and pair, every kind with every dtype and mode."""
    for arch, kind, pair in itertools.product(ARCHITECTURES, DIVERGENCES, PAIRS):
        if pair[0] == pair[1] or arch == "sm_90a":
            yield arch, kind, *pair, torch.float32, "rows and both gradients"
    for kind, dtype, mode in itertools.product(DIVERGENCES, DTYPES, MODES):
        if dtype in (torch.float32, torch.bfloat16) or mode in (
            "total and gradient",
            "rows and both gradients",
        ):
            yield "sm_90a", kind, "probs", "probs", dtype, mode


def everything():
    return itertools.starmap(
        lambda arch, kind, pair, dtype, mode: (arch, kind, *pair, dtype, mode),
        itertools.product(ARCHITECTURES, DIVERGENCES, PAIRS, DTYPES, MODES),
    )


def is_asked_for(case):
    """A flat sum needs a finish that is the identity; the driver never asks for another."""
    _, kind, form, target_form, _, mode = case
    return "total" not in mode or Problem(kind, form, target_form).formula.finish_is_identity


def check(case):
    arch, *rest = case
    used = registers(cuda.source(variant(*rest)), arch)
    budget = json.loads(BUDGET.read_text())
    key = name(*case)
    # what was never measured may use what its launch bounds leave
    assert used <= budget.get(key, 65536 // plan.THREADS // variant(*rest).shape.min_blocks), key


@pytest.mark.parametrize("case", [*filter(is_asked_for, dict.fromkeys(quick()))], ids=lambda c: name(*c))
def test_compiles_within_its_registers(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [*filter(is_asked_for, everything())], ids=lambda c: name(*c))
def test_every_instantiation(case):
    check(case)


# vocabulary, whether rows can stay on chip, whether their states are known, sum, gradients
LOGITS_MODES = {
    "total and gradient": (128256, True, False, True, INPUT),
    "short rows": (1000, False, False, True, NONE),
    "short rows, total and gradient": (1000, False, False, True, INPUT),
    "short rows, both gradients": (1000, False, False, True, BOTH),
    "rows": (8192, True, False, True, NONE),
    "both gradients of streamed rows": (262144, False, False, True, BOTH),
    "gradients of known rows": (128256, False, True, False, BOTH),
    "total and both gradients": (50257, True, False, True, BOTH),
    "capped, total and both gradients": (32000, True, False, True, BOTH),
    "capped short rows": (1000, False, False, True, BOTH),
}
MIXED_PAIRS = [("logits", "probs"), ("log_probs", "logits")]


def logits_variant(kind, form, target_form, dtype, mode, target_dtype=None):
    vocab, fits, known, want_sum, want = LOGITS_MODES[mode]
    capped = ("capped" in mode,) * 2
    problem = Problem(kind, form, target_form, (1.0, 1.0, *map(float, capped), 0.0, *oracle.PARAMETERS[kind].values()))
    y = target_dtype or dtype
    shape = logits.layout(problem, vocab, dtype, y, want, known, fits).shape
    assert shape.resident == fits
    return logits.Variant(
        kind, form, target_form, dtype, y, torch.float64, torch.float32, want_sum, want, capped, shape
    )


def every_logits():
    """Every kind in every mode on sm_90a, in both of the dtypes that differ in code."""
    for kind, mode, dtype in itertools.product(DIVERGENCES, LOGITS_MODES, (torch.bfloat16, torch.float32)):
        yield "sm_90a", kind, "logits", "logits", dtype, mode


def quick_logits():
    """A covering choice: every kind, every mode with and without moments, every architecture."""
    for kind, mode in itertools.product(DIVERGENCES, LOGITS_MODES):
        if kind in ("kl", "jensen_shannon") or mode == "total and gradient" or (kind == "renyi" and "short" in mode):
            yield "sm_90a", kind, "logits", "logits", torch.bfloat16, mode
    for arch, mode in itertools.product(ARCHITECTURES, LOGITS_MODES):
        resident = LOGITS_MODES[mode][1]
        if not resident or arch in ("sm_90a", "sm_100a"):
            yield arch, "jensen_shannon", "logits", "logits", torch.float32, mode
    for pair in MIXED_PAIRS:
        yield "sm_90a", "alpha", *pair, torch.float16, "total and both gradients"
    for dtype, target_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        yield "sm_90a", "skew_kl", "logits", "logits", dtype, "short rows, both gradients", target_dtype
        yield "sm_90a", "renyi", "logits", "logits", dtype, "capped short rows", target_dtype
        yield "sm_90a", "jensen_shannon", "logits", "logits", dtype, "total and gradient", target_dtype
        for kind in ("kl", "renyi"):
            yield "sm_90a", kind, "logits", "logits", dtype, "short rows, total and gradient", target_dtype
    yield "sm_90a", "skew_kl", "logits", "logits", torch.float16, "capped short rows"


@pytest.mark.parametrize("case", [*quick_logits()], ids=lambda c: name(*c))
def test_logits_compile_within_their_registers(case):
    arch, *rest = case
    used = registers(logits.source(logits_variant(*rest)), arch)
    assert used <= json.loads(BUDGET.read_text()).get(name(*case), 168)


@pytest.mark.full
@pytest.mark.parametrize("case", [*every_logits()], ids=lambda c: name(*c))
def test_every_instantiation_for_logits(case):
    test_logits_compile_within_their_registers(case)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mixed_dtypes_and_helpers(arch):
    registers(cuda.source(variant("kl", "probs", "probs", torch.bfloat16, "rows", torch.float32)), arch)
    registers(cuda.source(variant("kl", "probs", "probs", torch.float64, "rows", torch.float16)), arch)
    for dtype, factor in itertools.product(DTYPES, (torch.float32, torch.float64)):
        registers(cuda.scale_source(dtype, factor), arch)
    for dtype in DTYPES:
        registers(support.source(dtype, "logits", False), arch)
        if arch == "sm_90a":
            registers(support.source(dtype, "logits", True), arch)
            registers(support.source(dtype, "log_probs", False), arch)
            registers(support.source(dtype, "probs", False), arch)
    ceiling = f"#define THREADS {plan.THREADS}\n#define UNROLL 4\n" + cuda.text("ceiling.cuh")
    registers(ceiling, arch)


def test_a_spill_is_an_error():
    source = cuda.source(variant("renyi", "probs", "probs", torch.float32, "rows and both gradients"))
    with pytest.raises(cuda.BuildError, match="spill"):
        registers(source.replace("#define MIN_BLOCKS 2", "#define MIN_BLOCKS 8"), "sm_90a")


@pytest.mark.parametrize("both", [False, True], ids=["one gradient", "both gradients"])
@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES[:3], repeat=2)])
@pytest.mark.parametrize(
    "vocab", [1, 7, 2049, 2800, 8192, 19176, 32000, 50257, 128256, 151936, 262144, 400_001, 1 << 20]
)
def test_rows_on_chip_fit(vocab, dtypes, both):
    """The ring holds a row's share, its barriers can tell its turns apart, and the block its memory."""
    x, y = dtypes
    layout = plan.logits(vocab, x, y, both, False, True)
    if not layout.shape.resident:
        assert vocab <= 2048 or vocab * (x.itemsize + y.itemsize) / plan.MAX_CLUSTER > 190 << 10
        return
    held = layout.slots * layout.slot_vectors * layout.shape.width
    assert held * x.itemsize <= layout.shape.to_y
    assert layout.shape.to_y + held * y.itemsize <= layout.mail < layout.barriers < layout.shared
    assert layout.shape.to_y % 128 == layout.mail % 8 == layout.barriers % 8 == 0
    assert layout.slots <= plan.MOST_SLOTS
    assert layout.share * layout.cluster >= vocab // layout.shape.width
    pieces = -(-layout.share // layout.slot_vectors)
    assert pieces <= layout.slots
    assert (layout.shape.groups - 1) * pieces < layout.slots
    assert layout.shared <= plan.SHARED - plan.STATIC_BYTES
    assert layout.shape.threads <= 544
    turns = -(-layout.share // layout.shape.lanes)
    assert turns <= 32  # a thread has a bit for each vector
    last = layout.share - (pieces - 1) * layout.slot_vectors
    assert turns == (pieces - 1) * -(-layout.slot_vectors // layout.shape.lanes) + -(-last // layout.shape.lanes)


def test_slopes_are_kept_where_half_precision_holds_them():
    def keeps(kind, *parameters, dtype=torch.bfloat16):
        problem = Problem(kind, "logits", "logits", (*NUMBERS, *parameters))
        return logits.layout(problem, 128256, dtype, dtype, (True, False), False, True).shape.keeps_slopes

    assert keeps("total_variation")
    assert all(keeps("jensen_shannon", weight) for weight in (0.001, 0.5, 0.999))
    assert all(keeps("skew_kl", alpha) for alpha in (1e-4, 0.1, 0.99))
    assert not any(keeps("skew_kl", alpha) for alpha in (0.0, 1e-7, 1e-5))  # a slope may be -1/alpha
    assert not keeps("jensen_shannon", 0.5, dtype=torch.float16)
    assert not keeps("kl")


def test_lanes_grow_with_the_row():
    lanes = [plan.lanes(vocab) for vocab in (1, 2, 64, 65, 2048, 2049, 262144)]
    assert lanes == [1, 8, 8, 32, 32, plan.THREADS, plan.THREADS]


if __name__ == "__main__":
    cases = [*filter(is_asked_for, dict.fromkeys(quick()))]
    table = {}
    for i, case in enumerate(cases):
        table[name(*case)] = registers(cuda.source(variant(*case[1:])), case[0])
        print(f"\r{i + 1}/{len(cases)}", end="", file=sys.stderr)
    for case in quick_logits():
        table[name(*case)] = registers(logits.source(logits_variant(*case[1:])), case[0])
    BUDGET.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
