"""CUDA kernels whose rows stay on chip, where there is no GPU: clusters, copy engine and barriers on a CPU."""

import math
from math import inf

import pytest
import torch

import kullback
from kullback.backends.cuda import cross_entropy, device, logits, plan, source
from kullback.cli import rows as model_rows
from tests import emulation, kinds, oracle, samples, sanitize
from tests.samples import apart, at, dead, equal, far, masked, peaked, spiked
from tests.tolerances import (
    BF16_CACHED,
    BF16_GRADIENT,
    FLOAT_GRADIENT,
    LOSS,
    gradient,
    relative_error,
    share_misrounded,
)

pytestmark = [pytest.mark.parametrize("backend", ["emulated"], indirect=True), pytest.mark.usefixtures("on_chip")]


@pytest.fixture
def on_chip(backend, monkeypatch, request):
    """Rows are on chip, unless a test that has both says otherwise."""
    if request.getfixturevalue("is_on_chip") if "is_on_chip" in request.fixturenames else True:
        emulation.on_chip(monkeypatch)


@pytest.mark.parametrize("mask", [-1e5, torch.finfo(torch.bfloat16).min, -inf])
@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl", "total_variation", "kl"])
def test_rows_of_several_tiles(backend, generator, kind, mask):
    """Ends outside vectors; masked on both sides, on one; close, and close but for some tokens."""
    some, few = slice(90, 200), slice(90, 110)
    hidden = masked(apart(1.0), both=some, to=mask)
    rows = samples.batch(
        generator,
        13341,
        torch.bfloat16,
        masked=hidden,
        masked_too=hidden,
        student_lacks=masked(apart(1.0), x=few, to=mask) if kind != "kl" else apart(1.0),
        teacher_lacks=masked(apart(1.0), y=few, to=mask) if kind != "kl" else apart(1.0),
        close=apart(0.02),
        spiked=spiked(0.02, 2.0, 61),
        dead=dead,
    )
    x, y = rows.x, rows.y
    weight = rows.weight(masked_too=2.0, student_lacks=0.5, close=3.0, dead=0.0)
    counts = weight != 0
    for temperature in (1.0, 1.7):
        a = x.double().requires_grad_()
        losses = oracle.divergence(
            a[counts], y[counts].double(), kind, temperature=temperature, **kinds.parameters(kind)
        )
        truth = (losses * weight[counts]).sum()
        (expected,) = torch.autograd.grad(truth, a)
        b = x.clone().requires_grad_()
        loss = kullback.divergence(
            b, y, kind, temperature=temperature, row_weight=weight, reduction="sum", **kinds.parameters(kind)
        )
        (ours,) = torch.autograd.grad(loss, b)
        assert relative_error(loss, truth) < LOSS
        assert ours[~counts].count_nonzero() == 0
        assert ours[rows.index("masked", "masked_too"), some].count_nonzero() == 0
        for row in counts.nonzero().flatten().tolist():
            assert relative_error(ours[row], expected[row]) < (BF16_GRADIENT if kind == "kl" else BF16_CACHED), (
                rows.names[row]
            )
        if kind in ("jensen_shannon", "skew_kl"):
            assert share_misrounded(ours, expected) < 1e-3


@pytest.mark.parametrize("first", [0, 1, 8])
def test_gradients_that_begin_elsewhere_than_their_rows(backend, generator, first):
    """Parts of longer rows, whose gradients lie side by side: the emulation stops at a vector that is not aligned."""
    rows = samples.batch(generator, 9001, torch.bfloat16, far=far(1.0), apart=apart(1.0), close=apart(0.02))
    x, y = (torch.nn.functional.pad(t, (first, 7))[:, first : first + 9001] for t in (rows.x, rows.y))
    leaf, a = x.detach().requires_grad_(), rows.x.double().requires_grad_()
    truth = oracle.divergence(a, rows.y.double(), "kl").sum()
    loss = kullback.divergence(leaf, y, reduction="sum")
    assert relative_error(loss, truth) < LOSS
    assert relative_error(torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(truth, a)[0]) < BF16_GRADIENT


