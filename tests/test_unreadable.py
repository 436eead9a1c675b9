"""What `kullback compare` and `record` cannot read or write: an error that says what came, and nothing half-written."""

import hashlib
import json
import math
import os
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from kullback.cli import evaluate, record, runs
from kullback.cli.commands import app
from tests.test_compare import FIXTURE, HIDDEN, VOCAB, WINDOW, WINDOWS, likely, write_prompts, write_run

ROWS = WINDOWS * (WINDOW - 1)


def run(*arguments, command="compare"):
    """Exit status and words; a traceback is no way to end."""
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def refused(words, *arguments, code=3):
    found, output = run(*arguments)
    assert found == code, output
    # A terminal breaks a path where its line ends.
    assert "".join(words.split()) in "".join(output.split()), output


@pytest.fixture
def folder(tmp_path):
    """Two recordings, a and b; logits of the same rows."""
    draw = np.random.default_rng(5)
    hidden = draw.normal(size=(WINDOWS, WINDOW - 1, HIDDEN)).astype(np.float16)
    head = {"weight": draw.normal(size=(VOCAB, HIDDEN)).astype(np.float32)}
    tokens = draw.integers(0, VOCAB, (WINDOWS, WINDOW)).astype(np.int32)
    for name in ("a", "b"):
        write_run(tmp_path / name, hidden, head, tokens)
    logits = hidden.astype(np.float32) @ head["weight"].T
    save_file({"logits": logits, "tokens": tokens}, tmp_path / "logits.safetensors")
    write_prompts(tmp_path / "vllm", hidden, likely(hidden, head, tokens), head, range(WINDOWS))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("what", value) for value in (None, "attention", [])),
        *(("dtype", value) for value in (None, "float8", {})),
        *(("vocab", value) for value in (None, "forty", -1, 1.5, True, 41)),
        *(("shards", value) for value in (None, "x", 0, 10**12, [])),
        *(("logit_scale", value) for value in (None, "x", math.nan, 0)),
        *(("softcap", value) for value in ("x", -1, math.nan, [])),
        *(("tokens_sha256", value) for value in (None, 3)),
        *(("head", value) for value in (None, "x", {}, {"file": "../a/head.safetensors"}, {"file": 3})),
        ("groups", [1]),
        ("tokenizer", "x" * 300),
    ],
)
def test_headers_of_recordings(folder, name, value):
    path = folder / "b/run.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {name: value}))
    refused(name if name != "vocab" or value != 41 else "[41, 6]", folder / "a", folder / "b")
    if name in ("softcap", "groups", "tokenizer"):
        return
    del about[name]
    path.write_text(json.dumps(about))
    refused("got nothing" if name != "head" else "must name its file", folder / "a", folder / "b")


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[1]"])
def test_headers_that_are_none(folder, text):
    (folder / "b/run.json").write_bytes(text)
    refused("run.json", folder / "a", folder / "b")
    (folder / "b/run.json").unlink()
    (folder / "b/run.json").mkdir()
    refused("run.json cannot be read", folder / "a", folder / "b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": lambda t: t.reshape(-1)}, "tokens must have 2 dimensions; its shape is [108]"),
        ({"tokens": lambda t: t.astype(np.float32)}, "tokens must be int32 or int64; it is float32"),
        ({"tokens": lambda t: t + 100}, "must lie from 0 to 39; got 1"),
        ({"tokens": lambda t: np.where(t == t[0, 1], -7, t)}, "must lie from 0 to 39; got -7"),
        ({"group": lambda t: np.zeros(3, np.int32)}, "group has 3 ids, and tokens have 12 windows"),
        ({"group": lambda t: np.full(WINDOWS, -1)}, "group must lie from 0 to 1"),
        ({"group": lambda t: np.full(WINDOWS, 2**40)}, "it goes from 1099511627776 to 1099511627776"),
        ({"document": lambda t: np.zeros(WINDOWS, np.float32)}, "document must be int32 or int64"),
        (None, "tokens.safetensors is missing"),
        ({"other": lambda t: t}, "has no tensor tokens; it has other"),
    ],
)
def test_tokens_of_recordings(folder, change, words):
    path = folder / "b/tokens.safetensors"
    tokens = load_file(path)["tokens"]
    path.unlink()
    if change is not None:
        tensors = {name: np.ascontiguousarray(of(tokens)) for name, of in change.items()}
        save_file(tensors if "other" in change else {"tokens": tokens} | tensors, path)
        about = json.loads((folder / "b/run.json").read_text()) | {"groups": ["code", "prose"]}
        kept = tensors.get("tokens", tokens).astype(np.int32)
        about["tokens_sha256"] = hashlib.sha256(kept.tobytes()).hexdigest()
        (folder / "b/run.json").write_text(json.dumps(about))
    refused(words, folder / "a", folder / "b")
    refused(words, folder / "b", folder / "a")


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda w: {"weight": np.concatenate([w, w], 1)}, "weight must be [40, 6]"),
        (lambda w: {"weight": w[:, :3]}, "it is [40, 3]"),
        (lambda w: {"weight": w[:10]}, "it is [10, 6]"),
        (lambda w: {"weight": w.reshape(-1)}, "weight must have 2 dimensions"),
        (lambda w: {"weight": w.astype(np.int32)}, "it is int32"),
        (lambda w: {"weight": w, "bias": w[:3, 0]}, "it is float32 of [3]"),
        (lambda w: {"weight": w, "bias": w}, "bias must have 1 dimensions"),
        (lambda w: {"heads": w}, "has no tensor weight; it has heads"),
    ],
)
def test_heads(folder, of, words):
    path = folder / "b/head.safetensors"
    save_file({name: np.ascontiguousarray(value) for name, value in of(load_file(path)["weight"]).items()}, path)
    refused(words, folder / "a", folder / "b")


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda h: {"hidden": np.concatenate([h, h], 1)}, "hidden must be float16 of [rows, 6]"),
        (lambda h: {"hidden": h.astype(np.float32)}, "it is float32 of [16, 6]"),
        (lambda h: {"hidden": h.reshape(-1)}, "hidden must be rows of one length; its shape is [96]"),
        (lambda h: {"hidden": np.ones((), np.float16)}, "its shape is []"),
        (lambda h: {"hidden": h.astype(np.int32)}, "hidden must be float64"),
        (lambda h: {"hidden": h, "first_row": np.zeros(0, np.int64)}, "begins with row []"),
        (lambda h: {"hidden": h[:0]}, "its shards have 80 rows, and its tokens make 96"),
        (lambda h: {"logits": h}, "has no tensor hidden; it has logits"),
    ],
)
def test_shards(folder, of, words):
    path = folder / "b/rows-00002-of-00006.safetensors"
    save_file(of(load_file(path)["hidden"]), path)
    refused(words, folder / "a", folder / "b")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([1, 2], "its header must name tensors; it is [1, 2]"),
        (b"[" * 100_000, "its header cannot be read"),
        ({"logits": [1]}, "must give dtype, shape and two offsets of logits; got [1]"),
        ({"logits": {"shape": [10, 10], "data_offsets": [0, 400]}}, "must give dtype"),
        ({"shape": [-10, -10]}, "must give dtype, shape and two offsets"),
        ({"shape": [1.5, 2]}, "must give dtype, shape and two offsets"),
        ({"shape": "ab"}, "must give dtype, shape and two offsets"),
        ({"dtype": [1]}, "must give dtype, shape and two offsets"),
        ({"data_offsets": [10**20, 10**20 + 400]}, "must give dtype, shape and two offsets"),
        ({"data_offsets": []}, "must give dtype, shape and two offsets"),
        ({"data_offsets": [0, 8]}, "its header gives logits 8 bytes, and F32 of [10, 10] takes 400"),
        ({"data_offsets": [400, 0]}, "its header gives logits -400 bytes"),
        (
            {"shape": [10**12, 10], "data_offsets": [0, 4 * 10**13]},
            "rows are given by its header, and 10 are there",
        ),
        ({"shape": [10, 10**12], "data_offsets": [0, 4 * 10**13]}, "has no whole row"),
        ({"dtype": "X9"}, "has no tensor of floating-point logits"),
        ({"shape": [1 << 50, 0, 4], "data_offsets": [0, 0]}, "its logits have no row"),
    ],
)
def test_headers_that_lie(folder, header, words):
    plain = {"dtype": "F32", "shape": [10, 10], "data_offsets": [0, 400]}
    if isinstance(header, dict) and "logits" not in header:
        header = {"logits": plain | header}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(400))
    refused(words, path, path)
    refused(words, folder / "logits.safetensors", path)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((-16, 87, 16), "its header gives 16 windows of -16, and 87 tokens"),
        ((-16, 87, -16), "its header gives -16 windows"),
        ((16, 87, 2**31 - 1), "of 16 x 2147483647 tokens it has 5408"),
        ((2**31 - 1, 87, 2**31 - 1), "is cut within its header"),
        ((16, 2**31 - 1, 16), "has no whole row"),
        ((16, 50, 16), "must lie from 0 to 49"),
        ((16, 86, 16), "20608 follow it"),
    ],
)
def test_base_files_that_lie(tmp_path, sizes, words):
    whole = (FIXTURE / "base.kld").read_bytes()
    path = tmp_path / "x.kld"
    if sizes == (16, 86, 16):  # of tokens it knows; its rows are then shorter than they are
        tokens = np.minimum(np.frombuffer(whole[20:1044], "<i4"), 80).astype("<i4")
        whole = whole[:20] + tokens.tobytes() + whole[1044:]
        sizes = (16, 84, 16)
    path.write_bytes(whole[:8] + struct.pack("<3i", *sizes) + whole[20:])
    refused(words, path, path)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda t: {"group": np.zeros(3, np.int64)}, "group has 3 ids, and logits have 96 rows"),
        (lambda t: {"block": np.zeros(ROWS, np.float32)}, "block must be int32 or int64; it is float32"),
        (lambda t: {"labels": np.full(ROWS, -3)}, "must lie from 0 to 39; got -3"),
        (lambda t: {"tokens": t.astype(np.float32)}, "tokens must be int32 or int64"),
        (lambda t: {"tokens": t[:, :4]}, "got [12, 4] beside [[12, 8, 40]]"),
        (lambda t: {"tokens": t.reshape(-1)[:-1]}, "got [107] beside"),
        (lambda t: {"logits": np.ones((0, 8, 40), np.float32)}, "its logits have no row"),
        (lambda t: {"logits": np.ones((12, 8, 0), np.float32)}, "must be rows of one length"),
    ],
)
def test_what_lies_beside_logits(folder, of, words):
    path, other = folder / "logits.safetensors", folder / "x.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: np.ascontiguousarray(value) for name, value in of(tensors["tokens"]).items()}, other)
    refused(words, path, other)
    refused(words, other, path)


