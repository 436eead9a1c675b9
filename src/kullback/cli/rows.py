"""Rows of logits that are a language model's: of a file that `make real` writes, or made after its statistics."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kullback

FOLDER = Path("benchmarks/real")
FILE = "rows.safetensors"
CHECKOUT = Path(__file__).parents[3]
NOISE = {"noise5": 0.05, "noise1": 0.01}  # of the teacher's hidden states, in a row's root mean square
ON_LOAD = (*NOISE, "identical")
STEP = 1024  # rows whose float32 logits are held at once


def find(source: str) -> Path:
    """The file that `real` or a path means: in the working directory, or in the checkout that this module is of."""
    places = [Path(source)] if source != "real" else [root / FOLDER for root in (Path(), CHECKOUT)]
    for place in places:
        path = place / FILE if place.is_dir() else place
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there are no rows at {places[0]}: `make real` in a checkout of kullback writes {FOLDER / FILE}"
    )


@functools.lru_cache(maxsize=1)
def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and how they were made."""
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError("rows of a file need safetensors: pip install safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    if not {"head", "head_scale", "teacher"} <= tensors.keys() or "about" not in about:
        raise ValueError(f"{path} holds no rows as `make real` writes them: it has {', '.join(tensors)[:80]}")
    try:
        return tensors, json.loads(about["about"])
    except ValueError as error:
        raise ValueError(f"{path} does not tell how its rows were made: {error}") from error


def students(source: str) -> list[str]:
    """Stored ones, and those that are made of the teacher on load."""
    tensors, _ = read(find(source))
    return [name for name in tensors if tensors[name].dtype == torch.int8 and name != "head"] + list(ON_LOAD)


def vocabulary(source: str) -> int:
    return read(find(source))[0]["head"].size(0)


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale[:, None]


def hidden_states(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """[tokens, hidden] in float32. Students are stored by their difference from the teacher."""
    teacher = tensors["teacher"].float()
    if name in NOISE:
        noise = torch.randn(teacher.shape, generator=torch.Generator().manual_seed(0))
        return teacher + NOISE[name] * teacher.square().mean(-1, keepdim=True).sqrt() * noise
    if name in ("teacher", "identical"):
        return teacher
    return teacher + dequantised(tensors[name], tensors[f"{name}_scale"])


def load(source: str, student: str, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits of the student and of the teacher.

    Fewer rows than there are, are taken evenly from all; if more are asked for, they repeat. Products are in float32,
    of the same hidden states and head everywhere, then rounded.
    """
    tensors, _ = read(find(source))
    if student not in students(source):
        raise ValueError(f"{student!r} is not one of {', '.join(students(source))}")
    head = dequantised(tensors["head"].to(device), tensors["head_scale"].to(device))
    known = tensors["teacher"].size(0)
    taken = torch.arange(min(rows, known)) * known // min(rows, known)
    pair = []
    for name in (student, "teacher"):
        hidden = hidden_states(tensors, name)[taken].to(device)
        logits = torch.empty(rows, head.size(0), dtype=dtype, device=device)
        for start in range(0, hidden.size(0), STEP):
            logits[start : start + STEP][: hidden.size(0) - start] = hidden[start : start + STEP] @ head.T
        for start in range(hidden.size(0), rows, hidden.size(0)):
            logits[start : start + known] = logits[: min(known, rows - start)]
        pair.append(logits)
    return pair[0], pair[1]


# What follows is read off the rows of the file: `python benchmarks/real.py --tables` prints it
# (and 1, of which no logarithm of the rest can be taken, where TOP ends).
# fmt: off
TOP = {  # at quantiles of rows: the teacher's largest probability
    0: 0.0134, 0.001: 0.0203, 0.01: 0.044, 0.05: 0.0943, 0.25: 0.2396, 0.5: 0.4555, 0.75: 0.7358, 0.9: 0.9391,
    0.95: 0.9812, 0.99: 0.9982, 0.999: 0.9997, 1: 0.9999,
}
RANKS = (2, 3, 5, 10, 30, 100, 1000, 10000, 20000, 30000, 40000, 45000, 48000, 49000, 49140, 49152)
REST = {  # likewise, the logarithm of the share that the token of each rank has of what the first leaves
    0.05: (-2.7, -3.0, -3.4, -4.1, -5.3, -6.7, -9.9, -14.7, -16.7, -18.3, -20.1, -21.5, -23.4, -26.1, -30.0, -36.1),
    0.25: (-1.7, -2.3, -3.0, -4.0, -5.6, -7.4, -11.0, -15.7, -17.7, -19.3, -21.1, -22.5, -24.4, -27.1, -31.1, -37.8),
    0.5: (-1.3, -2.2, -3.2, -4.4, -6.2, -8.0, -11.6, -16.2, -18.1, -19.6, -21.4, -22.8, -24.7, -27.4, -31.3, -37.9),
    0.75: (-1.2, -2.2, -3.3, -4.6, -6.3, -8.1, -11.7, -16.3, -18.3, -19.8, -21.6, -23.0, -24.8, -27.5, -31.3, -37.4),
    0.95: (-1.1, -2.2, -3.3, -4.5, -6.4, -8.3, -11.9, -16.4, -18.4, -20.0, -21.8, -23.2, -25.2, -28.0, -31.8, -37.2),
}
LOG_SUM_EXP = (27.6, 6.2)  # of a row: mean and standard deviation
SPREAD = {  # of a student's noise, in logits: the median of rows, and the standard deviation of its logarithm
    "bits8": (0.058, 0.27), "bits5": (0.49, 0.17), "bits4": (0.97, 0.07), "bits3": (2.6, 0.0),
    "pruned": (1.2, 0.01), "distilled": (1.0, 0.08), "noise5": (0.25, 0.26), "noise1": (0.051, 0.27),
    "identical": (0.0, 0.0),
}
# fmt: on
FIRST, BEYOND = 64, 1.25  # the noise is so much larger in tokens beyond the first


def between(at: Tensor, nodes: Iterable[float]) -> Tensor:
    """[at, nodes]: the weights of linear interpolation."""
    x = torch.tensor(list(nodes), device=at.device, dtype=at.dtype)
    right = torch.searchsorted(x, at.clamp(x[0], x[-1])).clamp_min(1)
    share = (at.clamp(x[0], x[-1]) - x[right - 1]) / (x[right] - x[right - 1])
    weights = torch.zeros(at.size(0), x.size(0), device=at.device, dtype=at.dtype)
    return weights.scatter_(1, right[:, None], share[:, None]).scatter_(1, right[:, None] - 1, 1 - share[:, None])


def made(student: str, rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits at any vocabulary whose statistics are the real rows'.

    A teacher's row: the probability of its top token is the real rows' at a quantile of its own. The others share the
    rest as they do in real rows of that quantile, by log(rank) / log(vocabulary). Which token
    has which rank is random. A student's row: the teacher's and normal noise, whose size is log-normal over rows. It is
    fitted so that the median of kl and its spread are the real student's.
    """
    if student not in SPREAD:
        raise ValueError(f"{student!r} is not one of {', '.join(SPREAD)}")
    generator = torch.Generator(device).manual_seed(0)
    draw: Any = {"generator": generator, "device": device}
    ranks = torch.arange(2, vocab + 1, device=device).log() / math.log(vocab)
    known = [math.log(rank) / math.log(RANKS[-1]) for rank in RANKS]
    shapes = torch.tensor(list(REST.values()), device=device) @ between(ranks, known).T
    quantiles = (torch.randperm(rows, **draw) + 0.5) / rows
    log_top = between(quantiles, TOP) @ torch.tensor([math.log(p) for p in TOP.values()], device=device)
    offsets = LOG_SUM_EXP[0] + LOG_SUM_EXP[1] * torch.randn(rows, **draw)
    median, spread = SPREAD[student]
    sizes = median * (spread * torch.randn(rows, **draw)).exp()
    x, y = (torch.empty(rows, vocab, dtype=dtype, device=device) for _ in range(2))
    for part in torch.arange(rows, device=device).split(STEP // 4):
        first = log_top[part, None]
        rest = (between(quantiles[part], REST) @ shapes).log_softmax(-1) + torch.log1p(-first.exp())
        teacher = torch.cat([first, rest], -1) + offsets[part, None]
        noise = torch.randn(teacher.shape, **draw) * sizes[part, None]
        noise[:, FIRST:] *= BEYOND
        order = torch.rand(teacher.shape, **draw).argsort(-1)
        x[part], y[part] = (t.gather(-1, order).to(dtype) for t in (teacher + noise, teacher))
    return x, y


def drawn(source: str, student: str, rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits of the student and of the teacher: `made` at any vocabulary, or of the file that `source` names."""
    if source == "made":
        return made(student, rows, vocab, dtype, device)
    return load(source, student, rows, dtype, device)


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
CLOSE = 0.02  # kernels sum rows below it once more


def figures(source: str | Path, rows: int = 4096) -> dict[str, dict[str, Any]]:
    """Of each student: its perplexity, where it was measured, and what its kl from the teacher is over rows."""
    _, about = read(find(str(source)))
    found = {}
    for name in students(str(source)):
        kl = kullback.divergence(*load(str(source), name, rows, torch.float32, "cpu"), "kl", reduction="none")
        found[name] = {
            "perplexity": about["perplexity"].get(name),
            "mean": kl.mean().item(),
            "quantiles": dict(zip(map(str, QUANTILES), kl.quantile(torch.tensor(QUANTILES)).tolist(), strict=True)),
            "below": (kl < CLOSE).float().mean().item(),
        }
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of `figures`."""
    lines = [
        "| student | perplexity | kl mean | " + " / ".join(f"{q:.0%}" for q in QUANTILES) + f" | below {CLOSE} |",
        "|---|---|---|---|---|",
    ]
    for name, of in found.items():
        quantiles = " / ".join(f"{value:.2g}" for value in of["quantiles"].values())
        told = "" if of["perplexity"] is None else f"{of['perplexity']:.2f}"
        lines.append(f"| {name} | {told} | {of['mean']:.2g} | {quantiles} | {of['below']:.0%} |")
    return "\n".join(lines)


def describe(source: str | Path, rows: int = 4096) -> str:
    """Markdown: what the teacher's rows and each student's kl are like."""
    _, about = read(find(str(source)))
    return f"{table(figures(source, rows))}\n\nThe teacher's perplexity is {about['perplexity']['teacher']:.2f}."
