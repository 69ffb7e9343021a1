"""Token embeddings."""

from __future__ import annotations

import torch
from torch.nn import functional

from qiao.layers.weights import Target, floating
from qiao.optable import OpTable


class Embedding:
    """Rows [V, E] on the compute device. ``scale`` is rounded to the model's dtype first, as Gemma was trained."""

    def __init__(
        self, ops: OpTable, dtype: torch.dtype, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0
    ) -> None:
        self._device, self._dtype, self._name = ops.device, dtype, name
        self._shape = (vocab_size, hidden_size)
        self._scale = float(torch.tensor(scale, dtype=dtype))
        self._weight: torch.Tensor | None = None
        self._source: torch.Tensor | None = None

    def targets(self) -> dict[str, Target]:
        """The one weight [V, E]."""
        return {f"{self._name}.weight": Target(self._shape, self.put)}

    def put(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` [V, E] as the rows."""
        self._source = floating(f"{self._name}.weight", tensor, self._dtype)
        self._weight = self._source.to(self._device)

    def take_source(self) -> torch.Tensor | None:
        """The rows as they came, before they moved to the device, for a tied head; they are let go here."""
        source, self._source = self._source, None
        return source

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] int64 on the compute device; returns [T, E]."""
        assert self._weight is not None, f"{self._name} is not loaded"
        rows = functional.embedding(token_ids, self._weight)
        return rows if self._scale == 1.0 else rows * self._scale