def test_ids_of_groups_may_be_any(folder):
    path, other = folder / "logits.safetensors", folder / "x.safetensors"
    save_file(load_file(path) | {"group": np.where(np.arange(ROWS) < 40, -1, 2**40)}, other)
    code, output = run(path, other, "--json", folder / "found.json")
    assert code == 0, output
    groups = json.loads((folder / "found.json").read_text())["candidates"][0]["by_group"]
    assert {name: of["rows"] for name, of in groups.items()} == {"-1": 40, str(2**40): 56}


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda s, i: {"hidden_states": s}, "has no tensor token_ids; it has hidden_states"),
        (lambda s, i: {"hidden_states": s, "token_ids": i[None]}, "token_ids must have 1 dimensions"),
        (lambda s, i: {"hidden_states": s, "token_ids": i + 1000}, "must lie from 0 to 39"),
        (lambda s, i: {"hidden_states": s.reshape(-1), "token_ids": i}, "must be of 9 tokens and 6 dimensions"),
        (lambda s, i: {"hidden_states": np.ones((), np.float16), "token_ids": i}, "got []"),
        (lambda s, i: {"hidden_states": s.astype(np.int32), "token_ids": i}, "must be float64"),
    ],
)
def test_hidden_states_of_vllm(folder, of, words):
    path = folder / "vllm/3.safetensors"
    tensors = load_file(path)
    save_file(of(tensors["hidden_states"], tensors["token_ids"]), path)
    refused(words, folder / "vllm", folder / "vllm")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_none_of_which_is_a_number(folder, value):
    path, odd = folder / "logits.safetensors", folder / "odd.safetensors"
    save_file({"logits": np.full((WINDOWS, WINDOW - 1, VOCAB), value, np.float32)}, odd)
    found = folder / "found.json"
    refused("odd.safetensors: all 96 rows are not numbers", path, odd, "--json", found)
    refused("odd.safetensors: all 96 rows are not numbers", odd, path, "--json", found)
    assert not found.exists()
    # Others are still reported, and the exit status says that one is not.
    refused("odd.safetensors is left out", path, odd, folder / "a", "--json", found)
    assert [each["name"] for each in json.loads(found.read_text())["candidates"]] == ["a"]
    refused("odd.safetensors is left out", path, folder / "a", "--floor", odd, "--html", folder / "page.html")


