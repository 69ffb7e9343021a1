"""Light operators of torch_npu."""

from __future__ import annotations

import torch
from qiao.contract import composites, hookimpl

from qiao_ascend import _sdk
from qiao_ascend.chips import fits_swiglu, profile_of


def _gain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """910B and 910C take a float32 weight beside half precision; 310P does not."""
    return weight.to(x.dtype) if profile_of(x.device).name == "310P" or weight.dtype != torch.float32 else weight


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``npu_rms_norm``."""
    normed, _ = _sdk.operation("npu_rms_norm")(x.contiguous(), _gain(x, weight), eps)
    return normed  # type: ignore[no-any-return]


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_add_rms_norm``, which takes three tensors of one dtype."""
    normed, _, total = _sdk.operation("npu_add_rms_norm")(
        x.contiguous(), residual.contiguous(), weight.to(x.dtype), eps
    )
    return normed, total


@hookimpl
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_rotary_mul`` in float32: angles in half precision would lose more than the contract allows.

    On 310P it pairs halves only, so interleaved pairs are left to plain operators.
    """
    if interleaved and profile_of(query.device).name == "310P":
        return composites.rotary(query, key, cos, sin, interleaved)
    mode, width = ("interleave", 2) if interleaved else ("half", 1)
    angles = []
    for one in (cos, sin):
        wide = one.repeat_interleave(2, dim=-1) if width == 2 else torch.cat((one, one), dim=-1)
        angles.append(wide[None, :, None].float().contiguous())
    turned = (_turned(x, *angles, mode) for x in (query, key))
    return next(turned), next(turned)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    size = cos.shape[-1]
    part = _sdk.operation("npu_rotary_mul")(x[None, ..., :size].float().contiguous(), cos, sin, mode)[0].to(x.dtype)
    return part if size == x.shape[-1] else torch.cat((part, x[..., size:]), dim=-1)


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``npu_swiglu``, whose gate is the first half; on 310P some widths are left to plain operators."""
    if not fits_swiglu(profile_of(x.device), x.shape[-1]):
        return composites.silu_mul(x)
    return _sdk.operation("npu_swiglu")(x.contiguous(), -1)  # type: ignore[no-any-return]


@hookimpl
def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_moe_gating_top_k_softmax`` in float32."""
    weights, experts, _ = _sdk.operation("npu_moe_gating_top_k_softmax")(logits.float().contiguous(), None, top_k)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts.long()
