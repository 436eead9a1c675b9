"""Kernels that exchange numbers of rows with other ranks': emulated by processes that share memory, and on two GPUs."""

import contextlib
import math
import os
import tempfile
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

import kullback
from kullback import backends, collectives, parallel, symmetric
from tests import emulation, kinds, oracle, samples
from tests.ranks import Ranks, counted, spawn
from tests.tolerances import BF16_CACHED, FLOAT_GRADIENT, LOSS, relative_error

ROWS = 64


@contextlib.contextmanager
def exchanging(ranks: Ranks):
    """Inside, kernels of all ranks exchange; without GPUs each writes to files that the others have mapped."""
    if ranks.device.type == "cuda":
        kullback.enable_symmetric_memory(ranks.group, rows=ROWS, timeout=timedelta(seconds=20))
        yield
        return
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    count = symmetric.PACKETS * ROWS * ranks.world
    boxes = [
        torch.from_file(f"{folder[0]}/{rank}", shared=True, size=count, dtype=torch.int64)
        for rank in range(ranks.world)
    ]
    boxes[ranks.rank].fill_(symmetric.NOTHING_SENT)
    dist.barrier()
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    launches = torch.zeros((), dtype=torch.int64)
    buffer = symmetric.packet_buffer(
        addresses.data_ptr(), launches, ranks.rank, ranks.world, ROWS, timedelta(seconds=60), boxes, addresses
    )
    symmetric._buffers[ranks.group] = buffer
    with pytest.MonkeyPatch.context() as patch, emulation.emulated(patch):
        emulation.on_chip(patch)
        yield


def batch(dtype, vocab, cut):
    """Far and close rows; near ones of few far tokens; rows that have nothing in a slice; one that does not count."""
    generator = torch.Generator().manual_seed(1)
    return samples.batch(
        generator,
        vocab,
        dtype,
        far=samples.far(2.0),
        apart=samples.apart(1.0),
        some=samples.apart(0.5),
        near=samples.apart(0.15),
        closer=samples.apart(0.05),
        close=samples.apart(0.01),
        spiked=samples.spiked(0.02, 2.0, 61),
        peaked=samples.peaked(samples.apart(0.1), 5, 12.0),
        shifted=samples.shifted(0.05, 40.0),
        dead=samples.dead,
        nothing_there=samples.masked(samples.apart(0.5), both=slice(cut, vocab)),
        nothing_here=samples.masked(samples.apart(0.5), both=slice(0, cut)),
    )


def check_kind(ranks: Ranks, kind: str, dtype: torch.dtype, vocab: int, cuts: list[int]):
    rows = batch(dtype, vocab, cuts[0])
    weight = rows.weight(dead=0.0, apart=2.0)
    counts = weight != 0
    parameters = kinds.parameters(kind)
    a, b = (t[counts].double().requires_grad_() for t in (rows.x, rows.y))
    hidden = torch.isinf(a) & torch.isinf(b)
    losses = oracle.divergence(a.masked_fill(hidden, -1e5), b.masked_fill(hidden, -1e5), kind, **parameters)
    truth = (losses * weight[counts]).sum()
    exact = torch.autograd.grad(truth, (a, b))
    leaves = [ranks.slice(t, cuts=cuts).requires_grad_() for t in (rows.x, rows.y)]
    weight = weight.to(ranks.device)
    both = kullback.divergence(*leaves, kind, row_weight=weight, reduction="sum", group=ranks.group, **parameters)
    gradients = torch.autograd.grad(both, leaves)
    student = kullback.divergence(
        leaves[0], leaves[1].detach(), kind, row_weight=weight, reduction="sum", group=ranks.group, **parameters
    )
    (alone,) = torch.autograd.grad(student, leaves[0])
    with counted() as calls:
        each = kullback.divergence(
            *(leaf.detach() for leaf in leaves),
            kind,
            row_weight=weight,
            reduction="none",
            group=ranks.group,
            **parameters,
        )
    assert calls == [], "a kernel exchanges, and no collective"
    assert backends.backend_info().name == "cuda"
    what = f"{kind}, {dtype}"
    for loss in (both, student, each.sum()):
        assert relative_error(loss, truth) < LOSS, what
    for loss in (both, student, each):
        for other in ranks.everyone(loss.detach()):
            assert torch.equal(other, loss.detach()), what
    counts = counts.to(ranks.device)
    names = [name for name, is_counted in zip(rows.names, counts.tolist(), strict=True) if is_counted]
    # The target's gradient of renyi is a difference of masses, which float32 rounds: on one GPU too it is 2.3e-6 off.
    within = (2 if kind == "renyi" else 1) * FLOAT_GRADIENT if dtype == torch.float32 else BF16_CACHED
    for ours, of_whole in zip((gradients[0], gradients[1], alone), (exact[0], exact[1], exact[0]), strict=True):
        assert ours[~counts].count_nonzero() == 0
        # Of a rank's slice, beside the whole row's: a part of which there is nearly nothing is rounded like the rest.
        own = ranks.slice(of_whole, cuts=cuts)
        for name, row, true, whole in zip(names, ours[counts], own, of_whole, strict=True):
            error = (row.double() - true.to(row.device)).norm() / whole.norm().clamp(min=1e-300)
            assert error < within, (what, name, float(error))


