"""What a PyTorch operator owes: opcheck, gradcheck, transforms, compile, export, autocast, graphs, no syncs."""

import functools
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.export import export
from torch.utils._python_dispatch import TorchDispatchMode

import kullback
from kullback.problem import Problem, Side, Weights
from tests import kinds, oracle
from tests.kinds import FEW, KINDS, SMOOTH
from tests.samples import sample


def pair(form, shape, generator, device, dtype=torch.float64):
    return [sample(form, shape, generator, dtype, 1.0).to(device).requires_grad_() for _ in range(2)]


@pytest.mark.few_kinds
@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_gradgradcheck(kind, form, backend, device, generator):
    x, y = pair(form, (3, 5), generator, device)
    weight = torch.tensor([1.0, 0.0, 0.4], device=device, dtype=torch.float64)
    for reduction, w in (("mean", None), ("none", weight)):

        def function(a, b, reduction=reduction, w=w):
            return kullback.divergence(
                a, b, kind, form=form, reduction=reduction, row_weight=w, **kinds.parameters(kind)
            )

        # A first backward hands over what forward wrote, a second computes it anew: other roundings.
        check = functools.partial(torch.autograd.gradcheck, nondet_tol=1e-13)
        assert check(function, (x, y))
        assert check(function, (x, y.detach()))
        assert check(function, (x.detach(), y))
        if backend != "c":  # second derivatives are the formula's on every backend
            few = tuple(t.detach()[:2, :4].clone().requires_grad_() for t in (x, y))  # its time grows with their square
            of_few = functools.partial(function, w=w if w is None else w[1:])
            assert torch.autograd.gradgradcheck(of_few, few, nondet_tol=1e-13, fast_mode=kind not in FEW)


@pytest.mark.few_kinds
@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("kind", SMOOTH)
def test_second_derivatives_with_tokens_masked(kind, form, backend, device, generator):
    """A token without mass on either side is as if it were not there, for derivatives of derivatives too."""
    x, y = (t.detach() for t in pair(form, (3, 8), generator, device))
    vector = torch.randn(3, 8, generator=generator, dtype=torch.float64).to(device)
    for masked in ("both", "input", "target"):
        found = []
        for columns in (slice(None), slice(1, None)):
            leaves = [t.clone() for t in (x, y)]
            for leaf, name in zip(leaves, ("input", "target"), strict=True):
                if masked in ("both", name):
                    leaf[:, 0] = 0.0 if form == "probs" else -math.inf
            leaves = [leaf[:, columns].requires_grad_() for leaf in leaves]
            loss = kullback.divergence(*leaves, kind, form=form, reduction="sum", **kinds.parameters(kind))
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            dot = sum((f[:, -7:] * vector[:, 1:]).sum() for f in first)
            found.append((loss, torch.autograd.grad(dot, leaves)))
        (loss, ours), (_, expected) = found
        if masked == "both":
            for mine, theirs in zip(ours, expected, strict=True):
                torch.testing.assert_close(mine[:, 1:], theirs)
        elif loss.isfinite():
            assert all(mine[:, 1:].isfinite().all() for mine in ours), masked


def negated(tensor):
    """The tensor, its sign put off as by conj().imag."""
    return torch._neg_view(-tensor)


def test_signs_that_are_put_off(backend, device, generator):
    x, y = (t.detach() for t in pair("log_probs", (3, 7), generator, device, torch.float32))
    weight, upstream = torch.rand(2, 3, generator=generator).to(device)
    values, ids = y.topk(3)
    hidden, head = torch.eye(3, device=device), x.t().contiguous()

    def results(change):
        leaf = x.clone().requires_grad_()
        each = kullback.divergence(leaf, change(y), row_weight=change(weight), reduction="none")
        yield each
        yield from torch.autograd.grad(each, leaf, change(upstream))
        yield kullback.kl_div(change(x), change(y.exp()), "none")
        yield kullback.topk_divergence(leaf, change(values), change(ids), row_weight=change(weight))
        yield kullback.linear_divergence(hidden, head, change(values), target_indices=ids, row_weight=change(weight))

    assert negated(weight).is_neg()
    for mine, plain in zip(results(negated), results(lambda t: t), strict=True):
        assert torch.equal(mine, plain)


