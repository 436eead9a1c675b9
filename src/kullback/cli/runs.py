"""Files that hold what a model said, row by row: recordings, logits, vLLM's hidden states, llama.cpp's base logits.

All are read a chunk of rows at a time, and end at their last whole row; of vLLM's files each one does.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kullback.dtypes import kept_dtype
from kullback.problem import IGNORED

FORMAT = "kullback-run/1"
HEADER, TOKENS, HEAD, TOKENIZER = "run.json", "tokens.safetensors", "head.safetensors", "tokenizer.json"
NO_TOKEN = -1  # after the end of a window that is shorter than the others
MAGIC = b"_logits_"  # of llama.cpp's file
SPAN = 16.0  # nats below a row's largest entry, where llama.cpp's file ends
BELOW_FLOOR = 0.14, 0.07  # of what is stored there, what lies there: mean and spread over rows like SmolLM2's
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


class MismatchError(Exception):
    """Files that are not what they should be, or do not belong together."""


class StoredRows:
    """Rows of equal length in a file, from an offset on.

    They are read, not mapped: mapped pages would count as this process's memory, and a cut file could not be opened.
    """

    def __init__(self, path: Path, offset: int, dtype: torch.dtype, columns: int, rows: int) -> None:
        self.path, self.offset, self.dtype, self.columns, self.rows = path, offset, dtype, columns, rows
        self.row_bytes = columns * dtype.itemsize
        self.whole = max(0, min(rows, (path.stat().st_size - offset) // max(1, self.row_bytes)))
        self._space = torch.empty(0, columns, dtype=dtype)
        self._follows = 0  # the row behind those that were read last

    def read(self, start: int, stop: int) -> Tensor:
        """Some rows, in memory of their own."""
        return self._filled(torch.empty(max(0, stop - start), self.columns, dtype=self.dtype), start)

    def passing(self, start: int, stop: int) -> Tensor:
        """Some rows, in memory that the next such call takes: what each asks for anew leaves gaps in the heap."""
        count = max(0, stop - start)
        if len(self._space) < count:
            self._space = torch.empty(count, self.columns, dtype=self.dtype)
        return self._filled(self._space[:count], start)

    def _filled(self, values: Tensor, start: int) -> Tensor:
        if not values.numel():
            return values
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start * self.row_bytes)
            into, there = values.view(torch.uint8).numpy().data.cast("B"), 0
            while there < len(into):
                count = file.readinto(into[there:])
                if not count:
                    raise MismatchError(f"{self.path} has become shorter while it was read")
                there += count
            if start == self._follows and hasattr(os, "posix_fadvise"):  # the disk reads on while rows are worked on
                with contextlib.suppress(OSError):  # a hint
                    os.posix_fadvise(file.fileno(), file.tell(), len(into), os.POSIX_FADV_WILLNEED)
        self._follows = start + len(values)
        return values


class Entry(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: torch.dtype | None
    shape: list[int]
    offset: int


def entries(path: Path) -> dict[str, Entry]:
    """What a safetensors file says that it holds."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(path.stat().st_size - 8, 1 << 27):
            raise MismatchError(f"{path} is no safetensors file, or cut within its header")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise MismatchError(f"{path} is no safetensors file: its header cannot be read") from error
    if not isinstance(header, dict):
        raise MismatchError(f"{path} is no safetensors file: its header must name tensors; it is {_short(header)}")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, of, 8 + length) for name, of in header.items()}


