"""Tabulate how exact losses of logits are, against the textbook in float64; `!` marks what breaks a promise.

    python benchmarks/accuracy.py --out benchmarks/results/h200 [--device cpu] [--vocab 1000 32000] [--kinds kl]

"value" is the worst relative error of rows whose true value is 1e-7 at least, "tiny" of those down to 1e-9; "written"
the error of the student's gradient that a scalar loss writes in forward, "again" of the one that backward finds, in the
l2 norm; "ulp" the share of their elements more than a bfloat16 ulp off; "identical" what is left of equal logits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import kullback
from kullback.cli import bench, reference
from kullback.divergences import DIVERGENCES

ROWS = 16
VOCABS = (1000, 32000, 128256, 151936, 262144)
DTYPES = ("float32", "bfloat16")
EPSILONS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
STUDENTS = (
    *(("plain", offset, eps) for offset in (0.0, 2.5, 100.0) for eps in EPSILONS),
    *((teacher, 0.0, eps) for teacher in ("peaked", "one-hot") for eps in EPSILONS),
    *((teacher, 0.0, 0.0) for teacher in ("plain", "peaked", "one-hot")),
)
JUDGED, KNOWN = 1e-7, 1e-9  # the least values: below the second the textbook has too few digits itself
CASE = ("vocab", "dtype", "kind", "teacher", "offset", "eps")
COLUMNS = ("value", "tiny", "negative", "written", "again", "written ulp", "again ulp", "identical")


def limits(kind: str, dtype: str) -> dict[str, float]:
    """The most that a figure may be; what is not here is only recorded."""
    gradients = {"written": 2e-6, "again": 1e-6} if dtype == "float32" else {"written ulp": 1e-3, "again ulp": 1e-3}
    return {"value": 1e-5 if kind == "kl" else 2e-5, "negative": 0, "identical": 0, **gradients}


def inputs(vocab: int, dtype: str, device: str, teacher: str, offset: float, eps: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    y, noise = torch.randn(2, ROWS, vocab, device=device, generator=generator)
    y *= 30 if teacher == "peaked" else 3
    if teacher == "one-hot":
        rows = torch.arange(ROWS, device=device)
        y[rows, 61 * rows % vocab] = y.amax(-1) + 30
    return tuple(t.to(bench.DTYPES[dtype]) for t in (y + eps * noise + offset, y))


def truth(kind: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, the student's gradient, and what float64 leaves in doubt of each of its elements."""
    a, b = x.double().requires_grad_(), y.double()
    values = reference.rows(kind, "logits", a, b, **DIVERGENCES[kind].defaults)
    (gradient,) = torch.autograd.grad(values.sum(), a)
    # The textbook is off by roundings of logarithms, up to 300 here: by 1.4e-14 of the mass, found with 60 digits.
    # What is smaller than float32's normal numbers may be 0.
    doubt = 1e-13 * torch.maximum(a.detach().softmax(-1), b.softmax(-1)) + 4 * torch.finfo(torch.float32).tiny
    # A gradient's row sums to 0: of a mass near 1 the others tell more.
    top = b.argmax(-1, keepdim=True)
    for t, sign in ((gradient, -1), (doubt, 1)):
        t.scatter_(-1, top, 0.0).scatter_(-1, top, sign * t.sum(-1, keepdim=True))
    return values.detach(), gradient, doubt


def ulps(ours: Tensor, truth: Tensor) -> Tensor:
    """How many bfloat16 numbers apart."""
    bits = [t.bfloat16().view(torch.int16).int() for t in (ours, truth)]
    ours, truth = (torch.where(n < 0, -(1 << 15) - n, n) for n in bits)
    return (ours - truth).abs()


def measure(kind: str, x: Tensor, y: Tensor) -> dict[str, float]:
    a = x.clone().requires_grad_()
    losses = kullback.divergence(a, y, kind, reduction="none")
    (again,) = torch.autograd.grad(losses, a, torch.ones_like(losses))
    total = kullback.divergence(a, y, kind, reduction="sum")
    (written,) = torch.autograd.grad(total, a)
    figures: dict[str, float] = {"negative": int((losses < 0).sum() + (total < 0))}
    if torch.equal(x, y):
        left = losses, total, again, written
        return figures | {"identical": torch.stack([t.abs().max().float() for t in left]).max().item()}
    values, gradient, doubt = truth(kind, x, y)
    errors = (losses.detach() - values).abs() / values
    figures["least"] = values.min().item()
    for name, chosen in (("value", values >= JUDGED), ("tiny", (values >= KNOWN) & (values < JUDGED))):
        if chosen.any():
            figures[name] = errors[chosen].max().item()
    for name, ours in (("written", written), ("again", again)):
        wrong = ((ours - gradient).abs() - doubt).clamp_min(0.0)
        figures[name] = (wrong.norm() / gradient.norm().clamp_min(1e-300)).item()
        if x.dtype == torch.bfloat16:
            figures[f"{name} ulp"] = ((ulps(ours, gradient) > 1) & (wrong != 0)).double().mean().item()
    return figures


def told(results: list[dict], fields: tuple[str, ...]) -> list[str]:
    """What they have in common, and the worst of each figure."""
    first = results[0]
    limit, cells = limits(first["kind"], first["dtype"]), []
    for name in COLUMNS:
        figures = torch.tensor([r[name] for r in results if name in r])
        worst = figures.max().item() if len(figures) else 0.0  # NaN, where there is one
        cells.append(f"{worst:.2g}{'' if worst <= limit.get(name, math.inf) else '!'}" if len(figures) else "")
    return [" ".join(str(first[f]) for f in fields), *cells]


def show(results: list[dict]) -> None:
    line = lambda name, *cells: print(f"{name:46}", *(f"{cell:>12}" for cell in cells), sep="")
    line("worst of all students", *COLUMNS)
    for _, group in itertools.groupby(results, lambda r: [r[f] for f in CASE[:3]]):
        line(*told(list(group), CASE[:3]))
    broken = [cells for r in results if "!" in "".join(cells := told([r], CASE))]
    line(f"{len(broken)} of {len(results)} students break a promise")
    for cells in broken:
        line(*cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for accuracy.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABS)
    parser.add_argument("--kinds", nargs="+", choices=DIVERGENCES, default=("kl", "jensen_shannon"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = []
    cases = list(itertools.product(arguments.vocab, DTYPES, arguments.kinds, STUDENTS))
    for vocab, dtype, kind, student in track(cases, "", console=Console(stderr=True), transient=True):
        figures = measure(kind, *inputs(vocab, dtype, arguments.device, *student))
        case = dict(zip(CASE, (vocab, dtype, kind, *student), strict=True))
        results.append({**case, "ran_on": kullback.backend_info().name, **figures})
    report = {"results": results, "provenance": bench.provenance(arguments.device)}
    (arguments.out / "accuracy.json").write_text(json.dumps(report, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
