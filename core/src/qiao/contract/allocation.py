"""Allocation family: the memory of the paged KV cache. Group KV."""

from __future__ import annotations

import torch

from qiao.contract.markers import hookspec
from qiao.contract.types import KVCache


class AllocationSpec:
    """Hooks that own cache memory."""

    @hookspec
    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        layout: str,
        device: str,
    ) -> KVCache:
        """One layer's cache in a layout and dtype that the plugin declared. Contents need not be zero.

        ``torch.int8`` comes with scales, see ``KVCache``; all hooks of the group then read and write both.
        Raises ``torch.OutOfMemoryError`` where the device is full.
        """
        raise NotImplementedError

    @hookspec
    def copy_blocks(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks inside ``cache``: block ``source[i]`` to ``target[i]``, both [n] int64, no overlap."""
        raise NotImplementedError

    @hookspec
    def swap_blocks(
        self, source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Optional. Copy whole blocks between a device's cache and a host's; ids [n] int64 on the host."""
        raise NotImplementedError
