"""`kullback compare`: figures against float64 NumPy, every format, llama.cpp's own report, and how it ends.

The oracle knows softmax and logarithms alone: nothing of ours makes what is expected.
"""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from typer.testing import CliRunner

import kullback
from kullback import compare
from kullback.cli import comparison, evaluate, interrupts, tables, writing
from kullback.cli.commands import app

ROOT = Path(__file__).parent.parent
FIXTURE = ROOT / "tests/llamacpp"
WINDOWS, WINDOW, VOCAB, HIDDEN = 12, 9, 40, 6
ROWS = WINDOWS * (WINDOW - 1)


def run(*arguments):
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def found_by(tmp_path, *arguments, code=0):
    """The JSON of a run."""
    result = run(*arguments, "--json", tmp_path / "found.json")
    assert result.exit_code == code, result.output
    return json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_rows(reference, candidate):
    """Of logits."""
    p, q = log_softmax(reference), log_softmax(candidate)
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.fixture
def pair():
    """Logits of a reference and a candidate, and tokens, [windows, ...]."""
    draw = np.random.default_rng(3)
    reference = draw.normal(size=(WINDOWS, WINDOW - 1, VOCAB)) * 3
    candidate = reference + 0.3 * draw.normal(size=reference.shape)
    tokens = draw.integers(0, VOCAB, (WINDOWS, WINDOW)).astype(np.int32)
    return reference.astype(np.float32), candidate.astype(np.float32), tokens


@pytest.fixture
def files(tmp_path, pair):
    reference, candidate, tokens = pair
    for name, logits in (("reference", reference), ("candidate", candidate)):
        save_file({"logits": logits, "tokens": tokens}, tmp_path / f"{name}.safetensors")
    return tmp_path / "reference.safetensors", tmp_path / "candidate.safetensors"


def write_run(folder, hidden, head, tokens, **more):
    """A recording, by the format's description alone: two windows a shard."""
    import hashlib

    folder.mkdir()
    tokens = np.asarray(tokens, np.int32)
    step, dtype = 2, str(hidden.dtype)
    shards = math.ceil(len(tokens) / step)
    about = {
        "format": "kullback-run/1",
        "what": "hidden",
        "dtype": dtype,
        "vocab": len(head["weight"]),
        "logit_scale": 1.0,
        "softcap": None,
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "head": {"file": "head.safetensors"},
        "shards": shards,
    }
    extra = {name: more.pop(name) for name in ("group", "document") if name in more}
    (folder / "run.json").write_text(json.dumps(about | more), encoding="utf-8")
    save_file(
        {"tokens": tokens, **{k: np.asarray(v, np.int32) for k, v in extra.items()}}, folder / "tokens.safetensors"
    )
    save_file(head, folder / "head.safetensors")
    for i in range(shards):
        own = [
            h[: (t[1:] >= 0).sum()] for h, t in zip(hidden[i * step :][:step], tokens[i * step :][:step], strict=True)
        ]
        save_file({"hidden": np.concatenate(own)}, folder / f"rows-{i + 1:05}-of-{shards:05}.safetensors")


# The report alone


def report_of(reference, candidate, labels=None, block=None, **more):
    report = compare.Report()
    tensors = [torch.as_tensor(t) for t in (candidate, reference)]
    labels = None if labels is None else torch.as_tensor(labels)
    block = torch.arange(len(candidate)) if block is None else torch.as_tensor(block)
    report.add(kullback.row_statistics(*tensors, labels), block=block, **more)
    return report


def rows_of(pair):
    reference, candidate, tokens = pair
    flat = [t.reshape(-1, VOCAB).astype(np.float64) for t in (reference, candidate)]
    return *flat, tokens[:, 1:].reshape(-1).astype(np.int64), np.arange(ROWS) // (WINDOW - 1)


def test_each_figure_is_its_definition(pair):
    reference, candidate, labels, block = rows_of(pair)
    top = compare.top_agreement(*(torch.as_tensor(t) for t in (candidate, reference)))
    found = report_of(reference, candidate, labels, block, group=torch.as_tensor(block % 2), top=top).summary()
    p, q = log_softmax(reference), log_softmax(candidate)
    kl, reverse = (np.exp(p) * (p - q)).sum(-1), (np.exp(q) * (q - p)).sum(-1)
    m = np.log((np.exp(p) + np.exp(q)) / 2)
    jensen_shannon = ((np.exp(p) * (p - m)).sum(-1) + (np.exp(q) * (q - m)).sum(-1)) / 2
    overlap = np.minimum(np.exp(p), np.exp(q)).sum(-1)
    same = p.argmax(-1) == q.argmax(-1)
    own, other = q[np.arange(ROWS), labels], p[np.arange(ROWS), labels]
    change = np.exp(own) - np.exp(other)
    close = lambda value, truth: pytest.approx(truth, rel=1e-6, abs=1e-9) == value
    for name, truth in (("kl", kl), ("reverse_kl", reverse), ("jensen_shannon", jensen_shannon)):
        assert close(found[name]["mean"], truth.mean())
        assert close(found[name]["max"], truth.max())
        assert close(found[name]["median"], np.median(truth))
        for at, value in found[name]["percentiles"].items():
            assert close(value, np.percentile(truth, float(at)))
    assert close(found["kl"]["error_if_independent"], kl.std() / math.sqrt(ROWS - 1))
    assert close(found["overlap"]["mean"], overlap.mean())
    assert (found["same_top"]["mean"], found["flips"]) == (same.mean(), (~same).sum())
    for k in (5, 10):
        first = [np.argsort(-side, -1, kind="stable")[:, :k] for side in (p, q)]
        shared = [len(set(a) & set(b)) / k for a, b in zip(*first, strict=True)]
        assert close(found["top_agreement"][str(k)]["mean"], np.mean(shared))
        assert 0.3 < np.mean(shared) < 0.99
    assert close(found["perplexity"]["candidate"]["mean"], math.exp(-own.mean()))
    assert close(found["perplexity"]["reference"]["mean"], math.exp(-other.mean()))
    assert close(found["perplexity"]["log_ratio"]["mean"], (other - own).mean())
    assert close(found["perplexity"]["covariance"], np.cov(own, other, bias=True)[0, 1])
    assert close(found["perplexity"]["correlation"], np.corrcoef(own, other)[0, 1])
    assert close(found["label_probability_change"]["mean"], change.mean())
    assert close(found["label_probability_change"]["root_mean_square"], math.sqrt((change**2).mean()))
    assert close(found["label_probability_change"]["percentiles"]["1"], np.percentile(change, 1))
    ranks = (q > own[:, None]).sum(-1)
    assert close(found["label_in_top"]["candidate"]["5"], (ranks < 5).mean())
    top = np.exp(p).max(-1)
    for bucket in found["by_confidence"]:
        inside = (top >= bucket["from"]) & ((top < bucket["to"]) | (bucket["to"] == 1))
        assert bucket["rows"] == inside.sum()
        assert not inside.any() or close(bucket["kl"]["mean"], kl[inside].mean())
    assert close(found["by_group"][1]["kl"]["mean"], kl[block % 2 == 1].mean())
    for x, share in found["kl"]["share_above"]:
        assert close(share, (kl > x).mean())


@pytest.mark.parametrize("vocab", [3, 10, 192 * 20, 192 * 21, 192 * 40 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 20, -20])
def test_top_tokens_of_every_vocabulary(vocab, dtype, offset):
    """The largest may share a segment, or lie after the last whole one; equal ones are of one value."""
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=(40, vocab)) + offset).to(dtype)
    logits[:10] = logits[:10].sort(-1).values
    logits[10:20] = logits[10:20].sort(-1, descending=True).values
    found = compare.top_tokens(logits)
    expected = np.sort(logits.double().numpy(), -1)[:, ::-1][:, :10]
    assert np.array_equal(logits.gather(-1, found).double().numpy(), expected)
    assert all(len(set(row)) == min(10, vocab) for row in found.tolist())
    assert bool((compare.top_agreement(logits, logits) == 1).all())


def test_a_model_beside_itself_is_zero_without_a_doubt(pair):
    reference, _, labels, block = rows_of(pair)
    found = report_of(reference, reference, labels, block).summary()
    assert (found["kl"]["mean"], found["kl"]["max"], found["kl"]["interval"]) == (0, 0, [0, 0])
    assert (found["same_top"]["mean"], found["same_top"]["interval"], found["flips"]) == (1, [1, 1], 0)
    assert found["perplexity"]["ratio"]["mean"] == 1


def test_pieces_in_any_order_are_the_whole(pair):
    reference, candidate, labels, block = rows_of(pair)
    whole = report_of(reference, candidate, labels, block)
    first, second = compare.Report(), compare.Report()
    for number, part in enumerate(np.array_split(np.arange(ROWS)[::-1].copy(), 5)):
        statistics = kullback.row_statistics(*(torch.as_tensor(t[part]) for t in (candidate, reference, labels)))
        own = second if number % 2 else first
        own.add(statistics, block=torch.as_tensor(block[part]), row=torch.as_tensor(part))
    first.merge(second)
    assert first.summary() == whole.summary()


def dependent_rows(draw, blocks, rows=20):
    """Rows of a block share what they are off by; the mean over all blocks is known: 0.1."""
    of_block = draw.normal(size=blocks)
    return np.repeat(of_block, rows) + 0.2 * draw.normal(size=blocks * rows), np.repeat(np.arange(blocks), rows)


def test_errors_are_of_blocks_and_cover():
    """The error of a mean of equal blocks is that of their means; intervals of 30 blocks cover in 90 of 100 cases."""
    draw, covered, ratios = np.random.default_rng(0), 0, []
    for _ in range(100):
        values, block = dependent_rows(draw, 30)
        found = compare.Blocks(torch.as_tensor(block)).mean(torch.as_tensor(values))
        expected = values.reshape(30, -1).mean(-1).std() / math.sqrt(30)
        ratios.append(found["standard_error"] / expected)
        covered += found["interval"][0] <= 0 <= found["interval"][1]
    assert np.mean(ratios) == pytest.approx(1, abs=0.02)
    assert max(abs(np.array(ratios) - 1)) < 0.1
    assert 88 <= covered <= 99
    assert found["standard_error"] > 3 * found["error_if_independent"]


