"""``qiao bench``: throughput and latency of a running server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated

import typer

from qiao.cli.client import Client
from qiao.cli.options import DEFAULT_URL, ApiKey, ModelName, Url
from qiao.errors import QiaoError


def bench(
    url: Url = DEFAULT_URL,
    model_name: ModelName = None,
    api_key: ApiKey = None,
    requests: Annotated[int, typer.Option("--requests", "--num-prompts", help="How many to send.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests in flight, without --rate.")] = 8,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second, Poisson arrivals.")] = None,
    input_words: Annotated[int, typer.Option("--input-words", help="Words of each prompt, about a token each.")] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Tokens of each answer.")] = 64,
    shared_words: Annotated[int, typer.Option("--shared-words", help="Words that all prompts start with.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use /chat/completions.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Load a running server and report tokens a second and percentiles of TTFT, TPOT and ITL."""
    from qiao.cli.loadgen import Load, render, run_load

    load = Load(
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        input_words=input_words,
        output_tokens=output_tokens,
        shared_words=shared_words,
        chat=chat,
        seed=seed,
    )
    key = api_key or os.environ.get("OPENAI_API_KEY")
    with Client(url, key) as client:
        base, model = client.url, client.model(model_name)
    figures = asyncio.run(run_load(base, model, key, load))
    print(json.dumps(figures, indent=2) if as_json else render(figures))
    if figures["failed"]:
        raise QiaoError(f"{figures['failed']} of {load.requests} requests failed: {figures['errors'][0]}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)
