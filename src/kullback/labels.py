"""What a row of logits has to lose beside its divergence: its label's cross-entropy, and its log-sum-exp's square.

    loss       w_d·D + w_l·(lse - (1 - ε)·x_label - ε·mean x) + w_z·lse²
    gradient   w_d·dD/dx + (w_l + 2·w_z·lse)·q - w_l·((1 - ε)·[label] + ε/tokens)

The w are the problem's weights and ε is its smoothing; x are logits as they count. A divergence's gradient is that of
its masses' logarithms less q times their sum, so what multiplies q is taken off that sum: no pass over a row is added.
A row whose label is IGNORED has its divergence alone. Kernels do the same (c/rows.c, cuda/logits/labels.cuh).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kullback.dtypes import accumulator, compute_dtype, kept_dtype
from kullback.problem import IGNORED, Problem, Side, Weights, capped, inverse_temperature


def counts(labels: Tensor | None, like: Tensor) -> Tensor:
    """Which rows have more than their divergence: all, where there are no labels."""
    return torch.ones_like(like, dtype=torch.bool) if labels is None else labels != IGNORED


def losses(
    problem: Problem,
    divergence: Tensor,
    lse: Tensor,
    labels: Tensor | None,
    logit: Tensor,
    mean: Tensor | float,
    offset: Tensor | float = 0.0,
) -> Tensor:
    """Of rows: of the logit of each one's label, and of the mean of its logits. These and lse may lack an offset."""
    weights = problem.weights
    more = weights.z * (lse + offset).square() if weights.z else torch.zeros_like(lse)
    if weights.label:
        smooth = weights.smoothing
        expected = logit if not smooth else (1 - smooth) * logit + smooth * mean
        more = more + weights.label * (lse - expected)
    return weights.divergence * divergence + torch.where(counts(labels, lse), more, 0.0)


def mass_factor(problem: Problem, lse: Tensor, labels: Tensor | None) -> Tensor:
    """Of rows, what multiplies q in the gradient."""
    weights = problem.weights
    return torch.where(counts(labels, lse), weights.label + 2 * weights.z * lse, 0.0)


def are_tokens(labels: Tensor, vocab: int) -> Tensor:
    """Which labels are, or IGNORED."""
    return (labels == IGNORED) | ((labels >= 0) & (labels < vocab))


def demand(vocab: int) -> str:
    """What is asked of them."""
    return f"labels must lie from 0 to {vocab - 1}, or be {IGNORED}"


def assert_tokens(labels: Tensor, vocab: int) -> None:
    """That all are: a label that is no token stops a device, as in torch. By operators, which a compiler can follow."""
    torch._assert_async(are_tokens(labels, vocab).all(), demand(vocab))


def in_slice(labels: Tensor, first_token: int, width: int) -> Tensor:
    """Where labels stand in a slice of the vocabulary; -1 of those that others have."""
    here = labels - first_token
    return torch.where(labels == IGNORED, IGNORED, torch.where((here >= 0) & (here < width), here, -1))


def at_labels(x: Tensor, labels: Tensor) -> Tensor:
    """Of rows [..., tokens] the number at each one's label: any where that is none, and 0 where there are no tokens."""
    return x.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) if x.size(-1) else x.sum(-1)


def label_logits(side: Side, x: Tensor, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of rows [rows, vocab] of logits, as they count; 0 where there is none here. dtype: as of `compute_dtype`."""
    # Capped in the dtype of the pass that found the log-sum-exp: what is left of the two keeps its digits.
    dtype = dtype or compute_dtype(x, x)
    own = capped(at_labels(x, labels).to(dtype), side.softcap)
    scale = inverse_temperature(side, dtype == torch.float64)
    return torch.where(labels < 0, 0.0, own.to(accumulator(x)) * scale)


def weighted_of_masses(
    weights: Weights,
    input: Tensor,
    own: Tensor,
    form: str,
    labels: Tensor,
    row_weight: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Of rows of probabilities or their logarithms, taken as they are: what labels add to losses, differentiable.

    own: the labels' among them. dtype: of the losses. A row of weight 0 is not read: 0 times its derivative may be NaN.
    """
    if weights.label == 0:  # times which an infinite logarithm is no number
        return own.to(kept_dtype(dtype)).masked_fill(torch.ones_like(own, dtype=torch.bool), 0.0)
    has_label = counts(labels, labels)
    if row_weight is not None:
        has_label = has_label & (row_weight != 0)
    own = torch.where(has_label, own.to(kept_dtype(dtype)), 1.0)
    log_q = own.log() if form == "probs" else own
    if weights.smoothing:
        values = torch.where(has_label.unsqueeze(-1), input.to(own.dtype), 1.0)
        mean = (values.log() if form == "probs" else values).mean(-1)
        log_q = (1 - weights.smoothing) * log_q + weights.smoothing * mean
    loss = torch.where(has_label, -weights.label * log_q, 0.0)
    return loss if row_weight is None else loss * row_weight


LEAST_SHARE = 1e-20  # of a divergence's gradient in what labels and log-sum-exps add to it: less does not show


def shifted(
    problem: Problem, d_log_q: Tensor, d_loss: Tensor, lse: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of rows Σ d_log_q with which the divergence's gradient, times its weight, has the factor in it; and d_loss.

    That divides the factor: where there is one, d_loss is not so near to 0 that it could not.
    """
    weights, factor = problem.weights, mass_factor(problem, lse, labels)
    if not problem.formula.finish_is_identity:
        least = LEAST_SHARE * (abs(weights.label) + abs(weights.z)) / abs(weights.divergence)
        d_loss = torch.where((d_loss.abs() < least) & (factor != 0), least, d_loss)
    return d_log_q - torch.where(factor == 0, 0.0, factor / (weights.divergence * d_loss)), d_loss


class Marks(NamedTuple):
    """What is taken off a gradient of logits as they count, of rows' tokens."""

    columns: Tensor  # [rows]: of labels, of whatever column where there is none here
    at_label: Tensor  # [rows]: 0 where there is none here
    everywhere: Tensor | None  # [rows]: with smoothing

    def take_off(self, gradient: Tensor) -> Tensor:
        """The gradient without the marks, in its place."""
        if self.everywhere is not None:
            gradient.sub_(self.everywhere.to(gradient.dtype).unsqueeze(-1))
        if not gradient.size(-1):
            return gradient
        return gradient.scatter_add_(-1, self.columns.unsqueeze(-1), -self.at_label.to(gradient.dtype).unsqueeze(-1))

    def select(self, rows: Tensor) -> Marks:
        everywhere = None if self.everywhere is None else self.everywhere[rows]
        return Marks(self.columns[rows], self.at_label[rows], everywhere)


def marks(problem: Problem, labels: Tensor | None, upstream: Tensor, tokens: int, first: int, width: int) -> Marks:
    """Of so many columns from the first on, of rows of so many tokens. `upstream`: of rows' losses."""
    smooth, weight = problem.weights.smoothing, upstream * problem.weights.label
    weight = torch.where(counts(labels, upstream), weight, 0.0)
    here = labels - first if labels is not None else torch.full_like(upstream, -1, dtype=torch.int64)
    is_here = (here >= 0) & (here < width)
    at_label = torch.where(is_here, weight * (1 - smooth), 0.0)
    return Marks(torch.where(is_here, here, 0), at_label, weight * (smooth / tokens) if smooth else None)
