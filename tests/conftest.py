"""What all tests share: seeds, and each backend in turn."""

import contextlib
import zlib
from collections import defaultdict

import pytest
import torch

import kullback
from kullback.backends import build
from kullback.backends.c import compile
from tests import emulation
from tests.kinds import FEW, GPU


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A kernel for each kind, or each case that is emulated, is minutes' work of a compiler together."""
    emulated = defaultdict(list)
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.get_closest_marker("few_kinds") and given["backend"] in ("c", "emulated") and given["kind"] not in FEW:
            item.add_marker(pytest.mark.full)
        elif given.get("backend") == "emulated" and not item.get_closest_marker("full"):
            emulated[item.function].append(item)
    for cases in emulated.values():  # a quarter of each test's, whatever the order of its parameters
        cases.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in cases[(len(cases) + 3) // 4 :]:
            item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def seeded():
    """The same samples whatever ran before, and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def kernels_build():
    """A kernel that does not build makes a slower backend run: for users, never in a test."""
    yield
    assert not build.failures


@pytest.fixture(params=["torch", "c", GPU])
def backend(request):
    """Each backend in turn, forced; `device` is where its tensors lie. "emulated", for those who ask: CUDA's on a CPU.

    On a GPU nothing is forced, since float64 logits run in torch there: tests/test_pytorch.py holds that nothing else
    does.
    """
    if request.param == "emulated":
        with emulation.emulated(request.getfixturevalue("monkeypatch")), kullback.backend("cuda"):
            yield request.param
        return
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.fail("the gpu suite needs a CUDA device")
        yield request.param
        return
    if request.param == "c":
        compile.compiler()
    with kullback.backend(request.param):
        yield request.param


@pytest.fixture
def fake_compiler(tmp_path):
    """Makes a shell script of these lines, and gives its path."""

    def make(lines):
        path = tmp_path / "cc"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def device(backend):
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


@contextlib.contextmanager
def no_synchronisation():
    """Inside, a host that waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step):
    """A CUDA graph of a step, and what it gives whenever that is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found