def test_intervals_of_few_blocks_cover():
    """Of ten normal means, in 95 of 100 cases; percentiles of resamples as they are do in 90."""
    means = np.random.default_rng(1).normal(size=(400, 10))
    intervals = [compare.Blocks(torch.arange(10)).mean(torch.as_tensor(values))["interval"] for values in means]
    covered = np.mean([low <= 0 <= high for low, high in intervals])
    assert 0.93 <= covered <= 0.97


def test_no_interval_below_ten_blocks(pair):
    reference, candidate, labels, block = rows_of(pair)
    for count, has in ((9, False), (10, True)):
        found = report_of(reference, candidate, labels, np.minimum(block, count - 1)).summary()
        assert found["blocks"] == count
        assert (found["kl"]["interval"] is not None) == has == (found["perplexity"]["ratio"]["interval"] is not None)


def test_differences_are_paired(pair):
    reference, candidate, _, block = rows_of(pair)
    other = candidate + 1e-3 * reference
    one, two = report_of(reference, other, block=block), report_of(reference, candidate, block=block)
    difference = kl_rows(reference, other) - kl_rows(reference, candidate)
    found = compare.paired(one, two)
    assert found["mean"] == pytest.approx(difference.mean(), rel=1e-6)
    assert found["share_of_rows_above"] == (difference > 0).mean()
    means = difference.reshape(WINDOWS, -1).mean(-1)
    assert found["standard_error"] == pytest.approx(means.std() / math.sqrt(WINDOWS), rel=0.1)
    with pytest.raises(ValueError, match="which must be the same"):
        compare.paired(one, report_of(reference[:-1], candidate[:-1], block=block[:-1]))


def test_rows_that_are_no_numbers_are_counted_and_left_out(pair):
    reference, candidate, labels, block = rows_of(pair)
    whole = report_of(reference[1:], candidate[1:], labels[1:], block[1:]).summary()
    candidate[0, 3] = math.nan
    found = report_of(reference, candidate, labels, block).summary()
    assert (found["rows"], found["rows_not_numbers"]) == (ROWS - 1, 1)
    assert found["kl"]["mean"] == whole["kl"]["mean"]
    candidate[0] = reference[0]
    candidate[0, 3] = -math.inf
    found = report_of(reference, candidate, labels, block).summary()
    assert (found["kl"]["mean"], found["kl"]["interval"]) == (math.inf, None)


def test_what_a_report_refuses(pair):
    reference, candidate, labels, _ = rows_of(pair)
    report = report_of(reference, candidate)
    tensors = [torch.as_tensor(t) for t in (candidate, reference, labels)]
    with pytest.raises(ValueError, match="must have a target"):
        report.add(kullback.row_statistics(tensors[0]))
    with pytest.raises(ValueError, match=f"block must have an id for each of {ROWS} rows; got 3"):
        report.add(kullback.row_statistics(*tensors[:2]), block=torch.arange(3))
    with pytest.raises(ValueError, match="some lack label_log_prob"):
        report.add(kullback.row_statistics(*tensors))
    assert compare.Report().summary()["rows"] == 0


# Formats


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_logits(tmp_path, pair, dtype):
    reference, candidate, tokens = (t.astype(dtype) if t.dtype == np.float32 else t for t in pair)
    save_file({"logits": reference, "tokens": tokens}, tmp_path / "a.safetensors")
    save_file({"logits": candidate, "input_ids": tokens}, tmp_path / "b.safetensors")
    found = found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (each,) = found["candidates"]
    kl = kl_rows(reference, candidate)
    assert (each["rows"], each["blocks"], found["complete"]) == (ROWS, WINDOWS, True)
    assert each["kl"]["mean"] == pytest.approx(kl.mean(), rel=2e-6)
    own = log_softmax(candidate).reshape(-1, VOCAB)[np.arange(ROWS), tokens[:, 1:].reshape(-1)]
    assert each["perplexity"]["candidate"]["mean"] == pytest.approx(math.exp(-own.mean()), rel=1e-5)
    worst = each["worst"][0]
    assert (worst["window"], worst["position"]) == np.unravel_index(kl.argmax(), kl.shape)
    assert worst["context"] == " ".join(map(str, tokens[worst["window"], : worst["position"] + 1]))


