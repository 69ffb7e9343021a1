"""What this machine is: its CPU, the share of it that this process may use, and limits that stop servers."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from qiao.processors import allowed_cpus, cpu_quota

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Cpu:
    """``kind`` is the maker's name of the chip; ``features`` are the vector extensions that matter for inference.

    ``cores`` are the machine's logical cores, ``usable`` those of this process's affinity (which cpusets narrow),
    ``quota`` how many cores' time a cgroup grants, None for no limit. ``vector`` tells whether ``features`` has a width
    worth using.
    """

    kind: str
    architecture: str
    features: tuple[str, ...]
    cores: int
    usable: int
    quota: float | None
    vector: bool

    @property
    def effective(self) -> float:
        """Cores' worth of time that this process can really use."""
        return float(self.usable) if self.quota is None else min(float(self.usable), self.quota)


def read_cpu(root: Path = Path("/"), architecture: str = "", usable: int | None = None) -> Cpu:
    """Read the CPU below ``root`` (``/proc/cpuinfo`` and ``/sys/fs/cgroup``).

    ``architecture`` and ``usable`` default to this process's own machine name and affinity.
    """
    known = _known_cpus()
    machine = architecture or platform.machine()
    family = known["machines"].get(machine.lower(), "")
    info = _cpuinfo(root)
    flags = _flags(info)
    features = tuple(f for f in known["features"].get(family, ()) if f in flags)
    cores = sum(1 for name, _ in info if name == "processor") or os.cpu_count() or 1
    return Cpu(
        kind=_kind(info, known) or platform.processor() or machine,
        architecture=machine,
        features=features,
        cores=cores,
        usable=usable if usable is not None else len(allowed_cpus()),
        quota=cpu_quota(root),
        vector=any(f in features for f in known["wide"].get(family, ())),
    )


def open_files_limit() -> int | None:
    """How many files and sockets this process may open, None where that is unlimited or unknown."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _known_cpus() -> dict[str, Any]:
    text = files("qiao.observability").joinpath("known_cpus.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _cpuinfo(root: Path) -> list[tuple[str, str]]:
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines if ":" in line)
    return [(name.strip().lower(), value.strip()) for name, _, value in pairs]


def _flags(info: list[tuple[str, str]]) -> set[str]:
    """Flags that every core has: on mixed chips a feature of some cores is of no use."""
    common: set[str] | None = None
    for name, value in info:
        if name in ("flags", "features"):
            mine = set(value.lower().split())
        elif name == "isa":  # RISC-V: rv64imafdcv_zba_...
            base = value.lower().split("_")[0]
            mine = set(base.removeprefix("rv64").removeprefix("rv32")) | set(value.lower().split("_")[1:])
        else:
            continue
        common = mine if common is None else common & mine
    return common or set()


def _kind(info: list[tuple[str, str]], known: dict[str, Any]) -> str:
    values = dict(reversed(info))  # the first of each wins
    named = values.get("model name") or values.get("hardware") or values.get("uarch")
    if named:
        return named
    maker, part = values.get("cpu implementer", "").lower(), values.get("cpu part", "").lower()
    if not maker:
        return ""
    return f"{known['implementers'].get(maker, maker)} {known['parts'].get(f'{maker}:{part}', part)}".strip()
