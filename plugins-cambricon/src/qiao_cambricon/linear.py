"""Matmul family: dense, 4-bit and 8-bit weights under the names of both generations of torch_mlu_ops.

The kernels for quantized weights are symmetric, take groups of 64 to 512 and no act-order. A weight that asks for more
is dequantized at load and multiplied as a dense one. ``scaled_matmul`` of the newer generation gives 16 bits only:
float32 activations take the weight's value, made anew in each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl

from qiao_cambricon import _sdk, rules

_MIDDLE = 8
"""Zero point of a symmetric 4-bit weight held as 0..15."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Packed(PackedWeight):
    """A weight; ``shared`` holds by name what the experts of one layer have put together, ``data`` are views of it."""

    shared: dict[str, torch.Tensor] = field(default_factory=dict)


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Raises ``ValueError`` for a scheme that there is no operation for."""
    makers = {"dense": _dense, "w8a8": _eight_by_eight, "w4a16": _four_bit, "w8a16": _eight_bit}
    if scheme not in makers:
        raise ValueError(f"{info.name}: torch_mlu_ops has no operation for {scheme}")
    data = makers[scheme](tensors, info)
    return Packed(scheme, info, {name: tensor.to(device) for name, tensor in data.items()})


def _dense(tensors: Tensors, info: WeightInfo) -> dict[str, torch.Tensor]:
    return {"weight": tensors["weight"].contiguous()}


def _eight_by_eight(tensors: Tensors, info: WeightInfo) -> dict[str, torch.Tensor]:
    return {"codes": tensors["weight"].contiguous(), "scale": tensors["scale"].float().flatten()}


def _four_bit(tensors: Tensors, info: WeightInfo) -> dict[str, torch.Tensor]:
    if "perm" in tensors or not rules.takes_zero(tensors["zero"], _MIDDLE) or not rules.group_fits(info, 4):
        return {"weight": _dequantized(tensors, info)}
    return {"codes": _nibbles(tensors["weight"]), "scale": tensors["scale"].float().contiguous()}


def _eight_bit(tensors: Tensors, info: WeightInfo) -> dict[str, torch.Tensor]:
    """One scale a row, or a group that the kernel takes."""
    whole = tensors["scale"].shape[1] == 1
    there = _sdk.has("scaled_matmul") or _sdk.has("weight_only_quant_matmul")
    takes = there and "perm" not in tensors and rules.takes_zero(tensors.get("zero"), 0)
    if not takes or not (whole or rules.group_fits(info, 8)):
        return {"weight": _dequantized(tensors, info)}
    scale = tensors["scale"].float()
    return {"codes": tensors["weight"].contiguous(), "scale": scale.flatten() if whole else scale.contiguous()}


def _nibbles(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] of 0..15 to int8 [O, I/2] of two's complement nibbles, the even input in the low half."""
    signed = (weight.to(torch.int16) - _MIDDLE) & 15
    packed = signed[:, 0::2] | (signed[:, 1::2] << 4)
    return packed.to(torch.uint8).view(torch.int8).contiguous()


def _dequantized(tensors: Tensors, info: WeightInfo) -> torch.Tensor:
    """[O, I] in the scales' dtype, the columns in the order of the inputs; the last group may be short."""
    size = info.group_size if tensors["scale"].shape[1] > 1 else info.in_features
    value = tensors["weight"].float()
    if "zero" in tensors:
        value = value - tensors["zero"].float().repeat_interleave(size, 1)[:, : info.in_features]
    scale = tensors["scale"].float().repeat_interleave(size, 1)[:, : info.in_features]
    value = (value * scale).to(tensors["scale"].dtype)
    if "perm" not in tensors:
        return value
    ordered = torch.empty_like(value)
    ordered[:, tensors["perm"]] = value
    return ordered


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``MatmulSpec.matmul``."""
    rows, data = x.contiguous(), weight.data
    bias = None if bias is None else bias.to(x.dtype)
    if weight.scheme == "w8a8":
        return _by_int8(rows, data, bias)
    if "codes" in data:
        return _weight_only(rows, data, bias, 4 if weight.scheme == "w4a16" else 8)
    return _sdk.operation("matmul")(rows, data["weight"].to(x.dtype), bias, None, "none", 1.0, 0.0)


def _weight_only(x: torch.Tensor, data: Tensors, bias: torch.Tensor | None, bits: int) -> torch.Tensor:
    """A scale for each group is in the activations' dtype, one for each row in float32."""
    scale = data["scale"] if data["scale"].dim() == 1 else data["scale"].to(x.dtype)
    if not _sdk.has("scaled_matmul"):
        return _sdk.operation("weight_only_quant_matmul")(x, data["codes"], scale, None, bias, None, "none", bits)
    if x.dtype not in rules.HALVES:
        return _by_value(x, _signed(data["codes"], bits), data["scale"], bias)
    return _scaled(x, data["codes"], None, scale, bias, bits)


def _scaled(
    a: torch.Tensor,
    codes: torch.Tensor,
    a_scale: torch.Tensor | None,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``scaled_matmul``, whose later releases want to be told where activations are not quantized.

    By place: the fifth argument has had two names.
    """
    plain = a_scale is None and _sdk.accepts("scaled_matmul", "a_quant_bit_size")
    more = {"a_quant_bit_size": -1} if plain else {}
    return _sdk.operation("scaled_matmul")(  # type: ignore[no-any-return]
        a, codes, a_scale, scale, dtype or a.dtype, bias, None, "none", bits, **more
    )


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [O, I] of codes that may lie two in a byte."""
    if bits == 8:
        return codes
    pairs = codes.view(torch.uint8).to(torch.int16)
    both = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    return torch.where(both > 7, both - 16, both).to(torch.int8)


def _by_value(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    product: torch.Tensor = _sdk.operation("matmul")(x, codes.to(x.dtype) * wide, bias, None, "none", 1.0, 0.0)
    return product


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes and a float32 scale for each row of ``x``."""
    if _sdk.has("scaled_quantize"):
        return _sdk.operation("scaled_quantize")(x, quant_type=torch.int8, quant_mode="dynamic_per_token")
    smooth = torch.ones(x.shape[1], dtype=torch.float32, device=x.device)  # this generation demands one
    return _sdk.operation("per_token_smooth_quantize")(x, smooth)


def _by_int8(x: torch.Tensor, data: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
    codes, scale = data["codes"], data["scale"]
    a, a_scale = quantized(x)
    if not _sdk.has("scaled_matmul"):
        return _sdk.operation("smooth_quant_matmul")(a, a_scale, codes, scale, x.dtype, bias)
    if x.dtype not in rules.HALVES:
        return _by_value(a.to(x.dtype) * a_scale[:, None], codes, scale, bias)
    return _scaled(a, codes, a_scale, scale, bias, 8, x.dtype)
