"""C source -> shared object -> a loaded library; and what every source begins with."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kullback.backends import cache
from kullback.backends.arguments import Table, struct_fields, structure, table
from kullback.backends.build import BuildError, remember_failures
from kullback.backends.printer import print_macros

HERE = Path(__file__).parent
# Partial redundancy elimination turns selections into jumps, and a loop with jumps is not vectorised. Newer compilers
# refuse functions that are not declared.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-tree-pre",
    "-Werror=implicit-function-declaration",
    "-shared",
    "-fPIC",
]


COMPILE_SECONDS = 300.0  # the slowest kernel takes a few
PROBE_SECONDS = 30.0
NO_COMPILER = "no C compiler found (looked for $CC, cc, gcc, clang)"


class CompilerTimeoutError(BuildError):
    """A compiler that did not finish: it is not asked again with other flags."""


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
    """What a source that this command compiles for this processor is cached by."""
    return repr((command, processor(), source))


@functools.cache
def compiler_name() -> str | None:
    """What is asked to compile, whether it can or not; None where there is nothing to ask."""
    return os.environ.get("CC", "").strip() or next(filter(shutil.which, ("cc", "gcc", "clang")), None)


@functools.cache
@remember_failures
def compiler() -> tuple[str, ...]:
    """The compiler and its flags, tried on a small kernel. Raises BuildError."""
    name = compiler_name()
    if name is None:
        raise BuildError(NO_COMPILER)
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
            cache.cached(key(command, probe), ".so", functools.partial(_compile, command, probe, PROBE_SECONDS))
        except CompilerTimeoutError:
            raise
        except BuildError as problem:
            error = str(problem)
            continue
        return command
    raise BuildError(error)


def _compile(command: tuple[str, ...], source: str, seconds: float = COMPILE_SECONDS) -> bytes:
    """The shared object. OSError where there is no folder to work in, which other backends need not care for."""
    with tempfile.TemporaryDirectory(prefix="kullback-") as directory:
        code, binary, errors = (Path(directory) / name for name in ("rows.c", "rows.so", "errors"))
        code.write_text(source, encoding="utf-8")
        with errors.open("wb") as output:  # a file: of a pipe, what a compiler started may hold the other end
            try:
                process = subprocess.Popen(
                    [*command, str(code), "-o", str(binary), "-lm"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"{command[0]} could not be run: {error}") from error
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise CompilerTimeoutError(f"{command[0]} did not finish in {seconds:.0f} seconds") from None
            finally:
                if process.poll() is None:  # too slow, or interrupted
                    _kill(process)
        # Without the folder, so that all kernels fail alike where the compiler is to blame.
        said = errors.read_text(encoding="utf-8", errors="replace").replace(f"{directory}{os.sep}", "")[-2000:]
        if status or not binary.exists():
            raise BuildError(f"{' '.join(command)} failed: {said or f'status {status}, and no output'}")
        return binary.read_bytes()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def library() -> str:
    """The formula's operations and the element types in C; wants REAL_IS_DOUBLE."""
    shared = HERE.parent
    files = (
        HERE / "math.h",
        shared / "logarithm.h",
        HERE / "elementary.h",
        shared / "numerics.h",
        HERE / "types.h",
        HERE / "memory.h",
    )
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def softmaxes(input: bool, target: bool, *files: str) -> str:
    """What rows of logits are normalised by; and the files `side.h` and these of each side that has logits."""
    parts = [(HERE / "softmax.h").read_text(encoding="utf-8")]
    for name, letter, is_used in (("input", "X", input), ("target", "Y", target)):
        macros = {
            "SIDE(name)": f"{name}_##name",
            "T": letter,
            "LOAD": f"LOAD_{letter}",
            "LOADS": f"LOADS_{letter}",
            "COUNTED(x)": f"COUNTED_{letter}(x)",
            "IS_CAPPED": f"{name.upper()}_IS_CAPPED",
        }
        if is_used:
            parts.append(print_macros(macros))
            parts += ((HERE / file).read_text(encoding="utf-8") for file in ("side.h", *files))
            parts.append("".join(f"#undef {macro.partition('(')[0]}\n" for macro in macros))
    return "\n".join(parts)


def arguments_of(source: str) -> tuple[Table, type[ctypes.Structure]]:
    """What a call of a C file's kernels passes by name, and the struct that is made of it."""
    fields = struct_fields(source, "Arguments")
    return table(fields), structure(fields)


def function(source: str, name: str, arguments: type[ctypes.Structure]) -> Callable[[ctypes.Structure], None]:
    """A function of that source, which takes a pointer to such arguments; compiled where the cache lacks it."""
    command = compiler()
    make = functools.partial(cache.cached, key(command, source), ".so", lambda: _compile(command, source))
    path = make()
    try:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError:  # of a compiler that was broken then
            path.unlink(missing_ok=True)
            loaded = ctypes.CDLL(str(make()))
        found = getattr(loaded, name)
    except (OSError, AttributeError) as error:  # in a folder that may not execute, or still broken
        raise BuildError(f"a compiled kernel could not be loaded: {str(error).replace(str(path), 'it')}") from error
    found.argtypes = [ctypes.POINTER(arguments)]  # a structure is passed by reference
    found.restype = None
    return found  # type: ignore[no-any-return]
