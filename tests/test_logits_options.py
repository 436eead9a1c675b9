"""Scale, softcap, the valid part of a vocabulary, and gradients in the place of their logits."""

import itertools

import pytest
import torch

import kullback
from tests import kinds, oracle
from tests.kinds import EVERY_BACKEND, KINDS
from tests.samples import sample
from tests.tolerances import FLOAT_SUM, relative_error


def truth(x, y, kind, target_form, scales, caps, temperatures, valid):
    """Value and gradients of the rows' sum by the textbook, in float64."""
    a, b = (t.detach().double().cpu().requires_grad_() for t in (x, y))
    sides = []
    for t, form, scale, cap, temperature in zip(
        (a, b), ("logits", target_form), scales, caps, temperatures, strict=True
    ):
        t = t[..., :valid]
        if form == "logits":
            t = t * scale
            t = t if cap is None else cap * torch.tanh(t / cap)
        sides.append(oracle.masses(t, form, temperature))
    q, p = sides
    losses = oracle.rows(kind, p, q, **kinds.parameters(kind))
    return losses.detach(), *torch.autograd.grad(losses.sum(), (a, b))


# every kind in float32; of the rest a covering choice, since each is a kernel to compile
CASES = [
    *((kind, torch.float32, "logits", (3.0, 5.0)) for kind in KINDS),
    *((kind, torch.float32, "probs", (3.0, 5.0)) for kind in ("kl", "jensen_shannon", "renyi")),
    *(("kl", dtype, form, (3.0, 5.0)) for dtype in (torch.bfloat16, torch.float64) for form in ("logits", "probs")),
    *(("jensen_shannon", torch.float32, "logits", caps) for caps in ((None, 4.0), (2.0, None))),
]


@pytest.mark.few_kinds
@pytest.mark.parametrize(("kind", "dtype", "target_form", "caps"), CASES)
def test_scales_caps_and_valid_vocabulary(kind, dtype, target_form, caps, backend, device, generator):
    tight = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float64: 1e-12}[dtype]
    for x_vocab, y_vocab, valid in [(70, 64, 61), (64, 72, 64), (4104, 4096, 4090)]:
        x = sample("logits", (5, x_vocab), generator, dtype).to(device).requires_grad_()
        y = sample(target_form, (5, y_vocab), generator, dtype).to(device).requires_grad_()
        with torch.no_grad():  # nothing of the rest may be read
            x[:, valid:] = float("nan")
            y[:, valid:] = float("nan")
        scales, temperatures = (0.7, 1.3), (1.5, 0.8)
        options = {
            "logit_scale": 0.7,
            "softcap": caps[0],
            "temperature": 1.5,
            "target_form": target_form,
            "valid_vocab": valid,
        }
        if target_form == "logits":
            options |= {"target_logit_scale": 1.3, "target_softcap": caps[1], "target_temperature": 0.8}
        expected = truth(x, y, kind, target_form, scales, caps, temperatures, valid)
        losses = kullback.divergence(x, y, kind, reduction="none", **options, **kinds.parameters(kind))
        separate = torch.autograd.grad(losses.sum(), (x, y))
        whole = kullback.divergence(x, y, kind, reduction="sum", **options, **kinds.parameters(kind))
        together = torch.autograd.grad(whole, (x, y))
        assert relative_error(losses, expected[0]) <= (1e-12 if dtype == torch.float64 else 3e-6)
        for gradients in (separate, together):
            for ours, theirs in zip(gradients, expected[1:], strict=True):
                assert relative_error(ours, theirs) <= tight
                assert (ours[:, valid:] == 0).all()


def test_a_scale_is_an_inverse_temperature(backend, device, generator):
    x, y = (sample("logits", (4, 33), generator).to(device) for _ in range(2))
    ours = kullback.divergence(x, y, logit_scale=0.25, temperature=0.5)
    torch.testing.assert_close(ours, kullback.divergence(x, y, temperature=2.0))


def test_a_wide_cap_changes_nothing(backend, device, generator):
    x, y = (sample("logits", (4, 33), generator).to(device) for _ in range(2))
    ours = kullback.divergence(x, y, softcap=1e5, target_softcap=1e5)
    torch.testing.assert_close(ours, kullback.divergence(x, y))


def test_capped_logits_pass_gradgradcheck(backend, device, generator):
    x, y = (sample("logits", (3, 6), generator, torch.float64).to(device).requires_grad_() for _ in range(2))
    run = lambda a, b: kullback.divergence(a, b, softcap=2.0, target_softcap=3.0, logit_scale=0.5, valid_vocab=5)
    assert torch.autograd.gradcheck(run, (x, y))
    assert torch.autograd.gradgradcheck(run, (x, y), fast_mode=True)


