"""A vocabulary over several ranks: losses and gradients are one process's, whatever the slices; who sends what.

A check runs on every rank. `GROUPS` run on gloo here, and on NCCL by `make test-gpus`.
"""

import contextlib
import functools
import itertools
import operator
import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import kullback
from kullback import linear
from kullback.divergences import DIVERGENCES
from tests import kinds, oracle, samples
from tests.conftest import no_synchronisation
from tests.kinds import KINDS
from tests.ranks import Ranks, counted, spawn
from tests.samples import masked, sample
from tests.tolerances import relative_error

EXACT, LOSS, GRADIENT = 1e-12, 1e-6, 1e-5  # of float64; of float32


def generator():
    return torch.Generator().manual_seed(1)


def bounds(dtype):
    return (EXACT, EXACT) if dtype == torch.float64 else (LOSS, GRADIENT)


def hold(ranks: Ranks, loss, leaves, truth, gradients, dtype, what, upstream=None):
    """The loss is the truth's, the same on all ranks to the bit, and the gradients are the slices' own."""
    within, of_gradients = bounds(dtype)
    assert relative_error(loss, truth) <= within, what
    for other in ranks.everyone(loss.detach()):
        assert torch.equal(other, loss.detach()), what
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    for ours, exact in zip(torch.autograd.grad(loss, leaves, upstream), gradients, strict=True):
        assert relative_error(ours, exact) <= of_gradients, what


def check(
    ranks: Ranks, x, y, kind, cuts, row_weight=None, reduction="mean", form="logits", target_form=None, **options
):
    """One call against the textbook."""
    dtype, what = x.dtype, (kind, reduction, form, target_form, options, cuts)
    a, b = (t.double().requires_grad_() for t in (x, y))
    params = kinds.parameters(kind)
    losses = oracle.divergence(a, b, kind, form, target_form, **options, **params)
    weight = torch.ones(losses.shape) if row_weight is None else row_weight
    losses = losses * weight
    truth = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / weight.sum()}[reduction]
    upstream = torch.rand(truth.shape, generator=generator(), dtype=torch.float64) + 0.5
    gradients = [ranks.slice(g, cuts=cuts) for g in torch.autograd.grad(truth, (a, b), upstream)]
    leaves = [ranks.slice(t, cuts=cuts).requires_grad_() for t in (x, y)]
    given = None if row_weight is None else row_weight.to(ranks.device)
    loss = kullback.divergence(
        *leaves,
        kind,
        form=form,
        target_form=target_form,
        row_weight=given,
        reduction=reduction,
        group=ranks.group,
        **options,
        **params,
    )
    hold(ranks, loss, leaves, truth, gradients, dtype, what, upstream)


def rows_of_all_kinds(dtype, vocab, slices):
    """Far and close rows; rows that have nothing in a slice, or on one side of it; and one that is a single token."""
    last = slices[-1]
    return samples.batch(
        generator(),
        vocab,
        dtype,
        far=samples.far(2.0),
        apart=samples.apart(0.3),
        close=samples.apart(0.01),
        peaked=samples.peaked(samples.apart(0.1), 5, 12.0),
        shifted=samples.shifted(0.05, 40.0),
        nothing_there=masked(samples.apart(0.5), both=last),
        nothing_but_there=masked(samples.apart(0.5), both=slice(0, last.start)),
        alone=masked(samples.equal, both=slice(1, None)),
    )


def check_kinds(ranks: Ranks):
    vocab = 103
    cuts = ranks.uneven(vocab)
    starts = [0, *cuts, vocab]
    slices = [slice(a, b) for a, b in itertools.pairwise(starts)]
    weight = torch.rand(8, generator=generator(), dtype=torch.float64) + 0.5
    for dtype, some in ((torch.float64, kinds.FEW), (torch.float32, KINDS)):
        rows = rows_of_all_kinds(dtype, vocab, slices)
        keep = slice(0, 5)  # the textbook's gradients are NaN where a side lacks a token
        for kind in some:
            check(ranks, rows.x[keep], rows.y[keep], kind, cuts, weight[keep])
            check(ranks, rows.x[keep], rows.y[keep], kind, cuts, reduction="none")
            x, y = (t.clone().requires_grad_() for t in (rows.x, rows.y))
            whole = kullback.divergence(x, y, kind, reduction="sum", **kinds.parameters(kind))
            gradients = torch.autograd.grad(whole, (x, y))
            leaves = [ranks.slice(t, cuts=cuts).requires_grad_() for t in (rows.x, rows.y)]
            loss = kullback.divergence(*leaves, kind, reduction="sum", group=ranks.group, **kinds.parameters(kind))
            slices_of = [ranks.slice(g, cuts=cuts) for g in gradients]
            hold(ranks, loss, leaves, whole, slices_of, torch.float32, (kind, dtype))


def check_every_form(ranks: Ranks, has_both=lambda form, target_form: True):
    """Of forms that have not both, one kind in one dtype: each is a kernel or three to compile."""
    cuts = ranks.uneven(101)
    for form, target_form in itertools.product(oracle.FORMS, repeat=2):
        both = has_both(form, target_form)
        few = itertools.product(kinds.FEW, (torch.float64, torch.float32)) if both else [("kl", torch.float32)]
        for kind, dtype in few:
            x, y = (sample(each, (6, 101), generator(), dtype) for each in (form, target_form))
            check(ranks, x.flip(0), y, kind, cuts, form=form, target_form=target_form)


def check_forms(ranks: Ranks):
    check_every_form(ranks, operator.eq)


def check_options(ranks: Ranks):
    cuts = ranks.uneven(101)
    x, y = (sample("logits", (2, 3, 101), generator(), torch.float64, scale) for scale in (1.0, 2.0))
    whole = (3 * x).clone().requires_grad_()
    capped = {"softcap": 2.0, "logit_scale": 0.7, "target_softcap": 3.0}
    truth = kullback.divergence(whole, y, "skew_kl", **capped)
    (gradient,) = torch.autograd.grad(truth, whole)
    for inplace in (False, True):
        leaf = ranks.slice(3 * x, cuts=cuts).requires_grad_()
        given = leaf * 1
        loss = kullback.divergence(
            given, ranks.slice(y, cuts=cuts), "skew_kl", group=ranks.group, inplace=inplace, **capped
        )
        hold(ranks, loss, [leaf], truth, [ranks.slice(gradient, cuts=cuts)], torch.float64, inplace)
        assert inplace == (not torch.equal(given, leaf))
    weight = torch.rand(2, 3, generator=generator(), dtype=torch.float64)
    for backend in ("torch", *(("c",) if ranks.device.type == "cpu" else ())):
        with kullback.backend(backend):
            check(ranks, x, y, "hellinger", cuts, weight, temperature=2.0, target_temperature=0.7)
            check(ranks, x, y, "reverse_kl", cuts, reduction="none", temperature=0.5)


def check_close_rows(ranks: Ranks):
    """A kl of 1e-7 in float32 is right to 1e-5: sums are of slices' own, and the chain rule joins them."""
    y = 2 * torch.randn(4, 2001, generator=generator())
    x = y + 4.5e-4 * torch.randn(4, 2001, generator=generator().manual_seed(2))
    truth = oracle.divergence(x, y, "kl")
    assert 5e-8 < truth.mean() < 2e-7
    cuts = ranks.uneven(2001)
    loss = kullback.divergence(*(ranks.slice(t, cuts=cuts) for t in (x, y)), reduction="none", group=ranks.group)
    assert relative_error(loss, truth) < 1e-5


