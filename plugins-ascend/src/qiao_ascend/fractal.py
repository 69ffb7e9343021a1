"""The cache of a 310P: fractals of 16 columns, [blocks, K * D / 16, block, 16], for ATB, which is part of NNAL."""

from __future__ import annotations

import torch
from qiao.contract import AttentionMetadata, KVCache

from qiao_ascend import _sdk

WIDTH = 16
HIDDEN = -10000.0
"""Added to a score that must not count; the kernels' float16 has no room for an infinity in sums."""


def allocate(blocks: int, block_size: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[2, blocks, columns / 16, block_size, 16] in the format NZ: keys, then values."""
    return _sdk.nz_empty((2, blocks, columns // WIDTH, block_size, WIDTH), dtype, device)


def write(
    key: torch.Tensor, value: torch.Tensor, key_memory: torch.Tensor, value_memory: torch.Tensor, slots: torch.Tensor
) -> None:
    """``_npu_reshape_and_cache``."""
    _sdk.atb("_npu_reshape_and_cache")(key, value, key_memory, value_memory, slots)


def attend(
    rows: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    kv_heads: int,
    scale: float,
    sliding_window: int,
) -> torch.Tensor:
    """Decodes by ``_npu_paged_attention``; other batches, and windows, by its split-fuse form with a mask."""
    out, heads = torch.empty_like(rows), rows.shape[1]
    if metadata.decode_only and sliding_window <= 0:
        _sdk.atb("_npu_paged_attention")(
            rows, cache.key, cache.value, kv_heads, heads, scale, metadata.block_tables, metadata.seq_lens, out
        )
        return out
    query_lens = torch.tensor(metadata.query_lens, dtype=torch.int32)  # the kernel's tiling reads it on the host
    _sdk.atb("_npu_paged_attention_splitfuse")(
        rows,
        cache.key,
        cache.value,
        metadata.block_tables,
        metadata.seq_lens,
        _mask(metadata, sliding_window, rows),
        query_lens,
        kv_heads,
        heads,
        scale,
        out,
    )
    return out


def _mask(metadata: AttentionMetadata, sliding_window: int, like: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, NZ [1, L / 16, T, 16], L and T rounded up to 16."""
    width = -(-max(metadata.kv_lens) // WIDTH) * WIDTH
    ends = [
        length - count + j + 1
        for count, length in zip(metadata.query_lens, metadata.kv_lens, strict=True)
        for j in range(count)
    ]
    at = torch.tensor(ends + [width] * (-len(ends) % WIDTH))[:, None]
    position = torch.arange(width)[None, :]
    hidden = position >= at
    if sliding_window > 0:
        hidden |= position < at - sliding_window
    mask = torch.zeros(hidden.shape, dtype=torch.float16).masked_fill_(hidden, HIDDEN)
    fractals = mask.view(len(at), -1, WIDTH).transpose(0, 1)[None].contiguous()
    return _sdk.nz(fractals.to(like.device))
