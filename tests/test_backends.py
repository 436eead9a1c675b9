"""Which backend runs, what is reported of it, and what becomes of kernels that cannot be built."""

import concurrent.futures
import threading
import warnings
import weakref

import pytest
import torch

import kullback
from kullback import backends
from kullback.backends import BackendInfo, build, c
from kullback.backends.c import compile
from kullback.backends.cuda import launch, literal, logits
from kullback.problem import Problem, Side
from kullback.work import VERBS, Operands, Rows
from tests import emulation

X = torch.full((3, 4), 0.25)


@pytest.fixture
def fresh_kernels(monkeypatch):
    """As if nothing had been built, or failed, in this process."""
    monkeypatch.setattr(build, "failures", {})
    monkeypatch.setattr(backends, "_told", set())
    caches = compile.compiler_name, compile.compiler, c.kernel
    for cached in caches:
        cached.cache_clear()
    yield
    build.failures.clear()
    for cached in caches:
        cached.cache_clear()


def test_names():
    with pytest.raises(ValueError, match="cuda, c, torch; got 'cpp'"), kullback.backend("cpp"):
        pass


def test_a_backend_that_is_forced_and_cannot_run_is_an_error():
    with (
        pytest.raises(RuntimeError, match=r"'cuda' was asked for and cannot run.*tensors are on cpu"),
        kullback.backend("cuda"),
    ):
        kullback.divergence(X, X, form="probs")


def test_info_says_what_ran_and_why():
    kullback.divergence(X, X, form="probs")
    assert kullback.backend_info() == BackendInfo("c", {"loss": "c"}, {"cuda": "tensors are on cpu"})
    with kullback.backend("torch"):
        kullback.divergence(X, X, form="probs")
    assert kullback.backend_info() == BackendInfo("torch", {"loss": "torch"}, {})


def test_info_names_every_part():
    x = X.log().requires_grad_()
    kullback.divergence(x, X, reduction="none").sum().backward()
    assert kullback.backend_info().parts == {"loss": "c", "gradient": "c"}
    kullback.topk_divergence(x, X[:, :2].log(), torch.tensor([[0, 1]] * 3), reduction="none").sum().backward()
    assert kullback.backend_info().parts.keys() == {"entries", "gather", "loss", "gradient", "scatter"}
    with kullback.backend("torch"):
        loss = kullback.divergence(x, X, reduction="none").sum()
    loss.backward()
    assert kullback.backend_info() == BackendInfo("torch", {"loss": "torch", "gradient": "torch"}, {})


def test_a_call_of_two_backends_names_both(monkeypatch):
    """As on a GPU of one whose kernels refuse a part."""
    refuse = lambda work: "not this part" if isinstance(work, Rows) and work.verb == "gradient" else None
    monkeypatch.setattr(c, "why_not", refuse)
    x = X.log().requires_grad_()
    kullback.divergence(x, X, reduction="none").sum().backward()
    info = kullback.backend_info()
    assert info.name == "c+torch"
    assert info.parts == {"loss": "c", "gradient": "torch"}
    assert info.refused["c"] == "not this part"


def test_a_backward_runs_where_its_forward_was_forced_to():
    x = X.log().requires_grad_()
    calls = {
        "total": lambda: kullback.divergence(x, X),
        "rows": lambda: kullback.divergence(x, X, reduction="none").sum(),
        "elements": lambda: kullback.kl_div(x, X, "none").sum(),
        "top k": lambda: kullback.topk_divergence(x, X[:, :2].log(), torch.tensor([[0, 1]] * 3)),
        "top k rows": lambda: kullback.topk_divergence(
            x, X[:, :2].log(), torch.tensor([[0, 1]] * 3), reduction="none"
        ).sum(),
        "a top-k teacher's tokens alone": lambda: kullback.topk_divergence(
            x, X[:, :2].log(), torch.tensor([[0, 1]] * 3), tail="support"
        ),
        "linear": lambda: kullback.linear_divergence(x, X, X, X.clone()),
        "linear rows": lambda: kullback.linear_divergence(x, X, X, X.clone(), reduction="none").sum(),
    }
    for name, call in calls.items():
        with kullback.backend("torch"):
            loss = call()
        loss.backward()
        assert kullback.backend_info().name == "torch", name
        if "linear" not in name:
            with kullback.backend("torch"):
                loss = call()
            torch.autograd.grad(loss, x, create_graph=True)
            assert kullback.backend_info().name == "torch", name


def test_each_thread_forces_for_itself():
    barrier = threading.Barrier(2, timeout=60)

    def run(name):
        with kullback.backend(name):
            barrier.wait()
            found = backends.forced()
            barrier.wait()
        return found, backends.forced()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, ("torch", "c"))] == [("torch", None), ("c", None)]


def test_without_a_compiler_torch_runs_and_says_why(monkeypatch, fresh_kernels):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kullback.divergence(X, X, form="probs").item() == 0
    info = kullback.backend_info()
    assert info.name == "torch"
    assert "no C compiler found" in info.refused["c"]


def test_a_compiler_that_compiles_nothing_is_asked_once_and_told(monkeypatch, tmp_path, fake_compiler, fresh_kernels):
    log = tmp_path / "log"
    script = fake_compiler(f"echo asked >> {log}\nexit 1")
    monkeypatch.setenv("CC", script)
    with pytest.warns(
        RuntimeWarning, match=r"(?s)backend 'c' could not build a kernel; a slower one runs.*cc.*failed"
    ) as told:
        assert kullback.divergence(X, X, form="probs").item() == 0
    assert {each.filename for each in told} == {__file__}  # the line that called, and no line of ours
    asked = log.read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("kl", "renyi"):
            kullback.divergence(X, X, kind, form="probs")
            assert kullback.backend_info().name == "torch"
            assert script in kullback.backend_info().refused["c"]
    assert log.read_text() == asked


