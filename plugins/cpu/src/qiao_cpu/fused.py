"""Fused family. Results take their inputs' memory where the contract allows it."""

from __future__ import annotations

import torch
from qiao.contract import KVCache, hookimpl

from qiao_cpu import native
from qiao_cpu.attention import heads_of, last_contiguous
from qiao_cpu.cache import native_cache


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., E] as [rows, E] with E contiguous, sharing memory where possible."""
    return last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Both as [rows, E]; the sum goes to the residual's memory."""
    rows, size = x.shape
    weight = weight if weight.is_contiguous() else weight.contiguous()
    out = torch.empty((rows, size), dtype=x.dtype)
    status = native.norm(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        native.TYPES[x.dtype],
        weight.data_ptr(),
        native.TYPES[weight.dtype],
        out.data_ptr(),
        rows,
        size,
        eps,
    )
    native.check(status)
    return out


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``composites.rms_norm``."""
    out = _norm(_rows(x), None, weight, eps)
    return out if x.dim() == 2 else out.view(x.shape)


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``composites.add_rms_norm``; the sum takes the residual's memory."""
    if residual.dtype != x.dtype or residual.shape != x.shape:
        total = residual + x
        return rms_norm(total, weight, eps), total
    total = _rows(residual)
    out = _norm(_rows(x), total, weight, eps)
    return (out, total) if x.dim() == 2 else (out.view(x.shape), total.view(x.shape))


def _rotary_args(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> native.RotaryArgs:
    tokens, heads, size = query.shape
    return native.RotaryArgs(
        heads_of(query),
        heads_of(key),
        native.Heads(),
        tokens,
        heads,
        key.shape[1],
        size,
        2 * cos.shape[-1],
        interleaved,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.stride(0),
        sin.stride(0),
    )


@hookimpl
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``composites.rotary``; in place."""
    query, key = last_contiguous(query), last_contiguous(key)
    cos, sin = last_contiguous(cos.float()), last_contiguous(sin.float())
    native.check(native.rotary(_rotary_args(query, key, cos, sin, interleaved)))
    return query, key


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
    """``rotary`` in place and ``write_kv`` in one pass."""
    query, key, value = last_contiguous(query), last_contiguous(key), last_contiguous(value.to(key.dtype))
    cos, sin, slot_mapping = last_contiguous(cos.float()), last_contiguous(sin.float()), slot_mapping.contiguous()
    args = _rotary_args(query, key, cos, sin, interleaved)
    args.value, args.cache, args.slots = heads_of(value), native_cache(cache), slot_mapping.data_ptr()
    native.check(native.rotary(args))
    return query


def _gated(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    rows, size = _rows(x), x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    kind = native.TYPES[x.dtype]
    native.check(native.gated(rows.data_ptr(), rows.stride(0), kind, out.data_ptr(), rows.shape[0], size, gelu))
    return out


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See ``composites.silu_mul``."""
    return _gated(x, gelu=False)


@hookimpl
def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """See ``composites.gelu_mul``."""
    return _gated(x, gelu=True)


@hookimpl
def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See ``composites.cap_logits``; in place."""
    logits = _rows(logits)
    place = (logits.data_ptr(), logits.stride(0), native.TYPES[logits.dtype])
    native.check(native.soft_cap(*place, cap, *place, *logits.shape))
    return logits


@hookimpl
def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``composites.route_experts``; of equal shares the lower expert comes first."""
    logits = _rows(logits)
    rows, experts = logits.shape
    weights, ids = torch.empty((rows, top_k), dtype=logits.dtype), torch.empty((rows, top_k), dtype=torch.int64)
    place = logits.data_ptr(), logits.stride(0), native.TYPES[logits.dtype]
    status = native.route_experts(*place, rows, experts, top_k, normalise, weights.data_ptr(), ids.data_ptr())
    native.check(status)
    return weights, ids


@hookimpl
def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``composites.combine_experts``; the sum is float32, rounded once."""
    x, weights = x.contiguous(), weights.contiguous()
    tokens, chosen, size = x.shape
    out = torch.empty((tokens, size), dtype=x.dtype)
    shares = weights.data_ptr(), native.TYPES[weights.dtype]
    status = native.combine_experts(x.data_ptr(), native.TYPES[x.dtype], *shares, out.data_ptr(), tokens, chosen, size)
    native.check(status)
    return out
