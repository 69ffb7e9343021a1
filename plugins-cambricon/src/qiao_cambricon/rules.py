"""What torch_mlu_ops asks of its callers, each rule as a function of its own.

The kernels do not check all of it: what breaks a rule may come back as wrong numbers. Sources are the operators'
public signatures and Cambricon's manual of torch_mlu_ops; nothing here needs the vendor's software.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from qiao.contract import UnreadLengths, WeightInfo

BLOCK = 16
"""Paged prefill takes no other block size; decode takes it as well."""

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 224, 256, 512, 576)
GROUPS = (64, 128, 256, 512)
"""Group sizes of weights with a scale for each group."""

ROTARY_HEAD_DIMS = (2, 256)
"""The smallest and the largest head that ``apply_rotary`` turns."""

MOST_ROTARY_BATCH = 10_240
HALVES = (torch.float16, torch.bfloat16)
"""What norms and rotations take; float32 runs as the contract's sequence of torch operators."""

BREAKS_CAPTURE = "CNCL_ASYNC_ERROR_HANDLING"
"""A variable that Ray sets and under which graphs cannot be captured."""


def check_cache(block_size: int, head_dim: int, layout: str) -> None:
    """Raises ``ValueError`` for a cache that the kernels cannot read."""
    if layout != "HND" or block_size != BLOCK or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"torch_mlu_ops has no {layout} cache of blocks of {block_size} and heads of {head_dim}: HND, blocks of "
            f"{BLOCK}, heads of {', '.join(map(str, HEAD_DIMS))}"
        )


def most_heads(kept: torch.dtype) -> int:
    """Query heads to a key head that one decode takes: 256 over a bfloat16 cache, 128 over others."""
    return 256 if kept == torch.bfloat16 else 128


def decode_parts(heads: int, kv_heads: int, kept: torch.dtype) -> list[slice]:
    """Parts of the heads of each key head that a decode takes at once; raises ``ValueError`` for an uneven share."""
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot be shared out evenly over {kv_heads} key heads")
    share, most = heads // kv_heads, most_heads(kept)
    step = math.ceil(share / math.ceil(share / most))
    return [slice(first, min(first + step, share)) for first in range(0, share, step)]


def int32(indices: torch.Tensor) -> torch.Tensor:
    """Slots, tables, lengths and experts as the kernels read them."""
    return indices if indices.dtype == torch.int32 else indices.to(torch.int32)


def longest(kv_lens: Sequence[int]) -> int:
    """The longest context, or -1 ("unknown") inside a graph.

    A number that is too small gives wrong results without a word, and in a graph it would stay as it was recorded.
    """
    return -1 if isinstance(kv_lens, UnreadLengths) else max(kv_lens)


def apart(query: torch.Tensor) -> torch.Tensor:
    """Memory for a result of ``query``'s shape: it must not be the query's own. Rows of no sequence come as zero."""
    return torch.zeros_like(query)


def window(sliding_window: int) -> tuple[int, int]:
    """Keys to the left of the query's own, -1 for all, and to the right: always -1, other values are not taken."""
    return (sliding_window - 1 if sliding_window > 0 else -1), -1


def rotates(dtype: torch.dtype, head_dim: int, rotated: int) -> bool:
    """Whether ``apply_rotary`` takes heads of ``head_dim`` with their first ``rotated`` dimensions turned."""
    low, high = ROTARY_HEAD_DIMS
    return dtype in HALVES and low <= head_dim <= high and rotated % 2 == 0 and 0 < rotated <= head_dim


def takes_zero(zero: torch.Tensor | None, middle: int) -> bool:
    """Whether codes need no zero point of their own: the kernels are symmetric."""
    return zero is None or bool((zero == middle).all())


def group_fits(info: WeightInfo, bits: int) -> bool:
    """Whether a weight of ``bits`` with one scale a group has groups that the kernels take, all whole.

    The kernels are told no group size: they find it by dividing the inputs by the number of scales.
    """
    return info.group_size in GROUPS and info.in_features % max(info.group_size, 8 // bits) == 0


def why_not_captured() -> str:
    """What in this process keeps graphs from being captured, empty where nothing does."""
    if os.environ.get(BREAKS_CAPTURE):
        return f"{BREAKS_CAPTURE} is set (Ray sets it), under which CNCL breaks the capture of graphs: unset it"
    return ""
