"""info, check, bench, show, export: their arguments, and how they look; record and compare are in `evaluate`."""

from __future__ import annotations

import functools
import importlib.util
import math
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import kullback
from kullback import kernelbench
from kullback.backends import BACKENDS, cache
from kullback.backends.build import BuildError
from kullback.backends.c.compile import compiler
from kullback.backends.printer import print_functor
from kullback.cli import bench as bench_module
from kullback.cli import check as check_module
from kullback.cli import evaluate, writing
from kullback.cli import rows as rows_module
from kullback.cli.options import USAGE, device_of, is_written, kept_apart, one_of, writable
from kullback.divergences import DIVERGENCES
from kullback.forms import FORMS
from kullback.problem import Problem, Side
from kullback.work import Operands, Rows

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # lines of a docstring's paragraph are joined
    context_settings={"help_option_names": ["-h", "--help"]},
)
export_app = typer.Typer(help="Print a kernel for use elsewhere.", no_args_is_help=True)
app.add_typer(export_app, name="export")
app.command()(evaluate.record)
app.command()(evaluate.compare)
console = evaluate.console()
Kind = Annotated[str, typer.Option(help=f"The divergence: {', '.join(DIVERGENCES)}.")]
Form = Annotated[str, typer.Option(help=f"What the tensors hold: {', '.join(FORMS)}.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kullback {kullback.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Divergences between categorical distributions: what runs here, how exact, how fast."""


@contextmanager
def _progress(total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; the returned function says what is being done now."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=evaluate.Output(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def tell(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, advance=1 if begun else 0)
            begun = True

        yield tell


def _put(option: str, path: Path, write: Callable[[Path], None]) -> None:
    if not is_written(option, path, write):
        raise typer.Exit(USAGE)


def _wrote(path: Path, out: Console = console) -> None:
    out.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def info(
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Remove all compiled kernels first.")] = False,
) -> None:
    """Versions, devices, the backends that can run here and why others cannot, and the cache."""
    if clear_cache:
        console.print(f"removed {cache.clear()} files from {escape(str(cache.directory()))}")
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("kullback", kullback.__version__)
    table.add_row("system", platform.platform())
    table.add_row("python", platform.python_version())
    table.add_row("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})")
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        table.add_row(f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, capability {capability}")
    problem = Problem("kl", Side("probs"), Side("probs"))
    for name, backend in BACKENDS.items():
        device = "cuda" if name == "cuda" and torch.cuda.is_available() else "cpu"
        probe = torch.full((1, 2), 0.5, device=device)
        reason = backend.why_not(Rows(problem, Operands(probe, probe)))
        if name == "cuda" and device == "cpu":
            reason = "no CUDA device"
        compiled_by = ""
        if name == "c" and reason is None:
            try:
                compiled_by = f", compiled by {compiler()[0]}"
            except BuildError as error:
                reason = escape(str(error))
        told = f"[green]runs on {device}[/]{compiled_by}" if reason is None else f"[yellow]cannot run:[/] {reason}"
        if name == "torch":
            told += ", for what those above cannot do"
        table.add_row(f"backend {name}", told)
    kernels = [entry for entry in cache.entries() if entry.path.suffix in (".so", ".cubin")]
    size = sum(entry.size for entry in kernels) / 2**20
    table.add_row("cache", f"{escape(str(cache.directory()))} ({len(kernels)} kernels, {size:.1f} MiB)")
    console.print(table)


@app.command()
def check() -> None:
    """Check every backend on this machine against float64: the truth table and a random grid.

    It takes minutes the first time, since kernels are compiled, and later some seconds on a CPU.

    Exit status 1 if anything is off.
    """
    begin = time.monotonic()
    with _progress() as progress:
        progress("which backends run here")
        backends = check_module.available()
    with _progress(check_module.steps(backends)) as progress:
        outcomes = list(check_module.run(backends, progress))
    table = Table("backend", "what", "checks", "worst error / budget", "verdict")
    for o in outcomes:
        verdict = "[green]right[/]" if not o.failures else f"[red]{len(o.failures)} wrong[/]"
        worst = f"{o.worst:.2f}" if o.worst else ""
        table.add_row(o.backend, o.group, str(o.checks), worst, verdict)
    console.print(table)
    for o in outcomes:
        for failure in o.failures:
            console.print(f"[red]{o.backend}, {o.group}:[/] {failure}")
    wrong = sum(len(o.failures) for o in outcomes)
    told = f"{sum(o.checks for o in outcomes)} checks in {time.monotonic() - begin:.0f} s"
    console.print(f"{told}: " + (f"[red]{wrong} wrong[/]" if wrong else "[green]all right[/]"), highlight=False)
    if wrong:
        raise typer.Exit(1)


@app.command()
def bench(
    shape: Annotated[
        str, typer.Option(help="Rows x vocabulary: 16384x16384, or of a model's rows 4096 (512 on a CPU) x its own.")
    ] = "",
    dtype: Annotated[str, typer.Option(help=", ".join(bench_module.DTYPES) + ".")] = "float32",
    form: Annotated[str, typer.Option(help=f"What the tensors hold: {', '.join(FORMS)}; by default probs.")] = "",
    kind: Kind = "kl",
    source: Annotated[
        str,
        typer.Option(
            "--rows",
            help="random; real, those that `make real` wrote; a file of such; or made, like them, at any vocabulary. "
            "All but the first are logits, of several students, and random ones follow.",
        ),
    ] = "random",
    student: Annotated[
        list[str] | None, typer.Option(help="One of a model's rows, several times for more; by default all.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the best there is.")] = "",
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed runs of each; the median counts.")] = None,
    noise: Annotated[
        float,
        typer.Option(min=0.0, help="Of logits: the student is the teacher and so much normal noise; 0.03 is close."),
    ] = 1.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times into that PNG, PDF or SVG.")] = None,
) -> None:
    """Time a loss beside its rivals. Their ceiling is measured in the same run: reading the inputs, or copying logits.

    The default is KernelBench level 1, problem 98. Totals are checked against float64, and each of our rows. With too
    little memory fewer rows are taken, and that is said.

    Exit status 1 if a row is off.
    """
    form = form or ("probs" if source == "random" else "logits")
    one_of("--dtype", dtype, bench_module.DTYPES)
    one_of("--form", form, FORMS)
    one_of("--kind", kind, DIVERGENCES)
    device = device_of(device).type
    students, model_vocab = _students(source, student, form)
    default = f"{4096 if device == 'cuda' else 512}x{model_vocab}" if students else "16384x16384"
    rows, vocab = _parse_shape(shape or default)
    if source not in ("random", "made") and vocab != model_vocab:
        raise typer.BadParameter(
            f"rows of {source} have {model_vocab} tokens, not {vocab}; --rows made has any number", param_hint="--shape"
        )
    if noise != 1 and form != "logits":
        raise typer.BadParameter(f"it is for logits; got form {form!r}", param_hint="--noise")
    if not math.isfinite(noise):
        raise typer.BadParameter(f"it has to be finite; got {noise}", param_hint="--noise")
    writable("--json", json_path)
    writable("--plot", plot, PLOTS)
    of_file = None if source in ("random", "made") else rows_module.find(source).resolve()
    kept_apart((json_path, plot), lambda path: path == of_file)
    fitting = bench_module.fitting_rows(rows, vocab, bench_module.DTYPES[dtype], device)
    if fitting < 1:
        raise typer.BadParameter(f"no row of {vocab} tokens fits the memory of {device}", param_hint="--shape")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "it needs matplotlib: pip install 'kullback[plot]', or in a clone pip install '.[plot]'",
            param_hint="--plot",
        )
    if plot is not None and students:
        raise typer.BadParameter("it draws one case: random rows", param_hint="--plot")
    out = evaluate.console([json_path, plot])
    if fitting < rows:
        out.print(f"[yellow]{rows} rows asked for, and {fitting} taken: memory is short[/]")
    repeats = repeats or (20 if device == "cuda" else 3)
    cases = [*((source, name) for name in students), ("random", "")]
    results = []
    for number, (origin, name) in enumerate(cases, 1):
        torch._dynamo.reset()
        begin = time.monotonic()
        with _progress(12 if form == "logits" else 10) as progress:
            of_cases = f"{number} of {len(cases)}: " if len(cases) > 1 else ""
            result = bench_module.bench(
                *(rows, vocab, dtype, form, kind, device, repeats, lambda what, of=of_cases: progress(of + what)),
                noise=noise,
                source=origin,
                student=name,
            )
        results.append(result)
        took = time.monotonic() - begin
        if json_path is not None:  # before anything is shown: whoever reads that may have gone
            text = writing.as_json(results if students else result)
            _put("--json", json_path, functools.partial(writing.put_text, text=text))
        if result["case"]["rows"] < fitting:
            out.print(f"[yellow]{result['case']['rows']} rows taken: memory is shorter now[/]")
        _show(result, took, out)
    if json_path is not None:
        _wrote(json_path, out)
    if plot is not None:
        draw = functools.partial(bench_module.plot, results[0], plot.suffix[1:])
        _put("--plot", plot, functools.partial(writing.put, write=draw))
        _wrote(plot, out)
    worst = max(result["worst_row_error"] for result in results)
    if worst > ROW_BUDGET[dtype]:
        out.print(f"[red]a row is off by {worst:.1e}[/]")
        raise typer.Exit(1)


def _students(source: str, asked: list[str] | None, form: str) -> tuple[list[str], int]:
    """Whose rows are timed, and the vocabulary to be taken unless another is asked for."""
    if source == "random":
        if asked:
            raise typer.BadParameter("random rows have no student but --noise", param_hint="--student")
        return [], 0
    if form != "logits":
        raise typer.BadParameter(f"a model's rows are logits; got form {form!r}", param_hint="--rows")
    try:
        known = list(rows_module.SPREAD) if source == "made" else rows_module.students(source)
        vocab = rows_module.RANKS[-1] if source == "made" else rows_module.vocabulary(source)
    except (OSError, ModuleNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--rows") from error
    for name in asked or ():
        one_of("--student", name, known)
    return asked or known, vocab


PLOTS = (".png", ".pdf", ".svg")


# A row's terms have both signs: near p = q its relative error is more than its terms'.
ROW_BUDGET = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 1e-3, "float16": 1e-3}


def _parse_shape(shape: str) -> tuple[int, int]:
    parts = shape.lower().split("x")
    if len(parts) != 2 or not all(re.fullmatch(r"\s*[1-9][0-9]{0,11}\s*", part) for part in parts):
        raise typer.BadParameter(f"{shape!r} is not rows x vocabulary, as in 4096x32000", param_hint="--shape")
    return int(parts[0]), int(parts[1])


def _show(result: dict[str, Any], took: float, out: Console) -> None:
    case, origin, entries = result["case"], result["provenance"], result["results"]
    whose = f"{case['student']} of {case['source']} rows, " if "student" in case else ""
    out.print(
        f"{case['kind']} from {case['form']}, {whose}{case['rows']} x {case['vocab']} {case['dtype']}, "
        f"{origin['device']}, torch {origin['torch']}",
        markup=False,
        highlight=False,
    )
    measures_memory = any(e.get("peak_bytes") is not None for e in entries)
    table = Table("", box=None, pad_edge=False)
    for title in ("ms", "of ceiling", "kullback = 1", "error", *(["peak MiB"] if measures_memory else [])):
        table.add_column(title, justify="right")
    ours = {e["task"]: e["seconds"] for e in entries if e["name"] == "kullback"}
    for task in ours:
        table.add_row(f"[bold]{task}[/]")
        for e in entries:
            if e["task"] == task:
                table.add_row(*_row(e, ours[task]))
    out.print(table)
    for e in entries:
        if "failed" in e:
            out.print(f"{e['name']}, {e['task']}: {e['failed']}", style="yellow", markup=False, highlight=False)
    # From logits most of the work is measured against a copy: `bench.TASKS` has the passes of each task.
    unit, what, rest = (
        ("copy", "copying an input", ", a row and then its gradient 2.5 times")
        if case["form"] == "logits"
        else ("read", "reading both inputs", "")
    )
    out.print(
        f"Ceiling: {what} takes {bench_module.milliseconds(result[f'{unit}_seconds'])} ms "
        f"({result[f'{unit}_terabytes_a_second']:.3g} TB/s), forward as long, each gradient half as long again{rest}. "
        f"Worst row against float64: {result['worst_row_error']:.0e}. Measured in {took:.0f} s.",
        highlight=False,
    )
    if any(e.get("of_ceiling", 0) > 1.1 for e in entries):
        out.print(
            "More than the ceiling: other work disturbed that, or tensors of this size stay in a cache. "
            "Repeat it, or take more rows.",
            highlight=False,
        )


def _row(e: dict[str, Any], ours: float) -> list[str]:
    name = "  " + e["name"] + (f" ({e['ran_on']})" if "ran_on" in e else "")
    if "failed" in e:
        return [name, "failed"]
    cells = [name, bench_module.milliseconds(e["seconds"]), f"{e['of_ceiling']:.0%}", f"{e['seconds'] / ours:.2f}"]
    return [*cells, f"{e['error']:.0e}", *([] if e["peak_bytes"] is None else [f"{e['peak_bytes'] / 2**20:.0f}"])]


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help=f"The divergence: {', '.join(DIVERGENCES)}.")],
    form: Form = "probs",
    target_form: Annotated[str, typer.Option(help="What the target holds; by default as the input.")] = "",
) -> None:
    """Print the functor that is pasted into the C and CUDA templates."""
    one_of("KIND", kind, DIVERGENCES)
    one_of("--form", form, FORMS)
    one_of("--target-form", target_form or form, FORMS)
    text = f"/* {kind}: {DIVERGENCES[kind].definition} */\n\n{print_functor(kind, form, target_form or form)}"
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


@export_app.command("kernelbench")
def export_kernelbench(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; by default printed.")] = None,
) -> None:
    """KernelBench level 1, problem 98, as one Python file that needs torch and nvcc only."""
    writable("--output", output)
    text = kernelbench.standalone()
    if output is None:
        typer.echo(text, nl=False)
    else:
        _put("--output", output, functools.partial(writing.put_text, text=text))
        _wrote(output)