def test_zeros_that_are_not_stored(backend, device):
    zeros = torch._efficientzerotensor((3, 7), device=device)
    assert kullback.divergence(zeros, torch.zeros(3, 7, device=device)) == 0
    assert kullback.divergence(zeros, zeros, row_weight=torch._efficientzerotensor((3,), device=device)) == 0


@pytest.mark.few_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_another_default_device(kind, backend, device, generator):
    """What a call makes for itself lies where its tensors do."""
    x, y = (t.detach().float() for t in pair("logits", (3, 7), generator, device))
    values, ids = y.log_softmax(-1).topk(3)
    hidden, head = torch.eye(3, device=device), x.t().contiguous()

    def results():
        leaf = x.clone().requires_grad_()
        for reduction in ("none", "mean"):
            loss = kullback.divergence(leaf, y, kind, reduction=reduction, **kinds.parameters(kind)).sum()
            yield from (loss, *torch.autograd.grad(loss, leaf, create_graph=True))
        yield kullback.topk_divergence(leaf, values, ids, kind, **kinds.parameters(kind))
        yield kullback.linear_divergence(hidden, head, hidden, head, kind, **kinds.parameters(kind))

    expected = list(results())
    with torch.device("meta"):
        found = list(results())
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_of_weight_and_normalizer(backend, device, generator):
    x, y = pair("logits", (3, 5), generator, device)
    weight = torch.tensor([1.0, 0.5, 2.0], device=device, dtype=torch.float64, requires_grad=True)
    count = torch.tensor(3.0, device=device, dtype=torch.float64, requires_grad=True)
    for options in ({"reduction": "none"}, {"reduction": "sum"}, {}):
        function = lambda a, b, w, o=options: kullback.divergence(a, b, row_weight=w, **o)
        assert torch.autograd.gradcheck(function, (x, y, weight))
    assert torch.autograd.gradcheck(
        lambda a, b, w, n: kullback.divergence(a, b, row_weight=w, normalizer=n), (x, y, weight, count)
    )
    assert torch.autograd.gradcheck(lambda a, b, n: kullback.divergence(a, b, normalizer=n), (x, y, count))


@pytest.mark.parametrize("form", ["probs", "logits"])
def test_opcheck(form, backend, device, generator):
    x, y = (t.detach().float() for t in pair(form, (3, 5), generator, device))
    weights = Weights(0.5, 0.3, 0.01) if form == "logits" else Weights()
    problem = Problem("kl", Side(form), Side(form), weights=weights)
    key, scalars = problem.key, (list(problem.scalars), None)
    labels = torch.tensor([0, -100, 4], device=device) if form == "logits" else None
    weight = torch.rand(3, device=device, dtype=torch.float64)
    symbols = torch.tensor(problem.scalars, dtype=torch.float64)
    ops = torch.ops.kullback
    _, state = ops.per_row(x, y, None, labels, key, *scalars, torch.float32)
    for op, arguments in (
        (ops.value, (x, y, weight, labels, key, *scalars, 0.5, torch.float32)),
        (ops.value, (x[:0], y[:0], None, None, key, *scalars, 0.5, torch.float32)),
        (ops.per_row, (x, y, weight, labels, key, *scalars, torch.float32)),
        (ops.gradient, (x, y, weight, labels, key, *scalars, state, [False, True])),
        (ops.gradient, (x, y, weight, labels, key, *scalars, None, [True, True])),
        (ops.value, (x, y, None, labels, key, [], symbols, 0.5, torch.float32)),
    ):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("form", oracle.FORMS)
