"""``qiao serve``: the OpenAI-compatible server."""

from __future__ import annotations

import typer

from qiao.cli.options import PASS_THROUGH


def serve(context: typer.Context) -> None:
    """Serve a model over the OpenAI API; `qiao serve --help` lists all flags."""
    from qiao.server.__main__ import main

    main(context.args)


def register(app: typer.Typer) -> None:
    """Add the command. Its flags, help included, are those of ``python -m qiao.server``."""
    app.command("serve", context_settings=PASS_THROUGH, add_help_option=False, options_metavar="MODEL [FLAGS]")(serve)
