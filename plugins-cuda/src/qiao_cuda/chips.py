"""What GPUs can do, by compute capability (CUDA C++ Programming Guide, table of technical specifications)."""

from __future__ import annotations

from dataclasses import replace

from qiao.contract import Capabilities
from qiao_triton.architectures import nearest
from qiao_triton.limits import limits

from qiao_cuda import _sdk

USUAL = "sm_80"
"""Planned for where no chip is named."""

CAPTURE_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
"""Sequences of the decode steps that are recorded at the start; a step is filled up to the next one."""


def chip_of(major: int, minor: int) -> str:
    """``sm_90`` of compute capability 9.0."""
    return f"sm_{major}{minor}"


def capabilities_of(chip: str) -> Capabilities:
    """bfloat16 from sm_80 on, where there are units for it. Raises ``LookupError`` for chips older than sm_75."""
    architecture = nearest(chip or USUAL)
    dtypes = ("bfloat16", "float16", "float32") if architecture.bf16 else ("float16", "float32")
    return replace(limits(architecture, dtypes), sdk=_sdk.versions(), capture_sizes=CAPTURE_SIZES)
