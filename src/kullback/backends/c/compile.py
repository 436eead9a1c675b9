"""C source -> shared object -> a loaded library; and what every source begins with."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kullback.backends import build
from kullback.backends.arguments import Table, struct_fields, structure, table
from kullback.backends.build import BuildError

HERE = Path(__file__).parent
# Partial redundancy elimination turns selections into jumps, and a loop with jumps is not vectorised.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-tree-pre",
    "-shared",
    "-fPIC",
]


@functools.cache
def processor() -> str:
    """What -march=native means here: a cache may be seen by machines that differ."""
    told = platform.processor()
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        fields = ("model name", "flags", "CPU part", "Features")
        told = "".join(line for line in first.splitlines() if line.startswith(fields))
    return f"{platform.machine()} {told}"


def key(command: tuple[str, ...], source: str) -> str:
    """Of the cache."""
    return repr((command, processor(), source))


@functools.cache
def compiler() -> tuple[str, ...]:
    """The compiler and its flags, tried on a small kernel. Raises BuildError."""
    name = os.environ.get("CC", "").strip() or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if name is None:
        raise BuildError("no C compiler found (looked for $CC, cc, gcc, clang)")
    binary = shutil.which(name.split()[0])
    # Part of every cache key, since it is part of the command: another compiler compiles anew.
    version = f"-DCOMPILER_VERSION={os.stat(binary).st_mtime_ns}" if binary else "-DCOMPILER_VERSION=0"
    native = "-march=native"
    vectors = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    error = ""
    probe = "int probe(void) { return 0; }\n"
    for extra in (["-fopenmp", native, *vectors], ["-fopenmp", native], ["-fopenmp"], ["-fopenmp-simd"], []):
        command = (*name.split(), *FLAGS, version, *extra)
        try:
            build.cached(key(command, probe), ".so", functools.partial(_compile, command, probe))
        except BuildError as problem:
            error = str(problem)
            continue
        return command
    raise BuildError(error)


def _compile(command: tuple[str, ...], source: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kullback-") as directory:
        code, binary = Path(directory) / "rows.c", Path(directory) / "rows.so"
        code.write_text(source, encoding="utf-8")
        try:
            done = subprocess.run(
                [*command, str(code), "-o", str(binary), "-lm"],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise BuildError(f"{command[0]} could not be run: {error}") from error
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        return binary.read_bytes()


def library() -> str:
    """The formula's operations and the element types in C; wants REAL_IS_DOUBLE."""
    shared = HERE.parent
    files = (
        HERE / "math.h",
        shared / "logarithm.h",
        HERE / "elementary.h",
        shared / "numerics.h",
        HERE / "types.h",
    )
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def arguments_of(source: str) -> tuple[Table, type[ctypes.Structure]]:
    """What a call of a C file's kernels passes by name, and the struct that is made of it."""
    fields = struct_fields(source, "Arguments")
    return table(fields), structure(fields)


def function(source: str, name: str, arguments: type[ctypes.Structure]) -> Callable[[ctypes.Structure], None]:
    """A function of that source, which takes a pointer to such arguments; compiled where the cache lacks it."""
    command = compiler()
    path = build.cached(key(command, source), ".so", lambda: _compile(command, source))
    try:
        found = getattr(ctypes.CDLL(str(path)), name)
    except (OSError, AttributeError) as error:  # for another machine, or in a folder that may not execute
        raise BuildError(f"a compiled kernel could not be loaded: {error}") from error
    found.argtypes = [ctypes.POINTER(arguments)]  # a structure is passed by reference
    found.restype = None
    return found  # type: ignore[no-any-return]
