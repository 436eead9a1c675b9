"""KernelBench level 1, problem 98: its inputs, and a kernel for it as one standalone file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kullback.backends.arguments import table
from kullback.backends.cuda import literal, plan
from kullback.functional import kl_div

ROWS = VOCAB = 16384


class ModelNew(nn.Module):
    """`F.kl_div(torch.log(predictions), targets, reduction="batchmean")` of the problem, 0-d, with gradients.

    >>> import torch
    >>> from kullback.kernelbench import ModelNew
    >>> ModelNew()(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return kl_div(predictions, targets, "batchmean", form="probs")


def inputs(rows: int = ROWS, vocab: int = VOCAB, **options: object) -> tuple[Tensor, Tensor]:
    """Predictions and targets as the problem draws them: softmaxed uniform logits, the first scaled at random."""
    scale = torch.rand(())
    predictions = (torch.rand(rows, vocab, **options) * scale.item()).softmax(-1)  # type: ignore[call-overload]
    return predictions, torch.rand(rows, vocab, **options).softmax(-1)  # type: ignore[call-overload]


def standalone() -> str:
    """One Python file that needs torch and nvcc only: the row kernel of the problem, built by load_inline."""
    shape = plan.shape(plan.THREADS, True, torch.float32, torch.float32, 0)
    variant = literal.Variant(
        kind="kl",
        form="probs",
        target_form="probs",
        x=torch.float32,
        y=torch.float32,
        weight=torch.float64,
        loss=torch.float32,
        verb="loss",
        known=False,
        has_outputs=True,
        wants=(False, False),
    )
    arguments = table(literal.PARAMETERS)(
        x="x.data_ptr<float>()",
        y="y.data_ptr<float>()",
        d_input="nullptr",
        d_target="nullptr",
        row_weight="nullptr",
        known="nullptr",
        found="nullptr",
        loss="nullptr",
        total="result.data_ptr<float>()",
        partial="partial",
        ticket="(unsigned *)(partial + blocks)",
        rows="1",
        vocab="count",
        x_stride="count",
        y_stride="count",
        d_input_stride="0",
        d_target_stride="0",
        scale="1.0 / x.size(0)",
        parameter="0.0",
    )
    text = STANDALONE.replace("@KERNEL@", literal.source(variant, shape))
    return text.replace("@ARGUMENTS@", ",\n        ".join(arguments))


STANDALONE = '''\
"""KL divergence of KernelBench level 1, problem 98: each tensor is read once, in one launch.

Printed by `kullback export kernelbench`.
"""

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

cuda_source = r"""
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

@KERNEL@
torch::Tensor kl_div_forward_cuda(torch::Tensor predictions, torch::Tensor targets)
{
    TORCH_CHECK(predictions.is_cuda() && targets.device() == predictions.device(), "inputs must be on one CUDA device");
    TORCH_CHECK(predictions.scalar_type() == torch::kFloat32 && targets.scalar_type() == torch::kFloat32,
                "inputs must be float32");
    TORCH_CHECK(predictions.sizes() == targets.sizes() && predictions.dim() > 0, "inputs must have one shape");
    const c10::cuda::CUDAGuard guard(predictions.device());
    const auto x = predictions.contiguous(), y = targets.contiguous();
    int resident = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kullback::kullback_literal, THREADS, 0));
    const long long count = x.numel(), tile = (long long)THREADS * WIDTH * UNROLL;
    const long long full = (long long)resident * at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const long long blocks = std::max(1LL, std::min(full, (count + tile - 1) / tile));
    auto workspace = torch::zeros({blocks + 1}, x.options().dtype(torch::kFloat64));
    auto result = torch::empty({}, x.options());
    double *partial = workspace.data_ptr<double>();
    kullback::kullback_literal<<<blocks, THREADS, 0, at::cuda::getCurrentCUDAStream()>>>(
        @ARGUMENTS@);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return result;
}
"""

cpp_source = "torch::Tensor kl_div_forward_cuda(torch::Tensor predictions, torch::Tensor targets);"

kl_div = load_inline(
    name="kullback_kl_div",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["kl_div_forward_cuda"],
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        return kl_div.kl_div_forward_cuda(predictions, targets)
'''
