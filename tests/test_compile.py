"""Under torch.compile: results of Inductor's code, how often anything is compiled, and export for any count of rows."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import kullback

# Dynamo instantiates the class of an autograd.Function that it traces, and is warned of its own doing.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
VOCAB = 33


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def rows(count, generator):
    """A student's logits, a teacher's, the teacher's entries (two of one id), both models' hidden states and heads."""
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    x, y = randn(count, VOCAB), randn(count, VOCAB)
    log_p, ids = y.log_softmax(-1).topk(5)
    ids[:, 3] = ids[:, 2]
    hidden, head, teacher, teacher_head = randn(count, 8), randn(VOCAB, 8), randn(count, 6), randn(VOCAB, 6)
    return {
        "x": x.requires_grad_(),
        "y": y.requires_grad_(),
        "log_p": log_p.requires_grad_(),
        "ids": ids,
        "hidden": hidden.requires_grad_(),
        "head": head.requires_grad_(),
        "teacher": teacher,
        "teacher_head": teacher_head,
    }


def divergence(given, reduction, **options):
    return kullback.divergence(given["x"] * 1.5, given["y"], "jensen_shannon", reduction=reduction, **options)


def kl_div(given, reduction, **options):
    return kullback.kl_div(given["x"].log_softmax(-1), given["y"].softmax(-1), reduction, **options)


def topk(given, reduction, **options):
    return kullback.topk_divergence(given["x"], given["log_p"], given["ids"], reduction=reduction, **options)


def linear(given, reduction, **options):
    names = "hidden", "head", "teacher", "teacher_head"
    return kullback.linear_divergence(*(given[name] for name in names), reduction=reduction, **options)


def linear_topk(given, reduction, **options):
    log_p = given["log_p"].detach()
    return kullback.linear_divergence(
        given["hidden"], given["head"], log_p, target_indices=given["ids"], reduction=reduction, **options
    )


def calls(call, *reductions, longer=()):
    """The longer are for `make test-full`: each takes a compiler seconds."""
    yield from ((call, reduction) for reduction in reductions)
    yield from (pytest.param(call, reduction, marks=pytest.mark.full) for reduction in longer)


CALLS = [
    *calls(divergence, "mean", "none", longer=["sum"]),
    *calls(kl_div, "batchmean", "none", longer=["mean", "sum"]),
    *calls(topk, "mean", longer=["none"]),
    *calls(linear, "mean", longer=["none"]),
    (linear_topk, "mean"),
]
names = lambda value: getattr(value, "__name__", None) or str(value)


def check_inductor(call, reduction, generator, counts, dynamic):
    """The default backend, forward and backward."""
    compiled = torch.compile(lambda given: call(given, reduction).sum() * 2, fullgraph=True, dynamic=dynamic)
    for count in counts:
        given = rows(count, generator)
        leaves = [tensor for tensor in given.values() if tensor.requires_grad]
        ours, theirs = compiled(given), call(given, reduction).sum() * 2
        torch.testing.assert_close(ours, theirs)
        both = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (ours, theirs))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("call", "reduction"), CALLS, ids=names)
def test_inductor(call, reduction, generator):
    check_inductor(call, reduction, generator, (12, 5), dynamic=True)


SHORT = (divergence, "mean"), (linear, "mean")
OF_ONE_COUNT = [
    case if case in SHORT else pytest.param(*getattr(case, "values", case), marks=pytest.mark.full) for case in CALLS
]


@pytest.mark.parametrize(("call", "reduction"), OF_ONE_COUNT, ids=names)
def test_inductor_of_one_count(call, reduction, generator):
    check_inductor(call, reduction, generator, (12,), dynamic=False)


def twice(h, weight, bias, reduction):
    return kullback.linear_divergence(
        h, weight, 2 * h, weight, bias=bias, target_bias=bias, reduction=reduction
    ) + kullback.divergence(h, h, row_weight=bias[:3], reduction=reduction)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_tensor_may_be_given_twice(reduction, generator):
    h, weight, bias = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((3, 4), (5, 4), (5,)))
    given = h, weight, bias.detach().abs()
    ours, theirs = (
        call(*given, reduction).sum() for call in (torch.compile(twice, fullgraph=True, backend="aot_eager"), twice)
    )
    torch.testing.assert_close(ours, theirs)
    both = (torch.autograd.grad(loss, (h, weight)) for loss in (ours, theirs))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tail", ["renormalize", "zero"])
def test_inductor_of_other_tails(tail, generator):
    given = rows(12, generator)
    compiled = torch.compile(lambda given: topk(given, "mean", tail=tail), fullgraph=True)
    leaves = given["x"], given["log_p"]
    both = (torch.autograd.grad(loss(given), leaves) for loss in (compiled, lambda g: topk(g, "mean", tail=tail)))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("call", "reduction"), CALLS, ids=names)
def test_one_compilation_serves_all_counts_of_rows(call, reduction, generator):
    """Two: Dynamo takes the first count for a constant."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda given: call(given, reduction), fullgraph=True, backend=counter)
    for count in range(3, 13):
        given = rows(count, generator)
        torch.testing.assert_close(compiled(given), call(given, reduction))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (divergence, "temperature"),
        (divergence, "beta"),
        (divergence, "normalizer"),
        (topk, "temperature"),
        (linear, "temperature"),
    ],
    ids=names,
)
def test_one_compilation_serves_all_values_of_a_number(call, option, generator):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda g, value: call(g, "mean", **{option: value}), fullgraph=True, backend=counter)
    given = rows(4, generator)
    for i in range(10):
        value = 0.13 + i / 13
        ours, theirs = compiled(given, value), call(given, "mean", **{option: value})
        torch.testing.assert_close(ours, theirs)
        leaves = [tensor for tensor in given.values() if tensor.requires_grad]
        both = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (ours, theirs))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_export_for_any_count_of_rows(reduction, generator):
    class Loss(torch.nn.Module):
        def forward(self, x, y):
            return kullback.divergence(x, y, reduction=reduction)

    count = torch.export.Dim("count", min=2, max=1000)
    first, second = (rows(n, generator) for n in (12, 5))
    x, y = first["x"].detach(), first["y"].detach()
    program = torch.export.export(Loss(), (x, y), dynamic_shapes=({0: count}, {0: count}))
    x, y = second["x"].detach(), second["y"].detach()
    torch.testing.assert_close(program.module()(x, y), kullback.divergence(x, y, reduction=reduction))


