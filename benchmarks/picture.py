"""Draws what documents show of results into docs/pictures: `make pictures`.

Time against the floor on a language model's rows, and the curve of examples/smollm2.py.
"""

import argparse
import json
import runpy
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/h200/real_rivals.json"
PICTURE = ROOT / "docs/pictures/real_rows.svg"
CURVE = ROOT / "benchmarks/results/cpu/smollm2.json"
CURVE_PICTURE = ROOT / "docs/pictures/smollm2.svg"
STUDENTS = {"bits5": "student: teacher's weights rounded to 5 bits", "pruned": "student: 4 layers of 30 removed"}
KINDS = "kl", "reverse_kl", "jensen_shannon"
NAMES = {
    "kullback": "kullback",
    "fast-llm": "Fast-LLM",
    "torch.compile": "torch.compile",
    "liger": "Liger",
    "eager": "eager PyTorch",
}
COLOURS = dict(zip(NAMES, ("#c2410c", "#475569", "#64748b", "#94a3b8", "#cbd5e1"), strict=True))
LONGEST = 13.5  # milliseconds; what takes longer has no bar, and says so
BEYOND = ", beyond this axis"


def times(result: dict) -> tuple[dict[str, float], float]:
    """Milliseconds of the loss with the student's gradient, by name; and of the bytes that must move."""
    entries = [e for e in result["results"] if e["task"] == "forward + gradient"]
    ours = next(e for e in entries if e["name"] == "kullback")
    return {e["name"]: e["seconds"] * 1e3 for e in entries}, ours["seconds"] * ours["of_ceiling"] * 1e3


def chosen(results: list[dict], student: str) -> list[dict]:
    def is_shown(case: dict) -> bool:
        return (case["source"], case["student"]) == ("real", student) and case["kind"] in KINDS

    return [result for result in results if is_shown(result["case"])]


def draw(axes: plt.Axes, results: list[dict]) -> None:
    place, middles = 0.0, {}
    for result in results:
        found, floor = times(result)
        first = place
        for name in NAMES:
            if name not in found:
                continue
            length = found[name]
            label = f"{NAMES[name]} {length:.1f}"
            if length > LONGEST:
                axes.text(floor + 0.15, place, label + BEYOND, va="center", fontsize=9, style="italic")
            else:
                axes.barh(place, length, color=COLOURS[name], height=0.86)
                axes.text(length + 0.15, place, label, va="center", fontsize=9)
            place += 1
        middles[result["case"]["kind"]] = (first + place - 1) / 2
        axes.plot([floor, floor], [first - 0.6, place - 0.4], color="black", linewidth=1.2, linestyle=(0, (2, 1.5)))
        place += 0.9
    axes.set_yticks(list(middles.values()), list(middles), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlim(0, LONGEST)
    axes.set_ylim(place - 0.9, -1.7)
    axes.text(floor + 0.15, -1.15, f"floor {floor:.1f}: the bytes that must move", fontsize=9, va="center")
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    matplotlib.rcParams.update({"svg.hashsalt": "kullback", "font.family": "DejaVu Sans"})
    figure, panels = plt.subplots(len(STUDENTS), figsize=(6, 6.6), layout="constrained", sharex=True)
    for axes, (student, title) in zip(panels, STUDENTS.items(), strict=True):
        draw(axes, chosen(results, student))
        axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("milliseconds", fontsize=9)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    runpy.run_path(str(ROOT / "examples/smollm2.py"))["draw"](axes, json.loads(CURVE.read_text("utf-8"))["curve"])
    axes.set_title("SmolLM2-135M without four layers", fontsize=10)
    figure.savefig(CURVE_PICTURE, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
