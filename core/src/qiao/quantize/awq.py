"""AWQ (Lin et al., arXiv 2306.00978): input channels that matter are scaled up before rounding, what feeds them down.

A scale for each input channel, s = m ** a with m its mean absolute activation, is searched over a grid of a in [0, 1)
for the least error of the outputs, ``||(Q(W diag(s)) diag(s)^-1 - W) X^T||^2``. Then, for each group, the range of the
grid is searched for the least error of the group's share of the outputs ("clipping"). Both need only X^T X.
"""

from __future__ import annotations

import torch

from qiao.quantize.grid import Grid, in_groups

_STEPS = 20
"""Points of the grid of exponents (the published code's)."""

_SHRINKS = 10
"""Ranges that are tried for each group: 1, 0.95, ... 0.55 of the full one (the published code's)."""

_ROWS = 1024
"""Most rows for which a scale's error is summed: enough to tell which of them is the least."""


def search_scale(
    weight: torch.Tensor, gram: torch.Tensor, magnitude: torch.Tensor, size: int, grid: Grid
) -> torch.Tensor:
    """The scale of each input channel [I] float32 for ``weight`` [O, I].

    ``gram`` = X^T X [I, I]; ``magnitude`` [I] is the mean absolute activation of each channel. Ones where no exponent
    makes the error less.
    """
    sample = weight[:: -(-weight.shape[0] // _ROWS)]
    best, least = torch.ones_like(magnitude), _scaled_error(sample, gram, torch.ones_like(magnitude), size, grid)
    for step in range(1, _STEPS):
        scale = magnitude.pow(step / _STEPS).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = _scaled_error(sample, gram, scale, size, grid)
        if error < least:
            best, least = scale, error
    return best


def _scaled_error(weight: torch.Tensor, gram: torch.Tensor, scale: torch.Tensor, size: int, grid: Grid) -> float:
    difference = grid.round(in_groups(weight * scale, size)).flatten(1) / scale - weight
    return float(((difference @ gram) * difference).sum(dtype=torch.float64))


def clip(weight: torch.Tensor, gram: torch.Tensor, size: int, grid: Grid) -> torch.Tensor:
    """``weight`` [O, I] with the values of each group limited to the range whose grid gives the least error."""
    groups = in_groups(weight, size)
    width = groups.shape[2]
    blocks = torch.stack([gram[i : i + width, i : i + width] for i in range(0, weight.shape[1], width)])
    full = groups.abs().amax(-1, keepdim=True)
    best, least = full.clone(), torch.full_like(full, torch.inf)
    for step in range(_SHRINKS):
        limit = full * (1.0 - step / _STEPS)
        difference = grid.round(groups.clamp(-limit, limit)) - groups
        error = (torch.einsum("ogi,gij->ogj", difference, blocks) * difference).sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, limit, best), torch.where(better, error, least)
    return groups.clamp(-best, best).flatten(1)
