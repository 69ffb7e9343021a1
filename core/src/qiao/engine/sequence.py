"""State of a request and of its sequences inside the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qiao.engine.fairness import Account
from qiao.engine.prefix import BlockKey, block_key, root_digest
from qiao.engine.request import EngineRequest, TokenLogprobs

if TYPE_CHECKING:
    from qiao.engine.grammars import GrammarState
    from qiao.engine.prompt_lookup import NgramIndex

Key = tuple[int, int, int]
"""Order of service, lowest first: (level, arrival number, index of the sequence in its request)."""


class Status(Enum):
    """Where a sequence stands; a follower shares a prompt that sequence 0 has yet to compute."""

    FOLLOWING = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter; ``digest`` is of its files."""

    number: int
    name: str
    digest: bytes


class Request:
    """What the sequences of one ``EngineRequest`` have in common.

    ``forked`` says that sequences 1 to n-1 have left sequence 0, which computes the prompt for all.
    ``prompt_logprobs`` grows chunk by chunk, the first entry None. ``fault`` is set where scoring the prompt found
    something wrong, or a grammar cannot be followed, and then ``fault_field`` names the request's field.
    ``pooled`` [E] is the last hidden state, or the sum of the first ``pooled_count``. Times are
    ``time.time()`` in seconds.
    """

    __slots__ = (
        "account",
        "adapter",
        "cached_tokens",
        "fault",
        "fault_field",
        "first_token",
        "forked",
        "id",
        "params",
        "pooled",
        "pooled_count",
        "pooling",
        "prompt_logprobs",
        "prompt_sent",
        "root",
        "scheduled",
        "sequences",
        "unfinished",
    )

    def __init__(self, request: EngineRequest, account: Account, adapter: Adapter | None = None) -> None:
        self.id = request.request_id
        self.account = account
        self.adapter = adapter
        self.params = request.params
        self.root = root_digest(request.cache_salt, request.cache_scope, b"" if adapter is None else adapter.digest)
        self.forked = request.params.n == 1
        self.sequences: list[Sequence] = []
        self.unfinished = request.params.n
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.prompt_sent = False
        self.fault: str | None = None
        self.fault_field = ""
        self.pooling = request.pooling
        self.pooled: npt.NDArray[np.float64] | None = None
        self.pooled_count = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some prompt positions have still to be scored."""
        wanted = self.params.prompt_logprobs is not None and not self.prompt_sent
        return wanted and len(self.prompt_logprobs) < self.sequences[0].num_prompt

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the hidden states of all prompt positions are needed, so that none may come from the prefix cache."""
        return self.wants_prompt_logprobs or self.pooling == "mean"


class Sequence:
    """One answer in the making.

    ``tokens`` are prompt and output. The keys and values of the first ``num_computed`` of them are in ``blocks``; the
    sequence samples when all are. ``limit`` is the most tokens it may have. ``stops`` maps the ids that end it to the
    reported reason (None for EOS). ``row`` is its place in the persistent batch arrays, -1 while it waits.
    ``counted`` says that the prefix statistics know it. ``grammar`` is what the output must follow, where it must.
    ``draft`` are guesses at its next tokens while a step tries them, ``ngrams`` where its endings occurred before, and
    ``num_drafted`` how many of its tokens a draft model has computed. ``num_restored`` of its computed tokens came from
    host memory or files when it started.
    """

    __slots__ = (
        "blocks",
        "counted",
        "draft",
        "grammar",
        "index",
        "key",
        "keys",
        "limit",
        "ngrams",
        "num_computed",
        "num_drafted",
        "num_prompt",
        "num_registered",
        "num_restored",
        "request",
        "row",
        "seed",
        "status",
        "stops",
        "tokens",
        "waited",
        "waiting_since",
    )

    def __init__(self, request: Request, index: int, source: EngineRequest, key: Key, limit: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.key = key
        self.tokens = list(source.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_registered = 0
        self.num_restored = 0
        self.blocks: list[int] = []
        self.keys: list[BlockKey] = []
        self.limit = limit
        self.seed = seed
        self.row = -1
        self.status = Status.FOLLOWING
        self.waited = 0
        self.counted = False
        self.grammar: GrammarState | None = None
        self.draft: list[int] = []
        self.ngrams: NgramIndex | None = None
        self.num_drafted = 0
        self.waiting_since = 0
        params = source.params
        self.stops: dict[int, int | None] = {t: t for t in params.stop_token_ids or ()}
        if not params.ignore_eos:
            self.stops.update(dict.fromkeys(source.eos_token_ids))

    @property
    def num_output(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_token(self) -> bool:
        """Whether there is room for one more token."""
        return len(self.tokens) < self.limit

    def keys_up_to(self, count: int, block_size: int) -> list[BlockKey]:
        """Keys of the first ``count`` full blocks; made once, since tokens are only appended."""
        keys = self.keys
        parent = keys[-1].digest if keys else self.request.root
        for i in range(len(keys), count):
            keys.append(block_key(parent, self.tokens[i * block_size : (i + 1) * block_size]))
            parent = keys[-1].digest
        return keys[:count]
