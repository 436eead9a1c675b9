"""Every kind x form pair x reduction x dtype on every backend, values and both gradients, against the oracle.

The budget is torch's own: twice the error of the textbook formula run in the same dtype, and 2 ulp.
"""

import itertools
import math

import pytest
import torch

import kullback
from tests import kinds, oracle
from tests.kinds import FEW, KINDS, LONG_IN_C
from tests.samples import sample
from tests.tolerances import FLOAT_GRADIENT, FLOAT_SUM, relative_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROWS, VOCAB = 6, 67
# Where the reference has one pair of temperatures both are tried.
TEMPERATURE, TARGET_TEMPERATURE = 1.5, 0.8


def temperatures(form, target_form):
    return {
        "temperature": TEMPERATURE if form == "logits" else 1.0,
        "target_temperature": TARGET_TEMPERATURE if target_form == "logits" else 1.0,
    }


def reduce(rows, weight, reduction):
    if reduction == "none":
        return rows * weight
    total = (rows * weight).sum()
    return total if reduction == "sum" else total / weight.sum()


def textbook_in(dtype, x, y, kind, form, target_form, **options):
    """The textbook formula with every tensor in `dtype`, for its error."""

    def masses(t, form, temperature):
        if form == "logits":
            return (t / temperature).softmax(-1)
        return t.exp() if form == "log_probs" else t

    q = masses(x, form, options.pop("temperature"))
    p = masses(y, target_form, options.pop("target_temperature"))
    return oracle.rows(kind, p, q, **options).to(dtype)


CASES = [
    (form, target_form, dtype) for form, target_form in itertools.product(oracle.FORMS, repeat=2) for dtype in DTYPES
]
# Each compiles two kernels in C of each kind, and form, dtype and kind do not touch each other. The second dtype of 16
# bits differs from the first in how an element is loaded and stored.
OF_EACH_KIND = [case for case in CASES if case[0] == case[1] and case[2] == torch.float32]
OF_ONE = [case for case in CASES if (case[0] == case[1]) != (case[2] == torch.float32) and case[2] != torch.float16]
QUICK = [*itertools.product(OF_EACH_KIND, KINDS), *zip(OF_ONE, itertools.cycle(FEW), strict=False)]
LONG = [pair for pair in itertools.product(CASES, KINDS) if pair not in QUICK]


def name(value):
    return value if isinstance(value, str) else "-".join(str(each).removeprefix("torch.") for each in value)


@pytest.mark.parametrize(("case", "kind"), QUICK, ids=name)
def test_values_and_gradients(kind, case, backend, device, generator):
    check(kind, *case, device, generator)


@LONG_IN_C
@pytest.mark.parametrize(("case", "kind"), LONG, ids=name)
def test_values_and_gradients_of_other_forms_and_dtypes(kind, case, backend, device, generator):
    check(kind, *case, device, generator)


def check(kind, form, target_form, dtype, device, generator):
    x = sample(form, (ROWS, VOCAB), generator, dtype)
    y = sample(target_form, (ROWS, VOCAB), generator, dtype)
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    weight[2] = 0
    upstream = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    options = {**temperatures(form, target_form), **kinds.parameters(kind)}
    ulp = torch.finfo(dtype).eps
    loss_ulp = torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def run(formula, a, b, reduction):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        loss = formula(a, b, reduction)
        cotangent = upstream.to(loss) if reduction == "none" else torch.tensor(1.7).to(loss)
        return loss, *torch.autograd.grad(loss, (a, b), cotangent)

    def truth(a, b, reduction):
        rows = oracle.divergence(a, b, kind, form, target_form, **options)
        return reduce(rows, weight, reduction)

    def plain(a, b, reduction):
        rows = textbook_in(dtype, a, b, kind, form, target_form, **options)
        return reduce(rows, weight.to(dtype), reduction)

    def ours(a, b, reduction):
        return kullback.divergence(
            a,
            b,
            kind,
            form=form,
            target_form=target_form,
            row_weight=weight.to(device),
            reduction=reduction,
            **options,
        )

    for reduction in ("none", "sum", "mean"):
        expected = run(truth, x.double(), y.double(), reduction)
        reference = run(plain, x, y, reduction)
        actual = run(ours, x.to(device), y.to(device), reduction)
        for index, (a, r, e) in enumerate(zip(actual, reference, expected, strict=True)):
            representable = e.abs() <= torch.finfo(a.dtype).max
            assert torch.isinf(a[~representable]).all()
            a, r, e = (torch.where(representable.to(t.device), t, 0.0) for t in (a, r, e))
            reference_error = relative_error(r, e)
            # A gradient of logits starts from the row's log-sum-exp: one rounding more than the textbook's.
            roundings = 3 if index and "logits" in (form, target_form) else 2
            budget = roundings * (ulp if index else loss_ulp)
            budget += 2 * reference_error if math.isfinite(reference_error) else ulp
            if dtype == torch.float64:  # the oracle is float64 too: both are off by a few roundings
                budget = 2e-14
            if index == 0:  # a loss of ours is float32 or better: it may not hide behind bf16's error
                budget = min(budget, 64 * loss_ulp)
            elif dtype == torch.float32:
                # p²/q of logits on a GPU: three roundings of exponents, where the reference has two quotients'
                on_chip = (form, target_form, device) == ("logits", "logits", "cuda")
                is_triple = kinds.FACTS[kind].has_squares and on_chip
                # Of two forms a log-ratio is the difference of two rounded logarithms.
                is_mixed = form != target_form and "logits" in (form, target_form)
                budget = FLOAT_SUM if is_triple else min(budget, FLOAT_GRADIENT if is_mixed else FLOAT_SUM)
            assert relative_error(a, e) <= budget, (
                reduction,
                ("value", "input", "target")[index],
                relative_error(a, e),
                budget,
            )


# Of each kind one form; the others compile as many kernels again in C.
ONCE = list(zip(itertools.cycle(oracle.FORMS), KINDS))
OTHERS = [pair for pair in itertools.product(oracle.FORMS, KINDS) if pair not in ONCE]


@pytest.mark.parametrize(("form", "kind"), ONCE)
def test_no_weight_is_weight_one(form, kind, backend, device, generator):
    check_weight_one(form, kind, device, generator)


@LONG_IN_C
@pytest.mark.parametrize(("form", "kind"), OTHERS)
def test_no_weight_is_weight_one_in_other_forms(form, kind, backend, device, generator):
    check_weight_one(form, kind, device, generator)


def check_weight_one(form, kind, device, generator):
    x, y = (sample(form, (ROWS, VOCAB), generator).to(device) for _ in range(2))
    ones = torch.ones(ROWS, device=device)
    for reduction in ("none", "sum", "mean"):
        options = {"form": form, "reduction": reduction, **kinds.parameters(kind)}
        torch.testing.assert_close(
            kullback.divergence(x, y, kind, **options),
            kullback.divergence(x, y, kind, row_weight=ones, **options),
            rtol=1e-6,
            atol=0,
        )
