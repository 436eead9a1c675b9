"""Hard labels and z-loss in a divergence's pass: each backend, form, kind and dtype against float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import kullback
from tests import emulation, kinds, oracle, samples
from tests.kinds import EVERY_BACKEND, KINDS
from tests.samples import apart, at, dead, equal, far, sample
from tests.tolerances import BF16_GRADIENT, FLOAT_GRADIENT, LOSS, gradient, relative_error

WEIGHTS = {"divergence_weight": 0.7, "label_weight": 0.3, "z_weight": 1e-3}


SMOOTHED = pytest.mark.parametrize("smoothing", [0.0, 0.1])


def truth_of(x, y, labels, kind, weights, row_weight=None, **options):
    """Losses of rows, and their sum's gradients."""
    leaves = [t.detach().cpu().double().requires_grad_() for t in (x, y)]
    losses = oracle.divergence(*leaves, kind, **options, **kinds.parameters(kind))
    named = {
        name.removesuffix("_weight").replace("label_smoothing", "smoothing"): value for name, value in weights.items()
    }
    losses = oracle.labelled(losses, leaves[0], labels.cpu(), **named, temperature=options.get("temperature", 1.0))
    losses = losses if row_weight is None else losses * row_weight.cpu()
    return losses.detach(), torch.autograd.grad(losses.sum(), leaves)


