"""What happens at zero, at the infinities, at NaN and among subnormal numbers."""

import itertools
import math
from math import inf

import pytest
import torch

import kullback
from tests import kinds, oracle
from tests.kinds import EVERY_BACKEND, FACTS, KINDS, SMOOTH
from tests.samples import sample
from tests.tolerances import LOSS, relative_error

INF, NAN = math.inf, math.nan
TINY = 1e-42  # subnormal in float32

# p, q -> term of kl, its derivative in q, in p (probabilities)
KL = [
    (0.5, 0.25, 0.5 * math.log(2), -2.0, math.log(2) + 1),
    (0.0, 0.5, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (0.5, 0.0, INF, -INF, INF),
    (-0.1, 0.5, NAN, 0.2, NAN),
    (0.5, -0.1, NAN, 5.0, NAN),
    (-0.1, -0.1, NAN, -1.0, NAN),
    (NAN, 0.5, NAN, NAN, NAN),
    (0.5, NAN, NAN, NAN, NAN),
    (0.0, NAN, NAN, None, NAN),
    (0.5, TINY, 0.5 * (math.log(0.5) - math.log(TINY)), -INF, math.log(0.5) - math.log(TINY) + 1),
    (TINY, 0.5, TINY * math.log(TINY / 0.5), -TINY / 0.5, math.log(TINY / 0.5) + 1),
    (TINY, TINY, 0.0, -1.0, 1.0),
]


def close(actual, expected, rtol=1e-3):
    if expected is None:
        return True
    if math.isnan(expected):
        return math.isnan(actual)
    # A subnormal float32 such as 1e-42 has ten bits.
    return actual == expected or math.isclose(actual, expected, rel_tol=rtol, abs_tol=1e-42)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("p", "q", "value", "d_q", "d_p"), KL)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("vocab", [1, 5, 64])
def test_kl_of_probabilities(p, q, value, d_q, d_p, dtype, fused, vocab, backend, device):
    """One element among harmless ones (p = q, which add nothing to the value)."""
    x, y = (torch.full((1, vocab), 0.25, dtype=dtype, device=device) for _ in range(2))
    at = vocab // 2
    x[0, at], y[0, at] = q, p
    x.requires_grad_()
    y.requires_grad_()
    loss = kullback.divergence(x, y, form="probs", reduction="sum" if fused else "none")
    loss.sum().backward()
    assert close(loss.sum().item(), value)
    assert close(x.grad[0, at].item(), d_q if dtype == torch.float32 or q != TINY else -p / q)
    assert close(y.grad[0, at].item(), d_p)


# y, x -> target's and input's log-masses; term, its derivative in x, in y
KL_LOG = [
    (-INF, -1.0, 0.0, 0.0, 0.0),
    (-INF, -INF, 0.0, 0.0, 0.0),
    (-1.0, -INF, INF, -math.exp(-1), INF),
    (NAN, -1.0, NAN, NAN, NAN),
    (-1.0, NAN, NAN, -math.exp(-1), NAN),
    (-90.0, -1.0, math.exp(-90) * -89, -math.exp(-90), math.exp(-90) * -88),
    (-1.0, -90.0, math.exp(-1) * 89, -math.exp(-1), math.exp(-1) * 90),
]


@pytest.mark.parametrize(("y", "x", "value", "d_x", "d_y"), KL_LOG)
@pytest.mark.parametrize("vocab", [1, 5, 64])
def test_kl_of_log_probabilities(y, x, value, d_x, d_y, vocab, backend, device):
    a, b = (torch.full((1, vocab), -2.0, device=device) for _ in range(2))
    at = vocab // 2
    a[0, at], b[0, at] = x, y
    a.requires_grad_()
    b.requires_grad_()
    loss = kullback.divergence(a, b, form="log_probs", reduction="sum")
    loss.backward()
    assert close(loss.item(), value)
    assert close(a.grad[0, at].item(), d_x)
    assert close(b.grad[0, at].item(), d_y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["probs", "log_probs"])
