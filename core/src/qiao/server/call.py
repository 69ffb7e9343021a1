"""One HTTP request's caller, and what becomes known of the request while it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from qiao.engine.request import EngineRequest
from qiao.errors import DeadlineError, ForbiddenError
from qiao.outputs import RequestOutput
from qiao.tenants import Reservation, Tenant, TenantQuota

ASSUMED_ANSWER = 512
"""Tokens that are set aside for an answer whose length the client left open; it is settled to what it really was."""


MAX_DEADLINE_MS = 86_400_000
"""Longest deadline that a request can name: a day."""


@dataclass
class Call:
    """Made by the middleware that knows the key, used by whatever sends requests to the engine.

    ``priority`` is that of ``X-Priority``. ``deadline`` is in seconds of ``time.monotonic()``, by which the first step
    of the request must have begun. ``model`` answers; ``alias`` is what the client called it, where that is another
    name. ``adapter`` is the number of the LoRA adapter that ``model`` names. ``trace`` holds its trace headers.
    ``at_end`` is called once the HTTP request is over. Tokens are sums over all engine requests of the call.
    """

    tenant: Tenant
    quota: TenantQuota
    key_id: str = ""
    priority: int = 0
    deadline: float | None = None
    model: str = ""
    alias: str = ""
    adapter: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    answers: dict[tuple[str, int], str] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)

    def limit_wait(self, seconds: float | None) -> None:
        """The first step must begin within so many seconds from now; None changes nothing."""
        if seconds is not None:
            end = time.monotonic() + seconds
            self.deadline = end if self.deadline is None else min(end, self.deadline)

    def check_model(self, name: str) -> None:
        """Raises ``ForbiddenError`` unless the tenant may use the model or alias ``name``."""
        if not self.tenant.allows(name):
            raise ForbiddenError(f"this key may not use the model {name!r}; it may use {', '.join(self.tenant.models)}")

    def end(self) -> None:
        """The HTTP request is over."""
        while self.at_end:
            self.at_end.pop()()

    def prepare(self, request: EngineRequest) -> EngineRequest:
        """``request`` with the tenant's rights and duties. Raises ``ForbiddenError`` and ``DeadlineError``."""
        tenant = self.tenant
        if request.priority and not tenant.may_set_priority:
            raise ForbiddenError("this key may not set a priority; leave it out")
        return msgspec.structs.replace(
            self.in_time(request),
            priority=request.priority + self.priority + tenant.cls.priority,
            tenant=tenant.name,
            weight=tenant.cls.weight,
            kv_share=tenant.kv_share,
            cache_scope=tenant.cache_scope,
            adapter=self.adapter,
        )

    def in_time(self, request: EngineRequest) -> EngineRequest:
        """``request`` with what is left until the deadline. Raises ``DeadlineError`` where nothing is."""
        if self.deadline is None:
            return request
        wait = self.deadline - time.monotonic()
        if wait <= 0.0:
            raise DeadlineError("the request's deadline passed before it could be queued; nothing was computed")
        return msgspec.structs.replace(request, max_wait=wait)

    def ended(self, reasons: Sequence[str], queue: float | None, first_token: float | None) -> None:
        """One engine request of the call is over; times are in seconds, the longest one counts."""
        self.finish_reasons += reasons
        if queue is not None:
            self.queue_seconds = max(queue, self.queue_seconds or 0.0)
        if first_token is not None:
            self.first_token_seconds = max(first_token, self.first_token_seconds or 0.0)

    def note_answers(self, request_id: str, result: RequestOutput) -> None:
        """The texts that one engine request came to."""
        self.answers.update({(request_id, answer.index): answer.text for answer in result.outputs})

    @contextmanager
    def counted(self, requests: Sequence[EngineRequest], limit: int) -> Iterator[Sequence[EngineRequest]]:
        """Sets the tokens of ``requests`` aside, gives them ready for the engine, and settles at the end.

        ``limit`` is the most tokens that a sequence can have: an answer that may fill it was left open by the client.
        Raises ``QuotaError``, ``ForbiddenError`` and ``DeadlineError``; then nothing has been counted.
        """
        ready = [self.prepare(request) for request in requests]
        prompts = sum(len(r.prompt_token_ids) for r in requests)
        reservation = self.quota.reserve(prompts, sum(_longest_answer(r, limit) for r in requests))
        before = self.answer_tokens
        self.prompt_tokens += prompts
        try:
            yield ready
        finally:
            self._settle(reservation, prompts + self.answer_tokens - before)

    def _settle(self, reservation: Reservation, used: int) -> None:
        self.quota.settle(reservation, used)


def _longest_answer(request: EngineRequest, limit: int) -> int:
    most = request.params.max_tokens
    room = limit - len(request.prompt_token_ids)
    if most is None or most >= room:
        most = min(room, ASSUMED_ANSWER)
    return most * request.params.n


CURRENT: ContextVar[Call] = ContextVar("call")
"""The call that this task, and those that it starts, answer.

A context variable and not an argument, so that no route can forget to hand it on: whatever reaches the engine is
counted.
"""


def current_call() -> Call:
    """The call of this task. Raises ``LookupError`` outside a request."""
    return CURRENT.get()
