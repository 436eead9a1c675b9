"""NeMo-RL's distillation losses, found here.

Of nemo_rl/algorithms/loss/loss_functions.py and nemo_rl/distributed/model_utils.py at commit 7ea279abf (0.6.0).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from kullback import functional
from kullback.integrations.log_probs import as_int64, check_tokens, slices_of
from kullback.sharded import is_dtensor

TYPES = ("forward", "reverse", "mixed")  # of kl
LOG_INFINITESIMAL = -100.0  # DistillationLossFn's log p of tokens that the teacher's k leave out


def distillation_loss(
    logits: Tensor,
    data: Any,
    global_valid_seqs: Tensor | None,
    global_valid_toks: Tensor | float,
    *,
    kl_type: str = "mixed",
    mixed_kl_weight: float = 0.5,
    zero_outside_topk: bool = False,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """`DistillationLossFn`, from logits: with what `prepare_loss_input` does for it.

    Args:
        logits: the student's, `[batch, tokens, vocab]`, floating point; with a group the rank's slice, of equal width
            on all ranks. A DTensor's group is its mesh's "tp".
        data: a mapping with `teacher_topk_logits` and `teacher_topk_indices`, `[batch, tokens, k]`; `input_ids`; and
            `token_mask`, `[batch, tokens]`, and `sample_mask`, `[batch]`, or neither.
        global_valid_seqs: not read, as in NeMo-RL.
        global_valid_toks: what the sum over tokens is divided by, after 1e-8 is added.
        kl_type: "forward" is kl, "reverse" is reverse_kl, and "mixed" is mixed_kl_weight · kl + (1 - mixed_kl_weight) ·
            reverse_kl.
        mixed_kl_weight: from 0 to 1.
        zero_outside_topk: whether the student's distribution is of all tokens, and the teacher has e^-100 at those
            that its k leave out; else both are of the k (`tail="renormalize"`).
        vocab_parallel_group: ranks that share the vocabulary.
        context_parallel_group: of one rank, or None.

    Returns:
        The loss, 0-d, in nats, float32 or float64 of float64; and NeMo-RL's metrics, for which the host waits.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`; for names that NeMo-RL does not have; for sequences that
            are shared by a context_parallel_group; for DTensors of another placement or of unequal slices.

    >>> import torch
    >>> from kullback.integrations.nemo_rl import distillation_loss
    >>> student, teacher = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]), torch.tensor([[[1.0, 3.0]] * 2])
    >>> data = {"teacher_topk_logits": teacher, "teacher_topk_indices": torch.tensor([[[0, 2]] * 2])}
    >>> distillation_loss(student, data | {"input_ids": torch.tensor([[5, 7]])}, None, 1.0, kl_type="forward")
    (tensor(1.5232), {'loss': 1.523..., 'num_valid_samples': 1})
    """
    if kl_type not in TYPES:
        raise ValueError(f'kl_type must be "forward", "reverse" or "mixed"; got {kl_type!r}')
    if not 0 <= mixed_kl_weight <= 1:
        raise ValueError(f"mixed_kl_weight must lie from 0 to 1; got {mixed_kl_weight}")
    if is_dtensor(logits):
        vocab_parallel_group = logits.device_mesh.get_group("tp")
        names = logits.device_mesh.mesh_dim_names or ()
        placement = logits.placements[names.index("tp")]
        ranks = dist.get_world_size(vocab_parallel_group)
        if ranks > 1 and (not placement.is_shard(logits.dim() - 1) or logits.size(-1) % ranks):
            raise ValueError(
                f'logits must be sharded over "tp" by equal parts of their tokens; got {placement} of '
                f"{logits.size(-1)} tokens and {ranks} ranks"
            )
        context_parallel_group = logits.device_mesh.get_group("cp") if "cp" in names else None
        logits = logits.to_local()
    if context_parallel_group is not None and dist.get_world_size(context_parallel_group) > 1:
        raise ValueError("sequences are shared by a context_parallel_group, which this loss does not know")
    values, ids = (data[name].to(logits.device) for name in ("teacher_topk_logits", "teacher_topk_indices"))
    ids = as_int64("teacher_topk_indices", ids)
    row_weight, normalizer = _counted(data, logits.shape[:2], global_valid_toks)
    options: dict[str, Any] = {"row_weight": row_weight.to(logits.device), "reduction": "sum"}
    slices = slices_of(logits, vocab_parallel_group)

    def loss_of(kind: str, **parameter: Any) -> Tensor:
        if zero_outside_topk and kind == "reverse_kl":
            check_tokens("teacher_topk_indices", ids, slices.get("total_vocab", logits.size(-1)))
            dense = _everywhere(values, ids, logits, slices.get("first_token", 0))
            group = vocab_parallel_group
            return functional.divergence(logits, dense, kind, target_form="log_probs", group=group, **options)
        tail = "support" if zero_outside_topk else "renormalize"
        return functional.topk_divergence(
            logits, values, ids, kind, target_form="logits", tail=tail, **parameter, **options, **slices
        )

    share = {"forward": 1.0, "reverse": 0.0}.get(kl_type, mixed_kl_weight)
    if share in (0, 1):
        total = loss_of("kl" if share else "reverse_kl")
    elif zero_outside_topk:
        total = share * loss_of("kl") + (1 - share) * loss_of("reverse_kl")
    else:
        total = loss_of("mixed_kl", beta=share)
    loss = total / normalizer
    return loss, {"loss": float(loss.item()), "num_valid_samples": data["input_ids"].shape[0]}


def _counted(data: Any, shape: torch.Size, tokens: Tensor | float) -> tuple[Tensor, Tensor | float]:
    """What each token counts, [batch, tokens], and what the sum is divided by. The last has no next, and counts 0."""
    if "token_mask" in data and "sample_mask" in data:
        mask = data["token_mask"][:, 1 : shape[1]] * data["sample_mask"].unsqueeze(-1)
        return F.pad(mask, (0, 1)), tokens + 1e-8
    return F.pad(torch.ones(shape[0], shape[1] - 1), (0, 1)), shape[0] * (shape[1] - 1)


def _everywhere(values: Tensor, ids: Tensor, student: Tensor, first_token: int) -> Tensor:
    """[batch, tokens, vocab]: the teacher's log-probabilities at its ids, and next to nothing elsewhere."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    log_p, own, width = values.to(dtype).log_softmax(-1), ids - first_token, student.size(-1)
    log_p = log_p.masked_fill((own < 0) | (own >= width), LOG_INFINITESIMAL)  # what other ranks have
    dense = log_p.new_full(student.shape, LOG_INFINITESIMAL)
    return dense.scatter_reduce_(-1, own.clamp(0, width - 1), log_p, "amax")


