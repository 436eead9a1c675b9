"""Megatron-LM's distillation from stored top-k log-probabilities, with its loss found here.

Of megatron/training/distillation/cached_logits_loss.py at commit d98e8a64d.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kullback import functional
from kullback.integrations.log_probs import as_int64, slices_of

SENTINEL = -1e3  # CACHED_LOGITS_LOGPROB_SENTINEL: an entry that is none


def topk_kl_div(
    student_logits: Tensor,
    teacher_topk_logprobs: Tensor,
    teacher_topk_indices: Tensor,
    tp_size: int,
    tp_rank: int,
    tp_group: ProcessGroup | None,
    add_ghost_token: bool = False,
) -> Tensor:
    """Megatron-LM's `topk_kl_div`: Σ p log(p/q) over the teacher's tokens, and over all others as one ghost token.

    Megatron adds up what its ranks return. So each returns a tp_size-th of the loss, with the gradient of the whole.

    Args:
        student_logits: `[tokens, batch, vocab / tp_size]`, floating point: this rank's slice. It is not written to;
            Megatron's function shifts a float32 one by its maximum.
        teacher_topk_logprobs: `[tokens, batch, k]`, floating point; -1000 where there is no entry.
        teacher_topk_indices: their ids, `[tokens, batch, k]`, an integer dtype, of the whole vocabulary.
        tp_size: how many ranks share the vocabulary, in slices of one width.
        tp_rank: this one.
        tp_group: the ranks; None of one.
        add_ghost_token: whether the other tokens count, as one (`tail="bucket"`), or are left out ("support").

    Returns:
        `[batch, tokens]`, contiguous, in nats; float32.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`, for example for an id that is no token; Megatron leaves
            such an entry out.

    Megatron lets a ghost token count at least 1e-8. Here the student's counts as what it is, and the teacher's at least
    6e-8; entries that sum to more than 1 are normalised with it. Entries of one id are summed.

    >>> import torch
    >>> from kullback.integrations.megatron import topk_kl_div
    >>> student, teacher = torch.tensor([[[2.0, 1.0, 0.0, 0.0]]]), torch.tensor([[[1.0, 1.0, 0.0, -1.0]]])
    >>> values, ids = teacher.log_softmax(-1).topk(2)
    >>> topk_kl_div(student, values, ids, 1, 0, None, add_ghost_token=True)
    tensor([[0.1004]])
    """
    loss = functional.topk_divergence(
        student_logits,
        teacher_topk_logprobs.float(),
        torch.where(teacher_topk_logprobs == SENTINEL, -1, as_int64("teacher_topk_indices", teacher_topk_indices)),
        "kl",
        tail="bucket" if add_ghost_token else "support",
        reduction="none",
        **slices_of(student_logits, tp_group if tp_size > 1 else None),
    )
    if tp_size > 1:
        share = loss.detach() / tp_size + (loss - loss.detach())  # of the value, and all of the gradient
        loss = torch.where(loss.isinf(), loss, share)
    return loss.transpose(0, 1).contiguous()
