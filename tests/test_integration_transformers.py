"""`student(**batch).loss` of Hugging Face models, with what people train them with. Models are tiny and random."""

import copy
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import kullback
from kullback.integrations.transformers import distil, head_of
from tests import oracle
from tests.tolerances import relative_error

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:a distilled student was called:RuntimeWarning"),  # textbooks call it so
]

VOCAB, WORLD = 211, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What stands between hidden states and logits: nothing, tied weights, a softcap, a scale either way, a bias
ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 5.0},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "Phi": {},
}


def model(name, seed, dtype=torch.float32, **more):
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES.get(name, {}), **more})
    made = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    head = made.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(std=0.5)
        if head.bias is not None:
            head.bias.normal_()
    return made


def batch(rows=3, tokens=17, seed=7):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :5] = -100
    labels[1, 11:], mask[1, 11:] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def textbook(student, teacher, given, kind="kl", count=None, **options):
    """The mean over tokens that count, from both models' logits."""
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        target = teacher(**inputs).logits[:, :-1]
    rows = oracle.divergence(student(**inputs).logits[:, :-1], target, kind, **options)
    counts = given["labels"][:, 1:] != -100
    return rows[counts].sum() / (counts.sum() if count is None else count)


def gradients(loss, student):
    trained = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None}


def check(student, teacher, given, kind="kl", tight=2e-5, **options):
    loss = student.train()(**given).loss
    assert kullback.backend_info().name in ("c", "cuda")
    ours = gradients(loss, student)
    student.eval()
    expected = textbook(student, teacher, given, kind, **options)
    theirs = gradients(expected, student)
    assert relative_error(loss, expected) < tight
    assert ours.keys() == theirs.keys()
    total = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() < 20 * tight * total, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_loss_is_the_divergence_of_the_models_logits(name):
    student, teacher, given = model(name, 0), model(name, 1), batch()
    with distil(student, teacher):
        check(student, teacher, given)
    with distil(student, teacher, "jensen_shannon", beta=0.1):
        check(student, teacher, given, "jensen_shannon", beta=0.1)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("Llama", "kl", {}),
        ("Gemma2", "jensen_shannon", {"beta": 0.1}),
        ("Cohere", "reverse_kl", {"temperature": 2.0}),
        ("Phi", "kl", {"temperature": 2.0, "divergence_weight": 3.6}),
        ("Granite", "kl", {"divergence_weight": 0.5}),
    ],
)
@pytest.mark.parametrize("count", [None, 100])
def test_labels_count_what_the_model_s_own_loss_does(name, kind, options, count):
    student, teacher, given = model(name, 0), model(name, 1), batch()
    student.train()
    given["num_items_in_batch"] = count
    own = student(**given).loss
    rest = {name: value for name, value in options.items() if name != "divergence_weight"}
    expected = (
        options.get("divergence_weight", 1.0) * textbook(student, teacher, given, kind, count, **rest) + 0.3 * own
    )
    with distil(student, teacher, kind, label_weight=0.3, **options):
        loss = student(**given).loss
    assert relative_error(loss, expected) < 2e-5
    ours, theirs = gradients(loss, student), gradients(expected, student)
    total = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    assert all((ours[name] - gradient).norm() < 2e-5 * total for name, gradient in theirs.items())


def test_labels_in_float64():
    """The divergence of a model from itself is 0, and what is left is its own loss."""
    student, given = model("Llama", 0, torch.float64), batch()
    student.train()
    expected = student(**given).loss
    with distil(student, copy.deepcopy(student), label_weight=1.0):
        loss = student(**given).loss
    assert expected.dtype == torch.float32  # of transformers' own
    assert loss.dtype == torch.float64
    assert relative_error(loss, expected) < 1e-6


def test_smoothed_labels():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    logits = student.train()(**{name: given[name] for name in ("input_ids", "attention_mask")}).logits[:, :-1]
    own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"][:, 1:].flatten(), label_smoothing=0.1)
    with distil(student, teacher, label_weight=0.5, label_smoothing=0.1):
        loss = student(**given).loss
    assert relative_error(loss, textbook(student, teacher, given) + 0.5 * own) < 2e-5
    for options in ({}, {"label_weight": 0.5, "temperature": 2.0}):
        with pytest.raises(ValueError, match="with a divergence_weight of 0 labels count alone"):
            distil(student, teacher, divergence_weight=0.0, **options)
        with pytest.raises(ValueError, match="label_smoothing goes with a label_weight, and with temperature 1"):
            distil(student, teacher, label_smoothing=0.1, **options)
    with pytest.raises(ValueError, match="a model's loss is the mean of its tokens; got reduction='sum'"):
        distil(student, teacher, reduction="sum")


