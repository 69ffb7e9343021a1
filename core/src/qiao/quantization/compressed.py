"""Checkpoints of compressed-tensors (llm-compressor): 4 and 8 bit integers and FP8, by group, channel or tensor.

FP8 with a scale for each block of rows and columns becomes floating point.

``pack-quantized``: ``weight_packed`` [O, I * bits / 32] int32 holds signed integers raised by ``2 ** (bits - 1)``.
``int-quantized``: ``weight`` [O, I] int8. ``float-quantized``: ``weight`` float8_e4m3fn. Beside it ``weight_scale``
[O, groups], ``weight_zero_point`` (packed along O with packed weights), ``weight_shape`` and ``weight_g_idx``.
Source: ``compressed_tensors/compressors`` of the package.

Activations of ``w8a8`` are rounded per token as it runs, or by the static ``input_scale`` where inputs are symmetric
and not dynamic. Where static inputs have a zero point they are rounded per token too, which is finer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.quantization.fp8 import FORM as FP8_FORM
from qiao.quantization.fp8 import fp8_blocks, fp8_weight
from qiao.quantization.gptq import permutation
from qiao.quantization.packing import (
    expect,
    groups_of,
    int32_words,
    integer_form,
    integer_weight,
    promised,
    scales,
    unpack,
)
from qiao.quantization.weight import QuantizedWeight, Weight, WeightForm

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("group", "channel", "tensor")
_BLOCKS = "block"
_PACKED_BITS = (2, 4, 8)


class CompressedTensors:
    """See the module."""

    name = "compressed-tensors"
    markers = ("weight_packed", "weight_scale")
    parts = (
        "weight_packed",
        "weight",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._format = settings.get("format")
        groups = settings.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ModelError("quantization_config: config_groups must say how weights are quantized")
        self._groups = list(groups.values())
        self._ignore = tuple(settings.get("ignore") or ())
        for group in self._groups:
            self._check(group)

    def promise(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> QuantizedWeight | None:
        """The weight's form and shape from the shapes of its parts; None where it becomes floating point."""
        if "weight_packed" in shapes:
            rows, words = shapes["weight_packed"]
            columns = words * 32 // self._of(module)["weights"]["num_bits"]
        else:
            rows, columns = shapes["weight"]
        form = self.form(module, columns)
        return None if form is None else promised(form, rows, columns)

    def form(self, module: str, columns: int) -> WeightForm | None:
        """By the settings alone."""
        group = self._of(module)
        weights = group["weights"]
        if weights.get("strategy") == _BLOCKS:
            return None
        if weights["type"] == "float":
            return FP8_FORM
        if _rounds_activations(group) and weights.get("symmetric", True):
            return WeightForm("w8a8")
        return integer_form(weights["num_bits"], _group_size(weights), columns)

    def weight(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Weight:
        """The weight of ``module`` [O, I]."""
        group = self._of(module)
        weights = group["weights"]
        if weights.get("strategy") == _BLOCKS:
            block = tuple(weights["block_structure"])
            return fp8_blocks(module, tensors["weight"], tensors["weight_scale"], block, "weight_scale")
        if weights["type"] == "float":
            return fp8_weight(module, tensors["weight"], tensors["weight_scale"])
        bits, size = weights["num_bits"], _group_size(weights)
        middle = 1 << (bits - 1)
        packed = "weight_packed" in tensors
        if packed:
            codes = unpack(int32_words(f"{module}.weight_packed", tensors["weight_packed"]), bits)
        else:
            codes = _raised(_int8(module, tensors["weight"]), middle)
        if "weight_shape" in tensors:  # the last word of a row may be filled up
            codes = codes[:, : int(tensors["weight_shape"][1])].contiguous()
        rows, columns = codes.shape
        given = scales(f"{module}.weight_scale", tensors["weight_scale"])
        scale = given.reshape(-1, 1) if size < 0 else given
        scale = scale.expand(rows, -1) if scale.shape[0] == 1 else scale
        expect(f"{module}.weight_scale", scale.shape, (rows, groups_of(columns, size)))
        zero = self._zero(module, tensors, bits, scale, packed)
        if zero is None and not weights.get("symmetric", True):
            raise KeyError("weight_zero_point")
        if weights.get("actorder") in ("group", True) and "weight_g_idx" not in tensors:
            raise KeyError("weight_g_idx")
        perm = permutation(f"{module}.weight_g_idx", tensors.get("weight_g_idx"), columns, size, True)
        if _rounds_activations(group) and zero is None:
            found = {"weight": _lowered(codes), "scale": scale.contiguous()}
            found |= _input_scale(module, tensors, group["input_activations"])
            return QuantizedWeight(WeightForm("w8a8"), found)
        if zero is None:
            zero = torch.full(scale.shape, middle, dtype=torch.uint8)
        return integer_weight(codes, scale.contiguous(), zero, bits, size, perm)

    def _zero(
        self, module: str, tensors: Mapping[str, torch.Tensor], bits: int, scale: torch.Tensor, packed: bool
    ) -> torch.Tensor | None:
        zero = tensors.get("weight_zero_point")
        if zero is None:
            return None
        if packed and zero.dtype == torch.int32:
            words = int32_words(f"{module}.weight_zero_point", zero)
            zero = unpack(words.T.contiguous(), bits).T[: scale.shape[0]]
        else:
            zero = _raised(zero.reshape(-1, scale.shape[1]).expand(scale.shape[0], -1), 1 << (bits - 1))
        expect(f"{module}.weight_zero_point", zero.shape, scale.shape)
        return zero.contiguous()

    def _of(self, module: str) -> Mapping[str, Any]:
        """The group of ``module``: one that names it, else the one for all linear layers."""
        if any(_names(rule, module) for rule in self._ignore):
            raise ModelError(f"tensor {module}.weight_scale is there, but quantization_config: ignore leaves it out")
        named = [g for g in self._groups if any(_names(rule, module) for rule in g.get("targets") or ())]
        general = [g for g in self._groups if "Linear" in (g.get("targets") or ())]
        if not named and not general:
            raise ModelError(f"tensor {module}.weight_scale is there, but no group of quantization_config targets it")
        return dict((named or general)[0])

    def _check(self, group: Any) -> None:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ModelError("quantization_config: each of config_groups must have weights")
        form = group.get("format") or self._format
        bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy", "tensor")
        known = bits == 8 if kind == "float" else kind == "int" and bits in _PACKED_BITS
        block = weights.get("block_structure")
        whole = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        fits = kind == "float" and whole if strategy == _BLOCKS else strategy in _STRATEGIES
        if form not in (*_FORMATS, None) or not known or not fits:
            raise ModelError(
                f"quantization_config: format {form!r} with {bits} bits of {kind}, strategy {strategy!r}, is not read; "
                f"{', '.join(_FORMATS)} with 2, 4 or 8 bits of int or 8 of float, by {', '.join(_STRATEGIES)}, "
                "and FP8 by block, are"
            )


def _names(rule: str, module: str) -> bool:
    """Whether a target or an exception means ``module``: by its name, or by a pattern after ``re:``."""
    if rule.startswith("re:"):
        return re.match(rule.removeprefix("re:"), module) is not None
    return rule == module


def _group_size(weights: Mapping[str, Any]) -> int:
    return int(weights["group_size"]) if weights.get("strategy", "tensor") == "group" else -1


def _rounds_activations(group: Mapping[str, Any]) -> bool:
    """Whether both sides are 8-bit integers and each output has one scale."""
    weights, inputs = group["weights"], group.get("input_activations") or {}
    return bool(weights["num_bits"] == 8 and inputs.get("num_bits") == 8 and _group_size(weights) < 0)


def _input_scale(
    module: str, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The static scale [1, 1] of the inputs, by its name in the contract; nothing where they are rounded per token."""
    if inputs.get("dynamic", False) or not inputs.get("symmetric", True):
        return {}
    if "input_scale" not in tensors:
        raise KeyError("input_scale")
    found = scales(f"{module}.input_scale", tensors["input_scale"]).float().reshape(-1)
    expect(f"{module}.input_scale", found.shape, (1,))
    if not bool(found > 0.0):
        raise ModelError(f"tensor {module}.input_scale is {float(found)}; a scale is above 0. The file is damaged.")
    return {"input_scale": found[:, None]}


def _int8(module: str, values: torch.Tensor) -> torch.Tensor:
    if values.dtype != torch.int8:
        kind = str(values.dtype).removeprefix("torch.")
        raise ModelError(f"tensor {module}.weight is {kind}; whole weights are read as int8")
    return values


def _raised(values: torch.Tensor, middle: int) -> torch.Tensor:
    return (values.to(torch.int16) + middle).to(torch.uint8)


def _lowered(codes: torch.Tensor) -> torch.Tensor:
    return (codes.to(torch.int16) - 128).to(torch.int8)
