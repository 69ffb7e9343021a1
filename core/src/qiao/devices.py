"""Device names that people type, and which package provides them: data beside the code, so that no code names a device.

Nothing here imports torch or a plugin, so that a name that cannot work is refused within a blink.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from importlib.resources import files
from typing import Any

from qiao.errors import PluginError

GROUP = "qiao.v1"
"""The entry-point group. It carries the major version, so a mismatch is known without an import."""

GROUP_PREFIX = "qiao.v"
"""Any other group that starts so belongs to another major version and is reported, never imported."""

HOST = "cpu"
"""What torch calls the host; the plan calls placement there by the host plugin's name."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device name that people type; ``package`` is empty where no package provides it yet."""

    package: str
    vendor: str


@dataclass(frozen=True, slots=True)
class KnownPackages:
    """``devices`` by name, plugins that can be the host, name and module of the one that ships with the core.

    ``builtin_faster`` is the package that does the same work faster; ``libraries`` are packages without a device.
    """

    hosts: tuple[str, ...]
    devices: dict[str, KnownDevice]
    builtin_name: str
    builtin_module: str
    builtin_faster: str
    libraries: tuple[str, ...]


def known_packages() -> KnownPackages:
    """Read ``known_packages.json``."""
    text = files("qiao").joinpath("known_packages.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    devices = {name: KnownDevice(entry["package"], entry["vendor"]) for name, entry in data["devices"].items()}
    builtin = data["builtin"]
    names = (builtin["name"], builtin["module"], builtin["faster"])
    return KnownPackages(tuple(data["hosts"]), devices, *names, tuple(data["libraries"]))


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest candidate, or an empty string."""
    close = get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def installed_version(package: str) -> str:
    """The version of an installed distribution, empty where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def remedy_for(name: str, plugins: Iterable[str], known: KnownPackages) -> str:
    """What to do about a device called ``name`` that none of the installed ``plugins`` offers."""
    entry = known.devices.get(name)
    if entry is None:
        names = {HOST, AUTO, *known.devices, *plugins}
        return f"no plugin or package of that name is known.{did_you_mean(name, names)}"
    if not entry.package:
        return f"there is no Qiao package for {entry.vendor} yet; see the plugin guide to write one."
    if version := installed_version(entry.package):
        return f"{entry.package} {version} is installed but offers no plugin: upgrade it."
    return f"it is provided by {entry.package} ({entry.vendor}): pip install {entry.package}."


def check_device_name(device: str) -> None:
    """Refuse a device that nothing installed can be, before anything is loaded.

    Silent where an accelerator's plugin is installed: whether that one can serve ``device`` only its probe tells.
    Raises ``PluginError`` naming the package that provides the device and what can be used here.
    """
    known = known_packages()
    name = device.strip().partition(":")[0]
    plugins = {point.name for point in metadata.entry_points(group=GROUP)} | {known.builtin_name}
    if name in {"", AUTO, HOST, *plugins} or plugins - set(known.hosts):
        return
    remedy = remedy_for(name, plugins, known)
    raise PluginError(f"device {device!r} is not available: {remedy} Usable here: {HOST}, or --device {AUTO}.")
