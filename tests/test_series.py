"""Powers of the log-ratio stand for every smooth kind near p = q: against the textbook in 30 digits."""

import mpmath
import pytest
import torch

from kullback.divergences import DIVERGENCES
from kullback.rows import NUMBERS, Problem
from kullback.series import POWERS, REACH, TOLERANCE, series
from tests import oracle

mpmath.mp.dps = 30

# An element's term, with the multiple of p - q that makes it begin with (p - q)²
TERMS = {
    "kl": lambda p, q: p * mpmath.log(p / q) + q - p,
    "reverse_kl": lambda p, q: q * mpmath.log(q / p) + p - q,
    "jeffreys": lambda p, q: (p - q) * mpmath.log(p / q),
    "jensen_shannon": lambda p, q, w: (
        w * p * mpmath.log(p / (w * p + (1 - w) * q)) + (1 - w) * q * mpmath.log(q / (w * p + (1 - w) * q))
    ),
    "skew_kl": lambda p, q, a: p * mpmath.log(p / (a * p + (1 - a) * q)) + (1 - a) * (q - p),
    "hellinger": lambda p, q: (mpmath.sqrt(p) - mpmath.sqrt(q)) ** 2 / 2,
    "chi2": lambda p, q: (p - q) ** 2 / q,
    "alpha": lambda p, q, a: (a * p + (1 - a) * q - p**a * q ** (1 - a)) / (a * (1 - a)),
    "renyi": lambda p, q, a: a * p + (1 - a) * q - p**a * q ** (1 - a),
}
CASES = [
    *[(kind, tuple(oracle.PARAMETERS[kind].values())) for kind in TERMS],
    *[("jensen_shannon", (w,)) for w in (0.01, 0.5, 0.9)],
    *[("skew_kl", (a,)) for a in (0.0, 0.1, 0.5, 0.95)],
    *[(kind, (a,)) for kind in ("alpha", "renyi") for a in (-1.0, 0.2, 0.5, 2.0) if a > 0 or kind == "alpha"],
]


@pytest.mark.parametrize(("kind", "parameters"), CASES)
def test_series_is_the_divergence(kind, parameters):
    found = series(kind, parameters)
    for r in torch.linspace(-REACH, REACH, 24, dtype=torch.float64).tolist():
        p, q = mpmath.exp(mpmath.mpf(r) / 2), mpmath.exp(-mpmath.mpf(r) / 2)
        term = TERMS[kind](p, q, *parameters)
        slopes = [
            mpmath.diff(lambda log_p, q=q: TERMS[kind](mpmath.exp(log_p), q, *parameters), mpmath.log(p)),
            mpmath.diff(lambda log_q, p=p: TERMS[kind](p, mpmath.exp(log_q), *parameters), mpmath.log(q)),
        ]
        for factors, value in ((found.term, term), (found.difference, slopes[1] - slopes[0])):
            ours = sum(c * mpmath.mpf(r) ** k for k, c in enumerate(factors, 1))
            assert abs(ours - value) <= 1.01 * TOLERANCE * abs(value)


def test_factors_count():
    for kind in TERMS:
        found = series(kind, tuple(DIVERGENCES[kind].parameters.values()))
        assert len(found.term) == len(found.difference) == POWERS
        assert found.term[0] == 0


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("jeffreys", ()), ("hellinger", ()), ("jensen_shannon", (0.5,)), ("alpha", (0.5,)), ("renyi", (0.5,))],
)
def test_symmetric_kinds_are_even_and_odd_to_the_bit(kind, parameters):
    found = series(kind, parameters)
    assert all(c == 0 for c in found.term[0::2])
    assert all(c == 0 for c in found.difference[1::2])
    assert found.term[1] > 0
    assert found.difference[0] < 0


def test_where_powers_do_not_reach():
    assert series("total_variation", ()) is None
    assert series("alpha", (30.0,)) is None
    assert series("renyi", (20.0,)) is None
    assert not Problem("total_variation", "logits", "logits").is_smooth
    assert Problem("alpha", "logits", "logits", (*NUMBERS, 30.0)).is_smooth  # its kernels serve other parameters too
    assert Problem("kl", "logits", "log_probs").series is None


def test_jensen_shannon_is_small_where_kl_is():
    """Kernels take rows of a small Σ q log(q/p) for close; rows that are not must not be, whichever side is which."""
    factor = 3 * series("jensen_shannon", (0.5,)).term[1]
    for spread in (0.01, 0.3, 1.0, 3.0, 10.0):
        p, q = (spread * torch.randn(2, 1000, 50, dtype=torch.float64)).softmax(-1)
        ours, bound = oracle.rows("jensen_shannon", p, q, weight=0.5), factor * oracle.rows("reverse_kl", p, q)
        assert (ours <= bound + 1e-15).all()
