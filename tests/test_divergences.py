"""Laws that every divergence keeps, on its formula alone."""

import itertools
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kullback.divergences import DIVERGENCES, Element, Moments, Pair
from kullback.formula import Symbol
from kullback.problem import Problem, Side, formula
from tests import kinds, oracle
from tests.kinds import KINDS


def pair(log_p, log_q, centred=False):
    ratio = log_p - log_q
    p, q = log_p.exp(), log_q.exp()
    q_minus_p = torch.where(ratio.abs() < 0.5, p * torch.expm1(-ratio), q - p)
    return Pair(p, q, p.log(), q.log(), ratio, q_minus_p, torch.zeros(()), centred)


def element(kind, log_p, log_q, centred=False):
    return kinds.element(kind, pair(log_p, log_q, centred))


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


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_derivative_of_a_finish(kind, centred):
    log_p, log_q = random_rows()
    e = element(kind, log_p, log_q, centred)
    total = e.term.sum(-1).requires_grad_()
    finish = e.finish(total)
    (truth,) = torch.autograd.grad(finish.loss.sum(), total)
    torch.testing.assert_close(torch.as_tensor(finish.derivative).expand_as(truth).double(), truth)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_textbook(kind, centred):
    log_p, log_q = random_rows()
    truth = oracle.rows(kind, log_p.exp(), log_q.exp(), **kinds.parameters(kind))
    torch.testing.assert_close(finished(kind, log_p, log_q, centred), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_literal_on_unnormalised_rows(kind):
    log_p, log_q = random_rows(normalised=False)
    truth = oracle.rows(kind, log_p.exp(), log_q.exp(), **kinds.parameters(kind))
    torch.testing.assert_close(finished(kind, log_p, log_q, False), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", kinds.WITH_MOMENTS)
def test_sums_follow_from_the_moments(kind):
    log_p, log_q = random_rows()
    ratio = log_p - log_q
    moments = Moments(
        (log_p.exp() * ratio).sum(-1),
        (log_q.exp() * ratio).sum(-1),
        lambda a: (a * log_p + (1 - a) * log_q).exp().sum(-1),
    )
    sums = DIVERGENCES[kind].moments(moments, *kinds.values(kind))
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


@pytest.mark.parametrize("kind", kinds.having(is_symmetric=True))
def test_symmetric(kind):
    log_p, log_q = random_rows()
    torch.testing.assert_close(finished(kind, log_p, log_q, True), finished(kind, log_q, log_p, True))


def test_jensen_shannon_of_equal_weights_is_symmetric_to_the_bit():
    x = pair(*random_rows(), centred=True)
    one = DIVERGENCES["jensen_shannon"](x, 0.5)
    other = DIVERGENCES["jensen_shannon"](
        Pair(x.q, x.p, x.log_q, x.log_p, -x.ratio, -x.q_minus_p, x.tilted_lse, True), 0.5
    )
    assert torch.equal(one.term, other.term)
    assert torch.equal(one.d_log_p, other.d_log_q)


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
@pytest.mark.parametrize("parameter", [0.1, 0.3, 0.7, 0.9])
def test_a_mixture_of_one_side_alone(kind, parameter):
    """In float32, where a part of the mixture may round to more than all of it."""
    mass, nothing = torch.rand(2000), torch.zeros(2000)
    for p, q in ((mass, nothing), (nothing, mass)):
        ratio = torch.where(p == 0, -math.inf, math.inf)
        e = DIVERGENCES[kind](Pair(p, q, p.log(), q.log(), ratio, q - p, 0.0, centred=False), parameter)
        for value in e[:3]:
            assert value.isfinite().all()
        truth = oracle.rows(kind, p[:, None].double(), q[:, None].double(), parameter)
        torch.testing.assert_close(e.term.double(), truth, rtol=1e-5, atol=1e-7)


def test_jensen_shannon_admits_what_float32_tells_from_0_and_1():
    admits = DIVERGENCES["jensen_shannon"].parameter.admits
    for beta in (0.0, 1e-46, 1e-38, 1.3e-38, 1e-30, 0.5, 1 - 5e-8, 1 - 2.9e-8, 1 - 1e-9, 1.0, 1.5):
        rounded = torch.tensor(beta).item()
        assert admits(beta) == (torch.finfo(torch.float32).tiny <= rounded < 1)


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
def test_stable_functions_against_many_digits(d, z, ratio, weight):
    from kullback.formula import bennett, exp_remainder, log_mix, small_bennett

    mpmath.mp.dps = 400
    if d > -600:
        truth = float(mpmath.mpf(d) + mpmath.exp(-mpmath.mpf(d)) - 1)
        assert float(exp_remainder(torch.tensor(d, dtype=torch.float64))) == pytest.approx(truth, rel=1e-14)
    more = 1 + mpmath.mpf(z)
    truth = float(more * mpmath.log(more) - mpmath.mpf(z))
    for function in (bennett, small_bennett):
        assert float(function(torch.tensor(z, dtype=torch.float64))) == pytest.approx(truth, rel=1e-13)
    truth = float(8 * more * mpmath.log(8 * more) - (8 * more - 1))
    assert float(bennett(torch.tensor(8 * z + 7, dtype=torch.float64))) == pytest.approx(truth, rel=1e-13)
    a, b = mpmath.mpf(weight), mpmath.mpf(1 - weight)
    quotient = mpmath.exp(mpmath.mpf(ratio))
    truth = float(mpmath.log((a * quotient + b) / max(quotient, 1)))
    mix = log_mix(torch.tensor(ratio, dtype=torch.float64), weight, 1 - weight)
    assert float(mix) == pytest.approx(truth, rel=1e-13, abs=1e-16)


def sums_and_bounds(kind, spread, parameter):
    """Rows' sums; and `reverse_kl_factor` times what it bounds them by, of any log-ratios and of bounded ones."""
    known = DIVERGENCES[kind]
    curvature = Problem(kind, Side("logits"), Side("logits"), *parameter).curvature
    log_p, log_q = random_rows(spread, rows=200)
    e = known(pair(log_p, log_q, centred=True), *parameter)
    q, ratio = log_q.exp(), log_p - log_q
    most = 10 * math.log(2)  # as kernels bound it where few tokens decide
    means = [-(q * r).sum(-1) for r in (ratio, ratio.clamp(-most, most))]
    return e, [known.reverse_kl_factor * curvature * mean for mean in means]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if DIVERGENCES[kind].reverse_kl_factor is not None])
