"""What the operators of torch_npu compute, by their documentation, and the rules that CANN's kernels check themselves.

A broken rule raises as torch_npu does where CANN refuses a call: ``RuntimeError`` with the kernel's name and an error
code, 161002 for an argument, 561002 for what the kernel's tiling has no case for, 561003 for a kernel that the chip
does not have. All sums are float32.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor

OPERATORS: dict[str, Callable[..., Any]] = {}
"""By full name."""


def computes(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the numbers of operator ``name``."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[name] = function
        return function

    return keep


def ask(kept: bool, kernel: str, rule: str, code: int = 161002) -> None:
    """Refuse the call unless the rule is ``kept``."""
    if not kept:
        raise RuntimeError(f"call {kernel} failed, error code is {code}: {rule}")


def on_310p() -> bool:
    """Whether the device is one."""
    return os.environ.get("CANN_STUB_SOC", "").startswith("Ascend310P")


def _same(kernel: str, *tensors: Tensor | None) -> None:
    kinds = {t.dtype for t in tensors if t is not None}
    ask(len(kinds) <= 1, kernel, f"tensors of one dtype, not {kinds}")


# norms, activations, rotary


@computes("npu::npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(normed, 1 / root of the mean square)."""
    ask(x.dtype.is_floating_point and x.shape[-gamma.dim() :] == gamma.shape, "aclnnRmsNorm", "gamma is a row of x")
    ask(gamma.dtype in (x.dtype, torch.float32), "aclnnRmsNorm", "gamma is of x's dtype or float32")
    ask(not on_310p() or gamma.dtype == x.dtype, "aclnnRmsNorm", "gamma is of x's dtype on a 310P")
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(x.dtype), scale


@computes("npu::npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(normed sum, 1 / root of the mean square, sum)."""
    _same("aclnnAddRmsNorm", x1, x2, gamma)
    total = x1 + x2
    normed, scale = rms_norm(total, gamma, epsilon)
    return normed, scale, total


@computes("npu::npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """``silu(first half) * second half``."""
    ask(x.shape[dim] % 2 == 0, "aclnnSwiGlu", "an even width")
    ask(not on_310p() or x.shape[dim] % 32 == 0, "aclnnSwiGlu", "a width that 32 divides on a 310P", 561002)
    gate, up = x.float().chunk(2, dim)
    return (functional.silu(gate) * up).to(x.dtype)


@computes("npu::npu_rotary_mul")
def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """[B, S, N, D] by angles [1, S, 1, D] or [B, S, 1, D], as wide as a head."""
    name, size = "aclnnRotaryPositionEmbedding", x.shape[-1]
    _same(name, x, cos, sin)
    ask(x.dim() == cos.dim() == 4 and cos.shape == sin.shape and cos.shape[-1] == size, name, "four dimensions")
    ask(size < 896 and size % 2 == 0, name, "an even head below 896", 561002)
    ask(x.shape[0] < 1000 and x.shape[2] < 1000, name, "fewer than 1000 sequences and heads", 561002)
    wide = x.float()
    if rotary_mode == "half":
        first, second = wide.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    return (wide * cos.float() + turned * sin.float()).to(x.dtype)


# the cache and attention


@computes("npu::npu_scatter_pa_kv_cache")
def scatter(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, **options: Any) -> None:
    """[T, K, D] into caches [blocks, size, K, D] at ``slots``, each used once unless nobody reads it."""
    name = "aclnnScatterPaKvCache"
    ask(options.get("cache_mode", "PA_NZ") == "Norm", name, "cache_mode is Norm for a cache that is not NZ")
    ask(not on_310p(), name, "not on a 310P", 561003)
    _same(name, key, value, key_cache, value_cache)
    ask(key.is_contiguous() and value.is_contiguous() and slots.is_contiguous(), name, "contiguous tensors")
    ask(slots.dtype in (torch.int32, torch.int64), name, "slots are int32 or int64")
    count = key_cache.shape[0] * key_cache.shape[1]
    ask(bool(((slots >= 0) & (slots < count)).all()), name, f"slots from 0 to {count - 1}")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots.long()] = rows


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """``query`` [n, H, D] over [L, K, D]; ``hidden`` [n, L] is added to the scores where it is not bool."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), key) * scale
    if hidden is not None and hidden.dtype == torch.bool:
        scores = scores.masked_fill(hidden, float("-inf"))
    elif hidden is not None:
        scores = scores + hidden.float()
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), value).to(query.dtype)


