"""The architectures that the kernels are written for, and the table of their tiles.

Nothing is tried out on live tensors, and nothing is measured at start.

Bounds are those of one program: shared memory from the CUDA programming guide (table of compute capabilities) and
AMD's LDS of 64 KiB a workgroup; ``lanes`` is the width of a warp or wavefront.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch

Family = Literal["cuda", "hip", "interpreter"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """``shared`` bytes a program may use, ``processors`` that a usual chip has, ``bf16`` whether products may be in it.

    ``matrix`` says whether Triton uses matrix units there, without which tiles are kept small, and ``half`` whether
    products of half precision and of int8 codes are worth it or possible at all, else they are made in float32.
    """

    name: str
    family: Family
    lanes: int
    shared: int
    processors: int
    bf16: bool
    matrix: bool = True
    half: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one program: ``rows`` by ``columns`` of the result, ``depth`` of the sum, warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 2


_KIB = 1024

INTERPRETER = Architecture("interpreter", "interpreter", 32, 1 << 30, 4, bf16=False)
"""Triton's interpreter on the host, where sums and products of bfloat16 values are wrong (triton #11584)."""

_ALL = (
    Architecture("sm_75", "cuda", 32, 64 * _KIB, 40, bf16=False, matrix=False, half=False),
    Architecture("sm_80", "cuda", 32, 163 * _KIB, 108, bf16=True),
    Architecture("sm_86", "cuda", 32, 99 * _KIB, 84, bf16=True),
    Architecture("sm_89", "cuda", 32, 99 * _KIB, 128, bf16=True),
    Architecture("sm_90", "cuda", 32, 227 * _KIB, 132, bf16=True),
    Architecture("sm_100", "cuda", 32, 227 * _KIB, 148, bf16=True),
    Architecture("sm_120", "cuda", 32, 99 * _KIB, 170, bf16=True),
    Architecture("gfx906", "hip", 64, 64 * _KIB, 60, bf16=False, matrix=False),
    Architecture("gfx90a", "hip", 64, 64 * _KIB, 104, bf16=True),
    Architecture("gfx942", "hip", 64, 64 * _KIB, 304, bf16=True),
    Architecture("gfx926", "hip", 64, 64 * _KIB, 60, bf16=False, matrix=False),
    Architecture("gfx928", "hip", 64, 64 * _KIB, 120, bf16=True),
    Architecture("gfx936", "hip", 64, 64 * _KIB, 80, bf16=True),
    Architecture("gfx938", "hip", 64, 64 * _KIB, 80, bf16=True),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({a.name: a for a in (INTERPRETER, *_ALL)})
"""By name. The gfx92x and gfx93x ones are Hygon's: public Triton cannot compile for them."""

COMPILED: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx906", "gfx90a", "gfx942")
"""Those that public Triton compiles for without a device, and that the project's checks compile for."""


def nearest(name: str) -> Architecture:
    """The architecture ``name``, or the one of its family that is the closest below it.

    Raises ``LookupError`` where there is none: an NVIDIA GPU older than sm_75, an unknown gfx name.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name.startswith("sm_"):
        wanted = int(name.removeprefix("sm_").rstrip("af"))
        older = [a for a in _ALL if a.family == "cuda" and int(a.name.removeprefix("sm_")) <= wanted]
        if older:
            return older[-1]
    raise LookupError(f"no kernels for {name}; there are some for {', '.join(a.name for a in _ALL)}")


@cache
def of_index(index: int) -> Architecture:
    """The architecture of torch's accelerator ``index``."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return nearest(properties.gcnArchName.partition(":")[0])
    return nearest(f"sm_{properties.major}{properties.minor}")


def attention_tile(arch: Architecture, head_dim: int, wide: bool, many: bool, codes: bool) -> Tile:
    """For heads of ``head_dim`` (a power of two); ``wide`` computes in float32; ``many`` queries share a program.

    ``codes`` says that the cache is int8.
    """
    if arch.family == "interpreter":
        return Tile(32, 32, head_dim)
    columns = 16 if wide or head_dim > 128 else 32
    if arch.family == "hip" and not arch.matrix:  # a lane holds whole rows of its operands
        return Tile(8 if wide else 16, 16, head_dim, warps=4, stages=1)
    if not arch.matrix or wide:
        return Tile(16, columns, head_dim, warps=4, stages=1)
    if arch.family == "hip":
        return Tile(64 if many and head_dim <= 128 else 16, columns, head_dim, warps=4, stages=1)
    if head_dim > 128:
        return Tile(16, columns, head_dim, warps=8, stages=2)
    columns = 64 if head_dim <= 64 else 16 if many and codes else 32  # sm_80 has no registers for more codes
    return Tile(64 if many else 16, columns, head_dim, warps=4, stages=2)


def product_tile(arch: Architecture, tokens: int, wide: bool, depth: int = 64) -> Tile:
    """For the product of ``tokens`` rows with a packed weight; ``depth`` is the most that one group allows."""
    if arch.family == "interpreter":
        return Tile(16, 32, min(64, depth))
    rows = 16 if tokens <= 16 or wide or not arch.matrix else 32 if tokens <= 32 else 64
    depth = 32 if wide or not arch.matrix else depth
    stages = 1 if arch.family == "hip" or wide else 3
    return Tile(rows, 32 if wide or not arch.matrix else 64, depth, warps=4, stages=stages)


def head_dims_of(arch: Architecture) -> tuple[int, ...]:
    """Heads that attention takes there: without matrix units on HIP, wider ones than 128 do not fit into registers."""
    widest = 128 if arch.family == "hip" and not arch.matrix else 256
    return tuple(dim for dim in (64, 128, 32, 80, 96, 112, 192, 256) if dim <= widest)


def parts(arch: Architecture, programs: int, most: int) -> int:
    """Into how many parts to cut each of ``programs`` so that the chip is full: a power of two up to ``most``."""
    if arch.family == "interpreter":
        return min(2, most)
    count = 1
    while count * 2 <= most and programs * count * 2 <= 2 * arch.processors:
        count *= 2
    return count


def lanes_for(arch: Architecture, size: int) -> int:
    """Warps for a program over ``size`` numbers: about eight a lane, 1 to 8 warps (512 threads at the most)."""
    warps = 1
    while warps < (8 if arch.lanes == 32 else 4) and warps * arch.lanes * 8 < size:
        warps *= 2
    return warps
