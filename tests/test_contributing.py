"""A stranger adds a divergence: CONTRIBUTING.md's own example, followed to the letter."""

import re
from pathlib import Path

import pytest
import torch

import kullback
from kullback import divergences
from kullback.backends.cuda import literal, logits, plan
from kullback.backends.cuda.launch import compiled
from kullback.cli import reference
from kullback.divergences import DIVERGENCES
from kullback.problem import Problem, Side
from tests import kinds, oracle, test_divergences
from tests.samples import apart, batch, dead, equal, far, masked, sample
from tests.test_cuda_compile import CHIPS
from tests.tolerances import BF16_GRADIENT, LOSS, relative_error

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
KIND = "triangular"
# Of each file that is to be changed, what is added to it
ADDED = dict(re.findall(r"^In `([\w/.]+)`[^\n]*\n(?:[^\n`]+\n)*\n```python\n(.*?)```", DOCUMENT, re.S | re.M))


def test_at_most_four_files_are_touched():
    assert 1 < len(ADDED) <= 4
    assert all((ROOT / name).is_file() for name in ADDED)


def entry(file, names):
    """What the document adds to a dictionary."""
    return eval("{" + ADDED[file] + "}", names)


@pytest.fixture
def triangular(monkeypatch):
    """The kind, in the places that the document names."""
    exec(ADDED["src/kullback/divergences.py"], vars(divergences))
    monkeypatch.setitem(DIVERGENCES, KIND, vars(divergences).pop(KIND))
    monkeypatch.setitem(oracle.TEXTBOOK, KIND, entry("tests/oracle.py", vars(oracle))[KIND])
    monkeypatch.setitem(kinds.FACTS, KIND, entry("tests/kinds.py", vars(kinds))[KIND])
    monkeypatch.setitem(reference.TEXTBOOK, KIND, entry("src/kullback/cli/reference.py", vars(reference))[KIND])
    return DIVERGENCES[KIND]


def test_it_keeps_the_laws(triangular):
    for centred in (False, True):
        test_divergences.test_partials_sum_to_the_term(KIND, centred)
        test_divergences.test_agrees_with_the_textbook(KIND, centred)
        for spread in (0.05, 1.0, 4.0):
            test_divergences.test_partials_are_the_derivatives_of_the_term(KIND, centred, spread)
    for epsilon in (1.0, 1e-2, 1e-8):
        test_divergences.test_centred_terms_are_never_negative(KIND, epsilon)
    test_divergences.test_nothing_between_equals(KIND)
    test_divergences.test_symmetric(KIND)
    test_divergences.test_definitions_are_one_line(KIND)


def test_the_law_can_fail(triangular, monkeypatch):
    wrong = triangular._replace(element=lambda x: triangular.element(x)._replace(d_log_p=0.0 * x.p))
    monkeypatch.setitem(DIVERGENCES, KIND, wrong)
    with pytest.raises(AssertionError):
        test_divergences.test_partials_sum_to_the_term(KIND, False)


@pytest.mark.parametrize("form", oracle.FORMS)
def test_it_runs_in_every_form(triangular, backend, device, generator, form):
    x, y = (sample(form, (5, 300), generator).to(device) for _ in range(2))
    leaves = [t.double().requires_grad_() for t in (x, y)]
    truth = oracle.divergence(*leaves, KIND, form)
    expected = torch.autograd.grad(truth.sum(), leaves)
    assert relative_error(reference.rows(KIND, form, x.double(), y.double()), truth) < 1e-12
    for reduction in ("none", "sum"):
        ours = [t.clone().requires_grad_() for t in (x, y)]
        loss = kullback.divergence(*ours, KIND, form=form, reduction=reduction).sum()
        assert relative_error(loss, truth.sum()) < LOSS
        for mine, other in zip(torch.autograd.grad(loss, ours), expected, strict=True):
            assert relative_error(mine, other) < 1e-6


@pytest.mark.parametrize("backend", ["emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_cuda_kernels_run(triangular, backend, generator, dtype):
    rows = batch(
        generator,
        2503,
        dtype,
        far=far(2.0),
        close=apart(0.01),
        equal=equal,
        masked=masked(apart(1.0), both=slice(9)),
        dead=dead,
    )
    weight = rows.weight(dead=0.0)
    counts = weight != 0
    leaf = rows.x.double().requires_grad_()
    truth = oracle.divergence(leaf[counts], rows.y[counts].double(), KIND)
    (expected,) = torch.autograd.grad(truth.sum(), leaf)
    for reduction in ("none", "sum"):
        ours = rows.x.clone().requires_grad_()
        loss = kullback.divergence(ours, rows.y, KIND, row_weight=weight, reduction=reduction).sum()
        assert kullback.backend_info().name == "cuda"
        assert relative_error(loss, truth.sum()) < LOSS
        (found,) = torch.autograd.grad(loss, ours)
        assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else BF16_GRADIENT)


@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.full) for arch in ("sm_80", "sm_100a", "sm_120a"))]
)
def test_its_cuda_kernels_compile(triangular, arch):
    wants, dtypes = (True, False), (torch.bfloat16, torch.bfloat16)
    problem = Problem(KIND, Side("logits"), Side("logits"))
    chip = CHIPS.get(arch, plan.NO_CHIP)
    for vocab in (1000, 128256):
        shape = logits.layout(problem, vocab, *dtypes, wants, False, chip).shape
        variant = logits.Variant(
            KIND,
            "logits",
            "logits",
            *dtypes * 2,
            torch.float64,
            torch.float32,
            "loss",
            False,
            True,
            False,
            False,
            wants,
            (False, False),
        )
        assert compiled(logits.source(variant, shape), arch, ("-warn-spills", "-Werror"))
    variant = literal.Variant(
        KIND, "probs", "probs", torch.float32, torch.float32, torch.float64, torch.float32, "loss", False, True, wants
    )
    shape = plan.shape(plan.THREADS, True, torch.float32, torch.float32, 1)
    assert compiled(literal.source(variant, shape), arch, ("-warn-spills", "-Werror"))


def test_its_rows_in_tables_are_written_by_a_command(triangular, tmp_path):
    """The README's, the docstring's and docs/mathematics.md's: `make tables`."""
    from tests import tables

    assert all(KIND in tables.rendered(file) for file in tables.KINDS)


def test_no_other_file_names_a_kind_that_is_not_its_own():
    """What is said of a kind is said in divergences.py; templates and backends know none by name."""
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".c", ".h", ".cuh")]
    named = {str(p.relative_to(ROOT)) for p in sources if "jensen_shannon" in p.read_text(encoding="utf-8")}
    assert named <= {
        "src/kullback/divergences.py",
        "src/kullback/functional.py",  # the table of its docstring, and an example
        "src/kullback/integrations/transformers.py",  # an example
        "src/kullback/integrations/beta.py",  # which kind a beta of theirs is
        "src/kullback/integrations/trl.py",  # and what that is called there
        "src/kullback/statistics.py",  # a figure of its own
        "src/kullback/compare.py",  # which is summed up
        "src/kullback/cli/tables.py",  # and shown
        "src/kullback/words.py",  # what it is called elsewhere
        "src/kullback/cli/reference.py",
        "src/kullback/cli/bench.py",  # Liger has this one and kl
    }
