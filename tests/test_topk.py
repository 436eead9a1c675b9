"""Teachers known at k tokens: against the textbook's k + 1 outcomes, and the dense loss where k is everything."""

import functools
import itertools
import math

import pytest
import torch

import kullback
from kullback.problem import Problem, Side
from kullback.work import Rows
from tests import kinds, oracle
from tests.kinds import FACTS, KINDS
from tests.samples import sample
from tests.tolerances import relative_error

TAILS = ("bucket", "renormalize", "zero")
FORMS = ("logits", "log_probs", "probs")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Where a teacher has no tail and the student has
FINITE = {
    "bucket": KINDS,
    "renormalize": KINDS,
    "zero": [kind for kind in KINDS if math.isfinite(FACTS[kind].p_is_zero)],
}


def teacher(shape, k, generator, dtype=torch.float64, device="cpu"):
    """Log-probabilities of the k best tokens, and their ids, in no particular order."""
    log_p = sample("log_probs", shape, generator, dtype)
    values, ids = log_p.topk(k)
    order = torch.rand(values.shape, generator=generator).argsort(-1)
    return values.gather(-1, order).to(device), ids.gather(-1, order).to(device)


def outcomes(q, log_p, ids, tail, temperature=1.0):
    """The textbook's masses on the support and beside it, float64."""
    q, log_p = q.double(), log_p.double()
    vocab, k = q.size(-1), ids.size(-1)
    mine, theirs = q.gather(-1, ids), (log_p / temperature).exp()
    if tail == "renormalize":
        return mine / mine.sum(-1, keepdim=True), theirs / theirs.sum(-1, keepdim=True)
    rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=0)
    if vocab > k:
        rest = (vocab - k) * (rest / (vocab - k)) ** (1 / temperature)
    whole = theirs.sum(-1, keepdim=True) + rest if temperature != 1 else 1.0
    outside = q.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    rest = torch.zeros_like(rest) if tail == "zero" else rest / whole
    return torch.cat([mine, outside], -1), torch.cat([theirs / whole, rest], -1)


def truth(x, form, log_p, ids, kind, tail, temperature=1.0, target_temperature=None):
    q = oracle.masses(x, form, temperature)
    q, p = outcomes(q, log_p, ids, tail, target_temperature or temperature)
    return oracle.rows(kind, p, q, **kinds.parameters(kind))


# Probabilities of 300 tokens lie among float16's subnormal numbers. A tail and a dtype have nothing in common in C.
OF_FORMS = [*itertools.product(FORMS, DTYPES), ("logits", torch.float16), ("log_probs", torch.float16)]


@pytest.mark.parametrize(
    ("form", "dtype", "tail"),
    [
        pytest.param(*case, tail, marks=[] if torch.float32 in case or tail == "bucket" else [pytest.mark.full])
        for case, tail in itertools.product(OF_FORMS, TAILS)
    ],
)
def test_values_and_gradients(backend, device, generator, form, tail, dtype):
    x = sample(form, (3, 5, 301), generator, dtype).to(device).requires_grad_()
    log_p, ids = teacher((3, 5, 301), 20, generator, torch.float32, device)
    upstream = torch.rand(3, 5, generator=generator).to(device)
    # What is gathered knows no kind: all of them once.
    is_once = dtype == torch.float32 and form == "logits"
    for kind in FINITE[tail] if is_once else ("kl", "jensen_shannon", "total_variation"):
        loss = kullback.topk_divergence(
            x, log_p, ids, kind, form=form, tail=tail, reduction="none", **kinds.parameters(kind)
        )
        wide = x.detach().double().requires_grad_()
        expected = truth(wide, form, log_p, ids, kind, tail)
        assert relative_error(loss, expected) < 1e-5, kind
        (ours,) = torch.autograd.grad(loss, x, upstream.to(loss.dtype))
        (theirs,) = torch.autograd.grad(expected, wide, upstream.double())
        bound = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        assert relative_error(ours, theirs) < bound, kind


@pytest.mark.parametrize("tail", TAILS)
def test_all_tokens_give_the_dense_loss(backend, device, generator, tail):
    x = sample("logits", (4, 60), generator, torch.float32).to(device).requires_grad_()
    y = sample("logits", (4, 60), generator, torch.float32).to(device)
    log_p, ids = y.log_softmax(-1).topk(60)
    for kind in KINDS:
        params = kinds.parameters(kind)
        for temperature in (1.0, 2.0):
            at_ids = kullback.topk_divergence(x, log_p, ids, kind, tail=tail, temperature=temperature, **params)
            dense = kullback.divergence(x, y, kind, temperature=temperature, **params)
            assert relative_error(at_ids, dense) < 2e-6, kind
            ours, theirs = (torch.autograd.grad(loss, x)[0] for loss in (at_ids, dense))
            assert relative_error(ours, theirs) < 1e-5, kind


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("temperature", "target_temperature"), [(2.0, None), (1.5, 3.0), (1.0, 0.5)])
def test_temperatures(backend, device, generator, tail, temperature, target_temperature):
    x = sample("logits", (6, 200), generator, torch.float32).to(device)
    log_p, ids = teacher((6, 200), 9, generator, torch.float32, device)
    loss = kullback.topk_divergence(
        x, log_p, ids, tail=tail, reduction="none", temperature=temperature, target_temperature=target_temperature
    )
    expected = truth(x, "logits", log_p, ids, "kl", tail, temperature, target_temperature)
    assert relative_error(loss, expected) < 1e-5


