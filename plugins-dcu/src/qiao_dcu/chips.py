"""What DCUs can do, by architecture. The numbers are public statements of the vendor and of users; see the README.

gfx906 (Z100) has no matrix units and none for bfloat16, although HIP calls it capability 9.0: whether a type can be
used is asked of this table and never of a number. Only gfx938 has FP8 products; FP8 weights are decoded by the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from qiao.contract import Capabilities
from qiao_triton.architectures import ARCHITECTURES
from qiao_triton.limits import limits

from qiao_dcu import _sdk

LANES = 64
"""Of a wavefront, on all of them."""

CAPTURE_SIZES = (1, 2, 4, 8, 16)
"""Users report that recording larger steps fails on K100_AI."""


@dataclass(frozen=True, slots=True)
class Profile:
    """``bf16`` and ``fp8``: whether there are units for them. ``public_triton``: whether public Triton knows it."""

    architecture: str
    product: str
    bf16: bool
    fp8: bool
    public_triton: bool = False


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.architecture: profile
        for profile in (
            Profile("gfx906", "Z100, Z100L", bf16=False, fp8=False, public_triton=True),
            Profile("gfx926", "K100", bf16=False, fp8=False),
            Profile("gfx928", "K100_AI, K500SM_AI", bf16=True, fp8=False),
            Profile("gfx936", "BW1000", bf16=True, fp8=False),
            Profile("gfx938", "BW1100", bf16=True, fp8=True),
        )
    }
)

HYGON_ONLY = frozenset(PROFILES) - {"gfx906"} | {"gfx92a", "gfx946"}
"""Architectures that no other vendor has; gfx906 is AMD's MI50 as well. The last two have no profile yet."""

USUAL = "gfx928"


def profile_of(chip: str) -> Profile:
    """For ``gfx928`` or ``gfx928:sramecc+:xnack-``. Raises ``LookupError`` naming those that there are."""
    name = chip.partition(":")[0] or USUAL
    if name not in PROFILES:
        raise LookupError(f"no profile of {name}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


def capabilities_of(chip: str) -> Capabilities:
    """bfloat16 where there are units for it."""
    profile = profile_of(chip)
    dtypes = ("bfloat16", "float16", "float32") if profile.bf16 else ("float16", "float32")
    return replace(
        limits(ARCHITECTURES[profile.architecture], dtypes), sdk=_sdk.versions(), capture_sizes=CAPTURE_SIZES
    )
