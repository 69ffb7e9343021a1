"""One call of many prompts or inputs beside others: an engine that holds what it has been sent, and a route."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from qiao.engine.request import EngineRequest, SequenceOutput

from tests.server.test_security import app

WIDTH = 4
"""Sequences at a time: half of the queue of 8 that ``app`` has, which is less than its 8 sequences of a step."""


class Held:
    """Answers a request when the test lets it."""

    def __init__(self) -> None:
        self.here: list[EngineRequest] = []
        self.most = 0
        self.done = 0
        self.open = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        self.here.append(request)
        self.most = max(self.most, sum(one.params.n for one in self.here))
        await self.open.wait()
        await asyncio.sleep(0)
        self.here.remove(request)
        self.done += 1
        vector = struct.pack("<4f", 1, 2, 3, 4)
        for index in range(request.params.n):
            yield SequenceOutput(
                request_id=request.request_id, index=index, token_ids=[97], finish_reason="stop", embedding=vector
            )


def post(path: str, body: dict[str, Any], held: Held, wait: float = 0.0) -> httpx.Response:
    made = app()
    (state,) = made.state.qiao

    async def run() -> httpx.Response:
        state.client.generate = held.generate
        transport = httpx.ASGITransport(app=made, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = asyncio.create_task(client.post(path, json={"model": "M", **body}))
            while not held.here and not asked.done():
                await asyncio.sleep(0.001)
            for _ in range(20):
                await asyncio.sleep(0.001)
            await asyncio.sleep(wait)
            held.open.set()
            return await asked

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("n", "most"), [(1, 4), (2, 4), (3, 3), (7, 7)])
def test_prompts_of_one_call_leave_room_for_others(n: int, most: int, stream: bool) -> None:
    held = Held()
    body = {"prompt": ["a"] * 40, "max_tokens": 1, "n": n, "stream": stream}
    answer = post("/v1/completions", body, held)
    assert answer.status_code == 200
    assert (held.most, held.done) == (most, 40)
    if not stream:
        assert [(one["index"], one["text"]) for one in answer.json()["choices"]] == [(i, "a") for i in range(40 * n)]


def test_inputs_of_one_call_leave_room_for_others() -> None:
    held = Held()
    answer = post("/v1/embeddings", {"input": ["a"] * 40}, held)
    assert answer.status_code == 200
    assert (held.most, held.done, len(answer.json()["data"])) == (WIDTH, 40, 40)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": ["a"] * 8, "max_tokens": 1}), ("/v1/embeddings", {"input": ["a"] * 8})],
)
def test_the_deadline_counts_while_a_call_waits_for_itself(path: str, body: dict[str, Any]) -> None:
    held = Held()
    answer = post(path, {**body, "deadline_ms": 200}, held, wait=0.4)
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert held.done <= WIDTH, "those that were late have not been sent"
