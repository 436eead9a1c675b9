"""Statistics and sums of rows are monoids; a row in pieces gives the whole row's result, in every backend."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kullback import backends
from kullback.divergences import Pair
from kullback.problem import Problem, Side
from kullback.state import (
    Mode,
    RowState,
    RowStats,
    RowSums,
    fields,
    finish,
    merge_stats,
    merge_sums,
    packed,
    sums_of,
    unpacked,
)
from kullback.work import Operands, Rows
from tests import kinds, oracle, samples
from tests.kinds import EVERY_BACKEND, GPU, KINDS
from tests.samples import masked, sample
from tests.tolerances import relative_error

LOGITS = [(kind, "logits", "logits") for kind in KINDS]
# One side alone needs its row's normaliser.
MIXED = [
    (kind, *pair)
    for kind in ("kl", "jensen_shannon", "renyi")
    for pair in (("logits", "probs"), ("log_probs", "logits"))
]
LITERAL = [(kind, form, form) for kind in KINDS for form in ("probs", "log_probs")]


def problem_of(kind, form, target_form=None, **options):
    return Problem(kind, Side(form, **options), Side(target_form or form, **options), *kinds.values(kind))


def test_a_pickled_problem_leaves_its_hash_behind():
    """Hashes of names differ between processes."""
    problem = problem_of("renyi", "logits", temperature=0.7)
    hash(problem)
    other = pickle.loads(pickle.dumps(problem))
    assert other == problem
    assert "_hash" not in vars(other)


def statistics(problem, x, y):
    found = packed(x.size(0), len(fields(RowStats, problem.formula.has_tilted_lse)), x)
    backends.run(Rows(problem, Operands(x, y), "statistics", found=found))
    stats = unpacked(RowStats, found)
    assert {*stats.mode.tolist()} <= {*map(float, Mode)}
    return stats


def pack(problem, record):
    return torch.stack([getattr(record, name) for name in fields(type(record), problem.formula.has_tilted_lse)])


def accumulate(problem, x, y, stats):
    found = packed(x.size(0), len(RowSums._fields), x)
    backends.run(Rows(problem, Operands(x, y), "accumulate", known=pack(problem, stats), found=found))
    return RowSums(*found)


def gradient(problem, x, y, state, upstream):
    outputs = torch.empty_like(x), torch.empty_like(y)
    known = pack(problem, state)
    backends.run(
        Rows(problem, Operands(x, y, upstream), "gradient", known=known, d_input=outputs[0], d_target=outputs[1])
    )
    return outputs


def in_pieces(problem, x, y, upstream, cuts):
    """Losses and gradients of rows of which no one sees more than a piece."""
    xs, ys = x.tensor_split(cuts, -1), y.tensor_split(cuts, -1)
    pieces = [(a.contiguous(), b.contiguous()) for a, b in zip(xs, ys, strict=True)]
    stats = merge_stats(problem, [statistics(problem, *piece) for piece in pieces])
    sums = sums_of(stats)
    if not problem.has_moments:
        sums = merge_sums([accumulate(problem, *piece, stats) for piece in pieces])
    losses, state = finish(problem, stats, sums)
    d_input, d_target = zip(*(gradient(problem, *piece, state, upstream) for piece in pieces), strict=True)
    return losses, torch.cat(d_input, -1), torch.cat(d_target, -1)


def whole(problem, x, y, upstream):
    losses = torch.empty(x.size(0), dtype=torch.float64, device=x.device)
    state = packed(x.size(0), len(fields(RowState, problem.formula.has_tilted_lse)), x)
    backends.run(Rows(problem, Operands(x, y), loss=losses, found=state))
    return losses, *gradient(problem, x, y, unpacked(RowState, state), upstream)


def truth(problem, x, y, upstream):
    x, y = (t.double().requires_grad_() for t in (x, y))
    losses = oracle.divergence(
        x, y, problem.kind, problem.input.form, problem.target.form, temperature=1.0, **kinds.parameters(problem.kind)
    )
    return losses.detach(), *torch.autograd.grad(losses, (x, y), upstream)


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize(("kind", "form", "target_form"), LOGITS + MIXED)
def test_a_row_in_pieces_is_the_row(backend, device, generator, kind, form, target_form):
    check_pieces(device, generator, kind, form, target_form)


@pytest.mark.few_kinds
@pytest.mark.parametrize(("kind", "form", "target_form"), LITERAL)
def test_pieces_of_elements_that_stand_alone(backend, device, generator, kind, form, target_form):
    check_pieces(device, generator, kind, form, target_form)


def check_pieces(device, generator, kind, form, target_form):
    """Pieces of unlike masses and lengths, one of a single token; rows from far to close."""
    problem, vocab = problem_of(kind, form, target_form), 1003
    if form == target_form == "logits":
        rows = samples.batch(
            generator,
            vocab,
            torch.float32,
            far=samples.far(2.0),
            apart=samples.apart(0.3),
            close=samples.apart(0.01),
            closer=samples.apart(1e-3),
            spiked=samples.spiked(0.01, 2.0, 97),
            peaked=samples.peaked(samples.apart(0.1), 5, 12.0),
            shifted=samples.shifted(0.05, 40.0),
        )
        x, y = rows.x.to(device), rows.y.to(device)
    else:
        x, y = (sample(f, (5, vocab), generator).to(device) for f in (form, target_form))
    upstream = torch.rand(len(x), generator=generator, dtype=torch.float64).to(device) + 0.5
    expected = truth(problem, x, y, upstream)
    ours = in_pieces(problem, x, y, upstream, (1, 21, 512))
    together = whole(problem, x, y, upstream)
    for name, mine, once, exact in zip(("loss", "input", "target"), ours, together, expected, strict=True):
        for row in range(len(x)):
            # What a fused pass is off by, which may be one rounding's luck, and a few roundings of float32
            bound = 4 * relative_error(once[row], exact[row]) + 3e-6
            assert relative_error(mine[row], exact[row]) < bound, (name, row)


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jensen_shannon", "total_variation", "chi2", "alpha"])
def test_pieces_that_lack_a_side(backend, device, generator, kind):
    """A piece of which the teacher, the student or both mask every token; and one that neither has."""
    problem, vocab = problem_of(kind, "logits"), 240
    first = slice(0, 80)
    rows = samples.batch(
        generator,
        vocab,
        torch.float32,
        teacher=masked(samples.apart(0.5), y=first),
        student=masked(samples.apart(0.5), x=first),
        both=masked(samples.apart(0.5), both=first),
        some=masked(samples.apart(0.5), both=samples.EVERY_7TH),
    )
    x, y = rows.x.to(device), rows.y.to(device)
    upstream = torch.ones(len(x), dtype=torch.float64, device=device)
    ours = in_pieces(problem, x, y, upstream, (80, 160))
    together = whole(problem, x, y, upstream)
    for mine, once in zip(ours, together, strict=True):
        torch.testing.assert_close(mine, once, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("backend", ["torch", "c", "emulated", GPU], indirect=True)
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
@pytest.mark.parametrize("vocab", [3, 700])
def test_rows_whose_sides_share_no_token(backend, device, generator, alpha, vocab):
    """Σ p^a q^(1-a) is 0, and what rounding leaves of 1 is not that; in one piece of a row, too."""
    x, y = (sample("logits", (3, vocab), generator) for _ in range(2))
    is_of_x = torch.arange(vocab) % 3 > 0
    x[:2, ~is_of_x], y[:2, is_of_x] = -math.inf, -math.inf
    x[2, : vocab // 2][~is_of_x[: vocab // 2]] = -math.inf
    y[2, : vocab // 2][is_of_x[: vocab // 2]] = -math.inf
    x, y = x.to(device), y.to(device)
    upstream = torch.ones(3, dtype=torch.float64, device=device)
    for kind, expected in (("alpha", 1 / (alpha * (1 - alpha))), ("renyi", math.inf)):
        problem = Problem(kind, Side("logits"), Side("logits"), alpha)
        losses, d_input, d_target = whole(problem, x, y, upstream)
        assert losses[:2].tolist() == pytest.approx([expected] * 2, rel=1e-6)
        if kind == "alpha":
            assert max(d_input[:2].abs().max(), d_target[:2].abs().max()) < 1e-5
        in_two = in_pieces(problem, x, y, upstream, (vocab // 2,))[0]
        torch.testing.assert_close(in_two, losses, rtol=1e-5, atol=0)
        exact = oracle.divergence(x.double().cpu(), y.double().cpu(), kind, alpha=alpha, temperature=1.0)
        torch.testing.assert_close(losses[2].cpu(), exact[2], rtol=1e-5, atol=0)


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_identical_pieces_give_nothing(backend, device, generator, kind):
    x = sample("logits", (3, 300), generator).to(device)
    upstream = torch.ones(3, dtype=torch.float64, device=device)
    losses, *gradients = in_pieces(problem_of(kind, "logits"), x, x.clone(), upstream, (100, 200))
    assert (losses == 0).all()
    for found in gradients:
        assert found.abs().max() < 1e-7


logits = st.lists(st.one_of(st.floats(-1e4, 1e4), st.just(float("-inf"))), min_size=0, max_size=12)
KL, TOTAL_VARIATION = problem_of("kl", "logits"), problem_of("total_variation", "logits")


def stats_of(x, y):
    x, y = (torch.tensor([values], dtype=torch.float64).reshape(1, -1) for values in (x, y))
    return statistics(TOTAL_VARIATION, x, y)


def same(one, other):
    """A log-sum-exp near 0 is as far off as the masses' sum, which is near 1."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15, equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(logits, logits, logits)
