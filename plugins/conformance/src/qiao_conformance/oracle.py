"""What each hook has to return, in float64, by formulas written out here and nowhere else.

Slow on purpose: one sequence, one head, one row at a time. ``EXPECTED`` holds them by hook; each takes a case's
host arguments in the catalog's order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from qiao.contract import SamplingTensors
from qiao.contract.cases import LooseCache, LooseWeight

Tensor = torch.Tensor


def stored(x: Tensor, dtype: str) -> Tensor:
    """What a cache of ``dtype`` makes of vectors [n, K, D], in float64; for int8 by the text of ``KVCache``."""
    if dtype != "int8":
        return x.to(getattr(torch, dtype)).double()
    out = torch.empty(x.shape, dtype=torch.float64)
    for i, j in itertools.product(range(x.shape[0]), range(x.shape[1])):
        vector = x[i, j].float()
        scale = vector.abs().max() / 127
        codes = (vector / scale).round().clamp(-127, 127) if scale > 0 else torch.zeros_like(vector)
        out[i, j] = codes.double() * scale.double()
    return out


def attention(
    query: Tensor, cache: LooseCache, metadata: Any, scale: float, sliding_window: int, soft_cap: float
) -> tuple[Tensor, ...]:
    """``softmax(mask(cap(scale * Q K^T))) V``, each query and head by itself."""
    where = {int(slot): i for i, slot in enumerate(cache.slots)}
    group = query.shape[1] // cache.key.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    keys, values = (stored(x, cache.dtype) for x in (cache.key, cache.value))
    for i, (count, length) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        table, size = metadata.block_tables[i].tolist(), cache.block_size
        rows = [where[table[p // size] * size + p % size] for p in range(length)]
        for j in range(count):
            row, position = int(metadata.query_start[i]) + j, length - count + j
            first = max(0, position - sliding_window + 1) if sliding_window > 0 else 0
            seen = rows[first : position + 1]
            for head in range(query.shape[1]):
                key, value = (x[seen, head // group] for x in (keys, values))
                score = key @ query[row, head].double() * scale
                if soft_cap > 0:
                    score = soft_cap * torch.tanh(score / soft_cap)
                out[row, head] = torch.softmax(score, 0) @ value
    return (out,)


def weight_value(loose: LooseWeight) -> Tensor:
    """``(weight - zero) * scale``, columns in the order of the inputs, float64 [O, I]."""
    weight = loose.tensors["weight"].double()
    rows, columns = weight.shape
    if loose.scheme == "dense":
        return weight
    scale, zero = loose.tensors["scale"].double(), loose.tensors.get("zero")
    size = loose.info.group_size if loose.info.group_size > 0 else columns
    value = torch.empty_like(weight)
    for column in range(columns):
        group = 0 if scale.shape[1] == 1 else column // size
        shifted = weight[:, column] - (0 if zero is None else zero[:, group].double())
        value[:, column] = shifted * scale[:, group].expand(rows)
    if "perm" in loose.tensors:
        ordered = torch.empty_like(value)
        ordered[:, loose.tensors["perm"]] = value
        return ordered
    return value


def matmul(x: Tensor, weight: LooseWeight, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Product with the weight's value; ``w8a8`` rounds each token to int8 first, in float32 as kernels do."""
    wide = x.double()
    if weight.scheme == "w8a8":
        step = x.float().abs().amax(1, keepdim=True) / 127
        wide = (x.float() / step).round().clamp(-127, 127).double() * step.double()
    out = wide @ weight_value(weight).T
    return (out if bias is None else out + bias.double(),)


