"""What compute-sanitizer watches (`make sanitize`): every way that rows take through the CUDA kernels, few of each.

    compute-sanitizer --tool racecheck python tests/sanitize.py [logits] [sparse] [linear]

Values are what other tests are for; here a loss has to be a number, so that work is known to have been done.
"""

import itertools
import sys

import torch

import kullback

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU it runs, and shows that it does
KINDS = ("kl", "jensen_shannon", "skew_kl", "total_variation")
# on chip, in clusters of eight blocks and of one; streamed; short; all odd
VOCABULARIES = (128257, 8193, 400_001, 1001)


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def check(loss, *inputs):
    assert not loss.isnan().any()
    for gradient in torch.autograd.grad(loss.sum(), inputs):
        gradient.float().sum().item()  # initcheck tells of elements that nobody wrote, where they are read


def rows(vocab, dtypes):
    """Far, close, close with far words, masked on both sides and on one, of one word; vectors begin anywhere."""
    y = 3 * randn(8, vocab)
    noise = randn(8, vocab) * torch.tensor([1, 1, 0.03, 0.03, 1, 1, 1, 1e-3], device=DEVICE)[:, None]
    noise[3, ::50] *= 30
    x = y + noise
    x[4, vocab // 3 :] = y[4, vocab // 3 :] = -torch.inf
    x[5, 1:9] = -torch.inf
    x[6, 3] = y[6, 3] = 60
    wide = torch.zeros(8, vocab + 3, device=DEVICE)
    padded = wide.to(dtypes[0]), wide.to(dtypes[1])
    for whole, part in zip(padded, (x, y), strict=True):
        whole[:, 1 : 1 + vocab] = part
    return (x.to(dtypes[0]), y.to(dtypes[1])), (padded[0][:, 1 : 1 + vocab], padded[1][:, 1 : 1 + vocab])


def logits():
    weight = torch.tensor([1, 0, 2, 0.5, 1, 0, 1, 1], device=DEVICE)
    cases = [(torch.bfloat16, kind) for kind in KINDS] + [(torch.float32, kind) for kind in KINDS[:2]]
    for vocab, (dtype, kind) in itertools.product(VOCABULARIES, cases):
        for x, y in rows(vocab, (dtype, dtype)):
            a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
            check(kullback.divergence(a, y, kind, row_weight=weight), a)
            check(kullback.divergence(a, b, kind), a, b)
            check(kullback.divergence(a, b, kind, reduction="none", row_weight=weight), a, b)
            assert not kullback.divergence(x, y, kind).isnan()
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        (x, y), _ = rows(50257, dtypes)
        a = x.detach().requires_grad_()
        check(kullback.divergence(a, y, "kl", softcap=30.0, target_softcap=20.0, valid_vocab=50001, temperature=2.0), a)
        check(kullback.divergence(a, y.float().softmax(-1), "jensen_shannon", target_form="probs"), a)


def sparse():
    for dtype, form, tail in itertools.product(
        (torch.bfloat16, torch.float32, torch.float16, torch.float64),
        ("log_probs", "probs", "logits"),
        ("bucket", "renormalize", "zero"),
    ):
        if form == "logits" and tail == "bucket":
            continue
        x = randn(9, 4103).to(dtype)[1:, 1:].requires_grad_()
        # distinct but for a repeated and an absent one
        ids = (torch.arange(16, device=DEVICE) * 101 + torch.arange(8, device=DEVICE)[:, None] * 7) % 4102
        ids[2, 3], ids[4, 5] = ids[2, 2], -1
        values = randn(8, 20)
        values = values if form == "logits" else values.softmax(-1) if form == "probs" else values.log_softmax(-1)
        loss = kullback.topk_divergence(x, values[:, :16].to(dtype), ids, "kl", target_form=form, tail=tail)
        check(loss, x)


def linear():
    """Not for initcheck, which does not see that cuBLAS writes by bulk stores."""
    for kind in KINDS[:2]:
        hidden, head = randn(70, 64).bfloat16().requires_grad_(), randn(4099, 64).bfloat16().requires_grad_()
        teacher, teacher_head = randn(70, 96).bfloat16(), randn(4099, 96).bfloat16()
        check(kullback.linear_divergence(hidden, head, teacher, teacher_head, kind, chunk_rows=32), hidden, head)


if __name__ == "__main__":
    parts = {"logits": logits, "sparse": sparse, "linear": linear}
    torch.manual_seed(0)
    for name in sys.argv[1:] or parts:
        parts[name]()
        print(f"{name}: done on {DEVICE}, {kullback.backend_info().name}")
