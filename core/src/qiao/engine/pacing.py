"""How many prompt tokens a step may take so that running answers keep their pace.

The time of a step is taken to be ``a + c * decodes + b * prompt_tokens``. The three numbers are learned from steps as
they run: ``a`` and ``c`` from steps without prompts, ``b`` from the others. Each forgets at its own steps only,
so an hour without prompts does not lose what prompts cost. Chunks change when a token comes, never which.
"""

from __future__ import annotations

import math

MIN_CHUNK = 32
"""Prompt tokens that a step may always take: a prompt ends, whatever the target."""

KEPT = 0.9
"""What an observation keeps of its weight at each later one; a change of speed is learned in some twenty steps."""

MOST_SURPRISE = 2.0
"""A step of decodes counts as at most so many times what was expected: more is noise of the machine."""


class _Line:
    """A line through points of fading weight: ``value(x) = level + slope * x``, never falling."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Count one point; the others fade."""
        for name, value in (("_weight", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, getattr(self, name) * KEPT + value)

    def value(self, x: float) -> float:
        """The line at ``x``; 0 where nothing is known."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread <= 1e-3 * (1.0 + mean_x * mean_x):  # points at one place say nothing of a slope
            return mean_y
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(0.0, mean_y + slope * (x - mean_x))


class Pacer:
    """Prompt tokens for each step, so that a step with decodes takes about ``target`` seconds.

    Never fewer than ``minimum`` tokens. Without decodes nobody waits for the step, and there is no limit.
    """

    def __init__(self, target: float, minimum: int = MIN_CHUNK) -> None:
        assert target > 0.0
        assert minimum > 0
        self._target = target
        self._minimum = minimum
        self._decode = _Line()
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0
        self.allowed: int | None = None
        """What ``chunk`` answered last, None before it was asked."""

    def chunk(self, decodes: int, most: int) -> int:
        """Prompt tokens, at most ``most``, that a step beside ``decodes`` may take."""
        self.allowed = most if decodes == 0 else min(most, self._fitting(decodes, most))
        return self.allowed

    def _fitting(self, decodes: int, most: int) -> int:
        wanted = self._minimum
        if self._prompt_tokens:
            room = self._target - self._decode.value(decodes)
            cost = self._prompt_seconds / self._prompt_tokens
            fits = room / cost if cost > 0.0 else math.inf
            wanted = most if fits >= most else max(self._minimum, int(fits))
        return wanted

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step. A clock that went backwards is no observation."""
        if seconds < 0.0 or not math.isfinite(seconds) or decodes + prompt_tokens == 0:
            return
        base = self._decode.value(decodes)
        if prompt_tokens == 0:
            self._decode.add(decodes, min(seconds, MOST_SURPRISE * base) if base else seconds)
            return
        if seconds < base:  # decodes alone cannot take longer; where prompts never cease, nothing else would tell
            self._decode.add(decodes, seconds)
        self._prompt_seconds = self._prompt_seconds * KEPT + max(0.0, seconds - base)
        self._prompt_tokens = self._prompt_tokens * KEPT + prompt_tokens
