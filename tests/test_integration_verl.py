"""verl's losses of tokens, against their formula in float64; and their place in verl, of which a model is here."""

import dataclasses
import sys
import types

import pytest
import torch

import kullback
from kullback.integrations import verl
from tests.ranks import Ranks, spawn
from tests.tolerances import relative_error

VOCAB, K = 104, 8
LENGTHS = (4, 7)
LOSS, GRADIENT = 1e-6, 1e-5


def made(dtype=torch.float32):
    """The student's logits [1, tokens, vocab] and the teacher's nested entries."""
    generator = torch.Generator().manual_seed(2)
    student = (4 * torch.randn(1, sum(LENGTHS), VOCAB, generator=generator)).to(dtype)
    teacher = 0.7 * student[0].float() + 3 * torch.randn(sum(LENGTHS), VOCAB, generator=generator)
    values, ids = teacher.log_softmax(-1).topk(K)
    split = [torch.nested.as_nested_tensor(list(t.split(LENGTHS)), layout=torch.jagged) for t in (values, ids.int())]
    return student, *split


def textbook(student, log_p, ids, kind, least):
    """verl's dictionary; log-probabilities are clamped, and masses are of what is not."""
    ids, log_p = ids.long(), log_p.double()
    log_q = student.log_softmax(-1).gather(-1, ids)
    masses = log_q.exp().sum(-1), log_p.exp().sum(-1)
    if least is not None:
        log_q, log_p = log_q.clamp_min(least), log_p.clamp_min(least)
    of_kl = log_p.exp() * (log_p - log_q)
    terms = of_kl if kind == "kl" else log_q.exp() * (log_q - log_p)
    own = student.topk(ids.size(-1)).indices
    overlaps = (ids.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)
    count = overlaps.sum(-1)
    advantage = (-of_kl * overlaps).sum(-1) / count.clamp_min(1)
    return {
        "distillation_losses": terms.sum(-1),
        "student_mass": masses[0],
        "teacher_mass": masses[1],
        "overlap_count": count,
        "overlap_token_advantage": advantage,
    }