def rows_of(generator, vocab, dtype):
    """Far, near, close, equal, one that does not count, and the first token's; and their labels."""
    rows = samples.batch(
        generator,
        vocab,
        dtype,
        far=far(2.0),
        apart=apart(1.0),
        near=apart(0.1),
        close=apart(1e-2),
        equal=equal,
        unlabelled=apart(0.5),
        dead=dead,
        sure=at(apart(1.0), x={3: 20.0}, y={3: 19.0}),
    )
    labels = torch.tensor([0, vocab - 1, vocab // 2, 7, 9, -100, 1, 3])
    return rows, labels


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize(
    ("kind", "dtype", "vocab"),
    [
        (kind, dtype, vocab)
        for i, kind in enumerate(KINDS)
        for j, (dtype, vocab) in enumerate([(torch.float32, 2503), (torch.bfloat16, 61)])
        if i % 2 == j or kind in ("kl", "jensen_shannon")
    ],
)
@SMOOTHED
def test_every_kind(backend, device, generator, kind, dtype, vocab, smoothing):
    rows, labels = rows_of(generator, vocab, dtype)
    weight = rows.weight(far=2.0, dead=0.0)
    counts = weight != 0
    weights = WEIGHTS | {"label_smoothing": smoothing}
    truth, expected = truth_of(rows.x[counts], rows.y[counts], labels[counts], kind, weights, weight[counts])
    for reduction in ("sum", "none"):
        ours = [t.to(device, copy=True).requires_grad_() for t in (rows.x, rows.y)]
        loss = kullback.divergence(
            *ours,
            kind,
            labels=labels.to(device),
            row_weight=weight.to(device),
            reduction=reduction,
            **weights,
            **kinds.parameters(kind),
        )
        assert relative_error(loss.sum(), truth.sum()) < LOSS
        if reduction == "none":
            torch.testing.assert_close(loss.cpu().double()[counts], truth, rtol=1e-5, atol=1e-6)
        for mine, other in zip(torch.autograd.grad(loss.sum(), ours), expected, strict=True):
            assert relative_error(mine.cpu()[counts], other) < (1e-5 if dtype == torch.float32 else BF16_GRADIENT)
            assert mine.cpu()[~counts].count_nonzero() == 0


@EVERY_BACKEND
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(
    ("kind", "dtype", "vocab"),
    [
        ("kl", torch.bfloat16, 6152),
        ("renyi", torch.bfloat16, 2504),
        ("jensen_shannon", torch.float32, 2503),
        ("jensen_shannon", torch.bfloat16, 2504),
        ("total_variation", torch.bfloat16, 61),
    ],
)
def test_a_smoothed_label_where_only_the_student_learns(backend, device, generator, kind, dtype, vocab, softcap):
    rows, labels = rows_of(generator, vocab, dtype)
    counts = rows.weight(dead=0.0) != 0
    weights = WEIGHTS | {"label_smoothing": 0.3}
    x, y, labels = rows.x[counts], rows.y[counts], labels[counts]
    leaf = x.double().requires_grad_()
    capped = [t if softcap is None else softcap * torch.tanh(t / softcap) for t in (leaf, y.double())]
    losses = oracle.divergence(*capped, kind, **kinds.parameters(kind))
    truth = oracle.labelled(losses, capped[0], labels, 0.7, 0.3, 1e-3, 0.3).sum()
    ours = x.to(device, copy=True).requires_grad_()
    options = {**weights, **kinds.parameters(kind), "softcap": softcap, "target_softcap": softcap, "reduction": "sum"}
    loss = kullback.divergence(ours, y.to(device), kind, labels=labels.to(device), **options)
    assert relative_error(loss, truth) < LOSS
    (mine,), (expected,) = torch.autograd.grad(loss, ours), torch.autograd.grad(truth, leaf)
    for row in range(len(x)):
        assert relative_error(mine[row].cpu(), expected[row]) < (1e-5 if dtype == torch.float32 else BF16_GRADIENT)


@EVERY_BACKEND
def test_of_a_sure_and_right_student_little_is_left(backend, device, generator):
    """The label's gradient is q - 1, which rounding q to 16 bits before would lose."""
    x = sample("logits", (4, 1000), generator, torch.float32)
    x[:, 5] = torch.tensor([8.0, 10.0, 12.0, 14.0])
    x = x.bfloat16()
    labels = torch.full((4,), 5)
    truth, (expected, _) = truth_of(x, x, labels, "kl", {})
    ours = x.to(device, copy=True).requires_grad_()
    loss = kullback.divergence(ours, x.to(device), labels=labels.to(device), reduction="sum")
    assert relative_error(loss, truth.sum()) < 1e-5
    (mine,) = torch.autograd.grad(loss, ours)
    assert relative_error(mine[:, 5].cpu(), expected[:, 5]) < gradient(torch.bfloat16)


@EVERY_BACKEND
@pytest.mark.parametrize("label_weight", [0.3, 3e-3])
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jeffreys", "chi2", "jensen_shannon"])
@SMOOTHED
def test_a_likely_label_of_a_close_row(backend, device, generator, kind, label_weight, smoothing):
    """Its own gradient, where the row's are written by powers of log-ratios: q is much of it."""
    token, vocab = 60, 6152
    likely = {token: 9.0}
    rows = samples.batch(
        generator,
        vocab,
        torch.bfloat16,
        close=at(apart(0.05), x=likely, y=likely),
        nearer=at(apart(0.02), x=likely, y=likely),
        label_apart=at(apart(0.05), x={token: 9.125}, y=likely),
        label_far=at(apart(0.05), x={token: 5.75}, y={token: 5.25}),
    )
    labels = torch.full((len(rows.x),), token)
    weights = {"label_weight": label_weight, "z_weight": 1e-5, "label_smoothing": smoothing}
    truth, (expected, _) = truth_of(rows.x, rows.y, labels, kind, {"divergence_weight": 1.0, **weights})
    x = rows.x.to(device, copy=True).requires_grad_()
    options = {**weights, **kinds.parameters(kind)}
    loss = kullback.divergence(x, rows.y.to(device), kind, labels=labels.to(device), reduction="sum", **options)
    (mine,) = torch.autograd.grad(loss, x)
    assert relative_error(loss, truth.sum()) < LOSS
    for row in range(len(rows.x)):
        assert relative_error(mine[row, token].cpu(), expected[row, token]) < gradient(torch.bfloat16)


@pytest.mark.parametrize("backend", ["emulated"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "vocab", "dtype"),
    [
        ("kl", 13341, torch.bfloat16),
        ("kl", 13344, torch.bfloat16),
        ("jensen_shannon", 9001, torch.bfloat16),
        ("total_variation", 9001, torch.float32),
    ],
)
@SMOOTHED
def test_rows_on_chip(backend, generator, monkeypatch, kind, vocab, dtype, smoothing):
    """Labels of each block of a cluster, and of ends outside vectors."""
    emulation.on_chip(monkeypatch)
    rows, labels = rows_of(generator, vocab, dtype)
    weights = WEIGHTS | {"label_smoothing": smoothing}
    for step in (0, 1201, 4001):
        moved = torch.where(labels < 0, labels, (labels + step) % vocab)
        counts = rows.weight(dead=0.0) != 0
        truth, (expected, _) = truth_of(rows.x[counts], rows.y[counts], moved[counts], kind, weights)
        x = rows.x.clone().requires_grad_()
        loss = kullback.divergence(
            x, rows.y, kind, labels=moved, row_weight=counts, reduction="sum", **weights, **kinds.parameters(kind)
        )
        assert relative_error(loss, truth.sum()) < LOSS
        (mine,) = torch.autograd.grad(loss, x)
        assert relative_error(mine[counts], expected) < (FLOAT_GRADIENT if dtype == torch.float32 else BF16_GRADIENT)


@pytest.mark.parametrize("backend", ["emulated"], indirect=True)
def test_a_smoothed_label_of_a_sure_row_on_chip(backend, generator, monkeypatch):
    """Gradients of tokens of much mass are written again. Smoothing shows in those that have less than the label."""
    emulation.on_chip(monkeypatch)
    vocab, rows = 13344, 6
    x, y = (sample("logits", (rows, vocab), generator, torch.float32) for _ in range(2))
    x = y + 0.7 * (x - y)
    x[:, 5] = y[:, 5] = torch.linspace(12, 22, rows)
    x[:, 9] = y[:, 9] = x[:, 5] - 8
    x, y, labels = x.bfloat16(), y.bfloat16(), torch.full((rows,), 5)
    weights = {"divergence_weight": 1.0, "label_weight": 1.0, "label_smoothing": 0.9}
    truth, (expected, _) = truth_of(x, y, labels, "kl", weights)
    ours = x.clone().requires_grad_()
    loss = kullback.divergence(ours, y, labels=labels, reduction="sum", **weights)
    assert relative_error(loss, truth.sum()) < LOSS
    (mine,) = torch.autograd.grad(loss, ours)
    assert relative_error(mine[:, 9], expected[:, 9]) < gradient(torch.bfloat16)


@EVERY_BACKEND
@pytest.mark.parametrize("inplace", [False, True])
@SMOOTHED
def test_temperature_scale_cap_padding_and_the_logits_place(backend, device, generator, inplace, smoothing):
    x, y = (sample("logits", (6, 70), generator, torch.float32) for _ in range(2))
    labels = torch.tensor([0, 60, 30, -100, 5, 17])
    leaf = x.double().requires_grad_()
    counted = 3 * torch.tanh(1.5 * leaf[:, :61] / 3)
    losses = oracle.divergence(counted / 2, y[:, :61].double(), "kl")
    truth = oracle.labelled(losses, counted, labels, 0.7, 0.3, 1e-3, smoothing, 2.0).sum()
    ours = x.to(device, copy=True).requires_grad_()
    loss = kullback.divergence(
        ours * 1.0 if inplace else ours,
        y.to(device),
        labels=labels.to(device),
        **WEIGHTS,
        label_smoothing=smoothing,
        temperature=2.0,
        target_temperature=1.0,
        logit_scale=1.5,
        target_logit_scale=1.0,
        softcap=3.0,
        valid_vocab=61,
        reduction="sum",
        inplace=inplace,
    )
    assert relative_error(loss, truth) < 3e-6
    (mine,) = torch.autograd.grad(loss, ours)
    assert relative_error(mine.cpu(), torch.autograd.grad(truth, leaf)[0]) < 3e-6


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("form", "target_form"), [("logits", "probs"), ("log_probs", "log_probs"), ("probs", "logits")]
)
def test_forms(backend, device, generator, form, target_form):
    x, y = (sample(f, (5, 40), generator, torch.float32) for f in (form, target_form))
    labels = torch.tensor([0, 39, 30, -100, 5])
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0])
    leaf = x.double().requires_grad_()
    log_q = {"logits": leaf.log_softmax(-1), "log_probs": leaf, "probs": leaf.log()}[form]
    own = torch.where(labels < 0, 0.0, -log_q.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1))
    truth = (weight * (oracle.divergence(leaf, y, "kl", form, target_form) + 0.4 * own)).sum() / weight.sum()
    ours = x.to(device, copy=True).requires_grad_()
    loss = kullback.divergence(
        ours,
        y.to(device),
        form=form,
        target_form=target_form,
        labels=labels.to(device),
        label_weight=0.4,
        row_weight=weight.to(device),
    )
    assert relative_error(loss, truth) < 3e-6
    (mine,) = torch.autograd.grad(loss, ours)
    assert relative_error(mine.cpu(), torch.autograd.grad(truth, leaf)[0]) < 3e-6