def test_one_side_zero(kind, form, backend, device):
    for (p, q), expected in zip(kinds.one_side_zero(), FACTS[kind][:2], strict=True):
        y, x = ((t if form == "probs" else t.log()).to(device) for t in (p, q))
        loss = kullback.divergence(x, y, kind, form=form, reduction="none", **kinds.parameters(kind)).item()
        assert close(loss, expected, LOSS), (p, q)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_elements_stay_in_their_row(kind, form, bad, backend, device, generator):
    x, y = (sample(form, (5, 300), generator).to(device) for _ in range(2))
    options = {"form": form, "reduction": "none", **kinds.parameters(kind)}
    clean = kullback.divergence(x, y, kind, **options)
    x[1, 17] = bad
    y[3, 250] = bad
    losses = kullback.divergence(x, y, kind, **options)
    assert torch.equal(losses[[0, 2, 4]], clean[[0, 2, 4]])
    if math.isnan(bad) or form == "logits":
        assert torch.isnan(losses[[1, 3]]).all()
    x.requires_grad_()
    y.requires_grad_()
    kullback.divergence(x, y, kind, **{**options, "reduction": "sum"}).backward()
    for gradient in (x.grad, y.grad):
        assert torch.isfinite(gradient[[0, 2, 4]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_masked_vocabulary(kind, backend, device, generator):
    """-inf logits on both sides are columns that are not there."""
    x, y = (sample("logits", (4, 40), generator).to(device) for _ in range(2))
    wide_x, wide_y = (torch.full((4, 70), -INF, device=device) for _ in range(2))
    wide_x[:, 10:50], wide_y[:, 10:50] = x, y
    results = []
    for a, b in ((x, y), (wide_x, wide_y)):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        loss = kullback.divergence(a, b, kind, **kinds.parameters(kind))
        loss.backward()
        results.append((loss.detach(), a.grad, b.grad))
    (loss, d_x, d_y), (wide_loss, wide_d_x, wide_d_y) = results
    torch.testing.assert_close(wide_loss, loss, rtol=1e-6, atol=0)
    assert relative_error(wide_d_x[:, 10:50], d_x) <= 1e-6
    assert relative_error(wide_d_y[:, 10:50], d_y) <= 1e-6
    for gradient in (wide_d_x, wide_d_y):
        assert (gradient[:, :10] == 0).all()
        assert (gradient[:, 50:] == 0).all()


def test_logits_where_the_input_lacks_mass(backend, device):
    """p > 0 where q = 0: kl is +inf, the input's gradient q - p is finite."""
    x = torch.tensor([[0.0, 0.0, -INF]], device=device, requires_grad=True)
    y = torch.zeros(1, 3, device=device)
    loss = kullback.divergence(x, y)
    loss.backward()
    assert loss.item() == INF
    torch.testing.assert_close(x.grad.cpu(), torch.tensor([[1 / 6, 1 / 6, -1 / 3]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weight_type", ["float", "bool"])
def test_garbage_in_rows_without_weight_leaks_nowhere(kind, form, reduction, weight_type, backend, device, generator):
    x, y = (sample(form, (5, 130), generator).to(device) for _ in range(2))
    weight = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0], device=device)
    if weight_type == "bool":
        weight = weight != 0
    options = {"form": form, "row_weight": weight, "reduction": reduction, **kinds.parameters(kind)}

    def run():
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = kullback.divergence(a, b, kind, **options)
        loss.sum().backward()
        return loss.detach(), a.grad, b.grad

    clean = run()
    for garbage in (NAN, INF, -INF, -1.0):
        x[1], y[3] = garbage, garbage
        for ours, expected in zip(run(), clean, strict=True):
            if backend == "torch":  # guards a whole chunk where one row asks for it: other roundings
                assert relative_error(ours, expected) <= 1e-6
            else:
                assert torch.equal(ours, expected)
        assert (clean[1][[1, 3]] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", oracle.FORMS)
def test_no_weight_at_all_is_zero(kind, form, backend, device, generator):
    x, y = (sample(form, (3, 8), generator).to(device).requires_grad_() for _ in range(2))
    options = {"form": form, **kinds.parameters(kind)}
    for normalizer in (None, 5.0, torch.tensor(0.0, device=device)):
        loss = kullback.divergence(
            x, y, kind, row_weight=torch.zeros(3, device=device), normalizer=normalizer, **options
        )
        gradients = torch.autograd.grad(loss, (x, y))
        assert loss.item() == 0
        assert all((g == 0).all() for g in gradients)
    empty = x[:0]
    loss = kullback.divergence(empty, y[:0], kind, **options)
    assert loss.item() == 0
    loss.backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.few_kinds)], ids=str)
def test_identical_logits_give_exactly_nothing(kind, dtype, backend, device, generator):
    x = sample("logits", (7, 1271), generator, dtype).to(device).requires_grad_()
    y = x.detach().clone().requires_grad_()
    loss = kullback.divergence(x, y, kind, reduction="none", **kinds.parameters(kind))
    loss.sum().backward()
    assert (loss == 0).all()
    assert (x.grad == 0).all()
    assert (y.grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("low", [-200.0, -2000.0])
def test_logits_whose_mass_underflows(kind, low, backend, device):
    """A finite logit far below the others has no mass on either side: 0 / 0 in many a formula."""
    x = torch.tensor([[0.0, 1.0, low]], device=device, requires_grad=True)
    y = torch.tensor([[1.0, 0.0, low + 0.3]], device=device, requires_grad=True)
    loss = kullback.divergence(x, y, kind, **kinds.parameters(kind))
    loss.backward()
    a, b = (t.detach()[:, :2].double().requires_grad_() for t in (x, y))
    truth = oracle.divergence(a, b, kind, **kinds.parameters(kind)).mean()
    truth.backward()
    assert relative_error(loss, truth) < 1e-6
    assert relative_error(x.grad[:, :2], a.grad) < 1e-6
    assert relative_error(y.grad[:, :2], b.grad) < 1e-6
    assert x.grad[0, 2] == y.grad[0, 2] == 0


def test_a_loss_scaler_keeps_float16_gradients_from_underflow(backend, device, generator):
    x = sample("logits", (512, 100), generator, torch.float16).to(device).requires_grad_()
    y = sample("logits", (512, 100), generator, torch.float16).to(device)
    (kullback.divergence(x, y) * 65536.0).backward()
    a = x.detach().double().requires_grad_()
    oracle.divergence(a, y, "kl").mean().backward()
    assert relative_error(x.grad.double() / 65536, a.grad) < 1e-3


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
@pytest.mark.parametrize("form", oracle.FORMS)
def test_mixtures_that_round_to_nothing(kind, form, backend, device):
    """One mass a subnormal number, the other 0: so is their mixture, or 0."""
    rows = torch.tensor([[0.0, -1.0, -103.0], [0.0, -1.0, -120.0]], device=device)
    rows = rows.exp() if form == "probs" else rows
    for x, y in ((rows[:1], rows[1:]), (rows[1:], rows[:1])):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = kullback.divergence(x, y, kind, form=form)
        assert loss.abs() < 1e-40
        loss.backward()
        # of probabilities the derivative at 0 may be infinite, but not NaN
        assert not torch.isnan(x.grad).any()
        assert not torch.isnan(y.grad).any()


def peaked_rows(device, generator):
    """That hardly overlap, in a large vocabulary."""
    return (sample("logits", (4, 8000), generator, scale=25.0).to(device).requires_grad_() for _ in range(2))


@pytest.mark.parametrize("kind", kinds.having(holds_far_rows=True))
def test_peaked_logits_of_a_large_vocabulary(kind, backend, device, generator):
    x, y = peaked_rows(device, generator)
    loss = kullback.divergence(x, y, kind, reduction="none", **kinds.parameters(kind))
    truth = oracle.divergence(x, y, kind, **kinds.parameters(kind))
    torch.testing.assert_close(loss.double(), truth, rtol=LOSS, atol=1e-6)


@EVERY_BACKEND
@pytest.mark.parametrize("kind", kinds.having(holds_far_rows=False))
def test_peaked_logits_that_float32_does_not_hold(kind, backend, device, generator):
    x, y = peaked_rows(device, generator)
    loss = kullback.divergence(x, y, kind, reduction="none", **kinds.parameters(kind))
    assert (loss > 20).all(), "no NaN, and no small number"


@EVERY_BACKEND
@pytest.mark.parametrize(
    ("kind", "student", "teacher", "parameters"),
    [
        ("jensen_shannon", [0, 1, -inf, 2], [0, 3, 1, -1], {}),
        ("reverse_kl", [0, 1, -inf, 2], [0, 3, 1, -1], {}),
        ("kl", [0, 1, -inf, 2], [0, 3, -1e4, -1], {}),
        ("alpha", [0, 1, -inf, 2], [0, 2, -inf, -1], {"alpha": -1.5}),
    ],
)
def test_backward_of_each_row_is_that_of_the_sum(kind, student, teacher, parameters, backend, device):
    """A row that was summed with guards is differentiated with them, though its sum looks as if it needed none."""
    x, y = (torch.tensor([t], dtype=torch.float32, requires_grad=True, device=device) for t in (student, teacher))
    each = torch.autograd.grad(kullback.divergence(x, y, kind, reduction="none", **parameters).sum(), (x, y))
    total = torch.autograd.grad(kullback.divergence(x, y, kind, reduction="sum", **parameters), (x, y))
    for ours, other in zip(each, total, strict=True):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(ours, other)


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"logit_scale": 1.3}, {"temperature": 0.7, "target_temperature": 1.0}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_that_overflow_when_scaled(kind, dtype, options, backend, device, generator):
    """finfo.min is a masked token in many codebases; over a temperature below 1 it is -inf."""
    y = torch.randn(6, 60, generator=generator)
    x = y + torch.tensor([0.05, 3.0]).repeat_interleave(3)[:, None] * torch.randn(6, 60, generator=generator)
    x, y = x.to(dtype), y.to(dtype)
    kept = torch.arange(60) != 7
    x[:, 7] = y[:, 7] = torch.finfo(dtype).min
    given = options | kinds.parameters(kind)
    for reduction in ("sum", "none"):
        results = []
        for columns in (slice(None), kept):
            leaves = [t[:, columns].to(device).requires_grad_() for t in (x, y)]
            loss = kullback.divergence(*leaves, kind, reduction=reduction, **given).sum()
            results.append((loss, *torch.autograd.grad(loss, leaves)))
        for index, (mine, expected) in enumerate(zip(*results, strict=True)):
            of_kept = mine[:, kept.to(device)] if index else mine
            # The same rows summed in another order, as processors do it: chi2 of far ones is a sum of few large
            # exponentials, and an element of a gradient a difference of numbers as large as its largest, or as 1.
            largest = max(1.0, float(expected.detach().abs().max()))
            rtol = 2e-2 if dtype == torch.bfloat16 else 5e-5
            torch.testing.assert_close(of_kept, expected, rtol=rtol, atol=2e-7 * largest)
            if index:
                assert (mine[:, 7] == 0).all()


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_token(kind, dtype, backend, device, generator):
    """A logit so large that floats keep nothing of others beside it: that token has all of its side."""
    y = torch.randn(4, 300, generator=generator)
    x = y + torch.randn(4, 300, generator=generator)
    given = kinds.parameters(kind)
    for size in (1e5, 1e6, 1e9):
        x[1, 5] = y[2, 5] = x[3, 5] = y[3, 5] = size
        own, other = x.to(dtype), y.to(dtype)
        leaf = own.double().requires_grad_()
        truth = oracle.divergence(leaf, other.double(), kind, **given)
        (expected,) = torch.autograd.grad(truth.sum(), leaf)
        for reduction, row in itertools.product(("sum", "none"), range(4)):
            if truth[row].isinf():  # of the textbook's masses that are 0
                continue
            ours, theirs = (t[row : row + 1].clone().to(device) for t in (own, other))
            loss = kullback.divergence(ours.requires_grad_(), theirs, kind, reduction=reduction, **given).sum()
            (found,) = torch.autograd.grad(loss, ours)
            if row == 3:  # both sides': then they are equal
                assert loss == 0
                assert found.count_nonzero() == 0
                continue
            assert relative_error(loss, truth[row]) < LOSS, (size, row)
            if expected[row].isnan().any():  # of the textbook's root at 0
                continue
            largest = max(0.1, float(expected[row].abs().max()))  # of a forced student's nothing is left
            bound = 1e-2 if dtype == torch.bfloat16 else 2e-5
            assert (found[0].cpu().double() - expected[row]).abs().max() < bound * largest, (size, row)


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_far_rows_with_an_offset(kind, backend, device, generator):
    """Powers of masses are found from differences of logits, whatever these have in common."""
    x = torch.randn(4, 300, generator=generator)
    y = x + 0.5 * torch.randn(4, 300, generator=generator)
    x, y = (x * 16).round() / 16 + 1e4, (y * 16).round() / 16
    leaf = x.double().requires_grad_()
    truth = oracle.divergence(leaf, y.double(), kind, **kinds.parameters(kind))
    (expected,) = torch.autograd.grad(truth.sum(), leaf)
    for reduction in ("sum", "none"):
        ours = x.to(device).requires_grad_()
        losses = kullback.divergence(ours, y.to(device), kind, reduction=reduction, **kinds.parameters(kind))
        (found,) = torch.autograd.grad(losses.sum(), ours)
        assert relative_error(losses.sum(), truth.sum()) < LOSS
        assert relative_error(found, expected) < 1e-5


def tilted_log_sum_exp(x, y, order):
    """log Σ p^a q^(1-a) of float64 logits, as a log-sum-exp."""
    return torch.logsumexp(order * y.log_softmax(-1) + (1 - order) * x.log_softmax(-1), -1)


@EVERY_BACKEND
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("order", [0.1, 0.5, 0.999, 1.5, 4.0, 50.0])
def test_renyi_of_rows_far_apart(order, reduction, backend, device, generator):
    """Each sure of another word, by more and more, and as far as an order takes those that overlap."""
    apart = torch.tensor([0.0, 0.5, 2.0, 8.0, 30.0, 87.0, 104.0, 1000.0, 5000.0])
    x, y = torch.randn(2, 3 * len(apart), 130, generator=generator) * torch.tensor([[0.0], [1.0], [3.0]]).repeat(9, 1)
    x[:, 7] += apart.repeat_interleave(3)
    y[:, 61] += apart.repeat_interleave(3)
    exact = [t.double().requires_grad_() for t in (x, y)]
    truth = tilted_log_sum_exp(*exact, order) / (order - 1)
    upstream = torch.linspace(0.5, 2.0, len(x)) if reduction == "none" else torch.ones(len(x))
    gradients = torch.autograd.grad(truth, exact, upstream.double())
    ours = [t.to(device).requires_grad_() for t in (x, y)]
    losses = kullback.divergence(*ours, "renyi", alpha=order, reduction=reduction)
    each = kullback.divergence(*ours, "renyi", alpha=order, reduction="none")
    # A log-sum-exp of float32: its exponents are rounded, and multiplied by the order.
    size = order * (x.abs().amax(-1) + y.abs().amax(-1)).double() + 1
    assert ((each.cpu() - truth).abs() <= 3e-7 * size / abs(order - 1) + 1e-6 * truth).all()
    assert losses.sum().item() == pytest.approx(truth.sum().item(), rel=1e-5)
    found = torch.autograd.grad(losses, ours, upstream.to(device) if reduction == "none" else None)
    for mine, expected, factor in zip(found, gradients, (1, order / abs(order - 1)), strict=True):
        error = (mine.cpu() - expected).abs().amax(-1)  # of differences of masses, of the tilted and one side
        assert (error <= 3e-7 * size * factor * upstream).all()


@EVERY_BACKEND
@pytest.mark.parametrize("order", [-1.0, 0.1, 0.5, 2.0])
def test_alpha_of_rows_far_apart(order, backend, device, generator):
    apart = torch.tensor([0.0, 0.5, 2.0, 8.0, 20.0])
    x, y = torch.randn(2, len(apart), 130, generator=generator)
    x[:, 7] += apart
    y[:, 61] += apart
    exact = [t.double().requires_grad_() for t in (x, y)]
    truth = torch.expm1(tilted_log_sum_exp(*exact, order)) / (order * (order - 1))
    gradients = torch.autograd.grad(truth.sum(), exact)
    ours = [t.to(device).requires_grad_() for t in (x, y)]
    losses = kullback.divergence(*ours, "alpha", alpha=order, reduction="none")
    torch.testing.assert_close(losses.cpu().double(), truth, rtol=2e-5, atol=0)  # exponents up to 60, rounded
    size = 2e-5 * tilted_log_sum_exp(*exact, order).exp() / min(abs(order), abs(1 - order))
    for mine, expected in zip(torch.autograd.grad(losses.sum(), ours), gradients, strict=True):
        assert ((mine.cpu() - expected).abs().amax(-1) <= size).all()


@EVERY_BACKEND
def test_total_variation_of_rows_that_one_token_has(backend, device, generator):
    """The rounding of a sum of masses is larger than what the rows differ by, and no square makes it less."""
    y = torch.randn(800, 50, generator=generator)
    y[:, 3] += torch.tensor([14.0, 16.0, 20.0, 25.0]).repeat(200)
    x = y + torch.randn(800, 50, generator=generator)
    expected = oracle.divergence(x, y, "total_variation")
    ours = kullback.divergence(x.to(device), y.to(device), "total_variation", reduction="none").cpu()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=2e-14)  # some roundings of 1, squared


