"""Candidates against a reference: which rows belong together, and a pass over them."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kullback
from kullback.cli import tables
from kullback.cli.interrupts import held_back
from kullback.cli.runs import (
    APPLIED,
    BELOW_FLOOR,
    HiddenFiles,
    Layout,
    LlamaCpp,
    MismatchError,
    Read,
    Recording,
    Source,
    name_of,
)
from kullback.compare import LEAST_BLOCKS, Report, common, paired, top_tokens
from kullback.problem import IGNORED
from kullback.statistics import RowStatistics

FORMAT = "kullback-compare/1"
CHUNK_BYTES = 1 << 26  # of a side's logits in float32
FROM_FILE_BYTES = 1 << 24  # where a CPU only reads them: a chunk is still in its cache when it is worked on
LLAMA_CPP = "llama.cpp"
LEAST = -16.0  # llama.cpp leaves out the terms of tokens below this log-probability
SAMPLE, SAMPLED = 16, 200  # one row of 16 is asked what its rounding does, or so many of all


def names_of(paths: Sequence[Path]) -> list[str]:
    """The last parts of paths if they tell them apart, as text."""
    names = [[tables.shown(name) for name in (path.name or str(path), str(path))] for path in paths]
    for each in zip(*names, strict=True):
        if len(set(each)) == len(each):
            return list(each)
    return [f"{name} ({i})" for i, (_, name) in enumerate(names, 1)]  # bytes that are no text looked alike


def _has_windows(layout: Layout) -> bool:
    return bool(layout.window.any())


@dataclass
class Comparison:
    """What is compared with what, and what has been found so far."""

    reference: Source
    candidates: list[Source]
    names: list[str]
    vocab: int
    score: str
    compat: bool
    floor: Source | None = None
    index: list[Tensor] = field(default_factory=list)  # of each source: its rows that count, in one order
    block: Tensor = field(default_factory=lambda: torch.empty(0))  # of each row that counts, and so below
    blocks_are: str = "windows"
    group: Tensor | None = None
    groups: dict[int, str] = field(default_factory=dict)  # ids and their names
    asked: int = 0  # rows that count, whether they are there or not
    reports: list[Report] = field(default_factory=list)
    absent: dict[str, int] = field(
        default_factory=dict
    )  # of a file's path: rows of the reference that it has no place for
    rounding: dict[str, list[float]] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def sources(self) -> list[Source]:
        return [self.reference, *self.candidates, *([] if self.floor is None else [self.floor])]

    @property
    def teller(self) -> int:
        """Of whose rows labels and contexts are taken: a recording's, else one's with labels and several windows."""
        sources = self.sources
        told = [i for i, each in enumerate(sources) if isinstance(each, Recording)]
        labelled = [i for i, each in enumerate(sources) if bool((each.layout.label != IGNORED).any())]
        told += sorted(labelled, key=lambda i: not _has_windows(sources[i].layout))
        return told[0] if told else 0

    @property
    def cutter(self) -> int:
        """Of whose windows positions count: the teller's, but of a list of labels the first's that has several."""
        several = [i for i, each in enumerate(self.sources) if _has_windows(each.layout)]
        is_list = self.layout.tokens is None and self.teller not in several
        return several[0] if is_list and several else self.teller

    def places(self, told: Tensor) -> dict[str, Tensor]:
        """Window and position of rows of the teller's."""
        rows, cut = torch.zeros(len(self.layout.window), dtype=torch.int64), self.sources[self.cutter].layout
        rows[self.index[self.teller]] = self.index[self.cutter]
        return {"window": cut.window[rows[told]], "position": cut.position[rows[told]]}

    @property
    def layout(self) -> Layout:
        return self.sources[self.teller].layout


