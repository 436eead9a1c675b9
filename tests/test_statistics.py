"""Many figures of each row, each against its definition in float64."""

import itertools
import math

import mpmath
import pytest
import torch

import kullback
from kullback import backends
from kullback.backends import pytorch
from kullback.entropy import entropy_of, entropy_parts
from kullback.problem import Problem, Side
from kullback.work import Gather
from tests import oracle, samples
from tests.kinds import GPU
from tests.samples import masked, sample
from tests.tolerances import relative_error

INF, NAN = math.inf, math.nan
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])


def definitions(x, y, labels=None, form="logits"):
    q, p = (oracle.masses(t, form) for t in (x, y))
    q, p = (t / t.sum(-1, keepdim=True) for t in (q, p))
    found = {
        "kl": oracle.rows("kl", p, q),
        "reverse_kl": oracle.rows("reverse_kl", p, q),
        "jensen_shannon": oracle.rows("jensen_shannon", p, q, beta=0.5),
        "total_variation": oracle.rows("total_variation", p, q),
        "entropy": -torch.xlogy(q, q).sum(-1),
        "target_entropy": -torch.xlogy(p, p).sum(-1),
        "cross_entropy": -torch.xlogy(p, q).sum(-1),
        "top_token": q.argmax(-1),
        "target_top_token": p.argmax(-1),
        "agreement": q.argmax(-1) == p.argmax(-1),
        "target_top_probability": p.amax(-1),
    }
    if labels is not None:
        for side, masses in (("", q), ("target_", p)):
            own = masses.gather(-1, labels.clamp(min=0).unsqueeze(-1))
            found[f"{side}label_log_prob"] = torch.where(labels < 0, math.nan, own.log().squeeze(-1))
            found[f"{side}label_rank"] = torch.where(labels < 0, -1, (masses > own).sum(-1))
    return found


def check(found, expected, tight=3e-6, of_entropy=1e-12):
    """`of_entropy`: the absolute error of entropies and what is made of them."""
    for name, truth in expected.items():
        ours = getattr(found, name).cpu()
        if truth.is_floating_point():
            atol = of_entropy if "entropy" in name else 1e-12
            torch.testing.assert_close(ours.double(), truth, rtol=tight, atol=atol, equal_nan=True, msg=name)
        else:
            assert torch.equal(ours, truth), name


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_figure_is_its_definition(dtype, device):
    rows = samples.batch(
        torch.Generator().manual_seed(4),
        1003,
        dtype,
        far=samples.far(2.0),
        apart=samples.apart(0.3),
        close=samples.apart(0.02),
        both=masked(samples.apart(0.5), both=samples.EVERY_7TH),
        equal=samples.equal,
    )
    labels = torch.tensor([3, 500, -100, 7, 1002])
    found = kullback.row_statistics(*(t.to(device) for t in (rows.x, rows.y, labels)))
    check(found, definitions(rows.x, rows.y, labels))
    assert found.kl.dtype == torch.promote_types(dtype, torch.float32)
    assert found.kl[4] == found.reverse_kl[4] == found.jensen_shannon[4] == found.total_variation[4] == 0
    lse = rows.x.double().logsumexp(-1)
    assert relative_error(found.lse, lse) < 1e-6


@pytest.mark.parametrize("form", oracle.FORMS)
def test_forms_shapes_and_what_is_not_given(form, generator):
    x, y = (sample(form, (2, 3, 77), generator, torch.float64) for _ in range(2))
    found = kullback.row_statistics(x, y, form=form)
    check(found, definitions(x, y, form=form), 1e-9)
    assert found.kl.shape == (2, 3)
    assert found.label_rank is None
    alone = kullback.row_statistics(x, form=form)
    assert torch.equal(alone.entropy, found.entropy)
    assert alone.kl is alone.target_entropy is alone.agreement is None
    empty = kullback.row_statistics(x[:0], y[:0], form=form)
    assert empty.kl.shape == (0, 3)


