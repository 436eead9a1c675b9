"""The command `kullback`, which is also `python -m kullback`."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    missing = [name for name in ("typer", "rich") if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(f"the command line needs {', '.join(missing)}: pip install 'kullback[cli]'")
    from kullback.cli.commands import app

    app()
