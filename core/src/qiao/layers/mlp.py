"""Gated feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qiao.layers.linear import Linear, single
from qiao.layers.weights import Target
from qiao.optable import OpTable
from qiao.quantization import NO_FORMS, Forms


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """``down(act(gate x) * up x)``, F = ``intermediate``; ``activation`` is ``silu`` or ``gelu`` (tanh form)."""

    intermediate: int
    activation: str = "silu"
    bias: bool = False


class GatedMlp:
    """Gate and up are one packed weight, multiplied once."""

    def __init__(
        self,
        ops: OpTable,
        dtype: torch.dtype,
        name: str,
        hidden_size: int,
        spec: MlpSpec,
        *,
        forms: Forms = NO_FORMS,
    ) -> None:
        parts = {f"{name}.gate_proj": spec.intermediate, f"{name}.up_proj": spec.intermediate}
        self.gate_up = Linear(ops, dtype, f"{name}.gate_up_proj", hidden_size, parts, bias=spec.bias, forms=forms)
        self.down = single(ops, dtype, f"{name}.down_proj", spec.intermediate, hidden_size, bias=spec.bias, forms=forms)
        self.activate = ops.silu_mul if spec.activation == "silu" else ops.gelu_mul

    def linears(self) -> list[Linear]:
        """The layers that may have adapters."""
        return [self.gate_up, self.down]

    def targets(self) -> dict[str, Target]:
        """Targets of both linear layers."""
        return {**self.gate_up.targets(), **self.down.targets()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E]; returns [T, E]."""
        return self.down(self.activate(self.gate_up(x)))
