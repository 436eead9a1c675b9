"""record and compare: their arguments, and how they end."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kullback.cli import comparison as comparison_module
from kullback.cli import html, runs, tables, writing
from kullback.cli.interrupts import uninterrupted
from kullback.cli.options import (
    USAGE,
    device_of,
    is_written,
    kept_apart,
    not_written,
    one_of,
    writable,
    writable_folder,
)

INCOMPLETE, MISMATCH, INTERRUPTED = 1, 3, 130
SHOWN_WORST = 5
LEAST_WIDTH = 40  # in which figures are whole
STORED = ("float16", "bfloat16", "float32")


class Output(Console):
    """A stream whose reader may go: the rest of it is dropped then, and the exit status is the work's."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def console(outputs: Iterable[Path | None] = ()) -> Console:
    """Standard output, or standard error where that is one of the outputs."""
    is_taken = any(path is not None and writing.descriptor(path) == 1 for path in outputs)
    found = Output(emoji=False, stderr=is_taken)  # names and texts are shown as they are
    found.width = max(found.width, LEAST_WIDTH)
    return found


def record(
    model: Annotated[str, typer.Argument(help="A Hugging Face causal LM: a folder, a hub's name, or a .gguf file.")],
    text: Annotated[
        Path,
        typer.Argument(
            readable=False,
            help="A text; documents as JSON lines with a column `text` (.jsonl); or a recording or a llama.cpp "
            "base-logits file, whose tokens are read again.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    what: Annotated[str, typer.Option(help="hidden: what the head reads, and the head once; or logits.")] = "hidden",
    dtype: Annotated[str, typer.Option(help=f"What rows are stored in: {', '.join(STORED)}.")] = "float16",
    load_dtype: Annotated[
        str, typer.Option(help=f"What the model computes in: {', '.join(STORED)}; auto is its own, float32 of a GGUF.")
    ] = "auto",
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a text that are read together; by default 512.")
    ] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="How many windows; by default all of the text.")] = None,
    groups: Annotated[str | None, typer.Option(help="The column of a .jsonl that tells groups apart.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="The GGUF file of a folder or a hub's name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub's model: branch, tag or commit.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the best there is.")] = "",
) -> None:
    """Run a language model over a text, and keep what it says for `kullback compare`.

    Hidden states take 30 to 90 times less room than logits, and lose less than logits of 16 bits do. Each shard is
    written whole. If it is interrupted, the same command goes on where it ended.

    Example, whose second command takes the reference's tokens:

    - `kullback record ./model wiki.txt -o reference`
    - `kullback record ./model-q4.gguf reference -o q4`
    - `kullback compare reference q4`

    Exit status: 0; 2 for usage, a MODEL that cannot be read or an output that cannot be written; 3 for all else that is
    wrong; 130 if interrupted.
    """
    one_of("--what", what, ("hidden", "logits"))
    one_of("--dtype", dtype, STORED)
    one_of("--load-dtype", load_dtype, ("auto", *STORED))
    place = device_of(device)
    of_gguf = ["accelerate", "gguf"] if gguf_file or model.endswith(".gguf") else []
    _need(["transformers", "safetensors", *of_gguf], "record")
    if not (text.is_file() or text.is_dir()) or not os.access(text, os.R_OK):
        raise typer.BadParameter(f"{text} is no file or folder that can be read", param_hint="TEXT")
    writable_folder("--output", output)
    from safetensors import SafetensorError

    from kullback.cli import record as recorder

    try:
        recorder.check_own(output)
        recorder.check_text(text, window, groups)
    except (runs.MismatchError, OSError) as error:
        _refuse(error)
    if not Path(model).exists() and not recorder.is_path(model, gguf_file):
        typer.echo(f"there is no {model} here: asked for at huggingface.co, or in its cache", err=True)
    try:
        loaded = recorder.load(model, gguf_file, revision, load_dtype, place)
    except Exception as error:  # transformers, tokenizers and what quantised weights need have errors of all kinds
        told = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, OSError | ValueError | SafetensorError):
            told = f"{model} cannot be read: {type(error).__name__}: {told}"
        raise typer.BadParameter(told, param_hint="MODEL") from error
    try:
        read = recorder.read_text(text, loaded.tokenizer, window, windows, groups)
        with _progress("windows", len(read.tokens)) as tell:
            there = recorder.record(loaded, read, output, what, getattr(torch, dtype), tell)
    except writing.NotWrittenError as error:
        not_written("--output", error)
        raise typer.Exit(USAGE) from error
    except (runs.MismatchError, OSError, ValueError) as error:
        _refuse(error)
    except KeyboardInterrupt:
        whole = len(list(output.glob("rows-*.safetensors")))
        _say(f"[yellow]interrupted[/]: {escape(str(output))} has {whole} whole shards; the same command goes on there")
        raise typer.Exit(INTERRUPTED) from None
    size = sum(file.stat().st_size for file in output.iterdir() if file.is_file()) / 1e6
    rows = int((read.tokens[:, 1:] != runs.NO_TOKEN).sum())
    resumed = f", {there} shards of it from before" if there else ""
    _say(f"wrote {escape(str(output))}: {rows} rows of {len(read.tokens)} windows, {size:.1f} MB{resumed}")


