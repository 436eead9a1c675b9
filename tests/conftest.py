"""Samples and paths that all tests share."""

import contextlib

import pytest
import torch

import kullback
from kullback import backends
from kullback.backends import c
from tests import emulation


@pytest.fixture(autouse=True)
def seeded():
    """The same samples whatever ran before, and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def kernels_build():
    """A kernel that does not build makes a slower path take over: for users, never in a test."""
    yield
    assert not backends._broken


def _paths():
    yield pytest.param("torch", id="torch")
    yield pytest.param("c", id="c")
    yield pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=list(_paths()))
def path(request):
    """Each path in turn, forced; `device` is where its tensors lie. "emulated", for those who ask: CUDA's on a CPU.

    On a GPU nothing is forced, since float64 logits take the torch path there: tests/test_pytorch.py holds that
    nothing else does.
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
        c.compiler()
    with kullback.backend(request.param):
        yield request.param


@pytest.fixture
def device(path):
    return "cuda" if path == "cuda" else "cpu"


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


def sample(form, shape, generator, dtype=torch.float32, scale=2.0):
    """A random row of that form: normalised probabilities, their logarithms, or logits."""
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    if form == "logits":
        return logits.to(dtype)
    return (logits.softmax(-1) if form == "probs" else logits.log_softmax(-1)).to(dtype)


def relative_error(ours, truth):
    """‖ours - truth‖ / ‖truth‖; 0 where both are 0."""
    ours, truth = ours.detach().double().cpu(), truth.detach().double().cpu()
    difference = (ours - truth).norm()
    return 0.0 if difference == 0 else (difference / truth.norm()).item()
