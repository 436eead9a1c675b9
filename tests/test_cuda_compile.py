"""Every kernel compiles for every architecture without a GPU: no spilled register, none over its budget.

Of each kernel its registers and a digest of its source are recorded. What a compiler makes of a source does not change.
So `make test` compiles a sample, and what differs from its record, which `python -m tests.test_cuda_compile` mends;
`make test-full` compiles all.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kullback.backends.build import BuildError
from kullback.backends.cuda import cross_entropy, describe, device, labels, literal, logits, plan, scale, topk
from kullback.backends.cuda.launch import compiled
from kullback.backends.cuda.source import HERE, inlined
from kullback.backends.near import NARROW, WIDE, NearShape, OverRootShape
from kullback.backends.printer import (
    print_functor,
    print_layout,
    print_near_terms,
    print_order,
    print_slopes,
    print_terms,
)
from kullback.formula import TENSOR
from kullback.problem import Problem, Side, Weights
from kullback.work import Verb
from tests import kinds
from tests.kinds import FEW, KINDS

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a")
CHIPS = {"sm_90a": plan.HOPPER, "sm_100a": plan.BLACKWELL, "sm_120a": plan.SMALL_BLACKWELL}
RECORD = Path(__file__).with_name("registers.json")
PAIRS = [*itertools.product(("probs", "log_probs"), repeat=2)]
MIXED_PAIRS = [("logits", "probs"), ("log_probs", "logits")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NONE, INPUT, BOTH = (False, False), (True, False), (True, True)


class Literal(NamedTuple):
    """What is asked of rows whose elements stand alone."""

    flat: bool
    lanes: int
    wants: tuple[bool, bool]
    verb: Verb = "loss"
    known: bool = False


class Logits(NamedTuple):
    """What is asked of rows of logits."""

    vocab: int
    fits: bool  # whether rows stay on chip
    wants: tuple[bool, bool]
    verb: Verb = "loss"
    known: bool = False
    capped: bool = False
    gradients: tuple[torch.dtype, torch.dtype] | None = None  # their dtypes, where these are not the tensors'
    auxiliary: bool = False  # whether a row's loss is more than its divergence
    smoothing: bool = False  # whether its label is smoothed
    figures: bool = False  # whether its log-sum-exp and entropy are wanted
    peers: bool = False  # whether each rank has a slice of the rows
    keeps_states: bool = False  # whether gradients are found later
    writes_losses: bool = False  # whether each row's loss is wanted, and no gradient
    in_phase: bool = True  # whether the tensors' rows have vectors at the same elements


LITERAL = {
    "total": Literal(True, plan.THREADS, NONE),
    "total and gradient": Literal(True, plan.THREADS, INPUT),
    "rows": Literal(False, plan.THREADS, NONE),
    "short rows": Literal(False, 32, NONE),
    "single elements": Literal(False, 1, NONE),
    "gradients of rows": Literal(False, plan.THREADS, BOTH, "gradient"),
    "gradients of short rows": Literal(False, 8, BOTH, "gradient"),
    "rows and both gradients": Literal(False, plan.THREADS, BOTH),  # no smaller variant spills before it
    "gradients of known rows": Literal(False, plan.THREADS, BOTH, "gradient", known=True),
    "sums": Literal(False, plan.THREADS, NONE, "accumulate"),
}
LOGITS = {
    "total and gradient": Logits(128256, True, INPUT),
    "two blocks, total and gradient": Logits(49152, True, INPUT),
    "two blocks, total": Logits(49152, True, NONE),
    "two blocks, losses": Logits(49152, True, NONE, writes_losses=True),
    "two blocks, labels and figures, total and gradient": Logits(49152, True, INPUT, auxiliary=True, figures=True),
    "two blocks, smoothed labels, total and gradient": Logits(49152, True, INPUT, auxiliary=True, smoothing=True),
    "two blocks, capped, total and gradient": Logits(49152, True, INPUT, capped=True),
    "few blocks, total and gradient": Logits(24576, True, INPUT),  # of float32 two, of three row groups
    "short rows": Logits(1000, False, NONE, keeps_states=True),
    "short rows, total and gradient": Logits(1000, False, INPUT),
    "short rows, both gradients": Logits(1000, False, BOTH),
    "rows of 16 lanes, total and gradient": Logits(320, False, INPUT),
    "rows of 8 lanes, both gradients": Logits(200, False, BOTH),
    "rows": Logits(8192, True, NONE, keeps_states=True),
    "both gradients of streamed rows": Logits(262144, False, BOTH),
    "gradients of known rows": Logits(128256, False, BOTH, "gradient", known=True),
    "total and both gradients": Logits(50257, True, BOTH),
    "capped, total and both gradients": Logits(32000, True, BOTH, capped=True),
    "short rows out of phase, both gradients": Logits(1000, False, BOTH, in_phase=False),
    "capped short rows": Logits(1000, False, BOTH, capped=True),
    "labels, total and gradient": Logits(128256, True, INPUT, auxiliary=True),
    "labels, both gradients": Logits(50257, True, BOTH, auxiliary=True),
    "labels and figures, total and gradient": Logits(128256, True, INPUT, auxiliary=True, figures=True),
    "labels, short rows": Logits(1000, False, BOTH, auxiliary=True),
    "smoothed labels, total and gradient": Logits(128256, True, INPUT, auxiliary=True, smoothing=True),
    "smoothed labels, short rows": Logits(1000, False, BOTH, auxiliary=True, smoothing=True),
    "labels, gradients of known rows": Logits(128256, False, BOTH, "gradient", known=True, auxiliary=True),
    "slices, rows and gradient": Logits(64128, True, INPUT, peers=True),
    "slices, rows and both gradients": Logits(25129, True, BOTH, peers=True),
    "statistics": Logits(32000, True, NONE, "statistics"),
    "statistics of short rows": Logits(1000, False, NONE, "statistics"),
    "sums": Logits(32000, False, NONE, "accumulate"),
    "sums of short rows": Logits(1000, False, NONE, "accumulate"),
}
WITHOUT_MOMENTS = (
    "short rows, total and gradient",
    "labels and figures, total and gradient",
    "slices, rows and gradient",
)
# Where blocks have most warps, and so the fewest registers for each thread
MOST_WARPS = ("two blocks, total and gradient", "two blocks, labels and figures, total and gradient")
# Of which another mode has all the code: with a gradient
WITHIN_OTHERS = ("two blocks, total",)
ON_CHIP = {name for name, mode in LOGITS.items() if mode.fits}
ROUNDED = (torch.bfloat16, torch.bfloat16)
OF_FLOAT32 = {  # logits whose gradients are of 16 bits
    "rounded gradient": Logits(128256, True, INPUT, gradients=ROUNDED),
    "both gradients rounded": Logits(50257, True, BOTH, gradients=ROUNDED),
    "rounded gradient of short rows": Logits(1000, False, INPUT, gradients=ROUNDED),
    "both gradients of known rows rounded": Logits(128256, False, BOTH, "gradient", known=True, gradients=ROUNDED),
}


class Case(NamedTuple):
    arch: str
    kind: str
    form: str
    target_form: str
    dtype: torch.dtype
    mode: str
    target_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        dtypes = str(self.dtype)[6:] + ("" if self.target_dtype is None else f"/{str(self.target_dtype)[6:]}")
        return f"{self.arch} {self.kind} {self.form}/{self.target_form} {dtypes} {self.mode}"

    @property
    def has_logits(self) -> bool:
        return "logits" in (self.form, self.target_form)

    @property
    def is_asked_for(self) -> bool:
        """A flat sum needs a finish that is the identity, and a known state one that is not linear."""
        formula = Problem(self.kind, Side(self.form), Side(self.target_form)).formula
        if "total" in self.mode:
            return formula.finish_is_identity
        return self.mode != "gradients of known rows" or not formula.finish_is_linear

    @property
    def most_registers(self) -> int:
        """What its launch bounds leave."""
        return 168 if self.has_logits else 65536 // plan.THREADS // self.literal_shape().min_blocks

    @property
    def most_collectives(self) -> int | None:
        """Of rows on chip: the producer alone may assert, and labels' losses may be added at the end."""
        if not (self.has_logits and self.arch == "sm_90a" and self.mode in ON_CHIP):
            return None
        mode = LOGITS[self.mode]
        return (16 if mode.peers else 0) + (10 if mode.auxiliary and mode.figures else 0)

    def literal_shape(self) -> plan.Shape:
        mode = LITERAL[self.mode]
        return plan.shape(mode.lanes, mode.flat, self.dtype, self.target_dtype or self.dtype, sum(mode.wants))

    def source(self) -> str:
        x, y = self.dtype, self.target_dtype or self.dtype
        if not self.has_logits:
            mode = LITERAL[self.mode]
            loss = torch.promote_types(x, torch.float32)
            variant = literal.Variant(
                *self[1:4],
                *(x, y, torch.float64, loss),
                verb=mode.verb,
                known=mode.known,
                has_outputs=mode.verb != "gradient",
                wants=mode.wants,
            )
            return literal.source(variant, self.literal_shape())
        mode = (LOGITS | OF_FLOAT32)[self.mode]
        side = lambda form: Side(form, softcap=float(mode.capped))
        problem = Problem(self.kind, side(self.form), side(self.target_form), *kinds.values(self.kind))
        if mode.auxiliary:
            problem = dataclasses.replace(problem, weights=Weights(label=0.5, smoothing=0.1 * mode.smoothing))
        is_streamed = mode.known or mode.verb == "accumulate"
        chip = CHIPS.get(self.arch, plan.HOPPER)
        if not mode.fits:
            chip = plan.NO_CHIP if mode.in_phase else plan.NO_COPIES
        shape = logits.layout(problem, mode.vocab, x, y, mode.wants, is_streamed, chip, mode.peers, mode.figures).shape
        assert shape.resident == mode.fits
        dtypes = x, y, *(mode.gradients or (x, y))
        keeps_numbers = mode.keeps_states or mode.verb in ("statistics", "accumulate")
        is_coarse = logits.has_16_bits(dtypes, mode.wants, keeps_numbers)
        polynomials = (
            logits.near_of(problem, problem.parameter, mode.verb, is_coarse, reach) for reach in (WIDE, NARROW)
        )
        near, narrow = (NearShape() if found is None else found.shape for found in polynomials)
        fine = logits.fine_of(problem, problem.parameter, is_coarse)
        variant = logits.Variant(
            *self[1:4],
            *(*dtypes, torch.float64, torch.float32),
            verb=mode.verb,
            known=mode.known,
            has_outputs=mode.verb != "gradient",
            keeps_numbers=keeps_numbers,
            writes_losses=mode.writes_losses or mode.keeps_states or mode.peers,
            wants=mode.wants,
            capped=(mode.capped, mode.capped),
            auxiliary=mode.auxiliary,
            smoothing=mode.smoothing,
            figures=mode.figures,
            has_peers=mode.peers,
            near=near,
            narrow=narrow,
            fine=OverRootShape() if fine is None else fine.shape,
        )
        return logits.source(variant, shape)


