"""Weights go to a DCU one after another: several threads that copy to it at once have been seen to hang for hours."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from qiao.contract import KVCache, PackedWeight, WeightInfo, hookimpl
from qiao_triton import cache, matmul

_LANE = threading.Lock()
"""Held by whoever copies to a device, whatever thread it is."""


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """As the shared one, packed on the host; no two threads copy at once, and none goes on before its copy is done."""
    packed: PackedWeight = matmul.pack_weight(scheme, tensors, info, "cpu")
    with _LANE:
        data = {name: tensor.to(device, non_blocking=False) for name, tensor in packed.data.items()}
    return PackedWeight(scheme, info, matmul.Packed(data))


@hookimpl
def swap_blocks(source_cache: KVCache, target_cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """As the shared one, and not while a weight is copied."""
    with _LANE:
        cache.swap_blocks(source_cache, target_cache, source, target)
