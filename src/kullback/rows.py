"""The problem, the two mergeable row states, and the element that every path evaluates.

    norms = normalize(x), normalize(y)      LogSumExp a side, only for logits
    sums  = accumulate(x, y, norms)         Σ term, Σ ∂log p, Σ ∂log q
    grads = gradient(x, y, norms, sums, g)

Both states are monoids: a row may be split over threads, blocks, chunks or ranks, and merged.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.divergences import DIVERGENCES, Element, Finish, Moments
from kullback.forms import FORMS, Norm, Shift, pair
from kullback.formula import Program, Value, variable
from kullback.series import Series, element_at, series

ROW_VARIABLES = (
    *(f"{side}_{field}" for side in ("input", "target") for field in Norm._fields),
    "shift_high",
    "shift_low",
)


# temperature, target_temperature; softcap, target_softcap (0: none); valid_vocab (0: all of it)
NUMBERS = (1.0, 1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Problem:
    """Which divergence of which forms. Numbers that vary at run time are in `numbers`, never in code."""

    kind: str
    form: str
    target_form: str
    numbers: tuple[float, ...] = NUMBERS  # as these, and *parameters

    @property
    def spelling(self) -> str:
        """All but the numbers, in one word each: what an operator takes."""
        return f"{self.kind} {self.form} {self.target_form}"

    @property
    def temperatures(self) -> tuple[float, float]:
        return self.numbers[0], self.numbers[1]

    @property
    def parameters(self) -> dict[str, float]:
        return dict(zip(DIVERGENCES[self.kind].parameters, self.numbers[len(NUMBERS) :], strict=True))

    @property
    def parameter(self) -> float:
        """The kind's parameter; 0 where it has none."""
        return self.numbers[len(NUMBERS)] if len(self.numbers) > len(NUMBERS) else 0.0

    @property
    def caps(self) -> tuple[float, float]:
        """The input's softcap and the target's: a logit x counts as cap·tanh(x/cap); 0: as x."""
        return self.numbers[2], self.numbers[3]

    @property
    def capped(self) -> tuple[bool, bool]:
        return self.numbers[2] != 0, self.numbers[3] != 0

    def valid(self, tensor: Tensor) -> Tensor:
        """The part of the vocabulary that counts."""
        return tensor[..., : int(self.numbers[4])] if self.numbers[4] else tensor

    @property
    def slopes(self) -> tuple[float, float]:
        """Of what a gradient is pulled back to (forms.py) in the input's elements, in the target's."""
        forms = self.form, self.target_form
        return tuple(1 / t if f == "logits" else 1.0 for f, t in zip(forms, self.temperatures, strict=True))  # type: ignore[return-value]

    @functools.cached_property
    def needs_norms(self) -> bool:
        return self.form == "logits" or self.target_form == "logits"

    @property
    def has_slope(self) -> bool:
        """Whether the kind says what d_log_p / p and d_log_q / q are."""
        return bool(self.formula.element["slope_q"] != 0.0)

    @property
    def longest_slope(self) -> float:
        """Of d_log_q / q the largest where p is e^±30 q; beyond that it grows with the log-ratio at most."""
        ratio = torch.tensor([-30.0, 30.0], dtype=torch.float64, device="cpu")
        slope = element_at(self.kind, self.numbers[len(NUMBERS) :], ratio).slope_q
        return float(torch.as_tensor(slope).abs().max())

    @property
    def is_crossed(self) -> bool:
        """Whether the sums of a row follow from Σ p log(p/q) and Σ q log(p/q)."""
        found = sums_of_moments(self.kind)
        return self.form == self.target_form == "logits" and found is not None and found.exponent is None

    @property
    def series(self) -> Series | None:
        """Of elements near p = q; None where rows are not normalised, or so few powers do not reach."""
        if self.form != "logits" or self.target_form != "logits":
            return None
        # As kernels hold them: 1 - alpha of renyi is divided by again.
        parameters = (ctypes.c_float(number).value for number in self.numbers[len(NUMBERS) :])
        return series(self.kind, tuple(parameters))

    @property
    def is_smooth(self) -> bool:
        """Whether there is one for the default parameters."""
        defaults = tuple(DIVERGENCES[self.kind].parameters.values())
        return Problem(self.kind, self.form, self.target_form, (*NUMBERS, *defaults)).series is not None

    @property
    def formula(self) -> Formula:
        return formula(self.kind, self.form, self.target_form)

    def program(self, *outputs: str) -> Program:
        """What computes these outputs of an element, and nothing else."""
        return _program(self.kind, self.form, self.target_form, outputs)


class Formula(NamedTuple):
    """What a row element and a row sum become, over named variables."""

    element: dict[str, Value]  # term, partials, excess, masses, slopes; pulled back to the elements: input, target
    finish: Program  # of total: loss, slope
    finish_is_linear: bool  # slope 1: a gradient can be written before the row's sum is known
    finish_is_identity: bool


