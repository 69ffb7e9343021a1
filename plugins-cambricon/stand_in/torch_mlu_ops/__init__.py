"""Stands in for torch_mlu_ops: the documented signatures, every documented rule checked, numbers computed on the host.

What breaks a rule raises ``RuleError``. ``QIAO_MLU_OPS=old`` gives the names of releases before 1.12, anything else the
newer ones. It is written from public signatures and shares no code with the vendor.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
import torch_mlu  # noqa: F401 - the device must be there
from qiao_conformance.sim import kernels

__version__ = "stand-in"
Tensor = torch.Tensor
HEADS = (32, 64, 80, 96, 128, 160, 192, 224, 256, 512, 576)


class RuleError(RuntimeError):
    """A documented rule of the vendor's is broken."""


def _ask(condition: bool, rule: str) -> None:
    if not condition:
        raise RuleError(rule)


def _enter(name: str, *tensors: Tensor | None) -> int:
    present = [t for t in tensors if t is not None]
    _ask(all(t.device.type == "mlu" for t in present), f"{name}: tensors must be on mlu")
    _ask(all(t.is_contiguous() for t in present), f"{name}: tensors must be contiguous")
    return kernels.launch(f"tmo.{name}", *present)


def _same_dtype(name: str, *tensors: Tensor | None) -> None:
    kinds = {t.dtype for t in tensors if t is not None}
    _ask(len(kinds) == 1 and kinds <= {torch.float32, torch.float16, torch.bfloat16}, f"{name}: one dtype, not {kinds}")


def _int32(name: str, *tensors: Tensor | None) -> None:
    _ask(all(t is None or t.dtype == torch.int32 for t in tensors), f"{name}: indices, tables and lengths are int32")


def _apart(name: str, out: Tensor, *tensors: Tensor) -> None:
    places = {kernels.raw(t).untyped_storage().data_ptr() for t in tensors}
    _ask(kernels.raw(out).untyped_storage().data_ptr() not in places, f"{name}: out must not alias an input")


def reshape_paged_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, direction: bool = False
) -> None:
    """k, v [tokens, heads, dim] into [blocks, heads, block, dim]; a negative slot is skipped."""
    _enter("reshape_paged_cache", k, v, k_cache, v_cache, slot_mapping)
    _same_dtype("reshape_paged_cache", k, v, k_cache, v_cache)
    _int32("reshape_paged_cache", slot_mapping)
    _ask(k.shape[1:] == (k_cache.shape[1], k_cache.shape[3]), "reshape_paged_cache: heads and size are the cache's")
    slots = kernels.raw(slot_mapping).long()
    _ask(int(slots.max()) < k_cache.shape[0] * k_cache.shape[2], "reshape_paged_cache: a slot is beyond the cache")
    for part, new in ((k_cache, k), (v_cache, v)):
        kernels.store(kernels.raw(part), "HND", kernels.raw(new), slots)


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
    _enter(name, q, k, v, out, cu_seq_lens_q, cu_seq_lens_kv, block_tables)
    _same_dtype(name, q, k, v, out)
    _int32(name, cu_seq_lens_q, cu_seq_lens_kv, block_tables)
    _apart(name, out, q)
    _ask(is_causal and alibi_slope is None and attn_bias is None, f"{name}: only what the plugin needs is here")
    _ask(q.shape[-1] in HEADS, f"{name}: head size {q.shape[-1]}")
    starts, ends = (kernels.raw(x).tolist() for x in (cu_seq_lens_q, cu_seq_lens_kv))
    _ask(max_seq_len_q >= max(b - a for a, b in pairwise(starts)), f"{name}: max_seq_len_q")
    _ask(max_seq_len_kv >= max(b - a for a, b in pairwise(ends)), f"{name}: max_seq_len_kv")
    if block_tables is not None:
        _ask(k.dim() == 4 and k.shape[2] == 16, f"{name}: a paged cache has blocks of 16, not {k.shape[2]}")
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
    _enter(name, q, k_cache, v_cache, out, block_tables, context_lens)
    _same_dtype(name, q, k_cache, v_cache, out)
    _int32(name, block_tables, context_lens)
    _ask(windows_size_right == -1, f"{name}: windows_size_right must be -1")
    _ask(k_cache.shape[2] in (1, 2, 4, 8, 16, 32, 64), f"{name}: block size {k_cache.shape[2]}")
    _ask(q.shape[-1] in HEADS, f"{name}: head size {q.shape[-1]}")
    most = 256 if k_cache.dtype == torch.bfloat16 else 128
    _ask(q.shape[1] * q.shape[2] <= most * k_cache.shape[1], f"{name}: queries times heads over key heads above {most}")
    lens = kernels.raw(context_lens).tolist()
    for i, length in enumerate(lens):
        seen = min(length, max_contxt_len) if max_contxt_len > 0 else length
        table = kernels.raw(block_tables)[i]
        key, value = (kernels.context(kernels.raw(x), "HND", table, seen) for x in (k_cache, v_cache))
        window = windows_size_left + 1 if windows_size_left >= 0 else 0
        kernels.raw(out)[i] = kernels.attend(kernels.raw(q)[i], key, value, softmax_scale, window, 0.0)
    return out


