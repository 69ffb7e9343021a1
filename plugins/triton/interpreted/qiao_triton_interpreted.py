"""The kernels in Triton's interpreter on the host, as a plugin for the conformance kit and for nothing else.

Needs ``TRITON_INTERPRET=1`` in the environment before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import psutil
import torch
from qiao.contract import Capabilities, DeviceInfo, KVCache, MemoryInfo, hookimpl
from qiao_triton import cache, graphs, limits
from qiao_triton.architectures import INTERPRETER
from qiao_triton.attention import attention, decode_attention
from qiao_triton.cache import copy_blocks, swap_blocks, write_kv
from qiao_triton.fused import (
    add_rms_norm,
    cap_logits,
    combine_experts,
    gelu_mul,
    rms_norm,
    rope_write_kv,
    rotary,
    route_experts,
    silu_mul,
)
from qiao_triton.matmul import expert_matmul, matmul, pack_weight
from qiao_triton.sampling import apply_penalties, sample
from qiao_triton_host_graphs import Driver

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "apply_penalties",
    "attention",
    "cap_logits",
    "capabilities",
    "capture",
    "combine_experts",
    "copy_blocks",
    "decode_attention",
    "expert_matmul",
    "gelu_mul",
    "matmul",
    "memory_info",
    "pack_weight",
    "probe_devices",
    "rms_norm",
    "rope_write_kv",
    "rotary",
    "route_experts",
    "sample",
    "silu_mul",
    "swap_blocks",
    "synchronize",
    "write_kv",
]


@hookimpl
def probe_devices() -> list[DeviceInfo]:
    """The host, where Triton interprets."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return []
    evidence = f"Triton {metadata.version('triton')} interprets on the host"
    return [DeviceInfo("triton:0", "cpu", "interpreter", 0, evidence)]


@hookimpl
def capabilities(chip: str) -> Capabilities:
    """All that the kernels take."""
    facts = limits.limits(INTERPRETER, ("float32", "float16", "bfloat16"))
    return replace(facts, sdk={"triton": metadata.version("triton")})


@hookimpl
def memory_info(device: str) -> MemoryInfo:
    """The host's."""
    memory = psutil.virtual_memory()
    return MemoryInfo(memory.available, memory.total)


@hookimpl
def synchronize(device: str) -> None:
    """Nothing runs behind."""


_DRIVER = Driver()


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """The library's own recording, over graphs that are a stand-in on the host."""
    with _DRIVER.there():
        return graphs.record(function, example, device)


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """As the library does, but what the host has not is refused: systems promise more than there is."""
    total = psutil.virtual_memory().total
    if 2 * num_blocks * block_size * num_kv_heads * head_dim * dtype.itemsize > total:
        raise torch.OutOfMemoryError(f"the host has {total} bytes")
    return cache.allocate_kv(num_blocks, block_size, num_kv_heads, head_dim, dtype, layout, device)
