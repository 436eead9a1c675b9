"""Distillation of a Hugging Face language model: its own forward returns the divergence from a teacher as its loss."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kullback import checks, functional
from kullback.divergences import Kind
from kullback.dtypes import as_ids
from kullback.notices import notice
from kullback.problem import IGNORED

Model: TypeAlias = Any  # transformers' PreTrainedModel, which is not imported here


class Head(NamedTuple):
    """What a model makes of its last hidden states: softcap · tanh(scale · (weight · hidden + bias) / softcap)."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


FORMER = "_kullback_former_forward"


class Distillation:
    """What `distil` has done, and how it is undone: by `undo()`, or where a `with` ends."""

    def __init__(self, model: nn.Module, forward: Any) -> None:
        self._model: nn.Module | None = model
        if "forward" in vars(model):  # accelerate's, with hooks: kept in the model, so that copies have their own
            vars(model)[FORMER] = vars(model)["forward"]
        self._forward = model.forward = forward
        self.was_used = False  # whether the student's loss has been the divergence

    @property
    def is_over(self) -> bool:
        """Whether it was undone: then its forward, wherever another holds it, is the student's own."""
        return self._model is None

    def own_forward(self, model: nn.Module) -> Any:
        """What the model did before."""
        return vars(model).get(FORMER) or functools.partial(type(model).forward, model)

    def undo(self) -> None:
        """Give the student its own forward back."""
        model, self._model = self._model, None
        if model is None:
            return
        present = vars(model).get("forward", self._forward)
        is_replaced = present != self._forward
        if is_replaced and vars(model).get("_original_forward") == self._forward:
            return  # accelerate's mixed precision is around it, and stays
        vars(model).pop("forward", None)
        former = vars(model).pop(FORMER, None)
        if former is not None and "_hf_hook" in vars(model):  # else its hooks were taken off
            model.forward = former
        if is_replaced and not self.was_used:
            notice(
                "the student's forward was replaced by another's while it was distilled, as trainers of TRL do when "
                "they are made: where that one found the loss, the teacher was not used",
                RuntimeWarning,
            )

    def __enter__(self) -> Distillation:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


NO_LABELS = (
    "a distilled student was called in training without labels: its own forward ran, and the teacher was not used. "
    "Trainer's label_smoothing_factor and compute_loss_func take labels out of the batch: distil has label_smoothing"
)


# Of a batch with images these say which tokens are theirs. Without images they say nothing.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Of soft prompts
OF_ONE_MODEL = "which its teacher cannot share: it has embeddings and layers of its own"
# What a cross-entropy of its own shares with the divergence.
OPTIONS_OF_LABELS = ("valid_vocab", "reduction", "chunk_rows", "logits_dtype")
# Options of `kullback.linear_divergence` that a pair of models says, and why
NO_OPTIONS = {
    **dict.fromkeys(("target_form", "tail"), "a teacher's head makes logits"),
    **dict.fromkeys(
        ("logit_scale", "target_logit_scale", "softcap", "target_softcap"), "it is read from the models' configurations"
    ),
    **dict.fromkeys(("group", "first_token", "total_vocab", "sequence_dim"), "each process has whole heads and rows"),
}
DATA_PARALLEL = "nn.DataParallel's copies of a student are not distilled: start a process for each GPU, by torchrun"
IN_PIECES = "is kept in pieces by DeepSpeed (ZeRO-3), which a loss from hidden states cannot read"
# What a model's forward takes and its decoder does not.
NOT_OF_DECODERS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict", "use_cache")


