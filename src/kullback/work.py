"""What a backend is asked to do: one record for each kind of work, from the operators down to the kernels."""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from kullback.divergences import DESCRIBED
from kullback.dtypes import accumulator
from kullback.problem import Problem, Side
from kullback.state import Mode, RowStats

Verb: TypeAlias = Literal["loss", "statistics", "accumulate", "gradient"]
VERBS: tuple[Verb, ...] = get_args(Verb)  # as kernels number them


class Operands(NamedTuple):
    """The tensors that a call reads. A further operand of a row is a further field."""

    input: Tensor  # [..., vocab]
    target: Tensor  # [..., vocab]
    row_weight: Tensor | None = None  # [rows] or one number: multiplies a row's loss and gradients, or is its upstream
    labels: Tensor | None = None  # [rows] int64: a token of the row, IGNORED, or negative: of another's slice

    @property
    def of_rows(self) -> tuple[Tensor | None, ...]:
        """Those that have a number for each row, in order."""
        return self[2:]


OF_ROWS = Operands._fields[2:]


class Peers(NamedTuple):
    """Memory in which ranks that each have a slice of the rows find what others sent (symmetric.py)."""

    buffers: int  # the address, on the device, of the addresses of each rank's
    launches: int  # and of how many launches there were, the one to come included
    rank: int
    ranks: int
    rows: int  # that there is room for
    timeout: int  # of 2^20 ns: how long a rank waits for another


class Rows(NamedTuple):
    """Rows of a problem: what is read, what is wanted, and where that goes. None: not given, or not wanted.

    Drivers' tensors are [..., vocab]; a backend gets [rows, vocab], a row's elements adjacent (`split`).
    """

    problem: Problem
    operands: Operands
    verb: Verb = "loss"
    scale: float = 1.0  # multiplies the total and the gradients
    known: Tensor | None = None  # packed: to accumulate RowStats, for a gradient RowState
    found: Tensor | None = None  # packed: of a loss without gradients RowState; RowStats of statistics; RowSums
    loss: Tensor | None = None  # [rows]
    total: Tensor | None = None  # 0-d, Σ row_weight · loss · scale
    d_input: Tensor | None = None  # of the input's dtype; of float32 logits it may be of 16 bits
    d_target: Tensor | None = None
    figures: Tensor | None = None  # [2, rows], with a loss of logits: the input's log-sum-exp, and its entropy
    peers: Peers | None = None  # who have the rest of each row, where a kernel is to ask them

    @property
    def input(self) -> Tensor:
        return self.operands.input

    @property
    def target(self) -> Tensor:
        return self.operands.target

    @property
    def row_weight(self) -> Tensor | None:
        return self.operands.row_weight

    @property
    def labels(self) -> Tensor | None:
        return self.operands.labels

    @property
    def first_tensor(self) -> Tensor:
        return self.operands.input

    @property
    def has_outputs(self) -> bool:
        """Whether losses, or numbers of rows, are wanted; else gradients alone."""
        return self.loss is not None or self.total is not None or self.found is not None

    @property
    def wants(self) -> tuple[bool, bool]:
        """The gradient of the input, of the target."""
        return self.d_input is not None, self.d_target is not None

    @property
    def has_nothing_to_read(self) -> bool:
        """No rows; no tokens to normalise; or statistics of elements that stand alone."""
        x, is_of_statistics = self.operands[0], self.verb == "statistics"
        if x.numel() == 0:
            return self.problem.has_logits or x.size(0) == 0 or is_of_statistics
        return is_of_statistics and not self.problem.has_logits

    def write_nothing(self) -> None:
        """The results of rows that hold nothing to be read."""
        for tensor in (self.loss, self.found, self.figures):
            if tensor is not None:
                tensor.zero_()
        if self.total is not None:
            self.total.fill_(0 * self.scale)  # of nothing a mean is NaN
        if self.verb == "statistics" and self.found is not None and self.problem.has_logits:
            for field, side in enumerate(self.problem.sides):
                self.found[field] = -math.inf if side.form == "logits" else 0
            self.found[RowStats._fields.index("mode")] = Mode.SAFE

    def split(self) -> list[Rows]:
        """As backends take them: several, where a large tensor such as logits[:, :-1] has no view as rows."""
        if self._is_plain():
            return [self]
        parts = [part._as_rows() for part in self._parts()]
        if len(parts) == 1:
            return parts
        first = 0
        for i, part in enumerate(parts):
            last = first + part.input.size(0)
            parts[i] = part._replace(
                known=None if self.known is None else self.known[:, first:last].contiguous(),
                found=None if self.found is None else self.found.new_empty((self.found.size(0), last - first)),
                loss=None if self.loss is None else self.loss[first:last],
                figures=None if self.figures is None else self.figures.new_empty((2, last - first)),
                total=None if self.total is None else self.total.new_empty((), dtype=accumulator(self.total)),
            )
            first = last
        return parts

    def _is_plain(self) -> bool:
        """Whether backends can take it as it is. Half a microsecond of every call is decided here."""
        x, y, *of_rows = self.operands
        if self.problem.vocab or x.dim() != 2 or not (x.is_contiguous() and y.is_contiguous()):
            return False
        for tensor in of_rows:
            if tensor is not None and (tensor.dim() != 1 or is_put_off(tensor)):
                return False
        return not (is_put_off(x) or is_put_off(y))

    def join(self, parts: list[Rows]) -> None:
        """What the parts found, put together."""
        totals = [part.total for part in parts if part.total is not None]
        if self.total is not None:
            self.total.copy_(torch.stack(totals).sum())
        if self.found is not None:
            torch.cat([part.found for part in parts if part.found is not None], -1, out=self.found)
        if self.figures is not None:
            torch.cat([part.figures for part in parts if part.figures is not None], -1, out=self.figures)

    def _parts(self) -> list[Rows]:
        x, y = self.input, self.target
        if not _is_large(x) or x.stride(-1) != 1 or y.stride(-1) != 1 or (_has_one_step(x) and _has_one_step(y)):
            return [self]
        of_rows = [None if t is None else t.expand(x.shape[:-1]) for t in self.operands.of_rows]
        parts = []
        for i in range(x.size(0)):
            others = (None if t is None else t[i] for t in of_rows)
            d_x, d_y = (None if t is None else t[i] for t in (self.d_input, self.d_target))
            part = self._replace(operands=Operands(x[i], y[i], *others), d_input=d_x, d_target=d_y)
            parts += part._parts()
        return parts

    def _as_rows(self) -> Rows:
        narrow = self.problem.narrow
        x, y = (narrow(as_rows(t)) for t in (self.input, self.target))
        of_rows = (None if t is None else row_vector(t, x.size(0)) for t in self.operands.of_rows)
        d_x, d_y = (None if t is None else narrow(as_rows(t)) for t in (self.d_input, self.d_target))
        return self._replace(operands=Operands(x, y, *of_rows), d_input=d_x, d_target=d_y)


