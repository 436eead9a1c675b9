"""Laws that every divergence keeps, on its formula alone."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kullback.divergences import DIVERGENCES, Element, Moments, Pair
from tests import oracle

KINDS = list(DIVERGENCES)


def element(kind, log_p, log_q, centred=False):
    ratio = log_p - log_q
    p, q = log_p.exp(), log_q.exp()
    excess = torch.where(ratio.abs() < 0.5, p * torch.expm1(-ratio), q - p)
    return DIVERGENCES[kind].element(Pair(p, q, ratio, excess, centred), **oracle.PARAMETERS[kind])


def random_rows(spread=2.0, rows=20, vocab=50, normalised=True):
    x, y = (torch.randn(rows, vocab, dtype=torch.float64) * spread for _ in range(2))
    return (x.log_softmax(-1), y.log_softmax(-1)) if normalised else (x, y)


def finished(kind, log_p, log_q, centred):
    e: Element = element(kind, log_p, log_q, centred)
    return torch.as_tensor(e.finish(e.term.sum(-1)).loss)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_partials_sum_to_the_term(kind, centred):
    """Euler: a 1-homogeneous term is the sum of its partials in log p and log q."""
    e = element(kind, *random_rows(normalised=False), centred=centred)
    torch.testing.assert_close(e.d_log_p + e.d_log_q, e.term, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_partials_are_the_derivatives_of_the_term(kind, centred, spread):
    log_p, log_q = (t.requires_grad_() for t in random_rows(spread, normalised=False))
    e = element(kind, log_p, log_q, centred)
    by_autograd = torch.autograd.grad(e.term.sum(), (log_p, log_q))
    for ours, truth in zip((e.d_log_p, e.d_log_q), by_autograd, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl", "total_variation"])
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_slopes_times_masses_are_the_partials(kind, spread):
    log_p, log_q = random_rows(spread)
    e = element(kind, log_p, log_q, centred=True)
    slope_p = e.slope_p + e.lean * e.slope_q
    torch.testing.assert_close(slope_p * log_p.exp(), e.d_log_p, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(e.slope_q * log_q.exp(), e.d_log_q, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_finish_slope_is_its_derivative(kind):
    log_p, log_q = random_rows()
    e = element(kind, log_p, log_q)
    total = e.term.sum(-1).requires_grad_()
    finish = e.finish(total)
    (truth,) = torch.autograd.grad(finish.loss.sum(), total)
    torch.testing.assert_close(torch.as_tensor(finish.slope).expand_as(truth).double(), truth)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_textbook(kind, centred):
    log_p, log_q = random_rows()
    truth = oracle.rows(kind, log_p.exp(), log_q.exp(), **oracle.PARAMETERS[kind])
    torch.testing.assert_close(finished(kind, log_p, log_q, centred), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("alpha", "renyi")])
def test_literal_on_unnormalised_rows(kind):
    log_p, log_q = random_rows(normalised=False)
    truth = oracle.rows(kind, log_p.exp(), log_q.exp(), **oracle.PARAMETERS[kind])
    torch.testing.assert_close(finished(kind, log_p, log_q, False), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [k for k in KINDS if DIVERGENCES[k].of_moments])
def test_sums_follow_from_the_moments(kind):
    log_p, log_q = random_rows()
    ratio, parameters = log_p - log_q, oracle.PARAMETERS[kind]
    moments = Moments(
        (log_p.exp() * ratio).sum(-1),
        (log_q.exp() * ratio).sum(-1),
        lambda a: (a * log_p + (1 - a) * log_q).exp().sum(-1),
    )
    sums = DIVERGENCES[kind].of_moments(moments, **parameters)
    whole = element(kind, log_p, log_q, centred=True)
    for ours, truth in zip(sums[:3], whole[:3], strict=True):
        expected = truth.sum(-1)
        torch.testing.assert_close(torch.as_tensor(ours).expand_as(expected).double(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_between_equals(kind):
    log_p, _ = random_rows()
    e = element(kind, log_p, log_p, centred=True)
    assert (e.term == 0).all()
    assert torch.as_tensor(e.finish(e.term.sum(-1)).loss).abs().max() == 0
    assert (e.d_log_p == 0).all()
    assert (e.d_log_q == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [1.0, 1e-2, 1e-4, 1e-6, 1e-8])
def test_centred_terms_are_never_negative(kind, epsilon):
    log_p, noise = random_rows()
    log_q = (log_p + epsilon * noise).log_softmax(-1)
    assert (element(kind, log_p, log_q, centred=True).term >= 0).all()


@pytest.mark.parametrize("kind", ["jeffreys", "total_variation", "hellinger"])
def test_symmetric(kind):
    log_p, log_q = random_rows()
    torch.testing.assert_close(finished(kind, log_p, log_q, True), finished(kind, log_q, log_p, True))


def test_jensen_shannon_of_equal_weights_is_symmetric_to_the_bit():
    log_p, log_q = random_rows()
    ratio = log_p - log_q
    p, q = log_p.exp(), log_q.exp()
    one = DIVERGENCES["jensen_shannon"].element(Pair(p, q, ratio, q - p, True))
    other = DIVERGENCES["jensen_shannon"].element(Pair(q, p, -ratio, p - q, True))
    assert torch.equal(one.term, other.term)
    assert torch.equal(one.d_log_p, other.d_log_q)


def test_reverse_is_kl_with_sides_exchanged():
    log_p, log_q = random_rows()
    for centred in (False, True):
        torch.testing.assert_close(finished("reverse_kl", log_p, log_q, centred), finished("kl", log_q, log_p, centred))


def test_total_variation_has_no_gradient_at_ties():
    log_p, _ = random_rows()
    e = element("total_variation", log_p, log_p)
    assert (e.d_log_p == 0).all()
    assert (e.d_log_q == 0).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(-700, 700), st.floats(-1 / 3, 1 / 3), st.floats(-300, 300), st.floats(1e-6, 1 - 1e-6))
def test_series_against_many_digits(d, z, ratio, weight):
    from kullback.formula import bregman, gap, log_blend, small_bregman

    mpmath.mp.dps = 400
    if d > -600:
        truth = float(mpmath.mpf(d) + mpmath.exp(-mpmath.mpf(d)) - 1)
        assert float(gap(torch.tensor(d, dtype=torch.float64))) == pytest.approx(truth, rel=1e-14)
    more = 1 + mpmath.mpf(z)
    truth = float(more * mpmath.log(more) - mpmath.mpf(z))
    for function in (bregman, small_bregman):
        assert float(function(torch.tensor(z, dtype=torch.float64))) == pytest.approx(truth, rel=1e-13)
    truth = float(8 * more * mpmath.log(8 * more) - (8 * more - 1))
    assert float(bregman(torch.tensor(8 * z + 7, dtype=torch.float64))) == pytest.approx(truth, rel=1e-13)
    a, b = mpmath.mpf(weight), mpmath.mpf(1 - weight)
    quotient = mpmath.exp(mpmath.mpf(ratio))
    truth = float(mpmath.log((a * quotient + b) / max(quotient, 1)))
    blend = log_blend(torch.tensor(ratio, dtype=torch.float64), weight, 1 - weight)
    assert float(blend) == pytest.approx(truth, rel=1e-13, abs=1e-16)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 2.0])
def test_powers_of_logits_are_those_of_their_masses(alpha, generator):
    """What `sqrt` and `overlap` print for logits, where exponents are at hand, means the same."""
    from kullback.formula import TENSOR, overlap

    x, y = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    top, scale, inverse = torch.tensor(1.0), torch.tensor(0.7), torch.tensor(0.1)
    q, p = (TENSOR["logit_mass"](t, top, scale, inverse) for t in (x, y))
    torch.testing.assert_close(TENSOR["logit_root"](x, top, scale, inverse), q.sqrt())
    both = TENSOR["logit_overlap"](y, top, scale, inverse, x, top, scale, inverse, (y - x) * scale, alpha)
    torch.testing.assert_close(both, p**alpha * q ** (1 - alpha))
    torch.testing.assert_close(overlap(p, q, (y - x) * scale, alpha), both)
