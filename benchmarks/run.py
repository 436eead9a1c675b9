"""Run the reported cases on this machine and write the results as JSON.

    python benchmarks/run.py --out benchmarks/results/h200 [--only host]
    python benchmarks/run.py --out benchmarks/results/h200 --only logits --backend torch --tag _torch
    python benchmarks/run.py --out benchmarks/results/h200 --only real [--kinds kl] [--students bits5] [--rivals]
    python benchmarks/run.py --out benchmarks/results/h200 --only real --dtype float32 --tag _float32
    python benchmarks/run.py --out benchmarks/results/h100 --only written

The last three run on rows of a language model, which `make real` writes, and needs safetensors.

On a CPU the allocator decides much of the time: run it as it is, and once more with memory retained
(MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=68719476736 in the environment).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cases
import torch
from rich.console import Console
from rich.table import Table

import kullback
from kullback.cli import bench, reference
from kullback.cli import rows as model_rows
from kullback.divergences import DIVERGENCES

console = Console(width=160)


class Nothing(torch.autograd.Function):
    """The least that a loss with a gradient of its own can take: what autograd itself takes."""

    @staticmethod
    def forward(ctx, input, loss, gradient):
        ctx.gradient = gradient
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.gradient, None, None


def host(device: str) -> list[dict]:
    """Microseconds of host time a call on small inputs, the device kept busy but not waited for.

    Processors of shared hosts run at one of two speeds for tenths of a second, 1.6 times apart: all is timed in turn,
    so that both fall on everything alike, and the fastest of many short runs stands beside their median.
    """
    results = []
    for rows, vocab in cases.SMALL:
        x, y = bench.make_inputs(rows, vocab, torch.float32, "probs", device)
        student = x.clone().requires_grad_()
        zero, gradient, logits = x.new_zeros(()), torch.zeros_like(x), x.log()
        losses = {
            "kullback, logits": lambda a, b, logits=logits: kullback.divergence(a, logits),
            "nothing": lambda a, b, zero=zero, gradient=gradient: Nothing.apply(a, zero, gradient),
            "kullback": lambda a, b: kullback.kl_div(a, b, "batchmean", form="probs"),
            "eager": lambda a, b: torch.nn.functional.kl_div(a.log(), b, reduction="batchmean"),
        }
        calls = {}
        for name, loss in losses.items():

            def step(loss=loss) -> None:
                loss(student, y).backward()
                student.grad = None

            calls[f"{name}, forward"] = lambda loss=loss: loss(x, y)
            calls[f"{name}, forward + gradient"] = step
        times = {name: [] for name in calls}
        for _, (name, call) in itertools.product(range(30), calls.items()):
            for _ in range(20):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            times[name].append((time.perf_counter() - begin) / 100 * 1e6)
        summary = {name: {"median": statistics.median(of), "fastest": min(of)} for name, of in times.items()}
        results.append({"rows": rows, "vocab": vocab, "microseconds": summary})
    return results


FIRST_USE = """
import time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.rand(64, 128256, device=device).softmax(-1)
logits, target = torch.randn(2, 64, 128256, device=device).bfloat16()
logits.requires_grad_()
float(x.sum())
import kullback
begin = time.perf_counter()
{call}
if device == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""
FIRST_CALLS = {
    "kl of probabilities": "kullback.divergence(x, x, form='probs')",
    "kl of bfloat16 logits": "kullback.divergence(logits.detach(), target)",
    "kl of bfloat16 logits, with the gradient": "kullback.divergence(logits, target).backward()",
    "jensen_shannon of bfloat16 logits, with the gradient": (
        "kullback.divergence(logits, target, 'jensen_shannon').backward()"
    ),
}


