"""Tabulate KL of float32 logits near p = q, ours and PyTorch's, against a centred sum in float64.

    python benchmarks/near.py --out benchmarks/results/cpu

Rows of 32768 logits: the teacher's are 3·N(0, 1), the student's the teacher's + eps·N(0, 1) + offset. Errors are the
worst relative error of a row, and a gradient's is of the whole tensor in the l2 norm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kullback
from kullback.cli import bench

ROWS, VOCAB = 16, 32768
CASES = (*((0.0, 10.0**-k) for k in range(6)), (1000.0, 1e-3), (1000.0, 1e-4))  # offset, eps


def truth(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row Σ p·(e^-r + r - 1), whose terms do not cancel; and the student's gradient of the rows' sum."""
    log_q, log_p = (t.double().log_softmax(-1) for t in (x, y))
    ratio = log_p - log_q
    return (log_p.exp() * (torch.expm1(-ratio) + ratio)).sum(-1), log_p.exp() * torch.expm1(-ratio)


def measure(offset: float, eps: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    y, noise = torch.randn(2, ROWS, VOCAB, generator=generator)
    y = 3 * y
    x = (y + eps * noise + offset).requires_grad_()
    values, gradient = truth(x.detach(), y)
    relative = lambda found, true: ((found.double() - true) / true).abs().max().item()
    losses = {
        "kullback": kullback.divergence(x, y, reduction="none"),
        "torch": F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="none").sum(-1),
    }
    result: dict[str, float] = {"offset": offset, "eps": eps, "kl": values.mean().item()}
    for name, loss in losses.items():
        (found,) = torch.autograd.grad(loss.sum(), x)
        result |= {
            f"{name}_value": relative(loss.detach(), values),
            f"{name}_gradient": ((found.double() - gradient).norm() / gradient.norm()).item(),
            f"{name}_negative": int((loss < 0).sum()),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for near.json")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with kullback.backend("c"):
        results = [measure(*case) for case in CASES]
    report = {"rows": ROWS, "vocab": VOCAB, "results": results, "provenance": bench.provenance("cpu")}
    (arguments.out / "near.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print({name: float(f"{value:.2g}") for name, value in result.items()})


if __name__ == "__main__":
    main()
