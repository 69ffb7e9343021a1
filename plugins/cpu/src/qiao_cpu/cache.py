"""Allocation family, and the record of a cache for the kernels.

The layout is HND to the outside. Inside a block keys lie transposed, [D][tokens], and both tensors' last stored
dimension is padded to whole vectors; the tensors are views that hide this. Keys side by side let a kernel score a
vector of tokens at once without sums across lanes. The scales of an int8 cache are [blocks, K, block_size].
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import psutil
import torch
from qiao.contract import KVCache, hookimpl

from qiao_cpu import native


@dataclass(frozen=True, slots=True)
class NativeCache(KVCache):
    """A cache with what the kernels read of it: made once, since it is needed in every call."""

    record: native.Cache = field(kw_only=True)


def _padded(size: int) -> int:
    return -(-size // native.lanes()) * native.lanes()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros straight from the system: torch's own would write, and so occupy, all of it at once.

    More than the machine has is refused here: many systems would promise it and end the process when it is used.
    """
    count = math.prod(shape)
    total = psutil.virtual_memory().total
    if count * dtype.itemsize > total:
        raise torch.OutOfMemoryError(
            f"qiao-cpu: {count * dtype.itemsize} bytes for the KV cache, the machine has {total}"
        )
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise torch.OutOfMemoryError(
            f"qiao-cpu: {count * dtype.itemsize} bytes for the KV cache: {error.strerror}"
        ) from error
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """One layer's cache; see the module. Its memory is taken block by block as blocks are first written."""
    if layout != "HND":
        raise ValueError(f"KV layout {layout!r} is not HND")
    key = _zeros((num_blocks, num_kv_heads, head_dim, _padded(block_size)), dtype)
    value = _zeros((num_blocks, num_kv_heads, block_size, _padded(head_dim)), dtype)
    key, value = key[..., :block_size].transpose(2, 3), value[..., :head_dim]
    if dtype != torch.int8:
        return NativeCache(key, value, block_size, layout, record=_record(key, value))
    key_scale, value_scale = (_zeros((num_blocks, num_kv_heads, block_size), torch.float32) for _ in range(2))
    record = _record(key, value, key_scale, value_scale)
    return NativeCache(key, value, block_size, layout, key_scale, value_scale, record=record)


def native_cache(cache: KVCache) -> native.Cache:
    """The cache as the kernels see it."""
    if isinstance(cache, NativeCache):
        return cache.record
    return _record(cache.key, cache.value, cache.key_scale, cache.value_scale)


def _record(
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> native.Cache:
    _, heads, block, size = key.shape
    key_block, key_head, _, key_dim = key.stride()
    value_block, value_head, value_token, _ = value.stride()
    scales: tuple[int | None, int | None, int, int] = (None, None, 0, 0)
    if key_scale is not None and value_scale is not None:
        scales = (key_scale.data_ptr(), value_scale.data_ptr(), key_scale.stride(0), key_scale.stride(1))
    return native.Cache(
        key.data_ptr(),
        value.data_ptr(),
        native.CACHE_TYPES[key.dtype],
        heads,
        size,
        block,
        key_block,
        key_head,
        key_dim,
        value_block,
        value_head,
        value_token,
        *scales,
    )


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Block ``source[i]`` to ``target[i]``, each as one piece of memory."""
    source, target = source.contiguous(), target.contiguous()
    sizes = (part.stride(0) * part.element_size() for part in (cache.key, cache.value))
    native.check(native.copy_blocks(native_cache(cache), source.data_ptr(), target.data_ptr(), source.shape[0], *sizes))
