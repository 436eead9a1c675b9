"""User functions: contracts, argument order, reductions, row weights. What is wrong is said here, once."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from kullback import ops
from kullback.divergences import DIVERGENCES
from kullback.forms import FORMS
from kullback.rows import Problem, accumulator

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ELEMENTWISE_REDUCTIONS = ("none", "mean", "sum", "batchmean")
ELEMENTWISE_FORMS = ("log_probs", "probs")
KL = {(q, p): Problem("kl", q, p) for q, p in itertools.product(ELEMENTWISE_FORMS, repeat=2)}
ROW_REDUCTIONS = ("none", "mean", "sum")


def kl_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    *,
    form: str = "log_probs",
) -> Tensor:
    """Drop-in for :func:`torch.nn.functional.kl_div`: Σ target · (log target - input), in nats.

    Same argument order, reductions, broadcasting, dtypes and results, for normalised and unnormalised
    input alike, except that 0 · log 0 is 0 in value and gradients where torch has NaN.
    `form="probs"` takes probabilities: ``kl_div(p, t, form="probs") == F.kl_div(torch.log(p), t)``.

    Args:
        input: log-probabilities of the model (probabilities with `form="probs"`), any shape.
        target: probabilities of the reference (their logarithms with `log_target=True`).
        reduction: "none" (elementwise), "mean" (over elements), "sum" or "batchmean" (sum divided by
            the size of the first dimension, as torch has it).
        log_target: whether `target` holds log-probabilities.
        form: "log_probs" or "probs": what `input` holds.

    Returns:
        0-d, or the broadcast shape for "none"; the promoted dtype of both inputs (float32 under autocast).

    Raises:
        TypeError: an input that is no tensor, or of integer, bool or complex dtype.
        ValueError: unknown reduction or form; shapes that do not broadcast; devices that differ.

    Source: Kullback and Leibler, On information and sufficiency, 1951.

    >>> import torch, kullback
    >>> q = torch.tensor([[0.5, 0.25, 0.25]])
    >>> p = torch.tensor([[0.5, 0.5, 0.0]])
    >>> kullback.kl_div(q.log(), p, reduction="batchmean")
    tensor(0.3466)
    """
    _check_pair(input, target)
    _check_name("reduction", reduction, ELEMENTWISE_REDUCTIONS)
    _check_name("form", form, ELEMENTWISE_FORMS)
    # "batchmean" divides by the input's own first dimension, also where it is broadcast: as torch.
    batch = input.size(0) if input.dim() else 1
    if input.shape != target.shape:
        try:
            input, target = torch.broadcast_tensors(input, target)
        except RuntimeError:
            raise ValueError(
                f"input and target must have shapes that broadcast; got {_shape(input)} and {_shape(target)}"
            ) from None
    dtype = torch.promote_types(input.dtype, target.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(input.device.type):
        dtype = torch.float32
    problem = KL[form, "log_probs" if log_target else "probs"]
    if reduction == "none":
        return ops.per_row(input.unsqueeze(-1), target.unsqueeze(-1), None, problem, dtype)
    count = batch if reduction == "batchmean" else 1 if reduction == "sum" else input.numel()
    if input.dim() == 0:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    scale = 1 / count if count else math.nan  # of nothing the mean is NaN, as torch has it
    return ops.total(input, target, None, scale, problem, dtype)


def divergence(
    input: Tensor,
    target: Tensor,
    kind: str = "kl",
    *,
    form: str = "logits",
    target_form: str | None = None,
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float | None = None,
    softcap: float | None = None,
    target_softcap: float | None = None,
    valid_vocab: int | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    inplace: bool = False,
    **params: float,
) -> Tensor:
    """Divergence of the model's distributions from the reference's, in nats; rows are `[..., vocab]`.

    ============== ==========================================================  ===========
    kind           definition, p = target, q = input                           parameter
    ============== ==========================================================  ===========
    kl             Σ p log(p/q)
    reverse_kl     Σ q log(q/p)
    jeffreys       kl + reverse_kl
    jensen_shannon w·KL(p‖m) + (1-w)·KL(q‖m), m = w·p + (1-w)·q                weight=0.5
    skew_kl        KL(p ‖ a·p + (1-a)·q)                                       alpha=0.1
    total_variation ½ Σ abs(p - q)
    hellinger      ½ Σ (√p - √q)²
    chi2           Σ (p - q)²/q
    alpha          (1 - Σ p^a q^(1-a)) / (a(1-a)), Amari's                     alpha=0.5
    renyi          log(Σ p^a q^(1-a)) / (a-1)                                  alpha=0.5
    ============== ==========================================================  ===========

    Probabilities and log-probabilities are taken as they are, normalised or not; logits by their softmax.
    0 · log 0 is 0 in value and gradients; p > 0 where q = 0 makes kl +inf; NaN stays in its row.

    Args:
        input: the model's (student's) logits, log_probs or probs, `[..., vocab]`, floating point.
        target: the reference's (teacher's), of the same shape (but see `valid_vocab`); dtypes may differ.
        kind: a name of the table.
        form: "logits", "log_probs" or "probs": what `input` holds.
        target_form: the same of `target`; by default that of `input`.
        temperature: divides the input's logits; positive. No factor T² is applied: multiply the loss by
            T**2 to keep gradients' size, as Hinton et al. do.
        target_temperature: the same of the target; by default that of the input.
        logit_scale: multiplies the input's logits, before the softcap; positive (Cohere, Granite).
        target_logit_scale: the same of the target; by default that of the input.
        softcap: a logit x of the input counts as softcap · tanh(x / softcap), before the temperature (Gemma 2);
            positive, or None. A logit of -inf counts as -softcap, as it does there.
        target_softcap: the same of the target, on its own: by default it has none.
        valid_vocab: how many elements of a row count, where vocabularies are padded or one is longer; gradients of
            the others are 0. Nothing is copied for it.
        row_weight: float or bool, `input.shape[:-1]`. A row of weight 0 is not read: garbage or NaN in it
            cannot reach the value or a gradient, and the weight's own gradient there is 0.
        reduction: "none" gives weight · divergence of each row, "sum" their sum, "mean" the sum divided by
            Σ weight, or by `normalizer`.
        normalizer: positive number or 0-d tensor (never read on the host) for "mean".
        inplace: let the input's gradient take the place of its values, where one is wanted: a tensor less. For logits
            that nothing else needs; whatever saved them for its own backward raises there.
        **params: the kind's parameter.

    Returns:
        `input.shape[:-1]` for "none", else 0-d; float32 for 16-bit inputs, else the promoted dtype. Where
        there are no rows, or no weight, sum and mean are 0 with zero gradients.

    Raises:
        TypeError: an argument of the wrong type or dtype (integer, bool, complex).
        ValueError: shapes or devices that differ; an unknown kind, form, reduction or parameter; a
            temperature, scale, softcap, valid_vocab, normalizer or parameter out of its range; `inplace` with
            reduction "none", of float16 (whose gradient has to wait for a loss scaler's factor), of a leaf, or of
            memory that the target or another element shares.

    Sources: docs/mathematics.md.

    >>> import torch, kullback
    >>> student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    >>> kullback.divergence(student, teacher)
    tensor(0.3776)
    >>> kullback.divergence(student, teacher, "jensen_shannon", weight=0.5, reduction="none")
    tensor([0.0807])
    """
    _check_pair(input, target)
    _check_name("reduction", reduction, ROW_REDUCTIONS)
    options: tuple[Any, ...] = (
        *(kind, form, target_form, temperature, target_temperature, logit_scale, target_logit_scale),
        *(softcap, target_softcap, _valid_vocab(valid_vocab, input, target), *params, *params.values()),
    )
    problem = None
    if not torch.compiler.is_compiling():
        with contextlib.suppress(TypeError):  # an option that cannot be hashed, or one that is refused: said below
            problem = _cached_problem(*options)
    if problem is None:
        problem = _problem(*options)
    dtype = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    weight = None if row_weight is None else _row_weight(row_weight, input)
    if inplace:
        _check_inplace(input, target, form, weight, reduction, normalizer)
    return _reduce(input, target, weight, reduction, normalizer, problem, dtype, inplace)


def _reduce(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    normalizer: float | Tensor | None,
    problem: Problem,
    dtype: torch.dtype,
    inplace: bool,
) -> Tensor:
    total = functools.partial(ops.total, inplace=inplace) if inplace else ops.total
    if normalizer is not None:
        _check_normalizer(normalizer, reduction, input)
    if weight is not None and (weight.requires_grad or ops.hides_gradients()):
        # A weight's gradient is its row's loss: rows are weighted in the open. Zeros are still not read.
        losses = ops.per_row(input, target, (weight.detach() != 0).to(weight.dtype), problem, dtype)
        losses = (losses * weight).to(dtype)
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        if normalizer is None:
            normalizer = weight.sum()
        divisor = _nonzero(normalizer) if isinstance(normalizer, Tensor) else normalizer
        return (losses.sum() / divisor).to(dtype)
    if reduction == "none":
        return ops.per_row(input, target, weight, problem, dtype)
    if reduction == "sum":
        return total(input, target, weight, 1.0, problem, dtype)
    if isinstance(normalizer, Tensor):
        if normalizer.requires_grad or ops.hides_gradients():
            return (total(input, target, weight, 1.0, problem, dtype) / _nonzero(normalizer)).to(dtype)
        inverse = 1 / _nonzero(normalizer.detach().to(input.device, accumulator(input)))
        weight = inverse if weight is None else weight * inverse
        return total(input, target, weight, 1.0, problem, dtype)
    if normalizer is not None:
        return total(input, target, weight, 1 / normalizer, problem, dtype)
    if weight is not None:
        return total(input, target, weight / _nonzero(weight.sum()), 1.0, problem, dtype)
    rows = math.prod(input.shape[:-1])
    return total(input, target, None, 1 / max(rows, 1), problem, dtype)


def _nonzero(divisor: Tensor) -> Tensor:
    """The divisor, or 1 for 0: with no weight at all the loss is 0, not NaN."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _problem(
    kind: str,
    form: str,
    target_form: str | None,
    temperature: float,
    target_temperature: float | None,
    logit_scale: float,
    target_logit_scale: float | None,
    softcap: float | None,
    target_softcap: float | None,
    valid: int,
    *params: Any,
) -> Problem:
    """Of the options, checked; the kind's parameters come as their names and then their values."""
    _check_name("kind", kind, DIVERGENCES)
    _check_name("form", form, FORMS)
    target_form = form if target_form is None else target_form
    _check_name("target_form", target_form, FORMS)
    inherits, follows = target_temperature is None, target_logit_scale is None
    target_temperature = temperature if target_temperature is None else target_temperature
    target_logit_scale = logit_scale if target_logit_scale is None else target_logit_scale
    is_for_target = target_form == "logits"
    scales = (
        _of_logits("logit_scale", logit_scale, form, follows and is_for_target, "multiplies"),
        _of_logits("target_logit_scale", target_logit_scale, target_form, follows, "multiplies"),
    )
    temperatures = (
        _of_logits("temperature", temperature, form, inherits and is_for_target, "divides"),
        _of_logits("target_temperature", target_temperature, target_form, inherits, "divides"),
    )
    caps = (
        0.0 if softcap is None else _of_logits("softcap", softcap, form, False, "bounds", 0.0),
        0.0
        if target_softcap is None
        else _of_logits("target_softcap", target_softcap, target_form, False, "bounds", 0.0),
    )
    # cap·tanh(scale·x/cap)/temperature = c·tanh(x/c)/t with c = cap/scale and t = temperature/scale
    numbers = (
        _quotient("temperature", temperatures[0], "logit_scale", scales[0]),
        _quotient("target_temperature", temperatures[1], "target_logit_scale", scales[1]),
        _quotient("softcap", caps[0], "logit_scale", scales[0]),
        _quotient("target_softcap", caps[1], "target_logit_scale", scales[1]),
        float(valid),
    )
    spec = DIVERGENCES[kind]
    values = dict(spec.parameters)
    given = len(params) // 2
    for name, value in zip(params[:given], params[given:], strict=True):
        if name not in values:
            known = ", ".join(values) or "none"
            raise ValueError(f"kind {kind!r} has no parameter {name!r}{_nearest(name, values)}; it has: {known}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number; got {type(value).__name__}")
        if not (-math.inf < value < math.inf and spec.admits(value)):
            raise ValueError(f"{name} of kind {kind!r} must be {spec.domain}; got {value}")
        values[name] = float(value)
    return Problem(kind, form, target_form, (*numbers, *values.values()))


