"""Allocation family: paged caches as plain tensors."""

from __future__ import annotations

import math

import psutil
import torch
from qiao.contract import KVCache, hookimpl


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """One layer's cache. Zeros touch all of it now, so that memory neither grows nor runs out while serving."""
    shapes = {
        "NHD": (num_blocks, block_size, num_kv_heads, head_dim),
        "HND": (num_blocks, num_kv_heads, block_size, head_dim),
    }
    if layout not in shapes:
        raise ValueError(f"KV layout {layout!r} is not one of NHD, HND")
    size, total = 2 * math.prod(shapes[layout]) * dtype.itemsize, psutil.virtual_memory().total
    if size > total:  # many systems would promise it and end the process when it is used
        raise torch.OutOfMemoryError(f"a KV cache of {size} bytes, the machine has {total}")
    key, value = (torch.zeros(shapes[layout], dtype=dtype, device=device) for _ in range(2))
    if dtype != torch.int8:
        return KVCache(key, value, block_size, layout)
    scales = (torch.zeros(shapes[layout][:-1], device=device) for _ in range(2))
    return KVCache(key, value, block_size, layout, *scales)


def parts(cache: KVCache) -> tuple[torch.Tensor, ...]:
    """Its tensors, all with blocks first."""
    return tuple(x for x in (cache.key, cache.value, cache.key_scale, cache.value_scale) if x is not None)


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Block ``source[i]`` to ``target[i]`` inside one cache."""
    for part in parts(cache):
        part.index_copy_(0, target, part.index_select(0, source))


@hookimpl
def swap_blocks(source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Block ``source[i]`` of one cache to ``target[i]`` of another of the same layout."""
    if (source_cache.layout, source_cache.block_size) != (target_cache.layout, target_cache.block_size):
        raise ValueError("swap_blocks needs caches of one layout and block size")
    if (source_cache.key_scale is None) != (target_cache.key_scale is None):
        raise ValueError("swap_blocks needs both caches with scales or none")
    for from_part, to_part in zip(parts(source_cache), parts(target_cache), strict=True):
        to_part.index_copy_(0, target, from_part.index_select(0, source).to(to_part.dtype))
