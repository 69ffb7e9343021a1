"""``qiao audit``: whether an audit log is what was written."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer


def verify(
    file: Annotated[str, typer.Argument(help="The log; the files it was rotated to are found beside it.")],
    head: Annotated[
        str | None, typer.Option("--head", help="A hash that was noted earlier, which the log must still contain.")
    ] = None,
    first: Annotated[
        int, typer.Option("--first", min=1, help="The oldest line that must be there, where old files were removed.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Follow the chain of hashes: finds changed, removed, added and moved lines, and a cut off end.

    The key is read from QIAO_AUDIT_KEY. Exit status 1 where something is wrong.
    """
    from qiao.observability.audit import audit_key
    from qiao.observability.audit import verify as follow

    verdict = follow(file, audit_key(), head, first)
    if as_json:
        json.dump({"schema": 1, "file": file, "good": not verdict.problems, **dataclasses.asdict(verdict)}, sys.stdout)
        print()
    else:
        print("\n".join(verdict.problems) or f"good: lines {verdict.first} to {verdict.last}, head {verdict.head}")
    if verdict.problems:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Audit logs.")
    group.command("verify")(verify)
    group.callback()(_group)
    app.add_typer(group, name="audit")


def _group() -> None:
    """Audit logs."""
