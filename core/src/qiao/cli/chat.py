"""``qiao chat``: a conversation with a running server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from qiao.cli.client import Client, StreamStats
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


def answer(client: Client, path: str, body: dict[str, Any], show_stats: bool) -> str:
    """Print an answer while it streams and return it whole."""
    stats = StreamStats()
    parts: list[str] = []
    try:
        for text in client.stream(path, body, stats):
            parts.append(text)
            print(text, end="", flush=True)
    finally:  # an error message starts on its own line
        print(flush=True)
    if show_stats:
        print(stats.line(), file=sys.stderr)
    return "".join(parts)


def read_line(prompt: str) -> str | None:
    """One line from the user, or None at the end of input. The prompt is shown on a terminal only."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print()
        return None


def chat(
    url: Url = DEFAULT_URL,
    model_name: ModelName = None,
    api_key: ApiKey = None,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", help="First message, role system.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    quick: Quick = None,
    stats: Stats = False,
) -> None:
    """Talk to a model on a running server; an empty line or Ctrl-D ends it."""
    with Client(url, api_key) as client:
        model = client.model(model_name)
        settings = sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        messages: list[dict[str, str]] = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        while text := (quick if quick is not None else read_line("> ")):
            messages.append({"role": "user", "content": text})
            body = {"model": model, "messages": messages, **settings}
            messages.append({"role": "assistant", "content": answer(client, "/chat/completions", body, stats)})
            if quick is not None:
                break


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat")(chat)
