"""What is wrong with an option, said before the work whose results would be lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer


def one_of(option: str, value: str, known: Any) -> str:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)
    return value


def writable(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    reason = ""
    if path is None:
        return
    if path.is_dir():
        reason = f"{path} is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = f"{path} cannot be written"
    elif suffixes and path.suffix not in suffixes:
        reason = f"{path.name} does not end in {', '.join(suffixes)}"
    if reason:
        raise typer.BadParameter(reason, param_hint=option)
