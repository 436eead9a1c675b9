"""Rows of a language model: of a file, and made."""

import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

from kullback.cli import rows
from kullback.cli.commands import app
from tests import oracle

safetensors = pytest.importorskip("safetensors.torch")
TOKENS, HIDDEN, VOCAB = 12, 64, 50
MODEL_VOCABS = (49152, 128256, 151936)
# Medians of kl over the rows of the file, as `make real` printed them; docs/performance.md has the table
MEDIANS = {
    "bits8": 9.2e-4,
    "bits5": 0.066,
    "bits4": 0.27,
    "bits3": 2.3,
    "pruned": 0.44,
    "distilled": 0.29,
    "noise5": 0.018,
    "noise1": 7.1e-4,
}


@pytest.fixture
def file(tmp_path):
    draw = torch.Generator().manual_seed(1)
    tensors = {
        "teacher": torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16(),
        "head": torch.randint(-127, 128, (VOCAB, HIDDEN), generator=draw, dtype=torch.int8),
        "head_scale": torch.rand(VOCAB, generator=draw) / 127,
        "cut": torch.randint(-127, 128, (TOKENS, HIDDEN), generator=draw, dtype=torch.int8),
        "cut_scale": torch.rand(TOKENS, generator=draw) / 127,
        "tokens": torch.zeros(3, 5, dtype=torch.int32),
    }
    path = tmp_path / rows.FILE
    safetensors.save_file(tensors, path, {"about": json.dumps({"perplexity": {"teacher": 2.0, "cut": 3.0}})})
    return path, tensors


def test_logits_are_products_of_what_is_stored(file):
    path, t = file
    x, y = rows.load(str(path), "cut", TOKENS, torch.float32, "cpu")
    head = t["head"].double() * t["head_scale"][:, None]
    teacher = t["teacher"].double()
    cut = teacher + t["cut"].double() * t["cut_scale"][:, None]
    torch.testing.assert_close(y.double(), teacher @ head.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.double(), cut @ head.T, rtol=1e-5, atol=1e-5)


def test_a_folder_is_its_file_and_students_are_those_of_the_file_and_of_loading(file):
    path, _ = file
    assert rows.students(str(path.parent)) == ["cut", "noise5", "noise1", "identical"]
    assert rows.vocabulary(str(path)) == VOCAB


def test_rows_repeat_or_are_taken_evenly(file, monkeypatch):
    path, _ = file
    monkeypatch.setattr(rows, "STEP", 5)
    x, y = rows.load(str(path), "cut", TOKENS, torch.bfloat16, "cpu")
    for count in (1, 4, 2 * TOKENS, 2 * TOKENS + 5):
        taken = torch.arange(count) * 3 if count == 4 else torch.arange(count) % TOKENS
        for ours, whole in zip(rows.load(str(path), "cut", count, torch.bfloat16, "cpu"), (x, y), strict=True):
            assert ours.dtype == torch.bfloat16
            assert torch.equal(ours, whole[taken])


def test_noise_has_its_size_and_identical_is_identical(file):
    _, t = file
    teacher = rows.hidden_states(t, "teacher")
    for name, size in (("noise5", 0.05), ("noise1", 0.01)):
        found = (rows.hidden_states(t, name) - teacher).square().mean(-1) / teacher.square().mean(-1)
        assert found.mean().sqrt().item() == pytest.approx(size, rel=5 / math.sqrt(2 * TOKENS * HIDDEN))
    assert torch.equal(rows.hidden_states(t, "identical"), teacher)


def test_what_there_is_not_is_named(file, tmp_path):
    path, _ = file
    with pytest.raises(ValueError, match="'dog' is not one of cut, noise5, noise1, identical"):
        rows.load(str(path), "dog", 1, torch.float32, "cpu")
    with pytest.raises(FileNotFoundError, match="`make real`"):
        rows.find(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="'dog' is not one of bits8"):
        rows.made("dog", 1, 100, torch.float32, "cpu")


def test_describe_tabulates_every_student(file):
    told = rows.describe(file[0], TOKENS)
    assert re.search(r"\| cut \| 3.00 \| [\d.]+ \|", told)
    assert "| identical |  | 0 | 0 / 0 / 0 / 0 / 0 | 100% |" in told


@pytest.mark.parametrize("vocab", MODEL_VOCABS)
def test_made_rows_have_the_real_ones_statistics(vocab):
    _, y = rows.made("bits5", 40, vocab, torch.float32, "cpu")
    top, token = y.double().softmax(-1).max(-1)
    wanted = {0.05: 0.11, 0.25: 0.27, 0.5: 0.49, 0.75: 0.77, 0.9: 0.96}  # of other text, measured before
    for at, probability in wanted.items():
        assert top.quantile(at).item() == pytest.approx(probability, abs=0.06)
    assert y.std(-1).mean().item() == pytest.approx(3.2, abs=0.2)
    assert token.unique().numel() > 30  # tokens of any place
    # 97 % of all tokens share less than a hundredth of the mass, and 5 % of rows have less than that but for one
    rest = y.double().softmax(-1).sort(-1).values[:, : int(0.97 * vocab)].sum(-1)
    assert 1e-5 < rest.median().item() < 1e-2
    entropy = torch.distributions.Categorical(logits=y.double()).entropy().mean().item()
    assert entropy == pytest.approx(2.6, abs=0.5)


@pytest.mark.parametrize("student", MEDIANS)
def test_made_students_are_as_far_as_real_ones(student):
    x, y = rows.made(student, 128, 8192, torch.float32, "cpu")
    kl = oracle.divergence(x, y, "kl")
    assert kl.median().item() == pytest.approx(MEDIANS[student], rel=0.3)


def test_made_noise_is_larger_in_the_tail():
    x, y = rows.made("bits4", 64, 5000, torch.float32, "cpu")
    noise = (x - y).gather(-1, y.argsort(-1, descending=True))
    first, beyond = noise[:, :64].std().item(), noise[:, 64:].std().item()
    assert beyond / first == pytest.approx(1.25, abs=0.07)  # six standard errors of 4096 draws


def test_made_rows_are_seeded_and_identical_ones_equal():
    first, second = (rows.made("noise5", 3, 1000, torch.bfloat16, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(*rows.made("identical", 3, 1000, torch.float32, "cpu"))


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--repeats", "1", *arguments])
    return result.exit_code, re.sub(r"\s+│\s*\n│\s+", " ", result.output)


def test_bench_times_each_student_and_then_random_rows(file, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda loss: loss)  # it takes half a minute and is not what is tested
    path, out = file[0], tmp_path / "out.json"
    code, output = run("--rows", str(path), "--student", "cut", "--shape", "8x50", "--json", str(out))
    assert code == 0, output
    assert "cut of" in output
    data = json.loads(out.read_text())
    assert [r["case"].get("student", "random") for r in data] == ["cut", "random"]
    assert data[0]["rows_made"]["perplexity"] == {"teacher": 2.0, "cut": 3.0}
    assert all(e["error"] < 1e-4 for r in data for e in r["results"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "/no/such"], "make real"),
        (["--rows", "FILE", "--shape", "8x51"], "have 50 tokens, not 51"),
        (["--rows", "FILE", "--student", "dog"], "'dog' is not one of cut"),
        (["--rows", "made", "--form", "probs"], "are logits; got form 'probs'"),
        (["--rows", "made", "--plot", "x.png"], "it draws one case"),
        (["--student", "cut"], "random rows have no student"),
    ],
)
def test_bench_refuses_before_any_work(file, arguments, words):
    code, output = run(*(str(file[0]) if a == "FILE" else a for a in arguments))
    assert code == 2
    assert words in output
