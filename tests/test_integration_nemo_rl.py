"""NeMo-RL's distillation losses, against their formulas in float64."""

import sys
import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import kullback
from kullback.integrations.nemo_rl import direct_topk_kl, distillation_loss
from tests.ranks import Ranks, spawn
from tests.tolerances import relative_error

BATCH, TOKENS, VOCAB, K = 3, 7, 104, 8
LOSS, GRADIENT = 1e-6, 1e-5
CASES = [
    *({"kl_type": kl_type, "zero_outside_topk": zero} for kl_type in ("forward", "reverse") for zero in (False, True)),
    *({"mixed_kl_weight": weight, "zero_outside_topk": zero} for weight in (0.5, 0.2) for zero in (False, True)),
]


def made(dtype=torch.float32):
    """The student's logits, the teacher's, and a batch."""
    generator = torch.Generator().manual_seed(2)
    student = 3 * torch.randn(BATCH, TOKENS, VOCAB, generator=generator)
    teacher = 0.5 * student + 2 * torch.randn(BATCH, TOKENS, VOCAB, generator=generator)
    values, ids = teacher.topk(K)
    token_mask = torch.ones(BATCH, TOKENS)
    token_mask[0, :3], token_mask[2, 5:] = 0, 0
    data = {
        "input_ids": torch.zeros(BATCH, TOKENS, dtype=torch.int64),
        "teacher_topk_logits": values,
        "teacher_topk_indices": ids,
        "token_mask": token_mask,
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
    }
    return student.to(dtype), teacher.to(dtype), data


