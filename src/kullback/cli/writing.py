"""Files that are written whole or not at all, and whether they can be; devices and streams as they come."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor


class NotWrittenError(OSError):
    """A file could not be written."""


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors inside are of what could not be written there."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"{path} could not be written: {error}") from error


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file, which others may read as they may any file: safetensors itself lets its owner alone."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Written under another name, so that a broken write leaves nothing under this one."""
    temporary = beside(path)
    with _named(path):
        try:
            write(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def put(path: Path, write: Callable[[Path], Any]) -> None:
    """As `replace`, of what a link leads to; written in place where a folder takes no new file, and into devices."""
    number = descriptor(path)
    if number is not None:
        with _named(path):
            _copy_to(number, write)
        return
    if is_replaced(path):
        try:
            replace(path.resolve(), write)
        except NotWrittenError as error:
            # Of another's file in a folder such as /tmp
            if not (isinstance(error.__cause__, PermissionError) and path.exists()):
                raise
        else:
            return
    with _named(path):
        write(path)


def put_text(path: Path, text: str) -> None:
    """In UTF-8, with a question mark for what is no character, as a path's bytes may be."""
    put(path, lambda place: place.write_text(text, encoding="utf-8", errors="replace"))


def as_json(found: Any) -> str:
    """JSON has no infinity and no NaN: they become "inf" and null."""
    return json.dumps(_plain(found), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(of) for of in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def is_replaced(path: Path) -> bool:
    """Whether a file there is exchanged for another."""
    return not path.exists() or (path.is_file() and os.access(path.resolve().parent, os.W_OK))


STREAM = re.compile(r"/dev/(?:fd/(\d+)|(stdout)|(stderr))|/proc/(?:self|\d+)/fd/(\d+)")


def descriptor(path: Path) -> int | None:
    """Of a stream of this process that a path, or a link to it, leads to."""
    for _ in range(LINKS):
        found = STREAM.fullmatch(str(path.absolute()))
        if found is not None:
            number, out, err, other = found.groups()
            return 1 if out else 2 if err else int(number or other)
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return None


LINKS = 40  # that are followed, as a kernel does


def _copy_to(number: int, write: Callable[[Path], Any]) -> None:
    """Behind what the stream has had: a file that it goes to is not begun anew."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "output"
        write(whole)
        if sys.stdout is not None:
            sys.stdout.flush()
        with os.fdopen(os.dup(number), "wb") as stream, whole.open("rb") as found:
            shutil.copyfileobj(found, stream)


def beside(path: Path) -> Path:
    """A short name in the same folder that nobody else has, however long the path's own is."""
    return path.with_name(f".kullback.{secrets.token_hex(8)}")


def why_not(path: Path) -> str:
    """Why a file cannot be written there, or nothing. It is tried."""
    try:
        if path.is_dir():
            return f"{path} is a folder"
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if path.exists():
            return "" if os.access(path, os.W_OK) else f"{path} cannot be written"
        for name in (path, beside(path)):
            name.touch()
            name.unlink(missing_ok=True)  # another rank's trial may have gone first
    except (OSError, ValueError) as error:  # of a name that is too long or has a null in it
        return f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""
