"""verl's on-policy distillation from a served teacher's top-k log-probabilities, with its loss found here.

Of verl/trainer/distillation at commit 1dda039b9 (0.10.0.dev).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch import distributed as dist

from kullback import functional
from kullback.collectives import all_gather
from kullback.integrations.log_probs import as_int64, log_probs_at, slices_of

# Loss modes that `register` gives verl.
MODES = {"kullback_kl_topk": "kl", "kullback_reverse_kl_topk": "reverse_kl"}


def register() -> None:
    """Give verl the loss modes `kullback_kl_topk` and `kullback_reverse_kl_topk`, which are found here.

    For these the functions of verl that find losses from logits, of FSDP and of Megatron, hand over to this module. Its
    own modes stay its own. It is for each process of verl's, drivers and workers: call it in a module that the
    environment variable VERL_USE_EXTERNAL_MODULES names.

    Raises:
        ImportError: without verl, or of one whose `compute_forward_kl_topk` has other arguments.
        ValueError: if they are registered already.

    >>> import kullback.integrations.verl
    >>> # kullback.integrations.verl.register()
    >>> # distillation.distillation_loss.loss_mode=kullback_reverse_kl_topk
    """
    losses: Any = importlib.import_module("verl.trainer.distillation.losses")
    places: list[tuple[Any, Callable[..., Any]]]
    places = [(importlib.import_module("verl.trainer.distillation.fsdp.losses"), compute_forward_kl_topk)]
    with contextlib.suppress(ImportError):  # without Megatron
        module = importlib.import_module("verl.trainer.distillation.megatron.losses")
        places.append((module, compute_forward_kl_topk_of_megatron))
    for module, ours in places:
        given, wanted = (list(inspect.signature(f).parameters) for f in (module.compute_forward_kl_topk, ours))
        if given != wanted:
            raise ImportError(f"{module.__name__}.compute_forward_kl_topk has other arguments than {wanted}: {given}")
    settings = losses.DistillationLossSettings(names=list(MODES), use_topk=True)
    losses.register_distillation_loss(settings)(losses.compute_forward_kl_topk)
    for module, ours in places:
        module.compute_forward_kl_topk = _by_mode(module.compute_forward_kl_topk, ours)


def _by_mode(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def compute_forward_kl_topk(
        student_logits: Tensor, teacher_topk_log_probs: Tensor, teacher_topk_ids: Tensor, config: Any, data_format: str
    ) -> Any:
        function = ours if config.distillation_loss.loss_mode in MODES else theirs
        return function(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format)

    return compute_forward_kl_topk


def compute_forward_kl_topk(
    student_logits: Tensor, teacher_topk_log_probs: Tensor, teacher_topk_ids: Tensor, config: Any, data_format: str
) -> dict[str, Tensor]:
    """`compute_forward_kl_topk` of verl's FSDP workers.

    Args:
        student_logits: `[1, tokens, vocab]`, floating point.
        teacher_topk_log_probs: nested, `[batch, tokens of a sequence, k]`, floating point.
        teacher_topk_ids: nested, the same, an integer dtype.
        config: verl's DistillationConfig, whose `distillation_loss.log_prob_min_clamp` is read; of a loss_mode that
            `register` made, the direction, too.
        data_format: "thd" or "bshd"; not read, as in verl.

    Returns:
        As of `topk_losses`, each `[1, tokens]`.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`.

    >>> import kullback.integrations.verl
    >>> # verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk = (
    >>> #     kullback.integrations.verl.compute_forward_kl_topk
    >>> # )
    """
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor

    log_probs, ids = (nested.values().unsqueeze(0) for nested in (teacher_topk_log_probs, teacher_topk_ids))
    if get_ulysses_sequence_parallel_world_size() > 1:
        log_probs, ids = slice_input_tensor(log_probs, dim=1), slice_input_tensor(ids, dim=1)
    return topk_losses(student_logits, log_probs, ids, **_options(config))


def compute_forward_kl_topk_of_megatron(
    student_logits: Tensor, teacher_topk_log_probs: Tensor, teacher_topk_ids: Tensor, config: Any, data_format: str
) -> dict[str, Tensor]:
    """`compute_forward_kl_topk` of verl's Megatron workers, whose ranks share the vocabulary.

    Args:
        student_logits: `[batch, tokens, vocab / ranks]`, floating point: this rank's slice.
        teacher_topk_log_probs: nested, `[batch, tokens of a sequence, k]`, floating point.
        teacher_topk_ids: nested, the same, an integer dtype; of the whole vocabulary.
        config: as of `compute_forward_kl_topk`.
        data_format: "thd" or "bshd": which of verl's functions gives context-parallel ranks their tokens.

    Returns:
        As of `topk_losses`, each `[batch, tokens]`.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`.

    >>> import kullback.integrations.verl
    >>> # verl.trainer.distillation.megatron.losses.compute_forward_kl_topk = (
    >>> #     kullback.integrations.verl.compute_forward_kl_topk_of_megatron
    >>> # )
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from verl.models.mcore import util

    preprocess = util.preprocess_thd_engine if data_format == "thd" else util.preprocess_bshd_engine
    log_probs, ids = (preprocess(t, pre_process=True)[0] for t in (teacher_topk_log_probs, teacher_topk_ids))
    return topk_losses(student_logits, log_probs, ids, group=get_tensor_model_parallel_group(), **_options(config))