def test_options_are_those_of_the_divergence(generator):
    x, y = (sample("logits", (4, 90), generator) for _ in range(2))
    options = {"temperature": 2.0, "target_temperature": 0.5, "softcap": 3.0, "logit_scale": 0.7, "valid_vocab": 80}
    labels = torch.tensor([1, 2, 3, 79])
    found = kullback.row_statistics(x, y, labels, **options)
    for kind in ("kl", "reverse_kl", "jensen_shannon", "total_variation"):
        expected = kullback.divergence(x.double(), y.double(), kind, reduction="none", **options)
        assert relative_error(getattr(found, kind), expected) < 3e-6
    logits = 3.0 * torch.tanh(0.7 * x[:, :80].double() / 3.0) / 2.0
    own = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    assert relative_error(found.label_log_prob, own) < 1e-6


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_logarithm_of_probabilities_is_rounded(dtype, device, generator):
    p, q = (torch.randn(4, 50, generator=generator).softmax(-1).to(dtype).to(device) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 49], device=device)
    found = kullback.row_statistics(q, p, labels, form="probs")
    exact = kullback.row_statistics(q.double(), p.double(), labels, form="probs")
    for name in ("kl", "reverse_kl", "entropy", "label_log_prob", "target_top_probability"):
        assert relative_error(getattr(found, name), getattr(exact, name)) < 3e-6


def test_chunks_give_the_rows(generator, monkeypatch):
    x, y = (sample("logits", (9, 50), generator) for _ in range(2))
    labels = torch.arange(9)
    with kullback.backend("torch"):
        whole = kullback.row_statistics(x, y, labels)
        monkeypatch.setattr(pytorch, "CPU_CHUNK", 100)
        in_chunks = kullback.row_statistics(x, y, labels)
    for one, other in zip(whole, in_chunks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states(dtype, device, generator):
    """Logits of 16-bit operands are float32: a student within 1 % of its teacher is told from it."""
    hidden, head = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 32), (300, 32)))
    student = (hidden.float() + 0.01 * torch.randn(5, 32, generator=generator)).to(dtype)
    labels, bias = torch.tensor([0, 1, 2, -100, 299]), torch.randn(300, generator=generator).to(dtype)
    on = lambda *tensors: (t.to(device) for t in tensors)
    student, hidden, head, labels, bias = on(student, hidden, head, labels, bias)
    found = kullback.linear_row_statistics(student, head, hidden, head, labels, bias=bias, target_bias=bias)
    exact = [t.double().cpu() @ head.double().cpu().t() + bias.double().cpu() for t in (student, hidden)]
    check(found, definitions(*exact, labels.cpu()), 1e-3)
    alone = kullback.linear_row_statistics(student, head, bias=bias)
    assert torch.equal(alone.entropy, found.entropy)


def test_errors(generator):
    x = torch.randn(3, 5)
    for labels, error, words in (
        (torch.zeros(3), TypeError, "labels must be of an integer dtype; got torch.float32"),
        (torch.zeros(2).long(), ValueError, r"labels must have the rows' shape \[3\]; got \[2\]"),
        (torch.tensor([0, 5, 1]), ValueError, "labels must lie from 0 to 4, or be -100; got 5"),
        ([0, 1, 2], TypeError, "labels must be a tensor; got list"),
    ):
        with pytest.raises(error, match=words):
            kullback.row_statistics(x, x, labels)
    with pytest.raises(ValueError, match="same shape"):
        kullback.row_statistics(x, x[:, :4])
    with pytest.raises(ValueError, match="target and target_weight go together"):
        kullback.linear_row_statistics(x, x, x)
    with pytest.raises(ValueError, match="must have the same rows"):
        kullback.linear_row_statistics(x, x, x[:2], x)


def test_nothing_is_differentiated():
    x = torch.randn(3, 5, requires_grad=True)
    assert all(number is None or not number.requires_grad for number in kullback.row_statistics(x, x))


def test_ranks_where_masses_underflow():
    x = torch.tensor([[0.0, -200.0, -300.0, -400.0], [math.nan, 0.0, 1.0, 2.0]])
    assert kullback.row_statistics(x, labels=torch.tensor([3, 2])).label_rank.tolist() == [3, -1]


def test_the_top_token_is_that_of_the_logits_where_masses_tie():
    x = torch.tensor([[1e-3, 1e-3 + 2e-10, 0.0]])
    assert kullback.row_statistics(x, x).top_token.item() == 1
    assert kullback.row_statistics(x, x).target_top_token.item() == 1


def test_rows_that_are_no_numbers_do_not_agree():
    x = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])
    assert kullback.row_statistics(x, x).agreement.tolist() == [False, True]


