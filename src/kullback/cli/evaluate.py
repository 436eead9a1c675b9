"""record and compare: their arguments, and how they end."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kullback.cli import comparison as comparison_module
from kullback.cli import html, runs, tables
from kullback.cli.options import one_of, writable

INCOMPLETE, MISMATCH, INTERRUPTED = 1, 3, 130
STORED = ("float16", "bfloat16", "float32")


def console() -> Console:
    return Console()


def record(
    model: Annotated[str, typer.Argument(help="A Hugging Face causal LM: a folder, a hub's name, or a .gguf file.")],
    text: Annotated[
        Path,
        typer.Argument(
            help="A text; documents as JSON lines with a column `text` (.jsonl); or a recording or a llama.cpp "
            "base-logits file, whose tokens are read again."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    what: Annotated[str, typer.Option(help="hidden: what the head reads, and the head once; or logits.")] = "hidden",
    dtype: Annotated[str, typer.Option(help=f"What rows are stored in: {', '.join(STORED)}.")] = "float16",
    load_dtype: Annotated[
        str, typer.Option(help=f"What the model computes in: {', '.join(STORED)}; auto is its own, float32 of a GGUF.")
    ] = "auto",
    window: Annotated[int, typer.Option(min=2, help="Tokens that are read together.")] = 512,
    windows: Annotated[int | None, typer.Option(min=1, help="How many windows; by default all of the text.")] = None,
    groups: Annotated[str | None, typer.Option(help="The column of a .jsonl that tells groups apart.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="The GGUF file of a folder or a hub's name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub's model: branch, tag or commit.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the best there is.")] = "",
) -> None:
    """Run a language model over a text, and keep what it says for `kullback compare`.

    Hidden states take 30 to 90 times less room than logits, and lose less than logits of 16 bits do. Each shard is
    written whole. If it is interrupted, the same command goes on where it ended.

    Example, whose second line reads the reference's tokens again:

    - `kullback record ./model wiki.txt -o reference`
    - `kullback record ./model-q4.gguf reference -o q4`
    - `kullback compare reference q4`
    """
    one_of("--what", what, ("hidden", "logits"))
    one_of("--dtype", dtype, STORED)
    one_of("--load-dtype", load_dtype, ("auto", *STORED))
    place = _device(device)
    of_gguf = ["accelerate", "gguf"] if gguf_file or model.endswith(".gguf") else []
    _need(["transformers", "safetensors", *of_gguf], "record")
    if not text.exists():
        raise typer.BadParameter(f"there is no {text}", param_hint="TEXT")
    if output.is_file():
        raise typer.BadParameter(f"{output} is a file", param_hint="--output")
    from kullback.cli import record as recorder

    try:
        loaded = recorder.load(model, gguf_file, revision, load_dtype, place)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="MODEL") from error
    try:
        read = recorder.read_text(text, loaded.tokenizer, window, windows, groups)
        with _progress("windows", len(read.tokens)) as tell:
            there = recorder.record(loaded, read, output, what, getattr(torch, dtype), tell)
    except runs.MismatchError as error:
        _refuse(error)
    except KeyboardInterrupt:
        whole = len(list(output.glob("rows-*.safetensors")))
        _say(f"[yellow]interrupted[/]: {escape(str(output))} has {whole} whole shards; the same command goes on there")
        raise typer.Exit(INTERRUPTED) from None
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    rows = int((read.tokens[:, 1:] != runs.NO_TOKEN).sum())
    resumed = f", {there} shards of it from before" if there else ""
    _say(f"wrote {escape(str(output))}: {rows} rows of {len(read.tokens)} windows, {size:.1f} MB{resumed}")


def compare(
    reference: Annotated[
        Path,
        typer.Argument(
            help="What candidates are measured against: a recording, a .safetensors of logits, a folder of vLLM's "
            "hidden states with head.safetensors, or a llama.cpp base-logits file."
        ),
    ],
    candidates: Annotated[list[Path], typer.Argument(help="The same of each candidate.")],
    score: Annotated[
        str, typer.Option(help="Which positions count: all; half, the second of each window, as llama.cpp; or N: on.")
    ] = "",
    valid_vocab: Annotated[
        int | None, typer.Option(min=1, help="Only the first tokens count, where one is padded.")
    ] = None,
    floor: Annotated[
        Path | None, typer.Option(help="The reference once more, recorded by another engine: what a KLD has to exceed.")
    ] = None,
    compat: Annotated[
        str,
        typer.Option(help="llama.cpp: its own formula, its ± and its half of positions, to check against its output."),
    ] = "",
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst rows are reported.")] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there, as Markdown.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Write one page that needs nothing else.")] = None,
    rows_path: Annotated[Path | None, typer.Option("--rows", help="Write each row's figures (.safetensors).")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the best there is.")] = "",
) -> None:
    """Report how far candidates are from a reference, in nats a token: mean KLD with an interval, and where it is from.

    Files are read a chunk at a time. Intervals resample whole windows or documents, since tokens of a text depend on
    each other; there is none below ten. Candidates are told apart by rows in pairs. Under `torchrun` ranks share the
    rows.

    Examples:

    - `kullback compare reference q8 q4 --html report.html`
    - `kullback compare base.kld candidate.kld --compat llama.cpp`

    Exit status: 0; 1 if files end early; 2 for usage; 3 for files that do not belong together.
    """
    if compat:
        one_of("--compat", compat, (comparison_module.LLAMA_CPP,))
    score = score or ("half" if compat else "all")
    if score not in ("all", "half") and not (score.endswith(":") and score[:-1].isdecimal()):
        raise typer.BadParameter(f"{score!r} is not all, half or N:, as in 16:", param_hint="--score")
    twice = sorted({str(path) for path in candidates if candidates.count(path) > 1})
    if twice:
        raise typer.BadParameter(f"{', '.join(twice)} is given twice", param_hint="CANDIDATES")
    place = _device(device)
    for option, path, suffixes in (
        ("--json", json_path, ()),
        ("--markdown", markdown, ()),
        ("--html", html_path, ()),
        ("--rows", rows_path, (".safetensors",)),
    ):
        writable(option, path, suffixes)
    written = [path.resolve() for path in (json_path, markdown, html_path, rows_path) if path is not None]
    read = [path.resolve() for path in (reference, *candidates, *([] if floor is None else [floor]))]
    for path in written:
        if path in read or written.count(path) > 1:
            use = "is read too" if path in read else "is named for two outputs"
            raise typer.BadParameter(f"{path} {use}: it would be written over", param_hint="an output")
    _need(["safetensors"] if rows_path else [], "compare")
    rank, world = _ranks()
    try:
        sources = [runs.open_source(path) for path in (reference, *candidates)]
        second = None if floor is None else runs.open_source(floor)
        for source in (*sources, *([] if second is None else [second])):
            if not source.rows:
                raise runs.MismatchError(f"{source.path} has no whole row: it is cut, or its recording has only begun")
        names = comparison_module.names_of(candidates)
        planned = comparison_module.plan(sources[0], sources[1:], names, score, valid_vocab, bool(compat), second)
    except runs.MismatchError as error:
        _refuse(error)
    with _progress("rows", len(planned.index[0]), hidden=rank > 0) as tell:
        try:
            comparison_module.run(planned, place, tell, rank, world)
        except runs.MismatchError as error:
            _refuse(error)
    if not comparison_module.gather(planned, rank, world):
        return
    found = comparison_module.result(planned, worst)
    show(found)
    if json_path is not None:
        json_path.write_text(json.dumps(_plain(found), indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    if markdown is not None:
        markdown.write_text(tables.markdown(found), encoding="utf-8")
    if html_path is not None:
        html_path.write_text(html.page(found), encoding="utf-8")
    if rows_path is not None:
        _write_rows(planned, rows_path)
    for path in (json_path, markdown, html_path, rows_path):
        if path is not None:
            _say(f"wrote {escape(str(path))}")
    if not found["complete"]:
        raise typer.Exit(INTERRUPTED if found["interrupted"] else INCOMPLETE)


SHOWN_WORST = 5


def show(found: dict[str, Any]) -> None:
    out = console()
    for line in tables.heading(found):
        out.print(line, markup=False, highlight=False)
    for warning in found["warnings"]:
        out.print(f"[yellow]Note:[/] {escape(warning)}", highlight=False)
    shown = list(tables.tables(found))
    of_worst = [tables.worst(each, SHOWN_WORST) for each in found["candidates"] if each.get("worst")]
    for each in [*shown, *of_worst]:
        out.print(f"\n[bold]{escape(each.title)}[/]", highlight=False)
        for part in each.within(out.width):
            out.print(_as_rich(part), highlight=False)
        if each.note:
            out.print(each.note, style="dim", markup=False, highlight=False)


def _as_rich(words: tables.Table) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(words.columns):
        left = i == 0 or words.is_prose
        table.add_column(escape(column), justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for row in words.rows:
        table.add_row(*map(escape, row))
    return table


def _write_rows(planned: comparison_module.Comparison, path: Path) -> None:
    from safetensors.torch import save_file

    several = len(planned.names) > 1
    tensors: dict[str, Any] = {}
    for name, report in zip(planned.names, planned.reports, strict=False):
        rows = report.rows()
        rows |= (
            {"window": planned.layout.window[rows["row"]], "position": planned.layout.position[rows["row"]]}
            if rows
            else {}
        )
        tensors |= {f"{name}.{key}" if several else key: values.contiguous() for key, values in rows.items()}
    save_file(tensors, path)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become "inf" and null."""
    if isinstance(value, dict):
        return {str(key): _plain(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(of) for of in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _ranks() -> tuple[int, int]:
    """As torchrun says; without it there is one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def _device(asked: str) -> torch.device:
    has = torch.cuda.is_available()
    name = one_of("--device", asked or ("cuda" if has else "cpu"), ("cuda", "cpu"))
    if name == "cuda" and not has:
        raise typer.BadParameter("this machine has no CUDA device", param_hint="--device")
    return torch.device(name, int(os.environ.get("LOCAL_RANK", "0"))) if name == "cuda" else torch.device(name)


def _need(packages: list[str], extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"it needs {', '.join(missing)}: pip install 'kullback[{extra}]', or in a clone pip install '.[{extra}]'"
        )


@contextmanager
def _progress(unit: str, total: int, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    columns = TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda count: bar.advance(task, count)


def _refuse(error: runs.MismatchError) -> NoReturn:
    typer.echo(f"Error: {error}", err=True)
    raise typer.Exit(MISMATCH) from error


def _say(text: str) -> None:
    console().print(text, highlight=False, soft_wrap=True)