# A training loop asks with the same options again and again. By type, since True is not to pass for 1.
_cached_problem = functools.lru_cache(maxsize=1024, typed=True)(_problem)


def _valid_vocab(valid: int | None, input: Tensor, target: Tensor) -> int:
    """As a Problem has it: 0 where all of both rows counts."""
    if input.dim() == 0 or input.shape[:-1] != target.shape[:-1]:
        raise ValueError(
            f"input and target must have the same shape [..., vocab]; got {_shape(input)} and {_shape(target)}"
        )
    if valid is None:
        if input.shape != target.shape:
            raise ValueError(
                f"input and target must have the same shape [..., vocab], unless valid_vocab says how much of it "
                f"counts; got {_shape(input)} and {_shape(target)}"
            )
        return 0
    if isinstance(valid, bool) or not isinstance(valid, (int, SupportsIndex)):
        raise TypeError(f"valid_vocab must be an integer; got {type(valid).__name__}")
    valid = operator.index(valid) if not isinstance(valid, int) else valid
    longest = min(input.size(-1), target.size(-1))
    if not 0 < valid <= longest:
        raise ValueError(f"valid_vocab must be from 1 to {longest}, the shorter vocabulary; got {valid}")
    return 0 if input.size(-1) == target.size(-1) == valid else valid