def distil(
    student: nn.Module, teacher: nn.Module, kind: Kind | str = "kl", *, label_weight: float = 0.0, **options: Any
) -> Distillation:
    """From now on `student(**batch).loss`, in training, is the divergence from the teacher, in nats a token.

    With a `label_weight` it is divergence_weight · divergence + label_weight · the model's own loss, which is the
    cross-entropy of the batch's labels. Both are found in one pass, unless a temperature is the divergence's alone.

    It is found from hidden states, and logits are never all in memory. Since it is found inside the student's own
    forward, Trainer, accelerate, DDP, FSDP2, gradient checkpointing and compile need nothing else. A batch's `labels`
    say which tokens count: those that are not -100, shifted by one as in the model's own loss. A batch without labels
    has the model's own forward; in training a warning tells. `num_items_in_batch`, which Trainer passes, is what the
    sum is divided by. In evaluation the student is as it was. The teacher is no part of the student, nor of its
    checkpoints.

    Args:
        student: a causal language model of transformers; or that in PEFT's, DDP's or torch.compile's wrapper. A LoRA on
            its head is counted, and trained.
        teacher: another, with the same tokens, on the same device. It is put into evaluation mode.
        kind: as of `kullback.divergence`.
        label_weight: what the model's own loss counts, of the tokens that count. It is of logits at temperature 1.
        **options: options of `kullback.linear_divergence` that are no tensors: `temperature`, `valid_vocab`,
            `divergence_weight`, `z_weight`, a kind's parameter; with a `label_weight` at temperature 1 also
            `label_smoothing`. A `divergence_weight` of 0 wants such a `label_weight`, too: else nothing counts. Logit
            scales and softcaps are read from both models' configurations.

    Returns:
        What undoes it: a context manager with `undo()`.

    Raises:
        TypeError, ValueError: of `kullback.linear_divergence`, for options; for a head whose logits are not those of
            the model, since something stands between them; for one that DeepSpeed or FSDP keeps in pieces; for a
            student that is its own teacher, whose forward is another's, that takes shifted labels, or has a router's
            loss or a prompt that PEFT learns; for unlike vocabularies; for a teacher that FSDP2 shards as a whole; for
            nn.DataParallel. A training step raises ValueError for a batch with `inputs_embeds`, `past_key_values`,
            `ignore_index`, `logits_to_keep` or what the decoder does not read, such as images.

    >>> from kullback.integrations.transformers import distil
    >>> def train(student, teacher, trainer):
    ...     with distil(student, teacher, "jensen_shannon", beta=0.1):
    ...         return trainer.train()
    """
    options = _checked_options(kind, label_weight, options)
    loss_of = functools.partial(_loss, kind, label_weight, options)
    model, reference = _unwrapped("student", student), _unwrapped("teacher", teacher)
    if model is reference or model.get_decoder() is reference.get_decoder():
        raise ValueError(
            "student and teacher are one model, whose divergence from itself is 0. PEFT adapts a model in place: load "
            "the teacher anew"
        )
    _check_student(student, model)
    teacher.eval()
    _check_teacher(reference)
    for name, each in (("student", model), ("teacher", reference)):
        check_logits(name, each)
    _check_own_loss(model, label_weight)
    if not (_is_sharded(model) or _is_sharded(reference)):
        vocabularies = (head_of(each).weight.size(0) for each in (model, reference))
        checks.shared_vocab(options.get("valid_vocab"), *vocabularies)
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    read = inspect.signature(model.get_decoder().forward).parameters
    unread = set(names) - set(TOKEN_TYPES) - set(read) - set(NOT_OF_DECODERS)

    def forward(self: Model, *positional: Any, **batch: Any) -> Any:
        if distillation.is_over:
            return distillation.own_forward(self)(*positional, **batch)
        batch |= _named(names, positional, batch)
        labels: Tensor | None = batch.get("labels")
        shifted: Tensor | None = batch.get("shift_labels")
        if not self.training or (labels is None and shifted is None):
            if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                notice(NO_LABELS, RuntimeWarning)
            return distillation.own_forward(self)(**batch)
        count = batch.get("num_items_in_batch")
        _check_batch(self, batch, count, unread)
        inputs = {name: value for name, value in batch.items() if name not in NOT_OF_DECODERS} | {"use_cache": False}
        hidden = hidden_states(self, inputs)
        with torch.no_grad():
            target = hidden_states(reference, inputs)
        if shifted is None and labels is not None:
            hidden, target, shifted = hidden[:, :-1], target[:, :-1], labels[:, 1:]
        assert shifted is not None
        if shifted.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels must be as many as tokens, {list(hidden.shape[:-1])} once shifted; got {list(shifted.shape)}"
            )
        distillation.was_used = True
        loss = loss_of(hidden, head_of(self), target, head_of(reference), shifted, count)
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=loss) if batch.get("return_dict", True) is not False else (loss,)

    # Trainer gives a model what its signature names. No __wrapped__: accelerate would unwrap the student down to that.
    functools.update_wrapper(forward, type(model).forward)
    del forward.__wrapped__  # type: ignore[attr-defined]
    vars(forward).update(__signature__=inspect.signature(type(model).forward))
    distillation = Distillation(model, types.MethodType(forward, model))
    vars(forward).update(distillation=distillation)
    return distillation


