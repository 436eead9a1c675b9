"""(source, target, flags) -> cached binary: one cache for cubins and shared objects."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from filelock import FileLock

DIGEST_BYTES = 32


class BuildError(RuntimeError):
    """A kernel could not be compiled; the message holds what the compiler said."""


P = ParamSpec("P")
R = TypeVar("R")
failures: dict[tuple[object, ...], str] = {}  # kernels that could not be built in this process, and why


def remember_failures(make: Callable[P, R]) -> Callable[P, R]:
    """A kernel that could not be built is not tried again: the same arguments raise the same BuildError at once."""

    @functools.wraps(make)
    def attempt(*arguments: P.args, **named: P.kwargs) -> R:
        key = make.__module__, make.__qualname__, arguments
        if key in failures:
            raise BuildError(failures[key])
        try:
            return make(*arguments, **named)
        except BuildError as error:
            failures[key] = str(error)
            raise

    return attempt


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/kullback`, or `~/.cache/kullback`; this process's own where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            base = _private_directory().name
    return Path(base) / "kullback"


@functools.cache
def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """This process's own directory, where the cache cannot be written."""
    return tempfile.TemporaryDirectory(prefix="kullback-")


def cached(key: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """The file that holds `build()`, made at most once for a key by all processes together.

    The file ends in the SHA-256 of what precedes it (loaders of shared objects and cubins do not
    mind): a torn or damaged entry is a miss. It appears by an atomic rename.
    """
    name = hashlib.sha256(key.encode()).hexdigest() + suffix
    path = cache_directory() / name
    if is_intact(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not is_intact(path):
                _write(path, build())
        return path
    except OSError:  # a cache that cannot be written: read-only, full, or not ours
        path = Path(_private_directory().name) / name
        if not is_intact(path):
            _write(path, build())
        return path


def read(path: Path) -> bytes:
    """A cached file's contents."""
    return path.read_bytes()[:-DIGEST_BYTES]


def is_intact(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data + hashlib.sha256(data).digest())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
