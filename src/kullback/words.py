"""What arguments and kinds are called elsewhere: for hints in errors. None of these names is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

MASK = "row_weight is a row's mask"
ARGUMENTS = {
    **dict.fromkeys(("mask", "attention_mask", "completion_mask", "loss_mask", "padding_mask"), MASK),
    "ignore_index": "a label of -100 is none, and row_weight=labels != -100 leaves its row out",
    **dict.fromkeys(
        ("weight", "weights", "sample_weight", "sample_weights", "token_weight", "token_weights"),
        "row_weight has a weight for each row",
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
    **dict.fromkeys(("fkl", "forward_kl", "kld", "kl_div", "kldiv", "kullback_leibler"), "kl"),
    **dict.fromkeys(("rkl", "kl_reverse", "backward_kl", "exclusive_kl"), "reverse_kl"),
    **dict.fromkeys(("js", "jsd", "gjs", "generalized_jsd", "jeffreys_shannon"), "jensen_shannon"),
    **dict.fromkeys(("tv", "tvd", "l1"), "total_variation"),
    **dict.fromkeys(("symmetric_kl", "skl", "j_divergence"), "jeffreys"),
    **dict.fromkeys(("mixed", "kl_mix", "weighted_jeffreys", "bidirectional_kl"), "mixed_kl"),
    **dict.fromkeys(("skew_jsd", "skl_alpha", "alpha_skew"), "skew_kl"),
    **dict.fromkeys(("chi_squared", "chi_square", "pearson", "chisquare"), "chi2"),
}
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
    if KINDS.get(plain, "") in known:
        return f" (did you mean {KINDS[plain]!r}?)"
    # Of two letters, "kl" is near to names of the other direction.
    return nearest(plain, [kind for kind in known if kind != "kl"] + ["kl"] * (plain == "kl"))