@EVERY_BACKEND
@SMOOTHED
def test_without_a_target_it_is_torchs_cross_entropy(backend, device, generator, smoothing):
    x = sample("logits", (3, 4, 77), generator, torch.float32).to(device)
    labels = torch.randint(0, 77, (3, 4), generator=generator).to(device)
    labels[1, 2] = -100
    for temperature in (1.0, 2.0):
        leaf, ours = x.double().requires_grad_(), x.clone().requires_grad_()
        logits = leaf.flatten(0, 1) / temperature
        truth = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)
        options = {"labels": labels, "temperature": temperature, "label_smoothing": smoothing}
        rows = kullback.divergence(x, None, **options, reduction="none")
        assert relative_error(rows.flatten(), truth) < 1e-6
        total = kullback.divergence(ours, None, **options)
        truth = truth.sum() / truth.numel()
        assert relative_error(total, truth) < 1e-6
        mine, theirs = torch.autograd.grad(total, ours), torch.autograd.grad(truth, leaf)
        assert relative_error(mine[0], theirs[0]) < 3e-6
        assert mine[0][1, 2].count_nonzero() == 0


@EVERY_BACKEND
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("has_weights", [False, True])
@SMOOTHED
def test_rows_without_a_label_are_not_read(backend, device, generator, reduction, has_weights, smoothing):
    """As torch's cross-entropy has it: padding may be NaN."""
    x = torch.randn(4, 90, generator=generator)
    x[1], labels = torch.nan, torch.tensor([5, -100, 89, 0])
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]) if has_weights else torch.ones(4)
    rows = weight * F.cross_entropy(x.double(), labels, reduction="none", label_smoothing=smoothing)
    expected = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / weight.sum()}[reduction]
    ours, options = x.to(device).requires_grad_(), {"labels": labels.to(device), "reduction": reduction}
    if has_weights:
        options["row_weight"] = weight.to(device)
    loss = kullback.divergence(ours, None, **options, label_smoothing=smoothing)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), ours)
    assert gradient.isfinite().all()
    assert gradient[1].count_nonzero() == 0
    hidden, head = x.to(device).requires_grad_(), torch.eye(90, device=device, requires_grad=True)
    linear = kullback.linear_divergence(hidden, head, None, **options, label_smoothing=smoothing)
    torch.testing.assert_close(linear.double().cpu(), expected, rtol=1e-6, atol=0)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(linear.sum(), (hidden, head)))


@SMOOTHED
def test_second_derivatives_without_a_target(device, generator, smoothing):
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    labels = torch.tensor([1, -100, 7], device=device)
    assert torch.autograd.gradgradcheck(
        lambda x: kullback.divergence(x, None, labels=labels, z_weight=0.1, label_smoothing=smoothing), (x,)
    )


@pytest.mark.parametrize("weight", [None, torch.ones(2)])
def test_losses_of_rows_have_the_dtype_of_a_loss(weight):
    x, y, labels = torch.randn(2, 7), torch.randn(2, 7), torch.tensor([1, 2])
    options = {"labels": labels, "row_weight": weight, "reduction": "none"}
    values, ids = y.log_softmax(-1).topk(2)
    for loss in (
        kullback.topk_divergence(x, values, ids, **options),
        kullback.divergence(x.softmax(-1), y.softmax(-1), form="probs", **options),
        kullback.divergence(x, None, z_weight=0.1, **options),
        kullback.divergence(x, None, label_weight=0.3, **options),
    ):
        assert loss.dtype == torch.float32


@EVERY_BACKEND
def test_z_loss_alone_and_without_labels(backend, device, generator):
    x, y = (sample("logits", (4, 90), generator, torch.float32) for _ in range(2))
    leaf = x.double().requires_grad_()
    truth = oracle.labelled(oracle.divergence(leaf, y, "kl"), leaf, None, z=0.01).sum()
    ours = x.to(device, copy=True).requires_grad_()
    loss = kullback.divergence(ours, y.to(device), z_weight=0.01, reduction="sum")
    assert relative_error(loss, truth) < 1e-6
    (mine,) = torch.autograd.grad(loss, ours)
    assert relative_error(mine.cpu(), torch.autograd.grad(truth, leaf)[0]) < 3e-6


@EVERY_BACKEND
def test_a_masked_label_costs_infinitely_much(backend, device):
    x, y = torch.zeros(2, 50), torch.zeros(2, 50)
    x[0, 7] = y[0, 7] = -math.inf
    losses = kullback.divergence(
        x.to(device), y.to(device), labels=torch.tensor([7, 7], device=device), reduction="none"
    )
    assert losses.isinf().tolist() == [True, False]
    for target in (y.to(device), None):
        smoothed = kullback.divergence(
            x.to(device), target, labels=torch.tensor([7, 7], device=device), label_smoothing=0.1, reduction="none"
        )
        assert smoothed[0] == math.inf
        assert smoothed[1].isfinite()
    alone = kullback.divergence(
        x.to(device), None, labels=torch.tensor([7, 7], device=device), label_weight=0.0, z_weight=0.1
    )
    assert alone.isfinite()


