"""Cases of the KV group: paged caches in each layout, ragged batches over shuffled tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from qiao.contract.cases.base import LooseCache, Made, Random
from qiao.contract.types import AttentionMetadata, Capabilities


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged batch: per sequence new queries and cached tokens (its own included), heads, window, cap."""

    label: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    window: int = 0
    soft_cap: float = 0.0


_BATCHES = (
    Batch("one", (1,), (1,), 2, 2),
    Batch("decode", (1, 1, 1), (1, 17, 33), 4, 4),
    Batch("prefill", (7,), (7,), 4, 2),
    Batch("chunks", (5, 3), (21, 3), 6, 2),
    Batch("mixed", (1, 9, 1, 4), (30, 9, 1, 20), 8, 1),
    Batch("decode-window", (1, 1), (40, 3), 4, 2, window=6),
    Batch("mixed-window", (1, 9, 4), (30, 9, 20), 4, 2, window=5),
    Batch("mixed-cap", (1, 9, 4), (30, 9, 20), 4, 2, soft_cap=2.0),
    Batch("decode-cap", (1, 1), (18, 5), 4, 4, soft_cap=3.0),
    Batch("all", (1, 9, 1), (30, 25, 4), 6, 3, window=7, soft_cap=2.0),
    Batch("group-of-seven", (1, 2), (35, 6), 7, 1),
)


def _batches(block_size: int) -> tuple[Batch, ...]:
    """The fixed ones, and one over blocks that are just full and just begun, whatever their size."""
    lens = (block_size, 2 * block_size, block_size + 1)
    return (*_BATCHES, Batch("full-blocks", (1, 1, 1), lens, 4, 2), Batch("full-chunk", (2,), lens[1:2], 4, 2))


@dataclass(frozen=True, slots=True)
class Kind:
    """Activations of ``dtype`` over a cache of ``kept``; sizes in tokens and numbers."""

    dtype: str
    kept: str
    layout: str
    block_size: int
    head_dim: int

    @property
    def label(self) -> str:
        """For ids of cases."""
        other = f"-{self.kept}" if self.kept != self.dtype else ""
        return f"{self.layout}-block{self.block_size}-dim{self.head_dim}{other}"


def _kinds(capabilities: Capabilities) -> Iterator[Kind]:
    """Each dtype with each layout and each of the cache's dtypes, its own first, the sizes taken in turn.

    Then what of the declared block sizes and head dims has not come up.
    """
    blocks, dims = capabilities.block_sizes or (16, 4, 5), capabilities.head_dims or (64, 16, 80)
    block, dim = itertools.cycle(blocks), itertools.cycle(dims)
    layouts = [x for x in capabilities.kv_layouts if x in ("NHD", "HND")] or list(capabilities.kv_layouts)
    kept = capabilities.kv_dtypes or capabilities.dtypes
    own = [(d, d) for d in capabilities.dtypes if d in kept]
    mixed = [(d, k) for d in capabilities.dtypes for k in kept if k != d]
    made = [Kind(d, k, layout, next(block), next(dim)) for (d, k), layout in itertools.product(own + mixed, layouts)]
    yield from made
    missing_blocks = [b for b in blocks if b not in {k.block_size for k in made}]
    missing_dims = [d for d in dims if d not in {k.head_dim for k in made}]
    pairs = itertools.zip_longest(missing_blocks, missing_dims)
    for kind, (size, width) in zip(itertools.cycle(made), pairs, strict=False):
        yield replace(kind, block_size=size or kind.block_size, head_dim=width or kind.head_dim)


_FEW = ("decode", "mixed", "all")
"""Batches tried where the cache's dtype is another floating one than the activations'."""


