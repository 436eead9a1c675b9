"""DTensors by rows: every process finds its own rows' losses and gradients, and together they are the whole's."""

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import kullback
from tests import ranks

WORLD = 2


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """One process's, for what needs no other."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/0", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def rows():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 5, 40, generator=generator)
    return x, y, torch.rand(3, 5, generator=generator)


def whole(x, y, weight, reduction):
    leaf = x.clone().requires_grad_()
    loss = kullback.divergence(leaf, y, "jensen_shannon", reduction=reduction, row_weight=weight)
    return loss, *torch.autograd.grad(loss.square().sum(), leaf)


def check_rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    x, y, weight = rows()
    for placement in (Replicate(), Shard(0), Shard(1)):  # 3 and 5 rows of 2 devices: of unlike parts
        for reduction in ("none", "sum", "mean"):
            for given in (None, weight):
                dx, dy = (distribute_tensor(t, mesh, [placement]) for t in (x, y))
                dw = None if given is None else distribute_tensor(given, mesh, [placement])
                leaf = dx.detach().requires_grad_()
                loss = kullback.divergence(leaf, dy, "jensen_shannon", reduction=reduction, row_weight=dw)
                assert isinstance(loss, DTensor)
                loss.full_tensor().square().sum().backward()  # torch 2.8 squares each rank's part of a sum
                expected, gradient = whole(x, y, given, reduction)
                torch.testing.assert_close(loss.full_tensor(), expected)
                assert leaf.grad.placements == (placement,)
                torch.testing.assert_close(leaf.grad.full_tensor(), gradient)
        dp, dq = (distribute_tensor(t.softmax(-1), mesh, [placement]) for t in (x, y))
        ours = kullback.kl_div(dp.log(), dq, "batchmean").full_tensor()
        torch.testing.assert_close(
            ours, torch.nn.functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
        )
    ranks.leave()


def test_rows_of_two_processes(tmp_path):
    mp.spawn(check_rank, (tmp_path / "store",), WORLD)


def test_parts_of_sums_are_refused(mesh):
    x, y, _ = rows()
    x, y = (DTensor.from_local(t, mesh, [Partial()]) for t in (x, y))
    with pytest.raises(ValueError, match="sharded along a dimension of rows"):
        kullback.divergence(x, y)


def test_operands_that_lie_otherwise_are_refused(mesh):
    x, y, weight = rows()
    sharded, replicated = (distribute_tensor(x, mesh, [p]) for p in (Shard(0), Replicate()))
    with pytest.raises(ValueError, match=r"target must lie as the input does.*redistribute"):
        kullback.divergence(sharded, replicated)
    with pytest.raises(TypeError, match="must all be DTensors, or none; target is none"):
        kullback.divergence(sharded, y)
    with pytest.raises(TypeError, match="row_weight is none"):
        kullback.divergence(sharded, sharded, reduction="sum", row_weight=weight)
    with pytest.raises(ValueError, match="inplace=True is for plain eager calls"):
        kullback.divergence(sharded + 0, sharded, inplace=True)


def labels_of(x):
    return torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % x.size(-1)


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Shard(1), Shard(2)])
@pytest.mark.parametrize("has_labels", [False, True])
def test_a_normalizer_is_a_number_or_a_tensor(mesh, placement, has_labels):
    x, y, _ = rows()
    whole = {"labels": labels_of(x)} if has_labels else {}
    lies = Replicate() if placement == Shard(2) else placement
    local = {name: distribute_tensor(labels, mesh, [lies]) for name, labels in whole.items()}
    given, target = (distribute_tensor(t, mesh, [placement]) for t in (x, y))
    expected = kullback.divergence(x, y, normalizer=2.5, **whole)
    normalizer = torch.tensor(2.5)
    for each in (2.5, normalizer, distribute_tensor(normalizer, mesh, [Replicate()])):
        student = given.detach().requires_grad_()
        loss = kullback.divergence(student, target, normalizer=each, **local)
        torch.testing.assert_close(loss.full_tensor(), expected)
        loss.backward()
        assert student.grad.full_tensor().abs().max() > 0


def test_weights_of_labels_alone_have_a_gradient(mesh):
    x, _, weight = rows()
    labels = labels_of(x)
    plain, split = weight.clone().requires_grad_(), distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    kullback.divergence(x, None, labels=labels, row_weight=plain).backward()
    given = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, labels))
    x, labels = given
    kullback.divergence(x, None, labels=labels, row_weight=split).backward()
    torch.testing.assert_close(split.grad.full_tensor(), plain.grad)
