"""A comparison as tables of words, which the terminal, Markdown and HTML show alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells

Found = dict[str, Any]


LEAST_WORDS = 12  # cells of a terminal that a column of words has at least, if it has as long ones
LEAST_TITLE = 8  # and that any line of a heading has


class Table(NamedTuple):
    title: str
    columns: list[str]  # the first is of words, the others of numbers
    rows: list[list[str]]
    note: str = ""
    is_prose: bool = False  # all columns are of words, but for the first
    fixed: int = 0  # the first columns, which say what a row is; 0: columns belong together

    def within(self, width: int) -> Iterator[Table]:
        """This table in ones of so many characters if it can be, each of some of the columns behind the first."""
        if not self.fixed:
            yield self
            return
        cells = [max(map(cell_len, column), default=0) for column in zip(*self.rows, strict=True)]
        most = max(LEAST_WORDS, width // 2)  # of a column of words, which may be broken over lines
        wide = [min(max(own, LEAST_WORDS), most) + 2 for own in cells[: self.fixed]]
        room = max(width - sum(wide) - 2, LEAST_TITLE)
        others = zip(cells[self.fixed :], self.columns[self.fixed :], strict=True)
        wide += [max(own, min(cell_len(title), room)) + 2 for own, title in others]
        columns = ["\n".join(chop_cells(title, each - 2)) for title, each in zip(self.columns, wide, strict=True)]
        start = self.fixed
        while start < len(wide):
            stop, left = start + 1, width - sum(wide[: self.fixed]) - wide[start]
            while stop < len(wide) and wide[stop] <= left:
                left, stop = left - wide[stop], stop + 1
            cut = lambda row, start=start, stop=stop: [*row[: self.fixed], *row[start:stop]]
            yield self._replace(columns=cut(columns), rows=[cut(row) for row in self.rows])
            start = stop


def number(value: float | str | None) -> str:
    """Six decimals as llama.cpp prints, or three digits of what is smaller or huge."""
    if value is None or isinstance(value, str):
        return "" if value is None else value
    return f"{value:.6f}" if value == 0 or 1e-4 <= abs(value) < 1e9 or not math.isfinite(value) else f"{value:.2e}"


def percent(value: float | None, digits: int = 2) -> str:
    return "" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def interval(figure: Found, show: Callable[[float], str] = number) -> str:
    ends = figure.get("interval")
    return "" if ends is None else f"{show(ends[0])} … {show(ends[1])}"


def spread(figure: Found, compat: bool, show: Callable[[float], str] = number) -> str:
    """The interval; llama.cpp's error, which takes rows for independent, where its formula was asked for."""
    return f"± {show(figure['error_if_independent'])}" if compat else interval(figure, show)


def _of_spread(compat: bool) -> str:
    return "± one sigma" if compat else "95 % interval"


def tables(found: Found) -> Iterator[Table]:
    """Of a whole comparison."""
    if not found["rows_read"]:
        return
    candidates, compat = found["candidates"], found["formula"] != "exact"
    yield _overview(found, candidates, compat)
    if found["differences"]:
        yield _differences(found["differences"])
    yield _divergences(candidates, compat)
    of_text = [each for each in candidates if "perplexity" in each]
    if of_text:
        yield _of_text(of_text, compat)
    yield _by_confidence(candidates)
    if "by_group" in candidates[0]:
        yield _by_group(candidates)


def _overview(found: Found, candidates: list[Found], compat: bool) -> Table:
    columns = ["candidate", "mean KLD", _of_spread(compat), "median", "99 %", "same top"]
    rows = [
        [
            each["name"] + (" *" if each.get("below_floor") else ""),
            number(each["kl"]["mean"]),
            spread(each["kl"], compat),
            number(each["kl"]["median"]),
            number(each["kl"]["percentiles"]["99"]),
            percent(each["same_top"]["mean"]),
        ]
        for each in sorted(candidates, key=lambda each: float(each["kl"]["mean"]))
    ]
    note = ""
    floor = found["floor"]
    if floor is not None:
        rows.append(["floor", number(floor["kl"]["mean"]), spread(floor["kl"], compat), number(floor["kl"]["median"])])
        rows[-1] += [number(floor["kl"]["percentiles"]["99"]), percent(floor["same_top"]["mean"])]
        note = "floor: the reference beside its own second recording."
        if any(each.get("below_floor") for each in candidates):
            note += " * not above the floor: this KLD says nothing of the candidate."
    return Table("Divergence from the reference", columns, rows, note, fixed=1)


