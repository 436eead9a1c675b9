"""Time and check a loss against its rivals and against what the memory allows."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib.util
import math
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kullback
from kullback import kernelbench
from kullback.backends.cuda import plan
from kullback.backends.cuda.launch import Launcher
from kullback.backends.cuda.source import inlined
from kullback.cli import reference
from kullback.cli import rows as rows_module
from kullback.divergences import DIVERGENCES

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
Loss = Callable[[Tensor, Tensor], Tensor]
TRUTH_ERROR = 1e-15  # of equal rows
# Smaller losses are judged as this one.
LEAST = {name: TRUTH_ERROR * (1e10 if name == "float64" else 1e5) for name in DTYPES}


def make_inputs(
    rows: int, vocab: int, dtype: torch.dtype, form: str, device: str, noise: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The workload's probabilities, their logarithms, or logits of a language model's spread, and those with noise."""
    torch.manual_seed(0)
    if form == "logits":
        y = torch.randn(rows, vocab, device=device).mul_(3)
        return (y + noise * torch.randn_like(y)).to(dtype), y.to(dtype)
    pair = kernelbench.inputs(rows, vocab, device=device)
    return tuple((t if form == "probs" else t.log_()).to(dtype) for t in pair)  # type: ignore[return-value]


def fitting_rows(rows: int, vocab: int, dtype: torch.dtype, device: str) -> int:
    """As many rows as leave room for the textbook's temporaries."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else _available_memory()
    # Two inputs, a gradient, and the six or so float32 temporaries of an eager formula.
    per_row = vocab * (3 * dtype.itemsize + 6 * max(4, dtype.itemsize))
    return min(rows, int(0.8 * free) // per_row)


def _available_memory() -> int:
    for line in (
        Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if Path("/proc/meminfo").exists() else ()
    ):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 4 << 30


def _compiled(loss: Loss) -> Loss:
    """By torch.compile: where it cannot even be set up, a loss that says so."""
    try:
        return torch.compile(loss)
    except Exception as error:  # of any kind: inductor looks at compilers and locales
        reason = error

    def failing(x: Tensor, y: Tensor) -> Tensor:
        raise reason

    return failing


def contestants(kind: str, form: str) -> Iterator[tuple[str, Loss]]:
    """Names and losses: the sum over rows divided by their number."""
    parameters = DIVERGENCES[kind].defaults
    yield "kullback", functools.partial(kullback.divergence, kind=kind, form=form)

    def eager(x: Tensor, y: Tensor) -> Tensor:
        return reference.rows(kind, form, x, y, **parameters).mean()

    if kind == "kl" and form != "logits":

        def eager(x: Tensor, y: Tensor) -> Tensor:  # as users write it
            log_q = torch.log(x) if form == "probs" else x
            return torch.nn.functional.kl_div(log_q, y, reduction="batchmean", log_target=form == "log_probs")

    yield "eager", eager
    yield "torch.compile", _compiled(eager)
    if form != "probs" and kind in ("kl", "jensen_shannon") and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss  # type: ignore[import-not-found]

        liger = LigerKLDIVLoss(reduction="batchmean", log_target=True) if kind == "kl" else LigerJSD(beta=0.5)

        def from_logits(x: Tensor, y: Tensor) -> Tensor:
            return liger(x.log_softmax(-1), y.log_softmax(-1))  # type: ignore[no-any-return]

        yield "liger", from_logits if form == "logits" else liger
    if form == "logits" and kind in ("kl", "reverse_kl") and importlib.util.find_spec("fast_llm"):
        yield "fast-llm", functools.partial(FastLLM.apply, "forward_kl" if kind == "kl" else kind)


class FastLLM(torch.autograd.Function):
    """Fast-LLM's kernel, which returns the loss and writes the gradient at once, as its own wrapper has it."""

    @staticmethod
    def forward(ctx: Any, kind: str, x: Tensor, y: Tensor, group: Any = None) -> Tensor:
        from fast_llm.functional.config import EntropyLossType, TargetFormat  # type: ignore[import-not-found]
        from fast_llm.functional.triton.entropy_loss import (  # type: ignore[import-not-found]
            triton_entropy_loss_forward_backward,
        )

        loss: Tensor
        loss, _, ctx.gradient = triton_entropy_loss_forward_backward(
            x,
            y,
            None,
            grad_output=1.0 if ctx.needs_input_grad[1] else None,
            group=group,
            target_format=TargetFormat.logits,
            entropy_loss_type=EntropyLossType(kind),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.gradient, None, None


BACKLOG = 4  # sums of 2^28 numbers, 0.25 ms each on an H200: more than a call's host time


class Clock:
    """Median seconds of calls, after warm-up; peak memory of one.

    On a GPU the time is the device's: it is kept busy (reading, so that its cache holds nothing to write
    back) while the host prepares the call.
    """

    def __init__(self, device: str, repeats: int, backlogs: int = BACKLOG) -> None:
        self.device, self.repeats, self.backlogs = device, repeats, backlogs
        self.backlog = torch.zeros(1 << 28, device=device) if device == "cuda" else None

    def seconds(self, run: Callable[[], Any]) -> float:
        return self.in_turn(run)[0]

    def in_turn(self, *runs: Callable[[], Any]) -> list[float]:
        """Of each, where a machine's slower times fall on all. In any order: some leave a GPU cooler than others."""
        for run in runs:
            for _ in range(3 if self.device == "cuda" else 1):
                run()
        times: list[list[float]] = [[] for _ in runs]
        order, draw = list(range(len(runs))), random.Random(0)
        for _ in range(self.repeats):
            draw.shuffle(order)
            for i in order:
                times[i].append(self.once(runs[i]))
        return [float(statistics.median(of)) for of in times]

    def once(self, run: Callable[[], Any]) -> float:
        """Seconds of one call."""
        if self.backlog is None:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        for _ in range(self.backlogs):
            self.backlog.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def peak(self, run: Callable[[], Any]) -> int | None:
        """Bytes allocated at most above what was there before; only the CUDA allocator can tell."""
        if self.device != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak


def ceiling(x: Tensor, y: Tensor, clock: Clock) -> float:
    """Seconds that reading both tensors takes: the floor of any forward pass."""
    if x.device.type != "cuda":
        return clock.seconds(lambda: (x.sum(), y.sum()))
    launcher = Launcher(inlined("cuda/ceiling.cuh", {}), "kullback_ceiling", x.device.index or 0)
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    count = x.numel() * x.itemsize // plan.VECTOR_BYTES
    return clock.seconds(lambda: launcher(1 << 30, x.data_ptr(), y.data_ptr(), out.data_ptr(), count))


# Tasks, and how many passes over a tensor each makes; the last two are asked of kullback alone, from logits
TASKS = {"forward": 2, "forward + gradient": 3, "forward + both gradients": 4, "each row, then its gradient": 5}


def bench(
    rows: int,
    vocab: int,
    dtype: str,
    form: str,
    kind: str,
    device: str,
    repeats: int,
    progress: Callable[[str], None],
    rivals: bool = True,
    noise: float = 1.0,
    source: str = "random",
    student: str = "",
) -> dict[str, Any]:
    """Everything about one case, as plain data. Rows are random, made, or of the file that `source` names."""
    wanted, rows = rows, fitting_rows(rows, vocab, DTYPES[dtype], device)
    if rows < 1:
        raise MemoryError(f"no row of {vocab} tokens fits the memory of {device}")
    progress("drawing inputs")
    case = {"rows": rows, "vocab": vocab, "dtype": dtype, "form": form, "kind": kind}
    if source == "random":
        case["noise"] = noise
        x, y = make_inputs(rows, vocab, DTYPES[dtype], form, device, noise)
    else:
        case |= {"source": source, "student": student}
        x, y = rows_module.drawn(source, student, rows, vocab, DTYPES[dtype], device)
    clock = Clock(device, repeats)
    parameters = DIVERGENCES[kind].defaults
    progress("float64 truth")
    truth = reference.truth(kind, form, x, y, **parameters)
    progress("ceiling")
    floor = ceiling(x, y, clock)
    bytes_read = (x.numel() + y.numel()) * x.itemsize
    out = torch.empty_like(x)
    copy = clock.seconds(functools.partial(out.copy_, x))
    del out
    # A pass over a tensor: as a read's, or where most of the work is measured against it, as half a copy's
    a_pass = copy / 2 if form == "logits" else floor / 2
    entries: list[dict[str, Any]] = []
    for name, loss in contestants(kind, form):
        if name != "kullback" and not rivals:
            break
        for task in list(TASKS)[: 4 if (name, form) == ("kullback", "logits") else 2]:
            progress(f"{name}, {task}")
            entry: dict[str, Any] = {"name": name, "task": task}
            try:
                entry |= _measure(loss, x, y, task, truth.mean(), clock)
            except Exception as error:  # a rival's failure is a result too
                if name == "kullback":
                    raise
                entry["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                entry["of_ceiling"] = TASKS[task] * a_pass / entry["seconds"]
                if name == "kullback" and task == "forward":
                    entry["ran_on"] = kullback.backend_info().name
            entries.append(entry)
            gc.collect()
    progress("each row")
    ours = kullback.divergence(x, y, kind, form=form, reduction="none")
    row_error = relative_error(ours, truth, LEAST[dtype])
    return {
        "case": case,
        "rows_asked": wanted,
        "read_seconds": floor,
        "read_terabytes_a_second": bytes_read / floor / 1e12,
        "copy_seconds": copy,
        "copy_terabytes_a_second": 2 * x.numel() * x.itemsize / copy / 1e12,
        "value": truth.mean().item(),
        **({} if source in ("random", "made") else {"rows_made": rows_module.read(rows_module.find(source))[1]}),
        "worst_row_error": row_error,
        "results": entries,
        "provenance": provenance(device),
    }


def call_of(loss: Callable[..., Tensor], x: Tensor, y: Tensor, task: str) -> Callable[[], Tensor]:
    """What a task does once."""
    if task == "forward":
        return lambda: loss(x, y)
    student, teacher = x.detach().requires_grad_(), y.detach().requires_grad_(task == "forward + both gradients")
    upstream = torch.rand(x.shape[:-1], device=x.device)

    def run() -> Tensor:
        student.grad = teacher.grad = None
        if task == "each row, then its gradient":
            losses = loss(student, teacher, reduction="none")
            losses.backward(upstream)
            return losses.detach().mean()
        result = loss(student, teacher)
        result.backward()
        return result.detach()

    return run


def _measure(
    loss: Callable[..., Tensor], x: Tensor, y: Tensor, task: str, truth: Tensor, clock: Clock
) -> dict[str, Any]:
    run = call_of(loss, x, y, task)
    value = run()
    error = relative_error(value, truth, TRUTH_ERROR * 1e5)
    return {"seconds": clock.seconds(run), "error": error, "peak_bytes": clock.peak(run)}


def relative_error(ours: Tensor, truth: Tensor, least: float) -> float:
    """The largest of any element, where less than `least` counts as that; infinite where one alone is no number.

    What the dtype of ours cannot hold is an infinity.
    """
    expected = torch.where(truth.abs() <= torch.finfo(ours.dtype).max, truth, truth * math.inf)
    found = ours.double()
    error = (found - expected).abs() / expected.abs().clamp_min(least)
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    return torch.where(is_same, 0.0, torch.where(error.isnan(), math.inf, error)).max().item()


def provenance(device: str) -> dict[str, Any]:
    """Where and with what a result was measured."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kullback": kullback.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **_commit(),
    }
    if device == "cuda":
        result |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
    else:
        result |= {"device": _processor(), "threads": torch.get_num_threads()}
    return result


def _commit() -> dict[str, Any]:
    here = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        run = lambda *a: subprocess.run(
            ["git", *a], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        return {"commit": run("rev-parse", "HEAD"), "dirty": bool(run("status", "--porcelain"))}
    return {"commit": None, "dirty": None}


def _driver() -> str | None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def milliseconds(seconds: float) -> str:
    """Four digits, or the whole number."""
    return f"{seconds * 1e3:.4g}" if seconds < 10 else f"{seconds * 1e3:.0f}"


def plot(result: dict[str, Any], form: str, path: Path) -> None:
    """A panel of bars for each task, from 0: milliseconds of each contestant, and the time of reading the inputs.

    The form is png, pdf or svg.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = [e for e in result["results"] if "seconds" in e]
    panels = [[e for e in entries if e["task"] == task] for task in dict.fromkeys(e["task"] for e in entries)]
    figure, axes = plt.subplots(
        len(panels),
        sharex=True,
        squeeze=False,
        figsize=(8, 0.35 * len(entries) + 0.4 * len(panels) + 1.5),
        height_ratios=[len(panel) for panel in panels],
        layout="constrained",
    )
    floor = result["read_seconds"] * 1e3
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        colours = ["tab:blue" if e["name"] == "kullback" else "tab:gray" for e in panel]
        bars = axis.barh([e["name"] for e in panel], [e["seconds"] * 1e3 for e in panel], color=colours)
        line = axis.axvline(floor, color="tab:red", linestyle="--")
        beneath = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # so that no line goes through a label
        axis.bar_label(bars, [milliseconds(e["seconds"]) for e in panel], padding=6, zorder=3, bbox=beneath)
        axis.set_title(panel[0]["task"], loc="left", fontsize=10)
        axis.set_ylim(len(panel) - 0.5, -0.5)
    axis.set_xlim(0, 1.12 * max(floor, *(e["seconds"] * 1e3 for e in entries)))  # the longest bar's label has room
    axis.set_xlabel("milliseconds")
    case = result["case"]
    figure.suptitle(
        f"{case['kind']} from {case['form']}, {case['rows']} x {case['vocab']} {case['dtype']}\n"
        f"{result['provenance']['device']}",
        fontsize=10,
    )
    figure.legend(
        [line],
        [f"reading both inputs: {milliseconds(result['read_seconds'])} ms"],
        loc="outside lower center",
        frameon=False,
    )
    figure.savefig(path, dpi=150, format=form)
    plt.close(figure)
