"""``qiao run``: one answer from a model in this process, without a server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qiao.cli.options import AsJson, Seed, Stop, TopK, TopP, sampling, with_engine_options
from qiao.config import EngineArgs

if TYPE_CHECKING:
    from qiao import RequestOutput

SERVING = (
    *("model", "seed", "served_model_name", "max_num_queued_reqs", "scheduling_policy", "tpot_target_ms"),
    *("enable_prefix_caching", "max_logprobs", "check_integrity", "long_prefill_token_threshold"),
)
"""Fields that mean nothing for one request; ``model`` is an argument and ``seed`` the request's own."""

ENGINE = tuple(field.name for field in fields(EngineArgs) if field.name not in SERVING)


@with_engine_options(*ENGINE)
def run(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub name or pypi:PACKAGE.")],
    prompt: Annotated[str, typer.Argument(help="The user's message, or with --raw the text to continue.")],
    engine: dict[str, Any],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer PROMPT with MODEL here and now, and print the answer while it is made."""
    from qiao import LLM, RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        output_kind=RequestOutputKind.DELTA,
        **sampling(top_p=top_p, top_k=top_k, seed=seed, stop=stop),
    )
    llm = LLM(model=model, **engine)
    messages = [{"role": "user", "content": prompt}]
    results = llm.stream(prompt, params) if raw else llm.stream_chat(messages, params)
    if as_json:
        print(json.dumps(_figures(results), ensure_ascii=False))
        return
    try:
        for result in results:
            print(result.outputs[0].text, end="", flush=True)
    finally:
        print(flush=True)


def _figures(results: Iterator[RequestOutput]) -> dict[str, Any]:
    """The answer with its size and pace; ``ttft`` and ``seconds`` from the moment that the prompt is taken."""
    start = time.perf_counter()
    text, tokens, first, reason, prompt_tokens = "", 0, None, None, 0
    for result in results:
        answer = result.outputs[0]
        first = time.perf_counter() - start if first is None else first
        text, tokens, reason = text + answer.text, tokens + len(answer.token_ids), answer.finish_reason
        prompt_tokens = len(result.prompt_token_ids or ())
    return {
        "text": text,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "ttft": first,
        "seconds": time.perf_counter() - start,
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)
