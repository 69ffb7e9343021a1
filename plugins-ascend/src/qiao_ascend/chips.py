"""What the chips can do, and the limits that CANN's kernels check only when they run.

910B is the A2 generation, 910C (SoC names Ascend910_93xx) the A3; 310P is on Atlas 300I Duo and 300V cards.
Sources: the operator pages of Ascend/op-plugin, the code and issues of vllm-project/vllm-ascend.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch
from qiao.contract import Capabilities

from qiao_ascend import _sdk

BLOCK = 128
"""Tokens of a block: what every kernel of every scenario takes, though documents allow more in some."""

MOST_COLUMNS = 65535
"""Of K and N in products with quantized weights."""

MOST_SEQUENCES = 4096
"""Of one call of the fused attention."""

CAPTURED = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of sequences for which decode steps are recorded; each graph takes some of the chip's few streams."""

MASK = 2048
"""Side of the mask that sparse modes 3 and 4 take, whatever the lengths."""


@dataclass(frozen=True)
class Profile:
    """One generation. ``packed_int4``: it multiplies by 4-bit weights; elsewhere they are unpacked to 8. ``graphs``: it
    records steps."""

    name: str
    dtypes: tuple[str, ...]
    layout: str
    head_dims: tuple[int, ...]
    schemes: tuple[str, ...]
    sliding_window: bool
    packed_int4: bool
    graphs: bool


_A2 = Profile(
    "910B",
    ("bfloat16", "float16"),
    "NHD",
    (64, 128, 192),
    ("dense", "w4a16", "w8a16", "w8a8"),
    sliding_window=True,
    packed_int4=True,
    graphs=True,
)
PROFILES = MappingProxyType(
    {
        "910B": _A2,
        "910C": replace(_A2, name="910C"),
        "310P": Profile("310P", ("float16",), "NZ", (64, 128), ("dense", "w4a16", "w8a16"), True, False, False),
    }
)
"""By name."""


def profile(chip: str) -> Profile | None:
    """The profile of a SoC name (``Ascend910B3``, ``Ascend910_9391``, ``310P3``); None for a chip without one.

    The empty name is the usual chip, 910B.
    """
    short = chip.removeprefix("Ascend").upper()
    if not short or short.startswith("910B"):
        return PROFILES["910B"]
    if re.match(r"910(_93|C)", short):
        return PROFILES["910C"]
    return PROFILES["310P"] if short.startswith("310P") else None


@cache
def profile_of(device: torch.device) -> Profile:
    """The profile of a device of this process, asked for once; raises ``ValueError`` for a chip without one."""
    chip = str(_sdk.runtime().get_device_name(device))
    found = profile(chip)
    if found is None:
        raise ValueError(f"qiao-ascend has no profile of {chip}: it knows {', '.join(PROFILES)}")
    return found


def capabilities_of(chip: str) -> Capabilities:
    """The profile as the contract has it; raises ``ValueError`` for a chip without one."""
    found = profile(chip)
    if found is None:
        raise ValueError(f"qiao-ascend has no profile of {chip}: it knows {', '.join(PROFILES)}")
    return Capabilities(
        dtypes=found.dtypes,
        kv_layouts=(found.layout,),
        block_sizes=(BLOCK,),
        head_dims=found.head_dims,
        schemes=found.schemes,
        sliding_window=found.sliding_window,
        soft_cap=False,
        sdk=_sdk.found().as_dict(),
        capture_sizes=CAPTURED if found.graphs else (),
    )


def check_cache(found: Profile, block_size: int, head_dim: int, dtype: torch.dtype, layout: str) -> None:
    """Raises ``ValueError`` for a cache that the chip's kernels cannot read."""
    kind = str(dtype).removeprefix("torch.")
    if layout != found.layout or block_size != BLOCK or head_dim not in found.head_dims or kind not in found.dtypes:
        raise ValueError(
            f"{found.name} has no {layout} cache of {kind} with blocks of {block_size} and heads of {head_dim}: "
            f"{found.layout}, {' or '.join(found.dtypes)}, blocks of {BLOCK}, heads of "
            f"{', '.join(map(str, found.head_dims))}"
        )


def check_heads(heads: int, kv_heads: int, sequences: int) -> None:
    """Raises ``ValueError`` for a batch that the fused attention's tiling has no case for."""
    if heads > 64 * kv_heads or heads > 256 or heads % kv_heads:
        raise ValueError(f"{heads} heads over {kv_heads} key heads: attention takes 64 to one and 256 in all at most")
    if sequences > MOST_SEQUENCES:
        raise ValueError(f"{sequences} sequences: attention takes {MOST_SEQUENCES} at most; set --max-num-seqs lower")


def fits_group(rows: int, columns: int, group: int) -> bool:
    """Whether the product with quantized weights takes [rows, columns] in groups of ``group`` rows; 0 is one in all."""
    if rows > MOST_COLUMNS or columns > MOST_COLUMNS:
        return False
    return group == 0 or (group % 32 == 0 and 32 <= group <= rows - 1)


def fits_int4(rows: int, columns: int, group: int) -> bool:
    """The same for weights of 4 bits, which are packed eight to a word along the columns."""
    return columns % 8 == 0 and fits_group(rows, columns, group)


def fits_swiglu(found: Profile, width: int) -> bool:
    """Whether the fused gate takes rows of ``width``, gate and up together."""
    return width % 2 == 0 and (found.name != "310P" or width % 32 == 0)
