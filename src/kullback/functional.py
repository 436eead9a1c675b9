"""User functions: contracts and argument order. Each checks its arguments, then calls one driver."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from kullback import backends, checks, collecting, collectives, linear, parallel, sharded, statistics, topk
from kullback.choices import ElementwiseForm, ElementwiseReduction, Form, Reduction, Tail
from kullback.divergences import Kind
from kullback.dtypes import as_ids, kept_dtype
from kullback.forms import FORMS
from kullback.gathered import gather
from kullback.linear import Models
from kullback.problem import DIVERGENCE_ALONE, IGNORED, WHOLE, Problem, Side
from kullback.reductions import reduction_of
from kullback.statistics import RowStatistics, TopKRowStatistics
from kullback.tracing import in_functorch, is_traced, untraced
from kullback.words import hints_arguments
from kullback.work import Operands, as_rows, has_view_as_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kullback.sharded import Layout

ELEMENTWISE_REDUCTIONS = get_args(ElementwiseReduction)
ELEMENTWISE_FORMS = get_args(ElementwiseForm)
KL = {(q, p): Problem("kl", Side(q), Side(p)) for q, p in itertools.product(ELEMENTWISE_FORMS, repeat=2)}


def kl_div(
    input: Tensor,
    target: Tensor,
    reduction: ElementwiseReduction | str = "mean",
    log_target: bool = False,
    *,
    form: ElementwiseForm | str = "log_probs",
) -> Tensor:
    """Drop-in for `torch.nn.functional.kl_div`: Σ target · (log target - input), in nats.

    Same reductions, broadcasting, dtypes and results, for normalised and unnormalised input alike, except that
    0 · log 0 is 0 in value and gradients where torch has NaN. torch's deprecated `size_average` and `reduce` are not
    taken, so that `reduction` is the third argument.
    `form="probs"` takes probabilities: `kl_div(p, t, form="probs") == F.kl_div(torch.log(p), t)`.

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
        TypeError: an input that is no tensor, or of integer, bool or complex dtype; a log_target that is no bool.
        ValueError: unknown reduction or form; shapes that do not broadcast; devices that differ.

    Source: Kullback and Leibler, On information and sufficiency, 1951.

    >>> import torch, kullback
    >>> q = torch.tensor([[0.5, 0.25, 0.25]])
    >>> p = torch.tensor([[0.5, 0.5, 0.0]])
    >>> kullback.kl_div(q.log(), p, reduction="batchmean")
    tensor(0.3466)
    """
    backends.begin()
    checks.check_pair(input, target)
    checks.check_name("reduction", reduction, ELEMENTWISE_REDUCTIONS)
    checks.check_name("form", form, ELEMENTWISE_FORMS)
    checks.check_flag("log_target", log_target)
    # "batchmean" divides by the input's own first dimension, also where it is broadcast: as torch.
    batch = input.size(0) if input.dim() else 1
    wide = [tensor.dtype for tensor in (input, target) if tensor.dim()]  # a 0-d tensor promotes no other
    dtype = wide[0] if len(wide) == 1 else torch.promote_types(input.dtype, target.dtype)
    if input.shape != target.shape:
        try:
            input, target = torch.broadcast_tensors(input, target)
        except RuntimeError:
            raise ValueError(
                "input and target must have shapes that broadcast; "
                f"got {checks.shape(input)} and {checks.shape(target)}"
            ) from None
    if dtype.itemsize < 4 and checks.is_autocast(input):
        dtype = torch.float32
    forms = form, "log_probs" if log_target else "probs"
    # Dynamo may take the numbers of an object that it did not see made for inputs of the graph.
    problem = Problem("kl", Side(forms[0]), Side(forms[1])) if torch.compiler.is_compiling() else KL[forms]
    driver = sharded.driver(input, target)
    if reduction == "none":
        return driver.per_row(problem, Operands(input.unsqueeze(-1), target.unsqueeze(-1)), dtype)
    count = batch if reduction == "batchmean" else 1 if reduction == "sum" else input.numel()
    if input.dim() == 0:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    operands = Operands(input, target)
    # 1 / count as a number would be traced for this size alone.
    if reduction != "sum" and (torch.compiler.is_compiling() or not isinstance(count, int)):
        return (driver.total(problem, operands, 1.0, kept_dtype(dtype)) / count).to(dtype)
    scale = 1 / count if count else math.nan  # of nothing the mean is NaN, as torch has it
    return driver.total(problem, operands, scale, dtype)


def divergence(
    input: Tensor,
    target: Tensor | None,
    kind: Kind | str = "kl",
    *,
    form: Form | str = "logits",
    target_form: Form | str | None = None,
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float | None = None,
    softcap: float | None = None,
    target_softcap: float | None = None,
    valid_vocab: int | None = None,
    labels: Tensor | None = None,
    divergence_weight: float = 1.0,
    label_weight: float = 1.0,
    z_weight: float = 0.0,
    label_smoothing: float = 0.0,
    row_weight: Tensor | None = None,
    reduction: Reduction | str = "mean",
    normalizer: float | Tensor | None = None,
    inplace: bool = False,
    group: ProcessGroup | None = None,
    first_token: int | None = None,
    total_vocab: int | None = None,
    **params: float,
) -> Tensor:
    """Divergence of the model's distributions from the reference's, in nats; rows are `[..., vocab]`.

    | kind            | definition, p = target, q = input            | parameter |
    | --------------- | -------------------------------------------- | --------- |
    | kl              | Σ p log(p/q)                                 |           |
    | reverse_kl      | Σ q log(q/p)                                 |           |
    | jeffreys        | Σ (p - q) log(p/q)                           |           |
    | mixed_kl        | b·KL(p‖q) + (1-b)·KL(q‖p)                    | beta=0.5  |
    | jensen_shannon  | b·KL(p‖m) + (1-b)·KL(q‖m), m = b·p + (1-b)·q | beta=0.5  |
    | skew_kl         | KL(p ‖ a·p + (1-a)·q)                        | alpha=0.1 |
    | total_variation | ½ Σ abs(p - q)                               |           |
    | hellinger       | ½ Σ (√p - √q)²                               |           |
    | chi2            | Σ (p - q)²/q                                 |           |
    | alpha           | (1 - Σ p^a q^(1-a)) / (a(1-a))               | alpha=0.5 |
    | renyi           | log(Σ p^a q^(1-a)) / (a-1)                   | alpha=0.5 |

    Probabilities and log-probabilities are taken as they are, normalised or not; logits by their softmax.
    0 · log 0 is 0 in value and gradients; p > 0 where q = 0 makes kl +inf; NaN stays in its row.

    With `labels` a row's loss is, in the same pass over it,
    divergence_weight · D + label_weight · (-log q of its label) + z_weight · lse². Here lse is the log-sum-exp of its
    logits as they count: scaled, capped and over the temperature.

    Args:
        input: the model's (student's) logits, log_probs or probs, `[..., vocab]`, floating point.
        target: the reference's (teacher's), of the same shape (but see `valid_vocab`); dtypes may differ. None: the
            loss is the cross-entropy of `labels`. A row of label -100 loses 0 then, and "mean" counts it, unlike
            `F.cross_entropy`; `row_weight=labels != -100` leaves it out.
        kind: a name of the table.
        form: "logits", "log_probs" or "probs": what `input` holds.
        target_form: the same of `target`; by default that of `input`.
        temperature: divides the input's logits; over the scale more than 1e-30 and less than 1e30. No factor T² is
            applied: multiply the loss by T**2 to keep gradients' size, as Hinton et al. do.
        target_temperature: the same of the target; by default that of the input.
        logit_scale: multiplies the input's logits, before the softcap; positive (Cohere, Granite).
        target_logit_scale: the same of the target; by default that of the input.
        softcap: a logit x of the input counts as softcap · tanh(x / softcap), before the temperature (Gemma 2);
            positive, or None. A logit of -inf counts as -softcap, as it does there.
        target_softcap: the same of the target; by default it has none, since a softcap belongs to one architecture.
        valid_vocab: how many elements of a row count, where vocabularies are padded or one is longer; gradients of
            the others are 0. Nothing is copied for it.
        labels: ids of the true tokens, `input.shape[:-1]`, an integer dtype. A row of label -100 has its divergence
            alone. Where the label has no mass the loss is +inf.
        divergence_weight: what the divergence counts; at 0 the target is not read, and gets no gradient.
        label_weight: what the label's cross-entropy counts. It is of the softmax at `temperature`.
        z_weight: what the square of the log-sum-exp counts (z-loss), of rows that have a label, or of all where there
            are no labels; of logits.
        label_smoothing: which part of a label is spread over all tokens that count, as in torch. It is not for a
            vocabulary that ranks share.
        row_weight: float, integer or bool, `input.shape[:-1]`, of either sign. A row of weight 0 is not read: garbage
            or NaN in it cannot reach the value or a gradient; its loss counts as 0, in the weight's own gradient too.
        reduction: "none" gives weight · divergence of each row, "sum" their sum, "mean" the sum divided by
            Σ weight, or by `normalizer`; by 1 where that is 0.
        normalizer: positive number or 0-d tensor (never read on the host, nor checked) for "mean".
        group: a process group whose ranks share the vocabulary (tensor parallelism): each passes its slice of every
            row, of any width, and gets the same loss to the bit and the gradients of its slice. `valid_vocab` is then
            of the slice. Ranks meet in one all-gather of the rows' numbers, with jensen_shannon, skew_kl and
            total_variation from logits in two; a backward needs none (docs/parallel.md).
        first_token: with labels and a group, the id of the slice's first token. Without it and `total_vocab` the ranks
            tell each other their slices' widths, in rank order, for which the host waits.
        total_vocab: how many tokens that count all ranks have together.
        inplace: let the input's gradient take the place of its values, where one is wanted: a tensor less. For logits
            that nothing else needs; whatever saved them for its own backward raises there.
        **params: the kind's parameter.

    Returns:
        `input.shape[:-1]` for "none", else 0-d; float32 for 16-bit inputs, else the promoted dtype. Where
        there are no rows, or no weight, sum and mean are 0 with zero gradients. Of DTensors, replicated or sharded by
        rows, a DTensor: each device finds its own rows', and a sum is partial until it is needed. On one dimension of
        their mesh they may be sharded along the vocabulary: the loss is replicated there.

    Raises:
        TypeError: an argument of the wrong type or dtype (integer, bool, complex).
        ValueError: shapes or devices that differ; an unknown kind, form, reduction or parameter; a
            temperature, scale, softcap, valid_vocab, normalizer, weight, label_smoothing or parameter out of its
            range; neither a target nor labels; on a CPU, labels that are no tokens (a GPU stops with an assertion);
            a `first_token` that leaves the vocabulary; `inplace` with reduction "none", of float16 (whose gradient
            has to wait for a loss scaler's factor), of a leaf, where a weight or normalizer wants a gradient, or of
            memory that the target or another element shares.
        RuntimeError: a gradient of the gradient, where ranks share the vocabulary.

    Sources: Csiszár, "Information-type measures of difference of probability distributions", 1967; Lin, "Divergence
    measures based on the Shannon entropy", 1991; Rényi, "On measures of entropy and information", 1961. How each is
    found: docs/mathematics.md of the repository.

    >>> import torch, kullback
    >>> student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    >>> kullback.divergence(student, teacher)
    tensor(0.3775)
    >>> kullback.divergence(student, teacher, "jensen_shannon", beta=0.5, reduction="none")
    tensor([0.0807])
    >>> kullback.divergence(student, teacher, labels=torch.tensor([0]), label_weight=0.1)
    tensor(0.4015)
    """
    scales = temperature, target_temperature, logit_scale, target_logit_scale, softcap, target_softcap
    checks.check_flag("inplace", inplace)
    sharded.check_alike(input=input, target=target, row_weight=row_weight, labels=labels)
    sharded.check_normalizer(normalizer, input)
    if target is None or checks.number("divergence_weight", divergence_weight) == 0:
        if target is not None:
            checks.check_pair(input, target)
            if not checks.is_of_padding(valid_vocab, group):
                checks.valid_vocab(valid_vocab, input, target)
        if inplace:
            checks.check_inplace_options(form, reduction, divergence_weight=0)
        checks.problem(params, kind, form, target_form, *scales)
        labels = _labels_alone(labels, input, form, divergence_weight, label_weight, z_weight, label_smoothing)
        loss = _without_target(
            *(input, labels, form, label_weight, z_weight, label_smoothing),
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            valid_vocab=valid_vocab,
            row_weight=row_weight,
            reduction=reduction,
            normalizer=normalizer,
            group=group,
            first_token=first_token,
            total_vocab=total_vocab,
        )
        return loss if target is None else loss.to(checks.LOSS_DTYPES[input.dtype, target.dtype])
    backends.begin()
    checks.check_pair(input, target)
    checks.check_reduction(reduction, normalizer, input)
    checks.check_group(group, first_token, total_vocab)
    weights = checks.weights(labels is not None, form, divergence_weight, label_weight, z_weight, label_smoothing)
    checks.check_smoothing(label_smoothing, group is not None or sharded.shares_vocab(input))
    shard = WHOLE
    if group is not None:
        if checks.is_of_padding(valid_vocab, group):
            input, target, valid_vocab = input[..., :0], target[..., :0], None
        shard = parallel.shard(group)
    vocab = checks.valid_vocab(valid_vocab, input, target)
    tokens = vocab or input.size(-1)
    checks.check_slice(tokens, first_token, total_vocab)
    if labels is not None:
        labels = checks.labels(labels, input)
        if form != "logits" and sharded.shares_vocab(input):
            raise ValueError(f"labels beside DTensors that share their vocabulary are of logits; got form {form!r}")
        if group is not None:
            shard, tokens = parallel.slice_of(group, tokens, first_token, total_vocab)
        checks.check_tokens(labels.to_local() if sharded.is_dtensor(labels) else labels, tokens)
    weights_of_logits = weights if form == "logits" else DIVERGENCE_ALONE
    problem = checks.problem(params, kind, form, target_form, *scales, vocab, shard, weights_of_logits)
    dtype = checks.LOSS_DTYPES[input.dtype, target.dtype]
    weight = None if row_weight is None else checks.row_weight(row_weight, input)
    if inplace:
        checks.check_inplace(input, target, form, weight, reduction, normalizer)
    reduced = reduction_of(reduction, input, weight, normalizer, dtype)
    driver = sharded.driver(input, target, group)
    if form != "logits" and weights != DIVERGENCE_ALONE:
        operands = Operands(input, target, reduced.row_weight)
        ours = driver.per_row(problem, operands, dtype) * weights.divergence
        if labels is not None:
            ours = ours + topk.of_labels(problem, weights, input, labels, reduced.row_weight, dtype)
        return reduced.finish(reduced.of_rows(ours))
    operands = Operands(input, target, reduced.row_weight, labels)
    if reduced.per_row:
        return reduced.finish(driver.per_row(problem, operands, dtype))
    return reduced.finish(driver.total(problem, operands, reduced.scale, dtype, inplace))


def _without_target(
    input: Tensor,
    labels: Tensor,
    form: str,
    label_weight: float,
    z_weight: float,
    label_smoothing: float,
    **options: Any,
) -> Tensor:
    """The labels' cross-entropy.

    Where a kernel reads such rows once: the labels' term, and the input's divergence from itself, of any kind, which is
    0 with gradients of 0. Elsewhere the kl from a one-hot teacher.
    """
    is_whole = form == "logits" and options["group"] is None and not sharded.shares_vocab(input)
    is_dtensor = sharded.is_dtensor(input)
    if is_dtensor and form != "logits":
        raise ValueError(f"labels alone of DTensors are of logits; got form {form!r}")
    is_plain = is_whole and not is_dtensor
    collected: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if collecting.is_collecting() and is_plain:  # of all rows, those without a label too
        of_input = {name: options[name] for name in ("temperature", "logit_scale", "softcap")}
        vocab = checks.valid_vocab(options["valid_vocab"], input, input)
        checks.check_tokens(labels, vocab or input.size(-1))
        problem = checks.problem({}, "kl", form, **of_input, vocab=vocab)
        weight = options["row_weight"]
        operands = Operands(input, input, None if weight is None else checks.row_weight(weight, input), labels)
        collected = collecting.apart(problem, operands)
    of_labels: dict[str, Any] = {"labels": labels, "z_weight": z_weight, "label_smoothing": label_smoothing}
    is_read_once = is_plain and _is_read_once(input)
    if not is_read_once:
        of_rows = (options[name] for name in ("row_weight", "reduction", "normalizer"))
        options["row_weight"], options["normalizer"] = _of_labelled_rows(labels, input, *of_rows)
    with collected:
        if is_read_once or (is_whole and (label_smoothing or is_dtensor)):
            of_labels |= {"label_weight": label_weight, "target_softcap": options["softcap"]}
            return divergence(input, input.detach(), "total_variation", form=form, **of_labels, **options)
        (divergence_weight, label_weight), entries = _one_hot(labels, input, label_weight, label_smoothing)
        of_labels |= {"label_weight": label_weight, "divergence_weight": divergence_weight}
        options = {"target_temperature": 1.0, **options}
        return topk_divergence(input, entries[0], entries[1], form=form, tail="zero", **of_labels, **options)


def _labels_alone(
    labels: Tensor | None,
    input: Tensor,
    form: str,
    divergence_weight: float,
    label_weight: float,
    z_weight: float,
    label_smoothing: float,
) -> Tensor:
    """The labels, when all that is said of them is checked."""
    checks.check_tensor("input", input)
    checks.check_rows(input)
    if labels is None:
        raise ValueError("target or labels must be given; got neither, or a divergence_weight of 0")
    checks.check_name("form", form, FORMS)
    checks.check_weights_of_labels(form, divergence_weight, label_weight, z_weight, label_smoothing)
    return checks.labels(labels, input)


def _is_read_once(input: Tensor) -> bool:
    """Whether a kernel has the labels of whole rows."""
    return not is_traced(input) and has_view_as_rows(input) and backends.has_labels_alone(input)


def _of_labelled_rows(
    labels: Tensor, input: Tensor, row_weight: Tensor | None, reduction: str, normalizer: float | Tensor | None
) -> tuple[Tensor, float | Tensor | None]:
    """Row weights that are 0 where there is no label, and the normalizer with which a mean divides as it would."""
    checks.check_reduction(reduction, normalizer, input)
    is_mean = reduction == "mean" and normalizer is None
    counts = labels != IGNORED
    if row_weight is None:
        return counts, max(math.prod(input.shape[:-1]), 1) if is_mean else normalizer
    weight = checks.row_weight(row_weight, input)
    if is_mean:
        total = weight.sum()
        normalizer = total.full_tensor() if sharded.is_dtensor(total) and not total.requires_grad else total
    return torch.where(counts, weight, 0), normalizer


def _one_hot(
    labels: Tensor, input: Tensor, label_weight: float, label_smoothing: float
) -> tuple[tuple[float, float], tuple[Tensor, Tensor]]:
    """Weights of a divergence and of labels, and the entries of a teacher that gives labels probability 1.

    It has none where labels have no weight, since 0 times infinity is NaN; nor where they are smoothed and stay labels.
    """
    ids, is_teacher = labels.unsqueeze(-1), label_weight != 0 and not label_smoothing
    ids = torch.where(ids == IGNORED, -1, ids) if is_teacher else torch.full_like(ids, -1)
    weights = (label_weight, 0.0) if is_teacher else (1.0, label_weight)
    return weights, (torch.zeros_like(ids, dtype=kept_dtype(input.dtype)), ids)


def topk_divergence(
    input: Tensor,
    target_values: Tensor,
    target_indices: Tensor,
    kind: Kind | str = "kl",
    *,
    form: Form | str = "logits",
    target_form: Form | str = "log_probs",
    tail: Tail | str = "bucket",
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    labels: Tensor | None = None,
    divergence_weight: float = 1.0,
    label_weight: float = 1.0,
    z_weight: float = 0.0,
    label_smoothing: float = 0.0,
    row_weight: Tensor | None = None,
    reduction: Reduction | str = "mean",
    normalizer: float | Tensor | None = None,
    group: ProcessGroup | None = None,
    first_token: int | None = None,
    total_vocab: int | None = None,
    **params: float,
) -> Tensor:
    """Divergence from a teacher that is known at k tokens of each row: its best log-probabilities and their ids.

    The student's row is read once, and its gradient written once; there is never a dense teacher. What the k entries
    leave is told by `tail`:

    - "bucket": one more outcome, the teacher's 1 - Σ p against the student's mass outside the ids. From logits never
      negative; with k = vocab the dense loss, else the least that a teacher with these entries can have. Where they are
      tempered, the tail's tokens are taken to share its mass equally, and it may be more than the dense loss.
    - "renormalize": both are taken given that the token is one of the k; neither has any other mass.
    - "zero": the entries as they are and nothing else; the student has mass where the teacher has none. The usual
      Σ p log(p/q) of truncated teachers, which may be negative; reverse_kl is inf.
    - "support": sums over the k tokens alone, of the teacher's entries as they are and the student's full softmax: what
      verl and NeMo-RL compute. reverse_kl is finite, and may be negative.

    Args:
        input: the student's logits (log_probs, probs), `[..., vocab]`, floating point.
        target_values: the teacher's entries, `[..., k]`, floating point.
        target_indices: their ids, `[..., k]`, an integer dtype. Entries of the same id are summed; those of id -1 are
            left out, whatever their value.
        kind: as of `divergence`.
        form: what `input` holds.
        target_form: what `target_values` holds: "log_probs", "probs", or "logits", of which nothing is known but their
            softmax over the k: they do not go with `tail` "bucket".
        tail: "bucket", "renormalize", "zero" or "support".
        temperature: divides the student's logits; no factor T² is applied.
        target_temperature: of the teacher, by default the same: p^(1/T), normalised over the whole vocabulary. The
            tokens outside the ids are taken to share their mass equally, whatever the tail, but for "renormalize".
            Give 1 where the entries were stored at their temperature.
        logit_scale: of the student's logits, as of `divergence`.
        softcap: the same.
        valid_vocab: how many elements of the student's row count.
        labels: as of `divergence`, like the next four; they need not be among the ids.
        divergence_weight: what the divergence counts.
        label_weight: what the label's cross-entropy counts.
        z_weight: what the square of the log-sum-exp counts.
        label_smoothing: which part of a label is spread over all tokens.
        row_weight: as of `divergence`.
        reduction: as of `divergence`.
        normalizer: as of `divergence`.
        group: a process group whose ranks share the student's vocabulary: each passes its slice of every row and the
            teacher's entries, whose ids are of the whole vocabulary. They meet in one all-gather of k + 2 numbers a
            row; a teacher's gradient is the same on all.
        first_token: the id of the slice's first token. Without it and `total_vocab` the ranks tell each other their
            slices' widths, in rank order, for which the host waits.
        total_vocab: how many tokens that count all ranks have together.
        **params: the kind's parameter.

    Returns:
        `input.shape[:-1]` for "none", else 0-d; float32, or float64 where an argument is.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that differ; unknown names; options out of range; on a CPU, ids that are
            no tokens, in transforms and compiled code too. On a GPU those stop the device, as an index out of range
            does in torch: nothing waits for their check.

    Where there are tokens outside the ids, the teacher's tail has a mass of at least 6e-8 (1e-16 in float64). So
    reverse_kl is finite when the entries sum to 1. A tail of at most four roundings of the entries' dtype may be
    rounding alone. It then counts as 0 where the student has no mass outside the ids. At a temperature other than 1 it
    counts as no more than the student's tail. With "bucket" and "renormalize" a row without ids has a divergence of 0,
    if its probabilities sum to 1.

    Source: docs/mathematics.md.

    >>> import torch, kullback
    >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0, -1.0]])
    >>> log_p, ids = teacher.log_softmax(-1).topk(2)
    >>> kullback.topk_divergence(student, log_p, ids)
    tensor(0.1004)
    >>> own = student.topk(2).indices  # the student's choice of tokens: reverse_kl on policy
    >>> kullback.topk_divergence(student, teacher.log_softmax(-1).gather(-1, own), own, "reverse_kl")
    tensor(0.0968)
    """
    backends.begin()
    checks.check_tensor("input", input)
    checks.check_name("form", form, FORMS)
    checks.check_reduction(reduction, normalizer, input)
    checks.check_group(group, first_token, total_vocab)
    layout = None
    of_rows = {"target_values": target_values, "target_indices": target_indices, "row_weight": row_weight}
    of_rows["labels"] = labels
    sharded.check_alike(input=input, **of_rows)
    sharded.check_normalizer(normalizer, input)
    if sharded.is_dtensor(input):
        checks.valid_width(valid_vocab, input.size(-1))
        normalizer = sharded.whole(normalizer)
        local, layout = sharded.localised({"input": (input, -1)}, of_rows, valid_vocab, group)
        input, target_values, target_indices = (local[name] for name in ("input", "target_values", "target_indices"))
        row_weight, labels = local.get("row_weight"), local.get("labels")
        group, first_token, total_vocab, valid_vocab = layout.place
    checks.check_entries("target_values", target_values, target_indices, input, target_form, tail)
    if checks.is_of_padding(valid_vocab, group):
        input, valid_vocab = input[..., :0], None
    vocab = checks.valid_width(valid_vocab, input.size(-1))
    width = vocab or input.size(-1)
    checks.check_slice(width, first_token, total_vocab)
    shard, tokens = parallel.slice_of(group, width, first_token, total_vocab)
    if not tokens:
        raise ValueError(f"input must have tokens; got the shape {checks.shape(input)}")
    weight = None if row_weight is None else checks.row_weight(row_weight, input)
    weights = checks.weights(labels is not None, form, divergence_weight, label_weight, z_weight, label_smoothing)
    checks.check_smoothing(label_smoothing, group is not None)
    labels = checks.labels_of(labels, input, tokens)
    scales = temperature, target_temperature, logit_scale, softcap
    problem = _problem_of_entries(params, kind, form, *scales, vocab=vocab, shard=shard, weights=weights)
    checks.notice_logits("target_values", target_values, target_indices, target_form, weight)
    of = topk.entries_of(target_form, tail, form, tokens)
    teacher, target = topk.teacher(problem, target_values, target_indices, of, weight)
    dtype = checks.LOSS_DTYPES[input.dtype, target_values.dtype]
    reduced = reduction_of(reduction, input, weight, normalizer, dtype)
    operands = Operands(input, target, reduced.row_weight, labels)
    with collecting.apart(problem, operands) if collecting.is_collecting() else contextlib.nullcontext():
        if reduced.per_row:
            loss = reduced.finish(topk.per_row(teacher, operands, dtype))
        else:
            loss = reduced.finish(topk.total(teacher, operands, reduced.scale, dtype))
    return loss if layout is None else sharded.as_dtensor(loss, layout)


def _problem_of_entries(
    params: dict[str, float],
    kind: str,
    form: str,
    temperature: float,
    target_temperature: float | None,
    logit_scale: float,
    softcap: float | None,
    **more: Any,
) -> Problem:
    """Beside a teacher's entries. Whatever they are, they may be tempered, as logits are."""
    return checks.problem(
        params,
        kind,
        form=form,
        target_form="logits",
        temperature=temperature,
        target_temperature=temperature if target_temperature is None else target_temperature,
        logit_scale=logit_scale,
        target_logit_scale=1.0,
        softcap=softcap,
        **more,
    )