@pytest.mark.parametrize("is_on_chip", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "total_variation"])
def test_rows_that_a_sample_tells_nothing_of(backend, generator, kind, dtype, is_on_chip):
    """Maxima are estimated from a few logits: another is far above them, or they are all masked."""
    all_but = lambda first, last: (
        lambda y, noise: masked(apart(1.0), both=slice(last, None))(
            *(masked(lambda a, b: (a, b), both=slice(0, first))(t, t)[0] for t in (y, noise))
        )
    )
    rows = samples.batch(
        generator,
        4099,
        dtype,
        two_above=at(apart(1.0), x={7: 60, 9: 58}, y={7: 58, 9: 59}),
        student_above=at(apart(1.0), x={7: 60}),
        few=all_but(5, 40),
        one=all_but(6, 7),
        nan=at(apart(1.0), x={7: math.nan}),
        infinite=at(apart(1.0), x={7: inf}),
        apart=apart(1.0),
    )
    x, y, bad = rows.x, rows.y, rows.index("nan", "infinite")
    good = [row for row in range(len(x)) if row not in bad]
    a = x.double().requires_grad_()
    truth = oracle.divergence(a, y.double(), kind, **kinds.parameters(kind))
    expected = torch.autograd.grad(truth[good].sum(), a)[0].nan_to_num(0)
    b = x.clone().requires_grad_()
    losses = kullback.divergence(b, y, kind, reduction="none", **kinds.parameters(kind))
    assert kullback.backend_info().name == "cuda"
    assert losses[bad].isnan().all()
    torch.testing.assert_close(losses[good].double(), truth[good], rtol=LOSS, atol=1e-7)
    weight = rows.weight(nan=0.0, infinite=0.0)
    total = kullback.divergence(b, y, kind, row_weight=weight, reduction="sum", **kinds.parameters(kind))
    torch.testing.assert_close(total.double(), truth[good].sum(), rtol=LOSS, atol=1e-7)
    # of few tokens: a mass that is kept is rounded, and the gradient
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    for loss in (losses[good].sum(), total):
        (ours,) = torch.autograd.grad(loss, b, retain_graph=True)
        for row in good:
            error = (ours[row] - expected[row]).norm()
            assert error <= bound * expected[row].norm() + 1e-7, rows.names[row]


def differing(by: float, every: int, constant: float = 0.0, top: float = 0.0):
    """The same logits, but for a constant and for each so manieth token, in turn more and less; one is the largest."""

    def row(y, noise):
        y = torch.zeros_like(y)
        y[61] = top
        x = y + constant
        x[122::every] += by
        x[122 + every :: 2 * every] -= 2 * by
        return x, y

    return row


@pytest.mark.parametrize("is_on_chip", [False, True])
@pytest.mark.parametrize("kind", kinds.SMOOTH)
def test_mean_slopes_of_close_rows(backend, generator, kind, is_on_chip):
    """Gradients that are small differences from it, where the sums of statistics say enough of a row, too little, or
    nothing though tokens differ."""
    rows = samples.batch(
        generator,
        6152,
        torch.bfloat16,
        spread=3.0,
        foreseen=apart(0.05),
        closer=apart(1e-3),
        sure=peaked(apart(0.1), 61, 5.0),
        peaked=peaked(apart(0.03), 61, 9.0),
        skewed=lambda y, noise: (y - 0.03 * noise.square(), y),
        one_differs=lambda y, _: (y + 0.25 * (torch.arange(len(y)) == 122), y),
        one_far=at(differing(0.0, 1), x={122: 3.0}, y={122: 2.0}),
        some_far=differing(0.875, 211),
        offset=differing(4.0, 6152, 1000.0, 12.0),
        far_but_one=peaked(apart(1.0), 61, 12.0),
        equal=equal,
    )
    a = rows.x.double().requires_grad_()
    truth = oracle.divergence(a, rows.y.double(), kind, **kinds.parameters(kind))
    (expected,) = torch.autograd.grad(truth.sum(), a)
    ours = rows.x.clone().requires_grad_()
    for row, name in enumerate(rows.names):
        loss = kullback.divergence(ours[row], rows.y[row], kind, reduction="sum", **kinds.parameters(kind))
        (mine,) = torch.autograd.grad(loss, ours)
        assert loss >= 0
        if name == "equal":
            assert loss == 0
            assert mine.count_nonzero() == 0
        else:
            assert truth[row] < 1e-7 or relative_error(loss, truth[row]) < LOSS, name
            assert relative_error(mine[row], expected[row]) < BF16_GRADIENT, name
        if name in ("foreseen", "skewed", "one_far", "some_far"):
            assert share_misrounded(mine[row], expected[row]) < 1e-3, name


