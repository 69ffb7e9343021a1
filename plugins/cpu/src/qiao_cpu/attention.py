"""Attention family: one native call for any mix of prefill and decode."""

from __future__ import annotations

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl

from qiao_cpu import native
from qiao_cpu.cache import native_cache


def heads_of(x: torch.Tensor) -> native.Heads:
    """[T, heads, D] with D contiguous, as the kernels see it."""
    return native.Heads(x.data_ptr(), x.stride(0), x.stride(1), native.TYPES[x.dtype])


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where its last dimension is contiguous, as the contract promises; a copy in the odd other case."""
    return x if x.stride(-1) == 1 else x.contiguous()


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Store the new vectors; rows whose slot is -1 are left out."""
    key, value, slot_mapping = last_contiguous(key), last_contiguous(value.to(key.dtype)), slot_mapping.contiguous()
    native.check(
        native.write(heads_of(key), heads_of(value), native_cache(cache), slot_mapping.data_ptr(), key.shape[0])
    )


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """See native/attention.h. Rows that belong to no sequence come back as zero."""
    query, starts, lens = last_contiguous(query), metadata.query_start, metadata.seq_lens
    tokens, heads, size = query.shape
    whole = sum(metadata.query_lens) == tokens
    out = (torch.empty if whole else torch.zeros)((tokens, heads, size), dtype=query.dtype)
    tables = last_contiguous(metadata.block_tables)
    native.check(
        native.attention(
            heads_of(query),
            out.data_ptr(),
            native_cache(cache),
            heads,
            len(metadata.query_lens),
            starts.data_ptr(),
            lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            scale,
            soft_cap,
            sliding_window,
        )
    )
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
    """As ``attention``, which shares out a long context over the threads by itself."""
    return attention(query, cache, metadata, scale, sliding_window, soft_cap)