def linear_divergence(
    input: Tensor,
    weight: Tensor,
    target: Tensor | None,
    target_weight: Tensor | None = None,
    kind: Kind | str = "kl",
    *,
    bias: Tensor | None = None,
    target_bias: Tensor | None = None,
    target_form: Form | str | None = None,
    target_indices: Tensor | None = None,
    tail: Tail | str = "bucket",
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float | None = None,
    softcap: float | None = None,
    target_softcap: float | None = None,
    valid_vocab: int | None = None,
    labels: Tensor | None = None,
    divergence_weight: float = 1.0,
    label_weight: float = 1.0,
    z_weight: float = 0.0,
    label_smoothing: float = 0.0,
    row_weight: Tensor | None = None,
    reduction: Reduction | str = "mean",
    normalizer: float | Tensor | None = None,
    chunk_rows: int | None = None,
    logits_dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    first_token: int | None = None,
    total_vocab: int | None = None,
    sequence_dim: int | None = None,
    **params: float,
) -> Tensor:
    """Divergence of two language models from their hidden states: of softmax(input @ weight.T + bias) from the teacher.

    `divergence(F.linear(input, weight, bias), F.linear(target, target_weight, target_bias), kind, ...)`, of which the
    logits are in memory a chunk of rows at a time. "sum" and "mean" write the gradients in the forward pass. That is
    one matrix product each for the student's logits, the teacher's, the gradient of `input` and that of `weight`.
    What needs no gradient costs no product. Three cases keep their inputs and a few numbers per row instead, and
    project again in backward: reduction "none", float16, and a `row_weight` that requires a gradient.

    Args:
        input: the student's hidden states, `[..., hidden]`, floating point.
        weight: its head, `[vocab, hidden]`, of the same dtype.
        target: the teacher's hidden states, `[..., target hidden]`; without `target_weight` its `[..., vocab]` logits
            or what else `target_form` says; with `target_indices` its entries at those ids, `[..., k]`. None: the loss
            is the cross-entropy of `labels`.
        target_weight: the teacher's head, `[vocab, target hidden]`.
        kind: as of `divergence`.
        bias: of the student's head, `[vocab]`.
        target_bias: of the teacher's.
        target_form: what `target` holds if it is no hidden state: "logits" (the default), "probs" or "log_probs" (the
            default with `target_indices`).
        target_indices: ids of a teacher known at k tokens of each row, as of `topk_divergence`.
        tail: of such a teacher, as of `topk_divergence`.
        temperature: as of `divergence`, like the next five.
        target_temperature: of the teacher.
        logit_scale: of the student.
        target_logit_scale: of the teacher.
        softcap: of the student.
        target_softcap: of the teacher.
        valid_vocab: how many tokens count, where a head is padded or one is longer.
        labels: as of `divergence`, like the next four.
        divergence_weight: what the divergence counts.
        label_weight: what the label's cross-entropy counts.
        z_weight: what the square of the log-sum-exp counts.
        label_smoothing: which part of a label is spread over all tokens.
        row_weight: as of `divergence`. Hidden states of rows of weight 0 reach nothing.
        reduction: as of `divergence`.
        normalizer: as of `divergence`.
        chunk_rows: rows of a chunk. By default both models' logits and their gradients take a twentieth of the GPU's
            memory at most, or 2.1 GB if that is more.
        logits_dtype: what products are summed and kept in; by default float32 where hidden states and heads are of 16
            bits. Their own dtype is faster, and rounds logits as a model's own are: gradients are off by percents, of a
            student within 1 % of its teacher by as much as there is of them. A CPU is faster, too, and of bfloat16
            operands as exact, after `torch.set_float32_matmul_precision("medium")`.
        group: a process group whose ranks share the vocabulary: each passes its rows of both heads and biases, and its
            slice of a teacher's logits; hidden states and entries are the same on all. Parts of hidden states'
            gradients are summed over the ranks while later chunks are computed; a head's gradient is its rank's own.
        first_token: as of `topk_divergence`.
        total_vocab: as of `topk_divergence`; all ranks cut their rows into the same chunks by it.
        sequence_dim: the dimension of rows along which each rank has its part, as many as each other, of hidden states,
            entries and row weights (sequence parallelism). They are gathered; hidden states' gradients are
            reduce-scattered. Losses of rows are of the rank's own.
        **params: the kind's parameter.

    Returns:
        `input.shape[:-1]` for "none", else 0-d; float32, or float64 where an argument is. Under autocast hidden states
        and heads are cast as `F.linear` casts them.

    Raises:
        TypeError: an argument of the wrong type or dtype; hidden states and a head of different dtypes.
        ValueError: shapes or devices that differ; unknown names; options out of range.
        RuntimeError: in a transform of torch.func; in backward, where gradients of gradients are asked for.

    A gradient of logits is rounded to the dtype of the hidden states before it is multiplied by them and by the head. A
    head's gradient is summed over chunks in float32. Source: docs/decisions/0019-float32-logits.md.

    >>> import torch, kullback
    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> teacher, its_head = torch.tensor([[1.0]]), torch.tensor([[1.0], [1.0], [0.0]])
    >>> kullback.linear_divergence(hidden, head, teacher, its_head)
    tensor(0.3775)
    """
    backends.begin()
    chunk_rows = checks.chunk_rows(chunk_rows)
    if in_functorch():
        raise RuntimeError(
            "linear_divergence does not work inside torch.func transforms; use divergence(F.linear(input, weight), ...)"
        )
    sides: dict[str, Any] = {
        "form": "logits",
        "temperature": temperature,
        "target_temperature": target_temperature,
        "logit_scale": logit_scale,
        "target_logit_scale": target_logit_scale,
        "softcap": softcap,
        "target_softcap": target_softcap,
    }
    sharded.check_alike(
        input=input,
        weight=weight,
        bias=bias,
        target=target,
        target_weight=target_weight,
        target_bias=target_bias,
        target_indices=target_indices,
        row_weight=row_weight,
        labels=labels,
    )
    sharded.check_normalizer(normalizer, input)
    target_dtype = getattr(target, "dtype", None)  # whatever it is, it is checked below
    masks_later = False  # whether rows without a label are left out once each rank has all rows
    if target is None:
        of_target = {"target_weight": target_weight, "target_bias": target_bias, "target_indices": target_indices}
        checks.check_absent("target=None", **of_target)
    if target is None or checks.number("divergence_weight", divergence_weight) == 0:
        checks.check_name("tail", tail, checks.TAILS)
        checks.problem(params, kind, target_form=target_form if target_indices is None else "logits", **sides)
        labels = _labels_alone(labels, input, "logits", divergence_weight, label_weight, z_weight, label_smoothing)
        if target is not None:
            checks.teacher(input, target, target_weight, target_bias, target_form, target_indices, tail)
        masks_later = sequence_dim is not None
        if not masks_later:
            row_weight, normalizer = _of_labelled_rows(labels, input, row_weight, reduction, normalizer)
        own_weights, (target, target_indices) = _one_hot(labels, input, label_weight, label_smoothing)
        target_weight = target_bias = target_logit_scale = target_softcap = None
        kind, target_form, tail, params = "kl", "log_probs", "zero", {}
        sides |= {"target_temperature": 1.0, "target_softcap": None}
        divergence_weight, label_weight = own_weights
    checks.check_group(group, first_token, total_vocab)
    models = Models(input, weight, bias, target, target_weight, target_bias, target_indices, row_weight, labels)
    layout = None
    if sharded.is_dtensor(input):
        normalizer = sharded.whole(normalizer)
        models, layout = _localised(models, valid_vocab, group)
        group, first_token, total_vocab, valid_vocab = layout.place
        sequence_dim = layout.sequence_dim
    checks.check_sequence_dim(sequence_dim, group)
    models = _checked(models, target_form, tail)
    is_topk, has_labels = models.ids is not None, models.labels is not None
    widens = checks.widens_logits(logits_dtype, models.hidden.dtype)
    checks.check_reduction(reduction, normalizer, models.hidden)
    checks.check_sequence(sequence_dim, models.hidden, models.target_weight is None and not is_topk)
    weights = checks.weights(has_labels, "logits", divergence_weight, label_weight, z_weight, label_smoothing)
    checks.check_smoothing(label_smoothing, group is not None)
    if is_topk and (target_logit_scale is not None or target_softcap is not None):
        raise ValueError("target_logit_scale and target_softcap are of all logits, not of entries; got target_indices")
    vocab = _vocab(models, valid_vocab, group)
    checks.check_slice(vocab, first_token, total_vocab)
    if chunk_rows is None or is_topk or has_labels:
        shard, tokens = parallel.slice_of(group, vocab, first_token, total_vocab)
    else:
        shard, tokens = WHOLE if group is None else parallel.shard(group), 0  # nobody asks where the slice stands
    sides["target_form"] = target_form
    if is_topk:  # whatever they are, entries may be tempered
        sides |= {"target_form": "logits", "target_logit_scale": 1.0}
    problem = checks.problem(params, kind, **sides, shard=shard, weights=weights)
    if models.labels is not None:
        checks.check_tokens(models.labels, tokens)
    if sequence_dim is not None and group is not None:
        models = _gathered(models, sequence_dim, group)
        if masks_later and models.labels is not None:
            of_rows = models.labels, models.hidden, models.row_weight
            row_weight, normalizer = _of_labelled_rows(*of_rows, reduction, normalizer)
            models = models._replace(row_weight=row_weight)
    negligible = 0.0
    if models.ids is not None:
        form = "log_probs" if target_form is None else target_form
        checks.notice_logits("target", models.target, models.ids, form, models.row_weight)
        of = topk.entries_of(form, tail, "logits", tokens)
        teacher, entries = topk.teacher(problem, models.target, models.ids, of, models.row_weight)
        problem, negligible = teacher.problem, teacher.negligible
        models = models._replace(target=entries, ids=teacher.ids)
    dtype = checks.LOSS_DTYPES[models.hidden.dtype, target_dtype or models.target.dtype]
    reduced = reduction_of(reduction, models.hidden, models.row_weight, normalizer, dtype)
    rows = models.hidden.shape[:-1]
    models = _in_rows(models._replace(row_weight=reduced.row_weight), vocab)
    sums_hidden = group is not None and sequence_dim is None
    task = linear.task_of(problem, models, negligible, dtype, chunk_rows or 0, widens, sums_hidden)
    if reduced.per_row:
        loss = reduced.finish(linear.per_row(task, models).view(rows))
        if sequence_dim is not None and group is not None and reduction == "none":
            loss = collectives.own_rows(loss, sequence_dim, group)
    else:
        loss = reduced.finish(linear.total(task, models, reduced.scale))
    return loss if layout is None else sharded.as_dtensor(loss, layout)


