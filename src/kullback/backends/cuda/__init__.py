"""The verbs as CUDA kernels, compiled by NVRTC at first use, cached as cubins, launched by cuda.core."""

from __future__ import annotations

import functools
import importlib.util

import torch

from kullback.backends.cuda import cross_entropy, describe, labels, literal, logits, scale, topk
from kullback.work import Describe, Gather, Labels, Rows, Scale, Scatter, Work

OLDEST = (7, 5)


def why_not(work: Work) -> str | None:
    """Why this backend cannot do the work, or None."""
    tensor = work.first_tensor
    if not tensor.is_cuda:
        return f"tensors are on {tensor.device.type}"
    return unavailable(tensor.get_device()) or why_not_here(work)


def asks_peers(work: Rows) -> bool:
    """Whether kernels have a loss of such rows together with other ranks' (`peers`). All ranks find the same."""
    problem, dtypes = work.problem, (work.input.dtype, work.target.dtype)
    has_logits = problem.input.form == problem.target.form == "logits"
    is_alone = not problem.has_auxiliary and work.figures is None
    return has_logits and is_alone and torch.float64 not in dtypes


def why_not_with_peers(work: Rows) -> str | None:
    """Why this rank's part of such rows cannot take part, or None."""
    return why_not(work) or logits.why_not_on_chip(work)


def has_labels_alone(rows: torch.Tensor) -> bool:
    """Whether kernels read such rows of logits once where they are compared with themselves, for their labels alone."""
    return rows.is_cuda and unavailable(rows.get_device()) is None and cross_entropy.has_place(rows)


def why_not_here(work: Work) -> str | None:
    """Why no kernel can do the work, or None, on a device that can run kernels."""
    if isinstance(work, Rows):
        return logits.why_not(work) if work.problem.has_logits else None
    if isinstance(work, Labels | Scale):
        return None
    return describe.why_not(work) if isinstance(work, Describe) else topk.why_not(work)


@functools.cache
def unavailable(index: int) -> str | None:
    """Why kernels cannot be made for this device, or None."""
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "the package cuda-core is not installed"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        return f"compute capability {capability} is older than {OLDEST}"
    return None


def run(work: Work) -> None:
    if isinstance(work, Rows):
        if work.has_nothing_to_read:
            work.write_nothing()
        elif not work.problem.has_logits:
            literal.run(work)
        else:
            (cross_entropy if cross_entropy.takes(work) else logits).run(work)
    elif isinstance(work, Scale):
        scale.run(work)
    elif isinstance(work, Gather):
        topk.gather(work)
    elif isinstance(work, Scatter):
        topk.scatter(work)
    elif isinstance(work, Describe):
        describe.run(work)
    elif isinstance(work, Labels):
        labels.run(work)
    else:
        topk.entries(work)
