"""Tabulate errors of logits by regime, beside the textbook's in the same dtype, against mpmath with 300 bits.

    python benchmarks/regimes.py --out benchmarks/results/cpu --backend c torch

Of each regime the worst relative error of a value, and of a gradient in the l2 norm, over rows and kinds; and what the
textbook does better.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import mpmath
import torch
from mpmath import mpf
from rich.console import Console
from rich.progress import track
from torch import Tensor

import kullback
from kullback.cli import bench, reference
from kullback.divergences import DIVERGENCES

ROWS, VOCAB = 3, 200
LIMIT, TIMES = 4e-6, 3.0
LEAST_GRADIENT = 1e-5  # in the l2 norm: smaller ones are roundings of masses in float32, the textbook's too
FIGURES = ("value", "student's gradient", "teacher's gradient")
mpmath.mp.prec = 300


def partials(kind: str, p: mpf, q: mpf, a: float) -> tuple[mpf, mpf, mpf]:
    """The textbook's term and its derivatives in log p and log q; of alpha and renyi those of Σ p^a q^(1-a)."""
    if p == 0 and q == 0:
        return mpf(0), mpf(0), mpf(0)
    b = 1 - mpf(a)
    m = a * p + b * q
    over = lambda x, y: x * mpmath.log(x / y) if x else mpf(0)
    match kind:
        case "kl":
            return over(p, q), over(p, q) + p, -p
        case "reverse_kl":
            return over(q, p), -q, over(q, p) + q
        case "jeffreys":
            return over(p, q) + over(q, p), over(p, q) + p - q, over(q, p) + q - p
        case "mixed_kl":
            return a * over(p, q) + b * over(q, p), a * (over(p, q) + p) - b * q, b * (over(q, p) + q) - a * p
        case "jensen_shannon":
            return a * over(p, m) + b * over(q, m), a * over(p, m), b * over(q, m)
        case "skew_kl":
            return over(p, m), over(p, m) + p - a * p * p / m, -b * p * q / m
        case "total_variation":
            return abs(p - q) / 2, mpmath.sign(p - q) * p / 2, -mpmath.sign(p - q) * q / 2
        case "hellinger":
            root = mpmath.sqrt(p * q)
            return (p + q) / 2 - root, (p - root) / 2, (q - root) / 2
        case "chi2":
            return (p - q) ** 2 / q, 2 * p * (p - q) / q, q - p * p / q
    both = mpmath.exp(a * mpmath.log(p) + b * mpmath.log(q)) if p and q else mpf(0)
    return both, a * both, b * both


def softmax(logits: list[float]) -> list[mpf]:
    top = max(logits)
    masses = [mpmath.exp(mpf(x) - mpf(top)) if math.isfinite(x) else mpf(0) for x in logits]
    total = sum(masses)
    return [mass / total for mass in masses]


def truth(kind: str, x: list[float], y: list[float]) -> tuple[mpf, list[mpf], list[mpf]]:
    """The value, and the gradients in the student's and in the teacher's logits."""
    a = next(iter(DIVERGENCES[kind].defaults.values()), 0.0)
    p, q = softmax(y), softmax(x)
    terms, d_log_p, d_log_q = zip(*(partials(kind, *masses, a) for masses in zip(p, q, strict=True)), strict=True)
    value, factor = sum(terms), mpf(1)
    if kind in ("alpha", "renyi"):
        factor = -1 / (mpf(a) * (1 - mpf(a))) if kind == "alpha" else 1 / (value * (mpf(a) - 1))
        value = (1 - value) * -factor if kind == "alpha" else mpmath.log(value) / (mpf(a) - 1)
    of_logits = lambda partial, mass: [
        factor * (g - m * total) for total in [sum(partial)] for g, m in zip(partial, mass, strict=True)
    ]
    return value, of_logits(d_log_q, q), of_logits(d_log_p, p)


def near(eps: float, offset: float = 0.0) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda y, noise: (3 * y + eps * noise + offset, 3 * y)