def plan(
    reference: Source,
    candidates: Sequence[Source],
    names: Sequence[str],
    score: str = "all",
    valid_vocab: int | None = None,
    compat: bool = False,
    floor: Source | None = None,
    blocks: str = "",
    groups: str = "",
) -> Comparison:
    """Raises MismatchError where files do not belong together."""
    comparison = Comparison(reference, list(candidates), list(names), 0, score, compat, floor)
    comparison.vocab = _vocabulary(comparison.sources, valid_vocab)
    for each in comparison.sources[1:]:
        _check_tokens(reference, each)
    if reference.layout.tokens is None:
        first, *others = [each for each in comparison.sources if each.layout.tokens is not None] or [reference]
        for each in others:
            _check_tokens(first, each)
            if not torch.equal(_windows_in(each, first), torch.arange(len(each.layout.tokens))):  # type: ignore[arg-type]
                raise MismatchError(
                    f"{first.path} and {each.path} have their windows in other orders, and {reference.path} has no "
                    "tokens to tell which are whose"
                )
    layout, cut = reference.layout, comparison.sources[comparison.cutter].layout
    found = [torch.arange(len(layout.window)), *(_rows_in(each, reference) for each in comparison.sources[1:])]
    given = list(zip(comparison.sources, found, strict=True))
    told = found[comparison.cutter]
    position = torch.where(told < 0, layout.position, cut.position[told.clamp(min=0)])
    known = position >= first_scored(score, cut.length)
    if score == "half":  # of a window's last token llama.cpp has no row, since it foretells nothing
        is_last = layout.position + 1 == layout.window.bincount()[layout.window]
        told_of = (torch.where(rows < 0, IGNORED, each.layout.label[rows.clamp(min=0)]) for each, rows in given)
        known &= ~is_last | (torch.stack(tuple(told_of)) != IGNORED).any(0)
    for each, rows in given:
        absent = int((known & (rows < 0)).sum())
        if absent:
            comparison.absent[str(each.path)] = absent
        known &= rows >= 0
    if not known.any():
        raise MismatchError(
            f"no row is left to compare: {reference.path} has {len(known)} rows of windows of {cut.length}, "
            f"of which --score {score} and the other files leave none"
        )
    comparison.asked = int(known.sum())
    for each, rows in given:
        known &= rows < each.rows
    comparison.index = [rows[known] for rows in found]
    # vLLM's files can be read in any order; all others from their beginning to their end.
    pairs = zip(comparison.sources, comparison.index, strict=True)
    order = next((rows for each, rows in pairs if not isinstance(each, HiddenFiles)), comparison.index[0]).argsort()
    comparison.index = [rows[order] for rows in comparison.index]
    comparison.reports = [Report() for _ in comparison.sources[1:]]
    labels = comparison.layout.label[comparison.index[comparison.teller]]
    told = labels
    for each, rows in zip(comparison.sources, comparison.index, strict=True):
        own = each.layout.label[rows]
        differ = int(((own != told) & (own != IGNORED) & (told != IGNORED)).sum())
        if differ:
            raise MismatchError(
                f"{each.path} is of another text than the other files: {differ} of {len(labels)} labels differ"
            )
        told = torch.where(told == IGNORED, own, told)
    if len(labels) and int(labels.max()) >= comparison.vocab:
        raise MismatchError(
            f"--valid-vocab {comparison.vocab}: the text has the token {int(labels.max())}, which is beyond it"
        )
    _choose_blocks(comparison, blocks)
    _choose_groups(comparison, groups)
    return comparison


def _choose_blocks(comparison: Comparison, asked: str) -> None:
    """What intervals resample: as asked for, else `block`, else several documents, else windows."""
    names = [asked] if asked else ["block", "document"]
    found = [(name, _column(comparison, name)) for name in names]
    several = [(name, ids) for name, ids in found if ids is not None and (asked or len(ids.unique()) > 1)]
    if asked and not several:
        raise _no_column(comparison, "--blocks", asked)
    name, ids = several[0] if several else ("window", _column(comparison, "window"))
    assert ids is not None
    comparison.block = ids
    comparison.blocks_are = {"window": "windows", "document": "documents"}.get(name, f"blocks of `{name}`")


def _choose_groups(comparison: Comparison, asked: str) -> None:
    name = asked or "group"
    ids = _column(comparison, name)
    if ids is None and asked:
        raise _no_column(comparison, "--groups", asked)
    if ids is not None:
        comparison.group = ids
        named = next((each.layout.names for each in comparison.sources if name in each.layout.columns), None)
        known = ids.unique().tolist()
        comparison.groups = _told_apart(known, named if name == "group" else None)


