"""LoRA adapters over several engines, here and on other hosts; the engines are scripted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
from qiao.engine.request import EngineRequest
from qiao.errors import EngineDeadError, ModelError, NotFoundError, ParameterError
from qiao.lora.request import LoRARequest
from qiao.transport import EngineClient, EnginePool, EngineState
from qiao.transport.remote import RemoteSource

from tests.support.server import EOS
from tests.transport.test_client import request, until
from tests.transport.test_pool import pool
from tests.transport.test_remote import gateway, host, keys, scenario

__all__ = ["keys"]


def adapter(folder: Path, answer: str) -> str:
    """An adapter of the scripted engine that answers ``answer``."""
    folder.mkdir(exist_ok=True)
    (folder / "answer").write_text(answer)
    return str(folder)


async def text(made: EnginePool | EngineClient, number: int, request_id: str = "r") -> str:
    """The answer to a request with the adapter ``number``."""
    asked: EngineRequest = msgspec.structs.replace(request([ord("x")], request_id), adapter=number)
    ids = [token async for output in made.generate(asked) for token in output.token_ids]
    assert ids[-1] == EOS
    return bytes(ids[:-1]).decode()


def number(made: EnginePool, name: str) -> int:
    return made.adapters.loaded[name].lora_int_id


def kill(engine: EngineClient) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


async def back(engine: EngineClient, restarts: int) -> None:
    await until(lambda: engine.restarts == restarts and engine.state is EngineState.READY)


def test_every_engine_gets_them_also_one_that_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(2) as made:
            await made.adapters.load("a", adapter(tmp_path / "a", "one"))
            await made.adapters.load("b", adapter(tmp_path / "b", "two"))
            for engine in made.engines:
                assert [await text(engine, number(made, name)) for name in "ab"] == ["one", "two"]
            made.adapters.unload("a")
            with pytest.raises(NotFoundError):
                made.adapters.unload("a")
            first = made.engines[0]
            kill(first)
            await back(first, 1)
            assert await text(first, number(made, "b")) == "two"
            with pytest.raises(ParameterError):
                await text(first, 1)
            before = number(made, "b")
            await made.adapters.load("b", adapter(tmp_path / "c", "three"), replace=True)
            assert [await text(engine, number(made, "b")) for engine in made.engines] == ["three", "three"]
            for engine in made.engines:
                with pytest.raises(ParameterError):
                    await text(engine, before)
            with pytest.raises(ParameterError, match="loaded already"):
                await made.adapters.load("b", str(tmp_path / "a"))
            with pytest.raises(ModelError, match="no such folder"):
                await made.adapters.load("d", str(tmp_path / "nowhere"))
            assert list(made.adapters.loaded) == ["b"]

    asyncio.run(work())


def test_an_engine_without_an_adapter_gets_no_requests_for_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(2) as made:
            await made.adapters.load("a", adapter(tmp_path / "a", "one"))
            first, second = made.engines
            shutil.rmtree(tmp_path / "a")
            kill(first)
            await back(first, 1)
            await until(lambda: made.adapters.lacks(first, 1))
            answers = await asyncio.gather(*(text(made, 1, f"r{i}") for i in range(8)))
            assert answers == ["one"] * 8
            kill(second)
            await back(second, 1)
            await until(lambda: not made.adapters.loaded)
            with pytest.raises(EngineDeadError, match="has this adapter"):
                await text(made, 1)

    asyncio.run(work())


def test_a_request_that_waits_for_an_engine_finds_its_adapter_there(tmp_path: Path) -> None:
    async def work() -> None:
        async with pool(1, pause=0.3) as made:
            await made.adapters.load("a", adapter(tmp_path / "a", "one"))
            (engine,) = made.engines
            asked = asyncio.create_task(text(made, 1))
            await asyncio.sleep(0)  # submitted; a step takes 0.3 s
            kill(engine)
            assert await asked == "one"
            assert engine.restarts == 1

    asyncio.run(work())


def test_front_ends_of_one_host_count_for_themselves(keys: Path, tmp_path: Path) -> None:
    async def work(one: EnginePool, hosted: object) -> None:
        async with gateway(keys, hosted) as other:  # type: ignore[arg-type]
            await one.adapters.load("a", adapter(tmp_path / "a", "one"))
            await other.adapters.load("a", adapter(tmp_path / "b", "two"))
            assert (number(one, "a"), number(other, "a")) == (1, 1)
            assert [await text(one, 1), await text(other, 1)] == ["one", "two"]
            with pytest.raises(ModelError, match="no such folder"):
                await one.adapters.load("b", str(tmp_path / "nowhere"))
            with pytest.raises(ParameterError):
                await text(one, 2)
            kill(hosted.client)  # type: ignore[attr-defined]
            for each, answer in ((one, "one"), (other, "two")):
                await back(each.engines[0], 1)
                assert await text(each, 1) == answer
            one.adapters.unload("a")
            with pytest.raises(ParameterError):
                await text(one, 1)
            assert await text(other, 1) == "two"

    scenario(keys, 1, work)


def test_a_front_end_brings_its_own_from_the_start(keys: Path, tmp_path: Path) -> None:
    async def work() -> None:
        path = adapter(tmp_path / "a", "one")
        async with host(keys) as hosted:

            async def start(path: str) -> EnginePool:
                client = EngineClient(RemoteSource(hosted.service.address, keys), backoff=0.02)
                made = EnginePool([client], [LoRARequest("a", 1, path)])
                try:
                    await made.start()
                except BaseException:
                    await made.stop()
                    raise
                return made

            made = await start(path)
            assert await text(made, 1) == "one"
            await made.stop()
            with pytest.raises(ParameterError, match=r"lora_modules.*no such folder"):
                await start(str(tmp_path / "nowhere"))

    asyncio.run(work())
