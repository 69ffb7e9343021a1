"""What tests of several ways to quantize share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qiao.quantize import awq
from qiao.quantize.result import LayerResult
from qiao.quantize.source import Stack, part


@pytest.fixture
def scaled_weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights that awq is about to round, by tensor, while all its scales are large."""
    made: dict[str, torch.Tensor] = {}
    take = LayerResult.take

    def keep(result: LayerResult, stack: Stack, weight: torch.Tensor, *rest: Any) -> None:
        made.update(part(stack.weights, weight))
        take(result, stack, weight, *rest)

    def large(weight: torch.Tensor, gram: torch.Tensor, magnitude: torch.Tensor, *_: Any) -> torch.Tensor:
        return (magnitude / magnitude.mean()).clamp(0.2, 5.0).pow(-1.0)

    monkeypatch.setattr(awq, "search_scale", large)
    monkeypatch.setattr(LayerResult, "take", keep)
    return made