def direct_topk_kl(
    self: Any,
    student_logits: Tensor,
    teacher_full_logits: Tensor,
    align: Any,
    global_valid_toks: Tensor,
    *,
    tp_group: dist.ProcessGroup | None,
    cp_group: dist.ProcessGroup | None,
) -> Tensor:
    """`CrossTokenizerDistillationLossFn._direct_topk_kl`: of a teacher with the student's tokens.

    Put it in place by `CrossTokenizerDistillationLossFn._direct_topk_kl = direct_topk_kl`. Which tokens count, one set
    for all positions, and which positions, NeMo-RL's own functions say.

    Args:
        self: the loss, whose `temperature`, `reverse_kl`, `vocab_topk` and `student_vocab_size` are read.
        student_logits: `[batch, tokens, vocab]`, floating point; with a tp_group the rank's slice.
        teacher_full_logits: `[batch, tokens, at least student_vocab_size]`, floating point.
        align: NeMo-RL's LocalizedAlignment.
        global_valid_toks: how many tokens count, 0-d.
        tp_group: ranks that share the vocabulary.
        cp_group: ranks that share sequences.

    Returns:
        0-d, in nats times temperature², as NeMo-RL has it.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`.

    >>> import kullback.integrations.nemo_rl
    >>> # CrossTokenizerDistillationLossFn._direct_topk_kl = kullback.integrations.nemo_rl.direct_topk_kl
    """
    from nemo_rl.algorithms.x_token.loss_utils import select_teacher_topk_indices

    student = student_logits.to_local() if is_dtensor(student_logits) else student_logits
    teacher = teacher_full_logits[..., : self.student_vocab_size]
    ids = select_teacher_topk_indices(teacher, min(self.vocab_topk, teacher.size(-1)), cp_group=cp_group)
    if tp_group is not None and dist.get_world_size(tp_group) == 1:
        tp_group = None
    of_tokens = functional.topk_divergence(
        student,
        teacher[..., ids],
        ids.expand(*student.shape[:-1], -1),
        "reverse_kl" if self.reverse_kl else "kl",
        target_form="logits",
        tail="renormalize",
        temperature=self.temperature,
        reduction="none",
        **slices_of(student, tp_group),
    )
    loss: Tensor = self._same_vocab_masked_kl(of_tokens, align, global_valid_toks, cp_group)
    return loss
