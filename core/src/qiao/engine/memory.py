"""How much memory there is for the KV cache, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from qiao.contract import ModelShape
from qiao.errors import ParameterError
from qiao.processors import control_groups

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_UNLIMITED = 1 << 60
"""Cgroup v1 writes a number near 2^63 for "no limit"; no machine has this much memory."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory of this process in bytes: the tightest limit, the least that is ``free``, and all figures as text."""

    bytes: int
    free: int
    explanation: str


@dataclass(frozen=True, slots=True)
class KVSize:
    """Size of the KV cache: blocks, bytes of one block over all layers, and how it came about."""

    num_blocks: int
    block_bytes: int
    explanation: str


def gib(size: int) -> str:
    """``size`` bytes in a unit that people read."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.1f} MiB"


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The least of the host's memory, cgroup limits (v1, v2, and those of the parents) and resource limits.

    ``root`` is where ``proc`` and ``sys`` are looked up. A limit "max" or unreadable counts as none.
    """
    found = [("host", *_host(root)), *_cgroup_v2(root), *_cgroup_v1(root), *_rlimits(root)]
    size, free = min(f[1] for f in found), max(0, min(f[2] for f in found))
    parts = [f"{name} {gib(limit)} ({gib(max(0, left))} free)" for name, limit, left in found]
    if len(found) == 1:
        parts.append("no cgroup or process limit")
    return MemoryLimit(size, free, f"{', '.join(parts)}; so {gib(size)}, of which {gib(free)} free")


def _host(root: Path) -> tuple[int, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return values["MemTotal"], values["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        memory = psutil.virtual_memory()
        return memory.total, memory.available


def _number(path: Path) -> int | None:
    """The limit or usage in ``path``; None where it is absent, "max", or no limit at all."""
    try:
        value = int(path.read_text().strip())
    except (OSError, ValueError):
        return None
    return value if value < _UNLIMITED else None


def _reclaimable(path: Path, name: str) -> int:
    """File cache that the kernel gives back under pressure, from a ``memory.stat``."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if pair[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _limits(name: str, folders: Iterator[Path], files: tuple[str, str], cache: str) -> Iterator[tuple[str, int, int]]:
    tightest: tuple[str, int, int] | None = None
    for folder in folders:
        limit = _number(folder / files[0])
        if limit is None:
            continue
        used = (_number(folder / files[1]) or 0) - _reclaimable(folder / "memory.stat", cache)
        entry = (name, limit, limit - max(0, used))
        if tightest is None or entry[2] < tightest[2]:
            tightest = (name, min(limit, tightest[1]) if tightest else limit, entry[2])
        else:
            tightest = (name, min(limit, tightest[1]), tightest[2])
    if tightest is not None:
        yield tightest


def _cgroup_v2(root: Path) -> Iterator[tuple[str, int, int]]:
    folders = control_groups("memory", root)
    yield from _limits("cgroup v2", folders, ("memory.max", "memory.current"), "inactive_file")


def _cgroup_v1(root: Path) -> Iterator[tuple[str, int, int]]:
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    yield from _limits("cgroup v1", control_groups("memory", root), files, "total_inactive_file")


def _rlimits(root: Path) -> Iterator[tuple[str, int, int]]:
    if resource is None:
        return
    for name, kind, field in (
        ("address space limit", resource.RLIMIT_AS, "VmSize"),
        ("data segment limit", resource.RLIMIT_DATA, "VmData"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED:
            continue
        yield name, soft, soft - _status(root, field)


def _status(root: Path, field: str) -> int:
    try:
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def size_kv(
    shape: ModelShape,
    *,
    total: int,
    free: int,
    source: str,
    utilization: float,
    reserve: int,
    block_size: int,
    element_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    beside: int = 0,
    others: int = 0,
) -> KVSize:
    """Blocks of the KV cache on a memory of ``total`` bytes with ``free`` left, described by ``source``.

    ``reserve`` is what is still to come beside the cache: weights that are not loaded yet, activations, logits.
    Automatic: ``utilization`` of the total, less what is in use but for the ``others``' bytes and the reserve, no more
    than what is free, and no more than ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.
    ``num_blocks`` or ``kv_bytes`` fix it.
    ``beside`` are the bytes a token that another model keeps in the same blocks.

    Raises ``ParameterError`` with the figures where a fixed size does not fit, or where not one block does.
    """
    block_bytes = (shape.kv_bytes_per_token(element_size) + beside) * block_size
    room = free - reserve
    if num_blocks is not None:
        _fits("num_gpu_blocks_override", f"{num_blocks} blocks", num_blocks * block_bytes, room, source, reserve)
        count, why = num_blocks, "as set by --num-gpu-blocks-override"
    elif kv_bytes is not None:
        _fits("kv_cache_memory_bytes", gib(kv_bytes), kv_bytes, room, source, reserve)
        count, why = kv_bytes // block_bytes, f"as set by --kv-cache-memory-bytes ({gib(kv_bytes)})"
        if not count:
            raise ParameterError(
                "kv_cache_memory_bytes", f"{kv_bytes} bytes hold no block; one block takes {block_bytes} bytes"
            )
    else:
        count, why = _automatic(total, free, source, utilization, reserve, block_bytes, others)
        useful = max_num_seqs * -(-max_model_len // block_size)
        if count > useful:
            count, why = useful, f"{max_num_seqs} sequences of {max_model_len} tokens need no more ({why})"
    return KVSize(count, block_bytes, _explain(count, block_bytes, block_size, max_model_len, why))


def _fits(field: str, what: str, needed: int, room: int, source: str, reserve: int) -> None:
    if needed > room:
        raise ParameterError(
            field,
            f"{what} take {gib(needed)}, but {gib(max(0, room))} is left ({source}; {gib(reserve)} kept for weights "
            "and activations); set it lower, or leave it out to size the cache automatically",
        )


def _automatic(
    total: int, free: int, source: str, utilization: float, reserve: int, block_bytes: int, others: int
) -> tuple[int, str]:
    used = max(0, total - free - others)
    budget = min(int(total * utilization) - used, free) - reserve
    why = (
        f"{utilization:.0%} of {gib(total)}, less {gib(used)} in use and {gib(reserve)} kept for weights and "
        f"activations, is {gib(max(0, budget))}; {source}"
    )
    if budget < block_bytes:
        raise ParameterError(
            "gpu_memory_utilization",
            f"no room for the KV cache: {why}; one block takes {gib(block_bytes)}. Free some memory, raise "
            "--gpu-memory-utilization, or take a smaller model",
        )
    return budget // block_bytes, why


def _explain(count: int, block_bytes: int, block_size: int, max_model_len: int, why: str) -> str:
    tokens = count * block_size
    text = (
        f"KV cache: {count:,} blocks of {block_size} tokens = {tokens:,} tokens, {gib(count * block_bytes)} "
        f"({block_bytes / block_size / 1024:.1f} KiB a token): {why}"
    )
    if tokens < max_model_len:
        return f"{text}. It holds less than the context of {max_model_len:,}: sequences end at {tokens:,} tokens"
    return f"{text}. It holds {tokens / max_model_len:.1f} sequences of the full context of {max_model_len:,}"
