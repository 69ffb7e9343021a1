"""The waiting queue: sorted by order of service, with a bound on how long anyone can be passed over."""

from __future__ import annotations

from bisect import bisect_left, insort

from qiao.engine.sequence import Sequence, Status

MAX_WAIT_STEPS = 1000
"""A sequence that waited for so many steps altogether goes to the front and is not preempted for its priority again."""

CHECK_EVERY = 50
"""Steps between looks for such sequences."""

PROMOTED = -(1 << 63)
"""Level of a promoted sequence: before any priority."""


def _key(seq: Sequence) -> tuple[int, int, int]:
    return seq.key


class WaitingQueue:
    """Sequences that have no blocks yet, or lost them to preemption."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> list[Sequence]:
        """In order of service. Read only."""
        return self._items

    def push(self, seq: Sequence, step: int) -> None:
        """Let ``seq`` wait from ``step`` on."""
        seq.status = Status.WAITING
        seq.waiting_since = step
        insort(self._items, seq, key=_key)

    def peek(self) -> Sequence:
        """Who is next."""
        return self._items[0]

    def pop(self, step: int) -> Sequence:
        """Take who is next."""
        seq = self._items.pop(0)
        seq.waited += step - seq.waiting_since
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take out ``seq``, which is in the queue."""
        at = bisect_left(self._items, seq.key, key=_key)
        assert self._items[at] is seq
        del self._items[at]

    def promote(self, step: int) -> None:
        """Move those that waited too long to the front, in order of arrival."""
        if step % CHECK_EVERY or not self._items:
            return
        overdue = False
        for seq in self._items:
            if seq.key[0] != PROMOTED and seq.waited + step - seq.waiting_since >= MAX_WAIT_STEPS:
                seq.key = (PROMOTED, *seq.key[1:])
                overdue = True
        if overdue:
            self._items.sort(key=_key)