def test_labels_cost_no_pass_of_their_own():
    from torch.utils.flop_counter import FlopCounterMode

    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    counted = {}
    for label_weight in (0.0, 0.3):
        with distil(student, teacher, label_weight=label_weight), FlopCounterMode(display=False) as flops:
            student.train()(**given).loss.backward()
        counted[label_weight] = flops.get_total_flops()
    assert counted[0.3] == counted[0.0] > 0


def test_another_architecture_teaches():
    student, teacher = model("Llama", 0), model("Gemma2", 1, hidden_size=64)
    with distil(student, teacher, "reverse_kl", temperature=2.0):
        check(student, teacher, batch(), "reverse_kl", temperature=2.0)


def test_what_it_leaves_alone():
    """Evaluation, batches without labels, the teacher, and the student once it is undone."""
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    before, state = student.eval()(**given), teacher.state_dict()
    names = set(student.state_dict())
    done = distil(student, teacher)
    after = student(**given)
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(before.logits, after.logits)
    student.train()
    assert student(input_ids=given["input_ids"]).logits is not None
    loss = student(**given).loss
    loss.backward()
    assert loss != before.loss
    assert set(student.state_dict()) == names
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not teacher.training
    assert all(torch.equal(value, state[name]) for name, value in teacher.state_dict().items())
    done.undo()
    done.undo()
    assert torch.allclose(student(**given).loss, before.loss)
    assert "forward" not in vars(student)


def test_num_items_in_batch_and_shift_labels():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with distil(student, teacher):
        student.train()
        expected = textbook(student, teacher, given, count=100)
        for count in (100, torch.tensor(100)):
            assert relative_error(student(**given, num_items_in_batch=count).loss, expected) < 2e-5
        shifted = torch.nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        loss = student(**inputs, shift_labels=shifted).loss
        assert relative_error(loss, student(**given).loss) < 1e-6
        assert torch.equal(student(**given, return_dict=False)[0], student(**given).loss)


def test_bfloat16():
    student, teacher, given = model("Llama", 0, torch.bfloat16), model("Llama", 1, torch.bfloat16), batch()
    with distil(student, teacher):
        loss = student.train()(**given).loss
        assert loss.dtype == torch.float32
        assert relative_error(loss, textbook(student, teacher, given)) < 0.01
        loss.backward()
        assert student.lm_head.weight.grad.dtype == torch.bfloat16
    student, teacher = model("Llama", 0), model("Llama", 1)
    with distil(student, teacher), torch.autocast("cpu", torch.bfloat16):
        loss = student.train()(**given).loss
    assert relative_error(loss, textbook(student, teacher, given)) < 0.02


def test_gradient_checkpointing():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    student.gradient_checkpointing_enable()
    with distil(student, teacher):
        check(student, teacher, given)


def test_torch_compile():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with distil(student, teacher):
        expected = student.train()(**given).loss
        compiled = torch.compile(student, backend="aot_eager")
        assert relative_error(compiled(**given).loss, expected) < 1e-5


@pytest.mark.parametrize("where", ["lora", "saved"])
def test_an_adapter_of_the_head_counts(where):
    from peft import LoraConfig, get_peft_model

    modules = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    if where == "lora":
        modules = {"target_modules": ["q_proj", "lm_head"]}
    student = get_peft_model(model("Llama", 0), LoraConfig(r=4, lora_alpha=8, **modules))
    teacher, given = model("Llama", 1), batch()
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    with distil(student, teacher):
        check(student, teacher, given)
        loss = student.train()(**given).loss
        assert any("lm_head" in name for name in gradients(loss, student))


