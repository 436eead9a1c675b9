"""Fused divergences between categorical distributions."""

from kullback.backends import backend, backend_info
from kullback.functional import (
    divergence,
    kl_div,
    linear_divergence,
    linear_row_statistics,
    row_statistics,
    topk_divergence,
)
from kullback.modules import DivergenceLoss, KLDivLoss, LinearDivergenceLoss
from kullback.parallel import checking_ranks
from kullback.statistics import RowStatistics

__version__ = "0.1.0"

__all__ = [
    "DivergenceLoss",
    "KLDivLoss",
    "LinearDivergenceLoss",
    "RowStatistics",
    "backend",
    "backend_info",
    "checking_ranks",
    "divergence",
    "kl_div",
    "linear_divergence",
    "linear_row_statistics",
    "row_statistics",
    "topk_divergence",
]
