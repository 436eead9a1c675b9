"""Textbook definitions in float64, from masses. Imports nothing of ours.

`0 · log 0 = 0` is written out by leaving elements out. Gradients are autograd's, of the textbook formula.
"""

import torch

FORMS = ("probs", "log_probs", "logits")

PARAMETERS = {
    "kl": {},
    "reverse_kl": {},
    "jeffreys": {},
    "jensen_shannon": {"weight": 0.3},
    "skew_kl": {"alpha": 0.2},
    "total_variation": {},
    "hellinger": {},
    "chi2": {},
    "alpha": {"alpha": 0.7},
    "renyi": {"alpha": 0.6},
}


def masses(x, form, temperature=1.0):
    x = x.double()
    if form == "logits":
        return (x / temperature).softmax(-1)
    return x.exp() if form == "log_probs" else x


def relative_entropy(a, b):
    """Σ a log(a/b)"""
    present = a != 0
    safe_a, safe_b = torch.where(present, a, 1.0), torch.where(present, b, 1.0)
    return torch.where(present, safe_a * (safe_a.log() - safe_b.log()), 0.0).sum(-1)


def overlap(p, q, a):
    """Σ p^a q^(1-a)"""
    present = (p > 0) & (q > 0)
    safe_p, safe_q = torch.where(present, p, 1.0), torch.where(present, q, 1.0)
    return torch.where(present, safe_p**a * safe_q ** (1 - a), 0.0).sum(-1)


def rows(kind, p, q, weight=0.5, alpha=None):
    """The divergence of each row."""
    if kind == "kl":
        return relative_entropy(p, q)
    if kind == "reverse_kl":
        return relative_entropy(q, p)
    if kind == "jeffreys":
        return relative_entropy(p, q) + relative_entropy(q, p)
    if kind == "jensen_shannon":
        m = weight * p + (1 - weight) * q
        return weight * relative_entropy(p, m) + (1 - weight) * relative_entropy(q, m)
    if kind == "skew_kl":
        return relative_entropy(p, alpha * p + (1 - alpha) * q)
    if kind == "total_variation":
        return (p - q).abs().sum(-1) / 2
    if kind == "hellinger":
        return (p.sqrt() - q.sqrt()).square().sum(-1) / 2
    if kind == "chi2":
        return ((p - q).square() / q).sum(-1)
    if kind == "alpha":
        return (1 - overlap(p, q, alpha)) / (alpha * (1 - alpha))
    if kind == "renyi":
        return overlap(p, q, alpha).log() / (alpha - 1)
    raise ValueError(kind)


SMOOTH = [kind for kind in PARAMETERS if kind != "total_variation"]  # at p = q


def divergence(x, y, kind, form="logits", target_form=None, temperature=1.0, target_temperature=None, **parameters):
    """[rows] in float64, differentiable in x and y."""
    q = masses(x, form, temperature)
    p = masses(y, target_form or form, target_temperature or temperature)
    return rows(kind, p, q, **parameters)
