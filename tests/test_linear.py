"""Hidden states x head: equal to the divergence of the logits, whatever the chunks; what is kept, read and computed."""

import functools
import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import kullback
from kullback import linear
from kullback.problem import Problem, Side
from kullback.work import Rows
from tests import kinds, oracle
from tests.kinds import KINDS
from tests.samples import sample
from tests.tolerances import relative_error

ROWS, HIDDEN, TEACHER_HIDDEN, VOCAB = 13, 8, 6, 50
CHUNKS = (1, 7, ROWS, None)


def operands(generator, dtype=torch.float64, device="cpu", requires_grad=True, rows=(ROWS,), scale=1.0):
    """input, weight, bias, target, target_weight, target_bias"""
    shapes = ((*rows, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (*rows, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), (VOCAB,))
    tensors = [(scale * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for s in shapes]
    return [t.to(device).requires_grad_(requires_grad) for t in tensors]


def call(tensors, kind="kl", **options):
    h, w, b, t, v, c = tensors
    return kullback.linear_divergence(h, w, t, v, kind, bias=b, target_bias=c, **options)


def reference(tensors, kind="kl", **options):
    """The textbook's, of logits in one piece; float64 operands make it exact."""
    h, w, b, t, v, c = tensors
    return oracle.divergence(F.linear(h, w, b), F.linear(t, v, c), kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_all_six_gradients_in_any_chunks(backend, device, generator, kind, reduction):
    tensors = operands(generator, device=device)
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64).to(device)
    params = kinds.parameters(kind)
    losses = reference(tensors, kind, temperature=1.5, target_temperature=0.8, **params) * weight
    expected = {"mean": losses.sum() / weight.sum(), "sum": losses.sum(), "none": losses}[reduction]
    upstream = torch.rand(expected.shape, generator=generator, dtype=torch.float64).to(device)
    theirs = torch.autograd.grad(expected, tensors, upstream)
    for chunk_rows in CHUNKS:
        ours = call(
            tensors,
            kind,
            temperature=1.5,
            target_temperature=0.8,
            row_weight=weight,
            reduction=reduction,
            chunk_rows=chunk_rows,
            **params,
        )
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
        for mine, other in zip(torch.autograd.grad(ours, tensors, upstream), theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "reverse_kl"])
@pytest.mark.parametrize("chunk_rows", [32, None])
def test_no_worse_than_float32_logits(backend, device, generator, dtype, kind, chunk_rows):
    """Against float64 of the same operands; beside the loss that users write: the model's logits, cast to float32."""
    shapes = (128, 64), (500, 64), (128, 48), (500, 48)
    tensors = [
        (0.35 * torch.randn(s, generator=generator)).to(dtype).to(device).requires_grad_(i < 2)
        for i, s in enumerate(shapes)
    ]
    h, w, t, v = tensors
    scaler = 2.0**12 if dtype == torch.float16 else 1.0
    ours = kullback.linear_divergence(h, w, t, v, kind, chunk_rows=chunk_rows)
    eager = kullback_like_eager(h, w, t, v, kind)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    truth = oracle.divergence(wide[0] @ wide[1].T, wide[2] @ wide[3].T, kind, **SYMMETRIC.get(kind, {})).mean()
    assert relative_error(ours, truth) < (1e-4 if dtype != torch.bfloat16 else 4e-4)  # 128 rows average less than 4096
    exact = torch.autograd.grad(truth, wide[:2])
    mine = torch.autograd.grad(ours * scaler, (h, w))
    users = torch.autograd.grad(eager * scaler, (h, w))
    for a, b, c in zip(mine, users, exact, strict=True):
        floor = 2e-7 if dtype == torch.float32 else 0
        assert relative_error(a / scaler, c) <= 1.2 * relative_error(b / scaler, c) + floor


@pytest.fixture
def medium_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_medium_precision_loses_nothing_of_bfloat16(generator, medium_precision):
    """What a CPU then rounds to bfloat16 was widened from it: in logits and in the head's gradient."""
    shapes = (128, 64), (500, 64), (128, 48), (500, 48)
    h, w, t, v = (0.35 * torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    h.requires_grad_()
    w.requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (h, w, t, v)]
    truth = oracle.divergence(wide[0] @ wide[1].T, wide[2] @ wide[3].T, "kl").mean()
    loss = kullback.linear_divergence(h, w, t, v, chunk_rows=32)
    assert relative_error(loss, truth) < 1e-6
    for mine, exact in zip(torch.autograd.grad(loss, (h, w)), torch.autograd.grad(truth, wide[:2]), strict=True):
        assert relative_error(mine, exact) < 3e-3


SYMMETRIC = {"jensen_shannon": {"beta": 0.5}}


def kullback_like_eager(h, w, t, v, kind):
    """What users write, on float32 copies of the logits."""
    log_q, log_p = (F.linear(a, b).float().log_softmax(-1) for a, b in ((h, w), (t, v)))
    relative = lambda a, b: (a.exp() * (a - b)).sum(-1)
    if kind == "kl":
        return relative(log_p, log_q).mean()
    if kind == "reverse_kl":
        return relative(log_q, log_p).mean()
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    return ((relative(log_p, log_m) + relative(log_q, log_m)) / 2).mean()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(generator, reduction):
    tensors = operands(generator, rows=(4,))
    with kullback.backend("torch"):
        assert torch.autograd.gradcheck(
            lambda *t: call(t, temperature=1.3, softcap=4.0, reduction=reduction, chunk_rows=3),
            tensors,
            nondet_tol=1e-12,
            fast_mode=reduction == "none",
        )


def test_options_and_leading_dimensions(backend, device, generator):
    tensors = operands(generator, torch.float32, device, rows=(3, 4))
    h, w, b, t, v, c = tensors
    options = {"softcap": 3.0, "logit_scale": 0.5, "target_softcap": 4.0, "target_logit_scale": 1.5, "temperature": 2.0}
    for reduction in ("mean", "none"):
        ours = call(tensors, "reverse_kl", reduction=reduction, chunk_rows=5, **options)
        theirs = kullback.divergence(F.linear(h, w, b), F.linear(t, v, c), "reverse_kl", reduction=reduction, **options)
        assert ours.shape == theirs.shape == (() if reduction == "mean" else (3, 4))
        assert relative_error(ours, theirs) < 1e-5
        pairs = zip(*(torch.autograd.grad(loss.sum(), tensors) for loss in (ours, theirs)), strict=True)
        assert all(relative_error(a, b) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize("target_form", [None, "probs", "log_probs"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_teachers_of_logits_and_probabilities(backend, device, generator, target_form, reduction):
    h, w, b, *_ = operands(generator, torch.float32, device)
    target = sample(target_form or "logits", (ROWS, VOCAB), generator).to(device).requires_grad_()
    ours = kullback.linear_divergence(h, w, target, bias=b, target_form=target_form, reduction=reduction, chunk_rows=4)
    theirs = kullback.divergence(F.linear(h, w, b), target, target_form=target_form or "logits", reduction=reduction)
    assert relative_error(ours, theirs) < 1e-5
    pairs = zip(*(torch.autograd.grad(loss.sum(), (h, w, b, target)) for loss in (ours, theirs)), strict=True)
    assert all(relative_error(a, b) < 1e-5 for a, b in pairs)


def test_teachers_of_any_layout(backend, device, generator):
    h, w, *_ = operands(generator, torch.float32, device, rows=(5,))
    wide = sample("logits", (5, 2 * VOCAB), generator).to(device)
    for target in (
        wide.mT.contiguous().mT[:, :VOCAB],
        wide[:, ::2],
        wide[:, :1].expand(5, VOCAB),
        torch._neg_view(wide)[:, :VOCAB],
    ):
        target = target.detach().requires_grad_()
        ours = kullback.linear_divergence(h, w, target)
        theirs = kullback.divergence(h @ w.T, target.detach().clone().contiguous().requires_grad_())
        assert relative_error(ours, theirs) < 1e-5
    one = kullback.linear_divergence(
        h[0], w, wide[0, :4], target_form="logits", tail="zero", target_indices=torch.arange(4, device=device)
    )
    assert one.shape == ()
    many = wide[:, None, :].expand(5, 3, -1)[..., :VOCAB]
    assert kullback.linear_divergence(h[:, None].expand(5, 3, -1), w, many, reduction="none").shape == (5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_teachers_of_inference_mode(generator, dtype, reduction):
    h, w, _, t, v, _ = operands(generator, dtype)
    with torch.inference_mode():
        teacher = t * 1.0
    ours = kullback.linear_divergence(h, w, teacher, v.detach(), reduction=reduction)
    theirs = kullback.linear_divergence(h, w, t.detach(), v.detach(), reduction=reduction)
    for a, b in zip(*(torch.autograd.grad(loss.sum(), (h, w)) for loss in (ours, theirs)), strict=True):
        assert torch.equal(a, b)


def test_a_row_that_does_not_count_may_have_an_infinite_gradient(backend, device, generator):
    tensors = operands(generator, torch.float32, device)
    weight = torch.ones(ROWS, device=device)
    weight[3] = 0
    losses = call(tensors, row_weight=weight, reduction="none") / weight
    gradients = torch.autograd.grad(losses, tensors, torch.ones_like(losses))
    assert all(g.isfinite().all() for g in gradients)


def test_transforms_are_refused(generator):
    h, w, _, t, v, _ = operands(generator, torch.float32, requires_grad=False)
    with pytest.raises(RuntimeError, match=r"inside torch.func transforms"):
        torch.func.grad(lambda h: kullback.linear_divergence(h, w, t, v))(h)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_topk_teachers(backend, device, generator, tail, reduction):
    h, w, b, *_ = operands(generator, torch.float32, device, rows=(ROWS, 2))
    values, ids = sample("log_probs", (ROWS, 2, VOCAB), generator).topk(6)
    values, ids = values.to(device).requires_grad_(), ids.to(device)
    ids[3, 1, 2:], ids[4, 0, 1] = -1, ids[4, 0, 0]
    kind = "kl" if tail == "zero" else "jensen_shannon"
    options = {"tail": tail, "temperature": 1.5, "softcap": 6.0, "reduction": reduction, "valid_vocab": VOCAB}
    ours = kullback.linear_divergence(h, w, values, kind=kind, bias=b, target_indices=ids, chunk_rows=5, **options)
    theirs = kullback.topk_divergence(F.linear(h, w, b), values, ids, kind, **options)
    assert relative_error(ours, theirs) < 1e-5
    pairs = zip(*(torch.autograd.grad(loss.sum(), (h, w, b, values)) for loss in (ours, theirs)), strict=True)
    assert all(relative_error(a, b) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_padded_and_longer_heads(backend, device, generator, reduction):
    h, w, _, t, v, _ = operands(generator, torch.float32, device)
    longer = torch.cat([v, torch.full((7, TEACHER_HIDDEN), torch.nan, device=device)]).detach().requires_grad_()
    ours = kullback.linear_divergence(h, w, t, longer, valid_vocab=40, reduction=reduction, chunk_rows=4)
    theirs = kullback.divergence((h @ w.T)[..., :40], (t @ v.T)[..., :40], reduction=reduction)
    assert relative_error(ours, theirs) < 1e-5
    mine, other = torch.autograd.grad(ours.sum(), (w, longer)), torch.autograd.grad(theirs.sum(), (w, v))
    for a, b in zip(mine, other, strict=True):
        assert relative_error(a[:50], b) < 1e-5
        assert a[40:].abs().sum() == 0
    with pytest.raises(ValueError, match="same vocabulary, unless valid_vocab"):
        kullback.linear_divergence(h, w, t, longer)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_without_weight_leak_nothing(backend, device, generator, reduction):
    results = []
    for garbage in (0.0, torch.nan, torch.inf):
        tensors = operands(torch.Generator().manual_seed(3), torch.float32, device, requires_grad=False)
        tensors[0][2], tensors[3][5] = garbage, garbage
        tensors = [t.requires_grad_() for t in tensors]
        weight = torch.ones(ROWS, device=device)
        weight[2] = weight[5] = 0
        loss = call(tensors, row_weight=weight, reduction=reduction, chunk_rows=4)
        results.append((loss, *torch.autograd.grad(loss.sum(), tensors)))
    for clean, *others in zip(*results, strict=True):
        assert all(torch.equal(clean, other) for other in others)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "support"])
def test_rows_without_weight_leak_nothing_beside_a_topk_teacher(backend, device, generator, tail, reduction):
    h, w = torch.randn(3, 4, generator=generator), torch.randn(9, 4, generator=generator)
    log_p, ids = (t.to(device) for t in torch.randn(3, 9, generator=generator).log_softmax(-1).topk(3, -1))
    given = {"tail": tail, "labels": torch.tensor([1, 2, -100], device=device), "reduction": reduction}
    results = []
    for garbage in (0.0, torch.nan, torch.inf):
        h[1] = garbage
        leaves = [t.clone().to(device).requires_grad_() for t in (h, w)]
        weight = torch.tensor([1.0, 0.0, 2.0], device=device)
        loss = kullback.linear_divergence(*leaves, log_p, target_indices=ids, row_weight=weight, **given)
        results.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
    for clean, *others in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert all(torch.equal(clean, other) for other in others)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_weight_and_no_rows(backend, device, generator, reduction):
    for rows in (ROWS, 0):
        tensors = operands(generator, torch.bfloat16, device, rows=(rows,))
        weight = torch.zeros(rows, dtype=torch.bool, device=device)
        loss = call(tensors, row_weight=weight, reduction=reduction)
        assert loss.abs().sum() == 0
        gradients = torch.autograd.grad(loss.sum(), tensors)
        assert all(g.abs().sum() == 0 and g.shape == t.shape for g, t in zip(gradients, tensors, strict=True))


def test_gradients_of_weights_and_normalizers(backend, device, generator):
    tensors = operands(generator, torch.float64, device)
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    count = torch.tensor(7.0, device=device, dtype=torch.float64, requires_grad=True)
    ours = call(tensors, row_weight=weight, normalizer=count, chunk_rows=4)
    theirs = (reference(tensors) * weight).sum() / count
    for a, b in zip(*(torch.autograd.grad(loss, (weight, count)) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)
    plain = call(tensors, normalizer=count.detach())
    torch.testing.assert_close(plain, reference(tensors).sum() / 7)


class Products:
    """Counts products of matrices."""

    def __init__(self, monkeypatch):
        self.count = 0
        for owner, name in ((torch, "mm"), (torch, "addmm"), (torch.Tensor, "addmm_")):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, function):
        def wrapper(*arguments, **options):
            self.count += 1
            return function(*arguments, **options)

        return wrapper


@pytest.mark.parametrize("wanted", [*itertools.product((False, True), repeat=4)], ids=str)
def test_what_is_frozen_costs_no_product(generator, monkeypatch, wanted):
    h, w, _, t, v, _ = operands(generator, requires_grad=False)
    for tensor, wants in zip((h, w, t, v), wanted, strict=True):
        tensor.requires_grad_(wants)
    products = Products(monkeypatch)
    written = []
    run = linear.backends.run
    monkeypatch.setattr(linear.backends, "run", lambda work: written.append(work) or run(work))
    loss = kullback.linear_divergence(h, w, t, v)
    assert products.count == 2 + sum(wanted)
    assert isinstance(written[-1], Rows)
    assert written[-1].wants == (any(wanted[:2]), any(wanted[2:]))
    if any(wanted):
        loss.backward()
        assert products.count == 2 + sum(wanted)
        products.count = 0
        kullback.linear_divergence(h, w, t, v, reduction="none").sum().backward()
        assert products.count == 4 + sum(wanted)
    with torch.no_grad():
        products.count = 0
        kullback.linear_divergence(h, w, t, v)
    assert products.count == 2


def test_nothing_of_a_frozen_teacher_is_kept(generator):
    h, w, _, t, v, _ = operands(generator, torch.float32)
    teacher, head = t.detach().clone(), v.detach().clone()
    loss = kullback.linear_divergence(h, w, teacher, head)
    assert sum(s.numel() for s in loss.grad_fn.saved_tensors) == h.numel() + w.numel()  # the gradients alone
    watched = [weakref.ref(teacher), weakref.ref(head)]
    del teacher, head
    gc.collect()
    assert not any(reference() is not None for reference in watched)
    loss.backward()


def shapes(rows, vocab, dtype, has_teacher_head=True):
    """Operands of these sizes, without memory."""
    head, hidden = (torch.empty(n, 1, dtype=dtype, device="meta") for n in (vocab, rows))
    return linear.Models(hidden, head, None, hidden, head if has_teacher_head else None, None)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
def test_chunks_keep_the_budget(wanted):
    want = [False, wanted[0], False, False, wanted[1], False]
    for rows, vocab, dtype, has_teacher_head in itertools.product(
        (1, 100, 4096, 8192, 131072),
        (1000, 128256, 151936, 262144),
        (torch.bfloat16, torch.float32),
        (True, False),
    ):
        operands = shapes(rows, vocab, dtype, has_teacher_head)
        step, *kept = linear.plan_chunks(operands, want, linear.CHUNK_BYTES)
        assert 1 <= step <= rows + linear.LARGE_TILE
        assert all(count % step == 0 and count >= step for count in kept)
        counts = kept if has_teacher_head else kept[:1]
        assert sum(min(count, rows) * vocab * dtype.itemsize for count in counts) <= linear.CHUNK_BYTES


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("has_teacher_head", [True, False])
def test_wide_logits_and_their_rounded_gradients_keep_the_budget(wanted, has_teacher_head):
    want = [False, wanted[0], False, False, wanted[1], False]
    for rows, vocab in itertools.product((1, 100, 4096, 131072), (1000, 128256, 262144)):
        operands = shapes(rows, vocab, torch.bfloat16, has_teacher_head)
        step, *kept = linear.plan_chunks(operands, want, linear.CHUNK_BYTES, widens=True)
        assert all(count % step == 0 and count >= step for count in kept)
        sides = 1 + has_teacher_head
        rounded = [count for count, asked in list(zip(kept, wanted, strict=True))[:sides] if asked]
        held = sides * min(step, rows) * vocab * 4 + sum(min(count, rows) * vocab * 2 for count in rounded)
        assert held <= linear.CHUNK_BYTES


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon"])
def test_a_student_within_a_hundredth_of_its_teacher(backend, device, generator, kind, reduction):
    """Of 16-bit operands: exact with float32 logits, and not with their own."""
    v = 2 * torch.randn(1003, 64, generator=generator) / 8
    t = 3 * torch.randn(40, 64, generator=generator)
    h, w = t + 0.01 * t.square().mean(-1, keepdim=True).sqrt() * torch.randn(t.shape, generator=generator), v
    h, w, t, v = (tensor.bfloat16().to(device) for tensor in (h, w, t, v))
    exact = [tensor.double().requires_grad_() for tensor in (h, w)]
    logits = exact[0] @ exact[1].T, t.double() @ v.double().T
    truth = oracle.divergence(*logits, kind, **SYMMETRIC.get(kind, {})).mean()
    expected = torch.autograd.grad(truth, exact)
    errors = {}
    for dtype in (None, torch.bfloat16):
        ours = [tensor.clone().requires_grad_() for tensor in (h, w)]
        loss = kullback.linear_divergence(*ours, t, v, kind, reduction=reduction, logits_dtype=dtype).mean()
        found = torch.autograd.grad(loss, ours)
        assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 2
        pairs = zip((loss, *found), (truth, *expected), strict=True)
        errors[dtype] = [relative_error(mine, other) for mine, other in pairs]
    loss, *gradients = errors[None]
    assert loss < 1e-4
    assert all(error < 3e-3 for error in gradients)
    assert all(error > 3 * best for error, best in zip(errors[torch.bfloat16][1:], gradients, strict=True))


def test_dtypes_of_logits(generator):
    def run(dtype, logits_dtype):
        h, w = torch.randn(3, 8, generator=generator, dtype=dtype), torch.randn(5, 8, generator=generator, dtype=dtype)
        return kullback.linear_divergence(h, w, h, w, logits_dtype=logits_dtype)

    for dtype in (torch.bfloat16, torch.float16):
        for logits_dtype in (None, torch.float32, dtype):
            assert run(dtype, logits_dtype) == 0
    assert run(torch.float64, torch.float64) == 0
    with pytest.raises(
        ValueError, match=r"logits_dtype must be torch.bfloat16 or torch.float32, of hidden .* got torch.float16"
    ):
        run(torch.bfloat16, torch.float16)
    with pytest.raises(ValueError, match=r"logits_dtype must be torch.float64, .* got torch.float32"):
        run(torch.float64, torch.float32)
    with pytest.raises(TypeError, match=r"logits_dtype must be a torch.dtype; got str"):
        run(torch.bfloat16, "float32")
    with pytest.raises(TypeError, match=r"logits_dtype must be a torch.dtype; got int"):
        kullback.LinearDivergenceLoss(logits_dtype=32)
    h = torch.randn(3, 8, generator=generator).bfloat16()
    loss = kullback.LinearDivergenceLoss(logits_dtype=torch.bfloat16)
    assert loss(h, h, h, h) == 0


def test_rows_are_kept_together_for_a_head_whose_gradient_is_wanted():
    def chunks(rows, vocab, *want, teacher=True, widens=False, most_bytes=linear.CHUNK_BYTES):
        operands = shapes(rows, vocab, torch.bfloat16, teacher)
        return linear.plan_chunks(operands, [False, *want] if want else [False] * 6, most_bytes, widens)

    student, both = (True, False, False, False, False), (True, False, False, True, False)
    assert chunks(4096, 128256, *student) == (2304, 4608, 2304)  # the head's gradient is one product
    assert chunks(8192, 151936, *student) == (1408, 4224, 1408)
    assert chunks(8192, 151936, *both) == (2048, 2048, 2048)
    assert chunks(8192, 151936) == (2048, 2048, 2048)
    assert chunks(8192, 151936, *student, teacher=False) == (6144, 6144, 6144)
    assert chunks(100, 1000, *student) == (100, 100, 100)
    assert chunks(0, 1000, *student)[0] == 1
    assert chunks(4096, 128256, *student, widens=True) == (768, 4608, 768)
    assert chunks(8192, 151936, *student, widens=True) == (512, 4096, 512)
    wide = functools.partial(chunks, widens=True, most_bytes=4 << 30)
    assert wide(4096, 128256, *student) == (2304, 4608, 2304)
    assert wide(8192, 151936, *student) == (1152, 9216, 1152)
    assert wide(32768, 151936, *student) == (1024, 8192, 1024)
    # What passes needs no more rows than are projected fast, unless they are short.
    assert wide(65536, 128256, most_bytes=8 << 30) == (2048, 2048, 2048)
    assert wide(65536, 1000, most_bytes=8 << 30) == (65664, 65664, 65664)


def test_a_large_device_has_more_memory_for_chunks(monkeypatch):
    def properties(total):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
        return linear.bytes_of_chunks(torch.device("cuda", 0))

    assert linear.bytes_of_chunks(torch.device("cpu")) == properties(16 << 30) == linear.CHUNK_BYTES
    assert properties(80 << 30) == 4 << 30


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [(0, 1, 2), (3, 4, 5), (1,), (0, 4), (0,)])
def test_gradients_of_rows_kept_together(backend, device, generator, monkeypatch, wanted, reduction):
    # Of the 13 rows 1 is streamed and 5 are kept.
    monkeypatch.setattr(linear, "bytes_of_chunks", lambda device: 7 * 8 * VOCAB)
    tensors = operands(generator, device=device)
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index in wanted)
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64).to(device)
    leaves = [tensors[index] for index in wanted]
    losses = reference(tensors, "jeffreys") * weight
    expected = losses.sum() / weight.sum() if reduction == "mean" else losses
    ours = call(tensors, "jeffreys", row_weight=weight, reduction=reduction)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    theirs = torch.autograd.grad(expected.sum(), leaves)
    for mine, other in zip(torch.autograd.grad(ours.sum(), leaves), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-10)


def test_a_second_backward_and_second_derivatives(generator):
    tensors = operands(generator)
    for reduction in ("mean", "none"):
        loss = call(tensors, reduction=reduction).sum()
        first = torch.autograd.grad(2 * loss, tensors, retain_graph=True)
        second = torch.autograd.grad(2 * loss, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(call(tensors, reduction=reduction).sum(), tensors[0], create_graph=True)


def test_gradient_accumulation(backend, device, generator):
    """Micro-batches with one normalizer add up to the batch."""
    h, w, b, t, v, c = operands(generator, torch.float32, device)
    count = torch.tensor(ROWS, device=device)
    for part in (slice(0, 4), slice(4, ROWS)):
        call((h[part], w, b, t[part], v, c), normalizer=count).backward()
    theirs = torch.autograd.grad(reference([x.double() for x in (h, w, b, t, v, c)]).mean(), (h, w, b, t, v, c))
    for tensor, expected in zip((h, w, b, t, v, c), theirs, strict=True):
        assert relative_error(tensor.grad, expected) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpointing(generator, use_reentrant, reduction):
    tensors = operands(generator, torch.float32)
    plain = call(tensors, reduction=reduction).sum()
    kept = torch.utils.checkpoint.checkpoint(
        lambda *t: call(t, reduction=reduction).sum(), *tensors, use_reentrant=use_reentrant
    )
    (3 * kept).backward()
    for tensor, expected in zip(tensors, torch.autograd.grad(3 * plain, tensors), strict=True):
        torch.testing.assert_close(tensor.grad, expected)


def test_autocast(backend, device, generator):
    tensors = operands(generator, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        loss = call(tensors)
    cast = [t.detach().bfloat16().requires_grad_() for t in tensors]
    expected = call(cast)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, cast), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


def test_a_loss_scaler_keeps_float16_gradients(backend, device, generator):
    """Gradients of 1e-9 and less, which float16 does not hold before they are scaled."""
    tensors = operands(generator, torch.float16, device, scale=0.5)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    count = torch.tensor(1e7, device=device)
    scaled = torch.autograd.grad(call(tensors, normalizer=count) * 2.0**24, tensors)
    truth = torch.autograd.grad(reference(wide).sum() / 1e7, wide)
    assert all(relative_error(a.double() / 2**24, b) < 2e-3 for a, b in zip(scaled, truth, strict=True))


def test_opcheck(generator):
    tensors = [t.detach() for t in operands(generator, torch.float32)]
    models = [*tensors, None, torch.rand(ROWS), torch.arange(ROWS)]
    problem = Problem("kl", Side("logits"), Side("logits"))
    task = f"{problem.key} float32 4 1 0 110101", (1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.3, 0.01, 0.0, 0.0), None
    ops = torch.ops.kullback
    torch.library.opcheck(ops.linear_total, (*models, *task, 0.5))
    torch.library.opcheck(ops.linear_per_row, (*models, *task))
    _, state = ops.linear_per_row(*models, *task)
    torch.library.opcheck(ops.linear_gradient, (*models, *task, state))


def test_module(generator):
    h, w, b, t, v, c = operands(generator)
    symmetric = kullback.LinearDivergenceLoss("jensen_shannon", beta=0.3)(h, w, t, v)
    torch.testing.assert_close(symmetric, kullback.linear_divergence(h, w, t, v, "jensen_shannon", beta=0.3))
    loss = kullback.LinearDivergenceLoss("renyi", alpha=0.3, temperature=2.0)
    torch.testing.assert_close(
        loss(h, w, t, v, bias=b, target_bias=c, row_weight=torch.ones(ROWS)),
        call((h, w, b, t, v, c), "renyi", alpha=0.3, temperature=2.0),
    )
    assert repr(loss) == "LinearDivergenceLoss('renyi', alpha=0.3, temperature=2.0)"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"input": torch.zeros(3, 5)},
            ValueError,
            r"input must have .* weight \[vocab, hidden\]; got \[3, 5\] and \[9, 4\]",
        ),
        ({"weight": torch.zeros(9)}, ValueError, r"weight \[vocab, hidden\]; got \[3, 4\] and \[9\]"),
        (
            {"weight": torch.zeros(9, 4, dtype=torch.bfloat16)},
            TypeError,
            "weight must have the dtype of input, torch.float32; got .*weight.to\\(torch.float32\\) casts it",
        ),
        ({"bias": torch.zeros(8)}, ValueError, r"bias must have the shape \[9\]; got \[8\]"),
        ({"bias": 1.0}, TypeError, "bias must be a tensor; got float"),
        (
            {"target_weight": torch.zeros(9, 3)},
            ValueError,
            r"target_weight \[vocab, hidden\]; got \[3, 2\] and \[9, 3\]",
        ),
        ({"target_weight": torch.zeros(8, 2)}, ValueError, "same vocabulary, unless valid_vocab .*; got 9 and 8"),
        ({"target_weight": None}, ValueError, "same vocabulary, unless valid_vocab .*; got 9 and 2"),
        ({"target_weight": None, "target_bias": torch.zeros(9)}, ValueError, "target_bias goes with target_weight"),
        ({"target": torch.zeros(4, 2)}, ValueError, r"target must have the rows of input, \[3, '...'\]; got \[4, 2\]"),
        (
            {"target_form": "probs"},
            ValueError,
            "target_form must be 'logits' where there is a target_weight; got 'probs'",
        ),
        ({"target_indices": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, "got target_weight too"),
        (
            {"target_indices": torch.zeros(3, 2, dtype=torch.int64), "target_weight": None, "target_softcap": 2.0},
            ValueError,
            "not of entries; got target_indices",
        ),
        ({"tail": "zero"}, ValueError, "tail goes with target_indices; got 'zero'"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be positive; got 0"),
        ({"chunk_rows": 2.0}, TypeError, "chunk_rows must be an integer; got float"),
        ({"kind": "kld"}, ValueError, "kind must be one of .*mean 'kl'"),
        ({"row_weight": torch.ones(2)}, ValueError, "row_weight must have the rows' shape"),
        ({"temperature": -1.0}, ValueError, "temperature must be positive"),
        ({"reduction": "batchmean"}, ValueError, "reduction must be one of"),
        ({"valid_vocab": 10}, ValueError, "valid_vocab must be from 1 to 9"),
    ],
)
def test_errors(change, error, says):
    arguments = {
        "input": torch.zeros(3, 4),
        "weight": torch.zeros(9, 4),
        "target": torch.zeros(3, 2),
        "target_weight": torch.zeros(9, 2),
        **change,
    }
    with pytest.raises(error, match=says):
        kullback.linear_divergence(**arguments)


