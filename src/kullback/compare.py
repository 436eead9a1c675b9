"""What many rows say of a model beside its reference: figures of `row_statistics`, gathered and summed up.

It knows rows and the blocks they belong to, and nothing of files.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from kullback.statistics import RowStatistics

Summary = dict[str, Any]

PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
# Of the reference's largest probability; exllamav3's buckets
CONFIDENCE = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
RANKS = (1, 5, 10)
TOP = (5, 10)  # how many top tokens are looked for among as many of the other's
SEGMENT = 192  # tokens whose largest is found before any is sorted
LEAST_BLOCKS = 10  # whose resampling says something of their spread
RESAMPLES = 2000
MOST_EXPONENT = math.log(sys.float_info.max)
COVERAGE = 0.95


class Report:
    """Gathers the statistics of rows, in any order and in pieces, and sums them up.

    Rows of one text depend on each other, and so intervals are found by resampling whole blocks of them.

    >>> import torch, kullback
    >>> from kullback.compare import Report
    >>> original = torch.randn(120, 50)
    >>> candidate = original + 0.1 * torch.randn(120, 50)
    >>> report = Report()
    >>> report.add(kullback.row_statistics(candidate, original), block=torch.arange(120) // 10)
    >>> summary = report.summary()
    >>> summary["rows"], summary["blocks"], sorted(summary["kl"])[:3]
    (120, 12, ['error_if_independent', 'interval', 'max'])
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []

    def add(
        self,
        statistics: RowStatistics,
        block: Tensor | int = 0,
        group: Tensor | int | None = None,
        row: Tensor | None = None,
        top: Tensor | None = None,
    ) -> None:
        """Rows of `row_statistics`, of a candidate against its reference.

        Args:
            statistics: with a target.
            block: which rows depend on each other: an id for each row, or one for all.
            group: what figures are also told apart by: likewise.
            row: numbers that order rows, and by which two reports are paired; by default those after the last.
            top: what `top_agreement` says of the same rows.

        Raises:
            ValueError: statistics without a target; ids that are not one for each row; figures that other rows lack.
        """
        if statistics.kl is None:
            raise ValueError("statistics must have a target, against which the input is compared; they have none")
        found = {name: value for name, value in statistics._asdict().items() if value is not None}
        part = {name: value.detach().reshape(-1).cpu() for name, value in found.items()}
        count = part["kl"].numel()
        start = sum(len(p["kl"]) for p in self._parts)
        part["row"] = torch.arange(start, start + count) if row is None else _ids("row", row, count)
        part["block"] = _ids("block", block, count)
        if group is not None:
            part["group"] = _ids("group", group, count)
        if top is not None:
            part |= {f"top_{k}_agreement": own for k, own in zip(TOP, top.reshape(count, -1).cpu().T, strict=True)}
        self._take(part)

    def _take(self, part: dict[str, Tensor]) -> None:
        if self._parts and part.keys() != self._parts[0].keys():
            odd = ", ".join(sorted(part.keys() ^ self._parts[0].keys()))
            raise ValueError(f"all rows must have the same figures; some have and some lack {odd}")
        self._parts.append(part)

    def merge(self, other: Report) -> None:
        """Take over the rows of another, which has other rows of the same comparison.

        Raises:
            ValueError: figures that other rows lack.
        """
        for part in other._parts:
            self._take(part)

    def rows(self) -> dict[str, Tensor]:
        """All figures of all rows, in the order of their numbers."""
        if not self._parts:
            return {}
        joined = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        order = joined["row"].argsort(stable=True)
        return {name: values[order] for name, values in joined.items()}

    def summary(self) -> Summary:
        """All figures as plain data, in nats: means with intervals, percentiles, by confidence and by group."""
        rows = self.rows()
        if not rows:
            return {"rows": 0, "blocks": 0}
        numbers = ~rows["kl"].isnan()
        left_out = int((~numbers).sum())
        rows = {name: values[numbers] for name, values in rows.items()}
        sample = Blocks(rows["block"])
        found: Summary = {"rows": len(rows["kl"]), "rows_not_numbers": left_out, "blocks": sample.count}
        if not found["rows"]:
            return found
        for name in ("kl", "reverse_kl", "jensen_shannon"):
            found[name] = sample.mean(rows[name]) | distribution(rows[name])
        found["kl"]["share_above"] = _shares_above(rows["kl"])
        found["overlap"] = sample.mean(1 - rows["total_variation"].double())
        found["entropy"] = {side: float(rows[f"{at}entropy"].double().mean()) for side, at in SIDES.items()}
        found["same_top"] = sample.mean(rows["agreement"])
        found["flips"] = int((~rows["agreement"]).sum())
        if f"top_{TOP[0]}_agreement" in rows:
            found["top_agreement"] = {str(k): sample.mean(rows[f"top_{k}_agreement"]) for k in TOP}
        if "label_log_prob" in rows:
            found |= _of_labels(rows)
        found["by_confidence"] = _by_confidence(rows)
        if "group" in rows:
            found["by_group"] = {
                int(group): _brief({name: values[rows["group"] == group] for name, values in rows.items()})
                for group in rows["group"].unique()
            }
        return found

    def worst(self, count: int) -> list[dict[str, Any]]:
        """The rows of the largest kl."""
        rows = self.rows()
        if not rows:
            return []
        kl = rows["kl"]
        numbers = (~kl.isnan()).nonzero().squeeze(-1)
        order = numbers[kl[numbers].argsort(descending=True, stable=True)[:count]]
        return [{name: values[i].item() for name, values in rows.items()} for i in order.tolist()]


def top_agreement(input: Tensor, target: Tensor) -> Tensor:
    """[rows, len(TOP)]: of the first 5 and 10 tokens of each side, the share that they have in common.

    >>> import torch
    >>> from kullback.compare import top_agreement
    >>> logits = torch.arange(20.0).repeat(2, 1)
    >>> top_agreement(logits, logits.roll(1, -1))
    tensor([[0.8000, 0.9000],
            [0.8000, 0.9000]])
    """
    return common(top_tokens(input), top_tokens(target))


def common(ids: Tensor, other: Tensor) -> Tensor:
    """Of `top_tokens` of two sides."""
    same = ids.unsqueeze(-1) == other.unsqueeze(-2)
    shares = [same[:, :k, :k].any(-1).float().mean(-1) for k in TOP]
    return torch.stack(shares, -1)


def top_tokens(logits: Tensor) -> Tensor:
    """[rows, at most 10] ids of each row's largest elements, largest first: all lie in as many segments."""
    k = min(TOP[-1], logits.size(-1))
    whole = logits.size(-1) // SEGMENT
    if whole <= 2 * k:
        return logits.topk(k).indices
    segments = logits[:, : whole * SEGMENT].unflatten(-1, (whole, SEGMENT))
    starts = _first_segments(segments, k).unsqueeze(-1) * SEGMENT
    inside = (starts + torch.arange(SEGMENT, device=logits.device)).flatten(1)
    rest = torch.arange(whole * SEGMENT, logits.size(-1), device=logits.device).expand(len(logits), -1)
    ids = torch.cat([inside, rest], -1)
    return ids.gather(-1, logits.gather(-1, ids).float().topk(k).indices)


def _first_segments(segments: Tensor, k: int) -> Tensor:
    """Those of the k largest maxima. Positive floats of 16 bits are compared as integers: seven times as fast."""
    if segments.element_size() == 2:
        first = segments.view(torch.int16).amax(-1).topk(k)
        if bool((first.values[:, -1] >= 0).all()):
            return first.indices
    return segments.amax(-1).float().topk(k).indices


SIDES = {"candidate": "", "reference": "target_"}


def paired(worse: Report, better: Report) -> Summary:
    """By how much the kl of one candidate is above another's, in nats, row by row.

    Returns:
        `mean`, with `interval`, `standard_error` and `error_if_independent`, and `share_of_rows_above`.

    Raises:
        ValueError: reports of different rows.

    >>> import torch, kullback
    >>> from kullback.compare import Report, paired
    >>> original, noise, reports = torch.randn(60, 50), torch.randn(60, 50), [Report(), Report()]
    >>> for report, size in zip(reports, (0.2, 0.1)):
    ...     report.add(kullback.row_statistics(original + size * noise, original))
    >>> found = paired(*reports)
    >>> found["mean"] > 0, found["share_of_rows_above"], found["interval"]
    (True, 1.0, None)
    """
    one, other = worse.rows(), better.rows()
    if not one or not other or not torch.equal(one["row"], other["row"]):
        raise ValueError("two reports are paired by their rows, which must be the same")
    difference = one["kl"].double() - other["kl"].double()
    numbers = ~difference.isnan()
    found = Blocks(one["block"][numbers]).mean(difference[numbers])
    return found | {"share_of_rows_above": float((difference[numbers] > 0).double().mean())}


def distribution(values: Tensor) -> Summary:
    """Extremes, median and percentiles, linear between order statistics."""
    ordered = values.double().sort().values
    at = torch.tensor(PERCENTILES, dtype=torch.float64) / 100 * (len(ordered) - 1)
    low = at.floor().long()
    high = (low + 1).clamp_max(len(ordered) - 1)
    share = at - low
    between = torch.where(share == 0, ordered[low], ordered[low] * (1 - share) + ordered[high] * share)
    percentiles = {f"{p:g}": float(v) for p, v in zip(PERCENTILES, between, strict=True)}
    return {
        "min": float(ordered[0]),
        "median": percentiles["50"],
        "max": float(ordered[-1]),
        "percentiles": percentiles,
    }


def _shares_above(kl: Tensor) -> list[tuple[float, float]]:
    """[(x, share of rows above x)] for a curve, four to a decade."""
    ordered = kl.double().sort().values
    at = 10 ** (torch.arange(-40, 9, dtype=torch.float64) / 4)
    shares = 1 - torch.searchsorted(ordered, at, right=True).double() / len(ordered)
    return [(float(x), float(share)) for x, share in zip(at, shares, strict=True)]


class Blocks:
    """Means of rows, and how far they would be off with other blocks: of resamples of whole blocks."""

    def __init__(self, block: Tensor) -> None:
        ids, self.of_row = block.unique(return_inverse=True)
        self.count = len(ids)
        self.size = torch.zeros(self.count, dtype=torch.float64)
        self.size.index_add_(0, self.of_row, torch.ones(len(block), dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.of_row, values.double())

    def resampled(self, *sums: Tensor) -> Tensor:
        """[RESAMPLES, figures]: the means of resamples. Seeded, so that all figures have the same ones."""
        generator = torch.Generator().manual_seed(0)
        columns = torch.stack([self.size, *sums], -1)
        step = max(1, (1 << 20) // self.count)
        totals = [
            columns[torch.randint(self.count, (min(step, RESAMPLES - i), self.count), generator=generator)].sum(1)
            for i in range(0, RESAMPLES, step)
        ]
        return torch.cat([total[:, 1:] / total[:, :1] for total in totals])

    def mean(self, values: Tensor) -> Summary:
        return {"mean": float(values.double().mean())} | self.errors(values)

    def errors(self, values: Tensor) -> Summary:
        """The standard error and the interval of the mean; None with too few blocks."""
        spread = values.double().std(correction=0) if len(values) > 1 else torch.tensor(math.nan)
        alone = float(spread) / math.sqrt(max(1, len(values) - 1))
        error, interval = None, None
        if self.count >= LEAST_BLOCKS and bool(values.isfinite().all()):
            means = self.resampled(self.sums(values))[:, 0]
            error = float(means.std())
            interval = _interval(means, self.count)
        return {"standard_error": error, "interval": interval, "error_if_independent": alone}


def _interval(means: Tensor, blocks: int) -> list[float]:
    """Percentiles, further out where blocks are few: resamples spread less than means do, by √(1 - 1/n).

    Source: T. Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69, 2015 ("expanded
    percentile").
    """
    normal = NormalDist()
    outside = normal.cdf(-math.sqrt(blocks / (blocks - 1)) * _t_quantile((1 + COVERAGE) / 2, blocks - 1))
    return [float(end) for end in means.quantile(torch.tensor([outside, 1 - outside], dtype=means.dtype))]


def _t_quantile(share: float, freedom: int) -> float:
    """Of Student's t, by its expansion about the normal: to 1e-3 from nine degrees on."""
    z = NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _ids(name: str, given: Tensor | int, count: int) -> Tensor:
    ids = torch.full((count,), given) if isinstance(given, int) else given.reshape(-1).long().cpu()
    if len(ids) != count:
        raise ValueError(f"{name} must have an id for each of {count} rows; got {len(ids)}")
    return ids


def _of_labels(rows: Mapping[str, Tensor]) -> Summary:
    """Perplexities and the probability of the true token, of rows that have one."""
    has = ~(rows["label_log_prob"].isnan() | rows["target_label_log_prob"].isnan())
    if not has.any():
        return {}
    own, reference = rows["label_log_prob"][has].double(), rows["target_label_log_prob"][has].double()
    sample, change, ratio = Blocks(rows["block"][has]), own.exp() - reference.exp(), reference - own
    ranks = {side: rows[f"{at}label_rank"][has] for side, at in SIDES.items()}
    return {
        "labels": int(has.sum()),
        "perplexity": {
            "candidate": _exponentials(sample, -own),
            "reference": _exponentials(sample, -reference),
            "ratio": _exponentials(sample, ratio),
            "log_ratio": sample.mean(ratio),
            "covariance": _covariance(own, reference),
            "correlation": _correlation(own, reference),
        },
        "label_probability_change": sample.mean(change)
        | distribution(change)
        | {"root_mean_square": float(change.square().mean().sqrt())},
        "label_in_top": {
            side: {str(k): float((rank < k).double().mean()) for k in RANKS} for side, rank in ranks.items()
        },
    }


def _exponentials(sample: Blocks, values: Tensor) -> Summary:
    """Of a mean, its interval and, to first order, its errors."""
    log = sample.mean(values)
    mean, interval = _exp(log["mean"]), log["interval"]
    return {
        "mean": mean,
        "standard_error": None if log["standard_error"] is None else mean * log["standard_error"],
        "interval": None if interval is None else [_exp(end) for end in interval],
        "error_if_independent": mean * log["error_if_independent"],
    }


def _exp(x: float) -> float:
    return math.exp(x) if x < MOST_EXPONENT else math.inf


def _covariance(x: Tensor, y: Tensor) -> float:
    return float(((x - x.mean()) * (y - y.mean())).mean())


def _correlation(x: Tensor, y: Tensor) -> float:
    """NaN where one of them is the same in all rows."""
    spread = math.sqrt(_covariance(x, x) * _covariance(y, y))
    return _covariance(x, y) / spread if spread else math.nan


def _by_confidence(rows: Mapping[str, Tensor]) -> list[Summary]:
    top = rows["target_top_probability"].double()
    which = torch.bucketize(top, torch.tensor(CONFIDENCE[1:-1], dtype=torch.float64), right=True)
    found = []
    for i, (low, high) in enumerate(itertools.pairwise(CONFIDENCE)):
        own = {name: values[which == i] for name, values in rows.items()}
        found.append({"from": low, "to": high} | _brief(own))
    return found


def _brief(rows: Mapping[str, Tensor]) -> Summary:
    """Of some rows: the figures of a table's line."""
    count = len(rows["kl"])
    found: Summary = {"rows": count}
    if count:
        found["kl"] = Blocks(rows["block"]).mean(rows["kl"]) | distribution(rows["kl"])
        found["same_top"] = float(rows["agreement"].double().mean())
    return found
