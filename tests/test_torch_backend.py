"""The torch backend on machines that CI has not: without float64, and where sums are looked at late or never."""

import mpmath
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kullback
from kullback import dtypes
from kullback.backends import pytorch
from kullback.backends.pytorch import piece
from kullback.backends.pytorch.programs import Way, adds_partials, program, traits
from kullback.divergences import DIVERGENCES
from tests import kinds, oracle, samples
from tests.conftest import captured, no_synchronisation
from tests.kinds import KINDS
from tests.samples import masked
from tests.tolerances import FLOAT_GRADIENT, relative_error


@pytest.fixture(params=["looks", "is captured"])
def a_device(request, monkeypatch):
    monkeypatch.setattr(piece.Piece, "_way", lambda self: Way.PARTIALS)
    monkeypatch.setattr(pytorch, "looks_late", lambda device: request.param == "looks")
    monkeypatch.setattr(pytorch, "LEAST_FAR_SHARE", 0)


def rows(dtype=torch.float32, vocab=1003):
    return samples.batch(
        torch.Generator().manual_seed(2),
        vocab,
        dtype,
        far=samples.far(2.0),
        apart=samples.apart(0.3),
        close=samples.apart(0.01),
        closer=samples.apart(1e-3),
        equal=samples.equal,
        shifted=samples.shifted(0.05, 40.0),
        teacher=masked(samples.apart(0.5), y=samples.EVERY_7TH),
        both=masked(samples.apart(0.5), both=samples.EVERY_7TH),
        peaked=samples.peaked(samples.apart(0.1), 5, 12.0),
        beyond=samples.shifted(0.7, 1000.0),
    )


def truth(x, y, kind):
    x, y = (t.double().cpu().requires_grad_() for t in (x, y))
    losses = oracle.divergence(x, y, kind, **kinds.parameters(kind))
    return losses.detach(), *torch.autograd.grad(losses[losses.isfinite()].sum(), (x, y))


def ours(x, y, kind, reduction, **options):
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    loss = kullback.divergence(x, y, kind, reduction=reduction, **kinds.parameters(kind), **options)
    total = loss.sum()
    return loss.detach(), *torch.autograd.grad(total, (x, y))


def check(kind, batch, device):
    """A loss of d may be 4e-7/√d of itself off where terms are sums of partial derivatives; else as anywhere."""
    expected, parameter = truth(batch.x, batch.y, kind), next(iter(kinds.values(kind)), 0.0)
    finite = expected[0].isfinite()
    names = [name for name, is_finite in zip(batch.names, finite.tolist(), strict=True) if is_finite]
    for reduction in ("none", "sum"):
        x, y = (t.to(device)[finite.to(device)] for t in (batch.x, batch.y))
        found = [t.double().cpu() for t in ours(x, y, kind, reduction)]
        if reduction == "none":
            for loss, exact in zip(found[0], expected[0][finite], strict=True):
                if exact < 1e-14:
                    assert abs(loss) < 1e-14
                    continue
                own = 4e-7 / exact**0.5 if adds_partials(kind, parameter, Way.PARTIALS) else 0.0
                assert loss >= 0
                assert relative_error(loss, exact) < 4e-6 + own
        for mine, exact in zip(found[1:], expected[1:], strict=True):
            for name, one, other in zip(names, mine, exact[finite], strict=True):
                # The textbook's derivative of a root at 0 is no number; a sign's is all of a mass next to 1, or none.
                if other.isfinite().all() and (kind, name) != ("total_variation", "peaked"):
                    assert relative_error(one, other) < 2 * FLOAT_GRADIENT or other.norm() < 1e-9, name


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_device_runs(kind):
    with kullback.backend("torch"):
        check(kind, rows(), "cpu")


