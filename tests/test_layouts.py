"""Any stride, offset, length and dimension gives what the contiguous tensor gives; and the main workload."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kullback
from kullback import backends, work
from kullback.backends.cuda import logits
from kullback.problem import Problem, Side
from tests import kinds, oracle, samples
from tests.kinds import EVERY_BACKEND, KINDS
from tests.samples import sample
from tests.tolerances import BF16_CACHED, LOSS, relative_error

VOCABS = (1, 3, 35, 1271, 50257)


def losses_and_gradients(x, y, kind="kl", form="probs", weight=None, reduction="none"):
    a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
    loss = kullback.divergence(a, b, kind, form=form, row_weight=weight, reduction=reduction, **kinds.parameters(kind))
    upstream = torch.linspace(0.5, 2, loss.numel(), device=x.device).reshape(loss.shape)
    loss.backward(upstream)
    return loss.detach(), a.grad, b.grad


def same(x, y, like_x, like_y, **options):
    # The CUDA kernels of logits add a row in an order that its alignment decides: a float's last bit, which may
    # turn the rounding of a few 16-bit gradients.
    turned = x.is_cuda and options.get("form") == "logits" and x.dtype.itemsize == 2
    tolerance = 5e-5 if turned else 1e-6
    for reduction in ("none", "sum"):
        ours = losses_and_gradients(x, y, reduction=reduction, **options)
        theirs = losses_and_gradients(like_x, like_y, reduction=reduction, **options)
        for a, b in zip(ours, theirs, strict=True):
            assert relative_error(a, b) <= tolerance


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_storage_offsets(form, vocab, dtype, backend, device, generator):
    x, y = (sample(form, (3, vocab), generator, dtype).to(device) for _ in range(2))
    for offset, other in [(1, 0), (0, 1), (1, 1), (2, 3), (5, 4), (6, 7), (7, 7)]:
        same(samples.moved(x, offset), samples.moved(y, other), x, y, form=form)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_slices_of_sequences_are_not_copied(reduction, weighted, backend, device, generator, monkeypatch):
    """logits[:, :-1] has no view as rows: each sequence is a part of its own."""
    x, y = (sample("logits", (2, 3, 5, 40), generator).to(device) for _ in range(2))
    weight = torch.rand(2, 3, 4, generator=generator).to(device) if weighted else None
    options = {"row_weight": weight, "reduction": reduction, "valid_vocab": 37}

    def results(a, b):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        loss = kullback.divergence(a[:, :, :-1], b[:, :, 1:], "jensen_shannon", **options)
        return loss.detach(), *torch.autograd.grad(loss.sum() * 3, (a, b))

    whole = results(x, y)
    monkeypatch.setattr(work, "PART_BYTES", 1)
    problem = Problem("kl", Side("logits"), Side("logits"))
    parts = work.Rows(problem, work.Operands(x[:, :, :-1], y[:, :, 1:], weight)).split()
    assert [tuple(part.input.shape) for part in parts] == [(4, 40)] * 6
    assert {part.input.untyped_storage().data_ptr() for part in parts} == {x.untyped_storage().data_ptr()}
    for ours, expected in zip(results(x, y), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    assert len(work.Rows(problem, work.Operands(x, y)).split()) == 1


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("kind", ["kl", "renyi"])
def test_strides(form, kind, backend, device, generator):
    x, y = (sample(form, (6, 40), generator).to(device) for _ in range(2))
    wide = torch.full((6, 50), float("nan"), device=device)
    wide[:, 3:43] = x
    views = {
        "sliced vocabulary": (wide[:, 3:43], y),
        "transposed": (x.t().contiguous().t(), y.t().contiguous().t()),
        "every other element": (x.repeat_interleave(2, 1)[:, ::2], y),
        "every other row": (x.repeat_interleave(2, 0)[::2], y),
    }
    for a, b in views.values():
        same(a, b, x, y, kind=kind, form=form)
        same(b, a, y, x, kind=kind, form=form)
    same(x[:1].expand(6, 40), y, x[:1].repeat(6, 1), y, kind=kind, form=form)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 1, 3, 5), (1, 2, 2, 3, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions_are_rows(shape, kind, backend, device, generator):
    for form in oracle.FORMS:
        x, y = (sample(form, shape, generator).to(device) for _ in range(2))
        options = {"form": form, "reduction": "none", **kinds.parameters(kind)}
        rows = kullback.divergence(x, y, kind, **options)
        assert rows.shape == shape[:-1]
        flat = kullback.divergence(x.reshape(-1, 5), y.reshape(-1, 5), kind, **options)
        assert torch.equal(rows.flatten(), flat.flatten())
        permuted = x.movedim(0, -2) if len(shape) > 2 else x
        other = y.movedim(0, -2) if len(shape) > 2 else y
        assert relative_error(kullback.divergence(permuted, other, kind, **options).sum(), rows.sum()) < 1e-6


@pytest.mark.parametrize("vocab", [0, *VOCABS])
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "total_variation"])
def test_lengths(vocab, kind, backend, device, generator):
    for form in oracle.FORMS:
        if vocab == 0 and form == "logits":
            continue
        x, y = (sample(form, (4, vocab), generator).to(device) for _ in range(2))
        ours = losses_and_gradients(x, y, kind, form)
        a, b = x.double().requires_grad_(), y.double().requires_grad_()
        truth = oracle.divergence(a, b, kind, form, **kinds.parameters(kind))
        truth.backward(torch.linspace(0.5, 2, 4, device=device).double())
        for one, other in zip(ours, (truth, a.grad, b.grad), strict=True):
            assert one.shape == other.shape
            # a vocabulary of one has only rounding to show
            assert relative_error(one, other) <= 2e-6 or (one - other).abs().max() < 1e-6


def test_upstream_gradients_of_any_stride(backend, device, generator):
    x = sample("probs", (4, 3, 33), generator).to(device)
    y = sample("probs", (4, 3, 33), generator).to(device)
    plain = torch.randn(4, 3, generator=generator).to(device)
    upstreams = [
        plain.t().contiguous().t(),
        torch.cat([plain, plain], 1)[:, :3],
        torch.ones((), device=device).expand(4, 3),
        plain[:1].expand(4, 3),
        plain.repeat_interleave(2, 1)[:, ::2],
    ]
    for upstream in upstreams:
        a = x.clone().requires_grad_()
        b = x.clone().requires_grad_()
        kullback.divergence(a, y, form="probs", reduction="none").backward(upstream)
        kullback.divergence(b, y, form="probs", reduction="none").backward(upstream.contiguous())
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)  # vectors and single elements round apart


def test_a_row_alone_equals_the_row_in_a_batch(backend, device, generator):
    # On a GPU the order of a sum follows the alignment of its row, which is the same in these.
    vocabs = (8, 136, 5000) if backend == "cuda" else (5, 130, 5000)
    for form, kind, vocab in itertools.product(oracle.FORMS, KINDS, vocabs):
        x, y = (sample(form, (9, vocab), generator).to(device) for _ in range(2))
        options = {"form": form, "reduction": "none", **kinds.parameters(kind)}
        together = kullback.divergence(x, y, kind, **options)
        for row in (0, 4, 8):
            alone = kullback.divergence(x[row : row + 1].clone(), y[row : row + 1].clone(), kind, **options)
            # The torch backend guards a whole chunk or none of it, and torch's kernels vary with the shape.
            if backend == "torch":
                torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(alone[0], together[row])


def test_two_runs_are_equal_to_the_bit(backend, device, generator):
    x, y = (sample("probs", (50, 3000), generator).to(device) for _ in range(2))
    first = kullback.kl_div(x, y, "sum", form="probs")
    for _ in range(5):
        assert torch.equal(kullback.kl_div(x, y, "sum", form="probs"), first)


def test_threads_do_not_change_a_bit(generator):
    x, y = (sample("probs", (300, 2000), generator) for _ in range(2))
    threads = torch.get_num_threads()
    results = []
    try:
        with kullback.backend("c"):
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                results.append(kullback.kl_div(x, y, "sum", form="probs"))
                results.append(kullback.divergence(x, y, form="probs", row_weight=torch.ones(300), reduction="sum"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, results[0]) for r in results[::2])
    assert all(torch.equal(r, results[1]) for r in results[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_element_is_left_out(dtype, backend, device, generator):
    """The main workload's shape in small: NaN in any one element must reach the result."""
    x, y = (torch.rand(32, 2048, generator=generator).softmax(-1).to(dtype).to(device) for _ in range(2))
    assert torch.isfinite(kullback.kl_div(x, y, "batchmean", form="probs"))
    for index in [*torch.randint(x.numel(), (100,), generator=generator).tolist(), 0, x.numel() - 1]:
        for t in (x, y):
            kept = t.view(-1)[index].item()
            t.view(-1)[index] = float("nan")
            assert torch.isnan(kullback.kl_div(x, y, "batchmean", form="probs")), index
            t.view(-1)[index] = kept


