"""Statistics that losses find on their way, against float64; the losses are what they are without."""

import pytest
import torch

import kullback
from tests import emulation, kinds, samples
from tests.kinds import EVERY_BACKEND, KINDS
from tests.samples import EVERY_7TH, apart, dead, equal, far, masked, sample
from tests.tolerances import relative_error


def definitions(x, labels=None, temperature=1.0):
    log_q = (x.double().cpu() / temperature).log_softmax(-1)
    entropy = -torch.where(log_q == -torch.inf, 0.0, log_q.exp() * log_q).sum(-1)
    own = None
    if labels is not None:
        own = log_q.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        own = torch.where(labels < 0, torch.nan, own)
    return (x.double().cpu() / temperature).logsumexp(-1), entropy, own


def hold(collected, x, labels=None, temperature=1.0, counts=slice(None)):
    lse, entropy, own = definitions(x, labels, temperature)
    (found,) = collected
    ours = [None if t is None else t.cpu().double().view(lse.shape)[counts] for t in found]
    torch.testing.assert_close(ours[0], lse[counts], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(ours[1], entropy[counts], rtol=2e-6, atol=3e-6)
    assert (ours[2] is None) == (labels is None)
    if labels is not None:
        torch.testing.assert_close(ours[2], own[counts], rtol=2e-6, atol=3e-6, equal_nan=True)


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize(
    ("kind", "dtype", "vocab"),
    [(kind, *((torch.float32, 2503) if i % 2 else (torch.bfloat16, 61))) for i, kind in enumerate(KINDS)]
    + [("kl", torch.bfloat16, 2503), ("jensen_shannon", torch.float32, 61)],
)
def test_every_kind(backend, device, generator, kind, dtype, vocab):
    rows = samples.batch(
        generator,
        vocab,
        dtype,
        far=far(2.0),
        close=apart(1e-2),
        equal=equal,
        masked=masked(far(2.0), both=EVERY_7TH),
        dead=dead,
        more=apart(1.0),
        few_masked=masked(far(2.0), both=slice(3, 5)),
        half=masked(apart(1.0), both=slice(0, vocab // 2)),
    )
    weight = rows.weight(close=2.0, masked=0.5, dead=0.0)
    labels = torch.tensor([0, 5, -100, 60, 3, 9, 2, vocab - 1])
    x, y, on_device = rows.x.to(device), rows.y.to(device), labels.to(device)
    options = {"row_weight": weight.to(device), "labels": on_device, "label_weight": 0.5, **kinds.parameters(kind)}
    for reduction in ("sum", "none"):
        plain, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = kullback.divergence(plain, y, kind, reduction=reduction, **options)
        with kullback.collecting_statistics() as collected:
            loss = kullback.divergence(leaf, y, kind, reduction=reduction, **options)
        assert relative_error(loss, expected) < 1e-6
        ours, theirs = (torch.autograd.grad(of.sum(), t)[0] for of, t in ((loss, leaf), (expected, plain)))
        assert relative_error(ours, theirs) < 1e-6
        hold(collected, rows.x, labels, counts=weight != 0)
        assert collected[0].entropy[weight == 0].count_nonzero() == 0
        assert collected[0].label_log_prob[weight == 0].isnan().all()


@pytest.mark.parametrize("backend", ["emulated"], indirect=True)
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "jeffreys"])
@pytest.mark.parametrize("label_smoothing", [None, 0.0, 0.1])
def test_rows_on_chip(backend, generator, monkeypatch, kind, label_smoothing):
    emulation.on_chip(monkeypatch)
    rows = samples.batch(
        generator,
        13341,
        torch.bfloat16,
        far=far(2.0),
        near=apart(0.1),
        close=apart(0.01),
        dead=dead,
        few_masked=masked(far(2.0), both=slice(3, 5)),
        half=masked(apart(0.3), both=slice(0, 6600)),
    )
    weight = rows.weight(dead=0.0)
    options = {"temperature": 1.5, "row_weight": weight}
    labels = None if label_smoothing is None else torch.tensor([13340, 0, -100, 7, 6700, 9000])
    if labels is not None:
        options |= {"labels": labels, "label_weight": 0.3, "z_weight": 1e-3, "label_smoothing": label_smoothing}
    for reduction in ("mean", "none"):
        plain, leaf = rows.x.clone().requires_grad_(), rows.x.clone().requires_grad_()
        expected = kullback.divergence(plain, rows.y, kind, reduction=reduction, **options)
        with kullback.collecting_statistics() as collected:
            loss = kullback.divergence(leaf, rows.y, kind, reduction=reduction, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        ours, theirs = (torch.autograd.grad(of.sum(), t)[0] for of, t in ((loss, leaf), (expected, plain)))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        hold(collected, rows.x, labels, temperature=1.5, counts=weight != 0)


@EVERY_BACKEND
def test_capped_padded_in_place_and_what_is_not_finite(backend, device, generator):
    x, y = (sample("logits", (2, 3, 70), generator, torch.float32) for _ in range(2))
    leaf = x.to(device, copy=True).requires_grad_()
    with kullback.collecting_statistics() as collected:
        kullback.divergence(
            leaf * 1, y.to(device), softcap=3.0, valid_vocab=61, temperature=2.0, inplace=True
        ).backward()
    hold(collected, 3 * torch.tanh(x[..., :61] / 3), temperature=2.0)
    assert collected[0].entropy.shape == (2, 3)
    x[0, 0, 4], x[0, 1, 5], x[0, 2] = torch.nan, torch.inf, -torch.inf
    with kullback.collecting_statistics() as collected:
        kullback.divergence(x.to(device), y.to(device))
    assert collected[0].entropy.isnan().tolist() == [[True, True, True], [False] * 3]


@pytest.mark.parametrize("target", ["hidden", "entries", "none"])
def test_from_hidden_states(backend, device, generator, target):
    hidden, other = (torch.randn(11, 16, generator=generator).to(device) for _ in range(2))
    head = torch.randn(90, 16, generator=generator).to(device)
    labels = torch.randint(0, 90, (11,), generator=generator)
    labels[4] = -100
    weight = torch.ones(11)
    weight[7] = 0
    log_p, ids = (other @ head.T).log_softmax(-1).topk(5)
    given = {
        "hidden": {"target": other, "target_weight": head},
        "entries": {"target": log_p, "target_indices": ids},
        "none": {"target": None},
    }[target]
    for reduction in ("mean", "none"):
        with kullback.collecting_statistics() as collected:
            kullback.linear_divergence(
                hidden.clone().requires_grad_(),
                head,
                labels=labels.to(device),
                row_weight=weight.to(device),
                chunk_rows=4,
                reduction=reduction,
                **given,
            )
        is_read = weight != 0 if target != "none" else (weight != 0) & (labels != -100)
        hold(collected, hidden.double() @ head.double().T, labels, counts=is_read)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_alone_are_what_they_are_without(reduction):
    """Of rows without a label too, whatever they hold."""
    x = torch.randn(4, 20)
    x[1], labels = torch.nan, torch.tensor([3, -100, 19, 0])
    expected = kullback.divergence(x, None, labels=labels, reduction=reduction)
    with kullback.collecting_statistics() as collected:
        found = kullback.divergence(x, None, labels=labels, reduction=reduction)
    assert torch.equal(found, expected)
    hold(collected, x, labels, counts=torch.tensor([True, False, True, True]))
    assert collected[0].lse[1].isnan()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", ["probs", "log_probs", "hidden states"])
def test_a_row_without_a_label_leaks_nothing(backend, device, form, reduction):
    x, head, labels = torch.randn(3, 9), torch.randn(9, 9), torch.tensor([0, -100, 2])
    x = x.log_softmax(-1) if form == "log_probs" else x.softmax(-1) if form == "probs" else x
    x[1] = torch.nan
    leaves = [t.to(device).requires_grad_() for t in (x, head)]
    given = {"labels": labels.to(device), "reduction": reduction}
    with kullback.collecting_statistics():
        if form == "hidden states":
            loss = kullback.linear_divergence(*leaves, None, **given)
        else:
            loss = kullback.divergence(leaves[0], None, form=form, **given)
    loss.sum().backward()
    assert not loss.isnan().any()
    assert not any(leaf.grad is not None and leaf.grad.isnan().any() for leaf in leaves)
    assert not leaves[0].grad[1].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_call_of_no_rows_is_one_too(reduction):
    hidden, head = torch.empty(0, 4), torch.ones(9, 4)
    for labels in (None, torch.empty(0, dtype=torch.int64)):
        with kullback.collecting_statistics() as collected:
            kullback.linear_divergence(hidden, head, hidden, head, labels=labels, reduction=reduction)
        (found,) = collected
        assert found.lse.shape == found.entropy.shape == (0,)
        assert (found.label_log_prob is None) == (labels is None)


def test_of_a_teacher_known_at_some_tokens(backend, device, generator):
    x, y = (sample("logits", (2, 5, 200), generator, torch.float32) for _ in range(2))
    log_p, ids = y.log_softmax(-1).topk(8)
    given = x.to(device), log_p.to(device), ids.to(device)
    with kullback.collecting_statistics() as collected:
        loss = kullback.topk_divergence(*given, temperature=0.7)
    hold(collected, x, temperature=0.7)
    assert torch.equal(loss, kullback.topk_divergence(*given, temperature=0.7))


def test_each_call_inside_is_one_and_of_logits(generator):
    x, y = (sample("logits", (3, 20), generator, torch.float32) for _ in range(2))
    with kullback.collecting_statistics() as collected:
        kullback.divergence(x, y)
        kullback.divergence(x.softmax(-1), y.softmax(-1), form="probs")
        kullback.DivergenceLoss("jensen_shannon")(x, y)
        kullback.divergence(x.half().requires_grad_(), y.half()).backward()
    kullback.divergence(x, y)
    assert len(collected) == 3
    assert not any(found.entropy.requires_grad for found in collected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("tail", ["bucket", "support"])
def test_a_compiled_loss_of_some_tokens_is_not_taken_for_its_row(tail, generator):
    """What a compiler has traced are operators on a few outcomes."""
    x, y = (sample("logits", (3, 20), generator, torch.float32) for _ in range(2))
    log_p, ids = y.log_softmax(-1).topk(4)
    labels = torch.tensor([1, -100, 2])
    losses = {
        "topk": lambda a: kullback.topk_divergence(a, log_p, ids, tail=tail),
        "labels": lambda a: kullback.divergence(a, None, labels=labels),
    }
    for loss in losses.values():
        with kullback.collecting_statistics() as collected:
            torch.compile(loss, backend="aot_eager")(x.clone().requires_grad_()).backward()
        assert collected == []
    with kullback.collecting_statistics() as collected:
        torch.compile(lambda a: kullback.divergence(a, y), backend="aot_eager")(x.clone().requires_grad_()).backward()
    hold(collected, x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_differentiable_backward_is_no_call(reduction, generator):
    x, y = (sample("logits", (3, 20), generator, torch.float32) for _ in range(2))
    log_p, ids = y.log_softmax(-1).topk(4)
    leaf = x.requires_grad_()
    with kullback.collecting_statistics() as collected:
        loss = kullback.topk_divergence(leaf, log_p, ids, reduction=reduction).sum()
        torch.autograd.grad(loss, leaf, create_graph=True)
    hold(collected, x.detach())


def test_transforms_of_some_tokens_leave_nothing_behind(generator):
    x, y = (sample("logits", (3, 5, 20), generator, torch.float32) for _ in range(2))
    log_p, ids = y.log_softmax(-1).topk(4)
    with kullback.collecting_statistics() as collected:
        torch.vmap(kullback.topk_divergence)(x, log_p, ids)
        torch.func.jacrev(lambda a: kullback.divergence(a, None, labels=torch.tensor([1, 2, 3, 4, 5])))(x[0])
    assert collected == []


def test_figures_beside_a_teacher_of_some_tokens_are_no_losses(generator):
    x, y = (sample("logits", (3, 20), generator, torch.float32) for _ in range(2))
    with kullback.collecting_statistics() as collected:
        kullback.topk_row_statistics(x, *y.log_softmax(-1).topk(4))
        kullback.row_statistics(x, y)
    assert collected == []
