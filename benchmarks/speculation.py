"""What guessing ahead brings: tokens a second with and without it, on prompts that repeat themselves and on others.

    python benchmarks/speculation.py --model MODEL [--draft SMALLER] [--tokens 128] [--rounds 3] [--json FILE]

All engines are built first and take turns, so that a change of the machine's speed meets each. Greedy answers of each
are compared with those without guesses; where they part, the kernels' rounding has turned a near tie.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from comparison.machine import describe
from comparison.report import table
from qiao import LLM, SamplingParams
from rich.progress import track

LIST = "\n".join(f"  {{'name': 'item_{i}', 'price': {i * 3}, 'stock': {i * 7}, 'sold': false}}," for i in range(12))
CHATS = {
    "repeats its prompt": f"Write this Python list again, unchanged:\n\n[\n{LIST}\n]",
    "repeats itself": "Count from 1 to 60, one number a line, in the form 'number N is followed by number N + 1'.",
    "free text": "Explain in a few sentences how rain forms, and why some deserts get so little of it.",
}


def configurations(draft: str | None) -> dict[str, dict[str, Any]]:
    """``speculative_config`` by name."""
    found: dict[str, dict[str, Any]] = {"none": {}}
    for tokens in (3, 7):
        lookup = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        found[f"ngram, {tokens} tokens"] = lookup
    if draft is not None:
        found["draft model, 3 tokens"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    return found


def measure(llm: LLM, chat: str, tokens: int, streams: int) -> dict[str, Any]:
    """Tokens a second of decode steps, as they come, and how many guesses came true."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before = llm.get_metrics()
    start = time.perf_counter()
    results = llm.chat([[{"role": "user", "content": chat}]] * streams, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    after = llm.get_metrics()
    drafted, steps = after.draft_tokens - before.draft_tokens, after.steps - before.steps
    return {
        "tokens_per_second": streams * tokens / seconds,
        "tokens_per_step": streams * tokens / steps,
        "accepted": (after.accepted_tokens - before.accepted_tokens) / drafted if drafted else None,
        "answer": list(results[0].outputs[0].token_ids),
    }


def summary(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; ``same_tokens`` is how many of the first tokens equal those without guesses."""
    pairs = zip(runs[0]["answer"], plain[0]["answer"], strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain[0]["answer"]))
    rates = [run["tokens_per_second"] for run in runs]
    return {
        "tokens_per_second": round(statistics.median(rates), 1),
        "range": [round(min(rates), 1), round(max(rates), 1)],
        "tokens_per_step": round(runs[0]["tokens_per_step"], 2),
        "accepted": runs[0]["accepted"] and round(runs[0]["accepted"], 3),
        "same_tokens": same,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = {"max_model_len": 2048, "num_gpu_blocks_override": 1024, "enable_prefix_caching": False}
    engines = {n: LLM(options.model, speculative_config=c, **size) for n, c in configurations(options.draft).items()}
    cells = [(streams, kind, name) for streams in options.streams for kind in CHATS for name in engines]
    runs: dict[tuple[int, str, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for _, (streams, kind, name) in track([(i, cell) for i in range(options.rounds) for cell in cells], "Measuring"):
        runs[streams, kind, name].append(measure(engines[name], CHATS[kind], options.tokens, streams))
    report = [
        {"streams": s, "prompt": k, "speculation": n, **summary(runs[s, k, n], runs[s, k, "none"])} for s, k, n in cells
    ]
    head = ("streams", "prompt", "guesses", "tokens/s", "range", "tokens a step", "accepted", "equal first tokens")
    print(table(head, [[str(value) for value in row.values()] for row in report]))
    if options.json:
        facts = {"date": time.strftime("%Y-%m-%d"), "model": Path(options.model).name, "machine": describe()}
        options.json.write_text(json.dumps({**facts, "tokens": options.tokens, "cells": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
