"""The command line, and the original system."""

import ast
import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

import kullback
from kullback import kernelbench
from kullback.backends import cache as kernels
from kullback.cli import bench, check, commands, evaluate, reference, tables
from kullback.cli import rows as rows_module
from kullback.cli.commands import app
from tests.kinds import KINDS

run = lambda *arguments: CliRunner().invoke(app, arguments)


WIDTH = 80


@pytest.fixture
def terminal(monkeypatch):
    """What is printed is as wide as a terminal usually is."""
    monkeypatch.setattr(commands, "console", Console(width=WIDTH))


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_teaches(option):
    for command in ([], ["record"], ["compare"], ["info"], ["check"], ["bench"], ["show"], ["export", "kernelbench"]):
        result = run(*command, option)
        assert result.exit_code == 0
        assert len(result.output.splitlines()) > 5


def test_version():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"kullback {kullback.__version__}\n")


def test_no_word_of_a_toolkit_without_a_device(tmp_path):
    """torch.compile looks for one, and warns. A CPU build looks when it is asked to."""
    look = "from torch.utils.cpp_extension import _find_cuda_home as look; look()"
    quiet = f"import sys\nfrom kullback.cli import main\ntry: main()\nexcept SystemExit: {look}"
    environment = {**os.environ, "CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    said = {}
    for code in (look, quiet):
        command = [sys.executable, "-c", code, "--version"]
        said[code] = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert "No CUDA runtime is found" in said[look]
    assert said[quiet] == ""


def test_info_names_every_backend_and_the_cache():
    output = run("info").output
    for word in ("torch", "backend cuda", "backend c", "backend torch", "cache", "kernels"):
        assert word in output


@pytest.mark.parametrize("kind", KINDS)
def test_show_prints_the_functor(kind):
    result = run("show", kind, "--form", "logits")
    assert result.exit_code == 0
    assert "INLINE Element safe_element" in result.output


def test_show_names_what_is_unknown():
    result = run("show", "kll")
    assert result.exit_code == 2
    assert "'kll' is not one of kl" in re.sub(r"\s+│\s+", " ", result.output)


def test_check_finds_everything_right_and_a_wrong_formula_wrong(monkeypatch, terminal):
    monkeypatch.setattr(check, "available", lambda: ["torch"])
    monkeypatch.setattr(check, "SHAPES", [(5, 33)])
    result = run("check")
    assert result.exit_code == 0, result.output
    assert re.search(r"^414 checks in \d+ s: all right$", result.output, re.M)
    assert max(map(len, result.output.splitlines())) <= WIDTH
    true = reference.rows
    monkeypatch.setattr(reference, "rows", lambda kind, *a, **k: true(kind, *a, **k) * (1 + (kind == "chi2")))
    result = run("check")
    assert result.exit_code == 1
    assert "chi2" in result.output
    assert re.search(r"^414 checks in \d+ s: \d+ wrong$", result.output, re.M)
    assert "off by" in result.output


def test_bench_measures_writes_and_draws(tmp_path, terminal):
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        *("bench", "--shape", "64x512", "--repeats", "1", "--device", "cpu"),
        "--json",
        str(out),
        "--plot",
        str(png),
    )
    assert result.exit_code == 0, result.output
    assert f"wrote {out}\nwrote {png}\n" in result.output
    assert re.search(r"Measured\s+in\s+\d+\s+s", result.output)
    data = json.loads(out.read_text())
    assert data["case"] == {"rows": 64, "vocab": 512, "dtype": "float32", "form": "probs", "kind": "kl", "noise": 1.0}
    names = {e["name"] for e in data["results"]}
    assert names >= {"kullback", "eager", "torch.compile"}
    assert all(e["error"] < 1e-4 for e in data["results"] if "error" in e)
    assert {"device", "torch", "commit", "dirty", "date"} <= data["provenance"].keys()
    assert png.read_bytes()[:4] == b"\x89PNG"


def measured(peak_bytes):
    """As `bench` gives it, of all tasks and rivals, and with the longest figures."""
    figures = {"seconds": 12.3456, "of_ceiling": 0.0004, "error": 1e-8, "peak_bytes": peak_bytes}
    ours = [{"name": "kullback", "task": task, **figures} for task in bench.TASKS]
    rivals = [
        {"name": name, "task": task, **figures, "seconds": 0.0123}
        for name in ("eager", "torch.compile", "liger")
        for task in list(bench.TASKS)[:2]
    ]
    return {
        "case": {"rows": 16384, "vocab": 128256, "dtype": "bfloat16", "form": "logits", "kind": "total_variation"},
        "rows_asked": 16384,
        "read_seconds": 0.5,
        "copy_seconds": 0.5,
        "copy_terabytes_a_second": 1.23456,
        "worst_row_error": 1e-7,
        "results": [{**ours[0], "ran_on": "torch"}, *ours[1:], *rivals],
        "provenance": {"device": "a device", "torch": torch.__version__},
    }


