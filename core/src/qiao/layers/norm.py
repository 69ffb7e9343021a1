"""Root-mean-square norms over the OpTable."""

from __future__ import annotations

import torch

from qiao.layers.weights import Target, floating
from qiao.optable import OpTable
from qiao.quantization import Weight


class RMSNorm:
    """``norm(x) * weight`` over the last ``size`` dimensions, or ``norm(x) * (1 + weight)`` where ``offset``.

    The sum ``1 + weight`` (Gemma) is made once in float32 and kept so, because bfloat16 would round small weights away.
    """

    def __init__(
        self, ops: OpTable, dtype: torch.dtype, name: str, size: int, eps: float, *, offset: bool = False
    ) -> None:
        self._norm, self._add_norm, self._device = ops.rms_norm, ops.add_rms_norm, ops.device
        self._name, self._size, self._eps, self._offset = name, size, eps, offset
        self._dtype = torch.float32 if offset else dtype
        self._weight = torch.empty(0)

    def targets(self) -> dict[str, Target]:
        """The one weight [size]."""
        return {f"{self._name}.weight": Target((self._size,), self._put)}

    def _put(self, weight: Weight) -> None:
        values = floating(f"{self._name}.weight", weight, self._dtype)
        self._weight = (values + 1.0 if self._offset else values).to(self._device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., size]; returns the same shape and dtype."""
        return self._norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual + x`` [T, E] and its norm: (normed, sum). The memory of both arguments may be reused."""
        return self._add_norm(x, residual, self._weight, self._eps)