SOME = ("kl", "jensen_shannon")


def check_collectives_between(ranks: Ranks):
    """The hidden states' gradient is summed beside products, and beside no kernel that exchanges."""
    events: list[str] = []
    launch, begin = parallel._in_one_launch, collectives.begin_sum

    class Sum:
        def __init__(self, begun):
            self.begun = begun

        def wait(self):
            events.append("wait")
            self.begun.wait()

    def launching(*arguments):
        events.append("launch")
        launch(*arguments)

    def beginning(*arguments):
        events.append("begin")
        return Sum(begin(*arguments))

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 64, generator=generator).bfloat16().to(ranks.device).requires_grad_()
    heads = torch.randn(2, 2 * 2816, 64, generator=generator).bfloat16()
    own, teacher = (ranks.slice(head, dim=0) for head in heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "_in_one_launch", launching)
        patch.setattr(collectives, "begin_sum", beginning)
        tokens = {"first_token": 2816 * ranks.rank, "total_vocab": 5632}
        kullback.linear_divergence(hidden, own, hidden.detach(), teacher, group=ranks.group, chunk_rows=8, **tokens)
    assert events == ["launch", "begin", "wait"] * 3


def check_no_numbers(ranks: Ranks, of_kinds: tuple[str, ...]):
    """What one rank alone has of a row decides for all: NaN, infinities, and tokens that are masked."""
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(7, 5931, generator=generator)
    x = y + 0.1 * torch.randn(7, 5931, generator=generator)
    x[0, 7], y[1, 4000], x[2, 3300], x[3, 5] = math.nan, math.nan, math.inf, -math.inf
    y[4, 3200:] = -math.inf
    x[5, :3200] = y[5, :3200] = -math.inf
    for kind in of_kinds:
        parameters = kinds.parameters(kind)
        leaves = [ranks.slice(t.bfloat16(), cuts=[3200]).requires_grad_() for t in (x, y)]
        losses = kullback.divergence(*leaves, kind, reduction="none", group=ranks.group, **parameters)
        gradients = torch.autograd.grad(losses.sum(), leaves)
        of_whole = [t.bfloat16().to(ranks.device).requires_grad_() for t in (x, y)]
        truth = kullback.divergence(*of_whole, kind, reduction="none", **parameters)
        for other in ranks.everyone(losses.detach()):
            assert torch.equal(other.nan_to_num(), losses.detach().nan_to_num())
        torch.testing.assert_close(losses, truth, rtol=LOSS, atol=0, equal_nan=True)
        for ours, of_row in zip(gradients, torch.autograd.grad(truth.sum(), of_whole), strict=True):
            assert torch.equal(ours.isnan(), ranks.slice(of_row, cuts=[3200]).isnan()), kind


def check_disagreement(ranks: Ranks):
    """Slices of which one is too short for a kernel that exchanges."""
    x = ranks.slice(torch.randn(4, 5000), cuts=[2000]).bfloat16()
    with kullback.checking_ranks(), pytest.raises(ValueError, match=r"too few or too many.* and .*in one launch"):
        kullback.divergence(x, x, group=ranks.group)
    for part, y, reason in (
        (x[:, :1900], x[:, :1900], "1900 tokens are too few or too many"),
        (torch.zeros(4, 3000).bfloat16(), torch.zeros(4, 3001).bfloat16()[:, 1:], "rows of input, target"),
    ):
        with pytest.raises(ValueError, match=f"a slice is not what enable_symmetric_memory asks for: {reason}"):
            kullback.divergence(part, y, group=ranks.group)