@pytest.mark.parametrize("hidden", ["x", "y", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_of_rows_that_are_far(kind, hidden, generator, monkeypatch):
    """An infinite loss has the gradients that it has where nothing is taken for far."""
    monkeypatch.setattr(piece.Piece, "_way", lambda self: Way.PARTIALS)
    x, y = 2 * torch.randn(2, 3, 50, generator=generator)
    for name, rows in (("x", x), ("y", y)):
        if hidden in (name, "both"):
            rows[:, ::7] = -torch.inf
    found = []
    with kullback.backend("torch"):
        for looks in (True, False):
            monkeypatch.setattr(pytorch, "looks_late", lambda device, looks=looks: looks)
            found.append(ours(x, y, kind, "sum"))
    for mine, others in zip(*found, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_loss_on_a_device(kind, reduction):
    rows = torch.tensor([[[0.0, -torch.inf, 1.0]], [[0.5, 0.0, 0.0]]])
    for x, y in (rows, rows.flip(0)):
        expected = oracle.divergence(x.double(), y.double(), kind, **kinds.parameters(kind))
        with kullback.backend("torch"):
            found = kullback.divergence(x, y, kind, reduction=reduction, **kinds.parameters(kind))
        torch.testing.assert_close(found.double().view(1), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02, 1e-3, 1e-6, 0.9999])
@pytest.mark.parametrize(("kind", "name"), [("jensen_shannon", "beta"), ("mixed_kl", "beta"), ("skew_kl", "alpha")])
def test_a_small_share_on_a_device(kind, name, share, generator):
    """Where it makes a partial derivative small, terms are summed: they are as exact as of any share."""
    y, noise = torch.randn(2, 4, 5000, generator=generator)
    x, y = 2 * y + 0.1 * noise, 2 * y
    expected = oracle.divergence(x.double(), y.double(), kind, **{name: share})
    with kullback.backend("torch"):
        found = kullback.divergence(x, y, kind, reduction="none", **{name: share})
    allowed = 4e-6 + (4e-7 / expected.sqrt() if adds_partials(kind, share, Way.PARTIALS) else 0.0)
    assert ((found - expected).abs() < allowed * expected + 1e-15).all()  # what float64 rounds


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_device(kind):
    with kullback.backend("torch"):
        check(kind, rows(), "cuda")


@pytest.fixture
def watched(monkeypatch):
    """Modes see what the backend does: of an operator, which kullback's are under a mode, they see but its results."""

    def watch(mode):
        run = pytorch.run

        def within(work):
            with mode:
                run(work)

        monkeypatch.setattr(pytorch, "run", within)

    return watch


@pytest.fixture
def passes(monkeypatch):
    """A device that is looked at, of chunks of eight rows; what each pass had, and whether it took that for far."""
    found = []

    def recorded(work, is_far=False, run=pytorch._pass):
        found.append((work.input.size(0), is_far))
        return run(work, is_far)

    monkeypatch.setattr(pytorch, "_pass", recorded)
    monkeypatch.setattr(pytorch, "_chunk", lambda x: 8 * x.size(1))
    monkeypatch.setattr(pytorch, "looks_late", lambda device: True)
    return found


@pytest.mark.parametrize(
    ("near", "expected"),
    [
        ([], [(2, True), (8, True), (8, True)]),
        ([1, 5, 17], [(2, True), (8, True), (8, True), (3, False)]),
        ([1, *range(4, 14)], [(2, True), (8, True), (8, True), (8, False), (3, False)]),
        ([0, 1], [(2, True), (8, False), (8, False), (2, False)]),  # others are taken for much the same
    ],
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["kl", "total_variation", "renyi"])
def test_rows_that_are_not_far_are_done_again(kind, reduction, near, expected, passes, generator):
    x, y = torch.randn(2, 18, 300, generator=generator)
    x[near] = y[near] + 0.01 * x[near]
    weight, labels = torch.rand(18, generator=generator), torch.randint(300, (18,), generator=generator)
    options = {"reduction": reduction, "row_weight": weight, "labels": labels, "label_weight": 0.5}
    exact = ours(x.double(), y.double(), kind, **options)
    passes.clear()
    with kullback.backend("torch"):
        found = ours(x, y, kind, **options)
    assert passes[: len(expected)] == expected  # what follows is backward's
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-5, atol=0)
    for mine, its in zip(found[1:], exact[1:], strict=True):
        for one, other in zip(mine, its, strict=True):
            assert relative_error(one, other) < 2 * FLOAT_GRADIENT


def test_rows_that_nobody_reads_are_not_done_again(passes, generator):
    x, y = torch.randn(2, 18, 300, generator=generator)
    x[:3], weight = torch.nan, torch.ones(18)
    weight[:3] = 0
    with kullback.backend("torch"):
        loss, *gradients = ours(x, y, "kl", "sum", row_weight=weight)
    assert passes == [(2, True), (8, True), (8, True)]
    expected, *others = truth(x[3:], y[3:], "kl")
    assert relative_error(loss, expected.sum()) < 1e-6
    for mine, exact in zip(gradients, others, strict=True):
        assert not mine[:3].any()
        assert relative_error(mine[3:], exact) < 2 * FLOAT_GRADIENT


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_states_are_kept_are_not_taken_for_far(kind, passes, generator):
    """Another launch finds their gradient, in which Σ d_log_q takes off what this one has rounded."""
    x, y = torch.randn(2, 3, 300, generator=generator)
    x[:, 7] = torch.tensor([20.0, 40.0, 60.0])
    found = []
    for reduction in ("none", "sum"):
        with kullback.backend("torch"):
            found.append(ours(x, y, kind, reduction)[1])
    assert passes[0] == (3, False)
    exact = truth(x, y, kind)[1]
    for one, other, its in zip(*found, exact, strict=True):
        if its.isfinite().all():
            assert relative_error(one, its) < max(1e-4, 2 * relative_error(other, its))


class NoNumberIsRead(TorchDispatchMode):
    """As where the host must not wait for the device."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
        return function(*arguments, **(keywords or {}))


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "renyi"])
def test_rows_whose_states_are_kept_are_not_waited_for(kind, watched):
    x, y = rows()[:2]
    weight = torch.ones(len(x))
    with kullback.backend("torch"):
        ours(x, y, kind, "none", row_weight=weight)  # finds what is known of the kind
        watched(NoNumberIsRead())
        ours(x, y, kind, "none", row_weight=weight)


def test_logits_that_gradients_take_the_place_of(passes, generator):
    """They cannot be read again."""
    h, t, head = (torch.randn(*shape, generator=generator) for shape in ((8, 16), (8, 16), (300, 16)))
    h[::2] = t[::2] + 1e-3 * h[::2]
    exact = h.double().requires_grad_()
    kullback.divergence(exact @ head.double().T, t.double() @ head.double().T).backward()
    with kullback.backend("torch"):
        leaf = h.clone().requires_grad_()
        kullback.linear_divergence(leaf, head, t, head).backward()
    assert passes
    assert not any(is_far for _, is_far in passes)
    assert relative_error(leaf.grad, exact.grad) < 2 * FLOAT_GRADIENT


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "renyi"])
def test_a_device_is_not_waited_for(kind, dtype):
    x, y = (t.cuda() for t in rows(dtype)[:2])
    weight = torch.ones(len(x), device="cuda")
    with kullback.backend("torch"):
        ours(x, y, kind, "none", row_weight=weight)
        with no_synchronisation():
            ours(x, y, kind, "none", row_weight=weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "renyi"])
def test_a_captured_device_is_not_waited_for(kind, dtype):
    x, y = (t.cuda() for t in rows(dtype)[:2])
    with kullback.backend("torch"):
        expected = ours(x, y, kind, "mean")
        graph, found = captured(lambda: ours(x, y, kind, "mean"))
    graph.replay()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)


class Float64IsForbidden(TorchDispatchMode):
    """For a device that has no float64. What is known of a kind is found on a CPU, whatever the device."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            assert not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64, function
        return result


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr(dtypes, "WITHOUT_FLOAT64", {"cpu"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_there_may_be_no_float64(kind, dtype, without_float64, watched):
    batch = rows(dtype, vocab=515)
    expected = truth(batch.x, batch.y, kind)
    weight = torch.tensor([1.0] * 6 + [0.0, 1.0, 1.0, 0.0])  # of what the teacher masks a loss may be infinite
    with kullback.backend("torch"):
        for reduction in ("none", "sum", "mean"):  # finds what is known of the kind, under a mode and without
            ours(batch.x, batch.y, kind, reduction, row_weight=weight)
            with Float64IsForbidden():
                ours(batch.x, batch.y, kind, reduction, row_weight=weight)
        watched(Float64IsForbidden())
        for reduction in ("none", "sum", "mean"):
            with Float64IsForbidden():
                loss, *gradients = ours(batch.x, batch.y, kind, reduction, row_weight=weight)
            if reduction == "none":
                for row in (0, 1, 2, 5, 7):
                    assert relative_error(loss[row], expected[0][row]) < 1e-4, row
                assert loss[4] == 0
            if reduction != "mean":
                tight = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
                for found, exact in zip(gradients, expected[1:], strict=True):
                    for row in (0, 1, 2, 5, 7):
                        assert relative_error(found[row], exact[row]) < tight, row


def test_literal_rows_and_topk_teachers_without_float64(without_float64, watched, generator):
    p, q = (samples.sample("log_probs", (4, 300), generator) for _ in range(2))
    values, ids = p.topk(8)
    logits = samples.sample("logits", (4, 300), generator)
    with kullback.backend("torch"):
        expected = kullback.topk_divergence(logits.double(), values.double(), ids)
        for is_watched in (False, True):  # once what is known of the kind has been found
            if is_watched:
                watched(Float64IsForbidden())
            with Float64IsForbidden():
                leaf = q.clone().requires_grad_()
                kullback.divergence(leaf, p, form="log_probs").backward()
                student = logits.clone().requires_grad_()
                loss = kullback.topk_divergence(student, values, ids)
                loss.backward()
    assert relative_error(loss, expected) < 1e-5
    assert student.grad.isfinite().all()


def test_terms_that_are_sums_of_their_partial_derivatives():
    """Far from p = q; others are computed as they are written."""
    assert {kind for kind in DIVERGENCES if traits(kind).is_sum_of_partials} == {"kl", "reverse_kl", "alpha", "renyi"}
    assert traits("jeffreys").least_fast_sum < 1e-5  # exact as it stands, but for normalisers
    assert all(
        step.op != "select_near" for step in program("jensen_shannon", "logits", "logits", Way.FAST, ("term",)).steps
    )


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4, 1e5])
def test_sides_of_two_temperatures_with_an_offset(offset, generator):
    z = 3 * torch.randn(4, 500, generator=generator)
    x, y = 2 * z + 0.02 * torch.randn(4, 500, generator=generator) + offset, 1.5 * z + offset
    scales = [torch.tensor(1 / t, dtype=torch.float32).double() for t in (2.0, 1.5)]
    leaf = x.double().requires_grad_()
    expected = oracle.divergence(leaf * scales[0], y.double() * scales[1], "kl")
    truth = torch.autograd.grad(expected.sum(), leaf)[0]
    with kullback.backend("torch"):
        a = x.clone().requires_grad_()
        loss = kullback.divergence(a, y, temperature=2.0, target_temperature=1.5, reduction="none")
        found = torch.autograd.grad(loss.sum(), a)[0]
    # A product with 1/T is rounded to 6e-8 of up to 10, beside log-ratios of 0.01.
    assert relative_error(loss, expected) < 1e-4
    assert relative_error(found, truth) < 1e-4


def test_no_tokens():
    with kullback.backend("torch"):
        assert torch.equal(kullback.divergence(torch.zeros(3, 0), torch.zeros(3, 0), reduction="none"), torch.zeros(3))


@pytest.mark.parametrize(
    ("kind", "swapped"), [("reverse_kl", False), ("jeffreys", False), ("chi2", True), ("jeffreys", True)]
)
def test_an_infinite_loss_of_a_row_in_pieces(kind, swapped, generator, monkeypatch):
    x, y = (torch.randn(2, 40, generator=generator) for _ in range(2))
    y[:, 5:25] = -torch.inf
    x, y = (y, x) if swapped else (x, y)
    monkeypatch.setattr(kullback.backends.pytorch, "CPU_CHUNK", 8)
    with kullback.backend("torch"):
        assert (kullback.divergence(x, y, kind, reduction="none") == torch.inf).all()


@pytest.mark.parametrize("beside", ["nothing", "a far row"])
@pytest.mark.parametrize("kind", kinds.SMOOTH)
def test_digits_of_close_rows(kind, beside, generator):
    """What float32 normalisers are off by, 1e-7, would be 1e-4 of these losses. Gradients are found with the same."""
    y, noise = torch.randn(2, 4, 200, generator=generator)
    x = y + 1e-5 * noise
    if beside == "a far row":
        x[0] = noise[0]
    with kullback.backend("torch"):
        losses, *gradients = ours(x, y, kind, "none")
    for loss, a, b in zip(losses[1:], x[1:].tolist(), y[1:].tolist(), strict=True):
        with mpmath.workdps(40):
            q, p = ([mpmath.exp(v) for v in row] for row in (a, b))
            q, p = ([mass / mpmath.fsum(masses) for mass in masses] for masses in (q, p))
            centred, values = kinds.FACTS[kind].centred, [mpmath.mpf(v) for v in kinds.values(kind)]
            exact = mpmath.fsum(centred(*pair, *values) for pair in zip(p, q, strict=True))
            exact *= values[0] if kind == "renyi" else 1  # log(Σ p^a q^(1-a)) / (a - 1)
        assert abs(loss.item() / float(exact) - 1) < 1e-6
    for found, expected in zip(gradients, truth(x, y, kind)[1:], strict=True):
        assert relative_error(found[1:].double(), expected[1:]) < 1e-6