@pytest.mark.parametrize("form", ["probs", "log_probs"])
def test_a_label_without_mass_costs_infinitely_much_or_counts_nothing(backend, device, form):
    p = torch.tensor([[0.5, 0.5, 0.0]], device=device)
    given = {"form": form, "labels": torch.tensor([2], device=device)}
    x = p if form == "probs" else p.log()
    for weight in (0.5, 1.0, 3.0):
        assert kullback.divergence(x, None, label_weight=weight, **given) == math.inf
    assert kullback.divergence(x, None, label_weight=0.0, label_smoothing=0.1, **given) == 0
    assert kullback.divergence(x, x, label_weight=0.0, **given) == 0
    leaf, entries = x.clone().requires_grad_(), (torch.zeros(1, 1, device=device), given["labels"].unsqueeze(-1))
    nothing = kullback.topk_divergence(leaf, *entries, label_weight=0.0, divergence_weight=0.0, **given)
    assert torch.autograd.grad(nothing, leaf)[0].count_nonzero() == 0


@EVERY_BACKEND
def test_smoothed_labels_of_no_rows(backend, device):
    x = torch.randn(2, 9, device=device)
    labels = torch.full((2,), -100, device=device)
    assert kullback.divergence(x, None, labels=labels, softcap=1.0, label_smoothing=0.2) == 0


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(("torch", "c"), (torch.float32, torch.float64)),
        ("emulated", torch.float32),  # nothing else may run there, and CUDA's kernels have no float64
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.float64)),
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_divergence_whose_derivative_underflows(backend, device, reduction, dtype):
    """What labels add to a row's gradient is found by dividing by it."""
    far_apart = 200.0 if dtype == torch.float32 else 2000.0
    logits = torch.tensor([[far_apart, 0.0, -1.0]], dtype=dtype, device=device)
    for options in ({"labels": [2]}, {"labels": [0]}, {"z_weight": 0.1}, {"labels": [1], "z_weight": 0.1}):
        labels = torch.tensor(options["labels"], device=device) if "labels" in options else None
        x = logits.clone().requires_grad_()
        z_weight = options.get("z_weight", 0.0)
        loss = kullback.divergence(
            x, logits[:, [1, 0, 2]], "alpha", labels=labels, z_weight=z_weight, reduction=reduction
        )
        expected = 2 * z_weight * x.logsumexp(-1) * x.softmax(-1)
        if labels is not None:
            expected = expected + x.softmax(-1) - F.one_hot(labels, 3)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], expected.detach(), rtol=1e-6, atol=1e-7)


@EVERY_BACKEND
def test_what_is_not_divided_keeps_its_derivative(backend, device):
    """A row without a label has the divergence's gradient, however small that is; weights may be small, too."""
    x = torch.tensor([[100.0, 0.0, -1.0]] * 2, device=device).requires_grad_()
    y, labels = x.detach()[:, [1, 0, 2]], torch.tensor([-100, 2], device=device)
    loss = lambda rows, **options: kullback.divergence(x, y, "alpha", reduction=rows, **options)
    (alone,) = torch.autograd.grad(loss("sum"), x)
    (beside,) = torch.autograd.grad(loss("sum", labels=labels), x)
    torch.testing.assert_close(beside[0], alone[0], rtol=1e-5, atol=0.0)
    weight = torch.tensor([1.0, 1e-15], device=device)
    (light,) = torch.autograd.grad(loss("sum", labels=labels, row_weight=weight), x)
    torch.testing.assert_close(light[1] / 1e-15, torch.tensor([1.0, 0.0, -1.0], device=device), rtol=1e-5, atol=1e-5)


@EVERY_BACKEND
@pytest.mark.parametrize("offset", [1e3, 1e6, 1e8])
def test_a_smoothed_label_far_from_zero_and_tempered(backend, device, offset):
    x = torch.full((1, 7), offset, device=device)
    loss = kullback.divergence(x, None, labels=torch.tensor([0], device=device), label_smoothing=0.1, temperature=0.7)
    assert loss.item() == pytest.approx(math.log(7), rel=1e-6)


@EVERY_BACKEND
def test_smoothed_labels_far_from_zero_and_masked(backend, device, generator):
    """What logits have in common is no loss; of a smoothed label a masked token has a part."""
    x, y = (torch.randn(4, 3001, generator=generator) for _ in range(2))
    x += torch.tensor([1000.0, -1000.0, 0.0, 0.0]).unsqueeze(-1)
    labels = torch.tensor([0, 3000, 7, -100])
    x[2:, 9] = y[2:, 9] = -math.inf
    lowest = torch.full((1, 3001), -2e30)
    lowest[0, :1500] = -3e30
    losses = kullback.divergence(
        x.to(device), y.to(device), labels=labels.to(device), label_smoothing=0.3, reduction="none"
    ).cpu()
    kl = oracle.divergence(x[:2], y[:2], "kl")
    assert relative_error(losses[:2], oracle.labelled(kl, x[:2], labels[:2], smoothing=0.3)) < LOSS
    assert losses[2] == math.inf
    assert losses[3].isfinite()
    far = kullback.divergence(
        lowest.to(device), lowest.to(device), labels=torch.tensor([2000], device=device), label_smoothing=0.3
    )
    assert relative_error(far, oracle.labelled(torch.zeros(1), lowest, torch.tensor([2000]), smoothing=0.3)) < LOSS
    alone = [x.to(device), None]
    losses = kullback.divergence(*alone, labels=labels.to(device), label_smoothing=0.3, reduction="none").cpu()
    truth = F.cross_entropy(x[:2].double(), labels[:2], label_smoothing=0.3, reduction="none")
    assert relative_error(losses[:2], truth) < LOSS
    assert losses[2:].tolist() == [math.inf, 0]


