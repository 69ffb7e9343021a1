"""Packed weights that were kept in a file: under which name, and how they come back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from qiao.contract import PackedWeight, WeightInfo, hookimpl

from qiao_cpu import matmul, native


def packing() -> str:
    """``Capabilities.packing``: instruction set, settings, and digests of the library and of the code that packs."""
    parts = {"library": native.path().read_bytes(), "code": Path(matmul.__file__).read_bytes()}
    sums = [f"{name} {zlib.crc32(data):08x}" for name, data in parts.items()]
    rounded = ",".join(matmul.rounded_schemes()) or "none"
    return f"{native.isa()}, strips of {native.strip()}, rounded {rounded}, {', '.join(sums)}"


@hookimpl
def restore_weight(scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str) -> PackedWeight:
    """A weight with its record for the kernels. ``ValueError`` where its strips are of another instruction set."""
    weight = tensors.get("weight")
    if scheme not in matmul.SCHEMES or weight is None or weight.dim() < 3 or weight.shape[2] != native.strip():
        raise ValueError(f"{info.name}: these tensors are no weight packed for {native.isa()}")
    return PackedWeight(scheme, info, matmul.Packed(scheme, info, tensors))
