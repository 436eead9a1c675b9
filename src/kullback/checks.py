"""Validates arguments and builds the `Problem`; what lies below assumes valid input.

An error names the argument, what came and what was wanted.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, SupportsIndex, TypeVar, get_args

import torch
from torch import Tensor, distributed

from kullback import backends, words
from kullback.choices import Reduction, Tail
from kullback.divergences import DIVERGENCES
from kullback.dtypes import UNSIGNED, accumulator, as_ids, kept_dtype
from kullback.forms import FORMS
from kullback.labels import are_tokens, assert_tokens, demand
from kullback.notices import notice
from kullback.problem import DIVERGENCE_ALONE, WHOLE, Problem, Shard, Side, Weights
from kullback.tracing import has_memory, in_functorch, is_fake, is_symbolic, is_traced, untransformed
from kullback.work import Labels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of a loss, by the dtypes of input and target
LOSS_DTYPES = {(x, y): torch.promote_types(torch.promote_types(x, y), torch.float32) for x in FLOATS for y in FLOATS}
REDUCTIONS = get_args(Reduction)
TAILS = get_args(Tail)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
IDS = (*INTEGERS, *UNSIGNED)


P = ParamSpec("P")
R = TypeVar("R")


def remembered(make: Callable[P, R]) -> Callable[P, R]:
    """What eager calls made of options is kept: a training loop asks with the same ones again and again."""
    kept: Callable[..., R] = functools.lru_cache(maxsize=1024, typed=True)(make)  # True is not to pass for 1

    @functools.wraps(make)
    def ask(*options: P.args, **named: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            try:
                return kept(*options, **named)
            except TypeError:  # an option that cannot be hashed, or one that is refused: said below
                pass
        return make(*options, **named)

    return ask


@remembered
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
    vocab: int,
    shard: Shard,
    weights: Weights,
    *params: str | float,
) -> Problem:
    """Of the options, checked; the kind's parameters come as their names and then their values."""
    check_name("kind", kind, DIVERGENCES)
    check_name("form", form, FORMS)
    target_form = form if target_form is None else target_form
    check_name("target_form", target_form, FORMS)
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
    softcaps = (
        0.0 if softcap is None else _of_logits("softcap", softcap, form, False, "bounds", 0.0),
        0.0
        if target_softcap is None
        else _of_logits("target_softcap", target_softcap, target_form, False, "bounds", 0.0),
    )
    # cap·tanh(scale·x/cap)/temperature = c·tanh(x/c)/t with c = cap/scale and t = temperature/scale
    return Problem(
        kind,
        Side(
            form,
            _quotient("temperature", temperatures[0], "logit_scale", scales[0]),
            _quotient("softcap", softcaps[0], "logit_scale", scales[0]),
        ),
        Side(
            target_form,
            _quotient("target_temperature", temperatures[1], "target_logit_scale", scales[1]),
            _quotient("target_softcap", softcaps[1], "target_logit_scale", scales[1]),
        ),
        _parameter(kind, dict(zip(params[: len(params) // 2], params[len(params) // 2 :], strict=True))),
        vocab,
        shard,
        weights,
    )


def _parameter(kind: str, params: Mapping[str | float, str | float]) -> float:
    """The kind's parameter as it was given, or its default; 0 of a kind that has none."""
    known = DIVERGENCES[kind].parameter
    result = 0.0 if known is None else known.default
    for name, value in params.items():
        if known is None or name != known.name:
            names = () if known is None else (known.name,)
            if name in words.ARGUMENTS:
                own = f"; the parameter of {kind!r} is {known.name}" if known is not None else ""
                raise ValueError(f"there is no argument {name!r}: {words.ARGUMENTS[str(name)]}{own}")
            if name in ARGUMENTS:
                raise ValueError(f"there is no argument {name!r} of this function, only of others")
            whose, nearest = _whose(str(name)), words.nearest(str(name), (*names, *ARGUMENTS))
            own = f"it has: {', '.join(names) or 'none'}"
            if whose:
                raise ValueError(f"kind {kind!r} has no parameter {name!r}{nearest}; {own}{whose}")
            raise ValueError(
                f"there is no argument {name!r}, and kind {kind!r} has no parameter of that name{nearest}; {own}"
            )
        given = number(str(name), value)
        if not (-LARGEST < given < LARGEST and known.admits(given)):
            raise ValueError(f"{name} of kind {kind!r} must be {known.domain}; got {given}")
        result = float(given)
    return result


def _whose(parameter: str) -> str:
    """Which kinds have a parameter of that name."""
    kinds = [name for name, kind in DIVERGENCES.items() if parameter in kind.defaults]
    return f" ({parameter} is of {', '.join(kinds)})" if kinds else ""


def problem(
    params: Mapping[str, float],
    kind: str,
    form: str,
    target_form: str | None = None,
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float | None = None,
    softcap: float | None = None,
    target_softcap: float | None = None,
    vocab: int = 0,
    shard: Shard = WHOLE,
    weights: Weights = DIVERGENCE_ALONE,
) -> Problem:
    """The problem that a kind, its parameters and these options make, checked."""
    scales = temperature, target_temperature, logit_scale, target_logit_scale, softcap, target_softcap
    options: tuple[Any, ...] = (kind, form, target_form, *scales, vocab, shard, weights, *params, *params.values())
    made = _problem(*options)
    if torch.compiler.is_compiling():
        any([is_symbolic(scalar) for scalar in made.scalars])  # noqa: C419 # Dynamo has to meet a caller's numbers before it traces an autograd.Function
    return made


def check_rows(input: Tensor) -> None:
    """That it is of rows, where no other tensor is to have as many."""
    if input.dim() == 0:
        raise ValueError("input must have the shape [..., vocab]; got []")


def valid_vocab(valid: int | None, input: Tensor, target: Tensor) -> int:
    """As a Problem has it: 0 where all of both rows counts."""
    if valid is None and input.shape == target.shape and input.dim():
        return 0
    if input.dim() == 0 or input.shape[:-1] != target.shape[:-1]:
        raise ValueError(
            f"input and target must have the same shape [..., vocab]; got {shape(input)} and {shape(target)}"
        )
    if valid is None:
        raise ValueError(
            f"input and target must have the same shape [..., vocab], unless valid_vocab says how much of it "
            f"counts; got {shape(input)} and {shape(target)}"
        )
    valid = valid_width(valid, min(input.size(-1), target.size(-1)))
    return 0 if input.size(-1) == target.size(-1) == valid else valid


def valid_width(valid: int | None, most: int | None) -> int:
    """Of at most so many tokens, if that is known; 0 where nothing is said."""
    if valid is None:
        return 0
    try:
        whole = operator.index(valid)
    except TypeError:  # of a tensor of floats, too, which has the method
        whole = None
    if whole is None or isinstance(valid, bool):
        raise TypeError(f"valid_vocab must be an integer; got {type(valid).__name__}")
    valid = whole
    if valid < 1 or (most is not None and valid > most):
        bound = "positive" if most is None else f"from 1 to {most}, the tokens that rows have"
        raise ValueError(f"valid_vocab must be {bound}; got {valid}")
    return valid


def is_of_padding(valid_vocab: int | None, group: ProcessGroup | None) -> bool:
    """Whether a rank's slice of the vocabulary has no token that counts. What is no integer is refused elsewhere."""
    is_number = isinstance(valid_vocab, numbers.Integral) and not isinstance(valid_vocab, bool)
    return group is not None and is_number and valid_vocab == 0


def check_group(group: ProcessGroup | None, first_token: int | None = None, total_vocab: int | None = None) -> None:
    if group is None:
        if first_token is not None or total_vocab is not None:
            raise ValueError("first_token and total_vocab are of a slice of the vocabulary; got no group")
        return
    check_process_group(group)
    if (first_token is None) != (total_vocab is None):
        raise ValueError(f"first_token and total_vocab go together; got {first_token} and {total_vocab}")
    for name, value in (("first_token", first_token), ("total_vocab", total_vocab)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt)):
            raise TypeError(f"{name} must be an integer; got {type(value).__name__}")


def check_process_group(group: object) -> None:
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup that this rank is in; got {type(group).__name__}"
        )


def check_slice(width: int, first_token: int | None, total_vocab: int | None) -> None:
    """Whether a slice of so many tokens that count lies in the whole vocabulary."""
    if first_token is None or total_vocab is None:
        return
    if total_vocab < width:
        raise ValueError(f"total_vocab must be no less than the {width} tokens of this slice; got {total_vocab}")
    if not 0 <= first_token <= total_vocab - width:
        raise ValueError(
            f"first_token must lie from 0 to {total_vocab - width}, with {width} tokens here and total_vocab "
            f"{total_vocab}; got {first_token}"
        )


def check_sequence_dim(dim: int | None, group: ProcessGroup | None) -> None:
    if dim is None:
        return
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"sequence_dim must be an integer; got {type(dim).__name__}")
    if group is None:
        raise ValueError(f"sequence_dim goes with a group; got {dim} and none")


def check_sequence(dim: int | None, input: Tensor, has_whole_rows: bool) -> None:
    """Of rows of which each rank has a part along that dimension."""
    if dim is None:
        return
    if input.dim() < 2:
        raise ValueError(f"sequence_dim needs an input of rows, [..., hidden]; got {shape(input)}")
    if not 0 <= dim < input.dim() - 1:
        raise ValueError(f"sequence_dim must be a dimension of rows, from 0 to {input.dim() - 2}; got {dim}")
    if has_whole_rows:
        raise ValueError(
            "sequence_dim needs a teacher of hidden states or of entries; a slice of its logits has all rows"
        )


def check_inplace_options(form: str, reduction: str, divergence_weight: float = 1.0) -> None:
    if divergence_weight == 0:
        raise ValueError("inplace=True needs a target, and a divergence_weight other than 0")
    if form != "logits":
        raise ValueError(f"inplace=True is for logits; input holds {form}")
    if reduction == "none":
        raise ValueError('inplace=True goes with reduction "sum" or "mean"; got "none"')


def check_inplace(
    input: Tensor,
    target: Tensor,
    form: str,
    weight: Tensor | None,
    reduction: str,
    normalizer: float | Tensor | None,
) -> None:
    check_inplace_options(form, reduction)
    reason = ""
    if (weight is not None and weight.requires_grad) or (isinstance(normalizer, Tensor) and normalizer.requires_grad):
        reason = "leaves no logits to find a gradient of row_weight or normalizer from"
    elif is_traced(input, target):
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
    quotient = value if scale == 1 else value / scale
    if value and not 1e-30 < quotient < 1e30:
        asked, got = (name, f"{value}") if scale == 1 else (f"{name} / {of}", f"{value} / {scale}")
        raise ValueError(f"{asked} must lie between 1e-30 and 1e30; got {got}")
    return quotient


def _of_logits(name: str, value: float, form: str, is_for_other_side: bool, verb: str, otherwise: float = 1.0) -> float:
    value = number(name, value)
    if not 0 < value < LARGEST:
        raise ValueError(f"{name} must be positive and finite; got {value}")
    if form != "logits":
        if (value != 1 or otherwise != 1) and not is_for_other_side:
            raise ValueError(f"{name} {verb} logits, and form {form!r} holds none; got {value}")
        return otherwise
    return float(value)


LARGEST = sys.float_info.max  # an integer may be larger, and is no float then


def number(name: str, value: object) -> float:
    """NumPy's numbers are numbers, tensors are not: reading one may wait for a device."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a number; got a Tensor: {name}.item() is its number")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    return float(value)


def row_weight(weight: Tensor, input: Tensor) -> Tensor:
    check_dense("row_weight", weight)
    if weight.dtype not in (*FLOATS, *IDS, torch.bool):
        raise TypeError(f"row_weight must be of a float, integer or bool dtype; got {weight.dtype}")
    if weight.shape != input.shape[:-1]:
        raise ValueError(f"row_weight must have the rows' shape {shape(input, -1)}; got {shape(weight)}")
    if weight.device != input.device:
        raise ValueError(f"row_weight must be on the input's device {input.device}; got {weight.device}")
    return weight.to(accumulator(input))


def labels(given: Tensor, input: Tensor) -> Tensor:
    """The labels as int64, if their shape, dtype and device will do."""
    check_dense("labels", given)
    if given.dtype not in IDS:
        raise TypeError(f"labels must be of an integer dtype; got {given.dtype}")
    if given.shape != input.shape[:-1]:
        raise ValueError(f"labels must have the rows' shape {shape(input, -1)}; got {shape(given)}")
    if given.device != input.device:
        raise ValueError(f"labels must be on the input's device {input.device}; got {given.device}")
    return as_ids(given)


def check_tokens(labels: Tensor, vocab: int) -> None:
    """That they are tokens, or IGNORED. On a device those that are not stop it, as in torch."""
    if in_functorch():
        values = untransformed(labels)
        if values is None:  # a transform that is traced sees none
            return
        labels = values
    if torch.compiler.is_compiling() or is_fake(labels):
        assert_tokens(labels, vocab)
    elif labels.device.type != "cpu":
        if has_memory(labels):
            backends.run(Labels(labels, vocab))
        else:
            assert_tokens(labels, vocab)
    elif not (right := are_tokens(labels, vocab)).all():
        raise ValueError(f"{demand(vocab)}; got {labels[~right][0].item()}")


def check_memory(**given: Tensor | None) -> None:
    """Figures of rows are no operators: what records, maps or stands in for tensors cannot follow them."""
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and not has_memory(tensor):
            raise TypeError(
                f"{name} must be a plain tensor, outside of tracing and torch.func: figures of rows cannot be followed "
                f"there; got {type(tensor).__name__} (of a DTensor, pass what to_local() or full_tensor() gives)"
            )


def labels_of(given: Tensor | None, input: Tensor, vocab: int) -> Tensor | None:
    """Labels where there are any, checked to be tokens of so many."""
    if given is None:
        return None
    checked = labels(given, input)
    check_tokens(checked, vocab)
    return checked


LEAST_WEIGHT, MOST_WEIGHT = 1e-18, 1e18  # in size: one is divided by another, in float32


@remembered
def weights(
    has_labels: bool,
    form: str,
    divergence_weight: float,
    label_weight: float,
    z_weight: float,
    label_smoothing: float = 0.0,
) -> Weights:
    """What a row's loss is a sum of."""
    given = {
        "divergence_weight": divergence_weight,
        "label_weight": label_weight,
        "z_weight": z_weight,
        "label_smoothing": label_smoothing,
    }
    for name, value in given.items():
        if not -LARGEST < number(name, value) < LARGEST:
            raise ValueError(f"{name} must be finite; got {value}")
    if divergence_weight and not LEAST_WEIGHT <= abs(divergence_weight) <= MOST_WEIGHT:
        raise ValueError(
            f"divergence_weight must be 0, or from {LEAST_WEIGHT} to {MOST_WEIGHT:g} in size; got {divergence_weight}"
        )
    if abs(label_weight) > MOST_WEIGHT or abs(z_weight) > MOST_WEIGHT:
        raise ValueError(
            f"label_weight and z_weight must be at most {MOST_WEIGHT:g} in size; got {label_weight} and {z_weight}"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must lie from 0 to less than 1; got {label_smoothing}")
    if not has_labels:
        for name, default in (("label_weight", 1), ("label_smoothing", 0)):
            if given[name] != default:
                raise ValueError(f"{name} goes with labels; got {given[name]} and none")
    if z_weight and form != "logits":
        raise ValueError(f"z_weight is of a log-sum-exp of logits, and form {form!r} holds none; got {z_weight}")
    return Weights(divergence_weight, label_weight if has_labels else 0.0, z_weight, label_smoothing)


def check_smoothing(label_smoothing: float, is_shared: bool) -> None:
    """Of a vocabulary that ranks may share."""
    if label_smoothing and is_shared:
        raise ValueError(f"label_smoothing is not for a vocabulary that ranks share; got {label_smoothing}")


def check_weights_of_labels(
    form: str, divergence_weight: float, label_weight: float, z_weight: float, label_smoothing: float = 0.0
) -> None:
    """Of labels alone, whose cross-entropy is a divergence."""
    weights(True, form, divergence_weight, label_weight, z_weight, label_smoothing)
    if label_weight and abs(label_weight) < LEAST_WEIGHT:
        raise ValueError(
            f"label_weight without a divergence must be 0, or from {LEAST_WEIGHT} to {MOST_WEIGHT:g} in size; "
            f"got {label_weight}"
        )


def check_reduction(reduction: str, normalizer: float | Tensor | None, input: Tensor) -> None:
    """Whether there is such a reduction, and a normalizer is for it."""
    check_name("reduction", reduction, REDUCTIONS)
    if normalizer is None:
        return
    if reduction != "mean":
        raise ValueError(f'normalizer goes with reduction "mean"; got reduction {reduction!r}')
    if isinstance(normalizer, Tensor):
        check_dense("normalizer", normalizer)
        if normalizer.dim() != 0:
            raise ValueError(f"normalizer must be a number or 0-d; got shape {shape(normalizer)}")
        if normalizer.dtype not in (*FLOATS, *IDS):
            raise TypeError(f"normalizer must be of a float or integer dtype; got {normalizer.dtype}")
        if normalizer.device not in (input.device, torch.device("cpu")):
            raise ValueError(f"normalizer must be on the input's device {input.device}; got {normalizer.device}")
    elif isinstance(normalizer, bool) or not isinstance(normalizer, numbers.Real):
        raise TypeError(f"normalizer must be a number or a 0-d tensor; got {type(normalizer).__name__}")
    elif not 0 < normalizer < math.inf:
        raise ValueError(f"normalizer must be positive and finite; got {normalizer}")


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for its device; the meta device has none."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def check_tensor(name: str, tensor: Tensor) -> None:
    check_dense(name, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64; got {tensor.dtype}")


def check_dense(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} must not be a nested tensor: give its rows, {name}.values(), or a padded tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {tensor.layout}: {name}.to_dense() is one")


def check_pair(input: Tensor, target: Tensor) -> None:
    check_tensor("input", input)
    check_tensor("target", target)
    if input.device != target.device:
        raise ValueError(f"input and target must be on one device; got {input.device} and {target.device}")


def check_name(argument: str, name: str, known: Iterable[str]) -> None:
    if not isinstance(name, str) or name not in known:
        _unknown(argument, name, known)


def _unknown(argument: str, name: object, known: Iterable[str]) -> NoReturn:
    names = tuple(known)
    raise ValueError(
        f"{argument} must be one of {', '.join(names)}; got {name!r}{words.hint(argument, str(name), names)}"
    )


def shape(tensor: Tensor, drop: int | None = None) -> str:
    return str(list(tensor.shape[:drop]))


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype; got {type(dtype).__name__}")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"{name} must be one of {', '.join(map(str, FLOATS))}; got {dtype}")


def widens_logits(dtype: torch.dtype | None, own: torch.dtype) -> bool:
    """Whether logits of 16-bit operands, of either model, are to be float32."""
    check_dtype("logits_dtype", dtype)
    wide = kept_dtype(own)
    if dtype not in (None, own, wide):
        allowed = own if own == wide else f"{own} or {wide}"
        raise ValueError(f"logits_dtype must be {allowed}, of hidden states in {own}; got {dtype}")
    return dtype in (None, wide)


def chunk_rows(given: SupportsIndex | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, (bool, Tensor)) or not isinstance(given, (int, SupportsIndex)):
        raise TypeError(f"chunk_rows must be an integer; got {type(given).__name__}")
    count = operator.index(given)
    if count < 1:
        raise ValueError(f"chunk_rows must be positive; got {count}")
    return count


def projection(
    name: str, hidden: Tensor, weight_name: str, weight: Tensor, bias_name: str, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, head and bias; cast where autocast is on, as F.linear casts them."""
    given = {name: hidden, weight_name: weight, **({} if bias is None else {bias_name: bias})}
    for which, tensor in given.items():
        check_tensor(which, tensor)
        if tensor.device != hidden.device:
            raise ValueError(f"{which} must be on the device of {name}, {hidden.device}; got {tensor.device}")
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.size(-1) != weight.size(1):
        raise ValueError(
            f"{name} must have the shape [..., hidden] and {weight_name} [vocab, hidden]; "
            f"got {shape(hidden)} and {shape(weight)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{bias_name} must have the shape {shape(weight, 1)}; got {shape(bias)}")
    tensors = list(given.values())
    if is_autocast(hidden) and torch.float64 not in [t.dtype for t in tensors]:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        tensors = [tensor.to(dtype) for tensor in tensors]
    for which, tensor in zip(given, tensors, strict=True):
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"{which} must have the dtype of {name}, {tensors[0].dtype}; got {tensor.dtype}. "
                f"{which}.to({tensors[0].dtype}) casts it, as autocast would"
            )
    return tensors[0], tensors[1], None if bias is None else tensors[2]


def teacher(
    input: Tensor,
    target: Tensor,
    target_weight: Tensor | None,
    target_bias: Tensor | None,
    target_form: str | None,
    target_indices: Tensor | None,
    tail: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Target, head and bias, if what says how they are given goes together, and their rows are the student's."""
    if target_weight is None:
        check_tensor("target", target)
    else:
        of_target = "target", target, "target_weight", target_weight, "target_bias", target_bias
        target, target_weight, target_bias = projection(*of_target)
    if target_indices is not None:
        if target_weight is not None:
            raise ValueError("target_indices are of a target of entries, not of hidden states; got target_weight too")
        check_entries("target", target, target_indices, input, target_form or "log_probs", tail)
    elif tail != "bucket":
        raise ValueError(f"tail goes with target_indices; got {tail!r} and none")
    check_target_bias(target_weight, target_bias)
    if target_weight is not None and target_form not in (None, "logits"):
        raise ValueError(f"target_form must be 'logits' where there is a target_weight; got {target_form!r}")
    if target.device != input.device:
        raise ValueError(f"input and target must be on one device; got {input.device} and {target.device}")
    if target.dim() == 0 or target.shape[:-1] != input.shape[:-1]:
        raise ValueError(f"target must have the rows of input, {[*input.shape[:-1], '...']}; got {shape(target)}")
    return target, target_weight, target_bias


def check_target_bias(target_weight: Tensor | None, target_bias: Tensor | None) -> None:
    if target_weight is None and target_bias is not None:
        raise ValueError("target_bias goes with target_weight; got none")


def shared_vocab(valid: int | None, student: int, teacher: int) -> int:
    """How many tokens count of two vocabularies."""
    if valid is None and student != teacher:
        raise ValueError(
            f"student and teacher must have the same vocabulary, unless valid_vocab says how much of it counts; "
            f"got {student} and {teacher} tokens"
        )
    return valid_width(valid, min(student, teacher)) or student


def check_absent(beside: str, **given: object) -> None:
    """Arguments that say nothing beside another."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} means nothing beside {beside}")


def check_entries(name: str, values: Tensor, indices: Tensor, input: Tensor, target_form: str, tail: str) -> None:
    """A top-k teacher's entries and their ids. Whether these are tokens is said where they are read."""
    check_tensor(name, values)
    check_dense("target_indices", indices)
    if indices.dtype not in IDS:
        raise TypeError(f"target_indices must be of an integer dtype; got {indices.dtype}")
    rows = input.shape[:-1]
    if (
        not input.dim()
        or not values.dim()
        or values.shape[:-1] != rows
        or indices.shape != values.shape
        or not values.size(-1)
    ):
        raise ValueError(
            f"{name} and target_indices must both have the shape {[*rows, 'k']}, with k at least 1, "
            f"for an input {shape(input)}; got {shape(values)} and {shape(indices)}"
        )
    for what, tensor in ((name, values), ("target_indices", indices)):
        if tensor.device != input.device:
            raise ValueError(f"{what} must be on the input's device {input.device}; got {tensor.device}")
    check_name("target_form", target_form, FORMS)
    check_name("tail", tail, TAILS)
    if target_form == "logits" and tail == "bucket":
        raise ValueError(
            'tail="bucket" needs what the entries leave of 1, which k logits do not tell: give log_probs, or '
            'tail="renormalize", "zero" or "support"'
        )


def notice_logits(name: str, values: Tensor, indices: Tensor, target_form: str, row_weight: Tensor | None) -> None:
    """Warn of log-probabilities that are none, on a CPU: what raw logits give looks like a loss."""
    if target_form != "log_probs" or values.device.type != "cpu" or is_traced(values, indices):
        return
    counts = indices.long() >= 0
    if row_weight is not None:
        counts &= (row_weight != 0).unsqueeze(-1)
    most = torch.where(counts, values.detach().float(), -math.inf).exp().sum(-1)
    if most.numel() and (largest := most.max().item()) > 1.1:
        notice(
            f"{name} holds log-probabilities, by target_form, and they are those of probabilities that sum to "
            f"{largest:.3g}; of logits say target_form='logits' (with another tail than \"bucket\")",
            UserWarning,
        )


PROBLEM_OPTIONS = (
    "temperature",
    "target_temperature",
    "logit_scale",
    "target_logit_scale",
    "softcap",
    "target_softcap",
)
WEIGHT_OPTIONS = ("divergence_weight", "label_weight", "z_weight", "label_smoothing")
DENSE_OPTIONS = (
    *("form", "target_form", *PROBLEM_OPTIONS, *WEIGHT_OPTIONS, "valid_vocab", "reduction", "inplace"),
    *("group", "first_token", "total_vocab"),
)
LINEAR_OPTIONS = (
    *("target_form", "tail", *PROBLEM_OPTIONS, *WEIGHT_OPTIONS, "valid_vocab", "reduction"),
    *("chunk_rows", "logits_dtype"),
    *("group", "first_token", "total_vocab", "sequence_dim"),
)
# What comes with a call of a module; and all that some function has
OF_CALL = ("row_weight", "labels", "normalizer")
OF_LINEAR_CALL = (*OF_CALL, "target_indices", "target_weight", "bias", "target_bias")
ARGUMENTS = dict.fromkeys((*DENSE_OPTIONS, *LINEAR_OPTIONS, *OF_LINEAR_CALL, "target_values"))


def check_options(kind: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Of a module: what is wrong with a kind, its parameter and options, whatever the tensors will be."""
    given = dict(options)
    params = {name: given.pop(name) for name in options if name not in known}
    for name in (*OF_LINEAR_CALL, "weight") if known is LINEAR_OPTIONS else OF_CALL:
        if name in params:
            raise ValueError(f"{name} comes with a call of the module; it is no option that a module keeps")
    check_name("reduction", given.pop("reduction", "mean"), REDUCTIONS)
    check_name("tail", given.pop("tail", "bucket"), TAILS)
    chunk_rows(given.pop("chunk_rows", None))
    check_dtype("logits_dtype", given.pop("logits_dtype", None))
    inplace = given.pop("inplace", False)
    check_flag("inplace", inplace)
    group = given.pop("group", None)
    check_group(group, given.pop("first_token", None), given.pop("total_vocab", None))
    check_sequence_dim(given.pop("sequence_dim", None), group)
    valid_width(given.pop("valid_vocab", None), None)
    form = given.pop("form", "logits")
    if known is LINEAR_OPTIONS and given.get("target_form") in ("probs", "log_probs"):  # entries may be tempered, too
        problem(params, kind, form, target_temperature=given.pop("target_temperature", None))
    asked = {name: given.pop(name) for name in WEIGHT_OPTIONS if name in given}
    asked = {"divergence_weight": 1.0, "label_weight": 1.0, "z_weight": 0.0, **asked}
    if asked["divergence_weight"] == 0:
        check_weights_of_labels(form, **asked)
    else:
        weights(True, form, **asked)
    if inplace:
        check_inplace_options(form, options.get("reduction", "mean"), asked["divergence_weight"])
    problem(params, kind, form, **given)


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")
