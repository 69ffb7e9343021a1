"""Whether the native plugin chooses the reference plugin's tokens: greedy answers to 20 prompts, near ties listed.

    python benchmarks/greedy.py --model MODEL [--dtypes float16 bfloat16] [--tokens 64] [--json FILE]

For a 16-bit checkpoint: quantized weights are multiplied by rounded activations in the native plugin, and so differ.
Each dtype is compared with the reference plugin in the same dtype and in float32, which is nearer to what the weights
mean. An answer is compared up to where it parts, since what follows is about another text. Exit status 1 where one
parts though a side holds its own token for clearly the likelier.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from comparison.greedy import Answer, verdict
from comparison.machine import describe
from comparison.report import table
from qiao import LLM, SamplingParams

DATA = Path(__file__).parent / "data"
ENGLISH, CHINESE = 14, 6
LEAST = 40
"""Characters of a paragraph that is a prompt."""

LIKELIEST = 5


def prompts() -> list[str]:
    """The first paragraphs of both texts that are long enough."""
    found = []
    for name, count in (("en.txt", ENGLISH), ("zh.txt", CHINESE)):
        paragraphs = (DATA / name).read_text(encoding="utf-8").split("\n\n")
        found += [text.strip() for text in paragraphs if len(text.strip()) >= LEAST][:count]
    return found


def answers(model: str, device: str, dtype: str, tokens: int) -> tuple[list[Answer], dict[str, Any]]:
    """Greedy answers to all prompts in one batch, and what computed them."""
    llm = LLM(model, device=device, dtype=dtype, max_model_len=1024, kv_cache_memory_bytes=1 << 30)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=LIKELIEST)
    start = time.perf_counter()
    results = llm.generate(prompts(), params)
    facts = {"device": llm.info.device, "dtype": llm.info.dtype, "seconds": round(time.perf_counter() - start, 2)}
    found = []
    for result in results:
        (answer,) = result.outputs
        likeliest = [{i: found.logprob for i, found in one.items()} for one in answer.logprobs or []]
        found.append(Answer(list(answer.token_ids), likeliest))
    return found, facts


def render(comparisons: list[dict[str, Any]]) -> str:
    """Two tables as Markdown: the counts, and each place where answers part."""
    counts, places = [], []
    for one in comparisons:
        own, other = one["sides"]
        title = f"{own['dtype']} against {other['device'].partition(':')[0]} in {other['dtype']}"
        ties, wrong = len(one["near_ties"]), len(one["wrong"])
        counts.append(
            [title, f"{one['equal']} of {one['prompts']}", str(ties), str(wrong), str(one["compared_tokens"])]
        )
        for kind, partings in (("near tie", one["near_ties"]), ("**wrong**", one["wrong"])):
            for place in partings:
                held = [" / ".join("–" if x is None else f"{x:.4f}" for x in pair) for pair in place["logprobs"]]
                tokens = " / ".join(map(str, place["tokens"]))
                places.append([title, str(place["prompt"]), str(place["position"]), tokens, *held, kind])
    head = ("", "equal answers", "part at a near tie", "part elsewhere", "tokens compared")
    listed = ("", "prompt", "position", "tokens", "log-probabilities here", "there", "")
    return table(head, counts) + ("\n\n" + table(listed, places) if places else "")


def write(options: argparse.Namespace, comparisons: list[dict[str, Any]]) -> None:
    """The figures as JSON, and the tables as Markdown beside them."""
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "model": Path(options.model).name,
        "tokens": options.tokens,
        "machine": describe(),
        "comparisons": comparisons,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    options.json.with_suffix(".md").write_text(render(comparisons) + "\n")


def main() -> int:
    """Run all, compare, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or GGUF file with 16-bit weights")
    parser.add_argument("--devices", nargs=2, default=["cpu:0", "reference"], help="the plugin and its yardstick")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="a table goes beside it as Markdown")
    options = parser.parse_args()
    device, yardstick = options.devices
    own = {dtype: answers(options.model, device, dtype, options.tokens) for dtype in options.dtypes}
    pairs = [(dtype, "float32") for dtype in own] + [(dtype, dtype) for dtype in own]
    known, comparisons = dict[str, tuple[list[Answer], dict[str, Any]]](), list[dict[str, Any]]()
    for dtype, other in pairs:
        if other not in known:
            known[other] = answers(options.model, yardstick, other, options.tokens)
        sides = (own[dtype], known[other])
        comparisons.append({"sides": [facts for _, facts in sides], **verdict(sides[0][0], sides[1][0], dtype)})
        print(render(comparisons[-1:]), flush=True)
        if options.json:  # each time, since the next may take long
            write(options, comparisons)
    return 0 if all(one["passed"] for one in comparisons) else 1


if __name__ == "__main__":
    raise SystemExit(main())
