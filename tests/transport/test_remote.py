"""Engines on other hosts: keys, loss of a connection, of an engine, draining; all over TCP on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq.asyncio
from qiao.engine.request import EngineRequest
from qiao.errors import EngineDeadError, OverloadedError, ParameterError
from qiao.transport import EngineClient, EnginePool, EngineState
from qiao.transport.curve import EngineKeys, GatewayKeys, make_keys
from qiao.transport.process import LocalSource
from qiao.transport.remote import RemoteSource, check_address
from qiao.transport.service import EngineService

from tests.support.server import EOS, FULL
from tests.transport.test_client import OPTIONS, args, request, running_pool, until


@dataclass
class Host:
    """An engine's host, in this process but for the engine."""

    client: EngineClient
    service: EngineService


@asynccontextmanager
async def host(keys: Path, **script: object) -> AsyncIterator[Host]:
    client = EngineClient(LocalSource(args(**{"pause": 0.002, **script}), OPTIONS), backoff=0.01)
    service = EngineService(client, "tcp://127.0.0.1:0", EngineKeys.read(keys))
    await client.start()
    work = asyncio.create_task(service.run())
    try:
        yield Host(client, service)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await client.stop()
        service.close()


@asynccontextmanager
async def gateway(keys: Path, *hosts: Host) -> AsyncIterator[EnginePool]:
    async with running_pool([RemoteSource(one.service.address, keys) for one in hosts], 0.02) as pool:
        yield pool


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def scenario(keys: Path, count: int, work: Callable[..., Awaitable[None]], **script: object) -> None:
    """``work(pool, *hosts)`` with ``count`` engines behind one front end."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            hosts = [await stack.enter_async_context(host(keys, **script)) for _ in range(count)]
            pool = await stack.enter_async_context(gateway(keys, *hosts))
            await asyncio.wait_for(work(pool, *hosts), 60)

    asyncio.run(run())


async def tokens(pool: EnginePool, asked: EngineRequest) -> list[int]:
    return [token async for output in pool.generate(asked) for token in output.token_ids]


HORSE = [*b"horse", EOS]


def test_answers_errors_counters_and_aborts_cross_the_wire(keys: Path) -> None:
    async def work(pool: EnginePool, one: Host) -> None:
        assert pool.info.vocab_size == 320
        answers = await asyncio.gather(*(tokens(pool, request([ord("x")], f"r{i}")) for i in range(20)))
        assert answers == [HORSE] * 20
        several = [output async for output in pool.generate(request([ord("x")], "n", n=3))]
        assert {output.index for output in several if output.finish_reason == "stop"} == {0, 1, 2}
        with pytest.raises(OverloadedError, match="queue is full") as error:
            await tokens(pool, request([FULL]))
        assert error.value.retry_after == 3
        async with aclosing(pool.generate(request([100], max_tokens=10**6))) as outputs:
            await anext(outputs)
        await until(lambda: one.client.stats().running == 0 and one.service.serving == 0)
        await until(lambda: pool.engines[0].stats().generation_tokens >= 20 * 6)

    scenario(keys, 1, work)


def test_two_front_ends_may_use_the_same_ids(keys: Path) -> None:
    async def work(pool: EnginePool, one: Host) -> None:
        async with gateway(keys, one) as other:
            both = [tokens(each, request([100], "same", max_tokens=100)) for each in (pool, other)]
            assert await asyncio.gather(*both) == [[100] * 100] * 2

    scenario(keys, 1, work)


def test_a_killed_engine_loses_only_requests_with_output_and_is_taken_back(keys: Path) -> None:
    async def work(pool: EnginePool, one: Host, two: Host) -> None:
        long = [asyncio.create_task(tokens(pool, request([100], f"l{i}", max_tokens=500))) for i in range(2)]
        await until(lambda: one.client.stats().running == two.client.stats().running == 1)
        fresh = [asyncio.create_task(tokens(pool, request([ord("x")], f"r{i}"))) for i in range(8)]
        await asyncio.sleep(0)
        assert one.client.pid is not None
        os.kill(one.client.pid, signal.SIGKILL)
        ends = await asyncio.gather(*long, return_exceptions=True)
        assert sorted(type(end) for end in ends if not isinstance(end, list)) == [EngineDeadError]
        assert [end for end in ends if isinstance(end, list)] == [[100] * 500]
        assert await asyncio.gather(*fresh) == [HORSE] * 8
        await until(lambda: all(engine.state is EngineState.READY for engine in pool.engines))
        assert one.client.restarts == 1

    scenario(keys, 2, work)


def test_a_draining_engine_finishes_what_runs_and_gets_nothing_new(keys: Path) -> None:
    async def work(pool: EnginePool, one: Host, two: Host) -> None:
        long = [asyncio.create_task(tokens(pool, request([100], f"l{i}", max_tokens=300))) for i in range(2)]
        await until(lambda: one.service.serving == two.service.serving == 1)
        drained = asyncio.create_task(one.service.drain(60))
        await until(lambda: EngineState.DRAINING in {engine.state for engine in pool.engines})
        before = one.client.stats().prompt_tokens
        assert await asyncio.gather(*(tokens(pool, request([ord("x")], f"r{i}")) for i in range(6))) == [HORSE] * 6
        assert one.client.stats().prompt_tokens == before
        assert await asyncio.gather(*long) == [[100] * 300] * 2
        await drained

    scenario(keys, 2, work)


def test_a_side_that_falls_silent_is_given_up(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an end of the connection, as when a cable is pulled."""
    monkeypatch.setattr("qiao.transport.service.SILENT_SECONDS", 0.3)

    async def work(pool: EnginePool, one: Host) -> None:
        task = asyncio.create_task(tokens(pool, request([100], max_tokens=10**6)))
        await until(lambda: one.client.stats().running == 1)
        link = pool.engines[0]._link
        monkeypatch.setattr(link, "send", lambda message: None)
        await until(lambda: one.client.stats().running == 0)
        monkeypatch.setattr("qiao.transport.remote.SILENT_SECONDS", 0.0)
        with pytest.raises(EngineDeadError, match="silent"):
            await task

    scenario(keys, 1, work)


