"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from qiao.errors import QiaoError
from qiao.server.errors import error_body, internal_error, to_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; nobody reads it but the log and the metrics."""


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


def event(chunk: BaseModel) -> bytes:
    """One event; only fields that were set are written."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def json_answer(body: BaseModel) -> Response:
    """A whole answer; only fields that were set are written."""
    return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result. When the client goes first, cancels it and raises ``ClientGoneError``."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request))
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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream_answer(request: Request, chunks: AsyncGenerator[bytes, None]) -> Response:
    """Send ``chunks`` as events, and ``[DONE]``.

    The status waits for the first chunk, so that a refusal has its own status. A failure after it becomes an error
    event, as the status is sent by then. A client that goes ends the generator, and with it the work.
    """
    try:
        first = await unless_gone(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(first, chunks), media_type="text/event-stream", headers=headers)


async def _events(first: bytes, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for chunk in chunks:
            yield chunk
    except QiaoError as error:
        yield event(error_body(to_api_error(error)))
    except Exception as error:
        yield event(error_body(internal_error(error)))
    finally:
        await chunks.aclose()
    yield DONE