@pytest.mark.parametrize("how", ["frozen", "strict", "not strict"])
@pytest.mark.parametrize(("call", "reduction"), CALLS, ids=names)
def test_an_exported_module_trains(call, reduction, how, generator):
    """By whoever loads it, whether or not a gradient was wanted when it was exported."""

    class Loss(torch.nn.Module):
        def forward(self, given):
            return call(given, reduction).sum()

    given = rows(5, generator)
    shown = {name: tensor.detach() if how == "frozen" else tensor for name, tensor in given.items()}
    program = torch.export.export(Loss(), (shown,), strict=how == "strict")
    leaves = [tensor for tensor in given.values() if tensor.requires_grad]
    both = (torch.autograd.grad(run(given), leaves, allow_unused=True) for run in (program.module(), Loss()))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_traced_without_a_compiler(mode, reduction, generator):
    """Sizes are symbols in the last of these, and serve other counts of rows."""
    x, y = torch.randn(2, 5, 7, generator=generator)
    run = lambda x, y: kullback.divergence(x, y, reduction=reduction)
    graph = make_fx(run, tracing_mode=mode)(x, y)
    for rows in (5, 9) if mode == "symbolic" else (5,):
        x, y = torch.randn(2, rows, 7, generator=generator)
        torch.testing.assert_close(graph(x, y), run(x, y))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_kl_div_traced_with_sizes_that_are_symbols(reduction, generator):
    x, y = torch.randn(2, 5, 7, generator=generator).log_softmax(-1)
    run = lambda x, y: kullback.kl_div(x, y, reduction=reduction, log_target=True)
    graph = make_fx(run, tracing_mode="symbolic")(x, y)
    for rows in (5, 9):
        x, y = torch.randn(2, rows, 7, generator=generator).log_softmax(-1)
        torch.testing.assert_close(graph(x, y), run(x, y))


@pytest.mark.parametrize(("call", "option"), [(divergence, "valid_vocab"), (linear, "chunk_rows")], ids=names)
def test_counts_may_change(call, option, generator):
    """A kernel's name has them: a compiler's symbol would be no text."""
    compiled = torch.compile(lambda g, value: call(g, "mean", **{option: value}), fullgraph=True, backend="eager")
    given = rows(4, generator)
    for value in (3, 2, 1):
        torch.testing.assert_close(compiled(given, value), call(given, "mean", **{option: value}))