def check_refusals(ranks: Ranks):
    """Of what one rank asks all raise: none waits for it."""
    late = timedelta(seconds=ranks.rank - 1)
    for asked, reason in (
        ({"rows": 8 * ranks.rank}, "rows must be the same on all ranks; got 0, 8"),
        ({"rows": 0}, "rows must be from 1 to"),
        ({"timeout": late}, "timeout must be positive; got -1 day"),
    ):
        with pytest.raises(ValueError, match=reason):
            kullback.enable_symmetric_memory(ranks.group, **asked)


def check_some(ranks: Ranks):
    check_refusals(ranks)
    with pytest.raises(RuntimeError, match="rank 0 says: it serves GPUs"):
        kullback.enable_symmetric_memory(ranks.group)
    with exchanging(ranks):
        for kind in SOME:
            check_kind(ranks, kind, torch.bfloat16, 5931, [3200])
        check_kind(ranks, "kl", torch.float32, 5931, [2400])
        check_collectives_between(ranks)
        check_no_numbers(ranks, SOME)
        check_disagreement(ranks)


def check_all(ranks: Ranks):
    with exchanging(ranks):
        for kind in kinds.KINDS:
            check_kind(ranks, kind, torch.bfloat16, 5931, [3200])
        for kind in ("kl", "jensen_shannon", "renyi"):
            check_kind(ranks, kind, torch.float32, 5931, [2400])
        check_collectives_between(ranks)
        check_no_numbers(ranks, (*SOME, "total_variation", "renyi"))


def test_emulated_ranks(tmp_path):
    spawn(check_some, 2, tmp_path)


@pytest.mark.full
def test_all_kinds_of_emulated_ranks(tmp_path):
    spawn(check_all, 2, tmp_path)


@pytest.mark.gpus
def test_two_gpus(tmp_path):
    spawn(check_all, 2, tmp_path, "nccl")


def killed(ranks: Ranks):
    """The others' kernels end with an assertion after the time-out."""
    kullback.enable_symmetric_memory(ranks.group, rows=ROWS, timeout=timedelta(seconds=20))
    x = torch.randn(4, 4096, device=ranks.device)
    kullback.divergence(x, x, group=ranks.group)  # compiles it, which takes long
    torch.cuda.synchronize()
    dist.barrier()
    if ranks.rank == 1:
        os._exit(0)
    kullback.divergence(x, x, group=ranks.group)
    with pytest.raises(RuntimeError, match="assert"):
        torch.cuda.synchronize()
    os._exit(0)  # a barrier would wait for the dead


@pytest.mark.gpus
def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    spawn(killed, 2, tmp_path, "nccl")


@contextlib.contextmanager
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_enabled():
    with alone() as group:
        with pytest.raises(ValueError, match="rows must be from 1 to 214748363; got 0"):
            kullback.enable_symmetric_memory(group, rows=0)
        with pytest.raises(ValueError, match="timeout must be positive; got 0:00:00"):
            kullback.enable_symmetric_memory(group, timeout=timedelta())
        for rows in (3.5, True, None):
            with pytest.raises(TypeError, match=f"rows must be an integer; got {type(rows).__name__}"):
                kullback.enable_symmetric_memory(group, rows=rows)
        with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta; got int"):
            kullback.enable_symmetric_memory(group, timeout=5)


def test_a_group_of_the_same_name_is_not_enabled():
    with alone() as group:
        name, launches = group.group_name, torch.zeros((), dtype=torch.int64)
        assert symmetric.packet_buffer_of(group) is None
        symmetric._buffers[group] = symmetric.packet_buffer(0, launches, 0, 1, ROWS, timedelta(seconds=1))
        assert symmetric.packet_buffer_of(group) is not None
    with alone() as group:
        assert group.group_name == name
        assert symmetric.packet_buffer_of(group) is None
