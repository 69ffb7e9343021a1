"""Stop strings in a stream: found across tokens, with as little text held back as possible."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Watches one sequence's text.

    The string that completes first wins; of several that complete at one character, the longest. So the result does not
    depend on how the text is cut into pieces. Text is held back only while it could still become a stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, active: bool = True) -> str:
        """The text that may be shown now. ``matched`` is set when a stop string completed; nothing more comes then.

        With ``active`` False a string that completes in ``text`` is left in the text (``min_tokens``).
        """
        if not self._stops or not text:
            return text
        seen = len(self._held)
        buffer = self._held + text
        match = self._first(buffer, seen) if active else None
        if match is not None:
            start, end, self.matched = match
            self._held = ""
            return buffer[: end if self._include else start]
        cut = self._keep_from(buffer)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """Text still held back, at the end of the sequence."""
        text, self._held = self._held, ""
        return text

    def _first(self, buffer: str, seen: int) -> tuple[int, int, str] | None:
        """The match that ends first, after position ``seen``: ``(start, end, string)``."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[1] or (end == best[1] and start < best[0]):
                best = start, end, stop
        return best

    def _keep_from(self, buffer: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string."""
        cut = len(buffer)
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), cut)
            while at >= 0:
                if stop.startswith(buffer[at:]):
                    cut = at
                    break
                at = buffer.find(stop[0], at + 1, cut)
        return cut
