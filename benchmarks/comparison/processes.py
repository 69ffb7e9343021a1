"""Memory and processor time of a process and all that it started, from /proc. Linux only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """``root`` and all its descendants that live."""
    children: dict[int, list[int]] = {}
    for pid, fields in _stats():
        children.setdefault(int(fields[1]), []).append(pid)
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Each process with the fields of its stat file after the name."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            yield int(entry.name), text.rpartition(")")[2].split()


def cpu_seconds(root: int) -> float:
    """Processor time that a tree has used so far."""
    members = set(tree(root))
    return sum(sum(map(int, fields[11:15])) for pid, fields in _stats() if pid in members) / TICK


def busy_seconds() -> float:
    """Processor time that everything on the machine has used since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[place]) for place in (0, 1, 2, 5, 6)) / TICK


def proportional_mib(root: int) -> float:
    """PSS of a tree in MiB: each shared page counted once, split among those who map it; mapped files included."""
    return sum(_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in tree(root)) / 1024


def peak_resident_mib(root: int) -> float:
    """The sum of the peak RSS of a tree's processes in MiB: shared pages count in each."""
    return sum(_kib(Path(f"/proc/{pid}/status"), "VmHWM:") for pid in tree(root)) / 1024


def _kib(file: Path, key: str) -> int:
    try:
        for line in file.read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


class MemoryWatch:
    """Notes the peak PSS of a tree in the background, every ``every`` seconds, while its block runs."""

    def __init__(self, root: int, every: float = 1.0) -> None:
        self.peak_mib = proportional_mib(root)
        self._root, self._every = root, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _look(self) -> None:
        self.peak_mib = max(self.peak_mib, proportional_mib(self._root))

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self._look()