def test_what_would_be_ignored_is_refused():
    from peft import LoraConfig, get_peft_model

    teacher, given = model("Llama", 1), batch()
    student = get_peft_model(model("Llama", 0), LoraConfig(r=4, lora_dropout=0.1, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="dropout"):
        distil(student.train(), teacher)
    with distil(student.eval(), teacher), pytest.raises(ValueError, match="dropout"):
        student.train()(**given)
    student = get_peft_model(model("Llama", 0), LoraConfig(r=4, use_dora=True, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="DoRA"):
        distil(student, teacher)
    student = model("Llama", 0)
    student.lm_head.register_forward_hook(lambda module, inputs, output: 1.015 * output)
    with pytest.raises(ValueError, match="student's logits are not those of its head: they differ by"):
        distil(student, teacher)
    student = model("Llama", 0)
    with distil(student, teacher), pytest.raises(ValueError, match=r"distilled already.*DistillationTrainer"):
        distil(student, teacher)
    with pytest.raises(TypeError, match=r"must be a causal language model of transformers, .*; got Linear"):
        distil(torch.nn.Linear(2, 2), teacher)
    with pytest.raises(ValueError, match="did you mean"):
        distil(student, teacher, "jensen_shanon")
    for options, why in (
        ({"target_form": "probs"}, "a teacher's head makes logits; got 'probs'"),
        ({"tail": "zero"}, "a teacher's head makes logits"),
        ({"softcap": 3.0}, r"it is read from the models' configurations; got 3\.0"),
        ({"target_logit_scale": 3.0}, "it is read from the models' configurations"),
        ({"total_vocab": 8}, "each process has whole heads and rows"),
        ({"valid_vocab": 999}, "valid_vocab must be from 1 to 211"),
    ):
        with pytest.raises(ValueError, match=why):
            distil(student, teacher, **options)
    with pytest.raises(ValueError, match="must have the same vocabulary"):
        distil(student, model("Llama", 1, vocab_size=300))
    assert "forward" not in vars(student)


def test_a_student_is_not_its_own_teacher():
    from peft import LoraConfig, get_peft_model

    base = model("Llama", 0)
    student = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))  # in place
    with pytest.raises(ValueError, match=r"student and teacher are one model.*PEFT adapts a model in place"):
        distil(student, base)


def test_labels_that_a_model_does_not_shift_are_refused():
    from transformers import BartConfig, BartForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    }
    student = BartForCausalLM(BartConfig(**sizes, is_decoder=True, is_encoder_decoder=False))
    with pytest.raises(ValueError, match="BartForCausalLM takes labels that are shifted already"):
        distil(student, model("Llama", 1))


def test_a_loss_of_more_than_labels_is_refused_where_it_counts():
    student, teacher, own = model("Llama", 0), model("Llama", 1), type(model("Llama", 0)).forward

    class WithZLoss(type(student)):
        def forward(self, *positional, **given):
            said = own(self, *positional, **given)
            more = 1e-4 * said.logits.float().logsumexp(-1).square().mean()
            return said if said.loss is None else type(said)(loss=said.loss + more, logits=said.logits)

    for dtype in (torch.float32, torch.bfloat16):
        distil(student.to(dtype), teacher, label_weight=0.5).undo()
        student.__class__ = WithZLoss
        with pytest.raises(
            ValueError, match="label_weight counts the student's own loss, and WithZLoss's is more than"
        ):
            distil(student, teacher, label_weight=0.5)
        distil(student, teacher).undo()
        student.__class__ = WithZLoss.__base__


def test_accelerates_mixed_precision():
    """Prepared within, its wrapper stays around what is distilled; unwrapped, the student is distilled still."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    seen = []
    student.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, x, out: seen.append(out.dtype))
    expected = textbook(student, teacher, given)
    with distil(student, teacher) as distillation:
        prepared = accelerator.prepare(student).train()
        assert prepared(**given).loss.item() == pytest.approx(expected.item(), rel=0.02)
        assert seen.pop() == torch.bfloat16
    assert distillation.is_over
    own = prepared(**given)
    assert own.logits is not None  # the student's own forward, in mixed precision as before
    assert seen.pop() == torch.bfloat16
    with pytest.raises(ValueError, match=r"accelerate.*keep_fp32_wrapper=False"):
        distil(prepared, teacher)
    with distil(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), teacher):
        assert student(**given).loss.item() == pytest.approx(expected.item(), rel=1e-4)
    student = model("Llama", 0)
    with distil(student, teacher):
        prepared = accelerator.prepare(student).train()
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)  # as one does to save it
        assert student(**given).loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_accelerates_hooks():
    """As a `device_map` gives them: the student's own, of which there is nothing to be moved, and its parts'."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    expected = textbook(student, teacher, given)
    hooked = dispatch_model(student, {"": "cpu"}, force_hooks=True)
    before = hooked.forward
    with distil(hooked, teacher):
        with pytest.raises(ValueError, match="distilled already"):
            distil(hooked, teacher)
        assert hooked.train()(**given).loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert hooked.eval()(**given).logits is not None
        copied = copy.deepcopy(hooked)
    assert hooked.forward is before
    with torch.no_grad():
        for parameter in hooked.parameters():
            parameter.zero_()
    assert copied.eval()(**given).logits.abs().max() > 0  # of its own weights
    hooked.forward = types.MethodType(lambda self, **batch: None, hooked)  # a trainer of TRL's
    with pytest.raises(ValueError, match="its forward is another's"):
        distil(hooked, teacher)
    student = dispatch_model(model("Llama", 0), {"": "cpu"}, force_hooks=True)
    with pytest.warns(RuntimeWarning, match="replaced by another's"), distil(student, teacher):
        remove_hook_from_submodules(student)
    assert student(**given).logits is not None