def test_rows_longer_than_a_chunk(backend, device, generator):
    x, y = (sample("probs", (2, 700_001), generator).to(device) for _ in range(2))
    truth = oracle.divergence(x, y, "kl", "probs")
    torch.testing.assert_close(
        kullback.divergence(x, y, form="probs", reduction="none").double(), truth, rtol=2e-6, atol=0
    )
    torch.testing.assert_close(
        kullback.kl_div(x.flatten(), y.flatten(), "sum", form="probs").double(),
        truth.sum(),
        rtol=2e-6,
        atol=0,
    )


@pytest.mark.parametrize("offset", [0.0, 2.5, 100.0, 1000.0])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 3.0])
def test_a_constant_added_to_logits_changes_nothing(offset, temperature, backend, device, generator):
    x, y = (sample("logits", (50, 64), generator).to(device) for _ in range(2))
    a, b = x + offset, y - offset  # rounded to float32: the oracle gets the rounded ones
    for kind in ("kl", "hellinger", "total_variation"):
        ours = kullback.divergence(a, b, kind, temperature=temperature, reduction="none")
        truth = oracle.divergence(a, b, kind, temperature=temperature)
        torch.testing.assert_close(ours.double(), truth, rtol=2e-6, atol=0)


@pytest.mark.parametrize("epsilon", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("offset", [0.0, 2.5, 100.0])
@pytest.mark.parametrize("vocab", [1000, 32000])
def test_logits_near_each_other(epsilon, offset, vocab, backend, device, generator):
    """Relative error of the value <= 1e-5 down to a KL of 1e-9, never negative; gradients <= 1e-6."""
    y = sample("logits", (4, vocab), generator, scale=3.0).to(device)
    x = (y + epsilon * torch.randn(4, vocab, generator=generator).to(device) + offset).requires_grad_()
    ours = kullback.divergence(x, y, reduction="none")
    ours.sum().backward()
    a = x.detach().double().requires_grad_()
    log_q, log_p = a.log_softmax(-1), y.double().log_softmax(-1)
    d = log_p - log_q
    truth = (log_p.exp() * (d + torch.expm1(-d))).sum(-1)  # the textbook sum has no digit left at 1e-9
    truth.sum().backward()
    assert (ours >= 0).all()
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=0)
    assert relative_error(x.grad, a.grad) <= 1e-6


