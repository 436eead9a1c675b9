"""Labels, z-loss and statistics beside a divergence: what they add to its time, and labels alone against rivals.

    python benchmarks/labels.py --out benchmarks/results/h200

Rows of logits are made with a language model's statistics. Each call is checked against float64 in the same run. On a
CPU the shapes are small, and what is timed runs in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import kullback
from kullback.cli import bench, reference
from kullback.cli import rows as model_rows
from kullback.divergences import DIVERGENCES

WEIGHTS = {"label_weight": 0.3, "z_weight": 1e-4}
GPU, CPU = (8192, 128256, torch.bfloat16), (256, 32000, torch.float32)
LINEAR_GPU, LINEAR_CPU = (8192, 4096, 128256, torch.bfloat16), (256, 128, 8192, torch.float32)
STUDENTS = ("bits5", "noise5", "noise1")


def truth_of(x, y, labels, weights, kind="kl"):
    """The mean by float64."""
    divergence = 0.0 if y is None else reference.truth(kind, "logits", x, y, **DIVERGENCES[kind].defaults)
    lse = torch.cat([part.double().logsumexp(-1) for part in x.split(256)])
    own = x.gather(-1, labels.unsqueeze(-1)).squeeze(-1).double()
    return (divergence + weights["label_weight"] * (lse - own) + weights["z_weight"] * lse**2).mean().item()


def written(x, y, labels):
    """As users write it: on float32 copies."""
    a, b = x.float(), y.float()
    log_q = a.log_softmax(-1)
    kl = F.kl_div(log_q, b.log_softmax(-1), reduction="batchmean", log_target=True)
    return (
        kl + WEIGHTS["label_weight"] * F.nll_loss(log_q, labels) + WEIGHTS["z_weight"] * a.logsumexp(-1).square().mean()
    )


def rivals_of_cross_entropy():
    yield "eager", lambda x, labels: F.cross_entropy(x.float(), labels)
    yield "torch.compile", torch.compile(lambda x, labels: F.cross_entropy(x.float(), labels))
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_cross_entropy

        yield "liger", lambda x, labels: liger_cross_entropy(x * 1, labels)  # it writes over what it is given


def times(calls, device, repeats):
    """Median seconds of each call, with a student's gradient; on a CPU in turn, so that slow times fall on all."""
    if device == "cuda":
        clock = bench.Clock(device, repeats)
        return {name: clock.seconds(call) for name, call in calls.items()}
    found = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(repeats), calls.items()):
        begin = time.perf_counter()
        call()
        found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(of) for name, of in found.items()}


def differentiated(loss, *leaves):
    def run():
        for leaf in leaves:
            leaf.grad = None
        value = loss()
        value.backward()
        return value.detach()

    return run


def collected(loss):
    def run():
        with kullback.collecting_statistics():
            return loss()

    return run


def dense(device):
    rows, vocab, dtype = GPU if device == "cuda" else CPU
    for student, kind in itertools.product(STUDENTS, ("kl", "jensen_shannon")):
        x, y = model_rows.made(student, rows, vocab, dtype, device)
        labels = torch.randint(0, vocab, (rows,), device=device)
        leaf = x.requires_grad_()
        with_labels = lambda leaf=leaf, y=y, labels=labels, kind=kind: kullback.divergence(
            leaf, y, kind, labels=labels, **WEIGHTS
        )
        calls = {
            "divergence": differentiated(lambda leaf=leaf, y=y: kullback.divergence(leaf, y, kind), leaf),
            "with labels and z": differentiated(with_labels, leaf),
            "and statistics": differentiated(collected(with_labels), leaf),
            "then F.cross_entropy": differentiated(
                lambda leaf=leaf, y=y, labels=labels: (
                    kullback.divergence(leaf, y, kind) + WEIGHTS["label_weight"] * F.cross_entropy(leaf.float(), labels)
                ),
                leaf,
            ),
        }
        if kind == "kl":
            calls["eager"] = differentiated(lambda leaf=leaf, y=y, labels=labels: written(leaf, y, labels), leaf)
            compiled = torch.compile(written)
            calls["torch.compile"] = differentiated(
                lambda leaf=leaf, y=y, labels=labels: compiled(leaf, y, labels), leaf
            )
        truth = truth_of(x.detach(), y, labels, WEIGHTS, kind)
        error = abs(calls["with labels and z"]().item() - truth) / truth
        yield (
            {"rows": rows, "vocab": vocab, "student": student, "kind": kind, "error": error},
            times(calls, device, 20 if device == "cuda" else 7),
        )


def alone(device):
    rows, vocab, dtype = GPU if device == "cuda" else CPU
    x, _ = model_rows.made("bits5", rows, vocab, dtype, device)
    labels = torch.randint(0, vocab, (rows,), device=device)
    leaf = x.requires_grad_()
    calls = {"kullback": differentiated(lambda: kullback.divergence(leaf, None, labels=labels), leaf)}
    for name, loss in rivals_of_cross_entropy():
        calls[name] = differentiated(lambda loss=loss: loss(leaf, labels), leaf)
    truth = truth_of(x.detach(), None, labels, {"label_weight": 1.0, "z_weight": 0.0})
    errors = {name: abs(call().item() - truth) / truth for name, call in calls.items()}
    found = times(calls, device, 20 if device == "cuda" else 7)
    out = torch.empty_like(x)
    found["half a copy"] = times({"copy": lambda: out.copy_(x)}, device, 20)["copy"] / 2
    yield {"rows": rows, "vocab": vocab, "error": errors}, found


def linear(device):
    rows, width, vocab, dtype = LINEAR_GPU if device == "cuda" else LINEAR_CPU
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device=device, dtype=dtype)
    hidden, head = draw(rows, width).requires_grad_(), draw(vocab, width).mul_(3 / width**0.5).requires_grad_()
    other, its = draw(rows, width), draw(vocab, width).mul_(3 / width**0.5)
    labels = torch.randint(0, vocab, (rows,), device=device)
    calls = {
        "divergence": lambda: kullback.linear_divergence(hidden, head, other, its),
        "with labels and z": lambda: kullback.linear_divergence(hidden, head, other, its, labels=labels, **WEIGHTS),
        "and statistics": collected(
            lambda: kullback.linear_divergence(hidden, head, other, its, labels=labels, **WEIGHTS)
        ),
        "labels alone": lambda: kullback.linear_divergence(hidden, head, None, labels=labels),
    }
    calls = {name: differentiated(call, hidden, head) for name, call in calls.items()}
    yield {"rows": rows, "hidden": width, "vocab": vocab}, times(calls, device, 10 if device == "cuda" else 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for labels.json")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {"provenance": bench.provenance(device), "results": []}
    for part in (dense, alone, linear):
        for case, found in part(device):
            torch._dynamo.reset()
            report["results"].append({"part": part.__name__, "case": case, "seconds": found})
            (out / "labels.json").write_text(json.dumps(report, indent=1) + "\n")
            first = next(iter(found.values()))
            told = ", ".join(f"{name} {s * 1e3:.3f} ({s / first:.3f})" for name, s in found.items())
            print(part.__name__, case, told, flush=True)


if __name__ == "__main__":
    main()