def _hidden(mode: int, count: int, length: int, pre_tokens: int, next_tokens: int) -> Tensor | None:
    """True where query j, which stands at ``length - count + j``, does not see a key."""
    if mode == 0:
        return None
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)[None, :]
    if mode == 3:
        return distance < 0
    return (distance > pre_tokens) | (distance < -next_tokens)


_FIA = "aclnnFusedInferAttentionScoreV3"


def _check_fia(query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    _same(_FIA, query, key)
    ask(not on_310p(), _FIA, "not on a 310P", 561003)
    ask(query.dtype in (torch.float16, torch.bfloat16), _FIA, "float16 or bfloat16")
    ask(options["input_layout"] == "TND", _FIA, "the stand-in computes the layout TND only")
    ask(query.shape[-1] in (64, 128, 192), _FIA, "TND has heads of 64, 128 and 192", 561002)
    heads, kv_heads = options["num_heads"], options["num_key_value_heads"]
    ask(heads == query.shape[1] and kv_heads > 0 and heads % kv_heads == 0, _FIA, "heads as in the query")
    ask(heads // kv_heads <= 64 and heads <= 256, _FIA, "64 heads to a key head, 256 in all", 561002)
    starts, mode = options["actual_seq_lengths"], options.get("sparse_mode", 0)
    ask(starts[-1] == query.shape[0], _FIA, "the last running sum is the number of queries")
    ask(list(starts) == sorted(starts) and len(starts) <= 4096, _FIA, "running sums of 4096 sequences at most")
    ask(mode in (0, 3, 4), _FIA, f"the stand-in computes no sparse_mode {mode}")
    fits = mask is not None and mask.shape[-2:] == (2048, 2048) and mask.dtype in (torch.int8, torch.bool, torch.uint8)
    ask(fits if mode else mask is None, _FIA, "sparse modes 3 and 4 take a mask of 2048 by 2048, 0 none here")
    ask(not fits or bool((mask == torch.ones_like(mask).triu(1)).all()), _FIA, "the upper triangle is masked")


@computes("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """TND over a paged cache, where lengths are plain, or over packed keys, where they are running sums.

    Nobody asks for the second result; the form with ``out``, which graphs take, has room of any shape for it.
    """
    options = {"num_heads": 1, "num_key_value_heads": 0, "scale": 1.0, "sparse_mode": 0, "block_size": 0, **options}
    options["num_key_value_heads"] = options["num_key_value_heads"] or options["num_heads"]
    _check_fia(query, key, atten_mask, options)
    table, starts = options.get("block_table"), [0, *options["actual_seq_lengths"]]
    lens, size = list(options["actual_seq_lengths_kv"]), options.get("block_size", 0)
    ask(len(lens) == len(starts) - 1, _FIA, "as many lengths of keys as of queries")
    if table is not None:
        ask(size % 16 == 0 and 0 < size <= 1024, _FIA, f"a block size of 16 to 1024, not {size}", 561002)
        ask(table.dtype == torch.int32 and key.shape[1] == size, _FIA, "an int32 table and blocks of its size")
    kv_heads, scale = options["num_key_value_heads"], options.get("scale", 1.0)
    out = torch.empty_like(query)
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if table is not None:
            length = lens[i]
            blocks = table[i, : -(-length // size)].long()
            pair = [x[blocks].flatten(0, 1)[:length].view(length, kv_heads, -1) for x in (key, value)]
        else:
            first, last = ([0, *lens][i], lens[i])
            length, pair = last - first, [x[first:last] for x in (key, value)]
        reach = (options.get("pre_tokens", 2**31 - 1), options.get("next_tokens", 2**31 - 1))
        hidden = _hidden(options.get("sparse_mode", 0), end - start, length, *reach)
        out[start:end] = attend(query[start:end], *pair, scale, hidden)
    return out, None if "out" in options else torch.zeros(0, dtype=torch.float32)


def _context(cache: Tensor, kv_heads: int, table: Tensor, length: int) -> Tensor:
    """[L, K, D] of one sequence from an NZ cache [blocks, K * D / 16, size, 16]."""
    size = cache.shape[2]
    blocks = cache[table[: -(-length // size)].long()]
    return blocks.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:length].view(length, kv_heads, -1)


def _check_nz(name: str, cache: Tensor, heads: int, size: int) -> None:
    fits = cache.dim() == 4 and cache.shape[3] == 16 and cache.shape[1] * 16 == heads * size
    ask(fits, name, "the stand-in computes NZ caches only")
    ask(cache.dtype == torch.float16, name, "float16")
    ask(cache.shape[2] * size <= 128 * 128, name, "a block times a head of 128 * 128 at most", 561002)


@computes("atb::_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """[T, K, D] into NZ caches."""
    name = "atb::ReshapeAndCache"
    ask(slots.dtype == torch.int32, name, "slots are int32")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        _check_nz(name, cache, *rows.shape[1:])
        size = cache.shape[2]
        ask(bool(((slots >= 0) & (slots < cache.shape[0] * size)).all()), name, "slots of the cache")
        at = slots.long()
        cache[at // size, :, at % size] = rows.reshape(len(rows), -1, 16)


@computes("atb::_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    **options: Any,
) -> None:
    """One query a sequence."""
    name = "atb::PagedAttention"
    ask(block_table.dtype == context_lens.dtype == torch.int32, name, "an int32 table and lengths")
    ask(query.shape[0] == len(context_lens), name, "one query a sequence")
    _check_nz(name, key_cache, num_kv_heads, query.shape[2])
    for i, length in enumerate(context_lens.tolist()):
        pair = (_context(x, num_kv_heads, block_table[i], length) for x in (key_cache, value_cache))
        out[i : i + 1] = attend(query[i : i + 1], *pair, scale_value, None)


@computes("atb::_npu_paged_attention_splitfuse")
def splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Ragged queries; ``mask`` is NZ [1, L / 16, T, 16], a row for each query."""
    name, rows, start = "atb::PagedAttention(splitfuse)", query.shape[0], 0
    ask(mask.dim() == 4 and mask.shape[3] == 16 and mask.dtype == torch.float16, name, "an NZ mask of float16")
    ask(mask.shape[2] % 16 == 0 and mask.shape[2] >= rows, name, "a row of the mask for each query")
    _check_nz(name, key_cache, num_kv_heads, query.shape[2])
    plain = mask[0].permute(1, 0, 2).flatten(1)
    for i, (count, length) in enumerate(zip(seq_len.tolist(), context_lens.tolist(), strict=True)):
        ask(length <= plain.shape[1], name, "a mask as wide as the longest context")
        pair = (_context(x, num_kv_heads, block_table[i], length) for x in (key_cache, value_cache))
        part = slice(start, start + count)
        out[part] = attend(query[part], *pair, scale_value, plain[part, :length])
        start += count


@computes("npu::npu_format_cast")
def format_cast(x: Tensor, acl_format: int, **options: Any) -> Tensor:
    """The stand-in keeps each format as plain rows."""
    ask(acl_format != 29 or x.dtype != torch.float32, "Transdata", "no NZ of float32")
    return x.clone()


# linear layers


def nibbles(weight: Tensor) -> Tensor:
    """int32 [K, N / 8] to float32 -8..7 [K, N], the lowest four bits first."""
    pairs = weight.contiguous().flatten().view(torch.uint8)  # a single column may have any stride
    codes = torch.stack((pairs & 15, pairs >> 4), -1).view(len(weight), -1)
    return (codes ^ 8).float() - 8


_WQBMM = "aclnnWeightQuantBatchMatmulV2"


def _antiquantized(weight: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Tensor:
    """``(weight + offset) * scale`` as float32 [K, N]."""
    codes = nibbles(weight) if weight.dtype == torch.int32 else weight.float()
    rows, columns = codes.shape
    scale, offset = (None if x is None else x.reshape(-1, 1, columns).float() for x in (scale, offset))
    groups = -(-rows // group) if group else 1
    ask(len(scale) == groups, _WQBMM, f"{groups} groups of scales, not {len(scale)}")
    size = group or rows
    padded = functional.pad(codes, (0, 0, 0, groups * size - rows)).view(groups, size, columns)
    return (padded if offset is None else padded.add_(offset)).mul_(scale).view(-1, columns)[:rows]


def _check_weight_only(x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> None:
    ask(x.dtype in (torch.float16, torch.bfloat16), _WQBMM, "x of float16 or bfloat16")
    ask(weight.dtype in (torch.int8, torch.int32), _WQBMM, "int8, or int4 in int32")
    ask(not on_310p() or weight.dtype == torch.int8, _WQBMM, "int8 weights on a 310P", 561003)
    _same(_WQBMM, x, scale, offset)
    rows = x.shape[-1]
    ask(weight.shape[-2] == rows and rows <= 65535 and scale.shape[-1] <= 65535, _WQBMM, "K and N up to 65535", 561002)
    ask(group == 0 or (group % 32 == 0 and 32 <= group <= rows - 1), _WQBMM, f"a group of 32 to K - 1, not {group}")


@computes("npu::npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """``x`` [M, K] by ``(weight + offset) * scale``."""
    _check_weight_only(x, weight, antiquant_scale, antiquant_offset, antiquant_group_size)
    kind = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
    ask(bias is None or bias.dtype == kind, _WQBMM, f"a bias of {kind} for {x.dtype}")
    out = x.float() @ _antiquantized(weight, antiquant_scale, antiquant_offset, antiquant_group_size)
    return (out if bias is None else out + bias.float()).to(x.dtype)


@computes("npu::npu_dynamic_quant")
def dynamic_quant(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(int8 codes, a float32 scale for each row)."""
    ask(not on_310p(), "aclnnDynamicQuantV3", "not on a 310P", 561003)
    ask(x.dtype in (torch.float16, torch.bfloat16), "aclnnDynamicQuantV3", "float16 or bfloat16")
    scale = x.float().abs().amax(-1) / 127
    codes = (x.float() / torch.where(scale > 0, scale, 1.0)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


_DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""By torch's number."""


@computes("npu::npu_quant_matmul")
def quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, output_dtype: int | None = None, **options: Any) -> Tensor:
    """int8 [M, K] by int8 [K, N], each output column by ``scale`` and each row by ``pertoken_scale``."""
    name, pertoken, bias = "aclnnQuantMatmulV5", options.get("pertoken_scale"), options.get("bias")
    ask(x1.dtype == x2.dtype == torch.int8, name, "int8 by int8")
    ask(scale.dtype == torch.float32 and pertoken is not None, name, "the stand-in computes float32 scales by token")
    ask(pertoken.dtype == torch.float32 and pertoken.shape == x1.shape[:1], name, "a float32 scale for each row")
    ask(scale.shape in ((1,), x2.shape[1:]), name, "a scale for each column")
    kind = _DTYPES[int(output_dtype or 5) % 256]
    ask(
        bias is None or bias.dtype in (torch.int32, torch.float32, kind),
        name,
        "a bias of int32, float32 or the result's",
    )
    whole = (x1.double() @ x2.double()).float()
    out = whole * scale[None] * pertoken[:, None]
    return (out if bias is None else out + bias.float()).to(kind)


# experts


@computes("npu::npu_moe_gating_top_k_softmax")
def gating(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, source rows int32), each [T, k]."""
    name = "aclnnMoeGatingTopKSoftmaxV2"
    ask(x.dim() in (2, 3) and 0 < k <= x.shape[-1] and k <= 1024, name, "k up to the number of experts and 1024")
    weights, experts = torch.topk(x.float().softmax(-1), k, dim=-1)
    source = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T.contiguous()
    return weights.to(x.dtype), experts.to(torch.int32), source


@computes("npu::npu_grouped_matmul")
def grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    """Runs of rows of one ``x`` by a weight each: ``group_list`` holds running sums, or counts."""
    name = "aclnnGroupedMatmulV5"
    rows, counts = x[0], options["group_list"]
    ask(len(x) == 1 and options.get("split_item") in (2, 3), name, "one x and one result")
    ask(options.get("group_type") == 0 and len(weight) <= 128, name, "groups of rows, 128 weights at most")
    ask(counts.dtype == torch.int64 and len(counts) == len(weight), name, "an int64 group for each weight")
    ends = counts.cumsum(0) if options.get("group_list_type", 0) == 1 else counts
    ask(int(ends[-1]) == len(rows), name, "groups that hold all rows")
    scales, offsets = options.get("antiquant_scale"), options.get("antiquant_offset")
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        one = weight[i]
        if scales:
            group = 0 if scales[i].dim() == 1 else rows.shape[1] // scales[i].shape[0]
            _check_weight_only(rows, one, scales[i], offsets[i] if offsets else None, group)
            value = _antiquantized(one, scales[i], offsets[i] if offsets else None, group)
        else:
            _same(name, rows, one)
            value = one.float()
        parts.append((rows[start:end].float() @ value).to(rows.dtype))
    return [torch.cat(parts)]
