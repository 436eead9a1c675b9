"""Symbols, programs and what is printed of them."""

import math
from pathlib import Path

import pytest
import torch

from kullback.divergences import DIVERGENCES
from kullback.formula import TENSOR, Program, affine, exp, log, variable, where
from kullback.printer import print_functor
from kullback.rows import Problem
from tests import oracle

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


@pytest.mark.parametrize("kind", ["jensen_shannon", "skew_kl", "total_variation"])
def test_what_is_common_to_a_row_and_the_rest_make_the_whole(kind, generator):
    """Of elements that are apart."""
    problem = Problem(kind, "logits", "logits")
    names = ("target_top", "input_top", "target_inverse_total", "input_inverse_total", "target_scale", "input_scale")
    values = dict(zip(names, (0.3, -0.2, 0.25, 0.4, 1.0, 1.0), strict=True))
    values |= {"shift_high": 0.5 + math.log(0.4 / 0.25), "shift_low": 0.0, **oracle.PARAMETERS[kind]}
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    x, y = torch.randn(2, 1000, dtype=torch.float64, generator=generator)
    far = TENSOR | {"near": lambda x, bound, close, apart: apart}
    for output in ("slope_p", "slope_q"):
        whole = problem.formula.element[output]
        program = Program({"whole": whole, **affine(whole)._asdict()})
        found = {k: torch.as_tensor(v, dtype=x.dtype) for k, v in program.run({"x": x, "y": y, **values}, far).items()}
        assert found["factor"].dim() == found["offset"].dim() == 0
        torch.testing.assert_close(found["factor"] * found["rest"] + found["offset"], found["whole"])


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
