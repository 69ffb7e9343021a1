"""Modules that stand in for transformers' own inside a generic model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from qiao.contract import PackedWeight, WeightInfo
from qiao.optable import MatmulOps


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a plain linear layer: ``nn.Linear``, or GPT-2's ``Conv1D``, whose weight is [I, O]."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def features(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    outputs, inputs = reversed(weight.shape) if isinstance(module, Conv1D) else weight.shape
    return inputs, outputs


class OpLinear(nn.Module):
    """A linear layer over the OpTable's dense matmul. ``transposed`` says that checkpoints hold the weight as [I, O].

    ``in_features``, ``out_features`` and ``dtype`` are those of the layer it replaces.
    """

    def __init__(self, name: str, replaced: nn.Module, ops: MatmulOps, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = features(replaced)
        self.transposed = isinstance(replaced, Conv1D)
        self.has_bias = getattr(replaced, "bias", None) is not None
        self.dtype = dtype
        self._ops = ops
        self._packed: PackedWeight | None = None
        self._bias: torch.Tensor | None = None

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a checkpoint has for this layer, by parameter name."""
        shape = (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)
        return {"weight": shape, **({"bias": (self.out_features,)} if self.has_bias else {})}

    def take(self, parameter: str, tensor: torch.Tensor) -> None:
        """Pack the weight, or place the bias, where the W group lies."""
        if parameter == "bias":
            self._bias = tensor.to(self._ops.device, self.dtype)
            return
        weight = tensor.t().contiguous() if self.transposed else tensor
        info = WeightInfo(self.name, self.in_features, self.out_features)
        self._packed = self._ops.pack_weight("dense", {"weight": weight.to(self.dtype)}, info, self._ops.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., I] to [..., O]."""
        assert self._packed is not None, f"{self.name} has no weight yet"
        out = self._ops.matmul(x.reshape(-1, self.in_features), self._packed, self._bias)
        return out.view(*x.shape[:-1], self.out_features)


@dataclass
class HeadInput(MoeModelOutputWithPast):
    """A decoder's answer with the union of the fields that heads read; all but the hidden states stay None."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class Passthrough(nn.Module):
    """Stands where a causal model has its decoder and answers with the hidden states that it is given.

    Calling the causal model with ``inputs_embeds=hidden`` then runs its head alone, with whatever scaling and capping
    of logits the model's own code does.
    """

    @property
    def decoder(self) -> Passthrough:
        """Some models call ``self.model.decoder``."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> HeadInput:
        """``inputs_embeds`` as the last hidden state."""
        return HeadInput(last_hidden_state=inputs_embeds)