PART_BYTES = 1 << 24  # of a tensor that copying costs more than a launch does


def _is_large(tensor: Tensor) -> bool:
    """Whether parts of it are worth a launch each."""
    return tensor.dim() > 2 and tensor.numel() * tensor.itemsize >= PART_BYTES * max(tensor.size(0), 1)


def has_view_as_rows(tensor: Tensor) -> bool:
    """Whether `Rows.split` makes no copy of it."""
    return tensor.stride(-1) == 1 and (_is_large(tensor) or _has_one_step(tensor))


class TopK(NamedTuple):
    """What a teacher's entries are, and what is to be made of them."""

    form: str
    tail: str
    as_logits: bool  # whether the target may lack a normaliser
    vocab: int

    def normalises(self, temperature: float) -> bool:
        """Whether the target is to sum to 1 where the entries as stored, or tempered, may not."""
        return not self.as_logits and (temperature != 1 or self.tail == "bucket" or self.form == "logits")


class Entries(NamedTuple):
    """A teacher's entries: distinct ids, or -1, and the target there and, but for a renormalised one, in the tail."""

    problem: Problem
    values: Tensor  # [..., k]
    indices: Tensor  # [..., k]
    skipped: Tensor | None  # bool [...]: rows that do not count, whatever their entries
    of: TopK
    ids: Tensor  # [..., k] int64, to be written
    target: Tensor  # [..., k (+ 1)], to be written

    @property
    def first_tensor(self) -> Tensor:
        return self.values