@pytest.mark.parametrize("epsilon", [3.0, 1e-2])
@pytest.mark.parametrize("vocab", [64, 5000])
def test_jensen_shannon_is_symmetric_to_the_bit(vocab, epsilon, backend, device, generator):
    x = sample("logits", (7, vocab), generator, scale=3.0).to(device)
    y = (x.cpu() + epsilon * torch.randn(7, vocab, generator=generator)).to(device)
    x[1, ::7] = y[2, ::9] = -math.inf
    for beta, compare in ((0.5, torch.equal), (0.3, torch.allclose)):
        results = []
        for a, b, of_target in ((x, y, beta), (y, x, 1 - beta)):
            a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
            loss = kullback.divergence(a, b, "jensen_shannon", beta=of_target, reduction="none")
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (a, b))))
        (one, d_x, d_y), (other, e_y, e_x) = results
        assert compare(one, other)
        assert compare(d_x, e_x)
        assert compare(d_y, e_y)


def test_slices_of_no_rows(backend, device):
    x = torch.empty(0, 4, 5, device=device)
    assert kullback.divergence(x[:, :-1], x[:, 1:]) == 0
    assert kullback.divergence(x[:, :-1], x[:, 1:], reduction="none").shape == (0, 3)


def four(*choices):
    """Of each tensor a number, all of one kind or of any."""
    return st.one_of([st.lists(numbers, min_size=4, max_size=4) for numbers in (*choices, st.one_of(choices))])