@pytest.mark.parametrize("backend", ["torch", "c", "emulated"], indirect=True)
def test_labels_at_a_temperature_with_an_offset(backend, generator):
    x, y = sample("logits", (5, 40), generator) + 1e4, sample("logits", (5, 40), generator) - 1e4
    labels = torch.arange(5)
    found = kullback.row_statistics(x, y, labels, temperature=0.7, target_temperature=3.0)
    inverse, other = torch.tensor([1 / 0.7, 1 / 3.0], dtype=torch.float32).double()  # as everywhere, of float32 logits
    expected = definitions(x.double() * inverse, y.double() * other, labels)
    for name in ("label_log_prob", "target_label_log_prob"):
        torch.testing.assert_close(getattr(found, name).double(), expected[name], rtol=2e-6, atol=0)
    for name in ("kl", "reverse_kl", "jensen_shannon", "total_variation"):
        assert relative_error(getattr(found, name), expected[name]) < 3e-6, name


def test_a_shorter_vocabulary_cuts_heads_and_biases(generator):
    hidden, head, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 4), (9, 4), (9,)))
    found = kullback.linear_row_statistics(
        hidden, head, hidden, head[:8], bias=bias, target_bias=bias[:8], valid_vocab=7
    )
    logits = hidden @ head[:7].t() + bias[:7]
    assert relative_error(found.entropy, definitions(logits, logits)["entropy"]) < 1e-6
    with pytest.raises(ValueError, match=r"must have tokens; got the shape \[3, 0\]"):
        kullback.row_statistics(torch.zeros(3, 0))


@pytest.mark.parametrize("backend", ["torch", "c", "emulated"], indirect=True)
def test_on_each_backend(backend, generator):
    rows = samples.batch(generator, 503, torch.float32, far=samples.far(2.0), apart=samples.apart(0.3))
    labels = torch.tensor([7, -100])
    found = kullback.row_statistics(rows.x, rows.y, labels)
    check(found, definitions(rows.x, rows.y, labels))
    alone = kullback.row_statistics(rows.x, labels=labels)
    assert alone.kl is None
    torch.testing.assert_close(alone.entropy, found.entropy)


