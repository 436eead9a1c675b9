"""CUDA kernels where there is no GPU: their own code on a CPU, rows off the chip. What a GPU adds is run on one."""

import math

import pytest
import torch

import kullback
from kullback.backends import cuda
from kullback.backends.cuda import plan
from kullback.rows import Entries, Problem
from tests import emulation, oracle
from tests.conftest import relative_error, sample
from tests.test_logits_gpu import share_misrounded

inf = math.inf
emulated = pytest.mark.parametrize("path", ["emulated"], indirect=True)


@emulated
@pytest.mark.parametrize(
    ("kind", "dtype", "vocab"),  # a long row and a short one in turn, and both of three kinds
    [
        (kind, dtype, vocab)
        for i, kind in enumerate(oracle.PARAMETERS)
        for j, (dtype, vocab) in enumerate([(torch.float32, 2503), (torch.bfloat16, 61)])
        if i % 2 == j or kind in ("kl", "jensen_shannon", "renyi")
    ],
)
def test_logits(path, generator, kind, dtype, vocab):
    """Rows that are apart, close, equal, masked, and of no weight; a sum, and each row's with its backward."""
    y = sample("logits", (7, vocab), generator, dtype)
    x = sample("logits", (7, vocab), generator, dtype)
    x[1] = (y[1].float() + 1e-2 * torch.randn(vocab, generator=generator)).to(dtype)
    x[2] = y[2]
    if kind not in ("hellinger", "chi2"):  # the textbook's are NaN there
        x[3, ::7] = y[3, ::7] = -inf
    x[4] = math.nan
    weight = torch.tensor([1.0, 2.0, 1.0, 0.5, 0.0, 1.0, 3.0])
    params = oracle.PARAMETERS[kind]
    leaves = [t.detach().double().requires_grad_() for t in (x[weight != 0], y[weight != 0])]
    truth = oracle.divergence(*leaves, kind, **params) * weight[weight != 0]
    expected = torch.autograd.grad(truth.sum(), leaves)
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    for reduction in ("sum", "none"):
        ours = [t.clone().requires_grad_() for t in (x, y)]
        loss = kullback.divergence(*ours, kind, row_weight=weight, reduction=reduction, **params)
        assert kullback.backend_info().name == "cuda"
        assert relative_error(loss.sum(), truth.sum()) < 1e-5
        for mine, other in zip(torch.autograd.grad(loss.sum(), ours), expected, strict=True):
            assert relative_error(mine[weight != 0], other) < bound
            assert mine[4].abs().sum() == 0
            assert mine[2].abs().max() == 0 or kind in ("alpha", "renyi", "hellinger", "chi2")


@emulated
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, torch.bfloat16) for kind in oracle.SMOOTH] + [("kl", torch.float32)]
)
def test_close_rows_and_elements_that_are_not(path, generator, kind, dtype):
    """Close in most words; far in few of them; in all but the one that has the mass; masked in many, or on one side.

    More than 32 vectors for each thread, the last row's last element in none; the gradient also over the logits.
    """
    rows, vocab = 6, 70003 if dtype == torch.bfloat16 else 35001
    y = 3 * torch.randn(rows, vocab, generator=generator)
    noise = torch.randn(rows, vocab, generator=generator)
    x = y + 0.02 * noise
    x[1, ::97] += 2 * noise[1, ::97]
    y[2, 7] = 30
    x[2] = y[2] + noise[2]
    x[3, 9:4000] = y[3, 9:4000] = -inf
    x[4] = y[4] + 1e-3 * noise[4] + 40
    if kind in ("kl", "jensen_shannon", "skew_kl"):
        y[5, 11] = -inf
    x, y = x.to(dtype), y.to(dtype)
    if kind in ("hellinger", "chi2"):  # the textbook's are NaN there
        x[3], y[3] = x[0], y[0]
    params = oracle.PARAMETERS[kind]
    leaves = [t.double().requires_grad_() for t in (x, y)]
    truth = oracle.divergence(*leaves, kind, **params)
    expected = torch.autograd.grad(truth.sum(), leaves)
    losses = kullback.divergence(x, y, kind, reduction="none", **params)
    assert (losses >= 0).all()
    shows = truth.detach() > 1e-7
    assert shows.sum() >= rows - 1
    assert relative_error(losses[shows], truth.detach()[shows]) < 1e-5
    assert relative_error(losses[shows] / truth.detach()[shows], torch.ones(int(shows.sum()))) < 1e-5
    bound = 2e-6 if dtype == torch.float32 else 4e-3
    for reduction in ("sum", "none"):
        ours = [t.clone().requires_grad_() for t in (x, y)]
        loss = kullback.divergence(*ours, kind, reduction=reduction, **params).sum()
        for mine, other in zip(torch.autograd.grad(loss, ours), expected, strict=True):
            for row in shows.nonzero().flatten().tolist():
                assert relative_error(mine[row], other[row]) < bound
    written = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        kullback.divergence(leaf * 1, y, kind, reduction="sum", inplace=inplace, **params).backward()
        written.append(leaf.grad)
    assert torch.equal(*written)