def compare(
    reference: Annotated[
        Path,
        typer.Argument(
            readable=False,
            help="What candidates are measured against: a recording, a .safetensors of logits, a folder of vLLM's "
            "hidden states with head.safetensors, or a llama.cpp base-logits file.",
        ),
    ],
    candidates: Annotated[list[Path], typer.Argument(readable=False, help="The same of each candidate.")],
    score: Annotated[
        str,
        typer.Option(
            help="Which positions count: all; half, the second of each window, as llama.cpp; or N: (from N on)."
        ),
    ] = "",
    blocks: Annotated[
        str,
        typer.Option(
            help="What intervals resample: window, document, or another column of the files; by default documents "
            "where there are several, else windows."
        ),
    ] = "",
    groups: Annotated[
        str, typer.Option(help="The column by whose ids the report is split; by default `group`, if there is one.")
    ] = "",
    valid_vocab: Annotated[
        int | None, typer.Option(min=1, help="Only the first tokens count, where one is padded.")
    ] = None,
    floor: Annotated[
        Path | None,
        typer.Option(
            readable=False, help="The reference once more, recorded by another engine: what a KLD has to exceed."
        ),
    ] = None,
    compat: Annotated[
        str,
        typer.Option(help="llama.cpp: its own formula, its ± and its half of positions, to check against its output."),
    ] = "",
    worst: Annotated[
        int, typer.Option(min=0, help=f"How many of the worst rows are reported; the terminal shows {SHOWN_WORST}.")
    ] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", readable=False, help="Write all figures there.")] = None,
    markdown: Annotated[Path | None, typer.Option(readable=False, help="Write the tables there, as Markdown.")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", readable=False, help="Write one page that needs nothing else.")
    ] = None,
    rows_path: Annotated[
        Path | None, typer.Option("--rows", readable=False, help="Write each row's figures (.safetensors).")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the best there is.")] = "",
) -> None:
    """Report how far candidates are from a reference, in nats a token: mean KLD with an interval, and where it is from.

    Files are read a chunk at a time. Intervals resample whole windows or documents, since tokens of a text depend on
    each other; there is none below ten. Candidates are told apart by rows in pairs. Under `torchrun` ranks share the
    rows.

    Examples:

    - `kullback compare reference q8 q4 --html report.html`
    - `kullback compare base.kld candidate.kld --compat llama.cpp`

    Exit status: 0; 1 if files end early; 2 for usage; 3 for files that are unreadable or do not fit; 130 if stopped.
    """
    if compat:
        one_of("--compat", compat, (comparison_module.LLAMA_CPP,))
    score = score or ("half" if compat else "all")
    if score not in ("all", "half") and not re.fullmatch("[0-9]{1,9}:", score):
        raise typer.BadParameter(f"{score!r} is not all, half or N:, as in 16:", param_hint="--score")
    twice = sorted({str(path) for path in candidates if candidates.count(path) > 1})
    if twice:
        raise typer.BadParameter(f"{', '.join(twice)} is given twice", param_hint="CANDIDATES")
    place = device_of(device)
    for option, path, suffixes in (
        ("--json", json_path, ()),
        ("--markdown", markdown, ()),
        ("--html", html_path, ()),
        ("--rows", rows_path, (".safetensors",)),
    ):
        writable(option, path, suffixes)
    asked = json_path, markdown, html_path, rows_path
    inputs = [reference, *candidates, *([] if floor is None else [floor])]
    kept_apart(asked, lambda path: any(runs.is_part_of(path, each) for each in inputs))
    _need(["safetensors"] if rows_path else [], "compare")
    rank, world = _ranks()
    try:
        sources = [runs.open_source(path) for path in (reference, *candidates)]
        second = None if floor is None else runs.open_source(floor)
        for source in (*sources, *([] if second is None else [second])):
            if not source.rows:
                raise runs.MismatchError(f"{source.path} has no whole row: it is cut, or its recording has only begun")
        names = comparison_module.names_of(candidates)
        planned = comparison_module.plan(
            sources[0], sources[1:], names, score, valid_vocab, bool(compat), second, blocks, groups
        )
    except (runs.MismatchError, OSError) as error:
        _refuse(error)
    with _progress("rows", len(planned.index[0]), hidden=rank > 0) as tell:
        try:
            comparison_module.run(planned, place, tell, rank, world)
        except (runs.MismatchError, OSError) as error:
            _refuse(error)
    with uninterrupted():  # what was read is reported
        if not comparison_module.gather(planned, rank, world):
            return
        try:
            found = comparison_module.result(planned, worst)
        except runs.MismatchError as error:
            _refuse(error)
        as_json = writing.as_json(found)
        outputs: list[tuple[str, Path | None, Callable[[Path], None]]] = [
            ("--json", json_path, lambda path: writing.put_text(path, as_json)),
            ("--markdown", markdown, lambda path: writing.put_text(path, tables.markdown(found))),
            ("--html", html_path, lambda path: writing.put_text(path, html.page(found))),
            ("--rows", rows_path, lambda path: writing.put(path, lambda place: place.write_bytes(_rows(planned)))),
        ]
        # Before anything is shown: whoever reads that may have gone.
        wrote = [path for option, path, write in outputs if path is not None and is_written(option, path, write)]
        is_shown = _show(found, wrote)
    if not is_shown or len(wrote) < sum(path is not None for path in asked):
        raise typer.Exit(USAGE)
    if not found["complete"]:
        raise typer.Exit(INTERRUPTED if found["interrupted"] else INCOMPLETE)
    if found["left_out"]:
        raise typer.Exit(MISMATCH)


def _show(found: dict[str, Any], wrote: list[Path]) -> bool:
    out = console(wrote)
    try:
        show(found, out)
        for path in wrote:
            _say(f"wrote {escape(str(path))}", out)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        typer.echo(f"Error: the report could not be shown: {error}", err=True)
        return False
    return True


def show(found: dict[str, Any], out: Console) -> None:
    for line in tables.heading(found):
        out.print(line, markup=False, highlight=False)
    for warning in found["warnings"]:
        out.print(f"[yellow]Note:[/] {escape(tables.shown(warning))}", highlight=False)
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
    for i, (title, *cells) in enumerate(zip(words.columns, *words.rows, strict=True)):
        left, is_number = i == 0 or words.is_prose, (i == 0) == words.is_prose  # of these no cell may be broken
        least = min(max(map(cell_len, cells), default=0), tables.LEAST_WORDS)
        justify: Literal["left", "right"] = "left" if left else "right"
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if is_number else "fold"
        table.add_column(Text(title), justify=justify, no_wrap=is_number, overflow=overflow, min_width=least)
    for row in words.rows:
        table.add_row(*map(Text, row))
    return table


def _rows(planned: comparison_module.Comparison) -> bytes:
    """Each row's figures, of several candidates behind their names; safetensors itself would write a new file."""
    from safetensors.torch import save

    several, tensors = len(planned.names) > 1, dict[str, Tensor]()
    for name, report in zip(planned.names, planned.reports, strict=False):
        rows = report.rows()
        rows |= planned.places(rows["row"]) if rows else {}
        tensors |= {f"{name}.{key}" if several else key: values.contiguous() for key, values in rows.items()}
    return bytes(save(tensors))


def _ranks() -> tuple[int, int]:
    """As torchrun says, or whoever says all that it does; else there is one, whatever a cluster sets."""
    said = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    world = int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in said) else 1
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def _need(packages: list[str], extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"it needs {', '.join(missing)}: pip install 'kullback[{extra}]', or in a clone pip install '.[{extra}]'"
        )


@contextmanager
def _progress(unit: str, total: int, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    columns = TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Output(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda count: bar.advance(task, count)


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"Error: {error}", err=True)
    raise typer.Exit(MISMATCH) from error


def _say(text: str, out: Console | None = None) -> None:
    (out or console()).print(text, highlight=False, soft_wrap=True)