@pytest.mark.parametrize("backend", ["torch", "c", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unusual_rows_on_each_backend(backend, dtype, generator):
    """Ties, sure rows, masked tokens, the largest number as a logit; rows that are no numbers; many rows."""
    vocab, most = 777, torch.finfo(dtype).max
    x, y = (sample("logits", (12, vocab), generator, dtype) for _ in range(2))
    x[0], y[0] = 3.0, 3.0
    x[1, 700], y[1, 5] = 60.0, 60.0
    x[2, 100:], y[2, 100:] = -INF, -INF
    x[3, ::2] = -INF
    x[4, 20:700:5] = x[4].max() + 1
    x[5], y[5] = x[5].clamp(max=0), y[5].clamp(max=0)
    x[5, 3], y[5, 3] = most, most
    x[6, 40], x[7, 41], y[8, 9:11] = NAN, INF, NAN
    x[9] = -INF
    x[10, :] = torch.linspace(-30, 30, vocab).to(dtype)
    labels = torch.tensor([0, 700, 99, 1, 20, 3, 0, 0, 0, 0, 776, -100])
    found = kullback.row_statistics(x, y, labels)
    expected = definitions(x, y, labels)
    for name, truth in expected.items():
        if truth.is_floating_point():
            ours = getattr(found, name).double()
            torch.testing.assert_close(ours, truth, rtol=3e-6, atol=1e-12, equal_nan=True, msg=name)
    numbers = [0, 1, 2, 3, 4, 5, 10, 11]
    for name in ("top_token", "target_top_token", "label_rank", "target_label_rank"):
        assert torch.equal(getattr(found, name)[numbers], expected[name][numbers]), name
    assert (found.top_token[6], found.top_token[7], found.target_top_token[8]) == (40, 41, 9)


@pytest.mark.parametrize("backend", ["c", "emulated"], indirect=True)
@pytest.mark.parametrize("offset", [1e4, 1e6, -1e9, -1e30, 1e38])
def test_16_bit_rows_far_from_0(backend, offset, generator):
    """What all logits of a row have in common takes no digits of the others, and its own row is itself."""
    x = torch.full((2, 300), offset, dtype=torch.bfloat16)
    found = kullback.row_statistics(x, x)
    for name in ("kl", "reverse_kl", "jensen_shannon", "total_variation"):
        assert (getattr(found, name) == 0).all(), name
    if abs(offset) < 1e7:
        y = sample("logits", (2, 300), generator, torch.bfloat16)
        check(kullback.row_statistics(x, y), definitions(x, y))


@pytest.mark.parametrize("backend", ["c", "emulated"], indirect=True)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_rows_anywhere_in_memory(backend, dtypes, generator):
    """Of odd starts and strides, alike or not, beside NaN."""
    for starts in ((5, 5), (5, 8), (0, 3)):
        around = [torch.full((7, 2400), NAN, dtype=dtype) for dtype in dtypes]
        x, y = (t[1:6, start : start + 2077] for t, start in zip(around, starts, strict=True))
        for t in (x, y):
            t.copy_(sample("logits", t.shape, generator, t.dtype))
        labels = torch.tensor([0, 2076, 7, -100, 1000])
        check(kullback.row_statistics(x, y, labels), definitions(x, y, labels))


@pytest.mark.parametrize("target_form", ["log_probs", "probs"])
@pytest.mark.parametrize("form", oracle.FORMS)
def test_beside_a_teacher_known_at_some_tokens(form, target_form, generator):
    """Entries that are absent or repeated; a row without any; padding."""
    x, k = sample(form, (2, 3, 60), generator, torch.float64), 7
    p = sample("probs", (2, 3, 60), generator.manual_seed(3), torch.float64)
    values, ids = p.topk(k)
    ids[0, 0, 2] = -1
    ids[0, 1, 1] = ids[0, 1, 0]
    ids[1, 2] = -1
    labels = torch.tensor([[0, 59, -100], [3, 4, 5]])
    q = oracle.masses(x, form)
    padded = torch.nn.functional.pad(x, (0, 4), value=7.0)
    given = values if target_form == "probs" else values.log()
    options = {"form": form, "target_form": target_form, "valid_vocab": 60}
    found = kullback.topk_row_statistics(padded, given, ids, labels, **options)
    for row in itertools.product(range(2), range(3)):
        tokens = {t for t in ids[row].tolist() if t >= 0}
        theirs = sum(v for v, t in zip(values[row].tolist(), ids[row].tolist(), strict=True) if t >= 0)
        first = set(q[row].topk(len(tokens)).indices.tolist())
        assert found.mass[row] == pytest.approx(float(q[row][list(tokens)].sum()), rel=1e-12)
        assert found.target_mass[row] == pytest.approx(theirs, rel=1e-12)
        if tokens:
            assert found.overlap[row] == pytest.approx(len(first & tokens) / len(tokens))
            best = max(tokens, key=lambda t: sum(v for v, i in zip(values[row], ids[row], strict=True) if i == t))
            assert found.agreement[row] == (int(q[row].argmax()) == best)
        else:
            assert found.overlap[row].isnan()
            assert not found.agreement[row]
    for kind in ("kl", "reverse_kl"):
        loss = kullback.topk_divergence(padded, given, ids, kind, reduction="none", **options)
        assert torch.equal(getattr(found, kind), loss)
    alone = kullback.row_statistics(x, labels=labels, form=form)
    assert torch.equal(found.entropy, alone.entropy)
    assert torch.equal(found.label_rank, alone.label_rank)


def test_capped_16_bit_logits_keep_their_digits(generator):
    x, y = (sample("logits", (4, 300), generator, torch.bfloat16) for _ in range(2))
    labels = torch.tensor([0, 7, 299, -100])
    cap = lambda t: 5 * torch.tanh(t.double() / 5)
    found = kullback.row_statistics(x, y, labels, softcap=5.0, target_softcap=5.0)
    check(found, definitions(cap(x), cap(y), labels), 1e-5)


def test_rows_whose_elements_lie_apart(backend, generator):
    """Every second element of longer rows, and a transposed tensor: the others may be anything."""
    x = torch.full((2, 8), torch.nan)
    x[:, ::2] = sample("logits", (2, 4), generator, torch.float32)
    values, ids = torch.full((2, 2), 0.4).log(), torch.tensor([[1, 3], [0, 2]])
    expected = kullback.topk_row_statistics(x[:, ::2].contiguous(), values, ids)
    for strided in (x[:, ::2], x[:, ::2].T.contiguous().T):
        found = kullback.topk_row_statistics(strided, values, ids)
        for name, ours, theirs in zip(found._fields, found, expected, strict=True):
            assert (ours is theirs is None) or torch.equal(ours, theirs), name


def of_a_model(tops, noises, vocab, generator):
    """A row for each pair: how far its top token is above the others, and how far the student is from it."""
    y = 2.5 * torch.randn(len(tops) * len(noises), vocab, generator=generator)
    noise = torch.randn(y.shape, generator=generator)
    pairs = itertools.product(tops, noises)
    for row, (top, by) in enumerate(pairs):
        y[row, 11] = top
        noise[row] *= by
    return y + noise, y


@pytest.mark.parametrize("backend", ["c", "torch", "emulated"], indirect=True)
def test_close_rows_and_rows_that_a_token_has(backend, generator):
    """Tokens that are near, far, light or heavy, each with every other."""
    x, y = of_a_model((5.0, 12.0, 25.0), (1e-3, 0.03, 0.13, 0.2, 0.3, 0.5, 1.5), 3003, generator)
    found = kullback.row_statistics(x, y)
    # float64's textbook is 1e-16 off in all, and rows are no closer than 1e-12.
    if backend == "c":
        check(found, definitions(x, y))
    else:  # log-sum-exps there are float32 sums, and an entropy is as far off as they
        check(found, definitions(x, y), 5e-6 if backend == "emulated" else 3e-5, of_entropy=1e-6)


@pytest.mark.parametrize("backend", ["c", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_total_variation_of_rows_that_differ_in_a_token(backend, dtype, generator):
    """What rounding leaves in normalisers is most of it, unless it is taken out by the right slope."""
    y = (3 * torch.randn(12, 5003, generator=generator)).to(dtype)
    x = y.clone()
    for row, place in enumerate((1, 3, 10, 30, 100, 300, 1000, 2500, 1, 10, 100, 1000)):
        token = y[row].argsort(descending=True)[place]
        x[row, token] += 0.5 if row < 8 else -1.0
    found, expected = kullback.row_statistics(x, y).total_variation, definitions(x, y)["total_variation"]
    assert ((found - expected).abs() < 3e-6 * expected).all()


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "target_softcap": 30.0}, {"target_temperature": 2.0}])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.float16)])
def test_two_dtypes(dtypes, options, generator):
    x, y = (t.to(d) for t, d in zip(of_a_model((5.0, 12.0), (0.05, 0.4), 700, generator), dtypes, strict=True))
    labels = torch.tensor([0, 11, -100, 699])
    found = kullback.row_statistics(x, y, labels, **options)
    logits = [t.double() for t in (x, y)]
    for i, name in enumerate(("softcap", "target_softcap")):
        if cap := options.get(name):
            logits[i] = cap * torch.tanh(logits[i] / cap)
    if temperature := options.get("target_temperature"):
        logits[1] = logits[1] / temperature
    check(found, definitions(*logits, labels), 1e-5)


