"""The ``qiao`` command: assembles the subcommands and turns Qiao's own errors into one message and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from qiao.errors import QiaoError, UsageError

COMMANDS = (
    *("serve", "engine", "chat", "complete", "run", "plan", "plugins", "plugin", "conformance"),
    *("doctor", "run_batch", "bench", "quantize", "regress", "cache", "keys", "audit"),
)
"""Modules of ``qiao.cli`` in the order of the help text. Each imports what is heavy inside its command only."""


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"qiao {version('qiao')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Serve large language models on whatever accelerator a machine has."""


def build_app() -> typer.Typer:
    """The command line with every subcommand registered. Imports neither torch nor a plugin."""
    app = typer.Typer(
        name="qiao",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in COMMANDS:
        import_module(f"qiao.cli.{name}").register(app)
    return app


def exit_status(error: QiaoError) -> int:
    """2 for what the caller can mend, else 1."""
    return 2 if isinstance(error, UsageError) else 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line on ``argv`` (default: the process's own) and exit.

    A ``QiaoError`` becomes its message on stderr and exit status 2 (``UsageError``) or 1; with ``QIAO_DEBUG=1``
    its traceback is shown too. Anything else is a bug and keeps its traceback. ``serve`` takes its words as they are,
    so that a server does not hold what only the other commands import.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["serve"]:
            from qiao.server.__main__ import main as serve

            serve(words[1:])
            raise SystemExit
        build_app()(args=words, prog_name="qiao")
    except QiaoError as error:
        if os.environ.get("QIAO_DEBUG") == "1":
            raise
        print(f"qiao: {error}", file=sys.stderr)
        raise SystemExit(exit_status(error)) from None


if __name__ == "__main__":
    main()
