"""TRL's DistillationTrainer, with its loss found here."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kullback import functional
from kullback.collecting import collecting_statistics
from kullback.sharded import is_dtensor

MODULE, FUNCTION = "trl.trainer.distillation_trainer", "_chunked_divergence_loss"
VERSION = "1.16"  # of trl, whose function this takes the place of
KINDS: dict[float, tuple[str, dict[str, Any]]] = {0.0: ("kl", {}), 1.0: ("reverse_kl", {})}  # of beta, at its ends


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Inside, `trl.DistillationTrainer` finds its loss by `kullback.linear_divergence`.

    The loss, the entropy it logs and the gradients are TRL's own; each model's logits are found once, and not again in
    the backward. The heads are TRL's to choose: its trainer calls its loss inside the wrapper's forward, so that DDP,
    FSDP and accelerate need nothing else. FSDP2's heads are gathered here, as in its function, and so are ZeRO-3's.

    `beta` is the trainer's: 0 is kl, 1 is reverse_kl, and what lies between is jensen_shannon of that beta.

    Raises:
        ImportError: without trl, or of a version whose trainer has no such function, or one of other arguments.
        ValueError: in training, of a head in ZeRO-3's pieces with float16.

    >>> import kullback.integrations.trl
    >>> # with kullback.integrations.trl.patched():
    >>> #     DistillationTrainer(student, teacher, ...).train()
    """
    module = _trainer_module()
    theirs = getattr(module, FUNCTION)
    setattr(module, FUNCTION, chunked_divergence_loss)
    try:
        yield
    finally:
        setattr(module, FUNCTION, theirs)


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's `_chunked_divergence_loss`: the loss, the sum of the student's entropies, and how many tokens count."""
    from trl.trainer import utils

    gathered: Any = utils.maybe_gather_lm_head_ctx
    is_in_pieces = hasattr(student_lm_head_weight, "ds_id")
    if is_in_pieces and student_hidden_states.dtype == torch.float16 and torch.is_grad_enabled():
        raise ValueError(
            "student_lm_head_weight is kept in pieces by DeepSpeed (ZeRO-3), and hidden states are float16, of which a "
            "backward reads the head again when it is gone: train in bfloat16, or with ZeRO-2"
        )
    counts = completion_mask != 0
    student, teacher = student_hidden_states[counts], teacher_hidden_states[counts]  # others are not even projected
    count = counts.sum()
    normalizer = count if num_items_in_batch is None else num_items_in_batch
    kind, parameter = KINDS.get(beta, ("jensen_shannon", {"beta": beta}))
    with (
        gathered(student_lm_head_weight, student_lm_head_bias),
        gathered(teacher_lm_head_weight, teacher_lm_head_bias),
        collecting_statistics() as collected,
    ):
        loss = functional.linear_divergence(
            student,
            _whole(student_lm_head_weight, student.dtype),
            teacher.detach(),
            _whole(teacher_lm_head_weight.detach(), teacher.dtype),
            kind,
            bias=None if student_lm_head_bias is None else _whole(student_lm_head_bias, student.dtype),
            target_bias=None if teacher_lm_head_bias is None else _whole(teacher_lm_head_bias.detach(), teacher.dtype),
            temperature=temperature,
            logit_scale=student_logit_scale,
            target_logit_scale=teacher_logit_scale,
            softcap=student_final_logit_softcapping,
            target_softcap=teacher_final_logit_softcapping,
            normalizer=normalizer.to(student.device) if isinstance(normalizer, Tensor) else normalizer,
            **parameter,
        )
    return loss, collected[0].entropy.sum(), count


def _whole(head: Tensor, dtype: torch.dtype) -> Tensor:
    """A head or bias as its model's hidden states are multiplied by it. Of one that FSDP2 shards by itself, gathered.

    Each rank's gradient is of its own batch: FSDP2 averages those that it gathers, and nobody else those of a DTensor.
    """
    if is_dtensor(head):
        from torch.distributed.tensor import Partial

        head = head.full_tensor(grad_placements=[Partial("avg")] * head.device_mesh.ndim)
    return head.to(dtype)


def _trainer_module() -> Any:
    """TRL's module, if its function is the one that ours takes the place of."""
    try:
        import trl
    except ModuleNotFoundError as error:
        raise ImportError(
            f"kullback.integrations.trl needs trl {VERSION}, which is not installed: pip install 'trl=={VERSION}.*'"
        ) from error
    wanted = list(inspect.signature(chunked_divergence_loss).parameters)
    found = f"trl {trl.__version__}"
    try:
        module = importlib.import_module(MODULE)
        given = list(inspect.signature(getattr(module, FUNCTION)).parameters)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(f"{found} has no {MODULE}.{FUNCTION}; {VERSION} has, and was tested") from error
    if given != wanted:
        unlike = ", ".join(sorted(set(given) ^ set(wanted))) or "their order"
        raise ImportError(
            f"{MODULE}.{FUNCTION} of {found} has other arguments than that of {VERSION}, which was tested: {unlike}"
        )
    return module