def test_strangers_are_kept_out_and_nonsense_ends_its_own_session(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "others")

    async def work(pool: EnginePool, one: Host) -> None:
        address = one.service.address
        mixed = tmp_path / "mixed"  # a stranger's own pair, and the engine's public key
        mixed.mkdir()
        for name, folder in (("gateway.key_secret", "others"), ("engine.key", "keys")):
            (mixed / name).write_bytes((tmp_path / folder / name).read_bytes())
        for folder in (mixed, tmp_path / "others"):
            stranger = EngineClient(RemoteSource(address, folder), backoff=0.02)
            start = asyncio.create_task(stranger.start())
            await until(lambda who=stranger: "key" in who.failure)
            assert not stranger.known
            start.cancel()
            await stranger.stop()
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        context, own = zmq.asyncio.Context(), GatewayKeys.read(keys)
        friend = context.socket(zmq.DEALER)
        friend.curve_publickey, friend.curve_secretkey, friend.curve_serverkey = own.public, own.secret, own.engine
        friend.connect(address)
        await friend.send(b"\xc1 no message at all")
        assert b"failed" in await friend.recv()
        context.destroy(linger=0)
        assert await tokens(pool, request([ord("x")])) == HORSE

    scenario(keys, 1, work)


def test_key_files(keys: Path, tmp_path: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()}
    assert modes == {"engine.key": 0o644, "engine.key_secret": 0o600, "gateway.key": 0o644, "gateway.key_secret": 0o600}
    with pytest.raises(ParameterError, match="there already"):
        make_keys(keys)
    with pytest.raises(ParameterError, match="qiao engine-keys"):
        GatewayKeys.read(tmp_path / "nowhere")
    (keys / "gateway.key").unlink()
    with pytest.raises(ParameterError, match="nobody"):
        EngineKeys.read(keys)
    for wrong in ("host:1", "tcp://host", "tcp://:1", "tcp://host:99999", "ipc://x:1"):
        with pytest.raises(ParameterError, match="--engine"):
            check_address("--engine", wrong)
