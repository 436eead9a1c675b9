"""Bounds that tests share, by what makes them: an error above is a mistake and not a rounding."""

import torch

LOSS = 1e-5  # of a loss, relative: what docs/numerics.md promises down to a divergence of 1e-7
FLOAT_GRADIENT = 2e-6  # of float32 gradients: exponents are rounded by half a unit in 2⁻²⁴ of up to 30
FLOAT_SUM = 1e-6  # of float32 results whose order of summation differs
BF16_GRADIENT = 4e-3  # of bf16 gradients: half a unit in the last place of 8 bits is 2⁻⁹; masses are rounded too
BF16_CACHED = 6e-3  # where a mass is cached too: half a unit of that, and of the gradient
DOUBLE = 1e-9  # of float64 against float64, where sums cancel three digits


def gradient(dtype: torch.dtype) -> float:
    """Of gradients in that dtype, relative, by norm."""
    return {torch.float32: FLOAT_GRADIENT, torch.bfloat16: BF16_GRADIENT, torch.float16: 1e-3}[dtype]


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """‖ours - truth‖ / ‖truth‖; 0 where both are 0."""
    ours, truth = ours.detach().double().cpu(), truth.detach().double().cpu()
    difference = (ours - truth).norm()
    return 0.0 if difference == 0 else float(difference / truth.norm())


def share_misrounded(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Of a bfloat16 gradient's elements, but zeros, those that are off by more than a unit in the last place."""
    ulps = (ours.view(torch.int16).int() - truth.bfloat16().view(torch.int16).int()).abs()
    return float((ulps[ours != 0] > 1).double().mean())
