"""Loose weights and paged batches of any size, and their values in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import qiao_cpu
import torch
from qiao.contract import AttentionMetadata, KVCache, PackedWeight, WeightInfo
from qiao_conformance import oracle

SCHEMES = ("dense", "w8a16", "w8a8", "w4a16")


def generator(seed):
    return torch.Generator().manual_seed(seed)


@dataclass
class Linear:
    """A packed weight and its exact value [O, I] in float64."""

    packed: PackedWeight
    value: torch.Tensor

    def __call__(self, x, bias=None):
        return qiao_cpu.matmul(x, self.packed, bias)


def linear(scheme, outputs, inputs, dtype=torch.float32, group=-1, seed=0, half_scales=True, zeros="whole", **extra):
    """A weight with entries of the order of ``inputs ** -0.5``.

    ``zeros`` of w4a16 and w8a16: ``whole`` numbers, ``one`` for all (7.5), ``eight`` for all, ``quotient`` as of GGUF's
    Q4_1, or ``none``.
    ``extra`` are further tensors for ``pack_weight``.
    """
    g = generator(seed)
    if scheme == "dense":
        weight = (torch.randn(outputs, inputs, generator=g) * inputs**-0.5).to(dtype)
        tensors, value = {"weight": weight}, weight.double()
    else:
        bits = 4 if scheme == "w4a16" else 8
        low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
        size = group if group > 0 else inputs
        codes = torch.randint(low, high, (outputs, inputs), generator=g)
        scale = (torch.rand(outputs, -(-inputs // size), generator=g) + 0.5) / (high * inputs**0.5)
        scale = scale.half().float() if half_scales else scale
        zero = torch.randint(5, 11, scale.shape, generator=g).float()
        if zeros in ("one", "eight"):
            zero = torch.full_like(scale, 7.5 if zeros == "one" else 8)
        elif zeros == "quotient":
            zero = (zero * scale).half().float() / scale
        tensors = {"weight": codes.to(kind), "scale": scale, **extra}
        shifted = codes.double()
        columns = torch.arange(inputs) // size
        if scheme != "w8a8" and zeros != "none":
            tensors["zero"] = zero
            shifted = shifted - zero.double()[:, columns]
        value = shifted * scale.double()[:, columns]
    info = WeightInfo("w", inputs, outputs, group_size=group)
    return Linear(qiao_cpu.pack_weight(scheme, tensors, info, "cpu"), value)


@dataclass
class Batch:
    """Sequences over one cache: ``keys[i]``, ``values[i]`` [length, K, D] as written, ``queries[i]`` [length, H, D]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    cache: KVCache
    tables: list[list[int]]
    window: int = 0
    soft_cap: float = 0.0

    def step(self, parts):
        """Attention of one step: ``parts`` is a list of (sequence, first position, count); a list of results."""
        counts = [count for _, _, count in parts]
        lens = [first + count for _, first, count in parts]
        width = max(len(t) for t in self.tables)
        tables = [self.tables[i] + [0] * (width - len(self.tables[i])) for i, _, _ in parts]
        metadata = AttentionMetadata(
            torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            torch.empty(0, dtype=torch.int64),
            tuple(counts),
            tuple(lens),
        )
        query = torch.cat([self.queries[i][first : first + count] for i, first, count in parts])
        scale = query.shape[-1] ** -0.5
        out = qiao_cpu.attention(query, self.cache, metadata, scale, self.window, self.soft_cap)
        return list(out.split(counts))

    def exact(self, sequence, kept=None):
        """All positions of one sequence in float64; ``kept`` names the cache's dtype, whose rounding it then shares."""
        query, key, value = (x[sequence].double() for x in (self.queries, self.keys, self.values))
        if kept is not None:
            key, value = (oracle.stored(x[sequence], kept) for x in (self.keys, self.values))
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        if self.soft_cap > 0:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        at = torch.arange(len(query))
        hidden = at[None, :] > at[:, None]
        if self.window > 0:
            hidden |= at[None, :] <= at[:, None] - self.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def batch(lengths, heads, kv_heads, size, block, dtype=torch.float32, seed=0, kept=None, **options):
    """Random sequences written to shuffled blocks; unused slots hold NaN, which must never be read into a result."""
    g = generator(seed)
    counts = [-(-n // block) for n in lengths]
    order = (torch.randperm(sum(counts), generator=g) + 1).tolist()
    cache = qiao_cpu.allocate_kv(sum(counts) + 1, block, kv_heads, size, kept or dtype, "HND", "cpu")
    for part in (cache.key, cache.value, cache.key_scale, cache.value_scale):
        if part is not None:
            storage = torch.empty(0, dtype=part.dtype).set_(part.untyped_storage())
            storage.fill_(float("nan") if part.dtype.is_floating_point else 99)
    made = Batch([], [], [], cache, [], **options)
    for length, count in zip(lengths, counts, strict=True):
        own, order = order[:count], order[count:]
        key, value = (torch.randn(length, kv_heads, size, generator=g).to(dtype) for _ in range(2))
        at = torch.arange(length)
        qiao_cpu.write_kv(key, value, cache, torch.tensor(own)[at // block] * block + at % block)
        made.keys.append(key)
        made.values.append(value)
        made.queries.append(torch.randn(length, heads, size, generator=g).to(dtype))
        made.tables.append(own)
    return made


def with_options(made, **options):
    return replace(made, **options)
