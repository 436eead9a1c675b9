"""Hidden states x head, and top-k teachers: time against the products and the bytes that there must be, and rivals.

    python benchmarks/linear.py --out benchmarks/results/h200 [--only linear|topk|long]

On a CPU shapes are small. Real rows are those of `make real`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import kullback
from kullback.cli import bench
from kullback.cli import rows as real

# student, rows, its hidden size, the teacher's, vocabulary, kind, whether rivals run beside
GPU = [
    *((f"real {name}", 4096, 576, 576, 49152, "kl", True) for name in ("pruned", "bits5", "noise1")),
    ("real bits5", 4096, 576, 576, 49152, "jensen_shannon", True),
    *(("bits5", 4096, 4096, 4096, 128256, kind, True) for kind in ("kl", "jensen_shannon")),
    *(("noise1", 4096, 4096, 4096, 128256, kind, True) for kind in ("kl", "jensen_shannon")),
    *(("bits5", 8192, 2048, 2048, 151936, kind, True) for kind in ("kl", "jensen_shannon")),
    *(("random", 4096, 4096, 4096, 128256, kind, False) for kind in ("kl", "jensen_shannon")),
    ("random", 1024, 4096, 4096, 128256, "kl", False),
]
CPU = [
    *((f"real {name}", 256, 576, 576, 49152, "kl", True) for name in ("bits5", "noise1")),
    *((name, 256, 128, 128, 8192, kind, True) for kind in ("kl", "jensen_shannon") for name in ("random", "noise1")),
]
TOPK_GPU = [(8192, 151936, 64), (8192, 151936, 256)]
TOPK_CPU = [(256, 32000, 64), (256, 32000, 256)]
LONG = ((131072, 2048, 4096, 151936), (8192, 2048, 4096, 151936))


NOISE = real.NOISE | {"bits5": 0.12}  # of hidden states, for a kl such as the real student's


def operands(student, rows, hidden, teacher_hidden, vocab, device, dtype=torch.bfloat16):
    """Hidden states and heads: of a model's file, made after its statistics, or whose two models are unrelated.

    Made ones: the logarithm of probabilities is normal but for a token of each row, which has the probability that the
    first token of a real row has at the row's quantile. The head is the teacher's.
    """
    if student.startswith("real "):
        file, _ = real.read(real.find("real"))
        head = real.dequantised(file["head"], file["head_scale"]).to(device, dtype)
        h, t = (real.hidden_states(file, name)[:rows].to(device, dtype) for name in (student[5:], "teacher"))
        return h.requires_grad_(), head.clone().requires_grad_(), t, head
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device=device, dtype=dtype)
    t, v = draw(rows, teacher_hidden), draw(vocab, teacher_hidden).mul_(3 / teacher_hidden**0.5)
    if student == "random":
        h, w = draw(rows, hidden), draw(vocab, hidden).mul_(3 / hidden**0.5)
        return h.requires_grad_(), w.requires_grad_(), t, v
    quantiles = (torch.randperm(rows, device=device) + 0.5) / rows
    log_top = real.between(quantiles, real.TOP) @ torch.tensor(list(real.TOP.values()), device=device).log()
    first = v[torch.randint(vocab, (rows,), device=device)].float()
    others = math.log(vocab) + 3**2 / 2  # the mean of a log-sum-exp
    wanted = log_top - torch.log1p(-log_top.exp()) + others  # of the first token's logit
    norm = first.square().sum(-1)
    t = (t.float() + ((wanted - (t.float() * first).sum(-1)) / norm)[:, None] * first).to(dtype)
    return (t + NOISE[student] * draw(rows, hidden)).requires_grad_(), v.clone().requires_grad_(), t, v


def eager(kind):
    """As users write it, on float32 copies of the logits."""

    def loss(h, w, t, v):
        log_q, log_p = F.linear(h, w).float().log_softmax(-1), F.linear(t, v).float().log_softmax(-1)
        if kind == "kl":
            return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453
        sides = (F.kl_div(log_m, side, reduction="batchmean", log_target=True) for side in (log_p, log_q))
        return sum(sides) / 2

    return loss


def rivals(kind):
    yield "eager", eager(kind)
    yield "torch.compile", torch.compile(eager(kind))
    beta = 0.0 if kind == "kl" else 0.5  # to the others 0 is KL(teacher || student)
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        from liger_kernel.transformers import LigerFusedLinearJSD

        fused = LigerFusedLinearJSD(jsd_beta=beta)
        yield "liger fused", lambda h, w, t, v: fused(h, w, t, v, None)
        chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, chunk_size=1024)
        labels = {}

        def run(h, w, t, v):
            labels.setdefault(h.size(0), torch.zeros(h.size(0), dtype=torch.long, device=h.device))
            return chunked(h, w, t, v, labels[h.size(0)])

        yield "liger chunked", run
    if importlib.util.find_spec("trl"):
        with contextlib.suppress(ImportError):
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

            per_token = ChunkedDivergenceFunction.apply
            yield "trl chunked", lambda h, w, t, v: per_token(h, w, None, t, v, None, beta)[0].mean()


def four_products(tensors):
    """What there must be, to be timed."""
    h, w, t, v = (tensor.detach() for tensor in tensors)
    logits, d_head = torch.mm(h, w.t()), torch.empty_like(w)
    other, d_hidden = torch.empty_like(logits), torch.empty_like(h)

    def products():
        torch.mm(h, w.t(), out=logits)
        torch.mm(t, v.t(), out=other)
        torch.mm(logits, w, out=d_hidden)
        torch.mm(logits.t(), h, out=d_head)

    return products


def truth(tensors, kind, step=256):
    """Loss and both gradients in float64, of the same operands, a few rows at a time."""
    h, w, t, v = (tensor.detach().double() for tensor in tensors)
    rows, total = h.size(0), 0.0
    d_hidden, d_head = torch.empty_like(h), torch.zeros_like(w)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        x = (h[part] @ w.T).requires_grad_()
        log_q, log_p = x.log_softmax(-1), (t[part] @ v.T).log_softmax(-1)
        if kind == "kl":
            loss = (log_p.exp() * (log_p - log_q)).sum() / rows
        else:
            log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453
            sides = ((side.exp() * (side - log_m)).sum() for side in (log_p, log_q))
            loss = sum(sides) / (2 * rows)
        (d_logits,) = torch.autograd.grad(loss, x)
        total += loss.item()
        d_hidden[part] = d_logits @ w
        d_head += d_logits.T @ h[part]
    return total, d_hidden, d_head


def at_medium_precision(h, w, t, v, kind):
    """Gradients are written with the loss."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return kullback.linear_divergence(h, w, t, v, kind=kind)
    finally:
        torch.set_float32_matmul_precision(before)


