"""Light operators: norms and the gated activation. Rotary stays a sequence of torch operators.

``apply_rotary`` wants sine and cosine in the activations' dtype, which loses more than the contract allows.
"""

from __future__ import annotations

import torch
from qiao.contract import hookimpl

from qiao_cambricon import _sdk


@hookimpl
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``fused_rms_norm`` without a residual."""
    return _sdk.operation("fused_rms_norm")(
        x.contiguous(), None, weight.to(x.dtype), None, None, eps, False, None, None, False
    )


@hookimpl
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fused_rms_norm`` that gives the sum as well."""
    normed, total = _sdk.operation("fused_rms_norm")(
        x.contiguous(), residual.contiguous(), weight.to(x.dtype), None, None, eps, True, None, None, False
    )
    return normed, total


@hookimpl
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``active`` with the gate in the first half."""
    return _sdk.operation("active")(x.contiguous(), "silu", True)
