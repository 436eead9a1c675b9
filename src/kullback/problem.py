"""Which divergence of which forms: what every layer below the public functions is told of a call."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.divergences import DIVERGENCES, Divergence, Element, Finish, Moments, Pair
from kullback.dtypes import accumulator, kept_dtype
from kullback.forms import FORMS, SIDES, pair, softmax_of
from kullback.formula import Program, Value, log_geometric_mean, variable


class Side(NamedTuple):
    """How the input's rows, or the target's, are to be read."""

    form: str
    temperature: float = 1.0  # divides the logits; a logit scale is part of it
    softcap: float = 0.0  # a logit x counts as softcap·tanh(x / softcap); 0: as x


class Shard(NamedTuple):
    """Which part of every row this rank has, where ranks share the vocabulary."""

    group: str = ""  # the process group's name; none: rows are whole
    first_token: int = 0  # the id of the part's first token
    width: int = 0  # the most tokens that a rank has: what all of them plan with; 0: not known


WHOLE = Shard()


class Weights(NamedTuple):
    """Of what a row's loss is a sum of (`labels.py`)."""

    divergence: float = 1.0
    label: float = 0.0  # of the cross-entropy of its label
    z: float = 0.0  # of the square of its log-sum-exp
    smoothing: float = 0.0  # which part of a label is spread over all tokens


DIVERGENCE_ALONE = Weights()


@dataclass(frozen=True)
class Problem:
    """A kind, what either side holds, and the numbers that vary from call to call but never in code."""

    kind: str
    input: Side
    target: Side
    parameter: float = 0.0  # of the kind; 0 where it has none
    vocab: int = 0  # how many tokens of a row, or of this rank's part, count; 0: all
    shard: Shard = WHOLE
    weights: Weights = DIVERGENCE_ALONE
    is_gathered: bool = False  # whether rows are a few outcomes of the student's rows

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Problem], tuple[object, ...]]:
        """Without what is cached: hashes of names are a process's own."""
        return Problem, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def _hash(self) -> int:
        """Of every call's look into caches."""
        fields = self.kind, self.input, self.target, self.parameter, self.vocab, self.shard, self.weights
        return hash((*fields, self.is_gathered))

    @property
    def key(self) -> str:
        """All but the numbers; with `scalars` what an operator takes."""
        group, first_token, width = self.shard
        place = f" {first_token} {width} {group}" if group else ""
        vocab = operator.index(self.vocab)  # a compiler's symbol is no text
        return f"{self.kind} {self.input.form} {self.target.form} {vocab} {int(self.is_gathered)}{place}"

    @property
    def scalars(self) -> tuple[float, ...]:
        """Temperatures, softcaps, parameter, weights."""
        x, y = self.input, self.target
        return x.temperature, y.temperature, x.softcap, y.softcap, self.parameter, *self.weights

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.input, self.target

    @property
    def divergence(self) -> Divergence:
        return DIVERGENCES[self.kind]

    @property
    def parameters(self) -> dict[str, float]:
        """The kind's parameter by its name; empty where it has none."""
        known = self.divergence.parameter
        return {} if known is None else {known.name: self.parameter}

    @property
    def has_auxiliary(self) -> bool:
        """Whether a row's loss is more than its divergence: its label's cross-entropy, or its log-sum-exp's square."""
        return self.weights != DIVERGENCE_ALONE

    @functools.cached_property
    def has_logits(self) -> bool:
        """Whether a row has to be normalised before its elements mean anything."""
        return "logits" in (self.input.form, self.target.form)

    @functools.cached_property
    def is_normalised(self) -> bool:
        """Whether both sides sum to 1 by construction."""
        return FORMS[self.input.form].normalised and FORMS[self.target.form].normalised

    @functools.cached_property
    def has_moments(self) -> bool:
        """Whether the sums of a row follow from those of its parts, each normalised by itself (`state.merge_stats`)."""
        return self.is_normalised and self.divergence.moments is not None

    @functools.cached_property
    def chernoff_exponent(self) -> float | None:
        """a of the Σ p^a q^(1-a) that the kind is a function of; None where it is of other moments."""
        moments = moments_of(self.kind)
        if moments is None or moments.exponent is None:
            return None
        return float(Program({"a": moments.exponent}).run(self.parameters)["a"])

    @functools.cached_property
    def curvature(self) -> float:
        """c₂ of term = √(p·q)·(c₂·log²(p/q) + …) near p = q; 0 of a kind that has a corner there."""
        ratio = torch.tensor([1e-3, 2e-3], dtype=torch.float64, device="cpu")
        near, far = (element_at(self.kind, self.parameter, ratio).term / ratio**2).tolist()
        return near if abs(near - far) < 0.1 * abs(near) else 0.0

    @functools.cached_property
    def formula(self) -> Formula:
        return formula(self.kind, self.input.form, self.target.form)

    def program(self, *outputs: str) -> Program:
        """What computes these outputs of an element, and nothing else."""
        return _program(self.kind, self.input.form, self.target.form, outputs)

    def narrow(self, tensor: Tensor) -> Tensor:
        """The part of the vocabulary that counts."""
        return tensor[..., : self.vocab] if self.vocab else tensor


