"""What compute-sanitizer watches (`make sanitize`): the CUDA kernels, on few rows of each sort.

    compute-sanitizer --tool memcheck python tests/sanitize.py [--share 0/16] [logits] [labels] [alone] [short] ...
    compute-sanitizer --tool racecheck python tests/sanitize.py --each-lane-arrives ...

Most of its time a compiler has: of sixteen processes each takes a sixteenth of the cases. A launch has two blocks, or
two clusters of them, so that few rows follow each other there. Values are what other tests are for; here a loss has to
be a number, so that work is known to have been done.
"""

import argparse
import itertools

import torch

import kullback
from kullback.backends.cuda import source
from kullback.backends.cuda.launch import Launcher

# Without a GPU it runs all the same, and shows that it does.
DEVICE, BACKEND = ("cuda", "cuda") if torch.cuda.is_available() else ("cpu", "c")
KINDS = ("kl", "jensen_shannon", "skew_kl", "total_variation", "renyi")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# On chip, in clusters of sixteen or eight blocks, of eight or two, and one; streamed or sixteen; short, of 32, 16 and 8
# lanes. All odd.
VOCABULARIES = (128257, 49151, 8193, 600_001, 1001, 321, 201) if DEVICE == "cuda" else (1001,)
# Of probabilities: all rows at once, rows of a block, of a warp, of eight threads, of one
LITERAL_VOCABULARIES = (4099, 1001, 33, 1) if DEVICE == "cuda" else (33,)
# Elements before a row and in all beside it: none; so many that its gradient has vectors where it has; not so many
PADDING = ((0, 0), (8, 16), (1, 3))


share = (0, 1)  # which of how many


def let_few_blocks_run():
    create = Launcher.__init__

    def create_small(self, *arguments, **options):
        create(self, *arguments, **options)
        self.blocks = min(self.blocks, 2)
        self.filling = self.config(self.blocks)

    Launcher.__init__ = create_small


# A warp's first lane says that it has read a tile, after a __syncwarp that the compiler leaves out of code where lanes
# are together anyway. racecheck then takes the other lanes' reads for unordered. Where each arrives, it cannot tell of
# one that would read on after the first has arrived. File, text, and what replaces it.
EACH_LANE_ARRIVES = (
    ("cuda/logits/pipeline.cuh", "if (group.thread % 32 == 0)\n        mbarrier_arrive", "mbarrier_arrive"),
    ("cuda/logits/kernel.cuh", "(tile.empty(), WARPS)", "(tile.empty(), 32 * WARPS)"),
    ("cuda/cross_entropy.cuh", "if (threadIdx.x % WARP == 0)\n                mbarrier_arrive", "mbarrier_arrive"),
    ("cuda/cross_entropy.cuh", "(memory.empty(stage), WARPS)", "(memory.empty(stage), 32 * WARPS)"),
)


def with_each_lane_arriving(original):
    """`source.text`, but for that: the same order, told in a way that racecheck knows."""

    def text(path):
        found = original(path)
        for name, before, after in EACH_LANE_ARRIVES:
            if path.as_posix().endswith(name):
                assert found.count(before) == 1, f"{name} has another text"
                found = found.replace(before, after)
        return found

    return text


def product(*choices):
    """Of all combinations this process's share."""
    return itertools.islice(itertools.product(*choices), share[0], None, share[1])


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def check(loss, *inputs):
    assert not loss.isnan().any()
    for gradient in torch.autograd.grad(3 * loss.sum(), inputs):
        gradient.float().sum().item()  # initcheck tells of elements that nobody wrote, where they are read


