"""How many threads torch may use: no more than the container's control groups allow, which torch does not look at."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from qiao.contract import hookimpl


def quota(root: Path = Path("/")) -> float | None:
    """Processors that the control groups allow, version 2 or 1; None where there is no limit."""
    found = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _folders(root: Path) -> list[Path]:
    """The control groups of this process and those above them; a container may show only the topmost."""
    groups = root / "sys/fs/cgroup"
    out = [groups, groups / "cpu", groups / "cpu,cpuacct"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return out
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            own = Path(name.lstrip("/"))
            out += [groups / controllers / part for part in (own, *own.parents)]
    return out


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()[:2]
        else:
            most, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(most) / float(period) if most not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def allowed(root: Path = Path("/")) -> int:
    """Processors that this process may keep busy: those of its set, within the quota, at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = quota(root)
    return cpus if limit is None else max(1, min(cpus, int(limit)))


@hookimpl
def set_threads(count: int | None) -> str:
    """Torch's threads: ``count``, or torch's own choice (``OMP_NUM_THREADS``, or a thread a core), within the quota."""
    if count is not None and count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    most, wanted = allowed(), torch.get_num_threads() if count is None else count
    torch.set_num_threads(min(wanted, most))
    return f"{min(wanted, most)} torch threads" + (f"; no more than {most} are allowed" if wanted > most else "")