def test_hot_teachers_agree_with_a_dense_one_whose_tail_is_even(backend, device, generator):
    log_p, ids = teacher((6, 200), 9, generator, torch.float64, device)
    x = sample("logits", (6, 200), generator, torch.float64).to(device)
    even = ((1 - log_p.exp().sum(-1, keepdim=True)) / 191).log()
    dense = even.expand(6, 200).scatter(-1, ids, log_p)
    for temperature in (0.7, 2.0, 50.0):
        ours = kullback.topk_divergence(x, log_p, ids, temperature=temperature)
        q, p = ((t / temperature).softmax(-1) for t in (x, dense))
        lumped = [torch.cat([m.gather(-1, ids), 1 - m.gather(-1, ids).sum(-1, keepdim=True)], -1) for m in (q, p)]
        assert relative_error(ours, oracle.rows("kl", lumped[1], lumped[0]).mean()) < 1e-9


@pytest.mark.parametrize(
    ("target_form", "tail"),
    [*itertools.product(("log_probs", "probs"), TAILS), ("logits", "renormalize"), ("logits", "zero")],
)
def test_forms_of_entries(backend, device, generator, target_form, tail):
    x = sample("logits", (6, 200), generator, torch.float32).to(device)
    log_p, ids = teacher((6, 200), 9, generator, torch.float32, device)
    if target_form == "logits":
        log_p = log_p.log_softmax(-1)  # all that k logits tell
    values = {"log_probs": log_p, "probs": log_p.exp(), "logits": log_p + 3}[target_form]
    loss = kullback.topk_divergence(x, values, ids, tail=tail, target_form=target_form, reduction="none")
    assert relative_error(loss, truth(x, "logits", log_p, ids, "kl", tail)) < 1e-5


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"logit_scale": 0.3}, {"valid_vocab": 150, "temperature": 2.0}])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_of_the_students_logits(backend, device, generator, options, tail, dtype):
    x = sample("logits", (6, 200), generator, dtype, scale=4.0).to(device).requires_grad_()
    log_p, ids = teacher((6, 150), 9, generator, torch.float32, device)
    loss = kullback.topk_divergence(x, log_p, ids, tail=tail, target_temperature=1.0, **options)
    wide = x.detach().double().requires_grad_()
    logits = wide[:, : options.get("valid_vocab")] * options.get("logit_scale", 1.0)
    cap = options.get("softcap")
    logits = cap * torch.tanh(logits / cap) if cap else logits
    expected = truth(logits, "logits", log_p, ids, "kl", tail, options.get("temperature", 1.0), 1.0).mean()
    assert relative_error(loss, expected) < 1e-5
    (ours,), (theirs,) = torch.autograd.grad(loss, x), torch.autograd.grad(expected, wide)
    assert relative_error(ours, theirs) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert ours[:, options.get("valid_vocab", 200) :].abs().sum() == 0


@pytest.mark.parametrize("tail", TAILS)
def test_equal_ids_are_summed_and_absent_ones_ignored(backend, device, generator, tail):
    x = sample("logits", (4, 50), generator, torch.float32).to(device).requires_grad_()
    once = torch.tensor([[3, 7, 11]] * 4, device=device)
    p = torch.tensor([[0.3, 0.2, 0.1]] * 4, device=device)
    again = torch.tensor([[7, -1, 3, 11, 3, -1]] * 4, device=device)
    parts = torch.tensor([[0.2, math.nan, 0.1, 0.1, 0.2, 5.0]] * 4, device=device)
    for kind in FINITE[tail]:
        losses = [
            kullback.topk_divergence(x, values, ids, kind, tail=tail, target_form="probs")
            for values, ids in ((p, once), (parts, again))
        ]
        gradients = [torch.autograd.grad(loss, x)[0] for loss in losses]
        assert relative_error(losses[1], losses[0]) < 1e-6
        assert relative_error(gradients[1], gradients[0]) < 2e-6


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_a_row_without_ids_is_no_divergence(backend, device, generator, tail):
    x = sample("logits", (4, 50), generator, torch.float32).to(device).requires_grad_()
    ids = torch.full((4, 5), -1, device=device)
    for kind in KINDS:
        loss = kullback.topk_divergence(x, torch.zeros(4, 5, device=device), ids, kind, tail=tail, reduction="none")
        assert loss.abs().max() < 1e-6, kind
        assert torch.autograd.grad(loss.sum(), x)[0].abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "total_variation", "renyi"])
