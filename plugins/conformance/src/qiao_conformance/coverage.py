"""What the kit found, as the file that a plugin ships: operator by operator, chip by chip, with the level it holds at.

The file says by which kit and catalog it was made, so that a test can tell that it is out of date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from qiao.contract import CATALOG, CONTRACT_VERSION, Capabilities
from qiao.contract.cases import cases

from qiao_conformance.target import Target

SCHEMA = 2

LEVELS: tuple[str, ...] = ("device", "vendor-host", "compiled", "interpreted", "stand-in", "none")
"""How an operator was verified, strongest first.

``device``       on real hardware
``vendor-host``  with the vendor's real host library over stand-in drivers
``compiled``     its kernels compile for the target
``interpreted``  in a kernel interpreter
``stand-in``     on something that computes on the host in the vendor's place, by its documented rules
``none``         not there, or not right
"""

_EVERYTHING = Capabilities(
    ("float32", "float16", "bfloat16"),
    ("NHD", "HND"),
    ("float32", "float16", "bfloat16", "int8"),
    schemes=("dense", "w8a16", "w8a8", "w4a16", "fp8"),
)


def read_levels(text: str) -> tuple[str, dict[str, str]]:
    """``interpreted,capture=stand-in``: the level of a run, and of hooks that were there in another way.

    Raises ``ValueError`` where a level or a hook is none.
    """
    level, *others = text.split(",")
    apart = dict(other.partition("=")[::2] for other in others)
    for word in (level, *apart.values()):
        if word not in LEVELS[:-1]:
            raise ValueError(f"{word!r} is none of {', '.join(LEVELS[:-1])}")
    if unknown := sorted(set(apart) - set(CATALOG)):
        raise ValueError(f"there is no hook {', '.join(unknown)}")
    return level, apart


@dataclass
class Tally:
    """Checks of one operator: how many there were, which dtypes passed all of theirs, and what failed.

    ``calls`` of the ``checks`` have called it; the others looked at its name and types only.
    """

    checks: int = 0
    calls: int = 0
    dtypes: dict[str, bool] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, name: str, dtype: str, passed: bool, called: bool = True) -> None:
        """One more check ``name``; ``dtype`` is empty where it is about no dtype of its own."""
        self.checks += 1
        self.calls += called
        if dtype:
            self.dtypes[dtype] = self.dtypes.get(dtype, True) and passed
        if not passed:
            self.failed.append(name)


def kit_version() -> str:
    """The installed kit's version, ``0`` where it runs from a tree without metadata."""
    try:
        return metadata.version("qiao-conformance")
    except metadata.PackageNotFoundError:
        return "0"