def _check_inplace(
    input: Tensor,
    target: Tensor,
    form: str,
    weight: Tensor | None,
    reduction: str,
    normalizer: float | Tensor | None,
) -> None:
    reason = ""
    if form != "logits":
        reason = f"is for logits; input holds {form}"
    elif reduction == "none":
        reason = 'goes with reduction "sum" or "mean"'
    elif (weight is not None and weight.requires_grad) or (isinstance(normalizer, Tensor) and normalizer.requires_grad):
        reason = "leaves no logits to find a gradient of row_weight or normalizer from"
    elif ops.is_observed(input, target):
        reason = "is for plain eager calls, not for what traces or transforms them"
    elif torch.is_grad_enabled() and input.requires_grad:
        if input.is_leaf or (input._base is not None and input._base.is_leaf and input._base.requires_grad):
            reason = "would overwrite a leaf that the caller still holds: input must be the result of an operation"
        elif torch.float16 in (input.dtype, target.dtype):
            reason = "is not for float16, whose gradients wait for a loss scaler's factor"
        elif input.numel() and input.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            reason = "needs input and target in memory of their own"
        elif not (
            input.is_contiguous() or (input.dim() == 2 and input.stride(1) == 1 and input.stride(0) >= input.size(1))
        ):
            reason = f"needs an input whose rows lie apart and in order; got strides {list(input.stride())}"
    if reason:
        raise ValueError(f"inplace=True {reason}")


