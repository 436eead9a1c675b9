"""Fused divergences between categorical distributions."""

from kullback.backends import backend, backend_info
from kullback.functional import divergence, kl_div
from kullback.modules import DivergenceLoss, KLDivLoss

__version__ = "0.1.0"

__all__ = [
    "DivergenceLoss",
    "KLDivLoss",
    "backend",
    "backend_info",
    "divergence",
    "kl_div",
]