def test_logits_of_several_tensors_and_labels(tmp_path, pair):
    """As servers that store a tensor for each prompt write them."""
    reference, candidate, tokens = pair
    for name, logits in (("a", reference), ("b", candidate)):
        save_file({f"prompt_{i}": each for i, each in enumerate(logits)}, tmp_path / f"{name}.safetensors")
    (each,) = found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors")["candidates"]
    assert each["blocks"] == WINDOWS
    assert each["kl"]["mean"] == pytest.approx(kl_rows(reference, candidate).mean(), rel=2e-6)
    assert each["worst"][0]["window"] == kl_rows(reference, candidate).max(-1).argmax()  # 10 comes after 9
    assert "perplexity" not in each
    flat = {"logits": candidate.reshape(ROWS, VOCAB), "labels": tokens[:, 1:].reshape(-1)}
    save_file(flat | {"block": np.arange(ROWS) // 4, "group": np.arange(ROWS) % 3}, tmp_path / "c.safetensors")
    (each,) = found_by(tmp_path, tmp_path / "c.safetensors", tmp_path / "a.safetensors")["candidates"]
    assert (each["blocks"], each["labels"], list(each["by_group"])) == (ROWS // 4, ROWS, ["0", "1", "2"])


@pytest.fixture
def hidden():
    draw = np.random.default_rng(5)
    reference = draw.normal(size=(WINDOWS, WINDOW - 1, HIDDEN))
    candidate = reference + 0.1 * draw.normal(size=reference.shape)
    head = {
        "weight": draw.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
        "bias": draw.normal(size=VOCAB).astype(np.float32),
    }
    tokens = draw.integers(0, VOCAB, (WINDOWS, WINDOW)).astype(np.int32)
    return reference.astype(np.float16), candidate.astype(np.float16), head, tokens


def logits_of(hidden, head, scale=1.0, softcap=None):
    logits = (hidden.astype(np.float64) @ head["weight"].T.astype(np.float64) + head.get("bias", 0.0)) * scale
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def test_recordings_have_the_logits_of_their_heads(tmp_path, hidden):
    """In float32 although they are stored in 16 bits; with a scale, a softcap, groups, documents and a short window."""
    reference, candidate, head, tokens = hidden
    tokens[3, 5:] = -1
    groups = {"group": np.arange(WINDOWS) % 2, "groups": ["code", "prose"], "document": np.arange(WINDOWS)[::-1] // 2}
    write_run(tmp_path / "a", reference, head, tokens, **groups)
    other = {"weight": head["weight"] * np.float32(1.1)}
    write_run(tmp_path / "b", candidate, other, tokens, logit_scale=0.5, softcap=4.0)
    found = found_by(tmp_path, tmp_path / "a", tmp_path / "b")
    (each,) = found["candidates"]
    there = tokens[:, 1:] >= 0
    kl = kl_rows(logits_of(reference, head), logits_of(candidate, other, 0.5, 4.0))
    assert (each["rows"], each["blocks"], found["blocks_are"]) == (there.sum(), WINDOWS // 2, "documents")
    assert each["kl"]["mean"] == pytest.approx(kl[there].mean(), rel=1e-6)
    assert each["kl"]["max"] == pytest.approx(kl[there].max(), rel=1e-6)
    assert each["by_group"]["prose"]["kl"]["mean"] == pytest.approx(kl[1::2][there[1::2]].mean(), rel=1e-6)


def test_blocks_and_groups_by_a_column(tmp_path, hidden):
    """Any integers beside tokens or logits, of windows or of rows."""
    reference, candidate, head, tokens = hidden
    columns = {"document": np.zeros(WINDOWS), "group": np.arange(WINDOWS) % 2, "groups": ["code", "prose"]}
    write_run(tmp_path / "a", reference, head, tokens, **columns)
    path = tmp_path / "a/tokens.safetensors"
    save_file({**load_numpy(path), "source": np.arange(WINDOWS).astype(np.int32) // 4 + 7}, path)
    write_run(tmp_path / "b", candidate, head, tokens)
    logits = {"logits": logits_of(candidate, head), "tokens": tokens, "part": np.arange(ROWS) // 3}
    save_file(logits, tmp_path / "c.safetensors")
    pair = tmp_path / "b", tmp_path / "a", tmp_path / "c.safetensors"
    kl = kl_rows(logits_of(candidate, head), logits_of(reference, head)).reshape(-1)
    for options, blocks, count, groups in (
        ([], "windows", WINDOWS, {"code": np.arange(ROWS) // 8 % 2 == 0}),  # of one document
        (["--blocks", "document"], "documents", 1, {}),
        (["--blocks", "window"], "windows", WINDOWS, {}),
        (["--blocks", "source"], "blocks of `source`", 3, {}),
        (["--blocks", "part", "--groups", "source"], "blocks of `part`", 32, {"8": np.arange(ROWS) // 32 == 1}),
        (["--groups", "part"], "windows", WINDOWS, {"5": np.arange(ROWS) // 3 == 5}),
        (["--groups", "window"], "windows", WINDOWS, {"11": np.arange(ROWS) // 8 == 11}),
    ):
        found = found_by(tmp_path, *pair, *options)
        each = found["candidates"][0]
        assert (found["blocks_are"], each["blocks"]) == (blocks, count)
        assert (each["kl"]["interval"] is None) == (count < 10)
        for name, inside in groups.items():
            assert each["by_group"][name]["rows"] == inside.sum()
            assert each["by_group"][name]["kl"]["mean"] == pytest.approx(kl[inside].mean(), rel=1e-6)
    for option in ("--blocks", "--groups"):
        result = run(*pair, option, "cluster")
        assert result.exit_code == 3
        words = f"{option} cluster: no file has such a column; there are document, group, part, source, window"
        assert words in " ".join(result.output.split())


def test_groups_that_are_shown_alike_are_told_apart(tmp_path, hidden):
    reference, candidate, head, tokens = hidden
    columns = {"group": np.arange(WINDOWS) % 3, "groups": ["web\r", "web", "a\u0001"]}
    write_run(tmp_path / "a", reference, head, tokens, **columns)
    write_run(tmp_path / "b", candidate, head, tokens)
    found = found_by(tmp_path, tmp_path / "a", tmp_path / "b")["candidates"][0]["by_group"]
    counts = np.bincount(np.arange(WINDOWS) % 3) * (ROWS // WINDOWS)
    assert {name: of["rows"] for name, of in found.items()} == dict(
        zip(["'web\\r' (0)", "'web' (1)", "a\ufffd"], counts.tolist(), strict=True)
    )


def test_half_of_a_window_ends_before_its_last_token(tmp_path, pair):
    """As llama.cpp's does: nothing follows, to be foretold."""
    reference, candidate, tokens = pair
    for name, logits in (("a", reference), ("b", candidate)):
        save_file({"logits": logits, "tokens": tokens[:, :-1]}, tmp_path / f"{name}.safetensors")
    found = found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--score", "half")
    first, last = (WINDOW - 1) // 2, WINDOW - 2
    assert found["candidates"][0]["rows"] == WINDOWS * (last - first)
    kl = kl_rows(reference, candidate)[:, first:last]
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(kl.mean(), rel=2e-6)


def test_half_of_windows_that_differ_ends_before_the_last_token_of_each(tmp_path, pair):
    """Unless it has a label: then that is foretold."""
    lengths = [8, 6, 7, 8]
    draw = np.random.default_rng(5)
    logits = {f"prompt_{i}": draw.normal(size=(n, VOCAB)).astype(np.float32) for i, n in enumerate(lengths)}
    save_file(logits, tmp_path / "a.safetensors")
    save_file({name: 1.1 * of for name, of in logits.items()}, tmp_path / "b.safetensors")
    files = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert found_by(tmp_path, *files, "--score", "half")["candidates"][0]["rows"] == sum(n - 1 - 4 for n in lengths)
    labels = draw.integers(0, VOCAB, sum(lengths))
    save_file({**logits, "labels": labels}, tmp_path / "a.safetensors")
    assert found_by(tmp_path, *files, "--score", "half")["candidates"][0]["rows"] == sum(n - 4 for n in lengths)


def load_numpy(path):
    from safetensors.numpy import load_file

    return load_file(path)


def test_a_recording_beside_logits(tmp_path, hidden):
    reference, candidate, head, tokens = hidden
    write_run(tmp_path / "a", reference, head, tokens)
    logits = logits_of(candidate, head)
    save_file({"logits": logits, "tokens": tokens}, tmp_path / "b.safetensors")
    (each,) = found_by(tmp_path, tmp_path / "a", tmp_path / "b.safetensors")["candidates"]
    assert each["kl"]["mean"] == pytest.approx(kl_rows(logits_of(reference, head), logits).mean(), rel=1e-6)


def write_prompts(folder, hidden, tokens, head, names):
    """vLLM's files, of as many tokens as the window and two layers, of which the last is read."""
    folder.mkdir()
    save_file(head, folder / "head.safetensors")
    for states, ids, name in zip(hidden, tokens, names, strict=True):
        last = np.concatenate([states, states[-1:]])
        layers = np.stack([np.full_like(last, 9), last], 1)
        save_file({"hidden_states": layers, "token_ids": ids.astype(np.int64)}, folder / f"{name}.safetensors")


def likely(hidden, head, tokens):
    """Tokens as the model itself would go on, so that it predicts them better than chance."""
    tokens = tokens.copy()
    tokens[:, 1:] = logits_of(hidden, head).argmax(-1)
    return tokens


def test_hidden_states_of_vllm(tmp_path, hidden):
    """Files are named after requests, and belong together by their tokens."""
    reference, candidate, head, tokens = hidden
    tokens = likely(reference, head, tokens)
    order = np.random.default_rng(0).permutation(WINDOWS)
    write_prompts(tmp_path / "a", reference, tokens, head, [f"cmpl-{i}" for i in range(WINDOWS)])
    write_prompts(tmp_path / "b", candidate[order], tokens[order], head, [f"req-{i}" for i in range(WINDOWS)])
    (each,) = found_by(tmp_path, tmp_path / "a", tmp_path / "b")["candidates"]
    kl = kl_rows(logits_of(reference, head), logits_of(candidate, head))
    assert each["rows"] == ROWS
    assert each["kl"]["mean"] == pytest.approx(kl.mean(), rel=1e-6)


def test_a_cut_prompt_of_vllm_costs_its_own_rows_alone(tmp_path, hidden):
    reference, candidate, head, tokens = hidden
    tokens = likely(reference, head, tokens)
    for name, states in (("a", reference), ("b", candidate)):
        write_prompts(tmp_path / name, states, tokens, head, range(WINDOWS))
    first = sorted(range(WINDOWS), key=lambda i: tokens[i].tolist())[0]
    file = next(f for f in (tmp_path / "b").glob(f"{first}.*"))
    file.write_bytes(file.read_bytes()[: -2 * HIDDEN * 4 - 1])  # the last four rows, and one byte
    found = found_by(tmp_path, tmp_path / "a", tmp_path / "b", code=1)
    kl = kl_rows(logits_of(reference, head), logits_of(candidate, head))
    has = np.ones_like(kl, dtype=bool)
    has[first, found["rows_read"] - ROWS :] = False
    assert ROWS - 6 <= found["rows_read"] < ROWS
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(kl[has].mean(), rel=1e-6)
    order = sorted(range(WINDOWS), key=lambda i: tokens[i].tolist())  # as files without tokens have to have them
    logits = logits_of(candidate, head)[order].astype(np.float32)
    save_file({"logits": logits.reshape(ROWS, VOCAB)}, tmp_path / "flat.safetensors")
    for files in ((tmp_path / "b", tmp_path / "flat.safetensors"), (tmp_path / "flat.safetensors", tmp_path / "b")):
        again = found_by(tmp_path, *files, code=1)
        assert again["rows_read"] == found["rows_read"]
        assert again["candidates"][0]["kl"]["max"] < 1e-5


def test_hidden_states_before_the_norm_are_refused(tmp_path, hidden):
    reference, _, head, tokens = hidden
    tokens = likely(reference, head, tokens)
    write_prompts(tmp_path / "a", -reference, tokens, head, range(WINDOWS))
    result = run(tmp_path / "a", tmp_path / "a")
    assert result.exit_code == 3
    assert "were they stored before it?" in result.output
    (tmp_path / "a/head.safetensors").unlink()
    result = run(tmp_path / "a", tmp_path / "a")
    assert result.exit_code == 3
    assert "`kullback record` of the model writes one" in result.output


def test_hidden_states_of_vllm_beside_a_recording(tmp_path, hidden):
    """Whose windows have an order of their own. One prompt comes twice."""
    reference, candidate, head, tokens = hidden
    tokens = likely(reference, head, tokens)
    tokens[7] = tokens[2]
    order = np.random.default_rng(0).permutation(WINDOWS)
    write_run(tmp_path / "a", reference, head, tokens)
    write_prompts(tmp_path / "b", candidate[order], tokens[order], head, range(WINDOWS))
    found = found_by(tmp_path, tmp_path / "a", tmp_path / "b", "--rows", tmp_path / "rows.safetensors")
    kl = kl_rows(logits_of(reference, head), logits_of(candidate, head))
    rest = np.setdiff1d(np.arange(WINDOWS), [2, 7])  # which prompt is which nobody knows
    ours = floats_of(tmp_path / "rows.safetensors", "kl").reshape(WINDOWS, -1)
    assert found["candidates"][0]["rows"] == ROWS
    assert ours[rest] == pytest.approx(kl[rest], rel=1e-5, abs=1e-7)
    back = found_by(tmp_path, tmp_path / "b", tmp_path / "a")["candidates"][0]
    assert back["rows"] == ROWS
    tokens[4, 3] += 1
    write_run(tmp_path / "c", reference, head, tokens % VOCAB)
    result = run(tmp_path / "c", tmp_path / "b")
    assert result.exit_code == 3
    assert "1 of 12 windows differ, first window 4" in " ".join(result.output.split())


@pytest.mark.parametrize("stored_before", [True, False])
def test_the_final_norm_is_applied_to_hidden_states_that_lack_it(tmp_path, hidden, stored_before):
    """Where the head's file has it. Which states lack it is seen by how well they predict."""
    before, changed, head, tokens = hidden
    weight = np.linspace(0.5, 2, HIDDEN).astype(np.float32)
    before, changed = (40 * states.astype(np.float32) for states in (before, changed))
    norm = lambda x: x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.1) * weight
    tokens = likely(norm(before), head, tokens)
    full = {**head, "norm": weight, "norm_eps": np.array([0.1], np.float32)}
    for name, states in (("a", before), ("b", changed)):
        stored = states if stored_before else norm(states).astype(np.float32)
        write_prompts(tmp_path / name, stored, tokens, full, range(WINDOWS))
    found = found_by(tmp_path, tmp_path / "a", tmp_path / "b")
    kl = kl_rows(logits_of(norm(before), head), logits_of(norm(changed), head))
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(kl.mean(), rel=1e-5)
    assert any("it was applied" in warning for warning in found["warnings"]) == stored_before
    save_file({**full, "norm": weight[:3]}, tmp_path / "b/head.safetensors")
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 3
    assert "norm and norm_eps must be of [6]" in " ".join(result.output.split())


# llama.cpp


def read_kld(path):
    """tools/perplexity/perplexity.cpp, b11434: log-probabilities, scales and tokens."""
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    context, vocab, chunks = struct.unpack("<3i", data[8:20])
    at = 20 + 4 * context * chunks
    tokens = np.frombuffer(data[20:at], "<i4").reshape(chunks, context)
    width = 2 * ((vocab + 1) // 2) + 4
    stored = np.frombuffer(data[at:], "<u2").reshape(-1, width)
    scale, least = np.ascontiguousarray(stored[:, :4]).view("<f4").T
    steps = stored[:, 4 : 4 + vocab].astype(np.float64)
    return steps * scale[:, None] + least[:, None], steps == 0, tokens


def told(report):
    """What llama.cpp printed: {heading: {name: number}}."""
    found, current = {}, ""
    for line in report.splitlines():
        if line.startswith("="):
            current = line.strip("= ")
            found[current] = {}
        elif ":" in line:
            name, numbers = line.split(":")
            found[current][" ".join(name.split())] = [float(n.strip(" %")) for n in re.split("±", numbers)]
    return found


NAMED = {
    "99.9": "99.9%",
    "99": "99.0%",
    "95": "95.0%",
    "90": "90.0%",
    "75": "75.0%",
    "50": "Median",
    "25": "25.0%",
    "10": "10.0%",
    "5": "5.0%",
    "1": "1.0%",
    "0.1": "0.1%",
}
TAILS = ("99.9%", "0.1%", "Maximum", "Minimum")


@pytest.mark.parametrize(("candidate", "tight"), [("candidate-run", 2e-6), ("candidate.kld", 5e-6)])
def test_llama_cpps_own_report(tmp_path, candidate, tight):
    """Its base file beside a float run of the candidate; and beside its base file, of rounded entries.

    llama.cpp had the candidate unrounded: by the entries as they stand, percentiles are 2e-5 off. A label at the floor
    of the candidate's file has no probability there, and so the candidate no perplexity.
    """
    found = found_by(tmp_path, FIXTURE / "base.kld", FIXTURE / candidate, "--compat", "llama.cpp")
    (each,) = found["candidates"]
    assert (found["score"], each["rows"]) == ("half", 112)
    text = told((FIXTURE / "report.txt").read_text(encoding="utf-8"))
    check_report(each, text, tight)
    if candidate.endswith("run"):
        check_perplexities(each, text)


def check_report(each, text, tight, of_tails=None):
    """A candidate's figures are all that llama.cpp printed of kl, Δp and same top, to half a digit printed and `tight`.

    of_tails: what extremes and the outermost percentiles, of one row or two, may be off by instead.
    """
    divergence, probability = text["KL divergence statistics"], text["Token probability statistics"]
    bound = lambda name: tight if of_tails is None or name not in TAILS else of_tails
    nats = lambda value, truth, bound: abs(value - truth) <= bound + 5e-7
    percent = lambda value, truth, bound: abs(100 * value - truth) <= 100 * bound + 5e-4
    kl, change = each["kl"], each["label_probability_change"]
    assert nats(kl["mean"], divergence["Mean KLD"][0], min(tight, 5e-6))
    assert nats(kl["error_if_independent"], divergence["Mean KLD"][1], 1e-6)
    assert percent(change["mean"], probability["Mean Δp"][0], 5e-7)
    assert percent(change["error_if_independent"], probability["Mean Δp"][1], 5e-7)
    assert percent(change["root_mean_square"], probability["RMS Δp"][0], 5e-7)
    assert percent(each["same_top"]["mean"], probability["Same top p"][0], 5e-7)
    assert percent(each["same_top"]["error_if_independent"], probability["Same top p"][1], 5e-7)
    values = lambda of: (
        {"Maximum": of["max"], "Minimum": of["min"]} | {name: of["percentiles"][at] for at, name in NAMED.items()}
    )
    printed = lambda of, what: {name.removesuffix(what): of[name][0] for name in of if name.endswith(what)}
    of_kl, of_change = printed(divergence, " KLD"), printed(probability, " Δp")
    assert of_kl.keys() == {"Mean", *values(kl)} - {"75.0%", "25.0%"}
    assert of_change.keys() == {"Mean", "RMS", *values(change)}
    for name, value in values(kl).items():
        assert name not in of_kl or nats(value, of_kl[name], bound(name)), name
    for name, value in values(change).items():
        assert percent(value, of_change[name], bound(name)), name
    assert each["perplexity"]["reference"]["mean"] == pytest.approx(
        text["Perplexity statistics"]["Mean PPL(base)"][0], rel=1e-6
    )


def check_perplexities(each, text, rel=1e-6):
    """The perplexities are what llama.cpp printed; `rel`: their relative error, with half a digit printed."""
    printed, found = text["Perplexity statistics"], each["perplexity"]
    candidate, reference = found["candidate"], found["reference"]
    errors = [found[side]["error_if_independent"] for side in ("candidate", "reference")]
    shared = candidate["mean"] * reference["mean"] * found["covariance"] / (each["labels"] - 1)
    difference = candidate["mean"] - reference["mean"]
    of_difference = math.sqrt(errors[0] ** 2 + errors[1] ** 2 - 2 * shared)
    for name, value, scale in (
        ("Mean PPL(Q)", (candidate["mean"], errors[0]), candidate["mean"]),
        ("Mean PPL(base)", (reference["mean"], errors[1]), reference["mean"]),
        ("Mean ln(PPL(Q)/PPL(base))", (found["log_ratio"]["mean"], found["log_ratio"]["error_if_independent"]), 1),
        ("Mean PPL(Q)/PPL(base)", (found["ratio"]["mean"], found["ratio"]["error_if_independent"]), 1),
        ("Mean PPL(Q)-PPL(base)", (difference, of_difference), candidate["mean"]),
    ):
        assert value == pytest.approx(printed[name], rel=0, abs=rel * scale), name
    assert 100 * found["correlation"] == pytest.approx(printed["Cor(ln(PPL(Q)), ln(PPL(base)))"][0], abs=5e-3)


def test_a_base_file_beside_a_float_run_of_its_model(tmp_path):
    """What lies at the floor is one bucket. Renormalised, the same model would seem to be another."""
    (each,) = found_by(tmp_path, FIXTURE / "base.kld", FIXTURE / "base-run")["candidates"]
    assert 0 <= each["kl"]["min"] <= each["kl"]["mean"] <= 2e-5
    assert each["kl"]["max"] <= 2e-5
    assert each["flips"] == 0
    log_p, at_floor, _ = read_kld(FIXTURE / "base.kld")
    assert 0.3 < at_floor.mean() < 0.9
    run = {name: np.fromfile(FIXTURE / "base-run" / file, np.uint8) for name, file in
           (("rows", "rows-00001-of-00001.safetensors"), ("head", "head.safetensors"))}  # fmt: skip
    hidden, weight = (floats(run[name]) for name in ("rows", "head"))
    logits = hidden.reshape(16, 15, -1)[:, 8:].reshape(112, -1) @ weight.T
    q = log_softmax(logits)
    naive = (np.exp(log_softmax(log_p)) * (log_softmax(log_p) - q)).sum(-1)
    assert naive.mean() > 1e-5 + 2 * each["kl"]["mean"]


def floats(file):
    """The first float32 tensor of two dimensions of a safetensors file."""
    length = int(file[:8].view("<u8")[0])
    for entry in json.loads(bytes(file[8 : 8 + length])).values():
        if entry.get("dtype") == "F32" and len(entry["shape"]) == 2:
            start, stop = (8 + length + at for at in entry["data_offsets"])
            return file[start:stop].view("<f4").reshape(entry["shape"]).astype(np.float64)
    raise AssertionError


@pytest.mark.parametrize("vocab", [80, 60])
def test_a_part_of_a_base_files_vocabulary(tmp_path, vocab):
    """Its probabilities are of the first tokens alone, though the last have nearly all of some rows."""
    _, at_floor, _ = read_kld(FIXTURE / "base.kld")
    tokens = np.random.default_rng(0).integers(0, vocab, (16, 15))
    label = tokens[:, 8:].reshape(-1)
    hidden, weight = (floats(np.fromfile(FIXTURE / f"base-run/{name}.safetensors", np.uint8))
                      for name in ("rows-00001-of-00001", "head"))  # fmt: skip
    logits = hidden.reshape(16, 15, -1)[:, 8:].reshape(112, -1) @ weight.T
    assert np.exp(log_softmax(logits))[:, vocab:].sum(-1).max() > 0.9
    save_file({"logits": logits, "labels": label}, tmp_path / "logits.safetensors")
    files = write_base(tmp_path, tokens), tmp_path / "logits.safetensors"
    rows = tmp_path / "rows.safetensors"
    (each,) = found_by(tmp_path, *files, "--valid-vocab", vocab, "--rows", rows)["candidates"]
    assert 0 <= each["kl"]["min"] <= each["kl"]["mean"] < 2e-5
    truth = log_softmax(logits[:, :vocab])[np.arange(112), label]
    is_known = ~at_floor[np.arange(112), label]
    assert floats_of(rows, "label_log_prob") == pytest.approx(truth, rel=1e-6)
    assert floats_of(rows, "target_label_log_prob")[is_known] == pytest.approx(truth[is_known], abs=1e-3)


def write_base(folder, tokens):
    """The fixture's rows with other labels: windows of 16 tokens, of which row 8 to 14 are there."""
    whole = (FIXTURE / "base.kld").read_bytes()
    begins = np.zeros((16, 1), np.int32)
    given = np.concatenate([begins, tokens.astype(np.int32)], 1)
    assert given.nbytes == 4 * 256
    path = folder / "base.kld"
    path.write_bytes(whole[:20] + given.tobytes() + whole[20 + given.nbytes :])
    return path


def test_rows_of_a_base_file_that_are_no_numbers(tmp_path):
    """By llama.cpp's own formula, too, which leaves out small probabilities."""
    whole, width = bytearray((FIXTURE / "base.kld").read_bytes()), 2 * (2 * ((87 + 1) // 2) + 4)
    start = len(whole) - 112 * width
    whole[start + 5 * width : start + 5 * width + 4] = struct.pack("<f", math.nan)
    (tmp_path / "nan.kld").write_bytes(whole)
    for compat in ([], ["--compat", "llama.cpp"]):
        found = found_by(tmp_path, tmp_path / "nan.kld", FIXTURE / "candidate-run", *compat)
        each = found["candidates"][0]
        assert (each["rows"], each["rows_not_numbers"]) == (111, 1)
        assert each["kl"]["min"] > 0
        assert any("1 rows are not numbers (NaN) in candidate-run" in warning for warning in found["warnings"])


def test_two_base_files_share_one_bucket(tmp_path):
    files = FIXTURE / "base.kld", FIXTURE / "candidate.kld"
    found = found_by(tmp_path, *files, "--rows", tmp_path / "rows.safetensors")
    (p, low, _), (q, also, _) = (read_kld(FIXTURE / f"{name}.kld") for name in ("base", "candidate"))
    known = ~(low | also)
    # Rounded entries need not add up to 1: by - p + q that counts in second order alone. Buckets add little.
    kl = ((np.exp(p) * (p - q) - np.exp(p) + np.exp(q)) * known).sum(-1)
    ours = floats_of(tmp_path / "rows.safetensors", "kl")
    assert ours.min() >= 0
    assert abs(ours - kl).max() < 2e-5
    assert kl.max() > 0.4
    assert any("one bucket" in warning for warning in found["warnings"])
    found_by(tmp_path, *files, "--compat", "llama.cpp", "--rows", tmp_path / "rows.safetensors")
    literal = np.where(p > -16, np.exp(p) * (p - q), 0).sum(-1)
    found = floats_of(tmp_path / "rows.safetensors", "kl")
    hidden, weight = (floats(np.fromfile(FIXTURE / f"candidate-run/{name}.safetensors", np.uint8))
                      for name in ("rows-00001-of-00001", "head"))  # fmt: skip
    live = log_softmax(hidden.reshape(16, 15, -1)[:, 8:].reshape(112, -1) @ weight.T)
    truth = np.where(p > -16, np.exp(p) * (p - live), 0).sum(-1)
    root_mean_square = lambda error: math.sqrt((error**2).mean())
    assert root_mean_square(found - truth) < root_mean_square(literal - truth) / 5
    assert abs(found - literal).max() < 16 / 65535 / 2  # no entry is moved by more than it may have been rounded


def floats_of(path, name):
    from safetensors.numpy import load_file

    return load_file(path)[name].astype(np.float64)


# How it ends


def test_what_would_be_written_over_or_is_no_token_is_refused(tmp_path):
    logits = torch.randn(3, 4, 20)
    save_torch({"logits": logits}, tmp_path / "a.safetensors")
    save_torch({"logits": logits, "labels": torch.full((12,), 25)}, tmp_path / "b.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    for option in ("--json", "--rows"):
        result = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors", option, tmp_path / "a.safetensors")
        assert result.exit_code == 2
        assert "it would be written over" in " ".join(result.output.split())
    assert (tmp_path / "a.safetensors").read_bytes() == before
    result = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.exit_code == 3
    assert "must lie from 0 to 19; got 25" in " ".join(result.output.split())


def test_no_head_is_written_over(tmp_path, hidden):
    """That of a single file of hidden states lies beside it."""
    reference, _, head, tokens = hidden
    write_prompts(tmp_path / "a", reference[:1], likely(reference, head, tokens)[:1], head, ["one"])
    (file,) = (f for f in (tmp_path / "a").glob("*.safetensors") if f.name != "head.safetensors")
    before = (tmp_path / "a/head.safetensors").read_bytes()
    result = run(file, file, "--rows", tmp_path / "a/head.safetensors")
    assert result.exit_code == 2
    assert "it would be written over" in " ".join(result.output.split())
    assert (tmp_path / "a/head.safetensors").read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="others' names are UTF-8")
def test_outputs_of_odd_names_and_places(tmp_path, files):
    """Names as long as a folder takes; a path that is not UTF-8, in reports; files that may be written and not read."""
    long = tmp_path / ("模" * 83 + ".json")
    odd = tmp_path / os.fsdecode(b"caf\xe9.safetensors")
    shutil.copy(files[1], odd)
    (tmp_path / "old.md").write_text("old")
    (tmp_path / "old.md").chmod(0o200)
    outputs = ["--json", long, "--html", tmp_path / "a.html", "--markdown", tmp_path / "old.md"]
    done = command(files[0], odd, files[1], *outputs, "--rows", tmp_path / "rows.safetensors")
    assert done.returncode == 0, done.stderr
    assert b"caf?.safetensors" in done.stdout
    assert [each["name"] for each in json.loads(long.read_text())["candidates"]] == ["caf?.safetensors", files[1].name]
    assert floats_of(tmp_path / "rows.safetensors", "caf?.safetensors.kl").shape == (ROWS,)
    assert "KL divergence" in (tmp_path / "old.md").read_bytes().decode()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def command(*arguments, **environment):
    line = [sys.executable, "-m", "kullback", "compare", *arguments]
    more = {"PYTHONPATH": str(ROOT / "src")} | environment
    return subprocess.run(line, env=os.environ | more, capture_output=True, check=False)


@pytest.mark.parametrize(("columns", "taken"), [("0", "80"), ("20", "40")])
def test_a_terminal_without_room(columns, taken):
    """A width of 0 is none that is known; in fewer than 40 columns figures would be cut."""
    found, expected = (
        command(FIXTURE / "base.kld", FIXTURE / "candidate-run", COLUMNS=width) for width in (columns, taken)
    )
    assert found.returncode == 0, found.stderr
    assert b"mean KLD" in found.stdout
    assert found.stdout == expected.stdout


def test_a_terminal_without_unicode():
    done = command(FIXTURE / "base.kld", FIXTURE / "candidate-run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"95 % interval" in done.stdout


def test_no_part_of_a_recording_is_written_over(tmp_path, hidden):
    """A shard that a link leads to, a head of another name."""
    reference, _, head, tokens = hidden
    write_run(tmp_path / "a", reference, head, tokens)
    about = json.loads((tmp_path / "a/run.json").read_text()) | {"head": {"file": "h.bin"}}
    (tmp_path / "a/run.json").write_text(json.dumps(about))
    (tmp_path / "a/head.safetensors").rename(tmp_path / "a/h.bin")
    shard = tmp_path / "a/rows-00001-of-00006.safetensors"
    shard.rename(tmp_path / "blob.safetensors")
    shard.symlink_to(tmp_path / "blob.safetensors")
    before = (tmp_path / "blob.safetensors").read_bytes()
    for option, path in (("--rows", tmp_path / "blob.safetensors"), ("--json", tmp_path / "a/h.bin")):
        result = run(tmp_path / "a", tmp_path / "a", option, path)
        assert result.exit_code == 2
        assert "it would be written over" in " ".join(result.output.split())
    assert (tmp_path / "blob.safetensors").read_bytes() == before
    assert run(tmp_path / "a", tmp_path / "a", "--html", tmp_path / "a/report.html").exit_code == 0


def test_rows_into_what_is_no_file(tmp_path, files):
    """A pipe: nothing takes its place."""
    os.mkfifo(tmp_path / "rows.safetensors")
    reader = subprocess.Popen(["cat", tmp_path / "rows.safetensors"], stdout=subprocess.PIPE)
    try:
        assert run(*files, "--rows", tmp_path / "rows.safetensors").exit_code == 0
        assert len(reader.communicate()[0]) > 1000
    finally:
        reader.kill()
    assert (tmp_path / "rows.safetensors").is_fifo()


def test_a_head_beside_a_link(tmp_path, hidden):
    reference, _, head, tokens = hidden
    write_prompts(tmp_path / "a", reference[:1], likely(reference, head, tokens)[:1], head, ["one"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/link.safetensors").symlink_to(tmp_path / "a/one.safetensors")
    shutil.copy(tmp_path / "a/head.safetensors", tmp_path / "b")
    for folder in ("a", "b"):
        result = run(tmp_path / "b/link.safetensors", tmp_path / "a", "--rows", tmp_path / folder / "head.safetensors")
        assert result.exit_code == 2
        assert "it would be written over" in " ".join(result.output.split())


def test_names_that_no_file_can_have(tmp_path, files):
    result = run("a" * 300, files[1], "--json", tmp_path / "found.json")
    assert result.exit_code == 3
    assert "cannot be read: File name too long" in " ".join(result.output.split())


def test_an_output_through_a_link(tmp_path, files):
    """Its target is written."""
    target, link = tmp_path / "there.safetensors", tmp_path / "link.safetensors"
    target.write_bytes(b"")
    link.symlink_to(target)
    assert run(*files, "--rows", link).exit_code == 0
    assert link.is_symlink()
    assert floats_of(target, "kl").shape == (ROWS,)


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="there is no such device")
@pytest.mark.parametrize("to_file", [False, True])
def test_an_output_to_standard_output(tmp_path, files, to_file):
    (tmp_path / "out").write_text("before\n" if to_file else "")
    (tmp_path / "link.json").symlink_to("/dev/stdout")
    for place in ("/dev/stdout", tmp_path / "link.json"):
        with (tmp_path / "out").open("ab") as out:
            line = [sys.executable, "-m", "kullback", "compare", *files, "--json", place]
            environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
            where = out if to_file else subprocess.PIPE
            done = subprocess.run(line, env=environment, stdout=where, stderr=subprocess.PIPE, check=False)
        text = (tmp_path / "out").read_text() if to_file else done.stdout.decode()
        assert done.returncode == 0
        assert text.startswith("before\n" if to_file else "{")
        found, end = json.JSONDecoder().raw_decode(text[text.index("{") :])
        assert found["rows_read"] == ROWS
        assert to_file or text[text.index("{") :][end:].strip() == ""
        assert "Divergence from the reference" not in text
        assert "Divergence from the reference" in done.stderr.decode()
    assert (tmp_path / "link.json").is_symlink()


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="there is no such device")
def test_a_reader_of_the_tables_who_is_gone_costs_no_output(files):
    """They go to standard error where an output has standard output."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    line = [sys.executable, "-m", "kullback", "compare", *files, "--json", "/dev/stdout"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, stderr=write_end, check=False)
    os.close(write_end)
    assert json.loads(done.stdout)["rows_read"] == ROWS


def test_two_processes_write_beside_each_other(tmp_path, monkeypatch):
    """Though they have one number, as in two containers."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    places = [writing.beside(tmp_path / name) for name in ("a.json", "b.json")]
    assert places[0] != places[1]
    writing.put_text(tmp_path / "a.json", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_cut_in_half_is_cut_whatever_its_tensors(tmp_path):
    """Though one of them lacks more rows than a wrong header would."""
    logits = torch.randn(3, 1500, 4)
    save_torch({f"w{i}": each for i, each in enumerate(logits)}, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[: len(whole) // 2])
    found = found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors", code=1)
    assert 2200 < found["rows_read"] < 2260


def test_a_cut_base_file(tmp_path):
    """In the middle of row 50: the 49 before it count, as in a file that ends there."""
    width = 2 * (2 * ((87 + 1) // 2) + 4)
    whole = (FIXTURE / "base.kld").read_bytes()
    start = len(whole) - 112 * width
    (tmp_path / "cut.kld").write_bytes(whole[: start + 49 * width + 11])
    result = run(tmp_path / "cut.kld", FIXTURE / "candidate-run", "--json", tmp_path / "cut.json")
    assert result.exit_code == 1
    assert "49 of 112 rows were read: a file is cut" in " ".join(result.output.split())
    cut = json.loads((tmp_path / "cut.json").read_text())
    found_by(tmp_path, FIXTURE / "base.kld", FIXTURE / "candidate-run", "--rows", tmp_path / "rows.safetensors")
    assert cut["candidates"][0]["kl"]["mean"] == pytest.approx(
        floats_of(tmp_path / "rows.safetensors", "kl")[:49].mean()
    )
    (tmp_path / "header.kld").write_bytes(whole[: start - 1])
    assert run(tmp_path / "header.kld", tmp_path / "header.kld").exit_code == 3
    (tmp_path / "first.kld").write_bytes(whole[: start + width - 1])
    for pair in (("first.kld", "cut.kld"), ("cut.kld", "first.kld")):
        result = run(*(tmp_path / name for name in pair))
        assert result.exit_code == 3
        assert "first.kld has no whole row" in " ".join(result.output.split())


@pytest.mark.parametrize("how", ["cut", "missing"])
def test_a_recording_that_has_not_ended(tmp_path, hidden, how):
    reference, candidate, head, tokens = hidden
    write_run(tmp_path / "a", reference, head, tokens)
    write_run(tmp_path / "b", candidate, head, tokens)
    shard = tmp_path / "b/rows-00003-of-00006.safetensors"
    if how == "cut":
        row = HIDDEN * 2
        shard.write_bytes(shard.read_bytes()[: -(3 * row + 5)])
    else:
        shard.unlink()
    there = 4 * (WINDOW - 1) + (2 * (WINDOW - 1) - 4 if how == "cut" else 0)
    found = found_by(tmp_path, tmp_path / "a", tmp_path / "b", code=1)
    kl = kl_rows(logits_of(reference, head), logits_of(candidate, head)).reshape(-1)[:there]
    assert (found["rows_read"], found["rows_asked"], found["complete"]) == (there, ROWS, False)
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(kl.mean(), rel=1e-6)


def test_an_interrupt_reports_what_was_read(tmp_path, files, pair, monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK_BYTES", 4 * VOCAB * 10)
    true, calls = comparison.statistics, []

    def third_time(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return true(*arguments)

    monkeypatch.setattr(comparison, "statistics", third_time)
    found = found_by(tmp_path, *files, code=130)
    assert (found["rows_read"], found["interrupted"]) == (20, True)
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(kl_rows(*pair[:2]).reshape(-1)[:20].mean(), rel=1e-6)


@pytest.mark.parametrize("call", [2, 4])
def test_an_interrupt_between_candidates_leaves_them_the_same_rows(tmp_path, files, monkeypatch, call):
    """Of which all have read the first chunk, or none."""
    monkeypatch.setattr(comparison, "CHUNK_BYTES", 4 * VOCAB * 10)
    other = tmp_path / "other.safetensors"
    shutil.copyfile(files[1], other)
    true, calls = comparison.statistics, []

    def at_last(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return true(*arguments)

    monkeypatch.setattr(comparison, "statistics", at_last)
    found = found_by(tmp_path, *files, other, code=130)
    assert (found["rows_read"], found["interrupted"]) == (10 * (call // 2 - 1), True)


def test_an_interrupt_while_rows_are_added_comes_behind_them():
    added, former = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background

    def add():
        with interrupts.held_back():
            signal.raise_signal(signal.SIGINT)
            added.append(1)

    try:
        with pytest.raises(KeyboardInterrupt):
            add()
        assert added
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        add()
    finally:
        signal.signal(signal.SIGINT, former)
    assert len(added) == 2


def test_an_interrupt_before_the_first_row(tmp_path, files, monkeypatch):
    def at_once(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "statistics", at_once)
    options = ["--html", tmp_path / "x.html", "--markdown", tmp_path / "x.md", "--rows", tmp_path / "x.safetensors"]
    assert found_by(tmp_path, *files, *options, code=130)["rows_read"] == 0


def test_padded_vocabularies(tmp_path, hidden):
    reference, candidate, head, tokens = hidden
    padded = {name: np.concatenate([v, np.ones_like(v[:3])]) for name, v in head.items()}
    for name, states, own in (("a", reference, head), ("b", candidate, head), ("c", candidate, padded)):
        write_run(tmp_path / name, states, own, tokens)
    result = run(tmp_path / "a", tmp_path / "c")
    assert result.exit_code == 3
    assert "40 tokens" in result.output
    assert "43" in result.output
    assert "--valid-vocab 40" in result.output
    cut = found_by(tmp_path, tmp_path / "a", tmp_path / "c", "--valid-vocab", 40)["candidates"][0]
    whole = found_by(tmp_path, tmp_path / "a", tmp_path / "b")["candidates"][0]
    same = lambda each: {k: v for k, v in each.items() if k not in ("name", "path", "about")}
    assert same(cut) == same(whole)
    assert run(tmp_path / "a", tmp_path / "c", "--valid-vocab", 41).exit_code == 3


def test_files_that_do_not_belong_together(tmp_path, files, pair):
    reference, _, tokens = pair
    other = tokens.copy()
    other[5, 2] += 1
    save_file({"logits": reference, "tokens": other}, tmp_path / "text.safetensors")
    save_file({"logits": reference[:5], "tokens": tokens[:5]}, tmp_path / "few.safetensors")
    save_file({"logits": reference[:5]}, tmp_path / "bare.safetensors")
    save_file({"ids": tokens}, tmp_path / "none.safetensors")
    (tmp_path / "rubbish.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("text.safetensors", "1 of 12 windows differ, first window 5"),
        ("few.safetensors", "[12, 9] and [5, 9] tokens"),
        ("bare.safetensors", "96 and 40 rows"),
        ("none.safetensors", "has no tensor of floating-point logits"),
        ("rubbish.safetensors", "is no safetensors file"),
        ("empty", "neither run.json"),
        ("nothing", "there is no"),
    ):
        result = run(files[0], tmp_path / name, "--json", tmp_path / "no.json")
        assert result.exit_code == 3, name
        assert words in result.output, result.output
    assert not (tmp_path / "no.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "x"], "x is given twice"),
        (["--score", "last"], "'last' is not all, half or N:"),
        (["--compat", "ollama"], "'ollama' is not one of llama.cpp"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--rows", "x.npz"], "does not end in .safetensors"),
        (["--device", "tpu"], "'tpu' is not one of cuda, cpu"),
    ],
)
def test_usage(files, arguments, words):
    result = run(*files, *arguments)
    assert result.exit_code == 2
    assert words in re.sub(r"\s+│\s*\n│\s+", " ", result.output)


@pytest.mark.parametrize(("score", "first"), [("all", 0), ("half", WINDOW // 2), ("7:", 7)])
def test_scored_positions(tmp_path, files, pair, score, first):
    found = found_by(tmp_path, *files, "--score", score)
    kl = kl_rows(*pair[:2])[:, first:]
    assert (found["candidates"][0]["rows"], found["first_position"]) == (kl.size, first)
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(kl.mean(), rel=2e-6)
    assert run(*files, "--score", "99:").exit_code == 3


def test_scored_positions_are_of_whoever_has_the_text(tmp_path, files, pair):
    """A reference without tokens has rows, and no windows."""
    reference, candidate, _ = pair
    save_file({"logits": reference.reshape(ROWS, VOCAB)}, tmp_path / "flat.safetensors")
    found = found_by(tmp_path, tmp_path / "flat.safetensors", files[1], "--score", "half")
    assert found["first_position"] == WINDOW // 2
    expected = kl_rows(reference, candidate)[:, WINDOW // 2 :].mean()
    assert found["candidates"][0]["kl"]["mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_labels_of_a_file_without_windows(tmp_path, pair, has_tokens):
    """Positions are those of whoever has windows, and so are blocks and the rows' places."""
    reference, candidate, tokens = pair
    own = {"tokens": tokens} if has_tokens else {}
    save_file({"logits": reference} | own, tmp_path / "a.safetensors")
    flat = {"logits": candidate.reshape(ROWS, VOCAB), "labels": tokens[:, 1:].reshape(-1)}
    save_file(flat, tmp_path / "b.safetensors")
    for files in (("a", "b"), ("b", "a")):
        paths = [tmp_path / f"{name}.safetensors" for name in files]
        found = found_by(tmp_path, *paths, "--score", "4:", "--rows", tmp_path / "rows.safetensors")
        (each,) = found["candidates"]
        sides = (reference, candidate) if files[0] == "a" else (candidate, reference)
        assert each["kl"]["mean"] == pytest.approx(kl_rows(*sides)[:, 4:].mean(), rel=1e-5)
        assert (found["first_position"], each["blocks"], each["labels"]) == (4, WINDOWS, each["rows"])
        assert floats_of(tmp_path / "rows.safetensors", "position").tolist() == [4, 5, 6, 7] * WINDOWS
        assert 0 <= each["worst"][0]["window"] < WINDOWS


def test_candidates_of_different_texts_beside_a_reference_without(tmp_path, pair):
    reference, candidate, tokens = pair
    save_file({"logits": reference}, tmp_path / "a.safetensors")
    for i in range(2):
        save_file({"logits": candidate, "tokens": (tokens + i) % VOCAB}, tmp_path / f"{i}.safetensors")
    result = run(*(tmp_path / f"{name}.safetensors" for name in ("a", "0", "1")))
    assert result.exit_code == 3
    assert "different texts or tokenizers" in " ".join(result.output.split())


def test_windows_in_other_orders_beside_a_reference_without_tokens(tmp_path, hidden):
    """vLLM's come in that of their ids."""
    reference, candidate, head, tokens = hidden
    tokens = likely(reference, head, tokens)
    logits = logits_of(candidate, head).astype(np.float32)
    save_file({"logits": logits}, tmp_path / "flat.safetensors")
    save_file({"logits": logits, "tokens": tokens}, tmp_path / "told.safetensors")
    write_prompts(tmp_path / "a", candidate, tokens, head, range(WINDOWS))
    result = run(tmp_path / "flat.safetensors", tmp_path / "told.safetensors", tmp_path / "a")
    assert result.exit_code == 3
    assert "have their windows in other orders" in " ".join(result.output.split())


def test_files_that_are_cut_before_they_share_a_row(tmp_path, hidden):
    reference, _, head, tokens = hidden
    tokens = likely(reference, head, tokens)
    for name, odd in (("a", 0), ("b", 1)):
        write_prompts(tmp_path / name, reference, tokens, head, range(WINDOWS))
        for i in range(odd, WINDOWS, 2):
            file = tmp_path / name / f"{i}.safetensors"
            length = int.from_bytes(file.read_bytes()[:8], "little")
            held = json.loads(file.read_bytes()[8 : 8 + length])
            file.write_bytes(file.read_bytes()[: 8 + length + held["hidden_states"]["data_offsets"][0]])
    result = run(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1, result.output
    assert f"0 of {ROWS} rows were read" in " ".join(result.output.split())


def test_windows_whose_last_position_has_no_logits(tmp_path, pair):
    """Beside those that have them: the same rows are compared, and half of a window is of its tokens."""
    draw = np.random.default_rng(4)
    reference, candidate, tokens = pair
    more = np.concatenate([reference, draw.normal(size=(WINDOWS, 1, VOCAB)).astype(np.float32)], 1)
    save_file({"logits": more, "tokens": tokens}, tmp_path / "a.safetensors")
    save_file({"logits": candidate, "tokens": tokens}, tmp_path / "b.safetensors")
    for files in (("a", "b"), ("b", "a")):
        paths = [tmp_path / f"{name}.safetensors" for name in files]
        assert found_by(tmp_path, *paths)["rows_read"] == ROWS
        assert found_by(tmp_path, *paths, "--floor", paths[1])["rows_read"] == ROWS
        assert found_by(tmp_path, *paths, "--score", "half")["rows_read"] == WINDOWS * (WINDOW - 1 - WINDOW // 2)


def test_outputs_are_whole_though_nobody_reads_the_report(tmp_path, files):
    program = [sys.executable, "-m", "kullback", "compare", *map(str, files), "--json", str(tmp_path / "found.json")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.close()
        assert (running.stderr.read().strip(), running.wait()) == (b"", 0)
    assert json.loads((tmp_path / "found.json").read_text())["rows_read"] == ROWS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device")
def test_outputs_are_whole_though_the_report_cannot_be_shown(tmp_path, files):
    program = [sys.executable, "-m", "kullback", "compare", *map(str, files), "--json", str(tmp_path / "found.json")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "Error: the report could not be shown: [Errno 28] No space left on device",
    )
    assert json.loads((tmp_path / "found.json").read_text())["rows_read"] == ROWS


@pytest.mark.parametrize("step", ["gather", "result"])
def test_an_interrupt_while_the_report_is_made(tmp_path, files, monkeypatch, step):
    """Or while other ranks' rows are waited for."""
    true = getattr(comparison, step)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return true(*arguments)

    monkeypatch.setattr(comparison, step, interrupted)
    assert found_by(tmp_path, *files)["rows_read"] == ROWS


def test_labels_of_one_row_are_the_same(tmp_path, pair):
    reference, candidate, tokens = pair
    labels = tokens[:, 1:].astype(np.int64)
    save_file({"logits": reference, "labels": labels}, tmp_path / "a.safetensors")
    labels[1, 2] = -100
    save_file({"logits": candidate, "labels": labels}, tmp_path / "b.safetensors")
    assert found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors")["rows_read"] == ROWS
    labels[1, 3] = (labels[1, 3] + 1) % VOCAB
    save_file({"logits": candidate, "labels": labels}, tmp_path / "b.safetensors")
    result = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.exit_code == 3
    assert f"1 of {ROWS} labels differ" in " ".join(result.output.split())


def test_a_correlation_with_what_never_changes_is_none(tmp_path, pair):
    reference, _, tokens = pair
    alike = np.tile(reference[:1, :1], (*reference.shape[:2], 1))
    for name, logits in (("a", reference), ("b", alike)):
        save_file({"logits": logits, "labels": np.zeros_like(tokens[:, 1:])}, tmp_path / f"{name}.safetensors")
    found = found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found["candidates"][0]["perplexity"]["correlation"] is None


def test_reports_are_merged_with_what_they_have():
    statistics = kullback.row_statistics(torch.randn(3, 5), torch.randn(3, 5))
    reports = compare.Report(), compare.Report()
    reports[0].add(statistics)
    reports[1].add(statistics, group=1)
    with pytest.raises(ValueError, match="some have and some lack group"):
        reports[0].merge(reports[1])


def test_what_a_cluster_sets_makes_no_ranks(tmp_path, files, monkeypatch):
    for world in ("2", "", "two"):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert found_by(tmp_path, *files)["rows_read"] == ROWS


def test_a_token_without_mass_has_an_infinite_perplexity(tmp_path, pair):
    reference, candidate, tokens = pair
    candidate[2, 3, tokens[2, 4]] = -np.inf
    for name, logits in (("a", reference), ("b", candidate)):
        save_file({"logits": logits, "tokens": tokens}, tmp_path / f"{name}.safetensors")
    found = found_by(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors")["candidates"][0]["perplexity"]
    assert found["candidate"]["mean"] == found["ratio"]["mean"] == "inf"
    assert isinstance(found["reference"]["mean"], float)


def test_rounded_logits_tell_their_floor(tmp_path):
    """What is printed is what rounding does: here to bfloat16 and back."""
    draw = np.random.default_rng(1)
    exact = torch.from_numpy(draw.normal(size=(400, 300)) * 6)
    save_torch({"logits": exact.bfloat16()}, tmp_path / "a.safetensors")
    save_torch({"logits": exact.float()}, tmp_path / "b.safetensors")
    result = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    text = " ".join(result.output.split())
    said = float(
        re.search(r"rounded to bfloat16: that alone makes a mean KLD of about ([\d.e-]+)", text)[1].rstrip(".")
    )
    done = kl_rows(exact.bfloat16().double().numpy(), exact.numpy()).mean()
    assert said == pytest.approx(done, rel=0.25)
    assert "were rounded to" not in run(tmp_path / "b.safetensors", tmp_path / "b.safetensors").output


def test_rounding_of_logits_that_are_not_finite(tmp_path):
    """Minus infinity is exact; rows that are NaN say nothing of rounding."""
    exact = torch.from_numpy(np.random.default_rng(1).normal(size=(64, 300)) * 6)
    exact[:, ::7] = -math.inf
    for name, dtype in (("a", torch.float16), ("b", torch.float32)):
        save_torch({"logits": exact.to(dtype)}, tmp_path / f"{name}.safetensors")
    said = r"rounded to float16: that alone makes a mean KLD of about ([\d.e-]+)\. "
    text = " ".join(run(tmp_path / "a.safetensors", tmp_path / "b.safetensors").output.split())
    done = kl_rows(np.where(exact.isinf(), -1e4, exact.half()), np.where(exact.isinf(), -1e4, exact)).mean()
    assert float(re.search(said, text)[1]) == pytest.approx(done, rel=0.5)
    exact[0] = math.nan
    save_torch({"logits": exact.half()}, tmp_path / "a.safetensors")
    result = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.exit_code == 0
    assert float(re.search(said, " ".join(result.output.split()))[1]) == pytest.approx(done, rel=0.5)
    exact[1:] = math.nan
    exact[5] = 0.0  # which is not among the rows that are asked
    save_torch({"logits": exact.half()}, tmp_path / "a.safetensors")
    assert "were rounded to" not in run(tmp_path / "a.safetensors", tmp_path / "a.safetensors").output


@pytest.mark.parametrize("rows", [1, 5, 8, 20])
def test_chunks_of_any_size_make_one_report(tmp_path, pair, monkeypatch, rows):
    """They may end within a tensor, and go over several."""
    reference, candidate, _ = pair
    for name, logits in (("a", reference), ("b", candidate)):
        save_file({f"prompt_{i}": each[: 8 - i % 3] for i, each in enumerate(logits)}, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    whole = found_by(tmp_path, *paths, "--score", "1:")
    monkeypatch.setattr(comparison, "CHUNK_BYTES", 4 * VOCAB * rows)
    assert found_by(tmp_path, *paths, "--score", "1:") == whole


def test_short_passes_run_in_one_thread(files, monkeypatch):
    """Beside other processes 200 rows' rounding took 18 s in two. The statistics themselves keep all threads."""
    seen = {}

    def watched(module, name):
        true = getattr(module, name)

        def call(*arguments):
            seen[name] = torch.get_num_threads()
            return true(*arguments)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (comparison, "_note_rounding"),
        (comparison, "top_tokens"),
        (comparison, "in_context"),
        (comparison, "statistics"),
    ):
        watched(module, name)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run(*files).exit_code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == {"_note_rounding": 1, "top_tokens": 1, "in_context": 1, "statistics": 2}


def test_floor_and_differences_between_candidates(tmp_path, pair):
    reference, candidate, tokens = pair
    draw = np.random.default_rng(2)
    named = {
        "reference": reference,
        "far": candidate,
        "near": reference + (candidate - reference) / 2,
        "same": reference + np.float32(1e-3) * draw.normal(size=reference.shape).astype(np.float32),
        "again": reference + np.float32(1e-2) * draw.normal(size=reference.shape).astype(np.float32),
    }
    for name, logits in named.items():
        save_file({"logits": logits, "tokens": tokens}, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("reference", "far", "near", "same")]
    found = found_by(tmp_path, *paths, "--floor", tmp_path / "again.safetensors")
    assert found["floor"]["kl"]["mean"] == pytest.approx(kl_rows(reference, named["again"]).mean(), rel=1e-4)
    assert [each["below_floor"] for each in found["candidates"]] == [False, False, True]
    order = [(d["worse"], d["better"]) for d in found["differences"]]
    assert order == [("near.safetensors", "same.safetensors"), ("far.safetensors", "near.safetensors")]
    difference = kl_rows(reference, named["far"]).mean() - kl_rows(reference, named["near"]).mean()
    assert found["differences"][1]["mean"] == pytest.approx(difference, rel=1e-5)
    output = " ".join(run(*paths, "--floor", tmp_path / "again.safetensors").output.split())
    assert "same.safetensors *" in output
    assert "this KLD says nothing of the candidate" in output


def test_rows_that_one_file_lacks_count_for_none(tmp_path):
    """A floor of llama.cpp's has second halves alone; 8 of 15 rows of a window are before."""
    runs = FIXTURE / "base-run", FIXTURE / "candidate-run"
    found = found_by(tmp_path, *runs)
    assert (found["rows_read"], found["warnings"]) == (16 * 15, [])
    found = found_by(tmp_path, *runs, "--floor", FIXTURE / "base.kld")
    assert (found["rows_read"], found["complete"], found["first_position"]) == (16 * 7, True, 8)
    assert any(f"{16 * 8} more rows of the reference are not in" in warning for warning in found["warnings"])


def test_differences_are_of_the_rows_that_both_have(tmp_path, pair):
    """Though no row is a number in all."""
    reference, candidate, _ = pair
    save_file({"logits": reference}, tmp_path / "reference.safetensors")
    names = []
    for i, size in enumerate((0.5, 1.0, 2.0)):
        logits = reference + size * (candidate - reference)
        logits[4 * i : 4 * i + 4] = np.nan
        names.append(tmp_path / f"{i}.safetensors")
        save_file({"logits": logits}, names[-1])
    found = found_by(tmp_path, tmp_path / "reference.safetensors", *names)
    assert [(each["worse"][0], each["better"][0]) for each in found["differences"]] == [("1", "0"), ("2", "1")]
    kl = [kl_rows(reference, reference + size * (candidate - reference)) for size in (0.5, 1.0)]
    assert found["differences"][0]["mean"] == pytest.approx((kl[1] - kl[0])[8:].mean(), rel=1e-4)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_candidates_that_lack_what_others_have(tmp_path, pair, order):
    """One whose rows of a group, and of all labels, are not numbers, beside one that has them."""
    reference, candidate, tokens = pair
    labels, group = np.full((WINDOWS, WINDOW - 1), -100), np.repeat(np.arange(10, 10 + WINDOWS // 2), 2)
    labels[:2] = tokens[:2, 1:]
    odd = candidate.copy()
    odd[:2] = np.nan
    for i, logits in enumerate((reference, candidate, odd)):
        held = {"logits": logits, "labels": labels.reshape(-1).astype(np.int64), "group": group}
        save_file(held, tmp_path / f"{i}.safetensors")
    paths = [tmp_path / f"{i}.safetensors" for i in (0, *order)]
    outputs = ["--rows", tmp_path / "rows.safetensors", "--markdown", tmp_path / "a.md", "--floor", paths[2]]
    found = found_by(tmp_path, *paths, *outputs, "--html", tmp_path / "a.html")
    by_name = {each["name"]: each for each in found["candidates"]}
    assert list(by_name["1.safetensors"]["by_group"]) == [str(i) for i in range(10, 16)]
    assert list(by_name["2.safetensors"]["by_group"]) == [str(i) for i in range(11, 16)]
    text = (tmp_path / "a.md").read_text()
    assert re.search(r"^\| 10 \| 16 \|", text, re.M)
    assert "The text's own tokens" in text
    assert f"{ROWS} rows of {VOCAB} tokens in {WINDOWS} windows" in text
    notes = [warning for warning in found["warnings"] if "not numbers" in warning]
    whose = ["2.safetensors", *(["the floor"] if order == (1, 2) else [])]
    assert [f"16 rows are not numbers (NaN) in {name} or the reference" in note
            for name, note in zip(whose, notes, strict=True)] == [True] * len(whose)  # fmt: skip
    assert sorted(set(floats_of(tmp_path / "rows.safetensors", "1.safetensors.group"))) == [*range(10, 16)]
    (of_pair,) = found["differences"]
    both = kl_rows(reference, candidate)[2:].mean()
    assert (of_pair["mean"], both > 0) == (pytest.approx(0, abs=1e-6), True)
    assert all(row["kl"] is not None for each in found["candidates"] for row in each["worst"])


def test_ranks_share_rows(tmp_path, files):
    alone = found_by(tmp_path, *files)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "run.py"
    lines = [
        "import os, sys",
        "from kullback.cli import comparison, main",
        f"comparison.CHUNK_BYTES = {4 * VOCAB * 10}",
        "try: main()",
        "except SystemExit as ended:",
        "    sys.stdout.flush()",
        "    os._exit(ended.code or 0)  # a thread of gloo's may abort an interpreter that ends",
    ]
    script.write_text("\n".join(lines))
    command = [*launch, script, "compare", *files, "--json", tmp_path / "ranks.json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "ranks.json").read_text()) == alone
    assert done.stdout.count("Divergence from the reference") == 1


# How it looks


class Page(HTMLParser):
    """Which tags were opened and closed, and what they ask for."""

    VOID = ("meta", "line", "polyline", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.asked, self.text = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.asked += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def page(tmp_path):
    paths = [FIXTURE / name for name in ("base.kld", "base-run", "candidate-run", "candidate.kld")]
    odd = tmp_path / "a <candidate> & a long long long name of it"
    shutil.copytree(FIXTURE / "candidate-run", odd)
    result = run(
        *paths,
        odd,
        "--floor",
        FIXTURE / "base-run",
        "--html",
        tmp_path / "page.html",
        "--markdown",
        tmp_path / "page.md",
    )
    assert result.exit_code == 0, result.output
    return tmp_path / "page.html"


def test_the_page_is_whole_and_asks_for_nothing(page):
    parser = Page()
    text = page.read_text(encoding="utf-8")
    parser.feed(text)
    assert parser.open == []
    assert parser.asked == []
    assert "url(" not in text
    assert "@import" not in text
    assert {"svg", "table", "figure", "style"} <= set(parser.seen)
    for words in ("Mean KLD from 0", "a <candidate> & a long", "Worst rows of", "one bucket", "prefers-color-scheme"):
        assert words in parser.text or words in text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MEASURE = """<!doctype html><html><body><iframe id="page" style="width:{width}px;height:900px;border:0"></iframe>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const small = [...page.querySelectorAll("td, p, svg text")].map(e => e.tagName == "text"
    ? 12 * e.ownerSVGElement.getBoundingClientRect().width / 400 : parseFloat(getComputedStyle(e).fontSize));
  document.title = JSON.stringify({{width: root.scrollWidth, smallest: Math.min(...small),
    rows: page.querySelectorAll("tr").length, curve: page.querySelector("polyline").getBBox().height}});
}};
frame.srcdoc = {page};
</script></body></html>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_a_browser(page, tmp_path, width):
    """No sideways scrolling of the page, nothing smaller than 10 pixels, and curves are drawn."""
    text = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/")
    (tmp_path / "frame.html").write_text(MEASURE.format(width=width, page=text), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1600,1000",
    ]
    command = [CHROMIUM, *options, "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'frame.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    assert found["width"] <= width
    assert found["smallest"] >= 10
    assert found["rows"] > 60
    assert found["curve"] > 20


def test_markdown_has_every_table(page):
    text = page.with_suffix(".md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles[:4] == [
        "Divergence from the reference",
        "Differences, paired by rows",
        "KLD in nats",
        "The text's own tokens",
    ]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_the_terminal_is_wide_enough(monkeypatch, files):
    from rich.console import Console

    monkeypatch.setattr(evaluate, "console", lambda outputs=(): Console(width=80))
    names = [files[1].with_name(f"candidate-{i}.safetensors") for i in range(6)]
    for name in names:
        shutil.copy(files[1], name)
    output = run(files[0], *names).output
    lines = output[: output.index("Worst rows")].splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in output.replace(" … ", "")
    means = [line.split()[2:] for line in lines if line.startswith("mean KLD")]
    assert len(means) > 1
    assert [mean for line in means for mean in line] == [means[0][0]] * 6


@pytest.mark.parametrize("width", [1, 10, 16, 30])
def test_no_terminal_is_too_narrow(monkeypatch, tmp_path, width):
    """Though nothing is told there; an empty column, too."""
    from rich.console import Console

    monkeypatch.setattr(evaluate, "console", lambda outputs=(): Console(width=width))
    paths = [tmp_path / f"a-name-of-some-length-{i}.safetensors" for i in range(3)]
    for path in paths:
        save_torch({"logits": torch.randn(3, 4, 20), "group": torch.arange(3)}, path)
    assert run(*paths).exit_code == 0


@pytest.mark.parametrize("name", ["candidate", "Meta-Llama-3.1-8B-Instruct-Q4_K_M", "模型模型模型模型模型模型模型模型"])
@pytest.mark.parametrize("width", [40, 60, 70])
def test_a_narrow_terminal_cuts_no_number(monkeypatch, files, pair, width, name):
    from rich.console import Console

    monkeypatch.setattr(evaluate, "console", lambda outputs=(): Console(width=width))
    held = {"logits": pair[1], "tokens": pair[2], "group": np.arange(WINDOWS) % 3}
    files = files[0], files[1].with_name(f"{name}.safetensors")
    save_file(held, files[1])
    output = run(*files, files[0]).output
    before = output[: output.index("KLD in nats")]
    assert max(map(cell_len, before.splitlines()[5:])) <= width
    assert name[:12] in before
    json_path = files[0].with_name("found.json")
    run(*files, files[0], "--json", json_path)
    for each in json.loads(json_path.read_text())["candidates"]:
        for number in (each["kl"]["mean"], each["kl"]["median"], *(each["kl"]["interval"] or ())):
            assert tables.number(number) in before
    table = output[output.index("KLD in nats") :]
    for label in ("mean KLD", "99.9 %", "reverse KLD", "maximum Δp", "0.25 … 0.5"):
        assert re.search(f"^{label} ", table, re.M)
    for each in json.loads(json_path.read_text())["candidates"]:
        for group, of in each["by_group"].items():
            assert re.search(rf"^{group} +{of['rows']} ", table, re.M)
            assert f"{100 * of['same_top']:.1f} %" in table
        assert tables.number(each["worst"][0]["kl"]) in table


def test_markdown_shows_tokens_as_they_are():
    row = {
        "row": 0,
        "kl": 1.0,
        "context": "<s> a|b\n`c`",
        "label_text": "\\",
        "reference_says": "*x* $y$ :z: https://a",
        "candidate_says": "\x1b[1m",
    }
    table = tables.worst({"name": "a\nb", "worst": [row]})
    assert table.rows[0][4] == "\ufffd[1m"
    candidates = [{"name": "a_b", "blocks": 1, "worst": [row]}]
    found = {"reference": {"path": "a&amp;b"}, "rows_read": 0, "vocab": 3, "blocks_are": "windows", "first_position": 0}
    text = tables.markdown(
        found | {"score": "all", "formula": "exact", "warnings": ["~~x~~"], "candidates": candidates}
    )
    assert "| 1.000000 | \\<s> a\\|b⏎\\`c\\` | \\\\ | \\*x\\* \\$y\\$ \\:z: https\\://a | \ufffd\\[1m |" in text
    assert "Worst rows of a\\_b" in text
    assert "Reference: a\\&amp;b" in text
    assert "\\~\\~x\\~\\~" in text


def test_rows_are_written(tmp_path, files, pair):
    rows = tmp_path / "rows.safetensors"
    assert run(*files, "--rows", rows).exit_code == 0
    assert floats_of(rows, "kl") == pytest.approx(kl_rows(*pair[:2]).reshape(-1), rel=1e-4, abs=1e-8)
    assert floats_of(rows, "position").tolist() == list(range(WINDOW - 1)) * WINDOWS
    held = load_numpy(rows)
    assert {*kullback.RowStatistics._fields, "window", "position", "block", "row"} <= {*held}
    assert run(*files, files[0], "--rows", rows).exit_code == 0
    assert floats_of(rows, "candidate.safetensors.kl").shape == (ROWS,)
