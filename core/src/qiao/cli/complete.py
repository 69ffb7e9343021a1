"""``qiao complete``: continue text with a running server."""

from __future__ import annotations

import typer

from qiao.cli.chat import answer, read_line
from qiao.cli.client import Client
from qiao.cli.options import (
    DEFAULT_URL,
    ApiKey,
    MaxTokens,
    ModelName,
    Quick,
    Seed,
    Stats,
    Stop,
    Temperature,
    TopK,
    TopP,
    Url,
    sampling,
)


def complete(
    url: Url = DEFAULT_URL,
    model_name: ModelName = None,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    quick: Quick = None,
    stats: Stats = False,
) -> None:
    """Continue a text, without a chat template; an empty line or Ctrl-D ends it."""
    with Client(url, api_key) as client:
        model = client.model(model_name)
        settings = sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        while text := (quick if quick is not None else read_line("> ")):
            body = {"model": model, "prompt": text, **settings}
            answer(client, "/completions", body, stats)
            if quick is not None:
                break


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("complete")(complete)
