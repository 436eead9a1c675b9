"""Textbook formulas in plain torch: rivals in their own dtype, the truth in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """Σ p log(p/q)"""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def chernoff(p: Tensor, q: Tensor, a: float) -> Tensor:
    """Σ p^a q^(1-a)"""
    return (p**a * q ** (1 - a)).sum(-1)


def jensen_shannon(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * p + (1 - beta) * q
    return beta * relative_entropy(p, m) + (1 - beta) * relative_entropy(q, m)


# Of masses: p of the target, q of the input
TEXTBOOK: dict[str, Callable[..., Tensor]] = {
    "jensen_shannon": jensen_shannon,
    "skew_kl": lambda p, q, alpha: relative_entropy(p, alpha * p + (1 - alpha) * q),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
    "hellinger": lambda p, q: (p.sqrt() - q.sqrt()).square().sum(-1) / 2,
    "chi2": lambda p, q: ((p - q).square() / q).sum(-1),
    "alpha": lambda p, q, alpha: (1 - chernoff(p, q, alpha)) / (alpha * (1 - alpha)),
    "renyi": lambda p, q, alpha: chernoff(p, q, alpha).log() / (alpha - 1),
}


def masses(x: Tensor, form: str) -> Tensor:
    if form == "logits":
        return x.softmax(-1)
    return x.exp() if form == "log_probs" else x


def log_masses(x: Tensor, form: str) -> Tensor:
    if form == "logits":
        return x.log_softmax(-1)
    return x.log() if form == "probs" else x


def rows(kind: str, form: str, x: Tensor, y: Tensor, **parameters: float) -> Tensor:
    """The divergence of each row, as a textbook would write it."""
    if kind in TEXTBOOK:
        return TEXTBOOK[kind](masses(y, form), masses(x, form), **parameters)
    kl = lambda x, y: F.kl_div(log_masses(x, form), masses(y, form), reduction="none").sum(-1)  # as users write it
    if kind == "kl":
        return kl(x, y)
    if kind == "reverse_kl":
        return kl(y, x)
    share = parameters.get("beta")  # of jeffreys each counts once
    return kl(x, y) + kl(y, x) if share is None else share * kl(x, y) + (1 - share) * kl(y, x)


def truth(kind: str, form: str, x: Tensor, y: Tensor, **parameters: float) -> Tensor:
    """[rows] in float64, a few rows at a time."""
    step = max(1, (1 << 24) // max(1, x.size(-1)))
    parts = [
        rows(kind, form, x[i : i + step].double(), y[i : i + step].double(), **parameters)
        for i in range(0, x.size(0), step)
    ]
    return torch.cat(parts)
