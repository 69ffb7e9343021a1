"""``qiao conformance``: the kit of the package qiao-conformance, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from qiao.errors import PluginError

KIT = "qiao_conformance"


def conformance(
    device: Annotated[str, typer.Argument(help="Plugin, or one device of it as NAME:INDEX.")],
    level: Annotated[
        str,
        typer.Option(
            "--level",
            help="How the device is there: device, vendor-host, compiled, interpreted, stand-in; after a comma "
            "HOOK=LEVEL where a hook is there in another way.",
        ),
    ] = "device",
    select: Annotated[str, typer.Option("--select", help="Only checks whose names match, as pytest's -k.")] = "",
    examples: Annotated[int, typer.Option("--examples", min=1, help="Drawn cases for each hook.")] = 25,
    performance: Annotated[bool, typer.Option("--performance", help="Measure each hook as well.")] = False,
    coverage: Annotated[Path | None, typer.Option("--coverage", help="Write what holds to this coverage.json.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Pack a .zip that can go with an issue.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run as JSON.")] = False,
) -> None:
    """Check each hook of a plugin against the contract, on this machine's device.

    The same as pytest --qiao-device NAME. Exit status 0 where all checks passed, 1 where one failed, 2 where the device
    cannot be tested.
    """
    if find_spec(KIT) is None:
        raise PluginError("the conformance kit is not installed: pip install qiao-conformance")
    options = [device, f"--level={level}", f"--select={select}", f"--examples={examples}"]
    options += [f"--coverage={coverage}"] if coverage else []
    options += [f"--report={report}"] if report else []
    options += ["--performance"] if performance else []
    options += ["--json"] if as_json else []
    raise typer.Exit(run(options))


def run(options: list[str]) -> int:
    """Run the kit; a vendor's library may bring its process down, and then the check that was running is named.

    Returns the kit's exit status. Raises ``PluginError`` where a signal ended it.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "running"
        command = [sys.executable, "-m", KIT, *options, f"--trace={trace}"]
        status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own module and the user's own words
        if status >= 0:
            return status
        running = trace.read_text(encoding="utf-8") if trace.exists() else "the start"
        raise PluginError(f"{signal.Signals(-status).name} ended the kit during {running}: the plugin crashed there")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("conformance")(conformance)
