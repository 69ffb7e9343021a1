"""Tokens of each tenant and day, kept over restarts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from qiao.tenants.keys import KeyStore


def utc_day(now: float) -> str:
    """``2026-01-31`` for a ``time.time()``."""
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def until_midnight(now: float) -> float:
    """Seconds to the next day in UTC."""
    return 86400.0 - now % 86400.0


class DailyUsage:
    """Counts at once in memory; ``flush`` writes what is new. Without a store nothing outlives the process.

    ``add`` is called by one thread, ``flush`` by any. What has been reserved counts as used until it is settled, so
    that a server that is killed has counted rather too much than too little; what it loses is what came after its last
    flush.
    """

    def __init__(self, store: KeyStore | None = None, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._new: Counter[tuple[str, str]] = Counter()
        self._day = ""
        self._known: dict[str, int] = {}
        self._load(utc_day(clock()))

    def total(self, tenant: str) -> int:
        """Tokens of today."""
        today = utc_day(self._clock())
        with self._lock:
            known = self._known.get(tenant, 0) if today == self._day else 0
            return known + self._new[tenant, today]

    def add(self, tenant: str, tokens: int) -> None:
        """Count ``tokens``, or take back what had been reserved."""
        with self._lock:
            self._new[tenant, utc_day(self._clock())] += tokens

    def flush(self) -> None:
        """Write what is new, and read what other servers wrote. Raises ``ParameterError``; nothing is lost then."""
        with self._lock:
            new, self._new = self._new, Counter()
            today = utc_day(self._clock())
            if self._day == today:  # so that nobody finds the day empty while the file is written
                for (tenant, day), tokens in new.items():
                    if day == today:
                        self._known[tenant] = self._known.get(tenant, 0) + tokens
        if self._store is None or not (new or self._day != today):
            return
        try:
            self._store.add_usage({key: tokens for key, tokens in new.items() if tokens})
        except BaseException:
            with self._lock:
                self._new.update(new)
                for (tenant, day), tokens in new.items():
                    if day == self._day == today:
                        self._known[tenant] -= tokens
            raise
        self._load(today)

    def _load(self, day: str) -> None:
        known = self._store.usage(day) if self._store is not None else {}
        with self._lock:
            if self._store is not None or day != self._day:
                self._known = known
            self._day = day
