"""The row states are monoids: merging parts gives the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kullback.backends.torch import normalize
from kullback.rows import LogSumExp, Sums

logits = st.lists(st.one_of(st.floats(-1e4, 1e4), st.just(float("-inf"))), min_size=0, max_size=12)


def state(values):
    return normalize(torch.tensor([values], dtype=torch.float64).reshape(1, -1))


def same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0, equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(logits, logits, logits)
def test_log_sum_exp_is_a_monoid(a, b, c):
    parts = [state(v) for v in (a, b, c)]
    if any(torch.isnan(p.total).any() for p in parts):  # a row of -inf alone has no softmax
        return
    x, y, z = parts
    same(x.merge(y).merge(z), x.merge(y.merge(z)))
    same(x.merge(state([])), x)
    same(state([]).merge(x), x)
    if any(v > float("-inf") for v in a + b + c):
        same(x.merge(y).merge(z), state(a + b + c))


def test_nothing_merged_with_nothing_is_nothing():
    nothing = state([])
    same(nothing.merge(nothing), LogSumExp(torch.tensor([-torch.inf]).double(), torch.zeros(1).double()))


@pytest.mark.parametrize("split", [0, 1, 3, 7])
def test_sums_merge(split):
    values = torch.randn(3, 7, dtype=torch.float64)
    whole = Sums(*values.sum(-1))
    parts = [Sums(*part.sum(-1)) for part in (values[:, :split], values[:, split:])]
    same(parts[0].merge(parts[1]), whole)
