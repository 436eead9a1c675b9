"""Break the arithmetic one place at a time, and list what no test noticed: `make mutate`.

    python -m tests.mutate [file ...]     divergences, forms, state, ...: by default all of TARGETS

A mutant is one changed operator, sign, comparison, number or branch of a source file. Its tests run in a process of its
own; they have to fail. Exit status 1 where a mutant survives that EQUIVALENT does not explain.
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kullback"
SECONDS = 300  # a mutant that takes longer is found out, too

# What is broken, and the tests that are to notice: of each file those that `-k` selects
TARGETS = {
    "divergences": {
        "divergences": "",
        "documents": "",
        "truth_table": "probs or log_probs",
        "matrix": "float64 and probs-probs",
    },
    "forms": {"formula": "", "matrix": "float64 or float32", "truth_table": ""},
    "state": {"state": ""},
    "reductions": {"reductions": "", "compile": "one_compilation and divergence"},
    "autograd": {"pytorch": "", "truth_table": "", "logits_options": ""},
    "topk": {"topk": "", "linear": ""},
    "linear": {"linear": "", "compile": "trains and linear"},
    "backends/lowering": {"formula": ""},
    "backends/pytorch/__init__": {
        "matrix": "float64 or float32",
        "logits_options": "",
        "layouts": "",
        "pytorch": "",
        "truth_table": "",
    },
    "backends/pytorch/topk": {"topk": ""},
    "outcomes": {"topk": ""},
    "backends/cuda/logits/series": {"series": ""},
}


class Equivalent(NamedTuple):
    """Mutants that change no result, or only how long it takes: how what was, and became, begins."""

    file: str
    was: str
    became: str
    because: str


SIMPLER = "an expression that could be simpler"
HOW_MANY = "how many rows at once"
UNREAD = "what takes its place where nothing is read"
MORE_NONES = "autograd takes further Nones"
BOTH_SERVE = "between the two bounds either way is right to a few roundings"
EQUIVALENT = [
    Equivalent("divergences", "3.0", "6.0", "a looser bound: kernels try another mode first"),
    Equivalent("divergences", "select_near(p_over, 0.25", "select_near(p_over, 0.5", BOTH_SERVE),
    Equivalent("divergences", "select_near(q_over, 0.25", "select_near(q_over, 0.5", BOTH_SERVE),
    Equivalent("divergences", "select_near(over, 0.25", "select_near(over, 0.5", BOTH_SERVE),
    Equivalent("divergences", "select_near(x.ratio, 0.5, ratio_or_zero", "select_near(x.ratio, 1.0", BOTH_SERVE),
    Equivalent("divergences", "select_near(x.ratio, 0.5, x.p * (other", "select_near(x.ratio, 1.0", BOTH_SERVE),
    Equivalent("divergences", "select_near(x.ratio, 0.5, -(x.", "select_near(x.ratio, 1.0", BOTH_SERVE),
    Equivalent("divergences", "-1.0", "-2.0", "beyond -1 nothing lies but roundings"),
    Equivalent("forms", "(1e-30,", "(2e-30,", "a range that is narrower: guards more often"),
    Equivalent("forms", "(-69.0, 69.0)", "(-69.0, 138.0)", "e^x overflows with guards too"),
    Equivalent("forms", "-69.0", "-138.0", "logarithms are given: a mass that underflows is 0 with guards too"),
    Equivalent("forms", "select_near(ratio, 0.5, where(", "select_near(ratio, 1.0", BOTH_SERVE),
    Equivalent("state", "select_near(ratio, 0.5", "select_near(ratio, 1.0", BOTH_SERVE),
    Equivalent(
        "reductions", "Reduction(is_read, 1.0, True", "Reduction(is_read, 2.0, True", "of rows no scale is taken"
    ),
    Equivalent(
        "reductions", "Reduction(row_weight, 1.0, True", "Reduction(row_weight, 2.0, True", "of rows none is taken"
    ),
    Equivalent("autograd", "ctx.count - 2", "ctx.count + 2", MORE_NONES),
    Equivalent("linear", "ctx.count - GRADIENTS", "ctx.count + GRADIENTS", MORE_NONES),
    Equivalent("linear", "0.0 if scalars is None", "1.0 if scalars is None", "a task that is good for shapes"),
    Equivalent("linear", "vocab / ALIGNED", "vocab * ALIGNED", "rows of logits lie farther apart"),
    Equivalent("linear", "rows < TILE", "rows >= TILE", HOW_MANY),
    Equivalent("linear", "rows if rows < TILE", "rows // TILE", HOW_MANY),
    Equivalent("topk", "ctx.count - 1", "ctx.count + 1", MORE_NONES),
    Equivalent(
        "backends/lowering", "terms_p.pop(rest_q, 0.0)", "terms_p.pop(rest_q, 1.0)", "taken back where it is missing"
    ),
    Equivalent("backends/lowering", "_is_number(", "_is_number(", SIMPLER),
    Equivalent("backends/lowering", "0.0", "1.0", SIMPLER),
    Equivalent("backends/lowering", "-1.0", "-2.0", SIMPLER),
    Equivalent("backends/pytorch/__init__", "CPU_CHUNK if", "DEVICE_CHUNK if", HOW_MANY),
    Equivalent("backends/pytorch/__init__", "x.device.type == 'cpu'", "x.device.type != 'cpu'", HOW_MANY),
    Equivalent(
        "backends/pytorch/__init__", "work.verb == 'gradient'", "work.verb != 'gradient'", "states are found anew"
    ),
    Equivalent(
        "backends/pytorch/__init__", "weight * work.scale", "weight / work.scale", "the scale of a gradient is 1"
    ),
    Equivalent("backends/pytorch/__init__", "Piece(problem, x, y) if", "None if", HOW_MANY),
    Equivalent("backends/pytorch/__init__", "len(self.slices) == 1", "len(self.slices) != 1", HOW_MANY),
    Equivalent("backends/pytorch/__init__", "torch.where(skipped, 1.0", "torch.where(skipped, 2.0", UNREAD),
    Equivalent("backends/pytorch/topk", "torch.where(absent, 1.0", "torch.where(absent, 2.0", UNREAD),
    Equivalent("outcomes", "torch.where(p == 0, 1.0", "torch.where(p == 0, 2.0", UNREAD),
    Equivalent("backends/pytorch/topk", "torch.where(nothing, 0.0, known)", "torch.where(nothing, 1.0, known)", UNREAD),
    Equivalent(
        "backends/pytorch/topk", "torch.where(tail == -math.inf, 0.0", "torch.where(tail == -math.inf, 1.0", UNREAD
    ),
    Equivalent(
        "backends/pytorch/topk",
        "torch.where(top.isfinite(), top, 0.0)",
        "torch.where(top.isfinite(), top, 1.0)",
        UNREAD,
    ),
    Equivalent("backends/pytorch/topk", "CHUNK if", "CHUNK << 6 if", HOW_MANY),
    Equivalent("backends/pytorch/topk", "x.device.type == 'cpu'", "x.device.type != 'cpu'", HOW_MANY),
]

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


class Mutant(NamedTuple):
    file: str
    line: int
    before: str
    after: str
    text: str  # of the whole module


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the node's place."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.Constant(value) if type(value) is float and abs(value) < 1e3:
            yield ast.Constant(2 * value if value else 1.0)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Call(ast.Name("where"), [condition, x, y]):
            yield ast.Call(ast.Name("where"), [condition, y, x], [])
        case ast.Call(ast.Attribute(value=ast.Name("torch"), attr="where") as name, [condition, x, y]):
            yield ast.Call(name, [condition, y, x], [])


def mutants(file: str) -> list[Mutant]:
    path = SOURCE / f"{file}.py"
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = []
    for parent in ast.walk(tree):
        if isinstance(parent, ast.FunctionDef):
            parent.returns = None
            for argument in (*parent.args.args, *parent.args.kwonlyargs):
                argument.annotation = None
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if not isinstance(child, ast.expr) or (isinstance(parent, ast.AnnAssign) and field == "annotation"):
                    continue
                for changed in changes(child):
                    told = parent if isinstance(child, ast.Constant) and isinstance(parent, ast.expr) else None
                    before = ast.unparse(told or child)
                    replaced = [*children[:index], changed, *children[index + 1 :]]
                    setattr(parent, field, replaced if isinstance(value, list) else changed)
                    text = ast.unparse(ast.fix_missing_locations(tree))
                    found.append(Mutant(file, child.lineno, before, ast.unparse(told or changed), text))
                    setattr(parent, field, value)
    return found


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from another text."""

    def __init__(self, mutant: Mutant) -> None:
        parts = mutant.file.split("/")
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(["kullback", *parts[: -1 if self.is_package else None]])
        self.path, self.text = str(SOURCE / f"{mutant.file}.py"), mutant.text

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        places = [str(Path(self.path).parent)] if self.is_package else None
        return importlib.util.spec_from_file_location(name, self.path, loader=self, submodule_search_locations=places)

    def get_filename(self, name):
        return self.path

    def get_data(self, path):
        return self.text.encode()

    def path_stats(self, path):
        raise OSError("never from a cache")

    def set_data(self, path, data):
        pass


