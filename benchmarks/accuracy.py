"""What 4 bits cost: KL divergence and top-1 agreement with 16 bits, Qiao beside llama.cpp, on the same weights.

    python benchmarks/peers.py setup --peers qiao,llama.cpp --sizes 135m   # once
    python benchmarks/accuracy.py --json results/accuracy.json

SmolLM2-135M as GGUF F16 and, made from it by llama-quantize, Q4_0 and Q4_1. The distributions over the whole vocabulary
are compared at the second half of each chunk of 512 tokens, as ``llama-perplexity --kl-divergence`` does. The rows
"weights only" run the same 4-bit weights in float32 without rounding activations: what the others have above them is
the kernels' own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from comparison.divergence import Totals, chunks_of, parse_llama, scored
from comparison.machine import describe
from comparison.pins import Place
from comparison.report import table
from qiao import LLM
from tokenizers import Tokenizer

DATA = Path(__file__).parent / "data"
CHUNK = 512


class Scorer:
    """A model under Qiao's operators that gives the logits of whole chunks."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        """Load ``model``; ``arguments`` are those of ``LLM``."""
        self._llm = LLM(str(model), device="cpu", max_model_len=CHUNK, kv_cache_memory_bytes=1 << 28, **arguments)
        self.dtype = self._llm.info.dtype

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 logits [N, V] at the positions of the chunk that count."""
        places = scored(len(tokens))
        return torch.cat(list(self._llm.token_logits(tokens, places.start)))[: places.stop - places.start]


def qiao_rows(place: Place, kinds: list[str], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Qiao's figures of each kind, as it runs them and with only the weights rounded."""
    chunks = list(chunks_of(tokens, CHUNK))
    base = Scorer(place.model("135m", "f16.gguf"))
    logits = [base.logits(chunk) for chunk in chunks]
    for kind in kinds:
        path = place.model("135m", f"{kind}.gguf")
        for title, arguments in (
            ("qiao", {"dtype": base.dtype}),
            ("qiao, weights only", {"dtype": "float32", "quantization": "none"}),
        ):
            scorer, found = Scorer(path, **arguments), Totals()
            for chunk, expected in zip(chunks, logits, strict=True):
                targets = torch.tensor(chunk)[scored(CHUNK).start + 1 :]
                found.add(expected, scorer.logits(chunk), targets)
            yield {"engine": title, "kind": kind, "dtype": scorer.dtype, **found.figures()}


def llama_rows(place: Place, kinds: list[str], text: Path, threads: int) -> Iterator[dict[str, Any]]:
    """llama.cpp's figures of each kind, by its own tool."""
    tool = [str(place.llama_tool("llama-perplexity")), "-c", str(CHUNK), "-t", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        logits = ["--kl-divergence-base", f"{folder}/base"]
        subprocess.run(
            [*tool, "-m", place.model("135m", "f16.gguf"), "-f", text, *logits], check=True, capture_output=True
        )
        for kind in kinds:
            model = place.model("135m", f"{kind}.gguf")
            done = subprocess.run(
                [*tool, "-m", model, *logits, "--kl-divergence"], check=True, capture_output=True, text=True
            )
            yield {"engine": "llama.cpp", "kind": kind, **parse_llama(done.stdout + done.stderr)}


def render(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    head = ("", "KL to 16 bits", "median", "99 %", "same first token", "perplexity", "at 16 bits")
    lines = []
    for row in sorted(rows, key=lambda row: (row["kind"], row["engine"])):
        kl = f"{row['kl']:.4f} ± {row['kl_error']:.4f}"
        middle = [f"{row[name]:.4f}" for name in ("kl_median", "kl_p99")]
        rest = [f"{row['same_top']:.1f} %", f"{row['perplexity']:.2f}", f"{row['base_perplexity']:.2f}"]
        lines.append([f"{row['kind'].upper()}, {row['engine']}", kl, *middle, *rest])
    return table(head, lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", help="where `peers.py setup` put the models; ~/.cache/qiao-bench if not given")
    parser.add_argument("--kinds", default="q4_0,q4_1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without-llama", action="store_true", help="Qiao's rows only")
    parser.add_argument("--json", type=Path, default=Path("results/accuracy.json"))
    asked = parser.parse_args()
    cache, kinds = Place.of(asked.cache), asked.kinds.split(",")
    torch.set_num_threads(asked.threads)
    text = "".join((DATA / name).read_text() for name in ("en.txt", "zh.txt"))
    tokens = Tokenizer.from_file(str(cache.model("135m", "hf") / "tokenizer.json")).encode(text).ids
    with torch.inference_mode():
        rows = list(qiao_rows(cache, kinds, tokens))
    if not asked.without_llama:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            rows += llama_rows(cache, kinds, Path(file.name), asked.threads)
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "tokens": len(tokens),
        "chunk": CHUNK,
        "rows": rows,
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(data, indent=1) + "\n")
    asked.json.with_suffix(".md").write_text(render(rows) + "\n")
    print(render(rows))


if __name__ == "__main__":
    main()
