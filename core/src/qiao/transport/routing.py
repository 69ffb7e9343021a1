"""Which of several engines gets a request: the one that has its beginning cached, unless others have less to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from qiao.engine.request import EngineRequest

CHUNK = 32
"""Tokens that are remembered together."""

SEQUENCE_TOKENS = 128
"""What a running sequence counts, in prompt tokens: a prompt is worth moving when so many tokens a sequence are at
stake."""


class Desk:
    """What one engine has been sent: its work now, and the beginnings that its cache likely holds.

    ``capacity`` is the most tokens that it remembers, those of the engine's cache. ``generation`` is the start of the
    engine that it belongs to: a new one has an empty cache.
    """

    def __init__(self, capacity: int, generation: int = 0) -> None:
        self.generation = generation
        self._most = max(1, capacity // CHUNK)
        self._known: OrderedDict[int, None] = OrderedDict()
        self.sequences = 0
        self.prompt_tokens = 0

    @property
    def load(self) -> int:
        """Work under way, in prompt tokens."""
        return self.prompt_tokens + SEQUENCE_TOKENS * self.sequences

    def known(self, chunks: Sequence[int]) -> int:
        """Tokens of a prompt of these ``chunks`` that the engine has seen as a beginning."""
        count = 0
        for chunk in chunks:
            if chunk not in self._known:
                break
            count += 1
        return count * CHUNK

    def remember(self, chunks: Sequence[int]) -> None:
        """A prompt of these ``chunks`` goes to the engine."""
        for chunk in reversed(chunks):  # beginnings are forgotten last
            self._known[chunk] = None
            self._known.move_to_end(chunk)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


def chunks_of(request: EngineRequest) -> list[int]:
    """A number for each whole chunk of the prompt, which stands for it and all before it.

    The last token is left out: an engine computes it in any case. Numbers that meet by accident cost a detour at most.
    """
    ids = request.prompt_token_ids
    numbers, last = [], hash((request.cache_salt, request.cache_scope, request.adapter))
    for start in range(0, (len(ids) - 1) // CHUNK * CHUNK, CHUNK):
        last = hash((last, *ids[start : start + CHUNK]))
        numbers.append(last)
    return numbers


def choose(desks: Sequence[Desk], prompt: int, chunks: Sequence[int]) -> int:
    """The place of the desk with the least work after it has taken a prompt of ``prompt`` tokens."""
    costs = [desk.load + prompt - desk.known(chunks) for desk in desks]
    return costs.index(min(costs))