def test_copies_of_data_parallel_are_refused():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with pytest.raises(TypeError, match=r"student is in an nn\.DataParallel"):
        distil(torch.nn.DataParallel(student), teacher)
    with distil(student, teacher):
        student.train()
        with pytest.raises(
            ValueError, match=r"num_items_in_batch must be a number or 0-d; got shape \[2\].*DataParallel"
        ):
            student(**given, num_items_in_batch=torch.tensor([9, 9]))
        student.model.embed_tokens.to("meta")
        with pytest.raises(ValueError, match=r"input_ids are on cpu, and the student is on meta\. Batches of"):
            student(**given)


def test_what_changes_the_models_own_loss_is_refused():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with distil(student, teacher):
        student.train()
        loss = student(**given).loss
        assert student(**{**given, "labels": given["labels"].int()}).loss == loss
        with pytest.raises(ValueError, match=r"labels must lie from 0 to \d+, or be -100; got"):
            student(**{**given, "labels": given["labels"] + 100_000})
        with pytest.raises(ValueError, match="labels that do not count are -100; got ignore_index=0"):
            student(**given, ignore_index=0)
        with pytest.raises(ValueError, match="got logits_to_keep"):
            student(**given, logits_to_keep=5)
        with pytest.raises(ValueError, match="num_items_in_batch must be positive; got 0"):
            student(**given, num_items_in_batch=0)
        with pytest.raises(
            ValueError, match=r"labels must be as many as tokens, \[3, 16\] once shifted; got \[3, 14\]"
        ):
            student(**{**given, "labels": given["labels"][:, :15]})


def test_weights_in_pieces_are_refused():
    student = model("Llama", 0)
    for parameter in student.parameters():  # as DeepSpeed's zero.Init leaves them
        parameter.ds_id, parameter.data = 0, parameter.data.new_empty(0)
    with pytest.raises(ValueError, match="student is kept in pieces by DeepSpeed"):
        distil(student, model("Llama", 1))
    student = model("Llama", 0)
    with distil(student, model("Llama", 1)):
        student.lm_head.weight.ds_id = 0  # by a trainer that is made within
        with pytest.raises(ValueError, match="the head is kept in pieces by DeepSpeed"):
            student.train()(**batch())
    student = model("Llama", 0)
    student.lm_head.weight = torch.nn.Parameter(student.lm_head.weight.to("meta"))
    with pytest.raises(ValueError, match="on no device"):
        head_of(student)


def test_trainer(tmp_path):
    """Its losses, of accumulated steps, are those of an equal loop with the textbook's."""
    from transformers import Trainer, TrainingArguments

    rows = [{name: value[0] for name, value in batch(2, seed=seed).items()} for seed in range(8)]
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        seed=3,
    )
    student, teacher = model("Llama", 0), model("Llama", 1)
    twin = copy.deepcopy(student)
    with distil(student, teacher):
        trainer = Trainer(student, arguments, train_dataset=rows)
        seen = []
        loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = lambda: [seen.append(given) or given for given in loader()]
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    optimizer = torch.optim.SGD(twin.parameters(), 1e-2)
    for step, loss in enumerate(losses):
        steps = seen[2 * step : 2 * step + 2]
        count = sum(int((given["labels"][:, 1:] != -100).sum()) for given in steps)
        optimizer.zero_grad()
        expected = sum(textbook(twin, teacher, given, count=count) for given in steps)
        expected.backward()
        optimizer.step()
        assert relative_error(torch.tensor(loss), expected) < 1e-3


