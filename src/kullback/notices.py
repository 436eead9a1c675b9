"""Warnings, told of the line that called this library."""

from __future__ import annotations

import sys
import warnings


def notice(message: str, category: type[Warning]) -> None:
    """Warn whoever called: past this library's modules, and what torch has around them."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("kullback", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