def test_log_sum_exp_is_a_monoid(a, b, c):
    x, y, z = (stats_of(values, values) for values in (a, b, c))
    merge = lambda *pieces: merge_stats(TOTAL_VARIATION, pieces)
    nothing = stats_of([], [])
    same(merge(merge(x, y), z), merge(x, merge(y, z)))
    same(merge(x, nothing), x)
    same(merge(nothing, x), x)
    same(merge(x, y, z), stats_of(a + b + c, a + b + c))


row = st.lists(st.floats(-8, 8), min_size=3, max_size=12)


@settings(max_examples=200, deadline=None)
@given(row, row, st.integers(1, 2))
def test_moments_of_pieces_are_those_of_the_row(x, y, cut):
    """The chain rule, in float64, of every kind that has moments."""
    size = min(len(x), len(y))
    x, y = (torch.tensor([values[:size]], dtype=torch.float64) for values in (x, y))
    for kind in kinds.WITH_MOMENTS:
        problem = problem_of(kind, "logits")
        together = statistics(problem, x, y)
        merged = merge_stats(
            problem, [statistics(problem, *pair) for pair in ((x[:, :cut], y[:, :cut]), (x[:, cut:], y[:, cut:]))]
        )
        for name in ("term", "d_log_p", "d_log_q"):
            one, other = getattr(merged, name), getattr(together, name)
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12 * float(1 + together.term.abs()))