def _told_apart(ids: list[int], names: list[str] | None) -> dict[int, str]:
    """Names as they are shown; those that would be shown alike as Python writes them, with their ids."""
    if not names:
        return {i: str(i) for i in ids}
    shown = {i: tables.shown(names[i]) for i in ids}
    counts = collections.Counter(shown.values())
    return {i: name if counts[name] == 1 else f"{tables.shown(ascii(names[i]))} ({i})" for i, name in shown.items()}


def _column(comparison: Comparison, name: str) -> Tensor | None:
    """Of the rows that count, by the first source that has it."""
    if name == "window":
        return comparison.sources[comparison.cutter].layout.window[comparison.index[comparison.cutter]]
    for each, rows in zip(comparison.sources, comparison.index, strict=True):
        if name in each.layout.columns:
            return each.layout.columns[name][rows]
    return None


def _position(comparison: Comparison) -> Tensor:
    """Of each row that counts, in its window."""
    return comparison.sources[comparison.cutter].layout.position[comparison.index[comparison.cutter]]


def _no_column(comparison: Comparison, option: str, asked: str) -> MismatchError:
    known = sorted({"window"}.union(*(each.layout.columns for each in comparison.sources)))
    return MismatchError(f"{option} {asked}: no file has such a column; there are {', '.join(known)}")


def first_scored(score: str, length: int) -> int:
    """The first position that counts: of all, of the second half as in llama.cpp, or from N on."""
    if score == "all":
        return 0
    return length // 2 if score == "half" else int(score.removesuffix(":"))


def _vocabulary(sources: Sequence[Source], valid: int | None) -> int:
    reference, least = sources[0], min(each.vocab for each in sources)
    if valid is not None and not 1 <= valid <= least:
        raise MismatchError(f"--valid-vocab {valid}: the smallest vocabulary of the files has {least} tokens")
    if valid is not None:
        return valid
    for each in sources[1:]:
        if each.vocab != reference.vocab:
            raise MismatchError(
                f"vocabularies differ: {reference.path} has {reference.vocab} tokens and {each.path} {each.vocab}. "
                f"If the first {least} are the same and the others padding: --valid-vocab {least}"
            )
    return reference.vocab


def _check_tokens(reference: Source, other: Source) -> None:
    one, two = reference.layout.tokens, other.layout.tokens
    where = f"{reference.path} and {other.path}"
    if one is None or two is None:
        counts = len(reference.layout.window), len(other.layout.window)
        if counts[0] != counts[1]:
            raise MismatchError(
                f"{where} have {counts[0]} and {counts[1]} rows, and not both have tokens to tell which belong together"
            )
        return
    if one.shape != two.shape:
        raise MismatchError(
            f"{where} have {list(one.shape)} and {list(two.shape)} tokens [windows, window]. {_read_again(reference)}"
        )
    skip = _not_compared(reference, other)
    differ = (one[:, skip:] != two[_windows_in(other, reference), skip:]).any(-1)
    if differ.any():
        raise MismatchError(
            f"{where} are of different texts or tokenizers: {int(differ.sum())} of {len(one)} windows differ, "
            f"first window {int(differ.nonzero()[0])}. {_read_again(reference)}"
        )


def _read_again(reference: Source) -> str:
    return f"`kullback record MODEL {reference.path} -o RUN` reads the reference's tokens by another model"


def _not_compared(reference: Source, other: Source) -> int:
    """llama.cpp keeps the text's own token where it has put the one that begins a sequence."""
    return 1 if isinstance(reference, LlamaCpp) or isinstance(other, LlamaCpp) else 0