@functools.lru_cache(maxsize=1024)
def decode(key: str, scalars: tuple[float, ...] = (1.0, 1.0, 0.0, 0.0, 0.0, *DIVERGENCE_ALONE)) -> Problem:
    """The problem of that key and those scalars; without them, one that is good for shapes."""
    kind, form, target_form, vocab, is_gathered, *place = key.split(" ", 7)
    temperature, target_temperature, softcap, target_softcap, parameter, *weights = scalars
    input, target = Side(form, temperature, softcap), Side(target_form, target_temperature, target_softcap)
    shard = Shard(place[2], int(place[0]), int(place[1])) if place else WHOLE
    return Problem(kind, input, target, parameter, int(vocab), shard, Weights(*weights), is_gathered == "1")


class Formula(NamedTuple):
    """What a row element and a row sum become, over named variables."""

    element: dict[str, Value]  # term, partials, masses; `input`, `target`: pulled back; log_tilted: log(p^a q^(1-a))
    finish: Program  # of total and tilted_lse: loss, derivative
    finish_is_linear: bool  # derivative 1: a gradient can be written before the row's sum is known
    finish_is_identity: bool
    has_tilted_lse: bool  # whether the row is finished with log Σ p^a q^(1-a)


@functools.cache
def _program(kind: str, form: str, target_form: str, outputs: tuple[str, ...]) -> Program:
    element = formula(kind, form, target_form).element
    return Program({name: element[name] for name in outputs})


@functools.cache
def formula(kind: str, form: str, target_form: str) -> Formula:
    """Trace the divergence once for a pair of forms."""
    x, y, total = variable("x"), variable("y"), variable("total")
    m = pair(form, target_form, x, y)
    element = DIVERGENCES[kind](m, *_parameter(kind))
    finish: Finish = element.finish(total)
    own, other = map(softmax_of, SIDES)
    finished = Program(finish._asdict())
    moments = moments_of(kind)
    a = None if moments is None else moments.exponent
    return Formula(
        {
            "term": element.term,
            "d_log_p": element.d_log_p,
            "d_log_q": element.d_log_q,
            "input": FORMS[form].pull_back(x, m.q, element.d_log_q, own),
            "target": FORMS[target_form].pull_back(y, m.p, element.d_log_p, other),
            "q_minus_p": m.q_minus_p,
            "p": m.p,
            "q": m.q,
            "log_tilted": 0.0 if a is None else log_geometric_mean(m.p, m.q, m.log_p, m.log_q, m.ratio, a),
        },
        finished,
        finish.derivative == 1.0,
        finish.loss is total,
        any("tilted_lse" in step.operands for step in finished.steps),
    )


def _parameter(kind: str) -> list[Value]:
    known = DIVERGENCES[kind].parameter
    return [] if known is None else [variable(known.name)]


class TracedMoments(NamedTuple):
    """A row's sums over variables p_log_ratio, q_log_ratio and chernoff."""

    sums: Program  # term, d_log_p, d_log_q
    exponent: Value | None  # a of the Σ p^a q^(1-a); None where none is asked for


@functools.cache
def moments_of(kind: str) -> TracedMoments | None:
    """`Divergence.moments` traced, or None of a kind that has none."""
    moments = DIVERGENCES[kind].moments
    if moments is None:
        return None
    exponents: list[Value] = []

    def chernoff(exponent: Value) -> Value:
        exponents.append(exponent)
        return variable("chernoff")

    sums = moments(Moments(variable("p_log_ratio"), variable("q_log_ratio"), chernoff), *_parameter(kind))
    program = Program({"term": sums.term, "d_log_p": sums.d_log_p, "d_log_q": sums.d_log_q})
    if len(exponents) > 1:
        raise ValueError(f"moments of {kind!r} ask for Σ p^a q^(1-a) {len(exponents)} times; a row is summed for one a")
    return TracedMoments(program, exponents[0] if exponents else None)


def element_at(kind: str, parameter: float, ratio: Tensor) -> Element:
    """The centred element of p = e^(ratio/2) and q = e^(-ratio/2), whose product is 1."""
    half = ratio / 2
    masses = Pair(torch.exp(half), torch.exp(-half), half, -half, ratio, -2 * torch.sinh(half), 0 * ratio, centred=True)
    return DIVERGENCES[kind](masses, *([] if DIVERGENCES[kind].parameter is None else [parameter]))


@functools.cache
def has_corner(kind: str) -> bool:
    """Whether the kind's term is no parabola near p = q: an error in a normaliser enters it as it is, not squared."""
    return Problem(kind, Side("logits"), Side("logits"), DIVERGENCES[kind].default).curvature == 0


IGNORED = -100  # the label of a row that has none


def gathered_dtype(problem: Problem, tensor: Tensor) -> torch.dtype:
    """`kept_dtype`, or of a row that ranks share more: its logits have no common reference, and need more digits."""
    return accumulator(tensor) if problem.shard.group else kept_dtype(tensor.dtype)


@functools.lru_cache(maxsize=1024)
def inverse_temperature(side: Side, double: bool) -> float:
    """What a side's elements are multiplied by; 1 unless they are logits. Kernels hold it in float32."""
    if side.form != "logits":
        return 1.0
    inverse = 1 / side.temperature
    return inverse if double else torch.tensor(inverse, dtype=torch.float32, device="cpu").item()


def parts_of_lse(lse: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The number next to it that logits can be, which they are taken against, and what is left when that is scaled."""
    reference = (lse / scale).to(dtype)
    return reference, torch.where(lse.isinf(), 0.0, lse - reference.to(lse.dtype) * scale).to(dtype)


def capped(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x


def softcap_grad(capped: Tensor, softcap: float) -> Tensor | float:
    """d capped(x) / dx, from the capped value."""
    return 1 - (capped / softcap).square() if softcap else 1.0
