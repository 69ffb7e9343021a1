"""All engines of one model, behind the interface of one: where each request goes, and what happens when one ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import msgspec

from qiao.engine.request import EngineInfo, EngineRequest, SequenceOutput
from qiao.errors import DeadlineError, EngineDeadError, ParameterError
from qiao.lora.request import LoRARequest
from qiao.transport.adapters import Adapters
from qiao.transport.client import EngineClient, EngineState, unavailable
from qiao.transport.routing import Desk, choose, chunks_of

ATTEMPTS = 2
"""How often a request that has brought no output is sent: one that kills engines shall not kill them all."""

PATIENCE_SECONDS = 60.0
"""How long a request without output waits for an engine that starts again."""

MAX_WAITING = 1024
"""How many new requests do so at a time."""

POLL_SECONDS = 0.02

_HOPEFUL = (EngineState.STARTING, EngineState.DRAINING)


class EnginePool:
    """Engines of one model, used from one asyncio loop.

    A request whose engine ends before its first output goes to another one, or to the same one once it is back; one
    with output ends with the error, since a part of the answer has been sent. New requests that find no engine ready
    wait for one too, ``patience`` seconds and ``max_waiting`` of them at most; beyond, and where none will come back,
    they end with ``EngineDeadError``. ``adapters`` are LoRA adapters from the start.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        adapters: Iterable[LoRARequest] = (),
        *,
        patience: float = PATIENCE_SECONDS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._engines = list(engines)
        self.adapters = Adapters(self._engines, adapters)
        self._patience = patience
        self._max_waiting = max_waiting
        self._watch: asyncio.Task[None] | None = None
        self.waiting = 0
        """Requests that wait for an engine to start."""
        self._desks: dict[EngineClient, Desk] = {}
        self._at: dict[str, EngineClient | None] = {}
        self._starts: list[asyncio.Task[EngineInfo]] = []
        self._closing = ""

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The engines."""
        return self._engines

    @property
    def info(self) -> EngineInfo:
        """Facts of the first engine that is known; known once ``start`` has returned."""
        return next(engine for engine in self._engines if engine.known).info

    @property
    def state(self) -> EngineState:
        """The best of the engines' states."""
        states = {engine.state for engine in self._engines}
        return next(state for state in EngineState if state in states)

    @property
    def restarts(self) -> int:
        """How often engines were started again."""
        return sum(engine.restarts for engine in self._engines)

    @property
    def failure(self) -> str:
        """Why the last engine ended that is not ready, else why any did; empty if none did."""
        ended = sorted(self._engines, key=lambda engine: engine.state is EngineState.READY)
        return next((engine.failure for engine in ended if engine.failure), "")

    async def start(self) -> EngineInfo:
        """Start all, and wait for the first that is ready with its adapters.

        Raises what the last one raises when none can start, and ``ParameterError`` for an adapter of the start that it
        cannot load.
        """
        self._starts = starts = [asyncio.create_task(engine.start()) for engine in self._engines]
        for one in starts:  # nobody may wait any more for one that starts later
            one.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            waiting = set(starts)
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if one.exception() is None or not waiting:
                        info = one.result()
                        await self.adapters.restored()
                        return info
        except asyncio.CancelledError:
            for one in starts:
                one.cancel()
            raise

    async def stop(self, timeout: float = 5.0) -> None:
        """End all engines; see ``EngineClient.stop``."""
        self._closing = self._closing or "the engine was stopped"
        await asyncio.gather(*(engine.stop(timeout) for engine in self._engines))

    def kill(self) -> None:
        """End all engines at once, without waiting."""
        self._closing = self._closing or "the engine was stopped"
        for engine in self._engines:
            engine.kill()

    def fail_running(self, why: str) -> None:
        """End every running request with an ``EngineDeadError`` that says ``why``; none is sent again."""
        self._closing = why
        for engine in self._engines:
            engine.fail_running(why)

    def abort(self, request_ids: Sequence[str], index: int | None = None) -> None:
        """Drop requests, or only their answer ``index``; see ``EngineClient.abort``."""
        for request_id in request_ids:
            if (engine := self._at.get(request_id)) is not None:
                engine.abort([request_id], index)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        """Yield what an engine makes for ``request``; see ``EngineClient.generate``."""
        if request.request_id in self._at:
            raise ParameterError("request_id", f"{request.request_id!r} is already running")
        self._at[request.request_id] = None
        came = time.monotonic()
        try:
            for attempt in range(1, ATTEMPTS + 1):
                await self._ready(request, came, bound=self._max_waiting if attempt == 1 else None)
                engine = self._at[request.request_id] = self._choose(request)
                visit = _Visit(self._desk(engine), len(request.prompt_token_ids))
                try:
                    async with aclosing(engine.generate(_since(request, came))) as outputs:
                        async for output in outputs:
                            visit.answered()
                            yield output
                    return
                except EngineDeadError:
                    if visit.began or attempt == ATTEMPTS or self._closing:
                        raise
                finally:
                    visit.end()
        finally:
            del self._at[request.request_id]

    def _choose(self, request: EngineRequest) -> EngineClient:
        ready = [engine for engine in self._engines if engine.state is EngineState.READY]
        if not ready:
            raise EngineDeadError(unavailable(self.state, self.failure))
        if request.adapter:
            ready = [engine for engine in ready if not self.adapters.lacks(engine, request.adapter)]
            if not ready:
                raise EngineDeadError("no engine that is ready has this adapter; try again in a moment")
        if len(ready) == 1:
            return ready[0]
        chunks = chunks_of(request)
        desks = [self._desk(engine) for engine in ready]
        at = choose(desks, len(request.prompt_token_ids), chunks)
        desks[at].remember(chunks)
        return ready[at]

    async def _ready(self, request: EngineRequest, came: float, bound: int | None) -> None:
        """Returns as soon as an engine is ready, none will be, or patience is over. Raises ``DeadlineError``, and
        ``EngineDeadError`` when ``bound`` requests wait already or the pool is closed.
        """
        end = time.monotonic() + self._patience
        while not self._closing and self.state in _HOPEFUL and (left := end - time.monotonic()) > 0.0:
            if bound is not None and self.waiting >= bound:
                raise EngineDeadError(f"{self.waiting} requests wait; {unavailable(self.state, self.failure)}")
            rest = _since(request, came).max_wait
            self.waiting += 1
            try:
                await asyncio.wait([self._change()], timeout=left if rest is None else min(left, rest))
            finally:
                self.waiting -= 1
            _since(request, came)
        if self._closing:
            raise EngineDeadError(self._closing)

    def _change(self) -> asyncio.Task[None]:
        """One task for all that wait, which ends when there is no need to wait any more."""

        async def watch() -> None:
            while not self._closing and self.state in _HOPEFUL:
                await asyncio.sleep(POLL_SECONDS)

        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(watch(), name="engine-wait")
        return self._watch

    def _desk(self, engine: EngineClient) -> Desk:
        """What ``engine`` has been sent since it was started."""
        desk = self._desks.get(engine)
        if desk is None or desk.generation != engine.restarts:
            desk = self._desks[engine] = Desk(engine.info.kv_tokens, engine.restarts)
        return desk


class _Visit:
    """One request at one engine, as far as it counts as that engine's work."""

    def __init__(self, desk: Desk, prompt: int) -> None:
        self._desk = desk
        self._prompt = prompt
        self.began = False
        desk.sequences += 1
        desk.prompt_tokens += prompt

    def answered(self) -> None:
        """There is output: the prompt is done."""
        if not self.began:
            self.began = True
            self._desk.prompt_tokens -= self._prompt

    def end(self) -> None:
        """The request has left the engine."""
        self.answered()
        self._desk.sequences -= 1


def _since(request: EngineRequest, came: float) -> EngineRequest:
    """``request`` with what is left of its time to wait. Raises ``DeadlineError`` where nothing is."""
    if request.max_wait is None:
        return request
    left = request.max_wait - (time.monotonic() - came)
    if left <= 0.0:
        raise DeadlineError("the request's deadline passed while it waited; nothing was computed")
    return msgspec.structs.replace(request, max_wait=left)
