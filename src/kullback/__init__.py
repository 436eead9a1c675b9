"""Fused divergences between categorical distributions."""

from kullback.backends import backend, backend_info
from kullback.functional import divergence, kl_div, linear_divergence, topk_divergence
from kullback.modules import DivergenceLoss, KLDivLoss, LinearDivergenceLoss
from kullback.parallel import checking_ranks

__version__ = "0.1.0"

__all__ = [
    "DivergenceLoss",
    "KLDivLoss",
    "LinearDivergenceLoss",
    "backend",
    "backend_info",
    "checking_ranks",
    "divergence",
    "kl_div",
    "linear_divergence",
    "topk_divergence",
]
