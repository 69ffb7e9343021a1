"""Machines as Linux shows them below ``/sys``, laid out in a folder: sockets, threads of a core, nodes, fast cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """``cores`` are the logical processors of each core, ``nodes`` the kernel's list of each memory node."""

    cores: Sequence[Sequence[int]]
    nodes: Mapping[int, str] = field(default_factory=dict)
    capacity: Mapping[int, int] = field(default_factory=dict)

    def lay_out(self, root: Path) -> Path:
        """Write the files that the kernel would have; returns ``root``."""
        for siblings in self.cores:
            for cpu in siblings:
                write(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", _list(siblings))
        for node, cpus in self.nodes.items():
            write(root, f"sys/devices/system/node/node{node}/cpulist", cpus)
        for cpu, capacity in self.capacity.items():
            write(root, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
        return root


def write(root: Path, name: str, text: str) -> None:
    """One file of the kernel's, which ends with a newline."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _list(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))


RYZEN = Machine([(i, i + 12) for i in range(12)], {0: "0-23"})
"""One socket, twelve cores of two threads."""

XEONS = Machine([(i, i + 56) for i in range(56)], {0: "0-27,56-83", 1: "28-55,84-111"})
"""Two sockets of 28 cores of two threads, numbered socket by socket."""

EVEN_AND_ODD = Machine([(i, i + 32) for i in range(32)], {0: _list(range(0, 64, 2)), 1: _list(range(1, 64, 2))})
"""Two sockets whose processors take turns in the numbering, as some firmwares have it."""

KUNPENG = Machine([(i,) for i in range(128)], {n: f"{32 * n}-{32 * n + 31}" for n in range(4)})
"""Two Kunpeng 920 of 64 cores without threads, each two memory nodes."""

PHYTIUM = Machine([(i,) for i in range(4)], {0: "0-3"}, {0: 472, 1: 472, 2: 1024, 3: 1024})
"""Two small and two large cores, as in Phytium's E2000Q."""
