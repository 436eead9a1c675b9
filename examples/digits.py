"""Distil a classifier of handwritten digits: a small student learns from 100 labels, with and without a teacher.

    pip install '.[examples]' && python examples/digits.py

The teacher has seen every label. The student has labels for 100 images; the teacher's opinion of an image costs no
label, so with it the student learns from all of them. Prints both accuracies, mean and standard deviation of five
students, and draws them. Ten seconds on one core.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import kullback

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

TEMPERATURE = 4.0


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def fit(model: nn.Module, loss, steps: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(-1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where to draw (default: %(default)s)")
    parser.add_argument("--students", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.students < 1:
        parser.error(f"--students must be at least 1; got {arguments.students}")
    if not arguments.plot.resolve().parent.is_dir():
        parser.error(f"--plot: there is no folder {arguments.plot.resolve().parent}")
    if arguments.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot: {arguments.plot} does not end in .png, .pdf or .svg")
    torch.set_num_threads(1)  # networks as small as these wait for a second thread longer than it helps

    digits = load_digits()
    split = train_test_split(digits.data, digits.target, test_size=450, random_state=0, stratify=digits.target)
    images, test_images = (torch.tensor(part / 16, dtype=torch.float32) for part in split[:2])
    labels, test_labels = (torch.tensor(part) for part in split[2:])

    torch.manual_seed(0)
    teacher = fit(network(256), lambda model: F.cross_entropy(model(images), labels), arguments.steps)
    with torch.no_grad():
        opinion = teacher(images)
    few = slice(0, 100)

    def from_labels(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(images[few]), labels[few])

    def from_teacher(model: nn.Module) -> torch.Tensor:
        # T² keeps the gradient's size (Hinton et al., 2015).
        soft = kullback.divergence(model(images), opinion, temperature=TEMPERATURE) * TEMPERATURE**2
        return from_labels(model) + soft

    results = {}
    for name, loss in (("labels of 100 images", from_labels), ("and the teacher's opinion of all", from_teacher)):
        scores = []
        for seed in track(range(arguments.students), name):
            torch.manual_seed(seed + 1)
            scores.append(accuracy(fit(network(16), loss, arguments.steps), test_images, test_labels))
        results[name] = torch.tensor(scores, dtype=torch.float64)
    best = accuracy(teacher, test_images, test_labels)
    print(f"teacher: {best:.1%} of {len(test_labels)} unseen digits")
    for name, scores in results.items():
        print(f"student, {name}: {scores.mean():.1%} ± {scores.std(correction=0):.1%}")

    names = ["labels of 100 images", "those, and the teacher's\nopinion of all images"]
    means, deviations = zip(*((s.mean().item(), s.std(correction=0).item()) for s in results.values()), strict=True)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    bars = axes.bar(names, means, yerr=deviations, capsize=6, width=0.5, color=["tab:gray", "tab:blue"])
    axes.bar_label(bars, [f"{mean:.1%}" for mean in means], label_type="center", color="white")
    axes.axhline(best, color="tab:red", linestyle="--", label=f"the teacher: {best:.1%}")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.margins(x=0.15)
    axes.set_ylabel("unseen digits right")
    axes.set_title("What a small student learns from")
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(arguments.plot, dpi=150)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