POWERS = pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("chi2", {}),
        ("alpha", {"alpha": 2.0}),
        ("alpha", {"alpha": -1.0}),
        ("renyi", {"alpha": 1.5}),
    ],
)


def by_exponents(x, y, kind, alpha=2.0):
    """Of log-masses in float64: no mass underflows, no power overflows."""
    whole = torch.exp(alpha * y + (1 - alpha) * x).sum(-1)
    if kind == "renyi":
        return whole.log() / (alpha - 1)
    if kind == "alpha":
        return (1 - whole) / (alpha * (1 - alpha))
    return (torch.exp(2 * y - x) - 2 * y.exp() + x.exp()).sum(-1)


UNDERFLOWING = (  # student, teacher
    ([0.0, 0.01, -110.0], [0.0, 0.0, -100.0]),
    ([0.0, 0.5, -115.0], [0.0, 0.0, -46.0]),
    ([0.0, 1.0, -230.0], [0.0, 0.0, -110.0]),
    ([0.0, 0.01, -750.0], [0.0, 0.0, -740.0]),
    ([0.0, 0.0, 0.01], [-60.0, 0.0, 0.0]),
)


@EVERY_BACKEND
@POWERS
@pytest.mark.parametrize("form", ["logits", "log_probs"])
def test_quotients_of_masses_that_underflow(kind, options, form, backend, device):
    for rows in UNDERFLOWING:
        expect_exponents(kind, options, torch.float32, form, rows, device)