def check_rank(rank, store, wrapper):
    """Gradients of two ranks, each with half a batch, are those of the whole batch."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch(4)
    whole = copy.deepcopy(student)
    count = int((given["labels"][:, 1:] != -100).sum())
    textbook(whole.train(), teacher, given, count=count).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    own = {name: value[2 * rank : 2 * rank + 2] for name, value in given.items()}
    if wrapper == "ddp":
        distil(student, teacher)
        wrapped = DistributedDataParallel(student)
    else:
        from torch.distributed.fsdp import fully_shard

        distil(student, teacher)
        for layer in student.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(student)
    # Either averages over ranks.
    wrapped.train()(**own, num_items_in_batch=count / WORLD).loss.backward()
    for name, parameter in student.named_parameters():
        gradient = parameter.grad.full_tensor() if wrapper == "fsdp" else parameter.grad
        assert relative_error(gradient, expected[name]) < 1e-4, name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_processes(wrapper, tmp_path):
    mp.spawn(check_rank, (tmp_path / "store", wrapper), WORLD)


def check_teacher(rank, store):
    """One whose decoder gathers itself serves; one that is gathered in its own forward does not."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    expected = textbook(student, teacher, given)
    fully_shard(teacher.get_decoder())
    with distil(student, teacher):
        for _ in range(2):
            assert relative_error(student.train()(**given).loss, expected) < 2e-5
    whole = fully_shard(model("Llama", 1))
    with pytest.raises(ValueError, match=r"the head is sharded by itself|teacher is sharded as a whole"):
        distil(student, whole)
    dist.barrier()
    dist.destroy_process_group()


def test_a_sharded_teacher(tmp_path):
    mp.spawn(check_teacher, (tmp_path / "store",), WORLD)


