"""(source, target, flags) -> cached binary: one cache for cubins and shared objects, which trusts nobody else.

What it holds is run as the user's own code. So a folder or an entry that is not the user's, or that others may write,
is not read: SECURITY.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from kullback.backends.build import BuildError
from kullback.notices import notice

DIGEST_BYTES = 32
LOCK_SECONDS = 180.0  # for another process's compilation; then this one compiles for itself
MOST_BYTES = 512 << 20
MOST_SECONDS = 90 * 86400  # since an entry was last used
A_DAY = 86400  # how exactly the last use is known

logger = logging.getLogger(__name__)


def directory() -> Path:
    """`$XDG_CACHE_HOME/kullback`, or `~/.cache/kullback`; this process's own where there is no home.

    A relative XDG_CACHE_HOME is ignored, as the specification of it says.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return _private_directory()
    return Path(base) / "kullback"


def cached(key: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """The file that holds `build()`, made at most once for a key by all processes together.

    The file ends in the SHA-256 of what precedes it (loaders of shared objects and cubins do not mind): a torn or
    damaged entry is a miss. It appears by an atomic rename. Where the folder cannot be used, or another process does
    not finish, the file is in a folder of this process. BuildError where there is none either.
    """
    name = hashlib.sha256(key.encode()).hexdigest() + suffix
    folder = directory()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (reason := _why_not_trusted(folder)) is not None:
            _tell(f"the cache {folder} is not read: {reason}")
        else:
            path = folder / name
            if not is_intact(path):
                with filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS, mode=0o600):
                    if not is_intact(path):
                        _write(path, _built(build))
                        prune()
            return path
    except filelock.Timeout:
        _tell(f"another process has held a lock in {folder} for {LOCK_SECONDS:.0f} seconds: its kernel is built anew")
    except OSError:  # read-only, full, no folder
        pass
    try:
        path = _private_directory() / name
        if not is_intact(path):
            _write(path, _built(build))
        return path
    except OSError as error:
        raise BuildError(f"there is no folder to build a kernel in: {error}") from error


def read(path: Path) -> bytes:
    """A cached file's contents."""
    try:
        return path.read_bytes()[:-DIGEST_BYTES]
    except OSError as error:
        raise BuildError(f"a compiled kernel could not be read: {error}") from error


def is_intact(path: Path) -> bool:
    """Whether an entry is whole, and nobody else's."""
    try:
        if _why_not_trusted(path) is not None:
            return False
        data = path.read_bytes()
        if time.time() - path.stat().st_mtime > A_DAY:
            with contextlib.suppress(OSError):
                os.utime(path)
    except OSError:
        return False
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


class Entry(NamedTuple):
    path: Path
    size: int
    last_use: float


def entries() -> Iterator[Entry]:
    """What the cache holds, locks and what was left of killed processes included."""
    with contextlib.suppress(OSError):
        for path in directory().iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield Entry(path, status.st_size, status.st_mtime)


def prune(most_bytes: int = MOST_BYTES, most_seconds: float = MOST_SECONDS) -> int:
    """Remove what was not used for long, and of the rest what was not for longest, down to a size. How many went."""
    kept, removed = 0, 0
    for entry in sorted(entries(), key=lambda entry: -entry.last_use):
        kept += entry.size
        if kept > most_bytes or time.time() - entry.last_use > most_seconds:
            with contextlib.suppress(OSError):
                entry.path.unlink()
                removed += 1
    return removed


def clear() -> int:
    """Remove all. How many files went."""
    return prune(most_bytes=-1)


def _why_not_trusted(path: Path) -> str | None:
    """Why what lies there may be another's, or None. Links are not followed."""
    if not hasattr(os, "getuid"):
        return None
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


@functools.cache
def _tell(what: str) -> None:
    """Once for each folder and reason."""
    notice(f"kullback: {what}; a folder of this process is used", RuntimeWarning)


_private: list[Path] = []


def _private_directory() -> Path:
    """This process's own folder, where the cache cannot be used; made again where it was cleaned away."""
    if not _private or not _private[-1].is_dir():
        _private.append(Path(tempfile.mkdtemp(prefix="kullback-")))
        atexit.register(_remove, _private[-1], os.getpid())
    return _private[-1]


def _remove(folder: Path, process: int) -> None:
    """At exit; a forked child leaves its parent's folder alone."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _built(build: Callable[[], bytes]) -> bytes:
    """What it builds, which may take seconds: who listens is told."""
    logger.info("compiling a kernel")
    begin = time.monotonic()
    data = build()
    logger.info("compiled in %.1f s", time.monotonic() - begin)
    return data


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data + hashlib.sha256(data).digest())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
