"""The waiting queue: tenants take turns, each one's sequences are in order, and nobody is passed over for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection

from qiao.engine.fairness import PROMOTED, Account, rank
from qiao.engine.sequence import Key, Sequence, Status
from qiao.tenants import CLASSES

MAX_WAIT_STEPS = 1000
"""A sequence that waited for so many steps altogether goes to the front and is not preempted for its priority again."""

OVERDUE = "promoted"
"""Where such sequences are counted, beside the priority classes."""

CHECK_EVERY = 50
"""Steps between looks for such sequences."""


def _key(seq: Sequence) -> Key:
    return seq.key


def _first_plain(items: list[Sequence]) -> Sequence | None:
    return next((seq for seq in items if seq.request.adapter is None), None)


class WaitingQueue:
    """Sequences that have no blocks yet, or lost them to preemption."""

    def __init__(self) -> None:
        self._lists: dict[tuple[Account, int], list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    @property
    def items(self) -> list[Sequence]:
        """By level and arrival. A new list."""
        return sorted((seq for items in self._lists.values() for seq in items), key=_key)

    @property
    def heads(self) -> list[Sequence]:
        """The first of each tenant and level."""
        return [items[0] for items in self._lists.values()]

    @property
    def worst_level(self) -> int | None:
        """Level of the last of all, None where nobody waits."""
        return max((level for _, level in self._lists), default=None)

    def by_class(self) -> dict[str, int]:
        """How many wait: those that were promoted, and of the others those whose priority is nearest to a class's."""
        found = dict.fromkeys((OVERDUE, *CLASSES), 0)
        for (_, level), items in self._lists.items():
            nearest = min(CLASSES, key=lambda name: abs(CLASSES[name].priority - level))
            found[OVERDUE if level == PROMOTED else nearest] += len(items)
        return found

    def push(self, seq: Sequence, step: int) -> None:
        """Let ``seq`` wait from ``step`` on."""
        seq.status = Status.WAITING
        seq.waiting_since = step
        self._insert(seq)

    def _insert(self, seq: Sequence) -> None:
        insort(self._lists.setdefault((seq.request.account, seq.key[0]), []), seq, key=_key)

    def next(self, without: Collection[Account] = (), plain: bool = False) -> Sequence | None:
        """Who is next, apart from the tenants ``without``; with ``plain`` apart from those with a LoRA adapter too."""
        lists = [items for (account, _), items in self._lists.items() if account not in without]
        heads = map(_first_plain, lists) if plain else (items[0] for items in lists)
        return min(filter(None, heads), key=lambda seq: (rank(seq), seq.key), default=None)

    def pop(self, seq: Sequence, step: int) -> None:
        """``seq`` waits no longer and starts."""
        self.remove(seq)
        seq.waited += step - seq.waiting_since

    def remove(self, seq: Sequence) -> None:
        """Take out ``seq``, which is in the queue."""
        where = (seq.request.account, seq.key[0])
        items = self._lists[where]
        at = bisect_left(items, seq.key, key=_key)
        assert items[at] is seq
        del items[at]
        if not items:
            del self._lists[where]

    def promote(self, seq: Sequence) -> None:
        """Move ``seq`` to the front, behind those that were promoted and arrived before."""
        self.remove(seq)
        seq.key = (PROMOTED, *seq.key[1:])
        self._insert(seq)

    def promote_overdue(self, step: int) -> None:
        """Promote those that waited too long."""
        if step % CHECK_EVERY:
            return
        for seq in self.items:
            if seq.key[0] != PROMOTED and seq.waited + step - seq.waiting_since >= MAX_WAIT_STEPS:
                self.promote(seq)
