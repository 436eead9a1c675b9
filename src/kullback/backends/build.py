"""Kernels that could not be compiled: one error, remembered for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar


class BuildError(RuntimeError):
    """A kernel could not be compiled; the message holds what the compiler said."""


P = ParamSpec("P")
R = TypeVar("R")
failures: dict[tuple[object, ...], str] = {}  # kernels that could not be built in this process, and why


def remember_failures(make: Callable[P, R]) -> Callable[P, R]:
    """A kernel that could not be built is not tried again: the same arguments raise the same BuildError at once."""

    @functools.wraps(make)
    def attempt(*arguments: P.args, **named: P.kwargs) -> R:
        key = make.__module__, make.__qualname__, arguments, *named.items()
        if key in failures:
            raise BuildError(failures[key])
        try:
            return make(*arguments, **named)
        except BuildError as error:
            failures[key] = str(error)
            raise

    return attempt
