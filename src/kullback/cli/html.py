"""A comparison as one page that needs nothing else: for light and dark, and for screens from 400 pixels on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from kullback.cli import tables
from kullback.cli.tables import Table

STYLE = """
:root { color-scheme: light dark; --text: #1d2330; --soft: #5b6474; --page: #fff; --line: #d9dee7; --wash: #f4f6f9;
  --c0: #2460b8; --c1: #c2410c; --c2: #15803d; --c3: #7c3aed; --c4: #b91c5c; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #9aa4b5; --page: #12151b; --line: #2c3340;
  --wash: #1a1f28; --c0: #74a7f2; --c1: #f0955b; --c2: #62c584; --c3: #b394f7; --c4: #f07aa8; --c5: #5cc3dd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .soft, figcaption, .note { color: var(--soft); }
.warning { border-left: 4px solid var(--c1); background: var(--wash); padding: .5rem .75rem; margin: .75rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  overflow-wrap: normal; font-size: .9rem; }
th:first-child, td:first-child, .prose th, .prose td { text-align: left; }
.prose td { white-space: pre-wrap; min-width: 5rem; vertical-align: top; } .prose td:nth-child(2) { min-width: 16rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); }
thead th { color: var(--soft); font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 2rem; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } .grid { stroke: var(--line); }
.bar { margin: .5rem 0; } .track { position: relative; height: .9rem; background: var(--wash); }
.track span { position: absolute; top: 0; bottom: 0; } .ends { border: 1px solid var(--text); top: 35% !important;
  bottom: 35% !important; background: var(--text); } .floor { background: var(--soft); opacity: .35; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .35rem 0 .9rem; }
"""
COLOURS = 6


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    title = "KL divergence report"
    body = [f"<h1>{title}</h1>"]
    body += [f"<p class='soft'>{escape(line)}</p>" for line in tables.heading(found)]
    body += [f"<p class='warning'>{escape(warning)}</p>" for warning in found["warnings"]]
    if found["rows_read"]:
        shown = list(tables.tables(found))
        body += [
            _table(shown[0]),
            f"<div class='pictures'>{_bars(found)}{_curves(found)}</div>",
            *map(_table, shown[1:]),
        ]
        body += [_table(tables.worst(each)) for each in found["candidates"] if each["worst"]]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(table: Table) -> str:
    cells = lambda tag, row: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
    rows = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    kind = " class='prose'" if table.is_prose else ""
    head = f"<thead><tr>{cells('th', table.columns)}</tr></thead>"
    return (
        f"<section><h2>{escape(table.title)}</h2><div class='scroll'><table{kind}>{head}\n<tbody>{rows}</tbody></table>"
        f"</div>{note}</section>"
    )


def _bars(found: dict[str, Any]) -> str:
    """Means from 0, with their intervals, and the floor as a shade over all."""
    candidates = [c for c in found["candidates"] if math.isfinite(c["kl"]["mean"])]
    most = max([(c["kl"]["interval"] or [0, c["kl"]["mean"]])[1] for c in candidates], default=0.0)
    if most <= 0:
        return ""
    share = lambda value: f"{min(100.0, max(0.0, 100 * value / most)):.2f}%"
    floor = found["floor"]
    lines = []
    for i, each in enumerate(found["candidates"]):
        if each not in candidates:
            continue
        parts = [f"<span style='left:0;width:{share(each['kl']['mean'])};background:var(--c{i % COLOURS})'></span>"]
        if floor is not None:
            parts.append(f"<span class='floor' style='left:0;width:{share(floor['kl']['mean'])}'></span>")
        if each["kl"]["interval"] is not None:
            low, high = each["kl"]["interval"]
            parts.append(f"<span class='ends' style='left:{share(low)};width:{share(high - low)}'></span>")
        lines.append(
            f"<div class='bar'>{escape(each['name'])}: {tables.number(each['kl']['mean'])}"
            f"<div class='track'>{''.join(parts)}</div></div>"
        )
    told = "Mean KLD from 0; the thin bar is its 95 % interval." + (" Grey: the floor." if floor is not None else "")
    return f"<figure>{''.join(lines)}<figcaption>{told}</figcaption></figure>"


WIDTH, HEIGHT, LEFT, BOTTOM = 400, 250, 44, 34


def _curves(found: dict[str, Any]) -> str:
    """The share of rows above each KLD, both axes logarithmic."""
    curves = [(i, c["name"], c["kl"]["share_above"]) for i, c in enumerate(found["candidates"])]
    points = [(x, share) for _, _, curve in curves for x, share in curve if 0 < share < 1]
    if not points:
        return ""
    lowest = min(1e-1, 10 ** math.floor(math.log10(min(share for _, share in points))))
    left, right = (
        math.floor(math.log10(min(x for x, _ in points))),
        math.ceil(math.log10(max(x for x, _ in points)) + 1e-9),
    )
    right = max(right, left + 1)
    across = lambda x: LEFT + (math.log10(x) - left) / (right - left) * (WIDTH - LEFT - 8)
    down = lambda share: 8 + math.log10(share) / math.log10(lowest) * (HEIGHT - BOTTOM - 8)
    parts = list(_grid(left, right, lowest, across, down))
    for i, _, curve in curves:
        inside = [(x, share) for x, share in curve if share >= lowest and left <= math.log10(x) <= right]
        line = " ".join(f"{across(x):.1f},{down(share):.1f}" for x, share in inside)
        parts.append(f"<polyline points='{line}' fill='none' stroke='var(--c{i % COLOURS})' stroke-width='2'/>")
    keys = "".join(
        f"<span class='key' style='background:var(--c{i % COLOURS})'></span>{escape(name)}" for i, name, _ in curves
    )
    return (
        f"<figure><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='Share of rows above a KLD'>{''.join(parts)}</svg>"
        f"<figcaption>Share of rows above a KLD:{keys}</figcaption></figure>"
    )


def _grid(left: int, right: int, lowest: float, across: Any, down: Any) -> Iterator[str]:
    for power in range(left, right + 1):
        x = across(10.0**power)
        yield f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='8' y2='{HEIGHT - BOTTOM}'/>"
        if (power - left) % max(1, (right - left) // 5) == 0:
            yield f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 14}' text-anchor='middle'>{10.0**power:g}</text>"
    for power in range(round(math.log10(lowest)), 1):
        y = down(10.0**power)
        yield f"<line class='grid' x1='{LEFT}' x2='{WIDTH - 8}' y1='{y:.1f}' y2='{y:.1f}'/>"
        yield f"<text x='{LEFT - 5}' y='{y + 4:.1f}' text-anchor='end'>{100 * 10.0**power:g} %</text>"
    yield f"<text x='{(LEFT + WIDTH) / 2}' y='{HEIGHT - 4}' text-anchor='middle'>KLD, nats</text>"
