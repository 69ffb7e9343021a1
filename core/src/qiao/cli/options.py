"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from qiao.cli.client import DEFAULT_URL as DEFAULT_URL
from qiao.config import EngineArgs
from qiao.server.args import ServerArgs
from qiao.server.flags import Flag, flags, values_of
from qiao.server.flagtext import FLAG_TEXT

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
TopP = Annotated[float | None, typer.Option("--top-p", help="Share of probability to draw from.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Likeliest tokens to draw from; 0 for all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Stats = Annotated[bool, typer.Option("--stats", help="After each answer print its time and tokens on stderr.")]

PASS_THROUGH: dict[str, bool] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands whose flags are defined once, in ``qiao.server.flags``."""


def sampling(**given: Any) -> dict[str, Any]:
    """The fields of ``given`` that were given."""
    return {name: value for name, value in given.items() if value not in (None, [])}


def with_engine_options(
    *names: str, server: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each of these fields of ``EngineArgs``, as ``qiao serve`` has it.

    The command takes them as ``engine``: the values that were given, by field. ``server`` names fields of
    ``ServerArgs``, which it takes as ``server``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {"engine": values_of(EngineArgs, _words({name: given.pop(name) for name in names}))}
            if server:
                made["server"] = values_of(ServerArgs, _words({name: given.pop(name) for name in server}))
            command(**given, **made)

        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [p for p in parameters if p.name not in ("engine", "server")]
        own += [_parameter(flags()[name]) for name in (*names, *server)]
        run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in own}
        return run

    return decorate


def _parameter(flag: Flag) -> inspect.Parameter:
    kinds: dict[str, Any] = {"bool": bool | None, "tuple": list[str] | None}
    spelling = f"{flag.option}/--no-{flag.option[2:]}" if flag.kind == "bool" else flag.option
    option = typer.Option(spelling, help=FLAG_TEXT[flag.name], show_default=False)
    annotation = Annotated[kinds.get(flag.kind, str | None), option]  # type: ignore[valid-type]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _words(given: dict[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words.append(f"{flags()[name].option}={str(one).lower() if isinstance(one, bool) else one}")
    return words
