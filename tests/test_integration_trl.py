"""The loss that TRL's DistillationTrainer finds with ours in its place, against its own and against float64."""

import contextlib
import copy
import functools
import importlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import kullback
from kullback.integrations import trl as ours
from kullback.integrations.trl import chunked_divergence_loss, patched
from tests import oracle
from tests.test_integration_transformers import VOCAB, WORLD, batch, model
from tests.tolerances import relative_error

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BETAS = [0.0, 0.1, 0.5, 1.0]
LOSS, GRADIENT = 1e-6, 1e-5  # what two sums of float32, in another order, may differ by
LEARNED = ("student_hidden_states", "student_lm_head_weight", "student_lm_head_bias")
PLAIN = {"num_items_in_batch": None}
# Everything that a call can have, and a few tokens more than are counted here
FULL = {
    "num_items_in_batch": torch.tensor(23.0),
    "student_logit_scale": 0.7,
    "teacher_logit_scale": 1.2,
    "student_final_logit_softcapping": 5.0,
    "teacher_final_logit_softcapping": 8.0,
    "temperature": 1.3,
}


def theirs():
    from trl.trainer import distillation_trainer

    return distillation_trainer._chunked_divergence_loss


def call(beta, dtype=torch.float32, biased=True, **options):
    """Arguments by TRL's names: of models of unlike width, and completions of unlike length."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, 4:], mask[2, :2] = 0, 0
    return {
        "student_hidden_states": draw(3, 9, 16),
        "teacher_hidden_states": draw(3, 9, 24),
        "student_lm_head_weight": draw(VOCAB, 16) * 0.6,
        "teacher_lm_head_weight": draw(VOCAB, 24) * 0.6,
        "completion_mask": mask,
        "beta": beta,
        "student_lm_head_bias": draw(VOCAB) if biased else None,
        "teacher_lm_head_bias": draw(VOCAB) if biased else None,
        **options,
    }


def found(loss_of, given):
    """Loss, entropy, count, and the gradients by name."""
    given = dict(given)
    leaves = {name: given[name].clone().requires_grad_() for name in LEARNED if given[name] is not None}
    loss, entropy, count = loss_of(**given | leaves)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    assert not entropy.requires_grad
    return loss, entropy, count, dict(zip(leaves, gradients, strict=True))


def textbook(**given):
    """In float64, from what TRL's documentation says."""
    logits = {}
    for side in ("student", "teacher"):
        bias = given.get(f"{side}_lm_head_bias")
        x = given[f"{side}_hidden_states"].double() @ given[f"{side}_lm_head_weight"].double().T
        x = (x if bias is None else x + bias.double()) * given.get(f"{side}_logit_scale", 1.0)
        cap = given.get(f"{side}_final_logit_softcapping")
        logits[side] = (x if cap is None else cap * torch.tanh(x / cap)) / given.get("temperature", 1.0)
    kind = {0.0: "kl", 1.0: "reverse_kl"}.get(given["beta"], "jensen_shannon")
    parameter = {"beta": given["beta"]} if kind == "jensen_shannon" else {}
    rows = oracle.divergence(logits["student"], logits["teacher"], kind, **parameter)
    counts = given["completion_mask"] != 0
    log_q = logits["student"].log_softmax(-1)
    divisor = counts.sum() if given["num_items_in_batch"] is None else given["num_items_in_batch"]
    entropy = -(log_q.exp() * log_q).sum(-1)[counts].sum().detach()
    return rows[counts].sum() / divisor, entropy, counts.sum()


@pytest.mark.parametrize("options", [PLAIN, {**PLAIN, "biased": False}, FULL], ids=["plain", "unbiased", "full"])
@pytest.mark.parametrize("beta", BETAS)
def test_the_loss_is_theirs(beta, options):
    given = call(beta, **options)
    ours = found(chunked_divergence_loss, given)
    assert kullback.backend_info().name in ("c", "cuda")
    for loss, entropy, count, gradients in (found(theirs(), given), found(textbook, given)):
        assert relative_error(ours[0], loss) < LOSS
        assert relative_error(ours[1], entropy) < LOSS
        assert ours[2] == count
        assert ours[3].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative_error(ours[3][name], gradient) < GRADIENT, name


