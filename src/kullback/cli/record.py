"""Run a Hugging Face language model over a text, and keep what it says."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from torch import Tensor

import kullback
from kullback.cli import runs
from kullback.cli.runs import NO_TOKEN, MismatchError
from kullback.cli.writing import replace, save
from kullback.integrations import transformers as integration

WINDOW = 512  # tokens
MOST_TOKENS = 1 << 31  # that a text's windows have room for
SHARD_BYTES, SHARD_WINDOWS = 1 << 26, 16  # at most: it is what an interrupt loses
Model = Any


class Text(NamedTuple):
    """Windows of tokens, and where they are from."""

    tokens: Tensor  # int32 [windows, window], NO_TOKEN after the end of a short one
    document: Tensor | None
    group: Tensor | None
    groups: list[str]


class Loaded(NamedTuple):
    """A model, its tokenizer, and what a recording tells of where they are from."""

    model: Model
    tokenizer: Any
    about: dict[str, Any]


def is_path(name: str, gguf_file: str | None) -> bool:
    """Whether a model's name can be no hub's."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (gguf_file is None and name.endswith(".gguf"))


def load(name: str, gguf_file: str | None, revision: str | None, dtype: str, device: torch.device) -> Loaded:
    """In evaluation mode. The path of a GGUF file is its folder and its name."""
    folder = Path(name)
    if is_path(name, gguf_file) and not folder.exists():
        raise FileNotFoundError(f"there is no {name}")
    configurations = [folder / config for config in ("config.json", "adapter_config.json")]
    if folder.is_dir() and gguf_file is None and not any(config.exists() for config in configurations):
        raise FileNotFoundError(f"{name} has no config.json, as the folder of a model does")
    if folder.exists() and revision is not None:
        raise ValueError(f"--revision {revision}: {name} is on this machine, and only a hub's models have revisions")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = name
    if name.endswith(".gguf") and Path(name).is_file():
        place, gguf_file = str(Path(name).parent), Path(name).name
    options = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, **options)
    kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    if gguf_file and dtype == "auto":
        kind = torch.float32  # what quantised weights are made of
    model, found = AutoModelForCausalLM.from_pretrained(
        place, revision=revision, dtype=kind, output_loading_info=True, **options
    )
    absent = sorted({key for key, _ in model.named_parameters()}.intersection(found["missing_keys"]))
    if absent:
        raise ValueError(
            f"{name} lacks {len(absent)} weights of a {type(model).__name__}, which would be made up: "
            f"{', '.join(absent[:2])}{', …' if len(absent) > 2 else ''}"
        )
    about = {
        "model": name,
        "gguf_file": gguf_file,
        "revision": getattr(model.config, "_commit_hash", None),
        "runtime": {
            "name": "transformers",
            "version": importlib.metadata.version("transformers"),
            "torch": str(torch.__version__),
            "kullback": kullback.__version__,
            "device": str(device),
        },
    }
    return Loaded(model.eval().requires_grad_(False).to(device), tokenizer, about)


def check_text(path: Path, window: int | None, column: str | None) -> None:
    """What can be said of a text before a model is loaded."""
    if _has_tokens(path):
        _source_of_tokens(path, window, column)
    elif not sum(len(text) for text, _ in _documents(path, column)):
        raise MismatchError(f"{path} has fewer than two tokens")


def _has_tokens(path: Path) -> bool:
    """Whether it is a recording, or a llama.cpp file."""
    return path.is_dir() or _begins(path, runs.MAGIC)


def _source_of_tokens(path: Path, window: int | None, column: str | None) -> tuple[runs.Source, Tensor]:
    """Such a one, and its tokens."""
    if column:
        raise MismatchError(f"--groups {column}: {path} is no text; a recording's groups are kept as they are")
    if window:
        raise MismatchError(f"--window {window}: {path} is no text; its windows are kept as they are")
    source = runs.open_source(path)
    if source.layout.tokens is None:
        raise MismatchError(f"{path} has no tokens that could be read again")
    return source, source.layout.tokens