def moved(by):
    """A row that one token has, and whose others all move by as much beside it."""

    def row(y, noise):
        y = y.clone()
        y[61] = 22.5
        x = y + 0.05 * noise
        x[61] = y[61] + by
        return x, y

    return row


@pytest.mark.parametrize("is_on_chip", [False, True])
@pytest.mark.parametrize("kind", ["reverse_kl", "hellinger", "alpha", "renyi"])
def test_gradients_of_a_row_whose_tokens_move_alike(backend, generator, kind, is_on_chip):
    """Beside a token that has all mass: the sum is as small as a close row's, the gradient as the moments' error."""
    rows = samples.batch(generator, 6152, torch.bfloat16, spread=3.0, surer=moved(4.0), less_sure=moved(-2.0))
    a = rows.x.double().requires_grad_()
    truth = oracle.divergence(a, rows.y.double(), kind, **kinds.parameters(kind))
    (expected,) = torch.autograd.grad(truth.sum(), a)
    ours = rows.x.clone().requires_grad_()
    (mine,) = torch.autograd.grad(
        kullback.divergence(ours, rows.y, kind, reduction="sum", **kinds.parameters(kind)), ours
    )
    for row, name in enumerate(rows.names):
        assert relative_error(mine[row], expected[row]) < BF16_GRADIENT, name


@pytest.mark.parametrize(
    ("kind", "parameter", "is_on_chip"),
    [
        ("jensen_shannon", {"beta": 0.5}, True),
        ("jensen_shannon", {"beta": 0.5}, False),
        ("skew_kl", {"alpha": 0.1}, True),
        ("total_variation", {}, True),
    ],
)
def test_rows_at_every_distance(backend, generator, kind, parameter, is_on_chip):
    """By polynomials of log-ratios, where few are beyond their radius, or by masses: each loss to 5e-6 of itself."""
    rows = samples.batch(
        generator,
        9003,
        torch.bfloat16,
        spread=3.0,
        **{f"apart{noise}": apart(noise) for noise in (0.003, 0.03, 0.1, 0.3, 0.6, 1.0, 2.0)},
        **{f"sure{noise}": peaked(apart(noise), 61, 9.0) for noise in (0.03, 0.3, 1.0, 2.0)},
        some_far=spiked(0.05, 4.0, 61),
        many_far=spiked(0.05, 4.0, 7),
        masked=masked(apart(0.1), both=slice(3000, 7000)),
        lacks=masked(apart(0.1), x=slice(5000, 5010)),
        one=at(apart(0.0), x={61: 2.0}, y={61: 0.0}),
        equal=equal,
    )
    a = rows.x.double().requires_grad_()
    truth = oracle.divergence(a, rows.y.double(), kind, **parameter)
    (expected,) = torch.autograd.grad(truth.sum(), a)
    for row, name in enumerate(rows.names):
        ours, y = rows.x[row].clone().requires_grad_(), rows.y[row].clone()
        loss = kullback.divergence(ours, y, kind, reduction="sum", **parameter)
        both = kullback.divergence(ours, y.clone().requires_grad_(), kind, reduction="sum", **parameter)
        alone = kullback.divergence(ours.detach(), y, kind, reduction="sum", **parameter)
        for each in (loss, both, alone):
            assert relative_error(each, truth[row]) < 5e-6 or (name == "equal" and each == 0), name
        for each in (loss, both):
            (mine,) = torch.autograd.grad(each, ours)
            if name == "equal":
                assert mine.count_nonzero() == 0
            else:
                assert relative_error(mine, expected[row]) < BF16_CACHED, name
                # Nor are light tokens off, nor those that no vector covers, where slopes are cached; but for tokens of
                # equal logits, where their slope is nearly the mean.
                if each is loss and is_on_chip and kind != "total_variation":
                    assert share_misrounded(mine, expected[row]) < 0.03, name
                    assert relative_error(mine[-3:], expected[row, -3:]) < 2**-7, name


