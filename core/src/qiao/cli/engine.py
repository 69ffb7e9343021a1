"""``qiao engine``: an engine alone, for front ends on other hosts, and the keys that both sides need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qiao.cli.options import PASS_THROUGH, AsJson


def engine(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="What to serve, as for `qiao serve`.")],
    listen: Annotated[str, typer.Option("--listen", help="tcp://HOST:PORT; tcp://0.0.0.0:PORT for all addresses.")],
    keys: Annotated[Path, typer.Option("--engine-keys", help="Folder with the key files of `qiao engine-keys`.")],
    timeout: Annotated[
        float, typer.Option("--shutdown-timeout", help="Seconds that SIGTERM lets running requests go on.")
    ] = 30.0,
    log_level: Annotated[str, typer.Option("--log-level", help="critical, error, warning, info or debug.")] = "info",
) -> None:
    """Serve a model to front ends on other hosts (`qiao serve --engine`); takes the engine flags of `qiao serve` too.

    The connection is encrypted, and both sides know each other by their keys.
    """
    from qiao.config import EngineArgs
    from qiao.server.engine_host import host_engine
    from qiao.server.flags import values_of

    args = EngineArgs(**{**values_of(EngineArgs, context.args), "model": model})
    raise SystemExit(host_engine(args, listen, keys, timeout, log_level))


def engine_keys(
    folder: Annotated[Path, typer.Argument(help="A folder for the four files.")], as_json: AsJson = False
) -> None:
    """Make the keys by which engines and front ends on different hosts know each other."""
    from qiao.transport.curve import make_keys

    made = make_keys(folder)
    if as_json:
        print(json.dumps([str(path) for path in made]))
        return
    print("\n".join(map(str, made)))
    print(
        f"Copy {folder} to the engines' hosts and to the front ends'. Engines need engine.key_secret and gateway.key, "
        "front ends gateway.key_secret and engine.key; keep the secret ones secret."
    )


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command("engine", context_settings=PASS_THROUGH)(engine)
    app.command("engine-keys")(engine_keys)
