"""Bad input gets an error before any work, naming the argument, what came and what was wanted."""

import numpy
import pytest
import torch

import kullback

X = torch.full((3, 4), 0.25)
LABELS = torch.tensor([0, 3, -100])
NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kullback.divergence(X, X[:2]), ValueError, [r"\[3, 4\]", r"\[2, 4\]", "same shape"]),
        (lambda: kullback.divergence(X, X[0]), ValueError, [r"\[4\]"]),
        (lambda: kullback.divergence(X[0, 0], X[0, 0]), ValueError, ["vocab"]),
        (lambda: kullback.divergence(X.long(), X), TypeError, ["input", "int64", "float32"]),
        (lambda: kullback.divergence(X, X.bool()), TypeError, ["target", "bool"]),
        (lambda: kullback.divergence(X, X.cfloat()), TypeError, ["target", "complex64"]),
        (lambda: kullback.divergence([1.0], X), TypeError, ["input", "list"]),
        (lambda: kullback.divergence(X, X.to("meta")), ValueError, ["one device", "meta"]),
        *(
            (lambda alone=alone, options=options: alone(**options), ValueError, words)
            for alone in (
                lambda **options: kullback.divergence(X, None, labels=LABELS, **options),
                lambda **options: kullback.linear_divergence(X, X, None, labels=LABELS, **options),
                lambda **options: kullback.linear_divergence(X, X, X, X, labels=LABELS, divergence_weight=0, **options),
            )
            for options, words in (
                ({"mask": X[:, 0]}, ["'mask'", "row_weight is a row's mask"]),
                ({"kind": "foo"}, ["kind must be one of"]),
                ({"target_form": "foo"}, ["target_form must be one of"]),
                ({"target_temperature": -1.0}, ["target_temperature"]),
                ({"label_weight": float("nan")}, ["label_weight must be finite"]),
                ({"label_weight": 1e-25}, ["label_weight without a divergence must be 0"]),
            )
        ),
        (
            lambda: kullback.linear_divergence(X, X, None, labels=LABELS, tail="foo"),
            ValueError,
            ["tail must be one of"],
        ),
        (lambda: kullback.divergence(X[0, 0], None, labels=LABELS[0]), ValueError, ["input must have the shape"]),
        (lambda: kullback.divergence(NESTED, None, labels=LABELS), TypeError, ["input", "nested", "values()"]),
        (
            lambda: kullback.divergence(X, "junk", labels=LABELS, divergence_weight=0),
            TypeError,
            ["target must be", "str"],
        ),
        (lambda: kullback.divergence(X, X[:2], labels=LABELS, divergence_weight=0), ValueError, ["same shape"]),
        *(
            (lambda given=given: kullback.linear_divergence(X, X, *given, labels=LABELS, divergence_weight=0), *wanted)
            for given, wanted in (
                (("junk",), (TypeError, ["target must be a tensor; got str"])),
                ((X[:2],), (ValueError, ["target must have the rows of input"])),
                ((X, X[:, :3]), (ValueError, ["target must have the shape", "target_weight"])),
            )
        ),
        (lambda: kullback.kl_div(X, X, log_target="yes"), TypeError, ["log_target must be True or False", "'yes'"]),
        (lambda: kullback.LinearDivergenceLoss("kl", form="probs"), ValueError, ["no argument 'form' of this"]),
        (lambda: kullback.DivergenceLoss(divergence_weight=0, inplace=True), ValueError, ["inplace=True needs"]),
        (lambda: kullback.divergence(X, X, "reverse-kl"), ValueError, ["kind", "did you mean 'reverse_kl'"]),
        (lambda: kullback.divergence(X, X, form="logit"), ValueError, ["form", "did you mean 'logits'"]),
        (lambda: kullback.divergence(X, X, target_form="prob"), ValueError, ["target_form", "'probs'"]),
        (
            lambda: kullback.divergence(X, X, reduction="batchmean"),
            ValueError,
            ["reduction", "none, mean, sum"],
        ),
        (
            lambda: kullback.linear_divergence(X, X, None, target_weight=X, labels=torch.zeros(len(X)).long()),
            ValueError,
            ["target_weight means nothing beside target=None"],
        ),
        (lambda: kullback.divergence(X, X, alpha=0.5), ValueError, ["'kl' has no parameter 'alpha'", "none"]),
        (lambda: kullback.DivergenceLoss(temprature=2.0), ValueError, ["mean 'temperature'"]),
        (lambda: kullback.DivergenceLoss(normalizer=3.0), ValueError, ["normalizer comes with a call of the module"]),
        (lambda: kullback.linear_row_statistics(X, X, target_bias=X[0]), ValueError, ["target_bias goes with"]),
        (lambda: kullback.linear_row_statistics(X, X[:0]), ValueError, ["weight must have tokens", r"\[0, "]),
        (lambda: kullback.divergence(X, X, "renyi", alhpa=0.5), ValueError, ["did you mean 'alpha'"]),
        (
            lambda: kullback.divergence(X, X, "renyi", alpha=1),
            ValueError,
            [r"between 1e-30 and 1e\+06, and not so near", "got 1"],
        ),
        (
            lambda: kullback.divergence(X, X, "alpha", alpha=1 - 1e-9),
            ValueError,
            ["in size, and not so near to 1", "got 0.99"],
        ),
        (lambda: kullback.divergence(X, X, "renyi", alpha=1e-40), ValueError, ["between 1e-30", "got 1e-40"]),
        (lambda: kullback.divergence(X, X, ["kl"]), ValueError, ["kind must be one of kl", r"got \['kl'\]"]),
        (lambda: kullback.divergence(X, X, "alpha", alpha=float("nan")), ValueError, ["alpha", "nan"]),
        (lambda: kullback.divergence(X, X, "jensen_shannon", beta=1.5), ValueError, ["between 0 and 1"]),
        (lambda: kullback.divergence(X, X, "jensen_shannon", beta=1 - 1e-9), ValueError, ["beta", "float32"]),
        (lambda: kullback.divergence(X, X, "jensen_shannon", beta=1e-46), ValueError, ["beta", "float32"]),
        (lambda: kullback.divergence(X, X, temperature=1e39), ValueError, ["temperature must lie", "1e30", r"1e\+39"]),
        (lambda: kullback.divergence(X, X, temperature=1e-39), ValueError, ["temperature must lie", "1e-30"]),
        (lambda: kullback.divergence(X, X, temperature=10**400), ValueError, ["temperature", "finite"]),
        (lambda: kullback.divergence(X, X, temperature=torch.tensor(2.0)), TypeError, ["temperature.item()"]),
        (lambda: kullback.divergence(NESTED, NESTED), TypeError, ["input", "nested", "values()"]),
        (lambda: kullback.divergence(X.to_sparse(), X), TypeError, ["input", "sparse", "input.to_dense()"]),
        (lambda: kullback.divergence(X, X, inplace=1), TypeError, ["inplace must be True or False", "1"]),
        (lambda: kullback.divergence(X, X, normalizer=torch.tensor(1j)), TypeError, ["normalizer", "complex64"]),
        (lambda: kullback.divergence(X, X, normalizer=torch.tensor(True)), TypeError, ["normalizer", "bool"]),
        (lambda: kullback.divergence(X, X, "skew_kl", alpha=0), ValueError, ["alpha", "more than 0", "got 0"]),
        (lambda: kullback.divergence(X, X, "skew_kl", alpha=1), ValueError, ["alpha", "less than 1"]),
        (lambda: kullback.divergence(X, X, "skew_kl", alpha="a"), TypeError, ["alpha", "number", "str"]),
        (lambda: kullback.divergence(X, X, temperature=0), ValueError, ["temperature", "positive", "0"]),
        (lambda: kullback.divergence(X, X, target_temperature=-1.0), ValueError, ["target_temperature"]),
        (lambda: kullback.divergence(X, X, temperature=X), TypeError, ["temperature", "Tensor"]),
        (lambda: kullback.divergence(X, X, form="probs", temperature=2.0), ValueError, ["logits", "probs"]),
        (
            lambda: kullback.divergence(X, X, target_form="probs", target_temperature=5.0),
            ValueError,
            ["target_temperature", "logits", "probs"],
        ),
        (lambda: kullback.divergence(X, X, row_weight=X), ValueError, ["row_weight", r"\[3\]", r"\[3, 4\]"]),
        (
            lambda: kullback.divergence(X, X, row_weight=torch.ones(3).cfloat()),
            TypeError,
            ["row_weight", "complex64"],
        ),
        (lambda: kullback.divergence(X, X, row_weight=[1.0]), TypeError, ["row_weight", "list"]),
        (
            lambda: kullback.divergence(X, X, row_weight=torch.ones(3, device="meta")),
            ValueError,
            ["row_weight", "cpu", "meta"],
        ),
        (lambda: kullback.divergence(X, X, normalizer=0.0), ValueError, ["normalizer", "positive"]),
        (lambda: kullback.divergence(X, X, normalizer=torch.ones(1)), ValueError, ["normalizer", "0-d"]),
        (lambda: kullback.divergence(X, X, normalizer="3"), TypeError, ["normalizer", "str"]),
        *(
            (call, TypeError, [f"{name} must be a dense tensor; got torch.sparse_coo"])
            for name, call in {
                "row_weight": lambda: kullback.divergence(X, X, row_weight=X[:, 0].to_sparse()),
                "labels": lambda: kullback.divergence(X, X, labels=LABELS.to_sparse()),
                "normalizer": lambda: kullback.divergence(X, X, normalizer=X[0, 0].to_sparse()),
                "target_indices": lambda: kullback.topk_divergence(X, X, X.long().to_sparse()),
            }.items()
        ),
        (lambda: kullback.divergence(X, X, row_weight=NESTED), TypeError, ["row_weight must not be a nested tensor"]),
        *(
            (call, TypeError, [f"divergence_weight must be a number; got {what}"])
            for zero, what in ((torch.tensor(0.0), "a Tensor"), (numpy.zeros(2), "ndarray"))
            for call in (
                lambda zero=zero: kullback.divergence(X, X, divergence_weight=zero),
                lambda zero=zero: kullback.linear_divergence(X, X, X, X, divergence_weight=zero),
            )
        ),
        (
            lambda: kullback.divergence(X, X, valid_vocab=torch.tensor(3.0)),
            TypeError,
            ["valid_vocab must be an integer; got Tensor"],
        ),
        (lambda: kullback.enable_symmetric_memory(None), TypeError, ["group must be", "got NoneType"]),
        (
            lambda: kullback.divergence(X, X, normalizer=2.0, reduction="sum"),
            ValueError,
            ["normalizer", "'sum'"],
        ),
        (lambda: kullback.divergence(X, X, group="tp"), TypeError, ["group", "ProcessGroup", "str"]),
        (lambda: kullback.topk_divergence(X, X, X.long(), group=object()), TypeError, ["group", "object"]),
        (lambda: kullback.topk_divergence(X, X, X.long(), first_token=0), ValueError, ["first_token", "no group"]),
        (lambda: kullback.linear_divergence(X, X, X, X, sequence_dim=0), ValueError, ["sequence_dim", "group"]),
        (lambda: kullback.linear_divergence(X, X, X, X, sequence_dim="0"), TypeError, ["sequence_dim", "str"]),
        (lambda: kullback.DivergenceLoss(group=X), TypeError, ["group", "Tensor"]),
        (lambda: kullback.LinearDivergenceLoss(total_vocab=9), ValueError, ["total_vocab", "no group"]),
        (lambda: kullback.divergence(X[:, :0], X[:, :0], valid_vocab=0), ValueError, ["valid_vocab", "got 0"]),
        (lambda: kullback.kl_div(X, X, "median"), ValueError, ["reduction", "batchmean"]),
        (lambda: kullback.kl_div(X, X, form="logits"), ValueError, ["form", "log_probs, probs"]),
        (lambda: kullback.kl_div(X, X[:2]), ValueError, ["broadcast", r"\[2, 4\]"]),
        (lambda: kullback.kl_div(X.int(), X), TypeError, ["input", "int32"]),
    ],
)
def test_says_what_is_wrong(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert caught.match(word)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kullback.divergence(X, X, mask=X), "there is no argument 'mask': row_weight is a row's mask"),
        (lambda: kullback.divergence(X, X, attention_mask=X), "'attention_mask': row_weight is a row's mask"),
        (lambda: kullback.topk_divergence(X, X, X.long(), T=2.0), "'T': temperature divides logits"),
        (lambda: kullback.DivergenceLoss(ignore_index=-100), "'ignore_index': .*row_weight"),
        (
            lambda: kullback.divergence(X, X, beta=0.5),
            "'kl' has no parameter 'beta'; .*beta is of mixed_kl, jensen_shannon",
        ),
        (lambda: kullback.divergence(X, X, row_weights=X), "did you mean 'row_weight'"),
        (lambda: kullback.divergence(X, X, sample_weight=X), "'sample_weight': row_weight has a weight"),
        (lambda: kullback.divergence(X, X, "jensen_shannon", weight=0.3), "parameter of 'jensen_shannon' is beta"),
        (lambda: kullback.LinearDivergenceLoss(target_indices=X), "target_indices comes with a call of the module"),
        (lambda: kullback.divergence(X, X, normaliser=3), "did you mean 'normalizer'"),
        (lambda: kullback.divergence(X, X, label=X), "did you mean 'labels'"),
        (lambda: kullback.divergence(X, X, target_ids=X), "'target_ids': target_indices are a top-k teacher's"),
        (
            lambda: kullback.topk_divergence(X, X, X.long(), target_logit_scale=2.0),
            "no argument 'target_logit_scale' of this function, only of others",
        ),
        (lambda: kullback.divergence(X, X, "rkl"), "did you mean 'reverse_kl'"),
        (lambda: kullback.divergence(X, X, "Reverse-KL"), "did you mean 'reverse_kl'"),
        (lambda: kullback.divergence(X, X, "fkl"), "did you mean 'kl'"),
        (lambda: kullback.divergence(X, X, "KL"), "did you mean 'kl'"),
        (lambda: kullback.divergence(X, X, "jsd"), "did you mean 'jensen_shannon'"),
        (lambda: kullback.divergence(X, X, "tv"), "did you mean 'total_variation'"),
        (lambda: kullback.divergence(X, X, reduction="batchmean"), r"normalizer=input.size\(0\)"),
        (lambda: kullback.divergence(X, X, "skl"), "did you mean 'jeffreys' or 'skew_kl'"),
        (lambda: kullback.divergence(X, X, "skew_rkl"), "'skew_kl' with input and target exchanged"),
        (lambda: kullback.divergence(X, X, "srkl"), "'skew_kl' with input and target exchanged"),
        (lambda: kullback.divergence(X, X, "reverse_chi2"), "'chi2' with input and target exchanged"),
        (lambda: kullback.divergence(X, X, "rchi2"), "'chi2' with input and target exchanged"),
        (lambda: kullback.divergence(X, X, "bwd_skew_kl"), "'skew_kl' with input and target exchanged"),
        (lambda: kullback.divergence(X, X, "reverse_tv"), "did you mean 'total_variation'"),
        (lambda: kullback.divergence(X, X, "fwd_kl"), "did you mean 'kl'"),
        (lambda: kullback.divergence(X, X, "reverse_kld"), "did you mean 'reverse_kl'"),
        (lambda: kullback.divergence(X, X, "jeffreys", weight=0.3), "beta of mixed_kl weighs both directions"),
        (lambda: kullback.divergence(X, X, hard_weight=0.3), "'hard_weight': label_weight multiplies"),
        (lambda: kullback.divergence(X, X, kd_weight=0.3), "'kd_weight': divergence_weight multiplies"),
    ],
)
def test_words_that_people_bring_get_a_hint(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": X}, "choose rows before or after$"),
        ({"T": 2.0}, "temperature divides"),
        ({"from": "probs"}, "'form'"),
        ({"sample_weight": X}, "(?<='sample_weight')$"),
    ],
)
def test_figures_of_rows_hint_too(options, words):
    with pytest.raises(TypeError, match=f"^row_statistics has no argument '{next(iter(options))}'.*{words}"):
        kullback.row_statistics(X, X, **options)


@pytest.mark.parametrize("name", ["klr", "r_kl", "kl_r", "rev_kl", "bkl", "bwd_kl", "kl2", ""])
def test_no_hint_turns_the_direction(name):
    with pytest.raises(ValueError, match="kind must be one of") as error:
        kullback.divergence(X, X, name)
    assert "did you mean 'kl'" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integer_masks_are_weights(dtype):
    x, y = torch.randn(2, 3, 5)
    mask = torch.tensor([1, 0, 1], dtype=dtype)
    ours = kullback.divergence(x, y, row_weight=mask)
    assert torch.equal(ours, kullback.divergence(x, y, row_weight=mask.float()))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_ids_may_be_unsigned(dtype):
    student, teacher = torch.randn(2, 3, 50)
    values, ids = teacher.log_softmax(-1).topk(4)
    ours = kullback.topk_divergence(student, values, ids.to(dtype))
    assert torch.equal(ours, kullback.topk_divergence(student, values, ids))
