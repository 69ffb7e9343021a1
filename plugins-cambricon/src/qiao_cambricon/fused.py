"""Light operators: norms, rotation, gated activation. In float32 norms and rotation are the contract's own sequences.

``apply_rotary`` wants sine and cosine in the activations' dtype, which costs accuracy: the plugin declares a looser
tolerance for it (see ``qiao_cambricon.chips``).
"""

from __future__ import annotations

import torch
from qiao.contract import composites, hookimpl

from qiao_cambricon import _sdk, rules


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``fused_rms_norm`` without a residual."""
    if x.dtype not in rules.HALVES:
        return composites.rms_norm(x, weight, eps)
    return _sdk.operation("fused_rms_norm")(
        x.contiguous(), None, weight.to(x.dtype), None, None, eps, False, None, None, False
    )


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fused_rms_norm`` that gives the sum as well."""
    if x.dtype not in rules.HALVES:
        return composites.add_rms_norm(x, residual, weight, eps)
    normed, total = _sdk.operation("fused_rms_norm")(
        x.contiguous(), residual.contiguous(), weight.to(x.dtype), None, None, eps, True, None, None, False
    )
    return normed, total


@hookimpl
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``apply_rotary``, in place where the rows are contiguous.

    All tokens are one sequence of a batch of one, whose positions are the rows of the tables. These hold each angle
    twice: one half after the other, or each beside itself where ``interleaved``.
    """
    rotated = 2 * cos.shape[-1]
    if not rules.rotates(query.dtype, query.shape[-1], rotated):
        return composites.rotary(query, key, cos, sin, interleaved)
    tables = [_doubled(x.to(query.dtype), interleaved) for x in (sin, cos)]
    turned = []
    for x in (query.contiguous(), key.contiguous()):
        _sdk.operation("apply_rotary")(x[None], *tables, None, None, interleaved, False, False, x.shape[0])
        turned.append(x)
    return turned[0], turned[1]


def _doubled(angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``active`` with the gate in the first half."""
    return _sdk.operation("active")(x.contiguous(), "silu", True)