def _windows_in(source: Source, reference: Source) -> Tensor:
    """For each window of the reference, the source's: the same one, but of vLLM's files that of the same tokens."""
    wanted, own = reference.layout.tokens, source.layout.tokens
    assert wanted is not None
    assert own is not None
    if not (isinstance(source, HiddenFiles) or isinstance(reference, HiddenFiles)):
        return torch.arange(len(wanted))
    skip = _not_compared(reference, source)
    places: dict[tuple[int, ...], list[int]] = {}
    for window in reversed(range(len(own))):
        places.setdefault(tuple(own[window, skip:].tolist()), []).append(window)
    keys = (tuple(tokens) for tokens in wanted[:, skip:].tolist())
    return torch.tensor([places[key].pop() if places.get(key) else i for i, key in enumerate(keys)])


def _rows_in(source: Source, reference: Source) -> Tensor:
    """For each row of the reference, the source's; -1 where it has none."""
    layout, own = reference.layout, source.layout
    if layout.tokens is None or own.tokens is None:
        rows = torch.empty_like(layout.window)
        rows[_in_order(layout)] = _in_order(own)
        return rows
    places = torch.full((len(own.tokens), own.length), -1)
    places[own.window, own.position] = torch.arange(len(own.window))
    return places[_windows_in(source, reference)[layout.window], layout.position]


def _in_order(layout: Layout) -> Tensor:
    """Its rows by window and position: those that a file lacks come last in it."""
    return (layout.window * layout.length + layout.position).argsort()


