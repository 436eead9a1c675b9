"""Gradients as one differentiable expression in torch, nothing chunked: for double backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kullback.backends.pytorch.piece import log_sum_exp
from kullback.dtypes import accumulator
from kullback.forms import SIDES
from kullback.formula import TENSOR, Value
from kullback.labels import marks, shifted
from kullback.problem import Problem, capped, softcap_grad
from kullback.state import far_tilted_lse
from kullback.work import Operands


def _stopped_by_zero(operation: Callable[..., Value]) -> Callable[..., Value]:
    """The operation, no infinite derivative of which passes on an upstream gradient of 0.

    `torch.where` sends that to the branch that it did not take. A finite one does, for whoever differentiates again.
    """

    def run(*operands: Value) -> Value:
        shape = torch.broadcast_shapes(*(t.shape for t in operands if isinstance(t, Tensor)))
        views = [t.expand(shape) if isinstance(t, Tensor) and t.requires_grad else t for t in operands]
        result = operation(*views)
        if isinstance(result, Tensor) and result.requires_grad:
            upstream: dict[str, Tensor] = {}
            result.register_hook(lambda grad: upstream.update(grad=grad))
            for view in views:
                if isinstance(view, Tensor) and view.requires_grad:
                    view.register_hook(lambda grad: torch.where((upstream["grad"] == 0) & ~grad.isfinite(), 0.0, grad))
        return result

    return run


STOPPED_BY_ZERO = {name: _stopped_by_zero(operation) for name, operation in TENSOR.items()}


def gradient_by_formula(
    problem: Problem, operands: Operands, wants: tuple[bool, bool], skipped: Tensor | None
) -> tuple[Tensor, ...]:
    """The wanted gradients of Σ row_weight · loss as one differentiable expression, nothing chunked.

    Rows are [..., vocab]; the weight is the upstream gradient. For double backward. `skipped`: rows that are not read.
    One whose upstream gradient happens to be 0 is, if it has a softmax: what its gradient would be is a derivative too.
    """
    x, y, grad_out, labels = operands
    assert grad_out is not None
    wide = accumulator(x) if problem.has_logits else torch.float32
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), wide)
    rows = [problem.narrow(tensor).to(dtype) for tensor in (x, y)]
    if rows[0].size(-1):
        has_softmax = rows[0].detach().amax(-1).isfinite() & rows[1].detach().amax(-1).isfinite()
        without = (grad_out == 0) & ~has_softmax
        skipped = without if skipped is None else skipped | without
    if skipped is not None:
        rows = [torch.where(skipped.unsqueeze(-1), 1.0, row) for row in rows]  # 1 is harmless in every form
    values = {name: capped(row, side.softcap) for name, row, side in zip(SIDES, rows, problem.sides, strict=True)}
    variables: dict[str, Value] = {"x": values["input"], "y": values["target"], **problem.parameters}
    lse: dict[str, Tensor] = {}
    for name, side in zip(SIDES, problem.sides, strict=True):
        if side.form == "logits":
            scaled = values[name] / side.temperature
            top = scaled.detach().amax(-1, keepdim=True)
            sum_exp = torch.exp(scaled - top).sum(-1, keepdim=True)
            lse[name] = top + sum_exp.log()
            variables |= {
                f"{name}_inv_temperature": torch.full_like(top, 1 / side.temperature),
                f"{name}_max": top * side.temperature,
                f"{name}_inv_sum_exp": 1 / sum_exp,
                f"{name}_log_sum_exp": sum_exp.log(),
            }
    if problem.is_normalised:
        variables["log_z_diff_high"] = lse["target"] - lse["input"]
        variables["log_z_diff_low"] = torch.zeros_like(variables["log_z_diff_high"])
    tilted_lse = torch.zeros_like(grad_out, dtype=dtype)
    variables["tilted_lse"] = tilted_lse.unsqueeze(-1)
    if problem.formula.has_tilted_lse:
        log_tilted = problem.program("log_tilted").run(variables)["log_tilted"].detach()
        tilted_lse = far_tilted_lse(log_sum_exp(log_tilted))
        variables["tilted_lse"] = tilted_lse.unsqueeze(-1)
    sums = problem.program("term", "d_log_p", "d_log_q").run(variables, STOPPED_BY_ZERO)
    sum_q = sums["d_log_q"].sum(-1)
    variables["target_grad_sum"] = sums["d_log_p"].sum(-1, keepdim=True)
    total = {"total": sums["term"].sum(-1), "tilted_lse": tilted_lse}
    d_loss = problem.formula.finish.run({**total, **problem.parameters})["derivative"]
    if problem.has_auxiliary:
        sum_q, d_loss = shifted(problem, sum_q, torch.as_tensor(d_loss), lse["input"].squeeze(-1), labels)
    variables["input_grad_sum"] = sum_q.unsqueeze(-1)
    grad_out = grad_out.to(dtype)
    upstream = (grad_out * (d_loss * problem.weights.divergence)).unsqueeze(-1)
    names = [name for name, wanted in zip(SIDES, wants, strict=True) if wanted]
    results = problem.program(*names).run(variables, STOPPED_BY_ZERO)
    gradients = []
    for name, tensor, side in zip(SIDES, (x, y), problem.sides, strict=True):
        if name in results:
            inverse = 1 / side.temperature if side.form == "logits" else 1.0
            gradient = results[name] * upstream
            if name == "input" and problem.weights.label:
                tokens = gradient.size(-1)
                rest = marks(problem, labels, grad_out.expand(gradient.shape[:-1]), tokens, 0, tokens)
                gradient = gradient + rest.take_off(torch.zeros_like(gradient))
            gradient = gradient * inverse * softcap_grad(values[name], side.softcap)
            padding = tensor.size(-1) - gradient.size(-1)
            gradients.append(torch.nn.functional.pad(gradient, (0, padding)).to(tensor.dtype))
    return tuple(gradients)
