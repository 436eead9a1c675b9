"""Every figure of rows of logits, from what losses find on their way; the rest is torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from kullback.divergences import DESCRIBED, DIVERGENCES
from kullback.dtypes import accumulator, compute_dtype
from kullback.problem import Problem, Side, capped
from kullback.work import Describe, Operands, Rows


def write(work: Describe, run: Callable[[Rows], None]) -> None:
    """`run` computes losses: of each direction of kl, which find what is said of one side, and of other kinds."""
    x, y = work.input, work.input if work.target is None else work.target
    swapped = _of_kind(work.problem, "kl", *reversed(work.problem.sides))
    found, kl = _losses(_of_kind(work.problem, "kl", *work.problem.sides), x, y, run)
    sides = [(work.problem.input, x)]
    if work.target is not None:
        of_target, reverse_kl = _losses(swapped, y, x, run)
        losses = {"kl": kl, "reverse_kl": reverse_kl}
        for kind in DESCRIBED:
            if kind not in losses:
                losses[kind] = _losses(_of_kind(work.problem, kind, *work.problem.sides), x, y, run)[1]
        found = torch.cat([found, of_target, *(losses[kind] for kind in DESCRIBED)])
        sides.append((work.problem.target, y))
    work.numbers.copy_(found)
    work.tokens.copy_(torch.stack([row for side, logits in sides for row in _tokens(side, logits, work.labels)]))


def _of_kind(problem: Problem, kind: str, input: Side, target: Side) -> Problem:
    return dataclasses.replace(problem, kind=kind, parameter=DIVERGENCES[kind].default, input=input, target=target)


def _losses(problem: Problem, x: Tensor, y: Tensor, run: Callable[[Rows], None]) -> tuple[Tensor, Tensor]:
    """[2, rows]: the input's log-sum-exps and entropies; and [1, rows], the divergences."""
    figures, loss = (x.new_zeros((count, x.size(0)), dtype=accumulator(x)) for count in (2, 1))
    run(Rows(problem, Operands(x, y), loss=loss[0], figures=figures))
    return figures, loss


def _tokens(side: Side, logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """A side's top token, and how many are above the label: by logits, since masses underflow."""
    values = capped(logits.to(compute_dtype(logits, logits)), side.softcap) if side.softcap else logits
    top = values.argmax(-1)
    if labels is None:
        return top, torch.zeros_like(top)
    own = values.gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return top, (values > own).sum(-1)
