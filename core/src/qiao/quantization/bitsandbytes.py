"""bitsandbytes checkpoints as transformers writes them: NF4 and FP4 become floating point, LLM.int8() is ``w8a16``.

4 bits: ``weight`` is bytes that hold two codes each, the first in the high half, row after row; ``quant_map`` [16] is
what a code stands for and ``absmax`` the factor of each ``blocksize`` values. ``quant_state.bitsandbytes__nf4`` is JSON
as bytes, with the shape. With double quantization ``absmax`` is bytes too, ``nested_quant_map[absmax] *
nested_absmax[block] + nested_offset``. 8 bits: ``weight`` [O, I] int8 times ``SCB`` [O] / 127.
Source: ``QuantState`` in ``functional.py`` of bitsandbytes, and its ``Linear8bitLt``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.quantization.packing import expect, integer_form, promised, scales
from qiao.quantization.weight import QuantizedWeight, Weight, WeightForm

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_TABLES = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


class BitsAndBytes:
    """See the module. The 4-bit codes mean values of a table, for which the contract has no form."""

    name = "bitsandbytes"
    markers = (*_STATES, "SCB")
    parts = ("weight", *_STATES, *_TABLES, "SCB", "weight_format")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._eight = bool(settings.get("load_in_8bit", settings.get("_load_in_8bit", False)))

    def promise(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> QuantizedWeight | None:
        """The weight's form and shape where it has 8 bits; None for 4, which become floating point."""
        if "SCB" not in shapes:
            return None
        rows, columns = shapes["weight"]
        return promised(integer_form(8, -1, columns), rows, columns)

    def form(self, module: str, columns: int) -> WeightForm | None:
        """By the settings alone."""
        return integer_form(8, -1, columns) if self._eight else None

    def weight(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Weight:
        """The weight [O, I] of ``module``."""
        if "SCB" in tensors:
            return _eight_bits(module, tensors)
        state = next(name for name in _STATES if name in tensors)
        return _four_bits(module, tensors, f"{module}.{state}", _read_state(f"{module}.{state}", tensors[state]))


def _eight_bits(module: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    codes, scale = tensors["weight"], scales(f"{module}.SCB", tensors["SCB"]).float()
    if codes.dtype != torch.int8 or codes.dim() != 2:
        kind = str(codes.dtype).removeprefix("torch.")
        raise ModelError(f"tensor {module}.weight is {kind} {list(codes.shape)}; with SCB it is read as int8 [O, I]")
    layout = tensors.get("weight_format")
    if layout is not None and bool(layout.any()):
        raise ModelError(f"tensor {module}.weight_format is not 0 (row); weights in a card's own tiles are not read")
    expect(f"{module}.SCB", scale.shape, (codes.shape[0],))
    return QuantizedWeight(integer_form(8, -1, codes.shape[1]), {"weight": codes, "scale": (scale / 127)[:, None]})


def _four_bits(module: str, tensors: Mapping[str, torch.Tensor], where: str, state: Mapping[str, Any]) -> torch.Tensor:
    rows, columns = _shape(where, state)
    block = _size(where, state, "blocksize")
    table = scales(f"{module}.weight.quant_map", tensors["weight.quant_map"]).float()
    expect(f"{module}.weight.quant_map", table.shape, (16,))
    held = tensors["weight"].contiguous().view(torch.uint8).flatten()  # some writers keep the bytes as other types
    expect(f"{module}.weight", held.shape, (-(-rows * columns // 2),))
    codes = torch.stack((held >> 4, held & 15), dim=-1).flatten()[: rows * columns]
    absmax = _absmax(module, tensors, where, state)
    expect(f"{module}.weight.absmax", absmax.shape, (-(-rows * columns // block),))
    values = table[codes.int()]
    whole = values.numel() // block * block
    values[:whole].view(-1, block).mul_(absmax[: whole // block, None])
    values[whole:].mul_(absmax[-1])
    return values.view(rows, columns)


def _absmax(module: str, tensors: Mapping[str, torch.Tensor], where: str, state: Mapping[str, Any]) -> torch.Tensor:
    absmax = tensors["weight.absmax"]
    if absmax.is_floating_point():
        return scales(f"{module}.weight.absmax", absmax).float()
    table = scales(f"{module}.weight.nested_quant_map", tensors["weight.nested_quant_map"]).float()
    factor = scales(f"{module}.weight.nested_absmax", tensors["weight.nested_absmax"]).float()
    expect(f"{module}.weight.nested_quant_map", table.shape, (256,))
    block, offset = _size(where, state, "nested_blocksize"), state.get("nested_offset", 0.0)
    if absmax.dtype != torch.uint8 or not isinstance(offset, float | int):
        raise ModelError(f"tensor {where}: the nested scales of {module} are not as bitsandbytes writes them")
    expect(f"{module}.weight.nested_absmax", factor.shape, (-(-absmax.numel() // block),))
    spread = factor.repeat_interleave(block)[: absmax.numel()]
    return table[absmax.int()] * spread + float(offset)


def _read_state(where: str, stored: torch.Tensor) -> Mapping[str, Any]:
    try:
        state = json.loads(bytes(stored.flatten().to(torch.uint8).tolist()))
    except ValueError as error:
        raise ModelError(f"tensor {where} is not JSON ({error}). The file is damaged.") from error
    if not isinstance(state, dict):
        raise ModelError(f"tensor {where} is not a JSON object. The file is damaged.")
    return state


def _shape(where: str, state: Mapping[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ModelError(f"tensor {where} gives the shape {shape!r}; a linear weight has two dimensions")
    return shape[0], shape[1]


def _size(where: str, state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"tensor {where} gives {key} {value!r}; it must be a whole number above 0")
    return value