@pytest.mark.parametrize("tail", ["renormalize", "zero", "support"])
def test_entries_of_no_mass_are_no_distribution(backend, device, tail, kind):
    """As all of a row of logits that is -inf; ids that are all absent are another thing."""
    x, ids = torch.tensor([[1.0, 0.0, -1.0]], device=device), torch.tensor([[0, 1]], device=device)
    nothing = torch.full((1, 2), -torch.inf, device=device)
    assert kullback.topk_divergence(x, nothing, ids, kind, target_form="logits", tail=tail).isnan()
    absent = torch.full_like(ids, -1)
    assert not kullback.topk_divergence(x, nothing, absent, kind, target_form="logits", tail=tail).isnan()
    if tail == "zero":  # of all tokens, tempered, no tail takes the mass
        assert kullback.topk_divergence(x[:, :2], nothing, ids, kind, tail=tail, target_temperature=2.0).isnan()


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("more", [{"divergence_weight": 0.5}, {"z_weight": 0.1}, {"labels": [3, 49, -100, 0]}])
def test_a_row_without_ids_has_all_else_to_lose(backend, device, generator, tail, more):
    x = sample("logits", (4, 50), generator, torch.float32)
    entries = torch.zeros(4, 5, device=device), torch.full((4, 5), -1, device=device)
    more = {name: torch.tensor(value, device=device) if name == "labels" else value for name, value in more.items()}
    leaf, whole = x.to(device, copy=True).requires_grad_(), x.double().requires_grad_()
    loss = kullback.topk_divergence(leaf, *entries, tail=tail, reduction="none", **more)
    labels = more.get("labels")
    truth = more.get("z_weight", 0.0) * whole.logsumexp(-1).square()
    if labels is not None:
        truth = truth + torch.nn.functional.cross_entropy(whole, labels.cpu(), reduction="none")
    assert (loss.detach().cpu() - truth).abs().max() < 1e-5
    (mine,), (expected,) = torch.autograd.grad(loss.sum(), leaf), torch.autograd.grad(truth.sum(), whole)
    assert (mine.cpu() - expected).abs().max() < 1e-5


def test_a_tail_that_rounds_to_nothing_is_finite(backend, device):
    """A confident teacher whose stored entries sum to 1, or to more."""
    x = torch.zeros(1, 1000, device=device, requires_grad=True)
    for p in ([1.0, 0.0], [0.7, 0.3], [0.7, 0.3000002]):
        loss = kullback.topk_divergence(
            x,
            torch.tensor([p], device=device),
            torch.tensor([[4, 2]], device=device),
            "reverse_kl",
            target_form="probs",
        )
        if 0.0 not in p:
            assert loss.isfinite()
            assert torch.autograd.grad(loss, x)[0].isfinite().all()
        else:
            assert loss == math.inf