def _loss(
    kind: Kind | str,
    label_weight: float,
    options: dict[str, Any],
    hidden: Tensor,
    own: Head,
    target: Tensor,
    other: Head,
    labels: Tensor,
    count: Any,
) -> Tensor:
    """What the tokens of a batch lose, from both models' hidden states and heads."""
    checks.check_tokens(as_ids(labels), own.weight.size(0))
    is_fused = _is_fused(options)
    hidden = hidden.to(own.weight.dtype)
    of_student: dict[str, Any] = {
        "bias": own.bias,
        "logit_scale": own.scale,
        "softcap": own.softcap,
        "row_weight": labels != IGNORED,
        "normalizer": count.to(hidden.device) if isinstance(count, Tensor) else count,
    }
    of_labels: dict[str, Any] = {"labels": labels, "label_weight": label_weight} if label_weight else {}
    loss = functional.linear_divergence(
        hidden,
        own.weight,
        target.to(other.weight.dtype),
        other.weight.detach(),
        kind,
        target_bias=None if other.bias is None else other.bias.detach(),
        target_logit_scale=other.scale,
        target_softcap=other.softcap,
        **of_student,
        **(of_labels if is_fused else {}),
        **options,
    )
    if of_labels and not is_fused:
        shared = {name: options[name] for name in OPTIONS_OF_LABELS if name in options}
        loss = loss + functional.linear_divergence(hidden, own.weight, None, **of_student, **of_labels, **shared)
    return loss


def _is_fused(options: dict[str, Any]) -> bool:
    """Whether labels are of the logits that the divergence is of, so that one pass finds both."""
    return options.get("temperature", 1.0) == 1  # type: ignore[no-any-return]


def _checked_options(kind: Kind | str, label_weight: float, options: dict[str, Any]) -> dict[str, Any]:
    """Those that `kullback.linear_divergence` gets."""
    for name, why in NO_OPTIONS.items():
        if options.get(name) is not None:
            raise ValueError(f"distil has no option {name}: {why}; got {options[name]!r}")
    options = {name: value for name, value in options.items() if name not in NO_OPTIONS}
    checks.check_options(kind, {"label_weight": label_weight, **options}, checks.LINEAR_OPTIONS)
    if options.get("reduction", "mean") != "mean":
        raise ValueError(f"a model's loss is the mean of its tokens; got reduction={options['reduction']!r}")
    is_fused = _is_fused(options)
    if options.get("label_smoothing", 0.0) and not (label_weight and is_fused):
        raise ValueError(
            "label_smoothing goes with a label_weight, and with temperature 1; got label_weight "
            f"{label_weight} and temperature {options.get('temperature', 1.0)}"
        )
    if options.get("divergence_weight", 1.0) == 0 and not (label_weight and is_fused):
        raise ValueError(
            "with a divergence_weight of 0 labels count alone, so they need a label_weight, and temperature 1; got "
            f"label_weight {label_weight} and temperature {options.get('temperature', 1.0)}"
        )
    return options


