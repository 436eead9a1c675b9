"""What arguments and kinds are called elsewhere: for hints in errors. None of these names is accepted."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

MASK = "row_weight is a row's mask"
ARGUMENTS = {
    **dict.fromkeys(("mask", "attention_mask", "completion_mask", "loss_mask", "padding_mask"), MASK),
    "ignore_index": "a label of -100 is none, and row_weight=labels != -100 leaves its row out",
    **dict.fromkeys(
        ("weight", "weights", "sample_weight", "sample_weights", "token_weight", "token_weights"),
        "row_weight has a weight for each row, and beta of mixed_kl weighs both directions",
    ),
    **dict.fromkeys(
        ("hard_weight", "ce_weight", "hard_label_weight", "lm_weight", "weight_hard_loss"),
        "label_weight multiplies the labels' cross-entropy",
    ),
    **dict.fromkeys(
        ("soft_weight", "kl_weight", "kd_weight", "weight_soft_loss"), "divergence_weight multiplies the divergence"
    ),
    **dict.fromkeys(("target_ids", "ids", "indices", "topk_indices"), "target_indices are a top-k teacher's"),
    **dict.fromkeys(("T", "tau", "temp"), "temperature divides logits"),
    **dict.fromkeys(("log_target", "log_input"), 'forms say it: form="log_probs", target_form="log_probs"'),
    "dim": "distributions lie on the last dimension",
    "num_items_in_batch": 'normalizer divides the sum, with reduction="mean"',
    "softmax_scale": "logit_scale multiplies logits",
    "logit_softcapping": "softcap bounds logits",
}
KINDS = {
    **dict.fromkeys(("fkl", "forward_kl", "kld", "kl_div", "kldiv", "kullback_leibler"), ("kl",)),
    **dict.fromkeys(("rkl", "exclusive_kl"), ("reverse_kl",)),
    **dict.fromkeys(("js", "jsd", "gjs", "generalized_jsd", "jeffreys_shannon"), ("jensen_shannon",)),
    **dict.fromkeys(("tv", "tvd", "l1"), ("total_variation",)),
    **dict.fromkeys(("symmetric_kl", "j_divergence"), ("jeffreys",)),
    "skl": ("jeffreys", "skew_kl"),  # symmetric, or skewed
    **dict.fromkeys(("mixed", "kl_mix", "weighted_jeffreys", "bidirectional_kl"), ("mixed_kl",)),
    **dict.fromkeys(("sfkl", "skewed_kl", "skl_alpha", "alpha_skew"), ("skew_kl",)),
    **dict.fromkeys(("chi_squared", "chi_square", "pearson", "chisquare"), ("chi2",)),
}
# What says that a kind's arguments are exchanged
REVERSED = re.compile(
    r"reversed?|backward|inverse|(?<![a-z])(rev|bwd|r)(?![a-z])|(?<![a-z])r(?=kl|skew|chi|alpha|renyi)|(?<=\bs)r(?=kl)"
)
FORWARD = re.compile(r"(?<![a-z])(fwd|forward|f)_|_(fwd|forward|f)(?![a-z])")
SYMMETRIC = "jeffreys", "total_variation", "hellinger"
# What hints name, and a function may lack
NAMED = re.compile(
    r"\b(row_weight|labels|temperature|target_indices|form|target_form|normalizer|logit_scale|softcap|label_weight"
    r"|divergence_weight)\b"
)
REDUCTIONS = {"batchmean": 'reduction="mean" with normalizer=input.size(0) divides so'}


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" of a name that is nearly one of these, or nothing."""
    match = difflib.get_close_matches(name, tuple(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def hint(argument: str, name: str, known: Collection[str]) -> str:
    """What an argument's value that is not known may have meant, or nothing: by what it is called elsewhere, too."""
    if argument == "reduction" and name in REDUCTIONS:
        return f"; {REDUCTIONS[name]}"
    if argument != "kind":
        return nearest(name, known)
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    meant = [kind for kind in KINDS.get(plain, ()) if kind in known]
    if meant:
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    plain = FORWARD.sub("", plain)
    forward = re.sub("_+", "_", REVERSED.sub("", plain)).strip("_")
    if forward != plain:
        return _reversed(forward, known)
    # Of two letters, "kl" is near to names of the other direction.
    return nearest(plain, [kind for kind in known if kind != "kl"] + ["kl"] * (plain == "kl"))


def _reversed(forward: str, known: Collection[str]) -> str:
    """Of the reverse of a kind."""
    found = KINDS.get(forward) or difflib.get_close_matches(forward, tuple(known), n=1)
    if "kl" in found and "reverse_kl" in known:
        return " (did you mean 'reverse_kl'?)"
    if found and found[0] in SYMMETRIC and forward != "skl":
        return f" (did you mean {found[0]!r}?)"
    return f" (that is {found[-1]!r} with input and target exchanged)" if found and found[-1] in known else ""


def hints_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, with a hint for an argument that it does not have."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def hinting(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        for name in options:
            if name not in names:
                raise TypeError(f"{function.__name__} has no argument {name!r}{_meant(name, names)}")
        return function(*args, **options)

    return hinting


def _meant(argument: str, names: tuple[str, ...]) -> str:
    """What an argument may have meant, of a function that has these."""
    told = ARGUMENTS.get(argument)
    if told is None:
        return nearest(argument, names)
    if all(name in names for name in NAMED.findall(told)):
        return f": {told}"
    return ": it has figures of every row; choose rows before or after" if told == MASK else ""
