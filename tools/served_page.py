"""``docs/coverage/served.md`` from the ``acceptance.json`` of each vendor's distribution."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.coverage_page import ROOT, table

Document = Mapping[str, Any]


def files(root: Path = ROOT) -> list[Document]:
    """Every vendor's file, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob("plugins-*/acceptance.json"))]


def page(note: str, documents: Sequence[Document]) -> str:
    """The whole page; ``note`` goes in front."""
    intro = (
        "A model served by Qiao's own server on a vendor's device, or on what stands in its place where the level is "
        "not `device`, with everything and with each of four families left out of the plugin in turn: greedy answers "
        "beside those of a server on the CPU, the operators that `qiao plan` puts on the CPU, and those that the "
        "server's counters saw there. `make acceptance-vendors` runs it again; what the levels mean is said in "
        "[Coverage](README.md).\n"
    )
    sections = [*map(_section, documents)] or ["No run has been kept yet.\n"]
    return "\n".join([note, "# Served end to end\n", intro, *sections])


def _section(document: Document) -> str:
    head = ("left out", "equal answers", "on the CPU by the plan", "seen there", "replayed steps", "seconds")
    rows = [
        (
            name,
            f"{one['equal']} of {one['of']}",
            _names(one["planned_on_cpu"]),
            _names(one["ran_on_cpu"]),
            str(one["replayed_steps"]),
            str(one["seconds"]),
        )
        for name, one in document["families"].items()
    ]
    level = "" if document["level"] == "device" else f" ({document['level']})"
    title = f"## {document['model']} on {document['chip']}{level}\n\n"
    facts = f"`qiao-{document['plugin']}`, level `{document['level']}`, {document['date']}, "
    facts += f"{document['tokens']} tokens an answer.\n\n"
    return title + facts + table(head, rows) + "\n" + _kernels(document["families"].get("nothing", {}))


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _kernels(one: Document) -> str:
    launched = [f"`{name}` {count}" for name, count in one.get("kernels", {}).items()]
    text = "Kernels that were launched with nothing left out, and how often; those of a replayed step count once, when "
    return f"{text}it was recorded: {', '.join(launched)}.\n" if launched else ""