def check_padding(ranks: Ranks):
    """Tails that do not count, a slice that is nothing else, and one that is empty: with garbage there."""
    vocab = 30
    x, y = torch.randn(2, 5, vocab, generator=generator())
    for kind in ("kl", "total_variation"):
        a, b = (t.double().requires_grad_() for t in (x, y))
        truth = oracle.divergence(a, b, kind).mean()
        gradients = torch.autograd.grad(truth, (a, b))
        for widths in ([vocab, *[0] * (ranks.world - 1)], [*[vocab // (ranks.world - 1)] * (ranks.world - 1), 0]):
            widths[-1] += vocab - sum(widths)
            cuts = list(itertools.accumulate(widths))[:-1]
            for padding in (0, 7):
                leaves = [
                    F.pad(ranks.slice(t, cuts=cuts), (0, padding), value=torch.nan).requires_grad_() for t in (x, y)
                ]
                valid = widths[ranks.rank] if padding else None
                loss = kullback.divergence(*leaves, kind, valid_vocab=valid, group=ranks.group)
                own = [F.pad(ranks.slice(g, cuts=cuts), (0, padding)) for g in gradients]
                hold(ranks, loss, leaves, truth, own, torch.float32, (kind, widths, padding))


def check_masked_rows(ranks: Ranks):
    """Rows of weight 0 are not read; where all are such, all ranks still meet."""
    x, y = torch.randn(2, 4, 20, generator=generator())
    x[1] = torch.nan
    for weight in (torch.tensor([1.0, 0.0, 2.0, 0.5]), torch.tensor([0.0] * 4)):
        for kind in ("kl", "jensen_shannon"):
            a, b = (t.clone().requires_grad_() for t in (x, y))
            whole = kullback.divergence(a, b, kind, row_weight=weight)
            gradients = [ranks.slice(g) for g in torch.autograd.grad(whole, (a, b))]
            leaves = [ranks.slice(t).requires_grad_() for t in (x, y)]
            with kullback.collecting_statistics() as found:
                loss = kullback.divergence(*leaves, kind, row_weight=weight.to(ranks.device), group=ranks.group)
            hold(ranks, loss, leaves, whole, gradients, torch.float32, (kind, weight))
            assert found[0].lse[weight == 0].count_nonzero() == found[0].entropy[weight == 0].count_nonzero() == 0
    none = torch.empty(0, 20, requires_grad=True, device=ranks.device)
    loss = kullback.divergence(none, none, group=ranks.group)
    loss.backward()
    assert loss == 0


def check_masses_too_small_for_a_number(ranks: Ranks):
    """A slice that has e^-800 of a row has its share of the sums by its logarithm."""
    x, y = torch.randn(2, 3, 20, generator=generator(), dtype=torch.float64)
    x[:, : 20 // ranks.world] -= 800.0
    y[:, 20 // ranks.world :] -= 2.0
    of_logs = {
        "kl": lambda lp, lq: lp.exp() * (lp - lq),
        "reverse_kl": lambda lp, lq: lq.exp() * (lq - lp),
        "jeffreys": lambda lp, lq: (lp.exp() - lq.exp()) * (lp - lq),
        "hellinger": lambda lp, lq: ((lp / 2).exp() - (lq / 2).exp()).square() / 2,
    }
    for kind, term in of_logs.items():
        a, b = (t.clone().requires_grad_() for t in (x, y))
        whole = term(b.log_softmax(-1), a.log_softmax(-1)).sum(-1).mean()
        gradients = [ranks.slice(g) for g in torch.autograd.grad(whole, (a, b))]
        leaves = [ranks.slice(t).clone().requires_grad_() for t in (x, y)]
        loss = kullback.divergence(*leaves, kind, group=ranks.group)
        hold(ranks, loss, leaves, whole, gradients, torch.float64, kind)
    own = slice(0, 20 // ranks.world)
    alike = y.clone()
    alike[:, own] = x[:, own] + 800.0  # within the slice nothing differs, and between slices all
    assert kullback.divergence(ranks.slice(x), ranks.slice(alike), "chi2", group=ranks.group) == torch.inf
    x[:, own] += 800.0
    y[:, own] -= 800.0
    x[:, 0] = -torch.inf  # where the other side's mass is no number
    for kind, pair in (("kl", (x, y)), ("reverse_kl", (y, x)), ("jeffreys", (x, y)), ("reverse_kl", (x, y))):
        whole = kullback.divergence(*pair, kind)
        found = kullback.divergence(*map(ranks.slice, pair), kind, group=ranks.group)
        assert relative_error(found, whole) < EXACT, (kind, found, whole)


def check_a_slice_of_nothing(ranks: Ranks):
    """On torch's backend, which float64 logits have on a GPU: autograd would tell if what is passed were written."""
    x, y = torch.randn(2, 3, 8, generator=generator(), dtype=torch.float64)
    for kind in ("kl", "jensen_shannon", "renyi"):
        slices = [ranks.slice(t, cuts=[8] * (ranks.world - 1)).requires_grad_() for t in (x, y)]
        with kullback.backend("torch"):
            loss = kullback.divergence(*(t[:, : t.size(1)] for t in slices), kind, group=ranks.group)
            loss.backward()
        assert all(t._version == 0 for t in slices), kind


def check_row_weights_gradient(ranks: Ranks):
    x, y = torch.randn(2, 4, 20, generator=generator(), dtype=torch.float64)
    weight = torch.rand(4, dtype=torch.float64, device=ranks.device, requires_grad=True)
    leaf = ranks.slice(x).requires_grad_()
    kullback.divergence(leaf, ranks.slice(y), row_weight=weight, reduction="sum", group=ranks.group).backward()
    assert relative_error(weight.grad, oracle.divergence(x, y, "kl")) < EXACT


def check_collectives(ranks: Ranks):
    """One all-gather a pass of so many numbers a row; of a sum none in backward, or of losses of rows."""
    rows = 7
    for kind in KINDS:
        has_moments, tilted = DIVERGENCES[kind].moments is not None, kind in ("alpha", "renyi")
        fields = 7 if tilted else 6
        wanted = [fields * 8 * rows, *([] if has_moments else [5 * 8 * rows])]
        for reduction in ("mean", "none"):
            leaves = [torch.randn(rows, 20, device=ranks.device, requires_grad=True) for _ in range(2)]
            with counted() as calls:
                loss = kullback.divergence(*leaves, kind, reduction=reduction, group=ranks.group)
                assert calls == [("all_gather", size) for size in wanted], kind
                loss.sum().backward()
                assert len(calls) == len(wanted), kind
    half = [torch.randn(rows, 20, device=ranks.device).half().requires_grad_() for _ in range(2)]
    with counted() as calls:  # whose gradient waits for a loss scaler's factor
        (kullback.divergence(*half, group=ranks.group) * 1024).backward()
    assert len(calls) == 1
    masses = [torch.rand(rows, 20, device=ranks.device, requires_grad=True) for _ in range(2)]
    with counted() as calls:  # needs no normaliser
        kullback.divergence(*masses, form="probs", group=ranks.group).backward()
    assert calls == [("all_gather", 5 * 8 * rows)]
    log_p, ids = torch.randn(rows, 20 * ranks.world).log_softmax(-1).topk(3)
    with counted() as calls:
        kullback.topk_divergence(
            leaves[0],
            log_p.to(ranks.device),
            ids.to(ranks.device),
            group=ranks.group,
            first_token=20 * ranks.rank,
            total_vocab=20 * ranks.world,
        ).backward()
    assert calls == [("all_gather", rows * (3 + 2) * 4)]


def check_again(ranks: Ranks):
    """A second backward asks the ranks again and is right; a derivative of the gradient is refused."""
    x, y = torch.randn(2, 3, 20, generator=generator(), dtype=torch.float64)
    leaves = [ranks.slice(t).requires_grad_() for t in (x, y)]
    loss = kullback.divergence(*leaves, "jensen_shannon", group=ranks.group)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    for a, b in zip(first, second, strict=True):
        assert relative_error(a, b) < EXACT
    for reduction in ("mean", "none"):
        loss = kullback.divergence(*leaves, reduction=reduction, group=ranks.group).sum()
        (gradient,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.square().sum().backward()


def check_transforms(ranks: Ranks):
    """A batch of problems is one of more rows, which ranks share as any."""
    x, y = torch.randn(2, 3, 4, 12, generator=generator())
    parts = [ranks.slice(t) for t in (x, y)]
    whole = x.clone().requires_grad_()
    for reduction in ("sum", "none"):
        loss = lambda a, b, reduction=reduction: kullback.divergence(
            a, b, "jensen_shannon", reduction=reduction, group=ranks.group
        )
        ours = torch.func.vmap(loss)(*parts)
        expected = kullback.divergence(whole, y, "jensen_shannon", reduction="none")
        assert relative_error(ours, expected.sum(-1) if reduction == "sum" else expected) < LOSS
        gradient = torch.func.grad(lambda a, loss=loss: torch.func.vmap(loss)(a, parts[1]).sum())(parts[0])
        (exact,) = torch.autograd.grad(expected.sum(), whole)
        assert relative_error(gradient, ranks.slice(exact)) < GRADIENT


def check_labels(ranks: Ranks):
    """Each label's logit is on one rank: of all logits, of a top-k teacher's student, from hidden states."""
    vocab, weights = 67, {"divergence_weight": 0.7, "label_weight": 0.3, "z_weight": 1e-2}
    cuts = ranks.uneven(vocab)
    starts = [0, *cuts]
    place = {"first_token": starts[ranks.rank], "total_vocab": vocab}
    labels = torch.tensor([[0, 66, -100, 33, 2], [*(c % vocab for c in cuts), 5, -100, 1, 7, 8][:5]])
    on_device = labels.to(ranks.device)
    for dtype, kind, asks in itertools.product(
        (torch.float64, torch.float32), ("kl", "jensen_shannon", "renyi"), (False, True)
    ):
        x, y = (sample("logits", (2, 5, vocab), generator().manual_seed(i), dtype) for i in range(2))
        options = {**weights, **kinds.parameters(kind), "temperature": 1.5, "reduction": "none"}
        whole = [t.double().requires_grad_() for t in (x, y)]
        truth = kullback.divergence(*whole, kind, labels=labels, **options)
        gradients = [ranks.slice(g, cuts=cuts) for g in torch.autograd.grad(truth.sum(), whole)]
        leaves = [ranks.slice(t, cuts=cuts).requires_grad_() for t in (x, y)]
        where = {} if asks else place
        loss = kullback.divergence(*leaves, kind, labels=on_device, group=ranks.group, **where, **options)
        hold(ranks, loss, leaves, truth, gradients, dtype, (kind, dtype))
    for form in ("probs", "log_probs"):
        x, y = (sample(form, (vocab,), generator().manual_seed(i), torch.float64) for i in range(2))  # one bare row
        truth = kullback.divergence(x, y, form=form, labels=labels[0, 0])
        slices = (ranks.slice(t, cuts=cuts) for t in (x, y))
        loss = kullback.divergence(*slices, form=form, labels=on_device[0, 0], group=ranks.group, **place)
        assert relative_error(loss, truth) < GRADIENT, form
    x = sample("logits", (2, 5, vocab), generator(), torch.float64)
    log_p, ids = sample("log_probs", (2, 5, vocab), generator().manual_seed(3), torch.float64).topk(6)
    teacher = log_p.to(ranks.device), ids.to(ranks.device)
    for tail in ("bucket", "renormalize", "support"):
        whole = x.clone().requires_grad_()
        truth = kullback.topk_divergence(whole, log_p, ids, tail=tail, labels=labels, **weights)
        (gradient,) = torch.autograd.grad(truth, whole)
        leaf = ranks.slice(x, cuts=cuts).requires_grad_()
        options = {**weights, **place, "labels": on_device, "group": ranks.group}
        loss = kullback.topk_divergence(leaf, *teacher, tail=tail, **options)
        hold(ranks, loss, [leaf], truth, [ranks.slice(gradient, cuts=cuts)], torch.float64, tail)
    weights = {"divergence_weight": 0.7, "label_weight": 0.3}
    for form, target in itertools.product(("probs", "log_probs"), ("all", "entries", "none")):
        p, other = (sample(form, (2, 5, vocab), generator().manual_seed(i), torch.float64) for i in (5, 6))
        p[0, 2] = torch.nan  # in no label's row
        whole, leaf = p.clone().requires_grad_(), ranks.slice(p, cuts=cuts).requires_grad_()
        options = {"form": form, "row_weight": labels != -100, "reduction": "none"}
        given = options | {"row_weight": on_device != -100, "group": ranks.group, **place}

        def lose(input, all_of_target, entries, labels, target=target, **options):
            if target == "entries":
                return kullback.topk_divergence(input, *entries, labels=labels, **options, **weights)
            if target == "all":
                return kullback.divergence(input, all_of_target, labels=labels, **options, **weights)
            return kullback.divergence(input, None, labels=labels, label_weight=0.3, **options)

        truth = lose(whole, other, (log_p, ids), labels, **options)
        (gradient,) = torch.autograd.grad(truth.sum(), whole)
        other, own = ranks.slice(other, cuts=cuts), ranks.slice(gradient, cuts=cuts)
        hold(ranks, lose(leaf, other, teacher, on_device, **given), [leaf], truth, [own], torch.float64, (form, target))
        # and of a slice with padding, in which no label is to be found
        padding = torch.zeros_like(own[..., :3])
        padded = torch.cat([leaf.detach(), padding + 0.9], -1).requires_grad_()
        other, own = (torch.cat([t, padding], -1) for t in (other, own))
        loss = lose(padded, other, teacher, on_device, **given, valid_vocab=leaf.size(-1))
        hold(ranks, loss, [padded], truth, [own], torch.float64, (form, target, "padded"))
    weights["z_weight"] = 1e-2
    hidden, head = torch.randn(2, 5, 8, generator=generator()), torch.randn(vocab, 8, generator=generator())
    for target in (x.float(), None):
        whole = [t.double().requires_grad_() for t in (hidden, head)]
        truth = kullback.linear_divergence(*whole, target, labels=labels, **weights)
        expected = torch.autograd.grad(truth, whole)
        leaves = [hidden.to(ranks.device).requires_grad_(), ranks.slice(head, 0, cuts).requires_grad_()]
        mine = None if target is None else ranks.slice(target, cuts=cuts)
        loss = kullback.linear_divergence(*leaves, mine, labels=on_device, group=ranks.group, **weights)
        own = [expected[0].to(ranks.device), ranks.slice(expected[1], 0, cuts)]
        hold(ranks, loss, leaves, truth, own, torch.float32, "linear")


def check_labels_alone(ranks: Ranks):
    """A row without a label is not read, whatever it holds: collected from or not, and of a sequence in parts."""
    labels = torch.arange(4 * ranks.world) % 6
    labels[1] = -100
    x = sample("logits", (4 * ranks.world, 30), generator(), torch.float64)
    hidden, head = (torch.randn(n, 8, generator=generator(), dtype=torch.float64) for n in (4 * ranks.world, 30))
    x[1] = hidden[1] = torch.nan
    cuts = ranks.uneven(30)
    for collects in (False, True):
        whole, leaf = x.clone().requires_grad_(), ranks.slice(x, cuts=cuts).requires_grad_()
        truth = kullback.divergence(whole, None, labels=labels)
        gradients = torch.autograd.grad(truth, whole)
        with kullback.collecting_statistics() if collects else contextlib.nullcontext():
            loss = kullback.divergence(leaf, None, labels=labels.to(ranks.device), group=ranks.group)
        hold(ranks, loss, [leaf], truth, [ranks.slice(gradients[0], cuts=cuts)], torch.float64, collects)
        whole = [t.clone().requires_grad_() for t in (hidden, head)]
        truth = kullback.linear_divergence(*whole, None, labels=labels)
        expected = torch.autograd.grad(truth, whole)
        part = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        leaves = [hidden[part].to(ranks.device).requires_grad_(), ranks.slice(head, 0, cuts).requires_grad_()]
        options = {"labels": labels[part].to(ranks.device), "group": ranks.group, "sequence_dim": 0}
        with kullback.collecting_statistics() if collects else contextlib.nullcontext():
            loss = kullback.linear_divergence(*leaves, None, **options)
        own = [expected[0][part].to(ranks.device), ranks.slice(expected[1], 0, cuts)]
        hold(ranks, loss, leaves, truth, own, torch.float64, ("linear", collects))


def check_targets_that_are_not_read(ranks: Ranks):
    """Beside a slice that is padding alone."""
    x = sample("logits", (3, 6), generator(), torch.float64)
    labels = torch.tensor([0, 3, 5])
    truth = kullback.divergence(x, None, labels=labels)
    own = x.to(ranks.device) if ranks.rank == 0 else torch.zeros(3, 2, dtype=torch.float64, device=ranks.device)
    options = {"labels": labels.to(ranks.device), "group": ranks.group, "divergence_weight": 0}
    valid = 6 if ranks.rank == 0 else 0
    loss = kullback.divergence(own, torch.zeros_like(own), valid_vocab=valid, **options)
    torch.testing.assert_close(loss.cpu(), truth)


def check_topk(ranks: Ranks):
    vocab, k = 67, 6
    cuts = ranks.uneven(vocab)
    for form, dtype, tail in itertools.product(
        oracle.FORMS, (torch.float64, torch.float32), ("bucket", "renormalize", "zero")
    ):
        x = sample(form, (2, 5, vocab), generator(), dtype)
        log_p, ids = sample("log_probs", (2, 5, vocab), generator().manual_seed(3), dtype).topk(k)
        ids[0, 0, 0] = -1
        ids[0, 1, :2] = ids[0, 1, 2]
        for kind, temperature, reduction in (
            ("kl", 1.0, "mean"),
            ("jensen_shannon", 1.5 if form == "logits" else 1.0, "none"),
        ):
            whole = x.double().requires_grad_()
            options = {"tail": tail, "form": form, "temperature": temperature, "reduction": reduction}
            truth = kullback.topk_divergence(whole, log_p.double(), ids, kind, **options)
            (gradient,) = torch.autograd.grad(truth.sum(), whole)
            leaf = ranks.slice(x, cuts=cuts).requires_grad_()
            teacher = log_p.to(ranks.device), ids.to(ranks.device)
            loss = kullback.topk_divergence(leaf, *teacher, kind, group=ranks.group, **options)
            hold(ranks, loss, [leaf], truth, [ranks.slice(gradient, cuts=cuts)], dtype, (form, tail, kind, dtype))
    x = sample("logits", (5, vocab), generator(), torch.float64)
    log_p, ids = sample("log_probs", (5, vocab), generator().manual_seed(3), torch.float64).topk(k)
    whole = x.clone().requires_grad_()
    options = {"softcap": 1.5, "temperature": 0.8, "target_temperature": 1.0}
    truth = kullback.topk_divergence(whole, log_p, ids, **options)
    (gradient,) = torch.autograd.grad(truth, whole)
    leaf = ranks.slice(x, cuts=cuts).requires_grad_()
    loss = kullback.topk_divergence(leaf, log_p.to(ranks.device), ids.to(ranks.device), group=ranks.group, **options)
    hold(ranks, loss, [leaf], truth, [ranks.slice(gradient, cuts=cuts)], torch.float64, options)
    # Padded, one slice empty; logits whose offset would take the digits of float32
    x = sample("logits", (5, vocab), generator(), torch.float64) + 1000
    log_p, ids = sample("log_probs", (5, vocab), generator().manual_seed(3), torch.float64).topk(k)
    whole = x.clone().requires_grad_()
    truth = kullback.topk_divergence(whole, log_p, ids)
    (gradient,) = torch.autograd.grad(truth, whole)
    cuts = [vocab] * (ranks.world - 1)
    leaf = F.pad(ranks.slice(x, cuts=cuts), (0, 3), value=torch.nan).requires_grad_()
    valid = vocab if ranks.rank == 0 else 0
    teacher = log_p.to(ranks.device), ids.to(ranks.device)
    loss = kullback.topk_divergence(leaf, *teacher, valid_vocab=valid, group=ranks.group)
    own = F.pad(ranks.slice(gradient, cuts=cuts), (0, 3))
    hold(ranks, loss, [leaf], truth, [own], torch.float32, "padded")


def check_topk_in_float32(ranks: Ranks):
    """An offset that all of a row have takes no digits; nor does a tail that is rounding make a loss infinite."""
    vocab, k = 67, 40  # every slice has some of each row's ids
    x = sample("logits", (5, vocab), generator(), torch.float32) + 1000
    log_p, ids = sample("log_probs", (5, vocab), generator().manual_seed(3), torch.float32).topk(k)
    x[0].fill_(-torch.inf)[ids[0]] = log_p[0]
    log_p[0] = log_p[0].log_softmax(-1)
    whole = x.double().requires_grad_()
    truth = kullback.topk_divergence(whole, log_p, ids, reduction="none")
    (gradient,) = torch.autograd.grad(truth.sum(), whole)
    leaf = ranks.slice(x).requires_grad_()
    loss = kullback.topk_divergence(
        leaf, log_p.to(ranks.device), ids.to(ranks.device), group=ranks.group, reduction="none"
    )
    assert truth.isfinite().all()
    hold(
        ranks,
        loss[1:],
        [leaf],
        truth[1:],
        [ranks.slice(gradient) * (torch.arange(5) > 0).to(ranks.device)[:, None]],
        torch.float32,
        "offset",
    )
    assert loss[0] < 1e-6  # of a model from itself


def models(dtype, rows, hidden=8, vocab=53):
    shapes = ((*rows, hidden), (vocab, hidden), (vocab,), (*rows, hidden), (vocab, hidden), (vocab,))
    source = generator()
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes]


def check_linear(ranks: Ranks):
    """Hidden states on all ranks, or a part of the rows on each: all six gradients."""
    rows = (2 * ranks.world, 3)
    for dtype, kind, reduction in (
        (torch.float64, "kl", "mean"),
        (torch.float64, "jensen_shannon", "none"),
        (torch.float32, "renyi", "mean"),
        (torch.float32, "total_variation", "none"),
    ):
        tensors = models(dtype, rows)
        cuts = ranks.uneven(53)
        weight = torch.rand(rows, generator=generator(), dtype=torch.float64)
        wide = [t.double().requires_grad_() for t in tensors]
        h, w, b, t, v, c = wide
        losses = weight * oracle.divergence(F.linear(h, w, b), F.linear(t, v, c), kind, **kinds.parameters(kind))
        truth = losses if reduction == "none" else losses.sum() / weight.sum()
        upstream = torch.rand(truth.shape, generator=generator(), dtype=torch.float64) + 0.5
        gradients = torch.autograd.grad(truth, wide, upstream)
        for dim, chunk_rows in itertools.product((None, 0), (4, None)):
            part = lambda i, g, dim=dim, cuts=cuts: (
                ranks.slice(g, 0, cuts) if i % 3 else g.to(ranks.device) if dim is None else ranks.slice(g, dim)
            )
            leaves = [part(i, t).detach().clone().requires_grad_() for i, t in enumerate(tensors)]
            of_rows = lambda t, dim=dim: t.to(ranks.device) if dim is None else ranks.slice(t, dim)
            h, w, b, t, v, c = leaves
            loss = kullback.linear_divergence(
                h,
                w,
                t,
                v,
                kind,
                bias=b,
                target_bias=c,
                row_weight=of_rows(weight),
                reduction=reduction,
                chunk_rows=chunk_rows,
                group=ranks.group,
                sequence_dim=dim,
                **kinds.parameters(kind),
            )
            own = [part(i, g) for i, g in enumerate(gradients)]
            expected, given = (of_rows(t) if reduction == "none" else t for t in (truth, upstream))
            within, of_gradients = bounds(dtype)
            assert relative_error(loss, expected) < within, (kind, dim)
            for i, (ours, exact) in enumerate(zip(torch.autograd.grad(loss, leaves, given.to(loss)), own, strict=True)):
                assert relative_error(ours, exact) < of_gradients, (kind, dim, i)


def check_linear_teachers(ranks: Ranks):
    """A teacher of logits, a slice of them; and one of entries, whose gradients are every rank's."""
    h, w, b, *_ = models(torch.float64, (4, 3))
    y = sample("logits", (4, 3, 53), generator(), torch.float64)
    log_p, ids = y.log_softmax(-1).topk(5)
    cuts = ranks.uneven(53)
    wide = [t.clone().requires_grad_() for t in (h, w, b, y, log_p)]
    dense = kullback.linear_divergence(*wide[:2], wide[3], bias=wide[2])
    at_ids = kullback.linear_divergence(*wide[:2], wide[4], bias=wide[2], target_indices=ids)
    leaves = [h.to(ranks.device), ranks.slice(w, 0, cuts), ranks.slice(b, 0, cuts), ranks.slice(y, cuts=cuts), log_p]
    leaves = [t.detach().clone().to(ranks.device).requires_grad_() for t in leaves]
    ours = kullback.linear_divergence(*leaves[:2], leaves[3], bias=leaves[2], chunk_rows=5, group=ranks.group)
    own = lambda gradients: [
        ranks.slice(g, 0 if i < 3 else -1, cuts) if i in (1, 2, 3) else g for i, g in enumerate(gradients)
    ]
    gradients = own(torch.autograd.grad(dense, wide[:4]))
    hold(ranks, ours, leaves[:4], dense, gradients, torch.float64, "logits")
    used = [0, 1, 2, 4]
    for sequence_dim in (None, 1) if ranks.world == 3 else (None,):
        rows = lambda t, dim=sequence_dim: t.detach() if dim is None else ranks.slice(t, dim)
        given = [rows(leaves[0]), leaves[1], leaves[2], rows(leaves[4])]
        given = [t.detach().clone().requires_grad_() for t in given]
        loss = kullback.linear_divergence(
            *given[:2],
            given[3],
            bias=given[2],
            target_indices=rows(ids.to(ranks.device)).to(torch.uint16),  # which collectives refuse
            group=ranks.group,
            sequence_dim=sequence_dim,
        )
        gradients = torch.autograd.grad(at_ids, [wide[i] for i in used], retain_graph=True)
        gradients = [rows(gradients[0]), *(ranks.slice(g, 0, cuts) for g in gradients[1:3]), rows(gradients[3])]
        hold(ranks, loss, given, at_ids, gradients, torch.float64, "entries")


def check_linear_collectives(ranks: Ranks):
    """Hidden states' gradients are reduced once: in forward beside later products, or scattered in backward."""
    rows, step = 4 * ranks.world, ranks.world
    place = {"total_vocab": 53 * ranks.world, "first_token": 53 * ranks.rank}
    for dim in (None, 0):
        h, w, _, t, v, _ = (tensor.to(ranks.device) for tensor in models(torch.float32, (rows,)))
        if dim is not None:
            h, t = ranks.slice(h, 0), ranks.slice(t, 0)
        h.requires_grad_()
        w.requires_grad_()
        with counted() as calls:
            loss = kullback.linear_divergence(h, w, t, v, chunk_rows=step, group=ranks.group, sequence_dim=dim, **place)
            forward = len(calls)
            loss.backward()
        chunks = [("all_gather", 6 * 8 * step)]
        if dim is None:
            assert calls == [*chunks, ("all_reduce", step * 8 * 4)] * (rows // step)
            assert forward == len(calls)
        else:
            hidden = ("all_gather", h.nbytes)
            assert calls[:-1] == [hidden, hidden] + chunks * (rows // step)
            assert calls[-1][0].startswith("reduce_scatter")
            assert calls[-1][1] == rows * 8 * 4
            assert forward == len(calls) - 1


def check_chunks_of_unlike_slices(ranks: Ranks):
    """Ranks cut their rows alike, whatever the widths of their slices."""
    h, w, _, t, v, _ = (tensor.to(ranks.device) for tensor in models(torch.float32, (60,)))
    cuts = [50] * (ranks.world - 1)
    heads = [ranks.slice(head, 0, cuts) for head in (w, v)]
    first_token = [0, *cuts][ranks.rank]
    expected = kullback.linear_divergence(h, w, t, v)
    for place in ({}, {"first_token": first_token, "total_vocab": 53}):
        with mock.patch.object(linear, "CHUNK_BYTES", 2500), counted() as calls:
            loss = kullback.linear_divergence(h, heads[0], t, heads[1], group=ranks.group, **place)
        assert len(calls) > 2
        assert relative_error(loss, expected) < LOSS


def check_agreement(ranks: Ranks):
    """Ranks that disagree are told before numbers move."""
    x = torch.randn(4 + ranks.rank, 9, device=ranks.device)
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r" 4 rows.* of rank 0 and .* 5 rows.* of rank 1"):
        kullback.divergence(x, x, group=ranks.group)
    x = torch.randn(4, 9 + ranks.rank, device=ranks.device)
    kind = "kl" if ranks.rank == 0 else "reverse_kl"
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"kl.*reverse_kl"):
        kullback.divergence(x, x, kind, group=ranks.group)
    h, w, _, t, v, _ = (tensor.to(ranks.device) for tensor in models(torch.float32, (3 + ranks.rank,)))
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"got \[3, 8\] .* of rank 0 and \[4, 8\]"):
        kullback.linear_divergence(h, w, t, v, chunk_rows=2, group=ranks.group, sequence_dim=0)
    zeros = torch.zeros(4, 3 - ranks.rank, device=ranks.device)
    entries = zeros, zeros.long()
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r" of 3 entries.* of rank 0 and .* of 2 entries"):
        kullback.topk_divergence(x, *entries, group=ranks.group)
    place = {} if ranks.rank == 0 else {"first_token": 9, "total_vocab": 19}
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"is not given .*first_token is given"):
        kullback.topk_divergence(x, *entries, group=ranks.group, **place)
    z, own = torch.randn(4, 6, device=ranks.device), {"first_token": 6 * ranks.rank, "total_vocab": 12}
    log_p, ids = torch.randn(4, 12, generator=generator()).log_softmax(-1).topk(2)
    labels = torch.tensor([0, 1, 7, 11], device=ranks.device)
    entries = log_p.to(ranks.device).requires_grad_(), ids.to(ranks.device)
    tail, log_q = "bucket" if ranks.rank else "renormalize", z.log_softmax(-1)
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"renormalize.* of rank 0 and .*bucket"):
        kullback.topk_divergence(z, *entries, tail=tail, group=ranks.group, **own)
    own_labels = {"form": "log_probs", "labels": labels, "label_weight": 1.0 + ranks.rank, **own}
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"label=1\.0.* of rank 0 and .*label=2\.0"):
        kullback.divergence(log_q, log_q, group=ranks.group, **own_labels)
    collects = kullback.collecting_statistics() if ranks.rank else contextlib.nullcontext()
    with kullback.checking_ranks(), collects, pytest.raises(ValueError, match="statistics of labels of rank 1"):
        kullback.divergence(z, z, labels=labels, group=ranks.group, **own)
    h, w, _, t, v, _ = (tensor.to(ranks.device) for tensor in models(torch.float32, (3,)))
    h, w = h.requires_grad_(ranks.rank == 0), w.requires_grad_()
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"hidden states: True.* of rank 0 and .*: False"):
        kullback.linear_divergence(h, w, t, v, group=ranks.group)
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"with a gradient of rank 0 and .*without a"):
        kullback.linear_divergence(h, w, t, v, group=ranks.group, sequence_dim=0)
    with kullback.checking_ranks():  # slices may be of any width
        assert kullback.divergence(x, x, group=ranks.group) == 0
    loss = kullback.DivergenceLoss("hellinger", group=ranks.group, reduction="sum")
    assert loss(x, x + 1) < 1e-6  # the same for all tokens: the softmax's
    assert torch.equal(loss(x, -x), kullback.divergence(x, -x, "hellinger", group=ranks.group, reduction="sum"))
    with pytest.raises(ValueError, match="first_token and total_vocab go together; got 0 and None"):
        kullback.topk_divergence(x, x, x.long(), group=ranks.group, first_token=0)
    with pytest.raises(TypeError, match="total_vocab must be an integer; got float"):
        kullback.topk_divergence(x, x, x.long(), group=ranks.group, first_token=0, total_vocab=9.0)
    for wrong in (False, 0.0):
        with pytest.raises(TypeError, match="valid_vocab must be an integer"):
            kullback.divergence(x, x, valid_vocab=wrong, group=ranks.group)
    with pytest.raises(ValueError, match=r"total_vocab must be no less than the \d+ tokens of this slice; got 3"):
        kullback.divergence(x, x, group=ranks.group, first_token=0, total_vocab=3)
    with pytest.raises(ValueError, match=r"sequence_dim needs an input of rows, \[\.\.\., hidden\]"):
        kullback.linear_divergence(x[0], x, x[0], x, group=ranks.group, sequence_dim=0)
    with pytest.raises(ValueError, match="sequence_dim must be a dimension of rows, from 0 to 0; got 1"):
        kullback.linear_divergence(x, x, x, x, group=ranks.group, sequence_dim=1)
    with pytest.raises(ValueError, match="sequence_dim needs a teacher of hidden states or of entries"):
        kullback.linear_divergence(x, x, x[:, :4], group=ranks.group, sequence_dim=0)
    smoothed = {
        "labels": torch.zeros(4, dtype=torch.int64, device=ranks.device),
        "label_smoothing": 0.1,
        "group": ranks.group,
    }
    for loss, operands in (
        (kullback.divergence, (x, x)),
        (kullback.divergence, (x, None)),
        (kullback.linear_divergence, (x, x, None)),
    ):
        with pytest.raises(ValueError, match=r"label_smoothing is not for a vocabulary that ranks share; got 0.1"):
            loss(*operands, **smoothed)
    for call in (
        lambda **place: kullback.topk_divergence(x[:, :9], x[:, :1], x[:, :1].long(), **place),
        lambda **place: kullback.divergence(x[:, :9], x[:, :9], **place),
        lambda **place: kullback.divergence(x[:, :9], x[:, :9], labels=smoothed["labels"], **place),
    ):
        with pytest.raises(ValueError, match="first_token must lie from 0 to 1"):
            call(group=ranks.group, first_token=2, total_vocab=10)


