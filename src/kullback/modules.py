"""nn.Module faces of the functions: options at construction, where they are checked; tensors at call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kullback import checks, functional
from kullback.choices import ElementwiseForm, ElementwiseReduction
from kullback.divergences import Kind


class KLDivLoss(nn.Module):
    """Drop-in for `torch.nn.KLDivLoss`: `kullback.kl_div` with its options kept. A call takes `input` and `target`.

    Args:
        reduction: as of `kullback.kl_div`, which says what a call takes, gives and raises.
        log_target: likewise.
        form: likewise.

    Raises:
        TypeError, ValueError: an unknown reduction or form; a `log_target` that is no bool.

    >>> import torch, kullback
    >>> loss = kullback.KLDivLoss(reduction="batchmean", form="probs")
    >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """

    def __init__(
        self,
        reduction: ElementwiseReduction | str = "mean",
        log_target: bool = False,
        *,
        form: ElementwiseForm | str = "log_probs",
    ) -> None:
        super().__init__()
        checks.check_name("reduction", reduction, functional.ELEMENTWISE_REDUCTIONS)
        checks.check_flag("log_target", log_target)
        checks.check_name("form", form, functional.ELEMENTWISE_FORMS)
        self.reduction = reduction
        self.log_target = log_target
        self.form = form

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.kl_div(input, target, self.reduction, self.log_target, form=self.form)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, log_target={self.log_target}, form={self.form!r}"


class _WithOptions(nn.Module):
    """A loss of a kind, its options kept."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind = kind
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join([repr(self.kind), *(f"{name}={value!r}" for name, value in self.options.items())])


class DivergenceLoss(_WithOptions):
    """`kullback.divergence` with its options kept.

    A call takes `input`, `target` and, by name, `labels`, `row_weight` and `normalizer`, and gives what that does.

    Args:
        kind: as of `kullback.divergence`.
        **options: its options and the kind's parameter, by name.

    Raises:
        TypeError, ValueError: of `kullback.divergence`, for options that are wrong whatever the tensors.

    >>> import torch, kullback
    >>> loss = kullback.DivergenceLoss("total_variation", form="probs")
    >>> loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.5000)
    """

    def __init__(self, kind: Kind | str = "kl", **options: Any) -> None:
        checks.check_options(kind, options, checks.DENSE_OPTIONS)
        super().__init__(kind, options)

    def forward(
        self,
        input: Tensor,
        target: Tensor | None,
        *,
        labels: Tensor | None = None,
        row_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Tensor:
        return functional.divergence(
            input,
            target,
            self.kind,
            labels=labels,
            row_weight=row_weight,
            normalizer=normalizer,
            **self.options,
        )


class LinearDivergenceLoss(_WithOptions):
    """`kullback.linear_divergence` with its options kept.

    A call takes `input`, `weight`, `target`, `target_weight` and, by name, `bias`, `target_bias`, `target_indices`,
    `labels`, `row_weight` and `normalizer`, and gives what that does.

    Args:
        kind: as of `kullback.divergence`.
        **options: options of `kullback.linear_divergence` that are no tensors, and the kind's parameter, by name.

    Raises:
        TypeError, ValueError: of `kullback.linear_divergence`, for options that are wrong whatever the tensors.

    >>> import torch, kullback
    >>> loss = kullback.LinearDivergenceLoss("kl", temperature=2.0)
    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> loss(hidden, head, torch.tensor([[1.0]]), torch.tensor([[1.0], [1.0], [0.0]]))
    tensor(0.0934)
    """

    def __init__(self, kind: Kind | str = "kl", **options: Any) -> None:
        checks.check_options(kind, options, checks.LINEAR_OPTIONS)
        super().__init__(kind, options)

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor | None,
        target_weight: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        target_bias: Tensor | None = None,
        target_indices: Tensor | None = None,
        labels: Tensor | None = None,
        row_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Tensor:
        return functional.linear_divergence(
            input,
            weight,
            target,
            target_weight,
            self.kind,
            bias=bias,
            target_bias=target_bias,
            target_indices=target_indices,
            labels=labels,
            row_weight=row_weight,
            normalizer=normalizer,
            **self.options,
        )
