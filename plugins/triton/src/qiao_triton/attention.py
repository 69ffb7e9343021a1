"""Attention family over the kernels: ragged batches, and decodes whose contexts are cut into parts."""

from __future__ import annotations

from typing import Any

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl

from qiao_triton.architectures import Architecture, Tile, attention_tile, lanes_for, parts
from qiao_triton.cache import cache_arguments, cache_constants, last_contiguous
from qiao_triton.launch import architecture_of, launch, power_of_two, wide

MOST_PARTS = 64
"""Of a decode's context, for models of few key heads.

A part is no shorter than ``SHORTEST`` tokens of the longest context that there can be.
"""

SHORTEST = 256
_NO_WINDOW = 1 << 30


def _common(
    query: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float, window: int, cap: float
) -> dict[str, Any]:
    found = {"query": query, "key": cache.key, "value": cache.value, "tables": metadata.block_tables}
    found |= {"seq_lens": metadata.seq_lens, "scale": scale, "cap": cap, "t_row": metadata.block_tables.stride(0)}
    found |= {"window": window if window > 0 else _NO_WINDOW, "q_token": query.stride(0), "q_head": query.stride(1)}
    return found | cache_arguments(cache)


def _stages(tile: Tile, constants: dict[str, Any]) -> int:
    """Of the pipeline: codes of an int8 cache that wait to be widened would not fit into registers."""
    return 1 if constants["CODES"] else tile.stages


def _constants(arch: Architecture, query: torch.Tensor, cache: KVCache, cap: float) -> dict[str, Any]:
    group = query.shape[1] // cache.key.shape[2]
    found = cache_constants(cache) | {"GROUP": group, "CAPPED": cap > 0, "WIDE": wide(arch, query.dtype)}
    return found | {"WIDTH": max(16, found["WIDTH"])}  # the least that a product of tiles takes


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """A program for a few queries of one sequence and a key head; rows of no sequence come back as zero."""
    arch, query = architecture_of(query), last_contiguous(query)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    constants, count = _constants(arch, query, cache, soft_cap), len(metadata.seq_lens)
    tile = attention_tile(arch, constants["WIDTH"], constants["WIDE"], query.shape[0] > count, constants["CODES"])
    rows = max(tile.rows, power_of_two(constants["GROUP"]))
    queries = rows // constants["GROUP"]
    constants |= {"QUERIES": queries, "M": rows, "N": tile.columns}
    arguments = _common(query, cache, metadata, scale, sliding_window, soft_cap)
    arguments |= {"out": out, "query_start": metadata.query_start, "count": count}
    arguments |= {"o_token": out.stride(0), "o_head": out.stride(1)}
    grid = (query.shape[0] // queries + count, cache.key.shape[2])
    launch("attention.attend", grid, arguments, constants, tile.warps, _stages(tile, constants))
    return out


@hookimpl
def decode_attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """The parts depend on shapes alone, never on the lengths, so that a recorded step is right for any of them."""
    arch, query = architecture_of(query), last_contiguous(query)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    rows, heads, dim = query.shape
    constants, kv_heads = _constants(arch, query, cache, soft_cap), cache.key.shape[2]
    longest = metadata.block_tables.shape[1] * cache.block_size
    most = MOST_PARTS if arch.family == "interpreter" else max(1, min(MOST_PARTS, longest // SHORTEST))
    count = parts(arch, rows * kv_heads, most)
    tile = attention_tile(arch, constants["WIDTH"], constants["WIDE"], False, constants["CODES"])
    constants |= {"PARTS": count, "M": max(tile.rows, power_of_two(constants["GROUP"])), "N": tile.columns}
    partial, stats = out, out
    if count > 1:
        partial, stats = (
            torch.empty((rows, heads, count, n), dtype=torch.float32, device=query.device)
            for n in (constants["WIDTH"], 2)
        )
    arguments = _common(query, cache, metadata, scale, sliding_window, soft_cap)
    arguments |= {"out": out, "partial": partial, "stats": stats}
    arguments |= {"o_token": out.stride(0), "o_head": out.stride(1)}
    launch("attention.attend_part", (rows, kv_heads, count), arguments, constants, tile.warps, _stages(tile, constants))
    if count > 1:
        joined = {"out": out, "partial": partial, "stats": stats, "o_token": out.stride(0), "o_head": out.stride(1)}
        sizes = {"PARTS": count, "D": dim, "WIDTH": constants["WIDTH"]}
        launch("attention.join", (rows, heads), joined, sizes, lanes_for(arch, count * constants["WIDTH"]))
    return out
