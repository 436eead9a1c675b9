"""How the losses of rows become one number: what the kernels are to multiply by, and what is left to do after."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kullback.dtypes import accumulator
from kullback.tracing import PLAIN, in_forward_ad, in_functorch, is_symbolic


class Reduction(NamedTuple):
    """A reduction of rows, as two steps: kernels find `scale` · Σ `row_weight` · loss, or each row's; then `finish`."""

    row_weight: Tensor | None  # [rows] or 0-d; None: 1
    scale: float
    per_row: bool  # whether each row's loss is wanted, and not their sum
    dtype: torch.dtype
    outside: Tensor | None = None  # weights that want a gradient: rows are weighted in the open
    sums: bool = False  # whether rows, weighted in the open, are summed
    divisor: Tensor | float | None = None

    def of_rows(self, losses: Tensor) -> Tensor:
        """What kernels would have found, of the weighted losses of rows."""
        return (losses if self.per_row else losses.sum() * self.scale).to(self.dtype)

    def finish(self, loss: Tensor) -> Tensor:
        """What is wanted, of what the kernels found."""
        if self.outside is not None:
            loss = (loss * self.outside).to(self.dtype)
        if self.sums:
            loss = loss.sum()
        if self.divisor is not None:
            divisor = one_for_zero(self.divisor) if isinstance(self.divisor, Tensor) else self.divisor
            loss = (loss / divisor).to(self.dtype)
        return loss


def reduction_of(
    name: str,
    input: Tensor,
    row_weight: Tensor | None,
    normalizer: float | Tensor | None,
    dtype: torch.dtype,
) -> Reduction:
    """Of the input's rows, `input.shape[:-1]`."""
    if row_weight is None and normalizer is None and name == "mean" and not torch.compiler.is_compiling():
        try:
            return _mean(input.shape, dtype)
        except TypeError:  # sizes that are symbols cannot be hashed
            pass
    if row_weight is not None and _is_differentiated(row_weight):
        # A weight's gradient is its row's loss. Rows of weight 0 are still not read.
        divisor = None if name != "mean" else row_weight.sum() if normalizer is None else normalizer
        is_read = (row_weight.detach() != 0).to(row_weight.dtype)
        return Reduction(is_read, 1.0, True, dtype, row_weight, name != "none", divisor)
    if name == "none":
        return Reduction(row_weight, 1.0, True, dtype)
    if name == "sum":
        return Reduction(row_weight, 1.0, False, dtype)
    if isinstance(normalizer, Tensor):
        # Folded into the weights it costs no operation; of DTensors these lie as rows do, and a number does not.
        if _is_differentiated(normalizer) or (row_weight is None and type(input) not in PLAIN):
            return Reduction(row_weight, 1.0, False, dtype, divisor=normalizer)
        inverse = 1 / one_for_zero(normalizer.detach().to(input.device, accumulator(input)))
        return Reduction(inverse if row_weight is None else row_weight * inverse, 1.0, False, dtype)
    if normalizer is not None and is_symbolic(normalizer):
        return Reduction(row_weight, 1.0, False, dtype, divisor=normalizer)
    if normalizer is not None:
        return Reduction(row_weight, 1 / normalizer, False, dtype)
    if row_weight is not None:
        return Reduction(row_weight / one_for_zero(row_weight.sum()), 1.0, False, dtype)
    # Compiled: 1 / rows as a number would be compiled anew for each count.
    return Reduction(None, 1.0, False, dtype, divisor=max(math.prod(input.shape[:-1]), 1))


def _is_differentiated(tensor: Tensor) -> bool:
    return tensor.requires_grad or in_functorch() or in_forward_ad()


@functools.lru_cache(maxsize=1024)
def _mean(shape: torch.Size, dtype: torch.dtype) -> Reduction:
    """The usual one, of all rows alike."""
    return Reduction(None, 1 / max(math.prod(shape[:-1]), 1), False, dtype)


def one_for_zero(divisor: Tensor) -> Tensor:
    """The divisor, or 1 in the place of 0: with no weight at all the loss is 0, not NaN."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)
