"""Grammars of answers: compiled beside the engine's loop, followed token by token, and made into masks of a step."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qiao.engine.request import EngineRequest
from qiao.engine.sequence import Request, Status
from qiao.errors import OverloadedError, ParameterError, QiaoError
from qiao.structured_outputs import parser_limits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

FIELD = "structured_outputs"

MAX_KEPT = 16
"""Compiled grammars that are kept for the next request."""

MAX_USED = 20_000
"""Tokens after which a kept grammar is compiled anew: its automaton is shared by its users, and grows with them."""

MAX_ITEMS = 20_000
"""Items of the parser for one mask; some tens of milliseconds."""

MAX_LEXER_STATES = 30_000
"""States of a grammar's automaton; they take about 1 kB each."""

PAUSE_SECONDS = 0.01
"""How long a step waits for a grammar where there is nothing else to do."""

COMPILE_SECONDS = 10.0
"""Longest work on one grammar. What takes longer is left to itself on its thread, and refused."""

WAIT_SECONDS = 30.0
"""Longest wait for a grammar behind others."""

MAX_LEFT = 2
"""Threads that may be left to their work at a time; beyond them the next grammars wait."""

_PARALLEL = 4
"""Masks from which on threads share the work."""


@dataclass(frozen=True)
class Vocabulary:
    """``tokens[i]`` are the bytes of token i, empty for one without text; ``ends`` end a sequence."""

    tokens: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]


