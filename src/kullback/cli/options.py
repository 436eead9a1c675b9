"""What is wrong with an option, said before the work whose results would be lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from kullback.cli import writing

USAGE = 2  # the exit status


def not_written(option: str, error: OSError) -> None:
    typer.echo(f"Error: {option}: {error}", err=True)


def one_of(option: str, value: str, known: Any) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)


def device_of(asked: str) -> torch.device:
    """The best there is, unless one is asked for; of ranks, each its own."""
    has = torch.cuda.is_available()
    name = asked or ("cuda" if has else "cpu")
    one_of("--device", name, ("cuda", "cpu"))
    if name == "cuda" and not has:
        raise typer.BadParameter("this machine has no CUDA device", param_hint="--device")
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0"))) if name == "cuda" else torch.device(name)


def is_written(option: str, path: Path, write: Callable[[Path], None]) -> bool:
    """A failure is told, and costs none of the other outputs."""
    try:
        write(path)
    except OSError as error:
        not_written(option, error)
        return False
    return True


def writable(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    if path is None:
        return
    reason = writing.why_not(path)
    if not reason and suffixes and path.suffix not in suffixes:
        reason = f"{path.name} does not end in {', '.join(suffixes)}"
    if reason:
        raise typer.BadParameter(reason, param_hint=option)


def kept_apart(outputs: Sequence[Path | None], is_read: Callable[[Path], bool]) -> None:
    """Refuses an output that is an input, or is named twice. `is_read`: whether a resolved path is an input's."""
    written = [path.resolve() for path in outputs if path is not None]
    for path in written:
        is_input = is_read(path)
        if is_input or written.count(path) > 1:
            use = "is read too" if is_input else "is named for two outputs"
            raise typer.BadParameter(f"{path} {use}: it would be written over", param_hint="an output")


def writable_folder(option: str, path: Path) -> None:
    """One that may have to be made, with the folders that it lies in."""
    try:
        if path.is_symlink() and not path.exists():
            raise typer.BadParameter(f"{path} is a link to {path.readlink()}, which is not there", param_hint=option)
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise typer.BadParameter(f"{there} is a file", param_hint=option)
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{path} cannot be written: {reason}", param_hint=option) from error
