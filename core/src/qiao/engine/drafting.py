"""Speculative decoding: tokens are guessed, one step computes them all, and those that come true are kept.

A step computes a sequence's last token and its draft behind it, and so has logits before and behind each token of the
draft. ``Sampler.verify`` draws every position from its logits and its own random number, as it would be drawn without
a draft, and keeps the draft as far as it agrees. So the tokens are those that come without drafts, whatever the drafts
are, sampled or not; a better guess saves steps and changes nothing else. Leviathan et al. (ICML 2023) accept more often
where the draft is itself a sample, but then the tokens are others, equal in distribution only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from qiao.models.base import Model
from qiao.optable import OpTable

if TYPE_CHECKING:
    from qiao.engine.batch import Batch
    from qiao.engine.scheduler import Step
    from qiao.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What a draft model consists of; ``cache_dtype`` is that of its KV cache."""

    model: Model
    ops: OpTable
    cache_dtype: torch.dtype


class Drafter(Protocol):
    """Guesses tokens. ``most_running`` is the number of answers up to which it does."""

    most_running: int

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """At most ``most`` guesses at what follows the tokens of ``seq``, or as many places for them."""
        ...

    def complete(self, step: Step) -> None:
        """Fill the places of the sequences in ``step``, whose blocks reach that far."""
        ...

    def follow(self, step: Step, batch: Batch) -> None:
        """Take in what the model has just computed."""
        ...


@dataclass(slots=True)
class DraftCounts:
    """Totals: ``drafts`` tried, their ``tokens``, how many were ``accepted``, and that by place in a draft."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.tokens += proposed
        self.accepted += accepted
        if accepted > len(self.per_position):
            self.per_position += [0] * (accepted - len(self.per_position))
        for i in range(accepted):
            self.per_position[i] += 1