@functools.cache
def _program(kind: str, form: str, target_form: str, outputs: tuple[str, ...]) -> Program:
    element = formula(kind, form, target_form).element
    return Program({name: element[name] for name in outputs})


@functools.cache
def formula(kind: str, form: str, target_form: str) -> Formula:
    """Trace the divergence once for a pair of forms."""
    x, y, total = variable("x"), variable("y"), variable("total")
    norm, target_norm = (Norm(*(variable(f"{side}_{field}") for field in Norm._fields)) for side in ("input", "target"))
    shift = Shift(variable("shift_high"), variable("shift_low"))
    masses = pair(form, target_form, x, y, norm, target_norm, shift)
    divergence = DIVERGENCES[kind]
    element: Element = divergence.element(masses, **{name: variable(name) for name in divergence.parameters})
    finish: Finish = element.finish(total)
    return Formula(
        {
            "term": element.term,
            "d_log_p": element.d_log_p,
            "d_log_q": element.d_log_q,
            "input": FORMS[form].pull_back(x, masses.q, element.d_log_q, norm),
            "target": FORMS[target_form].pull_back(y, masses.p, element.d_log_p, target_norm),
            "excess": masses.excess,
            "p": masses.p,
            "q": masses.q,
            "slope_p": element.slope_p,
            "slope_q": element.slope_q,
            "lean": element.lean,
        },
        Program(finish._asdict()),
        finish.slope == 1.0,
        finish.loss is total,
    )


class SumsOfMoments(NamedTuple):
    """A row's sums over variables cross_p, cross_q and overlap."""

    sums: Program  # term, d_log_p, d_log_q
    exponent: Value | None  # a of the overlap Σ p^a q^(1-a); None where none is asked for


@functools.cache
def sums_of_moments(kind: str) -> SumsOfMoments | None:
    """`of_moments` (divergences.py) traced, or None of a kind that has none."""
    divergence = DIVERGENCES[kind]
    if divergence.of_moments is None:
        return None
    exponents: list[Value] = []

    def overlap(exponent: Value) -> Value:
        exponents.append(exponent)
        return variable("overlap")

    moments = Moments(variable("cross_p"), variable("cross_q"), overlap)
    parameters = {name: variable(name) for name in divergence.parameters}
    term, d_log_p, d_log_q, *_ = divergence.of_moments(moments, **parameters)
    sums = Program({"term": term, "d_log_p": d_log_p, "d_log_q": d_log_q})
    return SumsOfMoments(sums, exponents[0] if exponents else None)


class LogSumExp(NamedTuple):
    """log Σ exp of part of a row, as (maximum, Σ exp(x - maximum)). Identity: (-inf, 0)."""

    top: Tensor
    total: Tensor

    def merge(self, other: LogSumExp) -> LogSumExp:
        top = torch.maximum(self.top, other.top)
        # Two empty parts: (-inf) - (-inf) would be NaN where nothing is to be rescaled.
        ours = torch.where(self.top == top, 1.0, torch.exp(self.top - top))
        theirs = torch.where(other.top == top, 1.0, torch.exp(other.top - top))
        return LogSumExp(top, self.total * ours + other.total * theirs)


class Sums(NamedTuple):
    """Sums over part of a row. Identity: zeros."""

    term: Tensor
    d_log_p: Tensor
    d_log_q: Tensor

    def merge(self, other: Sums) -> Sums:
        return Sums(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))


class State(NamedTuple):
    """All that a row's gradient needs beside the row: both norms and the sums. float64, [rows] each."""

    input_norm: LogSumExp
    target_norm: LogSumExp
    sums: Sums

    @classmethod
    def unpack(cls, packed: Tensor) -> State:
        # C and CUDA mark rows that were summed with guards by the sign of a total.
        return cls(LogSumExp(packed[0], packed[1].abs()), LogSumExp(*packed[2:4]), Sums(*packed[4:7]))


STATE_FIELDS = 7

Wanted = tuple[bool, bool]  # the gradient of the input, of the target


Gradients = tuple[Tensor | None, Tensor | None]  # to be written: of the input, of the target; a row's elements adjacent


class Entries(NamedTuple):
    """What a sparse teacher's entries are, and what is to be made of them."""

    form: str
    tail: str
    as_logits: bool  # whether the target may lack a norm
    words: int

    def normalises(self, temperature: float) -> bool:
        """Whether the target is to sum to 1 where the entries as stored, or tempered, may not."""
        return not self.as_logits and (temperature != 1 or self.tail == "bucket" or self.form == "logits")


def accumulator(tensor: Tensor) -> torch.dtype:
    """The dtype of sums, row coefficients and cotangents: float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the few numbers of a row that are gathered from it."""
    return torch.promote_types(dtype, torch.float32)


def documentation(kind: str) -> str:
    """The definition, from the divergence's docstring."""
    return inspect.getdoc(DIVERGENCES[kind].element) or kind
