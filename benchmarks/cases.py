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

# And whether rivals are run beside (each is a compilation, and of eager the memory), and the student's noise
LOGITS = [
    *((8192, 128256, "bfloat16", kind, False, noise) for noise in (1.0, 0.03) for kind in DIVERGENCES if kind != "kl"),
    (4096, 151936, "bfloat16", "kl", False, 1.0),
    (2048, 262144, "bfloat16", "kl", False, 1.0),
    (4096, 128256, "float32", "kl", False, 1.0),
    (65536, 8192, "bfloat16", "kl", False, 1.0),
    (262144, 1000, "bfloat16", "kl", False, 1.0),
    (8192, 128256, "bfloat16", "kl", False, 0.03),
    (8192, 128256, "bfloat16", "kl", True, 1.0),
    (16384, 32000, "bfloat16", "kl", True, 1.0),
    (8192, 128256, "bfloat16", "jensen_shannon", True, 1.0),
    *(
        (*shape, "bfloat16", kind, False, 1.0)
        for shape in ((100000, 777), (3000, 249999), (3000, 50257))
        for kind in ("kl", "jensen_shannon")
    ),
]

# The torch path, forced: where CUDA's kernels and C cannot run
TORCH_KINDS = ("kl", "reverse_kl", "jensen_shannon", "total_variation")
TORCH_GPU = [(2048, 128256, dtype, kind, True, 1.0) for dtype in ("float32", "bfloat16") for kind in TORCH_KINDS]
TORCH_CPU = [(512, 49152, dtype, kind, True, 1.0) for dtype in ("float32", "bfloat16") for kind in TORCH_KINDS]

# A language model's rows: how many, of what dtype; made ones at a larger vocabulary, of some students; on whose rows
# rivals run
REAL_KINDS = ("kl", "reverse_kl", "jensen_shannon", "total_variation", "hellinger")
REAL_GPU, REAL_CPU = (16384, "bfloat16"), (512, "float32")
REAL_FLOAT32 = (8192, "float32")
WRITTEN_KINDS = ("kl", "reverse_kl", "jeffreys", "chi2", "alpha", "renyi")
MADE_GPU, MADE_CPU = (8192, 128256, "bfloat16"), None
MADE_STUDENTS = ("bits3", "pruned", "bits5", "noise5", "noise1", "identical")
REAL_RIVALS = ("pruned", "bits5")

SMALL = [(32, 10), (128, 1000), (1024, 1000)]
