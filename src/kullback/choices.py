"""What options may be, for editors to complete. Functions take `Form | str`: a name from a configuration is a str."""

from __future__ import annotations

from typing import Literal, TypeAlias

Form: TypeAlias = Literal["probs", "log_probs", "logits"]
Reduction: TypeAlias = Literal["none", "mean", "sum"]
Tail: TypeAlias = Literal["bucket", "renormalize", "zero", "support"]
# Of kl_div, as torch has them
ElementwiseForm: TypeAlias = Literal["log_probs", "probs"]
ElementwiseReduction: TypeAlias = Literal["none", "mean", "sum", "batchmean"]
