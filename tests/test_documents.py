"""What documents say of kinds and results is what code and results say, in short sentences."""

import ast
import inspect
import json
import re
import runpy
import tomllib
from typing import get_args

import pytest

import kullback
from kullback import choices
from kullback.divergences import DIVERGENCES, Kind
from kullback.forms import FORMS
from tests import tables

LONGEST = 30  # words
PROSE = [tables.ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PROSE += sorted((tables.ROOT / "docs").rglob("*.md"))
# A measurement: a number and its unit
FIGURE = re.compile(r"(?<!\w)\d[\d.,]*\s?(?:ms|µs|us|s|seconds|minutes|[KMG]i?B|kB|TB/s|%|times)(?!\w)")


@pytest.mark.parametrize("name", tables.FILES)
def test_tables_of_kinds(name):
    """After a change of DIVERGENCES: make tables."""
    assert tables.rendered(name) == (tables.ROOT / name).read_text(encoding="utf-8")


def test_editors_know_every_choice():
    assert get_args(Kind) == tuple(DIVERGENCES)
    assert get_args(choices.Form) == tuple(FORMS)


@pytest.mark.parametrize("function", [getattr(kullback, name) for name in kullback.__all__], ids=kullback.__all__)
def test_editors_complete_choices(function):
    """A literal is in the annotation of every kind, form, reduction and tail."""
    hints = inspect.signature(function).parameters.values()
    named = [each for each in hints if each.name.rpartition("_")[2] in ("kind", "form", "reduction", "tail")]
    known = ("Kind", "Form", "Reduction", "Tail", "ElementwiseForm", "ElementwiseReduction")
    assert all(each.annotation.partition(" |")[0] in known for each in named)


def test_the_picture_shows_the_results():
    """After new results: make pictures."""
    picture = runpy.run_path(str(tables.ROOT / "benchmarks/picture.py"))
    shown = re.findall(r"<!-- (.*?) -->", picture["PICTURE"].read_text(encoding="utf-8"))
    shown = [text.removesuffix(picture["BEYOND"]) for text in shown]
    results = json.loads(picture["RESULTS"].read_text(encoding="utf-8"))["results"]
    results = [result for student in picture["STUDENTS"] for result in picture["chosen"](results, student)]
    assert len(results) == 6
    for result in results:
        found, floor = picture["times"](result)
        assert any(text.startswith(f"floor {floor:.1f}:") for text in shown)
        for name, time in found.items():
            shown.remove(f"{picture['NAMES'][name]} {time:.1f}")


def test_the_curve_shows_the_results():
    """After a new run of examples/smollm2.py: make pictures."""
    picture = runpy.run_path(str(tables.ROOT / "benchmarks/picture.py"))
    shown = re.findall(r"<!-- (.*?) -->", picture["CURVE_PICTURE"].read_text(encoding="utf-8"))
    curve = json.loads(picture["CURVE"].read_text(encoding="utf-8"))["curve"]
    assert f"teacher: {curve[0]['teacher_perplexity']:.1f}" in shown
    assert all(f"{point['perplexity']:.1f}" in shown for point in (curve[0], curve[-1]))


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
    text = re.sub(r"^(#.*|\|.*\||    .*)$", "\n", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from (s for s in re.split(r"(?<=[.!?])[*)]*\s+", " ".join(paragraph.split())) if s)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    """In files that are no part of the site; of its pages `make docs` sees to that."""
    for link in re.findall(r"\]\(([^)]*)\)", (tables.ROOT / name).read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        assert link.startswith("https://") or (tables.ROOT / path).exists(), link
        assert link.startswith("https://") or not anchor, link


@pytest.mark.parametrize("path", sorted((tables.ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_the_site_links_to_itself(path):
    """Of files outside of `docs` it has none."""
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not link.startswith(("https://", "http://")):
            found = (path.parent / link).resolve()
            assert found.exists(), link
            assert found.is_relative_to(tables.ROOT / "docs"), link


@pytest.mark.parametrize("name", kullback.__all__)
def test_arguments_that_are_described_are_accepted(name):
    """The site reads one of each line."""
    public = getattr(kullback, name)
    found = re.search(r"\n *Args:\n(.*?)(?:\n\n|$)", inspect.getdoc(public) or "", re.DOTALL)
    if found is None:
        return
    names = re.findall(r"^ {4}(\S.*?):(?:\s|$)", found[1], re.MULTILINE)
    known = [p.name for p in inspect.signature(public).parameters.values()]
    assert names
    assert [given.lstrip("*") for given in names if given.lstrip("*") not in known] == []


def test_the_readme_is_short():
    """But for a line for each kind."""
    lines = (tables.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) - len(DIVERGENCES) <= 109


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CITATION.cff"])
def test_kinds_are_counted_right(page):
    words = {10: "ten", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen"}
    more = words.get(len(DIVERGENCES) - 1, "many")
    text = (tables.ROOT / page).read_text(encoding="utf-8")
    assert f"KL and {more} more" in text
    assert page != "README.md" or f"| kinds | {len(DIVERGENCES)} |" in text


def test_no_time_is_typed():
    """What is measured is rendered from results: of docs/performance.md nothing else has a figure."""
    text = (tables.ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rendered = r"<!-- (.*?): written by `make tables` -->.*?<!-- end of \1 -->"
    names = re.findall(rendered, text, re.S)
    assert len(names) == len(set(names)) == len(tables.PERFORMANCE)
    typed = [s for s in sentences(re.sub(rendered, "", text, flags=re.S)) if FIGURE.search(s)]
    assert not typed


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(tables.ROOT)))
def test_sentences_are_short(path):
    long = [s for s in sentences(path.read_text(encoding="utf-8")) if len(s.split()) > LONGEST]
    assert not long


MODULES = sorted((tables.ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(tables.ROOT / "src/kullback")))
def test_docstrings_are_short_and_stand_alone(path):
    """A sentence has as many words as on a page, and none begins with what another said, which may have moved."""
    of_code = ast.FunctionDef, ast.ClassDef, ast.Module
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, of_code)]
    for text in filter(None, map(ast.get_docstring, nodes)):
        prose = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(">>>"))
        apart = re.sub(r"^(?= {4}\S)", "\n", prose, flags=re.MULTILINE)  # what is said of each argument
        assert [s for s in sentences(apart) if len(s.split()) > LONGEST] == []
        assert not text.startswith("The same")


def test_warnings_are_told_of_who_called():
    """By notices.notice, which alone knows the line."""
    found = [path.name for path in MODULES if "warnings.warn(" in path.read_text(encoding="utf-8")]
    assert found == ["notices.py"]


# What reviews found that no reader knows: the field's word is beside it
PRIVATE = {
    "survey": "statistics",
    "tame": "in range",
    "mail(?:box)?": "slot of an exchange",
    "letters": "messages",
    "slab": "slice",
    "foretold": "predicted",
    "lean": "coupling",
    "affinity": "Chernoff coefficient",
}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(tables.ROOT)))
def test_words_are_the_fields(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(rf"\b(?:{'|'.join(PRIVATE)})s?\b", text, re.I)


def test_sentences_are_told_apart():
    text = "# A heading\n\nOne two\nthree. Four [five six](a.md).\n\n- seven\n- eight\n\n| nine |\n```\nten\n```\n"
    assert list(sentences(text)) == ["One two three.", "Four five six.", "seven", "eight"]