def built(source, arch, most_spilled=0):
    """The code, and how many registers it uses."""
    log = io.StringIO()
    code = compiled(source, arch, ("-v", "-Werror", *(() if most_spilled else ("-warn-spills",))), log)
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", log.getvalue()))) <= most_spilled
    return code, max(map(int, re.findall(r"Used (\d+) registers", log.getvalue())))


ENDCOLLECTIVE = (0x791B).to_bytes(8, "little")  # of sm_90, with its operands


def collectives(code):
    """How many shuffles and votes a warp meets for, where the compiler cannot tell that its threads are together."""
    return sum(code[i : i + 8] == ENDCOLLECTIVE for i in range(0, len(code), 16))


def literal_cases():
    """A covering choice: every kind with every pair and dtype, few on every architecture and in every mode."""
    for arch, kind, pair in itertools.product(ARCHITECTURES, KINDS, PAIRS):
        if arch == "sm_90a" or (kind in FEW and pair[0] == pair[1]):
            yield Case(arch, kind, *pair, torch.float32, "rows and both gradients")
    for kind, dtype, mode in itertools.product(KINDS, DTYPES, LITERAL):
        is_few = kind in FEW and dtype in (torch.float32, torch.bfloat16)
        if is_few or mode in ("total and gradient", "rows and both gradients"):
            yield Case("sm_90a", kind, "probs", "probs", dtype, mode)


