"""Allocation and attention families over caches [blocks, K, block, D] by torch_mlu_ops.

Its index tensors are int32, a negative slot is skipped, inputs must be contiguous, and ``out`` must not be the query.
"""

from __future__ import annotations

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl

from qiao_cambricon import _sdk
from qiao_cambricon.chips import check_cache, check_decode


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """Plain tensors of torch_mlu, which raises ``torch.OutOfMemoryError`` itself."""
    check_cache(block_size, head_dim, layout)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    key, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return KVCache(key, value, block_size, layout)


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """By torch: the vendor's operation takes a dict on the host, which would wait for the device."""
    for part in (cache.key, cache.value):
        part.index_copy_(0, target, part.index_select(0, source))


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """``reshape_paged_cache``, which asks for vectors of the cache's own dtype."""
    new = [x.to(cache.key.dtype).contiguous() for x in (key, value)]
    _sdk.operation("reshape_paged_cache")(*new, cache.key, cache.value, slot_mapping.to(torch.int32))


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """``flash_attention`` over the whole ragged batch; rows that belong to no sequence come back as zero."""
    rows = query.contiguous()
    out = torch.zeros_like(rows)
    lens = torch.tensor([0, *metadata.kv_lens], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    key, value, tables = cache.key, cache.value, metadata.block_tables
    if key.dtype != query.dtype:  # kernels take one dtype: bring this step's context into the query's
        key, value = (_packed(part, metadata, query.dtype) for part in (key, value))
        tables = None
    _sdk.operation("flash_attention")(
        rows,
        key,
        value,
        out,
        metadata.query_start,
        lens,
        None,
        None,
        max(metadata.query_lens),
        max(metadata.kv_lens),
        scale,
        True,
        sliding_window - 1 if sliding_window > 0 else -1,
        -1,
        block_tables=tables,
    )
    return out


def _packed(part: torch.Tensor, metadata: AttentionMetadata, dtype: torch.dtype) -> torch.Tensor:
    """The contexts of all sequences one after another, [sum of kv_lens, K, D]."""
    size = part.shape[2]
    pieces = []
    for i, length in enumerate(metadata.kv_lens):
        blocks = part.index_select(0, metadata.block_tables[i, : -(-length // size)].long())
        pieces.append(blocks.transpose(1, 2).flatten(0, 1)[:length])
    return torch.cat(pieces).to(dtype).contiguous()


@hookimpl
def decode_attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """``single_query_cached_kv_attn``; a longest context that is too small would give wrong results without a word."""
    check_decode(query.shape[1], cache.key.shape[1])
    if cache.key.dtype != query.dtype:
        return attention(query, cache, metadata, scale, sliding_window, soft_cap)
    rows = query.contiguous()[:, None]
    out = torch.empty_like(rows)
    _sdk.operation("single_query_cached_kv_attn")(
        rows,
        cache.key,
        cache.value,
        out,
        metadata.block_tables,
        metadata.seq_lens,
        None,
        None,
        None,
        max(metadata.kv_lens),
        sliding_window - 1 if sliding_window > 0 else -1,
        -1,
        scale,
    )
    return out[:, 0]
