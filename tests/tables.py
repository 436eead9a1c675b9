"""Tables in documents: `make tables` writes them from DIVERGENCES and results, a test holds the documents to them."""

import ast
import functools
import graphlib
import json
import math
import re
import runpy
from pathlib import Path

from kullback.cli import rows
from kullback.divergences import DIVERGENCES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
BEGIN, END = "<!-- kinds: written by `make tables` -->", "<!-- end of kinds -->"


def parameter(known):
    return "".join(f"{name}={default}" for name, default in known.defaults.items())


def markdown():
    """A row for each kind."""
    lines = ["| kind | definition | parameter |", "|---|---|---|"]
    for name, known in DIVERGENCES.items():
        own = f"`{parameter(known)}`" if known.parameter else ""
        lines.append(f"| `{name}` | {known.definition.replace('|', '&#124;')} | {own} |")
    return "\n".join(lines)


def markdown_with_domains():
    lines = ["| kind | definition | parameter | default | admitted |", "|---|---|---|---|---|"]
    for name, known in DIVERGENCES.items():
        own = known.parameter
        rest = "| | |" if own is None else f"`{own.name}` | {own.default} | {own.domain} |"
        lines.append(f"| [{name}](#{name}) | {known.definition.replace('|', '&#124;')} | {rest}")
    return "\n".join(lines)


def docstring():
    """In columns, indented as a docstring."""
    rows = [("kind", "definition, p = target, q = input", "parameter")]
    rows += [(name, known.definition, parameter(known)) for name, known in DIVERGENCES.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"    | {line} |" for line in lines)


def decisions():
    """A line for each."""
    paths = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    titles = (path.read_text(encoding="utf-8").partition("\n")[0].partition(". ")[2] for path in paths)
    return "\n".join(f"{int(p.name[:4])}. [{title}]({p.name})" for p, title in zip(paths, titles, strict=True))


def first_sentence(text):
    sentence = re.split(r"(?<=[\w)][.;])\s|\n\s*\n", text)[0]
    return " ".join(sentence.split()).rstrip(".;").replace("|", "&#124;")


def modules():
    """Python's files, and the first sentence of each; packages of the command line and of integrations in one line."""
    source = ROOT / "src/kullback"
    files = [*source.glob("*.py"), *source.glob("*/__init__.py"), *source.glob("backends/**/*.py")]
    lines = ["| file | what is in it |", "|---|---|"]
    for path in sorted(set(files) - {source / "__init__.py", source / "__main__.py"}):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        lines.append(f"| `{path.relative_to(source)}` | {first_sentence(said)} |")
    return "\n".join(lines)


def by_level(needs):
    """What each name needs -> lists of names, none before those that it needs: a circle is an error."""
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        yield sorted(ready)
        sorter.done(*ready)