@pytest.mark.parametrize("eps", [1.0, 1e-2, 1e-4])
def test_never_negative_and_nothing_for_the_same(backend, device, generator, eps):
    y = sample("logits", (256, 300), generator, torch.float32, scale=4.0)
    x = (y + eps * torch.randn(y.shape, generator=generator)).to(device)
    values, ids = y.to(device).log_softmax(-1).topk(16)
    for kind in ("kl", "reverse_kl", "jensen_shannon", "total_variation"):
        loss = kullback.topk_divergence(x, values, ids, kind, reduction="none")
        assert (loss >= 0).all()
        dense = kullback.divergence(x, y.to(device), kind, reduction="none")
        # Lumping tokens together can only lose; a float32 log-probability is known to 5e-7, total_variation to that.
        assert (loss <= dense * (1 + 1e-4) + 5e-7).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("target_form", ["log_probs", "probs"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_garbage_in_rows_without_weight_leaks_nowhere(backend, device, generator, garbage, tail, target_form, softcap):
    clean = sample("logits", (4, 50), generator, torch.float32).to(device)
    log_p, ids = teacher((4, 50), 5, generator, torch.float32, device)
    log_p = log_p.exp() if target_form == "probs" else log_p
    weight = torch.tensor([1.0, 0.0, 2.0, 0.0], device=device)
    x, spoiled, wrong = clean.clone(), log_p.clone(), ids.clone()
    x[1], x[3, 7], spoiled[1], wrong[3] = garbage, garbage, garbage, -100
    results = []
    for student, entries, where in ((clean, log_p, ids), (x, spoiled, wrong)):
        leaves = [t.clone().requires_grad_() for t in (student, entries)]
        options = {"tail": tail, "target_form": target_form, "softcap": softcap, "row_weight": weight}
        loss = kullback.topk_divergence(*leaves, where, **options)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for clean_result, other in zip(*results, strict=True):
        assert torch.equal(clean_result, other)
    assert results[1][1][1::2].abs().sum() == results[1][2][1::2].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("vocab", [100, 300, 50257])
def test_ids_of_any_integer_dtype(backend, device, generator, dtype, vocab):
    x = sample("logits", (2, vocab), generator).to(device)
    log_p, ids = teacher((2, 90), 5, generator, torch.float32, device)
    assert kullback.topk_divergence(x, log_p, ids.to(dtype)) == kullback.topk_divergence(x, log_p, ids)


def test_unsigned_ids_beyond_int64_are_not_absent_ones():
    ids = torch.tensor([[0, 2**64 - 1]], dtype=torch.uint64)
    with pytest.raises(ValueError, match="target_indices"):
        kullback.topk_divergence(torch.zeros(1, 4), torch.full((1, 2), -1.0), ids)


@pytest.mark.parametrize("kind", ["kl", "jeffreys", "chi2", "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_model_that_allows_only_the_ids_is_itself(backend, device, kind, temperature):
    """1 - Σ p is a rounding there, and the student has nothing beside the ids."""
    x = torch.tensor([[1.0, 2.0, -math.inf, -math.inf], [1.3, 0.1, -math.inf, -math.inf]], device=device)
    loss = kullback.topk_divergence(x, *x.log_softmax(-1).topk(2), kind, temperature=temperature, reduction="none")
    assert loss.abs().max() < 1e-6
    p = torch.tensor([[1.0, 0.0, 0.0, 0.0]], device=device)
    ids = torch.tensor([[0, 1]], device=device)
    if kind != "reverse_kl":
        same = kullback.topk_divergence(p, p[:, :2], ids, kind, form="probs", target_form="probs")
        assert same.abs() < 1e-6
    lost = kullback.topk_divergence(x[:1], torch.tensor([[0.5, 0.3]], device=device).log(), ids, "kl")
    assert lost == math.inf  # a tail that is no rounding


@pytest.mark.parametrize("offset", [0.0, 100.0, -200.0])
@pytest.mark.parametrize("tail", ["renormalize", "zero"])
def test_entries_that_are_logits_have_no_zero(backend, device, generator, offset, tail):
    x = sample("logits", (1, 10), generator).to(device)
    results = []
    for shift in (0.0, offset):
        values = (torch.tensor([[1.0, 2.0, 3.0]], device=device) + shift).requires_grad_()
        ids = torch.tensor([[1, 1, 3]], device=device)
        loss = kullback.topk_divergence(x, values, ids, tail=tail, target_form="logits")
        results.append((loss, torch.autograd.grad(loss, values)[0]))
    for plain, shifted in zip(*results, strict=True):  # a float32 of 200 is known to 8e-6, the divergence is 5e-5
        assert relative_error(shifted, plain) < 1e-2


def test_what_stands_at_no_id_has_no_gradient(backend, device, generator):
    x = sample("logits", (1, 10), generator).to(device)
    for target_form, tail in itertools.product(("probs", "log_probs"), TAILS):
        values = torch.tensor([[0.3, 0.2, math.nan]], device=device)
        values = (values if target_form == "probs" else values.log()).requires_grad_()
        ids = torch.tensor([[1, 2, -1]], device=device)
        loss = kullback.topk_divergence(x, values, ids, tail=tail, target_form=target_form)
        (gradient,) = torch.autograd.grad(loss, values)
        assert gradient[:, :2].isfinite().all()
        assert gradient[0, 2] == 0


def test_entries_stored_in_16_bits_that_sum_to_more_than_one(backend, device, generator):
    y = sample("logits", (64, 200), generator, torch.float32, scale=4.0)
    values, ids = y.log_softmax(-1).topk(50)
    values = values.bfloat16().to(device)
    for form, kind in itertools.product(FORMS, ("kl", "reverse_kl", "jensen_shannon", "alpha")):
        x = {"logits": y, "log_probs": y.log_softmax(-1), "probs": y.softmax(-1)}[form].to(device)
        loss = kullback.topk_divergence(x, values, ids.to(device), kind, form=form, reduction="none")
        assert loss.min() >= (0 if form == "logits" else -1e-6)


def test_impossible_tokens(backend, device, generator):
    """-inf logits, within the ids and beside them."""
    x = sample("logits", (4, 50), generator, torch.float32)
    x[0, 10:] = -math.inf  # all of the rest of ids 0 to 9
    x[1, 20:] = -math.inf
    x[2, 3] = -math.inf
    x[3] = -math.inf
    x = x.to(device).requires_grad_()
    ids = torch.arange(10, device=device).expand(4, 10)
    log_p = torch.full((4, 10), math.log(0.05), device=device)
    log_p[0] = math.log(0.1)
    loss = kullback.topk_divergence(x, log_p, ids, "reverse_kl", reduction="none")
    assert loss[:3].isfinite().all()
    assert loss[3].isnan()
    (gradient,) = torch.autograd.grad(loss[:3].sum(), x)
    assert gradient[:3].isfinite().all()
    assert gradient[0, 10:].abs().sum() == 0
    assert gradient[2, 3] == 0
    kl = kullback.topk_divergence(x, log_p, ids, reduction="none")
    assert kl[2] == math.inf


def test_layouts(backend, device, generator):
    """Views, odd lengths and starts, 1-D rows, strides of rows; and small integers as ids."""
    whole = sample("logits", (7, 5, 203), generator, torch.bfloat16).to(device)
    log_p, ids = teacher((7, 5, 100), 4, generator, torch.float32, device)
    views = [whole[..., :101], whole[..., 1:102], whole[..., 102:], whole[:, 1:, 3:].contiguous()[..., :101]]
    for view in (*views, views[0].transpose(0, 1).contiguous().transpose(0, 1), views[0].mT.contiguous().mT):
        rows = view.size(1)
        x = view.detach().requires_grad_()
        loss = kullback.topk_divergence(x, log_p[:, :rows], ids[:, :rows].int(), reduction="none")
        copy = view.detach().clone().contiguous().requires_grad_()
        expected = kullback.topk_divergence(copy, log_p[:, :rows].clone(), ids[:, :rows].clone(), reduction="none")
        assert relative_error(loss, expected) < 1e-6
        ours, theirs = (torch.autograd.grad(value.sum(), t)[0] for value, t in ((loss, x), (expected, copy)))
        assert relative_error(ours, theirs) < 1e-3  # an ulp of a few
    x = whole[0, 0].float()
    assert kullback.topk_divergence(x, log_p[0, 0], ids[0, 0]).shape == ()
    empty = kullback.topk_divergence(whole[:0], log_p.new_zeros(0, 5, 4), ids.new_zeros(0, 5, 4))
    assert empty == 0


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(backend, device, generator, form, tail):
    x = sample(form, (2, 12), generator, torch.float64).to(device).requires_grad_()
    log_p, ids = teacher((2, 12), 4, generator, torch.float64, device)
    log_p.requires_grad_()

    def loss(x, log_p):
        return kullback.topk_divergence(x, log_p, ids, form=form, tail=tail, temperature=1.3 if form == "logits" else 1)

    # A second backward finds anew what the first was handed by the forward pass (decision 5).
    assert torch.autograd.gradcheck(loss, (x, log_p), nondet_tol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("options", [{}, {"labels": torch.tensor([1, -100])}], ids=["alone", "labels"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(generator, form, tail, options, reduction):
    x = torch.randn(2, 6, generator=generator, dtype=torch.float64)  # of no mass so small that differences are coarse
    x = {"logits": x, "log_probs": x.log_softmax(-1), "probs": x.softmax(-1)}[form].requires_grad_()
    log_p, ids = teacher((2, 6), 3, generator, torch.float64)
    ids[0, 2] = -1
    scaled = {"softcap": 3.0, "temperature": 1.5, "valid_vocab": 5} if form == "logits" else {}
    ids = ids.clamp(max=4)

    def loss(x, kind="kl"):
        return kullback.topk_divergence(
            x, log_p, ids, kind, form=form, tail=tail, reduction=reduction, **scaled, **options
        )

    for kind in ("kl", "renyi"):
        assert torch.autograd.gradgradcheck(functools.partial(loss, kind=kind), (x,), fast_mode=True)


def test_second_derivatives_of_rows_that_are_not_read(generator):
    x = sample("logits", (3, 9), generator)
    x[1, 2:] = math.nan
    x.requires_grad_()
    log_p, ids = teacher((3, 9), 4, generator, torch.float32)
    weight, labels = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1, -100, 2])
    for loss in (
        kullback.topk_divergence(x, log_p, ids, row_weight=weight),
        kullback.divergence(x, None, labels=labels),
    ):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
        assert second[1].count_nonzero() == 0
        assert second.isfinite().all()
        assert second[0].count_nonzero()


def test_a_batch_of_upstream_gradients(generator):
    x = sample("logits", (3, 9), generator).requires_grad_()
    log_p, ids = teacher((3, 9), 4, generator, torch.float32)
    losses = kullback.topk_divergence(x, log_p, ids, reduction="none")
    (rows,) = torch.autograd.grad(losses, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(rows.sum(0), torch.autograd.grad(losses.sum(), x)[0])


def test_transforms(generator):
    x = sample("logits", (3, 4, 30), generator)
    log_p, ids = teacher((3, 4, 30), 5, generator, torch.float32)
    loss = lambda a, b, c: kullback.topk_divergence(a, b, c)
    gradients = torch.func.vmap(torch.func.grad(loss))(x, log_p, ids)
    losses = torch.func.vmap(loss)(x, log_p, ids)
    for i in range(3):
        leaf = x[i].clone().requires_grad_()
        each = loss(leaf, log_p[i], ids[i])
        torch.testing.assert_close(losses[i], each)
        torch.testing.assert_close(gradients[i], torch.autograd.grad(each, leaf)[0])


def test_opcheck(generator):
    x = sample("logits", (4, 50), generator)
    _, ids = teacher((4, 50), 5, generator, torch.float32)
    problem = (Problem("kl", Side("logits"), Side("logits")).key, (1.0, 1.0, 0.0, 0.0, 0.0), None)
    gathered = torch.ops.kullback.gather(x, ids, *problem, True)
    torch.library.opcheck(torch.ops.kullback.gather, (x, ids, *problem, True))
    torch.library.opcheck(torch.ops.kullback.scatter, (x, ids, gathered, torch.ones_like(gathered), *problem))
    values = torch.rand(4, 5)
    for tail in TAILS:
        torch.library.opcheck(torch.ops.kullback.entries, (values, ids, None, *problem, "probs", tail, False, 50))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"target_indices": torch.zeros(3, 2)},
            TypeError,
            "target_indices must be of an integer dtype; got torch.float32",
        ),
        ({"target_indices": [[0]]}, TypeError, "target_indices must be a tensor; got list"),
        ({"target_values": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "target_values must be float16"),
        (
            {"target_indices": torch.zeros(3, 4, dtype=torch.int64)},
            ValueError,
            r"\[3, 'k'\].*got \[3, 2\] and \[3, 4\]",
        ),
        (
            {"target_indices": torch.full((3, 2), 10)},
            ValueError,
            "target_indices must lie from 0 to 9, or be -1; got 10",
        ),
        ({"target_indices": torch.full((3, 2), -2)}, ValueError, "must lie from 0 to 9, or be -1; got -2"),
        ({"valid_vocab": 4, "target_indices": torch.full((3, 2), 4)}, ValueError, "from 0 to 3, or be -1; got 4"),
        (
            {"tail": "buckets"},
            ValueError,
            "tail must be one of bucket, renormalize, zero, support; got 'buckets'.*mean 'bucket'",
        ),
        ({"target_form": "logits"}, ValueError, 'tail="bucket" needs what the entries leave of 1'),
        ({"form": "logit"}, ValueError, "form must be one of"),
        ({"kind": "lk"}, ValueError, "kind must be one of"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": 2.0, "form": "probs"}, ValueError, "temperature divides logits, and form 'probs' holds none"),
        ({"weight": 0.5}, ValueError, "no argument 'weight': row_weight has"),
        ({"valid_vocab": 11}, ValueError, "valid_vocab must be from 1 to 10"),
        ({"input": torch.zeros(())}, ValueError, "for an input"),
        ({"row_weight": torch.ones(2)}, ValueError, "row_weight must have the rows' shape"),
    ],
)
def test_errors(change, error, says):
    arguments = {
        "input": torch.zeros(3, 10),
        "target_values": torch.full((3, 2), -1.0),
        "target_indices": torch.tensor([[0, 1]] * 3),
        **change,
    }
    with pytest.raises(error, match=says):
        kullback.topk_divergence(**arguments)


def test_the_students_own_tokens(generator):
    """On-policy reverse KL: the teacher is looked up at the student's best tokens."""
    student, teacher_logits = (sample("logits", (5, 40), generator, torch.float64) for _ in range(2))
    ids = student.topk(6).indices
    log_p = teacher_logits.log_softmax(-1).gather(-1, ids)
    for tail in TAILS[:2]:
        loss = kullback.topk_divergence(student, log_p, ids, "reverse_kl", tail=tail, reduction="none")
        assert relative_error(loss, truth(student, "logits", log_p, ids, "reverse_kl", tail)) < 1e-9


def test_more_threads_change_nothing(generator):
    x = sample("logits", (64, 1000), generator).requires_grad_()
    log_p, ids = teacher((64, 1000), 8, generator, torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            loss = kullback.topk_divergence(x, log_p, ids)
            results.append((loss, torch.autograd.grad(loss, x)[0]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in itertools.starmap(lambda a, b: (a, b), zip(*results, strict=True)))


def test_gradients_of_gradients_of_whatever_was_upstream(backend, device, generator):
    x = sample("logits", (4, 50), generator, torch.float32).to(device).requires_grad_()
    values, ids = x.detach().flip(0).log_softmax(-1).topk(5)
    for reduction in ("mean", "sum", "none"):
        weight = torch.rand(4, generator=generator).to(device).requires_grad_()
        factor = torch.tensor(2.0, device=device, requires_grad=True)
        loss = kullback.topk_divergence(x, values, ids, row_weight=weight, reduction=reduction).sum() * factor
        plain = torch.autograd.grad(loss, x, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(gradient, *plain)
        # A gradient is linear in either, and so the derivatives of its square are known (Euler).
        squares = gradient.square().sum()
        (of_factor,) = torch.autograd.grad(squares, factor, retain_graph=True)
        torch.testing.assert_close(of_factor * factor, 2 * squares, rtol=1e-4, atol=0)
        if reduction != "mean":  # which divides by the weights
            (of_weight,) = torch.autograd.grad(squares, weight, retain_graph=True)
            torch.testing.assert_close((of_weight * weight).sum(), 2 * squares, rtol=1e-4, atol=0)


def test_without_gradients_none_is_found(generator, monkeypatch):
    x = sample("logits", (4, 50), generator, torch.float32).requires_grad_()
    values, ids = x.detach().flip(0).log_softmax(-1).topk(5)
    done, run = [], kullback.backends.run
    monkeypatch.setattr(kullback.backends, "run", lambda work: done.append(work) or run(work))
    with torch.no_grad():
        kullback.topk_divergence(x, values, ids)
    assert [type(work).__name__ for work in done] == ["Entries", "Gather", "Rows"]
    assert isinstance(done[-1], Rows)
    assert done[-1].wants == (False, False)


def test_a_row_that_does_not_count_under_an_infinite_gradient(backend, device, generator):
    x = sample("logits", (3, 50), generator, torch.float32).to(device).requires_grad_()
    values, ids = x.detach().flip(0).log_softmax(-1).topk(5)
    weight = torch.tensor([1.0, 0.0, 1.0], device=device)
    for reduction in ("sum", "none"):
        loss = kullback.topk_divergence(x, values, ids, row_weight=weight, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), x, torch.tensor(math.inf, device=device))
        assert gradient[1].abs().sum() == 0


def test_backward_again_and_of_changed_logits(generator):
    x = sample("logits", (4, 50), generator, torch.float32).requires_grad_()
    values, ids = x.detach().flip(0).log_softmax(-1).topk(5)
    for reduction in ("mean", "none"):
        loss = kullback.topk_divergence(x, values, ids, reduction=reduction).sum()
        first = torch.autograd.grad(3 * loss, x, retain_graph=True)
        assert torch.equal(*first, *torch.autograd.grad(3 * loss, x, retain_graph=True))
        batch = torch.autograd.grad(loss, x, torch.tensor([3.0, 0.0]), is_grads_batched=True, retain_graph=True)[0]
        torch.testing.assert_close(batch, torch.stack([first[0], torch.zeros_like(x)]))
        with torch.no_grad():
            x += 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("vocab", [4, 3000])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_tail_of_four_roundings_may_be_none(temperature, vocab, backend, device):
    """Of the dtype that entries are stored in: against a student that has nothing there."""
    x = torch.full((2, vocab), -torch.inf)
    x[:, 3] = 0
    eps = torch.finfo(torch.float32).eps
    stored = 1 - torch.tensor([[3.5], [4.5]]) * eps
    ids = torch.full((2, 1), 3)
    losses = kullback.topk_divergence(
        *(t.to(device) for t in (x, stored, ids)), target_form="probs", temperature=temperature, reduction="none"
    )
    assert losses[0] == 0
    assert losses[1] == torch.inf


@pytest.mark.parametrize("form", ["logits", "log_probs", "probs"])
@pytest.mark.parametrize("temperature", [1.0, 1.5, 2.0, 4.0])
def test_a_sure_teacher_loses_nothing_to_its_student(temperature, form, backend, device, generator):
    """Whose tail is nothing but what rounding left of 1 - 1: tempered, it would be most of the row."""
    y = 2 * torch.randn(4, 30000, generator=generator)
    y[:, 0] = 40
    log_p, ids = y.log_softmax(-1).topk(64)
    log_q = (y.double() / temperature).log_softmax(-1)
    x = y if form == "logits" else (log_q if form == "log_probs" else log_q.exp()).float()
    x = x.to(device).requires_grad_()
    options = {"temperature": temperature} if form == "logits" else {"target_temperature": temperature}
    loss = kullback.topk_divergence(x, log_p.to(device), ids.to(device), form=form, **options)
    assert abs(loss.item()) < 1e-6
    if form == "logits":
        assert torch.autograd.grad(loss, x)[0].norm() < 1e-6 * 64


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "grad", "compile"])
def test_ids_that_are_no_tokens_are_refused_in_transforms(transform, generator):
    x, values = torch.randn(3, 10, generator=generator), torch.rand(3, 2, generator=generator)
    ids = torch.tensor([[1, 2], [3, 9999], [0, 1]])
    loss = lambda x, v, i: kullback.topk_divergence(x, v, i, target_form="probs", tail="zero")
    run = {
        "vmap": torch.vmap(loss),
        "grad": torch.func.grad(loss),
        "compile": torch.compile(loss, backend="aot_eager"),
    }
    with pytest.raises((ValueError, RuntimeError), match="target_indices must lie from 0 to 9"):
        run[transform](x, values, ids)


@pytest.mark.parametrize("offset", [0.0, 300.0, 1e4])
def test_an_offset_costs_no_digits(offset, backend, device, generator):
    """Of all of a row's logits. The student's are what float32 holds with it."""
    y = 3 * torch.randn(4, 500, generator=generator, dtype=torch.float64)
    x = (y + 1e-2 * torch.randn(y.shape, generator=generator, dtype=torch.float64) + offset).float().double()
    log_p, ids = y.log_softmax(-1).topk(8)
    losses, gradients = [], []
    for dtype in (torch.float64, torch.float32):
        student = x.to(device, dtype).requires_grad_()
        loss = kullback.topk_divergence(student, log_p.to(device), ids.to(device))
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, student)[0].double())
    assert abs(losses[1] - losses[0]) < 1e-5 * losses[0]  # of 2e-5; an offset of 1e4 in the tail would be 1e-3 of it
    assert relative_error(gradients[1], gradients[0]) < 2e-5  # of rows that are near


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_softcap_and_temperature_together(temperature, backend, device, generator):
    """As written out: the cap comes before the temperature, and both are in the gradient."""
    x = (8 * torch.randn(3, 40, generator=generator, dtype=torch.float64)).requires_grad_()
    p = torch.rand(3, 5, generator=generator, dtype=torch.float64) / 10
    ids = torch.stack([torch.randperm(40, generator=generator)[:5] for _ in range(3)])
    q = (6 * torch.tanh(x / 6) / temperature).softmax(-1)
    mine = q.gather(-1, ids)
    tails = 1 - p.sum(-1), q.scatter(-1, ids, 0.0).sum(-1)
    expected = (p * (p / mine).log()).sum(-1) + tails[0] * (tails[0] / tails[1]).log()
    ours = kullback.topk_divergence(
        x.to(device), p.to(device), ids.to(device), target_form="probs", reduction="none",
        temperature=temperature, target_temperature=1.0, softcap=6.0,
    )  # fmt: skip
    torch.testing.assert_close(ours.cpu(), expected)
    both = (torch.autograd.grad(loss.sum(), x)[0] for loss in (ours.cpu(), expected))
    torch.testing.assert_close(*both)


def support_only(x, form, log_p, ids, kind, temperature=1.0):
    """Sums over the ids, of the student's masses in its whole row."""
    q = oracle.masses(x, form, temperature).gather(-1, ids)
    return oracle.rows(kind, (log_p.double() / temperature).exp(), q, **kinds.parameters(kind))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jeffreys", "jensen_shannon", "total_variation"])
def test_sums_over_the_support_alone(backend, device, generator, kind, form):
    """As verl and NeMo-RL have them; with the gradient through the student's whole softmax."""
    x = sample(form, (4, 301), generator).to(device).requires_grad_()
    log_p, ids = teacher((4, 301), 20, generator, torch.float32, device)
    wide = x.detach().double().requires_grad_()
    expected = support_only(wide, form, log_p, ids, kind)
    assert expected.isfinite().all()
    (theirs,) = torch.autograd.grad(expected.sum(), wide)
    for reduction in ("none", "sum"):
        loss = kullback.topk_divergence(
            x, log_p, ids, kind, form=form, tail="support", reduction=reduction, **kinds.parameters(kind)
        )
        assert relative_error(loss.sum(), expected.sum()) < 1e-5
        (ours,) = torch.autograd.grad(loss.sum(), x)
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "renyi"])
def test_support_from_hidden_states(backend, device, generator, kind):
    hidden, head = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((6, 8), (90, 8)))
    hidden, head = (t.to(device).requires_grad_() for t in (hidden, head))
    log_p, ids = teacher((6, 90), 7, generator, torch.float64, device)
    ids = torch.where(torch.arange(7, device=device) == 6, -1, ids)
    for reduction in ("none", "mean"):
        options = {"tail": "support", "reduction": reduction, **kinds.parameters(kind)}
        ours = kullback.linear_divergence(hidden, head, log_p, kind=kind, target_indices=ids, chunk_rows=4, **options)
        dense = kullback.topk_divergence(hidden @ head.t(), log_p, ids, kind, **options)
        assert relative_error(ours, dense) < 1e-9
        for mine, other in zip(
            torch.autograd.grad(ours.sum(), (hidden, head)),
            torch.autograd.grad(dense.sum(), (hidden, head)),
            strict=True,
        ):
            assert relative_error(mine, other) < 1e-9


