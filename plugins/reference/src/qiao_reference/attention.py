"""Attention family: decodes of similar length together, each prefill on its own.

Sequences with one query are grouped by their context rounded up to a step that depends on nothing else, and padded to
that step. So a sequence's sums have the same length and order whatever shares the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from qiao.contract import AttentionMetadata, KVCache, hookimpl
from torch.nn import functional

from qiao_reference.allocation import parts

_SCORE_BYTES = 64 << 20
"""Upper bound for one block of float32 scores where they have to be written out."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query each: ``rows`` [b] in the packed queries, ``slots`` [b, L], ``lens`` [b]."""

    rows: torch.Tensor
    slots: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with ``count`` queries from row ``start``; ``slots`` [L] of its whole context."""

    start: int
    count: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each sequence's keys lie, worked out once a step for all layers."""

    block_size: int
    decodes: tuple[_Decodes, ...]
    prefills: tuple[_Prefill, ...]


def _step(length: int) -> int:
    """The least of 32, 48, 64, 96, 128, 192, ... that is no less than ``length``."""
    size = 32
    while size < length:
        size *= 2
    return size * 3 // 4 if size > 32 and length <= size * 3 // 4 else size


def _slots(tables: torch.Tensor, lens: torch.Tensor, width: int, block_size: int) -> torch.Tensor:
    """Cache slots [b, width] of positions 0, 1, ...; positions past the end point at position 0.

    Padding must read memory that was written: 0 times a NaN left in a fresh block is NaN.
    """
    position = torch.arange(width)[None, :]
    position = torch.where(position < lens[:, None], position, 0)
    block = tables.gather(1, position // block_size)
    return block * block_size + position % block_size


def _make_plan(metadata: AttentionMetadata, block_size: int) -> Plan:
    tables = metadata.block_tables.long()
    groups: dict[int, list[tuple[int, int]]] = {}
    prefills, start = list[_Prefill](), 0
    for i, (count, length) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if count == 1:
            groups.setdefault(_step(length), []).append((i, start))
        elif count > 1:
            slots = _slots(tables[i : i + 1], torch.tensor([length]), length, block_size)[0]
            prefills.append(_Prefill(start, count, slots))
        start += count
    decodes = []
    for width, members in groups.items():
        index, rows = torch.tensor(members).T
        lens = metadata.seq_lens.long()[index]
        decodes.append(_Decodes(rows, _slots(tables[index], lens, width, block_size), lens))
    return Plan(block_size, tuple(decodes), tuple(prefills))


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of ``x`` [..., D] and their scales [...], as ``KVCache`` has it."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    scale = torch.where(scale.isinf(), torch.nan, scale)
    codes = (wide / torch.where(scale > 0, scale, torch.inf)[..., None]).round().clamp(-127, 127)
    return codes.nan_to_num(0).to(torch.int8), scale


def _gather_pair(cache: KVCache, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at ``slots`` [b, L], each [b, K, L, D] of ``dtype``."""
    key, value = (_gather(part, cache, slots, dtype) for part in (cache.key, cache.value))
    if cache.key_scale is None or cache.value_scale is None:
        return key, value
    scales = (_gather(part[..., None], cache, slots, dtype) for part in (cache.key_scale, cache.value_scale))
    return key * next(scales), value * next(scales)


def _work_dtype(cache: KVCache, dtype: torch.dtype, soft_cap: float) -> torch.dtype:
    """What to compute in: float32 where scores are written out, and for codes, which half precision would round."""
    return torch.float32 if soft_cap > 0 or cache.key_scale is not None else dtype


def _gather(part: torch.Tensor, cache: KVCache, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors at ``slots`` [b, L] as [b, K, L, D] with D contiguous, whatever the layout."""
    if cache.layout == "NHD":
        rows = part.view(-1, part.shape[2] * part.shape[3]).index_select(0, slots.flatten())
        return rows.to(dtype).view(*slots.shape, *part.shape[2:]).transpose(1, 2)
    heads, slots = part.shape[1], slots[:, None, :]
    head = torch.arange(heads)[None, :, None]
    index = (slots // cache.block_size * heads + head) * cache.block_size + slots % cache.block_size
    rows = part.view(-1, part.shape[3]).index_select(0, index.flatten())
    return rows.to(dtype).view(*index.shape, part.shape[3])


def _softmax_product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float, soft_cap: float
) -> torch.Tensor:
    """Written-out attention in float32: ``query`` [b, K, G, D], ``visible`` broadcasts to [b, K, G, L]."""
    scores = torch.matmul(query.float() * scale, key.transpose(-1, -2))
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores.masked_fill_(~visible, float("-inf"))
    return torch.matmul(scores.softmax(-1), value)


def _decode(
    query: torch.Tensor, cache: KVCache, group: _Decodes, scale: float, sliding_window: int, soft_cap: float
) -> torch.Tensor:
    rows, (_, heads, size) = len(group.rows), query.shape
    dtype = _work_dtype(cache, query.dtype, soft_cap)
    key, value = _gather_pair(cache, group.slots, dtype)
    position, lens = torch.arange(key.shape[2])[None, :], group.lens[:, None]
    visible = position < lens
    if sliding_window > 0:
        visible &= position >= lens - sliding_window
    visible = visible[:, None, None, :]
    # the query heads that share a key head stand as the rows of one product
    packed = query[group.rows].to(dtype).view(rows, key.shape[1], heads // key.shape[1], size)
    if soft_cap > 0:
        # matmul chooses its kernel by strides too, and those of a batch of one differ
        out = _softmax_product(packed, key.contiguous(), value.contiguous(), visible, scale, soft_cap)
    else:
        out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=visible, scale=scale)
    return out.reshape(rows, heads, size)


def _prefill(
    query: torch.Tensor, cache: KVCache, one: _Prefill, scale: float, sliding_window: int, soft_cap: float
) -> torch.Tensor:
    """``query`` [n, H, D] of one sequence; returns the same shape."""
    count, heads, size = query.shape
    dtype = _work_dtype(cache, query.dtype, soft_cap)
    key, value = _gather_pair(cache, one.slots[None, :], dtype)
    length, kv_heads = key.shape[2], key.shape[1]
    at, position = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
    visible = position <= at
    if sliding_window > 0:
        visible &= position > at - sliding_window
    if soft_cap <= 0:
        plain = count == length and sliding_window <= 0
        out = functional.scaled_dot_product_attention(
            query.to(dtype).transpose(0, 1)[None],
            key,
            value,
            attn_mask=None if plain else visible,
            is_causal=plain,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        return out[0].transpose(0, 1)
    chunk = max(1, _SCORE_BYTES // (4 * heads * length))
    parts = []
    for first in range(0, count, chunk):
        piece = query[first : first + chunk]
        grouped = piece.view(len(piece), kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
        mask = visible[first : first + chunk]
        out = _softmax_product(grouped, key[0, :, None], value[0, :, None], mask, scale, soft_cap)
        parts.append(out.permute(2, 0, 1, 3).reshape(len(piece), heads, size))
    return torch.cat(parts)


@hookimpl
def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Scatter the new vectors; rows whose slot is -1 are left out."""
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().flatten()
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    new = [key, value]
    if cache.key_scale is not None:
        (key, key_scale), (value, value_scale) = quantize(key), quantize(value)
        new = [key, value, key_scale, value_scale]
    for part, rows in zip(parts(cache), new, strict=True):
        if cache.layout == "NHD":
            part.view(-1, *part.shape[2:]).index_copy_(0, slot_mapping, rows.to(part.dtype))
        else:
            part[slot_mapping // cache.block_size, :, slot_mapping % cache.block_size] = rows.to(part.dtype)


@hookimpl
def prepare_attention(
    metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> Any:
    """Groups the sequences and turns block tables into slots, once for all layers."""
    return _make_plan(metadata, block_size)


@hookimpl
def attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Mixed batch: see the module. Rows that belong to no sequence come back as zero."""
    plan = metadata.plan
    if not isinstance(plan, Plan) or plan.block_size != cache.block_size:
        plan = _make_plan(metadata, cache.block_size)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        out[group.rows] = _decode(query, cache, group, scale, sliding_window, soft_cap).to(query.dtype)
    for one in plan.prefills:
        rows = slice(one.start, one.start + one.count)
        out[rows] = _prefill(query[rows], cache, one, scale, sliding_window, soft_cap).to(query.dtype)
    return out


@hookimpl
def decode_attention(
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """As ``attention``, which already takes decodes together."""
    return attention(query, cache, metadata, scale, sliding_window, soft_cap)
