"""Allocation family and the writing half of the attention family: paged caches [blocks, block, K, D]."""

from __future__ import annotations

from typing import Any

import torch
from qiao.contract import KVCache, hookimpl

from qiao_triton.architectures import Architecture, lanes_for
from qiao_triton.launch import architecture_of, launch, power_of_two

LAYOUT = "NHD"


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """Zeros, so that no leftover that is not a number is ever read; torch raises ``torch.OutOfMemoryError`` itself."""
    if layout != LAYOUT:
        raise ValueError(f"KV layout {layout!r} is not {LAYOUT}")
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    key, value = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    if dtype != torch.int8:
        return KVCache(key, value, block_size, layout)
    scales = (torch.zeros(shape[:-1], dtype=torch.float32, device=device) for _ in range(2))
    return KVCache(key, value, block_size, layout, *scales)


def parts(cache: KVCache) -> tuple[torch.Tensor, ...]:
    """Its tensors, all with blocks first."""
    return tuple(x for x in (cache.key, cache.value, cache.key_scale, cache.value_scale) if x is not None)


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """By torch, on the device."""
    for part in parts(cache):
        part.index_copy_(0, target, part.index_select(0, source))


@hookimpl
def swap_blocks(source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """By torch: gathered where they are, copied over, scattered there."""
    for of, to in zip(parts(source_cache), parts(target_cache), strict=True):
        moved = of.index_select(0, source.to(of.device)).to(to.device, to.dtype)
        to.index_copy_(0, target.to(to.device), moved)


def cache_arguments(cache: KVCache) -> dict[str, Any]:
    """Tensors and strides of ``cache`` by the kernels' names; without codes the scales are stand-ins never read."""
    key_scale, value_scale = cache.key_scale, cache.value_scale
    found: dict[str, Any] = {
        "key_scale": cache.key,
        "value_scale": cache.value,
        "s_block": 0,
        "s_token": 0,
        "s_head": 0,
    }
    if key_scale is not None and value_scale is not None:
        found = {"key_scale": key_scale, "value_scale": value_scale}
        found |= dict(zip(("s_block", "s_token", "s_head"), key_scale.stride(), strict=True))
    return found | dict(zip(("c_block", "c_token", "c_head"), cache.key.stride()[:3], strict=True))


def cache_constants(cache: KVCache) -> dict[str, Any]:
    """Sizes of ``cache`` by the kernels' names."""
    dim = cache.key.shape[3]
    return {"D": dim, "WIDTH": power_of_two(dim), "BLOCK": cache.block_size, "CODES": cache.key_scale is not None}


def rows_together(arch: Architecture, dim: int, rows: int) -> int:
    """How many of ``rows`` vectors one program takes, so that it has about a thousand numbers.

    More in the interpreter, where a program costs and numbers do not.
    """
    numbers = 32768 if arch.family == "interpreter" else 1024
    return min(power_of_two(rows), max(1, numbers // power_of_two(dim)))


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where its last dimension is contiguous, as it should be."""
    return x if x.stride(-1) == 1 else x.contiguous()


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """A program for some heads of some tokens, which also makes the codes of an int8 cache."""
    arch, (tokens, heads, dim) = architecture_of(cache.key), key.shape
    key, value = last_contiguous(key), last_contiguous(value)
    tensors = {"key": key, "value": value, "key_cache": cache.key, "value_cache": cache.value, "slots": slot_mapping}
    strides = {"k_token": key.stride(0), "k_head": key.stride(1), "v_token": value.stride(0), "v_head": value.stride(1)}
    constants = cache_constants(cache) | {"ROWS": rows_together(arch, dim, tokens * heads)}
    arguments = tensors | cache_arguments(cache) | strides | {"tokens": tokens, "kv_heads": heads}
    warps = lanes_for(arch, constants["ROWS"] * constants["WIDTH"])
    launch("cache.write", (-(-tokens * heads // constants["ROWS"]),), arguments, constants, warps)