def _differences(differences: list[Found]) -> Table:
    rows = [
        [
            f"{d['worse']} − {d['better']}",
            number(d["mean"]),
            interval(d),
            percent(d["share_of_rows_above"], 1),
        ]
        for d in differences
    ]
    return Table(
        "Differences, paired by rows",
        ["candidates", "mean KLD", "95 % interval", "rows above"],
        rows,
        "An interval that has 0 in it does not tell the two apart.",
        fixed=1,
    )


def _columns(title: str, candidates: list[Found]) -> list[str]:
    return [title, *(each["name"] for each in candidates)]


PERCENTILES = ("99.9", "99", "95", "90", "75", "50", "25", "10", "5", "1", "0.1")


def _divergences(candidates: list[Found], compat: bool) -> Table:
    of = _of_spread(compat)
    rows = [
        ["mean KLD", *(number(c["kl"]["mean"]) for c in candidates)],
        [of, *(spread(c["kl"], compat) for c in candidates)],
        ["maximum", *(number(c["kl"]["max"]) for c in candidates)],
        *(
            ["median" if p == "50" else f"{p} %", *(number(c["kl"]["percentiles"][p]) for c in candidates)]
            for p in PERCENTILES
        ),
        ["minimum", *(number(c["kl"]["min"]) for c in candidates)],
        ["reverse KLD", *(number(c["reverse_kl"]["mean"]) for c in candidates)],
        ["Jensen–Shannon", *(number(c["jensen_shannon"]["mean"]) for c in candidates)],
        ["overlap, 1 − TV", *(percent(c["overlap"]["mean"]) for c in candidates)],
        ["same top token", *(percent(c["same_top"]["mean"]) for c in candidates)],
        [of, *(spread(c["same_top"], compat, percent) for c in candidates)],
        *(
            [f"top {k} in common", *(percent(c["top_agreement"][k]["mean"]) for c in candidates)]
            for k in candidates[0]["top_agreement"]
        ),
        ["flips", *(f"{c['flips']} of {c['rows']}" for c in candidates)],
    ]
    return Table("KLD in nats", _columns("", candidates), rows, fixed=1)


def _of_text(candidates: list[Found], compat: bool) -> Table:
    of, ends = [c["perplexity"] for c in candidates], _of_spread(compat)
    change = [c["label_probability_change"] for c in candidates]
    rows = [
        ["perplexity", *(number(p["candidate"]["mean"]) for p in of)],
        [ends, *(spread(p["candidate"], compat) for p in of)],
        ["reference's", *(number(p["reference"]["mean"]) for p in of)],
        ["ratio", *(number(p["ratio"]["mean"]) for p in of)],
        [ends, *(spread(p["ratio"], compat) for p in of)],
        ["covariance of log p", *(number(p["covariance"]) for p in of)],
        ["correlation", *(percent(p["correlation"]) for p in of)],
        ["mean Δp", *(percent(c["mean"], 3) for c in change)],
        [ends, *(spread(c, compat, lambda v: percent(v, 3)) for c in change)],
        ["root mean square Δp", *(percent(c["root_mean_square"], 3) for c in change)],
        ["maximum Δp", *(percent(c["max"], 3) for c in change)],
        *(
            ["median Δp" if p == "50" else f"{p} % Δp", *(percent(c["percentiles"][p], 3) for c in change)]
            for p in PERCENTILES
        ),
        ["minimum Δp", *(percent(c["min"], 3) for c in change)],
        *(
            [f"true token in top {k}", *(percent(c["label_in_top"]["candidate"][k]) for c in candidates)]
            for k in candidates[0]["label_in_top"]["candidate"]
        ),
    ]
    note = "Δp: the candidate's probability of the text's own next token, less the reference's."
    return Table("The text's own tokens", _columns("", candidates), rows, note, fixed=1)