@pytest.mark.parametrize("peak_bytes", [None, 1 << 40])
def test_the_table_is_whole_in_a_usual_terminal(terminal, capsys, peak_bytes):
    result = measured(peak_bytes)
    result["results"][-1] = {"name": "liger", "task": "forward + gradient", "failed": "ValueError: " + "[no] " * 30}
    commands._show(result, 3.0, commands.console)
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if " ms " in line) :]
    rows = [line.rstrip() for line in table[: 1 + len(bench.TASKS) + len(result["results"])]]
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines)
    assert rows[0].split()[-2:] == (["peak", "MiB"] if peak_bytes else ["1", "error"])
    assert rows[1] == "forward"
    memory = ["1048576"] if peak_bytes else []
    assert rows[2].split() == ["kullback", "(torch)", "12346", "0%", "1.00", "1e-08", *memory]
    assert rows[4].split() == ["torch.compile", "12.3", "0%", "0.00", "1e-08", *memory]
    assert "liger, forward + gradient: ValueError: [no] [no]" in "\n".join(lines)


@pytest.mark.parametrize("share", [0.99, 9.9])
def test_a_ceiling_that_is_exceeded_is_explained(terminal, capsys, share):
    result = measured(None)
    result["results"][0]["of_ceiling"] = share
    commands._show(result, 3.0, commands.console)
    assert ("More than the ceiling" in capsys.readouterr().out) == (share > 1)


def test_bars_begin_at_zero_and_nothing_is_cut_or_hidden(tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)  # it is looked at
    bench.plot(measured(None), "png", tmp_path / "plot")
    figure = plt.gcf()
    figure.draw_without_rendering()
    assert [axis.get_title(loc="left") for axis in figure.axes] == list(bench.TASKS)
    (legend,) = figure.legends
    for axis in figure.axes:
        assert axis.get_xscale() == "linear"
        assert axis.get_xlim()[0] == 0
        frame = axis.get_window_extent()
        assert all(frame.x0 < text.get_window_extent().x1 < frame.x1 for text in axis.texts)
        assert not axis.get_tightbbox().overlaps(legend.get_window_extent())
    plt.figure(figure)
    monkeypatch.undo()
    plt.close(figure)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "12"], "rows x vocabulary"),
        (["--shape", "0x5"], "rows x vocabulary"),
        (["--shape", "²x5"], "rows x vocabulary"),
        (["--shape", f"1x{'9' * 5000}"], "rows x vocabulary"),
        (["--shape", f"1x{'0' * 5000}1"], "rows x vocabulary"),
        (["--json", "/tmp/same.png", "--plot", "/tmp/same.png"], "is named for two outputs"),
        (["--dtype", "int8"], "float32"),
        (["--kind", "k"], "is not one of kl"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--noise", "0.1"], "it is for logits; got form 'probs'"),
        (["--repeats", "0"], "greater than or equal to 1"),
        (["--json", "/tmp"], "/tmp is a folder"),
        (["--plot", "/tmp/x.tiff"], "x.tiff does not end in .png, .pdf, .svg"),
        (["--shape", "99999999999x99999999999"], "no row of 99999999999 tokens fits"),
        (["--form", "logits", "--noise", "inf"], "finite"),
    ],
)
def test_bench_refuses_before_any_work(arguments, words):
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert words in re.sub(r"\s+│\s*\n│\s+", " ", result.output)


def test_bench_refuses_files_that_hold_no_rows(tmp_path):
    (tmp_path / "text").write_text("no rows")
    save_file({"logits": torch.zeros(2, 3)}, tmp_path / "logits.safetensors")
    for name, words in (("text", "is no safetensors file"), ("logits.safetensors", "holds no rows as `make real`")):
        result = run("bench", "--rows", str(tmp_path / name))
        assert result.exit_code == 2
        assert words in re.sub(r"\s+│\s*\n│\s+", " ", result.output)


