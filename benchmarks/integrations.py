"""Losses inside other libraries: time and peak memory of theirs and ours, and how far either is from float64.

    OMP_NUM_THREADS=1 python benchmarks/integrations.py --out benchmarks/results/cpu

`trl` is the loss of TRL's DistillationTrainer, from hidden states; `distil` is a step of a small Llama, beside one that
computes the divergence from both models' logits. `gkd` and `sdpo` are losses of TRL's other trainers. Of `modelopt`,
`verl`, `nemo_rl` and `megatron` theirs is written here as their sources have it; that of `modelopt` is what it does
without Liger, whose kernels are a GPU's. What is timed runs in turn. Peak memory is of a process of its own: what is
resident above what was before the call, gradients included. On a GPU (`--device cuda`) it is what PyTorch allocates
above that, and `trl` alone is timed, with a larger head.
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
import types
from pathlib import Path

import torch
import torch.nn.functional as F

from kullback.cli import bench, reference
from kullback.integrations import trl as ours_of_trl
from kullback.integrations.megatron import topk_kl_div
from kullback.integrations.modelopt import liger_kd_loss
from kullback.integrations.nemo_rl import distillation_loss
from kullback.integrations.transformers import distil
from kullback.integrations.verl import topk_losses

REPEATS = 5
# A head of SmolLM2's size; completions of unlike length, or all of one.
RAGGED, EVEN = (128, 96, 64, 40), (128, 128, 128, 128)
TRL = [
    *({"part": "trl", "beta": beta, "lengths": RAGGED, "dtype": "float32"} for beta in (0.0, 0.5, 1.0)),
    {"part": "trl", "beta": 0.5, "lengths": EVEN, "dtype": "float32"},
    {"part": "trl", "beta": 0.5, "lengths": RAGGED, "dtype": "bfloat16"},
]
ON_GPU = [
    {
        "part": "trl",
        "beta": beta,
        "noise": noise,
        "lengths": (1024, 900, 700, 512, 400, 320, 160, 80),
        "dtype": "bfloat16",
        "width": 2048,
        "vocab": 128256,
        "device": "cuda",
    }
    for noise, beta in itertools.product((1.0, 0.05), (0.0, 0.5, 1.0))
]
DISTIL = [{"part": "distil", "label_weight": weight, "lengths": RAGGED} for weight in (0.0, 0.3)]
LOGITS = [
    *({"part": "gkd", "beta": beta, "lengths": RAGGED, "dtype": "float32"} for beta in (0.0, 0.5, 1.0)),
    {"part": "gkd", "beta": 0.5, "lengths": RAGGED, "dtype": "bfloat16"},
    {"part": "sdpo", "alpha": 0.5, "lengths": RAGGED, "dtype": "float32"},
    {"part": "sdpo", "alpha": 0.5, "k": 100, "tail": True, "lengths": RAGGED, "dtype": "float32"},
    {"part": "sdpo", "alpha": 1.0, "k": 100, "tail": False, "lengths": RAGGED, "dtype": "float32"},
    {"part": "sdpo", "alpha": 0.5, "k": 100, "tail": True, "lengths": RAGGED, "dtype": "bfloat16"},
    *({"part": "modelopt", "lengths": RAGGED, "dtype": dtype} for dtype in ("float32", "bfloat16")),
    *({"part": "verl", "k": 128, "lengths": RAGGED, "dtype": dtype} for dtype in ("float32", "bfloat16")),
    *(
        {"part": "nemo_rl", "k": 64, "zero_outside_topk": zero, "lengths": RAGGED, "dtype": "bfloat16"}
        for zero in (False, True)
    ),
    *(
        {"part": "megatron", "k": 64, "add_ghost_token": ghost, "lengths": RAGGED, "dtype": "bfloat16"}
        for ghost in (False, True)
    ),
]
WIDTH, VOCAB = 576, 49152
MODEL = {"vocab_size": 32000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY = (3, 2)  # completions with which kernels are built and loaded


def trl_calls(case, lengths):
    """Loss and entropy by each, the leaves, and float64's loss, entropy and gradient norm."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    torch.manual_seed(0)
    dtype, device = getattr(torch, case["dtype"]), case.get("device", "cpu")
    width, vocab = case.get("width", WIDTH), case.get("vocab", VOCAB)
    draw = lambda *shape: torch.randn(shape, device=device).to(dtype)
    hidden, target = (draw(len(lengths), max(lengths), width) for _ in range(2))
    head, its = (draw(vocab, width).mul_(3 / width**0.5) for _ in range(2))
    if "noise" in case:
        hidden, head = target + case["noise"] * hidden, its.clone()
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)).long().to(device)
    given = (hidden, target, head, its, mask, case["beta"])
    calls = {
        "kullback": lambda: ours_of_trl.chunked_divergence_loss(*given)[:2],
        "trl": lambda: _chunked_divergence_loss(*given)[:2],
    }

    def truth():
        wide, weight = (leaf.detach().double().requires_grad_() for leaf in leaves)
        kind = {0.0: "kl", 1.0: "reverse_kl"}.get(case["beta"], "jensen_shannon")
        parameter = {"beta": case["beta"]} if kind == "jensen_shannon" else {}
        total, entropy = 0.0, 0.0
        for rows in (mask != 0).nonzero().split(256):
            at = tuple(rows.T)
            x, y = wide[at] @ weight.T, target[at].double() @ its.double().T
            loss = reference.rows(kind, "logits", x, y, **parameter).sum() / mask.sum()
            loss.backward()
            log_q = x.detach().log_softmax(-1)
            total, entropy = total + loss.detach(), entropy - (log_q.exp() * log_q).sum()
        return total, entropy, norm([wide.grad, weight.grad])

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