def _localised(models: Models, valid_vocab: int | None, group: ProcessGroup | None) -> tuple[Models, Layout]:
    """Of DTensors this device's parts, and how they lie."""
    checks.valid_width(valid_vocab, models.weight.size(0))
    of_tokens: dict[str, tuple[Tensor | None, int]] = {"weight": (models.weight, 0), "bias": (models.bias, 0)}
    of_rows = {"input": models.hidden, "target_indices": models.ids}
    of_rows |= {"row_weight": models.row_weight, "labels": models.labels}
    if models.target_weight is None and models.ids is None:
        of_tokens |= {"target": (models.target, -1)}
    else:
        of_tokens |= {"target_weight": (models.target_weight, 0), "target_bias": (models.target_bias, 0)}
        of_rows |= {"target": models.target}
    local, layout = sharded.localised(of_tokens, of_rows, valid_vocab, group)
    own = Models(
        hidden=local["input"],
        weight=local["weight"],
        bias=local.get("bias"),
        target=local["target"],
        target_weight=local.get("target_weight"),
        target_bias=local.get("target_bias"),
        ids=local.get("target_indices"),
        row_weight=local.get("row_weight"),
        labels=local.get("labels"),
    )
    return own, layout


def _checked(models: Models, target_form: str | None, tail: str) -> Models:
    """Each tensor checked, and cast as autocast casts it."""
    input = models.hidden
    hidden, weight, bias = checks.projection("input", input, "weight", models.weight, "bias", models.bias)
    given = models.target, models.target_weight, models.target_bias, target_form, models.ids, tail
    target, target_weight, target_bias = checks.teacher(input, *given)
    row_weight = None if models.row_weight is None else checks.row_weight(models.row_weight, input)
    labels = None if models.labels is None else checks.labels(models.labels, input)
    return Models(hidden, weight, bias, target, target_weight, target_bias, models.ids, row_weight, labels)


