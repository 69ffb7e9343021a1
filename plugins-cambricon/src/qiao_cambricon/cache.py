"""Allocation and attention families over caches [blocks, K, block, D] by torch_mlu_ops.

An int8 cache keeps a float32 scale for each token and key head, [blocks, K, block]. Decode reads codes and scales;
prefill takes none, so the contexts of such a step are dequantized first.
"""

from __future__ import annotations

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl

from qiao_cambricon import _sdk, rules


@hookimpl
def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str, device: str
) -> KVCache:
    """Plain tensors of torch_mlu, which raises ``torch.OutOfMemoryError`` itself."""
    rules.check_cache(block_size, head_dim, layout)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    key, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    if dtype != torch.int8:
        return KVCache(key, value, block_size, layout)
    scales = (torch.empty(shape[:-1], dtype=torch.float32, device=device) for _ in range(2))
    return KVCache(key, value, block_size, layout, *scales)


def _parts(cache: KVCache) -> list[torch.Tensor]:
    return [x for x in (cache.key, cache.value, cache.key_scale, cache.value_scale) if x is not None]


@hookimpl
def copy_blocks(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """By torch: the vendor's operation takes a dict on the host, which would wait for the device."""
    for part in _parts(cache):
        part.index_copy_(0, target, part.index_select(0, source))


@hookimpl
def swap_blocks(source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """By torch: in the vendor's dict a block that goes to two places would come up once."""
    for old, new in zip(_parts(source_cache), _parts(target_cache), strict=True):
        blocks = old.index_select(0, source.to(old.device))
        new.index_copy_(0, target.to(new.device), blocks.to(new.device))


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """``reshape_paged_cache``, which asks for vectors of the cache's own dtype; for int8 its quantizing sister."""
    slots = rules.int32(slot_mapping)
    if cache.key_scale is not None:
        new = [x.contiguous() for x in (key, value)]
        _sdk.operation("quant_to_paged_cache")(*new, cache.key, cache.value, cache.key_scale, cache.value_scale, slots)
        return
    new = [x.to(cache.key.dtype).contiguous() for x in (key, value)]
    _sdk.operation("reshape_paged_cache")(*new, cache.key, cache.value, slots)


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
    out = rules.apart(rows)
    lens = torch.tensor([0, *metadata.kv_lens], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    key, value, tables = cache.key, cache.value, rules.int32(metadata.block_tables)
    if key.dtype != query.dtype:  # kernels take one dtype: bring this step's context into the query's
        key, value = _contexts(cache, metadata, query.dtype)
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
        rules.longest(metadata.kv_lens),
        scale,
        True,
        *rules.window(sliding_window),
        block_tables=tables,
    )
    return out


def _contexts(cache: KVCache, metadata: AttentionMetadata, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all sequences one after another, [sum of kv_lens, K, D] each, in ``dtype``."""
    if cache.key_scale is None or cache.value_scale is None:
        return _packed(cache.key, metadata).to(dtype), _packed(cache.value, metadata).to(dtype)
    if dtype not in rules.HALVES:
        scales = (_packed(x[..., None], metadata) for x in (cache.key_scale, cache.value_scale))
        key, value = (_packed(x, metadata).to(dtype) * s for x, s in zip((cache.key, cache.value), scales, strict=True))
        return key, value
    shape = (sum(metadata.kv_lens), cache.key.shape[1], cache.key.shape[3])
    key, value = (torch.empty(shape, dtype=dtype, device=cache.key.device) for _ in range(2))
    _sdk.operation("dequant_from_paged_cache")(
        key,
        value,
        cache.key,
        cache.value,
        cache.key_scale,
        cache.value_scale,
        metadata.seq_lens,
        rules.longest(metadata.kv_lens),
        None,
        rules.int32(metadata.block_tables),
        1,  # a scale for each token and head
        8,
    )
    return key, value


def _packed(part: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """The contexts of all sequences one after another, [sum of kv_lens, K, ...]."""
    size = part.shape[2]
    pieces = []
    for i, length in enumerate(metadata.kv_lens):
        blocks = part.index_select(0, metadata.block_tables[i, : -(-length // size)].long())
        pieces.append(blocks.transpose(1, 2).flatten(0, 1)[:length])
    return torch.cat(pieces).contiguous()


@hookimpl
def decode_attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """``single_query_cached_kv_attn``, more than once where there are more heads to a key head than it takes."""
    if cache.key_scale is None and cache.key.dtype != query.dtype:
        return attention(query, cache, metadata, scale, sliding_window, soft_cap)
    sequences, heads, dim = query.shape
    kv_heads = cache.key.shape[1]
    parts = rules.decode_parts(heads, kv_heads, cache.key.dtype)
    if len(parts) == 1:
        return _decode(query.contiguous()[:, None], cache, metadata, scale, sliding_window)[:, 0]
    shared = query.reshape(sequences, kv_heads, heads // kv_heads, dim)
    found = [
        _decode(shared[:, :, part].reshape(sequences, 1, -1, dim), cache, metadata, scale, sliding_window)
        for part in parts
    ]
    return torch.cat([x.view(sequences, kv_heads, -1, dim) for x in found], 2).view(sequences, heads, dim)


def _decode(
    rows: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float, sliding_window: int
) -> torch.Tensor:
    out = rules.apart(rows)
    _sdk.operation("single_query_cached_kv_attn")(
        rows,
        cache.key,
        cache.value,
        out,
        rules.int32(metadata.block_tables),
        metadata.seq_lens,
        cache.key_scale,
        cache.value_scale,
        None,
        rules.longest(metadata.kv_lens),
        *rules.window(sliding_window),
        scale,
    )
    return out
