"""Which backend computes: cuda, c or torch, chosen by the tensors; and the report of why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch

from kullback.backends import c, cuda, pytorch
from kullback.backends.build import BuildError
from kullback.notices import notice
from kullback.work import Labels, Rows, Scale, Work


class Backend(Protocol):
    """What a backend is: two functions of a module. What CUDA alone has is asked for by name, below."""

    def why_not(self, work: Work) -> str | None:
        """Why it cannot do the work, or None."""

    def run(self, work: Work) -> None:
        """Do it: whatever is wanted is written where the record says. BuildError, if raised, comes before that."""


BACKENDS: dict[str, Backend] = {"cuda": cuda, "c": c, "torch": pytorch}  # the first that can, does

_forced: ContextVar[str | None] = ContextVar("kullback backend", default=None)
_told: set[str] = set()  # failures that this process has been warned of


class BackendInfo(NamedTuple):
    """What the last eager call ran on.

    `name` is the backend of all its parts, or the names of several joined by "+". `parts` has each part's: "loss",
    "gradient", "statistics", "accumulate"; "describe" of `row_statistics`; "entries", "gather" and "scatter" of a
    top-k teacher. `refused` says why preferred backends did not run. Before any call `name` is "none". Calls that
    torch.compile has traced are not noted. Threads share it: the last call is the process's.
    """

    name: str
    parts: dict[str, str]
    refused: dict[str, str]


_parts: dict[str, str] = {}
_refused: dict[str, str] = {}


def begin() -> None:
    """A call of a public function begins: parts that are run from now on are its."""
    if not torch.compiler.is_compiling():
        _parts.clear()
        _refused.clear()


def backend_info() -> BackendInfo:
    """The backend of each part of the last call, its backward included, and why faster ones did not run.

    >>> import torch, kullback
    >>> x = torch.full((2, 4), 0.25)
    >>> with kullback.backend("torch"):
    ...     loss = kullback.divergence(x, x, form="probs")
    >>> kullback.backend_info()
    BackendInfo(name='torch', parts={'loss': 'torch'}, refused={})
    """
    return BackendInfo("+".join(dict.fromkeys(_parts.values())) or "none", dict(_parts), dict(_refused))


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force "cuda", "c" or "torch" for the calls inside and their backward.

    It holds for this thread, or task, alone. The backward of compiled code runs where it is called.

    Raises:
        ValueError: another name.
        RuntimeError: at a call that it cannot run, with the reason.

    >>> import torch, kullback
    >>> x = torch.full((2, 4), 0.25)
    >>> with kullback.backend("torch"):
    ...     kullback.divergence(x, x, form="probs")
    tensor(0.)
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The backend that this context forces."""
    return None if torch.compiler.is_compiling() else _forced.get()


def restored(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Force what was `forced()` in a forward, for its backward: autograd's threads have contexts of their own."""
    return contextlib.nullcontext() if name is None else backend(name)


def run(work: Work, only: str | None = None) -> None:
    """Do the work on the backend that is forced, here or in this context, or else on the first that can."""
    only = only or _forced.get()
    parts = work.split() if isinstance(work, Rows) else (work,)
    for part in parts:
        refused: dict[str, str] = {}
        for name, backend in BACKENDS.items() if only is None else ((only, BACKENDS[only]),):
            reason = backend.why_not(part)
            if reason is None:
                try:
                    backend.run(part)
                except BuildError as error:
                    reason = _failed(name, error, only is not None)
                else:
                    break
            refused[name] = reason
        else:
            raise RuntimeError(f"backend {only!r} was asked for and cannot run: {refused}")
        if isinstance(part, Labels | Scale):  # beside a part
            continue
        _parts[part.verb if isinstance(part, Rows) else type(part).__name__.lower()] = name
        if refused:
            _refused.update(refused)
    if len(parts) > 1 and isinstance(work, Rows):
        work.join(parts)


def asks_peers(work: Rows) -> bool:
    """Whether kernels have a loss of such rows together with other ranks' (`peers`). All ranks find the same."""
    return forced() in (None, "cuda") and cuda.asks_peers(work)


def has_labels_alone(rows: torch.Tensor) -> bool:
    """Whether kernels read such rows of logits once where they are compared with themselves, for their labels alone."""
    return forced() in (None, "cuda") and cuda.has_labels_alone(rows)


def why_not_with_peers(work: Rows) -> str | None:
    """Why this rank's part of such rows cannot take part, or None."""
    return cuda.why_not_with_peers(work)


def _failed(name: str, error: BuildError, is_forced: bool) -> str:
    """The reason; a failure that makes another backend run is told once."""
    reason = str(error)
    if not is_forced and reason not in _told:
        _told.add(reason)
        notice(
            f"kullback's backend {name!r} could not build a kernel; a slower one runs in its place: {reason}",
            RuntimeWarning,
        )
    return reason
