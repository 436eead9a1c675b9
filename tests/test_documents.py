"""What documents say of kinds and results is what code and results say, in short sentences."""

import json
import re
import runpy
import tomllib
from typing import get_args

import pytest

from kullback.divergences import DIVERGENCES, Kind
from tests import tables

LONGEST = 30  # words
PAGES = ("README.md", "docs/index.md", "docs/faq.md", "docs/row.md", "docs/compare.md", "docs/integrations.md")
PROSE = [tables.ROOT / name for name in PAGES]
PROSE += sorted((tables.ROOT / "docs/guides").glob("*.md"))


@pytest.mark.parametrize("name", tables.FILES)
def test_tables_of_kinds(name):
    """After a change of DIVERGENCES: make tables."""
    assert tables.rendered(name) == (tables.ROOT / name).read_text(encoding="utf-8")


def test_editors_know_every_kind():
    assert get_args(Kind) == tuple(DIVERGENCES)


def test_the_picture_shows_the_results():
    """After new results: make pictures."""
    picture = runpy.run_path(str(tables.ROOT / "benchmarks/picture.py"))
    shown = re.findall(r"<!-- (.*?) -->", picture["PICTURE"].read_text(encoding="utf-8"))
    shown = [text.removesuffix(" →") for text in shown]
    results = json.loads(picture["RESULTS"].read_text(encoding="utf-8"))["results"]
    results = [r for r in results if r["case"]["source"] == "real"]
    assert len(results) == 6
    for result in results:
        found, floor = picture["times"](result)
        assert any(text.startswith(f"floor {floor:.1f}:") for text in shown)
        for name, time in found.items():
            shown.remove(f"{picture['NAMES'][name]} {time:.1f}")


def test_every_example_runs():
    """Of every page; docs/transformers.md by `make test-integrations`."""
    settings = tomllib.loads((tables.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    options = settings["tool"]["pytest"]["ini_options"]["addopts"]
    globs = [option.removeprefix("--doctest-glob=") for option in options if option.startswith("--doctest-glob=")]
    pages = {tables.ROOT / "README.md", *(tables.ROOT / "docs").rglob("*.md")}
    run = {path for glob in globs for path in tables.ROOT.glob(glob)} | {tables.ROOT / "docs/transformers.md"}
    for path in pages:
        fences = re.findall(r"^```(\w+)$", path.read_text(encoding="utf-8"), re.M)
        assert set(fences) <= {"pycon"}, path
        assert not fences or path in run, path


def sentences(text):
    """Of Markdown: without code, tables, headings, pictures and addresses."""
    text = re.sub(r"^```.*?^```", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.S)
    text = re.sub(r"^(#|\||    ).*$", "\n", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from (s for s in re.split(r"(?<=[.!?])[*)]*\s+", " ".join(paragraph.split())) if s)


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.stem)
def test_sentences_are_short(path):
    long = [s for s in sentences(path.read_text(encoding="utf-8")) if len(s.split()) > LONGEST]
    assert not long


def test_sentences_are_told_apart():
    text = "# A heading\n\nOne two\nthree. Four [five six](a.md).\n\n- seven\n- eight\n\n| nine |\n```\nten\n```\n"
    assert list(sentences(text)) == ["One two three.", "Four five six.", "seven", "eight"]
