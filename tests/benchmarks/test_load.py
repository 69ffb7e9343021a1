"""The client against a small server of its own: streams, chunk borders, failures."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from benchmarks.comparison.load import completion_body, run_load
from benchmarks.comparison.stats import Timing
from benchmarks.comparison.workload import Request

HEAD = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def events(*data: object) -> bytes:
    return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in data)


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


def text(words: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": words}]}


def ask(
    answer: bytes, count: int = 1, concurrency: int | None = 1
) -> tuple[list[Timing], list[dict[str, object]], int]:
    """Send ``count`` requests to a server that answers ``answer``: timings, bodies, most at a time."""
    bodies: list[dict[str, object]] = []
    running = [0, 0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running[0] += 1
        running[1] = max(running)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        bodies.append(json.loads(await reader.readexactly(length)))
        await asyncio.sleep(0.01)
        writer.write(answer)
        await writer.drain()
        running[0] -= 1
        writer.close()

    async def main() -> list[Timing]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        requests = [Request(0.0, f"prompt {i}", 2, 3) for i in range(count)]
        async with server:
            return (await run_load(port, requests, concurrency, completion_body))[0]

    return asyncio.run(main()), bodies, running[1]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_in_pieces_of_any_size(size: int) -> None:
    body = events(text("a"), text(""), text("b"), text("c"), USAGE) + b"data: [DONE]\n\n"
    (timing,), (sent,), _ = ask(HEAD.encode() + chunked(body, size))
    assert timing.error is None
    assert (timing.prompt_tokens, timing.completion_tokens, len(timing.gaps)) == (7, 3, 2)  # the empty text counts not
    assert timing.ttft is not None and 0 < timing.ttft <= timing.last <= timing.seconds
    assert sent["max_tokens"] == 3 and sent["ignore_eos"] is True and sent["stream"] is True


def test_a_body_that_ends_with_the_connection() -> None:
    (timing,), _, _ = ask(b"HTTP/1.1 200 OK\r\n\r\n" + events(text("a"), USAGE))
    assert timing.error is None and timing.completion_tokens == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\ntoo many", "503: too many"),
        (HEAD.encode() + chunked(events({"error": {"message": "boom"}}), 99), "boom"),
        (HEAD.encode() + chunked(events(text("a")), 99), "no usage"),
        (HEAD.encode() + b"20\r\ndata: {", "Incomplete"),
        (b"", "Incomplete"),
    ],
)
def test_failures_are_noted(answer: bytes, said: str) -> None:
    (timing,), _, _ = ask(answer)
    assert timing.error is not None and said in timing.error


@pytest.mark.parametrize(("concurrency", "limit"), [(2, 2), (None, 5)])
def test_a_closed_loop_keeps_to_its_limit(concurrency: int | None, limit: int) -> None:
    timings, bodies, most = ask(HEAD.encode() + chunked(events(text("a"), USAGE), 99), 5, concurrency)
    assert len(timings) == len(bodies) == 5 and most <= limit
    assert {body["prompt"] for body in bodies} == {f"prompt {i}" for i in range(5)}


def test_a_cut_run_ends_when_all_have_begun() -> None:
    """The first two answers end; those of the last two go on for ever, and the server sees that the client has gone."""
    gone: list[int] = []
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        number = count
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + events(text("a"), text("b")))
        if number <= 2:
            writer.write(events({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}))
            writer.close()
            return
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(events(text("c")))
                await writer.drain()
                await asyncio.sleep(0.01)
        gone.append(number)
        writer.close()

    async def main() -> list[Timing]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        requests = [Request(0.0, "prompt", 2, 3) for _ in range(4)]
        async with server:
            timings = (await run_load(port, requests, 2, completion_body, cut=True))[0]
            while len(gone) < 2:
                await asyncio.sleep(0.01)
            return timings

    timings = asyncio.run(asyncio.wait_for(main(), 20))
    assert [t.cut for t in timings] == [False, False, True, True]
    assert all(t.error is None and t.ttft is not None for t in timings)
    assert [t.completion_tokens for t in timings] == [6, 6] + [3 * t.texts for t in timings[2:]]
