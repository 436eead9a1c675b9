"""Formula -> C functor, the part of a kernel that knows which divergence it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kullback.divergences import DIVERGENCES, Moments
from kullback.forms import FORMS
from kullback.formula import Program, affine
from kullback.rows import ROW_VARIABLES, Problem, sums_of_moments

INFIX = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}"}
TYPES = {  # of elements, as kernels call them
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
ELEMENT = ("term", "d_log_p", "d_log_q", "input", "target", "excess")


def print_functor(problem: Problem, prefixes: tuple[str, ...] = ("k_",)) -> str:
    """`Row`, `Parameters`, `Element k_element(x, y, row, parameters)` and the row's `finish`.

    Valid C99 and CUDA C++. The template that pastes it defines `real`, `INLINE` and the `k_`
    functions, and likewise for each further prefix, which makes a further `element`. What an inlined
    caller does not use of an `Element` costs nothing.
    """
    parameters = tuple(DIVERGENCES[problem.kind].parameters)
    formula = problem.formula
    names = _names(problem)
    program = problem.program(*ELEMENT)
    elements = "\n".join(_print_element(program, names, prefix) for prefix in prefixes)
    if "apart_" in prefixes:
        elements += _print_moments(problem.kind, names)
    finish, finished = print_steps(formula.finish, "double", names, "")
    return f"""\
#define NEEDS_NORMS {int(problem.needs_norms)}
#define FINISH_IS_LINEAR {int(formula.finish_is_linear)}
#define FINISH_IS_IDENTITY {int(formula.finish_is_identity)}
typedef struct {{ real {", ".join(ROW_VARIABLES)}; }} Row;
typedef struct {{ real {", ".join(parameters) or "none"}; }} Parameters;
typedef struct {{ real {", ".join(ELEMENT)}; }} Element;
typedef struct {{ double loss, slope; }} Finish;

{elements}
INLINE Finish finish(double total, Parameters parameters)
{{
{finish}    Finish result = {{ {finished["loss"]}, {finished["slope"]} }};
    return result;
}}
"""


def print_slopes(problem: Problem) -> str:
    """Of a kind that has slopes, `Parts apart_parts(x, y, row, parameters)`: masses and slopes of a row that is apart.

    Slopes are what is left of them when the row's `apart_affinity` is taken out; the lean is between what is left.
    Macros say whether there are slopes and a lean, whether logarithms of a mass's part of a mixture are in the
    derivatives, and whether slope_q is one.
    """
    element = problem.formula.element
    has_log_part = any(step.op == "logit_log_part" for step in problem.program("d_log_p", "d_log_q").steps)
    p, q = affine(element["slope_p"]), affine(element["slope_q"])
    is_log = getattr(q.rest, "op", None) == "logit_log2_part"
    has_lean = element["lean"] != 0.0
    macros = {
        "HAS_SLOPE": problem.has_slope,
        "HAS_LOG_PART": has_log_part,
        "SLOPE_IS_LOG": is_log,
        "HAS_LEAN": has_lean,
    }
    if not problem.has_slope:
        return _print_macros(macros)
    names = _names(problem)
    common = Program(
        {
            "factor_p": p.factor,
            "offset_p": p.offset + element["lean"] * q.offset if has_lean else p.offset,
            "factor_q": q.factor,
            "offset_q": q.offset,
            "lean": element["lean"] * q.factor / p.factor if has_lean else 0.0,
        }
    )
    parts = Program({"p": element["p"], "q": element["q"], "slope_p": p.rest, "slope_q": q.rest})
    return f"""\
{_print_macros(macros)}typedef struct {{ real {", ".join(common.outputs)}; }} Affinity;
typedef struct {{ real {", ".join(parts.outputs)}; }} Parts;
INLINE Affinity apart_affinity(Row row, Parameters parameters)
{{
{_print_result("Affinity", common, names, "apart_")}}}
INLINE Parts apart_parts(real x, real y, Row row, Parameters parameters)
{{
{_print_result("Parts", parts, names, "apart_")}}}
"""


def _print_result(name: str, program: Program, names: dict[str, str], prefix: str) -> str:
    """The body of a function that returns the program's outputs as a struct of that name."""
    body, results = print_steps(program, "real", names, prefix)
    return f"{body}    {name} result = {{ {', '.join(results.values())} }};\n    return result;\n"


def tame_ranges(form: str, target_form: str) -> dict[str, str]:
    """Macros: the range of the input's elements (X) and the target's (Y) that need no guards."""
    return {
        f"{name}_{bound}": f"((real){value!r})"
        for name, side in (("X", form), ("Y", target_form))
        for bound, value in zip(("LOW", "HIGH"), FORMS[side].tame or (0.0, 0.0), strict=True)
    }


def _names(problem: Problem) -> dict[str, str]:
    names = {name: f"row.{name}" for name in ROW_VARIABLES}
    return names | {name: f"parameters.{name}" for name in DIVERGENCES[problem.kind].parameters}


def _print_element(program: Program, names: dict[str, str], prefix: str) -> str:
    return f"""\
INLINE Element {prefix}element(real x, real y, Row row, Parameters parameters)
{{
{_print_result("Element", program, names, prefix)}}}
"""


def _print_moments(kind: str, names: dict[str, str]) -> str:
    """`of_moments` (divergences.py) and the exponent of its overlap; macros say which moments it wants."""
    macros = dict.fromkeys(("HAS_MOMENTS", *(f"HAS_{name.upper()}" for name in Moments._fields)), 0)
    found = sums_of_moments(kind)
    if found is None:
        return _print_macros(macros)
    sums, asked = found
    wanted = {operand for step in sums.steps for operand in step.operands} | set(sums.outputs.values())
    _, exponent = print_steps(Program({"exponent": 0.0 if asked is None else asked}), "real", names, "")
    macros |= {"HAS_MOMENTS": 1, **{f"HAS_{name.upper()}": int(name in wanted) for name in Moments._fields}}
    return f"""\
{_print_macros(macros)}INLINE real overlap_exponent(Parameters parameters)
{{
    return {exponent["exponent"]};
}}
INLINE Element of_moments(real cross_p, real cross_q, real overlap, Parameters parameters)
{{
{_print_result("Element", sums, names, "apart_")}}}
"""


def _print_macros(macros: Mapping[str, int]) -> str:
    return "".join(f"#define {name} {int(value)}\n" for name, value in macros.items())


def print_steps(program: Program, kind: str, names: dict[str, str], prefix: str) -> tuple[str, dict[str, str]]:
    """The program's statements, and the expression of each of its outputs."""
    text: list[str] = []
    values: list[str] = []

    def spell(operand: float | str | int) -> str:
        if isinstance(operand, str):
            return names.get(operand, operand)
        return values[operand] if isinstance(operand, int) else f"({kind}){operand!r}"

    for index, step in enumerate(program.steps):
        operands = [spell(operand) for operand in step.operands]
        if step.op == "lt":  # a condition is spelled where it is used: it has no real value
            values.append(f"({operands[0]} < {operands[1]})")
            continue
        if step.op == "where":
            expression = "{} ? {} : {}".format(*operands)
        elif step.op in INFIX:
            expression = INFIX[step.op].format(*operands)
        else:
            expression = f"{prefix}{step.op}({', '.join(operands)})"
        values.append(f"v{index}")
        text.append(f"    const {kind} v{index} = {expression};\n")
    return "".join(text), {name: spell(operand) for name, operand in program.outputs.items()}