def _entry(path: Path, name: str, of: Any, start: int) -> Entry:
    known: dict[str, Any] = of if isinstance(of, dict) else {}
    shape: Any = known.get("shape")
    span: Any = known.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(span) and len(span) == 2 and isinstance(known.get("dtype"), str)):
        raise MismatchError(f"{path}: its header must give dtype, shape and two offsets of {name}; got {_short(of)}")
    dtype = DTYPES.get(known["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != span[1] - span[0]:
        raise MismatchError(
            f"{path}: its header gives {name} {span[1] - span[0]} bytes, and {known['dtype']} of {shape} takes "
            f"{math.prod(shape) * dtype.itemsize}"
        )
    return Entry(dtype, shape, start + span[0])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def tensor(path: Path, name: str, entry: Entry, dimensions: int | None = None) -> Tensor:
    """A whole tensor, of a file that has to be whole."""
    if entry.dtype is None:
        raise MismatchError(f"{path}: {name} must be of int32, int64, or a floating dtype of 16 bits or more")
    if dimensions is not None and len(entry.shape) != dimensions:
        raise MismatchError(f"{path}: {name} must have {dimensions} dimensions; its shape is {entry.shape}")
    count = math.prod(entry.shape)
    table = StoredRows(path, entry.offset, entry.dtype, 1, count)
    if table.whole < count:
        raise MismatchError(f"{path} is cut: of {name} it has {table.whole} of {count} numbers")
    return table.read(0, count).reshape(entry.shape)


def shapes_of(held: dict[str, Entry]) -> str:
    return _short({name: f"{entry.dtype or 'unknown'} {entry.shape}" for name, entry in held.items()})


def ids(path: Path, name: str, entry: Entry, dimensions: int | None = None) -> Tensor:
    """A whole tensor of integers."""
    found = tensor(path, name, entry, dimensions)
    if found.is_floating_point():
        raise MismatchError(f"{path}: {name} must be int32 or int64; it is {name_of(found.dtype)}")
    return found.long()


def rows_of(path: Path, name: str, entry: Entry) -> StoredRows:
    """A floating tensor as rows of its last dimension."""
    if entry.dtype is None or not entry.dtype.is_floating_point:
        raise MismatchError(f"{path}: {name} must be float64, float32, float16 or bfloat16")
    if len(entry.shape) < 2 or not entry.shape[-1]:
        raise MismatchError(f"{path}: {name} must be rows of one length; its shape is {entry.shape}")
    return StoredRows(path, entry.offset, entry.dtype, entry.shape[-1], math.prod(entry.shape[:-1]))


LEAST_SHARE = 1000  # a file with less of its rows is no cut file: its header is wrong


def check_share(path: Path, tables: Sequence[StoredRows]) -> None:
    """Of all tables of a file."""
    given, whole = sum(table.rows for table in tables), sum(table.whole for table in tables)
    if given > LEAST_SHARE * max(1, whole):
        raise MismatchError(
            f"{path}: {given} rows are given by its header, and {whole} are there: less than one in {LEAST_SHARE}"
        )


def _check_labels(path: Path, label: Tensor, vocab: int) -> None:
    wrong = label[(label != IGNORED) & ((label < 0) | (label >= vocab))]
    if len(wrong):
        raise MismatchError(f"{path}: labels and tokens must lie from 0 to {vocab - 1}; got {wrong[0].item()}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Layout:
    """Which rows there are. A row predicts the token after its position in its window."""

    window: Tensor
    position: Tensor
    label: Tensor  # IGNORED where it is not known
    length: int  # of windows, of which the last positions may have no row
    tokens: Tensor | None = None  # [windows, length]
    columns: dict[str, Tensor] = field(default_factory=dict)  # ids of rows, by which they may be blocked or grouped
    names: list[str] | None = None  # of the ids of the column `group`


def layout_of(tokens: Tensor, first: int = 0) -> Layout:
    """Of windows of tokens: every position from the first on whose next token is known."""
    tokens = tokens.long()
    window, position = (tokens[:, first + 1 :] != NO_TOKEN).nonzero(as_tuple=True)
    position = position + first
    return Layout(window, position, tokens[window, position + 1], tokens.size(1), tokens)


class Read(NamedTuple):
    """Logits of some rows, [rows, vocab], and which of them are only known to be at most so large."""

    values: Tensor
    floored: Tensor | None = None


class Source(Protocol):
    """What is compared: rows of logits, however they are stored."""

    path: Path
    vocab: int
    layout: Layout
    rows: int  # that are whole; the layout has all that there should be
    rounded: torch.dtype | None  # the dtype of 16 bits that logits themselves were rounded to
    about: dict[str, Any]

    def read(self, rows: Tensor, vocab: int, device: torch.device) -> Read:
        """Logits of the first tokens, of rows in ascending order; vLLM's windows may come in any."""
        ...


def _selected(table_rows: Tensor, wanted: Tensor, start: int) -> Tensor:
    return table_rows if len(table_rows) == len(wanted) else table_rows[wanted - start]


class Head:
    """Makes logits of hidden states, in float32 whatever both are stored in."""

    def __init__(self, path: Path, scale: float = 1.0, softcap: float | None = None) -> None:
        held = entries(path)
        if "weight" not in held:
            raise MismatchError(f"{path} has no tensor weight; it has {', '.join(held)}")
        self.weight = tensor(path, "weight", held["weight"], 2)
        self.bias = tensor(path, "bias", held["bias"], 1) if "bias" in held else None
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None and (
                not value.is_floating_point() or len(value) != len(self.weight) or not len(value)
            ):
                raise MismatchError(
                    f"{path}: {name} must be floating, a row for each token; it is {name_of(value.dtype)} of "
                    f"{list(value.shape)}, and weight has {len(self.weight)} rows"
                )
        self.scale, self.softcap = scale, softcap
        self.norm: tuple[Tensor, float] | None = None  # of the model's last layer, which stands before the head
        if "norm" in held and "norm_eps" in held:
            weight, eps = (tensor(path, name, held[name], 1).float() for name in ("norm", "norm_eps"))
            if weight.shape != self.weight.shape[1:] or eps.shape != (1,) or not float(eps[0]) >= 0:
                raise MismatchError(
                    f"{path}: norm and norm_eps must be of [{self.weight.size(1)}] and of one number from 0 on; got "
                    f"{list(weight.shape)} and {_short(eps.tolist())}"
                )
            self.norm = weight, float(eps[0])
        self._ready: tuple[int, torch.device, Tensor, Tensor | None] | None = None

    def logits(self, hidden: Tensor, vocab: int, device: torch.device) -> Tensor:
        if self._ready is None or self._ready[:2] != (vocab, device):
            dtype = kept_dtype(self.weight.dtype)
            weight = self.weight[:vocab].to(device, dtype)
            bias = None if self.bias is None else self.bias[:vocab].to(device, dtype)
            self._ready = vocab, device, weight, bias
        _, _, weight, bias = self._ready
        logits = torch.nn.functional.linear(hidden.to(device, weight.dtype), weight, bias)
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class Shards:
    """Tables that follow each other; they end at the first that is not whole."""

    def __init__(self, tables: list[StoredRows]) -> None:
        self.tables, self.starts, self.whole = tables, [], 0
        for table in tables:
            self.starts.append(self.whole)
            self.whole += table.whole
            if table.whole < table.rows:
                break

    def read(self, rows: Tensor) -> Tensor:
        """Rows in ascending order, until the next are read."""
        parts = []
        first, last = (bisect.bisect_right(self.starts, int(rows[end])) - 1 for end in (0, -1))
        for table, start in zip(self.tables[first : last + 1], self.starts[first : last + 1], strict=True):
            own = rows[(rows >= start) & (rows < start + table.whole)] - start
            if len(own):
                low, high = int(own[0]), int(own[-1]) + 1
                parts.append(_selected(table.passing(low, high), own, low))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Recording:
    """A folder that `kullback record` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about = header_of(path)
        self.vocab = self.about["vocab"]
        tokens = self._tokens()
        what, dtype = self.about["what"], DTYPES_BY_NAME[self.about["dtype"]]
        self.shards = Shards(list(self._tables(what, dtype, len(tokens))))
        self.rows = self.shards.whole
        self.head = self._head() if what == "hidden" else None
        self.rounded = dtype if what == "logits" and dtype.itemsize == 2 else None

    def _tokens(self) -> Tensor:
        path = self.path / TOKENS
        if not path.is_file():
            raise MismatchError(f"{path} is missing: without tokens no row has a place")
        held = entries(path)
        if "tokens" not in held:
            raise MismatchError(f"{path} has no tensor tokens; it has {', '.join(held)}")
        tokens = ids(path, "tokens", held.pop("tokens"), 2)
        if tokens_sha256(tokens) != self.about["tokens_sha256"]:
            raise MismatchError(f"{path} is not what {HEADER} was written for: its checksum is another")
        columns = {name: ids(path, name, entry, 1) for name, entry in held.items()}
        layout = layout_of(tokens)
        rows = len(layout.window)
        for name, column in columns.items():
            if len(column) not in (len(tokens), rows):
                raise MismatchError(
                    f"{path}: {name} has {len(column)} ids, and tokens have {len(tokens)} windows and {rows} rows"
                )
        names, group = self.about.get("groups") or [], columns.get("group")
        if group is not None and len(group) and not 0 <= int(group.min()) <= int(group.max()) < len(names):
            raise MismatchError(
                f"{path}: group must lie from 0 to {len(names) - 1}, as {HEADER} names {len(names)} groups; "
                f"it goes from {int(group.min())} to {int(group.max())}"
            )
        of_rows = {name: of if len(of) == rows else of[layout.window] for name, of in columns.items()}
        self.layout = dataclasses.replace(layout, columns=of_rows, names=names)
        _check_labels(path, self.layout.label, self.vocab)
        return tokens

    def _tables(self, what: str, dtype: torch.dtype, windows: int) -> Iterator[StoredRows]:
        first, columns, shards = 0, None, self.about["shards"]
        if shards > windows:
            raise MismatchError(
                f"{self.path / HEADER}: shards must be at most {windows}, as there are windows; got {shards}"
            )
        for name in shard_names(shards):
            path = self.path / name
            if not path.exists():
                return
            held = entries(path)
            if what not in held:
                raise MismatchError(f"{path} has no tensor {what}; it has {', '.join(held)}")
            table = rows_of(path, what, held[what])
            check_share(path, [table])
            columns = columns or (self.vocab if what == "logits" else table.columns)
            if len(held[what].shape) != 2 or table.columns != columns or table.dtype != dtype:
                raise MismatchError(
                    f"{path}: {what} must be {name_of(dtype)} of [rows, {columns}], as {HEADER} and other shards have "
                    f"it; it is {name_of(table.dtype)} of {held[what].shape}"
                )
            if "first_row" in held and table.whole == table.rows:
                begins = ids(path, "first_row", held["first_row"]).reshape(-1).tolist()
                if begins != [first]:
                    begins = begins[0] if len(begins) == 1 else begins
                    raise MismatchError(f"{path} begins with row {begins}, and the shards before it have {first} rows")
            if "recording" in held and table.whole == table.rows:
                mark = ids(path, "recording", held["recording"]).reshape(-1).tolist()
                if mark != [mark_of(self.about)]:
                    raise MismatchError(f"{path} is of another recording than {HEADER}")
            first += table.rows
            yield table
        if first != len(self.layout.window):
            raise MismatchError(
                f"{self.path}: its shards have {first} rows, and its tokens make {len(self.layout.window)}"
            )

    def _head(self) -> Head:
        path = self.path / self.about["head"]["file"]
        if not path.is_file():
            raise MismatchError(f"{path} is missing: without the head hidden states have no logits")
        head = Head(path, float(self.about["logit_scale"]), self.about.get("softcap"))
        hidden = self.shards.tables[0].columns if self.shards.tables else head.weight.size(1)
        if head.weight.shape != (self.vocab, hidden):
            raise MismatchError(
                f"{path}: weight must be [{self.vocab}, {hidden}], as {HEADER} has tokens and the shards have "
                f"dimensions; it is {list(head.weight.shape)}"
            )
        given = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
        if self.about["head"].get("sha256") not in (None, tensors_sha256(given)):
            raise MismatchError(f"{path} is not what {HEADER} was written for: its checksum is another")
        return head

    def read(self, rows: Tensor, vocab: int, device: torch.device) -> Read:
        values = self.shards.read(rows)
        if self.head is not None:
            return Read(self.head.logits(values, vocab, device))
        return Read(_first(values, vocab).to(device))


DTYPES_BY_NAME = {name_of(dtype): dtype for dtype in DTYPES.values() if dtype.is_floating_point}


def _first(values: Tensor, vocab: int) -> Tensor:
    return values if values.size(-1) == vocab else values[..., :vocab].contiguous()


def header_of(path: Path) -> dict[str, Any]:
    """Of a recording, with all that its readers ask for."""
    try:
        about = json.loads((path / HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(f"{path / HEADER} cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise MismatchError(f"{path / HEADER} is not of the format {FORMAT}")
    for name, is_right, wanted in WANTED:
        if not is_right(about.get(name)):
            came = _short(about[name]) if name in about else "nothing"
            raise MismatchError(f"{path / HEADER}: {name} must be {wanted}; got {came}")
    head = about.get("head")
    if about["what"] == "hidden" and not (isinstance(head, dict) and _is_file_name(head.get("file"))):
        raise MismatchError(f"{path / HEADER}: head must name its file, as {{'file': '{HEAD}'}}; got {_short(head)}")
    return about


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and value != 0


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) < 256 and not set(value) & {"/", "\\", "\0"} and value != ".."


# What must be in a recording's header, when it is right, and how that is said
WANTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("what", lambda v: v in ("hidden", "logits"), "hidden or logits"),
    ("dtype", lambda v: isinstance(v, str) and v in DTYPES_BY_NAME, f"one of {', '.join(DTYPES_BY_NAME)}"),
    ("vocab", lambda v: type(v) is int and 0 < v < 1 << 31, "the number of tokens"),
    ("shards", lambda v: type(v) is int and v > 0, "the number of shards"),
    ("tokens_sha256", lambda v: isinstance(v, str), f"the checksum of {TOKENS}"),
    ("logit_scale", _is_number, "a number other than 0"),
    ("softcap", lambda v: v is None or (_is_number(v) and v > 0), "null or a positive number"),
    (
        "groups",
        lambda v: v is None or (isinstance(v, list) and all(isinstance(name, str) for name in v)),
        "a list of names",
    ),
    ("tokenizer", lambda v: v is None or _is_file_name(v), "a file's name"),
)


def shard_names(count: int) -> list[str]:
    return [f"rows-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def mark_of(about: Mapping[str, Any]) -> int:
    """What shards carry, so that those of another recording are told."""
    names = "model_fingerprint", "tokens_sha256", "head", "what", "dtype"
    digest = hashlib.sha256(json.dumps([about.get(name) for name in names]).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def tokens_sha256(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()


class LogitsFile:
    """A safetensors file of logits, and of tokens or labels if it has them.

    Logits are `[rows, vocab]` or `[windows, positions, vocab]`: the tensor of that name, or all floating ones of two
    dimensions, each of which is a window.
    """

    def __init__(self, path: Path, held: dict[str, Entry]) -> None:
        self.path, self.about = path, {"what": "logits"}
        is_rows = lambda e: len(e.shape) in (2, 3) and e.dtype is not None and e.dtype.is_floating_point
        names = ["logits"] if "logits" in held else sorted((n for n in held if is_rows(held[n])), key=_natural)
        if not names or not all(is_rows(held[name]) for name in names):
            raise MismatchError(
                f"{path} has no tensor of floating-point logits, [rows, vocab] or [windows, positions, vocab]; "
                f"it has {shapes_of(held)}"
            )
        if len({(held[name].shape[-1], held[name].dtype) for name in names}) > 1:
            shapes = ", ".join(f"{name} {held[name].shape}" for name in names)
            raise MismatchError(f"{path}: its logits must have one vocabulary and dtype; got {shapes}")
        self.shards = Shards([rows_of(path, name, held[name]) for name in names])
        check_share(path, self.shards.tables)
        self.rows, self.vocab = self.shards.whole, held[names[0]].shape[-1]
        dtype = self.shards.tables[0].dtype
        self.rounded = dtype if dtype.itemsize == 2 else None
        self.layout = self._layout(held, [held[name].shape for name in names])

    def _layout(self, held: dict[str, Entry], shapes: list[list[int]]) -> Layout:
        if not any(math.prod(shape[:-1]) for shape in shapes):
            raise MismatchError(f"{self.path}: its logits have no row; their shapes are {shapes}")
        windows = [0 if not shape[-2] else shape[0] if len(shape) == 3 else 1 for shape in shapes]
        lengths = [shape[-2] for shape, count in zip(shapes, windows, strict=True) for _ in range(count)]
        window = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        position = torch.cat([torch.arange(length) for length in lengths])
        label, tokens = torch.full_like(window, IGNORED), None
        named = next((name for name in TOKEN_NAMES if name in held), None)
        if named is not None:
            given = ids(self.path, named, held[named])
            longest = max(lengths)
            if given.numel() not in (longest * len(lengths), (longest + 1) * len(lengths)):
                raise MismatchError(
                    f"{self.path}: {named} must have as many ids as logits have rows, or one more for each window; "
                    f"got {list(given.shape)} beside {shapes}"
                )
            tokens = given.reshape(len(lengths), -1)
            follows = position + 1 < tokens.size(1)
            label[follows] = tokens[window[follows], position[follows] + 1]
            label[label == NO_TOKEN] = IGNORED
        columns = {}
        for name, entry in held.items():
            is_asked = name in ("labels", "block", "group")
            if not is_asked and (
                entry.dtype not in (torch.int32, torch.int64) or entry.shape not in ([len(window)], [len(lengths)])
            ):
                continue
            column = ids(self.path, name, entry).reshape(-1)
            if len(column) == len(lengths) != len(window) and name != "labels":
                column = column[window]
            if len(column) != len(window):
                raise MismatchError(f"{self.path}: {name} has {len(column)} ids, and logits have {len(window)} rows")
            columns[name] = column
        label = columns.pop("labels", label)
        _check_labels(self.path, label, self.vocab)
        length = max(lengths) if tokens is None else tokens.size(1)
        return Layout(window, position, label, length, tokens, columns)

    def read(self, rows: Tensor, vocab: int, device: torch.device) -> Read:
        return Read(_first(self.shards.read(rows), vocab).to(device))


TOKEN_NAMES = ("tokens", "input_ids", "token_ids")


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in names by their size: one of more digits is larger."""
    numbers = (digits.lstrip("0") for digits in re.findall("[0-9]+", name))
    return [*((len(digits), digits) for digits in numbers), (0, name)]


class HiddenFiles:
    """vLLM's files of hidden states, one for each prompt, of a folder that also has the model's head.

    `hidden_states` is [tokens, hidden] or [tokens, layers, hidden], of which the last layer counts; `token_ids` beside.
    """

    rounded: torch.dtype | None = None

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path, self.about = path, {"what": "hidden", "norm": "as stored"}
        folder = path if path.is_dir() else path.parent
        if not (folder / HEAD).exists():
            raise MismatchError(
                f"{folder} has hidden states and no {HEAD}, with the head's weight [vocab, hidden]: "
                "`kullback record` of the model writes one, which can be copied there"
            )
        self.head = Head(folder / HEAD)
        self.vocab, hidden = self.head.weight.shape
        found = []
        for file in files:
            held = entries(file)
            if "token_ids" not in held:
                raise MismatchError(f"{file} has no tensor token_ids; it has {', '.join(held)}")
            given, states = ids(file, "token_ids", held["token_ids"], 1).tolist(), held["hidden_states"]
            if len(states.shape) not in (2, 3) or states.shape[0] != len(given) or states.shape[-1] != hidden:
                raise MismatchError(
                    f"{file}: hidden_states must be of {len(given)} tokens and {hidden} dimensions, as its token_ids "
                    f"and the head; got {states.shape}"
                )
            found.append((given, file, states))
        found.sort(key=lambda each: each[0])  # their names are of requests, and differ between runs
        length = max(len(given) for given, _, _ in found)
        tokens = torch.full((len(found), length), NO_TOKEN)
        self.tables = []
        for row, (given, file, states) in enumerate(found):
            tokens[row, : len(given)] = torch.tensor(given)
            self.tables.append(
                rows_of(file, "hidden_states", states._replace(shape=[len(given), math.prod(states.shape[1:])]))
            )
        check_share(path, self.tables)
        layout = layout_of(tokens)
        _check_labels(path, layout.label, self.vocab)
        self.hidden = hidden
        # Rows that files of the middle lack come last.
        is_there = layout.position < torch.tensor([table.whole for table in self.tables])[layout.window]
        order = (~is_there).to(torch.uint8).argsort(stable=True)
        of_rows = {name: getattr(layout, name)[order] for name in ("window", "position", "label")}
        self.layout, self.rows = dataclasses.replace(layout, **of_rows), int(is_there.sum())
        self._check_norm()

    def read(self, rows: Tensor, vocab: int, device: torch.device) -> Read:
        parts = []
        windows, counts = self.layout.window[rows].unique_consecutive(return_counts=True)
        for each, own in zip(windows.tolist(), self.layout.position[rows].split(counts.tolist()), strict=True):
            low, high = int(own[0]), int(own[-1]) + 1
            parts.append(_selected(self.tables[each].read(low, high), own, low)[:, -self.hidden :])
        states = torch.cat(parts)
        if self.about["norm"] == APPLIED and self.head.norm is not None:
            weight, eps = self.head.norm
            states = states.float()
            states = states * (states.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return Read(self.head.logits(states, vocab, device))

    def _check_norm(self) -> None:
        """States before the final norm predict the text worse than chance does. Whether they are is seen by that."""
        rows = torch.arange(min(self.rows, 256))
        if len(rows) == 0:
            return
        losses = {}
        for norm in ("as stored", *([APPLIED] if self.head.norm is not None else [])):
            self.about["norm"] = norm
            logits = self.read(rows, self.vocab, torch.device("cpu")).values
            loss = float(torch.nn.functional.cross_entropy(logits, self.layout.label[rows]))
            losses[norm] = loss if math.isfinite(loss) else math.inf
        self.about["norm"] = min(losses, key=lambda norm: losses[norm])
        loss = losses[self.about["norm"]]
        if not loss < math.log(self.vocab):
            raise MismatchError(
                f"{self.path}: these hidden states predict their own text at {loss:.1f} nats a token, worse than "
                f"chance ({math.log(self.vocab):.1f}). The head reads them after the final norm; were they stored "
                f"before it? If {HEAD} has norm and norm_eps, as `kullback record` writes them, it is applied"
            )


APPLIED = "applied"


class LlamaCpp:
    """llama.cpp's base-logits file (tools/perplexity/perplexity.cpp), of one model.

    Per row float32 scale and least log-probability, then uint16 of each token. Tokens more than 16 nats below the
    row's best are stored as the least: of those only an upper bound is known.
    """

    rounded: torch.dtype | None = None

    def __init__(self, path: Path) -> None:
        self.path, self.about = path, {"what": "llama.cpp"}
        with path.open("rb") as file:
            fixed = file.read(len(MAGIC) + 12)
            if len(fixed) < len(MAGIC) + 12:
                raise MismatchError(f"{path} is cut within its header")
            context, self.vocab, chunks = struct.unpack("<3i", fixed[len(MAGIC) :])
            size, count = path.stat().st_size, context * chunks
            if min(context, self.vocab, chunks) < 1:
                raise MismatchError(f"{path}: its header gives {chunks} windows of {context}, and {self.vocab} tokens")
            if size < len(fixed) + 4 * count:
                raise MismatchError(
                    f"{path} is cut within its header: of {context} x {chunks} tokens it has {(size - len(fixed)) // 4}"
                )
            given = file.read(4 * count)
        tokens = torch.frombuffer(bytearray(given), dtype=torch.int32).view(chunks, context)
        self.first = context // 2
        self.layout = layout_of(tokens, self.first)
        _check_labels(path, self.layout.label, self.vocab)
        columns = 2 * ((self.vocab + 1) // 2) + 4
        self.table = StoredRows(path, len(fixed) + len(given), torch.int16, columns, len(self.layout.window))
        self.rows = self.table.whole
        if size > self.table.offset + self.table.rows * self.table.row_bytes:
            raise MismatchError(
                f"{path}: its header gives {self.table.rows} rows of {self.vocab} tokens, "
                f"{self.table.rows * self.table.row_bytes} bytes; {size - self.table.offset} follow it"
            )

    def read(self, rows: Tensor, vocab: int, device: torch.device) -> Read:
        """As they stand in the file: their masses need not add up to 1. Of fewer tokens they are these tokens' own."""
        low, high = int(rows[0]), int(rows[-1]) + 1
        stored = _selected(self.table.passing(low, high), rows, low).to(device)
        scale, least = stored[:, :4].contiguous().view(torch.float32).split(1, -1)
        steps = stored[:, 4 : 4 + self.vocab].int() & 0xFFFF
        # A row whose tokens are all nearer than that has its own least entry there.
        is_cut = scale * 65535 > SPAN * (1 - 1e-5)
        values, floored = steps * scale + least, (steps == 0) & is_cut
        if vocab < self.vocab:
            likely = values.double() + torch.where(floored, math.log(BELOW_FLOOR[0]), 0.0)
            share = likely[:, :vocab].logsumexp(-1, keepdim=True) - likely.logsumexp(-1, keepdim=True)
            values, floored = (values[:, :vocab] - share).clamp(max=0).float(), floored[:, :vocab]
        return Read(values, floored)


def open_source(path: Path) -> Source:
    """The reader of whatever lies there."""
    try:
        return _reader(path)
    except OSError as error:
        raise MismatchError(f"{path} cannot be read: {error.strerror or error}") from error


def _reader(path: Path) -> Source:
    if not path.exists():
        raise MismatchError(f"there is no {path}")
    if not path.is_dir() and not path.is_file():
        raise MismatchError(f"{path} is neither a file nor a folder")
    if path.is_dir():
        if (path / HEADER).exists():
            return Recording(path)
        files = [file for file in sorted(path.glob("*.safetensors")) if file.name != HEAD]
        if files and all("hidden_states" in entries(file) for file in files):
            return HiddenFiles(path, files)
        raise MismatchError(
            f"{path} has neither {HEADER}, which `kullback record` writes, nor vLLM's files of hidden states"
        )
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic == MAGIC:
        return LlamaCpp(path)
    held = entries(path)
    if "first_row" in held and not held["first_row"].shape:
        raise MismatchError(f"{path} is a part of a recording: name its folder")
    if path.name in (HEAD, TOKENS) and "logits" not in held:
        raise MismatchError(f"{path} is a model's head or a recording's tokens, and no logits")
    return HiddenFiles(path, [path]) if "hidden_states" in held else LogitsFile(path, held)


def is_part_of(path: Path, source: Path) -> bool:
    """Whether a resolved path is that of a source, or of what one in a folder is read from."""
    try:
        if not source.is_dir():
            return path == source.resolve() or path in _heads_beside(source)
        names = {HEADER, *_named_by_header(source)}
        is_part = lambda file: file.suffix == ".safetensors" or file.name in names
        linked = [file.resolve() for file in source.iterdir() if is_part(file)]
        return (path.parent == source.resolve() and is_part(path)) or path in linked
    except (OSError, RuntimeError):  # a source that cannot be looked at cannot be read either, and that is said then
        return False


def _heads_beside(source: Path) -> list[Path]:
    """That of a single file of hidden states, beside it or a link to it."""
    if "hidden_states" not in _names_in(source):
        return []
    return [(place.parent / HEAD).resolve() for place in (source, source.resolve())]


def _names_in(source: Path) -> Iterable[str]:
    try:
        return entries(source)
    except MismatchError:
        return ()


def _named_by_header(source: Path) -> list[str]:
    """A recording's head and tokenizer."""
    try:
        about = header_of(source)
    except MismatchError:
        return [TOKENIZER]
    head = about.get("head")
    return [str(about.get("tokenizer")), *([str(head.get("file"))] if isinstance(head, dict) else [])]
