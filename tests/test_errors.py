"""Bad input gets an error before any work, naming the argument, what came and what was wanted."""

import pytest
import torch

import kullback

X = torch.full((3, 4), 0.25)


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
        (lambda: kullback.divergence(X, X, "reverse-kl"), ValueError, ["kind", "did you mean 'reverse_kl'"]),
        (lambda: kullback.divergence(X, X, form="logit"), ValueError, ["form", "did you mean 'logits'"]),
        (lambda: kullback.divergence(X, X, target_form="prob"), ValueError, ["target_form", "'probs'"]),
        (
            lambda: kullback.divergence(X, X, reduction="batchmean"),
            ValueError,
            ["reduction", "none, mean, sum"],
        ),
        (lambda: kullback.divergence(X, X, alpha=0.5), ValueError, ["'kl' has no parameter 'alpha'", "none"]),
        (lambda: kullback.divergence(X, X, "renyi", alhpa=0.5), ValueError, ["did you mean 'alpha'"]),
        (lambda: kullback.divergence(X, X, "renyi", alpha=1), ValueError, ["positive and not 1", "got 1"]),
        (lambda: kullback.divergence(X, X, "alpha", alpha=float("nan")), ValueError, ["alpha", "nan"]),
        (lambda: kullback.divergence(X, X, "jensen_shannon", weight=1.5), ValueError, ["between 0 and 1"]),
        (lambda: kullback.divergence(X, X, "jensen_shannon", weight=1 - 1e-9), ValueError, ["weight", "float32"]),
        (lambda: kullback.divergence(X, X, "jensen_shannon", weight=1e-46), ValueError, ["weight", "float32"]),
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
            lambda: kullback.divergence(X, X, row_weight=torch.ones(3).int()),
            TypeError,
            ["row_weight", "int32"],
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
        (
            lambda: kullback.divergence(X, X, normalizer=2.0, reduction="sum"),
            ValueError,
            ["normalizer", "'sum'"],
        ),
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


def test_backend_names():
    with pytest.raises(ValueError, match="cuda, c, torch; got 'cpp'"), kullback.backend("cpp"):
        pass
    with (
        pytest.raises(RuntimeError, match=r"'cuda' was asked for and cannot run.*tensors are on cpu"),
        kullback.backend("cuda"),
    ):
        kullback.divergence(X, X, form="probs")


def test_backend_info_says_what_ran_and_why():
    kullback.divergence(X, X, form="probs")
    info = kullback.backend_info()
    assert info.name == "c"
    assert info.refused == {"cuda": "tensors are on cpu"}
    with kullback.backend("torch"):
        kullback.divergence(X, X, form="probs")
    assert kullback.backend_info() == ("torch", {})


def test_without_a_compiler_the_torch_path_runs_and_says_why(monkeypatch):
    from kullback.backends import c

    monkeypatch.setenv("CC", "no-such-compiler")
    c.compiler.cache_clear()
    try:
        loss = kullback.divergence(X, X, form="probs")
        assert loss.item() == 0
        info = kullback.backend_info()
        assert info.name == "torch"
        assert "no-such-compiler" in info.refused["c"]
    finally:
        c.compiler.cache_clear()


def test_a_kernel_that_does_not_compile_leaves_the_torch_path(monkeypatch):
    from kullback import backends
    from kullback.backends import c

    def broken(variant):
        return "this is not C"

    monkeypatch.setattr(backends, "_broken", {})
    monkeypatch.setattr(c, "source", broken)
    c.kernel.cache_clear()
    try:
        assert kullback.divergence(X, X, form="probs").item() == 0
        assert kullback.backend_info().name == "torch"
        assert "failed" in kullback.backend_info().refused["c"]
    finally:
        c.kernel.cache_clear()


@pytest.mark.parametrize("damage", ["garbage", "blank"])
def test_a_compiler_that_cannot_be_used_leaves_the_torch_path(damage, monkeypatch, tmp_path):
    """One that writes what cannot be loaded; and a blank $CC, which is none."""
    from kullback import backends
    from kullback.backends import c

    script = tmp_path / "cc"
    script.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo garbage > "$2"; shift; done\n')
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(script) if damage == "garbage" else " ")
    monkeypatch.setattr(backends, "_broken", {})
    for cached in (c.compiler, c.kernel):
        cached.cache_clear()
    try:
        assert kullback.divergence(X, X, form="probs").item() == 0
        info = kullback.backend_info()
        assert info.name == ("torch" if damage == "garbage" else "c")
        assert damage == "blank" or "could not be loaded" in info.refused["c"]
    finally:
        for cached in (c.compiler, c.kernel):
            cached.cache_clear()
