"""Losses inside other libraries: time and peak memory of theirs and ours, and how far either is from float64.

    OMP_NUM_THREADS=1 python benchmarks/integrations.py --out benchmarks/results/cpu

`trl` is the loss of TRL's DistillationTrainer, from hidden states; `distil` is a step of a small Llama, beside one that
computes the divergence from both models' logits. What is timed runs in turn. Peak memory is of a process of its own:
what is resident above what was before the call, gradients included.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import itertools
import json
import multiprocessing
import re
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from kullback.cli import bench, reference
from kullback.integrations.transformers import distil
from kullback.integrations.trl import chunked_divergence_loss

REPEATS = 5
# A head of SmolLM2's size; completions of unlike length, or all of one.
RAGGED, EVEN = (128, 96, 64, 40), (128, 128, 128, 128)
TRL = [
    *({"part": "trl", "beta": beta, "lengths": RAGGED, "dtype": "float32"} for beta in (0.0, 0.5, 1.0)),
    {"part": "trl", "beta": 0.5, "lengths": EVEN, "dtype": "float32"},
    {"part": "trl", "beta": 0.5, "lengths": RAGGED, "dtype": "bfloat16"},
]
DISTIL = [{"part": "distil", "label_weight": weight, "lengths": RAGGED} for weight in (0.0, 0.3)]
WIDTH, VOCAB = 576, 49152
MODEL = {"vocab_size": 32000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY = (3, 2)  # completions with which kernels are built and loaded


def trl_calls(case, lengths):
    """Loss and entropy by each, the leaves, and float64's loss, entropy and gradient norm."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    torch.manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    draw = lambda *shape: torch.randn(shape).to(dtype)
    hidden, target = draw(len(lengths), max(lengths), WIDTH), draw(len(lengths), max(lengths), WIDTH)
    head, its = draw(VOCAB, WIDTH).mul_(3 / WIDTH**0.5), draw(VOCAB, WIDTH).mul_(3 / WIDTH**0.5)
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)).long()
    given = (hidden, target, head, its, mask, case["beta"])
    calls = {
        "kullback": lambda: chunked_divergence_loss(*given)[:2],
        "trl": lambda: _chunked_divergence_loss(*given)[:2],
    }

    def truth():
        wide, weight = (leaf.detach().double().requires_grad_() for leaf in leaves)
        x, y = wide[mask != 0] @ weight.T, target[mask != 0].double() @ its.double().T
        kind = {0.0: "kl", 1.0: "reverse_kl"}.get(case["beta"], "jensen_shannon")
        parameter = {"beta": case["beta"]} if kind == "jensen_shannon" else {}
        loss = reference.rows(kind, "logits", x, y, **parameter).mean()
        log_q = x.detach().log_softmax(-1)
        return loss, -(log_q.exp() * log_q).sum(), norm(torch.autograd.grad(loss, (wide, weight)))

    return calls, leaves, truth


def distil_calls(case, lengths):
    """The same of a model's step; there is no entropy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, num_attention_heads=4, num_key_value_heads=2)
    student, teacher = LlamaForCausalLM(config).train(), LlamaForCausalLM(config).eval()
    for model in (student, teacher):
        torch.nn.init.normal_(model.lm_head.weight, std=3 / MODEL["hidden_size"] ** 0.5)
    ids = torch.randint(MODEL["vocab_size"], (len(lengths), max(lengths)))
    labels = ids.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(-1), -100)

    def eager(student=student, teacher=teacher):
        outputs = student(input_ids=ids, labels=labels if case["label_weight"] else None)
        with torch.no_grad():
            target = teacher(input_ids=ids).logits[:, :-1]
        log_q, log_p = outputs.logits[:, :-1].log_softmax(-1), target.log_softmax(-1)
        counts = labels[:, 1:] != -100
        loss = (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * counts).sum() / counts.sum()
        return (loss + case["label_weight"] * outputs.loss if case["label_weight"] else loss), None

    def ours():
        with distil(student, teacher, label_weight=case["label_weight"]):
            return student(input_ids=ids, labels=labels).loss, None

    def truth():
        wide = copy.deepcopy(student).double()
        loss, _ = eager(wide, copy.deepcopy(teacher).double())
        return loss, None, norm(torch.autograd.grad(loss, list(wide.parameters())))

    return {"kullback": ours, "eager": eager}, list(student.parameters()), truth


CALLS = {"trl": trl_calls, "distil": distil_calls}


def norm(gradients):
    return torch.stack([gradient.double().norm() for gradient in gradients]).norm()


def step(call, leaves):
    """A loss and its gradients."""
    for leaf in leaves:
        leaf.grad = None
    loss, entropy = call()
    loss.backward()
    return loss, entropy


def resident(name):
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"^{name}:\s+(\d+) kB", status, re.M)[1]) * 1024


def peak(case, name):
    """Bytes of a step above what was resident before it; Linux alone tells."""
    calls, leaves, _ = CALLS[case["part"]](case, TINY)
    step(calls[name], leaves)
    calls, leaves, _ = CALLS[case["part"]](case, case["lengths"])
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = resident("VmRSS")
    step(calls[name], leaves)
    return resident("VmHWM") - before


def measured(case):
    calls, leaves, truth = CALLS[case["part"]](case, case["lengths"])
    exact = [None if value is None else value.item() for value in truth()]
    entries = {}
    for name, call in calls.items():
        loss, entropy = step(call, leaves)
        found = loss.item(), None if entropy is None else entropy.item(), norm(leaf.grad for leaf in leaves).item()
        errors = [None if one is None else abs(one - other) / other for one, other in zip(found, exact, strict=True)]
        named = zip(("loss_error", "entropy_error", "gradient_norm_error"), errors, strict=True)
        entries[name] = {"name": name, "seconds": [], "found": found, **dict(named)}
    for _, (name, call) in itertools.product(range(REPEATS), calls.items()):
        begin = time.perf_counter()
        step(call, leaves)
        entries[name]["seconds"].append(time.perf_counter() - begin)
    ours, theirs = (entry.pop("found") for entry in entries.values())
    apart = [None if one is None else abs(one - other) / other for one, other in zip(ours, theirs, strict=True)]
    for name, entry in entries.items():
        entry["seconds"] = statistics.median(entry["seconds"])
        with contextlib.closing(multiprocessing.get_context("spawn").Pool(1)) as pool:
            entry["peak_bytes"] = pool.apply(peak, (case, name))
    return {
        "case": case,
        "apart": dict(zip(("loss", "entropy", "gradient_norm"), apart, strict=True)),
        "results": list(entries.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for integrations.json")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    shapes = {"trl": {"hidden": WIDTH, "vocab": VOCAB}, "distil": MODEL}
    report = {"provenance": {**bench.provenance("cpu"), **versions}, "shapes": shapes, "results": []}
    for case in (*TRL, *DISTIL):
        report["results"].append(measured(case))
        (out / "integrations.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report["results"][-1]), flush=True)


if __name__ == "__main__":
    main()