def _named(names: list[str], positional: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
    """What a forward was given by place."""
    given = dict(zip(names, positional, strict=False))
    if len(given) < len(positional) or given.keys() & batch.keys():
        raise TypeError(
            f"forward takes {', '.join(names)}, each once; got {len(positional)} by place and {', '.join(batch)}"
        )
    return given


def _check_batch(model: Model, batch: dict[str, Any], count: Any, unread: set[str]) -> None:
    """What would change the model's own loss, and the divergence does not know. `unread`: by the decoder."""
    for name in ("inputs_embeds", "past_key_values"):
        if batch.get(name) is not None:
            raise ValueError(f"the student was given {name}, {OF_ONE_MODEL}")
    ignored = sorted(name for name in unread if batch.get(name) is not None and batch[name] is not False)
    if ignored:
        decoder = type(model.get_decoder()).__name__
        raise ValueError(
            f"the student was given {', '.join(ignored)}, of which its decoder, {decoder}, knows nothing: what is "
            "distilled so is a model of text"
        )
    if batch.get("ignore_index", IGNORED) not in (None, IGNORED):
        raise ValueError(f"labels that do not count are {IGNORED}; got ignore_index={batch['ignore_index']}")
    kept = batch.get("logits_to_keep")
    if kept is not None and (isinstance(kept, Tensor) or kept):
        raise ValueError("a distilled student finds the loss of all tokens; got logits_to_keep")
    if isinstance(count, Tensor) and count.dim():
        raise ValueError(f"num_items_in_batch must be a number or 0-d; got shape {list(count.shape)}. {DATA_PARALLEL}")
    if not isinstance(count, Tensor) and count is not None and count <= 0:
        raise ValueError(f"num_items_in_batch must be positive; got {count}")
    ids, own = batch.get("input_ids"), model.get_input_embeddings().weight.device
    if isinstance(ids, Tensor) and ids.device != own and own.type != "cpu":  # where FSDP2 keeps what it has offloaded
        why = DATA_PARALLEL if ids.device.type == own.type else "Batches of a distilled student are to be moved there"
        raise ValueError(f"input_ids are on {ids.device}, and the student is on {own}. {why}")


def _check_student(student: nn.Module, model: Model) -> None:
    """That its forward, `model`'s in its wrappers, is its own, and its loss that of tokens alone."""
    if not _is_own(vars(model).get("forward"), model):
        if "_original_forward" in vars(model):
            raise ValueError(
                "student's forward is that of accelerate, which has prepared it for mixed precision: take "
                "accelerator.unwrap_model(student, keep_fp32_wrapper=False) first"
            )
        raise ValueError(
            "student is distilled already, or its forward is another's, as where a trainer of TRL has been made of it: "
            "undo that first. With TRL, use DistillationTrainer and kullback.integrations.trl.patched()"
        )
    if getattr(getattr(student, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(f"student has a prompt that PEFT learns, {OF_ONE_MODEL}")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "student has a router's loss, output_router_logits, which is no part of a divergence: set that to False in "
            "its configuration"
        )


def _is_own(forward: Any, model: Model) -> bool:
    """Whether a forward that was put into a model is its class's, or with hooks of accelerate, which its parts have."""
    function = getattr(forward, "__func__", None)
    former: Distillation | None = getattr(function, "distillation", None)
    if former is not None:
        return former.is_over
    if "_hf_hook" in vars(model) and getattr(getattr(forward, "func", None), "__module__", "") == "accelerate.hooks":
        forward = vars(model).get("_old_forward")
        function = getattr(forward, "__func__", None)
    return forward is None or function is type(model).forward


def _unwrapped(name: str, model: Model) -> Model:
    """The causal language model itself."""
    if isinstance(model, nn.DataParallel):
        raise TypeError(f"{name} is in an nn.DataParallel. {DATA_PARALLEL}")
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):  # torch.compile's
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    if hasattr(model, "get_base_model"):  # PEFT's
        model = model.get_base_model()
    of_class = type(model)  # FSDP1's wrapper has its module's attributes, and its class has not
    if not (hasattr(of_class, "get_output_embeddings") and hasattr(of_class, "get_decoder")):
        raise TypeError(
            f"{name} must be a causal language model of transformers, distilled before FSDP wraps it; got "
            f"{of_class.__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"{name} must be a causal language model of transformers; {of_class.__name__} has an encoder")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no head: get_output_embeddings() is None")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(f"{name} {IN_PIECES}")
    return model


def hidden_states(model: Model, inputs: dict[str, Any]) -> Tensor:
    """[batch, tokens, hidden]: the head's input."""
    said = model.get_decoder()(**inputs)
    hidden = getattr(said, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise TypeError(
            f"{type(model).__name__}.get_decoder() gives a {type(said).__name__}, and no last hidden states"
        )
    return hidden


def head_of(model: Model) -> Head:
    """The head as it counts now, an adapter's part in it."""
    head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):  # PEFT's copy, which is trained instead
        saved = [] if head.disable_adapters else [name for name in head.active_adapters if name in head.modules_to_save]
        head = head.modules_to_save[saved[0]] if saved else head.original_module
    base = getattr(head, "base_layer", head)
    if not isinstance(getattr(base, "weight", None), Tensor) or not hasattr(base, "bias"):
        raise ValueError(f"the head is a {type(base).__name__}, which is more than a weight and a bias")
    weight, bias = base.weight, base.bias
    if hasattr(weight, "ds_id"):
        raise ValueError(f"the head {IN_PIECES}")
    if weight.is_meta:
        raise ValueError("the head's weight is on no device, as where accelerate has offloaded it: keep it on the GPU")
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            "the head is sharded by itself: give FSDP2 the layers and then the whole model (fully_shard(model)), which "
            "gathers the head before the forward"
        )
    if base is not head and not (head.merged or head.disable_adapters):
        if not hasattr(head, "lora_B"):
            raise ValueError(f"the head has a {type(head).__module__}.{type(head).__name__}: it may have a LoRA alone")
        for name in head.active_adapters:
            if name in head.lora_B:
                weight = weight + _low_rank(head, name)
    return Head(weight, bias, *_scale_and_softcap(model.config.get_text_config()))


def _low_rank(head: Model, name: str) -> Tensor:
    """What a LoRA adds to the head's weight."""
    if head.lora_dropout[name].training and getattr(head.lora_dropout[name], "p", 0):
        raise ValueError(f"adapter {name!r} of the head has a dropout, of which its weight knows nothing: set it to 0")
    is_dora = getattr(head, "use_dora", {}).get(name)
    if is_dora or name in getattr(head, "lora_variant", {}):
        kind = "a DoRA" if is_dora else f"a LoRA with a {type(head.lora_variant[name]).__name__}"
        raise ValueError(f"adapter {name!r} of the head is {kind}, which is more than a weight to be added")
    if getattr(head, "lora_bias", {}).get(name):
        raise ValueError(f"adapter {name!r} of the head has a bias, which is not counted: set lora_bias to False")
    added: Tensor = head.get_delta_weight(name)
    return added


