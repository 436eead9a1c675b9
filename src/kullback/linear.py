"""Driver: hidden states x head. Rows are projected a chunk at a time, and their logits are never all in memory.

    logits    = hidden @ weight.T + bias        a chunk of rows, of the student and of the teacher, in float32 or wider
    losses                                      the logits' gradient, in the dtype of the hidden states
    d_hidden  = d_logits @ weight               a few chunks of rows, whose logits' gradients are kept together
    d_weight += d_logits.T @ hidden             in float32

A sum writes its gradients in the pass that finds it, four products in all, and keeps nothing else. Losses of single
rows keep the rows' states, and backward projects again.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kullback import backends, collecting, collectives, parallel, topk
from kullback.autograd import Context, Gradients, differentiated, waits_for_scaler, widened
from kullback.dtypes import accumulator, kept_dtype
from kullback.library import SCALARS, Scalars, as_arguments, as_numbers, library, of_fields, schema_of
from kullback.problem import Problem, decode
from kullback.state import packed, state_fields
from kullback.tracing import distinct, is_batched, is_traced
from kullback.work import Operands, Rows, Scale, in_memory, weighted

# Logits and their gradients that are in memory at once. The float32 sum of a head's gradient is read and written once
# for what is kept together, and the fewer rows that product has the slower it is; one that only projects does well
# with a thousand: docs/lab-notebook.md.
CHUNK_BYTES = 2 << 30
DEVICE_SHARE = 20  # of a GPU's memory, if that is more: one byte in so many
STREAMED = 5  # at most one byte in so many is for a side whose logits are streamed, beside one whose are kept
WIDE_STREAMED = 3  # the same where logits are wider than what is kept
ALIGNED = 64  # elements: rows of logits begin where tensor cores and vectors want them to, whatever the vocabulary
BLOCK = 8192  # tokens of a 16-bit head that a CPU widens at once
FILLING = 2048  # rows whose product with a head has as many tiles as a GPU works on at once
TILE = 128  # rows of a chunk are a multiple of this, where they are more: what tensor cores take at once
LARGE_TILE = 384  # instead, where all rows are planned at once: whole tiles of 128 and of 192
ENOUGH = 6 * LARGE_TILE  # more rows would not be projected faster


class Models(NamedTuple):
    """The tensors that a call reads: both models' rows, and what else has a number for each row."""

    hidden: Tensor  # [rows, hidden]
    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None  # [vocab]
    target: Tensor  # [rows, hidden of the teacher]; without a head what the problem's form says, or [rows, k (+ 1)]
    target_weight: Tensor | None
    target_bias: Tensor | None
    ids: Tensor | None = None  # [rows, k]: of a top-k teacher
    row_weight: Tensor | None = None  # and further ones as `Operands` has them
    labels: Tensor | None = None

    @property
    def of_rows(self) -> tuple[Tensor | None, ...]:
        """Those that have a number for each row, in the order of `Operands.of_rows`."""
        return self[ROW_WEIGHT:]


ROW_WEIGHT = Models._fields.index("row_weight")
GRADIENTS = 6  # of the first operands, at most


class Task(NamedTuple):
    """What is asked of models' rows."""

    problem: Problem
    negligible: float  # of a top-k teacher: a tail that is no more may be rounding
    dtype: torch.dtype  # of the loss
    chunk_rows: int  # 0: as `plan_chunks` has it
    widens: bool  # whether logits of 16-bit operands are float32
    sums_hidden: bool  # whether ranks that share the vocabulary sum their parts of the hidden states' gradients
    wants: tuple[bool, ...]  # the gradients of the first operands


# Functions, not properties: Dynamo of torch 2.8 knows none of a NamedTuple.