def paged(random: Random, batch: Batch, kind: Kind, spare: int = 3) -> tuple[LooseCache, AttentionMetadata]:
    """Shuffled blocks, ``spare`` of them (1 or more) never used, block 0 (which pads the tables) among them."""
    block_size = kind.block_size
    counts = [-(-n // block_size) for n in batch.kv_lens]
    num_blocks = sum(counts) + spare
    blocks = (random.order(num_blocks - 1) + 1)[: sum(counts)]
    tables = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    slots, news, first = [], [], 0
    for i, (count, length, queries) in enumerate(zip(counts, batch.kv_lens, batch.query_lens, strict=True)):
        own = blocks[first : first + count]
        tables[i, :count] = own.int()
        position = torch.arange(length)
        slots.append(own[position // block_size] * block_size + position % block_size)
        news.append(slots[-1][length - queries :])
        first += count
    written = torch.cat(slots)
    key, value = (random.normal(len(written), batch.kv_heads, kind.head_dim, dtype=kind.dtype) for _ in range(2))
    cache = LooseCache(key, value, written, num_blocks, block_size, kind.layout, kind.kept)
    starts = torch.tensor([0, *itertools.accumulate(batch.query_lens)], dtype=torch.int32)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    return cache, AttentionMetadata(starts, lens, tables, torch.cat(news), batch.query_lens, batch.kv_lens)


def attention_arguments(random: Random, batch: Batch, kind: Kind, spare: int = 3) -> dict[str, Any]:
    """The arguments of ``attention`` for ``batch`` over a cache of ``kind``."""
    cache, metadata = paged(random, batch, kind, spare)
    query = random.normal(sum(batch.query_lens), batch.heads, kind.head_dim, dtype=kind.dtype)
    arguments = {"query": query, "cache": cache, "metadata": metadata, "scale": kind.head_dim**-0.5}
    return {**arguments, "sliding_window": batch.window, "soft_cap": batch.soft_cap}


def attention(capabilities: Capabilities, random: Random, decode_only: bool = False) -> Made:
    """Each batch with each dtype and layout that the chip has; a few with each other dtype of the cache."""
    for kind, batch in ((k, b) for k in _kinds(capabilities) for b in _batches(k.block_size)):
        if decode_only and set(batch.query_lens) != {1}:
            continue
        if (batch.window and not capabilities.sliding_window) or (batch.soft_cap and not capabilities.soft_cap):
            continue
        if kind.kept not in (kind.dtype, "int8") and batch.label not in _FEW:
            continue
        arguments = attention_arguments(random, batch, kind)
        heads = f"{batch.heads}/{batch.kv_heads} heads of {kind.head_dim}"
        note = f"queries {batch.query_lens} over contexts {batch.kv_lens}, {heads}"
        yield f"{batch.label}-{kind.label}", kind.dtype, arguments, note


def decode_attention(capabilities: Capabilities, random: Random) -> Made:
    """Those of the batches where every sequence has one query."""
    yield from attention(capabilities, random, decode_only=True)


def filled(random: Random, cache: LooseCache, dtype: str) -> LooseCache:
    """``cache`` with every slot written, so that what must not change can be compared in any layout."""
    slots = torch.arange(cache.num_blocks * cache.block_size)
    key, value = (random.normal(len(slots), *cache.key.shape[1:], dtype=dtype) for _ in range(2))
    return replace(cache, key=key, value=value, slots=slots)


def write_kv(capabilities: Capabilities, random: Random) -> Made:
    """Slots in no order, with and without padding, and nothing but padding."""
    for kind in _kinds(capabilities):
        cache, _ = paged(random, _BATCHES[3], kind)
        cache = cache if kind.layout in ("NHD", "HND") else filled(random, cache, kind.dtype)
        for tokens, padding in ((1, 0), (6, 0), (7, 3), (2, 2)):
            slots = random.order(cache.num_blocks * kind.block_size)[:tokens]
            slots[random.order(tokens)[:padding]] = -1
            key, value = (random.normal(tokens, *cache.key.shape[1:], dtype=kind.dtype) for _ in range(2))
            arguments = {"key": key, "value": value, "cache": cache, "slot_mapping": slots}
            label = f"{tokens}tokens-{padding}padding-{kind.label}"
            yield label, kind.dtype, arguments, "scattered slots, -1 skipped"


def copy_blocks(capabilities: Capabilities, random: Random) -> Made:
    """Two blocks to two others of a full cache."""
    for kind in _kinds(capabilities):
        cache, _ = paged(random, _BATCHES[1], kind)
        cache = filled(random, cache, kind.dtype)
        blocks = random.order(cache.num_blocks)
        arguments = {"cache": cache, "source": blocks[:2], "target": blocks[2:4]}
        yield kind.label, kind.dtype, arguments, "two blocks, the others untouched"


def swap_blocks(capabilities: Capabilities, random: Random) -> Made:
    """Two blocks of a full cache to two others of another one, from the device to the host and back."""
    for kind in _kinds(capabilities):
        for way in ("out", "in"):
            if way == "out" and kind.layout not in ("NHD", "HND"):
                continue  # nothing but the device reads such a layout
            caches = [filled(random, paged(random, _BATCHES[1], kind)[0], kind.dtype) for _ in range(2)]
            names = ("source_cache", "target_cache") if way == "in" else ("target_cache", "source_cache")
            pair = {names[0]: replace(caches[0], on_host=True), names[1]: caches[1]}
            ids = [random.order(caches[0].num_blocks)[:2] for _ in range(2)]
            arguments: dict[str, Any] = {name: pair[name] for name in ("source_cache", "target_cache")}
            arguments |= {"source": ids[0], "target": ids[1]}
            yield f"{way}-{kind.label}", kind.dtype, arguments, "two blocks, the others untouched"


def allocate_kv(capabilities: Capabilities, random: Random) -> Made:
    """Each dtype with each layout."""
    for kind in _kinds(capabilities):
        names = ("num_blocks", "block_size", "num_kv_heads", "head_dim", "dtype", "layout", "device")
        values = (3, kind.block_size, 2, kind.head_dim, getattr(torch, kind.kept), kind.layout, "cpu")
        yield kind.label, kind.dtype, dict(zip(names, values, strict=True)), "shape, dtype and layout as asked"
