"""Formula -> C functor, the part of a kernel that knows which divergence it computes. Valid C99 and CUDA C++."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from kullback.backends.lowering import (
    described_terms,
    has_sum_in_masses,
    lowered,
    near_element,
    slopes_of,
    with_corner,
)
from kullback.backends.near import WIDE, described_polynomials
from kullback.divergences import DESCRIBED, DIVERGENCES, Moments
from kullback.forms import FORMS, ROW_VARIABLES
from kullback.formula import Program
from kullback.problem import IGNORED, Formula, formula, moments_of
from kullback.state import FAR_TILTED_LSE, Mode, RowState, RowStats, RowSums, fields
from kullback.work import NUMBERS, TOKENS, VERBS

INFIX = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}"}
TYPES = {  # of elements, as kernels call them
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
NO_OTHERS: Mapping[str, str] = MappingProxyType({})
ELEMENT = ("term", "d_log_p", "d_log_q", "input", "target", "q_minus_p")


def print_functor(kind: str, form: str, target_form: str, prefixes: tuple[str, ...] = ("safe_",)) -> str:
    """`Row`, `Element safe_element(x, y, row, parameter)` and the row's `finish`.

    The template that pastes it defines `real`, `INLINE` and the `safe_` functions, and likewise for each further
    prefix, which makes a further `element`. With `stable_` there are also `finite_element`, the fast one of logits that
    are all finite, and `near_element`. What an inlined caller does not use of an `Element` costs nothing.
    """
    element = lowered(kind, form, target_form)
    traced: Formula = formula(kind, form, target_form)
    names = _names(kind)
    program = Program({name: element[name] for name in ELEMENT})
    elements = "\n".join(_print_element(program, names, prefix) for prefix in prefixes)
    if "fast_" in prefixes:
        elements += _print_moments(kind, names)
    if "stable_" in prefixes:
        elements += _print_element(program, names, "finite_", "fast_", {"logit_ratio": "finite_"})
        elements += _print_near_element(kind, names)
    if traced.has_tilted_lse:
        elements += _print_log_tilted(Program({"log_tilted": element["log_tilted"]}), names)
    finish, finished = print_steps(traced.finish, "double", {**names, "tilted_lse": "tilted_lse"}, "")
    macros: dict[str, int | str] = {
        "HAS_LOGITS": "logits" in (form, target_form),
        "HAS_MOMENTS": form == target_form == "logits" and DIVERGENCES[kind].moments is not None,
        "FINISH_IS_LINEAR": traced.finish_is_linear,
        "FINISH_IS_IDENTITY": traced.finish_is_identity,
        "HAS_TILTED_LSE": traced.has_tilted_lse,
        "FAR_TILTED_LSE": f"{FAR_TILTED_LSE}f",
    }
    return f"""\
{print_macros(macros)}typedef struct {{ real {", ".join(ROW_VARIABLES)}; }} Row;
typedef struct {{ real {", ".join(ELEMENT)}; }} Element;
typedef struct {{ double loss, derivative; }} Finish;