def test_types_of_what_is_returned():
    for dtype in (torch.float32, torch.bfloat16):
        given = call(0.5, dtype, **FULL)
        for mine, other in zip(found(chunked_divergence_loss, given)[:3], found(theirs(), given)[:3], strict=True):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)


def test_bfloat16_and_autocast():
    """Logits are float32 in either; gradients are rounded to 16 bits where they are multiplied."""
    for given, autocast in ((call(0.5, torch.bfloat16, **FULL), False), (call(0.5, **FULL), True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours, other = found(chunked_divergence_loss, given), found(theirs(), given)
        assert relative_error(ours[0], other[0]) < 1e-3
        assert relative_error(ours[1], other[1]) < 1e-3
        for name, gradient in other[3].items():
            assert ours[3][name].dtype == gradient.dtype
            assert relative_error(ours[3][name], gradient) < 0.02


def test_a_head_of_another_dtype_is_cast_to_the_hidden_states():
    given = call(0.5, torch.bfloat16, biased=False, **PLAIN)
    given["student_lm_head_weight"] = given["student_lm_head_weight"].float()
    ours, other = found(chunked_divergence_loss, given), found(theirs(), given)
    assert ours[3]["student_lm_head_weight"].dtype == torch.float32
    assert relative_error(ours[0], other[0]) < 1e-3


def test_what_does_not_count_is_not_read():
    given = call(0.5, **PLAIN)
    clean = found(chunked_divergence_loss, given)
    apart = given["completion_mask"] == 0
    for name in ("student_hidden_states", "teacher_hidden_states"):
        given[name] = given[name].masked_fill(apart.unsqueeze(-1), torch.nan)
    dirty = found(chunked_divergence_loss, given)
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[1], clean[1])
    for name in LEARNED:
        assert torch.equal(dirty[3][name], clean[3][name])


def test_a_batch_without_tokens_is_nothing():
    for count in (None, torch.tensor(5.0)):
        given = call(0.5, num_items_in_batch=count)
        given["completion_mask"] = torch.zeros_like(given["completion_mask"])
        loss, entropy, number, gradients = found(chunked_divergence_loss, given)
        assert loss == entropy == number == 0
        assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_the_teacher_learns_nothing_and_costs_no_product():
    from torch.utils.flop_counter import FlopCounterMode

    given = call(0.5, **PLAIN)
    leaves = {name: given[name].requires_grad_() for name in given if name.startswith(("student", "teacher"))}
    with FlopCounterMode(display=False) as flops:
        chunked_divergence_loss(**given)[0].backward()
    assert all((leaf.grad is None) == name.startswith("teacher") for name, leaf in leaves.items())
    counted = int(given["completion_mask"].sum())
    assert flops.get_total_flops() == 2 * counted * VOCAB * (3 * 16 + 24)  # three products, and one


def test_in_what_is_compiled_the_entropy_is_still_found():
    given = call(0.5, **PLAIN)
    compiled = torch.compile(lambda: chunked_divergence_loss(**given), backend="eager")
    assert relative_error(compiled()[1], chunked_divergence_loss(**given)[1]) < LOSS


def test_heads_that_zero3_keeps_in_pieces(monkeypatch):
    """They are empty but where TRL's context gathers them, and so they are in the backward."""
    given = call(0.5, **PLAIN)
    expected = found(theirs(), given)
    heads = [name for name in given if "lm_head" in name]
    for name in heads:
        given[name] = given[name].clone().requires_grad_()
    whole = {id(given[name]): given[name].data for name in heads}

    @contextlib.contextmanager
    def gathered(*parameters):
        for parameter in parameters:
            parameter.data = whole[id(parameter)]
        yield
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)

    for name in heads:
        given[name].data = given[name].data.new_empty(0)
    monkeypatch.setattr("trl.trainer.utils.maybe_gather_lm_head_ctx", gathered)
    loss, entropy, _ = chunked_divergence_loss(**given)
    assert all(given[name].numel() == 0 for name in heads)
    assert relative_error(loss, expected[0]) < LOSS
    assert relative_error(entropy, expected[1]) < LOSS
    for name in LEARNED[1:]:
        assert (
            relative_error(torch.autograd.grad(loss, given[name], retain_graph=True)[0], expected[3][name]) < GRADIENT
        )


