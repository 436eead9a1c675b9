"""Run the reported cases on this machine and write the results as JSON.

    python benchmarks/run.py --out benchmarks/results/h200 [--only host] [--backend torch]

On a CPU the allocator decides much of the time: run it as it is, and once more with memory retained
(MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=68719476736 in the environment).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cases
import torch

import kullback
from kullback.cli import bench


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
float(x.sum())
import kullback
begin = time.perf_counter()
float(kullback.divergence(x, x, form="{form}"))
print(time.perf_counter() - begin)
"""


def first_use(form: str) -> dict[str, float]:
    """Seconds of the first call in a process, with an empty cache and with a warm one; medians of three."""

    def seconds(directory: str) -> float:
        caches = {"XDG_CACHE_HOME": directory, "CUDA_CACHE_PATH": directory}  # NVRTC has one of its own
        return float(
            subprocess.run(
                [sys.executable, "-c", FIRST_USE.replace("{form}", form)],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--only", choices=["host", "cases", "logits"], help="one part")
    parser.add_argument("--backend", choices=["cuda", "c", "torch"], help="force one")
    parser.add_argument("--tag", default="", help="appended to the file names")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forced = kullback.backend(arguments.backend) if arguments.backend else contextlib.nullcontext()

    def save(name: str, data: object) -> None:
        (arguments.out / f"{name}{arguments.tag}.json").write_text(json.dumps(data, indent=1) + "\n")

    with forced:
        if arguments.only not in ("cases", "logits"):
            first = {form: first_use(form) for form in ("probs", "logits")}
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
        if device == "cuda" and arguments.only != "cases":
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
            times = {
                f"{e['name']} {e['task']}": (round(e["seconds"] * 1e3, 3), round(e["of_ceiling"], 3))
                for e in result["results"]
                if "seconds" in e
            }
            ours = result["results"][0]
            print(
                kind, form, dtype, f"{rows}x{vocab}", f"noise {noise}", f"read {result['read_seconds'] * 1e3:.3f} ms",
                f"of ceiling {ours['of_ceiling']:.3f}", times, f"error {ours['error']:.0e}",
                f"row {result['worst_row_error']:.0e}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
