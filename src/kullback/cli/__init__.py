"""The command `kullback`, which is also `python -m kullback`."""

from __future__ import annotations

import errno
import importlib.util
import io
import logging
import os
import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    missing = [name for name in ("typer", "rich") if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(
            f"the command line needs {', '.join(missing)}: pip install 'kullback[cli]', "
            "or in a clone pip install '.[cli]'"
        )
    # torch.compile imports it, and it warns of a CUDA toolkit without a device: no matter for what runs on a CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what its encoding lacks is a question mark
    if os.environ.get("COLUMNS") == "0":  # of no terminal; rich would take it for a width
        del os.environ["COLUMNS"]
    from kullback.cli.commands import app
    from kullback.cli.options import USAGE

    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered would fail again
        print(f"Error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(USAGE)
