"""Device hooks that are the same on every GPU that torch calls ``cuda``, NVIDIA's as well as Hygon's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from qiao.contract import MemoryInfo, hookimpl

from qiao_triton import graphs


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """As the driver has it, which counts what other processes hold; torch's cache of freed memory counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MemoryInfo(min(int(total), int(free) + int(kept)), int(total))


@hookimpl
def synchronize(device: str) -> None:
    """A late fault raises here."""
    torch.cuda.synchronize(device)


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """A CUDA graph, which on HIP is a HIP graph."""
    return graphs.record(function, example, device)


@hookimpl
def collective_backend() -> str:
    """NVIDIA's own; on HIP torch gives RCCL the name of what it replaces."""
    return "nccl"
