"""The sequences of plain torch operators that optional hooks replace.

They run on whatever torch device the tensors are on. A plugin that lacks an optional hook loses nothing but speed;
one that has it is tested equal to the function of the same name here.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from qiao.contract.types import LogprobOutput, PenaltyTensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in float32 (arXiv 1910.07467, equation 4)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, and its ``rms_norm``: returns (normed, sum)."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    size = 2 * cos.shape[-1]
    turned, kept = x[..., :size].float(), x[..., size:]
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    if interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pair = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        out = pair.flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((out.to(x.dtype), kept), dim=-1)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R dimensions of ``query`` [T, H, D] and ``key`` [T, K, D] (arXiv 2104.09864, equation 34).

    ``cos`` and ``sin`` [T, R/2] float32 belong to the tokens. Pairs are (i, i + R/2), or (2i, 2i + 1) where
    ``interleaved``.
    """
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``x`` [T, 2F] = (gate, up) (SwiGLU, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """``gelu_tanh(gate) * up`` of ``x`` [T, 2F] = (gate, up) (GEGLU, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(logits / cap)``, which stays within -cap..cap (Gemma 2, arXiv 2408.00118, section 2)."""
    return torch.tanh(logits / cap) * cap


def route_experts(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` largest of the float32 softmax over ``logits`` [T, X], in falling order, and their experts [T, A].

    The weights are of the logits' dtype; ``normalise`` makes a token's sum to 1 (arXiv 2401.04088, section 2.1).
    """
    weights, experts = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of a token's results ``x`` [T, A, E] by ``weights`` [T, A], in their order: [T, E]."""
    return (x * weights.unsqueeze(-1)).sum(dim=1)


def apply_penalties(logits: torch.Tensor, params: PenaltyTensors) -> torch.Tensor:
    """See ``SamplingSpec.apply_penalties``."""
    rows, vocab = logits.shape
    counts = logits.new_zeros((rows, vocab + 1), dtype=torch.float32)
    counts.scatter_add_(1, params.output_ids, torch.ones_like(params.output_ids, dtype=torch.float32))
    seen = counts.clone()
    seen.scatter_add_(1, params.prompt_ids, torch.ones_like(params.prompt_ids, dtype=torch.float32))
    counts, seen = counts[:, :vocab], seen[:, :vocab]
    repetition = torch.where(seen > 0, params.repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    logits.sub_(params.frequency[:, None] * counts)
    logits.sub_(params.presence[:, None] * (counts > 0))
    return logits


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobOutput:
    """See ``SamplingSpec.logprobs``."""
    values = torch.log_softmax(logits.float(), dim=-1)
    chosen = values.gather(1, token_ids[:, None])
    rank = (values > chosen).sum(dim=1) + 1
    top_values, top_ids = torch.topk(values, top, dim=-1)
    return LogprobOutput(chosen.squeeze(1), rank, top_ids, top_values)
