"""What a PyTorch operator owes: opcheck, gradcheck, transforms, compile, export, autocast, graphs, no syncs."""

import functools
import itertools
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.export import export
from torch.utils._python_dispatch import TorchDispatchMode

import kullback
from kullback.divergences import DIVERGENCES
from kullback.rows import NUMBERS
from tests import oracle
from tests.conftest import no_synchronisation, relative_error, sample

KINDS = list(DIVERGENCES)


def pair(form, shape, generator, device, dtype=torch.float64):
    return [sample(form, shape, generator, dtype, 1.0).to(device).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_gradgradcheck(kind, form, path, device, generator):
    x, y = pair(form, (3, 5), generator, device)
    weight = torch.tensor([1.0, 0.0, 0.4], device=device, dtype=torch.float64)
    for reduction, w in (("mean", None), ("none", weight)):

        def function(a, b, reduction=reduction, w=w):
            return kullback.divergence(
                a, b, kind, form=form, reduction=reduction, row_weight=w, **oracle.PARAMETERS[kind]
            )

        # A first backward hands over what forward wrote, a second computes it anew: other roundings.
        check = functools.partial(torch.autograd.gradcheck, nondet_tol=1e-13)
        assert check(function, (x, y))
        assert check(function, (x, y.detach()))
        assert check(function, (x.detach(), y))
        if path != "c":  # second derivatives are the formula's on every path
            assert torch.autograd.gradgradcheck(function, (x, y), nondet_tol=1e-13)


def test_gradients_of_weight_and_normalizer(path, device, generator):
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
def test_opcheck(form, path, device, generator):
    x, y = (t.detach().float() for t in pair(form, (3, 5), generator, device))
    spelling, numbers = f"kl {form} {form}", [*NUMBERS]
    weight = torch.rand(3, device=device, dtype=torch.float64)
    ops = torch.ops.kullback
    _, state = ops.per_row(x, y, None, spelling, numbers, torch.float32)
    for op, arguments in (
        (ops.value, (x, y, weight, 0.5, spelling, numbers, torch.float32)),
        (ops.value, (x[:0], y[:0], None, 0.5, spelling, numbers, torch.float32)),
        (ops.per_row, (x, y, weight, spelling, numbers, torch.float32)),
        (ops.gradient, (x, y, state, weight, spelling, numbers, False, True)),
        (ops.gradient, (x, y, None, weight, spelling, numbers, True, True)),
    ):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("form", oracle.FORMS)
def test_func_transforms(form, path, device, generator):
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


# Dynamo instantiates the class of an autograd.Function that it traces, and is warned of its own doing.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, path, device, generator):
    torch._dynamo.reset()

    def function(a, b, w):
        scaled = a * 1.5
        loss = kullback.divergence(scaled, b, "jensen_shannon", row_weight=w, weight=0.3)
        return loss + kullback.kl_div(scaled.softmax(-1), b.softmax(-1), "batchmean", form="probs")

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5) if dynamic else (3,):
        x, y = pair("logits", (rows, 7), generator, device, torch.float32)
        weight = torch.rand(rows, generator=generator).to(device)
        results = []
        for run in (function, compiled):
            loss = run(x, y, weight)
            results.append((loss, *torch.autograd.grad(loss, (x, y))))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_export(path, device, generator):
    class Loss(torch.nn.Module):
        def forward(self, a, b):
            return kullback.divergence(a, b, "kl", temperature=2.0)

    x, y = (t.detach() for t in pair("logits", (3, 5), generator, device))
    program = export(Loss(), (x, y))
    assert "kullback.value" in program.graph_module.code
    torch.testing.assert_close(program.module()(x, y), Loss()(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(dtype, path, device, generator):
    x, y = pair("log_probs", (3, 50), generator, device, dtype)
    with torch.autocast(device, dtype=dtype):
        ours = kullback.kl_div(x, y, "sum", log_target=True)
        theirs = torch.nn.functional.kl_div(x, y, reduction="sum", log_target=True)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.grad(ours, x)[0].dtype == dtype


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backward_twice_and_inputs_untouched(form, reduction, path, device, generator):
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


def test_an_input_changed_before_backward_is_an_error(path, device, generator):
    x, y = pair("probs", (4, 33), generator, device, torch.float32)
    middle = x * 1
    loss = kullback.divergence(middle, y, form="probs")
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_only_where_it_is_wanted(path, device, generator):
    x, y = pair("probs", (4, 33), generator, device, torch.float32)
    for a, b in ((x, y.detach()), (x.detach(), y)):
        for reduction in ("none", "mean"):
            loss = kullback.divergence(a, b, form="probs", reduction=reduction).sum()
            wanted = a if a.requires_grad else b
            assert torch.autograd.grad(loss, wanted)[0].shape == wanted.shape
    with torch.no_grad():
        assert not kullback.divergence(x, y, form="probs").requires_grad


def test_create_graph_then_plain_backward(path, device, generator):
    x, y = pair("logits", (3, 7), generator, device)
    loss = kullback.divergence(x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (gradient.square().sum() + loss).backward()
    a, b = x.detach().requires_grad_(), y.detach()
    truth = oracle.divergence(a, b, "kl").mean()
    (expected,) = torch.autograd.grad(truth, a, create_graph=True)
    (expected.square().sum() + truth).backward()
    torch.testing.assert_close(x.grad, a.grad)


def test_double_backward_does_not_read_rows_without_weight(path, device, generator):
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


def test_weight_gradients_through_nested_transforms(path, device, generator):
    x, y = (t.detach() for t in pair("logits", (4, 3, 5), generator, device))
    weight = torch.rand(4, 3, generator=generator, dtype=torch.float64).to(device)
    function = lambda a, b, w: kullback.divergence(a, b, row_weight=w, reduction="sum")
    ours = torch.func.grad(lambda w: torch.func.vmap(function)(x, y, w).sum())(weight)
    torch.testing.assert_close(ours, oracle.divergence(x, y, "kl"))


def test_hellinger_double_backward_where_both_masses_are_zero(path, device):
    x = torch.tensor([[1.0, 2.0, -torch.inf]], dtype=torch.float64, device=device, requires_grad=True)
    y = torch.tensor([[0.0, 3.0, -torch.inf]], dtype=torch.float64, device=device)
    (g,) = torch.autograd.grad(kullback.divergence(x, y, "hellinger"), x, create_graph=True)
    (second,) = torch.autograd.grad(g[0, 0], x)
    assert torch.isfinite(second).all()
    assert second.abs().sum() > 0


def test_loss_dtype_does_not_depend_on_what_requires_grad(path, device, generator):
    x, y = pair("logits", (3, 7), generator, device, torch.float32)
    for needs in (False, True):
        weight = torch.rand(3, device=device, requires_grad=needs)
        count = torch.tensor(2.0, device=device, dtype=torch.float64)
        for options in ({}, {"normalizer": count}, {"reduction": "sum"}, {"reduction": "none"}):
            assert kullback.divergence(x, y, row_weight=weight, **options).dtype == torch.float32


def test_forward_mode_is_refused_not_wrong(path, device, generator):
    x, y = (t.detach() for t in pair("logits", (3, 7), generator, device))
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda a: kullback.divergence(a, y), (x,), (x,))


def test_modules_agree_with_functions(path, device, generator):
    x, y = pair("logits", (3, 7), generator, device)
    loss = kullback.DivergenceLoss("skew_kl", alpha=0.3, temperature=2.0, reduction="sum")
    expected = kullback.divergence(x, y, "skew_kl", alpha=0.3, temperature=2.0, reduction="sum")
    assert torch.equal(loss(x, y), expected)
    assert "skew_kl" in repr(loss)
    assert "batchmean" in repr(kullback.KLDivLoss("batchmean"))


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_kernels_run(self, kind, generator):
        for form, target_form in itertools.product(("probs", "log_probs"), repeat=2):
            x, y = (sample(f, (3, 50), generator).cuda().requires_grad_() for f in (form, target_form))
            loss = kullback.divergence(x, y, kind, form=form, target_form=target_form)
            assert kullback.backend_info() == ("cuda", {})
            loss.backward()
            assert kullback.backend_info() == ("cuda", {})

    @pytest.mark.parametrize(
        "dtypes",
        [
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
        ],
    )
    @pytest.mark.parametrize("vocab", [2056, 8192, 32000, 50257, 128256, 262144])
    def test_logits_on_chip(self, vocab, dtypes):
        """More rows than are in flight at once, some without weight, close ones and masked ones among them."""
        rows = 300 if vocab < 100_000 else 70
        y = torch.randn(rows, vocab, device="cuda") * 2
        noise = torch.linspace(1e-2, 1.5, rows, device="cuda")[:, None]
        x = (y + noise * torch.randn_like(y)).to(dtypes[0])
        y = y.to(dtypes[1])
        x[5::7, 100:200] = y[5::7, 100:200] = float("-inf")
        weight = torch.rand(rows, device="cuda")
        weight[::9] = 0
        x[::9] = float("nan")
        for kind in ("kl", "jensen_shannon"):
            a = x.detach().requires_grad_()
            options = {"row_weight": weight, **oracle.PARAMETERS[kind]}
            loss = kullback.divergence(a, y, kind, **options)
            assert kullback.backend_info().name == "cuda"
            loss.backward()
            again = kullback.divergence(a, y, kind, **options)
            (gradient,) = torch.autograd.grad(again, a)
            assert torch.equal(again, loss)
            assert torch.equal(gradient, a.grad)
            read = weight != 0
            b = x[read].double().requires_grad_()
            truth = oracle.divergence(b, y[read].double(), kind, **oracle.PARAMETERS[kind])
            truth = (truth * weight[read].double()).sum() / weight.sum().double()
            truth.backward()
            assert relative_error(loss, truth) <= 1e-5
            assert (a.grad[~read] == 0).all()
            assert relative_error(a.grad[read], b.grad) <= (2e-6 if dtypes[0] == torch.float32 else 5e-3)

    def test_no_host_synchronisation(self, generator):
        x, y = pair("probs", (64, 1000), generator, "cuda", torch.float32)
        weight = torch.rand(64, device="cuda")
        count = torch.tensor(7.0, device="cuda")
        run = lambda: [
            kullback.divergence(x, y, form="probs", row_weight=weight, normalizer=count).backward(),
            kullback.divergence(x, y, "renyi", form="probs").backward(),
            kullback.kl_div(x, y, "none", form="probs").sum().backward(),
        ]
        run()
        with no_synchronisation():
            run()

    def test_graph_capture_and_replay_with_new_data(self, generator):
        x = torch.rand(128, 1000, device="cuda").softmax(-1).requires_grad_()
        y = torch.rand(128, 1000, device="cuda").softmax(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                kullback.divergence(x, y, form="probs").backward()
                x.grad = None
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = kullback.divergence(x, y, form="probs")
            loss.backward()
        for _ in range(3):
            with torch.no_grad():
                x.copy_(torch.rand(128, 1000, device="cuda").softmax(-1))
                y.copy_(torch.rand(128, 1000, device="cuda").softmax(-1))
            graph.replay()
            a = x.detach().clone().requires_grad_()
            expected = kullback.divergence(a, y, form="probs")
            expected.backward()
            assert torch.equal(loss, expected)
            assert torch.equal(x.grad, a.grad)

    def test_runs_on_the_current_stream(self, generator):
        x, y = (torch.rand(512, 4096, device="cuda").softmax(-1) for _ in range(2))
        expected = kullback.kl_div(x, y, "sum", form="probs")
        late = torch.full_like(x, 0.5)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(x)
            result = kullback.kl_div(late, y, "sum", form="probs")
        stream.synchronize()
        assert torch.equal(result, expected)

    def test_runs_on_the_tensors_device(self):
        if torch.cuda.device_count() < 2:
            torch.cuda.set_device(0)
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        x, y = (torch.rand(16, 100, device=device).softmax(-1) for _ in range(2))
        result = kullback.kl_div(x, y, "sum", form="probs")
        assert result.device == device
        torch.testing.assert_close(result, torch.nn.functional.kl_div(x.log(), y, reduction="sum"))

    @pytest.mark.parametrize("rows", [65537, 1 << 20])
    def test_many_rows(self, rows):
        x, y = (torch.rand(rows, 16, device="cuda").softmax(-1) for _ in range(2))
        losses = kullback.divergence(x, y, form="probs", reduction="none")
        truth = oracle.divergence(x, y, "kl", "probs")
        torch.testing.assert_close(losses.double(), truth, rtol=1e-4, atol=1e-7)
        assert torch.equal(losses[-5:], kullback.divergence(x[-5:], y[-5:], form="probs", reduction="none"))

    def test_more_than_two_to_the_31_elements(self):
        rows, vocab = 16760, 128256  # 2.15e9
        x = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda")
        y = torch.empty_like(x)
        for part in torch.arange(rows, device="cuda").split(1024):
            for t in (x, y):
                t[part] = torch.randn(len(part), vocab, device="cuda").softmax(-1).bfloat16()
        x.requires_grad_()
        losses = kullback.divergence(x, y, form="probs", reduction="none")
        losses.sum().backward()
        for at in (slice(0, 3), slice(rows - 3, rows)):
            a = x.detach()[at].clone().requires_grad_()
            alone = kullback.divergence(a, y[at].clone(), form="probs", reduction="none")
            alone.sum().backward()
            assert torch.equal(losses[at], alone)
            assert torch.equal(x.grad[at], a.grad)
        total = kullback.divergence(x.detach(), y, form="probs", reduction="sum")
        torch.testing.assert_close(total.double(), losses.double().sum(), rtol=1e-5, atol=0)

    def test_a_hundred_runs_under_load_are_equal_to_the_bit(self):
        x, y = (torch.rand(257, 151_936, device="cuda").softmax(-1) for _ in range(2))
        noise, other = torch.rand(4096, 4096, device="cuda"), torch.cuda.Stream()
        first = None
        for _ in range(100):
            with torch.cuda.stream(other):
                noise @ noise
            a = x.detach().requires_grad_()
            loss = kullback.kl_div(a, y, "batchmean", form="probs")
            loss.backward()
            rows = kullback.divergence(x, y, "renyi", form="probs", reduction="none")
            if first is None:
                first = loss.detach(), a.grad, rows
            assert all(torch.equal(p, q) for p, q in zip((loss, a.grad, rows), first, strict=True))


def test_modes_subclasses_and_traces_see_operators(path, device, generator):
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


@pytest.mark.parametrize("kind", [kind for kind in DIVERGENCES if kind != "total_variation"])
@pytest.mark.parametrize("teacher", [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 3.0, 2.0]])
def test_second_derivatives_at_ties(kind, teacher):
    """What a formula splits at p = q is one side's there."""
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([teacher], dtype=torch.float64)
    direction = torch.tensor([[1.0, 4.0, 9.0, 16.0]], dtype=torch.float64)
    ours, truth = (
        torch.autograd.grad((torch.autograd.grad(loss, x, create_graph=True)[0] * direction).sum(), x)[0]
        for loss in (
            kullback.divergence(x, y, kind, **oracle.PARAMETERS[kind]),
            oracle.divergence(x, y, kind, **oracle.PARAMETERS[kind]).mean(),
        )
    )
    torch.testing.assert_close(ours, truth)
