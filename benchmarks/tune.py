"""Time the row kernel over launch shapes, to choose the constants of `plan.py`. Needs a GPU.

python benchmarks/tune.py [--n 16384]
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch

from kullback.backends.build import BuildError
from kullback.backends.cuda import literal, plan
from kullback.backends.cuda.launch import Launcher
from kullback.backends.cuda.source import inlined
from kullback.divergences import DIVERGENCES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def milliseconds(run, repeats: int = 20) -> float:
    """Median of single runs. The inputs are many times the L2 cache: a run finds nothing of the last one there."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceiling(x: torch.Tensor, y: torch.Tensor) -> dict[tuple[int, int], float]:
    """Terabytes a second of the read-only kernel, by unroll and blocks a multiprocessor."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    count = x.numel() * x.itemsize // 16
    result = {}
    for unroll in (1, 2, 4):
        launcher = Launcher(f"#define UNROLL {unroll}\n" + inlined("cuda/ceiling.cuh", {}), "kullback_ceiling", 0)
        for per in (4, 8):
            blocks = min(launcher.blocks, per * 132)
            time = milliseconds(lambda: launcher(blocks, x.data_ptr(), y.data_ptr(), out.data_ptr(), count))
            result[unroll, per] = 2 * x.numel() * x.itemsize / time / 1e9
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=16384)
    n = parser.parse_args().n
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, dtype in DTYPES.items():
        x, y = (torch.rand(n, n, device="cuda").softmax(-1).to(dtype) for _ in range(2))
        gradient = torch.empty_like(x)
        result = torch.empty((), dtype=torch.float32, device="cuda")
        truth = {}
        for kind in DIVERGENCES:
            if name == "bf16" and kind not in ("kl", "jensen_shannon"):
                continue
            for form, want in itertools.product(("probs", "log_probs"), ((False, False), (True, False))):
                if kind != "kl" and (form != "probs" or any(want)):
                    continue
                a, b = (x.log(), y.log()) if form == "log_probs" else (x, y)
                row = []
                for unroll, blocks in itertools.product((1, 2, 4), (6, 4, 3, 2)):
                    shape = plan.Shape(True, 256, 16 // dtype.itemsize, unroll, blocks)
                    variant = literal.Variant(
                        kind, form, form, dtype, dtype, torch.float64, torch.float32, "loss", False, True, want
                    )
                    try:
                        launcher = Launcher(literal.source(variant, shape), "kullback_literal", 0)
                    except BuildError:
                        continue
                    workspace = torch.zeros(launcher.blocks + 1, dtype=torch.float64, device="cuda")
                    arguments = literal.Arguments(
                        x=a.data_ptr(),
                        y=b.data_ptr(),
                        d_input=gradient.data_ptr() if want[0] else 0,
                        d_target=0,
                        row_weight=0,
                        known=0,
                        found=0,
                        loss=0,
                        total=result.data_ptr(),
                        partial=workspace.data_ptr(),
                        ticket=workspace.data_ptr() + 8 * launcher.blocks,
                        rows=1,
                        vocab=n * n,
                        x_stride=n * n,
                        y_stride=n * n,
                        d_input_stride=n * n,
                        d_target_stride=0,
                        scale=1 / n,
                        parameter=next(iter(DIVERGENCES[kind].defaults.values()), 0.0),
                    )
                    run = lambda: launcher(1 << 30, *arguments)
                    time = milliseconds(run, 10)
                    truth.setdefault((kind, form, want), result.item())
                    row.append((time, f"u{unroll} b{blocks}: {time:.3f} ({launcher.blocks // 132})"))
                print(name, kind, form, "grad" if want[0] else "fwd", *(t for _, t in sorted(row)[:6]), sep="  ")
        print(name, "ceiling TB/s", {k: round(v, 3) for k, v in ceiling(x, y).items()})
        print(name, {f"{k[0]} {k[1]}": f"{v:.6g}" for k, v in truth.items()})


if __name__ == "__main__":
    main()