def _vocab(models: Models, valid_vocab: int | None, group: ProcessGroup | None) -> int:
    """How many tokens count; of a rank's slice of padding none."""
    tokens = models.weight.size(0)
    if checks.is_of_padding(valid_vocab, group):
        return 0
    if models.ids is not None:
        return checks.valid_width(valid_vocab, tokens) or tokens
    others = models.target.size(-1) if models.target_weight is None else models.target_weight.size(0)
    return checks.shared_vocab(valid_vocab, tokens, others)


def _gathered(models: Models, sequence_dim: int, group: ProcessGroup) -> Models:
    """The rows of all ranks."""
    gather_rows = functools.partial(collectives.all_gather_rows, dim=sequence_dim, group=group)
    ids = models.ids if models.ids is None or models.ids.dtype in (torch.int32, torch.int64) else as_ids(models.ids)
    return models._replace(
        hidden=gather_rows(models.hidden, sums=True),
        target=gather_rows(models.target, sums=models.ids is None),
        ids=None if ids is None else gather_rows(ids),
        row_weight=None if models.row_weight is None else gather_rows(models.row_weight),
        labels=None if models.labels is None else gather_rows(models.labels),
    )


def _in_rows(models: Models, vocab: int) -> Models:
    """As matrices, of the tokens that count."""
    target, rows = models.target, models.hidden.shape[:-1]
    if models.target_weight is None and models.ids is None and target.size(-1) != vocab:
        target = target[..., :vocab]
    return Models(
        rows_of(models.hidden),
        first(models.weight, vocab),
        None if models.bias is None else first(models.bias, vocab),
        rows_of(target),
        None if models.target_weight is None else first(models.target_weight, vocab),
        None if models.target_bias is None else first(models.target_bias, vocab),
        None if models.ids is None else rows_of(models.ids),
        None if models.row_weight is None else models.row_weight.expand(rows).reshape(-1),
        None if models.labels is None else models.labels.reshape(-1),
    )


