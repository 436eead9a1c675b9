"""Symbols, programs, what kernels make of expressions, and what is printed of them."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from kullback.backends.lowering import _terms, lowered, quotient, slopes_of
from kullback.backends.printer import print_functor
from kullback.divergences import DIVERGENCES, Divergence, Element
from kullback.forms import FORMS, softmax_of
from kullback.formula import (
    TENSOR,
    Program,
    _mass_times_exp,
    exp,
    geometric_mean,
    half_sign,
    log,
    log_geometric_mean,
    variable,
    where,
)
from kullback.problem import Problem, Side, formula, moments_of
from tests import kinds, oracle
from tests.kinds import KINDS

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
    def expression(x):
        return where(x < 1.0, log(1.0 + x) / 2.0, -x) - 3.0

    x = torch.linspace(0, 2, 9)
    program = Program({"out": expression(variable("x"))})
    assert torch.equal(program.run({"x": x})["out"], expression(x))


def test_the_vocabulary_is_closed():
    for kind in KINDS:
        for form in oracle.FORMS:
            program = Problem(kind, Side(form), Side(form)).program("term", "input", "target")
            assert {step.op for step in program.steps} <= TENSOR.keys()


ROW = {
    "target_inv_temperature": 1.0,
    "input_inv_temperature": 0.7,
    "target_max": 0.3,
    "input_max": -0.2,
    "target_inv_sum_exp": 0.25,
    "input_inv_sum_exp": 0.4,
    "target_log_sum_exp": -math.log(0.25),
    "input_log_sum_exp": -math.log(0.4),
}
ROW["log_z_diff_high"] = (
    ROW["target_max"] * ROW["target_inv_temperature"]
    - ROW["input_max"] * ROW["input_inv_temperature"]
    - math.log(ROW["target_inv_sum_exp"] / ROW["input_inv_sum_exp"])
)
ROW["log_z_diff_low"] = 0.0
ROW["tilted_lse"] = -0.7


def logit_power(x, maximum, inv_temperature, inv_sum_exp, exponent):
    return torch.exp((x - maximum) * inv_temperature * exponent) * inv_sum_exp**exponent


def log_power_of_logits(y, y_max, y_scale, y_inv_sum_exp, x, x_max, x_scale, x_inv_sum_exp, ratio, a):
    return torch.log(
        logit_power(y, y_max, y_scale, y_inv_sum_exp, a) * logit_power(x, x_max, x_scale, x_inv_sum_exp, 1 - a)
    )


# What is not in the vocabulary: kernels have these, and they mean what the formula says.
LOWERED = TENSOR | {
    "logit_ratio": lambda y, _, y_scale, x, __, x_scale, *rest: TENSOR["logit_difference"](
        y, y_scale, x, x_scale, *rest
    ),
    "logit_sqrt": lambda *mass: logit_power(*mass, 0.5),
    "logit_log_geometric_mean": log_power_of_logits,
    "logit_geometric_mean": lambda *args: torch.exp(log_power_of_logits(*args)),
    "logit_tilted_mass": lambda *args: torch.exp(log_power_of_logits(*args[:-1]) - args[-1]),
    "mass_times_exp": _mass_times_exp,
    "logit_log_fraction": lambda *args: args[-1],
    "logit_log2_fraction": lambda *args: args[-1] / math.log(2),
    "step": lambda x: (x > 0).double(),
}


def values(generator, **others):
    x, y = torch.randn(2, 1000, dtype=torch.float64, generator=generator)
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in {**ROW, **others}.items()}
    return {"x": x, "y": y, **numbers}


@pytest.mark.parametrize("form", FORMS)
def test_a_log_mass_is_the_logarithm_of_the_mass(form, generator):
    given = values(generator)
    x = given["x"].abs() if form == "probs" else given["x"]
    softmax = softmax_of("input")
    made = Program(
        {"mass": FORMS[form].mass(variable("x"), softmax), "log": FORMS[form].log_mass(variable("x"), softmax)}
    )
    found = made.run({**given, "x": x})
    torch.testing.assert_close(found["mass"].log(), found["log"])


@pytest.mark.parametrize(("form", "target_form"), [*itertools.product(FORMS, repeat=2)])
@pytest.mark.parametrize("kind", KINDS)
def test_lowering_changes_no_value(kind, form, target_form, generator):
    given = values(generator, input_grad_sum=0.1, target_grad_sum=-0.2, **kinds.parameters(kind))
    for name, held in (("x", form), ("y", target_form)):
        given[name] = given[name].abs() if held == "probs" else given[name]
    names = ("term", "d_log_p", "d_log_q", "input", "target")
    element = formula(kind, form, target_form).element
    made = Program({name: lowered(kind, form, target_form)[name] for name in names})
    ours = made.run(given, LOWERED)
    expected = Program({name: element[name] for name in names}).run(given)
    operations = {step.op for step in made.steps}
    if "logits" not in (form, target_form):
        assert not any(name.startswith("logit") for name in operations)
    elif form == target_form:  # what kernels have powers and exponents for
        assert not operations & {"sqrt", "geometric_mean", "log_fraction"}
    for name in names:
        torch.testing.assert_close(ours[name], expected[name])


WITH_SLOPES = [kind for kind in KINDS if slopes_of(kind) is not None]


def test_which_kinds_have_slopes():
    """A kind whose derivatives have their masses as factors; others are summed by their elements."""
    assert {"jensen_shannon", "skew_kl", "total_variation"} <= {*WITH_SLOPES}
    assert "chi2" not in WITH_SLOPES


@pytest.mark.parametrize("kind", WITH_SLOPES)
def test_slopes_times_masses_are_the_partials(kind, generator):
    """Of a row that is far, where both sides of `select_near` would serve."""
    given = values(generator, **kinds.parameters(kind))
    element, slopes = lowered(kind, "logits", "logits"), slopes_of(kind)
    far = LOWERED | {"select_near": lambda x, bound, near, far: far}
    program = Program({**{name: element[name] for name in ("p", "q", "d_log_p", "d_log_q")}, **slopes._asdict()})
    found = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in program.run(given, far).items()}
    for name in ("factor_p", "offset_p", "factor_q", "offset_q", "coupling"):
        assert found[name].dim() == 0, "the same for all elements"
    slope_q = found["factor_q"] * found["rest_q"] + found["offset_q"]
    slope_p = found["factor_p"] * (found["rest_p"] + found["coupling"] * found["rest_q"]) + found["offset_p"]
    torch.testing.assert_close(slope_q * found["q"], found["d_log_q"], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(slope_p * found["p"], found["d_log_p"], rtol=1e-10, atol=1e-13)


def several_terms(x):
    """Slopes that are sums of many terms."""
    r, one = x.ratio, exp(-(x.ratio * x.ratio))
    return Element(x.p * r, x.p * (2.0 * r + 3.0 * one - r * r + 0.5), x.q * (r - 2.0 * one + 1.5))


def coupled_terms(x):
    """One that is a multiple of the other's, and more."""
    r, one = x.ratio, exp(-(x.ratio * x.ratio))
    return Element(x.p * r, x.p * (2.0 * r - 3.0 * one + 0.5), x.q * (1.5 - 4.0 * r))


