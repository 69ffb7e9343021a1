"""Allocation and attention families: NHD caches and the fused attention on 910B and 910C, NZ caches and ATB on 310P."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache as remembered

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl

from qiao_ascend import _sdk, fractal, graphs
from qiao_ascend.chips import MASK, check_cache, check_heads, profile_of


@dataclass(frozen=True, slots=True)
class SparedCache(KVCache):
    """A cache with one block more than its tensors show: what has no slot is written there, so nothing is read back.

    ``memory`` is [2, blocks + 1, ...], keys then values.
    """

    memory: torch.Tensor | None = None


def _whole(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the spare block."""
    assert isinstance(cache, SparedCache) and cache.memory is not None  # made by allocate_kv below
    return cache.memory[0], cache.memory[1]


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """Memory of torch_npu, which raises ``torch.OutOfMemoryError`` itself. ``ValueError`` for what no kernel reads."""
    check_cache(profile_of(torch.device(device)), block_size, head_dim, dtype, layout)
    if layout == "NZ":
        memory = fractal.allocate(num_blocks + 1, block_size, num_kv_heads * head_dim, dtype, device)
    else:
        memory = torch.empty((2, num_blocks + 1, block_size, num_kv_heads, head_dim), dtype=dtype, device=device)
    return SparedCache(memory[0, :num_blocks], memory[1, :num_blocks], block_size, layout, memory=memory)


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Whole blocks are rows of the first dimension in either layout."""
    for part in (cache.key, cache.value):
        part.index_copy_(0, target, part.index_select(0, source))


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """``npu_scatter_pa_kv_cache``, or ATB's on 310P. Padding goes to the spare block: kernels refuse negative slots."""
    key_memory, value_memory = _whole(cache)
    spare = cache.key.shape[0] * cache.block_size
    slots = torch.where(slot_mapping < 0, spare, slot_mapping).to(torch.int32)
    new = [x.to(cache.key.dtype).contiguous() for x in (key, value)]
    if cache.layout == "NZ":
        fractal.write(*new, key_memory, value_memory, slots)
    else:
        _sdk.operation("npu_scatter_pa_kv_cache")(*new, key_memory, value_memory, slots, cache_mode="Norm")


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """All phases in one call of ``npu_fused_infer_attention_score``; rows that belong to no sequence come back as zero.

    Lengths are host lists: of queries as running sums, of keys as they are, or as running sums where keys are packed.
    """
    key, value = cache.key, cache.value
    kv_heads = key.shape[1] * 16 // query.shape[2] if cache.layout == "NZ" else key.shape[2]
    check_heads(query.shape[1], kv_heads, len(metadata.query_lens))
    used = sum(metadata.query_lens)
    rows = query[:used].contiguous()
    if cache.layout == "NZ":
        out = fractal.attend(rows, cache, metadata, kv_heads, scale, sliding_window)
    elif key.dtype != query.dtype:
        out = _attend_packed(rows, cache, metadata, scale, sliding_window)
    else:
        paged = {"block_table": metadata.block_tables, "block_size": cache.block_size}
        flat = (part.view(part.shape[0], cache.block_size, -1) for part in (key, value))
        lengths = graphs.kv_lengths(metadata, cache.block_size)
        out = _fused(rows, *flat, kv_heads, metadata, lengths, scale, sliding_window, **paged)
    if used == query.shape[0]:
        return out
    return torch.cat((out, query.new_zeros(query.shape[0] - used, *query.shape[1:])))


def _attend_packed(
    rows: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float, sliding_window: int
) -> torch.Tensor:
    """Over a cache of another dtype, which the kernel does not take: contexts are brought into the query's."""
    parts = []
    for part in (cache.key, cache.value):
        pieces = []
        for i, length in enumerate(metadata.kv_lens):
            blocks = metadata.block_tables[i, : -(-length // cache.block_size)].long()
            pieces.append(part.index_select(0, blocks).flatten(0, 1)[:length])
        parts.append(torch.cat(pieces).to(rows.dtype))
    ends = list(itertools.accumulate(metadata.kv_lens))
    return _fused(rows, *parts, cache.key.shape[2], metadata, ends, scale, sliding_window)


def _fused(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_heads: int,
    metadata: AttentionMetadata,
    kv_lens: list[int],
    scale: float,
    sliding_window: int,
    **paged: object,
) -> torch.Tensor:
    """Mode 3 is causal, aligned at the last key; mode 4 a band, whose width counts the keys before the query's own."""
    band = {"sparse_mode": 4, "pre_tokens": sliding_window - 1, "next_tokens": 0}
    out, _ = _sdk.operation("npu_fused_infer_attention_score")(
        rows,
        key,
        value,
        atten_mask=_mask(str(rows.device)),
        actual_seq_lengths=list(itertools.accumulate(metadata.query_lens)),
        actual_seq_lengths_kv=kv_lens,
        num_heads=rows.shape[1],
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout="TND",
        **(band if sliding_window > 0 else {"sparse_mode": 3}),
        **paged,
    )
    return out  # type: ignore[no-any-return]


@remembered
def _mask(device: str) -> torch.Tensor:
    """The upper triangle that the kernel wants for every length; made once for each device (4 MiB)."""
    return torch.ones((MASK, MASK), dtype=torch.int8, device=device).triu_(1)