@dataclass
class _Tools:
    """What all grammars of one vocabulary share."""

    vocabulary: Vocabulary
    tokenizer: LLTokenizer
    executor: LLExecutor
    openers: dict[tuple[bytes, bytes], npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Masks of the tokens that go on towards a mark, by the mark and what is there of it."""


@dataclass
class Compiled:
    """A grammar at its start. ``used`` counts the tokens that its copies have taken."""

    matcher: LLMatcher
    tools: _Tools
    used: int = 0


class GrammarState:
    """How far one sequence has come in its grammar.

    The grammar begins once ``after`` has appeared in the answer, at once where it is empty; until then everything is
    allowed. ``before`` is what an answer begins with, white space aside, that has ``after`` in it: any other follows
    the grammar from its first token. While that is open, what begins ``before`` may come as well.

    The state belongs to the sequence and outlives its place in a batch, so preemption does not touch it.
    """

    def __init__(self, compiled: Compiled, after: bytes, before: bytes = b"") -> None:
        self.matcher = compiled.matcher.deep_copy()
        self.tools = compiled.tools
        self._compiled = compiled
        self._after = after
        self._before = before if after else b""  # empty once it is known how the answer begins
        self._head = b""
        self._follows = True
        self._tail = b""
        self.begun = not after

    @property
    def bounds(self) -> bool:
        """Whether there are tokens that may not come next."""
        return self.begun or bool(self._before)

    def advance(self, token: int) -> bool:
        """Take a sampled token. True where the grammar is complete and nothing can follow."""
        if self._before:
            return self._open(token)
        if self.begun:
            return self._consume(token)
        return self._reach(self._bytes(token))

    def _bytes(self, token: int) -> bytes:
        tokens = self.tools.vocabulary.tokens
        return tokens[token] if token < len(tokens) else b""

    def _consume(self, token: int) -> bool:
        self._compiled.used += 1
        self.matcher.consume_token(token)
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def _open(self, token: int) -> bool:
        """Take a token while both a grammar from the start and ``before`` are possible."""
        head = (self._head + self._bytes(token)).lstrip()
        if head.startswith(self._before):
            rest, self._before, self._follows = head[len(self._before) :], b"", True
            self.matcher = self._compiled.matcher.deep_copy()
            return self._reach(rest)
        self._follows = self._follows and self.matcher.validate_tokens([token]) == 1
        self._head = head
        if not self._before.startswith(head):
            self._before, self.begun = b"", True
        return self._consume(token) if self._follows or self.begun else False

    def _reach(self, text: bytes) -> bool:
        """Look for ``after`` in what has come."""
        tail = self._tail + text
        at = tail.find(self._after)
        if at < 0:
            self._tail = tail[max(0, len(tail) - len(self._after) + 1) :]
            return False
        self.begun = True
        return self._take_rest(tail[at + len(self._after) :])

    def behind(self, tokens: Sequence[int]) -> GrammarState | None:
        """A state of its own behind ``tokens``; None where the grammar refuses one of them or is complete by then."""
        state = copy(self)
        state.matcher = self.matcher.deep_copy()
        for token in tokens:
            if state.bounds and not state._takes(token):
                return None
            if state.advance(token):
                return None
        return state

    def _takes(self, token: int) -> bool:
        if self._follows and self.matcher.validate_tokens([token]) == 1:
            return True
        return bool(self._before) and self._leads(self._bytes(token), token)

    def _leads(self, text: bytes, token: int) -> bool:
        """Whether ``token`` with this ``text`` goes on towards ``before``."""
        head = (self._head + text).lstrip()
        possible = head.startswith(self._before) or self._before.startswith(head)
        return possible and bool(text) and token not in self.tools.vocabulary.ends

    def widen(self, mask: npt.NDArray[np.uint8]) -> None:
        """Add to the grammar's ``mask``, in place, what may begin ``before``."""
        if not self._before:
            return
        if not self._follows:
            mask[:] = 0
        key = self._before, self._head
        found = self.tools.openers.get(key)
        if found is None:
            flags = np.zeros(len(mask) * 8, np.bool_)
            texts = self.tools.vocabulary.tokens
            flags[: len(texts)] = [self._leads(text, token) for token, text in enumerate(texts)]
            found = self.tools.openers[key] = np.packbits(flags, bitorder="little")
        mask |= found

    def _take_rest(self, rest: bytes) -> bool:
        """What stands behind ``after`` in the same token belongs to the grammar where it fits, as spaces need not."""
        text = rest.decode("utf-8", "ignore").strip()
        ids = self.tools.tokenizer.greedy_tokenize(text) if text else []
        if ids and self.matcher.validate_tokens(ids) == len(ids):
            self.matcher.consume_tokens(ids)
            return self.matcher.is_stopped()
        return False

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any further, for example a limit that was hit."""
        if not self.matcher.is_error():
            return None
        self._compiled.used = MAX_USED  # the next user gets a new one, whose automaton is empty
        return self.matcher.get_error()


def allowed_tokens(states: Sequence[GrammarState], vocab_size: int) -> npt.NDArray[np.uint8]:
    """Masks [N, ceil(V / 32) * 4] uint8 of the tokens that may come next, bit i % 8 of byte i // 8 for token i."""
    from llguidance import numpy as masks

    found = np.zeros((len(states), -(-vocab_size // 32)), np.int32)
    if len(states) >= _PARALLEL:
        pairs = [(state.matcher, i) for i, state in enumerate(states)]
        masks.fill_next_token_bitmask_par(states[0].tools.executor, pairs, found)
    else:
        for i, state in enumerate(states):
            masks.fill_next_token_bitmask(state.matcher, found, i)
    packed = found.view(np.uint8)
    for i, state in enumerate(states):
        state.widen(packed[i])
    return packed


class GrammarCompiler:
    """Compiles on a thread of its own and keeps the last ``MAX_KEPT`` results. ``vocabulary`` is read when needed.

    The library cannot be interrupted: a thread whose grammar takes longer than ``COMPILE_SECONDS`` is left to itself.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._read = vocabulary
        self._vocab_size = vocab_size
        self._tools: _Tools | None = None
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._work: tuple[str, float] | None = None
        self._left = 0
        self._lock = threading.Lock()  # of _work, _left and _kept
        self._thread = _new_thread()

    def submit(self, text: str) -> Future[Compiled]:
        """The compiled grammar ``text``. Fails with ``ParameterError``."""
        if text in self._refused:
            failed: Future[Compiled] = Future()
            failed.set_exception(ParameterError(FIELD, f"takes longer than {COMPILE_SECONDS:g} s to compile"))
            return failed
        return self._thread.submit(self._compile, text)

    def overdue(self) -> bool:
        """Whether the grammar in work took too long. Then it is refused from now on, and the others need to be
        submitted again, for a new thread.
        """
        with self._lock:
            work = self._work
            if work is None or time.monotonic() - work[1] < COMPILE_SECONDS or self._left >= MAX_LEFT:
                return False
            self._left += 1
            self._work = None
        self._refused[work[0]] = None
        while len(self._refused) > MAX_KEPT:
            self._refused.popitem(last=False)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = _new_thread()
        return True

    def _compile(self, text: str) -> Compiled:
        tools = self._tools = self._tools or self._make_tools()
        work = (text, time.monotonic())
        with self._lock:
            self._work = work
            found = self._kept.get(text)
        try:
            if found is None or found.used >= MAX_USED:
                found = self._compiled(text, tools)
            with self._lock:
                if self._work is work:  # else this thread was left to itself, and another has taken its place
                    self._kept[text] = found
                    self._kept.move_to_end(text)
                    while len(self._kept) > MAX_KEPT:
                        self._kept.popitem(last=False)
            return found
        finally:
            with self._lock:
                if self._work is work:
                    self._work = None
                else:
                    self._left -= 1

    def _compiled(self, text: str, tools: _Tools) -> Compiled:
        from llguidance import LLMatcher

        limits = parser_limits(step_max_items=MAX_ITEMS, max_lexer_states=MAX_LEXER_STATES)
        matcher = LLMatcher(tools.tokenizer, text, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_bitmask()  # the first mask is the most work: not in a step
        if first.is_error():
            raise ParameterError(FIELD, f"cannot be enforced: {first.get_error()}")
        return Compiled(matcher, tools)

    def _make_tools(self) -> _Tools:
        from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

        vocabulary = self._read()
        if not vocabulary.ends:
            raise ParameterError(FIELD, "needs a model with an end token; this one names none")
        tokenizer = LLTokenizer(
            TokenizerWrapper(_Encoder(vocabulary)), n_vocab=self._vocab_size, eos_token=list(vocabulary.ends)
        )
        return _Tools(vocabulary, tokenizer, LLExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))))


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="grammar")


class _Encoder:
    """A vocabulary in the form that the library asks for. Text that a grammar forces is cut into the longest tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special)
        special = {*vocabulary.special, *vocabulary.ends}
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        found, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((e for e in ends if data[at:e] in self._ids), None)
            if end is None:
                break  # bytes without a token: nothing is forced from here on
            found.append(self._ids[data[at:end]])
            at = end
        return found


@dataclass
class _Waiting:
    request: Request
    text: str
    after: bytes
    before: bytes
    future: Future[Compiled]
    began: float = field(default_factory=time.monotonic)
    aborted: set[int] = field(default_factory=set)


class GrammarQueue:
    """Requests whose grammar is being compiled."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, source: EngineRequest) -> None:
        """Compile the grammar of ``source``. Raises ``ParameterError`` where the engine has no vocabulary."""
        if self._compiler is None:
            raise ParameterError(FIELD, "is not available: this engine was built without a vocabulary")
        future = self._compiler.submit(source.grammar)
        marks = source.grammar_after.encode(), source.grammar_before.encode()
        self._waiting[request.id] = _Waiting(request, source.grammar, *marks, future)

    def abort(self, request_id: str, index: int | None) -> bool:
        """Note the end of a request, or of its sequence ``index``. False where the rest is left to the caller, because
        ``request_id`` does not wait here, or no longer.
        """
        if request_id not in self._waiting:
            return False
        if index is None:
            self._waiting.pop(request_id).future.cancel()
            return False
        self._waiting[request_id].aborted.add(index)
        return True

    def take(self, wait: bool) -> list[tuple[Request, set[int], QiaoError | None]]:
        """Requests that are ready, each with the sequences that ended meanwhile, or with why it cannot be served.

        With ``wait``, waits a moment where none is.
        """
        if wait and self._waiting:
            wait_for([one.future for one in self._waiting.values()], PAUSE_SECONDS, "FIRST_COMPLETED")
        if self._waiting:
            self._look_at_the_clock()
        ready = [one for one in self._waiting.values() if one.future.done()]
        return [self._started(self._waiting.pop(one.request.id)) for one in ready]

    def _look_at_the_clock(self) -> None:
        assert self._compiler is not None
        if self._compiler.overdue():
            for one in self._waiting.values():
                if one.future.cancelled() or not one.future.done():
                    one.future = self._compiler.submit(one.text)
        end = time.monotonic() - WAIT_SECONDS
        for one in self._waiting.values():
            if one.began < end and not one.future.done():
                one.future.cancel()
                one.future = Future()
                one.future.set_exception(OverloadedError("too many grammars wait to be compiled", retry_after=10))

    @staticmethod
    def _started(one: _Waiting) -> tuple[Request, set[int], QiaoError | None]:
        error = one.future.exception()
        if error is not None:
            known = error if isinstance(error, QiaoError) else ParameterError(FIELD, f"cannot be compiled: {error}")
            return one.request, one.aborted, known
        for seq in one.request.sequences:
            if seq.status is not Status.FINISHED:
                seq.grammar = GrammarState(one.future.result(), one.after, one.before)
        return one.request, one.aborted, None