@emulated
def test_a_constant_does_not_show_in_close_rows(path, generator):
    """Numbers that float16 holds with the constant too."""
    y = torch.randint(-128, 128, (16, 2504), generator=generator) / 16
    x = y + torch.randint(-3, 4, (16, 2504), generator=generator) / 16
    x, y = x.half(), y.half()
    plain, shifted = (kullback.divergence(x + c, y + c, reduction="none") for c in (0, 100))
    assert relative_error(shifted / plain, torch.ones(16)) < 1e-6


@emulated
@pytest.mark.parametrize("alpha", [0.999, 0.9999, 1.0001])
def test_close_rows_of_renyi_near_kl(path, generator, alpha):
    """What is summed is small with 1 - alpha, and divided by that again."""
    y = 3 * torch.randn(2, 2504, generator=generator)
    x = y + 0.1 * torch.randn(2, 2504, generator=generator)
    leaf = x.double().requires_grad_()
    truth = oracle.divergence(leaf, y.double(), "renyi", alpha=alpha)
    ours = x.clone().requires_grad_()
    losses = kullback.divergence(ours, y, "renyi", reduction="none", alpha=alpha)
    assert relative_error(losses, truth) < 3e-6
    assert relative_error(torch.autograd.grad(losses.sum(), ours)[0], torch.autograd.grad(truth.sum(), leaf)[0]) < 3e-6


@emulated
def test_close_rows_that_powers_do_not_reach(path, generator):
    """Another temperature on each side; a parameter far out."""
    y = 3 * torch.randn(3, 2503, generator=generator)
    x = y + 0.02 * torch.randn(3, 2503, generator=generator)
    for kind, options, params in (
        ("kl", {"temperature": 1.0, "target_temperature": 1.05}, {}),
        ("alpha", {}, {"alpha": 5.0}),
    ):
        leaf = x.double().requires_grad_()
        truth = oracle.divergence(leaf, y.double(), kind, **options, **params)
        ours = x.clone().requires_grad_()
        losses = kullback.divergence(ours, y, kind, reduction="none", **options, **params)
        assert relative_error(losses, truth) < 1e-5
        assert (
            relative_error(torch.autograd.grad(losses.sum(), ours)[0], torch.autograd.grad(truth.sum(), leaf)[0]) < 2e-6
        )