def fused_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    eps: float,
    store_output_before_norm: bool,
    quant_scale: Tensor | None = None,
    out: Tensor | None = None,
    dynamic_quant: bool = False,
) -> Any:
    """With a residual and the flag: (normed, sum)."""
    index = _enter("fused_rms_norm", x, residual, gamma)
    _same_dtype("fused_rms_norm", x, residual, gamma)
    _ask(gamma.shape == x.shape[-1:], "fused_rms_norm: gamma is as long as a row")
    total = kernels.raw(x) if residual is None else kernels.raw(x) + kernels.raw(residual)
    wide = total.float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * kernels.raw(gamma).float()).to(x.dtype)
    result = kernels.result("tmo.fused_rms_norm", normed, index)
    return (result, kernels.wrap(total, index)) if store_output_before_norm and residual is not None else result


def active(x: Tensor, act_mode: str, is_gated: bool) -> Tensor:
    """act(first half) * second half."""
    index = _enter("active", x)
    _ask(is_gated and act_mode == "silu" and x.shape[-1] % 2 == 0, "active: gated silu over an even width")
    gate, up = kernels.raw(x).float().chunk(2, -1)
    return kernels.result("tmo.active", (gate * torch.sigmoid(gate) * up).to(x.dtype), index)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    act_mode: str = "none",
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """a [m, k], b [n, k]."""
    index = _enter("matmul", a, b, bias)
    _same_dtype("matmul", a, b, bias)
    _ask(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1], "matmul: a [m, k] and b [n, k]")
    out = kernels.raw(a).float() @ kernels.raw(b).float().T * alpha
    out = out if bias is None else out + kernels.raw(bias).float()
    return kernels.result("tmo.matmul", out.to(a.dtype), index)


def _int4_product(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str) -> Tensor:
    index = _enter(name, a, b, scale, bias)
    _same_dtype(name, a, scale, bias)
    _ask(b.dtype == torch.int8 and b.shape[1] * 2 == a.shape[1], f"{name}: b is int8 [n, k/2]")
    group = a.shape[1] // scale.shape[1]
    _ask(group in (64, 128, 256, 512), f"{name}: group size {group}")
    codes = kernels.raw(b).view(torch.uint8).to(torch.int16)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    signed = torch.where(both > 7, both - 16, both).float()
    value = signed * kernels.raw(scale).float().repeat_interleave(group, 1)
    out = kernels.raw(a).float() @ value.T
    out = out if bias is None else out + kernels.raw(bias).float()
    return kernels.result(f"tmo.{name}", out.to(dtype), index)


def _int8_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None, name: str
) -> Tensor:
    index = _enter(name, a, a_scale, b, b_scale, bias)
    _ask(a.dtype == b.dtype == torch.int8, f"{name}: a and b are int8")
    _ask(a_scale.dtype == b_scale.dtype == torch.float32, f"{name}: scales are float32")
    _ask(a_scale.shape == a.shape[:1] and b_scale.shape == b.shape[:1], f"{name}: one scale a row")
    whole = kernels.raw(a).double() @ kernels.raw(b).double().T
    out = whole * kernels.raw(a_scale).double()[:, None] * kernels.raw(b_scale).double()[None]
    out = out if bias is None else out + kernels.raw(bias).double()
    return kernels.result(f"tmo.{name}", out.to(dtype), index)


def _quantized(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    index = _enter(name, x)
    wide = kernels.raw(x).float()
    step = wide.abs().amax(1) / 127
    codes = (wide / torch.where(step > 0, step, 1.0)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return kernels.wrap(codes, index), kernels.wrap(step, index)


if os.environ.get("QIAO_MLU_OPS") == "old":

    def per_token_smooth_quantize(x: Tensor, smooth: Tensor) -> tuple[Tensor, Tensor]:
        """Demands a smooth vector."""
        _ask(smooth.dtype == torch.float32 and smooth.shape == x.shape[1:], "per_token_smooth_quantize: smooth [k]")
        _ask(bool((kernels.raw(smooth) == 1).all()), "the stand-in smooths by ones only")
        return _quantized(x, "per_token_smooth_quantize")

    def smooth_quant_matmul(
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        c: Tensor | None = None,
        act_mode: str = "none",
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> Tensor:
        """int8 by int8."""
        return _int8_product(a, a_scale, b, b_scale, dtype, bias, "smooth_quant_matmul")

    def weight_only_quant_matmul(
        a: Tensor,
        b: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        bias: Tensor | None = None,
        c: Tensor | None = None,
        act_mode: str = "none",
        quant_bit_size: int = 8,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> Tensor:
        """Symmetric 4-bit weights."""
        _ask(quant_bit_size == 4 and zero is None, "weight_only_quant_matmul: 4 bits, symmetric")
        return _int4_product(a, b, scale, bias, a.dtype, "weight_only_quant_matmul")

else:

    def scaled_quantize(
        x: Tensor, *, quant_type: torch.dtype = torch.int8, quant_mode: str = "dynamic_per_token"
    ) -> tuple[Tensor, Tensor]:
        """(codes, a float32 scale for each row)."""
        _ask(quant_type == torch.int8 and quant_mode == "dynamic_per_token", "scaled_quantize: int8, per token")
        return _quantized(x, "scaled_quantize")

    def scaled_matmul(
        a: Tensor,
        b: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
        c: Tensor | None = None,
        act_mode: str = "none",
        quant_bit_size: int = 8,
    ) -> Tensor:
        """int8 by int8, or activations by symmetric 4-bit weights."""
        if quant_bit_size == 4:
            _ask(a_scale is None, "scaled_matmul: activations of 4-bit weights have no scale")
            return _int4_product(a, b, b_scale, bias, out_dtype, "scaled_matmul")
        _ask(a_scale is not None, "scaled_matmul: int8 needs a_scale")
        return _int8_product(a, a_scale, b, b_scale, out_dtype, bias, "scaled_matmul")