{elements}
INLINE Finish finish(double total, double tilted_lse, real parameter)
{{
{finish}    Finish result = {{ {finished["loss"]}, {finished["derivative"]} }};
    return result;
}}
"""


def print_slopes(kind: str) -> str:
    """Of a kind that has slopes, `Parts fast_parts(x, y, row, parameter)`: masses and slopes of an element of logits.

    Slopes are what is left of them when the row's `fast_coefficients` are taken out; the coupling is between what is
    left. Macros say whether there are slopes and a coupling, whether logarithms of a mass's part of a mixture are in
    the derivatives, and whether slope_q is one. `near_parts` are the same where logarithms of near masses lose nothing.
    """
    element, slopes = lowered(kind, "logits", "logits"), slopes_of(kind)
    partials = Program({name: element[name] for name in ("d_log_p", "d_log_q")})
    macros = {
        "HAS_SLOPES": slopes is not None,
        "HAS_LOG_FRACTION": any(step.op == "logit_log_fraction" for step in partials.steps),
        "SLOPE_IS_LOG": slopes is not None and getattr(slopes.rest_q, "op", None) == "logit_log2_fraction",
        "HAS_COUPLING": slopes is not None and slopes.coupling != 0.0,
    }
    if slopes is None:
        return print_macros(macros)
    names = _names(kind)
    common = Program({name: value for name, value in slopes._asdict().items() if not name.startswith("rest_")})
    parts = Program({"p": element["p"], "q": element["q"], "slope_p": slopes.rest_p, "slope_q": slopes.rest_q})

    def print_parts(prefix: str, operations: Iterable[str]) -> str:
        """`operations`: which have that prefix; the others are those of the fast mode."""
        result = _print_result("Parts", parts, names, "fast_", dict.fromkeys(operations, prefix))
        return f"INLINE Parts {prefix}parts(real x, real y, Row row, real parameter)\n{{\n{result}}}\n"

    return f"""\
{print_macros(macros)}typedef struct {{ real {", ".join(common.outputs)}; }} Coefficients;
typedef struct {{ real {", ".join(parts.outputs)}; }} Parts;
INLINE Coefficients fast_coefficients(Row row, real parameter)
{{
{_print_result("Coefficients", common, names, "fast_")}}}
{print_parts("fast_", ())}{print_parts("near_", ("logit_log2_fraction", "log_mix", "log"))}"""


def print_terms(prefixes: tuple[str, ...] = ("safe_",)) -> str:
    """`Row`, and `Terms safe_terms(x, y, row)` of an element of logits (`described_terms`); and the kinds it has.

    A function for each prefix, as of `print_functor`.
    """
    program, names = described_terms(), {name: f"row.{name}" for name in ROW_VARIABLES}
    macros: dict[str, int | str] = {
        "EACH_KIND(apply)": " ".join(f"apply({kind})" for kind in DESCRIBED),
        "KINDS": ", ".join(DESCRIBED),
        "WITH_CORNER": with_corner(),
    }
    functions = (
        f"INLINE Terms {prefix}terms(real x, real y, Row row)\n{{\n{_print_result('Terms', program, names, prefix)}}}\n"
        for prefix in prefixes
    )
    return (
        f"{print_macros(macros)}typedef struct {{ real {', '.join(ROW_VARIABLES)}; }} Row;\n"
        f"typedef struct {{ real {', '.join(program.outputs)}; }} Terms;\n{''.join(functions)}"
    )


@functools.cache
def print_near_terms() -> str:
    """Terms of elements whose log-ratio r is below NEAR_RADIUS, as polynomials of r over √(p·q).

    `NearSums near_sums(r, root)` are of an element what terms are made of: √(p·q)·r^k times polynomials of r², of even
    powers and of odd ones. What differs by a factor alone is one. Kinds of which one is the other with p and q
    exchanged share them, and |p - q| is the size of q - p. `Terms near_terms(sums)` are those of their sums.
    """
    parts: list[tuple[float, ...]] = []
    sums: dict[tuple[int, int, bool], str] = {}  # by the power of r, the part, and whether it is the size
    terms = []
    for name, (is_size, first, factors) in described_polynomials().items():
        summands = []
        for start in (0, 1):
            if (found := _part(factors[start::2], parts)) is not None:
                scale, part = found
                own = sums.setdefault((first + start, part, is_size), f"s{len(sums)}")
                summands.append(f"(real){scale!r} * sums.{own}")
        terms.append(f"    terms.{name} = {' + '.join(summands)};\n")
    printed = [f"    const real part{i} = {_horner(factors)};\n" for i, factors in enumerate(parts)]
    products: dict[tuple[int, int], str] = {}
    for power, part in sorted({key[:2] for key in sums}):
        lower = products.get((power - 1, part))
        products[power, part] = name = f"part{part}_{power}"
        value = f"root{power} * part{part}" if lower is None else f"r * {lower}"
        printed.append(f"    const real {name} = {value};\n")
    values = [
        f"    sums.{name} = {_sized(power, products[power, part]) if is_size else products[power, part]};\n"
        for (power, part, is_size), name in sums.items()
    ]
    return f"""\