@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "renyi"])
def test_second_derivatives_and_transforms(generator, kind):
    x, y = (sample("logits", (3, 6), generator, torch.float64) for _ in range(2))
    labels = torch.tensor([0, 5, -100])
    options = {"labels": labels, **WEIGHTS, "z_weight": 0.1, **kinds.parameters(kind)}

    def loss(x, y):
        return kullback.divergence(x, y, kind, reduction="sum", **options)

    leaves = [t.clone().requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)
    by_autograd = torch.autograd.grad(loss(*leaves), leaves)
    by_func = torch.func.grad(loss, argnums=(0, 1))(x, y)
    for a, b in zip(by_autograd, by_func, strict=True):
        torch.testing.assert_close(a, b)
    each = torch.func.vmap(lambda x, y, label: kullback.divergence(x, y, kind, **{**options, "labels": label}))(
        x, y, labels
    )
    torch.testing.assert_close(each, kullback.divergence(x, y, kind, reduction="none", **options))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled(generator):
    x, y = (sample("logits", (4, 64), generator, torch.float32) for _ in range(2))
    labels = torch.tensor([0, 63, -100, 5])

    def loss(x, y, labels):
        return kullback.divergence(x, y, labels=labels, **WEIGHTS)

    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = torch.compile(loss, fullgraph=True, backend="aot_eager")(ours, y, labels), loss(theirs, y, labels)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(*(torch.autograd.grad(value, leaf)[0] for value, leaf in ((a, ours), (b, theirs))))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"labels": torch.tensor([0, 9])}, ValueError, "labels must lie from 0 to 7, or be -100; got 9"),
        ({"labels": torch.tensor([0, -1])}, ValueError, "labels must lie from 0 to 7, or be -100; got -1"),
        ({"labels": torch.tensor([0.0, 1.0])}, TypeError, "labels must be of an integer dtype"),
        ({"labels": torch.tensor([0])}, ValueError, r"labels must have the rows' shape \[2\]; got \[1\]"),
        ({"label_weight": 0.5}, ValueError, "label_weight goes with labels; got 0.5 and none"),
        ({"label_smoothing": 0.5}, ValueError, "label_smoothing goes with labels; got 0.5 and none"),
        ({"labels": torch.tensor([0, 1]), "label_smoothing": 1.0}, ValueError, "label_smoothing must lie from 0 to"),
        ({"z_weight": math.nan}, ValueError, "z_weight must be finite"),
        ({"divergence_weight": 1e-30}, ValueError, "divergence_weight must be 0, or from 1e-18"),
        ({"labels": torch.tensor([0, 1]), "divergence_weight": 0, "inplace": True}, ValueError, "inplace=True needs"),
        ({"labels": torch.tensor([0, 1]), "divergence_weight": 0, "kind": "nope"}, ValueError, "kind must be one of"),
        ({"z_weight": 0.1, "form": "probs"}, ValueError, "z_weight is of a log-sum-exp of logits, and form 'probs'"),
        ({"divergence_weight": 0}, ValueError, "target or labels must be given"),
    ],
)
def test_errors(options, error, message):
    x = torch.zeros(2, 8)
    with pytest.raises(error, match=message):
        kullback.divergence(x, x, **options)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda loss, x, labels: torch.vmap(loss)(x, labels),
        lambda loss, x, labels: torch.func.grad(loss)(x, labels),
        lambda loss, x, labels: torch.vmap(torch.func.grad(loss))(x, labels),
    ],
    ids=["vmap", "grad", "grad in vmap"],
)
def test_transforms_see_labels_that_are_no_tokens(transformed):
    def loss(x, labels):
        return kullback.divergence(x, torch.zeros_like(x), labels=labels)

    x, labels = torch.randn(3, 2, 8), torch.tensor([[0, 7], [1, -100], [2, 3]])
    assert transformed(loss, x, labels).isfinite().all()
    traced = make_fx(lambda x, labels: transformed(loss, x, labels))(x, labels)
    torch.testing.assert_close(traced(x, labels), transformed(loss, x, labels))
    labels[2, 1] = 8
    with pytest.raises(ValueError, match=r"labels must lie from 0 to 7, or be -100; got 8"):
        transformed(loss, x, labels)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero", "support"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SMOOTHED
def test_of_a_teacher_known_at_some_tokens(backend, device, generator, tail, dtype, smoothing):
    """Labels among the ids and not; the divergence is what it is without them."""
    x, y = (sample("logits", (5, 200), generator, dtype) for _ in range(2))
    log_p, ids = y.float().log_softmax(-1).topk(8)
    labels = torch.stack([ids[0, 0], torch.tensor(199), torch.tensor(-100), ids[3, 7], torch.tensor(3)])
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0])
    leaf = x.double().requires_grad_()
    alone = kullback.topk_divergence(leaf, log_p.double(), ids, tail=tail, reduction="none")
    truth = (weight * oracle.labelled(alone, leaf, labels, 0.7, 0.3, 1e-3, smoothing)).sum()
    ours = x.to(device, copy=True).requires_grad_()
    given = [t.to(device) for t in (log_p, ids)]
    options = {"labels": labels.to(device), "row_weight": weight.to(device), "reduction": "sum", "tail": tail}
    options["label_smoothing"] = smoothing
    loss = kullback.topk_divergence(ours, *given, **options, **WEIGHTS)
    assert relative_error(loss, truth) < 3e-6
    (mine,) = torch.autograd.grad(loss, ours)
    (expected,) = torch.autograd.grad(truth, leaf)
    assert relative_error(mine.cpu(), expected) < gradient(dtype)
    # and from hidden states, of which these are the product
    hidden, head = torch.eye(200, dtype=dtype, device=device)[:5], torch.zeros(200, 200, dtype=dtype, device=device)
    head[:, :5] = ours.detach().T
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    linear = kullback.linear_divergence(hidden, head, given[0], target_indices=given[1], **options, **WEIGHTS)
    assert relative_error(linear, truth) < 3e-6
    assert relative_error(torch.autograd.grad(linear, head)[0][:, :5].T.cpu(), expected) < gradient(dtype)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero", "support"])
