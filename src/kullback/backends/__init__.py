"""Which path computes: cuda, c or torch, chosen by the tensors; and the report of why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from kullback.backends import c, cuda
from kullback.backends import torch as torch_path
from kullback.backends.build import BuildError
from kullback.rows import Problem

PATHS = {"cuda": cuda, "c": c, "torch": torch_path}  # the first that can, does

# Of the process, not of a context: backward runs on threads of autograd's own.
_forced: str | None = None
_broken: dict[str, str] = {}  # paths that failed to build a kernel in this process, and how


class BackendInfo(NamedTuple):
    """What the last call ran on, and why not on the paths preferred to it."""

    name: str
    refused: dict[str, str]


_last: tuple[str, dict[str, str]] = ("none", {})


def backend_info() -> BackendInfo:
    """The path that the last loss or gradient took, and why each faster one did not.

    >>> import torch, kullback
    >>> x = torch.full((2, 4), 0.25)
    >>> with kullback.backend("torch"):
    ...     loss = kullback.divergence(x, x, form="probs")
    >>> kullback.backend_info()
    BackendInfo(name='torch', refused={})
    """
    return BackendInfo(*_last)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force "cuda", "c" or "torch" for the calls inside; one that cannot run raises RuntimeError.

    >>> import torch, kullback
    >>> x = torch.full((2, 4), 0.25)
    >>> with kullback.backend("torch"):
    ...     kullback.divergence(x, x, form="probs")
    tensor(0.)
    """
    if name not in PATHS:
        raise ValueError(f"backend must be one of {', '.join(PATHS)}; got {name!r}")
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor; a factor of 1 costs no pass over it, and none is read on the host but a CPU's own."""
    device = gradient.device
    if (
        device.type == "cuda"
        and _forced in (None, "cuda")
        and "cuda" not in _broken
        and not cuda.unavailable(device.index)
        and gradient.is_contiguous()
    ):
        cuda.scale_(gradient, factor)
    elif device.type != "cpu" or factor.item() != 1:
        gradient.mul_(factor)


def call(verb: str, problem: Problem, x: Tensor, y: Tensor, *arguments: Any) -> Any:
    """Run a verb on the path that is forced, or else the first that can."""
    global _last
    forced = _forced
    refused: dict[str, str] = {}
    for name in PATHS if forced is None else (forced,):
        reason = _broken.get(name) or PATHS[name].why_not(problem, x, y)
        if reason is None:
            try:
                result = getattr(PATHS[name], verb)(problem, x, y, *arguments)
            except BuildError as error:
                reason = _broken[name] = str(error)
            else:
                _last = name, refused
                return result
        refused[name] = reason
    raise RuntimeError(f"backend {forced!r} was asked for and cannot run: {refused}")
