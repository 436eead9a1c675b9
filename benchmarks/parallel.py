"""A vocabulary over the GPUs of one host: time and memory beside one GPU's and rivals', and the parts they are made of.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results/h100x2 [--small]

On NCCL where each process has a GPU, else on gloo. `--small` takes shapes that a CPU does in seconds: what is measured
there is that it runs. What it says of 4 and 8 GPUs is a forecast: parts measured here, bytes divided among more.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import time
from pathlib import Path

import linear
import torch
from torch import Tensor
from torch import distributed as dist

import kullback
from kullback import backends, collectives
from kullback.cli import bench, reference
from kullback.divergences import DIVERGENCES
from kullback.problem import Problem, Side
from kullback.state import (
    RowState,
    RowStats,
    RowSums,
    fields,
    finish,
    merge_stats,
    merge_sums,
    packed,
    sums_of,
    unpacked,
)
from kullback.work import Operands, Rows

DENSE, LINEAR = (8192, 151936), (8192, 4096, 151936)
SMALL_DENSE, SMALL_LINEAR = (64, 1003), (64, 32, 1003)
PARTS = ("dense", "linear", "graph")
SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 22)  # bytes that each rank gives to an all-gather
CHECKED = 64  # rows whose gradients are found in float64


class Clock(bench.Clock):
    """Of a call that all ranks make: the slowest rank's median."""

    def seconds(self, run) -> float:
        slowest = torch.tensor([super().seconds(run)], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def once(self, run) -> float:
        dist.barrier()
        return super().once(run)

    def in_a_row(self, run, calls: int = 10) -> float:
        """Seconds a call of several, the host's time included where it is the longer."""
        dist.barrier()
        self.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        return (time.perf_counter() - begin) / calls

    def wait(self) -> None:
        if self.backlog is not None:
            torch.cuda.synchronize()


class GatherVocabulary(torch.autograd.Function):
    """All slices side by side, as losses that want whole rows have them."""

    @staticmethod
    def forward(ctx, slice: Tensor) -> Tensor:
        ctx.width = slice.size(-1)
        parts = collectives.all_gather(slice, dist.group.WORLD)
        return parts.movedim(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> Tensor:
        return grad_out[:, dist.get_rank() * ctx.width :][:, : ctx.width]


class HandWritten(torch.autograd.Function):
    """kl as it is written by hand after Megatron's cross-entropy: five all-reduces, float32 copies."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        log_masses = []
        for logits in (x.float(), y.float()):
            top = logits.amax(-1)
            dist.all_reduce(top, dist.ReduceOp.MAX)
            logits = logits - top.unsqueeze(-1)
            total = logits.exp().sum(-1)
            dist.all_reduce(total)
            log_masses.append(logits - total.log().unsqueeze(-1))
        log_q, log_p = log_masses
        losses = (log_p.exp() * (log_p - log_q)).sum(-1)
        dist.all_reduce(losses)
        ctx.save_for_backward(log_q, log_p)
        ctx.dtype = x.dtype
        return losses.mean()

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, None]:
        log_q, log_p = ctx.saved_tensors
        return ((log_q.exp() - log_p.exp()) * (grad_out / log_q.size(0))).to(ctx.dtype), None


def eager(kind: str, x: Tensor, y: Tensor) -> Tensor:
    """As users write it, on float32 copies."""
    return reference.rows(kind, "logits", x.float(), y.float(), **DIVERGENCES[kind].defaults).mean()


@functools.cache
def exchanging() -> dist.ProcessGroup | None:
    """All ranks, whose kernels exchange numbers of rows themselves; None where they cannot."""
    group = dist.new_group()
    try:
        kullback.enable_symmetric_memory(group)
    except RuntimeError as error:
        print(error)
        return None
    return group


def contestants(kind: str):
    """Names, losses, and whether they take slices; else the whole rows, on one GPU."""
    yield "one GPU", functools.partial(kullback.divergence, kind=kind), False
    if exchanging():
        yield "kullback, in the kernel", functools.partial(kullback.divergence, kind=kind, group=exchanging()), True
    yield "kullback", functools.partial(kullback.divergence, kind=kind, group=dist.group.WORLD), True
    compiled = torch.compile(functools.partial(eager, kind))
    yield "eager, gathered", lambda x, y: eager(kind, GatherVocabulary.apply(x), GatherVocabulary.apply(y)), True
    yield "torch.compile, gathered", lambda x, y: compiled(GatherVocabulary.apply(x), GatherVocabulary.apply(y)), True
    if kind == "kl":
        yield "by hand", HandWritten.apply, True
        if importlib.util.find_spec("fast_llm") is not None:
            yield "fast-llm", lambda x, y: bench.FastLLM.apply("forward_kl", x, y, dist.group.WORLD), True


def dense(kind: str, rows: int, vocab: int, device: torch.device, clock: Clock) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    vocab = vocab // world * world  # rivals gather slices of one width
    wide = bench.make_inputs(rows, vocab, torch.bfloat16, "logits", device.type)
    slices = [t.tensor_split(world, -1)[rank].contiguous() for t in wide]
    truth = reference.truth(kind, "logits", *wide, **DIVERGENCES[kind].defaults).mean().item()
    few = [t[:CHECKED].double() for t in wide]
    few[0].requires_grad_()
    parameters = DIVERGENCES[kind].defaults
    (exact,) = torch.autograd.grad(reference.rows(kind, "logits", *few, **parameters).sum() / rows, few[0])
    own = exact.tensor_split(world, -1)[rank]
    del few
    entries = []
    for name, loss, takes_slices in contestants(kind):
        entry = {"name": name}
        student, teacher = slices if takes_slices else wide
        student = student.detach().requires_grad_()

        def forward(loss=loss, student=student, teacher=teacher):
            return loss(student.detach(), teacher)

        def run(loss=loss, student=student, teacher=teacher):
            student.grad = None
            value = loss(student, teacher)
            value.backward()
            return value.detach()

        try:
            entry["loss_error"] = abs(run().item() - truth) / truth
            gradient, expected = student.grad[:CHECKED].double(), own if takes_slices else exact
            entry["gradient_error"] = ((gradient - expected).norm() / expected.norm()).item()
            entry["forward_seconds"] = clock.seconds(forward)
            entry["seconds"] = clock.seconds(run)
            entry["in_a_row_seconds"] = clock.in_a_row(run)
            student.grad = None
            entry["peak_bytes"] = clock.peak(run)
        except torch.OutOfMemoryError as error:  # a rival's failure is a result too, and every rank has it
            if name == "one GPU" or name.startswith("kullback"):
                raise
            entry["failed"] = str(error).splitlines()[0][:200]
        entries.append(entry)
        student.grad = None
    case = {"rows": rows, "vocab": vocab, "kind": kind, "inputs": "random", "ranks": world}
    result = {"case": case, "results": entries}
    measured = parts(kind, slices, clock)
    seconds = {entry["name"]: entry["seconds"] for entry in entries if "seconds" in entry}
    one, two = seconds["one GPU"], seconds.get("kullback, in the kernel")
    result |= {"parts": measured, "forecast": forecast(one, measured, world)}
    if two is not None:
        result["forecast in the kernel"] = forecast_in_kernel(one, two, world)
    return result


def parts(kind: str, slices: list[Tensor], clock: Clock) -> dict[str, float]:
    """Seconds of each step of a rank, one by one; of the merge with as many pieces as there may be."""
    problem = Problem(kind, Side("logits"), Side("logits"), *DIVERGENCES[kind].defaults.values())
    x, y = slices
    rows = x.size(0)
    stats, sums = (
        packed(rows, count, x)
        for count in (len(fields(RowStats, problem.formula.has_tilted_lse)), len(RowSums._fields))
    )
    operands, d_input = Operands(x, y), torch.empty_like(x)
    found = {"statistics": clock.seconds(lambda: backends.run(Rows(problem, operands, "statistics", found=stats)))}
    if not problem.has_moments:
        work = Rows(problem, operands, "accumulate", known=stats, found=sums)
        found["accumulate"] = clock.seconds(lambda: backends.run(work))

    def merge(pieces: int) -> RowState:
        merged = merge_stats(problem, [unpacked(RowStats, stats)] * pieces)
        total = sums_of(merged) if problem.has_moments else merge_sums([RowSums(*sums)] * pieces)
        return finish(problem, merged, total)[1]

    state = torch.stack(merge(1)[: len(fields(RowState, problem.formula.has_tilted_lse))])
    work = Rows(problem, operands, "gradient", scale=1 / rows, known=state, d_input=d_input)
    found["gradient"] = clock.seconds(lambda: backends.run(work))
    for pieces in (2, 4, 8):
        found[f"merge of {pieces}"] = clock.seconds(lambda pieces=pieces: merge(pieces))
    found["all_gather"] = clock.seconds(lambda: collectives.all_gather(stats, dist.group.WORLD))
    return found


def forecast(one: float, found: dict[str, float], world: int) -> dict:
    """Seconds on more GPUs: what reads a slice takes less by as much as the slice is shorter; a collective no less."""
    reads = sum(found.get(name, 0) for name in ("statistics", "accumulate", "gradient"))
    gathers = found["all_gather"] * (2 if "accumulate" in found else 1)
    expected = {n: reads * world / n + gathers * max(1, n / world) + found[f"merge of {n}"] for n in (2, 4, 8)}
    return {n: {"seconds": seconds, "of_one": one / seconds} for n, seconds in expected.items()}


def forecast_in_kernel(one: float, measured: float, world: int) -> dict:
    """What rows take beyond their share of one GPU's time, waiting for other ranks, they take of any share."""
    expected = {n: one / n + measured - one / world for n in (2, 4, 8)}
    return {n: {"seconds": seconds, "of_one": one / seconds} for n, seconds in expected.items()}


def hidden_states(kind: str, rows: int, hidden: int, vocab: int, device: torch.device, clock: Clock) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wide = linear.operands("random", rows, hidden, hidden, vocab, device, dtype)
    exact, *gradients = linear.truth(wide, kind, CHECKED if device.type == "cpu" else 256)
    heads = [wide[i].detach().tensor_split(world, 0)[rank].clone() for i in (1, 3)]
    first = sum(t.size(0) for t in wide[1].tensor_split(world, 0)[:rank])
    place = {"group": dist.group.WORLD, "first_token": first, "total_vocab": vocab}
    own = [t.detach().tensor_split(world, 0)[rank].clone() for t in (wide[0], wide[2])]
    cases = {
        "one GPU": (wide, {}, gradients),
        "kullback": ((wide[0], heads[0], wide[2], heads[1]), place, (gradients[0], None)),
        "kullback, rows sharded": (
            (own[0], heads[0], own[1], heads[1]),
            {**place, "sequence_dim": 0},
            (gradients[0].tensor_split(world, 0)[rank], None),
        ),
    }
    if exchanging():
        cases["kullback, in the kernel"] = (cases["kullback"][0], place | {"group": exchanging()}, cases["kullback"][2])
    head_gradient = gradients[1].tensor_split(world, 0)[rank]
    entries = []
    for name, (tensors, options, (d_hidden, d_head)) in cases.items():
        h, w, t, v = tensors
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()

        def run(h=h, w=w, t=t, v=v, options=options):
            h.grad = w.grad = None
            value = kullback.linear_divergence(h, w, t, v, kind, **options)
            value.backward()
            return value.detach()

        value = run().item()
        pairs = (h.grad, d_hidden), (w.grad, head_gradient if d_head is None else d_head)
        errors = [((ours.double() - truth).norm() / truth.norm()).item() for ours, truth in pairs]
        entry = {"name": name, "loss_error": abs(value - exact) / exact}
        entry |= {"hidden_gradient_error": errors[0], "head_gradient_error": errors[1], "seconds": clock.seconds(run)}
        h.grad = w.grad = None
        entry["peak_bytes"] = clock.peak(run)
        h.grad = w.grad = None
        entries.append(entry)
    return {
        "case": {"rows": rows, "hidden": hidden, "vocab": vocab, "kind": kind, "ranks": world},
        "results": entries,
    }


def graph(rows: int, vocab: int, device: torch.device, clock: Clock) -> dict:
    """kl with its gradient, captured as a CUDA graph with its collective, and replayed on other numbers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wide = bench.make_inputs(rows, vocab, torch.bfloat16, "logits", device.type)
    x, y = (t.tensor_split(world, -1)[rank].contiguous() for t in wide)
    x.requires_grad_()
    group = exchanging() or dist.group.WORLD
    run = lambda: torch.autograd.grad(kullback.divergence(x, y, group=group), x)[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        gradient = run()
    with torch.no_grad():
        x.copy_(x.flip(0))
    captured.replay()
    expected = run()
    error = ((gradient.float() - expected.float()).norm() / expected.float().norm()).item()
    return {"gradient_error_against_eager": error, "seconds": clock.seconds(captured.replay)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for parallel.json")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts, in a file of their own")
    arguments = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("torchrun has to start it: torchrun --nproc-per-node 2 benchmarks/parallel.py --out FOLDER")
    parts = arguments.only or PARTS
    name_of_file = "_".join(["parallel", *(arguments.only or [])]) + ".json"
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    is_first = dist.get_rank() == 0
    clock = Clock(device.type, 10 if has_gpus else 2, backlogs=12)  # 4 ms
    result = {
        "provenance": bench.provenance(device.type) | {"ranks": dist.get_world_size(), "backend": dist.get_backend()}
    }

    def save(name: str, measured) -> None:
        result[name] = measured
        if is_first:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / name_of_file).write_text(json.dumps(result, indent=1) + "\n")

    latency = {}
    for size in SIZES:
        given = torch.zeros(size // 8, dtype=torch.float64, device=device)
        latency[size] = clock.seconds(lambda given=given: collectives.all_gather(given, dist.group.WORLD))
    save("all_gather_seconds", latency)
    for kind in ("kl", "jensen_shannon"):
        if "dense" in parts:
            save(f"dense {kind}", dense(kind, *(SMALL_DENSE if arguments.small else DENSE), device, clock))
        if "linear" in parts:
            save(f"linear {kind}", hidden_states(kind, *(SMALL_LINEAR if arguments.small else LINEAR), device, clock))
    if has_gpus and "graph" in parts:
        save("graph", graph(*(SMALL_DENSE if arguments.small else DENSE), device, clock))
    if is_first:
        table(result)
    dist.barrier()  # a process that ends while another still waits may abort it
    dist.destroy_process_group()


def table(result: dict) -> None:
    """Milliseconds, and how many times one GPU's speed."""
    print("all_gather, bytes a rank -> µs:", {k: round(v * 1e6, 1) for k, v in result["all_gather_seconds"].items()})
    for name, of in result.items():
        if "results" not in of:
            continue
        one = of["results"][0]["seconds"]
        print(f"\n{name} {of['case']}")
        for entry in of["results"]:
            if "failed" in entry:
                print(f"  {entry['name']:26} {entry['failed']}")
                continue
            errors = {k.removesuffix("_error"): f"{v:.1e}" for k, v in entry.items() if k.endswith("_error")}
            peak = "" if entry["peak_bytes"] is None else f"{entry['peak_bytes'] / 1e9:7.2f} GB"
            print(
                f"  {entry['name']:26} {entry['seconds'] * 1e3:9.3f} ms {one / entry['seconds']:6.2f} x {peak} {errors}"
            )
            if "forward_seconds" in entry:
                others = (entry["forward_seconds"], entry["in_a_row_seconds"])
                print("     forward {:.3f} ms; in a row {:.3f} ms".format(*(1e3 * t for t in others)))
        if "parts" in of:
            print("  parts, µs:", {k: round(v * 1e6, 1) for k, v in of["parts"].items()})
            for name in ("forecast", "forecast in the kernel"):
                print(f"  {name}:", {n: f"{f['of_one']:.2f} x" for n, f in of.get(name, {}).items()})
    if "graph" in result:
        print("\nCUDA graph of kl:", result["graph"])


if __name__ == "__main__":
    main()