def read_text(path: Path, tokenizer: Any, window: int | None, windows: int | None, column: str | None) -> Text:
    """Of a text, of the documents of JSON lines, or the tokens of another recording or of a llama.cpp file."""
    if _has_tokens(path):
        return _tokens_again(*_source_of_tokens(path, window, column), tokenizer, windows)
    documents = list(_documents(path, column))
    names = sorted({name for _, name in documents if name is not None})
    window, parts, document, group = window or WINDOW, [], [], []
    first = [tokenizer.bos_token_id] if begins_with_bos(tokenizer) else []
    step = window - len(first)
    for number, (text, name) in enumerate(documents):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), step):
            own = [*first, *ids[start : start + step]]
            if len(own) < 2:
                continue
            parts.append(torch.tensor(own, dtype=torch.int32))
            document.append(number)
            group.append(names.index(name) if name is not None else 0)
            if len(parts) == windows:
                break
        if len(parts) == windows:
            break
    if not parts:
        raise MismatchError(f"{path} has fewer than two tokens")
    longest = max(map(len, parts))
    if len(parts) * window > MOST_TOKENS:
        raise MismatchError(f"--window {window} is too long: no window of the text has more than {longest} tokens")
    together = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=NO_TOKEN)
    return Text(
        torch.nn.functional.pad(together, (0, window - longest), value=NO_TOKEN),
        torch.tensor(document, dtype=torch.int32),
        torch.tensor(group, dtype=torch.int32) if column else None,
        names,
    )


def begins_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a token before every text, without which such a model is not itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _tokens_again(source: runs.Source, tokens: Tensor, tokenizer: Any, windows: int | None) -> Text:
    layout, tokens = source.layout, tokens.int().clone()
    if isinstance(source, runs.LlamaCpp) and begins_with_bos(tokenizer):
        tokens[:, 0] = tokenizer.bos_token_id  # as llama.cpp does before it runs a window

    def of_windows(name: str) -> Tensor | None:
        if name not in layout.columns:
            return None
        ids = torch.zeros(len(tokens), dtype=torch.int32)
        ids[layout.window] = layout.columns[name].int()
        return ids[:windows]

    group = of_windows("group") if layout.names is not None else None
    return Text(tokens[:windows], of_windows("document"), group, layout.names or [])


def _documents(path: Path, column: str | None) -> Iterator[tuple[str, str | None]]:
    """Texts, and to which group each belongs."""
    try:
        yield from _parsed(path, column)
    except UnicodeDecodeError as error:
        raise MismatchError(f"{path} is no text in UTF-8: {error}") from error


def _parsed(path: Path, column: str | None) -> Iterator[tuple[str, str | None]]:
    if path.suffix != ".jsonl":
        if column:
            raise MismatchError(f"--groups {column}: {path.name} has no columns; they are those of a .jsonl file")
        yield path.read_text(encoding="utf-8-sig"), None
        return
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MismatchError(f"{path}, line {number}: {error}") from error
            wanted = ["text", *([column] if column else [])]
            missing = [name for name in wanted if not isinstance(record, dict) or name not in record]
            if missing:
                raise MismatchError(f"{path}, line {number} has no column {missing[0]!r}")
            text, name = record["text"], record[column] if column else ""
            if not isinstance(text, str):
                raise MismatchError(f"{path}, line {number}: text must be a string; got {text!r:.80}")
            if not (type(name) in (str, int) or (type(name) is float and math.isfinite(name))):
                raise MismatchError(f"{path}, line {number}: {column} must be a string or a number; got {name!r:.80}")
            try:
                f"{text}{name}".encode()
            except UnicodeEncodeError as error:
                raise MismatchError(f"{path}, line {number} is no text in UTF-8: {error}") from error
            yield text, str(name) if column else None


