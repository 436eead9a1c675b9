"""NVIDIA Model Optimizer's KDTrainer, with its fused loss found here.

Of modelopt/torch/distill/plugins/huggingface.py at commit a2fbac7ba, and of LigerFusedLinearJSD, which it calls.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kullback import functional
from kullback.integrations.beta import kind_of
from kullback.problem import IGNORED


def liger_kd_loss(self: Any, outputs: Any, labels: Tensor, **kwargs: Any) -> Tensor:
    """`KDTrainer._liger_kd_loss`: from both models' hidden states, which stand where logits would.

    Put it in place by `KDTrainer._liger_kd_loss = liger_kd_loss`, and train with `use_liger_kernel`. Heads are gathered
    by the trainer, as for Liger's function: FSDP2 and ZeRO-3 need nothing else.

    Args:
        self: the trainer. Its `_liger_jsd_beta` is 0 for kl, 1 for reverse_kl, and between them Jensen-Shannon's. Its
            `_liger_temperature` divides both models' logits, without a factor T². Its `_last_teacher_outputs.logits`
            are the teacher's hidden states, `[batch, tokens, teacher's hidden]`.
        outputs: its `logits` are the student's hidden states, `[batch, tokens, hidden]`.
        labels: `[batch, tokens]`, int64; -100 where a token does not count. They are shifted by one here.
        **kwargs: what Trainer passes besides, which ModelOpt does not read either.

    Returns:
        0-d: the mean over the tokens that count, in nats; float32, or float64 of float64.

    Raises:
        TypeError, ValueError: of `kullback.linear_divergence`.

    The loss is that of `kullback.linear_divergence`. Heads' biases count, which Liger's function is not given, and
    logits of 16-bit heads are float32, which Liger rounds to 16 bits.

    >>> import kullback.integrations.modelopt
    >>> # KDTrainer._liger_kd_loss = kullback.integrations.modelopt.liger_kd_loss
    """
    student = self._get_lm_head(self.accelerator.unwrap_model(self.model))
    teacher = self._get_lm_head(self._get_unwrapped_teacher())
    hidden, target = outputs.logits[..., :-1, :], self._last_teacher_outputs.logits[..., :-1, :]
    self._last_teacher_outputs = None
    kind, parameter = kind_of(self._liger_jsd_beta)

    biases = [] if teacher.bias is None else [teacher.bias]

    def loss() -> Tensor:
        with self._ds_gather(biases):  # the trainer gathers the teacher's weight alone
            return functional.linear_divergence(
                hidden.to(student.weight.dtype),
                student.weight,
                target.to(teacher.weight.dtype),
                teacher.weight.detach(),
                kind,
                bias=student.bias,
                target_bias=None if teacher.bias is None else teacher.bias.detach(),
                temperature=self._liger_temperature,
                row_weight=labels[..., 1:] != IGNORED,
                **parameter,
            )

    gathered: Tensor = self._sharded_liger_compute(lambda: self._teacher_liger_enabled(loss, teacher))
    return gathered
