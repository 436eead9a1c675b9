"""Rows of float32 logits that are near, whose gradients have float32: exact as sums and element by element."""

import itertools
from typing import NamedTuple

import pytest
import torch

import kullback
from tests import emulation, kinds, oracle, samples
from tests.kinds import SMOOTH
from tests.samples import apart, at, equal, masked, peaked, shifted, spiked
from tests.tolerances import FLOAT_GRADIENT, LOSS, relative_error

TOKEN = 4007
SHOWS, CAPPED = 1e-3, 1e-4  # a loss, and its gradients: capped logits are rounded before their difference is found
VALUE = 3e-6  # of a loss above 1e-3; a normaliser's rounding is 1e-7 to 3e-7, of which there is a square
SUM = 5e-7  # of Σ d_log_q, relative: a gradient is what that leaves of masses' derivatives


class Far(NamedTuple):
    """Bounds of rows that are found by moments, or by the fast formula."""

    least: float = 0.02  # loss
    loss: float = LOSS
    gradient: float = 1e-5


# Totals alone: near rows of a parameter that shorter polynomials do not reach have the fast formula in light tokens.
TOTALS = {"skew_kl": 2 * LOSS}
FARS = {kind: Far() for kind in kinds.KINDS}
FARS |= dict.fromkeys(("kl", "reverse_kl"), Far(0.2, VALUE, 3 * FLOAT_GRADIENT)) | {"chi2": Far(gradient=5e-5)}


pytestmark = pytest.mark.parametrize(
    ("backend", "vocab"),
    [
        pytest.param("emulated", 8192),
        pytest.param("emulated", 8190),  # the last elements are in no vector
        pytest.param("cuda", 49152, marks=pytest.mark.gpu),
        pytest.param("cuda", 128256, marks=pytest.mark.gpu),
    ],
    indirect=["backend"],
)


@pytest.fixture(autouse=True)
def on_chip(backend, monkeypatch):
    if backend == "emulated":
        emulation.on_chip(monkeypatch)


@pytest.fixture
def rows(device, generator, vocab):
    made = {f"{noise} apart": apart(noise) for noise in (0.003, 0.02, 0.3, 1.0)}
    made |= {
        f"{above} above, {noise} apart": peaked(apart(noise), TOKEN, above)
        for above in (0.0, 4.0, 7.0)
        for noise in (0.1, 0.5)
    }
    batch = samples.batch(
        generator,
        vocab,
        torch.float32,
        spread=2.0,
        **made,
        some_far=spiked(0.05, 4.0, 97),
        few_far=at(apart(0.05), y={17: -12.0, 4001: -12.0}),
        masked=masked(apart(0.1), both=slice(3000, 5000)),
        lacking=at(apart(0.1), y={11: -torch.inf}),
        offset=shifted(0.1, 20.0),
        beyond=shifted(0.1, 64.0),
        alone=peaked(apart(0.5), TOKEN, 14.5),
        sunk=lambda y, noise: tuple(side - 200 for side in peaked(apart(0.1), TOKEN, 2.0)(y, noise)),
        equal=equal,
    )
    return batch._replace(x=batch.x.to(device), y=batch.y.to(device))


def expected_of(rows, kind, cap=None, labels=None, temperatures=(1.0, 1.0), **weights):
    """Losses by the textbook in float64, and both sides' gradients."""
    sides = [side.double().requires_grad_() for side in (rows.x, rows.y)]
    x, y = (side if cap is None else cap * torch.tanh(side / cap) for side in sides)
    x, y = x / temperatures[0], y / temperatures[1]
    losses = oracle.divergence(x, y, kind, **kinds.parameters(kind))
    if labels is not None:
        losses = oracle.labelled(losses, x, labels, label=weights["label_weight"], z=weights["z_weight"])
    return losses.detach(), torch.autograd.grad(losses[losses.isfinite()].sum(), sides)