def upstream(shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.5


def truth(student, log_p, ids, kind="kl", least=-10.0):
    wide = student.detach().double().requires_grad_()
    expected = textbook(wide, log_p, ids, kind, least)
    losses = expected["distillation_losses"]
    (gradient,) = torch.autograd.grad(losses, wide, upstream(losses.shape))
    return {name: value.detach() for name, value in expected.items()}, gradient


def hold(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        if name == "overlap_count":
            assert torch.equal(found[name], value)
        else:
            assert found[name].dtype == torch.float32, name
            assert relative_error(found[name], value) < LOSS, name
        assert found[name].requires_grad == (name == "distillation_losses"), name


def hold_gradient(losses, leaf, exact):
    (gradient,) = torch.autograd.grad(losses, leaf, upstream(losses.shape).float())
    assert gradient.dtype == leaf.dtype
    assert relative_error(gradient, exact) < (GRADIENT if leaf.dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
@pytest.mark.parametrize("least", [None, -10.0, -4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_losses_are_theirs(dtype, least, kind):
    student, values, ids = made(dtype)
    given = values.values().unsqueeze(0), ids.values().unsqueeze(0)
    expected, exact = truth(student, *given, kind, least)
    if least == -4.0:  # entries of either side lie below
        assert (given[0] < least).any()
        assert (student.double().log_softmax(-1).gather(-1, given[1].long()) < least).any()
    leaf = student.requires_grad_()
    found = verl.topk_losses(leaf, *given, kind=kind, log_prob_min_clamp=least)
    assert kullback.backend_info().name in ("c", "cuda")
    hold(found, expected)
    hold_gradient(found["distillation_losses"], leaf, exact)


def test_a_row_whose_entries_are_all_clamped_moves_nothing():
    student, values, ids = made()
    given = values.values().unsqueeze(0), ids.values().unsqueeze(0)
    student[0, 2] = student[0, 2].scatter(0, given[1][0, 2].long(), -200.0)
    expected, exact = truth(student, *given)
    leaf = student.requires_grad_()
    found = verl.topk_losses(leaf, *given)
    hold(found, expected)
    (gradient,) = torch.autograd.grad(found["distillation_losses"].sum(), leaf)
    assert gradient[0, 2].count_nonzero() == 0
    assert exact[0, 2].count_nonzero() == 0


def test_a_student_that_excludes_tokens():
    student, values, ids = made()
    given = values.values().unsqueeze(0), ids.values().unsqueeze(0)
    student[0, 1, given[1][0, 1, :3].long()] = -torch.inf
    student[0, 2, given[1][0, 2].long()] = -torch.inf  # all of the teacher's
    found = verl.topk_losses(student, *given)["distillation_losses"]
    assert relative_error(found, truth(student.clamp_min(-1e4), *given)[0]["distillation_losses"]) < LOSS


# A model of verl's modules: what they hold, and what `compute_topk_loss` calls.


@dataclasses.dataclass
class Settings:
    names: list
    use_topk: bool = False


def config(mode="forward_kl_topk", least=-10.0):
    loss = types.SimpleNamespace(loss_mode=mode, log_prob_min_clamp=least)
    return types.SimpleNamespace(distillation_loss=loss)


@pytest.fixture
def package(monkeypatch):
    """verl as sys.modules has it, with functions that tell that they were called."""

    def compute_forward_kl_topk(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format):
        return "theirs"

    registered = {}

    def register_distillation_loss(settings):
        return lambda function: registered.update(dict.fromkeys(settings.names, function)) or function

    modules = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.ulysses": {
            "get_ulysses_sequence_parallel_world_size": lambda: 1,
            "slice_input_tensor": lambda tensor, dim: tensor.chunk(2, dim)[1],
        },
        "verl.trainer": {},
        "verl.trainer.distillation": {},
        "verl.trainer.distillation.losses": {
            "DistillationLossSettings": Settings,
            "register_distillation_loss": register_distillation_loss,
            "compute_forward_kl_topk": lambda config, distillation_config, model_output, data: "collected",
        },
        "verl.trainer.distillation.fsdp": {},
        "verl.trainer.distillation.fsdp.losses": {"compute_forward_kl_topk": compute_forward_kl_topk},
        "verl.trainer.distillation.megatron": None,
    }
    made = {}
    for name, attributes in modules.items():
        if attributes is not None:
            made[name] = types.ModuleType(name)
            vars(made[name]).update(attributes, __path__=[])
        monkeypatch.setitem(sys.modules, name, made.get(name))
    return types.SimpleNamespace(
        registered=registered,
        losses=made["verl.trainer.distillation.losses"],
        fsdp=made["verl.trainer.distillation.fsdp.losses"],
        ulysses=made["verl.utils.ulysses"],
    )


def test_fsdp(package):
    student, values, ids = made()
    flat = values.values().unsqueeze(0), ids.values().unsqueeze(0)
    hold(verl.compute_forward_kl_topk(student.requires_grad_(), values, ids, config(), "thd"), truth(student, *flat)[0])
    package.ulysses.get_ulysses_sequence_parallel_world_size = lambda: 2
    half = [t.chunk(2, 1)[1] for t in (student, *flat)]
    expected, _ = truth(*half, least=None)
    hold(verl.compute_forward_kl_topk(half[0], values, ids, config(least=None), "thd"), expected)


def test_modes_that_are_registered(package):
    verl.register()
    student, values, ids = made()
    assert package.fsdp.compute_forward_kl_topk(student, values, ids, config(), "thd") == "theirs"
    student.requires_grad_()
    for mode, kind in verl.MODES.items():
        found = package.fsdp.compute_forward_kl_topk(student, values, ids, config(mode), "thd")
        hold(found, truth(student, values.values().unsqueeze(0), ids.values().unsqueeze(0), kind)[0])
        assert package.registered[mode] is package.losses.compute_forward_kl_topk


def test_another_verl_is_refused(package):
    package.fsdp.compute_forward_kl_topk = lambda student_logits, config: None
    with pytest.raises(
        ImportError, match=r"fsdp\.losses\.compute_forward_kl_topk has other arguments than .*'data_format'\]: \["
    ):
        verl.register()
    assert not package.registered


def test_without_verl():
    with pytest.raises(ImportError):
        verl.register()


def check_ranks(ranks: Ranks):
    """Through Megatron's function, whose context-parallel split is verl's own: here there is none."""
    state, util = types.ModuleType("megatron.core.parallel_state"), types.ModuleType("verl.models.mcore.util")
    state.get_tensor_model_parallel_group = lambda: ranks.group
    util.preprocess_thd_engine = lambda nested, pre_process: (nested.values().unsqueeze(0), None)
    util.preprocess_bshd_engine = lambda nested, pre_process: (nested.to_padded_tensor(0), None)
    for module in (state, util):
        *parents, name = module.__name__.split(".")
        for length in range(1, len(parents) + 1):
            package = sys.modules.setdefault(".".join(parents[:length]), types.ModuleType(".".join(parents[:length])))
            package.__path__ = []
        setattr(sys.modules[".".join(parents)], name, module)
        sys.modules[module.__name__] = module
    for dtype in (torch.float32, torch.bfloat16):
        student, values, ids = made(dtype)
        flat = values.values().unsqueeze(0), ids.values().unsqueeze(0)
        for mode, kind in {"forward_kl_topk": "kl", **verl.MODES}.items():
            for least in (None, -4.0):
                expected, exact = truth(student, *flat, kind, least)
                leaf = ranks.slice(student).requires_grad_()
                found = verl.compute_forward_kl_topk_of_megatron(leaf, values, ids, config(mode, least), "thd")
                hold(found, expected)
                hold_gradient(found["distillation_losses"], leaf, ranks.slice(exact))
    padded = torch.nn.utils.rnn.pad_sequence(list(student[0].split(LENGTHS)), batch_first=True)
    found = verl.compute_forward_kl_topk_of_megatron(ranks.slice(padded), values, ids, config(), "bshd")
    expected, _ = truth(student, *flat)
    assert relative_error(found["distillation_losses"][1], expected["distillation_losses"][0, LENGTHS[0] :]) < LOSS


@pytest.mark.filterwarnings("ignore:target_values holds log-probabilities")
def test_ranks_that_share_the_vocabulary(tmp_path):
    spawn(check_ranks, 2, tmp_path)


def test_what_it_does_not_know():
    student, log_p, ids = made()
    log_p, ids = log_p.values()[None], ids.values()[None]
    for options, why in (
        ({"kind": "jensen_shannon"}, "kind must be one of kl, reverse_kl; got 'jensen_shannon'"),
        ({"log_prob_min_clamp": 2.0}, r"log_prob_min_clamp must be at most 0, or None; got 2\.0"),
        ({"log_prob_min_clamp": float("nan")}, "log_prob_min_clamp must be at most 0, or None; got nan"),
    ):
        with pytest.raises(ValueError, match=why):
            verl.topk_losses(student, log_p, ids, **options)
    for dtype in (torch.bfloat16, torch.bool):
        with pytest.raises(TypeError, match=f"ids must be of an integer dtype; got {dtype}"):
            verl.topk_losses(student, log_p, ids.to(dtype))
    for wrong in (-1, VOCAB):
        with pytest.raises(ValueError, match=f"ids must lie from 0 to {VOCAB - 1}; got {wrong}"):
            verl.topk_losses(student, log_p, torch.full_like(ids, wrong))
