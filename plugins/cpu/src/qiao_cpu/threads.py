"""How many threads to use, and on which processors."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "QIAO_CPU_THREADS"
PIN_VARIABLE = "QIAO_CPU_PIN"


def allowed_cpus() -> list[int]:
    """The logical processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def physical_cores(cpus: list[int], root: Path = Path("/")) -> list[int]:
    """One logical processor of each core among ``cpus``; all of them where the machine does not tell."""
    seen, out = set[str](), list[int]()
    for cpu in cpus:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            core = path.read_text().strip()
        except OSError:
            core = str(cpu)
        if core not in seen:
            seen.add(core)
            out.append(cpu)
    return out


def quota(root: Path = Path("/")) -> float | None:
    """Processors that the container's control groups allow, version 2 or 1; None where there is no limit."""
    found = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _folders(root: Path) -> list[Path]:
    """The control groups of this process and those above them."""
    out = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return out
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        own = Path(name.lstrip("/"))
        out.extend(base / part for part in (own, *own.parents))
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


def default_threads(root: Path = Path("/")) -> tuple[int, str]:
    """Number of threads and the reason: ``QIAO_CPU_THREADS``, or allowed physical cores within the quota.

    One core is left to the front end where there are more than four. Raises ``ValueError`` for a bad variable.
    """
    cpus = physical_cores(allowed_cpus(), root)
    limit = quota(root)
    most = len(allowed_cpus()) if limit is None else max(1, min(len(allowed_cpus()), int(limit)))
    asked = os.environ.get(VARIABLE, "")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(f"{VARIABLE}={asked}: must be a whole number of at least 1")
        count = min(int(asked), most)
        return count, f"{VARIABLE}={asked}" + ("" if count == int(asked) else f", no more than {most} are allowed")
    count = len(cpus) - 1 if len(cpus) > 4 else len(cpus)
    reason = f"{len(cpus)} cores, one left to the front end" if len(cpus) > 4 else f"{len(cpus)} cores"
    if most < count:
        return most, f"{reason}; the quota allows {limit:g}"
    return max(1, count), reason


def pinned_cpus(count: int) -> tuple[int, ...]:
    """The processor of each thread where ``QIAO_CPU_PIN`` is 1, else none."""
    if os.environ.get(PIN_VARIABLE) != "1":
        return ()
    return tuple(physical_cores(allowed_cpus())[:count])
