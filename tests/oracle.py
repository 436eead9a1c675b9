"""Textbook definitions in float64, from masses. Imports nothing of ours.

`0 · log 0 = 0` is written out by leaving elements out. Gradients are autograd's, of the textbook formula.
"""

import torch

FORMS = ("probs", "log_probs", "logits")

# Each kind's parameter, none of them the default
PARAMETERS = {
    "mixed_kl": {"beta": 0.3},
    "jensen_shannon": {"beta": 0.3},
    "skew_kl": {"alpha": 0.2},
    "alpha": {"alpha": 0.7},
    "renyi": {"alpha": 0.6},
}


def masses(x, form, temperature=1.0):
    x = x.double()
    if form == "logits":
        return (x / temperature).softmax(-1)
    return x.exp() if form == "log_probs" else x


def sum_over(present, term, p, q):
    """Σ term(p, q) over the elements that are present: of others autograd sees nothing."""
    return torch.where(present, term(torch.where(present, p, 1.0), torch.where(present, q, 1.0)), 0.0).sum(-1)


def sum_of(term, p, q):
    """Over the elements that either side has."""
    return sum_over((p != 0) | (q != 0), term, p, q)


def relative_entropy(p, q):
    """Σ p log(p/q)"""
    return sum_over(p != 0, lambda p, q: p * (p.log() - q.log()), p, q)


def chernoff(p, q, a):
    """Σ p^a q^(1-a)"""
    return sum_over((p > 0) & (q > 0), lambda p, q: p**a * q ** (1 - a), p, q)


def jensen_shannon(p, q, beta=0.5):
    m = beta * p + (1 - beta) * q
    return beta * relative_entropy(p, m) + (1 - beta) * relative_entropy(q, m)


TEXTBOOK = {
    "kl": relative_entropy,
    "reverse_kl": lambda p, q: relative_entropy(q, p),
    "jeffreys": lambda p, q: relative_entropy(p, q) + relative_entropy(q, p),
    "mixed_kl": lambda p, q, beta: beta * relative_entropy(p, q) + (1 - beta) * relative_entropy(q, p),
    "jensen_shannon": jensen_shannon,
    "skew_kl": lambda p, q, alpha: relative_entropy(p, alpha * p + (1 - alpha) * q),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
    "hellinger": lambda p, q: sum_of(lambda p, q: (p.sqrt() - q.sqrt()).square() / 2, p, q),
    "chi2": lambda p, q: sum_of(lambda p, q: (p - q).square() / q, p, q),
    "alpha": lambda p, q, alpha: (1 - chernoff(p, q, alpha)) / (alpha * (1 - alpha)),
    "renyi": lambda p, q, alpha: chernoff(p, q, alpha).log() / (alpha - 1),
}


def rows(kind, p, q, *values, **parameters):
    """The divergence of each row."""
    return TEXTBOOK[kind](p, q, *values, **parameters)


def divergence(x, y, kind, form="logits", target_form=None, temperature=1.0, target_temperature=None, **parameters):
    """[rows] in float64, differentiable in x and y."""
    q = masses(x, form, temperature)
    p = masses(y, target_form or form, target_temperature or temperature)
    return rows(kind, p, q, **parameters)


def labelled(losses, logits, labels, divergence=1.0, label=1.0, z=0.0, smoothing=0.0, temperature=1.0):
    """[rows]: with what the labels (-100: none) and log-sum-exps of the logits add, in float64, differentiable."""
    values = logits.double() / temperature
    lse = values.logsumexp(-1)
    more = z * lse**2
    if labels is not None:
        own = values.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        expected = own if smoothing == 0 else (1 - smoothing) * own + smoothing * values.mean(-1)
        more = torch.where(labels == -100, 0.0, more + label * (lse - expected))
    return divergence * losses + more