def test_func_transforms(form, backend, device, generator):
    x, y = (t.detach() for t in pair(form, (4, 3, 5), generator, device))
    function = lambda a, b: kullback.divergence(a, b, "jensen_shannon", form=form)
    one = torch.stack([function(a, b) for a, b in zip(x, y, strict=True)])
    torch.testing.assert_close(torch.func.vmap(function)(x, y), one)
    torch.testing.assert_close(
        torch.func.vmap(function, in_dims=(0, None))(x, y[0]), torch.stack([function(a, y[0]) for a in x])
    )
    gradients = torch.func.grad(function, argnums=(0, 1))
    expected = [torch.stack(g) for g in zip(*(gradients(a, b) for a, b in zip(x, y, strict=True)), strict=True)]
    for ours, theirs in zip(torch.func.vmap(gradients)(x, y), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    rows = lambda a: kullback.divergence(a, y[0], form=form, reduction="none")
    jacobian = torch.func.jacrev(rows)(x[0])
    assert jacobian.shape == (3, 3, 5)
    for i in range(3):
        assert (jacobian[i][[j for j in range(3) if j != i]] == 0).all()
    second = torch.func.jacrev(torch.func.jacrev(lambda a: function(a, y[0])))(x[0].detach())
    truth = torch.autograd.functional.hessian(
        lambda a: oracle.divergence(a, y[0], "jensen_shannon", form).mean(), x[0].detach()
    )
    torch.testing.assert_close(second, truth)


def test_export(backend, device, generator):
    class Loss(torch.nn.Module):
        def forward(self, a, b):
            return kullback.divergence(a, b, "kl", temperature=2.0)

    x, y = (t.detach() for t in pair("logits", (3, 5), generator, device))
    program = export(Loss(), (x, y))
    assert "kullback.value" in program.graph_module.code
    x, y = x.requires_grad_(), y.requires_grad_()
    losses = program.module()(x, y), Loss()(x, y)
    torch.testing.assert_close(*losses)
    for ours, theirs in zip(*(torch.autograd.grad(loss, (x, y)) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(dtype, backend, device, generator):
    x, y = pair("log_probs", (3, 50), generator, device, dtype)
    with torch.autocast(device, dtype=dtype):
        ours = kullback.kl_div(x, y, "sum", log_target=True)
        theirs = torch.nn.functional.kl_div(x, y, reduction="sum", log_target=True)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.grad(ours, x)[0].dtype == dtype


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backward_twice_and_inputs_untouched(form, reduction, backend, device, generator):
    x, y = pair(form, (4, 33), generator, device, torch.float32)
    kept, versions = [t.detach().clone() for t in (x, y)], [t._version for t in (x, y)]
    loss = kullback.divergence(x, y, form=form, reduction=reduction).sum()
    first = torch.autograd.grad(2 * loss, (x, y), retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, (x, y), retain_graph=True)
    third = torch.autograd.grad(2 * loss, (x, y))
    for a, b, c, copy in zip(first, second, third, copies, strict=True):
        assert torch.equal(a, copy)
        torch.testing.assert_close(b, 1.5 * a, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(c, a, rtol=1e-5, atol=1e-8)
    assert [t._version for t in (x, y)] == versions
    assert all(torch.equal(t, k) for t, k in zip((x, y), kept, strict=True))


def test_an_input_changed_before_backward_is_an_error(backend, device, generator):
    x, y = pair("probs", (4, 33), generator, device, torch.float32)
    middle = x * 1
    loss = kullback.divergence(middle, y, form="probs")
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_only_where_it_is_wanted(backend, device, generator):
    x, y = pair("probs", (4, 33), generator, device, torch.float32)
    for a, b in ((x, y.detach()), (x.detach(), y)):
        for reduction in ("none", "mean"):
            loss = kullback.divergence(a, b, form="probs", reduction=reduction).sum()
            wanted = a if a.requires_grad else b
            assert torch.autograd.grad(loss, wanted)[0].shape == wanted.shape
    with torch.no_grad():
        assert not kullback.divergence(x, y, form="probs").requires_grad


def test_create_graph_then_plain_backward(backend, device, generator):
    x, y = pair("logits", (3, 7), generator, device)
    loss = kullback.divergence(x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (gradient.square().sum() + loss).backward()
    a, b = x.detach().requires_grad_(), y.detach()
    truth = oracle.divergence(a, b, "kl").mean()
    (expected,) = torch.autograd.grad(truth, a, create_graph=True)
    (expected.square().sum() + truth).backward()
    torch.testing.assert_close(x.grad, a.grad)


def test_double_backward_does_not_read_rows_without_weight(backend, device, generator):
    x, y = pair("logits", (3, 7), generator, device)
    weight = torch.tensor([1.0, 0.0, 1.0], device=device)
    results = []
    for garbage in (0.0, float("nan")):
        a = x.detach().clone()
        a[1] = garbage
        a.requires_grad_()
        loss = kullback.divergence(a, y.detach(), row_weight=weight)
        (g,) = torch.autograd.grad(loss**2, a, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), a)[0])
    assert torch.equal(*results)
    assert (results[0][1] == 0).all()


def test_weight_gradients_through_nested_transforms(backend, device, generator):
    x, y = (t.detach() for t in pair("logits", (4, 3, 5), generator, device))
    weight = torch.rand(4, 3, generator=generator, dtype=torch.float64).to(device)
    function = lambda a, b, w: kullback.divergence(a, b, row_weight=w, reduction="sum")
    ours = torch.func.grad(lambda w: torch.func.vmap(function)(x, y, w).sum())(weight)
    torch.testing.assert_close(ours, oracle.divergence(x, y, "kl"))


def test_hellinger_double_backward_where_both_masses_are_zero(backend, device):
    x = torch.tensor([[1.0, 2.0, -torch.inf]], dtype=torch.float64, device=device, requires_grad=True)
    y = torch.tensor([[0.0, 3.0, -torch.inf]], dtype=torch.float64, device=device)
    (g,) = torch.autograd.grad(kullback.divergence(x, y, "hellinger"), x, create_graph=True)
    (second,) = torch.autograd.grad(g[0, 0], x)
    assert torch.isfinite(second).all()
    assert second.abs().sum() > 0


def test_loss_dtype_does_not_depend_on_what_requires_grad(backend, device, generator):
    x, y = pair("logits", (3, 7), generator, device, torch.float32)
    for needs in (False, True):
        weight = torch.rand(3, device=device, requires_grad=needs)
        count = torch.tensor(2.0, device=device, dtype=torch.float64)
        for options in ({}, {"normalizer": count}, {"reduction": "sum"}, {"reduction": "none"}):
            assert kullback.divergence(x, y, row_weight=weight, **options).dtype == torch.float32


def test_forward_mode_is_refused_not_wrong(backend, device, generator):
    x, y = (t.detach() for t in pair("logits", (3, 7), generator, device))
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda a: kullback.divergence(a, y), (x,), (x,))


def test_modules_agree_with_functions(backend, device, generator):
    x, y = pair("logits", (3, 7), generator, device)
    loss = kullback.DivergenceLoss("skew_kl", alpha=0.3, temperature=2.0, reduction="sum")
    expected = kullback.divergence(x, y, "skew_kl", alpha=0.3, temperature=2.0, reduction="sum")
    assert torch.equal(loss(x, y), expected)
    assert "skew_kl" in repr(loss)
    assert "batchmean" in repr(kullback.KLDivLoss("batchmean"))


def test_modes_subclasses_and_traces_see_operators(backend, device, generator):
    """In plain eager calls no operator is dispatched; whatever looks on must still get one."""

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    seen: list[str] = []
    x, y = (sample("probs", (3, 35), generator).to(device) for _ in range(2))
    student = x.clone().requires_grad_()

    def loss(a, b):
        return kullback.kl_div(a, b, "sum", form="probs")

    expected = loss(x, y)
    (gradient,) = torch.autograd.grad(loss(student, y), student)
    with Recorder():
        value = loss(student, y)
        torch.testing.assert_close(torch.autograd.grad(value, student)[0], gradient)
    assert seen.count("kullback::value") == 1
    assert "kullback::gradient" in seen
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(loss(x.as_subclass(Subclass), y).as_subclass(torch.Tensor), expected)
    with FakeTensorMode() as fake:
        value = loss(fake.from_tensor(student), fake.from_tensor(y))
        assert value.shape == ()
        assert value.dtype == expected.dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's, of sizes it takes for constants
        traced = torch.jit.trace(loss, (x, y))
    torch.testing.assert_close(traced(y, x), loss(y, x))


@pytest.mark.parametrize("kind", SMOOTH)
@pytest.mark.parametrize("teacher", [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 3.0, 2.0]])
def test_second_derivatives_at_ties(kind, teacher):
    """What a formula splits at p = q is one side's there."""
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([teacher], dtype=torch.float64)
    direction = torch.tensor([[1.0, 4.0, 9.0, 16.0]], dtype=torch.float64)
    ours, truth = (
        torch.autograd.grad((torch.autograd.grad(loss, x, create_graph=True)[0] * direction).sum(), x)[0]
        for loss in (
            kullback.divergence(x, y, kind, **kinds.parameters(kind)),
            oracle.divergence(x, y, kind, **kinds.parameters(kind)).mean(),
        )
    )
    torch.testing.assert_close(ours, truth)


def test_meta_and_fake_tensors():
    """Shapes and dtypes without values, for every public function."""
    shapes = {
        "hidden": (3, 4),
        "head": (7, 4),
        "teacher": (3, 5),
        "teacher_head": (7, 5),
        "x": (3, 7),
        "values": (3, 2),
    }

    def results(**options):
        t = {name: torch.empty(shape, **options) for name, shape in shapes.items()}
        values, ids = torch.empty(3, 2, **options), torch.empty((3, 2), dtype=torch.int64, **options)
        for reduction in ("mean", "none"):
            yield kullback.kl_div(t["x"].bfloat16(), t["x"].bfloat16(), reduction)
            yield kullback.divergence(t["x"], t["x"], reduction=reduction)
            yield kullback.topk_divergence(t["x"], values, ids, reduction=reduction)
            models = (t[name] for name in ("hidden", "head", "teacher", "teacher_head"))
            yield kullback.linear_divergence(*models, reduction=reduction)
            yield kullback.divergence(t["x"], t["x"], labels=ids[:, 0], reduction=reduction)
            yield kullback.divergence(t["x"], None, labels=ids[:, 0], reduction=reduction)

    expected = [*[()] * 6, (3, 7), *[(3,)] * 5]
    assert [tuple(result.shape) for result in results(device="meta")] == expected
    with torch._subclasses.FakeTensorMode():
        assert [tuple(result.shape) for result in results()] == expected


def test_batched_gradients(backend, device, generator):
    x, y = pair("logits", (3, 7), generator, device)
    loss = kullback.divergence(x, y, reduction="none")
    together = torch.autograd.grad(loss, x, torch.eye(3, device=device, dtype=x.dtype), is_grads_batched=True)[0]
    for i, row in enumerate(together):
        torch.testing.assert_close(row, torch.autograd.grad(kullback.divergence(x, y, reduction="none")[i], x)[0])


def test_numpys_numbers_are_numbers(generator):
    x, y = pair("logits", (3, 7), generator, "cpu")
    numpy = x.detach().float().numpy().dtype.type(2)
    assert kullback.divergence(x, y, temperature=numpy) == kullback.divergence(x, y, temperature=2.0)


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
@pytest.mark.parametrize("kind", ["alpha", "renyi"])
@pytest.mark.parametrize("with_labels", [False, True])
def test_rows_of_weight_0_whose_loss_is_infinite(backend, kind, with_labels):
    """Of float32 rows on a CPU, in whichever way the others are summed."""
    x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -torch.inf]], requires_grad=True)
    y = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    options = {"labels": torch.tensor([0, 1])} if with_labels else {}
    loss = kullback.divergence(x, y, kind, alpha=2.0, row_weight=torch.tensor([1, 0]), **options)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert gradient[0].abs().min() > 0
    assert (gradient[1] == 0).all()


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_an_infinite_loss_is_no_row_of_weight_0(backend, reduction):
    """Its slope is 0 in a renyi's sum; what comes of it is no number, and not nothing."""
    x = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    y = torch.tensor([[0.2, 0.3, 0.5]]).log()
    loss = kullback.divergence(x, y, "renyi", target_form="log_probs", alpha=2.0, reduction=reduction).sum()
    assert loss == torch.inf
    assert torch.autograd.grad(loss, x)[0].isnan().all()


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
def test_a_large_mask_of_one_side(backend):
    """What its product with an order rounds is no mass."""
    x, y = torch.tensor([[0.08, -1e17]], dtype=torch.float64), torch.tensor([[0.137, 0.07]], dtype=torch.float64)
    assert kullback.divergence(x, y, "renyi", alpha=2.0).item() == pytest.approx(1e17)
    assert kullback.divergence(x, y, "alpha", alpha=2.0).item() == torch.inf


