"""Drafts from the sequence itself: what followed the last time that the text ended as it does now.

Saxena, "Prompt Lookup Decoding" (2023). Answers that quote their prompt, or repeat themselves, gain most.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qiao.engine.batch import Batch
    from qiao.engine.scheduler import Step
    from qiao.engine.sequence import Sequence


class NgramIndex:
    """Where the runs of ``shortest`` to ``longest`` tokens of one sequence ended last. Grows with the sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(longest, shortest - 1, -1)}
        self._known = 0

    def find(self, tokens: Items[int]) -> int | None:
        """The position behind the last earlier occurrence of the longest known ending of ``tokens``, None without one.

        ``tokens`` are those of the last call, and more.
        """
        for end in range(self._known + 1, len(tokens)):
            for n, ends in self._ends.items():
                if end >= n:
                    ends[tuple(tokens[end - n : end])] = end
        self._known = max(self._known, len(tokens) - 1)
        for n, ends in self._ends.items():
            at = ends.get(tuple(tokens[-n:]))
            if at is not None:
                return at
        return None


class PromptLookup:
    """A drafter (``qiao.engine.drafting``) of up to ``tokens`` tokens."""

    def __init__(self, tokens: int, shortest: int, longest: int, most_running: int) -> None:
        self.most_running = most_running
        self._tokens = tokens
        self._lengths = (shortest, longest)

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """What followed last time; where that runs into the present, it is taken to go on in the same way."""
        if seq.ngrams is None:
            seq.ngrams = NgramIndex(*self._lengths)
        tokens = seq.tokens
        at = seq.ngrams.find(tokens)
        if at is None:
            return []
        period = len(tokens) - at
        return [tokens[at + i % period] for i in range(min(most, self._tokens))]

    def complete(self, step: Step) -> None:
        """Nothing is left to fill."""

    def follow(self, step: Step, batch: Batch) -> None:
        """The sequences know all that is needed."""
