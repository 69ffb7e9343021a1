"""How many threads to use, and on which processors."""

from __future__ import annotations

import os
from pathlib import Path

from qiao.contract.processors import Core, allowed_cpus, cores, cpu_quota, granted_cpus, nodes

VARIABLE = "QIAO_CPU_THREADS"
PIN_VARIABLE = "QIAO_CPU_PIN"


def usable_cores(root: Path = Path("/")) -> tuple[list[Core], str]:
    """The cores for threads in the order in which they are taken, and what to say of them.

    Cores of less than half the speed of the fastest are left out: a step ends with its last thread. One is left to the
    front end where there are more than four.
    """
    found = cores(root, allowed_cpus())
    fast = [core for core in found if 2 * core.capacity >= found[0].capacity]
    reason = f"{len(fast)} cores" if len(fast) == len(found) else f"{len(fast)} fast cores of {len(found)}"
    if len(fast) <= 4:
        return fast, reason
    return fast[:-1], f"{reason}, one left to the front end"


def default_threads(root: Path = Path("/"), wanted: int | None = None) -> tuple[int, str]:
    """Number of threads and the reason: ``wanted``, else ``QIAO_CPU_THREADS``, else a thread a usable core.

    Never more than the allowed processors and the quota. Raises ``ValueError`` for a number below 1 or a bad variable.
    """
    most = granted_cpus(root, allowed_cpus())
    asked = _asked(wanted)
    if asked is not None:
        number, name = asked
        return min(number, most), name + ("" if number <= most else f", no more than {most} are allowed")
    usable, reason = usable_cores(root)
    if most < len(usable):
        return most, f"{reason}; the quota allows {cpu_quota(root):g}"
    return len(usable), reason


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


def pinned_cpus(count: int, root: Path = Path("/")) -> tuple[int, ...]:
    """The processor of each thread where ``QIAO_CPU_PIN`` is 1 and there is a core for each, else none."""
    usable = cores(root, allowed_cpus())
    if os.environ.get(PIN_VARIABLE) != "1" or count > len(usable):
        return ()
    return tuple(core.cpu for core in usable[:count])


def _used_nodes(root: Path) -> dict[int, int]:
    """The memory nodes that the process may run on, each with its usable processors."""
    allowed = set(allowed_cpus())
    return {node: len(allowed & set(cpus)) for node, cpus in nodes(root).items() if allowed & set(cpus)}


def node_facts(count: int, root: Path = Path("/")) -> str:
    """For reports: the machine's memory nodes and on which of them ``count`` threads run; empty where it has no files.

    Threads that are not pinned go where the system puts them, among the processors that are allowed.
    """
    all_nodes, pinned = nodes(root), pinned_cpus(count, root)
    if not all_nodes:
        return ""
    listed = ", ".join(f"node {node}: {len(cpus)} processors" for node, cpus in all_nodes.items())
    on = sorted({node for node, cpus in all_nodes.items() if set(cpus) & set(pinned)}) or sorted(_used_nodes(root))
    where = f"threads {'pinned to' if pinned else 'on'} node{'s' * (len(on) > 1)} {', '.join(map(str, on))}"
    return f"{len(all_nodes)} ({listed}); {where}"


def node_advice(root: Path = Path("/")) -> str:
    """What to do where the allowed processors lie on several memory nodes; empty where they do not.

    Packed weights lie where the packing thread touched them, so half of the reads of two nodes go to the other one.
    """
    used = _used_nodes(root)
    if len(used) < 2:
        return ""
    listed = ", ".join(f"node {node}: {count} processors" for node, count in used.items())
    return (
        f"{len(used)} memory nodes ({listed}): one server a node (numactl --cpunodebind=N --membind=N), "
        "or numactl --interleave=all for one over all"
    )
