"""Connections: how long the head of a request may take and how large it may be, and how often the log tells of what is
not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from qiao.observability.throttle import Throttle

LATE = "the request did not arrive within {seconds:g} s"

HEAD_BYTES = 64 * 1024
"""Most bytes of a request's head, and what was read with the one that is too many. httptools has no bound of its own,
and keeps all that comes until the head ends.
"""

_BODY = (
    '{{"error":{{"message":"{text}","type":"{kind}","param":null,"code":"{code}"}},'
    '"message":"{text}","type":"{kind}","param":null,"code":{status}}}'
)


def timed_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, which ends a connection with 408 when a request's head is not complete ``seconds`` after it
    was opened, or after the first byte behind an earlier answer (0: never), and with 431 when it is too large.

    Between an answer and the next request Uvicorn's keep-alive time holds.
    """
    base: Any = AutoHTTPProtocol

    class Timed(base):  # type: ignore[misc]
        """One connection."""

        _late: asyncio.TimerHandle | None = None
        _head: int | None = None
        """Bytes of the head that is arriving; None while there is none."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head is not None:
                self._head += len(data)
                if self._head > HEAD_BYTES:
                    text = f"the head of the request is larger than {HEAD_BYTES} bytes"
                    self._end(_refusal("431 Request Header Fields Too Large", "invalid_request_error", text))
            if self.cycle is None or self.cycle.response_complete:
                self._watch()
            else:
                self._unwatch()

        def on_message_begin(self) -> None:
            self._head = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head = None
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if seconds and self._late is None:
                text = LATE.format(seconds=seconds)
                self._late = self.loop.call_later(
                    seconds, lambda: self._end(_refusal("408 Request Timeout", "timeout_error", text))
                )

        def _unwatch(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _end(self, answer: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return Timed


def _refusal(status: str, kind: str, text: str) -> bytes:
    number, _, phrase = status.partition(" ")
    code = "request_timeout" if number == "408" else phrase.lower().replace(" ", "_")
    body = _BODY.format(text=text, kind=kind, code=code, status=number).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Seldom(logging.Filter):
    """Lets each message pass once in ``seconds``, and says with the next how many were left out.

    Only for messages without arguments; those with pass. At most ``most`` different ones are told apart.
    """

    def __init__(self, seconds: float = 60.0, most: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._throttle = Throttle(seconds, most, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is logged; its message may get the count."""
        if record.args or record.exc_info:
            return True
        told = self._throttle.admit(str(record.msg))
        if told is not None:
            record.msg = told
        return told is not None