@POWERS
@pytest.mark.parametrize("form", ["logits", "log_probs"])
def test_quotients_of_double_masses_that_underflow(kind, options, form, backend, device):
    for rows in UNDERFLOWING:
        expect_exponents(kind, options, torch.float64, form, rows, device)


def expect_exponents(kind, options, dtype, form, rows, device):
    rows = [torch.tensor([row], dtype=dtype) for row in rows]
    rows = [row.log_softmax(-1) if form == "log_probs" else row for row in rows]
    exact = [row.double().requires_grad_() for row in rows]
    logs = [row.log_softmax(-1) if form == "logits" else row for row in exact]
    truth = by_exponents(*logs, kind, **options)
    gradients = torch.autograd.grad(truth.sum(), exact)
    ours = [row.to(device).requires_grad_() for row in rows]
    loss = kullback.divergence(*ours, kind, form=form, reduction="none", **options)
    # Exponents in the hundreds are rounded; literal alpha and renyi are a difference from 1.
    literal = 1e-6 if form == "log_probs" and not kinds.FACTS[kind].has_squares else 1e-12
    torch.testing.assert_close(loss.cpu().double(), truth.detach(), rtol=1e-4, atol=literal)
    for mine, expected in zip(torch.autograd.grad(loss.sum(), ours), gradients, strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(mine.cpu().double(), expected, rtol=1e-4, atol=1e-4 * size)


@EVERY_BACKEND
@POWERS
@pytest.mark.parametrize("form", oracle.FORMS)
def test_a_mass_over_none_that_a_power_makes_infinite(kind, options, form, backend, device):
    """In whatever row: near ones are summed in another way than far ones."""
    for second in (1.0, 1e-3, 5.0):
        rows = torch.tensor([[0.0, second, -inf, 1.0]]), torch.tensor([[0.0, 1.0, 0.0, second]])
        rows = rows[::-1] if options.get("alpha", 2.0) < 0 else rows
        x, y = ((row.log_softmax(-1) if form == "log_probs" else row.softmax(-1)) for row in rows)
        x, y = rows if form == "logits" else (x, y)
        assert kullback.divergence(x.to(device), y.to(device), kind, form=form, **options) == inf


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forms", [("logits", "logits"), ("logits", "log_probs"), ("log_probs", "log_probs")])
def test_masks_of_both_sides(kind, forms, backend, device):
    """Finite ones, infinite ones, or one of each: a mass that underflows is none."""
    lower, higher = [(-1e4, -1e4), (-1e4, -inf)], [(-inf, -1e4), (-300.0, -150.0)]
    all_masks = lower if kinds.FACTS[kind].has_squares else lower + higher
    cases = [(kinds.parameters(kind), masks) for masks in all_masks]
    if kind in ("alpha", "renyi"):
        cases += [({"alpha": order}, masks) for order in (2.0, 3.0) for masks in lower]
    for options, masks in cases:
        x, y = torch.tensor([[0.0, 1.0, masks[0]]]), torch.tensor([[1.0, 0.0, masks[1]]])
        given = [(row.log_softmax(-1) if form == "log_probs" else row) for row, form in zip((x, y), forms, strict=True)]
        exact = [row[:, :2].double().requires_grad_() for row in given]
        truth = oracle.divergence(*exact, kind, *forms, **options)
        gradients = torch.autograd.grad(truth.sum(), exact)
        ours = [row.to(device).requires_grad_() for row in given]
        form = dict(zip(("form", "target_form"), forms, strict=True))
        loss = kullback.divergence(*ours, kind, **form, reduction="none", **options)
        torch.testing.assert_close(loss.cpu().double(), truth.detach(), rtol=1e-5, atol=1e-6)
        for mine, expected in zip(torch.autograd.grad(loss.sum(), ours), gradients, strict=True):
            torch.testing.assert_close(mine[:, :2].cpu().double(), expected, rtol=1e-5, atol=1e-6)
            assert mine[0, 2] == 0


@EVERY_BACKEND
@pytest.mark.parametrize("kind", ["reverse_kl", "jeffreys"])
@pytest.mark.parametrize("logit", [-58.0, -70.0, -84.0, -86.0])
def test_a_small_mass_over_none_is_infinite(kind, logit, backend, device):
    x, y = (torch.tensor([row], device=device) for row in ([0.0, 0.0, logit], [0.0, 1.0, -inf]))
    assert kullback.divergence(x, y, kind) == inf


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize(("vocab", "scale", "offset"), [(1000, 1.0, 0.0), (2503, 1.0, 0.0), (1000, 0.9, -1000.0)])
@pytest.mark.parametrize("kind", SMOOTH)
def test_gradients_of_rows_that_one_token_has(kind, vocab, scale, offset, backend, device, generator):
    """Of all but 1e-3 to 1e-16 of a row: the others' gradients are that small, and the token's is what they sum to."""
    above = torch.tensor([8.0, 12.0, 16.0, 20.0, 25.0, 30.0, 35.0]).repeat(4)
    y, noise = torch.randn(2, len(above), vocab, generator=generator)
    y, rows = 3 * y, torch.arange(len(above))
    tokens = 61 * rows % vocab  # the first is one that a sample sees
    y[rows, tokens] = y.amax(-1) + above
    x = y + torch.tensor([1.0, 1e-1, 1e-2, 1e-4]).repeat_interleave(7)[:, None] * noise + offset
    options = {"temperature": 1 / torch.tensor(scale).item(), **kinds.parameters(kind)}  # whose inverse is a float
    leaf = x.double().requires_grad_()
    losses = oracle.divergence(
        leaf / options["temperature"], y.double() / options["temperature"], kind, **kinds.parameters(kind)
    )
    (truth,) = torch.autograd.grad(losses.sum(), leaf)
    truth[rows, tokens] = 0.0  # float64's is a difference of numbers next to 1
    truth[rows, tokens] = -truth.sum(-1)
    for reduction in ("sum", "none"):
        ours = x.to(device).requires_grad_()
        loss = kullback.divergence(ours, y.to(device), kind, reduction=reduction, **options).sum()
        (gradient,) = torch.autograd.grad(loss, ours)
        for row in rows.tolist():
            # The exponent of a mass of e^-45 is rounded by up to 2.6e-6 of it, and of a tilted one twice.
            bound = 5e-6 if kind in ("alpha", "renyi") else 4e-6
            assert relative_error(gradient[row], truth[row]) < bound, (above[row], row // 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_that_its_dtype_does_not_hold_is_infinite(backend, device, dtype):
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    weight = torch.full((4,), 3e38, device=device)
    assert kullback.divergence(x.to(dtype), y.to(dtype), row_weight=weight, reduction="sum") == INF
    low = torch.full((4, 8), -6e4 if dtype == torch.float16 else -6e37, dtype=dtype, device=device)
    assert kullback.kl_div(low, torch.ones_like(low), reduction="sum") == INF


@EVERY_BACKEND
@pytest.mark.parametrize("kind", ["alpha", "renyi"])
@pytest.mark.parametrize(
    ("order", "vocab"), [(1e-20, 3000), (-1e-6, 500), (1e-3, 3000), (1 - 1e-7, 500), (1 + 1e-5, 3000)]
)
def test_orders_near_0_and_1(kind, order, vocab, backend, device, generator):
    """Nothing cancels: losses are those of reverse_kl and kl but for what the order adds."""
    if kind == "renyi" and order < 0:
        order = -order
    y = 3 * torch.randn(8, vocab, generator=generator)
    noise = torch.randn(8, vocab, generator=generator) * torch.tensor([2, 1, 0.3, 0.1, 0.03, 0.01, 1e-3, 0])[:, None]
    x, y = ((y + noise).to(device).requires_grad_(), y.to(device))
    losses = kullback.divergence(x, y, kind, alpha=order, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    a = torch.tensor(order, dtype=torch.float32).double()  # as kernels hold it
    leaf = x.detach().double().requires_grad_()
    log_q, log_p = leaf.log_softmax(-1), y.double().log_softmax(-1)
    q, p, r = log_q.exp(), log_p.exp(), log_p - log_q
    # Σ p^a q^(1-a) - 1 over a(1-a), from the nearer of both sides
    power = (
        q * (torch.expm1(a * r) - a * torch.expm1(r))
        if a < 0.5
        else p * (torch.expm1((a - 1) * r) - (a - 1) * -torch.expm1(-r))
    )
    shortfall = -power.sum(-1)
    wanted = shortfall / (a * (1 - a)) if kind == "alpha" else torch.log1p(-shortfall) / (a - 1)
    (gradient_wanted,) = torch.autograd.grad(wanted.sum(), leaf)
    assert (losses >= 0).all()
    assert losses[-1] == 0
    assert not gradient[-1].any()
    error = (losses.double() - wanted).abs()[:-1] / wanted[:-1]
    assert error.max() < 5e-6
    for found, true in zip(gradient[:-1].double(), gradient_wanted[:-1], strict=True):
        assert (found - true).norm() / true.norm() < 5e-6


@EVERY_BACKEND
@pytest.mark.parametrize(("kind", "order"), [("renyi", 10.0), ("renyi", 300.0), ("alpha", 60.0), ("alpha", -20.0)])
def test_large_orders_of_rows_that_differ_in_one_token(kind, order, backend, device):
    """Its log-ratio is small, and is not when the order multiplies it."""
    y = torch.zeros(2, 64)
    y[:, 5] = -5
    x = y.clone()
    x[:, 5] += torch.tensor([0.45, -0.3]) * (1 if order > 0 else -0.5)
    leaf = x.double().requires_grad_()
    whole = tilted_log_sum_exp(leaf, y.double(), order)
    expected = whole / (order - 1) if kind == "renyi" else torch.expm1(whole) / (order * (order - 1))
    (gradient_expected,) = torch.autograd.grad(expected.sum(), leaf)
    student = x.to(device).requires_grad_()
    losses = kullback.divergence(student, y.to(device), kind, alpha=order, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    error = ((losses.cpu().double() - expected) / expected).abs()
    assert error[0] < 2e-5
    assert error[1] < 1e-4  # exponents up to 18 are rounded
    assert (gradient.cpu() - gradient_expected).norm() < 1e-4 * gradient_expected.norm()
