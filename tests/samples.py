"""Rows with names: what a test is about, said where it is made.

A row is made of a teacher's logits y and of noise, as a pair (x, y) of the student's and the teacher's. `batch` stacks
such rows; `sample` makes rows of any form that nothing is special about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

INF, NAN = torch.inf, torch.nan
Row = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EVERY_7TH = slice(None, None, 7)


def far(scale: float = 1.0) -> Row:
    """A student of its own."""
    return lambda y, noise: (scale * noise, y)


def apart(by: float) -> Row:
    """The teacher and noise; of a few hundredths: close."""
    return lambda y, noise: (y + by * noise, y)


def shifted(by: float, constant: float) -> Row:
    """Close, but for a constant that a softmax does not see."""
    return lambda y, noise: (y + by * noise + constant, y)


def spiked(by: float, spike: float, every: int) -> Row:
    """Close in most tokens, far in some."""

    def row(y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x = y + by * noise
        x[::every] += spike * noise[::every]
        return x, y

    return row


def equal(y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


def masked(
    row: Row, *, both: slice | None = None, x: slice | None = None, y: slice | None = None, to: float = -INF
) -> Row:
    """Another row without some tokens: on both sides, or on one."""

    def without(teacher: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        sides = tuple(t.clone() for t in row(teacher, noise))
        for side, where in zip(sides, (x, y), strict=True):
            for part in (both, where):
                if part is not None:
                    side[part] = to
        return sides

    return without


def at(row: Row, x: dict[int, float] | None = None, y: dict[int, float] | None = None) -> Row:
    """Another row with some logits set."""

    def with_values(teacher: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        sides = tuple(t.clone() for t in row(teacher, noise))
        for side, values in zip(sides, (x, y), strict=True):
            for index, value in (values or {}).items():
                side[index] = value
        return sides

    return with_values


def peaked(row: Row, token: int, above: float) -> Row:
    """Another row of which one token has all but e^-above of the teacher's mass."""

    def with_peak(teacher: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        teacher = teacher.clone()
        teacher[token] = teacher.max() + above
        return row(teacher, noise)

    return with_peak


def dead(y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """For a row that does not count."""
    return torch.full_like(y, NAN), y


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    names: tuple[str, ...]

    def index(self, *names: str) -> list[int]:
        return [self.names.index(name) for name in names]

    def weight(self, **weights: float) -> Tensor:
        """1 for each row but these."""
        return torch.tensor([weights.get(name, 1.0) for name in self.names])


def batch(
    generator: torch.Generator,
    vocab: int,
    dtype: torch.dtype | tuple[torch.dtype, torch.dtype],
    spread: float = 2.0,
    **rows: Row,
) -> Batch:
    """One of each of these rows; a teacher's logits are normal, `spread` wide."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    device = generator.device
    made = [
        row(
            spread * torch.randn(vocab, generator=generator, device=device),
            torch.randn(vocab, generator=generator, device=device),
        )
        for row in rows.values()
    ]
    x, y = (torch.stack(side).to(dtype) for side, dtype in zip(zip(*made, strict=True), dtypes, strict=True))
    return Batch(x, y, tuple(rows))


def sample(
    form: str,
    shape: tuple[int, ...],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    scale: float = 2.0,
) -> Tensor:
    """A random row of that form: normalised probabilities, their logarithms, or logits."""
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    if form == "logits":
        return logits.to(dtype)
    return (logits.softmax(-1) if form == "probs" else logits.log_softmax(-1)).to(dtype)


def moved(t: Tensor, by: int) -> Tensor:
    """The same in a longer storage, so many elements from its beginning."""
    storage = t.new_zeros(by + t.numel() + 8)
    place = storage[by : by + t.numel()].view(t.shape)
    place.copy_(t)
    return place


def spectrum(
    rows: int, vocab: int, dtype: torch.dtype, seed: int = 0, device: str = "cuda", noise: float | None = None
) -> tuple[Tensor, Tensor]:
    """Rows from close to far (or all of one noise), every fifth masked in places."""
    generator = torch.Generator(device).manual_seed(seed)
    y, more = 3 * torch.randn(2, rows, vocab, device=device, generator=generator)
    x = y + torch.logspace(-3, 0.3, rows, device=device)[:, None] * more / 3
    x[1::5, 100:200] = y[1::5, 100:200] = -INF
    x, y = x.to(dtype), y.to(dtype)
    if noise is not None:
        generator = torch.Generator(device).manual_seed(seed + 1)
        x = (y.float() + noise * torch.randn(y.shape, device=device, generator=generator)).to(dtype)
    return x, y


def half_lost(noise: float, device: str) -> tuple[Tensor, Tensor]:
    """Rows some of which have a token that the student lacks, and beside it are as the teacher's."""
    x, y = spectrum(16, 32000, torch.bfloat16, device=device, noise=noise)
    y[:4, 7], x[:4, 7] = 14, -2
    x[:2] = torch.where(y[:2] == 14, -2, y[:2] + x[:2] / 64)
    return x, y
