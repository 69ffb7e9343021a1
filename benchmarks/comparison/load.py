"""The client: streams completions from an OpenAI-compatible server and notes when text comes.

Written on bare sockets, because the client shares the cores with the server it measures: an HTTP library costs several
times as much a token. One connection a request, on this machine only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from .stats import Timing, estimate_cut
from .workload import Request

Body = Callable[[Request], dict[str, Any]]
"""Makes the JSON body of a request."""


def completion_body(request: Request) -> dict[str, Any]:
    """A greedy completion of exactly ``request.output_tokens`` tokens, in the dialect that most servers know."""
    return {
        "model": "m",
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def plain_body(request: Request) -> dict[str, Any]:
    """The same without fields that are not OpenAI's, for a server that refuses them; its model must know no end."""
    return {"prompt": request.prompt, "max_tokens": request.output_tokens, "stream": True}


async def run_load(
    port: int, requests: list[Request], concurrency: int | None, body: Body, cut: bool = False
) -> tuple[list[Timing], float]:
    """Send all requests to the server on ``port``; ``concurrency`` at a time, or at their own times where it is None.

    With ``cut`` the connections of those that still run are closed as soon as each has its first text, or has ended.
    Returns one ``Timing`` a request and the seconds that all took.
    """
    gate = asyncio.Semaphore(concurrency or len(requests))
    all_began = asyncio.Event()
    silent = set(range(len(requests)))
    start = time.perf_counter()

    def began(number: int) -> None:
        silent.discard(number)
        if not silent:
            all_began.set()

    async def one(number: int, request: Request) -> Timing:
        if concurrency is None:
            await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
        async with gate:
            sent = time.perf_counter() - start
            timing = await stream(port, body(request), partial(began, number))
            timing.sent = sent
            return timing

    tasks = [asyncio.ensure_future(one(*numbered)) for numbered in enumerate(requests)]
    if cut and tasks:
        await all_began.wait()
        for task in tasks:
            task.cancel()
    timings = list(await asyncio.gather(*tasks))
    estimate_cut(timings)
    return timings, time.perf_counter() - start


async def stream(port: int, body: dict[str, Any], began: Callable[[], None] = lambda: None) -> Timing:
    """Send one completion and read its stream to the end; ``began`` is told of the first text, and again of the end.

    A failure is noted in the timing, not raised, and so is that the task was cancelled.
    """
    timing = Timing()
    start = time.perf_counter()
    try:
        async for data in _events(port, json.dumps(body).encode()):
            _note(timing, data, time.perf_counter() - start)
            if timing.ttft is not None and not timing.gaps:
                began()
    except asyncio.CancelledError:
        timing.cut = True
    except (OSError, ValueError, EOFError) as error:
        timing.error = f"{type(error).__name__}: {error}"[:300]
    timing.seconds = time.perf_counter() - start
    if timing.error is None and not timing.completion_tokens and not timing.cut:
        timing.error = "no usage came"
    began()
    return timing


def _note(timing: Timing, data: bytes, elapsed: float) -> None:
    event = json.loads(data)
    if event.get("error"):
        timing.error = str(event["error"])[:300]
    usage = event.get("usage")
    if usage:
        timing.prompt_tokens = usage.get("prompt_tokens") or 0
        timing.completion_tokens = usage.get("completion_tokens") or 0
    if any(choice.get("text") for choice in event.get("choices") or ()):
        if timing.ttft is None:
            timing.ttft = elapsed
        else:
            timing.gaps.append(elapsed - timing.last)
        timing.last = elapsed


async def _events(port: int, body: bytes) -> AsyncIterator[bytes]:
    """The data of each server-sent event but the closing ``[DONE]``. Raises ``ValueError`` for a status but 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, chunked = await _head(reader)
        if status != 200:
            raise ValueError(f"status {status}: {(await reader.read(2000)).decode(errors='replace')}")
        rest = b""
        async for piece in _pieces(reader, chunked):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield data
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status of the answer, and whether its body is chunked."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    return int(lines[0].split(" ")[1]), any(
        line.startswith("transfer-encoding:") and "chunked" in line for line in lines
    )


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    while True:
        if chunked:
            size = int((await reader.readline()).split(b";")[0], 16)
            piece = await reader.readexactly(size)
            await reader.readexactly(2)
        else:
            piece = await reader.read(1 << 16)
        if not piece:
            return
        yield piece
