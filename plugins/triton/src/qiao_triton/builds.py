"""What the hooks start on an architecture, for the shapes of real models: written down by the hooks themselves.

So what is compiled without a device is what is started on one, constants and sizes of tiles included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from qiao.contract import AttentionMetadata, KVCache, PackedWeight, PenaltyTensors, SamplingTensors, WeightInfo

from qiao_triton import attention, cache, fused, matmul, sampling
from qiao_triton.architectures import Architecture, head_dims_of
from qiao_triton.launch import Launch, recording

_HEADS, _KV_HEADS, _HIDDEN, _FEED, _VOCABULARY = 32, 8, 4096, 14336, 128_256
_BLOCK, _BLOCKS, _OUT = 16, 2, 1024


_WITHOUT_KERNELS = ("gpu.py", "graphs.py", "pci.py", "limits.py")


def sources() -> str:
    """A digest of all that decides what is compiled and how it is judged; with another one it has to be done again."""
    folder = Path(__file__).parent
    files = sorted(path for path in folder.rglob("*.py") if path.name not in _WITHOUT_KERNELS)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel to compile: which ``hook`` starts it, for ``dtype`` activations, in the case ``label``."""

    hook: str
    dtype: str
    label: str
    launch: Launch


def dtypes_of(arch: Architecture) -> tuple[str, ...]:
    """What the plugins declare for ``arch``: bfloat16 only where products can be in it."""
    return ("bfloat16", "float16", "float32") if arch.bf16 else ("float16", "float32")


def builds(arch: Architecture, dtype: str) -> Iterator[Build]:
    """All kernels for activations of ``dtype``, each once; those of float32 logits come with float32."""
    known = set()
    makers = [_attention, _written, _light, _products, *([_logits] if dtype == "float32" else [])]
    for maker in makers:
        for hook, label, call in maker(getattr(torch, dtype)):
            if "dim256" in label and 256 not in head_dims_of(arch):
                continue
            with recording(arch) as started:
                call()
            for number, launch in enumerate(started):
                build = Build(hook, dtype, f"{label}-{number}" if number else label, launch)
                key = (hook, launch.kernel.__name__, repr(sorted(launch.constants.items(), key=str)), _types(launch))
                if key not in known:
                    known.add(key)
                    yield build


def _types(launch: Launch) -> tuple[str, ...]:
    return tuple(str(getattr(x, "dtype", type(x))) for x in launch.arguments.values())


Calls = Iterator[tuple[str, str, Any]]


def _batch(rows: int, width: int) -> AttentionMetadata:
    lens = torch.empty(8, dtype=torch.int32)
    start, tables = torch.empty(9, dtype=torch.int32), torch.empty((8, width), dtype=torch.int32)
    return AttentionMetadata(start, lens, tables, torch.empty(rows, dtype=torch.int64), (), ())


def _cache(dtype: torch.dtype, dim: int) -> KVCache:
    return cache.allocate_kv(_BLOCKS, _BLOCK, _KV_HEADS, dim, dtype, "NHD", "cpu")


def _attention(dtype: torch.dtype) -> Calls:
    for dim, kept, cap in ((64, dtype, 0.0), (128, dtype, 0.0), (256, dtype, 50.0), (128, torch.int8, 0.0)):
        stored, label = _cache(kept, dim), f"dim{dim}-{str(kept).removeprefix('torch.')}" + "-cap" * bool(cap)
        for name, rows in (("attention", 512), ("attention", 8), ("decode_attention", 8)):
            query, hook = torch.empty(rows, _HEADS, dim, dtype=dtype), getattr(attention, name)
            arguments = (query, stored, _batch(rows, 512), 0.1, 0, cap)
            yield name, f"{label}-{rows}rows", lambda hook=hook, arguments=arguments: hook(*arguments)


def _written(dtype: torch.dtype) -> Calls:
    slots, angles = torch.empty(8, dtype=torch.int64), torch.empty(8, 64)
    query, key = (torch.empty(8, n, 128, dtype=dtype) for n in (_HEADS, _KV_HEADS))
    for kept in (dtype, torch.int8):
        stored = _cache(kept, 128)
        label = str(kept).removeprefix("torch.")
        yield "write_kv", label, lambda stored=stored: cache.write_kv(key, key, stored, slots)
        arguments = (query, key, key, angles, angles, False, stored, slots)
        yield "rope_write_kv", label, lambda arguments=arguments: fused.rope_write_kv(*arguments)
    for interleaved in (False, True):
        arguments = (query, key, angles, angles, interleaved)
        yield "rotary", f"interleaved{interleaved}", lambda arguments=arguments: fused.rotary(*arguments)


