"""Matmul family: weights in strips of columns, see native/kernels.h."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl
from torch.nn import functional

from qiao_cpu import native

SCHEMES = ("dense", "w8a16", "w8a8", "w4a16")

_DENSE, _INT8, _INT4 = range(3)
_BLOCK = 32
"""Quantized weights are stored in blocks of so many inputs."""

ROUND_VARIABLE = "QIAO_CPU_INT8_ACTIVATIONS"
"""``0`` keeps activations as they are before ``w4a16`` and ``w8a16`` weights packed from then on."""


def _rounds() -> bool:
    return os.environ.get(ROUND_VARIABLE, "1") != "0"


def rounded_schemes() -> tuple[str, ...]:
    """Weight-only schemes whose activations become int8 on the fly."""
    return ("w4a16", "w8a16") if _rounds() else ()


def _strips(rows: int) -> int:
    return -(-rows // int(native.strip()))


def _in_strips(matrix: torch.Tensor) -> torch.Tensor:
    """[O, n] of a float type as [strips, n, strip], padded with zeros; bfloat16 as [strips, ceil(n / 2), strip, 2]."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    shape = (-(-columns // 2), native.strip(), 2) if matrix.dtype == torch.bfloat16 else (columns, native.strip())
    out = torch.empty(_strips(rows), *shape, dtype=matrix.dtype)
    native.check(native.pack_dense(matrix.data_ptr(), out.data_ptr(), rows, columns, native.TYPES[matrix.dtype]))
    return out


