"""Some elements of some rows: their masses, sums and gradients, in float32, or in float64 where an input is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kullback.backends.pytorch.programs import (
    OPERATIONS,
    PARTIALS,
    Way,
    adds_partials,
    least_far_sum,
    least_fast_sum,
    program,
)
from kullback.dtypes import accumulator, compute_dtype
from kullback.forms import FORMS, SIDES
from kullback.formula import Value
from kullback.labels import Marks
from kullback.problem import Problem, capped, has_corner, inverse_temperature, parts_of_lse, softcap_grad
from kullback.state import Mode, RowState, RowStats, RowSums, far_tilted_lse

MASSES = {"input": "q", "target": "p"}
PARTIAL_OF = {"input": "d_log_q", "target": "d_log_p"}
# What depends on normalisers alone, and what does on a tilted log-sum-exp as well
OF_NORMALISERS = (*MASSES.values(), "log_q", "log_p", "ratio", "q_minus_p", "log_tilted")
OF_TILTED = (*OF_NORMALISERS, *PARTIALS)


class Elements(dict[str, Value]):
    """What an expression may name: of elements and of rows, found when it is first asked for."""

    def __init__(
        self,
        problem: Problem,
        values: Mapping[str, Tensor],
        known: RowStats | RowState | None = None,
        is_far: bool = False,
    ) -> None:
        super().__init__(x=values["input"], y=values["target"], **problem.parameters)
        self.problem, self.known, self.dtype = problem, known, compute_dtype(*values.values())
        self.is_far = is_far
        double = self.dtype == torch.float64
        self.scales = {n: inverse_temperature(side, double) for n, side in zip(SIDES, problem.sides, strict=True)}

    def __missing__(self, name: str) -> Value:
        finders: dict[str, Callable[[], Value]] = {
            "log_q": functools.partial(self._log_mass, "x", "input"),
            "log_p": functools.partial(self._log_mass, "y", "target"),
            "ratio": self._ratio,
            "q_minus_p": self._q_minus_p,
            "log_tilted": self._log_tilted,
        }
        found = self[name] = finders[name]() if name in finders else self._of_rows(name)
        return found

    def column(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.dtype).unsqueeze(-1)

    def _of_rows(self, name: str) -> Value:
        known, (side, _, field) = self.known, name.partition("_")
        assert known is not None
        if name == "tilted_lse":
            return self.column(known.tilted_lse)
        if field == "inv_temperature":
            return self.scales[side]
        if field == "grad_sum":
            assert isinstance(known, RowState)
            is_excess = self[PARTIAL_OF[side]] is self.get("q_minus_p")
            if self.is_far and is_excess and not self.problem.has_auxiliary:  # two rows of sum 1
                return 0.0
            return self.column(known.d_log_q if side == "input" else known.d_log_p)
        assert field in ("max", "log_sum_exp")
        lse = known.input_lse if side == "input" else known.target_lse
        parts = (part.unsqueeze(-1) for part in parts_of_lse(lse, self.scales[side], self.dtype))
        self[f"{side}_max"], self[f"{side}_log_sum_exp"] = parts
        return self[name]

    def _log_mass(self, element: str, side: str) -> Tensor:
        found: Tensor = self[element] - self[f"{side}_max"]
        if self.scales[side] != 1:
            found *= self.scales[side]
        found -= self[f"{side}_log_sum_exp"]
        return found

    def _ratio(self) -> Tensor:
        """log(p/q), finite where both logits are -inf. Where they are close their difference is exact."""
        known, (x_scale, y_scale) = self.known, self.scales.values()
        x: Tensor = self["x"]
        y: Tensor = self["y"]
        assert known is not None
        rest = known.log_z_diff if isinstance(known, RowState) else known.target_lse - known.input_lse
        scale = 1.0
        if x_scale == y_scale:
            # Logits keep their digits when a whole number is taken off those that are larger in size.
            scale, rest = x_scale, rest if x_scale == 1 else rest / x_scale
            if self.is_far:
                ratio = (y - x).sub_(self.column(rest))
                return ratio if scale == 1 else ratio.mul_(scale)
            whole = self.column(torch.round(rest))  # of float32 a number beyond 2²⁴ is whole, and another
            rest = rest - whole.squeeze(-1).to(rest.dtype)
            is_y_larger = (known.target_lse.abs() > known.input_lse.abs()).unsqueeze(-1)
            of_y = torch.where(is_y_larger, whole, 0.0)
            ratio = (y - of_y).sub_(x + (whole - of_y))
        else:
            # Against numbers next to their log-sum-exps, so that what a multiplication rounds is small.
            tops = self["target_max"], self["input_max"]
            log_p, log_q = (y - tops[0]).mul_(y_scale), (x - tops[1]).mul_(x_scale)
            nothing = (log_p < -1e38) & (log_q < -1e38)  # no masses, and of scaled numbers one may be infinite
            ratio = torch.where(nothing, 0.0, log_p - log_q)
            y_top, x_top = (top.squeeze(-1).to(rest.dtype) for top in tops)
            rest = rest - (y_top * y_scale - x_top * x_scale)
        ratio.nan_to_num_(0.0, math.inf, -math.inf)
        high = self.column(rest)
        ratio -= high
        ratio -= self.column(rest - high.squeeze(-1))
        return ratio if scale == 1 else ratio.mul_(scale)

    def _q_minus_p(self) -> Tensor:
        """-(p + q) tanh(ratio / 2), which is exact near 0 and at the infinities."""
        if self.is_far:
            return torch.sub(self["q"], self["p"])
        ratio: Tensor = self["ratio"]
        if ratio.device.type == "cpu":  # where tanh takes three times as long as expm1
            less = torch.copysign(ratio, -1.0).expm1_()
            less /= less + 2.0
            less.copysign_(ratio).neg_()
        else:
            less = torch.mul(ratio, -0.5).tanh_()
        return less.mul_(self["p"] + self["q"])

    def _log_tilted(self) -> Tensor:
        problem = self.problem
        asked = program(problem.kind, problem.input.form, problem.target.form, Way.EXACT, ("log_tilted",))
        found: Tensor = asked.run(self, OPERATIONS[Way.EXACT])["log_tilted"]
        return found


class Piece:
    """Some elements of some rows, as they count, and what is known of their rows."""

    def __init__(
        self,
        problem: Problem,
        x: Tensor,
        y: Tensor,
        is_whole: bool,
        is_loss_alone: bool = False,
        is_far: bool = False,
    ) -> None:
        """`is_whole`: whether these are known to be all of their rows; `is_loss_alone`: whether no gradient follows.

        `is_far`: whether to take rows for far. Whoever says so looks at the sums.
        """
        self.problem, self.is_whole, self.is_loss_alone = problem, is_whole, is_loss_alone
        dtype = compute_dtype(x, y)
        self.values = {}
        for name, values, side in zip(SIDES, (x, y), problem.sides, strict=True):
            self.values[name] = capped(values.to(dtype), side.softcap)
        self.elements = Elements(problem, self.values)
        self.way = Way.FAR if is_far else self._way()

    def _way(self) -> Way:
        """What is tried first. On a device no sum is looked at here, for that would wait for it."""
        x, y = self.values.values()
        if compute_dtype(x, y) == torch.float64 or x.numel() == 0:  # exact, though literal rows take twice as long
            return Way.EXACT
        is_on_cpu = x.device.type == "cpu"
        if self.problem.is_normalised:
            return Way.FAST if is_on_cpu else Way.PARTIALS
        lower, _ = FORMS[self.problem.target.form].in_range or (-math.inf, 0)
        return Way.IN_RANGE if is_on_cpu and y.amin().item() > lower else Way.EXACT

    def select(self, rows: Tensor) -> Piece:
        """Some of its rows, as a piece whose formula is exact."""
        part = object.__new__(Piece)
        part.problem, part.way = self.problem, Way.EXACT
        part.is_whole, part.is_loss_alone = self.is_whole, self.is_loss_alone
        part.values = {name: values[rows] for name, values in self.values.items()}
        part.elements = Elements(part.problem, part.values)
        part.elements |= {name: self.elements[name][rows] for name in MASSES.values() if name in self.elements}
        return part

    def normalise(self, known: RowStats | RowState) -> None:
        """Say what is known of the rows. What was found with the same normalisers stays."""
        former, names = self.elements, ("input_lse", "target_lse", "tilted_lse")
        are_same = [former.known is not None and getattr(former.known, n) is getattr(known, n) for n in names]
        kept = OF_TILTED if all(are_same) else OF_NORMALISERS if all(are_same[:2]) else MASSES.values()
        self.elements = Elements(self.problem, self.values, known, self.way is Way.FAR)
        self.elements |= {name: former[name] for name in kept if name in former}
        for name, side, lse in zip(SIDES, self.problem.sides, (known.input_lse, known.target_lse), strict=True):
            if side.form == "logits" and MASSES[name] not in self.elements:
                # Of a whole row exactly 1: a mass next to 1 is what it was when the row was summed.
                share = torch.exp(self._own_lse(name) - lse)
                self.elements[MASSES[name]] *= self.elements.column(share)

    def statistics(self, with_moments: bool) -> RowStats:
        problem, nothing = self.problem, self._numbers(0.0)
        sides = zip(SIDES, problem.sides, strict=True)
        lse = [self._own_lse(name) if side.form == "logits" else nothing for name, side in sides]
        stats = RowStats._make([*lse, nothing, nothing, nothing, self._numbers(Mode.SAFE), nothing])
        with_moments = with_moments and problem.has_moments
        if problem.is_normalised and (with_moments or (has_corner(problem.kind) and self.way is not Way.FAR)):
            stats = self._centred(stats)
        if problem.formula.has_tilted_lse and problem.is_normalised:
            self.normalise(stats)
            log_tilted: Tensor = self.elements["log_tilted"]
            stats = stats._replace(tilted_lse=far_tilted_lse(log_sum_exp(log_tilted).to(nothing.dtype)))
        if not with_moments:
            return stats
        _, sums = self.accumulate(stats)
        return stats._replace(term=sums.term, d_log_p=sums.d_log_p, d_log_q=sums.d_log_q)

    def _centred(self, stats: RowStats) -> RowStats:
        """What float32 normalisers are off by shows in Σ (q - p). Half of it is taken off each."""
        self.normalise(stats)
        off = torch.atanh(self.elements["q_minus_p"].sum(-1) / 2).to(stats.input_lse.dtype)  # odd, as exchanging is
        off = torch.where(off.isfinite(), off, 0.0)
        return stats._replace(input_lse=stats.input_lse + off, target_lse=stats.target_lse - off)

    def accumulate(self, stats: RowStats) -> tuple[RowStats, RowSums]:
        """All sums only where a gradient of logits will ask for them; and the statistics that they were found with."""
        self.normalise(stats)
        way, sums = self.way, self._sums(self.way)
        if way is Way.FAST:
            is_right = torch.stack(list(sums)).sum(0).isfinite()
            is_right &= (sums.term >= least_fast_sum(self.problem)) | (stats.tilted_lse != 0)
            rest = torch.nonzero(~is_right).squeeze(1)
            if len(rest) == len(is_right):
                self._take_exact()
                if self.is_whole:
                    stats = self._centred(stats)
                    self.normalise(stats)
            elif len(rest):
                part, known = self.select(rest), RowStats._make(number[rest] for number in stats)
                exact_stats, exact = part.accumulate(part._centred(known) if self.is_whole else known)
                stats = RowStats._make(a.index_copy(0, rest, b) for a, b in zip(stats, exact_stats, strict=True))
                # of a loss alone one way finds partial derivatives, and the other nothing, which is wider
                sums = RowSums._make(a.index_copy(0, rest, b.to(a.dtype)) for a, b in zip(sums, exact, strict=True))
                return stats, sums
        elif way is Way.IN_RANGE and not math.isfinite(sums.term.sum().item()):
            self._take_exact()
        return stats, sums if self.way is way else self._sums(self.way)

    def write(
        self,
        outputs: Sequence[Tensor | None],
        state: RowState | None,
        grad_out: Tensor | float,
        skipped: Tensor | None,
        marks: Marks | None = None,
    ) -> None:
        """Fill the wanted gradients: of rows that are `skipped`, and not to be read, with zeros."""
        if self.way is Way.FAST and state is not None:
            rest = torch.nonzero(state.mode != Mode.FAST).squeeze(1)
            if len(rest) == len(state.mode):
                self._take_exact()
            elif len(rest):
                found = [None if out is None else out.new_empty((len(rest), out.size(1))) for out in outputs]
                upstream = grad_out[rest] if isinstance(grad_out, Tensor) else grad_out
                known = RowState._make(number[rest] for number in state)
                left_out = None if skipped is None else skipped[rest]
                self.select(rest).write(found, known, upstream, left_out, None if marks is None else marks.select(rest))
                self._write(outputs, state, grad_out, skipped, marks)
                for out, others in zip(outputs, found, strict=True):
                    if out is not None and others is not None:
                        out[rest] = others
                return
        self._write(outputs, state, grad_out, skipped, marks)

    def _write(
        self,
        outputs: Sequence[Tensor | None],
        state: RowState | None,
        grad_out: Tensor | float,
        skipped: Tensor | None,
        marks: Marks | None,
    ) -> None:
        if self.problem.has_logits and state is not None:
            self.normalise(state)
        names = [name for name, out in zip(SIDES, outputs, strict=True) if out is not None]
        results = self._pulled_back(names)
        if self.way is Way.IN_RANGE and not all(math.isfinite(result.sum().item()) for result in results.values()):
            self._take_exact()
            results = self._pulled_back(names)
        column = self.elements.column(grad_out) if isinstance(grad_out, Tensor) else grad_out
        for name, side, out in zip(SIDES, self.problem.sides, outputs, strict=True):
            if out is not None:
                result, factor = results[name], column
                if marks is not None and name == "input":
                    result, factor = marks.take_off(result * column), 1.0
                if side.softcap:
                    result = result * softcap_grad(self.values[name], side.softcap)
                may_look = self.way in (Way.FAST, Way.IN_RANGE)  # a CPU's
                if skipped is not None and (not may_look or bool(skipped.any())):
                    result = torch.where(skipped.unsqueeze(-1), 0, result)
                torch.mul(result, factor * self.elements.scales[name], out=out)

    def _pulled_back(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Sides' gradients, from partial derivatives that sums may have left."""
        missing = [PARTIAL_OF[name] for name in names if PARTIAL_OF[name] not in self.elements]
        self.elements |= self.run(missing, self.way)
        return self.run(names, self.way)

    def _take_exact(self) -> None:
        """From here on; what was found otherwise is not kept."""
        self.way = Way.EXACT
        for name in PARTIALS:
            self.elements.pop(name, None)

    def run(self, outputs: Sequence[str], way: Way) -> dict[str, Tensor]:
        problem = self.problem
        asked = program(problem.kind, problem.input.form, problem.target.form, way, tuple(outputs))
        return asked.run(self.elements, OPERATIONS[way])

    def _numbers(self, value: float) -> Tensor:
        """Of rows, all this."""
        x = self.values["input"]
        return x.new_full((), value, dtype=accumulator(x)).expand(x.size(0))

    def _own_lse(self, name: str) -> Tensor:
        """Log-sum-exp, by a softmax that is kept: the largest logit less the logarithm of its mass."""
        values, scale, wide = self.values[name], self.elements.scales[name], accumulator(self.values[name])
        if values.size(-1) == 0:
            self.elements[MASSES[name]] = torch.empty_like(values, dtype=self.elements.dtype)  # to be written over
            return self._numbers(-math.inf)
        dtype, is_on_cpu = self.elements.dtype, values.device.type == "cpu"
        top, index = (values.amax(-1, keepdim=True), None) if is_on_cpu else values.max(-1, keepdim=True)
        scaled = values if scale == 1 else (values - top.to(dtype)).mul_(scale)
        masses = torch.softmax(scaled, -1, dtype=dtype)
        if is_on_cpu:  # where softmax adds a row up in few sums: 2e-6 off with 50000 tokens
            masses /= masses.sum(-1, keepdim=True)
        log_mass = (masses.amax(-1, keepdim=True) if index is None else masses.gather(-1, index)).log_()
        if not self.is_whole:  # a piece may be without mass
            masses.masked_fill_(top == -math.inf, 0.0)
            log_mass.masked_fill_(top == -math.inf, 0.0)
        self.elements[MASSES[name]] = masses
        top = top.to(wide) if scale == 1 else top.to(wide) * scale
        return (top - log_mass).squeeze(-1)

    def _sums(self, way: Way) -> RowSums:
        problem = self.problem
        is_of_partials = adds_partials(problem.kind, problem.parameter, way)
        names = list(PARTIALS) if is_of_partials or (problem.has_logits and not self.is_loss_alone) else []
        nothing = self._numbers(0.0)
        results = self.run(names if is_of_partials else ["term", *names], way)
        self.elements |= {name: results[name] for name in names}
        totals = {id(result): result for result in results.values()}
        if way is Way.FAR:  # two rows of sum 1
            totals.pop(id(self.elements.get("q_minus_p")), None)
        totals = {key: result.sum(-1) for key, result in totals.items()}
        if not self.is_whole:  # else widened with all rows'
            totals = {key: total.to(accumulator(total)) for key, total in totals.items()}
        found = {name: totals.get(id(result), nothing) for name, result in results.items()}
        if is_of_partials:
            found["term"] = term = found["d_log_p"] + found["d_log_q"]
        if is_of_partials and way is not Way.FAR:
            # Of a loss that is infinite both may be, with opposite signs.
            is_infinite = found["d_log_p"].isinf() | found["d_log_q"].isinf()
            found["term"] = torch.where(is_infinite, math.inf, term)
        if problem.is_normalised and problem.formula.has_tilted_lse and self.elements.known is not None:
            # Against it they are 0, but for what rounds its masses; against an infinite one they would be NaN.
            is_near = self.elements.known.tilted_lse == 0
            found = {name: torch.where(is_near, total, 0.0) for name, total in found.items()}
        sums = (found.get(name, nothing) for name in ("term", "d_log_p", "d_log_q"))
        # Both sides' masses sum to 1. What the log-ratios have in common, an error of 1e-7, enters sums squared.
        return RowSums._make([*sums, nothing, self._numbers(Mode.FAST if way is Way.FAST else Mode.SAFE)])


MOST_BETWEEN = 16  # times a sum: a log-ratio is rounded by 6e-8 of what lies between both sides' logits


def are_far(problem: Problem, stats: RowStats, sums: RowSums) -> Tensor:
    """The rows of `Way.FAR` whose sums are numbers, and large beside what they are off by."""
    size = torch.where(stats.tilted_lse == 0, sums.term, stats.tilted_lse.abs())
    between = (stats.target_lse - stats.input_lse).abs() / MOST_BETWEEN
    return size >= between.clamp(min=least_far_sum(problem))


def log_sum_exp(values: Tensor) -> Tensor:
    """Of each row of scaled logits; -inf of an empty one, and NaN of one that holds NaN."""
    return values.logsumexp(-1) if values.size(-1) else values.new_full(values.shape[:-1], -math.inf)