def key_of(task: Task) -> str:
    """All but the numbers; with `scalars_of` what an operator takes."""
    wants = "".join(str(int(wanted)) for wanted in task.wants)
    flags = f"{int(task.widens)} {int(task.sums_hidden)} {wants}"
    dtype, chunk_rows = str(task.dtype).removeprefix("torch."), operator.index(task.chunk_rows)
    return f"{task.problem.key} {dtype} {chunk_rows} {flags}"


def scalars_of(task: Task) -> tuple[float, ...]:
    return *task.problem.scalars, task.negligible


def decode_task(key: str, scalars: tuple[float, ...] | None = None) -> Task:
    """The task of that key and those scalars; without them, one that is good for shapes."""
    problem, dtype, chunk_rows, widens, sums_hidden, wants = key.rsplit(" ", 5)
    decoded = decode(problem) if scalars is None else decode(problem, scalars[:-1])
    negligible = 0.0 if scalars is None else scalars[-1]
    wanted = tuple(want == "1" for want in wants)
    flags = widens == "1", sums_hidden == "1"
    return Task(decoded, negligible, getattr(torch, dtype), int(chunk_rows), *flags, wanted)


ROWS = f"{schema_of(Models)}, str task, {SCALARS}"
library.define(f"linear_total({ROWS}, float scale) -> Tensor[]")
library.define(f"linear_per_row({ROWS}) -> (Tensor, Tensor)")
library.define(f"linear_gradient({ROWS}, Tensor state) -> Tensor[]")


