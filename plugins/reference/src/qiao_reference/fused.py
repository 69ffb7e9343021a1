"""Fused family: here each hook is the contract's sequence itself."""

from __future__ import annotations

import torch
from qiao.contract import KVCache, composites, hookimpl

from qiao_reference.attention import write_kv


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``composites.rms_norm``."""
    return composites.rms_norm(x, weight, eps)


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``composites.add_rms_norm``."""
    return composites.add_rms_norm(x, residual, weight, eps)


@hookimpl
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``composites.rotary``."""
    return composites.rotary(query, key, cos, sin, interleaved)


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See ``composites.silu_mul``."""
    return composites.silu_mul(x)


@hookimpl
def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """See ``composites.gelu_mul``."""
    return composites.gelu_mul(x)


@hookimpl
def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See ``composites.cap_logits``."""
    return composites.cap_logits(logits, cap)


@hookimpl
def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``composites.route_experts``."""
    return composites.route_experts(logits, top_k, normalise)


@hookimpl
def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``composites.combine_experts``."""
    return composites.combine_experts(x, weights)


@hookimpl
def rope_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    cache: KVCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate query and key, store key and value, return the query."""
    query, key = composites.rotary(query, key, cos, sin, interleaved)
    write_kv(key, value, cache, slot_mapping)
    return query