def _pack_int8(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = codes.contiguous()
    rows, columns = codes.shape
    packed = torch.empty(_strips(rows), -(-columns // _BLOCK), native.strip(), _BLOCK, dtype=torch.int8)
    native.check(native.pack_int8(codes.data_ptr(), packed.data_ptr(), rows, columns))
    return {"weight": packed}


def _pack_int4(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = codes.contiguous()
    rows, columns = codes.shape
    packed = torch.empty(_strips(rows), -(-columns // _BLOCK), native.strip(), _BLOCK // 2, dtype=torch.uint8)
    native.check(native.pack_int4(codes.data_ptr(), packed.data_ptr(), rows, columns))
    return {"weight": packed}


def _exact_in_half(tensor: torch.Tensor) -> bool:
    return bool((tensor.half().float() == tensor).all())


def _rounded_block(scheme: str, info: WeightInfo, groups: int) -> int:
    """``PackedWeight.block`` of kernels.h: how many inputs share a step when activations become int8; 0 for none."""
    if scheme == "w8a8":
        return -1
    if not _rounds():
        return 0
    if groups == 1 or info.group_size % 32 == 0:
        return 32
    return 16 if info.group_size % 16 == 0 else 0


def _zeros(zero: torch.Tensor, scale: torch.Tensor, rounded: bool) -> tuple[str, torch.Tensor]:
    """The shortest form of the zero points, and its name.

    One zero for all is a number. Rounded kernels take ``shift``, zero times scale, where that fits 16 bits and zero
    does not: GGUF's Q4_1 stores that product, of which zero is the rounded quotient.
    """
    if bool((zero == zero.flatten()[0]).all()):
        return "all_zeros", zero.flatten()[0]
    shift = zero * scale
    near = shift.half().float()
    short = _exact_in_half(scale) and bool(((near - shift).abs() <= shift.abs() * 2.0**-22).all())
    return ("shift", near) if rounded and short and not _exact_in_half(zero) else ("zero", zero)


def _scales(tensors: Mapping[str, torch.Tensor], info: WeightInfo, rounded: bool) -> dict[str, torch.Tensor]:
    """Scale and zero in strips: in 16 bits where that changes nothing, as with GPTQ's and GGUF's own scales."""
    scale = tensors["scale"].float()
    parts, plain = {"scale": scale}, dict[str, torch.Tensor]()
    if "zero" in tensors:
        name, zero = _zeros(tensors["zero"].float(), scale, rounded)
        (plain if name == "all_zeros" else parts)[name] = zero
    dtype = torch.float16 if all(_exact_in_half(x) for x in parts.values()) else torch.float32
    return plain | {name: _in_strips(x.expand(info.out_features, -1).to(dtype)) for name, x in parts.items()}


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
        return PackedWeight(scheme, info, Packed(scheme, info, {"weight": _in_strips(kept)}))
    if "input_scale" in tensors:
        weight = functional.pad(weight, (0, 1))
    data = _pack_int4(weight.to(torch.uint8)) if scheme == "w4a16" else _pack_int8(weight.to(torch.int8))
    block = _rounded_block(scheme, info, tensors["scale"].shape[1])
    data |= _scales(tensors, info, block > 0) | {"block": torch.tensor(block)}
    if "perm" in tensors:
        data["perm"] = tensors["perm"].long()
    if "input_scale" in tensors:
        data["input_scale"] = tensors["input_scale"].float()
    return PackedWeight(scheme, info, Packed(scheme, info, data))


class Packed(dict[str, torch.Tensor]):
    """The tensors of a weight, and what the kernels read of them: made once, since it is needed in every call."""

    def __init__(self, scheme: str, info: WeightInfo, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.record = _record(scheme, info, tensors)
        self.strip, self.perm = tensors["weight"].shape[2], tensors.get("perm")
        self.input_scale = tensors.get("input_scale")
        self.stacks: list[tuple[Sequence[PackedWeight], Any]] = []
        """Of the first of a layer's experts: all of them, and an array of their records."""


def _record(scheme: str, info: WeightInfo, tensors: Mapping[str, torch.Tensor]) -> native.Weight:
    pointers = {name: tensors[name].data_ptr() for name in ("weight", "scale", "zero") if name in tensors}
    if scheme == "dense":
        storage = native.TYPES[tensors["weight"].dtype]
        return native.Weight(info.in_features, info.out_features, _DENSE, storage, group=1, **pointers)
    groups, size = tensors["scale"].shape[1], info.group_size
    inputs = info.in_features + ("input_scale" in tensors)
    group = inputs if groups == 1 else size if size > 0 else -(-info.in_features // groups)
    if "shift" in tensors:
        pointers["zero"] = tensors["shift"].data_ptr()
    return native.Weight(
        inputs,
        info.out_features,
        _INT4 if scheme == "w4a16" else _INT8,
        0,
        scale_type=native.TYPES[tensors["scale"].dtype],
        group=group,
        block=int(tensors["block"]),
        finest=native.finest() if scheme == "w8a16" else 127,
        zero_is_scaled="shift" in tensors,
        all_zeros=float(tensors["all_zeros"]) if "all_zeros" in tensors else 0.0,
        **pointers,
    )


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``MatmulSpec.matmul`` and native/matmul.h; sums are float32, or exact integers."""
    data, info = weight.data, weight.info
    if not isinstance(data, Packed):  # the core made a new mapping of the tensors
        data = Packed(weight.scheme, info, data)
    assert data.strip == native.strip(), f"{info.name} was packed for another instruction set"
    if data.input_scale is not None and x.shape[1] == info.in_features:
        return _by_static_step(x, weight, data.input_scale, bias)
    if data.perm is not None:
        x = x.index_select(1, data.perm)
    elif x.stride(-1) != 1:
        x = x.contiguous()
    rows, bias_data, bias_type = x.shape[0], None, 0
    if bias is not None:
        bias = bias.contiguous()
        bias_data, bias_type = bias.data_ptr(), native.TYPES[bias.dtype]
    out = torch.empty((rows, info.out_features), dtype=x.dtype)
    kind = native.TYPES[x.dtype]
    status = native.matmul(data.record, x.data_ptr(), x.stride(0), kind, rows, bias_data, bias_type, out.data_ptr())
    native.check(status)
    return out


def _by_static_step(
    x: torch.Tensor, weight: PackedWeight, step: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The kernel's step of a row is its largest value over 127. One input more, whose weights are 0, makes it ``step``.

    Values below -127 steps, which have the code -128, leave one step over that is multiplied by itself; they are rare.
    """
    wide, one = x.float(), step.expand(x.shape[0], 1)
    out = matmul(torch.cat((wide.clamp(min=-127 * step, max=127 * step), 127 * one), 1), weight, bias)
    below = (wide / step).round() < -127
    if bool(below.any()):
        out -= matmul(torch.cat((below * step, one), 1), weight, None)
    return out.to(x.dtype)


@hookimpl
def expert_matmul(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    """See ``MatmulSpec.expert_matmul``; rows of one expert are brought side by side, and its weight is read once."""
    records = _records(weights)
    x = x if x.stride(-1) == 1 else x.contiguous()
    experts = experts if experts.is_contiguous() else experts.contiguous()
    out = torch.empty((x.shape[0], weights[0].info.out_features), dtype=x.dtype)
    kind = native.TYPES[x.dtype]
    where = x.data_ptr(), x.stride(0), kind, x.shape[0]
    native.check(native.expert_matmul(records, len(weights), *where, experts.data_ptr(), out.data_ptr()))
    return out


def _records(weights: Sequence[PackedWeight]) -> Any:
    """An array of the weights' records, which lives as long as the first of them, since programs keep its address."""
    first = weights[0].data
    assert isinstance(first, Packed)
    for known, records in first.stacks:
        if known is weights or (len(known) == len(weights) and all(map(operator.is_, known, weights))):
            return records
    assert first.strip == native.strip(), f"{weights[0].info.name} was packed for another instruction set"
    made = [weight.data.record for weight in weights if isinstance(weight.data, Packed)]
    assert len(made) == len(weights), "packed by another plugin"
    records = (native.Weight * len(made))(*made)
    first.stacks.append((weights, records))
    return records
