"""Attention: the shared kernels, or FlashInfer's for batches with prefills where it is installed and asked for.

``QIAO_CUDA_ATTENTION=flashinfer`` chooses it. It takes heads of 64, 128 and 256 in half precision over a cache of the
same type; whatever it does not take is computed by the shared kernels. FlashAttention's paged kernels want pages of 256
tokens (version 2), which this plugin's caches do not have: it is found and named, and not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl
from qiao_triton import attention as kernels

decode_attention = kernels.decode_attention
"""The shared kernel: its parts are recorded in graphs, whatever the lengths are."""

_DIMS = (64, 128, 256)
_WORKSPACE = 128 << 20


def library() -> Any:
    """FlashInfer where it is asked for, else None. Raises ``RuntimeError`` where it is asked for and not installed."""
    if os.environ.get("QIAO_CUDA_ATTENTION", "") != "flashinfer":
        return None
    if find_spec("flashinfer") is None:
        raise RuntimeError("QIAO_CUDA_ATTENTION=flashinfer, but it is not installed: pip install qiao-cuda[flashinfer]")
    return import_module("flashinfer")


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Zeros, as FlashInfer asks for, kept for the life of the process."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Pages:
    """A step's page table in FlashInfer's form, all int32 on the device, with the sizes that its plan needs."""

    query_start: torch.Tensor
    first: torch.Tensor
    pages: torch.Tensor
    last_length: torch.Tensor
    heads: tuple[int, int, int, int]
    planned: dict[tuple[Any, ...], Any]


@hookimpl
def prepare_attention(
    metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> Any:
    """The page table, once a step for all layers; None where FlashInfer has no part in it."""
    if library() is None or head_dim not in _DIMS or metadata.decode_only:
        return None
    counts = [-(-length // block_size) for length in metadata.kv_lens]
    tables, device = metadata.block_tables, metadata.block_tables.device
    pages = torch.cat([tables[i, :count] for i, count in enumerate(counts)])
    first = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(n - 1) % block_size + 1 for n in metadata.kv_lens], dtype=torch.int32)
    sizes = (num_heads, num_kv_heads, head_dim, block_size)
    return Pages(metadata.query_start, first.to(device), pages, last.to(device), sizes, {})


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """By FlashInfer where there is a plan for it and the types fit, else by the shared kernel."""
    pages = metadata.plan
    if isinstance(pages, Pages) and query.dtype == cache.key.dtype and query.dtype != torch.float32:
        wrapper = _wrapper(pages, query.dtype, scale, sliding_window, soft_cap)
        return wrapper.run(query.contiguous(), (cache.key, cache.value))  # type: ignore[no-any-return]
    return _shared(query, cache, metadata, scale, sliding_window, soft_cap)


def _shared(*arguments: Any) -> torch.Tensor:
    function: Callable[..., torch.Tensor] = kernels.attention
    return function(*arguments)


def _wrapper(pages: Pages, dtype: torch.dtype, scale: float, window: int, cap: float) -> Any:
    """Planned once a step for each kind of layer; a window of n keys is n - 1 to the left in FlashInfer's count."""
    key = (dtype, scale, window, cap)
    if key not in pages.planned:
        wrapper = library().BatchPrefillWithPagedKVCacheWrapper(_workspace(pages.pages.device), "NHD")
        wrapper.plan(
            pages.query_start,
            pages.first,
            pages.pages,
            pages.last_length,
            *pages.heads,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window > 0 else -1,
            logits_soft_cap=cap,
            q_data_type=dtype,
        )
        pages.planned[key] = wrapper
    return pages.planned[key]
