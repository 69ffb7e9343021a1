"""Several engines of one model: where requests go, and what happens to them when an engine ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from qiao.engine.request import EngineRequest
from qiao.errors import DeadlineError, EngineDeadError
from qiao.sampling_params import SamplingParams
from qiao.transport import EngineClient, EnginePool, EngineState
from qiao.transport.process import LocalSource
from qiao.transport.routing import CHUNK, Desk, choose, chunks_of

from tests.support.server import DIE, EOS
from tests.transport.test_client import OPTIONS, args, request, running_pool, until


@asynccontextmanager
async def pool(count: int, **script: object) -> AsyncIterator[EnginePool]:
    sources = [LocalSource(args(**{"pause": 0.002, **script}), OPTIONS) for _ in range(count)]
    async with running_pool(sources, 0.01) as made:
        yield made


async def tokens(made: EnginePool, asked: EngineRequest) -> list[int]:
    return [token async for output in made.generate(asked) for token in output.token_ids]


def kill(engine: EngineClient) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def test_requests_without_output_are_sent_again_and_others_end_with_the_cause() -> None:
    async def scenario() -> None:
        async with pool(1, pause=0.3) as made:
            (engine,) = made.engines
            with_output = asyncio.create_task(tokens(made, request([100], "old", max_tokens=10**6)))
            await until(lambda: engine.stats().generation_tokens > 0)
            without = asyncio.create_task(tokens(made, request([ord("x")], "new")))
            await asyncio.sleep(0)  # submitted; the step takes 0.3 s
            kill(engine)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await with_output
            assert await without == [*b"horse", EOS], "whole, and once"
            assert made.restarts == 1

    asyncio.run(scenario())


def test_a_dead_engines_requests_go_to_another_at_once_and_it_is_taken_back() -> None:
    async def scenario() -> None:
        async with pool(2) as made:
            first, second = made.engines
            work = [asyncio.create_task(tokens(made, request([ord("x")], f"r{i}"))) for i in range(6)]
            await asyncio.sleep(0)
            kill(first)
            assert await asyncio.gather(*work) == [[*b"horse", EOS]] * 6
            await until(lambda: first.state is EngineState.READY and first.restarts == 1)
            assert second.restarts == 0
            again = [asyncio.create_task(tokens(made, request([100], f"s{i}", max_tokens=200))) for i in range(4)]
            await until(lambda: first.stats().running == 2 and second.stats().running == 2)
            for task in again:
                task.cancel()
            await until(lambda: sum(one.stats().running for one in made.engines) == 0)

    asyncio.run(scenario())


def test_a_request_that_kills_engines_is_not_sent_for_ever() -> None:
    async def scenario() -> None:
        async with pool(2) as made:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await tokens(made, request([DIE]))
            await until(lambda: made.restarts == 2 and made.state is EngineState.READY)
            assert await tokens(made, request([ord("x")])) == [*b"horse", EOS]

    asyncio.run(scenario())


def test_waiting_for_an_engine_ends_with_the_deadline_and_with_the_server() -> None:
    async def scenario() -> None:
        async with pool(1, pause=0.3) as made:
            (engine,) = made.engines
            engine._backoff = 60.0
            late = EngineRequest(
                request_id="late",
                prompt_token_ids=[ord("x")],
                params=SamplingParams(max_tokens=4),
                arrival=0.0,
                max_wait=0.2,
            )
            work = [asyncio.create_task(tokens(made, one)) for one in (late, request([ord("x")], "patient"))]
            await asyncio.sleep(0)
            kill(engine)
            with pytest.raises(DeadlineError):
                await work[0]
            assert not work[1].done()
            made.fail_running("the server is shutting down")
            with pytest.raises(EngineDeadError, match="shutting down"):
                await work[1]
            made.kill()

    asyncio.run(scenario())


def test_new_requests_wait_for_the_only_engine_but_not_too_many_and_not_too_long() -> None:
    async def scenario() -> None:
        source = LocalSource(args(pause=0.002), OPTIONS)
        made = EnginePool([EngineClient(source, backoff=0.3)], patience=30.0, max_waiting=2)
        await made.start()
        (engine,) = made.engines
        kill(engine)
        await until(lambda: engine.state is not EngineState.READY)
        work = [asyncio.create_task(tokens(made, request([ord("x")], f"r{i}"))) for i in range(2)]
        left = asyncio.create_task(tokens(made, request([ord("x")], "left")))
        await until(lambda: made.waiting == 2)
        with pytest.raises(EngineDeadError, match=r"2 requests wait.*SIGKILL"):
            await left
        work[1].cancel()
        await until(lambda: made.waiting == 1)
        assert await work[0] == [*b"horse", EOS]
        assert made.waiting == 0
        assert await tokens(made, request([ord("x")], "r1")) == [*b"horse", EOS], "a cancelled one leaves nothing"
        engine._backoff, made._patience = 60.0, 0.1
        kill(engine)
        await until(lambda: engine.state is not EngineState.READY)
        with pytest.raises(EngineDeadError, match="starting"):
            await tokens(made, request([ord("x")], "patient"))
        made.kill()
        with pytest.raises(EngineDeadError, match="stopped"):
            await tokens(made, request([ord("x")], "late"))
        await made.stop()

    asyncio.run(scenario())


def test_aborting_one_answer_reaches_its_engine() -> None:
    async def scenario() -> None:
        async with pool(2) as made:
            async with aclosing(made.generate(request([100], n=3, max_tokens=10**6))) as outputs:
                await anext(outputs)
                made.abort(["r"], 1)
                await until(lambda: sum(one.stats().running for one in made.engines) == 2)
            await until(lambda: sum(one.stats().running for one in made.engines) == 0)

    asyncio.run(scenario())


def prompt(*ids: int, salt: str = "") -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=list(ids), params=SamplingParams(max_tokens=1), arrival=0.0, cache_salt=salt
    )


def test_a_prompt_goes_where_its_beginning_is_unless_others_have_much_less_to_do() -> None:
    shared = list(range(10 * CHUNK))
    desks = [Desk(10**6), Desk(10**6)]
    desks[1].remember(chunks_of(prompt(*shared, 1)))
    asked = prompt(*shared, 2, 3)
    chunks, length = chunks_of(asked), len(asked.prompt_token_ids)
    assert desks[1].known(chunks) == 10 * CHUNK
    assert choose(desks, length, chunks) == 1
    desks[1].sequences = 10
    assert choose(desks, length, chunks) == 0
    desks[0].prompt_tokens = 10**5
    assert choose(desks, length, chunks) == 1
    assert choose([Desk(1), Desk(1)], 5, []) == 0


def test_beginnings_are_kept_apart_by_salt_and_forgotten_when_there_are_too_many() -> None:
    ids = list(range(3 * CHUNK + 1))
    desk = Desk(4 * CHUNK)
    desk.remember(chunks_of(prompt(*ids)))
    assert desk.known(chunks_of(prompt(*ids))) == 3 * CHUNK
    assert desk.known(chunks_of(prompt(*ids, salt="other"))) == 0
    assert desk.known(chunks_of(prompt(*ids[: CHUNK + 1], 7, 7, *ids))) == CHUNK
    desk.remember(chunks_of(prompt(*range(1000, 1000 + 3 * CHUNK + 1))))
    assert desk.known(chunks_of(prompt(*ids))) == CHUNK, "the end goes first"
