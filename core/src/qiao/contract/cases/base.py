"""The records of a case, the numbers in it, and how a plugin's own form of it is made."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from qiao.contract.types import (
    AttentionMetadata,
    KVCache,
    PackedWeight,
    PenaltyTensors,
    SamplingTensors,
    WeightInfo,
)


@dataclass(frozen=True, slots=True)
class LooseCache:
    """What is written to a cache of ``dtype``: ``key`` and ``value`` [n, K, D] at ``slots`` [n] int64.

    With ``on_host`` the cache is a copy in the host's memory, as the other side of ``swap_blocks``.
    """

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    num_blocks: int
    block_size: int
    layout: str
    dtype: str
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class LooseWeight:
    """The arguments of ``pack_weight``."""

    scheme: str
    tensors: Mapping[str, torch.Tensor]
    info: WeightInfo


@dataclass(frozen=True, slots=True)
class Case:
    """One call of ``hook``: ``arguments`` by name in the catalog's order, on the host; ``note`` is what is tried."""

    hook: str
    id: str
    dtype: str
    arguments: Mapping[str, Any]
    note: str


Hooks = Mapping[str, Callable[..., Any]]


def place(value: Any, hooks: Hooks, device: str) -> Any:
    """``value`` of a case's arguments on ``device``, in the form of the plugin whose ``hooks`` are given.

    Records of tensors are taken apart, plain values pass through.
    """
    if isinstance(value, LooseCache):
        return place_cache(value, hooks, device)
    if isinstance(value, LooseWeight):
        packed: PackedWeight = hooks["pack_weight"](value.scheme, value.tensors, value.info, device)
        return packed
    if isinstance(value, tuple):
        return tuple(place(one, hooks, device) for one in value)
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)  # a hook may change its arguments, never the case
    if isinstance(value, (AttentionMetadata, SamplingTensors, PenaltyTensors)):
        names = [f.name for f in fields(value) if isinstance(getattr(value, f.name), torch.Tensor)]
        return replace(value, **{n: getattr(value, n).to(device, copy=True) for n in names})
    return value


def place_cache(loose: LooseCache, hooks: Hooks, device: str) -> KVCache:
    """A cache of the plugin's own that holds what ``loose`` says."""
    heads, size = loose.key.shape[1:]
    cache: KVCache = hooks["allocate_kv"](
        loose.num_blocks, loose.block_size, heads, size, getattr(torch, loose.dtype), loose.layout, device
    )
    hooks["write_kv"](loose.key.to(device), loose.value.to(device), cache, loose.slots.to(device))
    return _on_host(cache) if loose.on_host else cache


def _on_host(cache: KVCache) -> KVCache:
    """A copy of ``cache`` in the host's memory, in the same layout."""
    names = [f.name for f in fields(cache) if isinstance(getattr(cache, f.name), torch.Tensor)]
    return replace(cache, **{name: getattr(cache, name).to("cpu", copy=True) for name in names})


class Random:
    """Numbers that depend on the hook and the seed alone."""

    def __init__(self, name: str, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)

    def normal(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(getattr(torch, dtype))

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self.generator)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self.generator)

    def order(self, n: int) -> torch.Tensor:
        """0 to ``n - 1`` shuffled, int64."""
        return torch.randperm(n, generator=self.generator)


Made = Iterator[tuple[str, str, dict[str, Any], str]]
"""(label, dtype, arguments, note) of each case."""
