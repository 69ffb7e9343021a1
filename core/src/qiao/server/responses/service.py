"""Responses that are kept, or run in the background: one ``Responses`` a server, one ``Running`` for each that runs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import ParamSpec, TypeVar

import msgspec

from qiao.errors import ParameterError, QiaoError, QuotaError
from qiao.server.call import Call
from qiao.server.errors import ApiError, error_body, internal_error, to_api_error
from qiao.server.protocol.errors import ErrorBody
from qiao.server.protocol.responses import Item
from qiao.server.responses.answer import Answer, Event
from qiao.server.responses.store import ResponseStore, Stored

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_RUNNING = 1024
"""Most responses of one tenant in the background at a time. They wait in the engine's queue like all others, but no
client waits."""


class Share:
    """What the responses of one tenant that run in the background take up, and the most that they may."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.running = 0
        self.bytes = 0

    def enter(self, size: int) -> None:
        """One more, with ``size`` bytes. Raises ``QuotaError``, and then nothing is counted."""
        if self.running >= MAX_RUNNING:
            raise QuotaError(f"{MAX_RUNNING} responses of this key run in the background already; wait for one", 5.0)
        self.take(size)
        self.running += 1

    def take(self, size: int) -> None:
        """``size`` bytes more. Raises ``QuotaError``, and then nothing is counted."""
        if self.bytes + size > self._most:
            raise QuotaError(
                f"the responses that run in the background for this key take up {self._most} bytes "
                "(--responses-max-bytes); wait for one to end, or ask without stream=true, as events take up most",
                5.0,
            )
        self.bytes += size

    def leave(self, size: int) -> None:
        """One that had ``size`` bytes has ended."""
        self.running -= 1
        self.bytes -= size


class Running:
    """A response that nobody waits for. It counts as a request of its tenant; ``ended`` hears of its end.

    Its items and events count as bytes of ``share``; events are kept as the JSON that goes out.
    """

    def __init__(
        self,
        call: Call,
        answer: Answer,
        items: list[Item],
        keeps_events: bool,
        ended: Callable[[], None],
        share: Share,
    ) -> None:
        self.tenant = call.tenant.name
        self.quota = call.quota
        self.ended = ended
        self.answer = answer
        self.items = items
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        self.done = False
        self.share = share
        self.size = 0
        self.work: asyncio.Task[None] | None = None
        self.settled: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def begin(self) -> None:
        """Takes its place and notes the first events. Raises ``QuotaError`` where there is no room for it."""
        first = [encoded(self.answer.state(kind)) for kind in ("created", "queued")] if self.keeps_events else []
        size = len(json.dumps(self.items)) + sum(map(len, first))
        self.share.enter(size)
        self.size, self.events = size, first

    def note(self, event: Event) -> None:
        """One more event. Raises ``QuotaError`` where there is no room for it, unless it is the last."""
        if self.keeps_events:
            data = encoded(event)
            if self.answer.response.status in ("queued", "in_progress"):
                self.share.take(len(data))
                self.size += len(data)
            self.events.append(data)
        self._tell()

    def end(self) -> None:
        """There will be no more."""
        self.done = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """All events with numbers above ``after``, those of the past and those to come."""
        place = after + 1
        while True:
            news = self._news
            while place < len(self.events):
                yield wire(self.events[place])
                place += 1
            if self.done:
                return
            await news.wait()

    async def take(self, events: AsyncGenerator[Event, None]) -> None:
        """Note all of ``events``."""
        async with aclosing(events):
            async for event in events:
                self.note(event)

    def stored(self) -> Stored:
        """As it is now."""
        response = self.answer.response.plain()
        return Stored(self.tenant, response, self.items, self.events if self.keeps_events and self.done else None)