@contextmanager
def _one_thread() -> Iterator[None]:
    """For passes that are short: where others use the cores too, threads would wait longer for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(
    comparison: Comparison, device: torch.device, tell: Callable[[int], None], rank: int = 0, world: int = 1
) -> None:
    """One pass over all rows, of which each rank takes its share. An interrupt ends it with what was read."""
    makes_logits = device.type != "cpu" or any(getattr(each, "head", None) for each in comparison.sources)
    at_once = CHUNK_BYTES if makes_logits else min(CHUNK_BYTES, FROM_FILE_BYTES)
    step = max(1, at_once // (4 * comparison.vocab))
    layout, teller = comparison.layout, comparison.teller
    chunks = torch.arange(len(comparison.index[0])).split(step)
    has_labels = bool((layout.label != IGNORED).any())
    try:
        for part in chunks[rank::world]:
            if not len(part):  # all files are cut before the first row that they share
                continue
            told = comparison.index[teller][part]
            labels = layout.label[told].to(device) if has_labels else None
            reads = (
                each.read(index[part], comparison.vocab, device)
                for each, index in zip(comparison.sources, comparison.index, strict=True)
            )
            reference = next(reads)
            with _one_thread():
                _note_rounding(comparison, 0, reference, part)
                target_top = top_tokens(reference.values)
            found = []
            for i, candidate in enumerate(reads):
                with _one_thread():
                    _note_rounding(comparison, i + 1, candidate, part)
                    top = common(top_tokens(candidate.values), target_top)
                found.append((statistics(candidate, reference, labels, comparison.compat), top))
                del candidate
            block, group = comparison.block[part], None if comparison.group is None else comparison.group[part]
            with held_back():  # no candidate has rows that another lacks
                for report, (figures, top) in zip(comparison.reports, found, strict=True):
                    report.add(figures, block=block, group=group, row=told, top=top)
            tell(len(part) * world)
    except KeyboardInterrupt:
        comparison.interrupted = True


def statistics(candidate: Read, reference: Read, labels: Tensor | None, compat: bool) -> RowStatistics:
    x, y = candidate.values, reference.values
    if candidate.floored is None and reference.floored is None and not compat:
        dtype = torch.promote_types(x.dtype, y.dtype)
        return kullback.row_statistics(x.to(dtype), y.to(dtype), labels)
    log_q, log_p = (_log_probs(side) for side in (candidate, reference))
    if compat and candidate.floored is not None:
        log_q = _adding_up(log_q, candidate.floored)
    found = kullback.row_statistics(*_with_bucket(candidate, reference, log_q, log_p), form="log_probs")
    top, target_top = log_q.argmax(-1), log_p.argmax(-1)
    found = found._replace(top_token=top, target_top_token=target_top, agreement=top == target_top)
    if compat:
        terms = log_p.double().exp() * (log_p.double() - log_q.double())
        kl = terms.masked_fill(log_p <= LEAST, 0).sum(-1)
        found = found._replace(kl=kl.masked_fill((log_p + log_q).isnan().any(-1), math.nan))
    return found if labels is None else found._replace(**_of_labels(labels, log_q, log_p))


def _log_probs(side: Read) -> Tensor:
    """A file's as they stand, which is an upper bound of what lies at its floor.

    llama.cpp sums in float64. PyTorch's float32 log-softmax of a model's 49152 tokens was seen 9e-6 too large.
    """
    return side.values if side.floored is not None else side.values.double().log_softmax(-1).float()


def _adding_up(log_q: Tensor, floored: Tensor) -> Tensor:
    """A file's entries as llama.cpp has them before it writes, as far as their sum of 1 tells.

    Each is rounded to a 65535th of the row's span, but for the best token's, which is exact. What their masses are off
    by is rounding and what lies at the floor, told apart by their variances; all others are moved together.
    """
    best = log_q.argmax(-1, keepdim=True)
    masses = log_q.double().exp()
    others = torch.where(floored, 0, masses).scatter(-1, best, 0)
    floor = torch.where(floored, masses, 0).sum(-1, keepdim=True)
    known = others.sum(-1, keepdim=True)
    off = known - 1 + masses.gather(-1, best) + BELOW_FLOOR[0] * floor
    step = (log_q.amax(-1, keepdim=True) - log_q.amin(-1, keepdim=True)).double() / 65535
    of_rounding = step.square() / 12 * others.square().sum(-1, keepdim=True)
    off = off * of_rounding / (of_rounding + (BELOW_FLOOR[1] * floor).square())
    shift = torch.log1p(-off / known).nan_to_num(0.0)
    return torch.where(others > 0, log_q + shift.clamp(-step / 2, step / 2), log_q).to(log_q.dtype)


def _with_bucket(x: Read, y: Read, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens known on both sides, and last that of all others together.

    What a file's known tokens leave of 1 is the bucket's, within what its floor allows. Where their rounding leaves
    nothing, the bucket is taken to be the other side's: nothing is known to differ.
    """
    none = torch.zeros_like(log_p, dtype=torch.bool)
    unknown = (none if x.floored is None else x.floored) | (none if y.floored is None else y.floored)
    most = [torch.where(unknown, side, -math.inf).double().exp().sum(-1) for side in (log_q, log_p)]
    known = [torch.where(unknown, -math.inf, side).double().exp().sum(-1) for side in (log_q, log_p)]
    rest = [
        at_most if side.floored is None else torch.minimum(1 - sum_of, at_most)
        for side, at_most, sum_of in zip((x, y), most, known, strict=True)
    ]
    alike = torch.minimum(torch.where(rest[0] > 0, rest[0], most[0]), torch.where(rest[1] > 0, rest[1], most[1]))
    sides = []
    for side, own in ((log_q, rest[0]), (log_p, rest[1])):
        bucket = torch.where(own > 0, own, alike).log().to(side.dtype)
        sides.append(torch.cat([torch.where(unknown, -math.inf, side), bucket.unsqueeze(-1)], -1))
    return sides[0], sides[1]


def _of_labels(labels: Tensor, log_q: Tensor, log_p: Tensor) -> dict[str, Tensor]:
    """Of the true token as the file has it, which may lie in the bucket."""
    counts, found = labels != IGNORED, {}
    column = torch.where(counts, labels, 0).unsqueeze(-1)
    for name, side in (("label", log_q), ("target_label", log_p)):
        own = side.gather(-1, column)
        found[f"{name}_log_prob"] = torch.where(counts, own.squeeze(-1).float(), math.nan)
        found[f"{name}_rank"] = torch.where(counts, (side > own).sum(-1), -1)
    return found