def fingerprint() -> str:
    """A digest of the catalog and of the fixed cases: it changes where a coverage file has to be made anew."""
    facts = [
        (
            op.name,
            [a.name for a in op.args],
            op.mutates,
            sorted((d, t.atol, t.rtol) for d, t in op.tolerance.items()),
            [case.id for case in cases(op.name, _EVERYTHING)],
        )
        for op in CATALOG.values()
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def contract() -> str:
    """Major and minor version of the contract."""
    return ".".join(str(n) for n in CONTRACT_VERSION)


def chip_entry(target: Target, tallies: Mapping[str, Tally], levels: str, date: str) -> dict[str, Any]:
    """What a whole run on ``target`` found: SDK, limits that the plugin declares, and each operator.

    ``levels`` as ``read_levels`` takes them; an operator that no check has called, or of which one failed, gets
    ``none``. ``date`` is ISO's.
    """
    level, apart = read_levels(levels)
    operators = {
        name: {
            "level": apart.get(name, level) if tally.calls and not tally.failed else "none",
            "dtypes": sorted(d for d, passed in tally.dtypes.items() if passed),
            "checks": tally.checks,
            "failed": len(tally.failed),
        }
        for name, tally in tallies.items()
    }
    sdk = {"torch": str(torch.__version__).split("+")[0], **target.capabilities.sdk}
    limits = limits_of(target.capabilities)
    return {"level": level, "date": date, "sdk": sdk, "limits": limits, "operators": operators}


def limits_of(facts: Capabilities) -> dict[str, Any]:
    """What a plugin declares of a chip, as the file has it."""
    return {
        "dtypes": list(facts.dtypes),
        "kv_layouts": list(facts.kv_layouts),
        "kv_dtypes": list(facts.kv_dtypes or facts.dtypes),
        "block_sizes": list(facts.block_sizes),
        "head_dims": list(facts.head_dims),
        "schemes": list(facts.schemes),
        "sliding_window": facts.sliding_window,
        "soft_cap": facts.soft_cap,
    }


def merged(known: Mapping[str, Any] | None, target: Target, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The coverage file with this chip's ``entry`` in it.

    Other chips of ``known`` stay where kit, catalog and hooks are the same as now, and go where they are not.
    """
    head = {
        "schema": SCHEMA,
        "distribution": target.distribution or target.name,
        "version": target.version,
        "plugin": target.name,
        "contract": contract(),
        "kit": {"version": kit_version(), "catalog": fingerprint()},
        "hooks": [name for name in CATALOG if name in target.hooks],
    }
    fresh = known is not None and not stale(known, head["hooks"])
    chips = dict(known["chips"]) if known is not None and fresh else {}
    return {**head, "chips": dict(sorted({**chips, target.device.chip: dict(entry)}.items()))}


def stale(
    document: Mapping[str, Any],
    hooks: Iterable[str] | None = None,
    capabilities: Callable[[str], Capabilities] | None = None,
) -> list[str]:
    """Why ``document`` has to be made anew, empty where it holds; ``hooks`` are those that the plugin has now.

    ``capabilities`` is the plugin's hook: a chip of which it declares other limits than were tried is told.

    Dates do not count: what was found stays true until kit, catalog or plugin change.
    """
    if document.get("schema") != SCHEMA:
        return [f"it has schema {document.get('schema')}, this kit writes {SCHEMA}"]
    found = []
    if document["contract"] != contract():
        found.append(f"it is about contract {document['contract']}, now {contract()}")
    if not document["chips"]:
        return found
    if document["kit"]["version"] != kit_version():
        found.append(f"it was made by kit {document['kit']['version']}, now {kit_version()}")
    if document["kit"]["catalog"] != fingerprint():
        found.append("the catalog or its cases have changed since")
    if hooks is not None and set(document["hooks"]) != set(hooks):
        other = sorted(set(document["hooks"]) ^ set(hooks))
        found.append(f"the plugin's hooks have changed since: {', '.join(other)}")
    for chip, entry in document["chips"].items() if capabilities is not None else ():
        declared = limits_of(capabilities(chip))
        other = [name for name, value in declared.items() if entry["limits"].get(name) != value]
        if other:
            found.append(f"the plugin declares other limits of {chip} than were tried: {', '.join(other)}")
    return found


def write(path: Path, target: Target, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``entry`` into the file at ``path``, made where there is none; returns the whole of it.

    Where nothing but the date is new the file stays as it is.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    document = merged(known, target, entry)
    if known is not None and _undated(known) == _undated(document):
        return dict(known)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return document


def _undated(document: Mapping[str, Any]) -> dict[str, Any]:
    chips = document.get("chips", {}).items()
    return {**document, "chips": {name: {**chip, "date": ""} for name, chip in chips}}


def table(document: Mapping[str, Any]) -> str:
    """A Markdown table of ``document``: operators down, chips across; level, then the dtypes it holds for."""
    chips = document["chips"]
    lines = ["| operator | " + " | ".join(f"{name} ({chip['date']})" for name, chip in chips.items()) + " |"]
    lines.append("| --- |" + " --- |" * len(chips))
    for name in CATALOG:
        cells = (cell(chip["operators"].get(name)) for chip in chips.values())
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(operator: Mapping[str, Any] | None) -> str:
    """Level and dtypes of one operator, or why there is none."""
    if operator is None or operator["level"] == "none":
        failed = operator["failed"] if operator else 0
        return f"none ({failed} of {operator['checks']} checks failed)" if operator and failed else "none"
    return ": ".join(x for x in (operator["level"], ", ".join(operator["dtypes"])) if x)
