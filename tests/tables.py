"""Tables in documents: `make tables` writes them from DIVERGENCES and results, a test holds the documents to them."""

import json
import re
import runpy
from pathlib import Path

from kullback.divergences import DIVERGENCES

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- kinds: written by `make tables` -->", "<!-- end of kinds -->"


def parameter(known):
    return "".join(f"{name}={default}" for name, default in known.defaults.items())


def markdown():
    """A row for each kind."""
    lines = ["| kind | definition | parameter |", "|---|---|---|"]
    for name, known in DIVERGENCES.items():
        own = f"`{parameter(known)}`" if known.parameter else ""
        lines.append(f"| `{name}` | {known.definition.replace('|', '&#124;')} | {own} |")
    return "\n".join(lines)


def markdown_with_domains():
    lines = ["| kind | definition | parameter | default | admitted |", "|---|---|---|---|---|"]
    for name, known in DIVERGENCES.items():
        own = known.parameter
        rest = "| | |" if own is None else f"`{own.name}` | {own.default} | {own.domain} |"
        lines.append(f"| [{name}](#{name}) | {known.definition.replace('|', '&#124;')} | {rest}")
    return "\n".join(lines)


def docstring():
    """As reStructuredText has it, indented as a docstring."""
    rows = [("kind", "definition, p = target, q = input", "parameter")]
    rows += [(name, known.definition, parameter(known)) for name, known in DIVERGENCES.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(f"    {line}" for line in (rule, lines[0], rule, *lines[1:], rule))


def regimes():
    """The errors of every backend by regime, of the machines that have it; the textbook's on a CPU."""
    results = []
    for machine in ("cpu", "h200"):
        report = json.loads((ROOT / f"benchmarks/results/{machine}/regimes.json").read_text(encoding="utf-8"))
        known = {r["of"] for r in results}
        results += [r for r in report["results"] if r["of"] not in known]
    return runpy.run_path(str(ROOT / "benchmarks/regimes.py"))["tables"](results)


def between(begin, end, table):
    pattern = re.compile(f"({re.escape(begin)}\n).*?(\n{re.escape(end)})", re.S)
    return lambda text: pattern.subn(lambda match: match[1] + table() + match[2], text)


RULE = re.compile(r"^    =+  =+  =+\n    kind .*?\n    =+  =+  =+\n.*?\n    =+  =+  =+$", re.S | re.M)
KINDS = {
    "README.md": between(BEGIN, END, markdown),
    "docs/mathematics.md": between(BEGIN, END, markdown_with_domains),
    "src/kullback/functional.py": lambda text: RULE.subn(lambda match: docstring(), text),
}
REGIMES = between("<!-- regimes: written by `make tables` -->", "<!-- end of regimes -->", regimes)
FILES = {**KINDS, "docs/numerics.md": REGIMES}


def rendered(name):
    """The file as it should be."""
    text, count = FILES[name]((ROOT / name).read_text(encoding="utf-8"))
    assert count == 1, f"{name} has {count} such tables"
    return text


if __name__ == "__main__":
    for name in FILES:
        (ROOT / name).write_text(rendered(name), encoding="utf-8")