@pytest.mark.parametrize("score", ["9" * 5000 + ":", "9" * 10 + ":", "²:", "-3:", "1:2", ":"])
def test_scores(folder, score):
    code, output = run(folder / "a", folder / "b", "--score", score)
    assert code == 2
    assert "all, half or N:" in output
    refused("no row is left to compare", folder / "a", folder / "b", "--score", "999999999:")


def test_tokens_beyond_the_valid_vocabulary(folder):
    refused("--valid-vocab 12: the text has the token 39", folder / "a", folder / "b", "--valid-vocab", 12)


@pytest.fixture
def unread(monkeypatch):
    """Nothing may be read before outputs have been checked."""

    def fails(*_):
        raise AssertionError("it was read")

    monkeypatch.setattr(runs, "open_source", fails)


@pytest.mark.parametrize("option", ["--json", "--markdown", "--html", "--rows"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/proc/x", "cannot be written"),
        ("no/x", "there is no folder"),
        ("b", "is a folder"),
        ("logits.safetensors/x", "there is no folder"),
        ("x" * 300, "cannot be written"),
        ("link", "which is not there"),
        ("a/run.json", "is read too"),
        ("b/head.safetensors", "is read too"),
        ("logits.safetensors", "is read too"),
    ],
)
def test_outputs_are_checked_first(folder, unread, option, name, words):
    path = folder / name
    if option == "--rows" and path.suffix != ".safetensors" and name != "b":
        path = path.with_name(path.name + ".safetensors")
        if name == "a/run.json":
            path = folder / "a/tokens.safetensors"
    if name == "link":
        path.symlink_to("/no/such/folder/x")
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    code, output = run(folder / "a", folder / "b", folder / "logits.safetensors", option, path)
    assert code == 2
    assert words in output, output
    assert before == {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_an_output_that_breaks_costs_no_other(folder, monkeypatch):
    """The disk may be full when the work is done: the file that was there stays, and the others are written."""
    page = folder / "page.html"
    page.write_text("before")

    def full(found):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate.html, "page", full)
    options = ["--html", page, "--rows", folder / "rows.safetensors", "--json", folder / "found.json"]
    refused("--html: ", folder / "a", folder / "b", *options, code=2)
    assert page.read_text() == "before"
    assert len(load_file(folder / "rows.safetensors")["kl"]) == ROWS
    assert json.loads((folder / "found.json").read_text())["complete"]
    assert not [each for each in folder.iterdir() if each.name.startswith(".")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
def test_devices_are_written_to(folder):
    refused("could not be written", folder / "a", folder / "b", "--json", "/dev/full", code=2)
    assert run(folder / "a", folder / "b", "--json", "/dev/null")[0] == 0
    assert not os.path.isfile("/dev/null")


def test_files_that_are_none(folder):
    refused("is neither a file nor a folder", "/dev/null", folder / "b")
    refused("there is no", folder / "a", folder / "none")


# Record


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text; the model must not be loaded before what is wrong has been said."""

    def fails(*_):
        raise AssertionError("it was loaded")

    monkeypatch.setattr(evaluate, "_need", lambda packages, extra: None)
    monkeypatch.setattr(record, "load", fails)
    path = tmp_path / "text.txt"
    path.write_text("some words")
    return path


@pytest.mark.parametrize("output", ["/proc/x/run", "text.txt", "text.txt/run", "x" * 300, "a\0b"])
def test_where_no_recording_can_be_written(text, output):
    code, words = run("model", text, "-o", text.parent / output, command="record")
    assert code == 2, words
    assert "output" in words
    assert [each.name for each in text.parent.iterdir()] == ["text.txt"]


def test_a_text_that_is_none(text, monkeypatch):
    monkeypatch.setattr(record, "load", lambda *_: record.Loaded(None, None, {}))
    text.write_bytes(b"\xff\xfe\x00")
    code, words = run("model", text, "-o", text.parent / "run", command="record")
    assert code == 3
    assert "text.txt is no text in UTF-8" in words
    assert run("model", text.parent / "none", "-o", text.parent / "run", command="record")[0] == 2
    shutil.copytree(FIXTURE / "base-run", text.parent / "other")
    (text.parent / "other/run.json").write_text("{}")
    code, words = run("model", text.parent / "other", "-o", text.parent / "run", command="record")
    assert (code, "is not of the format" in words) == (3, True)