@pytest.mark.parametrize("weight", [1.0, -1.0, 1e-20, 1e20])
@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_close_rows_by_log_ratios(backend, generator, kind, weight):
    """Whatever is upstream, which masses are multiplied by where it is a number like theirs."""
    lacks = {{"kl": "y", "reverse_kl": "x"}[kind]: slice(5000, 5003)}  # a side whose mass is nothing there
    rows = samples.batch(
        generator,
        9003,
        torch.bfloat16,
        spread=3.0,
        **{f"apart{noise}": apart(noise) for noise in (0.01, 0.05, 0.2)},
        some_far=spiked(0.05, 2.0, 97),
        masked=masked(apart(0.1), both=slice(3000, 5000)),
        lacks=masked(apart(0.1), **lacks),
        offset=samples.shifted(0.05, 20.0),
        beyond=samples.shifted(0.05, 64.0),
        sure=peaked(apart(0.2), 61, 5.0),
        equal=equal,
    )
    sides = [side.double().requires_grad_() for side in (rows.x, rows.y)]
    truth = oracle.divergence(*sides, kind, **kinds.parameters(kind))
    expected = torch.autograd.grad(truth.sum(), sides)
    factor = torch.tensor([weight])
    for row, name in enumerate(rows.names):
        ours = [side[row : row + 1].clone().requires_grad_() for side in (rows.x, rows.y)]
        for count in (1, 2):
            x, y = ours[0], ours[1] if count == 2 else ours[1].detach()
            options = {"row_weight": factor, "reduction": "sum", **kinds.parameters(kind)}
            loss = kullback.divergence(x, y, kind, **options)
            alone = kullback.divergence(x.detach(), y.detach(), kind, **options)
            gradients = torch.autograd.grad(loss, ours[:count])
            for each in (loss, alone):
                assert each == 0 if name == "equal" else relative_error(each / weight, truth[row]) < 5e-6, name
            for mine, side in zip(gradients, expected, strict=False):
                if name == "equal":
                    assert mine.count_nonzero() == 0
                else:
                    assert relative_error(mine[0].double() / weight, side[row]) < BF16_GRADIENT, name


@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_far_tokens_of_close_rows(backend, generator, kind):
    """Their log-ratios are taken from exponents, which are rounded where logits are far from 0; others' are not."""
    y = 100 + (torch.randn(16, 6152, generator=generator) * 32).round() / 16
    y[:, 500] = y.logsumexp(-1) - 4
    x = y.clone()
    x[:, 500] -= 1.25
    rows = x.half(), y.half()
    truth = oracle.divergence(*(side.double() for side in rows), kind)
    for row in range(len(x)):
        loss = kullback.divergence(rows[0][row].clone().requires_grad_(), rows[1][row], kind, reduction="sum")
        assert relative_error(loss, truth[row]) < LOSS


@pytest.mark.parametrize(
    ("vocab", "dtype", "blocks", "kind"),
    [
        (32003, torch.bfloat16, 2, "jensen_shannon"),
        (49155, torch.bfloat16, 2, "kl"),
        (50257, torch.float32, 8, "jensen_shannon"),
        (128256, torch.bfloat16, 8, "jensen_shannon"),
        (128256, torch.float32, 16, "kl"),
    ],
)
def test_rows_of_several_blocks(backend, monkeypatch, generator, kind, vocab, dtype, blocks):
    """Blocks of one cluster tell each other their sums; it takes more rows than are on chip at once."""
    assert plan.logits(plan.Wanted(vocab, dtype, dtype), plan.HOPPER).cluster == blocks
    monkeypatch.setattr(emulation.Launcher, "blocks", 1)
    rows = samples.batch(
        generator,
        vocab,
        dtype,
        first=apart(1.0),
        close=apart(0.02),
        masked=masked(apart(1.0), both=slice(90, -200)),
        dead=dead,
        more=apart(1.0),
        far=far(2.0),
        last=apart(0.5),
    )
    weight = rows.weight(close=2.0, masked=0.5, dead=0.0, more=3.0)
    counts = weight != 0
    a = rows.x.double().requires_grad_()
    truth = oracle.divergence(a[counts], rows.y[counts].double(), kind, **kinds.parameters(kind)) * weight[counts]
    (expected,) = torch.autograd.grad(truth.sum(), a)
    for reduction in ("sum", "none"):
        b = rows.x.clone().requires_grad_()
        losses = kullback.divergence(b, rows.y, kind, row_weight=weight, reduction=reduction, **kinds.parameters(kind))
        (ours,) = torch.autograd.grad(losses.sum(), b)
        assert relative_error(losses.sum(), truth.sum()) < LOSS
        assert ours[~counts].count_nonzero() == 0
        for row in counts.nonzero().flatten().tolist():
            bound = FLOAT_GRADIENT if dtype == torch.float32 else BF16_CACHED
            assert relative_error(ours[row], expected[row]) < bound, rows.names[row]


