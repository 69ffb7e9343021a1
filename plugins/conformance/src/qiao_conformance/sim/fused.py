"""Fused hooks of the simulated chip: the contract's sequences, on the private payloads, one launch each."""

from __future__ import annotations

import torch
from qiao.contract import KVCache, composites, hookimpl

from qiao_conformance.sim import kernels


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One kernel."""
    index = kernels.launch("rms_norm", x, weight)
    return kernels.result("rms_norm", composites.rms_norm(kernels.raw(x), kernels.raw(weight), eps), index)


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel, which keeps the sum in the residual's memory, as the contract allows."""
    index = kernels.launch("add_rms_norm", x, residual, weight)
    normed, total = composites.add_rms_norm(kernels.raw(x), kernels.raw(residual), kernels.raw(weight), eps)
    kernels.raw(residual).copy_(total)
    return kernels.result("add_rms_norm", normed, index), residual


def _turned(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return composites.rotary(kernels.raw(query), kernels.raw(key), kernels.raw(cos), kernels.raw(sin), interleaved)


@hookimpl
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel, in place, as the contract allows."""
    kernels.launch("rotary", query, key, cos, sin)
    turned = _turned(query, key, cos, sin, interleaved)
    for target, new in zip((query, key), turned, strict=True):
        kernels.raw(target).copy_(new)
    return query, key


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """One kernel."""
    index = kernels.launch("silu_mul", x)
    return kernels.result("silu_mul", composites.silu_mul(kernels.raw(x)), index)


@hookimpl
def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """One kernel."""
    index = kernels.launch("gelu_mul", x)
    return kernels.result("gelu_mul", composites.gelu_mul(kernels.raw(x)), index)


@hookimpl
def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """One kernel."""
    index = kernels.launch("cap_logits", logits)
    return kernels.result("cap_logits", composites.cap_logits(kernels.raw(logits), cap), index)


@hookimpl
def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel."""
    index = kernels.launch("route_experts", logits)
    weights, experts = composites.route_experts(kernels.raw(logits), top_k, normalise)
    return kernels.result("route_experts", weights, index), kernels.result("route_experts", experts, index)


@hookimpl
def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One kernel."""
    index = kernels.launch("combine_experts", x, weights)
    combined = composites.combine_experts(kernels.raw(x), kernels.raw(weights))
    return kernels.result("combine_experts", combined, index)


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
    """One kernel; the query is turned in place."""
    kernels.launch("rope_write_kv", query, key, value, cos, sin, cache.key, cache.value, slot_mapping)
    turned = _turned(query, key, cos, sin, interleaved)
    kernels.raw(query).copy_(turned[0])
    for part, new in ((cache.key, turned[1]), (cache.value, kernels.raw(value))):
        kernels.store(kernels.raw(part), cache.layout, new, kernels.raw(slot_mapping))
    return query