def check_compiled(ranks: Ranks):
    """One graph, with collectives in it: what eager gives, forward and backward, and none of them in backward."""
    x, y = torch.randn(2, 4, 20, generator=generator())
    log_p, ids = torch.randn(4, 20, generator=generator()).log_softmax(-1).topk(3)
    h, w, _, t, v, _ = models(torch.float32, (2 * ranks.world,), vocab=20)
    cuts = ranks.uneven(20)
    log_p, ids = log_p.to(ranks.device), ids.to(ranks.device)
    labels = torch.tensor([0, 19, -100, 7], device=ranks.device)
    group = ranks.group  # Dynamo of torch 2.8 follows no property
    place = {"first_token": [0, *cuts][ranks.rank], "total_vocab": 20}
    cases = {
        "mean": (lambda a, b: kullback.divergence(a, b, "jensen_shannon", group=group), (x, y)),
        "none": (lambda a, b: kullback.divergence(a, b, reduction="none", group=group).square().sum(), (x, y)),
        "topk": (lambda a: kullback.topk_divergence(a, log_p, ids, group=group, **place), (x,)),
        "labels": (
            lambda a: kullback.divergence(a, a.detach(), form="log_probs", labels=labels, group=group, **place),
            (x.log_softmax(-1),),
        ),
        "linear": (lambda *a: kullback.linear_divergence(*a, group=group, **place), (h, w, t, v)),
        "sequence": (
            lambda *a: kullback.linear_divergence(*a, group=group, sequence_dim=0, **place),
            (h, w, t, v),
        ),
    }
    for name, (loss, tensors) in cases.items():
        leaves = []
        for i, tensor in enumerate(tensors):
            is_hidden = len(tensors) == 4 and i % 2 == 0
            if is_hidden:
                leaf = ranks.slice(tensor, 0) if name == "sequence" else tensor.to(ranks.device)
            else:
                leaf = ranks.slice(tensor, -1 if len(tensors) < 4 else 0, cuts)
            leaves.append(leaf.clone().requires_grad_())
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True)
        expected = loss(*leaves)
        # The collectives of sequence parallelism are in the graph itself, others in operators
        with contextlib.nullcontext([]) if name == "sequence" else counted() as calls:
            ours = compiled(*leaves)
            forward = len(calls)
            gradients = torch.autograd.grad(ours, leaves)
        assert forward == len(calls), name
        assert relative_error(ours, expected) < LOSS, name
        for a, b in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
            assert relative_error(a, b) < GRADIENT, name

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    leaves = [distribute_tensor(t, mesh, [Shard(1)]).detach().requires_grad_() for t in (x, y)]
    loss = lambda a, b: kullback.divergence(a, b, "jensen_shannon")
    ours, expected = torch.compile(loss, fullgraph=True)(*leaves), loss(*leaves)
    assert relative_error(ours.to_local(), expected.to_local()) < LOSS
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert relative_error(a.to_local(), b.to_local()) < GRADIENT