@pytest.mark.parametrize("weights", [WEIGHTS, {"z_weight": 0.1}, {"divergence_weight": 0.5}])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_teacher_that_learns_beside_labels(backend, device, generator, tail, weights, reduction):
    """From hidden states its entries have the gradient that their divergence gives them, as often as it counts."""
    hidden, head = (torch.randn(n, 6, generator=generator) for n in (5, 40))
    log_p, ids = torch.randn(5, 40, generator=generator).log_softmax(-1).topk(4)
    upstream = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0]) if reduction == "none" else torch.ones(5)
    entries = log_p.double().requires_grad_()
    alone = kullback.topk_divergence(hidden.double() @ head.double().T, entries, ids, tail=tail, reduction="none")
    (expected,) = torch.autograd.grad(alone, entries, upstream.double() * weights.get("divergence_weight", 1.0))
    ours = log_p.to(device, copy=True).requires_grad_()
    labels = torch.stack([ids[0, 0], torch.tensor(39), torch.tensor(-100), ids[3, 3], torch.tensor(3)])
    has_labels = "label_weight" in weights
    loss = kullback.linear_divergence(
        *(t.to(device).requires_grad_() for t in (hidden, head)),
        ours,
        target_indices=ids.to(device),
        tail=tail,
        labels=labels.to(device) if has_labels else None,
        reduction=reduction,
        chunk_rows=2,
        **weights,
    )
    (mine,) = torch.autograd.grad(loss, ours, upstream.to(device) if reduction == "none" else None)
    assert (mine.cpu() - expected).norm() < 3e-6 * max(expected.norm(), 1)