@emulated
@pytest.mark.parametrize(
    ("kind", "form", "dtype", "vocab"),
    [
        ("kl", "probs", torch.float32, 2503),
        ("kl", "log_probs", torch.bfloat16, 61),
        ("jensen_shannon", "log_probs", torch.float32, 2503),
        ("jensen_shannon", "probs", torch.float64, 300),
        ("renyi", "probs", torch.bfloat16, 61),
        ("renyi", "log_probs", torch.float64, 300),
    ],
)
def test_masses(path, generator, kind, form, dtype, vocab):
    x, y = (sample(form, (5, vocab), generator, dtype) for _ in range(2))
    x[1, 3] = y[1, 3] = 0 if form == "probs" else -inf
    leaves = [t.double().requires_grad_() for t in (x, y)]
    params = oracle.PARAMETERS[kind]
    truth = oracle.divergence(*leaves, kind, form, **params)
    expected = torch.autograd.grad(truth.sum(), leaves)
    ours = [t.clone().requires_grad_() for t in (x, y)]
    for reduction in ("sum", "none"):
        loss = kullback.divergence(*ours, kind, form=form, reduction=reduction, **params)
        assert relative_error(loss.sum(), truth.sum()) < 1e-5
        for mine, other in zip(torch.autograd.grad(loss.sum(), ours), expected, strict=True):
            kept = other.isfinite()
            assert relative_error(mine[kept], other[kept]) < (1e-5 if dtype != torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_a_kernel_reads_nothing_that_it_is_not_given(monkeypatch, generator, dtype, cap):
    """Views of odd starts and strides, more rows than blocks, in the student's place; NaN all round."""
    problem = Problem("kl", "logits", "logits", (1.5, 1.0, cap, 0.0, 0.0))
    around = torch.full((9, 300), math.nan, dtype=dtype)
    x = around[1:8, 5:262]
    x.copy_(sample("logits", x.shape, generator, dtype))
    ids = torch.stack([torch.randperm(257, generator=generator)[:9] for _ in range(7)])
    ids[2, 4], ids[3] = -1, -1
    d_held = torch.randn(7, 10, generator=generator)
    d_held[4] = 0
    with kullback.backend("torch"):
        expected = kullback.sparse.gather(problem, x, ids, True)
        gradient = torch.empty(x.shape, dtype=dtype)
        kullback.sparse.scatter(problem, x, ids, expected, d_held, gradient)
    with emulation.emulated(monkeypatch):
        held = cuda.gather(problem, x, ids, True)
        cuda.scatter(problem, x, ids, held, d_held, x)
    torch.testing.assert_close(held, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x, gradient, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)
    around[1:8, 5:262] = math.nan
    assert around.isnan().all()


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero"])
@pytest.mark.parametrize("form", ["log_probs", "probs", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entries(monkeypatch, generator, form, tail, dtype):
    """Repeated and absent ids, rows that do not count, rows of none, all words, entries of no mass; a temperature."""
    if form == "logits" and tail == "bucket":
        return  # refused by the checks
    words, rows, k = 140, 9, 137  # more entries than threads, more rows than blocks
    x = sample("logits", (rows, words), generator, torch.float32)
    values = x.log_softmax(-1)[:, :k] if form != "logits" else x[:, :k]
    values = (values.exp() if form == "probs" else values).to(dtype)
    ids = torch.stack([torch.randperm(words, generator=generator)[:k] for _ in range(rows)])
    ids[0, 5:9], ids[1, ::3], ids[2] = ids[0, 2], -1, -1
    ids[3, 100:] = ids[3, 20]
    values[4, 7] = 0 if form == "probs" else -inf
    values[5, :] = math.nan
    skipped = torch.zeros(rows, dtype=torch.bool)
    skipped[5], ids[5, 3] = True, words + 7
    for temperature, as_logits in ((1.0, False), (2.5, False), (0.7, tail != "zero")):
        of = Entries(form, tail, tail == "renormalize" or as_logits, words)
        problem = Problem("kl", "log_probs", "log_probs", (1.0, temperature, 0.0, 0.0, 0.0))
        with kullback.backend("torch"):
            expected = kullback.backends.call("entries", problem, values, ids, skipped, of)
        with emulation.emulated(monkeypatch):
            ours = cuda.entries(problem, values, ids, skipped, of)
        assert torch.equal(ours[0], expected[0])
        close = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(ours[1], expected[1], rtol=close, atol=close, equal_nan=True)


@emulated
def test_sparse_teachers(path, generator):
    """Both reductions, with a rest that the student has not."""
    x = sample("logits", (5, 257), generator, torch.float32).requires_grad_()
    with torch.no_grad():
        x[1, 9:] = -inf
    values, ids = (x.detach() + torch.randn(x.shape, generator=generator)).log_softmax(-1).topk(9)
    assert math.isfinite(values[1].exp().sum())
    weight = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0])
    for reduction, kind in (("sum", "jensen_shannon"), ("none", "reverse_kl")):
        found = []
        for backend in ("cuda", "torch"):
            with kullback.backend(backend):
                loss = kullback.topk_divergence(x, values, ids, kind, row_weight=weight, reduction=reduction)
                found.append((loss, *torch.autograd.grad(loss.sum(), x)))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7, equal_nan=True)