@hints_arguments
@untraced
@torch.no_grad()
def row_statistics(
    input: Tensor,
    target: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    form: Form | str = "logits",
    target_form: Form | str | None = None,
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float | None = None,
    softcap: float | None = None,
    target_softcap: float | None = None,
    valid_vocab: int | None = None,
) -> RowStatistics:
    """Many figures of each row, in nats: both kl, jensen_shannon, entropies, top tokens, labels'.

    Rows are normalised, in whatever form they come. Nothing is differentiated.

    Args:
        input: the model's logits, log_probs or probs, `[..., vocab]`, floating point.
        target: the reference's, of the same shape (but see `valid_vocab`).
        labels: ids of the true tokens, `input.shape[:-1]`, an integer dtype; -100 in a row that has none.
        form: as of `divergence`.
        target_form: as of `divergence`.
        temperature: as of `divergence`.
        target_temperature: as of `divergence`.
        logit_scale: as of `divergence`.
        target_logit_scale: as of `divergence`.
        softcap: as of `divergence`.
        target_softcap: as of `divergence`.
        valid_vocab: as of `divergence`.

    Returns:
        A `RowStatistics` of tensors `input.shape[:-1]`: float32, float64 of float64 rows, int64 for tokens and
        ranks, bool for agreement. Fields that need a target or labels are None without.

    Raises:
        TypeError, ValueError: as of `divergence`; labels of another shape or dtype or, on a CPU, that are no
            tokens; DTensors, and tensors that something traces or transforms.

    torch.compile leaves the call to Python, and so its `fullgraph` refuses it.

    Sources: docs/mathematics.md. The rank of a token is the number of tokens with more mass.

    >>> import torch, kullback
    >>> student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    >>> found = kullback.row_statistics(student, teacher, torch.tensor([1]))
    >>> found.kl, found.entropy, found.agreement, found.label_rank
    (tensor([0.3775]), tensor([0.6656]), tensor([True]), tensor([1]))
    """
    backends.begin()
    checks.check_tensor("input", input)
    checks.check_memory(input=input, target=target, labels=labels)
    if target is None:
        checks.check_rows(input)
    else:
        checks.check_pair(input, target)
    vocab = checks.valid_vocab(valid_vocab, input, input if target is None else target)
    problem = checks.problem(
        {},
        "kl",
        form=form,
        target_form=target_form,
        temperature=temperature,
        target_temperature=target_temperature,
        logit_scale=logit_scale,
        target_logit_scale=target_logit_scale,
        softcap=softcap,
        target_softcap=target_softcap,
        vocab=vocab,
    )
    tokens = vocab or input.size(-1)
    if not tokens:
        raise ValueError(f"input must have tokens; got the shape {checks.shape(input)}")
    given = checks.labels_of(labels, input, tokens)
    sides = [problem.narrow(as_rows(t)) for t in (input, target) if t is not None]
    is_double = [side.dtype == torch.float64 for side in sides]
    copies = (any(is_double) and not all(is_double)) or "probs" in (problem.input.form, problem.target.form)
    values_of = lambda rows: [side[rows] for side in sides]
    return statistics.of_rows(problem, values_of, input.shape[:-1], tokens, given, target is not None, copies)