def test_a_heads_gradient_is_summed_in_float32(backend, device, generator):
    """Over chunks, whatever its dtype: in bfloat16 each sum would be rounded to 8 bits."""
    h, w, _, t, v, _ = operands(generator, torch.bfloat16, device, rows=(300,))
    gradients = []
    for chunk_rows in (300, 2):
        loss = kullback.linear_divergence(h, w, t, v, chunk_rows=chunk_rows)
        gradients.append(torch.autograd.grad(loss, w)[0].double())
    assert relative_error(*gradients) < 3e-3  # two roundings; 150 would be 2e-2


def test_products_are_counted(generator):
    """By PyTorch's counter of floating-point operations: products, that is."""
    h, w, _, t, v, _ = operands(generator, torch.float32)
    for reduction in ("mean", "none"):
        with FlopCounterMode(display=False) as counter:
            kullback.linear_divergence(h, w, t.detach(), v.detach(), reduction=reduction).sum().backward()
        rows = h.numel() // h.size(-1)
        student, teacher = 2 * rows * w.numel(), 2 * rows * v.numel()
        again = student + teacher if reduction == "none" else 0  # backward projects again
        assert counter.get_total_flops() == 3 * student + teacher + again


def test_batched_gradients_are_refused(generator):
    h, w, _, t, v, _ = operands(generator, torch.float32, rows=(3,))
    loss = kullback.linear_divergence(h, w, t, v, reduction="none")
    with pytest.raises(RuntimeError, match=r"batched gradients.*use divergence\(F.linear"):
        torch.autograd.grad(loss, h, torch.eye(3), is_grads_batched=True)