def test_logits_given_as_log_probabilities_are_noticed(generator):
    student, logits = sample("logits", (4, 50), generator), sample("logits", (4, 50), generator, scale=3.0)
    values, ids = logits.topk(5)
    with pytest.warns(UserWarning, match="probabilities that sum to .*target_form=.logits"):
        kullback.topk_divergence(student, values, ids)
    with pytest.warns(UserWarning, match="target_form"):
        kullback.linear_divergence(student, torch.eye(50), values, target_indices=ids)
    # Neither what does not count, nor what 16 bits round
    rounded = logits.log_softmax(-1).bfloat16().gather(-1, ids)
    kullback.topk_divergence(student, rounded, ids)
    kullback.topk_divergence(student, values, torch.full_like(ids, -1))
    kullback.topk_divergence(student, values, ids, row_weight=torch.zeros(4))
    kullback.topk_divergence(student, values, ids, target_form="logits", tail="renormalize")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_support_of_rows_that_do_not_count(backend, device, generator, bad):
    """Their garbage reaches no gradient; a row without ids is a sum over nothing, in every form."""
    x = sample("logits", (3, 8), generator)
    x[1] = bad
    log_p, ids = teacher((3, 8), 2, generator, torch.float32)
    weight = torch.tensor([1.0, 0.0, 2.0])
    x, log_p, ids, weight = (t.to(device) for t in (x, log_p, ids, weight))
    for reduction in ("sum", "none"):
        options = {"tail": "support", "row_weight": weight, "reduction": reduction}
        leaf = x.clone().requires_grad_()
        kullback.topk_divergence(leaf, log_p, ids, "reverse_kl", **options).sum().backward()
        hidden, head = x.clone().requires_grad_(), torch.eye(8, device=device).requires_grad_()
        kullback.linear_divergence(
            hidden, head, log_p, kind="reverse_kl", target_indices=ids, **options
        ).sum().backward()
        for gradient in (leaf.grad, hidden.grad):
            assert (gradient[1] == 0).all()
            assert gradient[[0, 2]].isfinite().all()
        assert head.grad.isfinite().all()
    good = x[:1]
    for form, values in (("logits", good), ("log_probs", good.log_softmax(-1)), ("probs", good.softmax(-1))):
        for kind in ("kl", "reverse_kl", "jensen_shannon", "total_variation"):
            nothing = torch.full((1, 2), -1, device=device)
            assert kullback.topk_divergence(values, log_p[:1], nothing, kind, form=form, tail="support") == 0, (
                form,
                kind,
            )