@pytest.mark.parametrize("backend", ["c", "torch", "emulated"], indirect=True)
def test_rows_of_no_numbers_and_of_masked_tokens(backend, generator):
    x, y = of_a_model((5.0,), (0.05,) * 6, 200, generator)
    x[0, 30], y[1, 40], x[2, 50:], y[3, 60:] = NAN, NAN, -INF, -INF
    x[4, 70:], y[4, 70:] = -INF, -INF
    found = kullback.row_statistics(x, y, torch.full((6,), 80))
    assert found.kl.isnan().tolist() == [True, True, False, False, False, False]
    assert found.kl[2] == found.reverse_kl[3] == INF
    assert found.label_rank.tolist()[:1] + found.target_label_rank.tolist()[1:2] == [-1, -1]
    assert found.label_rank[2] == found.label_rank[4] == 50 or found.label_rank[4] == 70
    finite = slice(4, 6)
    expected = definitions(x[finite], y[finite])
    for name in ("kl", "reverse_kl", "jensen_shannon", "total_variation", "entropy"):
        assert relative_error(getattr(found, name)[finite], expected[name]) < 1e-5, name
    assert relative_error(found.jensen_shannon[2:4], definitions(x[2:4], y[2:4])["jensen_shannon"]) < 1e-5
    assert found.top_token[0] == 30
    assert found.target_top_token[1] == 40


@pytest.mark.parametrize("backend", ["c", "emulated"], indirect=True)
@pytest.mark.parametrize("gap", [20.0, 44.6, 80.9])
def test_a_sure_rows_entropy_keeps_its_digits(backend, gap):
    """Beside a mass of 1, others are summed by themselves."""
    x = torch.full((1, 300), -gap)
    x[0, 7] = 0
    log_q = x.double().log_softmax(-1)
    rest = torch.cat([log_q[:, :7], log_q[:, 8:]], -1)
    own = -torch.log1p(-rest.exp().sum(-1))  # of the top token, whose mass a float64 cannot tell from 1
    expected = own - (rest.exp() * rest).sum(-1)
    rounding = 0 if backend == "c" else 6e-8 * gap  # of exponents, which CUDA has to base 2
    assert relative_error(kullback.row_statistics(x).entropy, expected) < 1e-6 + rounding


