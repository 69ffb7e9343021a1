"""Chip profiles: what different pretend chips can and cannot do, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from qiao.contract import Capabilities, Tolerance

_ALL = ("float32", "bfloat16", "float16")
_SCHEMES = ("dense", "w8a16", "w8a8", "w4a16", "fp8")


@dataclass(frozen=True, slots=True)
class Chip:
    """``missing`` names hooks that the plugin does not have on it."""

    capabilities: Capabilities
    missing: tuple[str, ...] = ()

    @property
    def missing_dtypes(self) -> set[torch.dtype]:
        """Floating dtypes that raise on this chip."""
        return {getattr(torch, name) for name in _ALL if name not in self.capabilities.dtypes}


def _full(**changes: object) -> Capabilities:
    facts: dict[str, object] = {
        "dtypes": _ALL,
        "kv_layouts": ("NHD", "HND"),
        "kv_dtypes": _ALL,
        "schemes": _SCHEMES,
        "sdk": {"sim": "1.0"},
    }
    return Capabilities(**{**facts, **changes})  # type: ignore[arg-type]


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "full": Chip(_full()),
        "nobf16": Chip(_full(dtypes=("float16", "float32"), kv_dtypes=("float16", "float32"))),
        "sizes": Chip(_full(capture_sizes=(1, 2, 4))),
        "hnd": Chip(_full(kv_layouts=("HND",), block_sizes=(128,))),
        "dense": Chip(_full(schemes=("dense",))),
        "nowindow": Chip(_full(sliding_window=False, soft_cap=False)),
        "loose": Chip(_full(tolerances={("matmul", "float16"): Tolerance(1e-2, 1e-2)})),
        "nosample": Chip(_full(), ("sample",)),
        "bare": Chip(_full(schemes=("dense",)), ("sample", "attention", "decode_attention", "matmul", "pack_weight")),
    }
)
"""By name; ``full`` is the usual one."""


def chip(name: str) -> Chip:
    """The profile ``name``, the usual one where it is empty. Raises ``ValueError`` listing the names."""
    try:
        return CHIPS[name or "full"]
    except KeyError:
        raise ValueError(f"no simulated chip {name!r}; there are {', '.join(CHIPS)}") from None