@emulated
@pytest.mark.parametrize("kind", ["kl", "renyi"])
def test_rows_without_words(path, kind):
    x, y = torch.empty(3, 0, dtype=torch.bfloat16, requires_grad=True), torch.empty(3, 0, dtype=torch.bfloat16)
    for reduction in ("sum", "none"):
        loss = kullback.divergence(x, y, kind, reduction=reduction)
        assert kullback.backend_info().name == "cuda"
        assert not loss.any()
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert gradient.shape == x.shape


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 1 / 7, 0.2, 5.0])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_a_common_top_at_any_temperature(path, generator, kind, temperature, dtype):
    """First logits that are the row's largest, its least, and any."""
    y = sample("logits", (9, 2507), generator, dtype)
    x = (y.float() + torch.randn(y.shape, generator=generator) * temperature).to(dtype)
    for t in (x, y):
        t[0, 0], t[1, 0], t[2, 0] = t[0].max() + 1, t[1].min(), -inf
    x[3, 0], y[4, 0] = x[3].max() + 9, y[4].max() + 9
    leaves = [t.double().requires_grad_() for t in (x, y)]
    params = oracle.PARAMETERS[kind]
    truth = oracle.divergence(*(leaf / temperature for leaf in leaves), kind, **params)
    ours = x.clone().requires_grad_()
    losses = kullback.divergence(ours, y, kind, temperature=temperature, reduction="none", **params)
    for mine, other in zip(losses, truth, strict=True):
        assert other < 1e-7 or relative_error(mine, other) < 1e-5
    gradient = torch.autograd.grad(losses.sum(), ours)[0]
    expected = torch.autograd.grad(truth.sum(), leaves[0])[0]
    assert relative_error(gradient, expected) < 4e-3


@emulated
@pytest.mark.parametrize("mask", [-1e5, torch.finfo(torch.bfloat16).min, -inf])
@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl", "total_variation", "kl"])
def test_rows_on_chip(path, monkeypatch, generator, kind, mask):
    """Of several pieces, ends outside vectors; masked on both sides, on one; close, and close but for some words."""
    emulation.on_chip(monkeypatch)
    params, vocab = oracle.PARAMETERS[kind], 13341
    y = 2 * torch.randn(7, vocab, generator=generator)
    noise = torch.randn(7, vocab, generator=generator)
    x = y + noise
    x[:2, 90:200] = y[:2, 90:200] = mask
    if kind != "kl":
        x[2, 90:110] = y[3, 90:110] = mask
    x[4], x[5] = y[4] + 0.02 * noise[4], y[5] + 0.02 * noise[5]
    x[5, ::61] += 2 * noise[5, ::61]
    x[6] = float("nan")
    x, y = x.bfloat16(), y.bfloat16()
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.0])
    rows = weight != 0
    for temperature in (1.0, 1.7):
        a = x.double().requires_grad_()
        losses = oracle.divergence(a[rows], y[rows].double(), kind, temperature=temperature, **params)
        truth = (losses * weight[rows]).sum()
        (expected,) = torch.autograd.grad(truth, a)
        b = x.clone().requires_grad_()
        loss = kullback.divergence(b, y, kind, temperature=temperature, row_weight=weight, reduction="sum", **params)
        (ours,) = torch.autograd.grad(loss, b)
        assert relative_error(loss, truth) < 1e-5
        assert ours[6].count_nonzero() == 0
        assert ours[:2, 90:200].count_nonzero() == 0
        for row in rows.nonzero().flatten().tolist():
            assert relative_error(ours[row], expected[row]) < 4e-3
        if kind in ("jensen_shannon", "skew_kl"):
            ulps = (ours.view(torch.int16).int() - expected.bfloat16().view(torch.int16).int()).abs()
            assert (ulps[ours != 0] > 1).double().mean() < 1e-3


