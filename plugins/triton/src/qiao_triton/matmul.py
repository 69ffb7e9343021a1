"""Matmul family: dense by torch, packed weights by one kernel for all formats, experts together by their addresses."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl
from torch.nn import functional

from qiao_triton.architectures import Architecture, Tile, parts, product_tile
from qiao_triton.cache import last_contiguous
from qiao_triton.launch import architecture_of, launch, power_of_two, wide

SCHEMES = ("dense", "w4a16", "w8a16", "w8a8", "fp8")

_KINDS = {"dense": 0, "w8a16": 1, "w4a16": 2, "fp8": 3, "w8a8": 4}
_WITHOUT_INT8 = 5
_UNIT = 32
"""Inputs of a unit of 4-bit codes, see ``kernels.products``."""

MOST_PARTS = 16
_SHORTEST = 256
"""Inputs that a part of the sum has at the least."""


class Packed(dict[str, torch.Tensor]):
    """Tensors of a weight. ``stacks`` are those of experts that it is the first of."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.stacks: list[Stack] = []


def _smallest(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the narrowest floating type that holds it exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return x.to(dtype)
    return x


def _nibbles(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] of 0..15 to bytes [I / 2, O], I filled up to whole units."""
    weight = functional.pad(weight.to(torch.uint8), (0, -weight.shape[1] % _UNIT))
    units = weight.view(weight.shape[0], -1, 2, _UNIT // 2)
    return (units[:, :, 0] | (units[:, :, 1] << 4)).flatten(1).T.contiguous()


def _zeros(scheme: str, zero: torch.Tensor | None) -> torch.Tensor | None:
    """[groups, O], or None where the kernel knows them: 8 for 4-bit codes, 0 for others."""
    if zero is None or bool((zero == (8 if scheme == "w4a16" else 0)).all()):
        return None
    return _smallest(zero.float()).T.contiguous()


@hookimpl
def pack_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """Codes [I, O], ``w8a8`` [O, I], scales and zeros [groups, O] in the narrowest exact type; copied once."""
    weight = tensors["weight"]
    if tuple(weight.shape) != (info.out_features, info.in_features):
        raise ValueError(f"{info.name}: weight {tuple(weight.shape)} is not [{info.out_features}, {info.in_features}]")
    if scheme not in SCHEMES:
        raise ValueError(f"{info.name}: there is no kernel for {scheme}; there are some for {', '.join(SCHEMES)}")
    if scheme == "dense":
        return PackedWeight(scheme, info, Packed({"weight": weight.to(device).contiguous()}))
    if scheme == "w4a16":
        data = {"weight": _nibbles(weight)}
    elif scheme == "fp8":
        data = {"weight": weight.view(torch.uint8).T.contiguous()}
    elif scheme == "w8a8":  # products of int8 take both operands along the sum, and nothing turns bytes on the way
        data = {"weight": weight.contiguous()}
    else:
        data = {"weight": weight.T.contiguous()}
    scale = tensors["scale"].float()
    if scheme == "fp8":
        scale = scale.expand(info.out_features, 1)
    data["scale"] = _smallest(scale.contiguous()).T.contiguous()
    zero = _zeros(scheme, tensors.get("zero"))
    if zero is not None:
        data["zero"] = zero
    if "perm" in tensors:
        data["perm"] = tensors["perm"].long()
    return PackedWeight(scheme, info, Packed({name: tensor.to(device) for name, tensor in data.items()}))


def _format(weight: PackedWeight, arch: Architecture, tile: Tile) -> dict[str, Any]:
    """The constants that depend on how the weight is packed."""
    data, info = weight.data, weight.info
    groups = data["scale"].shape[0] if "scale" in data else 1
    size = info.group_size if info.group_size > 0 else -(-info.in_features // groups)
    scales = 0 if groups == 1 else 1 if size % tile.depth == 0 else 2
    kind = _WITHOUT_INT8 if weight.scheme == "w8a8" and not arch.half else _KINDS[weight.scheme]
    return {"GROUP": size, "KIND": kind, "SCALES": scales, "ZERO": "zero" in data}


def _depth(weight: PackedWeight) -> int:
    """The deepest tile that keeps within one group where that is possible at all; bytes are half as wide."""
    if weight.scheme == "w8a8":
        return 128
    groups = weight.data["scale"].shape[0] if "scale" in weight.data else 1
    size = weight.info.group_size
    return 32 if groups > 1 and size > 0 and size % 64 else 64


def _strides(weight: PackedWeight) -> dict[str, int]:
    stored = weight.data["weight"]
    depth, out = stored.stride()[::-1] if weight.scheme in ("dense", "w8a8") else stored.stride()
    group = weight.data["scale"].stride(0) if "scale" in weight.data else 0
    return {"w_depth": depth, "w_out": out, "s_group": group, "rows": stored.shape[0]}


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of ``x`` [T, I] and the step of each token, float32 [T]."""
    tokens, depth = x.shape
    codes = torch.empty((tokens, depth), dtype=torch.int8, device=x.device)
    steps = torch.empty(tokens, dtype=torch.float32, device=x.device)
    arguments = {"codes": codes, "steps": steps, "x": x, "x_row": x.stride(0), "depth": depth}
    launch("products.round_rows", (tokens,), arguments, {"WIDTH": min(1024, power_of_two(depth))}, 4)
    return codes, steps


@hookimpl
def matmul(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``MatmulSpec.matmul``. Few tokens cut the sum into parts, which are added up in a fixed order."""
    data, info = weight.data, weight.info
    if weight.scheme == "dense":
        return functional.linear(x, data["weight"], None if bias is None else bias.to(x.dtype))
    arch, dtype = architecture_of(x), x.dtype
    x = x.index_select(1, data["perm"]) if "perm" in data else last_contiguous(x)
    tokens, depth, outputs = x.shape[0], info.in_features, info.out_features
    tile = product_tile(arch, tokens, wide(arch, dtype) and weight.scheme != "w8a8", _depth(weight))
    constants = _format(weight, arch, tile) | {"M": tile.rows, "N": tile.columns, "K": tile.depth}
    constants |= {"WIDE": wide(arch, dtype)}
    x, steps = _rounded(x) if weight.scheme == "w8a8" else (x, data["scale"])
    grid = (-(-outputs // tile.columns), -(-tokens // tile.rows))
    count = parts(arch, grid[0] * grid[1], max(1, min(MOST_PARTS, depth // _SHORTEST)))
    span = math.ceil(depth / (tile.depth * count)) * tile.depth
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    target = torch.empty((count, tokens, outputs), dtype=torch.float32, device=x.device) if count > 1 else out
    arguments = {"out": target, "x": x, "steps": steps, "weight": data["weight"], "scale": data["scale"]}
    arguments |= {"zero": data.get("zero", data["scale"]), "bias": data["scale"] if bias is None else bias}
    arguments |= {"tokens": tokens, "outputs": outputs, "depth": depth, "span": span}
    arguments |= {"o_part": tokens * outputs, "o_row": outputs, "x_row": x.stride(0), **_strides(weight)}
    constants |= {"BIAS": bias is not None and count == 1}
    launch("products.multiply", (*grid, count), arguments, constants, tile.warps, tile.stages)
    if count > 1:
        _add_parts(out, target, bias)
    return out


def _add_parts(out: torch.Tensor, partial: torch.Tensor, bias: torch.Tensor | None) -> None:
    count, tokens, outputs = partial.shape
    width = min(1024, power_of_two(outputs))
    arguments = {"out": out, "partial": partial, "bias": out if bias is None else bias}
    arguments |= {"outputs": outputs, "o_part": tokens * outputs}
    constants = {"PARTS": count, "BIAS": bias is not None, "WIDTH": width}
    launch("products.add_parts", (tokens, -(-outputs // width)), arguments, constants, 4)


@dataclass(frozen=True, slots=True)
class Stack:
    """A layer's experts: ``table`` [X, 3] int64 of where weight, scale and zero of each lie, and the tensors of each.

    The tensors are of one type and shape for all experts: where they were packed differently, scales and zeros are
    float32 copies, which live as long as this.
    """

    weights: tuple[PackedWeight, ...]
    data: tuple[Mapping[str, torch.Tensor], ...]
    table: torch.Tensor


def _alike(weights: Sequence[PackedWeight]) -> tuple[Mapping[str, torch.Tensor], ...]:
    kinds = {tuple(sorted((name, str(x.dtype)) for name, x in weight.data.items())) for weight in weights}
    if len(kinds) == 1:
        return tuple(weight.data for weight in weights)
    zeros = any("zero" in weight.data for weight in weights)
    found = []
    for weight in weights:
        data = {"weight": weight.data["weight"], "scale": weight.data["scale"].float()}
        if zeros:
            known = 8.0 if weight.scheme == "w4a16" else 0.0
            data["zero"] = weight.data.get("zero", torch.full_like(data["scale"], known)).float()
        found.append(data)
    return tuple(found)


def _stack(weights: Sequence[PackedWeight]) -> Stack:
    """Made once and kept with the first of ``weights``."""
    first = weights[0].data
    assert isinstance(first, Packed), "packed by another plugin"
    for known in first.stacks:
        if len(known.weights) == len(weights) and all(map(operator.is_, known.weights, weights)):
            return known
    alike = _alike(weights)
    rows = [[data.get(name, data["weight"]).data_ptr() for name in ("weight", "scale", "zero")] for data in alike]
    table = torch.tensor(rows, dtype=torch.int64).to(first["weight"].device)
    first.stacks.append(Stack(tuple(weights), alike, table))
    return first.stacks[-1]


@hookimpl
def expert_matmul(x: torch.Tensor, weights: Sequence[PackedWeight], experts: torch.Tensor) -> torch.Tensor:
    """Rows are put in the order of their experts on the device, and no number of them is read on the host."""
    arch, dtype, stack = architecture_of(x), x.dtype, _stack(weights)
    first = PackedWeight(weights[0].scheme, weights[0].info, stack.data[0])
    x, info = last_contiguous(x), first.info
    tokens, count = x.shape[0], len(weights)
    each = -(-tokens // count)  # as if every expert had as many
    tile = product_tile(arch, each, wide(arch, dtype) and first.scheme != "w8a8", _depth(first))
    ordered, order = experts.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, device=x.device)).int()
    constants = _format(first, arch, tile) | {"M": tile.rows, "N": tile.columns, "K": tile.depth}
    constants |= {"WIDE": wide(arch, dtype)}
    for constant, name in (("WEIGHT", "weight"), ("SCALE", "scale"), ("OFFSET", "zero")):
        constants[constant] = first.data.get(name, first.data["weight"]).dtype
    x, steps = _rounded(x) if first.scheme == "w8a8" else (x, x)
    out = torch.empty((tokens, info.out_features), dtype=dtype, device=x.device)
    arguments = {"out": out, "x": x, "steps": steps, "table": stack.table, "order": order, "starts": starts}
    arguments |= {"experts": count, "outputs": info.out_features, "depth": info.in_features}
    arguments |= {"o_row": info.out_features, "x_row": x.stride(0), **_strides(first)}
    grid = (-(-info.out_features // tile.columns), tokens // tile.rows + count)
    launch("products.multiply_experts", grid, arguments, constants, tile.warps, tile.stages)
    return out
