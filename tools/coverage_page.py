"""``docs/coverage/README.md`` from the ``coverage.json`` of each distribution: operator by plugin by chip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qiao.contract import CATALOG

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {
    "device": "on real hardware",
    "vendor-host": "with the vendor's real host library over stand-in drivers",
    "compiled": "its kernels compile for the target",
    "interpreted": "in a kernel interpreter",
    "stand-in": "on something that computes on the host in the vendor's place, by its documented rules, which says "
    "nothing about the vendor's own software",
    "none": "not there, or some check failed",
}
"""Strongest first, as ``qiao_conformance.coverage`` has them."""

_RESOURCES = ("shared", "registers", "spilled")
_OWN = ("reference", "cpu", "sim")

Document = Mapping[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def files(root: Path = ROOT) -> list[Document]:
    """Every plugin's file: those of this repository's own devices first, then the vendors'."""
    paths = [*root.glob("plugins/*/src/**/coverage.json"), *root.glob("plugins-*/src/*/coverage.json")]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if "build" not in path.parts]
    return sorted(found, key=lambda d: (_OWN.index(d["plugin"]) if d["plugin"] in _OWN else len(_OWN), d["plugin"]))


def page(note: str, documents: Sequence[Document]) -> str:
    """The whole page; ``note`` goes in front."""
    tested = [d for d in documents if d["chips"]]
    without = [f"`{d['plugin']}`" for d in documents if not d["chips"]]
    meaning = "\n".join(f"- `{level}`: {text}" for level, text in LEVELS.items())
    intro = (
        "How each operator of each plugin was verified by the conformance kit, chip by chip. A cell of the first table "
        f"has the strongest level of the plugin's chips; the plugin's own section tells them apart.\n\n{meaning}\n\n"
        "[Served end to end](served.md) has whole models, on stand-ins so far.\n"
    )
    parts = [note, "# Coverage\n", intro, _summary(tested), _all_chips(tested)]
    parts += [f"No operator of {', '.join(without)} has been verified.\n"] if without else []
    parts += [_section(document) for document in tested]
    return "\n".join(parts)


def _strongest(document: Document, operator: str) -> str:
    found = [chip["operators"].get(operator, {}).get("level", "none") for chip in document["chips"].values()]
    return min(found, key=list(LEVELS).index)


def _summary(documents: Sequence[Document]) -> str:
    head = ("operator", *(f"[{d['plugin']}](#{d['plugin']})" for d in documents))
    rows = ((f"`{name}`", *(_shown(_strongest(d, name)) for d in documents)) for name in CATALOG)
    return "## Operators\n\n" + table(head, rows)


def _shown(level: str) -> str:
    return "-" if level == "none" else level


def _all_chips(documents: Sequence[Document]) -> str:
    rows = []
    for document in documents:
        for name, chip in document["chips"].items():
            verified = [entry for entry in chip["operators"].values() if entry["level"] != "none"]
            failed = sum(entry["failed"] for entry in chip["operators"].values())
            checks = sum(entry["checks"] for entry in chip["operators"].values())
            counts = (f"{len(verified)} of {len(CATALOG)}", f"{checks:,}", str(failed))
            rows.append((document["plugin"], name, chip["level"], chip["date"], *counts))
    head = ("plugin", "chip", "level", "date", "operators", "checks", "failed")
    return "## Chips\n\n" + table(head, rows)


def _section(document: Document) -> str:
    """One plugin: when, with which software and within which limits each chip was tested, and what holds there."""
    chips: Mapping[str, Any] = document["chips"]
    heading = f"## {document['plugin']}\n\n`{document['distribution']}` {document['version']}, "
    heading += f"contract {document['contract']}.\n\n"
    facts = [("level", *(chip["level"] for chip in chips.values())), ("date", *(c["date"] for c in chips.values()))]
    facts.append(("with", *(", ".join(f"{k} {v}" for k, v in chip["sdk"].items()) for chip in chips.values())))
    limits = dict.fromkeys(name for chip in chips.values() for name in chip["limits"])
    facts += [
        (name.replace("_", " "), *(_limit(chip["limits"].get(name)) for chip in chips.values())) for name in limits
    ]
    if any("kernels" in chip for chip in chips.values()):
        facts.append(("kernels", *(_taken(chip.get("kernels")) for chip in chips.values())))
    rows = [(f"`{name}`", *(_cell(chip["operators"].get(name)) for chip in chips.values())) for name in CATALOG]
    known = [row for row in rows if any(cell != "-" for cell in row[1:])]
    lacking = ", ".join(row[0] for row in rows if row not in known)
    end = f"\nNot there: {lacking}.\n" if lacking else ""
    return heading + table(("", *chips), facts) + "\n" + table(("operator", *chips), known) + end


def _taken(kernels: Mapping[str, Any] | None) -> str:
    """Of shared memory and registers what the kernel takes that takes the most, and the bound."""
    if kernels is None:
        return ""
    shared, registers, spilled = (f"{most:,} of {bound:,}" for most, bound in (kernels[k] for k in _RESOURCES))
    return f"{kernels['compiled']}: at most {shared} bytes shared, {registers} registers, {spilled} spilled"


def _limit(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "any"


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "-"
    if entry["failed"]:
        return f"none: {entry['failed']} of {entry['checks']} checks failed"
    if entry["level"] == "none":
        return "-"
    dtypes = f": {', '.join(entry['dtypes'])}" if entry["dtypes"] else ""
    return f"{entry['level']}{dtypes} ({entry['checks']})"