@emulated
@pytest.mark.parametrize("on_chip", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "total_variation"])
def test_rows_that_a_sample_tells_nothing_of(path, monkeypatch, generator, kind, dtype, on_chip):
    """Tops are guessed from a few logits: another is far above them, or they are all masked."""
    if on_chip:
        emulation.on_chip(monkeypatch)
    y = 2 * torch.randn(7, 4099, generator=generator)
    x = y + torch.randn(y.shape, generator=generator)
    x[0, 7], x[0, 9], y[0, 7], y[0, 9], x[1, 7] = 60, 58, 58, 59, 60
    for t in (x[2], y[2]):
        t[:5], t[40:] = -inf, -inf
    for t in (x[3], y[3]):
        t[:6], t[7:] = -inf, -inf
    x[4, 7], x[5, 7] = math.nan, inf
    x, y = x.to(dtype), y.to(dtype)
    params, numbers = oracle.PARAMETERS[kind], [0, 1, 2, 3, 6]
    a = x.double().requires_grad_()
    truth = oracle.divergence(a, y.double(), kind, **params)
    expected = torch.autograd.grad(truth[numbers].sum(), a)[0].nan_to_num(0)
    b = x.clone().requires_grad_()
    losses = kullback.divergence(b, y, kind, reduction="none", **params)
    assert kullback.backend_info().name == "cuda"
    assert losses[4:6].isnan().all()
    torch.testing.assert_close(losses[numbers].double(), truth[numbers], rtol=1e-5, atol=1e-7)
    weight = torch.ones(7)
    weight[4:6] = 0
    total = kullback.divergence(b, y, kind, row_weight=weight, reduction="sum", **params)
    torch.testing.assert_close(total.double(), truth[numbers].sum(), rtol=1e-5, atol=1e-7)
    bound = 1e-5 if dtype == torch.float32 else 2**-7  # of few words: a mass that is kept is rounded, and the gradient
    for loss in (losses[numbers].sum(), total):
        (ours,) = torch.autograd.grad(loss, b, retain_graph=True)
        for row in numbers:
            assert (ours[row] - expected[row]).norm() <= bound * expected[row].norm() + 1e-7


@emulated
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
@pytest.mark.parametrize(
    ("vocab", "dtype", "blocks"), [(32003, torch.bfloat16, 2), (50257, torch.float32, 8), (128256, torch.bfloat16, 8)]
)
def test_rows_of_several_blocks(path, monkeypatch, generator, kind, vocab, dtype, blocks):
    """Blocks of one cluster tell each other their sums; it takes more rows than are on chip at once."""
    assert plan.logits(vocab, dtype, dtype, False, False, True).cluster == blocks
    monkeypatch.setattr(emulation.Launcher, "blocks", 1)
    emulation.on_chip(monkeypatch)
    params = oracle.PARAMETERS[kind]
    y = 2 * torch.randn(7, vocab, generator=generator)
    noise = torch.randn(7, vocab, generator=generator)
    x = y + noise
    x[1] = y[1] + 0.02 * noise[1]
    x[2, 90:-200] = y[2, 90:-200] = -inf
    x[3] = math.nan
    x, y = x.to(dtype), y.to(dtype)
    weight = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 1.0, 1.0])
    read = weight != 0
    a = x.double().requires_grad_()
    truth = oracle.divergence(a[read], y[read].double(), kind, **params) * weight[read]
    (expected,) = torch.autograd.grad(truth.sum(), a)
    for reduction in ("sum", "none"):
        b = x.clone().requires_grad_()
        losses = kullback.divergence(b, y, kind, row_weight=weight, reduction=reduction, **params)
        (ours,) = torch.autograd.grad(losses.sum(), b)
        assert relative_error(losses.sum(), truth.sum()) < 1e-5
        assert ours[3].count_nonzero() == 0
        for row in read.nonzero().flatten().tolist():
            assert relative_error(ours[row], expected[row]) < (2e-6 if dtype == torch.float32 else 5e-3)


@emulated
@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
def test_kept_slopes_are_fine_near_their_mean(path, monkeypatch, kind):
    """As on a GPU. With the log-ratio's mean and no variance to guess theirs from 2e-3 were off."""
    emulation.on_chip(monkeypatch)
    assert share_misrounded(kind, 0.6, 0.05, "cpu") < 1e-3


@emulated
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_rows_on_chip_of_two_dtypes(path, monkeypatch, generator, kind, dtypes):
    """A vector of one is twice as long as of the other: they lie at different places of their slots."""
    emulation.on_chip(monkeypatch)
    y = 2 * torch.randn(4, 8000, generator=generator)
    x = y + torch.randn(4, 8000, generator=generator)
    x, y = x.to(dtypes[0]), y.to(dtypes[1])
    a, b = x.double().requires_grad_(), y.double().requires_grad_()
    truth = oracle.divergence(a, b, kind, **oracle.PARAMETERS[kind]).sum()
    expected = torch.autograd.grad(truth, (a, b))
    for wanted in ((True, False), (True, True)):
        ours = [t.clone().requires_grad_(want) for t, want in zip((x, y), wanted, strict=True)]
        loss = kullback.divergence(*ours, kind, reduction="sum", **oracle.PARAMETERS[kind])
        assert kullback.backend_info().name == "cuda"
        assert relative_error(loss, truth) < 1e-5
        leaves = [t for t in ours if t.requires_grad]
        for mine, other in zip(torch.autograd.grad(loss, leaves), expected, strict=False):
            assert relative_error(mine, other) < (2e-6 if mine.dtype == torch.float32 else 4e-3)


