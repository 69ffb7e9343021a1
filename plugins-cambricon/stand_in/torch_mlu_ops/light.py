"""Norms, rotation, activation."""

from __future__ import annotations

from typing import Any

import torch
from qiao_conformance.sim import kernels
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import ask, enter, halves, int32, same_dtype

Tensor = torch.Tensor


@operation
def fused_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    eps: float,
    store_output_before_norm: bool,
    quant_scale: Tensor | None = None,
    out: Tensor | None = None,
    dynamic_quant: bool = False,
) -> Any:
    """With a residual and the flag: (normed, sum)."""
    index = enter("fused_rms_norm", x, residual, gamma)
    same_dtype("fused_rms_norm", x, residual, gamma)
    halves("fused_rms_norm", x)
    ask(gamma.shape == x.shape[-1:], "fused_rms_norm: gamma is as long as a row")
    total = kernels.raw(x) if residual is None else kernels.raw(x) + kernels.raw(residual)
    wide = total.float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * kernels.raw(gamma).float()).to(x.dtype)
    result = kernels.result("tmo.fused_rms_norm", normed, index)
    return (result, kernels.wrap(total, index)) if store_output_before_norm and residual is not None else result


@operation
def active(x: Tensor, act_mode: str, is_gated: bool) -> Tensor:
    """act(first half) * second half."""
    index = enter("active", x)
    ask(is_gated and act_mode == "silu" and x.shape[-1] % 2 == 0, "active: gated silu over an even width")
    gate, up = kernels.raw(x).float().chunk(2, -1)
    return kernels.result("tmo.active", (gate * torch.sigmoid(gate) * up).to(x.dtype), index)


@operation
def apply_rotary(
    x: Tensor,
    sin_cache: Tensor,
    cos_cache: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    discrete: bool,
    dynamic_ntk: bool,
    max_seqlen: int,
) -> Tensor:
    """In place. x [batch, tokens, heads, dim]; the tables hold each angle twice, [rows, rotated]."""
    name = "apply_rotary"
    enter(name, x, sin_cache, cos_cache, position_ids, cu_seqlens)
    halves(name, x)
    ask(x.dtype == sin_cache.dtype == cos_cache.dtype, f"{name}: tables are of the input's dtype")
    int32(name, position_ids, cu_seqlens)
    ask(
        position_ids is None and cu_seqlens is None and not discrete and not dynamic_ntk, f"{name}: not in the stand-in"
    )
    ask(x.dim() == 4 and x.shape[0] <= 10240, f"{name}: [batch, tokens, heads, dim], batches up to 10240")
    ask(2 <= x.shape[-1] <= 256, f"{name}: head size {x.shape[-1]}")
    rotated = sin_cache.shape[-1]
    ask(rotated % 2 == 0 and rotated <= x.shape[-1], f"{name}: {rotated} rotated dimensions")
    ask(sin_cache.shape == cos_cache.shape and sin_cache.shape[0] >= x.shape[1], f"{name}: a row for each position")
    ask(max_seqlen >= x.shape[1], f"{name}: max_seqlen")
    sin, cos = (kernels.raw(t)[: x.shape[1], None].float() for t in (sin_cache, cos_cache))
    turned = kernels.raw(x)[..., :rotated].float()
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        other = torch.cat((-high, low), -1)
    kernels.raw(x)[..., :rotated] = (turned * cos + other * sin).to(x.dtype)
    return x
