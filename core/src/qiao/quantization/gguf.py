"""GGUF blocks taken apart into codes, scales and zeros: no value passes through 16 bits.

Layouts and formulas: ggml-common.h and ``dequantize_row_*`` in ggml-quants.c of llama.cpp. A block with a minimum,
``value = d * q + m``, has ``zero = -m / d``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Four bytes of each block as 32 bits, each at the place of a fifth bit."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _q5_0(blocks: np.ndarray) -> _Parts:
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - 16
    return codes, _half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    codes = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).view(np.int8)
    return _with_minimum(codes, _half(blocks, 0), _half(blocks, 2))


def _shifted(packed: np.ndarray, run: int, shifts: Sequence[int]) -> np.ndarray:
    """Each run of bytes [blocks, n] once for each of ``shifts``, shifted right: [blocks, n * shifts]."""
    runs = packed.reshape(len(packed), -1, 1, run) >> np.array(shifts, dtype=np.uint8)[:, None]
    found: np.ndarray = runs.reshape(len(packed), -1)
    return found


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [blocks, 8] of Q4_K and Q5_K out of their 12 bytes."""
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high_scales, high_minima = (scales >> 2) & 0x30, (minima >> 2) & 0x30
    return (
        np.concatenate((scales & 63, rest & 15 | high_scales), axis=1),
        np.concatenate((minima & 63, rest >> 4 | high_minima), axis=1),
    )


def _super_block(codes: np.ndarray, blocks: np.ndarray, at: int, scales: np.ndarray, minima: np.ndarray) -> _Parts:
    """Groups whose scales and minima are multiples of the float16 numbers at ``at`` and two bytes on."""
    scale = _half(blocks, at).astype(np.float32) * scales
    minimum = _half(blocks, at + 2).astype(np.float32) * minima
    return _with_minimum(codes, scale, -minimum)


def _q2_k(blocks: np.ndarray) -> _Parts:
    codes = _shifted(blocks[:, 16:80], 32, (0, 2, 4, 6)) & 3
    return _super_block(codes, blocks, 80, blocks[:, :16] & 15, blocks[:, :16] >> 4)


def _q3_k(blocks: np.ndarray) -> _Parts:
    low, high = _shifted(blocks[:, 32:96], 32, (0, 2, 4, 6)) & 3, _shifted(blocks[:, :32], 32, range(8)) & 1
    four, two = _shifted(blocks[:, 96:104], 8, (0, 4)) & 15, _shifted(blocks[:, 104:108], 4, (0, 2, 4, 6)) & 3
    scale = _half(blocks, 108).astype(np.float32) * ((four | two << 4).view(np.int8) - 32)
    return low | high << 2, scale, np.full_like(scale, 4)


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _super_block(_shifted(blocks[:, 16:], 32, (0, 4)) & 15, blocks, 0, *_six_bits(blocks[:, 4:16]))


def _q5_k(blocks: np.ndarray) -> _Parts:
    low, high = _shifted(blocks[:, 48:], 32, (0, 4)) & 15, _shifted(blocks[:, 16:48], 32, range(8)) & 1
    return _super_block((low | high << 4).view(np.int8), blocks, 0, *_six_bits(blocks[:, 4:16]))


def _q6_k(blocks: np.ndarray) -> _Parts:
    low, high = _shifted(blocks[:, :128], 64, (0, 4)) & 15, _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6)) & 3
    scale = _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return (low | high << 4).view(np.int8) - 32, scale, None


_UNEVEN = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.int8)
"""What the codes of IQ4_NL and IQ4_XS stand for (``kvalues_iq4nl``)."""


def _iq4_nl(blocks: np.ndarray) -> _Parts:
    return _UNEVEN[_nibbles(blocks[:, 2:])], _half(blocks, 0), None


def _iq4_xs(blocks: np.ndarray) -> _Parts:
    codes = _UNEVEN[_shifted(blocks[:, 8:], 16, (0, 4)) & 15]
    high = (np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (_shifted(blocks[:, 4:8], 1, (0, 4)) & 15 | high.astype(np.uint8) << 4).view(np.int8) - 32
    return codes, _half(blocks, 0).astype(np.float32) * scales, None


_SPLITS: Mapping[str, tuple[Callable[[np.ndarray], _Parts], int]] = MappingProxyType(
    {
        "Q4_0": (_q4_0, 18),
        "Q4_1": (_q4_1, 20),
        "Q5_0": (_q5_0, 22),
        "Q5_1": (_q5_1, 24),
        "Q8_0": (_q8_0, 34),
        "Q2_K": (_q2_k, 84),
        "Q3_K": (_q3_k, 110),
        "Q4_K": (_q4_k, 144),
        "Q5_K": (_q5_k, 176),
        "Q6_K": (_q6_k, 210),
        "IQ4_NL": (_iq4_nl, 18),
        "IQ4_XS": (_iq4_xs, 136),
    }
)
"""How to take blocks apart, and their size in bytes."""

_FORMS: Mapping[str, WeightForm] = MappingProxyType(
    {
        **dict.fromkeys(("Q2_K", "Q3_K"), WeightForm("w4a16", 16)),
        **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), WeightForm("w4a16", 32)),
        **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q8_0", "IQ4_NL", "IQ4_XS"), WeightForm("w8a16", 32)),
        "Q6_K": WeightForm("w8a16", 16),
    }
)