def test_a_close_row_with_one_light_token_that_is_far(generator):
    """The others of its group may not be found by a formula that far rows allow."""
    y = 0.3 * torch.randn(1, 6400, generator=generator)
    y[0, 70] = -9
    x = y + 1e-4 * torch.randn(1, 6400, generator=generator)
    x[0, 70] += 0.6
    check(kullback.row_statistics(x, y), definitions(x, y))


@pytest.mark.parametrize("backend", ["c", "emulated"], indirect=True)
def test_light_tokens_share_no_rounding(backend, generator):
    """Rows far above 0, most of whose tokens are light: what all masses have in common would be the sum's."""
    x, y = of_a_model((5.0, 7.3), (0.25, 0.3), 20_011, generator)
    x, y = x + 33.7, y + 71.3
    check(kullback.row_statistics(x, y), definitions(x, y), 5e-6)


@pytest.mark.parametrize("backend", ["c", "emulated"], indirect=True)
def test_logits_far_from_0_are_told_apart(backend):
    """At an offset of 1e8 a log-sum-exp has no units; differences from the maximum do."""
    y = torch.full((1, 512), 1e8 - 800)
    x = y.clone()
    x[0, 0] = y[0, 0] = 1e8
    y[0, 64:116] = 1e8
    found = kullback.row_statistics(x, y)
    expected = definitions(x, y)
    for name in ("jensen_shannon", "total_variation"):
        assert relative_error(getattr(found, name), expected[name]) < 1e-6


@pytest.mark.parametrize("backend", ["c", "torch", "emulated"], indirect=True)
def test_rows_of_nothing_agree_on_nothing(backend):
    x = torch.full((1, 9), -INF)
    found = kullback.row_statistics(x, x, torch.tensor([1]))
    assert not found.agreement
    assert found.label_rank == found.target_label_rank == -1
    assert found.label_log_prob.isnan()


@pytest.mark.parametrize("backend", ["c", "torch", "emulated"], indirect=True)
def test_no_log_probability_is_above_0_and_no_entropy_below(backend, generator):
    rows = 12 if backend == "emulated" else 400
    x = 2.5 * torch.randn(rows, 64, generator=generator)
    x[:, 3] += 30
    labels = torch.full((rows,), 3)
    for options in ({"temperature": 0.1, "softcap": 30.0}, {"temperature": 0.7}):
        for dtype in (torch.float32, torch.bfloat16):
            found = kullback.row_statistics(x.to(dtype), x.to(dtype), labels, **options)
            assert (found.label_log_prob <= 0).all()
            assert (found.target_top_probability <= 1).all()
            assert (found.entropy >= 0).all()


def test_entropies_of_sure_rows_in_float64():
    x = torch.zeros(3, 50, dtype=torch.float64)
    x[:, 3] = torch.tensor([15.0, 25.0, 40.0])
    rest = 49 * (-x[:, 3]).exp()  # over the first mass
    exact = torch.log1p(rest) + rest * x[:, 3] / (1 + rest)
    assert relative_error(kullback.row_statistics(x).entropy, exact) < 1e-13
    alone = torch.tensor([[12.24489688873291], [4.934647672770112e20]], dtype=torch.float64)
    assert (kullback.row_statistics(alone, temperature=0.7).entropy == 0).all()


def test_no_rows_from_hidden_states():
    found = kullback.linear_row_statistics(
        torch.randn(2, 0, 4), torch.randn(9, 4), torch.randn(2, 0, 4), torch.randn(9, 4)
    )
    assert found.kl.shape == found.entropy.shape == (2, 0)