def on_other_architectures():
    """The kind with the most code, in the dtype with the most registers that is on chip there."""
    for arch, mode in itertools.product(ARCHITECTURES, LOGITS):
        if mode not in ON_CHIP or arch in ("sm_90a", "sm_100a"):
            yield Case(arch, "jensen_shannon", "logits", "logits", torch.float32, mode)
        elif arch == "sm_120a":
            yield Case(arch, "jensen_shannon", "logits", "logits", torch.bfloat16, mode)


def logits_cases():
    """A covering choice: every kind, every mode with and without moments, every architecture.

    Some take a compiler ten seconds. So of jensen_shannon 16 bits have a few modes, and float32 has both gradients.
    """
    for kind, mode in itertools.product(KINDS, LOGITS):
        is_of_moments = kind == "kl" and mode not in WITHIN_OTHERS and not (LOGITS[mode].capped and LOGITS[mode].fits)
        is_of_none = kind == "jensen_shannon" and mode in WITHOUT_MOMENTS
        is_of_all = mode == "total and gradient" or mode in MOST_WARPS
        if is_of_moments or is_of_none or is_of_all or (kind == "renyi" and "short" in mode):
            yield Case("sm_90a", kind, "logits", "logits", torch.bfloat16, mode)
    for case in on_other_architectures():
        is_hopper = case.arch in ("sm_90a", "sm_100a")
        has_both = LOGITS[case.mode].wants == BOTH and not (LOGITS[case.mode].capped and case.arch != "sm_90a")
        if has_both or (not is_hopper and case.mode in ("total and gradient", "capped short rows", "sums")):
            yield case
    for kind, mode in itertools.product(FEW, OF_FLOAT32):
        if kind == "kl" or mode == "rounded gradient":
            yield Case("sm_90a", kind, "logits", "logits", torch.float32, mode)
    of_two_blocks = (f"two blocks, {what}, total and gradient" for what in ("smoothed labels", "capped"))
    for kind, mode in itertools.product(("jensen_shannon", "skew_kl", "alpha"), of_two_blocks):
        yield Case("sm_90a", kind, "logits", "logits", torch.bfloat16, mode)
    for kind in KINDS:
        yield Case("sm_90a", kind, "logits", "logits", torch.float32, "few blocks, total and gradient")
    # Rows of kl and reverse_kl have a mode of their own where gradients have float32.
    for mode in ("total and gradient", "labels, both gradients", "two blocks, total", "rows"):
        yield Case("sm_90a", "kl", "logits", "logits", torch.float32, mode)
    yield Case("sm_90a", "reverse_kl", "logits", "logits", torch.float32, "labels, both gradients")
    for arch in ("sm_100a", "sm_120a"):
        yield Case(arch, "kl", "logits", "logits", torch.float32, "total and both gradients")
    yield Case("sm_100a", "jensen_shannon", "logits", "logits", torch.float32, "labels and figures, total and gradient")
    for kind in ("alpha", "skew_kl", "total_variation"):  # whose polynomials have every power; or there are none
        yield Case("sm_90a", kind, "logits", "logits", torch.float32, "labels, both gradients")
    for arch, kind in itertools.product(("sm_75", "sm_80"), ("total_variation", "jensen_shannon")):
        # short rows cache slopes there, too
        yield Case(arch, kind, "logits", "logits", torch.bfloat16, "short rows, total and gradient")
    for pair in MIXED_PAIRS:
        for mode in ("total and both gradients", "statistics", "sums"):
            yield Case("sm_90a", "alpha", *pair, torch.float16, mode)
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        for kind, mode in (
            ("skew_kl", "short rows, both gradients"),
            ("renyi", "capped short rows"),
            ("jensen_shannon", "total and gradient"),
            ("kl", "short rows, total and gradient"),
            ("renyi", "short rows, total and gradient"),
        ):
            yield Case("sm_90a", kind, "logits", "logits", dtypes[0], mode, dtypes[1])
    yield Case("sm_90a", "skew_kl", "logits", "logits", torch.float16, "capped short rows")


