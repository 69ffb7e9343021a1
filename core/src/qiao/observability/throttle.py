"""What would be logged again and again, logged now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class Throttle:
    """Lets a line pass once in ``seconds`` and says with the next one how many were left out. For any thread.

    At most ``most`` different things are told apart; lines about others pass.
    """

    def __init__(self, seconds: float = 60.0, most: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}
        self._lock = Lock()

    def admit(self, what: str, line: str | None = None) -> str | None:
        """``line`` (``what`` itself by default) as it is to be logged, None where it is to be left out."""
        line = what if line is None else line
        with self._lock:
            if what not in self._told and len(self._told) >= self._most:
                return line
            now = self._clock()
            last, left_out = self._told.get(what, (now - self._seconds, 0))
            if now - last < self._seconds:
                self._told[what] = (last, left_out + 1)
                return None
            self._told[what] = (now, 0)
        return f"{line} ({left_out} more since the last such line)" if left_out else line
