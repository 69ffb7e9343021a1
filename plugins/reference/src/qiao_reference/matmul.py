"""Matmul family: ``dense`` is torch's own product, the rest are dequantized a block of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl
from torch.nn import functional

_BLOCK = 1 << 24
"""Most weight elements that are dequantized at once (64 MiB of float32)."""

_EXACT_TERMS = 1024
"""128 * 128 * 1024 = 2^24: a float32 sum of so many int8 products is exact in any order."""


def _pack_nibbles(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] of 0..15 to [O, ceil(I / 2)] bytes, even columns in the low half."""
    weight = functional.pad(weight.to(torch.uint8), (0, weight.shape[1] % 2))
    return weight[:, 0::2] | (weight[:, 1::2] << 4)


def _unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[:, :columns]


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Four-bit weights two to a byte, the rest as they come. ``ValueError`` for an unknown scheme or a wrong shape."""
    weight = tensors["weight"]
    if tuple(weight.shape) != (info.out_features, info.in_features):
        raise ValueError(f"{info.name}: weight {tuple(weight.shape)} is not [{info.out_features}, {info.in_features}]")
    if scheme not in ("dense", "w8a16", "w8a8", "w4a16", "fp8"):
        raise ValueError(f"{info.name}: unknown weight scheme {scheme!r}")
    if scheme == "dense":
        return PackedWeight(scheme, info, {"weight": weight.to(device).contiguous()})
    data = {"weight": _pack_nibbles(weight) if scheme == "w4a16" else weight.contiguous()}
    data["scale"] = tensors["scale"].float()
    if "zero" in tensors:
        data["zero"] = tensors["zero"].float()
    if "perm" in tensors:
        data["perm"] = tensors["perm"].long()
    if "input_scale" in tensors:
        data["input_scale"] = tensors["input_scale"].float()
    return PackedWeight(scheme, info, {k: v.to(device) for k, v in data.items()})


def _spread(per_group: torch.Tensor, info: WeightInfo) -> torch.Tensor:
    """[o, groups] to [o, I]: each column gets its group's number."""
    if per_group.shape[1] == 1:
        return per_group
    size = info.group_size if info.group_size > 0 else -(-info.in_features // per_group.shape[1])
    return per_group.repeat_interleave(size, dim=1)[:, : info.in_features]


def _dequantized(weight: PackedWeight, first: int, last: int) -> torch.Tensor:
    """Rows ``first`` to ``last`` of the weight's value as float32."""
    data, info = weight.data, weight.info
    codes = data["weight"][first:last]
    value = (_unpack_nibbles(codes, info.in_features) if weight.scheme == "w4a16" else codes).float()
    if "zero" in data:
        value -= _spread(data["zero"][first:last], info)
    scale = data["scale"] if data["scale"].shape[0] == 1 else data["scale"][first:last]
    return value.mul_(_spread(scale, info))


def _weight_only(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    wide = x.float()
    rows = max(1, _BLOCK // max(1, weight.info.in_features))
    starts = range(0, weight.info.out_features, rows)
    return torch.cat([wide @ _dequantized(weight, s, s + rows).T for s in starts], dim=1)


def _int8_product(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Activations to int8, then an exact integer product.

    Per token: ``round(x / s)`` with ``s = max|x| / 127``; or with the weight's static ``s``, limited to -128..127.
    """
    wide = x.float()
    if "input_scale" in weight.data:
        step = weight.data["input_scale"]
        codes = (wide / step).round_().clamp_(-128, 127)
    else:
        step = wide.abs().amax(1, keepdim=True) / 127
        step = torch.where(step > 0, step, 1.0)
        codes = (wide / step).round_().clamp_(-127, 127)
    total = torch.zeros(x.shape[0], weight.info.out_features, dtype=torch.float64)
    for start in range(0, weight.info.in_features, _EXACT_TERMS):
        part = slice(start, start + _EXACT_TERMS)
        total += codes[:, part] @ weight.data["weight"][:, part].float().T
    return (total * step.double() * weight.data["scale"].double().T).float()


@hookimpl
def restore_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """As packed. ``Capabilities.packing`` is empty: the checkpoint itself is hardly slower to read."""
    weight = tensors.get("weight")
    if weight is None or weight.dim() != 2 or weight.shape[0] != info.out_features:
        raise ValueError(f"{info.name}: these tensors are no packed weight of {info.out_features} outputs")
    return PackedWeight(scheme, info, dict(tensors))


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``MatmulSpec.matmul``; sums are float32 or better."""
    if weight.scheme == "dense":
        return functional.linear(x, weight.data["weight"], None if bias is None else bias.to(x.dtype))
    if "perm" in weight.data:
        x = x.index_select(1, weight.data["perm"])
    out = _int8_product(x, weight) if weight.scheme == "w8a8" else _weight_only(x, weight)
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


@hookimpl
def expert_matmul(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    """One product for each expert that is chosen."""
    out = x.new_empty((x.shape[0], weights[0].info.out_features))
    for expert in experts.unique().tolist():
        rows = torch.nonzero(experts == expert)[:, 0]
        out[rows] = matmul(x[rows], weights[expert], None)
    return out
