"""Distil a small causal language model from its hidden states and head, on text that comes with Python.

    pip install '.[examples]' && python examples/language_model.py

A teacher of two layers learns the topics of Python's `help()`, token by token. Then two students of one layer and a
third of its width: one learns from the text, one from the teacher through `kullback.linear_divergence`, which takes
hidden states and heads and never holds the logits of a batch. Prints and draws how far each is from the teacher on
text that none has seen. Forty seconds on one core.
"""

import argparse
import re
from collections import Counter
from pathlib import Path
from pydoc_data import topics

import matplotlib
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import kullback

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

CONTEXT, BATCH, VOCAB = 48, 16, 4096


def corpus() -> Tensor:
    """The help topics as numbers: the commonest words and signs, 0 for all others."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    words = re.findall(r"\w+|[^\w\s]|\n+", text)
    numbers = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(VOCAB - 1))}
    return torch.tensor([numbers.get(word, 0) for word in words])


class Model(nn.Module):
    """A causal transformer without its last product: hidden states, and the head that turns them into logits."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        return self.layers(hidden, mask=self.mask, is_causal=True)


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stretches of the text, and the tokens that follow each of theirs."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    stretches = text[starts + torch.arange(CONTEXT + 1)]
    return stretches[:, :-1], stretches[:, 1:]


def train(name: str, model: nn.Module, steps: int, text: Tensor, loss, watch=None) -> list[tuple[int, float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in track(range(steps + 1), name):
        if watch and step % max(1, steps // 15) == 0:
            seen.append((step, watch(model)))
        optimizer.zero_grad()
        loss(model, *batch(text, generator)).backward()
        optimizer.step()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("language_model.png"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=150, help="of training, each model (default: %(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    text = corpus()
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def from_text(model: Model, tokens: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model(tokens)).flatten(0, 1), following.flatten())

    teacher = Model(192, 2)
    train("teacher", teacher, arguments.steps, seen, from_text)
    teacher.requires_grad_(False)

    def from_teacher(model: Model, tokens: Tensor, following: Tensor) -> Tensor:
        return kullback.linear_divergence(model(tokens), model.head.weight, teacher(tokens), teacher.head.weight)

    generator = torch.Generator().manual_seed(1)
    held = [batch(unseen, generator)[0] for _ in range(4)]

    @torch.no_grad()
    def distance(model: Model) -> float:
        return sum(from_teacher(model, tokens, tokens).item() for tokens in held) / len(held)

    curves = {}
    for name, loss in (("the text", from_text), ("the teacher", from_teacher)):
        torch.manual_seed(2)
        student = Model(64, 1)
        curves[name] = train(f"student of {name}", student, arguments.steps, seen, loss, distance)
        print(f"student of {name}: {curves[name][0][1]:.3f} -> {curves[name][-1][1]:.3f} nats a token from the teacher")

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("tab:gray", "tab:blue"), strict=True):
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, color=colour, label=f"learns from {name}")
    axes.set_xlabel("steps")
    axes.set_ylabel("KL(teacher ‖ student), nats a token")
    axes.set_title("Distance from the teacher on unseen text")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(arguments.plot, dpi=150)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
