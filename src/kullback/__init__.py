"""Fused divergences between categorical distributions."""

from kullback.backends import backend, backend_info
from kullback.functional import divergence, kl_div, linear_divergence, topk_divergence
from kullback.modules import DivergenceLoss, KLDivLoss, LinearDivergenceLoss

__version__ = "0.1.0"

__all__ = [
    "DivergenceLoss",
    "KLDivLoss",
    "LinearDivergenceLoss",
    "backend",
    "backend_info",
    "divergence",
    "kl_div",
    "linear_divergence",
    "topk_divergence",
]
