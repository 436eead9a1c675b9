"""Textbook formulas in plain torch: rivals in their own dtype, the truth in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    if kind in ("kl", "reverse_kl", "jeffreys"):
        log_q, log_p = log_masses(x, form), log_masses(y, form)
        p_q = lambda: F.kl_div(log_q, masses(y, form), reduction="none").sum(-1)
        q_p = lambda: F.kl_div(log_p, masses(x, form), reduction="none").sum(-1)
        return {"kl": p_q, "reverse_kl": q_p, "jeffreys": lambda: p_q() + q_p()}[kind]()
    q, p = masses(x, form), masses(y, form)
    relative_entropy = lambda a, b: (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(-1)
    if kind == "jensen_shannon":
        weight = parameters["weight"]
        m = weight * p + (1 - weight) * q
        return weight * relative_entropy(p, m) + (1 - weight) * relative_entropy(q, m)
    if kind == "total_variation":
        return (p - q).abs().sum(-1) / 2
    if kind == "hellinger":
        return (p.sqrt() - q.sqrt()).square().sum(-1) / 2
    if kind == "chi2":
        return ((p - q).square() / q).sum(-1)
    alpha = parameters["alpha"]
    if kind == "skew_kl":
        return relative_entropy(p, alpha * p + (1 - alpha) * q)
    overlap = (p**alpha * q ** (1 - alpha)).sum(-1)
    if kind == "alpha":
        return (1 - overlap) / (alpha * (1 - alpha))
    return overlap.log() / (alpha - 1)


def truth(kind: str, form: str, x: Tensor, y: Tensor, **parameters: float) -> Tensor:
    """[rows] in float64, a few rows at a time."""
    step = max(1, (1 << 24) // max(1, x.size(-1)))
    parts = [
        rows(kind, form, x[i : i + step].double(), y[i : i + step].double(), **parameters)
        for i in range(0, x.size(0), step)
    ]
    return torch.cat(parts)
