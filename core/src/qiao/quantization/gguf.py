"""GGUF blocks taken apart into codes, scales and zeros: no value passes through 16 bits.

Layouts and formulas: ggml-common.h and ``dequantize_row_*`` in ggml-quants.c of llama.cpp. A block with a minimum,
``value = d * q + m``, has ``zero = -m / d``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from qiao.quantization.weight import QuantizedWeight, WeightForm

_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Codes [blocks, values], then scale and zero [blocks, groups]."""


def gguf_form(kind: str) -> WeightForm | None:
    """The form that blocks of a ggml type have; None for types that are kept or made floating point."""
    return _FORMS.get(kind)


def split_blocks(data: np.ndarray, kind: str, shape: tuple[int, int]) -> QuantizedWeight:
    """A tensor's bytes ``data`` [size] uint8 as a weight of ``shape`` [O, I]; ``kind`` must have a ``gguf_form``."""
    form, (split, size) = _FORMS[kind], _SPLITS[kind]
    codes, scale, zero = split(data.reshape(-1, size))
    tensors = {"weight": _torch(codes, shape[0]), "scale": _torch(scale, shape[0])}
    if zero is not None:
        tensors["zero"] = _torch(zero, shape[0])
    return QuantizedWeight(form, tensors)


def _torch(values: np.ndarray, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).view(rows, -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte ``at`` of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., n] to [..., 2n]: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _with_minimum(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> _Parts:
    """``scale * codes + minimum`` as codes, scale and zero.

    A group with scale 0 holds its minimum throughout: codes of 0 and a scale of 1 say so.
    """
    empty = scale == 0
    scale = np.where(empty, np.ones_like(scale), scale)
    if empty.any():
        per_group = codes.reshape(*empty.shape, -1)
        codes = np.where(empty[..., None], np.zeros_like(per_group), per_group).reshape(codes.shape)
    return codes, scale, -minimum.astype(np.float32) / scale.astype(np.float32)


def _q4_0(blocks: np.ndarray) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, np.full_like(scale, 8)


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _with_minimum(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


_SPLITS: Mapping[str, tuple[Callable[[np.ndarray], _Parts], int]] = MappingProxyType(
    {"Q4_0": (_q4_0, 18), "Q4_1": (_q4_1, 20), "Q8_0": (_q8_0, 34)}
)
"""How to take blocks apart, and their size in bytes."""

_FORMS: Mapping[str, WeightForm] = MappingProxyType(
    {"Q4_0": WeightForm("w4a16", 32), "Q4_1": WeightForm("w4a16", 32), "Q8_0": WeightForm("w8a16", 32)}
)