def _brief(each: Found) -> str:
    return f"{number(each['kl']['mean'])}, {percent(each['same_top'], 1)}" if each["rows"] else ""


def _by_confidence(candidates: list[Found]) -> Table:
    rows = [
        [f"{of[0]['from']:g} … {of[0]['to']:g}", str(max(each["rows"] for each in of)), *map(_brief, of)]
        for of in zip(*(c["by_confidence"] for c in candidates), strict=True)
    ]
    columns = ["reference's best p", "rows", *(c["name"] for c in candidates)]
    return Table("By the reference's confidence: mean KLD, same top", columns, rows, fixed=2)


def _by_group(candidates: list[Found]) -> Table:
    rows = []
    for name in dict.fromkeys(name for c in candidates for name in c["by_group"]):
        of = [c["by_group"].get(name, {"rows": 0}) for c in candidates]
        rows.append([name, str(max(each["rows"] for each in of)), *map(_brief, of)])
    columns = ["group", "rows", *(c["name"] for c in candidates)]
    return Table("By group: mean KLD, same top", columns, rows, fixed=2)


def worst(candidate: Found, count: int | None = None) -> Table:
    """The rows of the largest KLD, and what stood before them."""
    rows = [
        [
            number(row["kl"]),
            shown(row.get("context", f"row {row['row']}")),
            shown(row.get("label_text", "")),
            shown(row["reference_says"]),
            shown(row["candidate_says"]),
        ]
        for row in candidate["worst"][:count]
    ]
    columns = ["KLD", "after", "the text", "reference", "candidate"]
    return Table(f"Worst rows of {candidate['name']}", columns, rows, is_prose=True)


def shown(text: str) -> str:
    """On one line, with its spaces, and nothing that a terminal would obey or UTF-8 has not."""
    text = CONTROLS.sub("\ufffd", text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", ""))
    return text.encode("utf-8", "replace").decode()


CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # of directions, too


def heading(found: Found) -> list[str]:
    """What was compared with what."""
    first = found["first_position"]
    score = f"positions from {first} on" if first else "all positions"
    blocks = max(each["blocks"] for each in found["candidates"])
    lines = [
        f"Reference: {shown(found['reference']['path'])}",
        f"{found['rows_read']} rows of {found['vocab']} tokens in {blocks} {found['blocks_are']}",
        f"Scored: {score} (--score {found['score']})",
    ]
    if found["formula"] != "exact":
        lines.append(f"Formula: {found['formula']}'s own")
    return lines


def markdown(found: Found) -> str:
    escape = lambda text: MARKUP.sub(r"\\\1", shown(text))
    parts = ["# KL divergence report", *map(escape, heading(found))]
    parts += [f"> **Note.** {escape(warning)}" for warning in found["warnings"]]
    for table in [*tables(found), *(worst(each) for each in found["candidates"] if each.get("worst"))]:
        alignment = [":--", *((":--" if table.is_prose else "--:") for _ in table.columns[1:])]
        lines = [
            "| " + " | ".join(map(escape, table.columns)) + " |",
            "|" + "|".join(alignment) + "|",
            *("| " + " | ".join(map(escape, row)) + " |" for row in table.rows),
        ]
        parts += [f"## {escape(table.title)}", "\n".join(lines), *([escape(table.note)] if table.note else [])]
    return "\n\n".join(parts) + "\n"


# What Markdown would not show as it stands: as GitHub has it, formulas, links and emoji too
MARKUP = re.compile(r"([\\`*_~|<&#\[$]|:(?=//|\w+:))")
