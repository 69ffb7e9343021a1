"""Matmul family: dense products by torch's own operator, quantized ones by torch_npu's.

CANN's value of a quantized weight is ``(code + offset) * scale``, the contract's ``(code - zero) * scale`` with codes
of 0..15 in 4 bits. So a 4-bit code is stored less 8, and its offset is ``8 - zero``. A weight that the kernels have no
case for is dequantized when it is loaded and multiplied as a dense one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl
from torch.nn import functional

from qiao_ascend import _sdk
from qiao_ascend.chips import Profile, fits_group, fits_int4, profile_of

_MIDDLE = 8
Data = Mapping[str, torch.Tensor]


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Raises ``ValueError`` for a scheme that the chip has no operator for."""
    found = profile_of(torch.device(device))
    if scheme not in found.schemes:
        raise ValueError(f"{info.name}: {found.name} has no operator for {scheme}")
    if scheme == "dense":
        data = {"weight": tensors["weight"].contiguous()}
    elif scheme == "w8a8":
        data = {"codes": tensors["weight"].T.contiguous(), "scale": tensors["scale"].float().flatten()}
    else:
        data = _weight_only(scheme, tensors, info, found)
    return PackedWeight(scheme, info, {name: tensor.to(device) for name, tensor in data.items()})


def _weight_only(scheme: str, tensors: Data, info: WeightInfo, found: Profile) -> dict[str, torch.Tensor]:
    """``codes`` [I, O], packed where the chip takes it, ``scale`` and perhaps ``offset`` [groups, O]; or ``weight``."""
    rows, columns, groups = info.in_features, info.out_features, tensors["scale"].shape[1]
    group = 0 if groups == 1 else info.group_size
    fits = fits_int4 if scheme == "w4a16" and found.packed_int4 else fits_group
    if not fits(rows, columns, group):
        return {"weight": _dequantized(tensors, info)}
    codes = tensors["weight"].T
    data = {"scale": tensors["scale"].float().T.contiguous()}
    if scheme == "w4a16":
        codes = codes.to(torch.int8) - _MIDDLE
        data["offset"] = (_MIDDLE - tensors["zero"].float()).T.contiguous()
        codes = pack_int4(codes) if found.packed_int4 else codes
    elif "zero" in tensors:
        data["offset"] = -tensors["zero"].float().T.contiguous()
    data["codes"] = codes.contiguous()
    if "perm" in tensors:
        data["perm"] = tensors["perm"].long()
    return data


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 [K, N] of -8..7 to int32 [K, N / 8]: eight neighbours of a row to a word, the first in the lowest bits."""
    parts = (codes.to(torch.int32) & 15).unflatten(-1, (-1, 8))
    packed = parts[..., 0].clone()
    for place in range(1, 8):
        packed |= parts[..., place] << (4 * place)
    return packed


def _dequantized(tensors: Data, info: WeightInfo) -> torch.Tensor:
    """float32 [O, I] with the columns in the order of the inputs."""
    size = info.group_size if tensors["scale"].shape[1] > 1 else info.in_features
    scale = tensors["scale"].float().repeat_interleave(size, 1)[:, : info.in_features]
    value = tensors["weight"].float()
    if "zero" in tensors:
        value = value - tensors["zero"].float().repeat_interleave(size, 1)[:, : info.in_features]
    value = value * scale
    if "perm" not in tensors:
        return value
    ordered = torch.empty_like(value)
    ordered[:, tensors["perm"]] = value
    return ordered


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``MatmulSpec.matmul``."""
    data = weight.data
    if "weight" in data:
        return functional.linear(x, data["weight"].to(x.dtype), None if bias is None else bias.to(x.dtype))
    rows = x.contiguous()
    return _eight_bits(rows, data, bias) if weight.scheme == "w8a8" else _antiquant(rows, data, weight.info, bias)


def _group(data: Data, info: WeightInfo) -> int:
    return 0 if data["scale"].shape[0] == 1 else info.group_size


def _antiquant(x: torch.Tensor, data: Data, info: WeightInfo, bias: torch.Tensor | None) -> torch.Tensor:
    """``npu_weight_quant_batchmatmul``, which wants scales of x's dtype and a float32 bias beside bfloat16.

    The columns of a weight with act-order stand in the order of their groups, so the inputs are brought into it.
    """
    rows = x.index_select(1, data["perm"]) if "perm" in data else x
    offset = data["offset"].to(x.dtype) if "offset" in data else None
    added = None if bias is None else bias.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
    return _sdk.operation("npu_weight_quant_batchmatmul")(  # type: ignore[no-any-return]
        rows,
        data["codes"],
        data["scale"].to(x.dtype),
        offset,
        bias=added,
        antiquant_group_size=_group(data, info),
    )


def _eight_bits(x: torch.Tensor, data: Data, bias: torch.Tensor | None) -> torch.Tensor:
    """``npu_dynamic_quant``, then ``npu_quant_matmul`` with float32 scales (fp16 ones are refused by some formats)."""
    codes, step = _sdk.operation("npu_dynamic_quant")(x)
    return _sdk.operation("npu_quant_matmul")(  # type: ignore[no-any-return]
        codes,
        data["codes"],
        data["scale"],
        pertoken_scale=step,
        bias=None if bias is None else bias.float(),
        output_dtype=x.dtype,
    )


@hookimpl
def expert_matmul(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    """``npu_grouped_matmul`` over rows brought together by expert; nothing is read on the host.

    Eight-bit activations and weights with a short last group, of whose size the operator is not told, take one product
    an expert, which reads how many rows each has.
    """
    first = weights[0]
    if first.scheme == "w8a8" or _has_short_group(first) or len(weights) > _MOST_WEIGHTS:
        return _one_by_one(x, weights, experts)
    order = torch.argsort(experts.float(), stable=True)  # whole numbers would be sorted by the chip's CPU
    sorted_rows = x.index_select(0, order)
    counts = torch.zeros(len(weights), dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    out = _sdk.operation("npu_grouped_matmul")(
        [sorted_rows],
        _operands(weights, x.dtype),
        group_list=counts.cumsum(0),
        split_item=3,
        group_type=0,
        **_scales(weights, x.dtype),
    )[0]
    return torch.empty_like(out).index_copy_(0, order, out)


def _has_short_group(weight: PackedWeight) -> bool:
    groups = weight.data["scale"].shape[0] if "scale" in weight.data else 1
    return groups > 1 and weight.info.in_features % weight.info.group_size > 0


_MOST_WEIGHTS = 128
"""Of one grouped product."""


def _operands(weights: Sequence[PackedWeight], dtype: torch.dtype) -> list[torch.Tensor]:
    if "weight" in weights[0].data:
        return [w.data["weight"].to(dtype).T for w in weights]
    return [w.data["codes"] for w in weights]


def _scales(weights: Sequence[PackedWeight], dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """One row of scales a channel stands alone; several are a matrix."""
    if "codes" not in weights[0].data:
        return {}
    found = {}
    for name, wanted in (("scale", "antiquant_scale"), ("offset", "antiquant_offset")):
        if name in weights[0].data:
            found[wanted] = [w.data[name].to(dtype).squeeze(0) for w in weights]
    return found


def _one_by_one(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((x.shape[0], weights[0].info.out_features))
    for expert in experts.unique().tolist():
        rows = torch.nonzero(experts == expert)[:, 0]
        out.index_copy_(0, rows, matmul(x.index_select(0, rows), weights[expert], None))
    return out
