"""Writers of quantized checkpoints, from the definitions of the formats and bit by bit: slow, and unlike the readers.

Each makes random codes for a linear weight and returns the file's tensors and the float values [O, I] that they mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_config, rand_checkpoint

LINEAR = r"(q|k|v|o|gate|up|down)_proj"

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
Writer = Callable[[str, tuple[int, int], np.random.Generator], Written]


def quantized_checkpoint(
    path: Path,
    writer: Writer,
    settings: dict[str, Any] | None,
    linear: str = LINEAR,
    **config: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """RAND with each linear layer that matches ``linear`` replaced by what ``writer`` makes, and its float values."""
    rand_checkpoint(path, **config)
    tensors, values = {}, {}
    for i, (name, tensor) in enumerate(load_file(path / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and re.search(linear, module) and tensor.dim() == 2:
            parts, value = writer(module, (tensor.shape[0], tensor.shape[1]), np.random.default_rng(i))
            tensors.update({f"{module}.{part}": x.contiguous() for part, x in parts.items()})
            values[name] = value.float()
        else:
            tensors[name] = values[name] = tensor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if settings is not None:
        edit_config(path, quantization_config=settings)
    return path, values


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each row as one long number, the first code lowest, cut into 32-bit words."""
    out = np.zeros((codes.shape[0], codes.shape[1] * bits // 32), dtype=np.uint32)
    for r, row in enumerate(codes.tolist()):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        for w in range(out.shape[1]):
            out[r, w] = number >> (32 * w) & 0xFFFFFFFF
    return out.view(np.int32)


def _torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _scales(random: np.random.Generator, shape: Sequence[int], high: int) -> np.ndarray:
    return (random.uniform(0.5, 1.5, tuple(shape)) * 0.6 / high).astype(np.float16)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    second: bool = False,
    g_idx: bool = True,
    zeros: Callable[[np.ndarray], np.ndarray] = lambda z: z,
) -> Writer:
    """``value[o, i] = scale[g(i), o] * (code - zero[g(i), o])``, where g is ``g_idx``."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        outputs, inputs = shape
        size = group if group > 0 else inputs
        groups = -(-inputs // size)
        codes = random.integers(0, 1 << bits, (inputs, outputs))
        scale = _scales(random, (groups, outputs), 1 << bits)
        zero = zeros(random.integers(0, 1 << bits, (groups, outputs)))
        if symmetric:
            zero = np.full_like(zero, 1 << (bits - 1))
        owner = np.arange(inputs) // size
        if act_order:
            owner = random.permutation(owner)
        value = scale.astype(np.float64)[owner] * (codes - zero[owner])
        stored = zero if second else (zero - 1) % (1 << bits)
        parts = {
            "qweight": _torch(words(codes.T, bits).T),
            "qzeros": _torch(words(stored, bits)),
            "scales": _torch(scale),
        }
        if g_idx:
            parts["g_idx"] = torch.tensor(owner, dtype=torch.int32)
        return parts, _torch(value.T)

    return write


def awq(group: int = 32, *, gemv: bool = False, zeros: Callable[[np.ndarray], np.ndarray] = lambda z: z) -> Writer:
    """Slot i of a gemm word holds output ``[0, 2, 4, 6, 1, 3, 5, 7][i]``; gemv packs inputs in plain order."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        outputs, inputs = shape
        size = group if group > 0 else inputs
        groups = -(-inputs // size)
        codes = random.integers(0, 16, (inputs, outputs))
        scale = _scales(random, (groups, outputs), 16)
        zero = zeros(random.integers(0, 16, (groups, outputs)))
        owner = np.arange(inputs) // size
        value = scale.astype(np.float64)[owner] * (codes - zero[owner])
        if gemv:
            width = -(-groups // 8)
            padding = ((0, 0), (0, width * 8 - groups))
            parts = {
                "qweight": _torch(words(codes.T, 4)),
                "qzeros": _torch(words(np.pad(zero.T, padding), 4)),
                "scales": _torch(np.pad(scale.T, padding)),
            }
        else:
            order = [8 * w + slot for w in range(outputs // 8) for slot in (0, 2, 4, 6, 1, 3, 5, 7)]
            parts = {
                "qweight": _torch(words(codes[:, order], 4)),
                "qzeros": _torch(words(zero[:, order], 4)),
                "scales": _torch(scale),
            }
        return parts, _torch(value.T)

    return write


def compressed(
    bits: int,
    group: int = -1,
    *,
    packed: bool = False,
    symmetric: bool = True,
    static: bool = False,
    one_scale: bool = False,
    act_order: bool = False,
) -> Writer:
    """``value[o, i] = scale[o, g(i)] * (code - zero)`` of signed codes; packed ones are raised to unsigned."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        outputs, inputs = shape
        size, middle = group if group > 0 else inputs, 1 << (bits - 1)
        groups = -(-inputs // size)
        codes = random.integers(-middle, middle, (outputs, inputs))
        scale = _scales(random, (1, 1) if one_scale else (outputs, groups), 2 * middle)
        zero = np.zeros((outputs, groups), dtype=np.int64)
        if not symmetric:
            zero = random.integers(-middle, middle, (outputs, groups))
        owner = random.permutation(np.arange(inputs) // size) if act_order else np.arange(inputs) // size
        value = np.broadcast_to(scale.astype(np.float64), zero.shape)[:, owner] * (codes - zero[:, owner])
        parts = {"weight_scale": _torch(scale.reshape(-1) if one_scale else scale)}
        per_word = 32 // bits
        if packed:
            filled = np.pad(codes + middle, ((0, 0), (0, -inputs % per_word)))
            parts["weight_packed"] = _torch(words(filled, bits))
            parts["weight_shape"] = torch.tensor([outputs, inputs])
        else:
            parts["weight"] = _torch(codes.astype(np.int8))
        if not symmetric:
            raised = np.pad(zero.T + middle, ((0, 0), (0, -outputs % per_word)))
            parts["weight_zero_point"] = _torch(words(raised, bits).T) if packed else _torch(zero.astype(np.int8))
        if act_order:
            parts["weight_g_idx"] = torch.tensor(owner, dtype=torch.int32)
        if static:
            parts["input_scale"] = torch.tensor([0.02])
        return parts, _torch(value)

    return write


def fp8(per_channel: bool = False, block: tuple[int, int] | None = None) -> Writer:
    """``value = scale * code`` with codes in float8_e4m3fn."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        codes = torch.from_numpy(random.normal(0, 100, shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        if block is not None:
            scale = torch.from_numpy(
                random.uniform(1e-3, 3e-3, [-(-n // b) for n, b in zip(shape, block, strict=True)])
            )
            scale = scale.float()
            rows, columns = (torch.arange(n) // b for n, b in zip(shape, block, strict=True))
            return {"weight": codes, "weight_scale_inv": scale}, codes.double() * scale.double()[rows][:, columns]
        scale = torch.from_numpy(random.uniform(1e-3, 3e-3, (shape[0], 1) if per_channel else ())).float()
        return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()

    return write


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Dettmers et al., QLoRA (arXiv 2305.14314), appendix E."""


def bitsandbytes(*, nested: bool = False, block: int = 64, stored: torch.dtype = torch.uint8) -> Writer:
    """``value = NF4[code] * absmax[block]`` over the rows one after another; two codes a byte, the first one high."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        count = shape[0] * shape[1]
        codes = random.integers(0, 16, count)
        blocks = -(-count // block)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(shape)}
        parts = {"weight.quant_map": torch.tensor(NF4)}
        if nested:
            table, small = np.linspace(-1, 1, 256, dtype=np.float32), random.integers(0, 256, blocks)
            outer = random.uniform(0.01, 0.02, -(-blocks // 16)).astype(np.float32)
            absmax = table.astype(np.float64)[small] * outer[np.arange(blocks) // 16] + 0.06
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.06}
            parts |= {
                "weight.absmax": _torch(small.astype(np.uint8)),
                "weight.nested_absmax": _torch(outer),
                "weight.nested_quant_map": _torch(table),
            }
        else:
            absmax = random.uniform(0.02, 0.1, blocks).astype(np.float32)
            parts["weight.absmax"] = _torch(absmax)
        pairs = np.pad(codes, (0, count % 2)).reshape(-1, 2)
        held = _torch((pairs[:, 0] * 16 + pairs[:, 1]).astype(np.uint8))
        parts["weight"] = held.view(stored)[:, None]
        text = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
        parts["weight.quant_state.bitsandbytes__nf4"] = _torch(text)
        value = np.array(NF4)[codes] * absmax.astype(np.float64)[np.arange(count) // block]
        return parts, _torch(value.reshape(shape))

    return write


def bitsandbytes_int8() -> Writer:
    """``value[o, i] = code * SCB[o] / 127``."""

    def write(module: str, shape: tuple[int, int], random: np.random.Generator) -> Written:
        codes = random.integers(-127, 128, shape)
        largest = random.uniform(0.1, 0.4, shape[0]).astype(np.float32)
        parts = {
            "weight": _torch(codes.astype(np.int8)),
            "SCB": _torch(largest),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return parts, _torch(codes * largest.astype(np.float64)[:, None] / 127)

    return write


def write_json(path: Path, **values: Any) -> None:
    """A settings file beside ``config.json``."""
    path.write_text(json.dumps(values))