@pytest.mark.parametrize("split", [0, 1, 3, 7])
def test_sums_merge(split):
    values = torch.randn(5, 3, 7, dtype=torch.float64)
    whole = RowSums(*values[:4].sum(-1), values[4].amax(-1))
    parts = [RowSums(*part[:4].sum(-1), values[4].amax(-1)) for part in (values[..., :split], values[..., split:])]
    same(merge_sums(parts), whole)


def test_a_row_is_as_safe_as_its_safest_piece():
    modes = [torch.tensor([float(mode)]) for mode in (Mode.FAST, Mode.SAFE, Mode.STABLE)]
    zero = torch.zeros(1)
    assert merge_sums([RowSums(zero, zero, zero, zero, mode) for mode in modes]).mode == Mode.SAFE


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "total_variation"])
@pytest.mark.parametrize(("spread", "most"), [(1.0, 3.0), (0.02, 0.03)])
def test_normalisers_that_are_off(kind, spread, most, generator):
    """As float32's are: a loss shows nothing of their first order and, of rows that are close, of their second.

    total_variation has a corner at p = q, and keeps the first.
    """
    problem = problem_of(kind, "logits")
    y = sample("logits", (4, 300), generator)
    x = y + spread * torch.randn(y.shape, generator=generator, dtype=y.dtype)
    log_p, log_q = y.log_softmax(-1), x.log_softmax(-1)
    nothing = torch.zeros(4, dtype=torch.float64)
    stats = RowStats(x.logsumexp(-1), y.logsumexp(-1), nothing, nothing, nothing, nothing, nothing)

    def loss(off):
        p, q = log_p.exp(), (log_q - off).exp()
        element = problem.divergence(
            Pair(p, q, log_p, log_q - off, log_p - log_q + off, q - p, 0 * p, centred=True), *kinds.values(kind)
        )
        sums = (element.term, element.d_log_p, element.d_log_q, q - p)
        return finish(problem, stats, RowSums(*(torch.as_tensor(t).expand(4, 300).sum(-1) for t in sums), nothing))[0]

    for off in (2e-3, -2e-3):
        assert (loss(off) - loss(0.0)).abs().max() < most * off**2