@hints_arguments
@untraced
@torch.no_grad()
def topk_row_statistics(
    input: Tensor,
    target_values: Tensor,
    target_indices: Tensor,
    labels: Tensor | None = None,
    *,
    form: Form | str = "logits",
    target_form: Form | str = "log_probs",
    tail: Tail | str = "bucket",
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
) -> TopKRowStatistics:
    """Figures of each row beside a teacher that is known at k tokens: masses there, overlap, both kl, entropy.

    Nothing is differentiated.

    Args:
        input: the student's logits, log_probs or probs, `[..., vocab]`, floating point.
        target_values: the teacher's entries, as of `topk_divergence`.
        target_indices: their ids, as of `topk_divergence`.
        labels: ids of the true tokens, `input.shape[:-1]`, an integer dtype; -100 in a row that has none.
        form: as of `topk_divergence`, like all that follow.
        target_form: what the entries are.
        tail: what they leave of 1.
        temperature: of the student.
        target_temperature: of the teacher.
        logit_scale: of the student.
        softcap: of the student.
        valid_vocab: how many tokens count.

    Returns:
        A `TopKRowStatistics` of tensors `input.shape[:-1]`.

    Raises:
        TypeError, ValueError: as of `topk_divergence` and `row_statistics`.

    Source: docs/mathematics.md.

    >>> import torch, kullback
    >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 1.5, -1.0]])
    >>> log_p, ids = teacher.log_softmax(-1).topk(2)
    >>> found = kullback.topk_row_statistics(student, log_p, ids)
    >>> found.mass, found.target_mass, found.overlap, found.agreement
    (tensor([0.6929]), tensor([0.8403]), tensor([0.5000]), tensor([False]))
    """
    checks.check_tensor("input", input)
    checks.check_memory(input=input, target_values=target_values, target_indices=target_indices)
    checks.check_entries("target_values", target_values, target_indices, input, target_form, tail)
    checks.notice_logits("target_values", target_values, target_indices, target_form, None)
    of_rows = row_statistics(
        input,
        labels=labels,
        form=form,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        valid_vocab=valid_vocab,
    )
    valid = input[..., : valid_vocab or input.size(-1)]
    problem = _problem_of_entries({}, "kl", form, temperature, target_temperature, logit_scale, softcap)
    asked = topk.entries_of(target_form, tail, form, valid.size(-1))
    teacher, target = topk.teacher(problem, target_values, target_indices, asked, None)
    gathered = gather(problem, as_rows(valid), rows_of(teacher.ids), others=1)
    dtype = checks.LOSS_DTYPES[input.dtype, target_values.dtype]
    with collecting.paused():
        forward, backward = topk.of_gathered(teacher, target, gathered, ("kl", "reverse_kl"), dtype)
    plain = checks.problem({}, "kl", form=form, target_form="logits")
    as_given = topk.entries_of(target_form, "zero", form, valid.size(-1))
    teacher, target = topk.teacher(plain, target_values, target_indices, as_given, None)
    if form != "probs":
        gathered = gathered.softmax(-1) if form == "logits" else gathered.exp()
    best = target[..., :-1].max(-1, keepdim=True)
    teacher_top = teacher.ids.gather(-1, best.indices).squeeze(-1)
    are_numbers = ~(of_rows.entropy.isnan() | best.values.isnan().squeeze(-1))
    has_first = are_numbers & (best.values.squeeze(-1) > -math.inf)
    return TopKRowStatistics(
        kl=forward,
        reverse_kl=backward,
        mass=gathered[:, :-1].sum(-1).view(input.shape[:-1]),
        target_mass=target[..., :-1].exp().sum(-1),
        overlap=statistics.overlap(valid, teacher.ids).where(are_numbers, torch.nan),
        entropy=of_rows.entropy,
        lse=of_rows.lse,
        top_token=of_rows.top_token,
        agreement=has_first & (of_rows.top_token == teacher_top),
        label_log_prob=of_rows.label_log_prob,
        label_rank=of_rows.label_rank,
    )


