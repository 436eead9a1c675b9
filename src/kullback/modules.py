"""nn.Module faces of the functions: options at construction, tensors at call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kullback import functional


class KLDivLoss(nn.Module):
    """Drop-in for :class:`torch.nn.KLDivLoss`; see :func:`kullback.kl_div`.

    >>> import torch, kullback
    >>> loss = kullback.KLDivLoss(reduction="batchmean", form="probs")
    >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False, *, form: str = "log_probs") -> None:
        super().__init__()
        self.reduction = reduction
        self.log_target = log_target
        self.form = form

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.kl_div(input, target, self.reduction, self.log_target, form=self.form)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, log_target={self.log_target}, form={self.form!r}"


class _WithOptions(nn.Module):
    """A loss of a kind, its options held."""

    def __init__(self, kind: str = "kl", **options: Any) -> None:
        super().__init__()
        self.kind = kind
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join([repr(self.kind), *(f"{name}={value!r}" for name, value in self.options.items())])


class DivergenceLoss(_WithOptions):
    """:func:`kullback.divergence` with its options held; `row_weight` and `normalizer` come with a call.

    >>> import torch, kullback
    >>> loss = kullback.DivergenceLoss("total_variation", form="probs")
    >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.5000)
    """

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        row_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Tensor:
        return functional.divergence(
            input, target, self.kind, row_weight=row_weight, normalizer=normalizer, **self.options
        )


class LinearDivergenceLoss(_WithOptions):
    """:func:`kullback.linear_divergence` with its options held; tensors come with a call.

    Heads come with a call too, so `weight` is the kind's parameter here.

    >>> import torch, kullback
    >>> loss = kullback.LinearDivergenceLoss("kl", temperature=2.0)
    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> loss(hidden, head, torch.tensor([[1.0]]), torch.tensor([[1.0], [1.0], [0.0]]))
    tensor(0.0934)
    """

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        target_weight: Tensor | None = None,
        **tensors: Any,
    ) -> Tensor:
        options = {"weight_" if name == "weight" else name: value for name, value in self.options.items()}
        return functional.linear_divergence(input, weight, target, target_weight, self.kind, **options, **tensors)
