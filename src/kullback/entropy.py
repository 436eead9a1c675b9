"""Entropies of rows of logits whose log-sum-exps are known: what parts of rows have adds up."""

from __future__ import annotations

import torch
from torch import Tensor

from kullback.problem import Problem, capped, inverse_temperature, parts_of_lse

LEAST_LOG = -1e30  # of no mass, times which it is nothing
LOG_HALF = -0.69  # just above log ½: a token of more mass is left out, and what others have is then less than ½


def entropy_parts(problem: Problem, x: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """[2, rows], of these tokens of rows of logits: their mass, and -Σ q log q, which add up over a row's tokens.

    A token that has more than half of its row is left out: what its logarithm is rounded by may be more than the rest.
    dtype: what the log-sum-exps were found in.
    """
    side = problem.input
    scale = inverse_temperature(side, dtype == torch.float64)
    reference, rest = parts_of_lse(lse, scale, dtype)
    logs = (capped(x.to(dtype), side.softcap) - reference.unsqueeze(-1)).mul_(scale).sub_(rest.unsqueeze(-1))
    masses = logs.exp().masked_fill_(logs > LOG_HALF, 0)
    mass = masses.sum(-1)
    return torch.stack([mass, -masses.mul_(logs.clamp_(min=LEAST_LOG)).sum(-1)]).to(lse.dtype)


def entropy_of(parts: Tensor) -> Tensor:
    """Of whole rows: a token that was left out has what the others do not."""
    others, of_others = parts.unbind()
    left = torch.where(others < 0.5, others, 0.0)
    return of_others + (left - 1) * torch.log1p(-left)