@hints_arguments
@untraced
@torch.no_grad()
def linear_row_statistics(
    input: Tensor,
    weight: Tensor,
    target: Tensor | None = None,
    target_weight: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    target_bias: Tensor | None = None,
    temperature: float = 1.0,
    target_temperature: float | None = None,
    logit_scale: float = 1.0,
    target_logit_scale: float | None = None,
    softcap: float | None = None,
    target_softcap: float | None = None,
    valid_vocab: int | None = None,
) -> RowStatistics:
    """`row_statistics` of `input @ weight.T + bias` and the teacher's, a chunk of rows at a time.

    Logits of 16-bit operands are float32.

    Args:
        input: as of `linear_divergence`.
        weight: as of `linear_divergence`.
        target: as of `linear_divergence`.
        target_weight: as of `linear_divergence`.
        labels: as of `row_statistics`.
        bias: as of `linear_divergence`.
        target_bias: as of `linear_divergence`.
        temperature: as of `divergence`.
        target_temperature: as of `divergence`.
        logit_scale: as of `divergence`.
        target_logit_scale: as of `divergence`.
        softcap: as of `divergence`.
        target_softcap: as of `divergence`.
        valid_vocab: as of `divergence`.

    Returns:
        A `RowStatistics` of tensors `input.shape[:-1]`.

    Raises:
        TypeError, ValueError: as of `linear_divergence` and `row_statistics`.

    Source: docs/decisions/0019-float32-logits.md.

    >>> import torch, kullback
    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> kullback.linear_row_statistics(hidden, head, labels=torch.tensor([0])).label_log_prob
    tensor([-0.2395])
    """
    backends.begin()
    if (target is None) != (target_weight is None):
        raise ValueError("target and target_weight go together; one of them is None")
    checks.check_target_bias(target_weight, target_bias)
    checks.check_memory(input=input, weight=weight, target=target, target_weight=target_weight, labels=labels)
    checks.check_memory(bias=bias, target_bias=target_bias)
    hidden, weight, bias = checks.projection("input", input, "weight", weight, "bias", bias)
    models = [(rows_of(hidden), weight, bias)]
    if target is not None and target_weight is not None:
        other = checks.projection("target", target, "target_weight", target_weight, "target_bias", target_bias)
        if other[0].shape[:-1] != hidden.shape[:-1]:
            raise ValueError(
                f"input and target must have the same rows; got {checks.shape(input)} and {checks.shape(target)}"
            )
        models.append((rows_of(other[0]), *other[1:]))
    vocab = checks.shared_vocab(valid_vocab, weight.size(0), models[-1][1].size(0))
    if not vocab:
        raise ValueError(f"weight must have tokens; got the shape {checks.shape(weight)}")
    given = checks.labels_of(labels, input, vocab)
    heads = [(side, first(head, vocab), None if b is None else first(b, vocab)) for side, head, b in models]
    problem = checks.problem(
        {},
        "kl",
        form="logits",
        temperature=temperature,
        target_temperature=target_temperature,
        logit_scale=logit_scale,
        target_logit_scale=target_logit_scale,
        softcap=softcap,
        target_softcap=target_softcap,
    )

    def logits_of(rows: slice) -> list[Tensor]:
        return [linear.project(side[rows], head, shift) for side, head, shift in heads]

    return statistics.of_rows(problem, logits_of, input.shape[:-1], vocab, given, target is not None, copies=True)


def rows_of(tensor: Tensor) -> Tensor:
    """[rows, n] of [..., n]"""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.size(-1))


def first(tensor: Tensor, count: int) -> Tensor:
    """Of the first dimension so many; a slice of all would cost autograd a copy."""
    return tensor if tensor.size(0) == count else tensor[:count]
