"""What is wrong with an option, said before the work whose results would be lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import typer


def one_of(option: str, value: str, known: Any) -> str:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)
    return value


def writable(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    if path is None:
        return
    reason = _why_not(path)
    if not reason and suffixes and path.suffix not in suffixes:
        reason = f"{path.name} does not end in {', '.join(suffixes)}"
    if reason:
        raise typer.BadParameter(reason, param_hint=option)


def _why_not(path: Path) -> str:
    try:
        if path.is_dir():
            return f"{path} is a folder"
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if path.exists():
            return "" if os.access(path, os.W_OK) else f"{path} cannot be written"
        path.touch()
        path.unlink()
    except (OSError, ValueError) as error:  # of a name that is too long or has a null in it
        return f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""


def writable_folder(option: str, path: Path) -> None:
    """One that may have to be made, with the folders that it lies in."""
    try:
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise typer.BadParameter(f"{there} is a file", param_hint=option)
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{path} cannot be written: {reason}", param_hint=option) from error
