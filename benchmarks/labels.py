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
from pathlib import Path

import torch
import torch.nn.functional as F

import kullback
from kullback.cli import bench, reference
from kullback.cli import rows as model_rows
from kullback.divergences import DIVERGENCES

WEIGHTS, SMOOTHING = {"label_weight": 0.3, "z_weight": 1e-4}, 0.1
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
    if importlib.util.find_spec("quack") is not None:
        from quack import cross_entropy

        yield "quack", lambda x, labels: cross_entropy(x, labels, reduction="mean")


def rivals_of_linear_cross_entropy():
    """From hidden states and a head."""
    yield "eager", lambda hidden, head, labels: F.cross_entropy((hidden @ head.T).float(), labels)
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        yield "liger", liger_fused_linear_cross_entropy
    if importlib.util.find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy

        yield "cut-cross-entropy", linear_cross_entropy


def times(calls, device, repeats):
    """Median seconds of each call, with a student's gradient."""
    return dict(zip(calls, bench.Clock(device, repeats).in_turn(*calls.values()), strict=True))


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


def drawn(y):
    """A token of each row, as the model has it: by Gumbel's maximum."""
    parts = (part.float() - torch.empty_like(part, dtype=torch.float32).exponential_().log() for part in y.split(512))
    return torch.cat([part.argmax(-1) for part in parts])


def dense(device):
    rows, vocab, dtype = GPU if device == "cuda" else CPU
    for student, kind in itertools.product(STUDENTS, ("kl", "jensen_shannon")):
        x, y = model_rows.made(student, rows, vocab, dtype, device)
        labels = drawn(y)
        leaf = x.requires_grad_()
        with_labels = lambda leaf=leaf, y=y, labels=labels, kind=kind: kullback.divergence(
            leaf, y, kind, labels=labels, **WEIGHTS
        )
        smoothed = lambda leaf=leaf, y=y, labels=labels, kind=kind: kullback.divergence(
            leaf, y, kind, labels=labels, label_smoothing=SMOOTHING, **WEIGHTS
        )
        calls = {
            "divergence": differentiated(lambda leaf=leaf, y=y: kullback.divergence(leaf, y, kind), leaf),
            "with labels and z": differentiated(with_labels, leaf),
            "smoothed": differentiated(smoothed, leaf),
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
    alone = lambda **options: differentiated(lambda: kullback.divergence(leaf, None, labels=labels, **options), leaf)
    calls = {"kullback": alone()}
    for name, loss in rivals_of_cross_entropy():
        calls[name] = differentiated(lambda loss=loss: loss(leaf, labels), leaf)
    truth = truth_of(x.detach(), None, labels, {"label_weight": 1.0, "z_weight": 0.0})
    smoothed = {"kullback, smoothed": alone(label_smoothing=SMOOTHING)}
    errors = {name: abs(call().item() - truth) / truth for name, call in calls.items()}
    found = times(calls | smoothed, device, 20 if device == "cuda" else 7)
    out = torch.empty_like(x)
    found["half a copy"] = times({"copy": lambda: out.copy_(x)}, device, 20)["copy"] / 2
    yield {"rows": rows, "vocab": vocab, "error": errors}, found


def written_figures(x, y, labels, dtype=torch.float32):
    """As users write them: eleven calls on copies."""
    log_q, log_p = x.to(dtype).log_softmax(-1), y.to(dtype).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    log_m = (0.5 * (p + q)).log()
    of_m = F.kl_div(log_m, log_p, reduction="none", log_target=True) + F.kl_div(
        log_m, log_q, reduction="none", log_target=True
    )
    own = labels.unsqueeze(-1)
    return {
        "kl": F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1),
        "reverse_kl": F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1),
        "jensen_shannon": 0.5 * of_m.sum(-1),
        "total_variation": 0.5 * (p - q).abs().sum(-1),
        "entropy": -(q * log_q).sum(-1),
        "target_entropy": -(p * log_p).sum(-1),
        "top_token": x.argmax(-1),
        "target_top_token": y.argmax(-1),
        "label_log_prob": log_q.gather(-1, own),
        "label_rank": (x > x.gather(-1, own)).sum(-1),
        "target_label_rank": (y > y.gather(-1, own)).sum(-1),
    }


