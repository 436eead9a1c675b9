"""Whether something watches a call: compilers, transforms, modes and subclasses want operators to follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

# Private, and so by name. Where one is missing every call counts as traced: slower, or refused, and never wrong.
_functorch_is_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_modes = getattr(torch._C, "_TorchDispatchModeKey", None)
_proxies = functools.partial(torch._C._get_dispatch_mode, _modes.PROXY) if _modes else lambda: None  # of make_fx
_jit_is_tracing = getattr(torch._C, "_is_tracing", lambda: True)
is_batched: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)  # by is_grads_batched
_tells_batched = hasattr(torch._C._functorch, "is_legacy_batchedtensor")
_is_wrapped: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False
)
_unwrapped: Callable[[Tensor], Tensor] = getattr(torch._C._functorch, "get_unwrapped", lambda tensor: tensor)
_Fake: Any = getattr(getattr(torch, "_subclasses", None), "FakeTensor", None)
_forward_ad = torch.autograd.forward_ad
Given = ParamSpec("Given")
Found = TypeVar("Found")
UNLIKELY = 0.72317  # a bound that no check of an option has: what a check found is known of a symbol
PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(*tensors: Tensor) -> bool:
    """Whether something traces, transforms or overrides the call: it wants pure operators and all of autograd."""
    if torch.compiler.is_compiling() or _jit_is_tracing() or _functorch_is_active() or _dispatch_modes():
        return True
    if in_forward_ad():  # autograd.Function refuses it, a bare operator would drop tangents
        return True
    for tensor in tensors:  # a generator would take as long as all of this
        if type(tensor) not in PLAIN or is_batched(tensor):
            return True
    return not _tells_batched


def distinct(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """These tensors; while a compiler traces, none of them twice, since a Function that it traces takes none so."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    found: list[Tensor | None] = []
    for tensor in tensors:
        is_repeated = tensor is not None and any(tensor is other for other in found)
        found.append(tensor.view_as(tensor) if tensor is not None and is_repeated else tensor)
    return found


def has_memory(tensor: Tensor) -> bool:
    """Whether a kernel may read it now, and its result is what it will be: nothing stands in for it, or records."""
    records = _jit_is_tracing() or _functorch_is_active() or _proxies() is not None
    return type(tensor) in PLAIN and not (records or is_batched(tensor))


def untraced(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, left to Python by compilers: their graph ends before it, and another begins behind."""

    @functools.wraps(function)
    def call(*arguments: Given.args, **options: Given.kwargs) -> Found:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)  # type: ignore[no-any-return]
        return function(*arguments, **options)

    return call


def is_fake(tensor: Tensor) -> bool:
    """Whether it has a shape and no numbers."""
    return isinstance(tensor, _Fake) if _Fake else type(tensor) not in PLAIN


def is_symbolic(number: float) -> bool:
    """Whether a compiler knows the number as a symbol: then it cannot say on which side of anything it lies."""
    if not torch.compiler.is_compiling():
        return False
    # A module that compilers have imported, and that takes long to import.
    is_known = torch.fx.experimental.symbolic_shapes.statically_known_true
    return not (is_known(number > UNLIKELY) or is_known(number <= UNLIKELY))


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is open: then a tensor may have a tangent and not require a gradient."""
    return getattr(_forward_ad, "_current_level", 0) >= 0


def in_functorch() -> bool:
    """Whether a transform of torch.func is active: then `requires_grad` says nothing of an outer level's."""
    return bool(_functorch_is_active())


def untransformed(tensor: Tensor) -> Tensor | None:
    """The tensor that transforms of torch.func have wrapped, of vmap with all problems; None where it has no values."""
    if torch.compiler.is_compiling() or _jit_is_tracing() or _dispatch_modes() or _proxies() is not None:
        return None
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor if type(tensor) in PLAIN else None