def every_case():
    """Of logits every kind in every mode on sm_90a, in both of the dtypes that differ in code; one kind elsewhere."""
    for arch, kind, pair, dtype, mode in itertools.product(ARCHITECTURES, KINDS, PAIRS, DTYPES, LITERAL):
        yield Case(arch, kind, *pair, dtype, mode)
    for kind, mode, dtype in itertools.product(KINDS, LOGITS, (torch.bfloat16, torch.float32)):
        yield Case("sm_90a", kind, "logits", "logits", dtype, mode)
    for kind, mode in itertools.product(KINDS, OF_FLOAT32):
        yield Case("sm_90a", kind, "logits", "logits", torch.float32, mode)
    yield from on_other_architectures()


def asked_for(cases):
    return [case for case in dict.fromkeys(cases) if case.has_logits or case.is_asked_for]


class Other(NamedTuple):
    """A kernel of another file."""

    arch: str
    what: str
    text: str
    most_collectives: int | None = None
    most_registers: int = 255

    @property
    def name(self) -> str:
        return f"{self.arch} {self.what}"

    def source(self) -> str:
        return self.text


def mixed_dtypes_and_helpers(arch):
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float64, torch.float16)):
        case = Case(arch, "kl", "probs", "probs", dtypes[0], "rows", dtypes[1])
        yield Other(*case.name.split(" ", 1), case.source())
    for dtype in DTYPES if arch == "sm_90a" else (torch.bfloat16, torch.float64):
        called = str(dtype)[6:]
        for factor in (torch.float32, torch.float64):
            yield Other(arch, f"scale {called} {str(factor)[6:]}", scale.source(dtype, factor))
        yield Other(arch, f"topk {called} with means", topk.source(dtype, "logits", False, has_mean=True))
        yield Other(arch, f"entries {called}", topk.entries_source(dtype, "log_probs"))
        yield Other(arch, f"labels {called}", labels.source(dtype))
        if arch == "sm_90a" or dtype == torch.bfloat16:
            yield Other(arch, f"describe {called}", describe.source(describe.Variant(dtype, dtype)))
        if arch == "sm_90a":
            yield Other(arch, f"topk {called}", topk.source(dtype, "logits", False))
            yield Other(arch, f"topk {called} capped", topk.source(dtype, "logits", True))
            yield Other(arch, f"topk {called} log_probs", topk.source(dtype, "log_probs", False))
            yield Other(arch, f"topk {called} probs", topk.source(dtype, "probs", False))
            if dtype in (torch.bfloat16, torch.float64):
                mixed = describe.Variant(dtype, torch.float32, (True, True), True, False)
                alone = describe.Variant(dtype, dtype, (True, False), False, threads=64)
                yield Other(arch, f"describe {called}/float32 capped", describe.source(mixed))
                yield Other(arch, f"describe {called} alone", describe.source(alone))
    yield Other(arch, "ceiling", inlined("cuda/ceiling.cuh", {}))