def test_options_compose_with_transforms(backend, device, generator):
    x, y = (sample("logits", (2, 3, 9), generator).to(device) for _ in range(2))
    run = lambda a, b: kullback.divergence(a, b, softcap=2.0, valid_vocab=7, reduction="sum")
    plain = x.clone().requires_grad_()
    run(plain, y).backward()
    torch.testing.assert_close(torch.func.grad(run)(x, y), plain.grad)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(run))(x, y), plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [40, 4104])
def test_in_place(dtype, vocab, backend, device, generator):
    leaf, y = (sample("logits", (3, 7, vocab), generator, dtype).to(device) for _ in range(2))
    weight = torch.rand(3, 7, generator=generator).to(device)
    weight[0, 2] = 0
    for kind, valid in itertools.product(("kl", "jensen_shannon"), (None, vocab - 3)):
        a, b = leaf.clone().requires_grad_(), leaf.clone().requires_grad_()
        logits = a * 1.5
        address, version = logits.data_ptr(), logits._version
        received = []
        logits.register_hook(received.append)
        loss = kullback.DivergenceLoss(kind, inplace=True, valid_vocab=valid)(logits, y, row_weight=weight)
        assert logits._version > version
        (loss * 2.0).backward()
        plain = kullback.divergence(b * 1.5, y, kind, row_weight=weight, valid_vocab=valid)
        (plain * 2.0).backward()
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
        assert received[0].data_ptr() == address
        # Not to the bit: where the gradient has memory of its own, the C path keeps slopes there.
        assert relative_error(a.grad, b.grad) < FLOAT_SUM
        with pytest.raises(RuntimeError, match="handed over"):
            (loss * 2.0).backward()
        with torch.no_grad():
            kept = leaf * 1.5
            torch.testing.assert_close(
                kullback.divergence(kept, y, kind, row_weight=weight, inplace=True, valid_vocab=valid), loss
            )
            assert torch.equal(kept, leaf * 1.5)


def test_in_place_tells_whoever_saved_the_logits(backend, device, generator):
    a, y = (sample("logits", (3, 40), generator).to(device).requires_grad_() for _ in range(2))
    logits = a * 1.0
    penalty = logits.square().mean()
    loss = kullback.divergence(logits, y.detach(), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + penalty).backward()