@pytest.mark.parametrize("tail", ["bucket", "zero", "renormalize", "support"])
@pytest.mark.parametrize("labels", [None, torch.tensor([0, 1, -100])], ids=["no labels", "labels"])
def test_weights_that_are_all_0_have_a_gradient_of_0(tail, labels):
    """As a schedule has that passes through 0."""
    student = torch.randn(3, 7, requires_grad=True)
    entries = torch.randn(3, 7).log_softmax(-1).topk(2)
    weights = {"divergence_weight": 0.0, "z_weight": 0.0} | ({} if labels is None else {"label_weight": 0.0})
    loss = kullback.topk_divergence(student, *entries, tail=tail, labels=labels, **weights)
    loss.backward()
    assert loss == 0
    assert torch.equal(student.grad, torch.zeros(3, 7))


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_rows_without_tokens_are_refused(backend):
    with kullback.backend(backend), pytest.raises(ValueError, match=r"input must have tokens; got the shape \[3, 0\]"):
        kullback.topk_divergence(torch.zeros(3, 0), torch.zeros(3, 1), torch.full((3, 1), -1))


def test_the_warning_of_logits_is_of_who_called():
    hidden, head = torch.randn(4, 5), torch.randn(11, 5)
    values, ids = (torch.randn(4, 11) + 3).topk(3)
    for name, call in (
        ("target", lambda: kullback.linear_divergence(hidden, head, values, target_indices=ids)),
        ("target", lambda: kullback.LinearDivergenceLoss()(hidden, head, values, target_indices=ids)),
        ("target_values", lambda: kullback.topk_row_statistics(torch.randn(4, 11), values, ids)),
    ):
        with pytest.warns(UserWarning, match=f"^{name} holds log-probabilities, by target_form") as told:
            call()
        assert {each.filename for each in told} == {__file__}
