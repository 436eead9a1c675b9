"""Log-probabilities of a row's tokens at a few ids; and what losses are told of a shared vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from kullback import checks, functional
from kullback.dtypes import as_ids
from kullback.tracing import is_traced


def slices_of(logits: Tensor, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Options of losses, for ranks whose slices of the vocabulary are of one width; none without a group."""
    if group is None:
        return {}
    width = logits.size(-1)
    return {
        "group": group,
        "first_token": dist.get_rank(group) * width,
        "total_vocab": dist.get_world_size(group) * width,
    }


def as_int64(name: str, ids: Tensor) -> Tensor:
    """Ids of tokens, whatever integers they are. Other numbers would be rounded to other tokens."""
    if ids.dtype not in checks.IDS:
        raise TypeError(f"{name} must be of an integer dtype; got {ids.dtype}")
    return as_ids(ids)


def check_tokens(name: str, ids: Tensor, vocab: int) -> None:
    """That int64 ids are tokens. Those on a device are not looked at, for that would wait for it."""
    if ids.device.type == "cpu" and not is_traced(ids) and not bool(((ids >= 0) & (ids < vocab)).all()):
        wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
        raise ValueError(f"{name} must lie from 0 to {vocab - 1}; got {wrong}")


def log_probs_at(logits: Tensor, ids: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """log softmax(logits) at the ids, of rows that are read once and never copied.

    The most likely of the ids is a teacher of one token: kl from it is -log q of that token. The others' differ from
    it by what their logits do.

    Args:
        logits: `[..., vocab]`, floating point; with a group the rank's slice, of equal width on all ranks.
        ids: `[..., k]`, int64, tokens of the whole vocabulary; the same on all ranks.
        group: ranks that share the vocabulary, slices in rank order.

    Returns:
        `[..., k]`, in nats, float32, or float64 of float64; the same on all ranks. With a group it has no gradient.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`.

    >>> import torch
    >>> from kullback.integrations.log_probs import log_probs_at
    >>> log_probs_at(torch.tensor([[2.0, 1.0, 0.0, 0.0]]), torch.tensor([[1, 3]]))
    tensor([[-1.4938, -2.4938]])
    """
    width, slices = logits.size(-1), slices_of(logits, group)
    check_tokens("ids", ids, slices.get("total_vocab", width))
    if group is None:
        values = logits.gather(-1, ids)
    else:
        own = ids - slices["first_token"]
        is_here = (own >= 0) & (own < width)
        logits = logits.detach()
        values = logits.gather(-1, own.clamp(0, width - 1)).masked_fill(~is_here, -math.inf)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    largest, place = values.max(-1, keepdim=True)
    certain = torch.zeros_like(largest)
    negative = functional.topk_divergence(
        logits, certain, ids.gather(-1, place), "kl", tail="support", reduction="none", **slices
    )
    return torch.where(values == -math.inf, -math.inf, values - largest - negative.unsqueeze(-1))