class InTorch:
    """Of the tests that run on each backend, those on torch."""

    @staticmethod
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        parameters = ((item, getattr(item, "callspec", None)) for item in items)
        items[:] = [item for item, spec in parameters if spec is None or spec.params.get("backend", "torch") == "torch"]


def is_noticed(mutant: Mutant) -> bool:
    """Run the tests on it, in a process that has nothing of ours imported yet."""
    sys.meta_path.insert(0, Mutated(mutant))
    torch.set_num_threads(1)
    for name, selection in TARGETS[mutant.file].items():
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(ROOT / "tests" / f"test_{name}.py")]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = pytest.main([*options, *(["-k", selection] if selection else [])], plugins=[InTorch()])
        if status != pytest.ExitCode.OK:
            return True
    return False


def run(todo: list[Mutant], workers: int) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant and whether it was noticed."""
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(todo))
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            process = os.fork()
            if process == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    status = 1 if is_noticed(mutant) else 0
                os._exit(status)
            running[process] = mutant, time.monotonic()
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            mutant, _ = running.pop(process)
            yield mutant, status != 0
        else:
            for slow, (_, begun) in running.items():
                if time.monotonic() - begun > SECONDS:
                    os.kill(slow, 9)
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at once")
    arguments = parser.parse_args()
    if unknown := [file for file in arguments.files if file not in TARGETS]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(TARGETS)}")
    files = arguments.files or list(TARGETS)
    unbroken = [Mutant(file, 0, "", "", (SOURCE / f"{file}.py").read_text(encoding="utf-8")) for file in files]
    if failing := [mutant.file for mutant, noticed in run(unbroken, arguments.workers) if noticed]:
        sys.exit(f"their tests fail before anything is broken: {', '.join(failing)}")
    todo = [mutant for file in files for mutant in mutants(file)]
    survivors, explained = [], []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("mutants", total=len(todo))
        for mutant, noticed in run(todo, arguments.workers):
            reasons = [known for known in EQUIVALENT if explains(known, mutant)]
            if not noticed:
                (explained if reasons else survivors).append(mutant)
            progress.advance(task)
    table = Table("where", "was", "survived as")
    for mutant in sorted(survivors):
        table.add_row(f"{mutant.file}.py:{mutant.line}", mutant.before, mutant.after)
    if survivors:
        Console(width=160).print(table)
    stale = [e for e in EQUIVALENT if e.file in {m.file for m in todo} and not any(explains(e, m) for m in explained)]
    for known in stale:
        print(f"no mutant survives any more as EQUIVALENT says: {known.file}, {known.was!r} -> {known.became!r}")
    print(f"{len(todo)} mutants, {len(survivors)} survived, {len(explained)} known to change no result")
    sys.exit(bool(survivors or stale))


def explains(known: Equivalent, mutant: Mutant) -> bool:
    return mutant.file == known.file and mutant.before.startswith(known.was) and mutant.after.startswith(known.became)


if __name__ == "__main__":
    main()
