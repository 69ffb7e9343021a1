"""Whether the native plugin chooses the reference plugin's tokens: greedy answers to 20 prompts, near ties listed.

    python benchmarks/greedy.py --model MODEL [--dtype float16] [--yardstick-dtype float32] [--tokens 64] [--json FILE]

For a 16-bit checkpoint: quantized weights are multiplied by rounded activations in the native plugin, and so differ.
The yardstick computes in the same dtype unless told otherwise; plain torch is slow in 16 bits on many processors, and
in float32 it is nearer to what the weights mean. An answer is compared up to where it parts, since what follows is
about another text. Exit status 1 where one parts though a side holds its own token for clearly the likelier.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from comparison.greedy import Answer, verdict
from comparison.machine import describe
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


def main() -> int:
    """Run both, compare, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or GGUF file with 16-bit weights")
    parser.add_argument("--devices", nargs=2, default=["cpu:0", "reference"], help="the plugin and its yardstick")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--yardstick-dtype", help="the same as --dtype if not given")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (first, own), (second, other) = (
        answers(options.model, device, dtype, options.tokens)
        for device, dtype in zip(
            options.devices, (options.dtype, options.yardstick_dtype or options.dtype), strict=True
        )
    )
    found = {
        "model": Path(options.model).name,
        "tokens": options.tokens,
        "sides": [own, other],
        "machine": describe(),
        **verdict(first, second, options.dtype),
    }
    text = json.dumps(found, indent=2, ensure_ascii=False)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    print(
        f"{found['equal']} of {found['prompts']} answers are equal, {len(found['near_ties'])} part at a near tie, "
        f"{len(found['wrong'])} elsewhere; {found['compared_tokens']} tokens compared"
    )
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
