"""What surrounds every route: request ids, the access log, HTTP metrics, and the limit on bodies. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qiao.server.connections import LATE
from qiao.server.errors import ApiError, error_response

access_log = logging.getLogger("qiao.access")

QUIET_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/load", "/console/state"})
"""Polled all the time: neither logged nor counted (vLLM's rule)."""

OTHER_ROUTE = "other"
"""The ``handler`` label of a path that no route matches."""


class Observe:
    """Counts and logs each exchange, without bodies, and echoes ``X-Request-Id`` when ``echo_request_id``."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        record: Callable[[str, str, int, float], None],
        log: bool,
        echo_request_id: bool,
    ) -> None:
        self._app = app
        self._record = record
        self._log = log
        self._echo = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and note the status on the way back."""
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id"))

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._echo and request_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - began
            handler = getattr(scope.get("route"), "path", OTHER_ROUTE)
            self._record(handler, scope["method"], status, seconds)
            if self._log:
                path = scope["path"][:200].encode("ascii", "backslashreplace").decode()
                access_log.info("%s %r %d %.1f ms", scope["method"], path, status, seconds * 1000)


def clean_request_id(value: str | None) -> str | None:
    """A client's id when it is 1 to 128 printable ASCII characters without spaces, else None."""
    if value and len(value) <= 128 and value.isascii() and all(33 <= ord(c) < 127 for c in value):
        return value
    return None


class HeadAsGet:
    """Answers HEAD as GET; the HTTP server leaves the body out by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on under the other method."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server looks at its own to leave the body out
        await self._app(scope, receive, send)


class LimitBody:
    """Refuses bodies above ``limit`` bytes with 413, at once when the length is declared, else as soon as it is passed;
    and with 408 those that are not there ``seconds`` after they were first asked for. None: however long they take.
    """

    def __init__(self, app: ASGIApp, *, limit: int, seconds: float | None = None) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with a counting ``receive``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._limit:
            await error_response(self._error(), scope)(scope, receive, send)
            return
        received, end, whole = 0, float("inf"), False

        async def count() -> Message:
            nonlocal received, end, whole
            if whole or self._seconds is None:  # what comes behind the body is that the client has gone
                message = await receive()
            else:
                now = asyncio.get_running_loop().time()
                end = min(end, now + self._seconds)
                try:
                    message = await asyncio.wait_for(receive(), end - now)
                except asyncio.TimeoutError:
                    text = LATE.format(seconds=self._seconds)
                    raise ApiError(408, text, headers={"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._error()
            return message

        await self._app(scope, count, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit} bytes", headers={"Connection": "close"})