def _note_rounding(comparison: Comparison, which: int, read: Read, part: Tensor) -> None:
    """The kl that the rounding of 16-bit logits alone makes: half the variance, under the row, of its error."""
    source = comparison.sources[which]
    if source.rounded is None:
        return
    asked = part % max(SAMPLE, len(comparison.index[0]) // SAMPLED) == 0
    if not asked.any():
        return
    kept = read.values[asked.to(read.values.device)]
    exponent, bits = (0x7F80, 7) if source.rounded == torch.bfloat16 else (0x7C00, 10)
    unit = (kept.view(torch.int16) & exponent).view(kept.dtype).float().mul_(2.0**-bits)
    unit = unit.square_().nan_to_num_(posinf=0.0)  # what is infinite is exact
    p = kept.float().softmax(-1)
    rows = unit.mul_(p).mul_(1 - p).sum(-1) / 24  # an error is uniform within a unit: its variance is a twelfth
    comparison.rounding.setdefault(str(source.path), []).extend(rows[~rows.isnan()].tolist())


def gather(comparison: Comparison, rank: int, world: int) -> bool:
    """All ranks' rows to the first, which alone goes on."""
    if world == 1:
        return True
    mine = comparison.reports, comparison.rounding, comparison.interrupted
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, every)
    dist.barrier()  # a process that ends while another still waits may abort it
    dist.destroy_process_group()
    for reports, rounding, interrupted in (every or [])[1:]:
        for own, theirs in zip(comparison.reports, reports, strict=True):
            own.merge(theirs)
        for path, rows in rounding.items():
            comparison.rounding.setdefault(path, []).extend(rows)
        comparison.interrupted |= interrupted
    return rank == 0


@_one_thread()
def result(comparison: Comparison, worst: int) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    layout, reports, no_numbers = comparison.layout, {}, []
    decode = decoder(comparison.sources)
    candidates: list[dict[str, Any]] = []
    for name, report, source in zip(comparison.names, comparison.reports, comparison.candidates, strict=False):
        summary = report.summary()
        if not summary["rows"] and summary.get("rows_not_numbers"):
            no_numbers.append(name)
            continue
        reports[name] = report
        summary |= _named(summary, comparison.groups)
        rows = report.worst(worst)
        places = comparison.places(torch.tensor([row["row"] for row in rows], dtype=torch.int64))
        of_rows = [
            dict(zip(places, place, strict=True))
            for place in zip(*(of.tolist() for of in places.values()), strict=True)
        ]
        summary["worst"] = [place | in_context(row, layout, decode) for place, row in zip(of_rows, rows, strict=True)]
        candidates.append({"name": name, "path": str(source.path), "about": source.about} | summary)
    if not candidates:
        of_reference = comparison.reports[0].rows()["target_entropy"].isnan().all()
        raise MismatchError(
            f"{comparison.reference.path if of_reference else ', '.join(no_numbers)}: all {len(comparison.index[0])} "
            "rows are not numbers (NaN or no finite logit)"
        )
    read = candidates[0]["rows"] + candidates[0].get("rows_not_numbers", 0)
    found: dict[str, Any] = {
        "format": FORMAT,
        "kullback": kullback.__version__,
        "reference": {"path": str(comparison.reference.path), "about": comparison.reference.about},
        "score": comparison.score,
        "first_position": int(_position(comparison).min()) if len(comparison.index[0]) else 0,
        "formula": LLAMA_CPP if comparison.compat else "exact",
        "vocab": comparison.vocab,
        "rows_asked": comparison.asked,
        "rows_read": read,
        "complete": read == comparison.asked and not comparison.interrupted,
        "interrupted": comparison.interrupted,
        "blocks_are": comparison.blocks_are,
        "left_out": no_numbers,
        "floor": None,
        "candidates": candidates,
        "differences": list(differences(reports)) if read else [],
    }
    if comparison.floor is not None:
        of_floor: dict[str, Any] = {"path": str(comparison.floor.path)} | comparison.reports[-1].summary()
        of_floor |= _named(of_floor, comparison.groups)
        if "kl" in of_floor:
            found["floor"] = of_floor
            for each in candidates:
                each["below_floor"] = each["kl"]["mean"] <= of_floor["kl"]["mean"]
        elif read:
            found["left_out"].append(str(comparison.floor.path))
    found["warnings"] = list(warnings(comparison, found))
    return found


def _named(summary: dict[str, Any], groups: dict[int, str]) -> dict[str, Any]:
    """Its figures by group, behind their names."""
    return {"by_group": {groups[i]: of for i, of in summary["by_group"].items()}} if "by_group" in summary else {}