def linear_case(student, rows, hidden, teacher_hidden, vocab, kind, with_rivals, device, clock):
    tensors = operands(student, rows, hidden, teacher_hidden, vocab, device)
    h, w, t, v = tensors
    exact, *exact_gradients = truth(tensors, kind)
    returned = sum(x.numel() * x.itemsize for x in (h, w))
    entries, products = [], four_products(tensors)
    contestants = [
        ("kullback", lambda *a: kullback.linear_divergence(*a, kind=kind)),
        ("kullback, 16-bit logits", lambda *a: kullback.linear_divergence(*a, kind=kind, logits_dtype=h.dtype)),
    ]
    if device == "cpu":
        contestants.insert(1, ("kullback, medium", lambda *a: at_medium_precision(*a, kind)))
    for name, loss in [*contestants, *(rivals(kind) if with_rivals else ())]:
        entry = {"name": name}

        def run(loss=loss):
            h.grad = w.grad = None
            value = loss(h, w, t, v)
            value.backward()
            return value.detach()

        try:
            value = run().item()
            entry["loss_error"] = abs(value - exact) / exact
            for what, tensor, gradient in zip(("hidden", "head"), (h, w), exact_gradients, strict=True):
                entry[f"{what}_gradient_error"] = ((tensor.grad.double() - gradient).norm() / gradient.norm()).item()
            floor, entry["seconds"] = clock.in_turn(products, run)  # what a device's heat allows, it allows both
            entry["of_floor"] = entry["seconds"] / floor
            h.grad = w.grad = None
            peak = clock.peak(run)
            entry["peak_bytes_above_gradients"] = None if peak is None else peak - returned
        except Exception as error:  # a rival's failure is a result too
            if name.startswith("kullback"):
                raise
            entry["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        entries.append(entry)
    models = kullback.linear.Models(h, w, None, t, v, None)
    most_bytes = kullback.linear.bytes_of_chunks(h.device)
    chunk, kept, _ = kullback.linear.plan_chunks(models, (True, True, *[False] * 4), most_bytes, widens=True)
    return {
        "case": {
            "rows": rows,
            "hidden": hidden,
            "teacher_hidden": teacher_hidden,
            "vocab": vocab,
            "kind": kind,
            "student": student,
        },
        "floor_seconds": clock.seconds(products),
        "chunk_rows": chunk,
        "kept_rows": kept,  # of the student's logits
        "head_sum_bytes": 4 * w.numel() if kept < rows else 0,  # in float32, beside the gradients
        "results": entries,
    }


def long_case(device, clock):
    """Time a token and peak memory of many tokens, beside fewer."""
    result = {}
    for rows, hidden, teacher_hidden, vocab in LONG:
        h, w, t, v = operands("random", rows, hidden, teacher_hidden, vocab, device)

        def run(h=h, w=w, t=t, v=v):
            h.grad = w.grad = None
            kullback.linear_divergence(h, w, t, v).backward()

        clock.repeats = 3
        seconds = clock.seconds(run)
        h.grad = w.grad = None
        returned = sum(x.numel() * x.itemsize for x in (h, w))
        peak = clock.peak(run)
        result[rows] = {
            "microseconds_a_token": seconds / rows * 1e6,
            "peak_bytes_above_gradients": None if peak is None else peak - returned,
        }
    return result


def topk_case(rows, vocab, k, device, clock):
    x, y = bench.make_inputs(rows, vocab, torch.bfloat16, "logits", device)
    a_pass = clock.seconds(functools.partial(torch.empty_like(x).copy_, x)) / 2
    values, ids = y.float().log_softmax(-1).topk(k)
    x.requires_grad_()
    wide = x[:64].detach().double().requires_grad_()
    q = wide.softmax(-1)
    p, mine = values[:64].double().exp(), q.gather(-1, ids[:64])
    rest = 1 - p.sum(-1), q.scatter(-1, ids[:64], 0.0).sum(-1)
    exact = (p * (p.log() - mine.log())).sum(-1) + rest[0] * (rest[0].log() - rest[1].log())
    (gradient,) = torch.autograd.grad(exact.mean(), wide)
    few = kullback.topk_divergence(x[:64], values[:64], ids[:64])
    (ours,) = torch.autograd.grad(few, x)
    labels = torch.randint(0, vocab, (rows,), device=device)
    of_labels = torch.nn.functional.cross_entropy(wide, labels[:64])
    (of_label,) = torch.autograd.grad(of_labels, wide)
    with_labels = kullback.topk_divergence(x[:64], values[:64], ids[:64], labels=labels[:64])
    (labelled,) = torch.autograd.grad(with_labels, x)
    exact_with_labels = exact.mean().item() + of_labels.item()

    def run(**options):
        x.grad = None
        kullback.topk_divergence(x, values, ids, **options).backward()

    forward = clock.seconds(lambda: kullback.topk_divergence(x.detach(), values, ids))
    seconds = clock.seconds(run)
    seconds_with_labels = clock.seconds(functools.partial(run, labels=labels))
    seconds_smoothed = clock.seconds(functools.partial(run, labels=labels, label_smoothing=0.1))
    x.grad = None
    return {
        "case": {"rows": rows, "vocab": vocab, "k": k},
        "copy_seconds": 2 * a_pass,
        "loss_error": abs(few.item() - exact.mean().item()) / exact.mean().item(),
        "gradient_error": ((ours[:64].double() - gradient).norm() / gradient.norm()).item(),
        "forward_seconds": forward,
        "forward_of_ceiling": a_pass / forward,
        "seconds": seconds,
        "of_ceiling": 3 * a_pass / seconds,
        "peak_bytes": clock.peak(run),
        "loss_error_with_labels": abs(with_labels.item() - exact_with_labels) / exact_with_labels,
        "gradient_error_with_labels": (
            (labelled[:64].double() - gradient - of_label).norm() / (gradient + of_label).norm()
        ).item(),
        "seconds_with_labels": seconds_with_labels,
        "seconds_with_smoothed_labels": seconds_smoothed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for linear.json")
    parser.add_argument("--only", choices=["linear", "topk", "long"], help="one part, in a file of its own")
    arguments = parser.parse_args()
    if arguments.only in (None, "linear"):
        real.find("real")  # before any work
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = bench.Clock(device, 10 if device == "cuda" else 7)
    result = {"provenance": bench.provenance(device), "linear": [], "topk": [], "long": None}
    name = f"linear_{arguments.only}.json" if arguments.only else "linear.json"

    def save() -> None:
        (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")

    if arguments.only in (None, "topk"):
        for case in TOPK_GPU if device == "cuda" else TOPK_CPU:
            result["topk"].append(topk_case(*case, device, clock))
            save()
            print(result["topk"][-1], flush=True)
    if arguments.only in (None, "linear"):
        for case in GPU if device == "cuda" else CPU:
            torch._dynamo.reset()
            result["linear"].append(linear_case(*case, device, clock))
            save()
            done = result["linear"][-1]
            print(done["case"], f"floor {done['floor_seconds'] * 1e3:.2f} ms, {done['kept_rows']} rows kept")
            for entry in done["results"]:
                print("   ", {k: round(v, 5) if isinstance(v, float) else v for k, v in entry.items()}, flush=True)
    if arguments.only in (None, "long") and device == "cuda":
        result["long"] = long_case(device, clock)
        save()
        print(result["long"], flush=True)


if __name__ == "__main__":
    main()