def draw(row: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The text of ``SamplingSpec.sample`` for one row of logits."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if temperature == 0:
        return order[0]
    mass = [math.exp((row[i] - row[order[0]]) / temperature) for i in order]
    if top_k > 0:
        mass = mass[:top_k]
    if top_p < 1:
        total, reached, count = sum(mass), 0.0, 0
        while count < len(mass) and (count == 0 or reached < top_p * total):
            reached += mass[count]
            count += 1
        mass = mass[:count]
    mass = [m for m in mass if m >= min_p * mass[0]]
    target, reached, best = uniform * sum(mass), 0.0, 0
    for place, part in enumerate(mass):
        if part == 0:
            break
        reached, best = reached + part, place
        if reached > target:
            break
    return order[best]


def draws(logits: Tensor, params: SamplingTensors, slack: float = 1e-5) -> list[set[int]]:
    """Per row the tokens that are right: more than one where a threshold is nearer than ``slack``."""
    out: list[set[int]] = []
    for i, row in enumerate(logits.double().tolist()):
        if not math.isfinite(max(row)) or any(math.isnan(x) for x in row):
            out.append(set(range(len(row))))
            continue
        temperature, top_p = float(params.temperature[i]), float(params.top_p[i])
        top_k, min_p, uniform = int(params.top_k[i]), float(params.min_p[i]), float(params.uniform[i])
        found = set()
        for du in (-slack, 0.0, slack):
            for dp in (-slack, 0.0, slack):
                near_p = top_p if top_p >= 1 else min(top_p + dp, 1.0)
                near_u = min(max(uniform + du, 0.0), 1.0 - 1e-12)
                found.add(draw(row, temperature, top_k, near_p, min_p * (1 - dp), near_u))
        out.append(found)
    return out


def apply_penalties(logits: Tensor, params: Any) -> tuple[Tensor, ...]:
    """Token by token."""
    out, vocab = logits.double().clone(), logits.shape[1]
    for row in range(logits.shape[0]):
        prompt = [t for t in params.prompt_ids[row].tolist() if t < vocab]
        output = [t for t in params.output_ids[row].tolist() if t < vocab]
        repetition, frequency = float(params.repetition[row]), float(params.frequency[row])
        for token in {*prompt, *output}:
            value = out[row, token]
            out[row, token] = value / repetition if value > 0 else value * repetition
        for token in set(output):
            out[row, token] -= frequency * output.count(token) + float(params.presence[row])
    return (out,)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """arXiv 1910.07467, equation 4."""
    wide = x.double()
    return (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / wide.shape[-1] + eps) * weight.double(),)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The norm of the sum, and the sum."""
    total = x.double() + residual.double()
    return (*rms_norm(total, weight, eps), total)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    out, pairs = x.double().clone(), cos.shape[1]
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        c, s = cos[:, i, None].double(), sin[:, i, None].double()
        first, second = x[:, :, a].double(), x[:, :, b].double()
        out[:, :, a], out[:, :, b] = first * c - second * s, second * c + first * s
    return out


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """arXiv 2104.09864, equation 34, pair by pair."""
    return _turned(query, cos, sin, interleaved), _turned(key, cos, sin, interleaved)


def silu_mul(x: Tensor) -> tuple[Tensor, ...]:
    """``g / (1 + e^-g) * u``."""
    gate, up = x.double().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up,)


def gelu_mul(x: Tensor) -> tuple[Tensor, ...]:
    """The tanh form of GELU (arXiv 1606.08415, section 2), times ``u``."""
    gate, up = x.double().chunk(2, -1)
    return (0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up,)


def cap_logits(logits: Tensor, cap: float) -> tuple[Tensor, ...]:
    """``cap * tanh(logits / cap)``."""
    return (cap * torch.tanh(logits.double() / cap),)


def route_experts(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, ...]:
    """The largest shares of the softmax, and whose they are."""
    shares = torch.softmax(logits.double(), dim=-1)
    order = torch.tensor([sorted(range(len(row)), key=lambda i: -row[i])[:top_k] for row in shares.tolist()])
    weights = shares.gather(1, order)
    return (weights / weights.sum(1, keepdim=True) if normalise else weights), order


def combine_experts(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Expert by expert."""
    out = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float64)
    for i in range(x.shape[1]):
        out += weights[:, i, None].double() * x[:, i].double()
    return (out,)


def expert_matmul(x: Tensor, weights: Sequence[LooseWeight], experts: Tensor) -> tuple[Tensor, ...]:
    """Row by row."""
    rows = [matmul(x[i : i + 1], weights[int(e)], None)[0] for i, e in enumerate(experts)]
    return (torch.cat(rows),)


EXPECTED: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "attention": attention,
    "decode_attention": attention,
    "matmul": matmul,
    "expert_matmul": expert_matmul,
    "route_experts": route_experts,
    "combine_experts": combine_experts,
    "apply_penalties": apply_penalties,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rotary": rotary,
    "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "cap_logits": cap_logits,
}
"""Results by hook, for hooks whose whole effect is their result."""
