"""Fused family over the kernels."""

from __future__ import annotations

from typing import Any

import torch
from qiao.contract import KVCache, hookimpl

from qiao_triton.architectures import lanes_for
from qiao_triton.cache import cache_arguments, cache_constants, last_contiguous, rows_together
from qiao_triton.launch import architecture_of, launch, power_of_two

PART = 1024
"""Most numbers of a row that one program of an element-wise kernel takes."""


def _norm(out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    size = x.shape[-1]
    width = power_of_two(size)
    arguments = {"out": out, "x": x, "residual": residual, "weight": weight.contiguous(), "eps": eps}
    arguments |= {"o_row": out.stride(0), "x_row": x.stride(0), "r_row": residual.stride(0)}
    constants = {"E": size, "WIDTH": width, "SUM": residual is not x}
    launch("light.norm", (x.shape[0],), arguments, constants, lanes_for(architecture_of(x), width))


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A program a row; rows of up to three dimensions are seen as two."""
    rows = last_contiguous(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _norm(out, rows, rows, weight, eps)
    return out.view(x.shape)


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place: the sum takes the residual's memory, the norm that of ``x``."""
    x, residual = last_contiguous(x), last_contiguous(residual)
    _norm(x, x, residual, weight, eps)
    return x, residual


def _heads(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[dict[str, Any], dict[str, Any], tuple[int]]:
    """Arguments, constants and grid of the two kernels that rotate."""
    (tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    together = rows_together(architecture_of(query), dim, tokens * max(heads, kv_heads))
    query_parts = -(-tokens * heads // together)
    found = {"query": query, "key": key, "cos": cos, "sin": sin, "a_token": cos.stride(0)}
    found |= {
        "q_token": query.stride(0),
        "q_head": query.stride(1),
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
    }
    found |= {"k_token": key.stride(0), "k_head": key.stride(1), "query_parts": query_parts}
    constants = {"D": dim, "WIDTH": power_of_two(dim), "ROWS": together, "PAIRS": cos.shape[1]}
    return found, constants | {"INTERLEAVED": interleaved}, (query_parts - (-tokens * kv_heads // together),)


@hookimpl
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place, a program for some heads of some tokens."""
    arguments, constants, grid = _heads(query, key, cos.contiguous(), sin.contiguous(), interleaved)
    warps = lanes_for(architecture_of(query), constants["ROWS"] * constants["WIDTH"])
    launch("cache.rotate", grid, arguments, constants, warps)
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
    """The query in place; the rotated key goes to the cache and nowhere else."""
    arguments, constants, grid = _heads(query, key, cos.contiguous(), sin.contiguous(), interleaved)
    arguments |= {"value": value, "v_token": value.stride(0), "v_head": value.stride(1), "slots": slot_mapping}
    arguments |= {"key_cache": cache.key, "value_cache": cache.value, **cache_arguments(cache)}
    constants |= cache_constants(cache)
    warps = lanes_for(architecture_of(query), constants["ROWS"] * constants["WIDTH"])
    launch("cache.rotate_write", grid, arguments, constants, warps)
    return query


def _gated(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    x = last_contiguous(x)
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    width = min(PART, power_of_two(size))
    arguments = {"out": out, "x": x, "o_row": size, "x_row": x.stride(0), "F": size}
    warps = lanes_for(architecture_of(x), width)
    launch("light.gate", (rows, -(-size // width)), arguments, {"WIDTH": width, "GELU": gelu}, warps)
    return out


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's half: ``silu(gate) * up``."""
    return _gated(x, gelu=False)


@hookimpl
def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """GEGLU's half: ``gelu_tanh(gate) * up``."""
    return _gated(x, gelu=True)


@hookimpl
def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """In place."""
    logits = last_contiguous(logits)
    rows, vocab = logits.shape
    width = min(PART, power_of_two(vocab))
    arguments = {"x": logits, "cap": cap, "x_row": logits.stride(0), "V": vocab}
    launch("light.capped", (rows, -(-vocab // width)), arguments, {"WIDTH": width}, 4)
    return logits


@hookimpl
def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A program a token."""
    logits = last_contiguous(logits)
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=logits.dtype, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    arguments = {"weights": weights, "experts": chosen, "logits": logits, "l_row": logits.stride(0), "X": experts}
    constants = {"TOP": top_k, "PLACES": power_of_two(top_k), "WIDTH": power_of_two(experts), "NORMALISE": normalise}
    launch("light.route", (tokens,), arguments, constants, 1)
    return weights, chosen


@hookimpl
def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums in float32, in the order of the experts."""
    x, weights = last_contiguous(x), last_contiguous(weights)
    tokens, chosen, size = x.shape
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    width = min(PART, power_of_two(size))
    arguments = {"out": out, "x": x, "weights": weights, "x_token": x.stride(0), "x_place": x.stride(1)}
    arguments |= {"w_token": weights.stride(0), "E": size}
    warps = lanes_for(architecture_of(x), width)
    launch("light.combine", (tokens, -(-size // width)), arguments, {"TOP": chosen, "WIDTH": width}, warps)
    return out
