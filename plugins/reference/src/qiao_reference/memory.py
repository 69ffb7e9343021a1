"""Bytes that this process may use: the least of the machine, its control groups and its resource limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
from qiao.contract import MemoryInfo

_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number near 2^63 for "no limit"."""


def _number(path: Path) -> int | None:
    """The integer in ``path``; None where there is no such file or it says ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _reclaimable(folder: Path, key: str) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def _upwards(root: Path, inner: str) -> Iterator[Path]:
    """The group's folder and its parents up to ``root``; a container may show only ``root`` itself."""
    folder = root / inner.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _group_limits(proc: Path, sys: Path) -> Iterator[MemoryInfo]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, inner = line.split(":", 2)
        if number == "0":
            root, limit, used, cache = sys, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = sys / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for folder in _upwards(root, inner):
            total = _number(folder / limit)
            if total is not None:
                taken = (_number(folder / used) or 0) - _reclaimable(folder, cache)
                yield MemoryInfo(max(0, total - max(0, taken)), total)


def _process_limits() -> Iterator[MemoryInfo]:
    memory = psutil.Process().memory_info()
    for limit, used in ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, getattr(memory, "data", memory.rss))):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield MemoryInfo(max(0, soft - used), soft)


def free_and_total(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> MemoryInfo:
    """Free and total bytes under the tightest limit; each is taken on its own. The folders are for tests."""
    host = psutil.virtual_memory()
    limits = [MemoryInfo(host.available, host.total), *_group_limits(proc, sys), *_process_limits()]
    return MemoryInfo(min(x.free for x in limits), min(x.total for x in limits))