def test_float16_is_refused_of_heads_in_pieces():
    given = call(0.5, torch.float16, **PLAIN)
    whole, _, _ = chunked_divergence_loss(**given)
    given["student_lm_head_weight"].ds_id = 0
    with pytest.raises(ValueError, match=r"student_lm_head_weight is kept in pieces by DeepSpeed .* float16"):
        chunked_divergence_loss(**given)
    with torch.no_grad():
        assert torch.equal(chunked_divergence_loss(**given)[0], whole)


def loss_in_a_forward(student, teacher, given, count):
    """As the trainer has it: inside the wrapper's forward."""
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    hidden = student.model(**inputs).last_hidden_state
    with torch.no_grad():
        target = teacher.model(**inputs).last_hidden_state
    heads = student.lm_head.weight, teacher.lm_head.weight
    return chunked_divergence_loss(hidden, target, *heads, given["labels"] != -100, 0.5, num_items_in_batch=count)[0]


def check_rank(rank, store, wrapper):
    """Gradients of two ranks, each with half a batch, are those of the whole batch."""
    from torch.distributed.fsdp import fully_shard
    from trl.models.utils import _ForwardRedirection

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch(4)
    whole = copy.deepcopy(student)
    count = (given["labels"] != -100).sum()
    loss_in_a_forward(whole, teacher, given, count).backward()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(student)
    else:
        for layer in [*student.model.layers, *([student.lm_head] if wrapper == "fsdp, head" else [])]:
            fully_shard(layer)
        wrapped = fully_shard(student)
    own = {name: value[2 * rank : 2 * rank + 2] for name, value in given.items()}
    _ForwardRedirection()(wrapped, student, loss_in_a_forward, student, teacher, own, count / WORLD).backward()
    for (name, parameter), expected in zip(student.named_parameters(), whole.parameters(), strict=True):
        gradient = parameter.grad if wrapper == "ddp" else parameter.grad.full_tensor()
        assert relative_error(gradient, expected.grad) < GRADIENT, name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp, head"])
