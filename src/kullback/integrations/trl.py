"""TRL's distilling trainers, with their losses found here."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback import functional
from kullback.collecting import collecting_statistics
from kullback.integrations.beta import kind_of
from kullback.integrations.log_probs import log_probs_at
from kullback.problem import IGNORED
from kullback.sharded import is_dtensor

VERSION = "1.16"  # of trl, whose functions these take the place of


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Inside, TRL's distilling trainers find their losses here.

    | trainer | function | with |
    | --- | --- | --- |
    | `DistillationTrainer` | `_chunked_divergence_loss` | `linear_divergence` |
    | `GKDTrainer` | `generalized_jsd_loss` | `divergence` |
    | `SDPOTrainer`, `SDFTTrainer` | `compute_divergence`, `compute_full_logit_self_distillation_loss` | `divergence` |
    | the same | `compute_topk_self_distillation_loss` | `topk_divergence` |

    Losses, gradients and the entropy that is logged are TRL's own. So is the meaning of beta or alpha: 0 is kl, 1 is
    reverse_kl, and what lies between is jensen_shannon of that beta. DDP, FSDP and accelerate need nothing else:
    trainers call their losses as before. FSDP2's and ZeRO-3's heads are gathered here, as in TRL's function.

    All but `DistillationTrainer` are experimental. One that TRL lacks, or that cannot be imported, is left alone. What
    these trainers have besides stays TRL's, for example `compute_sampled_token_self_distillation_loss`.

    Raises:
        ImportError: without trl; of a version without one of these functions, or with one of other arguments.
        ValueError: in training, of a head in ZeRO-3's pieces with float16; of `generalized_jsd_loss`, a reduction that
            is of elements.

    >>> import kullback.integrations.trl
    >>> # with kullback.integrations.trl.patched():
    >>> #     DistillationTrainer(student, teacher, ...).train()
    """
    with contextlib.ExitStack() as undone:
        for owner, place in _found():
            before = vars(owner)[place.name]
            undone.callback(setattr, owner, place.name, before)
            setattr(owner, place.name, staticmethod(place.ours) if inspect.isclass(owner) else place.ours)
        yield


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
    kind, parameter = kind_of(beta)
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


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """`GKDTrainer.generalized_jsd_loss` of trl 1.16: a mean over the tokens that count.

    Args:
        student_logits: `[batch, tokens, vocab]`, floating point.
        teacher_logits: the same.
        labels: `[batch, tokens]`, int64; -100 where a token does not count.
        beta: 0 is kl, 1 is reverse_kl, and what lies between is jensen_shannon of that beta.
        temperature: of both; no factor T² is applied.
        reduction: "batchmean" divides by the tokens that count, or without labels by the batch's size. "sum" does not
            divide, and "mean" divides by vocab, too.
        num_items_in_batch: divides the sum instead, whatever the reduction.

    Returns:
        0-d, in nats; float32, or float64 of float64. TRL's has the logits' dtype.

    Raises:
        TypeError, ValueError: of `kullback.divergence`; for "none", which is of elements and would be [rows, vocab].

    >>> import torch
    >>> from kullback.integrations.trl import generalized_jsd_loss
    >>> student, teacher = torch.tensor([[[2.0, 1.0, 0.0]]]), torch.tensor([[[1.0, 1.0, 1.0]]])
    >>> generalized_jsd_loss(student, teacher, torch.tensor([[1]]))
    tensor(0.0687)
    """
    if reduction not in ("batchmean", "sum", "mean"):
        raise ValueError(
            f'reduction must be "batchmean", "sum" or "mean"; got {reduction!r}: losses of elements are not found here'
        )
    kind, parameter = kind_of(beta)
    if labels is not None and labels.shape != student_logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape {list(student_logits.shape[:-1])} of student_logits; got {list(labels.shape)}"
        )
    normalizer: Tensor | float | None = num_items_in_batch
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(student_logits.device)
    elif normalizer is None and labels is None and reduction == "batchmean":
        normalizer = max(student_logits.size(0), 1)
    is_sum = reduction == "sum" and num_items_in_batch is None
    loss = functional.divergence(
        student_logits,
        teacher_logits,
        kind,
        temperature=temperature,
        row_weight=None if labels is None else labels != IGNORED,
        reduction="sum" if is_sum else "mean",
        normalizer=normalizer,
        **parameter,
    )
    of_elements = reduction == "mean" and num_items_in_batch is None
    return loss / student_logits.size(-1) if of_elements else loss


def compute_divergence(student_log_probs: Tensor, teacher_log_probs: Tensor, alpha: float) -> Tensor:
    """`compute_divergence` of trl 1.16's sdpo and sdft: sums over what is given, whatever the masses sum to.

    Args:
        student_log_probs: `[..., k]`, floating point.
        teacher_log_probs: the same.
        alpha: 0 is kl, 1 is reverse_kl, and what lies between is jensen_shannon of that beta.

    Returns:
        `[...]`, in nats; float32, or float64 of float64. TRL's has the argument's dtype.

    Raises:
        TypeError, ValueError: of `kullback.divergence`.

    >>> import torch
    >>> from kullback.integrations.trl import compute_divergence
    >>> q, p = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    >>> compute_divergence(q, p, 0.0)
    tensor(0.1438)
    """
    kind, parameter = kind_of(alpha, "alpha")
    return functional.divergence(
        student_log_probs, teacher_log_probs, kind, form="log_probs", reduction="none", **parameter
    )