def test_a_device_without_room_for_sixteen_blocks(backend, monkeypatch, generator):
    portable = plan.HOPPER._replace(cluster=plan.PORTABLE_CLUSTER)
    monkeypatch.setattr(device, "admitted", lambda index, chip: portable)
    clusters = []

    class Launcher(emulation.Launcher):
        def __call__(self, *arguments):
            clusters.append(self.cluster)
            super().__call__(*arguments)

    monkeypatch.setattr(logits, "Launcher", Launcher)
    x, y = torch.randn(2, 2, 128256, generator=generator)
    loss = kullback.divergence(x, y, reduction="sum")
    assert clusters == [plan.PORTABLE_CLUSTER]
    assert relative_error(loss, oracle.divergence(x.double(), y.double(), "kl").sum()) < LOSS


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
def test_cached_slopes_are_fine_near_their_mean(backend, kind):
    """As on a GPU. With the log-ratio's mean and no variance to predict theirs from 2e-3 were off."""
    x, y = samples.half_lost(0.6, "cpu")
    parameter = dict.fromkeys(kinds.parameters(kind), 0.05)
    a, b = x.double().requires_grad_(), x.clone().requires_grad_()
    oracle.divergence(a, y.double(), kind, **parameter).mean().backward()
    kullback.divergence(b, y, kind, **parameter).backward()
    assert share_misrounded(b.grad, a.grad) < 1e-3


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_rows_of_two_dtypes(backend, generator, kind, dtypes):
    """A vector of one is twice as long as of the other: they lie at different places of their stages."""
    rows = samples.batch(generator, 8000, dtypes, one=apart(1.0), two=far(2.0), three=apart(0.5), four=apart(1.0))
    a, b = rows.x.double().requires_grad_(), rows.y.double().requires_grad_()
    truth = oracle.divergence(a, b, kind, **kinds.parameters(kind)).sum()
    expected = torch.autograd.grad(truth, (a, b))
    for wanted in ((True, False), (True, True)):
        ours = [t.clone().requires_grad_(want) for t, want in zip((rows.x, rows.y), wanted, strict=True)]
        loss = kullback.divergence(*ours, kind, reduction="sum", **kinds.parameters(kind))
        assert kullback.backend_info().name == "cuda"
        assert relative_error(loss, truth) < LOSS
        leaves = [t for t in ours if t.requires_grad]
        for mine, other in zip(torch.autograd.grad(loss, leaves), expected, strict=False):
            assert relative_error(mine, other) < gradient(mine.dtype)