#define NEAR_RADIUS (real){WIDE.radius!r}
#define EACH_NEAR_SUM(apply) {" ".join(f"apply({name})" for name in sums.values())}
#define NEAR_SUMS {", ".join(sums.values())}
typedef struct {{ real {", ".join(sums.values())}; }} NearSums;
INLINE NearSums near_sums(real r, real root)
{{
    const real square = r * r, root0 = root, root1 = root * r, root2 = root1 * r, root3 = root2 * r;
{"".join(printed)}    NearSums sums;
{"".join(values)}    return sums;
}}
INLINE Terms near_terms(NearSums sums)
{{
    Terms terms;
{"".join(terms)}    return terms;
}}
"""


def _sized(power: int, product: str) -> str:
    """√(p·q)·|r|^k times a polynomial that is positive; of the slope, which has no power, with the sign of r."""
    return f"safe_abs({product})" if power else f"real_copysign({product}, r)"


def _part(factors: tuple[float, ...], parts: list[tuple[float, ...]]) -> tuple[float, int] | None:
    """A polynomial of the square, as a factor times one of `parts`, which it may become; None of nothing."""
    own = torch.tensor(factors, dtype=torch.float32, device="cpu")
    if not bool(own.any()):
        return None
    for scale in (1.0, -1.0, 2.0, -2.0, 0.5, -0.5):
        if (known := tuple((own / scale).tolist())) in parts:
            return scale, parts.index(known)
    parts.append(tuple(own.tolist()))
    return 1.0, len(parts) - 1


def _horner(factors: tuple[float, ...]) -> str:
    """Σ factor · square^k."""
    text = ""
    for factor in reversed(factors):
        text = f"(real){factor!r} + square * ({text})" if text else f"(real){factor!r}"
    return text


def print_order() -> str:
    """Of what `Describe` has written: the divergences come last, in the order of KINDS."""
    names = [f"NUMBER_{name.upper()}" for name in NUMBERS[: -len(DESCRIBED)]] + ["NUMBER_KINDS"]
    tokens = [f"TOKEN_{name.upper()}" for name in TOKENS]
    return "".join(f"enum {{ {', '.join(of)} }};\n" for of in (names, tokens))


def print_layout(has_tilted_lse: bool = False) -> str:
    """The fields of packed statistics, sums and states of rows in order, verbs, modes, and what is no label."""
    layouts = {
        "STATS": fields(RowStats, has_tilted_lse),
        "SUMS": RowSums._fields,
        "STATE": fields(RowState, has_tilted_lse),
    }
    enums = [
        f"enum {{ {', '.join(f'{prefix}_{name.upper()}' for name in names)}, {prefix}_FIELDS }};\n"
        for prefix, names in layouts.items()
    ]
    modes = ", ".join(f"{mode.name} = {mode.value}" for mode in Mode)
    verbs = print_macros({f"VERB_{verb.upper()}": number for number, verb in enumerate(VERBS)})
    return "".join(enums) + f"enum {{ {modes} }};\n" + print_macros({"IGNORED": f"({IGNORED})"}) + verbs


def ranges(form: str, target_form: str) -> dict[str, str]:
    """Macros: the range of the input's elements (X) and the target's (Y) that need no guards."""
    return {
        f"{name}_{bound}": f"((real){value!r})"
        for name, side in (("X", form), ("Y", target_form))
        for bound, value in zip(("LOW", "HIGH"), FORMS[side].in_range or (0.0, 0.0), strict=True)
    }


def type_macros(
    x: torch.dtype, y: torch.dtype, weight: torch.dtype = torch.float64, loss: torch.dtype = torch.float32
) -> dict[str, int | str]:
    """Of CUDA kernels: element types of input and target, of row weights and of losses; and which arithmetic serves."""
    types = {"X": TYPES[x], "Y": TYPES[y], "WEIGHT": TYPES[weight], "LOSS": TYPES[loss]}
    return {"REAL_IS_DOUBLE": torch.float64 in (x, y), **types}


def print_macros(macros: Mapping[str, int | str]) -> str:
    lines = (f"#define {name} {value if isinstance(value, str) else int(value)}\n" for name, value in macros.items())
    return "".join(lines)


def _names(kind: str) -> dict[str, str]:
    names = {name: f"row.{name}" for name in ROW_VARIABLES}
    parameter = DIVERGENCES[kind].parameter
    return names if parameter is None else names | {parameter.name: "parameter"}


def _print_element(
    program: Program, names: dict[str, str], prefix: str, of_operations: str = "", others: Mapping[str, str] = NO_OTHERS
) -> str:
    return f"""\