class Gather(NamedTuple):
    """A row at its ids, none where one is -1; all other elements in one; the mean of all.

    Elements are as they count: tempered, capped.
    """

    problem: Problem
    input: Tensor  # [rows, vocab]
    ids: Tensor  # [rows, k], distinct or -1
    gathered: Tensor  # [rows, k + others], to be written
    target: Tensor | None = None  # [rows, k + 1]: its tail, if no more than `negligible`, may be nothing but rounding
    negligible: float = 0.0

    @property
    def others(self) -> int:
        """Columns behind those of ids: none, one for the tail, and of rows of logits a second for the mean."""
        return self.gathered.size(1) - self.ids.size(1)

    @property
    def first_tensor(self) -> Tensor:
        return self.input


class Scatter(NamedTuple):
    """The gradient in a row from that in what was gathered of it; zeros where that is 0."""

    problem: Problem
    input: Tensor  # [rows, vocab]
    ids: Tensor
    gathered: Tensor
    d_gathered: Tensor
    d_input: Tensor  # [rows, vocab], to be written; may be the input

    @property
    def others(self) -> int:
        """As of `Gather`"""
        return self.gathered.size(1) - self.ids.size(1)

    @property
    def first_tensor(self) -> Tensor:
        return self.input


class Scale(NamedTuple):
    """gradient *= factor; a factor of 1 costs no pass over it, and none is read on the host but a CPU's own."""

    gradient: Tensor
    factor: Tensor  # 0-d

    @property
    def first_tensor(self) -> Tensor:
        return self.gradient


class Labels(NamedTuple):
    """Labels, each of which must be a token or IGNORED: of another a device-side assertion fails.

    With an input, its logits at labels of which that is known, as they count.
    """

    labels: Tensor  # int64, [rows] with an input
    vocab: int
    side: Side = Side("logits")  # how the input is to be read
    input: Tensor | None = None  # [rows, vocab]
    logits: Tensor | None = None  # [rows] of the accumulator's dtype, to be written; NaN where there is no label

    @property
    def first_tensor(self) -> Tensor:
        return self.labels


NUMBERS = ("lse", "entropy", "target_lse", "target_entropy", *DESCRIBED)
TOKENS = ("top_token", "label_rank", "target_top_token", "target_label_rank")


class Describe(NamedTuple):
    """Rows of logits of which every figure is wanted; without a target those that come first, of the input."""

    problem: Problem  # what its sides are
    input: Tensor  # [rows, vocab]
    target: Tensor | None
    labels: Tensor | None  # [rows] int64: a token, or negative: none, whose rank is anything
    numbers: Tensor  # of NUMBERS [8 or 2, rows], to be written
    tokens: Tensor  # of TOKENS [4 or 2, rows] int64, to be written

    def narrow(self, rows: slice) -> Describe:
        target, labels = (None if t is None else t[rows] for t in (self.target, self.labels))
        numbers, tokens = self.numbers[:, rows], self.tokens[:, rows]
        return Describe(self.problem, self.input[rows], target, labels, numbers, tokens)

    @property
    def first_tensor(self) -> Tensor:
        return self.input


# The `first_tensor` of each is one that it reads; all are on its device.
Work: TypeAlias = Rows | Entries | Gather | Scatter | Describe | Labels | Scale


def is_put_off(tensor: Tensor) -> bool:
    """Whether its numbers are not in memory: PyTorch puts off signs (conj().imag), and storage of some zeros."""
    return tensor.is_neg() or tensor._is_zerotensor()


def in_memory(tensor: Tensor) -> Tensor:
    return tensor.clone() if is_put_off(tensor) else tensor


def as_rows(tensor: Tensor) -> Tensor:
    """[rows, vocab] with a row's elements side by side; a copy only where the layout has no such view."""
    tensor = in_memory(tensor)
    if tensor.dim() == 2 and tensor.is_contiguous():
        return tensor
    if tensor.dim() != 2:
        tensor = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.size(-1))
    return tensor if tensor.stride(1) == 1 or tensor.size(1) == 1 else tensor.contiguous()


def row_vector(tensor: Tensor, rows: int) -> Tensor:
    """A number for each row."""
    tensor = in_memory(tensor)
    return tensor.expand(rows) if tensor.dim() == 0 else tensor.reshape(rows)


def weighted(value: Tensor, weight: Tensor | None) -> Tensor:
    """value · weight, and 0 where that is 0, whatever the value."""
    return value if weight is None else torch.where(weight == 0, 0.0, value) * weight


def _has_one_step(tensor: Tensor) -> bool:
    """Whether the leading dimensions are one, of a common step."""
    leading = [(size, step) for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(leading))
