"""``qiao plugins``: what is installed, what works, and why the rest does not."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from qiao.registry import Surveyed


def plugins(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the installed plugins with their devices, hooks and, where one cannot be used, the reason."""
    from qiao.registry import allowed_plugins, discover, survey

    discovery = discover(allowed_plugins(os.environ))
    entries = [as_dict(item) for item in survey(discovery)]
    if as_json:
        json.dump({"schema": 1, "core_version": discovery.core_version, "plugins": entries}, sys.stdout, indent=2)
        print()
    else:
        _show(entries)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plugins")(plugins)


def as_dict(item: Surveyed) -> dict[str, Any]:
    """One plugin as JSON-ready data."""
    record = item.record
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "group": record.group,
        "entry_point": record.target,
        "requires_core": record.requires,
        "status": record.status,
        "reason": item.verdict,
        "hooks": list(record.hooks),
        "devices": [asdict(device) for device in item.usable],
    }


def _show(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for name in ("plugin", "package", "group", "status", "devices, or the reason"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        devices = [
            f"{d['name']} ({d['torch_device']}): {d['evidence']}" + ("" if d["score"] > 0 else " [only by name]")
            for d in entry["devices"]
        ]
        package = f"{entry['distribution']} {entry['version']}"
        cells = (entry["name"], package, entry["group"], entry["status"], "\n".join(devices) or entry["reason"])
        table.add_row(*(Text(cell) for cell in cells))
    console = Console()
    console.print(table)
    for entry in entries:
        if entry["hooks"]:
            console.print(f"{entry['name']} implements {', '.join(entry['hooks'])}", markup=False, highlight=False)