INLINE Element {prefix}element(real x, real y, Row row, real parameter)
{{
{_print_result("Element", program, names, of_operations or prefix, others)}}}
"""


def _print_near_element(kind: str, names: dict[str, str]) -> str:
    """`near_element`, of kinds that are the mean of a log-ratio; and `short_element`, whose ratio is rounded once.

    Macros say whether there is one, whether the row's Σ d_log_q may be other than 0, and whether it is in masses.
    """
    moments = moments_of(kind)
    if moments is None or moments.exponent is not None or len(_moments_in(moments.sums)) != 1:
        return print_macros({"HAS_NEAR_ELEMENT": 0})
    of_q, element = moments.sums.outputs["d_log_q"], near_element(kind)
    macros = print_macros(
        {
            "HAS_NEAR_ELEMENT": 1,
            "HAS_D_LOG_Q_SUM": not (isinstance(of_q, float) and of_q == 0),
            "SUM_IN_MASSES": has_sum_in_masses(kind),
        }
    )
    program = Program({name: element[name] for name in ELEMENT})
    return macros + "".join(
        _print_element(program, names, prefix, "fast_", {"logit_ratio": prefix, "small_exp_slope": "near_"})
        for prefix in ("near_", "short_")
    )


def _print_log_tilted(program: Program, names: dict[str, str]) -> str:
    body, results = print_steps(program, "real", names, "safe_")
    return f"""\
INLINE real safe_log_tilted(real x, real y, Row row, real parameter)
{{
{body}    return {results["log_tilted"]};
}}
"""


def _print_moments(kind: str, names: dict[str, str]) -> str:
    """`Divergence.moments` and the exponent of its Chernoff coefficient; macros say which moments it wants."""
    found = moments_of(kind)
    if found is None:
        return print_macros(dict.fromkeys((f"HAS_{name.upper()}" for name in Moments._fields), 0))
    sums, asked = found
    wanted = _moments_in(sums)
    _, exponent = print_steps(Program({"exponent": 0.0 if asked is None else asked}), "real", names, "")
    macros = {f"HAS_{name.upper()}": int(name in wanted) for name in Moments._fields}
    return f"""\
{print_macros(macros)}INLINE real chernoff_exponent(real parameter)
{{
    return {exponent["exponent"]};
}}
INLINE Element from_moments(real p_log_ratio, real q_log_ratio, real chernoff, real parameter)
{{
{_print_result("Element", sums, names, "fast_")}}}
"""


def _moments_in(sums: Program) -> set[str]:
    found = {operand for step in sums.steps for operand in step.operands} | set(sums.outputs.values())
    return {name for name in Moments._fields if name in found}


def _print_result(
    name: str, program: Program, names: dict[str, str], prefix: str, others: Mapping[str, str] = NO_OTHERS
) -> str:
    """The body of a function that returns the program's outputs as a struct of that name."""
    body, results = print_steps(program, "real", names, prefix, others)
    return f"{body}    {name} result = {{ {', '.join(results.values())} }};\n    return result;\n"


def print_steps(
    program: Program, kind: str, names: dict[str, str], prefix: str, others: Mapping[str, str] = NO_OTHERS
) -> tuple[str, dict[str, str]]:
    """The program's statements, and the expression of each of its outputs.

    prefix: of operations; `others`: those that have another one.
    """
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
            expression = f"{others.get(step.op, prefix)}{step.op}({', '.join(operands)})"
        values.append(f"v{index}")
        text.append(f"    const {kind} v{index} = {expression};\n")
    return "".join(text), {name: spell(operand) for name, operand in program.outputs.items()}