def _light(dtype: torch.dtype) -> Calls:
    x, weight = torch.empty(8, _HIDDEN, dtype=dtype), torch.empty(_HIDDEN, dtype=dtype)
    yield "rms_norm", "4096", lambda: fused.rms_norm(x, weight, 1e-5)
    yield "add_rms_norm", "4096", lambda: fused.add_rms_norm(x, x.clone(), weight, 1e-5)
    wide = torch.empty(8, 2 * _FEED, dtype=dtype)
    yield "silu_mul", "14336", lambda: fused.silu_mul(wide)
    yield "gelu_mul", "14336", lambda: fused.gelu_mul(wide)
    yield "route_experts", "8of128", lambda: fused.route_experts(torch.empty(8, 128, dtype=dtype), 8, True)
    chosen, shares = torch.empty(8, 8, _HIDDEN, dtype=dtype), torch.empty(8, 8, dtype=dtype)
    yield "combine_experts", "8", lambda: fused.combine_experts(chosen, shares)


def packed(scheme: str, groups: int, zero: bool, kept: torch.dtype = torch.float16) -> PackedWeight:
    """A weight [1024, 4096] as ``pack_weight`` leaves it, without its numbers."""
    rows = _HIDDEN // 2 if scheme == "w4a16" else _HIDDEN
    kind = {"w4a16": torch.uint8, "fp8": torch.uint8}.get(scheme, torch.int8)
    data = {"weight": torch.empty(rows, _OUT, dtype=kind), "scale": torch.empty(groups, _OUT, dtype=kept)}
    if zero:
        data["zero"] = torch.empty(groups, _OUT, dtype=kept)
    if scheme == "w8a8":
        data["weight"] = torch.empty(_OUT, _HIDDEN, dtype=kind)
    if scheme == "dense":
        data = {"weight": torch.empty(_OUT, _HIDDEN, dtype=kept)}
    info = WeightInfo("w", _HIDDEN, _OUT, group_size=-1 if groups == 1 else _HIDDEN // groups)
    return PackedWeight(scheme, info, matmul.Packed(data))


_FORMATS = (
    ("w4a16", 32, True),  # groups of 128, as GPTQ and AWQ have them
    ("w4a16", 128, True),
    ("w4a16", 1, False),
    ("w8a16", 32, False),
    ("w8a16", 1, False),
    ("w8a8", 1, False),
    ("fp8", 1, False),
)


def _products(dtype: torch.dtype) -> Calls:
    for scheme, groups, zero in _FORMATS:
        weight, label = packed(scheme, groups, zero), f"{scheme}-{groups}groups" + "-zeros" * zero
        for tokens in (8, 512):
            x = torch.empty(tokens, _HIDDEN, dtype=dtype)
            arguments = (x, weight, torch.empty(_OUT, dtype=dtype))
            yield "matmul", f"{label}-{tokens}tokens", lambda arguments=arguments: matmul.matmul(*arguments)
    for scheme, groups, zero in (("dense", 1, False), *_FORMATS[::2], _FORMATS[5]):
        weights = tuple(packed(scheme, groups, zero, dtype if scheme == "dense" else torch.float16) for _ in range(2))
        for tokens in (8, 1024) if scheme in ("dense", "w4a16") else (8,):
            arguments = (torch.empty(tokens, _HIDDEN, dtype=dtype), weights, torch.zeros(tokens, dtype=torch.int64))
            label = f"{scheme}-{groups}groups-{tokens}tokens"
            yield "expert_matmul", label, lambda given=arguments: matmul.expert_matmul(*given)


def _logits(dtype: torch.dtype) -> Calls:
    logits, row, whole = torch.empty(8, _VOCABULARY), torch.empty(8), torch.empty(8, dtype=torch.int32)
    for label, flags in (("greedy", (True, False, False, False)), ("all", (False, True, True, True))):
        params = SamplingTensors(row, whole, row, row, row, *flags)
        yield "sample", label, lambda params=params: sampling.sample(logits, params)
    penalties = PenaltyTensors(*(torch.empty(8, 500, dtype=torch.int64) for _ in range(2)), row, row, row)
    yield "apply_penalties", "500", lambda: sampling.apply_penalties(logits, penalties)
    yield "cap_logits", "128256", lambda: fused.cap_logits(logits, 30.0)