def figures(device):
    """`row_statistics`, which has all of these and their log-sum-exps."""
    cases = [GPU] if device == "cuda" else [(255, 49152, torch.float32), (64, 128256, torch.float16)]
    for (rows, vocab, dtype), student in itertools.product(cases, STUDENTS):
        x, y = model_rows.made(student, rows, vocab, dtype, device)
        labels = drawn(y)
        found, part = kullback.row_statistics(x, y, labels), slice(0, rows, rows // 32)
        truth = written_figures(x[part], y[part], labels[part], torch.float64)
        kinds = ("kl", "reverse_kl", "jensen_shannon", "total_variation", "entropy", "target_entropy")
        error = {
            name: ((getattr(found, name)[part].double() - truth[name]) / truth[name]).abs().max().item()
            for name in kinds
        }
        step = rows // 8  # of float32 copies no more fits
        calls = {
            "row_statistics": lambda x=x, y=y, labels=labels: kullback.row_statistics(x, y, labels),
            "the input alone": lambda x=x, labels=labels: kullback.row_statistics(x, labels=labels),
            "kl alone": lambda x=x, y=y: kullback.divergence(x, y, reduction="none"),
            "eleven calls": lambda x=x, y=y, labels=labels, step=step: [
                written_figures(*of) for of in zip(x.split(step), y.split(step), labels.split(step), strict=True)
            ],
        }
        seconds = times(calls, device, 20 if device == "cuda" else 7)
        out = torch.empty_like(x)  # a copy reads and writes as much as is read here
        read = (lambda x=x, out=out: out.copy_(x)) if device == "cuda" else (lambda x=x, y=y: (x.amax(), y.amax()))
        seconds["reading both"] = times({"": read}, device, 20)[""]
        yield {"rows": rows, "vocab": vocab, "dtype": str(dtype)[6:], "student": student, "error": error}, seconds


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
    for name, loss in rivals_of_linear_cross_entropy():
        calls[f"labels alone: {name}"] = lambda loss=loss: loss(hidden, head, labels)
    calls = {name: differentiated(call, hidden, head) for name, call in calls.items()}
    with torch.no_grad():
        truth = torch.cat(
            [
                F.cross_entropy(part.double() @ head.double().T, ids, reduction="none")
                for part, ids in zip(hidden.split(512), labels.split(512), strict=True)
            ]
        )
    error = {n: abs(c().item() / truth.mean().item() - 1) for n, c in calls.items() if n.startswith("labels alone")}
    yield (
        {"rows": rows, "hidden": width, "vocab": vocab, "error": error},
        times(calls, device, 10 if device == "cuda" else 7),
    )


PARTS = (dense, alone, figures, linear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for labels.json, or for one named after the parts"
    )
    parser.add_argument("--only", nargs="+", choices=[part.__name__ for part in PARTS], help="parts of it")
    given = parser.parse_args()
    out, chosen = given.out, given.only
    out.mkdir(parents=True, exist_ok=True)
    name = "labels.json" if chosen is None else f"{'_'.join(sorted(chosen))}.json"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {"provenance": bench.provenance(device), "results": []}
    for part in PARTS if chosen is None else [part for part in PARTS if part.__name__ in chosen]:
        for case, found in part(device):
            torch._dynamo.reset()
            report["results"].append({"part": part.__name__, "case": case, "seconds": found})
            (out / name).write_text(json.dumps(report, indent=1) + "\n")
            first = next(iter(found.values()))
            told = ", ".join(f"{name} {s * 1e3:.3f} ({s / first:.3f})" for name, s in found.items())
            print(part.__name__, case, told, flush=True)


if __name__ == "__main__":
    main()