class ModelRows:
    """One model's rows, a chunk at a time: projected, or as they are given; and what is pulled back through them."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        wants: Sequence[bool] = (False, False, False),
        step: int | None = None,
        kept: int | None = None,
        row_weight: Tensor | None = None,
        summing: str = "",
    ) -> None:
        """dtype: of the logits. step: rows of a chunk; without it there is one chunk."""
        step = step or max(1, hidden.size(0))
        kept = kept or step
        self.weight, self.bias = weight, bias
        self.hidden = hidden
        self.wants = wants  # the gradient of each of these
        self.row_weight = row_weight
        self.kept = kept  # rows whose logits, or their gradients, are in memory: a chunk's, or several chunks'
        self.summing = summing  # the group whose ranks have parts of the hidden states' gradient, or none
        self.sums: list[collectives.Sum] = []
        self.is_first_product = True
        self.d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wants[0] else None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        if weight is None:
            return
        vocab = weight.size(0)
        # Where logits are wider than what they are products of, a chunk's only; their gradients are rounded and kept.
        self.logits = _buffer(hidden, step if dtype != hidden.dtype else kept, vocab, dtype)
        self.d_logits = self.logits
        if dtype != hidden.dtype and any(wants):
            self.d_logits = _buffer(hidden, kept, vocab, hidden.dtype)
        if wants[1]:
            new = torch.empty_like if hidden.size(0) else torch.zeros_like
            self.d_weight = new(weight, dtype=self.sum_dtype, memory_format=torch.contiguous_format)
        if wants[2]:
            self.d_bias = hidden.new_zeros(vocab, dtype=kept_dtype(hidden.dtype))

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the head's gradient while products are added to it."""
        wide = kept_dtype(self.hidden.dtype)
        return self.hidden.dtype if self.kept >= self.hidden.size(0) else wide

    def values(self, rows: slice) -> Tensor:
        """The chunk's logits, in memory that a later chunk's will take; or what was given."""
        hidden = self.hidden[rows]
        if self.weight is None:
            return hidden
        first = rows.start % self.kept if self.logits.dtype == hidden.dtype else 0
        out = self.logits[first : first + hidden.size(0)]
        if out.dtype != hidden.dtype:
            return self.wide_values(hidden, out)
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def wide_values(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Products of 16-bit operands, summed and kept in float32."""
        assert self.weight is not None
        if hidden.is_cuda:
            torch.mm(hidden, self.weight.t(), out_dtype=out.dtype, out=out)
        else:
            wide = hidden.to(out.dtype)
            for start in range(0, self.weight.size(0), BLOCK):
                block = slice(start, start + BLOCK)
                torch.mm(wide, self.weight[block].to(out.dtype).t(), out=out[:, block])
        return out if self.bias is None else out.add_(self.bias)

    def place(self, rows: slice, values: Tensor) -> Tensor | None:
        """Where the chunk's gradient is to be written: over the logits, or rounded beside them."""
        if self.weight is None:
            return None if self.d_hidden is None else self.d_hidden[rows]
        if not any(self.wants):
            return None
        first = rows.start % self.kept
        return values if self.d_logits is self.logits else self.d_logits[first : first + values.size(0)]

    def pull_back(self, chunk: slice) -> None:
        """From the logits' gradients that are kept, once the chunk completes them, to hidden states and head."""
        if self.weight is None or not any(self.wants):
            return
        end = min(chunk.stop, self.hidden.size(0))
        rows = slice(chunk.start // self.kept * self.kept, end)
        if end % self.kept and end < self.hidden.size(0):
            return
        d_logits = self.d_logits[: end - rows.start]
        if self.d_hidden is not None:
            torch.mm(d_logits, self.weight, out=self.d_hidden[rows])
            if self.summing:  # while later chunks are computed
                self.sums.append(collectives.begin_sum(self.d_hidden[rows], self.summing))
        if self.d_weight is not None:
            self.add_product(self.d_weight, d_logits, self.read(rows))
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=self.d_bias.dtype)

    def read(self, rows: slice) -> Tensor:
        """Hidden states, 0 where the row does not count: 0 times what stands there may be NaN."""
        hidden = self.hidden[rows]
        if self.row_weight is None:
            return hidden
        return torch.where((self.row_weight[rows] != 0).unsqueeze(-1), hidden, 0)

    def add_product(self, total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
        """total += d_logits.T @ hidden, where the total may be wider than they; the first product is put there."""
        beta = 0 if self.is_first_product else 1
        self.is_first_product = False
        if total.dtype == hidden.dtype:
            total.addmm_(d_logits.t(), hidden, beta=beta)
        elif total.device.type == "cuda":
            torch.addmm(total, d_logits.t(), hidden, beta=beta, out_dtype=total.dtype, out=total)
        else:  # some tokens at a time: a wider copy of all would be twice as large as they are
            hidden = hidden.to(total.dtype)
            for start in range(0, total.size(0), BLOCK):
                tokens = slice(start, start + BLOCK)
                total[tokens].addmm_(d_logits[:, tokens].t().to(total.dtype), hidden, beta=beta)

    def wait(self) -> None:
        """For the sums that have begun: what follows on this stream, and not the host."""
        while self.sums:
            self.sums.pop(0).wait()

    def gradients(self) -> list[Tensor]:
        """Those that were wanted, in the dtypes of what they are gradients of."""
        self.wait()
        found = (self.d_hidden, self.hidden), (self.d_weight, self.weight), (self.d_bias, self.bias)
        return [gradient.to(of.dtype) for gradient, of in found if gradient is not None and of is not None]


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows' logits, in float32 where operands are of 16 bits."""
    model = ModelRows(hidden, weight, bias, logits_dtype(hidden, widens=True))
    return model.values(slice(0, hidden.size(0)))


def _buffer(like: Tensor, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """[rows, vocab], as many of them as there are at most."""
    buffer = like.new_empty(min(rows, like.size(0)), math.ceil(vocab / ALIGNED) * ALIGNED, dtype=dtype)
    buffer[:, vocab:] = 0  # products may read what they do not use
    return buffer[:, :vocab]


def logits_dtype(hidden: Tensor, widens: bool) -> torch.dtype:
    return kept_dtype(hidden.dtype) if widens else hidden.dtype


class Chunks:
    """Both models' rows, a chunk at a time, both sides projected."""

    def __init__(self, task: Task, models: Models) -> None:
        self.task, self.models = task, models
        self.rows = models.hidden.size(0)
        self.begun: list[collecting.Begun] = []
        shard = task.problem.shard
        if task.chunk_rows:
            self.step, *kept = (task.chunk_rows,) * 3
        else:  # by ranks alike, whatever their devices
            most_bytes = CHUNK_BYTES if shard.group else bytes_of_chunks(models.hidden.device)
            self.step, *kept = plan_chunks(models, task.wants, most_bytes, task.widens, shard.width)
        summing = shard.group if task.sums_hidden else ""
        if summing:
            collectives.compare(task.problem, "gradients of hidden states:", task.wants[0], task.wants[3])
        dtypes = [logits_dtype(hidden, task.widens) for hidden in (models.hidden, models.target)]
        sides = ((models[:3], task.wants[:3]), (models[3:6], task.wants[3:]))
        self.student, self.teacher = (
            ModelRows(
                *side,
                dtype,
                wants=wants,
                step=self.step,
                kept=rows,
                row_weight=models.row_weight,
                summing=summing,
            )
            for (side, wants), rows, dtype in zip(sides, kept, dtypes, strict=True)
        )

    def __iter__(self) -> Iterator[tuple[slice, Rows]]:
        """Each chunk's rows, and a record to be completed; whatever it found is pulled back before the next comes."""
        for start in range(0, self.rows, self.step):
            rows = slice(start, start + self.step)
            x, y = self.student.values(rows), self.teacher.values(rows)
            of_rows = (None if t is None else in_memory(t[rows]).contiguous() for t in self.models.of_rows)
            d_x, d_y = self.student.place(rows, x), self.teacher.place(rows, y)
            yield rows, Rows(self.task.problem, Operands(x, y, *of_rows), d_input=d_x, d_target=d_y)
            self.student.pull_back(rows)
            self.teacher.pull_back(rows)

    def run(self, rows: slice, work: Rows) -> None:
        begun = collecting.begin(work.problem, work.operands) if work.verb == "loss" else None
        if begun is not None:
            self.begun.append(begun)
            work = work._replace(figures=begun.figures)
        if parallel.exchanges_in_kernels(work.problem.shard.group):
            self.student.wait()
            self.teacher.wait()
        if self.models.ids is None:
            parallel.run(work)
        else:
            topk.run_at_ids(work, self.models.ids[rows], self.task.negligible)

    def end(self) -> None:
        """All losses are found."""
        if not self.rows:
            self.begun.append(collecting.of_no_rows(self.models.hidden, self.models.labels))
        collecting.end(self.begun)

    def gradients(self) -> list[Tensor]:
        return [*self.student.gradients(), *self.teacher.gradients()]


def bytes_of_chunks(device: torch.device) -> int:
    """So many that all models' rows may take at once: a share of a large GPU's memory."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // DEVICE_SHARE)


def plan_chunks(
    models: Models, wants: Sequence[bool], most_bytes: int, widens: bool = False, width: int = 0
) -> tuple[int, int, int]:
    """Rows of a chunk, and of the student's and the teacher's logits that are kept: whole chunks, in `most_bytes`.

    Those of a head whose gradient is wanted are kept for several chunks, if the other side's are streamed. Logits wider
    than their operands are a chunk's, and what is kept is their rounded gradient. `width`: how many tokens to count
    with, where ranks that have unlike slices must plan alike.
    """
    rows = models.hidden.size(0)
    kept = streamed = 0
    keeps = []
    sides = ((models.hidden, models.weight, wants[:3]), (models.target, models.target_weight, wants[3:]))
    for hidden, weight, wanted in sides:
        tokens = 0 if weight is None else width or weight.size(0)
        own = tokens * hidden.itemsize
        wide = tokens * logits_dtype(hidden, widens).itemsize
        keeps.append(weight is not None and wanted[1])
        if keeps[-1]:
            kept += own
            streamed += wide if wide > own else 0
        else:
            streamed += wide + (own if wide > own and any(wanted) else 0)
    if kept and streamed:
        share = (WIDE_STREAMED if widens else STREAMED) * streamed
        most = _whole_tiles(most_bytes // max(share, kept + streamed))
        largest = most * max(1, (most_bytes // most - streamed) // kept)
    else:
        most = most_bytes // max(1, kept + streamed)
        if streamed:  # what passes needs no more memory on a large GPU, but for rows that are enough
            most = min(most, max(ENOUGH, CHUNK_BYTES // streamed))
        most = largest = _whole_tiles(most)
    blocks = math.ceil(rows / largest)
    each = math.ceil(rows / max(1, blocks)) if blocks < 2 or largest < FILLING else largest // FILLING * FILLING
    if kept and streamed and blocks < 2:  # all rows are kept, and what memory is left is for those that pass
        most = max(most, min(_whole_tiles((most_bytes - each * kept) // streamed, LARGE_TILE), ENOUGH))
    tile = TILE if blocks > 1 or most < LARGE_TILE else LARGE_TILE
    several = math.ceil(each / most)
    step = max(1, math.ceil(each / max(1, several)))
    step = min(most, step if step < tile else math.ceil(step / tile) * tile)
    student, teacher = (step * several if keep else step for keep in keeps)
    return step, student, teacher


def _whole_tiles(rows: int, tile: int = TILE) -> int:
    """At most so many, of whole tiles if there is one."""
    return max(1, rows if rows < tile else rows // tile * tile)


def sum_losses(task: Task, models: Models, scale: float) -> list[Tensor]:
    """scale · Σ row_weight · loss, 0-d, and the gradients that are wanted."""
    chunks = Chunks(task, models)
    totals = []
    for rows, work in chunks:
        total = models.hidden.new_empty((), dtype=accumulator(models.hidden))
        chunks.run(rows, work._replace(scale=scale, total=total))
        totals.append(total)
    chunks.end()
    loss = torch.stack(totals).sum() if totals else models.hidden.new_zeros(())
    return [loss.to(task.dtype), *chunks.gradients()]


def row_losses(task: Task, models: Models) -> tuple[Tensor, Tensor]:
    """row_weight · loss of each row, and the rows' states."""
    chunks = Chunks(task._replace(wants=(False,) * GRADIENTS), models)
    loss, states = models.hidden.new_empty(chunks.rows, dtype=task.dtype), []
    for rows, work in chunks:
        states.append(packed(work.input.size(0), state_fields(task.problem), loss))
        chunks.run(rows, work._replace(loss=loss[rows], found=states[-1]))
    chunks.end()
    return loss, torch.cat(states, -1) if states else packed(0, state_fields(task.problem), loss)


def write_gradients(task: Task, models: Models, state: Tensor) -> list[Tensor]:
    """The wanted gradients of Σ row_weight · loss."""
    chunks = Chunks(task, models)
    for rows, work in chunks:
        chunks.run(rows, work._replace(verb="gradient", known=state[:, rows].contiguous()))
    return chunks.gradients()


def _total(models: Models, task: str, scalars: Scalars, symbols: Tensor | None, scale: float) -> list[Tensor]:
    return sum_losses(decode_task(task, as_numbers(scalars, symbols)), models, scale)


def _per_row(models: Models, task: str, scalars: Scalars, symbols: Tensor | None) -> tuple[Tensor, Tensor]:
    return row_losses(decode_task(task, as_numbers(scalars, symbols)), models)


def _gradient(models: Models, task: str, scalars: Scalars, symbols: Tensor | None, state: Tensor) -> list[Tensor]:
    return write_gradients(decode_task(task, as_numbers(scalars, symbols)), models, state)


def _fake_total(models: Models, task: str, *arguments: Any) -> list[Tensor]:
    asked = decode_task(task)
    wanted = zip(models[:GRADIENTS], asked.wants, strict=True)
    gradients = (t.new_empty(t.shape) for t, wants in wanted if wants and t is not None)
    return [models.hidden.new_empty((), dtype=asked.dtype), *gradients]


def _fake_per_row(models: Models, task: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    asked = decode_task(task)
    loss = models.hidden.new_empty(models.hidden.size(0), dtype=asked.dtype)
    return loss, packed(loss.size(0), state_fields(asked.problem), loss)


def _fake_gradient(models: Models, task: str, *arguments: Any) -> list[Tensor]:
    return _fake_total(models, task)[1:]


for name, function, fake in (
    ("linear_total", _total, _fake_total),
    ("linear_per_row", _per_row, _fake_per_row),
    ("linear_gradient", _gradient, _fake_gradient),
):
    library.impl(name, of_fields(Models, function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kullback::{name}", of_fields(Models, fake), lib=library)


def _flops(writes_gradients: bool, *arguments: Any, out_val: object = None) -> int:
    """Of the products: each side's logits, and from there the gradients that are wanted."""
    models = Models._make(arguments[: len(Models._fields)])
    wants = decode_task(arguments[len(models)]).wants
    total = 0
    for hidden, weight, wanted in ((*models[:2], wants[:2]), (*models[3:5], wants[3:5])):
        if weight is not None:
            total += 2 * hidden.size(0) * weight.numel() * (1 + writes_gradients * sum(wanted))
    return total


for name, writes_gradients in (("linear_total", True), ("linear_per_row", False), ("linear_gradient", True)):
    count = functools.partial(_flops, writes_gradients)
    register_flop_formula(getattr(torch.ops.kullback, name), get_raw=True)(count)


ONCE = "linear_divergence does not support double backward; use divergence(F.linear(input, weight), ...)"
BATCHED = (
    "linear_divergence has no batched gradients (is_grads_batched, or a vectorized jacobian); "
    "use divergence(F.linear(input, weight), ...)"
)
# Private; where it is missing, gradients are copied as if another backward were to come.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _operator_total(task: Task, scale: float, *models: Tensor | None) -> list[Tensor]:
    arguments = *models, key_of(task), *as_arguments(scalars_of(task)), scale
    return torch.ops.kullback.linear_total.default(*arguments)  # type: ignore[no-any-return]


def _operator_per_row(task: Task, *models: Tensor | None) -> tuple[Tensor, Tensor]:
    arguments = *models, key_of(task), *as_arguments(scalars_of(task))
    return torch.ops.kullback.linear_per_row.default(*arguments)  # type: ignore[no-any-return]


class LinearTotal(torch.autograd.Function):
    """scale · Σ row_weight · loss, and the gradients of all that wants one, found in the same pass."""

    @staticmethod
    def forward(ctx: Context, task: Task, scale: float, *models: Tensor | None) -> Tensor:
        if is_traced(*(t for t in models if t is not None)):
            loss, *gradients = _operator_total(task, scale, *models)
        else:
            loss, *gradients = sum_losses(task, Models._make(models), scale)
        ctx.task, ctx.backend, ctx.count = task, backends.forced(), len(models)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        gradients = ctx.saved_tensors
        if is_traced(grad_out) or _keeps_graph():
            gradients = [(gradient * grad_out).to(gradient.dtype) for gradient in gradients]
        else:
            with backends.restored(ctx.backend):
                for gradient in gradients:
                    backends.run(Scale(gradient, grad_out))
        return None, None, *_spread(ctx, gradients)


class LinearPerRow(torch.autograd.Function):
    """row_weight · loss of each row; backward projects again and starts from the rows' states."""

    @staticmethod
    def forward(ctx: Context, task: Task, *models: Tensor | None) -> Tensor:
        if is_traced(*(t for t in models if t is not None)):
            loss, state = _operator_per_row(task, *models)
        else:
            loss, state = row_losses(task, Models._make(models))
        ctx.task, ctx.backend, ctx.count = task, backends.forced(), len(models)
        ctx.save_for_backward(state, *models)
        return loss

    @staticmethod
    def backward(ctx: Context, grad_out: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        if not torch.compiler.is_compiling() and is_batched(grad_out):
            raise RuntimeError(BATCHED)
        state, *saved = ctx.saved_tensors
        task, models = ctx.task, Models(*saved)
        row_weight = weighted(widened(grad_out), models.row_weight)
        given = tuple(models)  # Dynamo knows no `_replace`
        models = Models(*given[:ROW_WEIGHT], row_weight, *given[ROW_WEIGHT + 1 :])  # type: ignore[call-arg, arg-type]
        if is_traced(*(t for t in models if t is not None)):
            scalars = as_arguments(scalars_of(task))
            gradients = torch.ops.kullback.linear_gradient.default(*models, key_of(task), *scalars, state)
        else:
            with backends.restored(ctx.backend):
                gradients = write_gradients(task, models, state)
        return None, *_spread(ctx, gradients)


def _spread(ctx: Context, gradients: Sequence[Tensor]) -> Gradients:
    """Those that were wanted, each in its operand's place."""
    remaining = iter(gradients)
    wanted = (next(remaining) if wanted else None for wanted in ctx.task.wants)
    return *wanted, *(None for _ in range(ctx.count - GRADIENTS))


def _asked(models: Models, key: str, scalars: Scalars, symbols: Tensor | None) -> Task:
    """An operator's task, with the gradients that its caller will ask for: whoever exported it may have had others."""
    wants = tuple(t is not None and t.requires_grad for t in models[:GRADIENTS])
    return decode_task(key, as_numbers(scalars, symbols))._replace(wants=wants)


def _differentiated_total(models: Models, *asked: Any) -> list[Tensor]:
    *task, scale = asked
    loss = LinearTotal.apply(_asked(models, *task), scale, *models)
    return [loss, *_fake_total(models, *asked)[1:]]  # nobody looks at these: the Function has its own


def _differentiated_per_row(models: Models, *task: Any) -> tuple[Tensor, Tensor]:
    return LinearPerRow.apply(_asked(models, *task), *models), _fake_per_row(models, *task)[1]


differentiated("linear_total", torch.ops.kullback.linear_total.default, of_fields(Models, _differentiated_total))
differentiated("linear_per_row", torch.ops.kullback.linear_per_row.default, of_fields(Models, _differentiated_per_row))


def task_of(
    problem: Problem,
    models: Models,
    negligible: float,
    dtype: torch.dtype,
    chunk_rows: int,
    widens: bool,
    sums_hidden: bool = False,
) -> Task:
    """The task, with the gradients that autograd will ask for."""
    enabled = torch.is_grad_enabled()
    wants = tuple(enabled and t is not None and t.requires_grad for t in tuple(models)[:GRADIENTS])
    return Task(problem, negligible, dtype, chunk_rows, widens, sums_hidden, wants)


def total(task: Task, models: Models, scale: float) -> Tensor:
    """scale · Σ row_weight · loss, 0-d."""
    if any(task.wants) and waits_for_scaler(models.hidden, models.target):
        return (per_row(task, models).sum() * scale).to(task.dtype)
    if torch.compiler.is_exporting():  # as of autograd.applied
        return _operator_total(task, scale, *distinct(models))[0]
    return LinearTotal.apply(task, scale, *distinct(models))  # type: ignore[no-any-return]


def per_row(task: Task, models: Models) -> Tensor:
    """row_weight · loss of each row."""
    if any(task.wants) and not torch.compiler.is_compiling():
        # What inference mode made cannot be saved for backward; a copy made outside of it can.
        models = Models._make(t.clone() if t is not None and t.is_inference() else t for t in models)
    if torch.compiler.is_exporting():
        return _operator_per_row(task, *distinct(models))[0]
    return LinearPerRow.apply(task, *distinct(models))  # type: ignore[no-any-return]