def header(loaded: Loaded, text: Text, what: str, dtype: torch.dtype, head_sha256: str) -> dict[str, Any]:
    """What a recording is of; the same again when it is resumed."""
    head = integration.head_of(loaded.model)
    vocab, hidden = head.weight.shape
    of_window = text.tokens.size(1) * (hidden if what == "hidden" else vocab) * dtype.itemsize
    windows_per_shard = max(1, min(SHARD_WINDOWS, SHARD_BYTES // of_window))
    return {
        "format": runs.FORMAT,
        "what": what,
        **loaded.about,
        "weights": runs.name_of(head.weight.dtype),
        "activations": runs.name_of(loaded.model.dtype),
        "dtype": runs.name_of(dtype),
        "logit_scale": head.scale,
        "softcap": head.softcap,
        "vocab": vocab,
        "valid_vocab": min(vocab, len(loaded.tokenizer)),
        "tokenizer": runs.TOKENIZER,
        "tokens_sha256": runs.tokens_sha256(text.tokens),
        "head": {"file": runs.HEAD, "sha256": head_sha256},
        "groups": text.groups,
        "windows": len(text.tokens),
        "window": text.tokens.size(1),
        "windows_per_shard": windows_per_shard,
        "shards": math.ceil(len(text.tokens) / windows_per_shard),
    }


def fingerprint(model: Model) -> str:
    """Of all weights: names, shapes, and sums of their bits, plain and by places: the same on every device."""
    digest, states = hashlib.sha256(), model.state_dict()
    for name in sorted(name for name, state in states.items() if isinstance(state, Tensor)):
        weights = states[name].detach().resolve_conj()
        bits = (weights.int_repr() if weights.is_quantized else weights).contiguous().reshape(-1)
        bits = bits.view(INTEGERS.get(bits.element_size(), torch.uint8))
        places = 2 * torch.arange(min(len(bits), PART), device=bits.device) + 1
        parts = (part.long() for part in bits.split(PART))
        sums = [(int(part.sum()), int((part * places[: len(part)]).sum())) for part in parts]
        digest.update(f"{name} {list(weights.shape)} {weights.dtype} {sums}".encode(errors="replace"))
    return digest.hexdigest()


PART = 1 << 24
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def record(loaded: Loaded, text: Text, folder: Path, what: str, dtype: torch.dtype, tell: Callable[[int], None]) -> int:
    """Write what is missing of a recording; how many shards were there already."""
    model = loaded.model
    if what == "hidden":
        integration.check_logits("MODEL", model, _rounding(model))
    head = integration.head_of(model)
    weights = {"weight": head.weight, **({} if head.bias is None else {"bias": head.bias})}
    weights = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    about = header(loaded, text, what, dtype, runs.tensors_sha256(weights))
    _check_known(folder, about)
    _check_tokens(model, text.tokens)
    check_own(folder)
    _check_causal(model, text.tokens[0])
    about["model_fingerprint"] = fingerprint(model)  # behind what takes no time
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _check_known(folder, about)
        return _write(loaded, text, folder, about, weights, tell)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process writes there."""
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise MismatchError(
            f"another process is recording into {folder}: wait for it, or give another folder"
        ) from error
    except (OSError, NotImplementedError):  # of a file system without locks
        yield
        return
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        lock.release()


def _write(
    loaded: Loaded,
    text: Text,
    folder: Path,
    about: dict[str, Any],
    weights: dict[str, Tensor],
    tell: Callable[[int], None],
) -> int:
    """What is not there yet, the header before all rows; how many shards were."""
    model, what, dtype = loaded.model, about["what"], getattr(torch, about["dtype"])
    columns = {"tokens": text.tokens, "document": text.document, "group": text.group}
    tensors = {name: column for name, column in columns.items() if column is not None}
    replace(folder / runs.TOKENS, lambda path: save(tensors, path))
    if what == "hidden":
        replace(folder / runs.HEAD, lambda path: save(weights | final_norm(model), path))
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        replace(folder / runs.TOKENIZER, lambda path: backend.save(str(path)))
    described = json.dumps(about, indent=2) + "\n"  # in ASCII: a path may be no text
    replace(folder / runs.HEADER, lambda path: path.write_text(described, encoding="utf-8"))

    step, names, there, first = about["windows_per_shard"], runs.shard_names(about["shards"]), 0, 0
    for number, shard in enumerate(names):
        windows = text.tokens[number * step : (number + 1) * step]
        rows = int((windows[:, 1:] != NO_TOKEN).sum())
        if _is_whole(folder / shard, what, rows):
            there += 1
            tell(len(windows))
        else:
            parts = []
            for window in windows:
                try:
                    parts.append(stored_rows(model, window[window != NO_TOKEN].long(), what, dtype))
                except IndexError as error:  # of positions that are no table of weights
                    raise MismatchError(
                        f"the model does not read {int((window != NO_TOKEN).sum())} tokens together ({error}): "
                        "cut the text by a smaller --window"
                    ) from error
                tell(1)
            mark = torch.tensor(runs.mark_of(about))
            kept = {what: torch.cat(parts), "first_row": torch.tensor(first), "recording": mark}
            replace(folder / shard, lambda path, kept=kept: save(kept, path))  # type: ignore[misc]
        first += rows
    return there


def _check_known(folder: Path, about: dict[str, Any]) -> None:
    """That a recording which has begun is the same."""
    if not (folder / runs.HEADER).exists():
        return
    known = runs.header_of(folder)
    other = sorted(key for key in about if key != "runtime" and known.get(key) != about[key])
    if other:
        first = sorted(
            other, key=lambda key: (key not in ("model", "gguf_file", "revision"), isinstance(about[key], dict))
        )
        told = lambda value: "another" if isinstance(value, dict) else repr(value)
        differences = "; ".join(f"{key}: {told(known.get(key))} there, {told(about[key])} now" for key in first)
        raise MismatchError(f"{folder} has another recording ({differences}): give another folder, or delete that one")


def _rounding(model: Model) -> float:
    """What two ways to the same logits may differ by, of themselves."""
    try:
        is_exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was set by other names, of each backend
        is_exact = False
    return 1e-4 if is_exact and all(weight.itemsize >= 4 for weight in model.parameters()) else 0.02


def _check_causal(model: Model, window: Tensor) -> None:
    """That no row of a few tokens depends on the last: such a model foretells what it sees."""
    ids = window[window != NO_TOKEN][: integration.PROBE].long()[None]
    ids = ids.to(integration.head_of(model).weight.device)
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % model.get_input_embeddings().weight.size(0)
    try:
        with torch.no_grad():
            said, changed = (model(input_ids=each, use_cache=False).logits[0, :-1] for each in (ids, other))
    except RuntimeError as failure:
        raise MismatchError(f"the model does not read {ids.size(1)} tokens: {failure}") from failure
    error = integration.difference(changed, said)
    if not error < _rounding(model) / 10:  # both are found alike
        raise MismatchError(
            f"{type(model).__name__} is no causal language model: what it says of tokens changes by {error:.1%} with a "
            "later one, which it therefore does not foretell"
        )


def _check_tokens(model: Model, tokens: Tensor) -> None:
    """That the model has an embedding of each token and, where it has a table of positions, of each position."""
    embedding, most = model.get_input_embeddings(), int(tokens.max())
    known = embedding.weight.size(0)
    if most >= known:
        raise MismatchError(
            f"the text has token {most}, and the model has {known} tokens: was the text tokenised for another model?"
        )
    places = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    longest = int((tokens != NO_TOKEN).sum(-1).max())
    if longest > places and any(
        POSITIONS.search(name) and module.num_embeddings >= places
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    ):
        raise MismatchError(
            f"the model reads {places} tokens together, and windows have {longest}: cut the text by --window {places}"
        )


POSITIONS = re.compile("wpe|position")  # as models call such a table; that of an image is shorter
OWN = runs.HEADER, runs.TOKENS, runs.HEAD, runs.TOKENIZER


def check_own(folder: Path) -> None:
    """That a recording is not mixed with a model's files or others: they have the same names.

    One that has only begun has its tokens, which are written first.
    """
    if not folder.is_dir() or (folder / runs.HEADER).exists():
        return
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {"lost+found"}
    others = sorted(names - {*OWN} if runs.TOKENS in names else names)
    if others:
        some = ", ".join(others[:3]) + (", …" if others[3:] else "")
        raise MismatchError(f"{folder} has other files ({some}): give a folder of its own")


def _is_whole(shard: Path, what: str, rows: int) -> bool:
    """Whether it is there with so many rows: it may have been cut since."""
    try:
        held = runs.entries(shard)
        return runs.rows_of(shard, what, held[what]).whole == rows
    except (OSError, KeyError, MismatchError):
        return False


NORM_EPS = "variance_epsilon", "eps"  # as transformers' modules call it
NORM_ERROR = 0.01  # relative: more than rounding to bfloat16, less than a formula that is another


def final_norm(model: Model) -> dict[str, Tensor]:
    """Weight and epsilon of the RMSNorm before the head, which other programs' hidden states may lack; {} of others."""
    decoder, seen = model.get_decoder(), []
    if not isinstance(decoder, torch.nn.Module):
        return {}
    hooks = [
        module.register_forward_hook(lambda module, given, said: seen.append((module, *given[:1], said)))
        for module in decoder.children()
        if getattr(module, "weight", None) is not None and any(hasattr(module, name) for name in NORM_EPS)
    ]
    try:
        ids = integration.probe_ids(model, 8)
        with torch.no_grad():
            last = integration.hidden_states(model, {"input_ids": ids, "use_cache": False})
    finally:
        for hook in hooks:
            hook.remove()
    for module, given, said in (each for each in seen if len(each) == 3):
        eps = next(float(getattr(module, name)) for name in NORM_EPS if hasattr(module, name))
        x = given.double()
        normalised = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        for weight in (module.weight, 1 + module.weight.float()):  # the second is Gemma's
            error = (normalised * weight - last.double()).norm() / last.double().norm()
            if said.shape == last.shape and error < NORM_ERROR:
                return {"norm": weight.detach().cpu().contiguous().clone(), "norm_eps": torch.tensor([eps])}
    return {}


def stored_rows(model: Model, ids: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    """Of a window, all rows but the last, whose next token is not known."""
    head = integration.head_of(model)
    with torch.no_grad():
        inputs = {"input_ids": ids[None].to(head.weight.device), "use_cache": False}
        whole = model(**inputs).logits if what == "logits" else integration.hidden_states(model, inputs)
        rows = whole[0, :-1]
    kept = rows.to(dtype).cpu().contiguous()
    if kept.isinf().any() and not rows.isinf().any():
        raise MismatchError(
            f"{what} of the model reach {float(rows.abs().max()):.3g}, which {runs.name_of(dtype)} "
            "cannot hold: --dtype bfloat16 or float32 can"
        )
    return kept
