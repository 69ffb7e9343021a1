"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from qiao.errors import QiaoError
from qiao.server.errors import error_body, internal_error, to_api_error
from qiao.server.protocol.errors import ErrorBody

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; nobody reads it but the log and the metrics."""


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


def event(chunk: BaseModel) -> bytes:
    """One event; only fields that were set are written."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class TextEvents:
    """Events that differ in one text only: made once around a placeholder, then filled in.

    ``make(text)`` is the event with ``text``; so a filled event is byte for byte what ``make`` would have made, which
    would take ten times as long.
    """

    def __init__(self, make: Callable[[str], bytes]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = make(mark).split(msgspec.json.encode(mark))

    def fill(self, text: str) -> bytes:
        """The event with ``text``."""
        return self._before + msgspec.json.encode(text) + self._after


def json_answer(body: BaseModel) -> Response:
    """A whole answer; only fields that were set are written."""
    return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """``work``'s result. When the client goes first, cancels it and raises ``ClientGoneError``."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def kept_alive(chunks: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """``chunks``, and a comment, which clients ignore, whenever none has come for so many seconds."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(chunks))
            done, _ = await asyncio.wait([waiting], timeout=seconds)
            if not done:
                yield KEEP_ALIVE
                continue
            try:
                chunk = waiting.result()
            except StopAsyncIteration:
                return
            finally:
                waiting = None
            yield chunk
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await chunks.aclose()


@dataclass(frozen=True)
class Ending:
    """How a stream ends: ``done`` after its last chunk, or what ``failed`` makes of an error that came in it."""

    done: bytes
    failed: Callable[[ErrorBody], bytes]


OPENAI_ENDING = Ending(DONE, lambda body: event(body) + DONE)


async def stream_answer(
    request: Request, chunks: AsyncGenerator[bytes, None], ending: Ending = OPENAI_ENDING
) -> Response:
    """Send ``chunks`` as events, and the ``ending``.

    The status waits for the first chunk, so that a refusal has its own status. A failure after it becomes an error
    event, as the status is sent by then. A client that goes ends the generator, and with it the work. With
    ``--sse-keep-alive-interval`` the status waits so long at most.
    """
    interval = request.app.state.qiao.server_args.sse_keep_alive_interval
    if interval:
        chunks = kept_alive(chunks, interval)
    try:
        first = await unless_gone(request.receive, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, ending)


class EventStream(Response):
    """The answer that sends ``first`` and ``chunks``; see ``stream_answer``.

    The framework's own streaming answer would add a generator and a task group's check to every token.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes, None], ending: Ending) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first = first
        self._chunks = chunks
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, or stop when the client goes."""
        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = self._ending.done
        try:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except QiaoError as error:
            last = self._ending.failed(error_body(to_api_error(error)))
        except Exception as error:
            last = self._ending.failed(error_body(internal_error(error)))
        finally:
            await self._chunks.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})
