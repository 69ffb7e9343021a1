"""``qiao regress``: does a candidate still answer as its base, on the user's own prompts, yes or no."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qiao.cli.doctor import language_of
from qiao.errors import ParameterError, QiaoError, UsageError

if TYPE_CHECKING:
    from qiao.config import EngineArgs
    from qiao.regress.run import Advance

CANNOT_RUN = 2
"""Exit status where there is no verdict, whatever the reason: a broken threshold is 1, and must not be mistaken."""

_MODEL = (
    "Model, then settings as qiao serve names them: PATH[,device=cpu][,plugin=NAME][,quantization=none]"
    "[,kv-cache-dtype=int8][,dtype=float32]..."
)


def spec(text: str) -> EngineArgs:
    """``PATH,name=value,...`` as engine arguments; ``plugin`` is another word for ``device``.

    A comma that no ``name=`` follows belongs to the value before it. Raises ``ParameterError`` naming the setting.
    """
    from qiao.config import EngineArgs
    from qiao.server.flags import flags, parse

    model, *settings = re.split(r",(?=[a-zA-Z][\w.-]*=)", text)
    known = flags()
    words = [model]
    for setting in settings:
        name, _, value = setting.partition("=")
        name = "device" if name == "plugin" else name
        flag = known.get(name.replace("-", "_").partition(".")[0])
        if name == "model" or (flag is not None and flag.owner is not EngineArgs):
            raise ParameterError(name, f"is no setting of a model; in {text!r}")
        words.append(f"--{name}={value}")
    return parse(words).engine


@contextmanager
def _bars(language: str) -> Iterator[Advance]:
    """Progress on stderr, one bar a stage; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from qiao.regress.page import texts_of

    say = texts_of(language)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(say[f"stage.{stage}"], total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield advance


def regress(
    base: Annotated[str, typer.Argument(metavar="BASE", help=_MODEL)],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="As BASE.")],
    suite: Annotated[str, typer.Option("--suite", help="en, zh, or a file of JSON lines.")],
    threshold: Annotated[
        list[str] | None,
        typer.Option("--threshold", help="'TAG: METRIC LIMIT', over the suite's own; repeatable; tag all is all."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Compare answers alone, for other vocabularies.")
    ] = False,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", help="Folder for the base's logits while the candidate runs.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything found as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as one page.")] = None,
    lang: Annotated[str | None, typer.Option("--lang", help="zh or en; the locale's if not given.")] = None,
) -> None:
    """Compare CANDIDATE with BASE on the suite's prompts and judge it by the thresholds.

    Exit status 0: all thresholds hold. 1: one is broken. 2: there is no verdict.
    """
    asked = _Asked(base, candidate, suite, tuple(threshold or ()), max_tokens, text_only, scratch, json_file, html_file)
    try:
        passes = _run(asked, lang or language_of(os.environ))
    except QiaoError as error:
        if os.environ.get("QIAO_DEBUG") == "1":
            traceback.print_exc()
        print(f"qiao: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_RUN) from None
    except Exception:  # a bug must not read as a broken threshold
        traceback.print_exc()
        raise typer.Exit(CANNOT_RUN) from None
    raise typer.Exit(0 if passes else 1)


@dataclass(frozen=True)
class _Asked:
    base: str
    candidate: str
    suite: str
    thresholds: tuple[str, ...]
    max_tokens: int | None
    text_only: bool
    scratch: Path | None
    json: Path | None
    html: Path | None


def _run(asked: _Asked, language: str) -> bool:
    from qiao.regress import Options, compare, load_suite, make_report, parse_thresholds, usable
    from qiao.regress.page import render, texts_of

    texts_of(language)
    suite = load_suite(asked.suite)
    if asked.max_tokens is not None:
        suite = suite.limited(asked.max_tokens)
    thresholds = parse_thresholds([*suite.header.thresholds, *asked.thresholds])
    judged, left_out = usable(thresholds, suite, asked.text_only)
    models = spec(asked.base), spec(asked.candidate)
    _check_places(asked)
    with _bars(language) as advance:
        options = Options(text_only=asked.text_only, scratch=asked.scratch, advance=advance)
        report = make_report(compare(*models, suite, options), judged, left_out)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if asked.html is not None:
        asked.html.write_text(render(report, language), encoding="utf-8")
    _show(report, texts_of(language))
    return bool(report["passes"])


def _check_places(asked: _Asked) -> None:
    """Find now, and not after an hour, that there is no place for the results."""
    for file in (asked.json, asked.html):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise UsageError(f"{file}: cannot be written; make the folder {file.absolute().parent}, or name another")
    if asked.scratch is not None and not asked.scratch.is_dir():
        raise ParameterError("--scratch", f"{asked.scratch} is not a folder")


def _show(report: dict[str, Any], say: dict[str, str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qiao.regress.report import label, tag_rows, with_interval

    title = Text(f"{label(report['base'])} → {label(report['candidate'])}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = tag_rows(report, intervals=False)
    for row in rows:  # what fits in 80 columns
        del row["kl_p99"]
    for name in rows[0]:
        table.add_column(say[f"short.{name}"], no_wrap=True)
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))
    console = Console()
    console.print(table)
    for note in report["notes"]:
        console.print(Text(say[f"note.{note['key']}"].format(**note["values"])))
    for text in report["not_judged"]:
        console.print(Text(f"{text}: {say['not_judged']}"))
    for verdict in report["verdicts"]:
        state = say["holds"] if verdict["holds"] else say["broken"]
        close = f" {say['close']}" if verdict["close"] else ""
        line = f"{verdict['threshold']}: {with_interval(verdict, '.4g')}, {state}.{close}"
        console.print(Text(line, style="" if verdict["holds"] else "bold red"))
    word, style = ("pass", "bold green") if report["passes"] else ("fail", "bold red")
    console.print(Text(say[word], style=style))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("regress")(regress)
