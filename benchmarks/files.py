"""`kullback compare` of two files of logits: seconds and memory, beside what reading both takes.

    python benchmarks/files.py --out benchmarks/results/cpu [--rows 20000] [--vocab 128256]

The files are float16 and made, of rows with a language model's statistics. Linux forgets them before each is timed, so
that both read from the disk. Each is timed again as files lie in memory. All of a process counts, its start too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from kullback.cli import bench
from kullback.cli import rows as model_rows

STUDENT, REPEATS, BLOCK = "bits8", 3, 1 << 24


def write(folder: Path, rows: int, vocab: int) -> list[Path]:
    """The teacher's file and its student's, of the same rows again and again."""
    few = min(rows, 500)
    files = []
    for name, logits in zip(
        ("candidate", "reference"), model_rows.made(STUDENT, few, vocab, torch.float16, "cpu"), strict=True
    ):
        files.insert(0, folder / f"{name}.safetensors")
        save_file({"logits": logits.repeat(-(-rows // few), 1)[:rows].contiguous()}, files[0])
    return files


def forget(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> None:
    """Both, block by block in turn."""
    room = bytearray(BLOCK)
    opened = [file.open("rb", buffering=0) for file in files]
    while sum(each.readinto(room) for each in opened):
        pass
    for each in opened:
        each.close()


def compare(files: list[Path]) -> int:
    """Bytes that were resident at most."""
    command = [sys.executable, "-m", "kullback", "compare", *map(str, files), "--score", "all"]
    process, most = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), 0
    while process.poll() is None:
        # What rusage tells begins with the memory of the process that started it.
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        most = max(most, 0, *(int(kilobytes) * 1024 for kilobytes in re.findall(r"^VmHWM:\s+(\d+) kB", status, re.M)))
        time.sleep(0.01)
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}"
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for files.json")
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--folder", type=Path, help="where files are made, for a while: twice rows x vocab x 2 bytes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {}
    resident = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        compare(write(Path(folder), 8, arguments.vocab))  # compiles a kernel
        files = write(Path(folder), arguments.rows, arguments.vocab)
        for _, where, (name, call) in itertools.product(
            range(REPEATS), ("disk", "memory"), (("reading both", read), ("compare", compare))
        ):
            if where == "disk":
                forget(files)
            begin = time.perf_counter()
            resident.append(call(files) or 0)
            seconds.setdefault(f"{name}, {where}", []).append(time.perf_counter() - begin)
            print(name, where, f"{seconds[f'{name}, {where}'][-1]:.1f} s", flush=True)
    report = {
        "provenance": bench.provenance("cpu"),
        "case": {"rows": arguments.rows, "vocab": arguments.vocab, "dtype": "float16", "student": STUDENT},
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "resident_bytes": max(resident),
    }
    (arguments.out / "files.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
