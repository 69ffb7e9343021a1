"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from qiao.cli.client import DEFAULT_URL as DEFAULT_URL

Url = Annotated[str, typer.Option("--url", help="Address of a running server.")]
ModelName = Annotated[
    str | None, typer.Option("--model-name", "--model", help="Model to ask; the server's first one if not given.")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", help="Bearer key; OPENAI_API_KEY if not given.", show_default=False)
]
Quick = Annotated[str | None, typer.Option("-q", "--quick", help="Send this one text, print the answer and stop.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 takes the likeliest token; the server's default if not given.")
]
Stats = Annotated[bool, typer.Option("--stats", help="After each answer print its time and tokens on stderr.")]

PASS_THROUGH: dict[str, bool] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands whose flags are defined once, in ``qiao.server.flags``."""


def sampling(max_tokens: int | None, temperature: float | None) -> dict[str, int | float]:
    """The request's fields for what was given."""
    given = {"max_tokens": max_tokens, "temperature": temperature}
    return {name: value for name, value in given.items() if value is not None}