def test_bench_does_not_write_over_its_rows(tmp_path, monkeypatch):
    """Nor does it take a path's brackets for markup."""
    folder = tmp_path / "x[" / "b]y"  # [/b] ends nothing
    folder.mkdir(parents=True)
    path = folder / rows_module.FILE
    save_file({name: torch.zeros(4, 4) for name in ("head", "head_scale", "teacher")}, path, {"about": "{}"})
    asked = ("bench", "--rows", str(folder), "--student", "identical", "--shape", "2x4")
    before = path.read_bytes()
    result = run(*asked, "--json", str(path))
    assert result.exit_code == 2
    assert "is read too" in re.sub(r"\s+│\s*\n│\s+", " ", result.output)
    assert path.read_bytes() == before
    result = measured(None)
    monkeypatch.setattr(bench, "bench", lambda *given, source, student, **named: result)
    result["case"] |= {"source": str(folder), "student": "identical"}
    shown = run(*asked)
    assert shown.exit_code == 0, shown.output
    assert "x[/b]y" in shown.output.replace("\n", "")


def test_a_row_that_is_no_number_is_off(monkeypatch, tmp_path):
    """And is written as JSON has it."""
    real = kullback.divergence

    def broken(*given, reduction="mean", **options):
        loss = real(*given, reduction=reduction, **options)
        return loss.index_fill(0, torch.tensor([1]), torch.nan) if reduction == "none" else loss

    monkeypatch.setattr(kullback, "divergence", broken)
    monkeypatch.setattr(torch, "compile", lambda loss: loss)
    path = tmp_path / "found.json"
    result = run("bench", "--shape", "4x50", "--form", "logits", "--repeats", "1", "--json", str(path))
    assert (result.exit_code, "a row is off by inf" in result.output) == (1, True), result.output
    refuse = lambda name: pytest.fail(f"{name} is no JSON")
    assert json.loads(path.read_text(), parse_constant=refuse)["worst_row_error"] == "inf"


@pytest.mark.parametrize(
    ("ours", "truth", "error"),
    [
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([torch.nan, 1.0], [1.0, 1.0], torch.inf),
        ([torch.nan, torch.inf, 1.0], [torch.nan, torch.inf, 1.0], 0.0),
        ([torch.inf, 1.0], [1e50, 1.0], 0.0),  # more than float32 holds
        ([3e38, 1.0], [1e50, 1.0], torch.inf),
        ([torch.inf, 1.0], [1.0, 1.0], torch.inf),
        ([0.0, 2e-8], [0.0, 1e-8], 0.1),  # less than the least is that
    ],
)
def test_errors_are_numbers(ours, truth, error):
    found = bench.relative_error(torch.tensor(ours), torch.tensor(truth, dtype=torch.float64), 1e-7)
    assert found == pytest.approx(error, rel=1e-6)


def test_bench_writes_before_it_shows(tmp_path, monkeypatch):
    """Whoever reads what is shown may have gone."""
    shown = []
    monkeypatch.setattr(bench, "bench", lambda *given, **named: measured(None))
    monkeypatch.setattr(commands, "_show", lambda result, took, out: shown.append((tmp_path / "out.json").exists()))
    assert run("bench", "--shape", "8x8", "--json", str(tmp_path / "out.json")).exit_code == 0
    assert shown == [True]