@emulated
@pytest.mark.parametrize("alpha", [0.1, 1e-3])
def test_words_that_the_teacher_all_but_masks(path, generator, alpha, monkeypatch):
    """The expected slope is guessed badly there; a loss does not depend on it, nor many digits of a gradient."""
    emulation.on_chip(monkeypatch)
    x = torch.randn(4, 13341, generator=generator).bfloat16()
    masked = torch.rand(x.shape, generator=generator) < 0.03
    y = torch.where(masked, x.float() - 22 * math.log(2), x.float()).bfloat16()
    a, b = x.double().requires_grad_(), x.clone().requires_grad_()
    truth = oracle.divergence(a, y.double(), "skew_kl", alpha=alpha).sum()
    loss = kullback.divergence(b, y, "skew_kl", alpha=alpha, reduction="sum")
    assert relative_error(loss, truth) < 1e-5
    (expected,), (ours,) = torch.autograd.grad(truth, a), torch.autograd.grad(loss, b)
    assert relative_error(ours, expected) < 4e-3


@emulated
def test_an_alpha_that_float32_takes_for_1(path, generator):
    x, y = torch.randn(2, 3, 500, generator=generator).bfloat16()
    x.requires_grad_()
    loss = kullback.divergence(x, y, "skew_kl", alpha=1 - 1e-9)
    loss.backward()
    assert 0 <= loss.item() < 1e-7
    assert x.grad.abs().max() < 1e-7


@emulated
@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl"])
def test_rows_far_below_zero(path, generator, kind):
    """Exponents are measured from the row's norm, not from 0; an infinite logit among them."""
    params = oracle.PARAMETERS[kind]
    y = -7000 + 8 * torch.randn(3, 4096, generator=generator)
    x = y + 4 * torch.randint(-1, 2, y.shape, generator=generator)
    x[1, 5] = y[1, 5] = y[2, 9] = -inf
    x, y = x.half(), y.half()
    leaves = [t.double().requires_grad_() for t in (x, y)]
    truth = oracle.divergence(*leaves, kind, **params)
    expected = torch.autograd.grad(truth.sum(), leaves)
    ours = [t.clone().requires_grad_() for t in (x, y)]
    losses = kullback.divergence(*ours, kind, reduction="none", **params)
    assert relative_error(losses, truth) < 1e-5
    for mine, theirs in zip(torch.autograd.grad(losses.sum(), ours), expected, strict=True):
        assert relative_error(mine, theirs) < 2e-3
        assert mine[1, 5] == 0


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_jensen_shannon_is_symmetric_where_one_gradient_is_wanted(path, monkeypatch, generator, dtype):
    """To the bit, also where one side lacks words, few or many; what is expected of slopes that are kept is not."""
    emulation.on_chip(monkeypatch)
    y, noise = 3 * torch.randn(2, 60, 4099, generator=generator)
    x = y + torch.linspace(0.02, 2, 60)[:, None] * noise
    few = y < -6
    x[:10][few[:10]], y[10:20][few[10:20]] = -inf, -inf
    x[30, ::7] = y[40, ::5] = -inf
    x, y = x.to(dtype), y.to(dtype)
    for a, b in zip(x, y, strict=True):
        one, other = (
            kullback.divergence(pair[0].clone().requires_grad_(), pair[1], "jensen_shannon", reduction="sum")
            for pair in ((a, b), (b, a))
        )
        assert torch.equal(one, other)


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["masked", "first word", "last word"])
def test_jensen_shannon_is_symmetric_near_its_bound(path, generator, dtype, case):
    """To the bit, though what tells rows that are close from others, Σ q log(q/p), is not."""
    vocab = 4097
    y, noise = 3 * torch.randn(2, 8, vocab, generator=generator)
    x = y + torch.linspace(0.1, 0.5, 8)[:, None] * noise
    x[:, 5] = y[:, 5] = -inf
    if case == "first word":
        x[:, 0], y[:, 0] = -16, 3
    if case == "last word":
        x[:, -1], y[:, -1] = 12, 11
    x, y = x.to(dtype), y.to(dtype)
    one, other = (kullback.divergence(*pair, "jensen_shannon", reduction="none") for pair in ((x, y), (y, x)))
    assert torch.equal(one, other)
