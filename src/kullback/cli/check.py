"""The truth table and a random grid on this machine, every backend against float64."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import kullback
from kullback.cli import reference
from kullback.divergences import DIVERGENCES

INF, NAN = math.inf, math.nan

# p, q, their term of kl, and whether the input's and the target's gradients are finite
TRUTH_TABLE = [
    (0.5, 0.25, 0.5 * math.log(2), True, True),
    (0.0, 0.5, 0.0, True, True),
    (0.0, 0.0, 0.0, True, True),
    (0.5, 0.0, INF, False, False),
    (-0.1, 0.5, NAN, True, False),
    (NAN, 0.5, NAN, False, False),
    (0.5, NAN, NAN, False, False),
    (1e-42, 1e-42, 0.0, True, True),
    (0.5, 1e-42, 0.5 * (math.log(0.5) - math.log(1e-42)), False, True),
]

SHAPES = [(7, 1), (5, 33), (3, 1271), (2, 50257)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Relative error allowed of a sum of rows, by input dtype: the loss of 16-bit inputs is float32.
VALUE_BUDGET = {torch.float64: 1e-11}
GRADIENT_BUDGET = {
    torch.float64: 1e-11,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-10,
}


class Outcome(NamedTuple):
    """Of one backend and group of checks."""

    backend: str
    group: str
    checks: int
    worst: float
    failures: list[str]


def available() -> list[str]:
    """The backends that run here."""
    found = ["torch"]
    probe = torch.full((1, 2), 0.5)
    for name, tensor in (("c", probe), ("cuda", probe.cuda() if torch.cuda.is_available() else probe)):
        try:
            with kullback.backend(name):
                kullback.divergence(tensor, tensor, form="probs")
        except RuntimeError:
            continue
        found.append(name)
    return found


def run(backends: list[str], progress: Callable[[str], None]) -> Iterator[Outcome]:
    """Their outcomes, each one's of the truth table and of each kind of divergence."""
    for name in backends:
        # On a GPU logits of float64 run in torch: there nothing is forced.
        with contextlib.nullcontext() if name == "cuda" else kullback.backend(name):
            device = "cuda" if name == "cuda" else "cpu"
            progress(f"{name}: truth table")
            yield _truth_table(name, device)
            for kind in DIVERGENCES:
                progress(f"{name}: {kind}")
                yield _grid(name, kind, device)


def steps(backends: list[str]) -> int:
    return len(backends) * (1 + len(DIVERGENCES))


def _truth_table(backend: str, device: str) -> Outcome:
    failures = []
    for (p, q, expected, finite_input, finite_target), vocab in itertools.product(TRUTH_TABLE, (1, 40)):
        x, y = (torch.full((1, vocab), 0.25, device=device) for _ in range(2))
        x[0, -1], y[0, -1] = q, p
        x.requires_grad_()
        y.requires_grad_()
        loss = kullback.divergence(x, y, form="probs", reduction="sum")
        gradients = torch.autograd.grad(loss, (x, y))
        value = loss.item()
        right = value == expected or (math.isnan(value) and math.isnan(expected))
        right = right or math.isclose(value, expected, rel_tol=1e-3)
        finite = [bool(torch.isfinite(g).all()) for g in gradients]
        if not right or finite != [finite_input, finite_target]:
            failures.append(f"p = {p}, q = {q}: {value} for {expected}, finite gradients {finite}")
    return Outcome(backend, "truth table", 2 * len(TRUTH_TABLE), 0.0, failures)


def _grid(backend: str, kind: str, device: str) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    failures, worst, checks = [], 0.0, 0
    parameters = DIVERGENCES[kind].defaults
    for form, dtype, shape in itertools.product(("probs", "log_probs", "logits"), DTYPES, SHAPES):
        logits = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        if form != "logits":
            logits = logits.softmax(-1) if form == "probs" else logits.log_softmax(-1)
        x, y = (t.to(device, dtype).requires_grad_() for t in logits)
        loss = kullback.divergence(x, y, kind, form=form, reduction="sum")
        ours = (loss, *torch.autograd.grad(loss, (x, y)))
        a, b = (t.detach().double().requires_grad_() for t in (x, y))
        truth = reference.rows(kind, form, a, b, **parameters).sum()
        expected = (truth, *torch.autograd.grad(truth, (a, b)))
        for index, (result, right) in enumerate(zip(ours, expected, strict=True)):
            budget = GRADIENT_BUDGET[dtype] if index else VALUE_BUDGET.get(dtype, 2e-6)
            # A vocabulary of one has nothing but rounding to show.
            error = _relative(result, right, floor=1e-3 if shape[1] == 1 else 0.0)
            checks += 1
            worst = max(worst, error / budget)
            if not error <= budget:
                name = ("value", "input's gradient", "target's gradient")[index]
                failures.append(f"{form} {str(dtype)[6:]} {list(shape)}: {name} off by {error:.1e}")
    return Outcome(backend, kind, checks, worst, failures)


def _relative(ours: Tensor, truth: Tensor, floor: float) -> float:
    """‖ours - truth‖ / ‖truth‖ over what the dtype can hold, beyond the rounding of its subnormal numbers."""
    ours, truth, limits = ours.detach(), truth.detach(), torch.finfo(ours.dtype)
    held = truth.abs() <= limits.max
    if not torch.isinf(ours[~held]).all():
        return math.inf
    difference = torch.where(held, ours.double() - truth, 0.0).abs() - limits.smallest_normal * limits.eps
    size = torch.where(held, truth, 0.0).norm().item()
    error = difference.clamp_min(0).norm().item()
    return 0.0 if error == 0 else error / max(size, floor)
