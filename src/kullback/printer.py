"""Formula -> C functor, the part of a kernel that knows which divergence it computes."""

from __future__ import annotations

from kullback.divergences import DIVERGENCES, Pair
from kullback.forms import FORMS
from kullback.formula import Program, variable
from kullback.rows import ROW_VARIABLES, Problem

INFIX = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}"}
ELEMENT = ("term", "d_log_p", "d_log_q", "input", "target")


def print_functor(problem: Problem, prefixes: tuple[str, ...] = ("k_",)) -> str:
    """`Row`, `Parameters`, `Element k_element(x, y, row, parameters)` and the row's `finish`.

    Valid C99 and CUDA C++. The template that pastes it defines `real`, `INLINE` and the `k_`
    functions, and likewise for each further prefix, which makes a further `element`. What an inlined
    caller does not use of an `Element` costs nothing.
    """
    parameters = tuple(DIVERGENCES[problem.kind].parameters)
    formula = problem.formula
    names = {name: f"row.{name}" for name in ROW_VARIABLES}
    names |= {name: f"parameters.{name}" for name in parameters}
    program = problem.program(*ELEMENT)
    elements = "\n".join(_print_element(program, names, prefix) for prefix in prefixes)
    if "apart_" in prefixes:
        elements += _print_rescaling(problem.kind)
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


def tame_ranges(form: str, target_form: str) -> dict[str, str]:
    """Macros: the range of the input's elements (X) and the target's (Y) that need no guards."""
    return {
        f"{name}_{bound}": f"((real){value!r})"
        for name, side in (("X", form), ("Y", target_form))
        for bound, value in zip(("LOW", "HIGH"), FORMS[side].tame or (0.0, 0.0), strict=True)
    }


def _print_element(program: Program, names: dict[str, str], prefix: str) -> str:
    body, results = print_steps(program, "real", names, prefix)
    return f"""\
INLINE Element {prefix}element(real x, real y, Row row, Parameters parameters)
{{
{body}    Element result = {{ {", ".join(results[name] for name in ELEMENT)} }};
    return result;
}}
"""


def _print_rescaling(kind: str) -> str:
    """`mass_term`, a term of unnormalised masses, and `rescaled` (divergences.py), where the kind has them."""
    divergence = DIVERGENCES[kind]
    if divergence.rescaled is None:
        return "#define HAS_RESCALED 0\n"
    p, q, ratio = (variable(name) for name in ("p", "q", "ratio"))
    term = divergence.element(Pair(p, q, ratio, q - p, centred=False)).term
    arguments = ("total", "mass_p", "mass_q", "scale_p", "scale_q", "shift")
    sums = divergence.rescaled(*map(variable, arguments))
    term_body, term_results = print_steps(Program({"term": term}), "real", {}, "apart_")
    body, results = print_steps(Program(sums._asdict()), "real", {}, "apart_")
    return f"""\
#define HAS_RESCALED 1
INLINE real mass_term(real p, real q, real ratio)
{{
{term_body}    return {term_results["term"]};
}}
INLINE Element rescaled({", ".join(f"real {name}" for name in arguments)})
{{
{body}    Element result = {{ {", ".join(results.values())}, 0, 0 }};
    return result;
}}
"""


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
