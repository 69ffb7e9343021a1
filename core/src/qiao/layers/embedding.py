"""Token embeddings."""

from __future__ import annotations

import torch
from torch.nn import functional

from qiao.layers.weights import Target, floating
from qiao.optable import OpTable
from qiao.quantization import QuantizedWeight, Weight


class Embedding:
    """Rows [V, E] on the compute device. ``scale`` is rounded to the model's dtype first, as Gemma was trained.

    A quantized table stays so: one byte a value, and the rows that are looked up become floating point.
    """

    def __init__(
        self, ops: OpTable, dtype: torch.dtype, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0
    ) -> None:
        self._device, self._dtype, self._name = ops.device, dtype, name
        self._shape = (vocab_size, hidden_size)
        self._scale = float(torch.tensor(scale, dtype=dtype))
        self._weight: torch.Tensor | None = None
        self._quantized: QuantizedWeight | None = None
        self._source: Weight | None = None

    def targets(self) -> dict[str, Target]:
        """The one weight [V, E]."""
        return {f"{self._name}.weight": Target(self._shape, self.put)}

    def put(self, weight: Weight) -> None:
        """Keep ``weight`` [V, E] as the rows."""
        if isinstance(weight, QuantizedWeight) and _in_whole_groups(weight):
            self._source, self._quantized = weight, weight.to(self._device)
            return
        self._source = floating(f"{self._name}.weight", weight, self._dtype)
        self._weight = self._source.to(self._device)

    def take_source(self) -> Weight | None:
        """The rows as they came, before they moved to the device, for a tied head; they are let go here."""
        source, self._source = self._source, None
        return source

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] int64 on the compute device; returns [T, E]."""
        rows = self._dequantized(token_ids) if self._weight is None else functional.embedding(token_ids, self._weight)
        return rows if self._scale == 1.0 else rows * self._scale

    def _dequantized(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._quantized is not None, f"{self._name} is not loaded"
        chosen = {name: x.index_select(0, token_ids).float() for name, x in self._quantized.tensors.items()}
        groups = chosen["scale"].shape[1]
        rows = chosen["weight"].view(-1, groups, self._shape[1] // groups)
        if "zero" in chosen:
            rows = rows - chosen["zero"].unsqueeze(-1)
        rows = rows * chosen["scale"].unsqueeze(-1)
        return rows.view(-1, self._shape[1]).to(self._dtype)


def _in_whole_groups(weight: QuantizedWeight) -> bool:
    rows, columns = weight.shape
    scale = weight.tensors["scale"]
    return scale.shape[0] == rows and columns % scale.shape[1] == 0 and "perm" not in weight.tensors