def check(rows, kind, expected, weight=1.0, labels=None, least=0.0, **options):
    """Of each row alone: a loss without gradients, with one, with both, and with both that are found later.

    least: of the bounds of gradients.
    """
    truth, gradients = expected
    far = FARS[kind]
    asked = labels is not None or bool(options)
    options |= kinds.parameters(kind) | {"row_weight": torch.tensor([weight], device=rows.x.device)}
    some = slice(None) if weight == 1 and not asked else slice(0, None, 3)  # of the rest a part is enough
    for row, name in list(enumerate(rows.names))[some]:
        if "softcap" in options and truth[row] < SHOWS:
            continue
        for count, reduction in ((0, "sum"), (1, "sum"), (2, "sum"), (2, "none")):
            sides = [side[row : row + 1].clone().requires_grad_(i < count) for i, side in enumerate((rows.x, rows.y))]
            if labels is not None:
                options["labels"] = labels[row : row + 1]
            loss = kullback.divergence(*sides, kind, reduction=reduction, **options).sum()
            if truth[row].isinf():
                assert loss == truth[row] * weight
                continue
            if labels is None and truth[row].abs() < 1e-14:  # of equal sides
                assert loss == 0
            else:
                is_exact = count and "softcap" not in options  # totals alone are found as of 16 bits
                bound = VALUE if is_exact and truth[row] > 1e-3 else LOSS if count else TOTALS.get(kind, LOSS)
                bound = far.loss if is_exact and truth[row] >= far.least else bound
                assert relative_error(loss / weight, truth[row]) < bound, (name, count, reduction)
            found = torch.autograd.grad(loss, sides[:count]) if count else ()
            for side, (mine, theirs) in enumerate(zip(found, gradients, strict=False)):
                if theirs[row].isnan().any():  # of the textbook's root at 0
                    continue
                if theirs[row].norm() < 1e-12:  # of equal rows, but for labels
                    assert mine.count_nonzero() == 0
                    continue
                bound = FLOAT_GRADIENT
                if truth[row] >= far.least:
                    bound = max(far.gradient, SUM * float(truth[row].abs() / theirs[row].norm()))
                bound = max(CAPPED if "softcap" in options else bound, least)
                assert relative_error(mine[0].double() / weight, theirs[row]) < bound, (name, count, reduction, side)


@pytest.mark.parametrize("weight", [1.0, -1.0, 1e20])
@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_losses_and_gradients(rows, kind, weight):
    """Whatever is upstream, which masses are multiplied by where it is a number like theirs."""
    check(rows, kind, expected_of(rows, kind), weight)


@pytest.mark.few_kinds
@pytest.mark.parametrize("kind", [kind for kind in SMOOTH if kind not in ("kl", "reverse_kl")])
def test_kinds_that_polynomials_serve(rows, kind):
    check(rows, kind, expected_of(rows, kind))


def test_total_variation_of_near_rows(device, generator, vocab):
    """Tokens near the tie have the sign of their log-ratio, which what masses sum to beside 1 would change."""
    made = {f"{noise} apart, {i}": apart(noise) for noise in (0.0005, 0.003) for i in range(3)}
    rows = samples.batch(generator, vocab, torch.float32, spread=1.0, **made)
    lowest = rows.y[::3].argmin(-1)
    rows.x[range(0, len(rows.x), 3), lowest] += 4  # one is far, of so little mass that others are near the tie still
    rows = rows._replace(x=rows.x.to(device), y=rows.y.to(device))
    expected, gradients = expected_of(rows, "total_variation")
    for (row, name), count in itertools.product(enumerate(rows.names), (1, 2)):
        sides = [side[row : row + 1].clone().requires_grad_(i < count) for i, side in enumerate((rows.x, rows.y))]
        loss = kullback.divergence(*sides, "total_variation", reduction="none" if row % 2 else "mean")
        assert relative_error(loss, expected[row]) < VALUE, name
        for mine, theirs in zip(torch.autograd.grad(loss, sides[:count]), gradients, strict=False):
            assert relative_error(mine[0], theirs[row]) < FLOAT_GRADIENT, name


def test_total_variation_of_few_far_tokens(device, generator, vocab):
    """Others' slopes are nearly one number, of which sums leave little: of either side's gradient as much is off."""
    rows = samples.batch(generator, vocab, torch.float32, spread=1.0, **{f"{i}": apart(0.001) for i in range(4)})
    rows.x[:, :8] += 2.5
    rows = rows._replace(x=rows.x.to(device), y=rows.y.to(device))
    _, gradients = expected_of(rows, "total_variation")
    for row, reduction in itertools.product(range(4), ("mean", "none")):
        sides = [side[row : row + 1].clone().requires_grad_() for side in (rows.x, rows.y)]
        loss = kullback.divergence(*sides, "total_variation", reduction=reduction).sum()
        for mine, theirs in zip(torch.autograd.grad(loss, sides), gradients, strict=True):
            assert relative_error(mine[0], theirs[row]) < 5e-6


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_total_variation_of_a_sure_token(device, generator, vocab, reduction):
    """Its log-ratio is 0 where losses are found and where gradients are, which may be in launches of their own."""
    y = torch.randn(60, vocab, generator=generator)
    y[:, 4007] = 60
    sides = [t.to(device).requires_grad_() for t in (y + 0.1 * torch.randn(60, vocab, generator=generator), y)]
    loss = kullback.divergence(*sides, "total_variation", temperature=0.2, reduction=reduction).sum()
    for gradient in torch.autograd.grad(loss, sides):
        assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["hellinger", "jensen_shannon"])
