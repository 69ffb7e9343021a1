"""Integers of a few bits out of 32-bit words, and checks that all formats share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qiao.errors import ModelError
from qiao.quantization.weight import QuantizedWeight, WeightForm


def int32_words(name: str, words: torch.Tensor) -> torch.Tensor:
    """``words`` as int32 [n, m], contiguous. Raises ``ModelError`` naming the tensor where it is something else."""
    if words.dtype == torch.uint32:
        words = words.view(torch.int32)
    if words.dtype != torch.int32 or words.dim() != 2:
        kind = str(words.dtype).removeprefix("torch.")
        raise ModelError(
            f"tensor {name} is {kind} {list(words.shape)}; packed weights are read as int32 of two dimensions"
        )
    return words.contiguous()


def scales(name: str, found: torch.Tensor) -> torch.Tensor:
    """``found``, which must be finite floating point numbers. Raises ``ModelError`` naming the tensor."""
    if not found.is_floating_point():
        raise ModelError(f"tensor {name} is {str(found.dtype).removeprefix('torch.')}; scales are floating point")
    if not bool(found.float().isfinite().all()):
        raise ModelError(f"tensor {name} holds NaN or infinity. The file is damaged or badly quantized.")
    return found


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """``words`` [n, m] int32 as [n, m * 32 / bits] uint8: a stream of ``bits`` each, lowest first.

    Three bits cross words: 32 values take three of them.
    """
    step = math.gcd(32, bits)
    per_unit, values = bits // step, 32 // step
    units = words.view(words.shape[0], -1, per_unit)
    out = torch.empty(*units.shape[:2], values, dtype=torch.uint8)
    for i in range(values):
        word, offset = divmod(i * bits, 32)
        value = units[..., word] >> offset
        kept = 32 - offset
        if kept < bits:
            value = value & ((1 << kept) - 1) | units[..., word + 1] << kept
        out[..., i] = value & ((1 << bits) - 1)
    return out.view(words.shape[0], -1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The words [n, m * bits / 32] int32 from which ``unpack`` makes ``codes`` [n, m] uint8; they must fill them."""
    step = math.gcd(32, bits)
    per_unit, values = bits // step, 32 // step
    units = codes.view(codes.shape[0], -1, values).to(torch.int64)
    out = torch.zeros(*units.shape[:2], per_unit, dtype=torch.int64)
    for i in range(values):
        word, offset = divmod(i * bits, 32)
        out[..., word] |= units[..., i] << offset
        if offset + bits > 32:
            out[..., word + 1] |= units[..., i] >> (32 - offset)
    out &= 0xFFFFFFFF
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32).view(codes.shape[0], -1)


def integer_weight(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    group_size: int,
    perm: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Unsigned ``codes`` [O, I] of ``bits`` with whole ``zero`` points [O, groups], in the contract's form.

    Up to four bits become ``w4a16``, more ``w8a16``, where codes and zeros move down to int8's range.
    """
    form = integer_form(bits, group_size, codes.shape[1])
    if form.scheme == "w8a16":
        middle = 1 << (bits - 1)
        codes = (codes.to(torch.int16) - middle).to(torch.int8)
        zero = None if zero is None or bool((zero == middle).all()) else zero.to(torch.int16) - middle
    tensors = {"weight": codes if perm is None else codes.index_select(1, perm), "scale": scale}
    if zero is not None:
        tensors["zero"] = zero.to(scale.dtype)
    if perm is not None:
        tensors["perm"] = perm
    return QuantizedWeight(form, tensors)


def integer_form(bits: int, group_size: int, columns: int) -> WeightForm:
    """The form that ``integer_weight`` gives."""
    return WeightForm("w4a16" if bits <= 4 else "w8a16", group_size if 0 < group_size < columns else -1)


def groups_of(columns: int, group_size: int) -> int:
    """How many groups a row has; the last may be short."""
    return -(-columns // group_size) if 0 < group_size < columns else 1


def promised(form: WeightForm, rows: int, columns: int) -> QuantizedWeight:
    """A weight that is still in the file, on the meta device."""
    return QuantizedWeight(form, {"weight": torch.empty(rows, columns, dtype=torch.int8, device="meta")})


def expect(name: str, found: Sequence[int], shape: Sequence[int]) -> None:
    """Raise ``ModelError`` naming the tensor where its shape is not the one that the settings lead to."""
    if tuple(found) != tuple(shape):
        raise ModelError(
            f"tensor {name} has shape {list(found)}, but the quantization settings lead to {list(shape)}; "
            "quantization_config and the weights belong to different models"
        )


def number(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of a quantization config. Raises ``ModelError`` naming the key."""
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"quantization_config: {key} must be a whole number, got {value!r}")
    return value
