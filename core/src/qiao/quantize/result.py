"""What becomes of one layer, and which of its linear layers are looked at together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from qiao.quantize.activations import Statistics
from qiao.quantize.grid import Grid, Rounded, error_of, round_to_nearest
from qiao.quantize.options import Options
from qiao.quantize.output import shards_of
from qiao.quantize.source import Stack, is_expert

GRAMS = 1 << 30
"""Bytes of sums of inputs' products that are gathered at once, one of them in any case."""


@dataclass
class LayerResult:
    """``rounded`` weights by the checkpoint's names, ``changed`` other tensors likewise (float32), and ``errors``: for
    each linear layer of ``Decoder`` the squared error of its outputs over the squared outputs (of weights for rtn).
    ``to_nearest``: those of experts that saw fewer tokens than they have inputs, and how many; no other way to round
    has enough to go by there."""

    rounded: dict[str, Rounded] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    to_nearest: dict[str, int] = field(default_factory=dict)

    def take(self, stack: Stack, weight: torch.Tensor, rounded: Rounded, gram: torch.Tensor | None) -> None:
        """Keep the result of ``stack``, whose weight was ``weight`` [O, I]."""
        first = 0
        for entry in stack.weights:
            rows = rounded.rows(first, entry.shape[0])
            self.rounded[entry.name] = Rounded(
                entry.back(rows.codes), entry.back(rows.scale), entry.back(rows.zero), rows.group
            )
            first += entry.shape[0]
        self.errors[stack.name] = error_of(weight, rounded.values(), gram)

    def nearest(
        self, stack: Stack, weight: torch.Tensor, heard: Statistics | None, options: Options, grid: Grid
    ) -> None:
        """Round ``weight`` of an expert that too few tokens visited to the nearest, and note it."""
        gram = None if heard is None else heard.gram
        self.take(stack, weight, round_to_nearest(weight, options.group, grid), gram)
        self.to_nearest[stack.name] = 0 if heard is None else heard.count


def stages(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """``stacks`` in the order in which they run; the same part of several experts is together, within ``GRAMS``."""
    parts: dict[str, list[Stack]] = {}
    for stack in stacks:
        part = stack.name.rpartition(".")[2] if ".mlp." in stack.name else stack.name
        parts.setdefault(part, []).append(stack)
    sizes = {part: [4 * stack.weights[0].shape[1] ** 2 for stack in held] for part, held in parts.items()}
    return [[parts[part][i] for i in chosen] for part in parts for chosen in shards_of(sizes[part], GRAMS)]


def few(name: str, heard: Statistics | None, inputs: int) -> bool:
    """Whether the linear layer ``name`` is one of an expert that saw fewer tokens than it has ``inputs``."""
    return is_expert(name) and (heard is None or heard.count < inputs)