def rows(vocab, dtypes, padding=(0, 0)):
    """Far, close, close with far tokens, masked on both sides and on one, of one token; parts of longer rows."""
    y = 3 * randn(8, vocab)
    noise = randn(8, vocab) * torch.tensor([1, 1, 0.03, 0.03, 1, 1, 1, 1e-3], device=DEVICE)[:, None]
    noise[3, ::50] *= 30
    x = y + noise
    x[4, vocab // 3 :] = y[4, vocab // 3 :] = -torch.inf
    x[5, 1:9] = -torch.inf
    x[6, 3] = y[6, 3] = 60
    first, more = padding
    parts = []
    for tensor, dtype in zip((x, y), dtypes, strict=True):
        parts.append(torch.zeros(8, vocab + more, device=DEVICE, dtype=dtype)[:, first : first + vocab])
        parts[-1].copy_(tensor)
    return parts


def logits():
    weight = torch.tensor([1, 0, 2, 0.5, 1, 0, 1, 1], device=DEVICE)
    cases = [(torch.bfloat16, kind) for kind in KINDS] + [(torch.float32, kind) for kind in KINDS[:2]]
    for vocab, (dtype, kind) in product(VOCABULARIES, cases):
        for padding in reversed(PADDING):  # what follows has rows without
            x, y = rows(vocab, (dtype, dtype), padding)
            a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
            check(kullback.divergence(a, y, kind, row_weight=weight), a)
            check(kullback.divergence(a, y, kind, reduction="none"), a)
        check(kullback.divergence(a, b, kind), a, b)
        check(kullback.divergence(a, b, kind, reduction="none", row_weight=weight), a, b)
        assert not kullback.divergence(x, y, kind).isnan()
        x[1, 4], y[2, 5], x[3] = torch.inf, torch.nan, -torch.inf
        assert kullback.divergence(x, y, kind, reduction="none")[1:4].isnan().all()
    for (dtypes,) in product(((torch.bfloat16, torch.float32), (torch.float16, torch.float16))):
        x, y = rows(50257, dtypes)
        a = x.detach().requires_grad_()
        check(kullback.divergence(a, y, "kl", softcap=30.0, target_softcap=20.0, valid_vocab=50001, temperature=2.0), a)
        check(kullback.divergence(a, y.float().softmax(-1), "jensen_shannon", target_form="probs"), a)
        a = x.float().log_softmax(-1).requires_grad_()
        check(kullback.divergence(a, y, "jensen_shannon", form="log_probs", target_form="logits"), a)


def labels():
    """Labels, z-loss and statistics of rows on chip, streamed and short; a backward of its own; logits' own place."""
    weight = torch.tensor([1, 0, 2, 0.5, 1, 0, 1, 1], device=DEVICE)
    weights = {"divergence_weight": 0.5, "label_weight": 0.3, "z_weight": 1e-3}
    for vocab, kind, dtype in product(VOCABULARIES, ("kl", "jensen_shannon"), DTYPES[:2]):
        x, y = rows(vocab, (dtype, dtype))
        token = torch.arange(8, device=DEVICE) * (vocab // 8) + 2
        token[2] = -100
        a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
        with kullback.collecting_statistics():
            check(kullback.divergence(a, y, kind, labels=token, row_weight=weight, **weights), a)
            check(kullback.divergence(a, b, kind, labels=token, reduction="none", **weights), a, b)
            check(kullback.divergence(a * 1, y, kind, labels=token, inplace=True, **weights), a)
        check(kullback.divergence(a, y, kind, labels=token, label_smoothing=0.1, **weights), a)
        check(kullback.divergence(a, b, kind, labels=token, label_smoothing=0.1, reduction="none", **weights), a, b)


def alone():
    """Labels without a teacher: rows of a warp, of a block, of clusters."""
    weight = torch.tensor([1, 0, 2, 0.5, 1, 0, 1, 1], device=DEVICE)
    for vocab, padding in product(VOCABULARIES, (PADDING[0], PADDING[-1])):
        a = rows(vocab, DTYPES[:2], padding)[0].requires_grad_()
        token = torch.arange(8, device=DEVICE) * (vocab // 8) + 2
        token[2] = -100
        for reduction, smoothing in itertools.product(("mean", "none"), (0.0, 0.1)):
            options = {"z_weight": 1e-3, "label_smoothing": smoothing, "reduction": reduction}
            check(kullback.divergence(a, None, labels=token, row_weight=weight, **options), a)


def short():
    """More rows than are in flight at once: each is copied to the chip while the one before is worked on."""
    weight = torch.arange(300, device=DEVICE) % 5
    for vocab, kind in product((1001, 777, 321, 201), ("kl", "jensen_shannon", "total_variation")):
        y = 3 * randn(len(weight), vocab)
        x, y = (y + torch.randn_like(y)).bfloat16().requires_grad_(), y.bfloat16()
        check(kullback.divergence(x, y, kind, row_weight=weight), x)


def literal():
    """Probabilities and their logarithms."""
    for vocab, dtype, form in product(LITERAL_VOCABULARIES, DTYPES, ("probs", "log_probs")):
        x, y = (t.softmax(-1) if form == "probs" else t.log_softmax(-1) for t in randn(2, 8, vocab))
        a, b = x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()
        for kind in ("kl", "renyi"):
            check(kullback.divergence(a, y.to(dtype), kind, form=form), a)
            check(kullback.divergence(a, b, kind, form=form, reduction="none"), a, b)
        a = x.to(dtype)[1:, vocab // 2 :].detach().requires_grad_()
        check(kullback.divergence(a, y.to(dtype)[1:, vocab // 2 :], "kl", form=form), a)


def topk():
    forms, tails = ("log_probs", "probs", "logits"), ("bucket", "renormalize", "zero")
    for dtype, form, tail in product(DTYPES, forms, tails):
        if form == "logits" and tail == "bucket":
            continue
        x = randn(9, 4103).to(dtype)[1:, 1:].requires_grad_()
        # distinct but for a repeated and an absent one
        ids = (torch.arange(16, device=DEVICE) * 101 + torch.arange(8, device=DEVICE)[:, None] * 7) % 4102
        ids[2, 3], ids[4, 5] = ids[2, 2], -1
        values = randn(8, 20)
        values = values if form == "logits" else values.softmax(-1) if form == "probs" else values.log_softmax(-1)
        teacher = values[:, :16].to(dtype), ids, "kl"
        check(kullback.topk_divergence(x, *teacher, target_form=form, tail=tail), x)
        label = torch.arange(8, device=DEVICE)
        check(kullback.topk_divergence(x, *teacher, target_form=form, tail=tail, labels=label, label_smoothing=0.1), x)


def describe():
    """Rows whose sides begin at unlike elements, too; capped logits; one side alone."""
    for vocab, dtype, (first, more) in product((50257, 1001, 3), DTYPES, PADDING):
        x, y = rows(max(vocab, 9), (dtype, dtype), (first, more))
        label = torch.arange(8, device=DEVICE)
        label[3] = -100
        for other in (y, y.contiguous(), None):
            found = kullback.row_statistics(x, other, label, softcap=30.0 if more == 3 else None)
            assert not found.entropy[:4].isnan().any()


def linear():
    """Not for initcheck, which does not see that cuBLAS writes by bulk stores."""
    for (kind,) in product(KINDS[:2]):
        hidden, head = randn(70, 64).bfloat16().requires_grad_(), randn(4099, 64).bfloat16().requires_grad_()
        teacher, teacher_head = randn(70, 96).bfloat16(), randn(4099, 96).bfloat16()
        check(kullback.linear_divergence(hidden, head, teacher, teacher_head, kind, chunk_rows=32), hidden, head)


if __name__ == "__main__":
    parts = {
        "logits": logits,
        "labels": labels,
        "alone": alone,
        "short": short,
        "literal": literal,
        "topk": topk,
        "describe": describe,
        "linear": linear,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--share", default="0/1", help="which of how many: 0/16 to 15/16")
    parser.add_argument(
        "--each-lane-arrives", action="store_true", help="for racecheck, which else reports what is none"
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; by default all")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - parts.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(parts)}")
    share = tuple(map(int, arguments.share.split("/")))
    let_few_blocks_run()
    if arguments.each_lane_arrives:
        source.text = with_each_lane_arriving(source.text)
    torch.manual_seed(0)
    with kullback.backend(BACKEND):
        for name in arguments.parts or parts:
            parts[name]()
            print(f"{name}: done on {DEVICE}, {kullback.backend_info().name}")
