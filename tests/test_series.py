"""A power series in the log-ratio stands for every smooth kind near p = q: against the textbook in 30 digits."""

import mpmath
import pytest
import torch

from kullback.backends.cuda.logits import fits_series
from kullback.backends.cuda.logits.series import RADIUS, TERMS, TOLERANCE, series
from kullback.backends.near import (
    LEAST_TOLERANCE,
    MOST_SLOPE_TOLERANCE,
    NARROW,
    NEAR_TOLERANCE,
    SLOPE_TOLERANCE,
    WIDE,
    near,
)
from kullback.divergences import DIVERGENCES
from tests import kinds
from tests.kinds import FACTS, SMOOTH

mpmath.mp.dps = 30


def default(kind):
    known = DIVERGENCES[kind].parameter
    return 0.0 if known is None else known.default


CASES = [
    *[(kind, *kinds.values(kind)) for kind in SMOOTH],
    *[("jensen_shannon", beta) for beta in (0.01, 0.5, 0.9)],
    *[("skew_kl", alpha) for alpha in (1e-6, 0.1, 0.5, 0.95)],
    *[("alpha", alpha) for alpha in (-1.0, 0.2, 0.5, 2.0)],
    *[("renyi", alpha) for alpha in (0.2, 0.5, 2.0)],
]


@pytest.mark.parametrize(("kind", "parameter"), [(*case, 0.0)[:2] for case in CASES])
def test_series_is_the_divergence(kind, parameter):
    found = series(kind, parameter)
    given = [] if DIVERGENCES[kind].parameter is None else [parameter]
    term = lambda p, q: FACTS[kind].centred(p, q, *given)
    for r in torch.linspace(-RADIUS, RADIUS, 24, dtype=torch.float64).tolist():
        p, q = mpmath.exp(mpmath.mpf(r) / 2), mpmath.exp(-mpmath.mpf(r) / 2)
        d_log_p = mpmath.diff(lambda log_p, q=q: term(mpmath.exp(log_p), q), mpmath.log(p))
        d_log_q = mpmath.diff(lambda log_q, p=p: term(p, mpmath.exp(log_q)), mpmath.log(q))
        for factors, value in ((found.term, term(p, q)), (found.difference, d_log_q - d_log_p)):
            ours = sum(c * mpmath.mpf(r) ** k for k, c in enumerate(factors, 1))
            assert abs(ours - value) <= 1.01 * TOLERANCE * abs(value)


def test_factors_count():
    for kind in SMOOTH:
        found = series(kind, default(kind))
        assert len(found.term) == len(found.difference) == TERMS
        assert found.term[0] == 0


@pytest.mark.parametrize(
    ("kind", "parameter"),
    [
        *[(kind, 0.0) for kind in SMOOTH if FACTS[kind].is_symmetric],
        *[("jensen_shannon", 0.5), ("alpha", 0.5), ("renyi", 0.5)],
    ],
)
def test_symmetric_kinds_are_even_and_odd_to_the_bit(kind, parameter):
    found = series(kind, parameter)
    assert all(c == 0 for c in found.term[0::2])
    assert all(c == 0 for c in found.difference[1::2])
    assert found.term[1] > 0
    assert found.difference[0] < 0


def test_where_a_series_does_not_reach():
    assert series("total_variation", 0.0) is None
    assert series("alpha", 30.0) is None
    assert series("renyi", 20.0) is None
    assert not fits_series("total_variation", "logits", "logits")
    assert fits_series("alpha", "logits", "logits")  # whatever the parameter: kernels serve all of them
    assert not fits_series("kl", "logits", "log_probs")


WITH_NEAR = [
    ("jensen_shannon", 0.5, (10, 2, 8, 2)),
    ("jensen_shannon", 0.01, (8, 1, 8, 1)),
    ("jensen_shannon", 0.1, (10, 1, 8, 1)),
    ("skew_kl", 0.1, (10, 1, 8, 1)),
    ("total_variation", 0.0, (8, 2, 2, 2)),
    ("alpha", 0.5, (8, 2, 6, 1)),
    ("alpha", 0.8, (8, 1, 8, 1)),
    ("renyi", 0.5, (8, 2, 6, 1)),
]


@pytest.mark.parametrize("reach", [WIDE, NARROW])
@pytest.mark.parametrize(("kind", "parameter", "shape"), WITH_NEAR)
def test_polynomials_of_near_rows_are_the_divergence(kind, parameter, shape, reach):
    found = near(kind, parameter, reach)
    _, term_step, slope_terms, slope_step = shape
    assert found.shape == (shape if reach == WIDE else (6, term_step, min(slope_terms, 6), slope_step))
    given = [] if DIVERGENCES[kind].parameter is None else [parameter]
    corner = kind == "total_variation"
    term = lambda p, q: abs(p - q) / 2 if corner else FACTS[kind].centred(p, q, *given)
    for share in torch.linspace(-1, 1, 24, dtype=torch.float64).tolist():
        r = mpmath.mpf(reach.radius * share)
        p, q = mpmath.exp(r / 2), mpmath.exp(-r / 2)
        slope = mpmath.diff(lambda q, p=p: term(p, q), q)
        ours = sum(c * (abs(r) if corner else r) ** k for k, c in enumerate(found.term, 1 if corner else 2))
        ours_of_slope = (
            found.slope[0] * mpmath.sign(r) / 2 if corner else sum(c * r**k for k, c in enumerate(found.slope, 1))
        )
        allowed = LEAST_TOLERANCE + share**2
        of_slope = SLOPE_TOLERANCE if len(found.slope) < reach.slope_counts[-1] else MOST_SLOPE_TOLERANCE
        assert abs(ours - term(p, q)) <= 1.01 * NEAR_TOLERANCE * allowed * term(p, q)
        assert abs(ours_of_slope - slope) <= 1.01 * of_slope * allowed * abs(slope)


def test_where_they_do_not_reach():
    assert near("skew_kl", 0.5) is near("skew_kl", 0.95) is None
    assert near("skew_kl", 1.0) is None