def arrows():
    """Python's modules by what they import."""
    source = ROOT / "src/kullback"
    imported = {}
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kullback":
                names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                imported.setdefault(module, set()).update({*names} - {module})
    del imported["__init__"]  # imports what is public, and nobody imports it
    lines = ["| level | modules |", "|---|---|"]
    for level, names in enumerate(by_level(imported), 1):
        lines.append(f"| {level} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def levels():
    """The CUDA files by what they include."""
    source = ROOT / "src/kullback/backends"
    texts = {str(path.relative_to(source)): path.read_text(encoding="utf-8") for path in source.glob("cuda/**/*.cuh")}

    included = {name: re.findall(r'^#include "(.*)"', text, re.M) for name, text in texts.items()}
    lines = ["| level | file | what is in it |", "|---|---|---|"]
    for level, names in enumerate(by_level(included), 1):
        for name in filter(texts.get, names):
            said = re.match(r"/\*(.*?)\*/", texts[name], re.S)[1].strip()
            lines.append(f"| {level} | `{name}` | {first_sentence(said)} |")
    return "\n".join(lines)


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def regimes():
    """The errors of every backend by regime, of the machines that have it; the textbook's on a CPU."""
    results = []
    for machine in ("cpu", "h200"):
        report = load(f"{machine}/regimes")
        known = {r["of"] for r in results}
        results += [r for r in report["results"] if r["of"] not in known]
    return runpy.run_path(str(ROOT / "benchmarks/regimes.py"))["tables"](results)


def real_rows(name, beside=None):
    """Milliseconds with a student's gradient, of kinds that `beside` lacks; three passes' time over it."""
    report = load(name)
    others = {result["case"]["kind"] for result in load(beside)["results"]} if beside else ()
    cells = {}
    for result in report["results"]:
        case = result["case"]
        entry = next(e for e in result["results"] if e["task"] == "forward + gradient")
        row = cells.setdefault((case["source"], case["student"], f"{case['rows']} × {case['vocab']}"), {})
        row[case["kind"]] = f"{entry['seconds'] * 1e3:.2f} ({entry['of_ceiling']:.2f})"
    kinds = [kind for kind in next(iter(cells.values())) if kind not in others]
    lines = ["| rows | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for (source, student, shape), row in cells.items():
        lines.append(f"| {source}, {student}, {shape} | " + " | ".join(row.get(kind, "") for kind in kinds) + " |")
    return "\n".join(lines)


def rivals_in_float32():
    """Milliseconds on an H200: the loss, and with a student's gradient; of ours each row's, and then its gradient."""
    names = ["kullback", "fast-llm", "torch.compile", "liger", "eager"]
    lines = ["| rows | kind | kullback, each row | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    for result in load("h200/real_float32")["results"]:
        case, found = result["case"], milliseconds(result)
        if not any(name in names[1:] for name, _ in found):
            continue
        cells = [f"{found['kullback', TASKS[3]]:.2f}"]
        for name in names:
            told = (found.get((name, task)) for task in TASKS[:2])
            cells.append(" / ".join(f"{time:.2f}" for time in told if time is not None))
        lines.append(f"| {case['student']} | {case['kind']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rivals_on_real_rows():
    """Milliseconds on an H200, each with a student's gradient."""
    report = load("h200/real_rivals")
    names = ["kullback", "fast-llm", "torch.compile", "liger", "eager"]
    lines = ["| rows | kind | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for result in report["results"]:
        case = result["case"]
        times = {e["name"]: e["seconds"] * 1e3 for e in result["results"] if e["task"] == "forward + gradient"}
        if len(times) > 1:
            cells = " | ".join(f"{times[name]:.2f}" if name in times else "" for name in names)
            lines.append(f"| {case['student']} | {case['kind']} | {cells} |")
    return "\n".join(lines)


def real_rows_on_a_cpu():
    """Medians of rounds in which all ran in turn, milliseconds: as memory is by default, and retained."""
    paths = (ROOT / f"benchmarks/results/cpu/{name}.json" for name in ("real", "real_retained"))
    default, retained = (json.loads(path.read_text(encoding="utf-8"))["results"] for path in paths)
    names = ("kullback", "torch.compile", "eager")
    head = ["student", "kind", "", *names, *(f"retained: {name}" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) - 1)]
    for pair in zip(default, retained, strict=True):
        case = pair[0]["case"]
        for task in ("forward", "forward + gradient"):
            times = [
                {e["name"]: e["milliseconds"]["median"] for e in result["in_turn"] if e["task"] == task}
                for result in pair
            ]
            cells = " | ".join(f"{found[name]:.0f}" for found in times for name in names)
            lines.append(f"| {case['student']} | {case['kind']} | {task} | {cells} |")
    return "\n".join(lines)


def labels():
    """Milliseconds with a student's gradient and times the first column; of figures of rows there is none."""
    newest, of_labels, on_a_cpu = (load(name)["results"] for name in ("h200/labels", "h100/labels", "cpu/figures"))
    lines = []
    for part, head, results in (
        ("dense", "H200: rows, kind", newest),
        ("dense", "H100: rows, kind", of_labels),
        ("linear", "H100: hidden states", of_labels),
        ("alone", "H200: labels alone", newest),
        ("figures", "H200: figures of rows", newest),
        ("figures", "two cores: figures of rows", on_a_cpu),
    ):
        found = [result for result in results if result["part"] == part]
        names = list(dict.fromkeys(name for result in found for name in result["seconds"]))
        lines += ["", f"| {head} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for result in found:
            case, seconds = result["case"], result["seconds"]
            first = next(iter(seconds.values()))
            of = f"{case['rows']} × {case['vocab']}"
            if "student" in case:
                of = f"{case['student']}, {case['kind']}" if part == "dense" else f"{case['student']}, {of}"
            cells = (
                f"{seconds[name] * 1e3:.2f} ({seconds[name] / first:.2f})" if name in seconds else "" for name in names
            )
            lines.append(f"| {of} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:])


TASKS = ("forward", "forward + gradient", "forward + both gradients", "each row, then its gradient")


def literal():
    """Milliseconds of probabilities and log-probabilities on an H200, the ceiling's share in those of a forward."""
    lines = ["| | kullback | of the ceiling | torch.compile | eager |", "|---|" + "---|" * 4]
    for result in load("h200/cases"):
        case, found = result["case"], {(e["name"], e["task"]): e for e in result["results"]}
        for task in TASKS[:2]:
            ours, *rivals = (found[name, task]["seconds"] * 1e3 for name in ("kullback", "torch.compile", "eager"))
            share = f"{found['kullback', task]['of_ceiling']:.3f}" if task == "forward" else ""
            others = " | ".join(f"{time:.3f}" for time in rivals)
            lines.append(
                f"| {case['kind']}, {case['form']}, {case['dtype']}, {task} | {ours:.3f} | {share} | {others} |"
            )
    return "\n".join(lines)


def logits(name, noise, tasks):
    """Milliseconds of random logits on a GPU, and the share in them of the bytes that must move."""
    results = load(name)
    rows = {}
    for result in sorted(results, key=lambda result: list(DIVERGENCES).index(result["case"]["kind"])):
        case = result["case"]
        if case["noise"] == noise:
            ours = {e["task"]: e for e in result["results"] if e["name"] == "kullback"}
            dtype = "" if case["dtype"] == "bfloat16" else f", {case['dtype']}"
            cells = [f"{ours[task]['seconds'] * 1e3:.2f} ({ours[task]['of_ceiling']:.2f})" for task in tasks]
            rows[f"{case['kind']}, {case['rows']} × {case['vocab']}{dtype}"] = " | ".join(cells)
    lines = ["| | " + " | ".join(tasks) + " |", "|---|" + "---|" * len(tasks)]
    return "\n".join([*lines, *(f"| {row} | {cells} |" for row, cells in rows.items())])


def milliseconds(result):
    """Of each contestant and task, but of those that failed."""
    return {(e["name"], e["task"]): e["seconds"] * 1e3 for e in result["results"] if "seconds" in e}


def rivals_on_random_rows():
    """Milliseconds of far rows of logits on an H200, of all that were run there."""
    names = ["kullback", "torch.compile", "liger", "eager"]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for result in load("h200/logits"):
        case, found = result["case"], milliseconds(result)
        if case["noise"] != 1.0 or ("liger", "forward") not in found:
            continue
        for task in TASKS[:2]:
            cells = " | ".join(f"{found[name, task]:.2f}" for name in names)
            lines.append(f"| {case['kind']}, {case['rows']} × {case['vocab']}, {task} | {cells} |")
    return "\n".join(lines)


def title_of(case):
    shape = ", ".join(str(case[name]) for name in ("rows", "hidden", "teacher_hidden", "vocab"))
    return f"{case['kind']}, {case['student']}: {shape}"


def linear_of_ours(machine):
    """Milliseconds, and how many times the four products'."""
    lines = ["| | float32 logits | 16-bit logits |", "|---|---|---|"]
    for result in load(f"{machine}/linear")["linear"]:
        ours = [entry for entry in result["results"] if entry["name"].startswith("kullback")]
        cells = " | ".join(f"{entry['seconds'] * 1e3:.2f} ({entry['of_floor']:.2f})" for entry in ours)
        lines.append(f"| {title_of(result['case'])} | {cells} |")
    return "\n".join(lines)


def linear(machine):
    """Times over four products', memory, and errors against float64 of the same operands; ours and rivals'."""
    report = load(f"{machine}/linear")
    lines = ["| | ms | times the products | GB | error: loss | hidden | head |", "|---|" + "---|" * 6]
    for result in report["linear"]:
        lines.append(f"| **{title_of(result['case'])}** | {result['floor_seconds'] * 1e3:.1f} | 1 | | | | |")
        for entry in result["results"]:
            errors = (entry[f"{name}_error"] for name in ("loss", "hidden_gradient", "head_gradient"))
            times = f"{entry['seconds'] * 1e3:.1f} | {entry['of_floor']:.2f}"
            peak = entry["peak_bytes_above_gradients"]
            memory = "" if peak is None else f"{peak / 1e9:.1f}"
            shown = " | ".join(f"{error:.1g}" for error in errors)
            lines.append(f"| {entry['name']} | {times} | {memory} | {shown} |")
    return "\n".join(lines)


def inside(result, figures):
    """Rows of one case: its name, and of each contestant seconds, memory and errors."""
    case = result["case"]
    words = ", ".join(f"{name} {value}" for name, value in case.items() if name not in ("part", "lengths", "device"))
    lengths = ", ".join(map(str, case["lengths"]))
    yield f"| **{case['part']}, {words}; completions of {lengths}** |" + " |" * (2 + len(figures))
    for entry in result["results"]:
        errors = (entry[f"{name}_error"] for name in figures)
        shown = " | ".join("" if error is None else f"{error:.0e}" for error in errors)
        seconds = f"{entry['seconds']:.{2 if entry['seconds'] > 0.1 else 4}f}"
        yield f"| {entry['name']} | {seconds} | {entry['peak_bytes'] / 1e6:.0f} | {shown} |"


def integrations(parts, figures, machine="cpu"):
    """A step's time, memory and errors against float64: inside other libraries."""
    report = load(f"{machine}/integrations")
    heads = ["", "s", "MB", *(f"error: {name.replace('_', ' ')}" for name in figures)]
    lines = ["| " + " | ".join(heads).lstrip() + " |", "|---|" + "---|" * (len(heads) - 1)]
    for result in report["results"]:
        if result["case"]["part"] in parts:
            lines.extend(inside(result, figures))
    return "\n".join(lines)


def ranks():
    """Two GPUs that share a vocabulary, beside one and rivals; and what is foretold of more."""
    report = load("h100/parallel")
    lines = ["| | ms | one GPU's time over it | GB | forward, ms |", "|---|---|---|---|---|"]
    for name, part in report.items():
        if not name.startswith(("dense", "linear")):
            continue
        case, one = part["case"], part["results"][0]["seconds"]
        shape = " × ".join(str(case[size]) for size in ("rows", "hidden", "vocab") if size in case)
        lines.append(f"| **{case['kind']}, {'hidden states' if 'hidden' in case else 'logits'}: {shape}** | | | | |")
        for entry in part["results"]:
            forward = f"{entry['forward_seconds'] * 1e3:.2f}" if "forward_seconds" in entry else ""
            times = f"{entry['seconds'] * 1e3:.2f} | {one / entry['seconds']:.2f}"
            lines.append(f"| {entry['name']} | {times} | {entry['peak_bytes'] / 1e9:.1f} | {forward} |")
        for way in ("forecast in the kernel", "forecast"):
            for count, foretold in part.get(way, {}).items():
                if count != "2":
                    times = f"{foretold['seconds'] * 1e3:.2f} | {foretold['of_one']:.2f}"
                    lines.append(f"| {way.replace('forecast', f'forecast: {count} GPUs')} | {times} | | |")
    return "\n".join(lines)


def header(*names):
    return [f"| {' | '.join(names)} |", "|---|" + "---|" * (len(names) - 1)]


def best(found, names):
    """The rival that is first, and how many times our time it takes."""
    times = {name: found[name] for name in names if name in found}
    first = min(times, key=times.get)
    return f"{first}, {times[first] / found['kullback']:.1f}"


def summary():
    """A line for each kind of input: our time, the floor's share in it, eager PyTorch's, and the next best."""
    lines = header("", "kullback", "the floor over it", "eager", "next best, times as long")
    rest = ("torch.compile", "liger", "liger chunked", "liger fused", "trl chunked", "fast-llm", "eager")

    def line(of, found, share, rivals=rest):
        lines.append(f"| {of} | {found['kullback']:.2f} | {share:.2f} | {found['eager']:.2f} | {best(found, rivals)} |")

    def seconds(result, task):
        return {e["name"]: e["seconds"] * 1e3 for e in result["results"] if e.get("task", task) == task}

    for result in load("h200/cases"):
        case, found = result["case"], seconds(result, "forward")
        if (case["kind"], case["form"], case["dtype"]) == ("kl", "probs", "float32"):
            ours = next(e for e in result["results"] if (e["name"], e["task"]) == ("kullback", "forward"))
            line(f"kl of probabilities, {case['rows']} × {case['vocab']}, forward", found, ours["of_ceiling"])
    for result in load("h200/real_rivals")["results"]:
        case, found = result["case"], seconds(result, "forward + gradient")
        if case["source"] == "real" and case["student"] == "bits5" and "eager" in found:
            ours = next(e for e in result["results"] if (e["name"], e["task"]) == ("kullback", "forward + gradient"))
            line(f"{case['kind']} of a model's logits, {case['rows']} × {case['vocab']}", found, ours["of_ceiling"])
    for result in load("h200/linear")["linear"]:
        case, found = result["case"], seconds(result, None)
        if case["rows"] == 4096 and case["student"] == "bits5":
            share = 1 / next(e["of_floor"] for e in result["results"] if e["name"] == "kullback")
            shape = f"{case['rows']} × {case['hidden']} × {case['vocab']}"
            right = [e["name"] for e in result["results"] if e["hidden_gradient_error"] < 0.01]
            line(f"{case['kind']} of hidden states, {shape}", found, share, [n for n in rest if n in right])
    return "\n".join(lines)


def ceiling():
    """What only reading two tensors takes."""
    lines, shown = header("dtype", "reading both, ms", "TB/s", "three times one tensor's read, ms"), set()
    for result in load("h200/cases"):
        dtype = result["case"]["dtype"]
        if dtype not in shown:
            shown.add(dtype)
            milliseconds = result["read_seconds"] * 1e3
            speed = result["read_terabytes_a_second"]
            lines.append(f"| {dtype} | {milliseconds:.3f} | {speed:.2f} | {1.5 * milliseconds:.2f} |")
    return "\n".join(lines)


def students():
    """What a language model's rows are like, and how they were made."""
    report = load("cpu/students")
    made = report["rows"]
    told = {name: f"noise of {size:.0%} on the teacher's hidden states" for name, size in rows.NOISE.items()}
    told |= {**made["students"], "identical": "the teacher itself"}
    found = dict(sorted(report["students"].items(), key=lambda item: -item[1]["mean"]))
    lines = [*header("student", "what it is"), *(f"| {name} | {told[name]} |" for name in found)]
    said = f"The teacher's perplexity is {made['perplexity']['teacher']:.1f}. The text is {made['text']}."
    return "\n".join([*lines, "", rows.table(found), "", said])


def cpu():
    lines = header("backend, allocator", "", "kullback", "reading both", "torch.compile", "eager")
    for backend in ("c", "torch"):
        for allocator in ("default", "retained"):
            result = next(
                r
                for r in load(f"cpu/{backend}_{allocator}")
                if (r["case"]["kind"], r["case"]["form"], r["case"]["dtype"]) == ("kl", "probs", "float32")
            )
            found = milliseconds(result)
            for task in TASKS[:2]:
                ours, *rivals = (f"{found[name, task]:.1f}" for name in ("kullback", "torch.compile", "eager"))
                read = f"{result['read_seconds'] * 1e3:.1f}"
                lines.append(f"| {backend}, {allocator} | {task} | {ours} | {read} | {' | '.join(rivals)} |")
    return "\n".join(lines)


def logits_on_a_cpu():
    lines = header("backend, allocator", "case", "", "kullback", "torch.compile", "eager")
    for backend, allocator, name in (
        ("c", "default", "c_default"),
        ("c", "retained", "logits_retained"),
        ("torch", "default", "logits_torch"),
    ):
        for result in load(f"cpu/{name}"):
            case = result["case"]
            if case["form"] != "logits":
                continue
            found = milliseconds(result)
            dtype = "" if case["dtype"] == "float32" else f", {case['dtype']}"
            for task in TASKS[:2]:
                cells = " | ".join(f"{found[each, task]:.0f}" for each in ("kullback", "torch.compile", "eager"))
                of = f"{case['kind']}, {case['rows']} × {case['vocab']}{dtype}"
                lines.append(f"| {backend}, {allocator} | {of} | {task} | {cells} |")
    return "\n".join(lines)


def torch_on_a_gpu():
    """Milliseconds of logits by the torch backend, forced, beside torch's own."""
    names = ("kullback", "eager", "torch.compile")
    lines = header("", "", *names, "kullback over eager")
    for result in load("h100/real_torch")["results"] + load("h100/logits_torch"):
        case, found = result["case"], milliseconds(result)
        student = f", {case['student']}" if "student" in case else ""
        for task in TASKS[:2]:
            times = [found[name, task] for name in names]
            of = f"{case['kind']}, {case['rows']} × {case['vocab']}, {case['dtype']}{student}"
            cells = " | ".join(f"{each:.1f}" for each in times)
            lines.append(f"| {of} | {task} | {cells} | {times[0] / times[1]:.2f} |")
    return "\n".join(lines)


def long_batches():
    lines = header("tokens", "microseconds a token", "GB above the gradients")
    for count, of in sorted(load("h200/linear")["long"].items(), key=lambda item: int(item[0])):
        lines.append(f"| {count} | {of['microseconds_a_token']:.2f} | {of['peak_bytes_above_gradients'] / 1e9:.1f} |")
    return "\n".join(lines)


WITH_LABELS = "seconds_with_labels", "seconds_with_smoothed_labels"


def topk():
    lines = header("", "tokens of the teacher", "forward", "forward + gradient", "with labels", "smoothed")
    for device, name in (("an H200", "h200"), ("two cores", "cpu")):
        for result in load(f"{name}/linear")["topk"]:
            case = result["case"]
            cells = (
                f"{result['forward_seconds'] * 1e3:.2f} ({result['forward_of_ceiling']:.2f})",
                f"{result['seconds'] * 1e3:.2f} ({result['of_ceiling']:.2f})",
                *(f"{result[key] * 1e3:.2f}" if key in result else "" for key in WITH_LABELS),
            )
            lines.append(f"| {device}, {case['rows']} × {case['vocab']} | {case['k']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def all_gather():
    lines = header("bytes of a rank", "all-gather, µs")
    for size, seconds in load("h100/parallel")["all_gather_seconds"].items():
        lines.append(f"| {size} | {seconds * 1e6:.0f} |")
    return "\n".join(lines)


def host():
    names = {
        "kullback": "kl_div of probs",
        "kullback, logits": "kl of logits",
        "eager": "eager PyTorch",
        "nothing": "a Function that computes nothing",
    }
    lines = header("rows × vocab", "", *names.values())
    for of in load("h200/host")["host"]:
        for task in TASKS[:2]:
            found = (of["microseconds"][f"{name}, {task}"] for name in names)
            cells = " | ".join(f"{each['median']:.0f} ({each['fastest']:.0f})" for each in found)
            lines.append(f"| {of['rows']} × {of['vocab']} | {task} | {cells} |")
    return "\n".join(lines)


def first_use():
    lines = header("", "empty cache, s", "from the cache, ms")
    for name, of in load("h200/host")["first_use"].items():
        lines.append(f"| {name} | {of['cold']:.2f} | {of['warm'] * 1e3:.0f} |")
    return "\n".join(lines)


def near():
    """KL of float32 logits near p = q on C, beside PyTorch's."""
    names = ("value", "gradient", "negative rows")
    lines = header("offset", "KL", *(f"{who}: {name}" for who in ("kullback", "PyTorch") for name in names))
    for of in load("cpu/near")["results"]:
        cells = " | ".join(
            f"{of[f'{who}_value']:.0e} | {of[f'{who}_gradient']:.0e} | {of[f'{who}_negative']}"
            for who in ("kullback", "torch")
        )
        lines.append(f"| {of['offset']:.0f} | {of['kl']:.0e} | {cells} |")
    return "\n".join(lines)


def near_on_a_gpu():
    """The worst of all vocabularies and offsets on an H200, of values above 1e-9, and gradients."""
    kinds = ("kl", "jensen_shannon")
    lines = header("eps", *(f"{kind}: {name}" for kind in kinds for name in ("value", "gradient")))
    results = [r for r in load("h200/accuracy")["results"] if (r["dtype"], r["teacher"]) == ("float32", "plain")]
    for eps in sorted({r["eps"] for r in results} - {0.0}, reverse=True):
        cells = []
        for kind in kinds:
            found = [r for r in results if (r["eps"], r["kind"]) == (eps, kind)]
            values = [max(r.get("value", 0.0), r.get("tiny", 0.0)) for r in found]
            gradients = [max(r["written"], r["again"]) for r in found]
            cells += [f"{max(values):.0e}", f"{max(gradients):.0e}"]
        lines.append(f"| {eps:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def smollm2():
    """What examples/smollm2.py found."""
    found = load("cpu/smollm2")
    first, last = found["curve"][0], found["curve"][-1]
    lines = header("", "perplexity of unseen text", "kl from the teacher, nats a token")
    lines.append(f"| teacher, {found['layers']} layers | {first['teacher_perplexity']:.1f} | 0 |")
    removed = ", ".join(map(str, found["removed"]))
    lines.append(f"| student, without layers {removed} | {first['perplexity']:.1f} | {first['kl']:.3f} |")
    told = f"student after {found['steps']} steps of {found['window']} tokens"
    lines.append(f"| {told} | {last['perplexity']:.1f} | {last['kl']:.3f} |")
    minutes, threads = found["seconds"] / 60, found["threads"]
    by = "one thread" if threads == 1 else f"{threads} threads"
    said = f"{found['unseen_tokens']} tokens were judged. It took {minutes:.0f} minutes with {by}."
    return "\n".join([*lines, "", said])


def between(begin, end, table):
    pattern = re.compile(f"({re.escape(begin)}\n).*?(\n{re.escape(end)})", re.S)
    return lambda text: pattern.subn(lambda match: match[1] + table() + match[2], text)


def worst_rows(*files):
    """The largest relative error of a single row's loss, over students; of identical rows it is the textbook's own.

    A kind that a later file has is as it is there.
    """
    worst = {}
    for results in files:
        errors = {}
        for result in results:
            case = result["case"]
            if case["student"] == "identical":
                continue
            of = errors.setdefault(case["kind"], {"real": 0.0, "made": 0.0})
            of[case["source"]] = max(of[case["source"]], result["worst_row_error"])
        worst |= errors
    sources = [source for source in ("real", "made") if any(of[source] for of in worst.values())]
    lines = ["| kind | " + " | ".join(f"{source} rows" for source in sources) + " |", "|---|" + "---|" * len(sources)]
    lines += [
        f"| {kind} | " + " | ".join(f"{of[source]:.0e}" for source in sources) + " |" for kind, of in worst.items()
    ]
    return "\n".join(lines)


def worst_in_16_bits():
    return worst_rows(load("h200/real")["results"] + load("h200/real_others")["results"], written_in("bfloat16"))


def worst_in_float32():
    return worst_rows(load("h200/real_float32")["results"], written_in("float32"))


def written_in(dtype):
    return [result for result in load("h100/written_rows")["results"] if result["case"]["dtype"] == dtype]


RULE = re.compile(r"^    \| kind .*\|$(?:\n    \|.*\|$)+", re.M)
KINDS = {
    "README.md": between(BEGIN, END, markdown),
    "docs/mathematics.md": between(BEGIN, END, markdown_with_domains),
    "src/kullback/functional.py": lambda text: RULE.subn(lambda match: docstring(), text),
}


def gradients():
    """How far gradients are off on rows of a language model, ours and eager PyTorch's."""
    lines = header("student", "dtype", "kind", "kullback", "its worst row", "eager", "its worst row")
    for result in load("cpu/gradients")["results"]:
        case = result["case"]
        errors = (result[name][of] for name in ("kullback", "eager") for of in ("gradient_error", "worst_row"))
        cells = " | ".join(f"{error:.0e}" for error in errors)
        lines.append(f"| {case['student']} | {case['dtype']} | {case['kind']} | {cells} |")
        assert result["negative"] == 0
    return "\n".join(lines)


def files():
    """Comparing two files of logits, beside reading them."""
    report = load("cpu/files")
    case, of = report["case"], report["seconds"]
    lines = header(f"{case['rows']} × {case['vocab']}", "reading both", "compare", "times as long", "MB resident")
    for where in ("disk", "memory"):
        read, compare = (of[f"{name}, {where}"] for name in ("reading both", "compare"))
        resident = f"{report['resident_bytes'] / 1e6:.0f}"
        lines.append(f"| from {where} | {read:.1f} | {compare:.1f} | {compare / read:.2f} | {resident} |")
    return "\n".join(lines)


def section(name, table):
    return between(f"<!-- {name}: written by `make tables` -->", f"<!-- end of {name} -->", table)


REGIMES = section("regimes", regimes)
PERFORMANCE = (
    section("summary", summary),
    section("ceiling", ceiling),
    section("students", students),
    section("CPU", cpu),
    section("logits, CPU", logits_on_a_cpu),
    section("torch backend", torch_on_a_gpu),
    section("files", files),
    section("long", long_batches),
    section("topk", topk),
    section("all-gather", all_gather),
    section("host", host),
    section("first use", first_use),
    section("literal", literal),
    section("logits, far", functools.partial(logits, "h100/logits", 1.0, TASKS)),
    section("logits, close", functools.partial(logits, "h100/logits", 0.03, TASKS)),
    section("shapes", functools.partial(logits, "h200/shapes", 1.0, TASKS[:2])),
    section("rivals, random rows", rivals_on_random_rows),
    section("real rows", functools.partial(real_rows, "h200/real")),
    section("real rows, other kinds", functools.partial(real_rows, "h200/real_others", "h200/real")),
    section("real rows, H100", functools.partial(real_rows, "h100/real")),
    section("real rows, other kinds, H100", functools.partial(real_rows, "h100/real_others", "h100/real")),
    section("rivals", rivals_on_real_rows),
    section("rivals, float32", rivals_in_float32),
    section("real rows, CPU", real_rows_on_a_cpu),
    section("linear", functools.partial(linear, "h200")),
    section("linear, H100", functools.partial(linear_of_ours, "h100")),
    section("linear, CPU", functools.partial(linear, "cpu")),
    section("labels", labels),
    section("ranks", ranks),
)


MODULES = (section("arrows", arrows), section("modules", modules), section("levels", levels))
NUMERICS = (
    section("near", near),
    section("near, H200", near_on_a_gpu),
    section("worst rows", worst_in_16_bits),
    section("worst rows, float32", worst_in_float32),
    section("gradients", gradients),
    REGIMES,
)


def each(sections, text):
    counts = []
    for table in sections:
        text, count = table(text)
        counts.append(count)
    return text, math.prod(counts)


TRANSFORMERS = [
    section("integrations", functools.partial(integrations, ("trl", "distil"), ("loss", "entropy", "gradient_norm"))),
    section("TRL, H200", functools.partial(integrations, ("trl",), ("loss", "entropy", "gradient_norm"), "h200")),
]
FILES = {
    **KINDS,
    "docs/numerics.md": functools.partial(each, NUMERICS),
    "docs/performance.md": functools.partial(each, PERFORMANCE),
    "docs/examples.md": section("smollm2", smollm2),
    "docs/transformers.md": functools.partial(each, TRANSFORMERS),
    "docs/integrations.md": section(
        "integrations",
        functools.partial(
            integrations, ("gkd", "sdpo", "modelopt", "verl", "nemo_rl", "megatron"), ("loss", "gradient_norm")
        ),
    ),
    "CONTRIBUTING.md": functools.partial(each, MODULES),
    "docs/decisions/README.md": between("<!-- written by `make tables` -->", "<!-- end -->", decisions),
}


def rendered(name):
    """The file as it should be."""
    text, count = FILES[name]((ROOT / name).read_text(encoding="utf-8"))
    assert count == 1, f"{name} has {count} such tables"
    return text


if __name__ == "__main__":
    for name in FILES:
        (ROOT / name).write_text(rendered(name), encoding="utf-8")
