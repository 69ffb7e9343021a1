"""Sampling by torch's operators on the device.

torch_mlu_ops draws with random numbers of its own, but a draw of Qiao is settled by the one number that comes with the
row, so that each device gives the same token. Sums are in float32: the device stores float64 as that anyway.
"""

from __future__ import annotations

import torch
from qiao.contract import SamplingTensors, hookimpl


@hookimpl
def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """See ``SamplingSpec.sample``; all rows together, nothing is read on the host."""
    best = logits.argmax(1)
    if params.all_greedy:
        return best
    ranked, order = logits.sort(dim=1, descending=True, stable=True)
    greedy = params.temperature <= 0
    temperature = torch.where(greedy, torch.ones_like(params.temperature), params.temperature)[:, None]
    mass = _kept(((ranked - ranked[:, :1]) / temperature).exp(), params)
    reached = mass.cumsum(1)
    place = (reached <= params.uniform[:, None] * reached[:, -1:]).sum(1)
    last = (mass > 0).sum(1) - 1
    drawn = order.gather(1, torch.minimum(place, last).clamp(min=0)[:, None])[:, 0]
    return torch.where(greedy, best, drawn)


def _kept(mass: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Unnormalised chances [N, V] in falling order, zero where top-k, top-p or min-p leaves a token out."""
    rank = torch.arange(mass.shape[1], device=mass.device)[None]
    nothing = torch.zeros_like(mass)
    if params.any_top_k:
        limit = params.top_k[:, None].long()
        mass = torch.where((limit <= 0) | (rank < limit), mass, nothing)
    if params.any_top_p:
        top_p, before = params.top_p[:, None], mass.cumsum(1) - mass
        inside = (top_p >= 1) | (rank == 0) | (before < top_p * mass.sum(1, keepdim=True))
        mass = torch.where(inside, mass, nothing)
    if params.any_min_p:
        mass = torch.where(mass >= params.min_p[:, None] * mass[:, :1], mass, nothing)
    return mass