def test_two_processes(wrapper, tmp_path):
    """In the last one FSDP2 shards the head by itself, so that the loss is given a DTensor."""
    mp.spawn(check_rank, (tmp_path / "store", wrapper), WORLD)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def trained(folder, beta, student):
    """What the trainer logs of three steps of two batches, and of an evaluation."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    arguments = DistillationConfig(
        str(folder),
        beta=beta,
        max_completion_length=12,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    data = Dataset.from_list(
        [{"prompt": " ".join(f"w{3 + (7 * i + j) % 200}" for j in range(5 + i))} for i in range(8)]
    )
    trainer = DistillationTrainer(
        student, model("Llama", 1), arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    trainer.evaluate()
    return [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_their_trainer(tmp_path, beta, monkeypatch):
    """Loss, entropy and gradient norm of its steps are what they are without."""
    calls = []
    monkeypatch.setattr(
        "kullback.functional.linear_divergence",
        lambda *args, of=kullback.functional.linear_divergence, **options: calls.append(1) or of(*args, **options),
    )
    student = model("Llama", 0)
    expected = trained(tmp_path / "theirs", beta, copy.deepcopy(student))
    assert not calls
    with patched():
        logged = trained(tmp_path / "ours", beta, student)
    assert len(calls) == 10  # six of training, four of evaluation
    assert len(logged) == len(expected) == 4
    bounds = {"loss": LOSS, "entropy": LOSS, "grad_norm": GRADIENT, "eval_loss": GRADIENT, "eval_entropy": GRADIENT}
    for mine, its in zip(logged, expected, strict=True):
        for name in bounds.keys() & its.keys():
            assert abs(mine[name] - its[name]) < bounds[name] * abs(its[name]), name


MODULE, FUNCTION = "trl.trainer.distillation_trainer", "_chunked_divergence_loss"


def places():
    return {str(place): vars(owner)[place.name] for owner, place in ours._found()}


def test_what_is_patched_is_given_back():
    before = places()
    assert len(before) == 14
    with patched():
        inside = places()
        assert theirs() is chunked_divergence_loss
        assert not any(inside[name] is function for name, function in before.items())
    with contextlib.suppress(RuntimeError), patched():
        raise RuntimeError
    assert all(places()[name] is function for name, function in before.items())


def test_versions_that_do_not_fit_are_named(monkeypatch):
    import trl

    module = sys.modules[MODULE]
    other = types.SimpleNamespace()
    monkeypatch.setattr(trl, "__version__", "9.7.5")
    monkeypatch.setitem(sys.modules, MODULE, other)
    with pytest.raises(ImportError, match=rf"trl 9\.7\.5 has no {MODULE}\.{FUNCTION}; 1\.16 has"), patched():
        pass
    other._chunked_divergence_loss = lambda student_hidden_states, gamma: None
    with pytest.raises(ImportError, match=r"9\.7\.5 has other arguments than that of 1\.16.*gamma"), patched():
        pass
    assert theirs() is not chunked_divergence_loss
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ImportError, match=rf"trl 9\.7\.5 has no {MODULE}"), patched():
        pass
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"needs trl 1\.16, which is not installed: pip install"), patched():
        pass


def test_an_experimental_trainer_may_be_absent_and_not_another(monkeypatch):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    for module in ("loss_utils", "sdpo_trainer"):
        monkeypatch.setitem(sys.modules, f"trl.experimental.sdpo.{module}", None)
    assert len(places()) == 8
    with patched():
        assert theirs() is chunked_divergence_loss
    monkeypatch.setattr(GKDTrainer, "generalized_jsd_loss", staticmethod(lambda student_logits, gamma: None))
    with pytest.raises(ImportError, match=r"gkd_trainer\.GKDTrainer\.generalized_jsd_loss of trl 1.*gamma"), patched():
        pass
    monkeypatch.delattr(GKDTrainer, "generalized_jsd_loss")
    with pytest.raises(ImportError, match=r"has no .*GKDTrainer\.generalized_jsd_loss"), patched():
        pass
    assert theirs() is not chunked_divergence_loss  # which had been replaced already


# Losses of logits: of GKD, and of self-distillation.


def logits(dtype=torch.float32, vocab=VOCAB):
    generator = torch.Generator().manual_seed(5)
    student, teacher = (3 * torch.randn(2, 7, vocab, generator=generator) for _ in range(2))
    return student.to(dtype), (0.5 * student + teacher).to(dtype)


def labels():
    made = torch.ones(2, 7, dtype=torch.int64)
    made[0, :3] = -100
    made[1, 5:] = -100
    return made


def of(loss_of, student, teacher, wide=False):
    """Loss and both gradients, of an upstream gradient that is no constant."""
    leaves = [(t.double() if wide else t).clone().requires_grad_() for t in (student, teacher)]
    loss = loss_of(*leaves)
    upstream = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape).to(loss)
    return loss.detach(), torch.autograd.grad(loss, leaves, upstream)


def check_both(mine, its, student, teacher, dtype):
    """Ours is as near to theirs of float64 as theirs of this dtype may be, and nearer."""
    (loss, gradients), (truth, exact) = of(mine, student, teacher), of(its, student, teacher, wide=True)
    assert kullback.backend_info().name in ("c", "cuda")
    assert loss.dtype == torch.float32
    assert loss.shape == truth.shape
    assert relative_error(loss, truth) < 2e-6
    for gradient, other, leaf in zip(gradients, exact, (student, teacher), strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == leaf.shape
        assert relative_error(gradient, other) < (GRADIENT if dtype == torch.float32 else 4e-3)


GKD = [
    {},
    {"reduction": "sum"},
    {"reduction": "mean"},
    {"num_items_in_batch": 23},
    {"num_items_in_batch": torch.tensor(23.0), "reduction": "sum"},
    {"temperature": 1.7},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", GKD, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1])
def test_gkd(beta, options, dtype):
    from trl.experimental.gkd import GKDTrainer

    for given in (None, labels()):
        call = {"labels": given, "beta": beta, **options}
        its = functools.partial(GKDTrainer.generalized_jsd_loss, **call)
        check_both(functools.partial(ours.generalized_jsd_loss, **call), its, *logits(dtype), dtype)


def test_gkd_of_no_tokens_and_of_elements():
    student, teacher = logits()
    nothing = torch.full((2, 7), -100)
    assert ours.generalized_jsd_loss(student, teacher, nothing) == 0
    with pytest.raises(ValueError, match="losses of elements are not found here"):
        ours.generalized_jsd_loss(student, teacher, reduction="none")
    with pytest.raises(ValueError, match=r"beta must lie from 0 to 1; got 1\.5"):
        ours.generalized_jsd_loss(student, teacher, beta=1.5)
    with pytest.raises(ValueError, match=r"labels must have the shape \[2, 7\] of student_logits; got \[2, 6\]"):
        ours.generalized_jsd_loss(student, teacher, nothing[:, 1:])


def test_self_distillation_names_its_own_arguments():
    student, teacher = logits()
    with pytest.raises(ValueError, match=r"^alpha must lie from 0 to 1; got 2\.0"):
        ours.compute_divergence(student.log_softmax(-1), teacher.log_softmax(-1), 2.0)
    with pytest.raises(ValueError, match="distillation_alpha must lie from 0 to 1; got -1"):
        ours.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=-1)
    call = {"distillation_alpha": 0.5, "distillation_add_tail": True}
    with pytest.raises(ValueError, match="distillation_topk must lie from 1 to"):
        ours.compute_topk_self_distillation_loss(student, teacher, distillation_topk=0, **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("trainer", ["sdpo", "sdft"])
def test_self_distillation(trainer, alpha, dtype):
    its = importlib.import_module(f"trl.experimental.{trainer}.loss_utils")
    whole, options = logits(dtype), {"distillation_alpha": alpha}
    name = "compute_full_logit_self_distillation_loss"
    check_both(*(functools.partial(getattr(of, name), **options) for of in (ours, its)), *whole, dtype)
    name = "compute_topk_self_distillation_loss"
    for tail in (True, False):
        call = {**options, "distillation_topk": 9, "distillation_add_tail": tail}
        check_both(*(functools.partial(getattr(of, name), **call) for of in (ours, its)), *whole, dtype)
    few = [t.log_softmax(-1)[..., :12] for t in whole]  # masses that do not sum to 1
    check_both(*(functools.partial(of.compute_divergence, alpha=alpha) for of in (ours, its)), *few, dtype)


def test_a_tail_of_nothing():
    """Where the student's tokens have all the mass, TRL's tails are 1e-7 each, and here the teacher's is 6e-8."""
    from trl.experimental.sdpo import loss_utils

    student, teacher = logits()
    student[..., :3] += 60.0
    teacher[..., :3] += 60.0
    for alpha in (0.0, 0.3, 1.0):
        call = {"distillation_topk": 3, "distillation_alpha": alpha, "distillation_add_tail": True}
        mine = ours.compute_topk_self_distillation_loss(student, teacher, **call)
        its = loss_utils.compute_topk_self_distillation_loss(student.double(), teacher.double(), **call)
        assert torch.allclose(mine.double(), its, rtol=1e-5, atol=6e-8 * 100)  # of 100 nats
    teacher[..., 0] = -torch.inf  # among the student's top tokens
    assert (
        ours.compute_topk_self_distillation_loss(student, teacher, **{**call, "distillation_alpha": 0.0})
        .isfinite()
        .all()
    )