def test_a_compiler_without_headers_is_told_once(monkeypatch, tmp_path, fake_compiler, fresh_kernels):
    """Each kernel fails in a file of its own, and by the same words."""
    script = fake_compiler(
        'for a in "$@"; do case "$a" in *.c) source=$a;; esac; done\n'
        'grep -q probe "$source" && exec cc "$@"\necho "$source:3: fatal error: math.h" >&2\nexit 1'
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", script)
    with pytest.warns(RuntimeWarning, match=r"rows\.c:3: fatal error: math\.h"):
        kullback.divergence(X, X, form="probs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("renyi", "chi2"):
            kullback.divergence(X, X, kind, form="probs")
            assert kullback.backend_info().name == "torch"


def test_a_kernel_that_cannot_be_built_is_told_once_and_no_other_suffers(monkeypatch, fresh_kernels):
    source = c.source
    attempts = []

    def broken(variant):
        if variant.kind != "renyi":
            return source(variant)
        attempts.append(variant)
        return "this is not C"

    monkeypatch.setattr(c, "source", broken)
    with pytest.warns(RuntimeWarning, match=r"(?s)backend 'c' could not build a kernel; a slower one runs.*failed"):
        assert kullback.divergence(X, X, "renyi", form="probs").item() == pytest.approx(0)
    assert kullback.backend_info().name == "torch"
    assert "failed" in kullback.backend_info().refused["c"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kullback.divergence(X, X, "renyi", form="probs")
        assert kullback.backend_info().name == "torch"
        assert kullback.divergence(X, X, form="probs").item() == 0
        assert kullback.backend_info().name == "c"
    assert len(attempts) == 1
    with pytest.raises(RuntimeError, match=r"'c' was asked for and cannot run.*failed"), kullback.backend("c"):
        kullback.divergence(X, X, "renyi", form="probs")


def test_a_cuda_kernel_that_cannot_be_built_leaves_the_others(monkeypatch, fresh_kernels):
    with emulation.emulated(monkeypatch), kullback.backend("cuda"):
        source = logits.source
        refuse = lambda variant, shape: source(variant, shape) + "this is not C++" * (variant.kind == "chi2")
        monkeypatch.setattr(logits, "source", refuse)
        x = X.log()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="'cuda' was asked for and cannot run"):
                kullback.divergence(x, x, "chi2")
        assert kullback.divergence(x, x).item() == 0
        assert kullback.backend_info().name == "cuda"


@pytest.mark.parametrize("damage", ["garbage", "blank"])
def test_a_compiler_that_cannot_be_used_leaves_torch(damage, monkeypatch, tmp_path, fake_compiler, fresh_kernels):
    """One that writes what cannot be loaded; and a blank $CC, which is none."""
    script = fake_compiler('while [ $# -gt 0 ]; do [ "$1" = -o ] && echo garbage > "$2"; shift; done')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", script if damage == "garbage" else " ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert kullback.divergence(X, X, form="probs").item() == 0
    info = kullback.backend_info()
    assert info.name == ("torch" if damage == "garbage" else "c")
    assert damage == "blank" or "could not be loaded" in info.refused["c"]


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_is_a_module_of_two_functions(name):
    """mypy holds them to the protocol; nothing else of a backend is called from outside."""
    module = backends.BACKENDS[name]
    assert callable(module.why_not)
    assert callable(module.run)


def test_a_record_of_any_verb_is_taken_by_every_backend_of_its_device():
    problem = Problem("kl", Side("logits"), Side("logits"))
    for verb in VERBS:
        work = Rows(problem, Operands(X, X), verb)
        assert c.why_not(work) is None
        assert backends.BACKENDS["torch"].why_not(work) is None
        assert backends.BACKENDS["cuda"].why_not(work) == "tensors are on cpu"


def test_workspaces_are_a_streams_or_a_captures(monkeypatch):
    capturing, zeros = False, torch.zeros
    monkeypatch.setattr(launch, "_workspaces", {})
    monkeypatch.setattr(launch, "raw_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: zeros(count, dtype=dtype))
    first = launch.workspace(0, 8)
    assert first.ticket - first.partial == 8 * 8
    assert launch.workspace(0, 3) is first
    larger = launch.workspace(0, 9)
    assert (larger is not first, larger.ticket - larger.partial) == (True, 8 * 9)
    assert launch.workspace(1, 3) is not larger
    capturing = True
    captured = [launch.workspace(0, 3) for _ in range(2)]
    assert len({each.partial for each in (larger, *captured)}) == 3


def test_a_workspace_is_held_until_the_launch(monkeypatch):
    """Else what is allocated before that, in a graph's capture, may take its place."""
    held = []

    class Watched(emulation.Launcher):
        def __call__(self, *arguments):
            held.append(all(made() is not None for made in found))
            super().__call__(*arguments)

    found = []

    def workspace(*given):
        made = emulation.workspace(*given)
        found.append(weakref.ref(made.numbers))
        return made

    with emulation.emulated(monkeypatch), kullback.backend("cuda"), kullback.collecting_statistics():
        for module in (literal, logits):
            monkeypatch.setattr(module, "Launcher", Watched)
            monkeypatch.setattr(module, "workspace", workspace)
        x, y = torch.randn(2, 3, 40)
        kullback.divergence(x, y)
        found.clear()
        kullback.divergence(x.softmax(-1), y.softmax(-1), form="probs")
    assert held == [True, True]