@pytest.mark.parametrize("alpha", [0.1, 1e-3])
def test_tokens_that_the_teacher_all_but_masks(backend, generator, alpha):
    """The mean slope is predicted badly there; a loss does not depend on it, nor many digits of a gradient."""
    x = torch.randn(4, 13341, generator=generator).bfloat16()
    hidden = torch.rand(x.shape, generator=generator) < 0.03
    y = torch.where(hidden, x.float() - 22 * math.log(2), x.float()).bfloat16()
    a, b = x.double().requires_grad_(), x.clone().requires_grad_()
    truth = oracle.divergence(a, y.double(), "skew_kl", alpha=alpha).sum()
    loss = kullback.divergence(b, y, "skew_kl", alpha=alpha, reduction="sum")
    assert relative_error(loss, truth) < LOSS
    (expected,), (ours,) = torch.autograd.grad(truth, a), torch.autograd.grad(loss, b)
    assert relative_error(ours, expected) < BF16_GRADIENT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_jensen_shannon_is_symmetric_where_one_gradient_is_wanted(backend, generator, dtype):
    """To the bit, also where one side lacks tokens, few or many; what is predicted of cached slopes is not."""
    y, noise = 3 * torch.randn(2, 60, 4099, generator=generator)
    x = y + torch.linspace(0.02, 2, 60)[:, None] * noise
    few = y < -6
    x[:10][few[:10]], y[10:20][few[10:20]] = -inf, -inf
    x[30, ::7] = y[40, ::5] = -inf
    x, y = x.to(dtype), y.to(dtype)
    for a, b in zip(x, y, strict=True):
        one, other = (
            kullback.divergence(pair[0].clone().requires_grad_(), pair[1], "jensen_shannon", reduction="sum")
            for pair in ((a, b), (b, a))
        )
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_on_chip", [True, False])
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "hellinger", "total_variation"])
def test_a_gradient_over_the_logits_changes_no_loss(backend, generator, kind, is_on_chip):
    """Of near rows, some of whose tokens are heavy: these are read again after others' gradients are written."""
    y = 3 * torch.randn(4, 9003, generator=generator)
    x = y + torch.tensor([0.03, 0.05, 0.1, 0.15])[:, None] * torch.randn(4, 9003, generator=generator)
    x[:, 5] += 12
    y[:, 5] += 12
    x, y = x.to(torch.bfloat16), y.to(torch.bfloat16)
    found = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        loss = kullback.divergence(leaf * 1, y, kind, reduction="sum", inplace=inplace)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    (loss, grad), (over_logits, its_grad) = found
    assert relative_error(loss, oracle.divergence(x.double(), y.double(), kind).sum()) < LOSS
    assert torch.equal(loss, over_logits)
    assert torch.equal(grad, its_grad)


