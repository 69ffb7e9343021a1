"""``qiao run-batch``: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from qiao.cli.options import PASS_THROUGH, AsJson, with_engine_options
from qiao.config import EngineArgs
from qiao.errors import ParameterError, QiaoError
from qiao.server.flags import values_of

ENGINE = tuple(field.name for field in fields(EngineArgs) if field.name != "model")


SERVER = (
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
    *("chat_template_content_format", "default_chat_template_kwargs", "response_role"),
)
"""The server's options that change an answer."""


class _Advance(Protocol):
    def __call__(self, good: bool) -> None: ...


@with_engine_options(*ENGINE, server=SERVER)
def run_batch(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Folder, GGUF file, hub name or pypi:PACKAGE.")],
    input_file: Annotated[Path, typer.Option("-i", "--input-file", help="JSONL of requests, as OpenAI's batches.")],
    output_file: Annotated[Path, typer.Option("-o", "--output-file", help="JSONL of answers; gone on with if there.")],
    engine: dict[str, Any],
    server: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Answer every request of a JSONL file with MODEL; a run that was killed goes on where it stopped.

    Flags of vLLM that are not listed are taken as `qiao serve` takes them.
    """
    from qiao.server import batch

    engine = {**values_of(EngineArgs, context.args), **engine}
    if "model" in engine:
        raise ParameterError(engine["model"], "is one word too many; flags start with --")
    requests = batch.read_requests(input_file)
    done = batch.answered(output_file, requests)
    todo = [line for line in requests if line.custom_id not in done]
    figures = {"requests": len(requests), "answered_before": len(done), "answered": 0, "failed": 0}
    if todo:
        args, answers = EngineArgs(model=model, **engine), batch.server_args(**server)
        try:
            batch.rewrite(output_file, done)
        except OSError as error:
            raise QiaoError(f"{output_file}: {error.strerror}; choose a file that can be written") from None
        with _progress(len(requests), len(done), figures) as advance:
            asyncio.run(batch.run_batch(args, answers, todo, output_file, advance))
    print(json.dumps(figures) if as_json else _text(figures, output_file))
    if figures["failed"]:
        raise QiaoError(f"{figures['failed']} of {len(requests)} requests failed; their answers say why. Run it again")


def _text(figures: dict[str, int], output: Path) -> str:
    before = f", {figures['answered_before']} of them in an earlier run" if figures["answered_before"] else ""
    good = figures["answered"] + figures["answered_before"]
    return f"{good} of {figures['requests']} requests answered{before}; {output} has the answers"


@contextmanager
def _progress(total: int, done: int, figures: dict[str, int]) -> Iterator[_Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Requests", total=total, completed=done)

        def advance(good: bool) -> None:
            figures["answered" if good else "failed"] += 1
            bar.update(task, advance=1, description=f"Requests ({figures['failed']} failed)")

        yield advance


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run-batch", context_settings=PASS_THROUGH)(run_batch)