def _scale_and_softcap(config: Any) -> tuple[float, float | None]:
    """As architectures name them: Cohere, Falcon-H1 and Granite; Gemma, RecurrentGemma and xLSTM."""
    scales = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    scale = next((scale for scale in scales if scale is not None), None)
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        scale = config.logits_scaling if config.model_type == "hyperclovax" else 1 / config.logits_scaling
    softcap = next((cap for name in SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)
    return 1.0 if scale is None else float(scale), softcap


SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


PROBE = 4  # tokens


def probe_ids(model: Model, count: int = PROBE) -> Tensor:
    """[1, count]: tokens that the model has, with its head."""
    device = model.get_input_embeddings().weight.device
    known: int = model.get_input_embeddings().weight.size(0)
    return (torch.arange(count, device=device) % known)[None]


def difference(one: Tensor, two: Tensor) -> float:
    """Relative, of what is finite; infinite where other elements of them are not."""
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()):
        return math.inf
    one, two = one[finite].double(), two[finite].double()
    return float((one - two).norm() / two.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _is_sharded(model: Model) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _check_teacher(model: Model) -> None:
    """That it can be read outside of its own forward, which alone gathers what FSDP2 shards as a whole."""
    if not _is_sharded(model):
        return
    head_of(model)  # refuses one that is sharded
    is_gathered = any(each.__name__ == "FSDPModule" for each in type(model.get_decoder()).__mro__)
    if hasattr(model.get_input_embeddings().weight, "device_mesh") and not is_gathered:
        raise ValueError(
            "teacher is sharded as a whole, and gathered in its own forward alone: give FSDP2 its decoder "
            "(fully_shard(teacher.get_decoder())), and keep its head"
        )


def rounding(dtype: torch.dtype) -> float:
    """By how much, relative to them, logits may differ: of 16 bits they are off by 2^-8, and of TF32 by 2^-11."""
    return 0.02 if dtype.itemsize == 2 else 5e-3


def _check_own_loss(model: Model, label_weight: float) -> None:
    """That it shifts labels by one as the divergence does; and if it counts, that it is of labels alone."""
    if _is_sharded(model):
        return
    ids = probe_ids(model)
    with _evaluating(model):
        said = model(input_ids=ids, labels=ids, use_cache=False)
    if said.loss is None:
        return
    logits, own = said.logits[0].double(), said.loss.item()
    shifted = nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).item()
    most = 0.02 if said.loss.dtype.itemsize == 2 else 1e-5  # of logits that are there: a loss is found in float32
    if math.isclose(own, shifted, rel_tol=most, abs_tol=most):
        return
    name = type(model).__name__
    if math.isclose(own, nn.functional.cross_entropy(logits, ids[0]).item(), rel_tol=most, abs_tol=most):
        raise ValueError(f"{name} takes labels that are shifted already, and the divergence shifts them by one")
    if label_weight:
        raise ValueError(
            f"label_weight counts the student's own loss, and {name}'s is more than the cross-entropy of labels: of "
            f"{PROBE} tokens {own:.4g}, and that is {shifted:.4g}"
        )


def check_logits(name: str, model: Model, most: float | None = None) -> None:
    """That nothing but what `Head` tells stands between hidden states and logits: an adapter, a scale, a hook.

    most: the relative difference that is rounding; by default as of `rounding`.
    """
    if _is_sharded(model):
        return  # FSDP2 gathers a student in its forward, in which the loss is found
    ids = probe_ids(model)
    with _evaluating(model):
        wanted, head = model(input_ids=ids, use_cache=False).logits, head_of(model)
        try:
            hidden = hidden_states(model, {"input_ids": ids, "use_cache": False})
            logits = hidden.double() @ head.weight.double().t()
        except (TypeError, RuntimeError) as failure:
            raise ValueError(f"{name} has no hidden states that its head reads: {failure}") from failure
        logits = (logits if head.bias is None else logits + head.bias.double()) * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
    error = difference(logits, wanted)
    if not error < (rounding(wanted.dtype) if most is None else most):
        raise ValueError(
            f"{name}'s logits are not those of its head: they differ by {error:.1%}. What {type(model).__name__} has "
            "between its hidden states and its logits, an adapter, a hook or a scale, would be ignored"
        )
