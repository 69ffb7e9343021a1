"""Who goes next when tenants and priorities compete.

Tenants: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each computed
token adds one over the tenant's weight to its counter, and the lowest counter goes first, so that whoever sends little
is served at once and those who send much share what is left by weight. Who was away starts from the lowest counter of
those whose prompts wait, less the prompt that it brings: so that prompt goes first to its end, as in borrowed virtual
time (Duda and Cheriton, SOSP 1999), where it would else take turns with the others' chunk by chunk.

Priorities: the better one always goes first, but the others are owed a share of the tokens that pass them by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qiao.engine.sequence import Sequence

PROMOTED = -(1 << 63)
"""Level of a promoted sequence: before any priority."""

CREDIT_STEPS = 16
"""Most full steps of a prompt that go first so. The others' prompts wait at most so long for it, and a prompt of twice
as many steps still takes at most one and a half times as many beside another tenant's of the same weight.
"""

Rank = tuple[int, float]


class Account:
    """One tenant's standing. ``blocks`` and ``rows`` are what its running sequences hold, ``active`` counts its
    sequences that have not finished, ``served`` is its virtual counter and ``came`` where the others' counters were
    when its newest request came. ``cap`` is the most blocks, None for no limit.
    """

    __slots__ = ("active", "blocks", "came", "cap", "rows", "served", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.cap: int | None = None
        self.served = -math.inf
        self.came = 0.0
        self.active = self.rows = self.blocks = 0

    def charge(self, tokens: int) -> None:
        """Count computed tokens; negative ones that were not computed after all."""
        self.served += tokens / self.weight


class Shares:
    """The accounts of an engine. Names come from the operator's file, so there are few. Whenever nobody is busy they
    begin anew: nobody pays later for having used what nobody else wanted.

    ``credit`` is the most tokens by which who comes may be ahead of the others.
    """

    def __init__(self, credit: int) -> None:
        self._accounts: dict[str, Account] = {}
        self._credit = credit
        self._clock = 0.0
        self._busy = 0

    def account(self, tenant: str, weight: float, cap: int | None) -> Account:
        """A tenant's account, with the weight and the cap of its newest request."""
        found = self._accounts.setdefault(tenant, Account())
        found.weight, found.cap = weight, cap
        return found

    def enter(self, account: Account, sequences: int, prompt: int, rivals: Iterable[Account]) -> None:
        """Sequences of a tenant arrive, with one prompt of so many tokens; ``rivals`` have prompts at the same level
        that are not computed yet.
        """
        account.came = min((max(one.served, one.came) for one in rivals), default=self._clock)  # credit is no measure
        account.served = max(account.served, account.came - min(prompt, self._credit) / account.weight)
        self._busy += not account.active
        account.active += sequences

    def serves(self, account: Account) -> None:
        """A prompt of ``account`` has its turn: where the others are, should its tenant be gone when one arrives."""
        self._clock = max(self._clock, account.served)

    def leave(self, account: Account) -> None:
        """A sequence of a tenant has ended."""
        account.active -= 1
        if not account.active:
            self._busy -= 1
            if not self._busy:
                self._accounts.clear()

    @property
    def competing(self) -> bool:
        """Whether more than one tenant is busy."""
        return self._busy > 1


def rank(seq: Sequence) -> Rank:
    """Lowest first; equal ones by arrival. Promoted sequences know no tenants."""
    level = seq.key[0]
    return (level, 0.0 if level == PROMOTED else seq.request.account.served)


def loses_first(seq: Sequence) -> tuple[int, float, int, int]:
    """Highest first: who gives up its blocks where they run out. The worst priority, then the tenant with most blocks
    for its weight, then the latest arrival. Of promoted sequences the first to arrive is the last to lose.
    """
    level, arrival, index = seq.key
    account = seq.request.account
    return (level, 0.0 if level == PROMOTED else account.blocks / account.weight, arrival, index)


class Displacement:
    """Which running sequences ``seq`` may push out to get ``rows`` and ``blocks`` that it lacks.

    Those of a worse priority; and those of a tenant that still has as much for its weight, without them, as the tenant
    of ``seq`` then has: each such change brings the two nearer, so that they cannot push each other out in turn.
    """

    def __init__(self, seq: Sequence, rows: int, blocks: int, wanted_rows: int, wanted_blocks: int) -> None:
        self._seq = seq
        self._rows, self._blocks = rows, blocks
        own = seq.request.account
        self._row_share = (own.rows + wanted_rows) / own.weight
        self._block_share = (own.blocks + wanted_blocks) / own.weight
        self._taken: dict[Account, tuple[int, int]] = {}

    def victims(self, running: Iterable[Sequence], references: list[int]) -> list[Sequence]:
        """Enough of them, the worst first; empty where there are not enough."""
        chosen: list[Sequence] = []
        for victim in sorted(running, key=loses_first, reverse=True):
            if self._rows <= 0 and self._blocks <= 0:
                break
            freed = sum(references[block] == 1 for block in victim.blocks)
            if self._allowed(victim, freed):
                taken = self._taken.get(victim.request.account, (0, 0))
                self._taken[victim.request.account] = (taken[0] + 1, taken[1] + len(victim.blocks))
                self._rows -= 1
                self._blocks -= freed
                chosen.append(victim)
        return chosen if self._rows <= 0 and self._blocks <= 0 else []

    def _allowed(self, victim: Sequence, freed: int) -> bool:
        level, own = victim.key[0], self._seq.key[0]
        if PROMOTED in (level, own) or level < own:
            return False
        if level > own:
            return True
        account = victim.request.account
        if account is self._seq.request.account:
            return False
        rows, blocks = self._taken.get(account, (0, 0))
        if self._rows > 0 and (account.rows - rows - 1) / account.weight < self._row_share:
            return False
        enough = (account.blocks - blocks - len(victim.blocks)) / account.weight >= self._block_share
        return self._blocks <= 0 or (freed > 0 and enough)


class Floor:
    """What priorities that are passed by are owed, in tokens: ``share`` of those that went before them.

    As in deficit round robin, a sequence is promoted when the debt covers its tokens so far; what promoted sequences
    take is paid back, also beyond the debt, and then the better priorities have their turn until it has grown again.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed = 0.0

    def candidate(self, heads: Iterable[Sequence], best: int) -> Sequence | None:
        """Who is to be promoted now, if anyone: the first to arrive of those that have a worse level than ``best``."""
        if self._owed < 1.0:
            return None
        passed = [seq for seq in heads if seq.key[0] > best]
        first = min(passed, key=lambda seq: seq.key[1:], default=None)
        return first if first is not None and self._owed >= len(first.tokens) else None

    def note(self, scheduled: Mapping[Sequence, int], worst_waiting: int | None) -> None:
        """Count a step's tokens. ``worst_waiting`` is the level of the last in the queue, None where nobody waits."""
        paid = sum(count for seq, count in scheduled.items() if seq.key[0] == PROMOTED)
        levels = [seq.key[0] for seq in scheduled if seq.key[0] != PROMOTED]
        best = min(levels, default=None)
        passed_by = worst_waiting is not None and best is not None and worst_waiting > best
        if passed_by:
            self._owed += self._share * sum(scheduled.values())
        elif self._owed > 0.0:
            self._owed = 0.0
        self._owed -= paid
        if best is not None and self._owed > 0.0:
            others = sum(count for seq, count in scheduled.items() if seq.key[0] > best)
            self._owed = max(0.0, self._owed - others)
