"""Requests that arrive slowly or never, against Uvicorn with a small application; and what the log says of bad ones."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from qiao.errors import ParameterError
from qiao.server import errors
from qiao.server.args import ServerArgs
from qiao.server.connections import Seldom, timed_protocol
from qiao.server.middleware import LimitBody
from qiao.server.protocol.errors import ErrorBody
from starlette.middleware import Middleware

LIMIT = 0.5
HEAD = b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


def application(seconds: float | None) -> FastAPI:
    """Answers with the length of the body, one and a half of ``LIMIT`` later than it was read."""
    made = FastAPI(middleware=[Middleware(LimitBody, limit=1000, seconds=seconds)])
    errors.install(made)

    @made.post("/length")
    async def length(request: Request) -> int:
        size = len(await request.body())
        await asyncio.sleep(LIMIT * 1.5)
        return size

    return made


@asynccontextmanager
async def serving(seconds: float) -> AsyncIterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            application(seconds or None), http=timed_protocol(seconds), lifespan="off", log_config=None, ws="none"
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.force_exit = server.should_exit = True
            await running


def talk(with_: Talk, seconds: float = LIMIT) -> Any:
    async def run() -> Any:
        async with serving(seconds) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await asyncio.wait_for(with_(reader, writer), 20)
            finally:
                writer.close()

    return asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


async def closes_late(reader: asyncio.StreamReader) -> None:
    """The next answer is a whole error object of 408, and the last of the connection."""
    status, body = await answer(reader)
    error = ErrorBody.model_validate(body)
    assert (status, error.code, error.error.code, error.error.type) == (408, 408, "request_timeout", "timeout_error")
    assert error.error.message == error.message == f"the request did not arrive within {LIMIT:g} s"
    assert await reader.read() == b""


@pytest.mark.parametrize("sent", [b"", b"POST /len", HEAD[:-2], HEAD, HEAD + b"abc"])
def test_what_never_arrives_gets_408(sent: bytes) -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await closes_late(reader)

    talk(stall)


@pytest.mark.parametrize(
    "sent", [b"POST /length HTTP/1.1\r\n" + b"X: y\r\n" * 100, HEAD.replace(b" 6", b" 600") + b"a" * 99]
)
def test_a_byte_now_and_then_wins_no_time(sent: bytes) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write() -> None:
            for byte in sent:
                writer.write(bytes([byte]))
                await asyncio.sleep(LIMIT / 5)

        writing = asyncio.create_task(write())
        await closes_late(reader)
        assert not writing.done()
        writing.cancel()

    talk(drip)


def test_slow_answers_and_later_requests_have_their_time() -> None:
    """The bound is on what arrives: not on the answer, and anew for each request of a connection."""

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEAD + b"abc")
            await asyncio.sleep(LIMIT / 10)
            writer.write(b"def")
            assert await answer(reader) == (200, 6)
        writer.write(HEAD[:20])
        await closes_late(reader)

    talk(twice)


def test_without_a_bound_the_server_waits() -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in (HEAD[:10], HEAD[10:], b"abc"):
            writer.write(piece)
            await asyncio.sleep(LIMIT * 1.5)
        writer.write(b"def")
        assert await answer(reader) == (200, 6)

    talk(late, 0.0)


@pytest.mark.parametrize("seconds", [0.0, 20.0])
@pytest.mark.parametrize("head", [b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\nX: " + b"y" * 10**6, b"X: y\r\n"])
def test_a_head_without_end_is_refused(head: bytes, seconds: float) -> None:
    """httptools keeps whatever comes, and takes quadratic time for one long value."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = head * 20_000 if len(head) < 10 else head
        writer.write((b"GET / HTTP/1.1\r\n" if len(head) < 10 else b"") + lines)
        status, body = await answer(reader)
        assert (status, ErrorBody.model_validate(body).error.code) == (431, "request_header_fields_too_large")

    talk(flood, seconds)


def test_large_heads_below_the_bound_pass() -> None:
    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for size in (6, 1000):
            head = HEAD.replace(b" 6", b" %d" % size).replace(b"Host", b"X: " + b"y" * 60_000 + b"\r\nHost")
            writer.write(head + b"a" * size)
            assert await answer(reader) == (200, size)

    talk(large, 20.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_the_bound_is_a_time(seconds: float) -> None:
    with pytest.raises(ParameterError, match="request_read_timeout"):
        ServerArgs(request_read_timeout=seconds)


def test_the_log_tells_of_bad_requests_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = logging.Logger("seldom")
    log.addFilter(Seldom(60.0, most=2, clock=lambda: now))
    log.addHandler(caplog.handler)
    for second, text in [(0, "bad"), (1, "bad"), (59, "bad"), (59, "odd"), (60, "bad"), (61, "bad"), (61, "third")]:
        now = second
        log.warning(text)
    now = 62
    log.warning("third")
    log.warning("bad %d", 7)
    told = ["bad", "odd", "bad (2 more since the last such line)", "third", "third", "bad 7"]
    assert [record.getMessage() for record in caplog.records] == told
