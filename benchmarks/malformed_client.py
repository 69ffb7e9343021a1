"""Sending malformed requests over bare sockets, and judging what comes back."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

try:
    from benchmarks.malformed_requests import CUT, PEEK, READ, WAIT, Bad
except ImportError:  # run as a script
    from malformed_requests import CUT, PEEK, READ, WAIT, Bad  # type: ignore[no-redef]

HANGS_SECONDS = 60.0
"""A whole request that has no end of its answer by then counts as hanging."""

WAIT_SECONDS = 2.0

DOCUMENTED = {503: b"retry-after:", 504: b""}
"""Statuses from 500 that the server's document explains, and the header that must come with them."""

PARSER_SAYS = b"Invalid HTTP request received."
"""The HTTP library's own words for what is not HTTP."""

MAX_READ = 1 << 20
"""Bytes of an answer that are looked at."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass
class Outcome:
    """What became of one request: ``status`` of the (last) answer, 0 for none; ``wrong`` says what must not be."""

    bad: Bad
    status: int = 0
    seconds: float = 0.0
    wrong: str = ""
    answer: str = ""


@dataclass
class Tally:
    """All outcomes so far, in few numbers."""

    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[dict[str, object]] = field(default_factory=list)
    answers: list[Outcome] = field(default_factory=list)
    sent: int = 0
    slowest: list[tuple[float, str, str]] = field(default_factory=list)

    def note(self, outcome: Outcome) -> None:
        """Count one."""
        self.sent += 1
        label = str(outcome.status) if outcome.status else "none"
        self.by_kind.setdefault(outcome.bad.kind, Counter())[label] += 1
        if outcome.wrong:
            found = {"kind": outcome.bad.kind, "request": outcome.bad.what[:400], "status": outcome.status}
            self.faults.append({**found, "wrong": outcome.wrong, "answer": outcome.answer[:400]})
        self.slowest = sorted([*self.slowest, (outcome.seconds, outcome.bad.kind, outcome.bad.what[:200])])[-10:]


async def send(host: str, port: int, bad: Bad) -> Outcome:
    """Send one request on a connection of its own, and judge the answer."""
    outcome, began = Outcome(bad), time.monotonic()
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), HANGS_SECONDS)
    except (OSError, asyncio.TimeoutError) as error:
        outcome.wrong = f"no connection: {error!r}"
        return outcome
    try:
        data = await asyncio.wait_for(_exchange(reader, writer, bad), HANGS_SECONDS)
        judge(outcome, data)
    except asyncio.TimeoutError:
        outcome.wrong = f"no end of the answer within {HANGS_SECONDS:.0f} s"
    finally:
        writer.transport.abort()
        outcome.seconds = time.monotonic() - began
    return outcome


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bad: Bad) -> bytes:
    try:
        for number, piece in enumerate(bad.pieces):
            if number and bad.pause:
                await asyncio.sleep(bad.pause)
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass  # the server has closed: it may have said why
    if bad.end == CUT:
        return b""
    data = b""
    with suppress(ConnectionError, asyncio.TimeoutError):
        while piece := await asyncio.wait_for(reader.read(1 << 16), WAIT_SECONDS if bad.end == WAIT else None):
            if len(data) < MAX_READ:
                data += piece
            if bad.end == PEEK:
                break
    return data


def judge(outcome: Outcome, data: bytes) -> None:
    """Note the status of ``data``, and what is wrong with it."""
    statuses = [int(found) for found in _STATUS.findall(data)]
    outcome.status = statuses[-1] if statuses else 0
    outcome.answer = data[:2000].decode("utf-8", "replace")
    if outcome.bad.end == READ and not statuses and outcome.bad.kind != "oversized":
        outcome.wrong = "closed without an answer"
    for status in statuses:
        if status >= 500 and (status not in DOCUMENTED or DOCUMENTED[status] not in data.lower()):
            outcome.wrong = f"status {status}"
    if not outcome.wrong and outcome.bad.end == READ:
        outcome.wrong = _shape(outcome.status, data)


def _shape(status: int, data: bytes) -> str:
    """What is wrong with the error object of an answer, or with one within a stream."""
    head, _, body = data.partition(b"\r\n\r\n")
    if status >= 400 and body and body != PARSER_SAYS:
        try:
            if not json.loads(body)["error"]["message"]:
                return "an error without a message"
        except (ValueError, KeyError, TypeError):
            return "an error without an error object"
    if b"text/event-stream" in head:
        for line in body.splitlines():
            if line.startswith(b"data: {") and b'"error"' in line:
                with suppress(ValueError, KeyError, TypeError, AttributeError):
                    code = json.loads(line[6:]).get("code")
                    if isinstance(code, int) and code >= 500 and code not in DOCUMENTED:
                        return f"an error of {code} within the stream"
    return ""


async def bombard(
    url: str,
    stream: Iterator[Bad],
    *,
    rate: float,
    at_once: int,
    done: Callable[[Outcome], None],
) -> None:
    """Send ``stream``, at most ``rate`` requests a second (0: as fast as they end), ``at_once`` at the same time."""
    host, _, port = url.removeprefix("http://").partition(":")
    began, sent = time.monotonic(), 0

    async def work() -> None:
        nonlocal sent
        for bad in stream:
            sent += 1
            if rate:
                await asyncio.sleep(max(0.0, began + sent / rate - time.monotonic()))
            done(await send(host, int(port), bad))

    await asyncio.gather(*(work() for _ in range(at_once)))