def sure(less: float, student: float, same: bool = True) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """One token has all but `less` of the teacher's row, and all but `student` of the student's."""

    def rows(y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = y + 0.1 * noise
        for t, rest, token in ((y, less, 7), (x, student, 7 if same else 9)):
            others = torch.cat([t[:, :token], t[:, token + 1 :]], -1).double().logsumexp(-1)
            t[:, token] = (others + math.log((1 - rest) / rest)).float()
        return x, y

    return rows


def masked(value: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def rows(y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = 3 * y + noise
        for t in (x, y):
            t[:, 4:] = value
        return x, y

    return rows


def zipf(y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    tail = -1.1 * torch.arange(1, y.size(-1) + 1).log()
    return 2 * tail + noise, 2 * tail + y


REGIMES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "far, of Zipf's tails": zipf,
    **{f"near, 1e-{n}": near(10.0**-n) for n in range(1, 7)},
    "near, 1e-2, offset 1e4": near(1e-2, 1e4),
    **{f"sure of one token but for {less:.0e}": sure(less, less) for less in (1e-3, 1e-7, 1e-12)},
    "the student half as sure": sure(1e-3, 2e-3),
    "sure of another token but for 1e-3": sure(1e-3, 1e-3, same=False),
    "sure of another token but for 1e-7": sure(1e-7, 1e-7, same=False),
    "a sure teacher, a flat student": sure(1e-7, 0.99),
    "98 % masked, -inf": masked(-math.inf),
    "98 % masked, -1e4": masked(-1e4),
    "masked by the lowest number": masked(torch.finfo(torch.float32).min),
}


def relative(ours: Tensor, exact: list[mpf], norm: mpf) -> float:
    wrong = mpmath.sqrt(sum((mpf(g) - e) ** 2 for g, e in zip(ours.double().tolist(), exact, strict=True)))
    return float(wrong / norm) if all(map(math.isfinite, ours.tolist())) else math.inf


def losses_and_gradients(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, y)]
    losses = run(*leaves)
    return [losses.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(losses.sum(), leaves))]


def measure(regime: str, kind: str, backends: list[str]) -> list[dict]:
    """One figure for each of the backends, the textbook and the three columns; None where nothing is to be judged."""
    y, noise = torch.randn(2, ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    x, y = REGIMES[regime](y, noise)
    exact = [truth(kind, *row) for row in zip(x.tolist(), y.tolist(), strict=True)]
    parameters = DIVERGENCES[kind].defaults
    textbook = lambda a, b: reference.rows(kind, "logits", a, b, **parameters)
    found = {"textbook": losses_and_gradients(textbook, x, y)}
    for name in backends:
        device = "cuda" if name == "cuda" else "cpu"
        with kullback.backend(name):
            run = lambda a, b: kullback.divergence(a, b, kind, reduction="none", **parameters)
            found[name] = losses_and_gradients(run, x.to(device), y.to(device))
    results = []
    for name, (values, *gradients) in found.items():
        judged = [(float(v), row) for v, (row, *_) in zip(values.tolist(), exact, strict=True) if row > 1e-12]
        figures = [max((float(abs(mpf(v) - e) / e) if math.isfinite(v) else math.inf for v, e in judged), default=None)]
        for ours, side in zip(gradients, (1, 2), strict=True):
            errors = []
            for mine, row in zip(ours, exact, strict=True):
                norm = mpmath.sqrt(sum(g * g for g in row[side]))
                if norm > LEAST_GRADIENT:
                    errors.append(relative(mine, row[side], norm))
            figures.append(max(errors, default=None))
        results.append({"regime": regime, "kind": kind, "of": name, **dict(zip(FIGURES, figures, strict=True))})
    return results


def worst(results: list[dict], figure: str, regime: str, of: str) -> str:
    errors = [r[figure] for r in results if (r["regime"], r["of"]) == (regime, of) and r[figure] is not None]
    return f"{max(errors):.0e}" if errors else ""


def behind(results: list[dict]) -> list[str]:
    """What is above the limit and more than 3 times the textbook's error."""
    plain = {
        (r["regime"], r["kind"], figure): r[figure] for r in results if r["of"] == "textbook" for figure in FIGURES
    }
    found: dict[tuple[str, str, str], list[str]] = {}
    for r in results:
        for figure in FIGURES:
            theirs = plain[r["regime"], r["kind"], figure]
            if r[figure] is not None and r[figure] > max(LIMIT, TIMES * theirs):
                case = r["kind"], figure, r["regime"]
                found.setdefault(case, []).append(f"{r['of']} {r[figure]:.0e} (textbook {theirs:.0e})")
    return [f"- {kind}, {figure}, {regime}: {', '.join(errors)}" for (kind, figure, regime), errors in found.items()]


def tables(results: list[dict]) -> str:
    """Markdown: of each figure a table of every regime's worst kind, and what the textbook does better."""
    names = list(dict.fromkeys(r["of"] for r in results))
    lines = []
    for figure in FIGURES:
        lines += [f"| {figure} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for regime in dict.fromkeys(r["regime"] for r in results):
            lines.append(f"| {regime} | " + " | ".join(worst(results, figure, regime, name) for name in names) + " |")
        lines.append("")
    return "\n".join([*lines, "Above 4e-6, and behind the textbook by more than 3 times:", "", *behind(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for regimes.json")
    parser.add_argument("--backend", nargs="+", choices=["c", "torch", "cuda"], default=["c", "torch"])
    parser.add_argument("--kinds", nargs="+", choices=DIVERGENCES, default=tuple(DIVERGENCES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[dict] = []
    cases = [(regime, kind) for regime in REGIMES for kind in arguments.kinds]
    for regime, kind in track(cases, "", console=Console(stderr=True), transient=True):
        results += measure(regime, kind, arguments.backend)
    device = "cuda" if "cuda" in arguments.backend else "cpu"
    report = {"results": results, "provenance": bench.provenance(device)}
    (arguments.out / "regimes.json").write_text(json.dumps(report, indent=1) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
