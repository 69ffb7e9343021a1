"""What the engine asks of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from qiao.contract import AttentionMetadata, KVCache, ModelShape
from qiao.quantization import Weight


class Model(Protocol):
    """A decoder over an OpTable. ``shape`` tells the engine how many caches to allocate, in layer order."""

    shape: ModelShape

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take a checkpoint's weights by name and pack each where its group lies.

        Raises ``ModelError`` naming a tensor that is missing, unexpected or of another shape.
        """
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Final hidden states [T, E] of ``token_ids`` and ``positions`` [T] int64, both on the compute device."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, V] of ``hidden`` [N, E]."""
        ...