def test_names_are_shown_as_they_are(capsys):
    """Codes of emoji too; and what turns a terminal's text around, or ends its line, is not obeyed."""
    evaluate.console().print("v1:100:.safetensors", markup=False)
    assert capsys.readouterr().out == "v1:100:.safetensors\n"
    assert tables.shown("a\u202eb\u2028c\u2066d\u200f") == "a\ufffdb\ufffdc\ufffdd\ufffd"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.000000"),
        (1e-5, "1.00e-05"),
        (-12.5, "-12.500000"),
        (999999999.0, "999999999.000000"),
        (-1e9, "-1.00e+09"),
        (1.6e300, "1.60e+300"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_few_digits(value, words):
    assert tables.number(value) == words


def test_export_refuses_a_folder(tmp_path):
    result = run("export", "kernelbench", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "is a folder" in re.sub(r"\s+│\s*\n│\s+", " ", result.output)


def test_equal_float64_rows_are_not_off(monkeypatch):
    """The truth of the benchmark is itself a rounding away from 0."""
    monkeypatch.setattr(torch, "compile", lambda loss: loss)
    arguments = ["--shape", "8x300", "--form", "logits", "--noise", "0", "--dtype", "float64", "--repeats", "1"]
    assert run("bench", *arguments).exit_code == 0


def test_without_its_extra_the_command_says_what_to_install():
    code = (
        "import importlib.util as u, sys; f = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'typer' else f(n, *a)\n"
        "from kullback.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs typer: pip install 'kullback[cli]', or in a clone pip install '.[cli]'" in done.stderr


WITHOUT_MATPLOTLIB = (
    "import importlib.util as u, sys; f = u.find_spec\n"
    "u.find_spec = lambda n, *a: None if n == 'matplotlib' else f(n, *a)\n"
    "sys.modules['matplotlib'] = None\n"
    "from kullback.cli import main; main()"
)


@pytest.mark.parametrize("command", ["info", "show kl", "export kernelbench", "check --help"])
def test_only_plots_need_matplotlib(command):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, *command.split()], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_plot_without_matplotlib_is_refused_before_any_work(tmp_path):
    arguments = ["bench", "--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "kullback[plot]" in done.stderr


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "kullback", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "check" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
@pytest.mark.parametrize("command", ["show kl", "export kernelbench"])
def test_a_full_device_is_an_error_and_no_traceback(command):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "kullback", *command.split()]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "Error: standard output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("command", ["show kl", "info"])
def test_a_reader_that_has_gone_is_no_failure(command):
    reads, writes = os.pipe()
    os.close(reads)
    line = [sys.executable, "-m", "kullback", *command.split()]
    done = subprocess.run(line, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
def test_a_full_output_is_named():
    result = run("export", "kernelbench", "-o", "/dev/full")
    assert result.exit_code == 2
    assert "Error: --output: /dev/full could not be written" in result.output


def test_info_shows_any_path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c[red]x[/b]"))
    for option in ((), ("--clear-cache",)):
        result = run("info", *option)
        assert result.exit_code == 0, result.output
        assert "c[red]x[/b]" in "".join(result.output.split())


def test_export_writes_a_file(tmp_path):
    path = tmp_path / "new.py"
    result = run("export", "kernelbench", "-o", str(path))
    assert (result.exit_code, result.output) == (0, f"wrote {path}\n")
    assert path.read_text() == kernelbench.standalone()


def test_standalone_keeps_the_static_rules():
    source = kernelbench.standalone()
    tree = ast.parse(source)
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Try | ast.Pass)]
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported == {"torch", "torch.utils.cpp_extension"}
    for word in ("__global__", "load_inline", "kl_div_forward_cuda(predictions, targets)", "class ModelNew"):
        assert word in source
    python = re.sub(r'r""".*?"""', "", source, flags=re.S)
    assert not re.search(r"\btorch\.(nn\.functional|sum|log|mul|div|zeros|matmul|softmax)\b", python)


def test_model_new(monkeypatch):
    predictions, targets = kernelbench.inputs(32, 64)
    predictions.requires_grad_()
    loss = kernelbench.ModelNew()(predictions, targets)
    expected = torch.nn.functional.kl_div(torch.log(predictions), targets, reduction="batchmean")
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(v, predictions)[0] for v in (loss, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_standalone_builds_and_agrees(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    module = types.ModuleType("standalone")
    exec(kernelbench.standalone(), module.__dict__)
    for rows, vocab in ((64, 4096), (3, 35), (1, 1), (1000, 1271)):
        predictions, targets = kernelbench.inputs(rows, vocab, device="cuda")
        ours = module.ModelNew()(predictions, targets)
        assert ours.shape == ()
        torch.testing.assert_close(ours, kullback.kl_div(predictions, targets, "batchmean", form="probs"))


def test_info_clears_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.cached("key", ".so", lambda: b"binary")
    result = run("info", "--clear-cache")
    assert result.exit_code == 0
    assert "removed 2 files" in result.output
    assert not list(kernels.entries())


def test_rivals_that_cannot_be_set_up_say_why(monkeypatch):
    def refuse(loss):
        raise UnicodeDecodeError("ascii", b"\xc3", 0, 1, "no character")

    monkeypatch.setattr(torch, "compile", refuse)
    result = bench.bench(8, 16, "float32", "probs", "kl", "cpu", 1, lambda what: None)
    failed = {entry["name"]: entry["failed"] for entry in result["results"] if "failed" in entry}
    assert failed.keys() == {"torch.compile"}
    assert "no character" in failed["torch.compile"]


def test_too_little_memory_is_said_before_the_work(monkeypatch):
    monkeypatch.setattr(bench, "fitting_rows", lambda rows, *of: min(rows, 5))
    begun = []
    monkeypatch.setattr(bench, "bench", lambda *of, **options: begun.append(of) or 1 / 0)
    result = run("bench", "--shape", "8x8")
    assert "8 rows asked for, and 5 taken" in result.output
    assert begun