@pytest.mark.parametrize("is_on_chip", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_maxima_whose_products_overflow(backend, generator, dtype, is_on_chip):
    x, y = torch.randn(2, 1, 2112, generator=generator).to(dtype)
    x[:, 5] = y[:, 6] = torch.finfo(dtype).max
    leaf = x.requires_grad_()
    loss = kullback.divergence(leaf, y, "jensen_shannon", temperature=0.3, reduction="sum")
    truth = oracle.divergence(x.detach().double(), y.double(), "jensen_shannon", temperature=0.3)
    assert relative_error(loss, truth.sum()) < LOSS
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad.isfinite().all()


def test_each_far_row_s_loss_is_exact(backend):
    """Σ exp and moments of a row that is far cancel: they are summed with what additions round."""
    x, y = model_rows.made("pruned", 400, 16384, torch.bfloat16, "cpu")
    losses, truth = kullback.divergence(x, y, reduction="none"), oracle.divergence(x.double(), y.double(), "kl")
    assert ((losses - truth).abs() / truth)[truth > 1e-3].max() < 1.5e-6


@pytest.mark.parametrize("vocab", [13344, 13341])  # whose first tokens are in vectors, or not
@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_heavy_tokens_of_a_near_row_are_exact(backend, generator, kind, vocab):
    """Of rows that are not close, of which one token of some mass has most of the sum."""
    y = torch.randn(200, vocab, generator=generator)
    y[:, 0], y[:, 1] = 17, 13 + torch.rand(200, generator=generator)
    x = y + 0.5 * torch.randn(200, vocab, generator=generator)
    x[:, 0], x[:, 1] = y[:, 0], y[:, 1] + 0.5 + 0.45 * torch.rand(200, generator=generator)
    x, y = x.bfloat16(), y.bfloat16()
    losses, truth = kullback.divergence(x, y, kind, reduction="none"), oracle.divergence(x.double(), y.double(), kind)
    assert ((losses - truth).abs() / truth).max() < 1.2e-6


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jeffreys", "mixed_kl"])
def test_masked_near_rows_whose_maxima_a_sample_misses(backend, generator, kind):
    """Statistics are found again, with guards from the first: then no moment tells of the masked tokens."""
    y = torch.randn(4, 13341, generator=generator, dtype=torch.float64) - 70
    y[:, 5100:5140] += 70
    x = y + 0.1 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    x[:2, 700:800] = y[:2, 700:800] = -inf
    x, y = x.bfloat16(), y.bfloat16()
    a, b = x.double().requires_grad_(), x.clone().requires_grad_()
    truth = oracle.divergence(a, y.double(), kind, **kinds.parameters(kind))
    assert ((truth > 1e-3) & (truth < 0.02)).all()  # near
    (expected,) = torch.autograd.grad(truth.sum(), a)
    loss = kullback.divergence(b, y, kind, reduction="sum", **kinds.parameters(kind))
    (ours,) = torch.autograd.grad(loss, b)
    assert relative_error(loss, truth.sum()) < LOSS
    assert relative_error(ours, expected) < BF16_GRADIENT


@pytest.mark.parametrize("kind", ["jensen_shannon", "alpha", "renyi"])
def test_near_rows_whose_sides_lie_apart(backend, generator, kind):
    """By so much that what their difference of log-sum-exps has beyond a float shows in a loss, 3e-6 of it. Of every
    second row of jensen_shannon a heavy token is far."""
    x = torch.randn(12, 13341, generator=generator).mul_(6).round_().div_(2)
    apart_by = torch.linspace(600, 1000, 12).mul(2).round().div(2)[:, None]
    y = x + apart_by + torch.randn(x.shape, generator=generator).mul_(0.35).round_().div_(2)
    if kind == "jensen_shannon":
        x[::2] = x[::2].scatter_add(1, x[::2].topk(30).indices[:, 29:], torch.full((6, 1), -3.5))
    truth = oracle.divergence(x.double(), y.double(), kind, **kinds.parameters(kind))
    assert ((truth > 1e-3) & (truth < 0.04)).all()  # near
    losses = kullback.divergence(x.half(), y.half(), kind, reduction="none", **kinds.parameters(kind))
    assert ((losses - truth) / truth).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "alpha"])
def test_rows_are_the_same_wherever_their_lines_begin(backend, generator, kind):
    """To the bit: of memory's lines of 128 bytes, to which vectors of 16 on chip are kept."""
    vocab = 13341
    y = 3 * torch.randn(4, vocab, generator=generator)
    x = y + torch.tensor([1.0, 0.3, 0.05, 0.3])[:, None] * torch.randn(y.shape, generator=generator)
    x[3, ::500] -= 9  # far tokens of a row that is near
    labels = torch.tensor([0, 7000, vocab - 1, 500])

    def found(first):
        leaf, target = (samples.moved(side.bfloat16(), first) for side in (x, y))
        leaf.requires_grad_()
        losses = kullback.divergence(leaf, target, kind, labels=labels, label_weight=0.3, reduction="none")
        return losses.detach(), *torch.autograd.grad(losses.sum(), leaf)

    expected = found(0)
    assert all(all(map(torch.equal, found(8 * vectors), expected)) for vectors in range(1, 8))


def test_what_racecheck_watches(backend, monkeypatch, generator):
    """With barriers told as that tool knows them, kernels find the same to the bit."""
    x, y = (torch.randn(50, 13341, generator=generator).bfloat16() for _ in range(2))  # more than stages hold
    labels = torch.arange(50)

    def found():
        of_two, of_one = x.clone().requires_grad_(), x.clone().requires_grad_()
        losses = kullback.divergence(of_two, y), kullback.divergence(of_one, None, labels=labels)
        return *losses, *torch.autograd.grad(sum(losses), (of_two, of_one))

    expected = found()
    monkeypatch.setattr(source, "text", sanitize.with_each_lane_arriving(source.text))
    launchers = logits._launcher, logits._prepared, cross_entropy._launcher
    for each in launchers:
        each.cache_clear()
    assert all(map(torch.equal, found(), expected))
    assert all(each.cache_info().misses for each in launchers)
