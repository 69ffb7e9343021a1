"""Matmul family: dense, 4-bit and 8-bit weights under the names of both generations of torch_mlu_ops.

The 4-bit kernels are symmetric, take groups of 64 to 512 and no act-order. A weight that asks for more is dequantized
at load and multiplied as a dense one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl

from qiao_cambricon import _sdk
from qiao_cambricon.chips import GROUPS

_MIDDLE = 8
"""Zero point of a symmetric 4-bit weight held as 0..15."""


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Raises ``ValueError`` for a scheme that there is no operation for."""
    if scheme == "dense":
        data = {"weight": tensors["weight"].contiguous()}
    elif scheme == "w8a8":
        data = {"codes": tensors["weight"].contiguous(), "scale": tensors["scale"].float().flatten()}
    elif scheme == "w4a16" and _fits(tensors, info):
        data = {"codes": _nibbles(tensors["weight"]), "scale": tensors["scale"].float().contiguous()}
    elif scheme == "w4a16":
        data = {"weight": _dequantized(tensors, info)}
    else:
        raise ValueError(f"{info.name}: torch_mlu_ops has no operation for {scheme}")
    return PackedWeight(scheme, info, {name: tensor.to(device) for name, tensor in data.items()})


def _fits(tensors: Mapping[str, torch.Tensor], info: WeightInfo) -> bool:
    symmetric = bool((tensors["zero"] == _MIDDLE).all())
    return symmetric and "perm" not in tensors and info.group_size in GROUPS and info.in_features % 2 == 0


def _nibbles(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] of 0..15 to int8 [O, I/2] of two's complement nibbles, the even input in the low half."""
    signed = (weight.to(torch.int16) - _MIDDLE) & 15
    packed = signed[:, 0::2] | (signed[:, 1::2] << 4)
    return packed.to(torch.uint8).view(torch.int8).contiguous()


def _dequantized(tensors: Mapping[str, torch.Tensor], info: WeightInfo) -> torch.Tensor:
    """float32 [O, I] with the columns in the order of the inputs."""
    columns = info.in_features // tensors["scale"].shape[1]
    zero, scale = (tensors[name].float().repeat_interleave(columns, 1) for name in ("zero", "scale"))
    value = (tensors["weight"].float() - zero) * scale
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
        return _eight_bits(rows, data, bias)
    if "codes" in data:
        return _four_bits(rows, data, bias)
    return _sdk.operation("matmul")(rows, data["weight"].to(x.dtype), bias, None, "none", 1.0, 0.0)


def _four_bits(x: torch.Tensor, data: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    scale = data["scale"].to(x.dtype)
    if _sdk.has("scaled_matmul"):
        return _sdk.operation("scaled_matmul")(
            a=x, b=data["codes"], a_scale=None, b_scale=scale, out_dtype=x.dtype, bias=bias, quant_bit_size=4
        )
    return _sdk.operation("weight_only_quant_matmul")(x, data["codes"], scale, None, bias, None, "none", 4)


def _eight_bits(x: torch.Tensor, data: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    codes, scale = data["codes"], data["scale"]
    if _sdk.has("scaled_quantize", "scaled_matmul"):
        a, a_scale = _sdk.operation("scaled_quantize")(x, quant_type=torch.int8, quant_mode="dynamic_per_token")
        return _sdk.operation("scaled_matmul")(
            a=a, b=codes, a_scale=a_scale, b_scale=scale, out_dtype=x.dtype, bias=bias, quant_bit_size=8
        )
    smooth = torch.ones(x.shape[1], dtype=torch.float32, device=x.device)  # this generation demands one
    a, a_scale = _sdk.operation("per_token_smooth_quantize")(x, smooth)
    return _sdk.operation("smooth_quant_matmul")(a, a_scale, codes, scale, x.dtype, bias)
