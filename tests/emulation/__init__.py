"""CUDA kernels on a CPU: their own source, of which cuda/ptx.cuh here takes one file's place, run by fibers.

Slow, and the special functions are libm's: it tells whether a kernel is right, and nothing of its speed.
"""

import atexit
import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from kullback.backends import cache, cuda
from kullback.backends.build import BuildError
from kullback.backends.c import compile
from kullback.backends.cuda import (
    cross_entropy,
    describe,
    device,
    labels,
    launch,
    literal,
    logits,
    plan,
    scale,
    source,
    topk,
)

HERE = Path(__file__).parent
# Without -fno-gnu-unique libraries share what inline functions have as shared memory, of whatever size.
SHARED = ("-fno-gnu-unique", "-shared", "-fPIC")
# A fortified longjmp would take another fiber's stack for one that has been left.
FLAGS = (
    "-std=c++17",
    "-O0",  # compiling takes longer than running
    "-U_FORTIFY_SOURCE",
    "-march=native",
    "-fno-strict-aliasing",
    "-fpermissive",
    "-w",
    *SHARED,
)
HEADERS = re.findall(r"#include <.*>", (HERE / "gpu.h").read_text())
KINDS = {"double": ctypes.c_double, "long long": ctypes.c_int64}
MODULES = cross_entropy, describe, labels, literal, logits, scale, topk


def inlined(name, printed):
    """`source.inlined`, but for what stands here."""
    return source.inlined(name, printed, (HERE, source.ROOT))


def library(text: str, name: str) -> ctypes.CDLL:
    """With `run(clusters, blocks of a cluster, threads of a block, *the kernel's arguments)`."""
    parameters = re.search(rf"\b{name}\(([^)]*)\)", text)[1].split(",")
    names = ", ".join(re.search(r"(\w+)\s*$", parameter)[1] for parameter in parameters)
    text += (
        f'extern "C" int run(int clusters, int cluster, int threads, {", ".join(parameters)})\n'
        f"{{\n    return gpu::launch(clusters, cluster, threads, [=] {{ {name}({names}); }});\n}}\n"
    )
    path = cache.cached(compile.key(FLAGS, text), ".so", lambda: built(text, "-include", str(headers())))
    run = ctypes.CDLL(str(path)).run
    kinds = [ctypes.c_void_p if "*" in p else KINDS[p.rsplit(None, 1)[0].strip()] for p in parameters]
    run.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, *kinds]
    return run


def built(text: str, *more: str) -> bytes:
    """Of CUDA a shared object; `more` flags tell of another file."""
    with tempfile.TemporaryDirectory() as directory:
        code, binary = Path(directory) / "kernel.cpp", Path(directory) / "kernel.so"
        code.write_text(text)
        done = subprocess.run(["g++", *FLAGS, *more, str(code), "-o", str(binary)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(done.stderr[-4000:])
        return binary.read_bytes()


@functools.cache
def headers() -> Path:
    """HEADERS in a file, with what the compiler made of them beside it: a third of a small kernel's time."""
    folder = Path(tempfile.mkdtemp(prefix="kullback-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, text = folder / "headers.h", "\n".join(HEADERS)
    path.write_text(text)
    path.with_suffix(".h.gch").write_bytes(built(text, "-x", "c++-header"))
    return path


class Launcher:
    """In the place of launch.Launcher."""

    blocks = 3

    def __init__(self, text, name, index, threads=256, cluster=1, shared=0):
        self.run, self.cluster, self.threads = library(f"{text}using namespace kullback;\n", name), cluster, threads

    def __call__(self, blocks, *arguments):
        assert self.run(max(1, min(blocks, self.blocks)), self.cluster, self.threads, *arguments), "the kernel hangs"


def workspace(index, blocks):
    return launch.new_workspace(blocks, torch.device("cpu"))


@contextlib.contextmanager
def emulated(monkeypatch):
    """Inside, the CUDA backend works on CPU tensors; rows stay off the chip, until `on_chip` is called."""
    caches = [value for module in MODULES for value in vars(module).values() if hasattr(value, "cache_clear")]
    for module in MODULES:
        monkeypatch.setattr(module, "Launcher", Launcher)
        monkeypatch.setattr(module, "inlined", inlined)
    for module in (cross_entropy, literal, logits):
        monkeypatch.setattr(module, "workspace", workspace)
    monkeypatch.setattr(cuda, "why_not", cuda.why_not_here)
    monkeypatch.setattr(cuda, "has_labels_alone", cross_entropy.has_place)
    monkeypatch.setattr(device, "chip", lambda index: plan.NO_CHIP)
    monkeypatch.setattr(device, "admitted", lambda index, chip: chip)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def on_chip(monkeypatch, chip=plan.HOPPER):
    """Rows of `emulated` tensors are on chip, where a cluster of blocks with so much memory can hold them."""
    monkeypatch.setattr(device, "chip", lambda index: chip)
    logits._prepared.cache_clear()