def check_dtensors(ranks: Ranks):
    """Sharded by tokens on one dimension of a mesh, and by rows on another: what one process gives."""
    meshes = [init_device_mesh(ranks.device.type, (ranks.world,))]
    if ranks.world == 4:
        meshes.append(init_device_mesh("cpu", (2, 2)))
    x, y = torch.randn(2, 3, 5, 41, generator=generator(), dtype=torch.float64)
    weight = torch.rand(3, 5, generator=generator(), dtype=torch.float64)
    for mesh, kind, reduction, valid in itertools.product(
        meshes, ("kl", "jensen_shannon"), ("mean", "none"), (None, 19)
    ):
        for of_rows in (Replicate(), Shard(0), Shard(1)) if mesh.ndim > 1 else (None,):
            rest = [] if of_rows is None else [of_rows]
            a, b = (t.clone().requires_grad_() for t in (x, y))
            options = {"reduction": reduction, "valid_vocab": valid, "label_weight": 0.3, "z_weight": 0.01}
            labels = torch.arange(15).view(3, 5) + 2
            expected = kullback.divergence(a, b, kind, row_weight=weight, labels=labels, **options)
            gradients = torch.autograd.grad(expected.square().sum(), (a, b))
            leaves = [distribute_tensor(t, mesh, [*rest, Shard(2)]).detach().requires_grad_() for t in (x, y)]
            given, labels = (distribute_tensor(t, mesh, [*rest, Replicate()]) for t in (weight, labels))
            loss = kullback.divergence(*leaves, kind, row_weight=given, labels=labels, **options)
            assert loss.placements[-1] == Replicate()
            assert relative_error(loss.full_tensor(), expected) < EXACT
            loss.full_tensor().square().sum().backward()  # torch 2.8 squares the parts of a sum over rows
            for leaf, gradient in zip(leaves, gradients, strict=True):
                assert leaf.grad.placements == leaf.placements
                assert relative_error(leaf.grad.full_tensor(), gradient) < EXACT, (kind, reduction, valid, of_rows)
    mesh = meshes[0]
    p, q = (distribute_tensor(t.softmax(-1), mesh, [Shard(2)]) for t in (x, y))
    ours = kullback.kl_div(p, q, "batchmean", form="probs")
    assert relative_error(ours.full_tensor(), F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")) < EXACT
    log_p, ids = y.log_softmax(-1).topk(4)
    a = x.clone().requires_grad_()
    leaf = distribute_tensor(x, mesh, [Shard(2)]).detach().requires_grad_()
    entries = [distribute_tensor(t, mesh, [Replicate()]) for t in (log_p, ids.clamp(max=39))]
    expected = kullback.topk_divergence(a, log_p, ids.clamp(max=39), valid_vocab=40)
    loss = kullback.topk_divergence(leaf, *entries, valid_vocab=40)
    assert relative_error(loss.full_tensor(), expected) < EXACT
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.placements == leaf.placements
    assert gradient.stride() == leaf.stride()  # else .grad is a copy, which torch 2.11 gathers
    assert relative_error(gradient.full_tensor(), torch.autograd.grad(expected, a)[0]) < EXACT
    alone = {"labels": torch.tensor([[0, 3, -100, 40, 1]]).expand(3, 5).contiguous(), "row_weight": weight}
    expected = kullback.divergence(a, None, **alone)
    loss = kullback.divergence(
        leaf, None, **{name: distribute_tensor(t, mesh, [Replicate()]) for name, t in alone.items()}
    )
    assert relative_error(loss.full_tensor(), expected) < EXACT
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert relative_error(gradient.full_tensor(), torch.autograd.grad(expected, a)[0]) < EXACT
    for placement, smoothing in itertools.product((Shard(0), Replicate()), (0.0, 0.1)):
        leaf = distribute_tensor(x, mesh, [placement]).detach().requires_grad_()
        options = {name: distribute_tensor(t, mesh, [placement]) for name, t in alone.items()}
        b = distribute_tensor(y, mesh, [placement])
        for target, of_whole in ((None, None), (b, y)):
            expected = kullback.divergence(a, of_whole, label_smoothing=smoothing, **alone)
            loss = kullback.divergence(leaf, target, label_smoothing=smoothing, **options)
            assert relative_error(loss.full_tensor(), expected) < EXACT
            (gradient,) = torch.autograd.grad(loss, leaf)
            assert relative_error(gradient.full_tensor(), torch.autograd.grad(expected, a)[0]) < EXACT
    tensors = models(torch.float64, (2 * ranks.world, 3))
    wide = [t.clone().requires_grad_() for t in tensors]
    for of_rows, reduction in itertools.product((Replicate(), Shard(0)), ("mean", "none")):
        h, w, b, t, v, c = wide
        expected = kullback.linear_divergence(h, w, t, v, bias=b, target_bias=c, reduction=reduction, valid_vocab=50)
        gradients = torch.autograd.grad(expected.square().sum(), wide)
        placements = [Shard(0) if i % 3 else of_rows for i in range(6)]
        leaves = [
            distribute_tensor(t, mesh, [p]).detach().requires_grad_() for t, p in zip(tensors, placements, strict=True)
        ]
        h, w, b, t, v, c = leaves
        loss = kullback.linear_divergence(h, w, t, v, bias=b, target_bias=c, reduction=reduction, valid_vocab=50)
        assert loss.placements == ((of_rows if reduction == "none" else Replicate()),)
        assert relative_error(loss.full_tensor(), expected) < EXACT
        loss.square().sum().backward()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert leaf.grad.placements == leaf.placements
            assert relative_error(leaf.grad.full_tensor(), gradient) < EXACT


def check_weights_of_labels_alone(ranks: Ranks):
    """The mean divides by a weight that is differentiated, and lies as rows do."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    x, w = torch.randn(4, 12, generator=generator()), torch.tensor([1.0, 2.0, 0.5, 3.0])
    h, head = torch.randn(4, 3, generator=generator()), torch.randn(12, 3, generator=generator())
    labels = torch.tensor([0, 1, 11, -100])
    place = lambda t, placement: distribute_tensor(t.to(ranks.device), mesh, [placement]).detach()
    alone = lambda a, **rows: kullback.divergence(a, None, **rows)
    from_hidden = lambda *a, **rows: kullback.linear_divergence(*a, None, **rows)
    for call, of_rows, tensors in (
        (alone, Replicate(), ((x, Shard(1)),)),
        (from_hidden, Replicate(), ((h, Replicate()), (head, Shard(0)))),
        (from_hidden, Shard(0), ((h, Shard(0)), (head, Shard(0)))),
    ):
        leaf = w.clone().requires_grad_()
        expected = call(*(t for t, _ in tensors), labels=labels, row_weight=leaf)
        own = place(w, of_rows).requires_grad_()
        loss = call(*(place(*each) for each in tensors), labels=place(labels, of_rows), row_weight=own)
        assert relative_error(loss.full_tensor(), expected) < LOSS
        expected.backward()
        loss.backward()
        assert relative_error(own.grad.full_tensor(), leaf.grad) < GRADIENT


def check_refused_placements(ranks: Ranks):
    """Never a silent gather, never a wrong number: what lies otherwise is named."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    x, y = torch.randn(2, 4, 12, device=ranks.device)
    place = lambda t, *placements: distribute_tensor(t, mesh, placements)
    weight, labels = torch.tensor([1.0, 0.0, 3.0, 4.0]), torch.tensor([0, 1, 2, 11])
    entries = torch.zeros(4, 1, device=ranks.device), torch.zeros(4, 1, dtype=torch.int64, device=ranks.device)
    for option in ({"row_weight": weight}, {"labels": labels}):
        (name,) = option
        there = {name: place(option[name].to(ranks.device), Replicate())}
        for call in (
            lambda **given: kullback.divergence(x, y, **given),
            lambda **given: kullback.topk_divergence(x, *entries, **given),
            lambda **given: kullback.linear_divergence(x, y, x, y, **given),
        ):
            with pytest.raises(TypeError, match=f"{name} must all be DTensors, or none; input is none"):
                call(**there)
    with pytest.raises(TypeError, match="input, labels must all be DTensors, or none; labels is none"):
        kullback.divergence(place(x, Shard(0)), None, labels=labels.to(ranks.device))
    with pytest.raises(TypeError, match="normalizer must be a number or a plain tensor"):
        kullback.divergence(x, y, normalizer=place(torch.tensor(2.0, device=ranks.device), Replicate()))
    if ranks.device.type == "cpu":  # on a device an assertion
        for at, of_labels in ((Shard(1), Replicate()), (Replicate(), Replicate())):
            with pytest.raises(ValueError, match="labels must lie from 0 to 11, or be -100; got 50"):
                kullback.divergence(place(x, at), place(y, at), labels=place(labels.where(labels < 9, 50), of_labels))
    by_tokens = place(x, Shard(1))
    with pytest.raises(ValueError, match=r"target must lie as the input does.*got \(Replicate"):
        kullback.divergence(by_tokens, place(y, Replicate()))
    with pytest.raises(ValueError, match=r"target must lie as the input does.*got \(Shard\(dim=0"):
        kullback.divergence(by_tokens, place(y, Shard(0)))
    with pytest.raises(ValueError, match=r"row_weight must lie.*Replicate.*got \(Shard\(dim=0"):
        kullback.divergence(by_tokens, by_tokens, row_weight=place(torch.ones(4), Shard(0)))
    with pytest.raises(ValueError, match="replicated, sharded along a dimension of rows or"):
        kullback.divergence(*[DTensor.from_local(x, mesh, [Partial()])] * 2)
    with pytest.raises(ValueError, match="must have the same one"):
        kullback.divergence(by_tokens, place(torch.randn(4, 14), Shard(1)), valid_vocab=12)
    with pytest.raises(ValueError, match="group must not be given with DTensors"):
        kullback.divergence(by_tokens, by_tokens, group=ranks.group)
    h, w, _, t, v, _ = models(
        torch.float32, (3,)
    )  # as FSDP2 leaves a head between its uses: sharded, and by no one's tokens
    with pytest.raises(TypeError, match="must all be DTensors, or none; input is none"):
        kullback.linear_divergence(h, place(w, Shard(0)), t, v)
    with pytest.raises(ValueError, match=r"weight must be sharded along its dimension 0.*got \(Replicate"):
        kullback.linear_divergence(*(place(q, Replicate()) for q in (h, w, t, v)))
    with pytest.raises(ValueError, match="target must lie on"):
        kullback.linear_divergence(
            *(place(q, p) for q, p in zip((h, w, t, v), (Replicate(), Shard(0), Shard(1), Shard(0)), strict=True))
        )
    rows = torch.randn(3, 2 * ranks.world + 1, 8)
    with pytest.raises(ValueError, match="must be as many on each of"):
        kullback.linear_divergence(
            *(place(q, p) for q, p in zip((rows, w, rows, v), [Shard(1), Shard(0)] * 2, strict=True))
        )
    log_p, ids = y.log_softmax(-1).topk(2)
    with pytest.raises(TypeError, match="target_values is none"):
        kullback.topk_divergence(by_tokens, log_p, ids)
    with pytest.raises(ValueError, match="input must be sharded along its dimension 1"):
        kullback.topk_divergence(*(place(q, Replicate()) for q in (x, log_p, ids)))


def check_data_parallel(ranks: Ranks):
    """FSDP2 and DDP know nothing of a loss: each process's is of its own rows, and gradients are their mean."""
    head = torch.randn(30, 8, generator=generator())
    hidden = torch.randn(2 * ranks.world, 8, generator=generator())
    teacher = torch.randn(2 * ranks.world, 30, generator=generator())
    wide = head.clone().requires_grad_()
    kullback.divergence(hidden @ wide.T, teacher, "jensen_shannon").backward()
    for wrap in (fully_shard, DistributedDataParallel):
        model = torch.nn.Linear(8, 30, bias=False, device=ranks.device)
        with torch.no_grad():
            model.weight.copy_(head)
        if wrap is fully_shard:
            mesh = init_device_mesh(ranks.device.type, (ranks.world,))
            model = fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        mine = [ranks.slice(t, 0) for t in (hidden, teacher)]
        kullback.divergence(model(mine[0]), mine[1], "jensen_shannon").backward()
        (parameter,) = model.parameters()
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if wrap is fully_shard and ranks.device.type == "cpu" and torch.__version__.startswith("2.8."):
            gradient = gradient / ranks.world  # torch 2.8 leaves gloo's sum undivided, of any loss
        assert relative_error(gradient, wide.grad) < GRADIENT


def check_cuda(ranks: Ranks):
    """The host waits for nothing; and a captured graph, its collective in it, serves other numbers."""
    x, y, z = torch.randn(3, 64, 4000, generator=generator()).to(ranks.device)
    x, y = x.bfloat16().requires_grad_(), y.bfloat16()
    log_p, ids = z.log_softmax(-1).topk(8)
    place = {"first_token": 4000 * ranks.rank, "total_vocab": 4000 * ranks.world}
    for kind in ("kl", "jensen_shannon", "renyi"):
        losses = (
            lambda kind=kind: kullback.divergence(x, y, kind, group=ranks.group),
            lambda kind=kind: kullback.topk_divergence(x, log_p, ids, kind, group=ranks.group, **place),
        )
        for loss in losses:
            run = lambda loss=loss: torch.autograd.grad(loss(), x)[0]
            with torch.cuda.stream(torch.cuda.Stream()):
                run()
            torch.cuda.synchronize()
            with no_synchronisation():
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = run()
            with torch.no_grad():
                x.copy_(x.flip(0))
            graph.replay()
            assert relative_error(captured, run()) < GRADIENT, kind


ROWS = [
    check_kinds,
    check_close_rows,
    check_padding,
    check_masked_rows,
    check_a_slice_of_nothing,
    check_labels,
    check_labels_alone,
    check_targets_that_are_not_read,
    check_topk,
    check_linear,
]
GROUPS = {
    "rows": ROWS,
    "options": [
        check_forms,
        check_masses_too_small_for_a_number,
        check_options,
        check_row_weights_gradient,
        check_collectives,
        check_again,
        check_linear_teachers,
        check_linear_collectives,
        check_chunks_of_unlike_slices,
        check_topk_in_float32,
        check_agreement,
    ],
    "traced": [check_transforms, check_compiled],
    "dtensors": [check_dtensors, check_weights_of_labels_alone, check_refused_placements, check_data_parallel],
}
SUITE = [*itertools.chain(*GROUPS.values())]


def run(checks, ranks: Ranks):
    for each in checks:
        each(ranks)


@pytest.mark.parametrize(
    ("checks", "world"),
    [(SUITE, 2), (ROWS, 3), pytest.param([*ROWS, check_every_form, check_dtensors], 4, marks=pytest.mark.full)],
    ids=[2, 3, 4],
)
def test_ranks(checks, world, tmp_path):
    spawn(functools.partial(run, checks), world, tmp_path)


@pytest.mark.gpus
@pytest.mark.parametrize("checks", [*GROUPS.values(), [check_cuda]], ids=[*GROUPS, "graphs"])
def test_two_gpus(checks, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.fail("this suite needs two CUDA devices")
    spawn(functools.partial(run, checks), 2, tmp_path, "nccl")


def long_rows(ranks: Ranks):
    """The vocabulary of GPT-2, a prime number of tokens: of all kinds."""
    for dtype, kind in itertools.product((torch.float64, torch.float32), KINDS):
        x, y = sample("logits", (2, 3, 50257), generator(), dtype)
        check(ranks, y + 0.5 * x, y, kind, None)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
def test_long_rows(world, tmp_path):
    spawn(long_rows, world, tmp_path)


def killed(ranks: Ranks):
    """The others get torch's own error, at once on gloo: no hang."""
    dist.barrier()
    if ranks.rank == 1:
        os._exit(0)
    x = torch.randn(4, 9)
    with pytest.raises(RuntimeError, match="gloo"):
        kullback.divergence(x, x, group=ranks.group)
    os._exit(0)  # a barrier would wait for the dead


def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    spawn(killed, 2, tmp_path)
