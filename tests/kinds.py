"""What tests know of each kind beside its textbook formula: one table, each exception with its reason."""

import math
from collections.abc import Callable
from typing import NamedTuple

import mpmath
import pytest
import torch

from kullback.divergences import DIVERGENCES, Divergence
from tests import oracle

INF = math.inf
KINDS = tuple(DIVERGENCES)
# With moments, without, and with a finish that is not linear: what backends do in ways of their own
FEW = ("kl", "jensen_shannon", "renyi")


class Facts(NamedTuple):
    """The first two are the loss of the rows in `one_side_zero`, by hand."""

    p_is_zero: float
    q_is_zero: float
    is_symmetric: bool = False
    # A term with the multiple of p - q that makes it begin with (p - q)², in any arithmetic; None: it has a corner
    centred: Callable[..., object] | None = None
    # Whether the textbook's loss of rows that hardly overlap is a float32 that ours has to hold
    holds_far_rows: bool = True
    # Whether p²/q is in a term, which may be the largest number of all where q underflows
    has_squares: bool = False


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EVERY_BACKEND = pytest.mark.parametrize("backend", ["torch", "c", "emulated", GPU], indirect=True)
# Of cases each of which compiles more kernels in C, though nothing there is new
LONG_IN_C = pytest.mark.parametrize("backend", ["torch", pytest.param("c", marks=pytest.mark.full), GPU], indirect=True)


def one_side_zero():
    """Rows (p, q) where p is 0 at q = 1/2, beside an element of equal masses; and the other way round."""
    whole = torch.tensor([[0.5, 0.0, 0.0, 0.25]])
    part = torch.tensor([[0.0, 0.0, 0.0, 0.25]])
    return (part, whole), (whole, part)


log, sqrt = mpmath.log, mpmath.sqrt
BETA, SKEW, ALPHA, RENYI = (
    next(iter(oracle.PARAMETERS[kind].values())) for kind in ("jensen_shannon", "skew_kl", "alpha", "renyi")
)


def mixed_kl(p, q, b):
    return b * (p * log(p / q) + q - p) + (1 - b) * (q * log(q / p) + p - q)


def jensen_shannon(p, q, b):
    m = b * p + (1 - b) * q
    return b * p * log(p / m) + (1 - b) * q * log(q / m)


def shortfall(p, q, a):
    return a * p + (1 - a) * q - p**a * q ** (1 - a)


FACTS = {
    "kl": Facts(0.0, INF, centred=lambda p, q: p * log(p / q) + q - p),
    "reverse_kl": Facts(INF, 0.0, centred=lambda p, q: q * log(q / p) + p - q),
    "jeffreys": Facts(INF, INF, is_symmetric=True, centred=lambda p, q: (p - q) * log(p / q)),
    "mixed_kl": Facts(INF, INF, centred=mixed_kl),
    "jensen_shannon": Facts(
        -(1 - BETA) * 0.5 * math.log(1 - BETA), -BETA * 0.5 * math.log(BETA), centred=jensen_shannon
    ),
    "skew_kl": Facts(
        0.0, -0.5 * math.log(SKEW), centred=lambda p, q, a: p * log(p / (a * p + (1 - a) * q)) + (1 - a) * (q - p)
    ),
    "total_variation": Facts(0.25, 0.25, is_symmetric=True),
    "hellinger": Facts(
        0.25,
        0.25,
        is_symmetric=True,
        centred=lambda p, q: (sqrt(p) - sqrt(q)) ** 2 / 2,
    ),
    "chi2": Facts(
        0.5,
        INF,
        centred=lambda p, q: (p - q) ** 2 / q,
        holds_far_rows=False,  # p²/q overflows
        has_squares=True,
    ),
    "alpha": Facts(
        *[(1 - 0.25) / (ALPHA * (1 - ALPHA))] * 2,
        centred=lambda p, q, a: shortfall(p, q, a) / (a * (1 - a)),
    ),
    "renyi": Facts(
        *[math.log(0.25) / (RENYI - 1)] * 2,
        centred=lambda p, q, a: shortfall(p, q, a) / (a * (1 - a)),
    ),
}


def having(**facts):
    """The kinds of which these facts hold."""
    return [kind for kind in KINDS if all(getattr(FACTS[kind], name) == value for name, value in facts.items())]


SMOOTH = [kind for kind in KINDS if FACTS[kind].centred is not None]  # at p = q
WITH_MOMENTS = [kind for kind, known in DIVERGENCES.items() if known.moments is not None]
WITH_PARAMETER = [kind for kind, known in DIVERGENCES.items() if known.parameter is not None]


def parameters(kind):
    """A kind's own number for tests, none of them a default, as keywords."""
    return oracle.PARAMETERS.get(kind, {})


def values(kind):
    """The same as positions."""
    return tuple(parameters(kind).values())


def element(kind, pair):
    known: Divergence = DIVERGENCES[kind]
    return known(pair, *values(kind))