WITHOUT_BATCHES = """
import torch
del torch._C._functorch.is_legacy_batchedtensor
import kullback

x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
loss = kullback.divergence(x, y, reduction="none")
(rows,) = torch.autograd.grad(loss, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
(whole,) = torch.autograd.grad(loss.sum(), x)
torch.testing.assert_close(rows.sum(0), whole)
print("right")
"""
WITHOUT_LEVELS = """
import torch, kullback

with torch.autograd.forward_ad.dual_level():
    dual = torch.autograd.forward_ad.make_dual(torch.randn(3, 5), torch.ones(3, 5))
    del torch.autograd.forward_ad._current_level
    try:
        kullback.divergence(dual, torch.randn(3, 5))
    except NotImplementedError:
        print("right")
    torch.autograd.forward_ad._current_level = 0
"""


@pytest.mark.parametrize("program", [WITHOUT_BATCHES, WITHOUT_LEVELS], ids=["batches", "levels"])
def test_private_names_of_torch_may_go(program):
    """What they told of a call is then taken for so: no tangent is dropped, and no batch of gradients read as one."""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "right\n"


def _written_out(name, y, labels, entries):
    """float64 textbook losses of rows, of x alone."""
    log_p = y.log_softmax(-1)
    dense = lambda x: (log_p.exp() * (log_p - x.log_softmax(-1))).sum(-1)
    if name == "labels":
        return lambda x: dense(x) + torch.nn.functional.cross_entropy(x, labels, reduction="none")
    if name != "topk":
        return dense
    values, ids = entries

    def topk(x):
        log_q = x.log_softmax(-1).gather(-1, ids)
        tail, own = 1 - values.exp().sum(-1), 1 - log_q.exp().sum(-1)
        return (values.exp() * (values - log_q)).sum(-1) + tail * (tail / own).log()

    return topk


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
@pytest.mark.parametrize("name", ["kl_div", "divergence", "labels", "topk"])
def test_an_upstream_gradient_of_0_is_differentiated(backend, generator, name):
    """As torch's forward-mode products begin, and weights that are learnt and begin at 0."""
    x, y, v = torch.randn(3, 3, 5, generator=generator, dtype=torch.float64)
    labels, entries = torch.tensor([0, 1, 2]), y.log_softmax(-1).topk(2)
    ours = {
        "kl_div": lambda x: kullback.kl_div(x.log_softmax(-1), y.softmax(-1), "none").sum(-1),
        "divergence": lambda x: kullback.divergence(x, y, reduction="none"),
        "labels": lambda x: kullback.divergence(x, y, labels=labels, reduction="none"),
        "topk": lambda x: kullback.topk_divergence(x, *entries, reduction="none"),
    }[name]
    theirs = _written_out(name, y, labels, entries)
    functional = torch.autograd.functional
    torch.testing.assert_close(functional.jvp(ours, x, v)[1], functional.jvp(theirs, x, v)[1])
    products = (functional.hvp(lambda x, f=f: f(x).sum(), x, v)[1] for f in (ours, theirs))
    torch.testing.assert_close(*products)

    def learnt(f):
        leaf, weights = x.clone().requires_grad_(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((f(leaf) * weights).sum(), leaf, create_graph=True)
        return torch.autograd.grad((gradient * v).sum(), weights)[0]

    torch.testing.assert_close(learnt(ours), learnt(theirs))


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_a_student_that_is_its_top_k_teacher_has_a_hessian(backend, tail):
    """Fisher's, of the outcomes, though the gradient is 0."""
    values, ids = torch.full((2,), 0.25).log(), torch.tensor([0, 1])
    x = torch.zeros(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(kullback.topk_divergence(x, values, ids, tail=tail), x, create_graph=True)
    (product,) = torch.autograd.grad(gradient @ torch.tensor([1.0, 2, 3, 4]), x)
    expected = [-0.375, -0.125, 0.25, 0.25] if tail == "bucket" else [-0.25, 0.25, 0.0, 0.0]
    torch.testing.assert_close(product, torch.tensor(expected))


@pytest.mark.parametrize("backend", ["torch", "c"], indirect=True)
@pytest.mark.parametrize("kind", ["kl", "jensen_shannon", "renyi"])
def test_rows_that_a_caller_leaves_out_may_hold_anything(backend, generator, kind):
    """Their upstream gradients are 0, though no row weight says so."""
    x, y = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    x[1, 2], y[2] = torch.nan, -torch.inf
    x.requires_grad_()
    losses = kullback.divergence(x, y, kind, reduction="none")
    (gradient,) = torch.autograd.grad(losses[:1].sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(gradient.square().sum(), x)
    assert again[0].abs().sum() > 0
    assert (again[1:] == 0).all()
