"""Fused divergences between categorical distributions."""

from kullback.backends import backend, backend_info
from kullback.collecting import LossStatistics, collecting_statistics
from kullback.collectives import checking_ranks
from kullback.functional import (
    divergence,
    kl_div,
    linear_divergence,
    linear_row_statistics,
    row_statistics,
    topk_divergence,
    topk_row_statistics,
)
from kullback.modules import DivergenceLoss, KLDivLoss, LinearDivergenceLoss
from kullback.statistics import RowStatistics, TopKRowStatistics
from kullback.symmetric import enable_symmetric_memory

__version__ = "0.1.0"

__all__ = [
    "DivergenceLoss",
    "KLDivLoss",
    "LinearDivergenceLoss",
    "LossStatistics",
    "RowStatistics",
    "TopKRowStatistics",
    "backend",
    "backend_info",
    "checking_ranks",
    "collecting_statistics",
    "divergence",
    "enable_symmetric_memory",
    "kl_div",
    "linear_divergence",
    "linear_row_statistics",
    "row_statistics",
    "topk_divergence",
    "topk_row_statistics",
]
