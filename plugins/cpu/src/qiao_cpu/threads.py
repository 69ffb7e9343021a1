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


def default_threads(root: Path = Path("/"), wanted: int | None = None) -> tuple[int, str]:
    """Number of threads and the reason: ``wanted``, else ``QIAO_CPU_THREADS``, else a thread a physical core.

    Never more than the allowed processors and the quota. One core is left to the front end where there are more than
    four. Raises ``ValueError`` for a number below 1 or a bad variable.
    """
    limit = quota(root)
    allowed = allowed_cpus()
    most = len(allowed) if limit is None else max(1, min(len(allowed), int(limit)))
    asked = _asked(wanted)
    if asked is not None:
        number, name = asked
        return min(number, most), name + ("" if number <= most else f", no more than {most} are allowed")
    cpus = physical_cores(allowed, root)
    count = len(cpus) - 1 if len(cpus) > 4 else len(cpus)
    reason = f"{len(cpus)} cores, one left to the front end" if len(cpus) > 4 else f"{len(cpus)} cores"
    if most < count:
        return most, f"{reason}; the quota allows {limit:g}"
    return max(1, count), reason


def _asked(wanted: int | None) -> tuple[int, str] | None:
    """The number that the user set, and where; None where there is none."""
    if wanted is not None:
        if wanted < 1:
            raise ValueError(f"threads must be at least 1, got {wanted}")
        return wanted, f"{wanted} asked for"
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text}: must be a whole number of at least 1")
    return int(text), f"{VARIABLE}={text}"


def nodes(root: Path = Path("/")) -> dict[int, list[int]]:
    """The memory nodes that have processors, each with them; empty where the machine does not tell."""
    found: dict[int, list[int]] = {}
    for folder in sorted(root.glob("sys/devices/system/node/node[0-9]*")):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text())
            number = int(folder.name.removeprefix("node"))
        except (OSError, ValueError):
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


def node_advice(root: Path = Path("/")) -> str:
    """What to do where the allowed processors lie on several memory nodes; empty where they do not.

    Packed weights lie where the packing thread touched them, so half of the reads of two nodes go to the other one.
    """
    allowed = set(allowed_cpus())
    used = {node: len(allowed & set(cpus)) for node, cpus in nodes(root).items() if allowed & set(cpus)}
    if len(used) < 2:
        return ""
    listed = ", ".join(f"node {node}: {count} processors" for node, count in used.items())
    return (
        f"{len(used)} memory nodes ({listed}): one server a node (numactl --cpunodebind=N --membind=N), "
        "or numactl --interleave=all for one over all"
    )


def pinned_cpus(count: int) -> tuple[int, ...]:
    """The processor of each thread where ``QIAO_CPU_PIN`` is 1, else none."""
    if os.environ.get(PIN_VARIABLE) != "1":
        return ()
    return tuple(physical_cores(allowed_cpus())[:count])
