"""The cases that the project reports: rows, vocab, dtype, form, kind."""

from kullback.divergences import DIVERGENCES

GPU = [
    *((16384, 16384, dtype, "probs", "kl") for dtype in ("float32", "bfloat16", "float16")),
    *((16384, 16384, dtype, "log_probs", "kl") for dtype in ("float32", "bfloat16", "float16")),
    *((16384, 16384, "float32", "probs", kind) for kind in DIVERGENCES if kind != "kl"),
]

CPU = [
    (4096, 4096, "float32", "probs", "kl"),
    (4096, 4096, "float32", "log_probs", "kl"),
    (4096, 4096, "bfloat16", "probs", "kl"),
    *((4096, 4096, "float32", "probs", kind) for kind in ("reverse_kl", "jensen_shannon", "total_variation")),
    (512, 32000, "float32", "logits", "kl"),
]

SMALL = [(32, 10), (128, 1000), (1024, 1000)]