def test_training_without_the_teacher_is_told():
    """Trainer takes labels away where it smooths them itself."""
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    with distil(student, teacher):
        with pytest.warns(RuntimeWarning, match="called in training without labels.*label_smoothing_factor"):
            student.train()(**inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            student.eval()(**inputs)
            with torch.no_grad():
                student.train()(**inputs)
            student(**given)


def test_a_forward_that_another_replaced_is_told():
    """As trainers of TRL do when they are made inside; mixed precision wraps it, and calls ours."""
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    for calls_ours in (False, True):
        distillation = distil(student, teacher)
        ours = student.forward
        student.forward = lambda ours=ours, **batch: ours(**batch)
        if calls_ours:
            student.train()(**given).loss.backward()
            distillation.undo()
        else:
            with pytest.warns(RuntimeWarning, match="replaced by another's") as told:
                distillation.undo()
            assert told[0].filename == __file__
        assert "forward" not in vars(student)
    distillation = distil(student, teacher)
    del student.forward
    distillation.undo()


def test_compiled_without_labels():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with distil(student, teacher):
        compiled = torch.compile(student.train(), backend="eager", fullgraph=True)
        assert compiled(input_ids=given["input_ids"], use_cache=False).logits is not None
        torch.testing.assert_close(compiled(**given).loss, student(**given).loss)


def test_a_routers_loss_is_refused():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    student, teacher = model("Mixtral", 0, output_router_logits=True, **sizes), model("Mixtral", 1, **sizes)
    with pytest.raises(ValueError, match="router's loss, output_router_logits"):
        distil(student, teacher)
    student.config.output_router_logits = False
    with distil(student, teacher):
        check(student, teacher, batch())
        student.train()(**batch(), output_router_logits=False).loss.backward()


def test_images_are_refused():
    """The decoder would not see them."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    student = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES)))
    teacher, given = model("Llama", 1), batch()
    with distil(student, teacher):
        check(student, teacher, given)
        loss = student.train()(**given).loss
        assert student(**given, token_type_ids=torch.zeros_like(given["input_ids"])).loss == loss
        with pytest.raises(ValueError, match="given pixel_values, of which its decoder, LlamaModel, knows nothing"):
            student.train()(**given, pixel_values=torch.zeros(3, 3, 8, 8))


def test_prompts_of_one_model_are_refused():
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    teacher, given = model("Llama", 1), batch()
    for made in (PromptTuningConfig, PrefixTuningConfig):
        student = get_peft_model(model("Llama", 0), made(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(ValueError, match="student has a prompt that PEFT learns, which its teacher cannot share"):
            distil(student, teacher)
    student = model("Llama", 0).train()
    embeddings = student.model.embed_tokens(given.pop("input_ids"))
    with distil(student, teacher), pytest.raises(ValueError, match="given inputs_embeds, which its teacher cannot"):
        student(inputs_embeds=embeddings, **given)


def test_adapters_of_the_head_that_are_no_weight_are_refused():
    from peft import IA3Config, LoraConfig, get_peft_model

    teacher = model("Llama", 1)
    biased = get_peft_model(model("Phi", 0), LoraConfig(r=4, lora_bias=True, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="which is not counted: set lora_bias to False"):
        distil(biased, teacher)
    scaled = get_peft_model(model("Llama", 0), IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"peft\.tuners\.ia3\.layer\.Linear: it may have a LoRA alone"):
        distil(scaled, teacher)
    tokens = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    tied = get_peft_model(model("Qwen2", 0), tokens)
    with pytest.raises(ValueError, match=r"the head is a TrainableTokens.*, which is more than a weight and a bias"):
        distil(tied, teacher)


@pytest.mark.parametrize("where", ["lora", "saved"])
def test_an_adapter_that_is_disabled_does_not_count(where):
    from peft import LoraConfig, get_peft_model

    modules = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    if where == "lora":
        modules = {"target_modules": ["lm_head"]}
    student = get_peft_model(model("Llama", 0), LoraConfig(r=4, **modules))
    teacher, given = model("Llama", 1), batch()
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    with distil(student, teacher), student.disable_adapter():
        loss = student.train()(**given).loss
        assert relative_error(loss, textbook(student.eval(), teacher, given)) < 2e-5


def test_a_head_that_the_active_adapter_has_not_saved():
    from peft import LoraConfig, get_peft_model

    student = get_peft_model(
        model("Llama", 0), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), adapter_name="one"
    )
    student.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj"]))
    student.set_adapter("two")
    teacher, given = model("Llama", 1), batch()
    with distil(student, teacher):
        assert relative_error(student.train()(**given).loss, textbook(student.eval(), teacher, given)) < 2e-5


def test_a_copy_has_its_own_weights():
    """As averages of weights are."""
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with distil(student, teacher):
        average = copy.deepcopy(student).eval()
        with torch.no_grad():
            student.lm_head.weight.zero_()
            assert average(input_ids=given["input_ids"]).logits.norm() > 1


def test_positional_arguments():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    ids, mask = given["input_ids"], given["attention_mask"]
    wanted = student(ids, mask).logits
    with distil(student, teacher):
        torch.testing.assert_close(student.eval()(ids, mask).logits, wanted)
        loss = student.train()(ids, mask, labels=given["labels"]).loss
        with pytest.raises(TypeError, match="each once; got 1 by place and input_ids, labels"):
            student(ids, input_ids=ids, labels=given["labels"])
        assert relative_error(loss, textbook(student.eval(), teacher, given)) < 2e-5


def test_what_trained_the_student_before_is_named():
    from accelerate.utils import convert_outputs_to_fp32

    student, teacher = model("Llama", 0), model("Llama", 1)
    student._original_forward = student.forward  # as Accelerator.prepare does it for mixed precision
    student.forward = convert_outputs_to_fp32(student.forward)
    with pytest.raises(ValueError, match=r"accelerate.*keep_fp32_wrapper=False"):
        distil(student, teacher)


def test_what_is_no_decoder_alone_is_refused():
    teacher = model("Llama", 1)

    class Wrapped(torch.nn.Module):  # FSDP1's
        def __init__(self, module):
            super().__init__()
            self.module = module

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    with pytest.raises(TypeError, match="distilled before FSDP wraps it; got Wrapped"):
        distil(Wrapped(model("Llama", 0)), teacher)
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    translator = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(TypeError, match="T5ForConditionalGeneration has an encoder"):
        distil(translator, teacher)


def test_a_head_of_zeros():
    student, teacher, given = model("Llama", 0), model("Llama", 1), batch()
    with torch.no_grad():
        student.lm_head.weight.zero_()
    with distil(student, teacher):
        check(student, teacher, given)