def multiples(of):
    return st.integers(0, 40).map(lambda n: of * n)


@given(
    four(multiples(64), multiples(8), st.integers(0, 300)),
    four(multiples(8), multiples(4), st.integers(0, 40)),
    st.integers(1, 20),
    st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 4),
)
def test_rows_in_phase(addresses, strides, rows, dtypes):
    """Kernels on chip take rows of which vectors of all tensors begin at the same elements."""
    addresses[:2] = [address or 64 for address in addresses[:2]]
    sizes = [dtype.itemsize for dtype in dtypes]
    tensors = [t for t in zip(addresses, strides, sizes, strict=True) if t[0]]
    width = 16 // min(sizes[:2])
    whole = all(address % size == 0 for address, _, size in tensors)
    begins = ({(a // size + row * stride) % width for a, stride, size in tensors} for row in range(rows))
    assert logits._in_phase(addresses, strides, rows, dtypes) == (whole and all(len(b) == 1 for b in begins))


@EVERY_BACKEND
@pytest.mark.few_kinds
@pytest.mark.parametrize(
    ("kind", "temperatures"),
    [(kind, (1.0, 1.0)) for kind in ("kl", "jensen_shannon", "total_variation", "renyi")]
    + [(kind, (1.0, 2.0)) for kind in ("kl", "jensen_shannon")],
)
def test_float32_logits_with_gradients_of_16_bits(backend, device, generator, kind, temperatures):
    """As `linear_divergence` asks for them; each of its own dtype, from states and without, one of them and both."""
    problem = Problem(kind, *(Side("logits", temperature) for temperature in temperatures), *kinds.values(kind))
    zoo = {
        "far": samples.far(2.0),
        "near": samples.apart(0.15),
        "close": samples.apart(1e-2),
        "shifted": samples.shifted(0.01, 40.0),
        "masked": samples.masked(samples.far(2.0)),
    }
    lengths = (777, 5000) if device == "cpu" else (777, 50257, 128256, 600001)
    if backend == "emulated" and (kind, temperatures) != ("kl", (1.0, 1.0)):
        lengths = lengths[1:]  # short rows have one more kernel of each kind, and a minute of compilation
    for vocab in lengths:
        rows = samples.batch(generator, vocab, torch.float32, **zoo)
        x, y = rows.x.to(device), rows.y.to(device)
        weight = rows.weight(masked=0.5).to(device)
        leaves = [t.double().requires_grad_() for t in (rows.x, rows.y)]
        options = {"temperature": temperatures[0], "target_temperature": temperatures[1]}
        losses = oracle.divergence(*leaves, kind, **options, **kinds.parameters(kind))
        truth = torch.autograd.grad((losses * rows.weight(masked=0.5)).sum(), leaves)
        for verb, dtypes in itertools.product(
            ("loss", "gradient"),
            [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, None), (torch.float16, torch.float32)],
        ):
            written = [None if dtype is None else torch.empty_like(x, dtype=dtype) for dtype in dtypes]
            total = x.new_zeros(()) if verb == "loss" else None
            scale = 32768.0  # float16 has no small numbers
            backends.run(
                work.Rows(problem, work.Operands(x, y, weight), verb, scale, None, None, None, total, *written)
            )
            if total is not None:
                expected = (losses * rows.weight(masked=0.5)).sum() * scale
                assert relative_error(total, expected) < LOSS
            for narrow, expected in zip(written, truth, strict=True):
                for row, name in enumerate(rows.names if narrow is not None else ()):
                    assert relative_error(narrow[row].double() / scale, expected[row]) < BF16_CACHED, (
                        vocab,
                        verb,
                        dtypes,
                        name,
                    )
