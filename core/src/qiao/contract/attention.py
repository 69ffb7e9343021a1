"""Attention family: ragged batches, prefill and decode mixed, over block tables. Group KV.

Formula: ``softmax(mask(cap(scale * Q K^T))) V`` with ``cap(x) = soft_cap * tanh(x / soft_cap)`` where ``soft_cap`` > 0
(Gemma 2, arXiv 2408.00118, section 2), a causal mask, and, where ``sliding_window`` > 0, only the last
``sliding_window`` positions including the query's own (Mistral, arXiv 2310.06825).
"""

from __future__ import annotations

from typing import Any

import torch

from qiao.contract.markers import hookspec
from qiao.contract.types import AttentionMetadata, KVCache


class AttentionSpec:
    """Hooks that read and write the paged cache."""

    @hookspec
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [T, K, D] at ``slot_mapping`` [T] int64; -1 is skipped. Writes nothing else.

        They are rounded to the cache's dtype; for int8 see ``KVCache``.
        """
        raise NotImplementedError

    @hookspec
    def attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
    ) -> torch.Tensor:
        """Attend ``query`` [T, H, D] to the cache, this step's tokens included; returns [T, H, D] of its dtype."""
        raise NotImplementedError

    @hookspec
    def decode_attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int,
        soft_cap: float,
    ) -> torch.Tensor:
        """Optional. As ``attention`` where every sequence has exactly one query, so T = B."""
        raise NotImplementedError

    @hookspec
    def prepare_attention(
        self, metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> Any:
        """Optional. Once a step before the layers: whatever the kernels want to plan; arrives as ``metadata.plan``."""
        raise NotImplementedError