def logits_of(case, lengths):
    """A student's logits, a leaf; those of a teacher that is near, as after some training; which tokens count."""
    torch.manual_seed(0)
    student = 3 * torch.randn(len(lengths), max(lengths), VOCAB)
    teacher = student + torch.randn_like(student)
    counts = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    dtype = getattr(torch, case["dtype"])
    return student.to(dtype).requires_grad_(), teacher.to(dtype), counts


def of_logits(ours, name, theirs, student):
    """Two calls of the student's logits, and float64's results: of their formula."""

    def truth():
        wide = student.detach().double().requires_grad_()
        loss = theirs(wide)
        return loss, None, norm(torch.autograd.grad(loss, (wide,)))

    return {"kullback": lambda: (ours(student), None), name: lambda: (theirs(student), None)}, [student], truth


def gkd_calls(case, lengths):
    from trl.experimental.gkd import GKDTrainer

    student, teacher, counts = logits_of(case, lengths)
    labels = torch.where(counts, 1, -100)
    theirs = lambda x: GKDTrainer.generalized_jsd_loss(x, teacher.to(x.dtype), labels, case["beta"])
    return of_logits(
        lambda x: ours_of_trl.generalized_jsd_loss(x, teacher, labels, case["beta"]), "trl", theirs, student
    )


def sdpo_calls(case, lengths):
    from trl.experimental.sdpo import loss_utils

    student, teacher, counts = logits_of(case, lengths)
    name, options = "compute_full_logit_self_distillation_loss", {"distillation_alpha": case["alpha"]}
    if "k" in case:
        name = "compute_topk_self_distillation_loss"
        options |= {"distillation_topk": case["k"], "distillation_add_tail": case["tail"]}

    def loss_of(module):
        return lambda x: (getattr(module, name)(x, teacher.to(x.dtype), **options) * counts).sum() / counts.sum()

    return of_logits(loss_of(ours_of_trl), "trl", loss_of(loss_utils), student)


class Trainer:
    """ModelOpt's trainer, around its loss."""

    accelerator = types.SimpleNamespace(unwrap_model=lambda model: model)
    _liger_jsd_beta, _liger_temperature = 0.0, 1.0
    liger_kd_loss = liger_kd_loss

    def __init__(self, head, its_head):
        self.model, self.teacher = (types.SimpleNamespace(lm_head=each) for each in (head, its_head))

    def _get_unwrapped_teacher(self):
        return self.teacher

    def _get_lm_head(self, model):
        return model.lm_head

    def _sharded_liger_compute(self, compute):
        return compute()

    def _teacher_liger_enabled(self, compute, lm_head):
        return compute()


def modelopt_calls(case, lengths):
    """From hidden states, since ours needs no logits; theirs is `_standard_kd_loss` at temperature 1."""
    torch.manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    hidden, target = (torch.randn(len(lengths), max(lengths) + 1, WIDTH).to(dtype) for _ in range(2))
    heads = [torch.nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype) for _ in range(2)]
    for head in heads:
        torch.nn.init.normal_(head.weight, std=3 / WIDTH**0.5)
    labels = torch.where(torch.arange(max(lengths) + 1) <= torch.tensor(lengths).unsqueeze(-1), 1, -100)
    trainer, weight = Trainer(*heads), heads[0].weight
    hidden.requires_grad_()

    def ours():
        trainer._last_teacher_outputs = types.SimpleNamespace(logits=target)
        return trainer.liger_kd_loss(types.SimpleNamespace(logits=hidden), labels), None

    def theirs(hidden=hidden, weight=weight):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.no_grad():
            teacher_logits = (target.to(hidden.dtype) @ heads[1].weight.to(hidden.dtype).T)[..., :-1, :].to(wide)
        student_logits = (hidden @ weight.T)[..., :-1, :].to(wide)
        log_q, log_p = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        rows = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        mask = labels[..., 1:] != -100
        return (rows * mask).sum() / mask.sum().clamp(min=1), None

    def truth():
        leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
        loss, _ = theirs(*leaves)
        return loss, None, norm(torch.autograd.grad(loss, leaves))

    return {"kullback": ours, "modelopt": theirs}, [hidden, weight], truth


def entries_of(teacher, k):
    return [t.contiguous() for t in teacher.float().log_softmax(-1).topk(k)]


