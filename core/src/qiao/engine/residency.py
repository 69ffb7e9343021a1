"""How long blocks stay in the KV cache, measured on a sample of them (vLLM's ``--kv-cache-metrics``).

A block is sampled when it is allocated, and used when another sequence comes to share it. It counts once its cached
content is evicted: its lifetime since it was allocated, the time since its last use (or the allocation), and the gaps
between its last uses, of which four are kept. Blocks that are given back without cached content do not count.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from qiao.engine.request import ResidencyStats
from qiao.observability.names import RESIDENCY_BUCKETS

_USES = 4


class Residency:
    """Times of a share ``rate`` of the allocated blocks, above 0 and at most 1; ``clock`` is in seconds.

    How many blocks to pass by is drawn (it is geometric), so that an allocation without a sampled one costs a
    subtraction.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic, seed: int | None = None) -> None:
        self._rate = rate
        self._clock = clock
        self._draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
        self._born: dict[int, float] = {}
        self._uses: dict[int, deque[float]] = {}
        self._until = self._gap()
        self.stats = ResidencyStats()

    def _gap(self) -> int:
        """Blocks to pass by before the next one is sampled."""
        if self._rate >= 1.0:
            return 0
        return int(math.log(1.0 - self._draw.random()) / math.log1p(-self._rate))

    def allocated(self, blocks: Sequence[int]) -> None:
        """``blocks`` have new owners."""
        at = self._until
        while at < len(blocks):
            self._born[blocks[at]] = self._clock()
            self._uses[blocks[at]] = deque(maxlen=_USES)
            at += 1 + self._gap()
        self._until = at - len(blocks)

    def used(self, block: int) -> None:
        """One more sequence shares ``block``."""
        uses = self._uses.get(block)
        if uses is not None:
            uses.append(self._clock())

    def evicted(self, block: int) -> None:
        """The cached content of ``block`` is about to be overwritten."""
        born = self._born.pop(block, None)
        if born is None:
            return
        now, uses = self._clock(), self._uses.pop(block)
        self.stats.lifetime.observe(now - born, RESIDENCY_BUCKETS)
        self.stats.idle.observe(now - (uses[-1] if uses else born), RESIDENCY_BUCKETS)
        for earlier, later in pairwise(uses):
            self.stats.reuse_gap.observe(later - earlier, RESIDENCY_BUCKETS)

    def dropped(self, block: int) -> None:
        """``block`` is free, and what it held is nobody's."""
        if self._born.pop(block, None) is not None:
            del self._uses[block]
