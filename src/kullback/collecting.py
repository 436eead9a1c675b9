"""What losses find of the student's rows on their way, for whoever asks around the calls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from kullback import backends, collectives
from kullback.dtypes import accumulator, compute_dtype, kept_dtype
from kullback.entropy import entropy_of, entropy_parts
from kullback.labels import in_slice, label_logits
from kullback.problem import Problem, capped, inverse_temperature
from kullback.tracing import in_functorch, is_traced
from kullback.work import Describe, Labels, Operands, as_rows, row_vector


class LossStatistics(NamedTuple):
    """Figures of a loss's rows, in nats: of the input, as its logits count. No gradient.

    Each is `input.shape[:-1]`, or [rows] of `linear_divergence`; float32, or float64 where the input is.

    Attributes:
        lse: log-sum-exp over the temperature; 0 in a row of weight 0, which is not read.
        entropy: -Σ q log q; 0 in such a row, too.
        label_log_prob: log q of the label; NaN in a row without one, or of weight 0; None without labels.
    """

    lse: Tensor
    entropy: Tensor
    label_log_prob: Tensor | None


_collected: ContextVar[list[LossStatistics] | None] = ContextVar("kullback collected statistics", default=None)


@contextlib.contextmanager
def collecting_statistics() -> Iterator[list[LossStatistics]]:
    """Collect statistics of the losses that are computed inside, which find them in the pass that they take anyway.

    One `LossStatistics` for each call of `divergence` and `linear_divergence`, of logits, whatever its reduction, and
    of what calls them: modules, integrations. Of `topk_divergence` the row is read once more. It holds for this thread,
    or task, alone; a checkpointed forward that runs again inside is another call.

    Losses of probabilities are not collected. Under `torch.compile` and transforms of `torch.func` neither are
    `topk_divergence` and `divergence` of labels alone (`target=None`). `linear_divergence` of labels alone has 0 in
    rows whose label is -100, which are not read; so has `divergence` of them where ranks share the vocabulary.

    Yields:
        A list, which gets a `LossStatistics` when such a call returns.

    >>> import torch, kullback
    >>> student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    >>> with kullback.collecting_statistics() as collected:
    ...     loss = kullback.divergence(student, teacher, labels=torch.tensor([0]))
    >>> collected[0].entropy, collected[0].label_log_prob
    (tensor([0.6656]), tensor([-0.2395]))
    """
    found: list[LossStatistics] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def is_collecting() -> bool:
    return not torch.compiler.is_compiling() and _collected.get() is not None


class Begun(NamedTuple):
    """What a loss is to fill, and what was read before gradients may take the logits' place."""

    shape: torch.Size
    dtype: torch.dtype
    figures: Tensor  # [2, rows]: as of `Rows`
    logit: Tensor | None  # [rows]: of labels, NaN where there is none


def end(begun: Sequence[Begun]) -> None:
    """Losses of rows, one loss's, have filled these."""
    into = _collected.get()
    if into is None or not begun:
        return
    figures, logits, shape = begun[0].figures, begun[0].logit, begun[0].shape
    if len(begun) > 1:
        figures = torch.cat([part.figures for part in begun], -1)
        logits = None if logits is None else torch.cat([part.logit for part in begun if part.logit is not None])
        shape = figures.shape[1:]
    own = None if logits is None else (logits - figures[0]).to(begun[0].dtype)
    numbers = (None if n is None else n.view(shape) for n in (*figures.to(begun[0].dtype), own))
    into.append(LossStatistics(*numbers))  # type: ignore[arg-type]


