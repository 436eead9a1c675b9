"""Near rows on a CPU: polynomials of log-ratios over √(p·q), and what serves where they do not reach."""

import pytest
import torch

import kullback
from kullback import backends
from kullback.backends.near import FLOAT_RADIUS, FLOAT_TOLERANCE, over_root, term_over_root
from kullback.divergences import DIVERGENCES
from kullback.problem import Problem, Side, element_at
from kullback.state import Mode, RowState, packed, state_fields
from kullback.work import Operands, Rows
from tests import kinds, oracle
from tests.samples import sample
from tests.tolerances import FLOAT_GRADIENT, LOSS, relative_error

pytestmark = pytest.mark.parametrize("backend", ["c"], indirect=True)


def modes_of(kind, x, y, temperatures=(1.0, 1.0)):
    """Of rows, as a loss keeps them for a later backward."""
    problem = Problem(kind, *(Side("logits", t) for t in temperatures), *kinds.values(kind))
    loss = torch.empty(x.size(0))
    found = packed(x.size(0), state_fields(problem), loss)
    backends.run(Rows(problem, Operands(x, y), loss=loss, found=found))
    return found[RowState._fields.index("mode")].tolist()


def near_rows(generator, rows=6, vocab=1203, apart=0.12):
    y = torch.randn(rows, vocab, generator=generator)
    return y + apart * torch.randn(rows, vocab, generator=generator), y


@pytest.mark.parametrize("share", [None, 0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("kind", kinds.SMOOTH)
def test_polynomials_are_as_exact_as_floats(backend, kind, share):
    defaults = list(DIVERGENCES[kind].defaults.values())
    parameter = share if share is not None and defaults else (*defaults, 0.0)[0]
    found = over_root(kind, parameter)
    at = torch.linspace(-1, 1, 401, dtype=torch.float64)
    ratio = FLOAT_RADIUS * at
    for factors, (values_of, first) in (
        (found.term, term_over_root(kind, parameter)),
        (
            found.difference,
            (lambda r: element_at(kind, parameter, r).d_log_q - element_at(kind, parameter, r).d_log_p, 1),
        ),
    ):
        powers = ratio.unsqueeze(-1) ** torch.arange(first, first + len(factors))
        error = (powers @ torch.tensor(factors, dtype=torch.float64) - values_of(ratio)).abs()
        assert (error <= 1.01 * FLOAT_TOLERANCE * (0.02 + at.square()) * values_of(ratio).abs() + 1e-15).all()


@pytest.mark.few_kinds
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("wants", [(True, False), (True, True)])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "chi2", "renyi", "hellinger", "mixed_kl"])
def test_values_and_gradients(backend, generator, kind, wants, far):
    """far: one span of a row has log-ratios beyond the polynomials, and one has a token that both sides mask."""
    x, y = near_rows(generator)
    if far:
        x[:, 300], y[:, 300] = -3.0, -6.0
        x[:, 700] = y[:, 700] = -torch.inf
    assert modes_of(kind, x, y) == [Mode.STABLE] * 6
    for softcap in (None, 20.0) if all(wants) else (None,):
        leaves = [t.double().requires_grad_() for t in (x, y)]
        capped = leaves if softcap is None else [softcap * torch.tanh(t / softcap) for t in leaves]
        losses = oracle.divergence(*capped, kind, temperature=0.9, **kinds.parameters(kind))
        expected = torch.autograd.grad(losses.sum(), leaves)
        ours = [t.clone().requires_grad_(wanted) for t, wanted in zip((x, y), wants, strict=True)]
        options = {"temperature": 0.9, "softcap": softcap, "target_softcap": softcap, **kinds.parameters(kind)}
        rows = kullback.divergence(*ours, kind, reduction="none", **options)
        torch.testing.assert_close(rows.double(), losses.detach(), rtol=1e-6, atol=0)
        total = kullback.divergence(*ours, kind, reduction="sum", **options)
        assert relative_error(total, losses.sum()) < LOSS
        for loss in (rows.sum(), total):  # of states, and in forward
            found = torch.autograd.grad(loss, [t for t in ours if t.requires_grad])
            for mine, truth in zip(found, expected, strict=False):
                assert relative_error(mine, truth.nan_to_num()) < FLOAT_GRADIENT


@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
@pytest.mark.parametrize("apart", [1e-1, 1e-2, 1e-3, 1e-4])
def test_the_nearer_the_row_no_less_exact(backend, generator, kind, apart):
    x, y = near_rows(generator, apart=apart)
    truth = oracle.divergence(x, y, kind, **kinds.parameters(kind))
    for offset in (0.0, 1000.0):
        moved = (x + offset).requires_grad_()
        leaf = moved.detach().double().requires_grad_()
        expected = oracle.divergence(leaf, y, kind, **kinds.parameters(kind))
        found = kullback.divergence(moved, y, kind, reduction="none", **kinds.parameters(kind))
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-6, atol=0)
        assert (found >= 0).all()
        (mine,) = torch.autograd.grad(found.sum(), moved)
        assert relative_error(mine, torch.autograd.grad(expected.sum(), leaf)[0]) < FLOAT_GRADIENT
    assert (truth > 0).all()