def test_reverse_kl_foresees_close_rows(kind):
    """Strictly where p and q may be exchanged: then exchanging them changes no row's mode."""
    parameters = {kinds.values(kind), (0.5,) if kinds.values(kind) else ()}
    for parameter, spread in itertools.product(parameters, (0.01, 0.1, 0.3)):
        e, bounds = sums_and_bounds(kind, spread, parameter)
        assert all((e.term.sum(-1) <= bound + 1e-15).all() for bound in bounds)
    for spread in (1.0, 3.0, 10.0, 20.0):
        e, bounds = sums_and_bounds("jensen_shannon", spread, (0.5,))
        assert all((e.term.sum(-1) <= bound).all() for bound in bounds)


@pytest.mark.parametrize("kind", KINDS)
def test_least_mean_slope(kind):
    for spread in (0.01, 0.3, 1.0, 3.0, 10.0):
        e = element(kind, *random_rows(spread, rows=200), centred=True)
        assert (e.d_log_q.sum(-1) >= DIVERGENCES[kind].least_mean_slope - 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_definitions_are_one_line(kind):
    """They stand in tables: README.md, docs/mathematics.md and the docstring of `divergence`."""
    known = DIVERGENCES[kind]
    assert known.name == kind
    assert len(known.definition) < 60
    assert known.definition != kind
    assert [*known.defaults] == [*kinds.parameters(kind)]
    if known.parameter is not None:
        assert known.parameter.admits(known.parameter.default)
        assert known.parameter.admits(*kinds.values(kind))


# Where an operation is exact, as a bound on its operand: formula.py
SMALL = {"small_exp_remainder": 0.5, "small_expm1": 0.5, "small_bennett": 1 / 3}


def unsigned(x):
    """Whatever the sign is."""
    return unsigned(x.args[0]) if isinstance(x, Symbol) and x.op in ("neg", "abs") else x


def small_operands(expression, bounds=None):
    """Each operand of an operation of small numbers, with the bound under which it is used."""
    bounds = bounds or {}
    if not isinstance(expression, Symbol):
        return
    if expression.op in SMALL:
        yield expression.op, bounds.get(unsigned(expression.args[0]), math.inf)
    if expression.op == "select_near":
        x, bound, near, far = expression.args
        yield from small_operands(x, bounds)
        yield from small_operands(near, {**bounds, unsigned(x): bound})
        yield from small_operands(far, bounds)
    elif expression.op != "variable":
        for operand in expression.args:
            yield from small_operands(operand, bounds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", oracle.FORMS)
def test_series_are_used_where_they_hold(kind, form):
    """In kernels they have no other branch."""
    element = formula(kind, form, form).element
    for name in ("term", "d_log_p", "d_log_q"):
        for op, bound in small_operands(element[name]):
            assert bound <= SMALL[op], (name, op)
