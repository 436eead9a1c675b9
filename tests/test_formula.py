"""Symbols, programs and what is printed of them."""

from pathlib import Path

import pytest
import torch

from kullback.divergences import DIVERGENCES
from kullback.formula import TENSOR, Program, exp, log, variable, where
from kullback.printer import print_functor
from kullback.rows import Problem

GOLDEN = Path(__file__).parent / "golden"


def test_equal_expressions_are_one():
    x, y = variable("x"), variable("y")
    assert x * y + 1.0 is x * y + 1.0
    assert exp(x) is not exp(y)


def test_a_program_computes_what_its_outputs_need_and_no_more():
    x = variable("x")
    program = Program({"out": exp(x) + exp(x), "constant": 2.0})
    log(x)
    assert [step.op for step in program.steps] == ["exp", "add"]
    result = program.run({"x": torch.tensor(0.0)})
    assert result == {"out": torch.tensor(2.0), "constant": 2.0}


def test_a_program_forgets_what_it_no_longer_needs():
    x = variable("x")
    value = x
    for _ in range(5):
        value = exp(value) * 0.5
    steps = Program({"out": value}).steps
    assert sum(len(step.last_use) for step in steps) == len(steps) - 1


def test_the_same_formula_on_symbols_and_tensors():
    def formula(x):
        return where(x < 1.0, log(1.0 + x) / 2.0, -x) - 3.0

    x = torch.linspace(0, 2, 9)
    program = Program({"out": formula(variable("x"))})
    assert torch.equal(program.run({"x": x})["out"], formula(x))


def test_the_vocabulary_is_closed():
    for kind in DIVERGENCES:
        for form in ("probs", "log_probs", "logits"):
            program = Problem(kind, form, form).program("term", "input", "target")
            assert {step.op for step in program.steps} <= TENSOR.keys()


@pytest.mark.parametrize(("kind", "form"), [("kl", "probs"), ("kl", "logits"), ("jensen_shannon", "log_probs")])
def test_printed_functors(kind, form):
    """What is compiled, for review. After an intended change: kullback show KIND --form FORM, without its title."""
    golden = GOLDEN / f"{kind}_{form}.h"
    assert print_functor(Problem(kind, form, form)) == golden.read_text()
