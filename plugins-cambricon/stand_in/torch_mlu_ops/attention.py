"""Cache and attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from qiao_conformance.sim import kernels
from torch_mlu.graphs import operation

from torch_mlu_ops._rules import HALVES, HEADS, apart, ask, enter, int32, same_dtype

Tensor = torch.Tensor


@operation
def reshape_paged_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, direction: bool = False
) -> None:
    """k, v [tokens, heads, dim] into [blocks, heads, block, dim]; a negative slot is skipped."""
    enter("reshape_paged_cache", k, v, k_cache, v_cache, slot_mapping)
    same_dtype("reshape_paged_cache", k, v, k_cache, v_cache)
    int32("reshape_paged_cache", slot_mapping)
    ask(k.shape[1:] == (k_cache.shape[1], k_cache.shape[3]), "reshape_paged_cache: heads and size are the cache's")
    slots = kernels.raw(slot_mapping).long()
    ask(int(slots.max()) < k_cache.shape[0] * k_cache.shape[2], "reshape_paged_cache: a slot is beyond the cache")
    for part, new in ((k_cache, k), (v_cache, v)):
        kernels.store(kernels.raw(part), "HND", kernels.raw(new), slots)


@operation
def quant_to_paged_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_cache_scale: Tensor,
    v_cache_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """The same into int8 caches, whose float32 scales are [blocks, heads, block]."""
    name = "quant_to_paged_cache"
    enter(name, k, v, k_cache, v_cache, k_cache_scale, v_cache_scale, slot_mapping)
    same_dtype(name, k, v)
    int32(name, slot_mapping)
    ask(k_cache.dtype == v_cache.dtype == torch.int8, f"{name}: caches are int8")
    ask(k_cache_scale.dtype == v_cache_scale.dtype == torch.float32, f"{name}: scales are float32")
    ask(k_cache_scale.shape == k_cache.shape[:3], f"{name}: scales are [blocks, heads, block]")
    slots = kernels.raw(slot_mapping).long()
    for part, scales, new in ((k_cache, k_cache_scale, k), (v_cache, v_cache_scale, v)):
        wide = kernels.raw(new).float()
        step = wide.abs().amax(-1) / 127
        codes = (wide / torch.where(step > 0, step, 1.0)[..., None]).round().clamp(-127, 127)
        kernels.store(kernels.raw(part), "HND", codes, slots)
        kernels.store(kernels.raw(scales)[..., None], "HND", step[..., None], slots)


@operation
def dequant_from_paged_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_cache_scale: Tensor,
    value_cache_scale: Tensor,
    context_lengths: Tensor,
    max_context_len: int,
    context_seq_offset: Tensor | None,
    block_tables: Tensor,
    quant_mode: int = 0,
    quant_bit: int = 8,
) -> None:
    """Contexts of int8 caches one after another into key and value, [sum of lengths, heads, dim] in 16 bits."""
    name = "dequant_from_paged_cache"
    enter(name, key, value, key_cache, value_cache, key_cache_scale, value_cache_scale, context_lengths, block_tables)
    ask(key.dtype == value.dtype and key.dtype in HALVES, f"{name}: key and value in 16 bits")
    ask(key_cache.dtype == value_cache.dtype == torch.int8 and quant_bit == 8, f"{name}: caches are int8")
    ask(quant_mode == 1 and key_cache_scale.dim() == 3, f"{name}: the stand-in knows scales of tokens only, mode 1")
    int32(name, context_lengths, block_tables, context_seq_offset)
    lens = kernels.raw(context_lengths).tolist()
    ask(context_seq_offset is None and sum(lens) == key.shape[0], f"{name}: contexts lie one after another")
    ask(max_context_len >= max(lens), f"{name}: max_context_len")
    parts = ((key, key_cache, key_cache_scale), (value, value_cache, value_cache_scale))
    for out, cache, scales in parts:
        pieces = [_dequantized(cache, scales, kernels.raw(block_tables)[i], n) for i, n in enumerate(lens)]
        kernels.raw(out).copy_(torch.cat(pieces))


def _dequantized(cache: Tensor, scales: Tensor | None, table: Tensor, length: int) -> Tensor:
    codes = kernels.context(kernels.raw(cache), "HND", table, length)
    if scales is None:
        return codes
    return codes.float() * kernels.context(kernels.raw(scales)[..., None], "HND", table, length)


@operation
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_kv: Tensor,
    alibi_slope: Tensor | None,
    attn_bias: Tensor | None,
    max_seq_len_q: int,
    max_seq_len_kv: int,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    compute_dtype: torch.dtype = torch.float32,
    return_lse: bool = False,
    block_tables: Tensor | None = None,
    **scales: Any,
) -> Tensor:
    """Ragged prefill; with ``block_tables`` k and v are caches, whose block size must be 16."""
    name = "flash_attention"
    enter(name, q, k, v, out, cu_seq_lens_q, cu_seq_lens_kv, block_tables)
    same_dtype(name, q, k, v, out)
    int32(name, cu_seq_lens_q, cu_seq_lens_kv, block_tables)
    apart(name, out, q)
    ask(is_causal and alibi_slope is None and attn_bias is None, f"{name}: only what the plugin needs is here")
    ask(q.shape[-1] in HEADS, f"{name}: head size {q.shape[-1]}")
    starts, ends = (kernels.raw(x).tolist() for x in (cu_seq_lens_q, cu_seq_lens_kv))
    ask(max_seq_len_q >= max(b - a for a, b in pairwise(starts)), f"{name}: max_seq_len_q")
    ask(max_seq_len_kv >= max(b - a for a, b in pairwise(ends)), f"{name}: max_seq_len_kv")
    if block_tables is not None:
        ask(k.dim() == 4 and k.shape[2] == 16, f"{name}: a paged cache has blocks of 16, not {k.shape[2]}")
    for i in range(len(starts) - 1):
        rows, length = slice(starts[i], starts[i + 1]), ends[i + 1] - ends[i]
        if block_tables is None:
            key, value = (kernels.raw(x)[ends[i] : ends[i + 1]] for x in (k, v))
        else:
            table = kernels.raw(block_tables)[i]
            key, value = (kernels.context(kernels.raw(x), "HND", table, length) for x in (k, v))
        window = window_size_left + 1 if window_size_left >= 0 else 0
        kernels.raw(out)[rows] = kernels.attend(kernels.raw(q)[rows], key, value, softmax_scale, window, 0.0)
    return out


@operation
def single_query_cached_kv_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    k_cache_quant_scale: Tensor | None,
    v_cache_quant_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    max_contxt_len: int,
    windows_size_left: int,
    windows_size_right: int,
    softmax_scale: float,
    return_lse: bool = False,
) -> Tensor:
    """Decode, q [batch, queries, heads, dim]; a longest context that is too small cuts contexts off silently."""
    name = "single_query_cached_kv_attn"
    enter(name, q, k_cache, v_cache, out, block_tables, context_lens, k_cache_quant_scale, v_cache_quant_scale)
    int8 = k_cache.dtype == torch.int8
    same_dtype(name, q, out, *(() if int8 else (k_cache, v_cache)))
    ask(v_cache.dtype == k_cache.dtype, f"{name}: caches of one dtype")
    scales = (k_cache_quant_scale, v_cache_quant_scale)
    ask(all((x is not None) == int8 for x in scales), f"{name}: int8 caches come with scales, others without")
    ask(all(x is None or x.dtype == torch.float32 for x in scales), f"{name}: scales are float32")
    apart(name, out, q)
    int32(name, block_tables, context_lens)
    ask(windows_size_right == -1, f"{name}: windows_size_right must be -1")
    ask(k_cache.shape[2] in (1, 2, 4, 8, 16, 32, 64), f"{name}: block size {k_cache.shape[2]}")
    ask(q.shape[-1] in HEADS, f"{name}: head size {q.shape[-1]}")
    most = 256 if k_cache.dtype == torch.bfloat16 else 128
    ask(q.shape[1] * q.shape[2] <= most * k_cache.shape[1], f"{name}: queries times heads over key heads above {most}")
    lens = kernels.raw(context_lens).tolist()
    for i, length in enumerate(lens):
        seen = min(length, max_contxt_len) if max_contxt_len > 0 else length
        table = kernels.raw(block_tables)[i]
        parts = zip((k_cache, v_cache), scales, strict=True)
        key, value = (_dequantized(cache, x, table, seen) for cache, x in parts)
        window = windows_size_left + 1 if windows_size_left >= 0 else 0
        kernels.raw(out)[i] = kernels.attend(kernels.raw(q)[i], key, value, softmax_scale, window, 0.0)
    return out
