"""Which package provides which device: data beside the code, so that no code of the core names a device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device name that people type; ``package`` is empty where no package provides it yet."""

    package: str
    vendor: str


@dataclass(frozen=True, slots=True)
class KnownPackages:
    """``devices`` by name, plugins that can be the host, and name and module of the one that ships with the core."""

    hosts: tuple[str, ...]
    devices: dict[str, KnownDevice]
    builtin_name: str
    builtin_module: str


def known_packages() -> KnownPackages:
    """Read ``known_packages.json``."""
    text = files("qiao.registry").joinpath("known_packages.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    devices = {name: KnownDevice(entry["package"], entry["vendor"]) for name, entry in data["devices"].items()}
    return KnownPackages(tuple(data["hosts"]), devices, data["builtin"]["name"], data["builtin"]["module"])


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest candidate, or an empty string."""
    close = get_close_matches(word, sorted(set(candidates)), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