def _options(config: Any) -> dict[str, Any]:
    given = config.distillation_loss
    return {"log_prob_min_clamp": given.log_prob_min_clamp, "kind": MODES.get(given.loss_mode, "kl")}


def topk_losses(
    student_logits: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    *,
    kind: str = "kl",
    log_prob_min_clamp: float | None = -10.0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """verl's losses of tokens, and what it logs of them: sums over the teacher's tokens alone (`tail="support"`).

    Σ p log(p/q), or of reverse_kl Σ q log(q/p), where no log p and no log q counts as less than `log_prob_min_clamp`.
    A student's entry below it has no gradient, as that of a clamp.

    Args:
        student_logits: `[..., vocab]`, floating point; with a group the rank's slice, of equal width on all ranks.
        log_probs: the teacher's, `[..., k]`, floating point.
        ids: their tokens, `[..., k]`, an integer dtype, of the whole vocabulary.
        kind: "kl" or "reverse_kl".
        log_prob_min_clamp: at most 0; None: nothing is clamped.
        group: ranks that share the vocabulary.

    Returns:
        Tensors `[...]`: `distillation_losses` in nats, differentiable; `student_mass` and `teacher_mass` at the ids, of
        what is not clamped; `overlap_count`, int64: how many ids are among the student's own k top tokens; and
        `overlap_token_advantage`, the mean of -p log(p/q) over these, 0 without any. Floats are float32, or float64 of
        float64. The same on all ranks.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`.

    What differs from verl: log-probabilities of 16-bit logits are not rounded to 16 bits. Entries of one id are summed.
    Figures have no gradient. With Megatron verl's `student_mass` is of what is clamped.

    >>> import torch
    >>> from kullback.integrations.verl import topk_losses
    >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0, -20.0]]), torch.tensor([[1.0, 0.0, 1.5, -1.0]])
    >>> found = topk_losses(student, *teacher.log_softmax(-1).topk(2))
    >>> found["distillation_losses"], found["student_mass"], found["overlap_count"]
    (tensor([0.6855]), tensor([0.7553]), tensor([1]))
    """
    if kind not in MODES.values():
        raise ValueError(f"kind must be one of {', '.join(MODES.values())}; got {kind!r}")
    if log_prob_min_clamp is not None and not log_prob_min_clamp <= 0:
        raise ValueError(f"log_prob_min_clamp must be at most 0, or None; got {log_prob_min_clamp}")
    ids = as_int64("ids", ids)
    own = log_probs_at(student_logits.detach(), ids, group)
    log_p = log_probs.to(own.dtype)
    student_mass, teacher_mass = own.exp().sum(-1), log_p.exp().sum(-1)
    least = -math.inf if log_prob_min_clamp is None else log_prob_min_clamp
    is_counted, log_p, log_q = own >= least, log_p.clamp_min(least), own.clamp_min(least)
    counted_ids, slices = ids.masked_fill(~is_counted, -1), slices_of(student_logits, group)
    losses = functional.topk_divergence(
        student_logits, log_p, counted_ids, kind, tail="support", reduction="none", **slices
    )
    clamped = log_p.exp() * (log_p - log_q) if kind == "kl" else log_q.exp() * (log_q - log_p)
    overlaps = (ids.unsqueeze(-1) == first_tokens(student_logits.detach(), ids.size(-1), group).unsqueeze(-2)).any(-1)
    count = overlaps.sum(-1)
    advantage = (log_p.exp() * (log_q - log_p)).masked_fill(~overlaps, 0.0).sum(-1) / count.clamp_min(1)
    return {
        "distillation_losses": losses + clamped.masked_fill(is_counted, 0.0).sum(-1),
        "student_mass": student_mass,
        "teacher_mass": teacher_mass,
        "overlap_count": count,
        "overlap_token_advantage": advantage,
    }


def first_tokens(logits: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """[..., count]: the ids of a row's largest logits, on whichever ranks."""
    values, ids = logits.topk(min(count, logits.size(-1)), dim=-1)
    if group is None:
        return ids
    ids = ids + slices_of(logits, group)["first_token"]
    of_all, their_ids = (all_gather(tensor, group).movedim(0, -2).flatten(-2) for tensor in (values, ids))
    return their_ids.gather(-1, of_all.topk(count, dim=-1).indices)