def test_masses_that_are_no_normal_numbers(device, generator, kind, vocab):
    """Tokens of no mass are far, so that all have the stable formula."""
    y = 2 * torch.randn(12, vocab, generator=generator)
    x = y + 0.05 * torch.randn(12, vocab, generator=generator)
    x = torch.where(y < -3.2, x + 0.4, x).to(device).requires_grad_()
    leaf = x.detach().double().requires_grad_()
    truth = oracle.divergence(leaf / 0.1, y.to(device).double() / 0.1, kind, **kinds.parameters(kind))
    losses = kullback.divergence(x, y.to(device), kind, temperature=0.1, reduction="none", **kinds.parameters(kind))
    gradients, expected = (torch.autograd.grad(of.sum(), at)[0] for of, at in ((losses, x), (truth, leaf)))
    for row in range(12):
        assert relative_error(losses[row], truth[row]) < LOSS
        assert relative_error(gradients[row], expected[row]) < FARS[kind].gradient


def test_jensen_shannon_is_symmetric_to_the_bit(rows):
    for reduction in ("sum", "none"):
        found = []
        for pair in ((rows.x, rows.y), (rows.y, rows.x)):
            sides = [side.clone().requires_grad_() for side in pair]
            loss = kullback.divergence(*sides, "jensen_shannon", reduction=reduction)
            found.append((loss.detach(), *torch.autograd.grad(loss.sum(), sides)))
        (one, d_x, d_y), (other, e_y, e_x) = found
        assert torch.equal(one, other)
        assert torch.equal(d_x, e_x)
        assert torch.equal(d_y, e_y)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jensen_shannon"])
def test_labels(rows, kind):
    """What gradients are to sum to is then not 0. Where the label is the sure token, and where it is not."""
    labels = torch.full((len(rows.x),), TOKEN, device=rows.x.device)
    labels[1::2] = 17
    options = {"label_weight": 0.3, "z_weight": 1e-3}
    check(rows, kind, expected_of(rows, kind, labels=labels, **options), labels=labels, **options)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_what_log_ratios_do_not_serve(rows, kind):
    """Two temperatures; and a label's weight that takes all of the student's masses off its gradient.

    Gradients of far rows cancel there: the textbook's in float32 are 1e-4 off.
    """
    truth = expected_of(rows, kind, temperatures=(0.7, 0.71))
    check(rows, kind, truth, least=5e-5, temperature=0.7, target_temperature=0.71)
    labels = torch.full((len(rows.x),), 17, device=rows.x.device)
    options = {"label_weight": -1.0, "z_weight": 0.0}
    check(rows, kind, expected_of(rows, kind, labels=labels, **options), labels=labels, least=5e-5, **options)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jensen_shannon"])
def test_softcaps(rows, kind):
    """What gradients sum to is found upstream of them. Logits of a row that has no mass are none then."""
    check(rows, kind, expected_of(rows, kind, cap=30.0), softcap=30.0, target_softcap=30.0)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jeffreys"])
def test_totals_alone_of_sides_far_apart(device, generator, kind, vocab):
    """A log-sum-exp of 1000 is rounded by 4e-5, and so are all masses of that side: what they sum to is taken off."""
    rows = samples.batch(generator, vocab, torch.float32, **{f"{i}": shifted(0.3, 1000 + 0.37 * i) for i in range(8)})
    truth = oracle.divergence(rows.x.double(), rows.y.double(), kind)
    for x, y, expected in zip(rows.x.to(device), rows.y.to(device), truth, strict=True):
        loss = kullback.divergence(x, y, kind, reduction="sum", **kinds.parameters(kind))
        assert relative_error(loss, expected) < 2 * LOSS