def differences(reports: dict[str, Report]) -> Iterator[dict[str, Any]]:
    """Of neighbours in the order of their means, which is worse by the rows that both have, and by how much."""
    mean = {name: float(report.rows()["kl"].double().nanmean()) for name, report in reports.items()}
    for better, worse in itertools.pairwise(sorted(mean, key=lambda name: mean[name])):
        found = paired(reports[worse], reports[better])
        if found["mean"] < 0:  # by these rows the other one is
            better, worse = worse, better
            found = paired(reports[worse], reports[better])
        kl = [reports[name].rows()["kl"] for name in (worse, better)]
        if not (kl[0].isnan() | kl[1].isnan()).all():
            yield {"worse": worse, "better": better} | found


def warnings(comparison: Comparison, found: dict[str, Any]) -> Iterator[str]:
    if not found["complete"]:
        why = "interrupted" if found["interrupted"] else "a file is cut or a recording has not ended"
        yield f"{found['rows_read']} of {found['rows_asked']} rows were read: {why}"
    for path, count in comparison.absent.items():
        yield f"{count} more rows of the reference are not in {path}, and so count for none"
    for path, rows in comparison.rounding.items():
        if not rows:
            continue
        source = next(each for each in comparison.sources if str(each.path) == path)
        assert source.rounded is not None
        yield (
            f"logits of {path} were rounded to {name_of(source.rounded)}: that alone makes a mean KLD of about "
            f"{sum(rows) / len(rows):.2g}. Hidden states in float16 have no such floor"
        )
    for each in comparison.sources:
        if each.about.get("norm") == APPLIED:
            yield f"hidden states of {each.path} were stored before the final norm: it was applied"
    of_llama = [each for each in comparison.sources if isinstance(each, LlamaCpp)]
    if of_llama and not comparison.compat:
        yield (
            "llama.cpp's files do not say what lies 16 nats below a row's best token: all of that is one bucket. "
            "KLD is known to about 2e-5, reverse KLD roughly, and a true token there has a bound as its probability"
        )
    for name in found["left_out"]:
        yield f"{name} is left out: all its rows are not numbers (NaN or no finite logit)"
    summed = [*found["candidates"], *([found["floor"] | {"name": "the floor"}] if found["floor"] else [])]
    for each in summed:
        count = each.get("rows_not_numbers", 0)
        if count:
            yield f"{count} rows are not numbers (NaN) in {each['name']} or the reference, and left out of its figures"
    few = [each for each in found["candidates"] if 0 < each["blocks"] < LEAST_BLOCKS]
    for blocks in sorted({each["blocks"] for each in few}):
        whose = ", ".join(each["name"] for each in few if each["blocks"] == blocks)
        of = "" if len(few) == len(found["candidates"]) else f" of {whose}"
        yield f"no intervals{of}: {blocks} independent {found['blocks_are']} are fewer than {LEAST_BLOCKS}"


def decoder(sources: Sequence[Source]) -> Callable[[list[int]], str]:
    """Text of token ids by a recording's tokenizer, or the ids themselves."""
    for source in sources:
        name = source.about.get("tokenizer")
        path = source.path / str(name)
        if isinstance(source, Recording) and name and path.is_file():
            try:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # it is not installed, or cannot read the file and raises nothing narrower
                break
            return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return lambda ids: " ".join(map(str, ids))


CONTEXT = 12  # tokens


def in_context(row: dict[str, Any], layout: Layout, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """A row, what stood before it, and what each model would have said."""
    at = row["row"]
    window, position, found = int(layout.window[at]), int(layout.position[at]), dict(row)
    if layout.tokens is not None:
        before = layout.tokens[window, max(0, position + 1 - CONTEXT) : position + 1].tolist()
        found["context"] = decode([token for token in before if token >= 0])
    label = int(layout.label[at])
    if label != IGNORED:
        found["label"] = label
        found["label_text"] = decode([label])
    for side, name in (("target_top_token", "reference_says"), ("top_token", "candidate_says")):
        found[name] = decode([row[side]])
    return found