def labels_alone(arch, dtype):
    """Each launch shape."""
    chip = CHIPS.get(arch, plan.HOPPER)
    sources = {}
    for vocab, wants_input in itertools.product((777, 16384, 32000, 128256, 400_000), (False, True)):
        placed = plan.slices(vocab, dtype, chip, wants_input)
        if placed is not None:
            variant = cross_entropy.Variant(dtype, torch.float64, torch.float32, wants_input)
            flags = itertools.product((False, True), repeat=2) if dtype == torch.bfloat16 else [(True, True)]
            for capped, smoothing in flags:
                options = " capped" * capped + " smoothed" * smoothing + " with gradient" * wants_input
                source = cross_entropy.source(variant._replace(capped=capped, smoothing=smoothing), placed)
                sources.setdefault(source, f"labels alone {str(dtype)[6:]} {vocab}{options}")
    assert len(sources) >= 5  # five vocabularies, with the gradient and without: some are alike
    return [Other(arch, name, source, 0 if arch == "sm_90a" else None) for source, name in sources.items()]


ALONE = [*itertools.product(["sm_90a"], DTYPES[:3]), ("sm_100a", DTYPES[1]), ("sm_120a", DTYPES[0])]
QUICK = [
    *asked_for(itertools.chain(literal_cases(), logits_cases())),
    *itertools.chain.from_iterable(map(mixed_dtypes_and_helpers, ARCHITECTURES)),
    *itertools.chain.from_iterable(itertools.starmap(labels_alone, ALONE)),
]
SAMPLE = {case.name for case in QUICK[::32]}


class Found(NamedTuple):
    """Of a kernel, when it was compiled."""

    registers: int
    digest: str  # of its source