def textbook(student, data, kl_type="mixed", mixed_kl_weight=0.5, zero_outside_topk=False):
    """Both softmaxes of the k tokens; or the student's of all, and of the teacher e^-100 at tokens that are none."""
    logits, ids = student[:, :-1], data["teacher_topk_indices"][:, :-1]
    log_p = data["teacher_topk_logits"][:, :-1].double().log_softmax(-1)
    whole = logits.log_softmax(-1)
    log_q = whole.gather(-1, ids) if zero_outside_topk else logits.gather(-1, ids).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    if zero_outside_topk:
        rest = (whole.exp() * whole).sum(-1) - (q * log_q).sum(-1)
        reverse = reverse + rest + 100 * (1 - q.sum(-1))
    mixed = mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse
    rows = {"forward": forward, "reverse": reverse, "mixed": mixed}[kl_type]
    if "token_mask" not in data:
        return rows.mean()
    return (rows * data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum() / 11


def truth(student, data, **options):
    wide = student.detach().double().requires_grad_()
    loss = textbook(wide, data, **options)
    return loss.detach(), torch.autograd.grad(loss, wide)[0]


def bound(dtype):
    return GRADIENT if dtype == torch.float32 else 4e-3


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_theirs(dtype, options):
    student, _, data = made(dtype)
    for given in (data, {name: value for name, value in data.items() if "mask" not in name}):
        expected, exact = truth(student, given, **options)
        leaf = student.clone()
        leaf[:, -1, 0] = torch.nan  # of the last tokens nothing is read
        leaf.requires_grad_()
        loss, metrics = distillation_loss(leaf, given, None, torch.tensor(11.0), **options)
        assert kullback.backend_info().name in ("c", "cuda")
        assert loss.dtype == torch.float32
        assert relative_error(loss, expected) < LOSS
        assert metrics == {"loss": loss.item(), "num_valid_samples": BATCH}
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert gradient.dtype == dtype
        assert relative_error(gradient, exact) < bound(dtype)
        assert gradient[:, -1].count_nonzero() == 0


def test_a_batch_without_tokens_is_nothing():
    student, _, data = made()
    loss, _ = distillation_loss(student.requires_grad_(), data | {"sample_mask": torch.zeros(BATCH)}, None, 0.0)
    assert loss == 0
    assert torch.autograd.grad(loss, student)[0].count_nonzero() == 0


def test_what_it_does_not_know():
    student, _, data = made()
    with pytest.raises(ValueError, match='kl_type must be "forward", "reverse" or "mixed"; got \'both\''):
        distillation_loss(student, data, None, 1.0, kl_type="both")
    with pytest.raises(ValueError, match="mixed_kl_weight must lie from 0 to 1"):
        distillation_loss(student, data, None, 1.0, mixed_kl_weight=2.0)
    ids = data["teacher_topk_indices"]
    for kl_type in ("forward", "reverse"):
        with pytest.raises(TypeError, match="teacher_topk_indices must be of an integer dtype"):
            distillation_loss(student, data | {"teacher_topk_indices": ids.half()}, None, 1.0, kl_type=kl_type)
        wrong = data | {"teacher_topk_indices": torch.where(ids == ids[0, 3, 0], VOCAB, ids)}
        with pytest.raises(ValueError, match=f"_indices must lie from 0 to {VOCAB - 1}.*; got {VOCAB}"):
            distillation_loss(student, wrong, None, 1.0, kl_type=kl_type, zero_outside_topk=True)


def of_same_vocabulary(reverse):
    """What `direct_topk_kl` reads of NeMo-RL's loss, whose reduction it calls: here plainly masked."""

    def masked_mean(of_tokens, align, global_valid_toks, cp_group):
        return (of_tokens * align).sum() / global_valid_toks * 1.7 * 1.7

    return types.SimpleNamespace(
        temperature=1.7,
        reverse_kl=reverse,
        vocab_topk=20,
        student_vocab_size=VOCAB - 4,
        _same_vocab_masked_kl=masked_mean,
    )


def first_of_all(teacher, k, *, cp_group):
    return teacher.reshape(-1, teacher.size(-1)).max(0).values.topk(k).indices.sort().values


def module_of_theirs():
    made = types.ModuleType("nemo_rl.algorithms.x_token.loss_utils")
    made.select_teacher_topk_indices = first_of_all
    return {"nemo_rl.algorithms.x_token.loss_utils": made}


def textbook_of_columns(student, teacher, mask, reverse):
    ids = first_of_all(teacher[..., : VOCAB - 4], 20, cp_group=None)
    log_q, log_p = ((t[..., ids] / 1.7).log_softmax(-1) for t in (student, teacher))
    rows = (log_q.exp() * (log_q - log_p) if reverse else log_p.exp() * (log_p - log_q)).sum(-1)
    return (rows * mask).sum() / 11 * 1.7**2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_of_the_same_vocabulary(dtype, reverse, monkeypatch):
    for name, module in module_of_theirs().items():
        monkeypatch.setitem(sys.modules, name, module)
    student, teacher, data = made(dtype)
    mask = data["token_mask"]
    wide = student.double().requires_grad_()
    expected = textbook_of_columns(wide, teacher.double(), mask, reverse)
    (exact,) = torch.autograd.grad(expected, wide)
    leaf = student.requires_grad_()
    loss = direct_topk_kl(
        of_same_vocabulary(reverse), leaf, teacher, mask, torch.tensor(11.0), tp_group=None, cp_group=None
    )
    assert kullback.backend_info().name in ("c", "cuda")
    assert relative_error(loss, expected) < LOSS
    assert relative_error(torch.autograd.grad(loss, leaf)[0], exact) < bound(dtype)


def check_ranks(ranks: Ranks):
    """With a group; and of a DTensor, whose group is its mesh's."""
    sys.modules.update(module_of_theirs())
    mesh = init_device_mesh("cpu", (ranks.world,), mesh_dim_names=("tp",))
    for dtype in (torch.float32, torch.bfloat16):
        student, teacher, data = made(dtype)
        for options in CASES:
            expected, exact = truth(student, data, **options)
            leaf = ranks.slice(student).requires_grad_()
            loss, _ = distillation_loss(leaf, data, None, 11.0, vocab_parallel_group=ranks.group, **options)
            assert relative_error(loss, expected) < LOSS, options
            assert relative_error(torch.autograd.grad(loss, leaf)[0], ranks.slice(exact)) < bound(dtype), options
            sharded = distribute_tensor(student, mesh, [Shard(-1)]).requires_grad_()
            loss, _ = distillation_loss(sharded, data, None, 11.0, **options)
            assert relative_error(loss, expected) < LOSS, options
            (gradient,) = torch.autograd.grad(loss, sharded)
            assert relative_error(gradient.to_local(), ranks.slice(exact)) < bound(dtype), options
        for reverse in (False, True):
            wide = student.double().requires_grad_()
            expected = textbook_of_columns(wide, teacher.double(), data["token_mask"], reverse)
            (exact,) = torch.autograd.grad(expected, wide)
            leaf, theirs = ranks.slice(student).requires_grad_(), of_same_vocabulary(reverse)
            loss = direct_topk_kl(theirs, leaf, teacher, data["token_mask"], 11.0, tp_group=ranks.group, cp_group=None)
            assert relative_error(loss, expected) < LOSS, reverse
            assert relative_error(torch.autograd.grad(loss, leaf)[0], ranks.slice(exact)) < bound(dtype), reverse
    for placement, part in ((Shard(-1), student[..., 1:]), (Replicate(), student)):
        refused = distribute_tensor(part, mesh, [placement])
        with pytest.raises(ValueError, match='sharded over "tp" by equal parts of their tokens; got '):
            distillation_loss(refused, data, None, 11.0)
    with pytest.raises(ValueError, match="shared by a context_parallel_group"):
        distillation_loss(student, data, None, 11.0, context_parallel_group=ranks.group)


def test_ranks_that_share_the_vocabulary(tmp_path):
    spawn(check_ranks, 2, tmp_path)


@pytest.mark.parametrize(("weight", "kl_type"), [(1.0, "forward"), (0.0, "reverse")])
def test_the_ends_of_a_mixture_are_the_kinds(weight, kl_type):
    """A direction of weight 0 may be infinite."""
    student, teacher = torch.randn(1, 3, 7), torch.randn(1, 3, 4)
    if kl_type == "forward":
        teacher[0, 0, 1] = -torch.inf
    data = {"teacher_topk_logits": teacher, "teacher_topk_indices": torch.arange(4).expand(1, 3, 4)}
    data["input_ids"] = torch.ones(1, 3, dtype=torch.long)
    loss = lambda **options: distillation_loss(student, data, None, 2.0, **options)[0]
    mixed = loss(kl_type="mixed", mixed_kl_weight=weight)
    assert mixed.isfinite()
    assert torch.equal(mixed, loss(kl_type=kl_type))