def first_use(call: str) -> dict[str, float]:
    """Seconds of the first call in a process, with an empty cache and with a warm one; medians of three."""

    def seconds(directory: str) -> float:
        caches = {"XDG_CACHE_HOME": directory, "CUDA_CACHE_PATH": directory}  # NVRTC has one of its own
        return float(
            subprocess.run(
                [sys.executable, "-c", FIRST_USE.replace("{call}", call)],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )

    cold, warm = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as directory:
            cold.append(seconds(directory))
            warm.append(seconds(directory))
    return {"cold": statistics.median(cold), "warm": statistics.median(warm)}


def tell(result: dict) -> None:
    """A line of figures."""
    case = result["case"]
    whose = f"{case['student']} of {case['source']} rows" if "student" in case else f"noise {case['noise']}"
    times = {
        f"{e['name']} {e['task']}": (round(e["seconds"] * 1e3, 3), round(e["of_ceiling"], 3))
        for e in result["results"]
        if "seconds" in e
    }
    ours = result["results"][0]
    print(
        case["kind"], case["form"], case["dtype"], f"{case['rows']}x{case['vocab']}", whose,
        f"read {result['read_seconds'] * 1e3:.3f} ms", f"of ceiling {ours['of_ceiling']:.3f}", times,
        f"error {ours['error']:.0e}", f"row {result['worst_row_error']:.0e}", flush=True,
    )  # fmt: skip


def table(results: list[dict]) -> Table:
    """Milliseconds with a student's gradient, and the share of the three passes' floor in it."""
    kinds = list(dict.fromkeys(r["case"]["kind"] for r in results))
    shown = Table("with gradient, ms (share of three passes)", "", *kinds)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in results:
        whose = f"{r['case']['student']}, {r['case']['rows']} x {r['case']['vocab']}"
        for e in r["results"]:
            if e["task"] == "forward + gradient":
                told = f"{e['seconds'] * 1e3:.4g} ({e['of_ceiling']:.2f})" if "seconds" in e else "failed"
                cells.setdefault((whose, e["name"]), {})[r["case"]["kind"]] = told
    for (whose, name), row in cells.items():
        shown.add_row(whose, name, *(row.get(kind, "") for kind in kinds))
    return shown


def in_turn(source: str, student: str, rows: int, dtype: str, kind: str, rounds: int = 15) -> list[dict]:
    """Milliseconds on a CPU, which others may share: all rivals in turn, so that its slow times fall on all alike."""
    x, y = model_rows.load(source, student, rows, bench.DTYPES[dtype], "cpu")
    truth = reference.truth(kind, "logits", x, y, **DIVERGENCES[kind].defaults).mean()
    leaf = x.clone().requires_grad_()
    calls, results = {}, []
    for name, loss in bench.contestants(kind, "logits"):

        def step(loss=loss) -> torch.Tensor:
            leaf.grad = None
            value = loss(leaf, y)
            value.backward()
            return value.detach()

        for task, call in (("forward", lambda loss=loss: loss(x, y)), ("forward + gradient", step)):
            error = bench.relative_error(call(), truth, bench.LEAST[dtype])
            calls[name, task] = call, error, []
    for _, (call, _, times) in itertools.product(range(rounds), calls.values()):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    for (name, task), (_, error, times) in calls.items():
        found = {"median": statistics.median(times), "fastest": min(times), "error": error}
        results.append({"name": name, "task": task, "milliseconds": found})
    return results


def compile_kernels(kind: str, vocab: int, dtype: str, task: str) -> None:
    """Those of a task on a GPU's rows of logits, so that another process finds them in the cache."""
    x, y = bench.make_inputs(8, vocab, bench.DTYPES[dtype], "logits", "cuda")
    bench.call_of(functools.partial(kullback.divergence, kind=kind), x, y, task)()


def compile_at_once(wanted: list[tuple[str, int, str, str]]) -> None:
    """Kernels of these kinds, vocabularies, dtypes and tasks, by all processors: one after the other takes minutes."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), spawn) as pool:
        for compiled in [pool.submit(compile_kernels, *each) for each in wanted]:
            compiled.result()


def real(arguments: argparse.Namespace, device: str) -> Iterator[dict]:
    """Each student and kind on rows of the file, then on made ones; the report so far, as it grows."""
    rows, dtype = cases.REAL_GPU if device == "cuda" else cases.REAL_CPU
    made = cases.MADE_GPU if device == "cuda" and not arguments.dtype else cases.MADE_CPU
    dtype = arguments.dtype or dtype
    vocab = model_rows.vocabulary(arguments.rows)
    students = arguments.students or model_rows.students(arguments.rows)
    listed = [(arguments.rows, name, rows, vocab, dtype, name in arguments.rivals) for name in students]
    if made:
        listed += [("made", name, *made, False) for name in cases.MADE_STUDENTS if name in students]
    if device == "cuda" and arguments.backend is None:
        shapes = {(vocab, dtype) for _, _, _, vocab, dtype, _ in listed}
        compile_at_once([(kind, *shape, task) for kind in arguments.kinds for shape in shapes for task in bench.TASKS])
    report = {"rows": model_rows.read(model_rows.find(arguments.rows))[1], "results": []}
    repeats = 20 if device == "cuda" else 7
    for source, name, rows, vocab, dtype, rivals in listed:
        for kind in arguments.kinds:
            torch._dynamo.reset()
            result = bench.bench(
                *(rows, vocab, dtype, "logits", kind, device, repeats, lambda what: None),
                rivals=rivals,
                source=source,
                student=name,
            )
            result.pop("rows_made", None)  # once is enough
            if device == "cpu" and rivals:
                result["in_turn"] = in_turn(source, name, rows, dtype, kind)
                for e in result["in_turn"]:
                    print(kind, name, "in turn,", e["name"], e["task"], e["milliseconds"], flush=True)
            report["results"].append(result)
            yield report


def written(arguments: argparse.Namespace, device: str) -> Iterator[dict]:
    """Losses of rows, written one by one: the worst of those above 1e-3, and what they cost beside their mean."""
    vocab, known = model_rows.vocabulary(arguments.rows), model_rows.students(arguments.rows)
    students = [name for name in arguments.students or known if name != "identical"]
    sizes = [(rows, vocab, dtype) for rows, dtype in (cases.REAL_GPU, cases.REAL_FLOAT32)]
    listed = [(arguments.rows, name, *size) for size in sizes for name in students]
    listed += [("made", name, *cases.MADE_GPU) for name in cases.MADE_STUDENTS if name in students]
    report = {"provenance": bench.provenance(device), "case": "rows with a loss above 1e-3", "results": []}
    if device == "cuda":
        shapes = {(vocab, dtype) for _, _, _, vocab, dtype in listed}
        compile_at_once([(kind, *shape, "forward") for kind in cases.WRITTEN_KINDS for shape in shapes])
    clock = bench.Clock(device, 20)
    for source, name, rows, vocab, dtype in listed:
        x, y = model_rows.drawn(source, name, rows, vocab, bench.DTYPES[dtype], device)
        for kind in cases.WRITTEN_KINDS:
            truth = reference.truth(kind, "logits", x, y, **DIVERGENCES[kind].defaults)
            each, mean = (functools.partial(kullback.divergence, x, y, kind, reduction=r) for r in ("none", "mean"))
            error = ((each().double() - truth).abs() / truth)[truth > 1e-3]
            seconds = clock.in_turn(each, mean)
            report["results"].append({
                "case": {"source": source, "student": name, "kind": kind, "dtype": dtype, "rows": rows},
                "worst_row_error": error.max().item(),
                "mean_error": abs(mean().item() / truth.mean().item() - 1),
                "none_seconds": seconds[0],
                "mean_seconds": seconds[1],
            })  # fmt: skip
            print(report["results"][-1], flush=True)
        yield report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--only", choices=["host", "cases", "logits", "real", "written"], help="one part")
    parser.add_argument("--kinds", nargs="+", choices=DIVERGENCES, default=cases.REAL_KINDS, help="with --only real")
    parser.add_argument("--students", nargs="+", help="with --only real; by default all")
    parser.add_argument(
        "--rivals", nargs="*", default=cases.REAL_RIVALS, help="with --only real: on which students' rows"
    )
    parser.add_argument("--rows", default="real", help="with --only real: another file")
    parser.add_argument("--dtype", choices=bench.DTYPES, help="with --only real: of the file's rows, and these alone")
    parser.add_argument("--backend", choices=["cuda", "c", "torch"], help="force one")
    parser.add_argument("--tag", default="", help="appended to the file names")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forced = kullback.backend(arguments.backend) if arguments.backend else contextlib.nullcontext()

    def save(name: str, data: object) -> None:
        (arguments.out / f"{name}{arguments.tag}.json").write_text(json.dumps(data, indent=1) + "\n")

    with forced:
        if arguments.only == "real":
            for report in real(arguments, device):
                save("real", report)
                tell(report["results"][-1])
            console.print(table(report["results"]))
            return
        if arguments.only == "written":
            for report in written(arguments, device):
                save("written_rows", report)
            return
        if arguments.only not in ("cases", "logits"):
            first = {name: first_use(call) for name, call in FIRST_CALLS.items()}
            result = {"host": host(device), "first_use": first, "provenance": bench.provenance(device)}
            save("host", result)
            for entry in result["host"]:
                print(f"host time, {entry['rows']} x {entry['vocab']}, microseconds: median, fastest")
                for name, of in entry["microseconds"].items():
                    print(f"  {name:40} {of['median']:7.1f} {of['fastest']:7.1f}")
            print("first use", first, flush=True)
        if arguments.only == "host":
            return
        listed = [(*case, True, 1.0) for case in (cases.GPU if device == "cuda" else cases.CPU)]
        if arguments.backend == "torch" and arguments.only == "logits":
            of_torch = cases.TORCH_GPU if device == "cuda" else cases.TORCH_CPU
            listed = [(*case[:3], "logits", *case[3:]) for case in of_torch]
        elif device == "cuda" and arguments.only != "cases":
            logits = [(*case[:3], "logits", *case[3:]) for case in cases.LOGITS]
            listed = logits if arguments.only == "logits" else listed + logits
        if arguments.only == "logits":
            listed = [case for case in listed if case[3] == "logits"]
        results = []
        for rows, vocab, dtype, form, kind, rivals, noise in listed:
            torch._dynamo.reset()
            repeats = 20 if device == "cuda" else 7
            result = bench.bench(rows, vocab, dtype, form, kind, device, repeats, lambda what: None, rivals, noise)
            results.append(result)
            save("logits" if arguments.only == "logits" else "cases", results)
            tell(result)


if __name__ == "__main__":
    main()