def test_a_module_may_temper_entries_of_any_form():
    hidden, head = torch.randn(4, 5), torch.randn(11, 5)
    values, ids = torch.randn(4, 11).softmax(-1).topk(3)
    options = {"target_form": "probs", "target_temperature": 2.0}
    found = kullback.LinearDivergenceLoss(**options)(hidden, head, values, target_indices=ids)
    assert found == kullback.linear_divergence(hidden, head, values, target_indices=ids, **options)
    with pytest.raises(ValueError, match="target_form must be one of"):
        kullback.LinearDivergenceLoss(target_form="prob")
    with pytest.raises(ValueError, match="target_temperature must be positive"):
        kullback.LinearDivergenceLoss(target_form="probs", target_temperature=0.0)


def test_logits_dtype_is_of_both_models(generator):
    """A student of float32 beside a teacher of 16 bits, whose logits are not to be rounded."""
    h, w = torch.randn(16, 32, generator=generator), torch.randn(60, 32, generator=generator) / 4
    t, v = h.bfloat16(), w.bfloat16()
    expected = oracle.divergence(h.double() @ w.double().T, t.double() @ v.double().T, "kl").mean()
    for dtype in (None, torch.float32):
        assert relative_error(kullback.linear_divergence(h, w, t, v, logits_dtype=dtype), expected) < 1e-4


def test_a_logits_dtype_is_floating_point():
    with pytest.raises(ValueError, match=r"logits_dtype must be one of .*; got torch\.int32"):
        kullback.LinearDivergenceLoss("kl", logits_dtype=torch.int32)


def test_a_head_s_gradient_in_blocks_of_tokens(monkeypatch, generator):
    """On a CPU, of 16-bit operands whose sum is wider."""
    h, w, t = (torch.randn(*s, generator=generator).bfloat16() for s in ((5, 8), (50, 8), (5, 50)))
    found = []
    for block in (linear.BLOCK, 16):
        monkeypatch.setattr(linear, "BLOCK", block)
        leaf = w.clone().requires_grad_()
        kullback.linear_divergence(h, leaf, t, chunk_rows=2).backward()  # whose products are added in float32
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-5)
