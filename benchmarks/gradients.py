"""Gradients on rows of a language model: how far off float64 they are, beside eager PyTorch.

    python benchmarks/gradients.py --out benchmarks/results/cpu [--rows 256]

`make real` writes the rows. Of each student, dtype and kind: the relative error of the whole gradient, and of the row
that is furthest off, in the l2 norm; how many rows' losses are negative; and the worst of losses above 1e-3.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import kullback
from kullback.cli import bench, reference
from kullback.cli import rows as model_rows
from kullback.divergences import DIVERGENCES

STUDENTS, KINDS, DTYPES = (
    ("pruned", "bits5", "noise1"),
    ("kl", "jensen_shannon", "total_variation"),
    ("float32", "bfloat16"),
)


def gradient(loss, x, y):
    leaf = x.detach().clone().requires_grad_()
    loss(leaf, y).backward()
    return leaf.grad.double()


def measured(student, dtype, kind, rows, device):
    x, y = model_rows.load("real", student, rows, bench.DTYPES[dtype], device)
    options = DIVERGENCES[kind].defaults
    exact = gradient(lambda a, b: reference.rows(kind, "logits", a, b, **options).mean(), x.double(), y.double())
    losses = dict(bench.contestants(kind, "logits"))
    result = {"case": {"student": student, "dtype": dtype, "kind": kind, "rows": rows}}
    for name in ("kullback", "eager"):
        off = gradient(losses[name], x, y) - exact
        of_rows = off.norm(dim=-1) / exact.norm(dim=-1)
        result[name] = {"gradient_error": (off.norm() / exact.norm()).item(), "worst_row": of_rows.max().item()}
    truth = reference.truth(kind, "logits", x, y, **options)
    found = kullback.divergence(x, y, kind, reduction="none").double()
    result["negative"] = int((found < 0).sum())
    result["worst_loss"] = ((found - truth).abs() / truth)[truth > 1e-3].max().item()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gradients.json")
    parser.add_argument("--rows", type=int, default=256)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {"provenance": bench.provenance(device), "results": []}
    for dtype in DTYPES:
        for student in STUDENTS:
            for kind in KINDS:
                report["results"].append(measured(student, dtype, kind, arguments.rows, device))
                print(report["results"][-1], flush=True)
    (arguments.out / "gradients.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
