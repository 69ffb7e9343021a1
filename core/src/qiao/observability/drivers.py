"""Which accelerators' drivers and SDKs are on this machine, by files and by the vendors' monitoring commands.

Nothing of a vendor's is imported.

What to look for is data (``known_drivers.json``), so that no code of the core names a device.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from qiao.observability import monitors


@dataclass(frozen=True, slots=True)
class Driver:
    """One vendor's traces. ``package`` is the Qiao package for it, empty where there is none yet.

    ``present`` means a device node, a driver version or a PCI device: a device is likely here. Else only an SDK, a
    command or a Python package was found. ``versions`` and ``distributions`` map names to versions; ``torch`` names the
    distributions that bring its torch backend. ``monitor`` is what the vendor's own command says.
    """

    name: str
    vendor: str
    package: str
    present: bool
    evidence: tuple[str, ...]
    versions: Mapping[str, str]
    distributions: Mapping[str, str]
    torch: tuple[str, ...]
    monitor: monitors.Reading


def known_drivers() -> dict[str, Any]:
    """Read ``known_drivers.json``."""
    text = files("qiao.observability").joinpath("known_drivers.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def find_drivers(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None, ask: monitors.Ask | None = None
) -> list[Driver]:
    """What of the known accelerators is found below ``root``; those without a trace are left out.

    ``ask`` runs the monitoring commands; without it they are run on this machine only, not where ``root`` is another's.
    """
    env = environment or {}
    pci = list(_pci(root))
    run = ask or (monitors.ask if root == Path("/") else _nothing)
    found = (_find(entry, root, env, pci, run) for entry in known_drivers()["accelerators"])
    return [driver for driver in found if driver is not None]


def installed(distribution: str) -> str:
    """The installed version of a distribution, empty where it is absent."""
    try:
        return metadata.version(distribution) or "unknown"
    except metadata.PackageNotFoundError:
        return ""


def _nothing(command: Sequence[str], folders: Sequence[str]) -> None:
    """There is no command in another machine's tree."""


def _find(
    entry: dict[str, Any], root: Path, environment: Mapping[str, str], pci: list[tuple[str, str]], ask: monitors.Ask
) -> Driver | None:
    nodes = [f"/{p.relative_to(root)}" for pattern in entry["devices"] for p in _glob(root, pattern)]
    wanted = entry["pci"]
    cards = sum(v == wanted["vendor"] and c.startswith(tuple(wanted["classes"])) for v, c in pci)
    versions = dict(_versions(entry["versions"], root, environment))
    evidence = nodes + ([f"{cards} PCI device(s) of vendor {wanted['vendor']}"] if cards else [])
    reading = monitors.read(entry.get("monitor"), ask)
    if reading.driver:
        versions.setdefault("driver", reading.driver)
    present = bool(nodes or cards or reading.chips or "driver" in versions)
    evidence += [f"${name}" for name in entry["environment"] if environment.get(name)]
    if root == Path("/"):
        evidence += [path for command in entry["commands"] if (path := shutil.which(command))]
    own = {name: version for name in entry["distributions"] if (version := installed(name))}
    special = {name: version for name, version in own.items() if name in entry["torch"]}
    if not (evidence or versions or special or reading.command):
        return None
    return Driver(
        entry["name"],
        entry["vendor"],
        entry["package"],
        present,
        tuple(evidence),
        versions,
        own,
        tuple(entry["torch"]),
        reading,
    )


def _versions(entries: list[dict[str, Any]], root: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        for pattern in entry["files"]:
            version = _version(root, _expanded(pattern, environment), entry["pattern"])
            if version:
                yield entry["what"], version
                break


def _expanded(pattern: str, environment: Mapping[str, str]) -> str:
    """``$NAME`` at the start replaced by its value; empty where it is unset."""
    if not pattern.startswith("$"):
        return pattern
    name, slash, rest = pattern[1:].partition("/")
    value = environment.get(name, "")
    return f"{value.rstrip('/')}{slash}{rest}" if value.startswith("/") else ""


def _version(root: Path, pattern: str, expression: str) -> str:
    for path in _glob(root, pattern) if pattern else ():
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(expression, text, re.MULTILINE):
            return match.group(1)
    return ""


def _glob(root: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from sorted(root.glob(pattern.lstrip("/")))
    except (OSError, ValueError):
        return


def _pci(root: Path) -> Iterator[tuple[str, str]]:
    """Vendor and class of each PCI device, as sysfs writes them: ``0x1d94``, ``0x120000``."""
    for device in _glob(root, "/sys/bus/pci/devices/*"):
        try:
            yield (device / "vendor").read_text().strip().lower(), (device / "class").read_text().strip().lower()
        except OSError:
            continue
