"""The processors that this process may use: its set, its control groups' quota, cores, memory nodes. Linux's files.

All paths are below ``root``, so that tests can lay out other machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: ``cpu`` is the first of its logical processors that may be used, ``node`` its memory node.

    ``capacity`` is its speed beside other cores of the machine, at most 1024; 1024 where all are alike.
    """

    cpu: int
    node: int = 0
    capacity: int = 1024


def allowed_cpus() -> list[int]:
    """The logical processors that this process may run on; cpusets narrow them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def granted_cpus(root: Path = ROOT, allowed: Sequence[int] | None = None) -> int:
    """How many processors this process may keep busy: those ``allowed``, within the quota, at least 1."""
    count, limit = len(allowed_cpus() if allowed is None else allowed), cpu_quota(root)
    return count if limit is None else max(1, min(count, int(limit)))


def cores(root: Path = ROOT, allowed: Sequence[int] | None = None) -> list[Core]:
    """The physical cores among ``allowed``: fast ones first, then node by node, the node with most of them first."""
    places = {cpu: node for node, cpus in nodes(root).items() for cpu in cpus}
    seen: dict[str, Core] = {}
    for cpu in allowed_cpus() if allowed is None else allowed:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        siblings = _text(folder / "topology/thread_siblings_list") or str(cpu)
        capacity = _text(folder / "cpu_capacity")
        speed = int(capacity) if capacity.isdigit() else 1024
        seen.setdefault(siblings, Core(cpu, places.get(cpu, 0), speed))
    found = list(seen.values())
    sizes = {node: sum(core.node == node for core in found) for node in {core.node for core in found}}
    return sorted(found, key=lambda core: (-core.capacity, -sizes[core.node], core.node, core.cpu))


def nodes(root: Path = ROOT) -> dict[int, list[int]]:
    """The memory nodes that have processors, each with them; empty where the machine does not tell."""
    found = {}
    for folder in root.glob("sys/devices/system/node/node[0-9]*"):
        try:
            cpus = parse_cpus(_text(folder / "cpulist"))
            number = int(folder.name.removeprefix("node"))
        except ValueError:
            continue
        if cpus:
            found[number] = cpus
    return dict(sorted(found.items()))


def parse_cpus(text: str) -> list[int]:
    """``0-3,8`` as numbers, as the kernel writes lists. Raises ``ValueError`` for anything else."""
    out: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            out.extend(range(int(first), int(last or first) + 1))
    return out


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that the control groups allow, of version 2 or 1; None where there is no limit."""
    limits = (_limit(folder) for folder in control_groups("cpu", root))
    return min((limit for limit in limits if limit is not None), default=None)


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The groups of this process that ``controller`` limits, and those above them.

    A container may show only the topmost, whatever name ``/proc/self/cgroup`` has for it.
    """
    top = root / "sys/fs/cgroup"
    mounts = {top: Path(), top / controller: Path(), top / "cpu,cpuacct": Path()}
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mounts[top] = Path(name.strip("/"))
        elif controller in controllers.split(","):
            mounts[top / controllers] = mounts[top / controller] = Path(name.strip("/"))
    for mount, own in mounts.items():
        if ".." not in own.parts:  # above what the container may see
            yield from (mount / part for part in (own, *own.parents) if part != Path())
        yield mount


def _limit(folder: Path) -> float | None:
    both = _text(folder / "cpu.max").split()
    if len(both) < 2:
        both = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        most, period = float(both[0]), float(both[1])
    except ValueError:  # max
        return None
    return most / period if most > 0 and period > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