def begin(problem: Problem, operands: Operands) -> Begun | None:
    """Of a loss of such rows; None where nobody collects, there are no logits, or a few outcomes of the rows alone."""
    if not is_collecting() or problem.input.form != "logits" or problem.is_gathered:
        return None
    x, labels = operands.input.detach(), operands.labels
    rows, dtype = math.prod(x.shape[:-1]), kept_dtype(x.dtype)
    logit = None
    if labels is not None:
        dtype_of_logit = compute_dtype(x, operands.target)
        logit = logits_at(problem, problem.narrow(as_rows(x)), row_vector(labels, rows), dtype_of_logit)
        if operands.row_weight is not None:
            logit = logit.masked_fill(row_vector(operands.row_weight, rows) == 0, torch.nan)
    return Begun(x.shape[:-1], dtype, x.new_zeros((2, rows), dtype=accumulator(x)), logit)


def of_no_rows(hidden: Tensor, labels: Tensor | None) -> Begun:
    """Of a loss that has no chunk of rows to begin with."""
    none = hidden.new_empty((2, 0), dtype=accumulator(hidden))
    dtype = kept_dtype(hidden.dtype)
    return Begun(torch.Size([0]), dtype, none, None if labels is None else none[0])


def logits_at(problem: Problem, x: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Of rows [rows, vocab] the labels' logits as they count, whichever rank has them; NaN where there is none.

    dtype: what log-sum-exps are found in. A kernel knows that of the rows alone.
    """
    group = problem.shard.group
    if not group and not is_traced(x) and dtype == compute_dtype(x, x):
        logits = x.new_empty(x.size(0), dtype=accumulator(x))
        backends.run(Labels(labels, x.size(1), problem.input, x, logits))
        return logits
    own = label_logits(problem.input, x, in_slice(labels, problem.shard.first_token, x.size(1)), dtype)
    if group:
        collectives.compare(problem, "statistics of labels")
        own = collectives.all_gather(own, collectives.resolved(group)).sum(0)
    return torch.where(labels < 0, torch.nan, own)


def figures_of(problem: Problem, x: Tensor, row_weight: Tensor | None) -> Tensor:
    """[2, rows]: of rows [rows, vocab] that no loss reads whole; 0 where they do not count."""
    figures = (
        _in_operators(problem, x) if problem.shard.group or is_traced(x) or not x.numel() else _of_kernel(problem, x)
    )
    return figures if row_weight is None else figures.masked_fill(row_weight == 0, 0)


def _of_kernel(problem: Problem, x: Tensor) -> Tensor:
    figures = x.new_empty((2, x.size(0)), dtype=accumulator(x))
    backends.run(Describe(problem, x, None, None, figures, x.new_empty((2, x.size(0)), dtype=torch.int64)))
    return figures


def _in_operators(problem: Problem, x: Tensor) -> Tensor:
    """Figures of a row by torch's operators: for pieces that ranks have, and for what follows operators."""
    side, group = problem.input, problem.shard.group
    values = capped(x.to(accumulator(x)), side.softcap) * inverse_temperature(side, x.dtype == torch.float64)
    lse = values.logsumexp(-1) if x.size(1) else x.new_full((x.size(0),), -math.inf, dtype=values.dtype)
    if group:
        collectives.compare(problem, "statistics of rows")
        lse = collectives.all_gather(lse, collectives.resolved(group)).logsumexp(0)
    parts = entropy_parts(problem, x, lse, compute_dtype(x, x))
    if group:
        parts = collectives.all_gather(parts, collectives.resolved(group)).sum(0)
    return torch.stack([lse, entropy_of(parts)])


@contextlib.contextmanager
def apart(problem: Problem, operands: Operands) -> Iterator[None]:
    """Collect from rows of which the loss, computed inside, is of a few tokens."""
    begun = None if in_functorch() else begin(problem, operands)
    if begun is not None:
        x = problem.narrow(as_rows(operands.input.detach()))
        weight = None if operands.row_weight is None else row_vector(operands.row_weight, x.size(0))
        begun.figures.copy_(figures_of(problem, x, weight))
        end([begun])
    with paused():
        yield


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing of the losses inside."""
    token = _collected.set(None)
    try:
        yield
    finally:
        _collected.reset(token)
