"""Sampling family: plain operators on the device, over the sorted vocabulary, in float32.

``npu_top_k_top_p`` is of no use here: the contract's draw needs the order anyway, and top-k beyond 1024 as well.
"""

from __future__ import annotations

import torch
from qiao.contract import SamplingTensors, hookimpl

_TINY = torch.finfo(torch.float32).tiny


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """See ``SamplingSpec.sample``; nothing is read on the host."""
    greedy = logits.argmax(dim=-1)
    if params.all_greedy:
        return greedy
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    # the largest goes before the division: x / 1e-38 overflows, 0 / 1e-38 does not
    weight = ((values - values[:, :1]) / params.temperature.clamp(min=_TINY)[:, None]).exp()
    weight = _kept(weight, params)
    mass = weight.cumsum(1)
    place = (mass <= params.uniform[:, None] * mass[:, -1:]).sum(1)
    last = (weight > 0).sum(1).clamp(min=1) - 1
    drawn = ids.gather(1, torch.minimum(place, last)[:, None])[:, 0]
    return torch.where(params.temperature == 0, greedy, drawn)


def _kept(weight: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """``weight`` [N, V], falling, the largest 1, with 0 for the tokens that a filter takes away."""
    vocabulary = weight.shape[1]
    place = torch.arange(vocabulary, device=weight.device)[None, :]
    if params.any_top_k:
        most = torch.where(params.top_k > 0, params.top_k, vocabulary)[:, None]
        weight = torch.where(place < most, weight, 0.0)
    keep = place == 0
    if params.any_top_p:
        mass = weight.cumsum(1)
        # a token stays if the mass before it is short of top_p, so the one that crosses it stays too
        inside = (mass - weight < params.top_p[:, None] * mass[:, -1:]) | (params.top_p >= 1)[:, None]
        weight = torch.where(inside | keep, weight, 0.0)
    if params.any_min_p:
        weight = torch.where((weight >= params.min_p[:, None]) | keep, weight, 0.0)
    return weight