def gkd_steps(folder, student):
    """What GKDTrainer logs of three steps on the data's own completions."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    arguments = GKDConfig(
        str(folder),
        beta=0.3,
        lmbda=0.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    words = lambda i: " ".join(f"w{3 + (7 * i + j) % 200}" for j in range(5 + i))
    turn = lambda i: [{"role": "user", "content": words(i)}, {"role": "assistant", "content": words(i + 3)}]
    data = Dataset.from_list([{"messages": turn(i)} for i in range(8)])
    made = tokenizer()
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    trainer = GKDTrainer(student, model("Llama", 1), arguments, train_dataset=data, processing_class=made)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_gkd_s_trainer(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "kullback.functional.divergence",
        lambda *args, of=kullback.functional.divergence, **options: calls.append(1) or of(*args, **options),
    )
    student = model("Llama", 0)
    expected = gkd_steps(tmp_path / "theirs", copy.deepcopy(student))
    assert not calls
    with patched():
        logged = gkd_steps(tmp_path / "ours", student)
    assert len(calls) == 6
    assert len(logged) == len(expected) == 3
    for mine, its in zip(logged, expected, strict=True):
        assert abs(mine["loss"] - its["loss"]) < LOSS * its["loss"] + 1e-6
        assert abs(mine["grad_norm"] - its["grad_norm"]) < 1e-4 * its["grad_norm"]


def self_distilled(trainer, folder, student, **options):
    """What SDFTTrainer or SDPOTrainer logs of three steps."""
    from datasets import Dataset

    module = importlib.import_module(f"trl.experimental.{trainer}")
    name = trainer.upper()
    given = {"reward_funcs": lambda completions, **_: [float(i % 2) for i in range(len(completions))]}
    arguments = getattr(module, f"{name}Config")(
        str(folder),
        max_completion_length=8,
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        num_generations=4,
        **options,
    )
    words = lambda i: " ".join(f"w{3 + (7 * i + j) % 200}" for j in range(5))
    data = Dataset.from_list([{"prompt": words(i), "privileged_context": words(i + 3)} for i in range(8)])
    made = getattr(module, f"{name}Trainer")(
        student,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        **(given if trainer == "sdpo" else {}),
    )
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


TOP = {"distillation_mode": "topk_logits", "distillation_topk": 9, "distillation_add_tail": True}


@pytest.mark.parametrize("options", [{"distillation_mode": "full_logits"}, TOP], ids=["full", "top"])
@pytest.mark.parametrize("trainer", ["sdft", "sdpo"])
def test_self_distillation_s_trainers(trainer, options, tmp_path, monkeypatch):
    calls = []
    for name in ("divergence", "topk_divergence"):
        function = getattr(kullback.functional, name)
        counting = lambda *args, of=function, **options: calls.append(1) or of(*args, **options)
        monkeypatch.setattr(f"kullback.functional.{name}", counting)
    saved, options = str(tmp_path / "model"), {"distillation_alpha": 0.5, **options}
    model("Llama", 0).save_pretrained(saved)  # where the teacher is loaded from, too
    expected = self_distilled(trainer, tmp_path / "theirs", saved, **options)
    assert not calls
    with patched():
        logged = self_distilled(trainer, tmp_path / "ours", saved, **options)
    assert len(calls) >= 3
    assert len(logged) == len(expected) == 3
    assert expected[0]["loss"] > 0
    for mine, its in zip(logged, expected, strict=True):
        assert abs(mine["loss"] - its["loss"]) < 1e-5 * its["loss"]
        assert abs(mine["grad_norm"] - its["grad_norm"]) < 1e-4 * its["grad_norm"]
