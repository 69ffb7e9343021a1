"""The engine client against a real child process with a scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest
from qiao.config import EngineArgs
from qiao.engine.request import EngineRequest
from qiao.errors import EngineDeadError, KernelError, ModelError, OverloadedError, ParameterError, QiaoError
from qiao.sampling_params import SamplingParams
from qiao.transport import EngineClient, EnginePool, EngineState
from qiao.transport.client import Source
from qiao.transport.messages import FromEngine
from qiao.transport.process import EngineProcess, HostOptions, LocalSource, launch

from tests.support.server import DIE, EOS, FAULT, FULL, RAISE, chain

OPTIONS = HostOptions(module="tests.support.server", log_level="error")
ENDLESS = {**chain("x>horse"), 100: 100}


def args(**script: object) -> EngineArgs:
    return EngineArgs(model="scripted", hf_overrides={"table": ENDLESS, **script}, check_integrity=True)


def request(prompt: list[int], request_id: str = "r", **params: object) -> EngineRequest:
    given = SamplingParams(**{"max_tokens": 16, **params})
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=given, arrival=0.0, eos_token_ids=[EOS])


@asynccontextmanager
async def running(**options: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(LocalSource(args(pause=0.001), OPTIONS), backoff=0.01, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def running_pool(sources: Sequence[Source], backoff: float) -> AsyncIterator[EnginePool]:
    """A pool of the engines behind ``sources``, all ready."""
    pool = EnginePool([EngineClient(source, backoff=backoff) for source in sources])
    await pool.start()
    await until(lambda: all(engine.state is EngineState.READY for engine in pool.engines))
    try:
        yield pool
    finally:
        await pool.stop()


async def tokens(client: EngineClient, asked: EngineRequest) -> list[int]:
    return [token async for output in client.generate(asked) for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), 60)


def test_many_requests_share_one_engine_and_counters_return_to_zero() -> None:
    async def scenario() -> None:
        async with running() as client:
            assert client.state is EngineState.READY
            assert client.info.vocab_size == 320
            asked = [request([ord("x")], f"r{i}") for i in range(20)]
            answers = await asyncio.gather(*(tokens(client, one) for one in asked))
            assert answers == [[*b"horse", EOS]] * 20
            await until(lambda: client.stats().generation_tokens == 120)
            assert (client.stats().running, client.stats().waiting) == (0, 0)
            several = [o async for o in client.generate(request([ord("x")], "n", n=3))]
            assert {o.index for o in several if o.finish_reason == "stop"} == {0, 1, 2}

    asyncio.run(scenario())


def test_leaving_early_aborts_in_the_engine() -> None:
    async def scenario() -> None:
        async with running() as client:
            async with aclosing(client.generate(request([100], max_tokens=100000))) as outputs:
                async for _ in outputs:
                    break
            await until(lambda: client.stats().running == 0 and client.stats().steps > 0)
            assert client.stats().generation_tokens < 1000

            task = asyncio.create_task(tokens(client, request([100], "cancelled", max_tokens=100000)))
            await until(lambda: client.stats().running == 1)
            task.cancel()
            await until(lambda: client.stats().running == 0)

    asyncio.run(scenario())


def test_one_answer_is_dropped_and_its_siblings_go_on() -> None:
    async def scenario() -> None:
        async with running() as client:
            async with aclosing(client.generate(request([100], n=3, max_tokens=10**6))) as outputs:
                await anext(outputs)
                client.abort(["r"], 1)
                await until(lambda: client.stats().running == 2)
                late = [(await anext(outputs)).index for _ in range(2000)]
                assert set(late[1000:]) == {0, 2}
            await until(lambda: client.stats().running == 0)

    asyncio.run(scenario())


def test_errors_of_one_request_arrive_as_themselves_and_hurt_nobody() -> None:
    async def scenario() -> None:
        async with running() as client:
            with pytest.raises(OverloadedError, match="queue is full") as overload:
                await tokens(client, request([FULL]))
            assert overload.value.retry_after == 3
            with pytest.raises(KernelError, match="boom"):
                await tokens(client, request([FAULT]))
            pending = asyncio.create_task(tokens(client, request([100], "same", max_tokens=50)))
            await asyncio.sleep(0)
            with pytest.raises(ParameterError, match="already running"):
                await tokens(client, request([100], "same"))
            assert len(await pending) == 50
            assert client.restarts == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("poison", "cause"), [(DIE, "SIGKILL"), (RAISE, "ZeroDivisionError: a bug in the engine")])
def test_a_dead_engine_fails_its_requests_and_is_started_again(poison: int, cause: str) -> None:
    async def scenario() -> None:
        async with running() as client:
            first = client.pid
            other = asyncio.create_task(tokens(client, request([100], "other", max_tokens=10**6)))
            await until(lambda: client.stats().running == 1)
            with pytest.raises(EngineDeadError, match=cause):
                await tokens(client, request([poison], "poison"))
            with pytest.raises(EngineDeadError, match=cause):
                await other
            assert client.state is not EngineState.READY
            with pytest.raises(EngineDeadError, match="starting"):
                await tokens(client, request([ord("x")], "too soon"))
            await until(lambda: client.state is EngineState.READY)
            assert client.pid != first
            assert client.restarts == 1
            assert await tokens(client, request([ord("x")], "after")) == [*b"horse", EOS]

    asyncio.run(scenario())


def test_an_engine_that_hangs_with_work_is_replaced_and_a_silent_one_without_is_not() -> None:
    limit = 2.0

    async def scenario() -> None:
        given = dataclasses.replace(args(pause=0.001), step_timeout=limit)
        client = EngineClient(LocalSource(given, OPTIONS), backoff=0.01)
        await client.start()
        slow = client.generate(request([ord("x")], "slow"))
        await anext(slow)
        await until(lambda: client.stats().steps > 0 and client.stats().running == 0)
        os.kill(client.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(limit + 1.0)
        os.kill(client.pid or 0, signal.SIGCONT)
        assert [token async for output in slow for token in output.token_ids] == [*b"orse", EOS]
        assert client.restarts == 0, "it owed nothing"
        for name in ("runs", "waits"):
            begun = asyncio.create_task(tokens(client, request([100], name, max_tokens=10**6)))
            if name == "runs":
                await until(lambda: client.stats().running == 1)
            os.kill(client.pid or 0, signal.SIGSTOP)
            more = asyncio.create_task(ask_again_and_again(client))
            with pytest.raises(EngineDeadError, match=r"said nothing about its work for [2-9] s.*step-timeout"):
                await asyncio.wait_for(begun, 60)
            more.cancel()
            await until(lambda: client.state is EngineState.READY)
        assert client.restarts == 2
        await client.stop()

    async def ask_again_and_again(client: EngineClient) -> None:
        for number in range(1000):  # new requests are no sign of life
            asyncio.create_task(tokens(client, request([ord("x")], f"more{number}"))).add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )
            await asyncio.sleep(0.1)

    asyncio.run(scenario())


def test_an_engine_that_loads_is_started_again_without_end_and_one_that_does_not_is_given_up(tmp_path: Path) -> None:
    stop = tmp_path / "stop"

    async def scenario() -> None:
        client = EngineClient(LocalSource(args(fail_once_there=str(stop)), OPTIONS), backoff=0.01, max_restarts=1)
        await client.start()
        for _ in range(2):
            await until(lambda: client.state is EngineState.READY)
            with pytest.raises(EngineDeadError):
                await tokens(client, request([DIE]))
        stop.touch()
        await until(lambda: client.state is EngineState.DEAD)
        assert client.restarts >= 2, "more ends than bad starts it would bear"
        with pytest.raises(EngineDeadError, match=r"not running.*is there"):
            await tokens(client, request([ord("x")]))
        await client.stop()

    asyncio.run(scenario())


def test_a_failed_start_carries_the_childs_own_cause() -> None:
    async def scenario(expected: type[QiaoError], text: str, **script: object) -> None:
        client = EngineClient(LocalSource(args(**script), OPTIONS))
        with pytest.raises(expected, match=text):
            await client.start()
        assert client.state is EngineState.DEAD
        await client.stop()

    asyncio.run(scenario(ModelError, "no weights there; download", fail="no weights there; download them first"))
    asyncio.run(scenario(QiaoError, "KeyError: 'not a planned error'", crash=True))


def test_a_reader_that_falls_behind_loses_its_request_only() -> None:
    async def scenario() -> None:
        async with running(max_unread=5) as client:
            outputs = client.generate(request([100], max_tokens=10**6))
            await anext(outputs)
            await until(lambda: client.stats().steps > 0 and client.stats().running == 0)
            with pytest.raises(OverloadedError, match="more slowly"):
                async for _ in outputs:
                    pass
            assert await tokens(client, request([ord("x")], "next", max_tokens=2)) == [*b"ho"]

    asyncio.run(scenario())


def test_a_reader_with_a_backlog_leaves_turns_to_others() -> None:
    async def scenario() -> None:
        async with running() as client:
            outputs = client.generate(request([100], max_tokens=1000))
            await anext(outputs)
            await until(lambda: client.stats().steps > 0 and client.stats().running == 0)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            assert len([output async for output in outputs]) == 999
            assert turns >= 50
            task.cancel()

    asyncio.run(scenario())


PARENT = """
import asyncio, sys
from qiao.config import EngineArgs
from qiao.transport import EngineClient
from qiao.transport.process import HostOptions, LocalSource
async def main():
    client = EngineClient(LocalSource(EngineArgs(model="scripted"), HostOptions(module="tests.support.server")))
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_child_ignores_terminal_signals_and_ends_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
        assert child.is_running()
        parent.kill()
        parent.wait()
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_socket_has_no_name_that_others_could_connect_to() -> None:
    async def scenario() -> None:
        async with running() as client:
            found = psutil.Process(client.pid).net_connections(kind="unix")
            assert found
            assert not any(connection.laddr or connection.raddr for connection in found)

    asyncio.run(scenario())


def test_a_message_that_cannot_be_taken_in_ends_the_child() -> None:
    async def scenario() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

        def received(message: FromEngine) -> None:
            raise ValueError("not understood")

        process = await EngineProcess.attach(launch(args(), OPTIONS), received)
        try:
            assert "SIGKILL" in str(await asyncio.wait_for(process.wait(), 60))
            assert [str(error) for error in errors] == ["not understood"]
        finally:
            process.close()

    asyncio.run(scenario())