def _quotient(name: str, value: float, of: str, scale: float) -> float:
    """value / scale, which kernels hold in float32; 0 of a softcap that there is not."""
    quotient = value / scale
    if value and (scale != 1 or "softcap" in name) and not 1e-30 < quotient < 1e30:
        raise ValueError(f"{name} / {of} must lie between 1e-30 and 1e30; got {value} / {scale}")
    return quotient


def _of_logits(name: str, value: float, form: str, is_for_other_side: bool, verb: str, otherwise: float = 1.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}")
    if form != "logits":
        if (value != 1 or otherwise != 1) and not is_for_other_side:
            raise ValueError(f"{name} {verb} logits, and form {form!r} holds none; got {value}")
        return otherwise
    return float(value)


def _row_weight(weight: Tensor, input: Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError(f"row_weight must be a tensor; got {type(weight).__name__}")
    if weight.dtype not in FLOATS and weight.dtype != torch.bool:
        raise TypeError(f"row_weight must be of float or bool dtype; got {weight.dtype}")
    if weight.shape != input.shape[:-1]:
        raise ValueError(f"row_weight must have the rows' shape {_shape(input, -1)}; got {_shape(weight)}")
    if weight.device != input.device:
        raise ValueError(f"row_weight must be on the input's device {input.device}; got {weight.device}")
    return weight.to(accumulator(input))


def _check_normalizer(normalizer: float | Tensor, reduction: str, input: Tensor) -> None:
    if reduction != "mean":
        raise ValueError(f'normalizer goes with reduction "mean"; got reduction {reduction!r}')
    if isinstance(normalizer, Tensor):
        if normalizer.dim() != 0:
            raise ValueError(f"normalizer must be a number or 0-d; got shape {_shape(normalizer)}")
        if normalizer.device not in (input.device, torch.device("cpu")):
            raise ValueError(f"normalizer must be on the input's device {input.device}; got {normalizer.device}")
    elif isinstance(normalizer, bool) or not isinstance(normalizer, (int, float)):
        raise TypeError(f"normalizer must be a number or a 0-d tensor; got {type(normalizer).__name__}")
    elif not 0 < normalizer < math.inf:
        raise ValueError(f"normalizer must be positive and finite; got {normalizer}")


def _check_pair(input: Tensor, target: Tensor) -> None:
    for name, tensor in (("input", input), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64; got {tensor.dtype}")
    if input.device != target.device:
        raise ValueError(f"input and target must be on one device; got {input.device} and {target.device}")


def _check_name(argument: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        _unknown(argument, name, known)


def _unknown(argument: str, name: object, known: Iterable[str]) -> NoReturn:
    names = tuple(known)
    raise ValueError(f"{argument} must be one of {', '.join(names)}; got {name!r}{_nearest(str(name), names)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, tuple(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _shape(tensor: Tensor, drop: int | None = None) -> str:
    return str(list(tensor.shape[:drop]))