class Responses:
    """``store`` is None where nothing is kept."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store
        self._running: dict[tuple[str, str], Running] = {}
        self._shares: dict[str, Share] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    @property
    def kept(self) -> bool:
        """Whether responses can be kept at all."""
        return self._store is not None

    def share(self, tenant: str) -> Share:
        """What ``tenant`` takes up in the background. Room is that for all that it keeps: more would not be kept."""
        return self._shares.setdefault(tenant, Share(self._store.bounds.bytes if self._store is not None else 0))

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def history(self, tenant: str, name: str | None) -> list[Item]:
        """The items of the conversation that ended with ``name``; none without one. Raises ``ParameterError``."""
        if name is None:
            return []
        if self._store is None:
            raise ParameterError("previous_response_id", "this server keeps no responses; send the items again")
        running = self._running.get((tenant, name))
        if running is not None and running.answer.response.status not in ("queued", "in_progress"):
            await _until(running)  # its client knows already that it is complete
        return await self._run(self._store.history, tenant, name)

    async def keep(self, stored: Stored) -> bool:
        """Store a response. What cannot be stored can be answered all the same: the log says why, and it is False."""
        if self._store is None:
            return False
        try:
            await self._run(self._store.put, stored)
        except QiaoError as error:
            logger.error("a response is not kept: %s", error)
            return False
        return True

    async def get(self, tenant: str, name: str) -> Running | Stored:
        """A response of ``tenant``. Raises ``ApiError`` 404."""
        if (running := self._running.get((tenant, name))) is not None:
            return running
        stored = await self._run(self._store.get, tenant, name) if self._store is not None else None
        if stored is None:
            raise ApiError(404, f"no response has the id {name[:100]!r}; it may have expired", param="response_id")
        return stored

    async def start(self, running: Running, events: AsyncGenerator[Event, None]) -> None:
        """Let ``events``, those of an answer, happen without a client. Raises ``QuotaError``."""
        running.begin()
        key = (running.tenant, running.answer.response.id)
        self._running[key] = running
        running.quota.hold()
        running.work = asyncio.create_task(running.take(events))
        running.settled = asyncio.create_task(self._settle(key, running, running.work))

    async def _settle(self, key: tuple[str, str], running: Running, work: asyncio.Task[None]) -> None:
        try:
            await self.keep(running.stored())  # a server that ends early leaves a trace of it
            await asyncio.wait([work])
            error = None if work.cancelled() else work.exception()
            if work.cancelled():
                running.answer.cancel()
            elif isinstance(error, Exception):
                running.answer.fail(failure(error))
                running.note(running.answer.last())
            running.end()
            await self._keep_end(running.stored())
        finally:
            running.quota.end()
            running.share.leave(running.size)
            del self._running[key]
            running.ended()

    async def _keep_end(self, stored: Stored) -> None:
        """Store how it ended, without its events where they are too much; else nothing says any more that it runs."""
        if await self.keep(stored) or await self.keep(replace(stored, events=None)) or self._store is None:
            return
        with suppress(QiaoError):  # the log has the reason
            await self._run(self._store.delete, stored.tenant, stored.response["id"])

    async def cancel(self, tenant: str, name: str) -> dict[str, object]:
        """End a response of the background; one that has ended stays as it is. Raises ``ApiError``."""
        found = await self.get(tenant, name)
        if isinstance(found, Running):
            await self._stop(found)
            return found.stored().response
        if not found.response["background"]:
            raise ApiError(400, "only responses of the background can be cancelled", param="response_id")
        return found.response

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a response; one that runs is ended first. Raises ``ApiError`` 404."""
        found = await self.get(tenant, name)
        if isinstance(found, Running):
            await self._stop(found)
        if self._store is not None:
            await self._run(self._store.delete, tenant, name)

    async def _stop(self, running: Running) -> None:
        assert running.work is not None
        running.work.cancel()
        await _until(running)

    async def close(self) -> None:
        """Wait for what runs, which the engine's end ends, and let go of the database."""
        for running in list(self._running.values()):
            await _until(running)
        if self._store is not None:
            await self._run(self._store.close)
        self._thread.shutdown(wait=False)


async def _until(running: Running) -> None:
    assert running.settled is not None
    await asyncio.wait([running.settled])  # unlike awaiting it, this does not cancel it where the caller is cancelled


def failure(error: Exception) -> ErrorBody:
    """What a client learns of an error that came while it was answered."""
    return error_body(to_api_error(error) if isinstance(error, QiaoError) else internal_error(error))


def encoded(event: Event) -> bytes:
    """One event as JSON."""
    return json.dumps(event, ensure_ascii=False).encode()


def wire(data: bytes) -> bytes:
    """What ``encoded`` made, for the wire."""
    return _wire(msgspec.json.decode(data, type=_Typed).type, data)


def sse(event: Event) -> bytes:
    """One event for the wire."""
    return _wire(event["type"], encoded(event))


class _Typed(msgspec.Struct):
    type: str


def _wire(kind: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
