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

CODE = """def total(items, rate):
    result = 0
    for item in items:
        if item.price < 0:
            raise ValueError("a price is below zero")
        result += item.price * item.count
    tax = result * rate
    print(f"items: {len(items)}, tax: {tax}")
    return result + tax
"""
ARTICLE = (
    "The Grand Canal of China is the longest canal in the world. Its oldest parts date from the fifth century BC, "
    "and the parts were joined during the Sui dynasty. The canal starts in Beijing and passes through Tianjin and "
    "the provinces of Hebei, Shandong, Jiangsu and Zhejiang to the city of Hangzhou, linking the Yellow River and "
    "the Yangtze River. Its length is 1,776 kilometres. Its greatest height is reached in the mountains of "
    "Shandong, at a summit of 42 metres. Ships did not have trouble reaching higher places after the pound lock "
    "was invented in the tenth century by the engineer Qiao Weiyue. The canal was admired by many throughout "
    "history, among them the Japanese monk Ennin, the Persian historian Rashid al-Din and the Italian missionary "
    "Matteo Ricci."
)
CHATS = {
    "code edit": "Rename the variable `result` to `amount` in this Python function. "
    f"Answer with the whole function.\n\n{CODE}",
    "summary": f"Summarize this text in four sentences.\n\n{ARTICLE}",
    "counting": "Count from 1 to 60, one number a line, in the form 'number N is followed by number N + 1'.",
    "free text": "Explain in a few sentences how rain forms, and why some deserts get so little of it.",
}
"""Code edit and summary quote their prompt. Whether the others repeat themselves is the model's doing: the share of
guesses that come true says it."""


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


def plot(cells: list[dict[str, Any]], file: Path) -> None:
    """How many times as fast each kind of guesses is as none, for each prompt and number of streams."""
    from matplotlib.figure import Figure

    streams = sorted({cell["streams"] for cell in cells})
    kinds = list(dict.fromkeys(cell["prompt"] for cell in cells))
    rates = {(cell["streams"], cell["prompt"], cell["speculation"]): cell["tokens_per_second"] for cell in cells}
    names = [name for name in dict.fromkeys(cell["speculation"] for cell in cells) if name != "none"]
    figure = Figure(figsize=(4.5 * len(streams), 3.6), layout="constrained")
    for axes, count in zip(figure.subplots(1, len(streams), sharey=True, squeeze=False)[0], streams, strict=True):
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            heights = [rates[count, kind, name] / rates[count, kind, "none"] for kind in kinds]
            axes.bar([j + (i + 0.5) * width - 0.4 for j in range(len(kinds))], heights, width * 0.95, label=name)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set(title=f"{count} stream{'s' if count > 1 else ''}", ylabel="times as fast as without guesses")
    axes.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", nargs="+", choices=tuple(CHATS), default=list(CHATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = {"max_model_len": 2048, "num_gpu_blocks_override": 1024, "enable_prefix_caching": False}
    engines = {n: LLM(options.model, speculative_config=c, **size) for n, c in configurations(options.draft).items()}
    cells = [(streams, kind, name) for streams in options.streams for kind in options.prompts for name in engines]
    runs: dict[tuple[int, str, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for _, (streams, kind, name) in track([(i, cell) for i in range(options.rounds) for cell in cells], "Measuring"):
        runs[streams, kind, name].append(measure(engines[name], CHATS[kind], options.tokens, streams))
    report = [
        {"streams": s, "prompt": k, "speculation": n, **summary(runs[s, k, n], runs[s, k, "none"])} for s, k, n in cells
    ]
    head = ("streams", "prompt", "guesses", "tokens/s", "range", "tokens a step", "accepted", "equal first tokens")
    print(table(head, [[str(value) for value in row.values()] for row in report]))
    if options.json:
        facts = {"date": time.strftime("%Y-%m-%d"), "model": named(options.model), "machine": describe()}
        if options.draft:
            facts["draft"] = named(options.draft)
        more = {"tokens": options.tokens, "rounds": options.rounds, "cells": report}
        options.json.write_text(json.dumps({**facts, **more}, indent=1) + "\n")
        plot(report, options.json.with_suffix(".png"))


def named(model: str) -> str:
    """The last two parts of a path."""
    return "/".join(Path(model).parts[-2:])


if __name__ == "__main__":
    main()