def digest(source):
    """Of the code: comments and line ends make no other."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", " ", source, flags=re.DOTALL)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()[:16]


def compile_case(case, most_spilled=0):
    """Without a register spilled, but for so many bytes, and warps together."""
    source = case.source()
    code, used = built(source, case.arch, most_spilled)
    assert case.most_collectives is None or collectives(code) <= case.most_collectives
    assert used <= case.most_registers
    return Found(used, digest(source))


def check(case, most_spilled=0):
    compiler, record = read_record()
    found = compile_case(case, most_spilled)
    if compiler == nvrtc_version() and case.name in record:
        assert found.registers <= record[case.name].registers


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_compiles_within_its_registers(case):
    if case.name in SAMPLE or not is_recorded(case):
        check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", dict.fromkeys([*asked_for(every_case()), *QUICK]), ids=lambda case: case.name)
def test_every_instantiation(case):
    """Of a few literal kernels ptxas 13.5, not 13.0, spills up to 40 bytes: once a row, or of one once a tile."""
    check(case, 0 if case in QUICK or case.has_logits else 40)


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.bfloat16, 49152), (torch.float32, 24576)])
def test_three_groups_are_compiled(dtype, vocab):
    """Modes that are to have most warps have them."""
    assert plan.logits(plan.Wanted(vocab, dtype, dtype), plan.HOPPER).shape.threads == 25 * 32
    assert vocab in {LOGITS[mode].vocab for mode in (*MOST_WARPS, "few blocks, total and gradient")}


def test_every_kernel_is_recorded():
    """As it is: CI is to compile a sample."""
    compiler, record = read_record()
    assert f"nvidia-cuda-nvrtc=={compiler}\n" in (RECORD.parents[1] / "constraints.txt").read_text()
    assert record.keys() == {case.name for case in QUICK}
    changed = [case.name for case in QUICK if not has_digest(case)]
    assert not changed, "run python -m tests.test_cuda_compile"


HEADERS = sorted(str(path.relative_to(HERE.parent)) for path in HERE.rglob("*.cuh"))


@pytest.mark.parametrize("name", HEADERS)
def test_every_file_compiles_by_itself(name):
    """As an editor opens it: with what it includes and nothing before it."""
    compiled(inlined(name, {}), "sm_90a")


def test_no_lambda_is_generic():
    """NVRTC of CUDA 13.0 takes one for a function of the host."""
    assert not [name for name in HEADERS if re.search(r"\[[&=]?\]\([^)]*\bauto\b", (HERE.parent / name).read_text())]


def test_only_one_file_has_assembly():
    assert [name for name in HEADERS if "asm" in (HERE.parent / name).read_text()] == ["cuda/ptx.cuh"]


def test_the_stand_in_for_a_functor_declares_what_is_printed():
    """So that an editor knows the names: structs, functions and macros."""
    declared = (HERE / "functor.cuh").read_text()
    printed = print_layout() + print_functor("alpha", "logits", "logits", ("safe_", "fast_", "stable_"))
    printed += print_functor("kl", "probs", "probs", ("safe_", "in_range_")) + print_slopes("jensen_shannon")
    printed += print_functor("kl", "logits", "logits", ("fast_", "stable_"))
    names = lambda pattern, text: set(re.findall(pattern, text, re.M))
    for pattern in (r"^#define (\w+)", r"^(?:typedef struct \{.*)?\} (\w+);", r"^INLINE \w+ (\w+)\("):
        assert names(pattern, declared) == names(pattern, printed)
    enums = lambda text: [re.sub(r"\s+|= \d", "", found) for found in re.findall(r"enum \{(.*?)\}", text, re.S)]
    assert enums(declared) == enums(print_layout(has_tilted_lse=True))


def test_the_stand_in_for_terms_declares_what_is_printed():
    declared = (HERE / "terms.cuh").read_text()
    printed = print_terms(("safe_", "light_")) + print_near_terms() + print_order()
    structs, functions = r"^(?:typedef struct \{.*)?\} (\w+);", r"^INLINE \w+ (\w+)\("
    for pattern in (r"^#define (\w+)", structs, functions, r"\b((?:NUMBER|TOKEN)_\w+)", r"\b((?:input|target)_\w+)"):
        assert set(re.findall(pattern, declared, re.M)) == set(re.findall(pattern, printed, re.M)), pattern


# What is printed as an operator, and what lowering.py leaves to no kernel, or to those of logits
INFIX = {"add", "sub", "mul", "div", "neg", "lt", "where"}
LOWERED = {"geometric_mean", "log_geometric_mean", "log_fraction", "mass_difference", "logit_difference"}
OF_LOGITS = {"mixture", "logit_mass"}


@pytest.mark.parametrize("prefix", ["safe_", "in_range_", "fast_", "stable_"])
def test_every_operation_exists_under_every_prefix(prefix):
    """A kind may use any of the vocabulary in any form."""
    text = inlined("cuda/logits/fast_math.cuh", {}) + inlined("cuda/math.cuh", {})
    wanted = TENSOR.keys() - INFIX - LOWERED - (OF_LOGITS if prefix == "in_range_" else set())
    assert wanted <= set(re.findall(rf"(?:#define |INLINE real ){prefix}(\w+)", text))


@pytest.mark.parametrize(("is_coarse", "count"), [(True, 7), (False, 10)], ids=["coarse", "fine"])
def test_the_polynomial_of_close_rows(is_coarse, count):
    """As exact as its comment says."""
    text = (HERE / "logits/fast_math.cuh").read_text()
    fine, coarse = text.split("near_small_exp_slope(real d)")[1].split("return")[:2]
    body = (coarse if is_coarse else fine).replace("sum * d - ", "-")
    factors = list(map(float, re.findall(r"(-?[0-9.]+(?:e-\d+)?)f;", body)))
    radius = float(re.findall(r"NEAR_ELEMENT_RADIUS \(IS_COARSE \? ([0-9.]+)f : ([0-9.]+)f", text)[0][not is_coarse])
    d = torch.linspace(-radius, radius, 2000, dtype=torch.float64)
    found = sum(factor * d**power for power, factor in enumerate(reversed(factors)))
    error = (found / ((torch.expm1(-d) + d) / d**2) - 1).abs()
    assert len(factors) == count
    assert error.max() < 1.5e-7


def test_a_spill_is_an_error():
    source = Case("sm_90a", "renyi", "probs", "probs", torch.float32, "rows and both gradients").source()
    with pytest.raises(BuildError, match="spill"):
        built(source.replace("#define MIN_BLOCKS 2", "#define MIN_BLOCKS 8"), "sm_90a")


@pytest.mark.parametrize("both", [False, True], ids=["one gradient", "both gradients"])
@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES[:3], repeat=2)])
@pytest.mark.parametrize(
    "vocab", [1, 7, 2049, 2800, 8192, 19176, 24576, 32000, 49152, 50257, 128256, 151936, 262144, 400_001, 1 << 20]
)
@pytest.mark.parametrize("chip", [*CHIPS.values(), plan.HOPPER._replace(cluster=8)], ids=str)
def test_rows_on_chip_fit(vocab, dtypes, both, chip):
    """The pipeline holds a row's slice, its barriers can tell its rounds apart, and the block its memory."""
    x, y = dtypes
    layout = plan.logits(plan.Wanted(vocab, x, y, both), chip)
    assert layout.cluster <= chip.cluster
    if not layout.shape.resident:
        # What a block has for a row is less what it keeps of others.
        most = 69 << 10 if chip == plan.SMALL_BLACKWELL else 190 << 10
        assert vocab <= 2048 or vocab * (x.itemsize + y.itemsize) / chip.cluster > most
        return
    has_lead = vocab % (layout.shape.width * plan.ALIGNMENT) != 0
    assert layout.stage_vectors - layout.tile_vectors == (plan.ALIGNMENT if has_lead else 0)
    kept = layout.stages * layout.stage_vectors * layout.shape.width
    assert layout.tile_vectors % plan.ALIGNMENT == layout.slice_vectors % plan.ALIGNMENT == 0
    assert kept * x.itemsize <= layout.shape.y_offset
    assert layout.shape.y_offset + kept * y.itemsize <= layout.exchange_offset < layout.header_offset < layout.shared
    assert layout.shape.y_offset % 128 == layout.exchange_offset % 16 == layout.header_offset % 16 == 0
    assert layout.stages <= plan.MAX_STAGES
    assert layout.slice_vectors * layout.cluster >= vocab // layout.shape.width
    tiles = -(-layout.slice_vectors // layout.tile_vectors)
    assert tiles <= layout.stages
    assert (layout.shape.groups - 1) * tiles < layout.stages
    assert layout.shared <= chip.block_bytes - plan.STATIC_BYTES
    assert layout.shape.threads <= 32 * (1 + chip.warps)
    threads = layout.shape.threads_per_row
    turns = -(-layout.slice_vectors // threads)
    assert turns <= 32  # a thread has a bit for each vector
    last = layout.slice_vectors - (tiles - 1) * layout.tile_vectors
    assert turns == (tiles - 1) * -(-layout.tile_vectors // threads) + -(-last // threads)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 2049, 8192, 32000, 50257, 128256, 151936, 262144, 400_001, 1 << 20])
@pytest.mark.parametrize("chip", [plan.HOPPER, plan.SMALL_BLACKWELL, plan.NO_CHIP], ids=str)
def test_slices_fit(vocab, dtype, gradient, chip):
    """A block holds its slice, a multiprocessor its blocks, and a tile ends where all threads have read as often."""
    placed = plan.slices(vocab, dtype, chip, gradient)
    if dtype == torch.float64 or placed is None:
        # What a block has for a row is less what it keeps of others.
        assert dtype == torch.float64 or vocab * dtype.itemsize > chip.block_bytes * (8 - 1)
        assert placed is None
        return
    assert placed.vectors * placed.cluster >= vocab // plan.width(dtype, dtype)
    assert placed.tiles * placed.tile_vectors >= placed.vectors
    assert placed.stages >= placed.tiles
    assert placed.tile_vectors % (placed.threads - 32) == 0
    assert (
        placed.stages * placed.tile_vectors * plan.VECTOR_BYTES < placed.shared <= chip.block_bytes - plan.STATIC_BYTES
    )
    assert placed.blocks * (placed.shared + plan.STATIC_BYTES + plan.RESERVED_BYTES) <= chip.block_bytes
    assert placed.threads % 32 == 0
    assert placed.threads * placed.blocks <= 1024


@pytest.mark.parametrize(
    ("major", "clusters", "cluster"), [(9, 7, 16), (9, 0, 8), (9, None, 8), (10, 8, 16), (12, 8, 8)]
)
def test_clusters_of_a_device(monkeypatch, major, clusters, cluster):
    """Sixteen blocks where so many fit side by side; eight where none do, or where that cannot be found out."""

    class Launcher:
        def __init__(self, *arguments, **layout):
            if clusters is None:
                raise RuntimeError("CUDA_ERROR_INVALID_CLUSTER_SIZE")
            self.blocks = clusters

    properties = SimpleNamespace(major=major, shared_memory_per_block_optin=plan.HOPPER.block_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device, "Launcher", Launcher)
    found = device.admitted.__wrapped__(0, device.chip.__wrapped__(0))
    known = {9: plan.HOPPER, 10: plan.BLACKWELL, 12: plan.SMALL_BLACKWELL}[major]
    assert found == known._replace(block_bytes=plan.HOPPER.block_bytes, cluster=cluster)


def test_devices_without_clusters_keep_no_rows_on_chip(monkeypatch):
    properties = SimpleNamespace(major=8, shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert device.chip.__wrapped__(0) == plan.NO_CHIP


def test_slopes_are_cached_where_half_precision_holds_them():
    def caches(kind, *parameter, dtype=torch.bfloat16):
        problem = Problem(kind, Side("logits"), Side("logits"), *parameter)
        return logits.layout(problem, 128256, dtype, dtype, (True, False), False, plan.HOPPER).shape.caches_slopes

    assert caches("total_variation")
    assert all(caches("jensen_shannon", beta) for beta in (0.001, 0.5, 0.999))
    assert all(caches("skew_kl", alpha) for alpha in (1e-3, 0.1, 0.99))
    # A slope may be -1/alpha, and is kept 64 times as long.
    assert not any(caches("skew_kl", alpha) for alpha in (1e-30, 1e-7, 1e-5, 1e-4))
    assert not caches("jensen_shannon", 0.5, dtype=torch.float16)
    assert not caches("kl")


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES[:3], repeat=2)])
@pytest.mark.parametrize("vocab", [1, 7, 8, 255, 257, 384, 385, 512, 777, 896, 1024, 1025, 2048])
@pytest.mark.parametrize("goes_one_way", [False, True])
def test_short_rows_fit(vocab, dtypes, goes_one_way):
    """A row or two of each group are on chip, where what every device has is enough."""
    x, y = dtypes
    layout = plan.logits(plan.Wanted(vocab, x, y, caches_slopes=True, goes_one_way=goes_one_way), plan.HOPPER)
    shape = layout.shape
    if vocab > 256 * shape.width:
        assert shape.resident
        return
    assert layout.slice_vectors <= shape.slot_vectors
    assert shape.slot_vectors % shape.threads_per_row == 0
    assert shape.slots in (1, 2)
    assert shape.y_offset == shape.slots * shape.groups * shape.slot_vectors * shape.width * x.itemsize
    assert layout.shared == shape.y_offset // x.itemsize * (x.itemsize + y.itemsize)
    declared = shape.groups * (8 + 8 + 24)  # group_losses, warp_losses and own_labels
    assert layout.shared + declared <= 48 << 10
    assert shape.groups >= 1
    assert shape.threads % 32 == 0
    assert 1 <= shape.min_blocks <= 32


def test_rows_that_are_read_once_cache_no_slopes():
    wanted = plan.Wanted(1000, *DTYPES[1:2] * 2, has_normalisers=True, caches_slopes=True)
    assert not plan.logits(wanted, plan.HOPPER).shape.caches_slopes


def test_lanes_grow_with_the_row():
    lanes = [plan.lanes(vocab) for vocab in (1, 2, 64, 65, 2048, 2049, 262144)]
    assert lanes == [1, 8, 8, 32, 32, plan.THREADS, plan.THREADS]


def nvrtc_version():
    """Of the package, if it is what compiles: a PyTorch of another CUDA has its own, and loads it first."""
    installed = importlib.metadata.version("nvidia-cuda-nvrtc")
    _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return installed if installed.startswith(f"{major}.{minor}.") else f"{major}.{minor}"


@functools.cache
def read_record():
    """The compiler's version, and what was found of each kernel."""
    table = json.loads(RECORD.read_text())
    return table.pop("nvrtc"), {name: Found(*found) for name, found in table.items()}


def has_digest(case):
    """Whether its record is of this code."""
    _, record = read_record()
    return case.name in record and record[case.name].digest == digest(case.source())


def is_recorded(case):
    return read_record()[0] == nvrtc_version() and has_digest(case)


def write_record():
    importlib.import_module("cuda.core")  # which threads would find half imported
    found = {case.name: read_record()[1][case.name] for case in QUICK if is_recorded(case)}
    missing = [case for case in QUICK if case.name not in found]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, (case, of_case) in enumerate(zip(missing, pool.map(compile_case, missing), strict=True)):
            found[case.name] = of_case
            print(f"\r{i + 1}/{len(missing)}", end="", file=sys.stderr)
    lines = [f'"{name}": {json.dumps(value)}' for name, value in found.items()]
    RECORD.write_text("{\n" + ",\n".join(sorted([f'"nvrtc": "{nvrtc_version()}"', *lines])) + "\n}\n")


if __name__ == "__main__":
    write_record()
