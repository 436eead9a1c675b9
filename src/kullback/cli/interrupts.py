"""Interrupts that come where they would do harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt that comes inside is raised behind it."""
    came: list[int] = []
    try:
        with _told_to(lambda _: came.append(signal.SIGINT)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """The first interrupt that comes inside is dropped. A second one is as ever."""
    with _told_to(lambda former: signal.signal(signal.SIGINT, former)):
        yield


@contextmanager
def _told_to(hear: Callable[[Any], object]) -> Iterator[None]:
    """A function hears of interrupts inside, and is given their former handler: in the main thread, if there is one."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: hear(former))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