def verl_calls(case, lengths):
    student, teacher, counts = logits_of(case, lengths)
    log_probs, ids = entries_of(teacher, case["k"])

    def theirs(logits, least=-10.0):
        """`compute_forward_kl_topk` of verl's FSDP workers, figures too."""
        student_log_probs = F.log_softmax(logits, dim=-1)
        own = torch.topk(student_log_probs, k=ids.shape[-1], dim=-1).indices
        log_q = torch.gather(student_log_probs, dim=-1, index=ids)
        masses = log_q.exp().sum(-1), log_probs.exp().sum(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_q, log_p = log_q.clamp_min(least).to(wide), log_probs.clamp_min(least).to(wide)
        token_kl = log_p.exp() * (log_p - log_q)
        overlap = (ids.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)
        advantage = (-token_kl * overlap).sum(-1) / overlap.sum(-1).clamp_min(1)
        return token_kl.sum(-1), masses, advantage

    losses_of = lambda x: topk_losses(x, log_probs, ids)["distillation_losses"]
    mean = lambda losses: (losses * counts).sum() / counts.sum()
    return of_logits(lambda x: mean(losses_of(x)), "verl", lambda x: mean(theirs(x)[0]), student)


def nemo_rl_calls(case, lengths):
    student, teacher, counts = logits_of(case, lengths)
    values, ids = teacher.float().topk(case["k"])
    zero = case["zero_outside_topk"]
    data = {"teacher_topk_logits": values, "teacher_topk_indices": ids, "input_ids": ids[..., 0]}
    data |= {"token_mask": counts.float(), "sample_mask": torch.ones(len(lengths))}

    def theirs(logits):
        """`get_distillation_topk_logprobs_from_logits` and `DistillationLossFn`, mixed."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if zero:
            whole = F.log_softmax(wide, dim=-1)
            log_q, negative_entropy = whole.gather(-1, ids), (whole.exp() * whole).sum(-1)
        else:
            log_q = F.log_softmax(wide.gather(-1, ids), dim=-1)
        log_p = F.log_softmax(values.to(wide.dtype), dim=-1)
        p, q = log_p.exp(), log_q.exp()
        rows = (0.5 * p * (log_p - log_q) + 0.5 * q * (log_q - log_p)).sum(-1)
        if zero:
            rows = rows + 0.5 * (negative_entropy - (q * log_q).sum(-1) + 100 * (1 - q.sum(-1)))
        return (rows[:, :-1] * counts[:, 1:]).sum() / (counts.sum() + 1e-8)

    ours = lambda x: distillation_loss(x, data, None, counts.sum(), zero_outside_topk=zero)[0]
    return of_logits(ours, "nemo_rl", theirs, student)


def megatron_calls(case, lengths):
    student, teacher, counts = logits_of(case, lengths)
    log_probs, ids = entries_of(teacher, case["k"])
    ghost = case["add_ghost_token"]

    def theirs(logits):
        """`topk_kl_div` of one rank."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits - logits.max(-1, keepdim=True).values.detach()
        log_q = (logits - logits.exp().sum(-1, keepdim=True).log()).gather(-1, ids)
        log_p = log_probs.to(logits.dtype)
        if ghost:
            rest = [(1 - t.exp().sum(-1, keepdim=True)).clamp(min=1e-8).log() for t in (log_q, log_p)]
            log_q, log_p = torch.cat([log_q, rest[0]], -1), torch.cat([log_p, rest[1]], -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    mean = lambda losses: (losses * counts).sum() / counts.sum()
    ours = lambda x: mean(topk_kl_div(x, log_probs, ids, 1, 0, None, ghost).T)
    return of_logits(ours, "megatron", lambda x: mean(theirs(x)), student)


CALLS = {
    "trl": trl_calls,
    "distil": distil_calls,
    "gkd": gkd_calls,
    "sdpo": sdpo_calls,
    "modelopt": modelopt_calls,
    "verl": verl_calls,
    "nemo_rl": nemo_rl_calls,
    "megatron": megatron_calls,
}


def norm(gradients):
    return torch.stack([gradient.double().norm() for gradient in gradients]).norm()


def step(call, leaves):
    """A loss and its gradients."""
    for leaf in leaves:
        leaf.grad = None
    loss, entropy = call()
    loss.backward()
    if loss.is_cuda:
        torch.cuda.synchronize()
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


def allocated(call, leaves):
    """Bytes that a step on a GPU takes above what was taken before it, gradients included."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(call, leaves)
    return torch.cuda.max_memory_allocated() - before


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
        if case.get("device") == "cuda":
            entry["peak_bytes"] = allocated(calls[name], leaves)
            continue
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    out, device = arguments.out, arguments.device
    out.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    shapes = {"trl": {"hidden": WIDTH, "vocab": VOCAB}, "distil": MODEL}
    shapes |= {part: {"vocab": VOCAB} for part in CALLS.keys() - {"trl", "distil", "modelopt"}}
    shapes |= {"modelopt": {"hidden": WIDTH, "vocab": VOCAB}}
    report = {"provenance": {**bench.provenance(device), **versions}, "results": []}
    if device == "cpu":
        report["shapes"] = shapes
    for case in ON_GPU if device == "cuda" else (*TRL, *DISTIL, *LOGITS):
        report["results"].append(measured(case))
        (out / "integrations.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report["results"][-1]), flush=True)


if __name__ == "__main__":
    main()