def test_in_place_where_it_is_unsafe(backend, device, generator):
    x, y = (sample("logits", (3, 40), generator).to(device) for _ in range(2))
    leaf = x.clone().requires_grad_()
    run = lambda a, b=y, **options: kullback.divergence(a, b, inplace=True, **options)
    cases = [
        ("reduction", lambda: run(leaf * 1, reduction="none")),
        ("leaf", lambda: run(leaf)),
        ("overwrite a leaf", lambda: run(leaf.view(-1, 20), y.view(-1, 20))),
        ("for logits", lambda: run((leaf * 1).softmax(-1), y.softmax(-1), form="probs")),
        ("float16", lambda: run((leaf * 1), y.half().requires_grad_())),
        ("float16", lambda: run((leaf * 1).half(), y.half())),
        ("memory of their own", lambda: (lambda both: run(both[:3], both[3:].detach()))(torch.cat([leaf, leaf]) * 1)),
        ("strides", lambda: run((leaf * 1)[:1].expand(3, 40))),
        ("row_weight", lambda: run(leaf * 1, row_weight=torch.ones(3, device=device, requires_grad=True))),
        ("traces or transforms", lambda: torch.func.grad(run)(x)),
    ]
    for words, call in cases:
        with pytest.raises(ValueError, match=words):
            call()
    assert torch.equal(leaf.detach(), x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"valid_vocab": 0}, "valid_vocab must be from 1 to 6"),
        ({"valid_vocab": 7}, "valid_vocab must be from 1 to 6"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"target_softcap": -1.0}, "target_softcap must be positive"),
        ({"logit_scale": float("inf")}, "logit_scale must be positive"),
        ({"form": "probs", "softcap": 3.0}, "softcap bounds logits"),
        ({"form": "probs", "logit_scale": 3.0}, "logit_scale multiplies logits"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        kullback.divergence(torch.zeros(2, 6), torch.zeros(2, 6), **options)


@pytest.mark.parametrize("options", [{"valid_vocab": 3.0}, {"valid_vocab": True}, {"softcap": "3"}])
def test_options_of_the_wrong_type(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        kullback.divergence(torch.zeros(2, 6), torch.zeros(2, 6), **options)


def test_vocabularies_of_two_lengths_want_a_bound():
    with pytest.raises(ValueError, match="unless valid_vocab"):
        kullback.divergence(torch.zeros(2, 6), torch.zeros(2, 7))


def test_in_place_and_whoever_writes_there_again(backend, device, generator):
    a, y = (sample("logits", (3, 40), generator).to(device) for _ in range(2))
    a.requires_grad_()
    logits = a * 1.0
    loss = kullback.divergence(logits, y, inplace=True)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified since"):
        loss.backward()
    logits = a * 1.0
    with pytest.raises(RuntimeError, match="modified since"):
        (kullback.divergence(logits, y, inplace=True) + kullback.divergence(logits, y, "chi2", inplace=True)).backward()


def test_in_place_in_rows_that_lie_apart(backend, device, generator):
    leaf, y = (sample("logits", (6, 40), generator).to(device) for _ in range(2))
    a, b = leaf.clone().requires_grad_(), leaf.clone().requires_grad_()
    (2 * kullback.divergence((a * 1)[:, :33], y[:, :33], inplace=True)).backward()
    (2 * kullback.divergence((b * 1)[:, :33], y[:, :33])).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


def test_one_valid_element_of_probabilities(backend, device, generator):
    x, y = (sample("probs", (3, 4), generator).to(device).requires_grad_() for _ in range(2))
    kullback.divergence(x, y, form="probs", valid_vocab=1, reduction="none").sum().backward()
    a, b = (t.detach()[:, :1].clone().requires_grad_() for t in (x, y))
    kullback.divergence(a, b, form="probs", reduction="none").sum().backward()
    for ours, theirs in ((x, a), (y, b)):
        torch.testing.assert_close(ours.grad[:, :1], theirs.grad)
        assert (ours.grad[:, 1:] == 0).all()


def test_no_rows(backend, device):
    x = torch.zeros(0, 9, device=device, requires_grad=True)
    y = torch.zeros(0, 7, device=device)
    loss = kullback.divergence(x * 1, y, valid_vocab=5, inplace=True)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.shape == (0, 9)
    run = torch.func.grad(lambda a, b: kullback.divergence(a, b, valid_vocab=5, reduction="sum"))
    batch = torch.vmap(run)(torch.zeros(4, 0, 9, device=device), torch.zeros(4, 0, 7, device=device))
    assert batch.shape == (4, 0, 9)


def test_a_negative_view_is_read_as_it_is(backend, device):
    x = torch.tensor([[-1.0, -2.0, -5.0]], device=device)
    y = torch.tensor([[1.0, 0.0, 0.0]], device=device)
    torch.testing.assert_close(kullback.divergence(torch._neg_view(-x), y), kullback.divergence(x, y))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1e39},
        {"softcap": 1e-40},
        {"temperature": 1e-200, "logit_scale": 1e200},
        {"softcap": 1e30, "logit_scale": 1e-10},
    ],
)
def test_quotients_that_float32_cannot_hold(options):
    with pytest.raises(ValueError, match="between 1e-30 and 1e30"):
        kullback.divergence(torch.zeros(2, 6), torch.zeros(2, 6), **options)


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cap", "temperature"),  # of the last three the quotient of their product is not the cap
    [(30.0, 0.3), (30.0, 0.9), (7.3, 1.0), (30.0, 1.7), (7.3, 1.3), (49.0, 1.3)],
)
def test_a_logit_far_beyond_its_cap_has_no_slope(backend, device, dtype, cap, temperature):
    """The label's and a teacher's tokens have a slope of their own."""
    far = 100 * cap
    x = torch.tensor([[far, -far, cap, cap / 2, far, -torch.inf]], dtype=dtype, device=device)
    saturated = x.abs() > cap
    ids, label = torch.tensor([[1, 0]], device=device), torch.tensor([1], device=device)
    teacher = torch.tensor([[-1.0, -1.5]], device=device)
    options = {"softcap": cap, "temperature": temperature}
    losses = {
        "labels": lambda leaf: kullback.divergence(leaf, None, labels=label, z_weight=0.1, **options),
        "top-k": lambda leaf: kullback.topk_divergence(leaf, teacher, ids, target_temperature=1.0, **options),
        "kl": lambda leaf: kullback.divergence(leaf, x.flip(-1), target_softcap=cap, labels=label, **options),
    }
    for name, loss in losses.items():
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf), leaf)
        assert (found[saturated] == 0).all(), (name, found)
        assert (found[~saturated] != 0).all(), (name, found)