def test_which_rows(backend, generator):
    """Not those of two temperatures, those that a sure token has, and those that are far."""
    x, y = near_rows(generator)
    assert modes_of("kl", x, 2 * y, (1.0, 2.0)) == [Mode.SAFE] * 6
    x[0, 5] = y[0, 5] = 30.0
    x[1] = torch.randn(x.size(1), generator=generator)
    modes = modes_of("kl", x, y)
    assert modes[0] == Mode.SAFE
    assert modes[1] == Mode.FAST
    assert modes[2:] == [Mode.STABLE] * 4


@pytest.mark.parametrize("kind", ["jensen_shannon", "hellinger", "total_variation"])
@pytest.mark.parametrize("apart", [0.1, 1.0])
def test_symmetric_kinds_under_a_softcap(backend, generator, kind, apart):
    pair, found = near_rows(generator, apart=apart), []
    for rows in (pair, pair[::-1]):
        leaves = [t.clone().requires_grad_() for t in rows]
        options = {"softcap": 30.0, "target_softcap": 30.0, **({"beta": 0.5} if kind == "jensen_shannon" else {})}
        loss = kullback.divergence(*leaves, kind, **options)
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    (loss, of_x, of_y), (again, of_y_again, of_x_again) = found
    assert loss == again
    assert torch.equal(of_x, of_x_again)
    assert torch.equal(of_y, of_y_again)


def test_equal_rows_lose_nothing(backend, generator):
    x = sample("logits", (3, 700), generator, torch.float32)
    for kind in kinds.SMOOTH:
        leaf = x.clone().requires_grad_()
        loss = kullback.divergence(leaf, x, kind, **kinds.parameters(kind))
        assert loss == 0
        assert torch.autograd.grad(loss, leaf)[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [1e3, -2e4])
def test_16_bit_logits_that_lie_apart_by_an_offset(backend, generator, dtype, offset):
    """Their difference has more digits than a float: what it is rounded by must not be lost."""
    x = (0.02 * torch.randn(8, 4096, generator=generator)).to(dtype)
    y = torch.full((8, 4096), offset).to(dtype)
    for kind in ("kl", "jensen_shannon"):
        losses = kullback.divergence(x, y, kind, reduction="none")
        assert relative_error(losses, oracle.divergence(x.double(), y.double(), kind)) < 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
@pytest.mark.parametrize("rises", [False, True])
def test_far_rows_of_a_sure_token_are_exact(backend, generator, kind, dtype, rises):
    """Little room is left beside it in a float's sum of masses, and kl is what is left of two such sums.

    Where logits rise, and that token is the last, many spans have much of what was found till then.
    """
    y = torch.randn(300, 13341, generator=generator) - rises * (torch.arange(13341) // 256 * 0.25)
    y[:, 0], y[:, 1] = 17, 13 + torch.rand(300, generator=generator)
    x = y + 0.5 * torch.randn(300, 13341, generator=generator)
    x[:, 0], x[:, 1] = y[:, 0], y[:, 1] + 1 + 3 * torch.rand(300, generator=generator)
    x, y = ((each.flip(-1) if rises else each).to(dtype) for each in (x, y))
    losses = kullback.divergence(x, y, kind, reduction="none")
    truth = oracle.divergence(x.double(), y.double(), kind)
    assert ((losses - truth).abs() / truth).max() < 1.5e-6


def test_subnormal_masses_make_no_negative_chi2(backend):
    for seed in range(40):
        y = 30 * torch.randn(4, 17, generator=torch.Generator().manual_seed(seed))
        assert kullback.divergence(y, y.clone(), "chi2", reduction="none").min() >= 0


# Of q and r = log(p/q), without cancellation
CENTRED = {
    "kl": lambda q, r: q * torch.exp(r) * (torch.expm1(-r) + r),
    "reverse_kl": lambda q, r: q * (torch.expm1(r) - r),
    "chi2": lambda q, r: q * torch.expm1(r) ** 2,
    "jeffreys": lambda q, r: q * torch.expm1(r) * r,
}


@pytest.mark.parametrize("kind", CENTRED)
def test_rows_nearer_than_their_normalisers_are_exact(backend, generator, kind):
    """What log-sum-exps are rounded by would be more than 1e-4 of a row of 1e-11."""
    x, y = near_rows(generator, 16, 1000, 1e-5)
    losses = kullback.divergence(x, y, kind, reduction="none")
    log_q, log_p = (t.double().log_softmax(-1) for t in (x, y))
    truth = CENTRED[kind](log_q.exp(), log_p - log_q).sum(-1)
    assert ((losses.double() - truth) / truth).abs().max() < 3e-6


@pytest.mark.parametrize("eps", [1e-4, 1e-5])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jensen_shannon", {"beta": 0.01}),
        ("jensen_shannon", {"beta": 0.99}),
        ("skew_kl", {}),
        ("renyi", {}),
        ("kl", {}),
    ],
)
def test_the_nearest_rows_and_their_gradients(backend, generator, kind, options, eps):
    """Beside the same call in float64."""
    x, y = near_rows(generator, 8, 1000, eps)

    def found(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, y)]
        losses = kullback.divergence(*leaves, kind, reduction="none", **options)
        return losses.detach().double(), *(g.double() for g in torch.autograd.grad(losses.sum(), leaves))

    for ours, exact in zip(found(torch.float32), found(torch.float64), strict=True):
        error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1) if exact.dim() > 1 else ((ours - exact) / exact).abs()
        assert error.max() < 2e-6