def test_what_cannot_be_followed_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x, head = torch.randn(2, 5), torch.randn(7, 5)
    figures = lambda a, b: kullback.row_statistics(a, b).kl
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        with pytest.raises(TypeError, match=r"input must be a plain tensor.*got FakeTensor"):
            figures(fake, fake)
        with pytest.raises(TypeError, match=r"bias must be a plain tensor.*got FakeTensor"):
            kullback.linear_row_statistics(x, head, bias=mode.from_tensor(torch.zeros(7)))
    for call in (
        lambda: torch.vmap(figures)(x[:, None], x[:, None]),
        lambda: torch.func.grad(lambda a: figures(a, x).sum())(x),
        lambda: make_fx(figures)(x, x),
        lambda: torch.jit.trace(figures, (x, x), check_trace=False),
        lambda: torch.vmap(lambda a: kullback.linear_row_statistics(a, head).entropy)(x[:, None]),
    ):
        with pytest.raises(TypeError, match=r"input must be a plain tensor, outside of tracing and torch\.func"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_are_all_among_the_first(dtype):
    """Whichever of them a sort would choose: a token is one of k first if less than k have more mass."""
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 2.0, 0.0], [3.0, 1.0, 1.0, 1.0]], dtype=dtype)
    ids = torch.tensor([[2, -1], [2, 0], [3, 0]])
    found = kullback.topk_row_statistics(x, torch.tensor([[-0.1, -torch.inf], [-1.0, -1.0], [-1.0, -2.0]]), ids)
    assert found.overlap.tolist() == [1.0, 0.5, 1.0]


def test_a_row_of_nan_agrees_with_no_teacher():
    found = kullback.topk_row_statistics(
        torch.full((1, 8), torch.nan), torch.full((1, 2), -1.0), torch.tensor([[0, 1]])
    )
    assert not found.agreement.item()
    assert found.overlap.isnan().item()


@pytest.mark.parametrize("temperature", [1.0, 0.05])
def test_the_entropy_of_sharp_rows(backend, device, generator, temperature):
    """What a scaled logit is rounded by does not show."""
    x = 300 * torch.randn(32, 500, generator=generator)
    log_q = (x.double() / temperature).log_softmax(-1)
    expected = -(log_q.exp() * log_q.clamp(min=-1e4)).sum(-1)
    found = kullback.row_statistics(x.to(device), temperature=temperature).entropy.cpu().double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "c", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_entropy_of_sure_rows(backend, dtype, generator):
    """Of a token that has all but 1e-2 to 1e-11 of its row no digit of the rest is lost."""
    x, y = (sample("logits", (40, 301), generator, dtype) for _ in range(2))
    for side in (x, y):
        side[torch.arange(40), torch.arange(40)] = torch.linspace(12, 32, 40).to(dtype)
    found = kullback.row_statistics(x, y)
    expected = definitions(x, y)
    for name in ("entropy", "target_entropy", "cross_entropy"):
        torch.testing.assert_close(getattr(found, name).double(), expected[name], rtol=3e-6, atol=0, msg=name)


NEAR = 3e-2, 1e-4, 1e-6, 1e-7, 3e-8