@pytest.mark.parametrize(("vocab", "k"), [(300, 5), (6, 5)])
def test_a_label_leaves_a_teachers_tail_as_it_is(backend, device, generator, vocab, k):
    """Of any kind: among the ids, in the tail, a part of it that has no mass, and all of it. Traced or not."""
    x = torch.randn(5, vocab, generator=generator)
    log_p, ids = (x + 0.3 * torch.randn(5, vocab, generator=generator)).log_softmax(-1).topk(k)
    outside = torch.ones(5, vocab, dtype=torch.bool).scatter(-1, ids, False)
    labels = outside.int().argmax(-1)
    labels[0], labels[1] = ids[0, 1], -100
    x[2, labels[2]] = -30.0
    x[4, labels[4]] = 4.0
    given = [t.to(device) for t in (log_p, ids)]
    barely = {"labels": labels.to(device), "label_weight": 1e-12, "reduction": "none"}
    for kind in KINDS:
        params = kinds.parameters(kind)
        leaf = x.double().requires_grad_()
        expected = kullback.topk_divergence(leaf, log_p.double(), ids, kind, reduction="none", **params)
        ours = x.to(device, copy=True).requires_grad_()
        losses = kullback.topk_divergence(ours, *given, kind, **barely, **params)
        assert relative_error(losses, expected) < 1e-5, kind
        theirs = torch.autograd.grad(expected.sum(), leaf)[0]
        assert relative_error(torch.autograd.grad(losses.sum(), ours)[0], theirs) < 1e-5, kind
        traced = torch.func.grad(
            lambda x, kind=kind, params=params: kullback.topk_divergence(x, *given, kind, **barely, **params).sum()
        )
        assert relative_error(traced(ours.detach()), theirs) < 1e-5, kind


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero", "support"])
@pytest.mark.parametrize("form", ["logits", "log_probs"])
def test_a_loss_of_each_row_beside_a_teachers_tokens(backend, device, generator, tail, form):
    """Of the dtype that it has without labels; its gradient, that from hidden states, too, is that of the sum."""
    x = sample(form, (4, 30), generator, torch.float32)
    log_p, ids = torch.randn(4, 30, generator=generator).log_softmax(-1).topk(3)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64, device=device)
    options = {"labels": torch.tensor([0, 29, -100, 5], device=device), "tail": tail, "row_weight": weight}
    options |= WEIGHTS if form == "logits" else {"label_weight": 0.3}
    given = [t.to(device) for t in (log_p, ids)]
    ours = x.to(device, copy=True).requires_grad_()
    losses, total = (
        kullback.topk_divergence(ours, *given, form=form, reduction=reduction, **options)
        for reduction in ("none", "sum")
    )
    assert losses.dtype == total.dtype == torch.float32
    assert relative_error(losses.sum(), total) < 1e-6
    (expected,) = torch.autograd.grad(total, ours)
    assert relative_error(torch.autograd.grad(losses.sum(), ours)[0], expected) < 1e-6
    if form == "logits":
        leaf, head = ours.detach().requires_grad_(), torch.eye(30, device=device)
        linear = kullback.linear_divergence(
            leaf, head, given[0], target_indices=ids.to(device), reduction="none", **options
        )
        assert relative_error(torch.autograd.grad(linear.sum(), leaf)[0], expected) < 1e-6


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero", "support"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_teacher_that_counts_nothing_is_not_read(backend, device, generator, tail, reduction):
    """Even where its divergence is infinite; traced, too."""
    x = sample("logits", (3, 30), generator, torch.float32)
    log_p, ids = torch.randn(3, 30, generator=generator).log_softmax(-1).topk(3)
    labels, leaf = torch.tensor([0, 29, -100]), x.double().requires_grad_()
    truth = oracle.labelled(torch.zeros(3), leaf, labels, z=0.1).sum()
    given = [log_p.to(device), ids.to(device), "reverse_kl"]
    options = {"labels": labels.to(device), "divergence_weight": 0.0, "z_weight": 0.1}
    loss = lambda x: kullback.topk_divergence(x, *given, tail=tail, reduction=reduction, **options).sum()
    ours = x.to(device, copy=True).requires_grad_()
    assert relative_error(loss(ours), truth) < 1e-6
    (expected,) = torch.autograd.grad(truth, leaf)
    assert relative_error(torch.autograd.grad(loss(ours), ours)[0], expected) < 1e-6
    assert relative_error(torch.func.grad(loss)(ours.detach()), expected) < 1e-6


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("teacher", ["hidden", "logits", "none"])
@SMOOTHED
def test_from_hidden_states(backend, device, generator, teacher, reduction, smoothing):
    hidden, other = (torch.randn(11, 16, generator=generator).to(device) for _ in range(2))
    head, its_head = (torch.randn(90, 16, generator=generator).to(device) for _ in range(2))
    labels = torch.randint(0, 90, (11,), generator=generator).to(device)
    labels[4] = -100
    target, target_head = {"hidden": (other, its_head), "logits": (other @ its_head.T, None), "none": (None, None)}[
        teacher
    ]
    leaves = [t.double().requires_grad_() for t in (hidden, head)]
    x, y = F.linear(*leaves), (other @ its_head.T).double()
    losses = oracle.divergence(x, y, "kl") if target is not None else torch.zeros(11, dtype=torch.float64)
    truth = oracle.labelled(losses.to(device), x, labels, 0.7, 0.3, 1e-3, smoothing).sum()
    options = {**WEIGHTS, "label_smoothing": smoothing}
    ours = [t.clone().requires_grad_() for t in (hidden, head)]
    loss = kullback.linear_divergence(
        *ours, target, target_head, labels=labels, reduction=reduction, chunk_rows=4, **options
    ).sum()
    assert relative_error(loss, truth) < 3e-6
    for a, b in zip(torch.autograd.grad(loss, ours), torch.autograd.grad(truth, leaves), strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("is_linear", [False, True])
def test_smoothed_labels_beside_a_teacher_known_at_some_tokens(is_linear, backend, device, generator):
    """With a temperature, a softcap, padding, and rows that do not count and hold NaN."""
    x = torch.randn(4, 45, generator=generator)
    log_p, ids = torch.randn(4, 40, generator=generator).log_softmax(-1).topk(3)
    labels, weight = torch.tensor([ids[0, 1], 39, 7, -100]), torch.tensor([1.0, 2.0, 0.0, 1.0])
    options = {"temperature": 2.0, "softcap": 1.5, "valid_vocab": 40, "reduction": "sum"}
    leaf = x.double().requires_grad_()
    counted = 1.5 * torch.tanh(leaf[:, :40] / 1.5)
    losses = kullback.topk_divergence(leaf, log_p.double(), ids, **{**options, "reduction": "none"})
    truth = (weight * oracle.labelled(losses, counted, labels, 1.0, 0.3, 0.0, 0.2, 2.0)).sum()
    (expected,) = torch.autograd.grad(truth, leaf)
    x[2] = torch.nan
    ours = x.to(device).requires_grad_()
    options |= {
        "labels": labels.to(device),
        "label_weight": 0.3,
        "label_smoothing": 0.2,
        "row_weight": weight.to(device),
    }
    if is_linear:
        head = torch.eye(45, device=device)
        loss = kullback.linear_divergence(ours, head, log_p.to(device), target_indices=ids.to(device), **options)
    else:
        loss = kullback.topk_divergence(ours, log_p.to(device), ids.to(device), **options)
    assert relative_error(loss, truth) < 3e-6
    (mine,) = torch.autograd.grad(loss, ours)
    kept = torch.tensor([0, 1, 3])
    assert relative_error(mine.cpu()[kept], expected[kept]) < 3e-6
    assert mine[2].count_nonzero() == 0


@SMOOTHED
def test_logits_far_from_zero_beside_a_teacher_known_at_some_tokens(backend, device, generator, smoothing):
    x = torch.randn(5, 300, generator=generator) * 2 + 1e4
    log_p, ids = torch.randn(5, 300, generator=generator).log_softmax(-1).topk(3)
    labels = x.argmax(-1)
    options = {
        "labels": labels.to(device),
        "divergence_weight": 1e-9,
        "label_smoothing": smoothing,
        "reduction": "none",
    }
    truth = F.cross_entropy(x.double(), labels, label_smoothing=smoothing, reduction="none")
    losses = kullback.topk_divergence(x.to(device), log_p.to(device), ids.to(device), **options)
    assert relative_error(losses, truth) < 3e-6


def test_smoothing_over_tokens_that_are_masked_by_the_lowest_number(backend, device, generator):
    """Beside a top-k teacher: their sum is no number that float32 has, and their mean is."""
    x = torch.randn(3, 900, generator=generator)
    x[:, 100:] = torch.finfo(torch.float32).min
    log_p, ids = torch.randn(3, 90, generator=generator).log_softmax(-1).topk(5)
    labels = torch.tensor([1, 7, 50])
    options = {"labels": labels.to(device), "label_smoothing": 0.1, "reduction": "none"}
    losses = kullback.topk_divergence(x.to(device), log_p.to(device), ids.to(device), **options)
    truth = F.cross_entropy(x.double(), labels, label_smoothing=0.1, reduction="none")
    assert relative_error(losses, truth) < LOSS


@pytest.mark.parametrize("backend", ["emulated"], indirect=True)
@SMOOTHED
def test_a_row_of_several_warps_keeps_its_label(backend, generator, smoothing):
    """Until all have read it: rows 1 and 4 are one block's, and gradients of the one take longer."""
    y = 1.5 * torch.randn(6, 1300, generator=generator)
    x = y + 0.2 * torch.randn(6, 1300, generator=generator)
    x[4] = y[4] + 0.02 * torch.randn(1300, generator=generator)
    x[4, 650], y[4, 650] = 12, 11.5
    labels = torch.tensor([0, 1299, 3, 4, 650, 6])
    leaf = x.double().requires_grad_()
    capped = [20 * torch.tanh(t / 20) for t in (leaf, y.double())]
    losses = oracle.divergence(*capped, "kl", temperature=1.5)
    truth = oracle.labelled(losses, capped[0], labels, smoothing=smoothing, temperature=1.5).sum()
    ours = x.clone().requires_grad_()
    options = {"temperature": 1.5, "softcap": 20.0, "target_softcap": 20.0, "label_smoothing": smoothing}
    loss = kullback.divergence(ours, y, labels=labels, reduction="sum", **options)
    (mine,), (expected,) = torch.autograd.grad(loss, ours), torch.autograd.grad(truth, leaf)
    assert relative_error(mine, expected) < 1e-5


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_second_derivatives_of_rows_that_do_not_count(garbage, device, generator):
    x = torch.randn(4, 30, generator=generator)
    log_p, ids = (t.to(device) for t in torch.randn(4, 30, generator=generator).log_softmax(-1).topk(3))
    x[2] = garbage
    weight, labels = torch.tensor([1.0, 1.0, 0.0, 2.0], device=device), torch.tensor([1, 2, 3, 4], device=device)
    for loss in (
        lambda x: kullback.topk_divergence(x, log_p, ids, row_weight=weight, reduction="sum"),
        lambda x: kullback.divergence(x, None, labels=labels, row_weight=weight, reduction="sum"),
    ):
        leaf = x.to(device).requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        assert second[2].count_nonzero() == 0
        assert second.isfinite().all()


def test_modules_take_labels(generator):
    x, y = (sample("logits", (4, 30), generator, torch.float32) for _ in range(2))
    labels = torch.tensor([0, 29, -100, 5])
    loss = kullback.DivergenceLoss("kl", label_weight=0.5, z_weight=1e-3)
    assert loss(x, y, labels=labels) == kullback.divergence(x, y, labels=labels, label_weight=0.5, z_weight=1e-3)
    hidden, head = torch.randn(4, 8), torch.randn(30, 8)
    linear = kullback.LinearDivergenceLoss("kl", label_weight=0.5)
    expected = kullback.linear_divergence(hidden, head, y, labels=labels, label_weight=0.5)
    assert linear(hidden, head, y, labels=labels) == expected


@pytest.mark.parametrize("form", ["probs", "log_probs"])
def test_masses_without_a_target_and_rows_that_do_not_count(form, backend, device, generator):
    """Smoothed or not; NaN in a row of weight 0 reaches no gradient."""
    x = sample(form, (3, 9), generator, torch.float64)
    labels = torch.tensor([0, -100, 5])
    for smoothing in (0.0, 0.2):
        leaf = x.clone().requires_grad_()
        log_q = leaf if form == "log_probs" else leaf.log()
        own = log_q.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        truth = -torch.where(labels < 0, 0.0, (1 - smoothing) * own + smoothing * log_q.mean(-1)).sum()
        ours = x.to(device, copy=True).requires_grad_()
        options = {"form": form, "label_smoothing": smoothing, "reduction": "sum"}
        loss = kullback.divergence(ours, None, labels=labels.to(device), **options)
        assert relative_error(loss, truth) < 1e-6
        assert relative_error(torch.autograd.grad(loss, ours)[0].cpu(), torch.autograd.grad(truth, leaf)[0]) < 1e-6
        ours = x.to(device, copy=True)
        ours[2] = torch.nan
        ours.requires_grad_()
        weight = torch.tensor([1, 1, 0], device=device)
        loss = kullback.divergence(
            ours, x.to(device), target_form=form, labels=labels.to(device), row_weight=weight, **options
        )
        gradient = torch.autograd.grad(loss, ours)[0]
        assert gradient.isfinite().all()
        assert gradient[2].count_nonzero() == 0


@SMOOTHED
@pytest.mark.parametrize("form", ["probs", "log_probs"])
def test_labels_of_masses_beside_a_float64_target(backend, device, generator, form, smoothing):
    """All is float64 where anything is."""
    log_q, log_p = torch.randn(2, 4, 30, generator=generator).log_softmax(-1)
    x, y = (log_q.exp(), log_p.double().exp()) if form == "probs" else (log_q, log_p.double())
    given = {"form": form, "labels": torch.tensor([0, 3, -100, 29], device=device), "label_smoothing": smoothing}
    loss = kullback.divergence(x.to(device), y.to(device), **given)
    expected = kullback.divergence(x.double().to(device), y.to(device), **given)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)


def test_labels_beside_a_float64_target(backend, device, generator):
    """What float64 finds of the input is not to be spoiled by a label's logit in float32."""
    x, y = torch.randn(3, 9, generator=generator), torch.randn(3, 9, generator=generator, dtype=torch.float64)
    labels = torch.tensor([1, 8, -100])
    given = {"labels": labels.to(device), "softcap": 5.0, "temperature": 1.3, "reduction": "sum"}
    loss = kullback.divergence(x.to(device), y.to(device), **given, target_temperature=1.0)
    logits = 5 * torch.tanh(x.double() / 5) / 1.3
    expected = oracle.divergence(logits, y, "kl").sum()
    expected = expected + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert relative_error(loss, expected) < 1e-13


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_divergence_that_counts_nothing_changes_no_dtype(weight, generator):
    x, y = torch.randn(2, 3, 7, generator=generator)
    options = {"labels": torch.tensor([1, 2, -100]), "divergence_weight": weight}
    head = torch.randn(7, 7, generator=generator)
    assert kullback.divergence(x, y.double(), **options).dtype == torch.float64
    assert kullback.linear_divergence(x, head, y.double(), head.double(), **options).dtype == torch.float64
    assert kullback.divergence(x, y, **options).dtype == torch.float32