@pytest.mark.parametrize("element", [several_terms, coupled_terms], ids=lambda f: f.__name__)
def test_slopes_of_other_kinds(element, monkeypatch, generator):
    monkeypatch.setitem(DIVERGENCES, element.__name__, Divergence(element))
    test_slopes_times_masses_are_the_partials(element.__name__, generator)
    slopes = slopes_of(element.__name__)
    assert (slopes.coupling == 0.0) == (element is several_terms)


def test_terms_add_up():
    """Σ factor · term + offset is what was taken apart; what all elements of a row share is in factors and offset."""
    x, y, a = variable("x"), variable("y"), variable("input_max")
    one, other = exp(x), exp(y)
    parts = (
        a,
        -a,
        one,
        -one,
        one * a,
        a * one,
        a * (one - other),
        -(other + a),
        half_sign(x),
        3.0 * half_sign(x),
        1.0 - one,
    )
    given = {"x": torch.linspace(-1, 1, 8), "y": torch.linspace(2, -3, 8), "input_max": torch.tensor(0.7)}
    for chosen in itertools.combinations(parts, 3):
        whole = chosen[0] + (chosen[1] - chosen[2])
        terms, offset = _terms(whole)
        again = sum((factor * term for term, factor in terms.items()), start=offset)
        ours, theirs = (Program({"out": value}).run(given, LOWERED)["out"] for value in (again, whole))
        torch.testing.assert_close(
            torch.as_tensor(ours).expand(8), torch.as_tensor(theirs).expand(8), check_dtype=False
        )
        for factor in (*terms.values(), offset):
            assert torch.as_tensor(Program({"out": factor}).run(given, LOWERED)["out"]).dim() == 0


def test_quotients():
    p, q, x = variable("p"), variable("q"), variable("x")
    assert quotient(p * x - p, p) is x - 1.0
    assert quotient(-(x * p), p) is -x
    assert quotient(p + q, p) is None
    assert quotient(where(x < 0.0, p, x * p), p) is where(x < 0.0, 1.0, x)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 2.0])
def test_powers_of_logits_are_those_of_their_masses(alpha, generator):
    x, y = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    softmax = torch.tensor(1.0), torch.tensor(0.7), torch.tensor(0.1)
    q, p = (TENSOR["logit_mass"](t, *softmax) for t in (x, y))
    torch.testing.assert_close(LOWERED["logit_sqrt"](x, *softmax), q.sqrt())
    both, ratio = p**alpha * q ** (1 - alpha), (y - x) * 0.7
    torch.testing.assert_close(geometric_mean(p, q, p.log(), q.log(), ratio, alpha), both)
    torch.testing.assert_close(log_geometric_mean(p, q, p.log(), q.log(), ratio, alpha), both.log())
    less = LOWERED["logit_tilted_mass"](y, *softmax, x, *softmax, None, alpha, 0.4)
    torch.testing.assert_close(less, both / math.exp(0.4))


@pytest.mark.parametrize(("kind", "form"), [("kl", "probs"), ("kl", "logits"), ("jensen_shannon", "log_probs")])
def test_printed_functors(kind, form):
    """What is compiled, for review. After an intended change: kullback show KIND --form FORM, without its title."""
    golden = GOLDEN / f"{kind}_{form}.h"
    assert print_functor(kind, form, form) == golden.read_text()


def test_moments_are_of_one_exponent(monkeypatch):
    twice = DIVERGENCES["chi2"]._replace(moments=lambda m: Element(m.chernoff(2.0), m.chernoff(-1.0), 0.0))
    monkeypatch.setitem(DIVERGENCES, "chi2", twice)
    with pytest.raises(ValueError, match=r"moments of 'chi2' ask for Σ p\^a q\^\(1-a\) 2 times"):
        moments_of.__wrapped__("chi2")