def near_rows(generator, dtype, vocab=300):
    """Rows whose sides are so far apart, and one whose sure token has all but 1e-13."""
    x = (3 * torch.randn(len(NEAR) + 1, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    x[-1, 7] = 40.0
    apart = torch.tensor([*NEAR, 1e-3], dtype=torch.float64).unsqueeze(-1)
    y = (x.double() + apart * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(dtype)
    return x, y


def exact(x, y):
    """total_variation and kl of rows, with 40 digits."""
    found = []
    with mpmath.workdps(40):
        for sides in zip(x.tolist(), y.tolist(), strict=True):
            q, p = ([mpmath.exp(v) for v in side] for side in sides)
            q, p = ([v / sum(masses) for v in masses] for masses in (q, p))
            pairs = list(zip(p, q, strict=True))
            found.append((sum(abs(a - b) for a, b in pairs) / 2, sum(a * mpmath.log(a / b) for a, b in pairs)))
    return torch.tensor([[float(v) for v in row] for row in found], dtype=torch.float64).T


@pytest.mark.parametrize("backend", ["c", "emulated", GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 0.9, 40.0])
def test_near_rows(backend, offset, dtype, device, generator):
    """What normalisers and differences of logits are rounded by is taken off, however little the sides differ."""
    x, y = near_rows(generator, dtype)
    y = (y.double() + offset).to(dtype)
    total_variation, kl = exact(x, y)
    found = kullback.row_statistics(x.to(device), y.to(device))
    atol = torch.zeros(len(x), dtype=torch.float64)
    atol[-1] = 1e-15 * (offset > 0)  # the sure token's log-ratio is rounded as the offset is
    assert ((found.total_variation.double().cpu() - total_variation).abs() <= 3e-6 * total_variation + atol).all()
    torch.testing.assert_close(found.kl.double().cpu(), kl, rtol=3e-6, atol=0)
    assert (total_variation[:-1] > 0).sum() >= (2 if dtype == torch.bfloat16 else 5)


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
@pytest.mark.parametrize("doubles", ["input", "target"])
def test_one_side_in_float64(backend, doubles, generator):
    """All figures are: a label's logit is taken against a log-sum-exp of as many digits."""
    sides = [1e4 + torch.randn(3, 9, generator=generator) for _ in range(2)]
    x, y = (side.double() if name == doubles else side for name, side in zip(("input", "target"), sides, strict=True))
    labels = torch.tensor([0, 8, -100])
    found = kullback.row_statistics(x, y, labels, temperature=0.7)
    expected = definitions(x.double() / 0.7, y.double() / 0.7, labels)
    check(found, expected, 1e-9)
    with kullback.collecting_statistics() as collected:
        kullback.divergence(x, y, labels=labels, temperature=0.7)
    for name in ("entropy", "label_log_prob"):
        own = getattr(collected[0], name).double()
        torch.testing.assert_close(own, expected[name], rtol=1e-6, atol=1e-7, equal_nan=True, msg=name)
    q, p = (torch.tensor([[0.1, 0.2, 0.7]], dtype=t.dtype) for t in (x, y))
    found = kullback.row_statistics(q, p, form="probs")
    check(found, definitions(q, p, form="probs"), 1e-12)


@pytest.mark.parametrize("backend", ["torch", "c", "emulated"], indirect=True)
def test_the_log_sum_exp_of_nothing(backend):
    x = torch.tensor([[-INF, -INF], [1.0, NAN], [1.0, INF]])
    found = kullback.row_statistics(x, x)
    assert found.lse[0] == found.target_lse[0] == -INF
    assert found.lse[1:].isnan().all()
    capped = kullback.row_statistics(x[:1], softcap=30.0)  # to which it is a number
    assert capped.lse.item() == pytest.approx(math.log(2) - 30)


def test_a_teacher_without_a_first_token_agrees_with_nobody():
    x, ids = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).double(), torch.tensor([[1, 0]])
    for values, shared in (([-0.5, NAN], NAN), ([-INF, -INF], 1.0), ([-0.5, -1.0], 1.0)):
        found = kullback.topk_row_statistics(x, torch.tensor([values]).double(), ids)
        assert not found.agreement
        torch.testing.assert_close(found.overlap, torch.tensor([shared]).double(), equal_nan=True)


def test_labels_beyond_int64_are_no_tokens():
    for given in (2**64 - 100, 2**63 + 5):
        labels = torch.tensor([2, given], dtype=torch.uint64)
        with pytest.raises(ValueError, match="must lie from 0 to 2, or be -100; got 9223372036854775807"):
            kullback.row_statistics(torch.randn(2, 3), labels=labels)


def test_a_compiler_leaves_figures_to_python():
    """Whose graph ends before them: nothing of them is compiled."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x, y = torch.randn(2, 5), torch.randn(2, 5)
    call = lambda x, y: kullback.row_statistics(2 * x, y).kl + 1
    compiled = torch.compile(call, backend=count)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y), call(x, y))
    assert len(graphs) == 2


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "zero", "support"])
def test_a_teacher_s_tokens_are_gathered_once(tail, monkeypatch, generator):
    """Both directions of kl, and masses, are of one read of the row."""
    x, y = (sample("logits", (4, 60), generator) for _ in range(2))
    works, run = [], backends.run
    monkeypatch.setattr(backends, "run", lambda work, only=None: works.append(work) or run(work, only))
    kullback.topk_row_statistics(x, *y.log_softmax(-1).topk(5), tail=tail)
    assert [isinstance(work, Gather) for work in works].count(True) == 1


def test_the_entropy_of_a_row_in_pieces(generator):
    """Of a rank that has the token of nearly all mass, and of others, to which it is not known."""
    x = sample("logits", (6, 90), generator)
    x[torch.arange(6), torch.arange(6)] = torch.linspace(10, 32, 6)
    lse = x.double().logsumexp(-1)
    problem = Problem("kl", Side("logits"), Side("logits"))
    parts = [entropy_parts(problem, piece, lse, torch.float32) for piece in x.split(30, -1)]
    found = entropy_of(torch.stack(parts).sum(0))
    torch.testing.assert_close(found, definitions(x, x)["entropy"], rtol=3e-6, atol=0)
