"""Matmul family: weights in strips of columns, see native/kernels.h."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl

from qiao_cpu import native

SCHEMES = ("dense", "w8a16", "w8a8", "w4a16")

_DENSE, _INT8, _INT4 = range(3)
_BLOCK = 32
"""Inputs that share a step of rounded activations; 4-bit weights are stored in blocks of as many."""

_ROUND = os.environ.get("QIAO_CPU_INT8_ACTIVATIONS", "1") != "0"


def _strips(rows: int) -> int:
    return -(-rows // native.strip())


def _in_strips(matrix: torch.Tensor) -> torch.Tensor:
    """[O, n] of 4- or 2-byte elements as [strips, n, strip], padded with zeros."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    out = torch.empty(_strips(rows), columns, native.strip(), dtype=matrix.dtype)
    native.check(native.pack_dense(matrix.data_ptr(), out.data_ptr(), rows, columns, matrix.element_size()))
    return out


def _pack_int8(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = codes.contiguous()
    rows, columns = codes.shape
    packed = torch.empty(_strips(rows), -(-columns // 4), native.strip(), 4, dtype=torch.int8)
    sums = torch.empty(_strips(rows), native.strip(), dtype=torch.int32)
    native.check(native.pack_int8(codes.data_ptr(), packed.data_ptr(), sums.data_ptr(), rows, columns))
    return {"weight": packed, "sums": sums}


def _pack_int4(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = codes.contiguous()
    rows, columns = codes.shape
    packed = torch.empty(_strips(rows), -(-columns // _BLOCK), native.strip(), _BLOCK // 2, dtype=torch.uint8)
    native.check(native.pack_int4(codes.data_ptr(), packed.data_ptr(), rows, columns))
    return {"weight": packed}


def _exact_in_half(tensor: torch.Tensor) -> bool:
    return bool((tensor.half().float() == tensor).all())


def _scales(tensors: Mapping[str, torch.Tensor], info: WeightInfo) -> dict[str, torch.Tensor]:
    """Scale and zero in strips: in 16 bits where that changes nothing, as with GPTQ's and GGUF's own scales."""
    found = {name: tensors[name].float() for name in ("scale", "zero") if name in tensors}
    dtype = torch.float16 if all(_exact_in_half(x) for x in found.values()) else torch.float32
    return {name: _in_strips(x.expand(info.out_features, -1).to(dtype)) for name, x in found.items()}


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """The weight in strips for the instruction set in use. ``ValueError`` for an unknown scheme or a wrong shape."""
    weight = tensors["weight"]
    if tuple(weight.shape) != (info.out_features, info.in_features):
        raise ValueError(f"{info.name}: weight {tuple(weight.shape)} is not [{info.out_features}, {info.in_features}]")
    if scheme not in SCHEMES:
        raise ValueError(f"{info.name}: unknown weight scheme {scheme!r}; there are {', '.join(SCHEMES)}")
    if scheme == "dense":
        kept = weight if weight.dtype in native.TYPES else weight.float()
        return PackedWeight(scheme, info, {"weight": _in_strips(kept)})
    if scheme == "w4a16":
        codes = weight.to(torch.uint8)
        data = _pack_int4(codes)
    else:
        data = _pack_int8(weight.to(torch.int8))
    data |= _scales(tensors, info)
    if "perm" in tensors:
        data["perm"] = tensors["perm"].long()
    return PackedWeight(scheme, info, data)


def _group(weight: PackedWeight) -> int:
    """Inputs that share a scale."""
    groups = weight.data["scale"].shape[1]
    size = weight.info.group_size
    return weight.info.in_features if groups == 1 else size if size > 0 else -(-weight.info.in_features // groups)


def _rounds(weight: PackedWeight, x: torch.Tensor, group: int, groups: int) -> bool:
    """Whether activations become int8: always in w8a8, in w4a16 where they are 16 bit and groups are whole blocks."""
    if weight.scheme == "w8a8":
        return True
    aligned = groups == 1 or group % _BLOCK == 0
    return weight.scheme == "w4a16" and _ROUND and aligned and x.dtype != torch.float32


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``MatmulSpec.matmul`` and native/matmul.h; sums are float32, or exact integers."""
    data, info = weight.data, weight.info
    packed = data["weight"]
    assert packed.shape[2] == native.strip(), f"{info.name} was packed for another instruction set"
    if "perm" in data:
        x = x.index_select(1, data["perm"])
    elif x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, info.out_features), dtype=x.dtype)
    scale = zero = sums = None
    kind, storage, scale_type, group, rounds = _DENSE, 0, 0, 1, False
    if weight.scheme == "dense":
        storage = native.TYPES[packed.dtype]
    else:
        kind = _INT4 if weight.scheme == "w4a16" else _INT8
        scale_type, scale = native.TYPES[data["scale"].dtype], data["scale"].data_ptr()
        zero = data["zero"].data_ptr() if "zero" in data else None
        sums = data["sums"].data_ptr() if "sums" in data else None
        group = _group(weight)
        rounds = _rounds(weight, x, group, data["scale"].shape[1])
    bias_type = 0
    if bias is not None:
        bias = bias.contiguous()
        bias_type = native.TYPES[bias.dtype]
    native.check(
        native.matmul(
            x.data_ptr(),
            x.stride(0),
            native.TYPES[x.dtype],
            rows,
            info.in_features,
            info.out_features,
            kind,
            storage,
            packed.data_ptr(),
            scale,
            zero,
            scale_type,
            group,
            sums,
            None if bias is None else bias.data_ptr(),
            bias_type,
            rounds,
            out.data_ptr(),
        )
    )
    return out