def compute_full_logit_self_distillation_loss(
    student_logits: Tensor, teacher_logits: Tensor, *, distillation_alpha: float
) -> Tensor:
    """`compute_full_logit_self_distillation_loss` of trl 1.16's sdpo and sdft.

    Args:
        student_logits: `[..., vocab]`, floating point.
        teacher_logits: the same.
        distillation_alpha: as alpha of `compute_divergence`.

    Returns:
        `[...]`, in nats; float32, or float64 of float64. TRL's has the logits' dtype.

    Raises:
        TypeError, ValueError: of `kullback.divergence`.

    >>> import torch
    >>> from kullback.integrations.trl import compute_full_logit_self_distillation_loss
    >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    >>> compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=1.0)
    tensor([0.2662])
    """
    kind, parameter = kind_of(distillation_alpha, "distillation_alpha")
    return functional.divergence(student_logits, teacher_logits, kind, reduction="none", **parameter)


def compute_topk_self_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    distillation_topk: int,
    distillation_alpha: float,
    distillation_add_tail: bool,
) -> Tensor:
    """`compute_topk_self_distillation_loss` of trl 1.16's sdpo and sdft: at the student's own k top tokens.

    Args:
        student_logits: `[..., vocab]`, floating point.
        teacher_logits: the same.
        distillation_topk: k.
        distillation_alpha: as alpha of `compute_divergence`.
        distillation_add_tail: whether the other tokens are one more outcome (`tail="bucket"`), or left out of both
            distributions ("renormalize").

    Returns:
        `[...]`, in nats; float32, or float64 of float64. TRL's has the logits' dtype.

    Raises:
        TypeError, ValueError: of `kullback.topk_divergence`.

    TRL lets a tail count at least 1e-7. Here the student's counts as what it is, and the teacher's at least 6e-8.

    >>> import torch
    >>> from kullback.integrations.trl import compute_topk_self_distillation_loss
    >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 1.5, -1.0]])
    >>> options = {"distillation_topk": 2, "distillation_alpha": 1.0}
    >>> compute_topk_self_distillation_loss(student, teacher, distillation_add_tail=True, **options)
    tensor([0.3427])
    """
    kind, parameter = kind_of(distillation_alpha, "distillation_alpha")
    if not 1 <= distillation_topk <= student_logits.size(-1):
        raise ValueError(f"distillation_topk must lie from 1 to {student_logits.size(-1)}; got {distillation_topk}")
    ids = student_logits.topk(distillation_topk, dim=-1).indices
    if distillation_add_tail:
        values, form, tail = log_probs_at(teacher_logits, ids), "log_probs", "bucket"
    else:
        values, form, tail = teacher_logits.gather(-1, ids), "logits", "renormalize"
    return functional.topk_divergence(
        student_logits, values, ids, kind, target_form=form, tail=tail, reduction="none", **parameter
    )


class Place(NamedTuple):
    """A function of TRL's, and ours."""

    module: str
    owner: str  # the class that has it; none: the module itself
    name: str
    ours: Callable[..., Any]

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


STABLE = (Place("trl.trainer.distillation_trainer", "", "_chunked_divergence_loss", chunked_divergence_loss),)
OF_TOKENS = (compute_divergence, compute_full_logit_self_distillation_loss, compute_topk_self_distillation_loss)
EXPERIMENTAL = (
    Place("trl.experimental.gkd.gkd_trainer", "GKDTrainer", "generalized_jsd_loss", generalized_jsd_loss),
    *(
        Place(f"trl.experimental.{trainer}.{module}", "", ours.__name__, ours)
        for trainer in ("sdpo", "sdft")
        for module in ("loss_utils", f"{trainer}_trainer")  # which imports the names
        for ours in OF_TOKENS
    ),
)


def _found() -> list[tuple[Any, Place]]:
    """What has each function: a module or a class."""
    try:
        import trl
    except ModuleNotFoundError as error:
        raise ImportError(
            f"kullback.integrations.trl needs trl {VERSION}, which is not installed: pip install 'trl=={VERSION}.*'"
        ) from error
    version = f"trl {trl.__version__}"
    found = [(_owner(place, importlib.import_module, version), place) for place in STABLE]
    experimental = ((_owner(place, _experimental_module, version), place) for place in EXPERIMENTAL)
    return found + [(owner, place) for owner, place in experimental if owner is not None]


def _experimental_module(name: str) -> Any:
    """None where there is none, or one that wants what is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


def _owner(place: Place, importing: Callable[[str], Any], version: str) -> Any:
    """What has the function, if that is the one that ours takes the place of; None of a module that is none."""
    try:
        module = importing(place.module)
        if module is None:
            return None
        owner = getattr(module, place.owner) if place.owner else module
        given = list(inspect.signature(vars(owner)[place.name]).parameters)
    except (ModuleNotFoundError, AttributeError, KeyError) as error:
        raise ImportError(f"{version} has no {place}; {VERSION} has, and was tested") from error
    wanted = list(inspect.signature(place.ours).parameters)
    if given != wanted:
        unlike = ", ".join(sorted(set(given) ^ set(wanted))) or "their order"
        raise ImportError(
            f"{place} of {version} has other arguments than that of {VERSION}, which was tested: {unlike}"
        )
    return owner
