"""CUDA kernels on a CPU: their own source, compiled for it, run by fibers.

Slow, and the special functions are libm's: it tells whether a kernel is right, and nothing of its speed.
"""

import contextlib
import ctypes
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from kullback.backends import build, cuda
from kullback.backends.c import compile
from kullback.backends.cuda import logits, support
from kullback.backends.cuda.launch import text

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-march=native", "-fno-strict-aliasing", "-fpermissive", "-w", "-shared", "-fPIC")
UNARY = re.compile(r'asm\("([a-zA-Z0-9.]+) %0, ([^"]*);" : "=[fh]"\(([\w.]+)\) : (.*)\);')
OPERAND = re.compile(r'"[fh]"\(')
SHARED_VECTOR = re.compile(r'asm volatile\("ld\.shared\.v4.*?"r"\((.*?)\)\);', re.S)
HALVES = re.compile(
    r'asm\("cvt\.rn\.satfinite\.f16x2\.f32 %0, %1, %2;" : "=r"\((.*?)\) : "f"\((.*?)\), "f"\((.*?)\)\);'
)
TYPES = {"double": ctypes.c_double, "long long": ctypes.c_int64}


def on_cpu(source: str) -> str:
    """The CUDA file with its assembly spelled as calls."""

    def call(match):
        name = "ptx_" + match[1].replace(".", "_")
        operands = OPERAND.sub("(", match[4])
        return f"{match[3]} = {name}({operands});"

    source = source.replace(text("logits/cluster.cuh"), (HERE / "cluster.h").read_text())
    source = UNARY.sub(call, source)
    source = HALVES.sub(r"\1 = halves_of(\2, \3);", source)
    source = SHARED_VECTOR.sub(r"words[i] = *gpu::vector_at(\1);", source)
    source = re.sub(r'(asm|asm volatile)\("" : "\+f"\(x\)\);', r'\1("" : "+x"(x));', source)
    source = re.sub(r'asm volatile\("bar\.sync[^;]*;[^;]*;', WAIT, source)
    source = re.sub(
        r"extern __shared__ (?:__align__\(128\) )?([\w ]+) (\w+)\[\];",
        r"#define \2 ((\1 *)gpu::own().shared)",
        source,
    )
    source = source.replace(
        "__shared__ double results[GROUPS];",
        "static double results_of[gpu::MOST_BLOCKS][GROUPS];\n#define results results_of[gpu::rank]\n",
    )
    return "#pragma once\n" + (HERE / "gpu.h").read_text() + source


WAIT = "gpu::wait(gpu::own().named[team.group + 1], LANES);"


def library(source: str, name: str) -> ctypes.CDLL:
    """With `run(clusters, blocks of a cluster, threads of a block, *the kernel's arguments)`."""
    parameters = re.search(rf"\b{name}\(([^)]*)\)", source)[1].split(",")
    names = ", ".join(re.search(r"(\w+)\s*$", parameter)[1] for parameter in parameters)
    wrapper = (
        f'extern "C" int run(int clusters, int cluster, int threads, {", ".join(parameters)})\n'
        f"{{\n    return gpu::launch(clusters, cluster, threads, [=] {{ {name}({names}); }});\n}}\n"
    )
    text = on_cpu(source) + wrapper
    path = build.cached(compile.key(FLAGS, text), ".so", lambda: built(text))
    run = ctypes.CDLL(str(path)).run
    kinds = [ctypes.c_void_p if "*" in p else TYPES[p.rsplit(None, 1)[0].strip()] for p in parameters]
    run.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, *kinds]
    return run


def built(text: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        code, binary = Path(directory) / "kernel.cpp", Path(directory) / "kernel.so"
        code.write_text(text)
        done = subprocess.run(["g++", *FLAGS, str(code), "-o", str(binary)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return binary.read_bytes()


class Launcher:
    """In the place of launch.Launcher."""

    blocks = 3

    def __init__(self, text, name, index, threads=256, cluster=1, shared=0):
        self.run, self.cluster, self.threads = library(text, name), cluster, threads

    def __call__(self, blocks, *arguments):
        assert self.run(max(1, min(blocks, self.blocks)), self.cluster, self.threads, *arguments), "the kernel hangs"


def workspace(index, blocks):
    kept = torch.zeros(blocks + 1, dtype=torch.float64)
    workspace.kept.append(kept)
    return kept.data_ptr(), kept.data_ptr() + 8 * blocks


workspace.kept = []


@contextlib.contextmanager
def emulated(monkeypatch):
    """Inside, the CUDA path's verbs run on CPU tensors; rows stay off the chip, until `on_chip` is called."""
    caches = [cuda._launcher, cuda._scaler, logits._prepared, logits._launcher]
    caches += [support._launcher, support._entries_launcher]
    for module in (cuda, logits, support):
        monkeypatch.setattr(module, "Launcher", Launcher)
    for module in (cuda, logits):
        monkeypatch.setattr(module, "workspace", workspace)
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    monkeypatch.setattr(cuda, "why_not", lambda problem, x, y: logits.why_not(x, y) if problem.needs_norms else None)
    monkeypatch.setattr(logits, "_has_clusters", lambda index: False)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    workspace.kept.clear()


def on_chip(monkeypatch):
    """Rows of `emulated` tensors are on chip, where a cluster can hold them."""
    monkeypatch.setattr(logits, "_has_clusters", lambda index: True)
    logits._prepared.cache_clear()
