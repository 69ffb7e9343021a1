"""The front end's side of an engine process: start it, talk to it, notice its end, start it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from enum import Enum
from typing import Any, Protocol

from qiao.engine.request import EngineInfo, EngineRequest, EngineStats, SequenceOutput
from qiao.errors import DeadlineError, EngineDeadError, OverloadedError, ParameterError, QiaoError
from qiao.lora.request import LoRARequest
from qiao.transport.messages import (
    Aborted,
    AdapterDone,
    Draining,
    DropAdapter,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    Step,
    Submit,
    ToEngine,
    rebuild_error,
)

logger = logging.getLogger(__name__)

HEALTHY_SECONDS = 10.0
"""An engine that served this long is started again at once when it ends."""

MAX_PAUSE_SECONDS = 10.0
"""The longest pause before an engine is started again."""

MAX_UNREAD = 8192
"""Outputs that may wait for one reader; a client that lets more pile up loses its request."""

FAIR_EVERY = 16
"""Outputs that one reader may take from a backlog before the others have a turn."""

LOOKS = 8
"""How often within ``Source.step_timeout`` it is looked whether an engine with work says anything."""

LOADING_NOTE_SECONDS = 30.0
"""Every so often a log line says that the engine is still loading."""


class EngineState(Enum):
    """From best to worst. ``DRAINING`` goes on with what runs and takes no more. ``DEAD`` is final: the engine failed
    again and again, or was stopped.
    """

    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"
    DEAD = "dead"


_Item = SequenceOutput | QiaoError


def unavailable(state: EngineState, failure: str) -> str:
    """Why no request can be taken in ``state``; ``failure`` is what happened last, empty where nothing did."""
    cause = f": {failure}" if failure else ""
    if state is not EngineState.DEAD:
        return f"the engine is {state.value}; try again in a moment{cause}"
    return f"the engine is not running{cause}"


class Mailbox:
    """What one reader has not read yet. An ``asyncio.Queue`` without what one reader does not need."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item) -> None:
        """Add ``item`` and wake the reader."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def take(self) -> _Item | None:
        """The next item, None where there is none."""
        return self._items.popleft() if self._items else None

    async def wait(self) -> _Item:
        """The next item as soon as there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class Link(Protocol):
    """One life of an engine, as its front end sees it: a process, or a connection to another host."""

    @property
    def pid(self) -> int | None:
        """The process id of a child."""
        ...

    def send(self, message: ToEngine) -> None:
        """Queue a message without waiting."""
        ...

    async def wait(self) -> QiaoError:
        """Until it has ended: why."""
        ...

    def stop(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Source(Protocol):
    """Where engines come from. A ``lasting`` one is tried without end, also before it has ever worked."""

    @property
    def lasting(self) -> bool:
        """See the class."""
        ...

    @property
    def step_timeout(self) -> float:
        """Seconds after which an engine that has work and says nothing hangs; 0 for never."""
        ...

    async def open(self, received: Callable[[FromEngine], None]) -> Link:
        """The next engine; ``received`` gets its messages, from the loop."""
        ...


class EngineClient:
    """One engine at a time from ``source``, used from one asyncio loop.

    After a first good start an engine that ends is started again, after a pause that doubles from ``backoff`` seconds
    while engines end soon after their start. Only when ``max_restarts`` in a row have not even loaded the model, it is
    given up. An engine that hangs (see ``Source.step_timeout``) is killed. Requests that were running fail with
    ``EngineDeadError``; see ``EnginePool`` for those that can be sent again.
    """

    def __init__(
        self,
        source: Source,
        *,
        max_restarts: int = 8,
        backoff: float = 0.5,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        self._source = source
        self._max_restarts = max_restarts
        self._backoff = backoff
        self._max_unread = max_unread
        self._link: Link | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, Mailbox] = {}
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._failure: QiaoError | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._stopping = False
        self._ready_at: float | None = None
        self._heard = 0.0
        self._asked = 0.0  # the first request since then
        self._loads: dict[int, asyncio.Future[None]] = {}
        self.on_ready: Callable[[], None] | None = None
        """Called as soon as an engine is ready, before it gets any request."""
        self.state = EngineState.STARTING
        self.restarts = 0

    @property
    def known(self) -> bool:
        """Whether an engine has been ready."""
        return self._info is not None

    @property
    def info(self) -> EngineInfo:
        """Facts fixed at start; known once ``start`` has returned."""
        assert self._info is not None, "start() has not returned yet"
        return self._info

    @property
    def pid(self) -> int | None:
        """The engine's process id, None while there is none."""
        return self._link.pid if self._link else None

    @property
    def failure(self) -> str:
        """Why the last engine ended, empty if none did."""
        return str(self._failure) if self._failure else ""

    def stats(self) -> EngineStats:
        """The latest counters: exact when idle, at most 0.2 s old when busy."""
        return self._stats

    async def start(self) -> EngineInfo:
        """Start the engine and wait until the model is loaded.

        Raises the engine's own error (a ``QiaoError`` with its remedy) when it cannot start.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        began = time.monotonic()
        while not self._started.done():
            waits: list[asyncio.Future[Any]] = [self._started, self._supervisor]
            await asyncio.wait(
                waits,
                timeout=LOADING_NOTE_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._supervisor.done() and not self._started.done():
                self.state = EngineState.DEAD
                self._supervisor.result()  # raises what ended it
                raise EngineDeadError("the engine was stopped while it started")
            if not self._started.done():
                logger.info("the engine is still loading after %.0f s", time.monotonic() - began)
        return self._started.result()

    async def stop(self, timeout: float = 5.0) -> None:
        """End the engine: ask, and kill after ``timeout`` seconds. Running requests fail."""
        self._stopping = True
        self.state = EngineState.DEAD
        if self._link is not None:
            self._link.stop()
        elif self._supervisor is not None:
            self._supervisor.cancel()  # it pauses between two engines
        if self._supervisor is not None:
            done, _ = await asyncio.wait([self._supervisor], timeout=timeout)
            if not done:
                self.kill()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._supervisor

    def kill(self) -> None:
        """End the engine at once, without waiting."""
        self._stopping = True
        if self._link is not None:
            self._link.kill()
        elif self._supervisor is not None:
            self._supervisor.cancel()

    def fail_running(self, why: str) -> None:
        """End every running request with an ``EngineDeadError`` that says ``why``, and abort it in the engine."""
        for stream in self._streams.values():
            stream.put(EngineDeadError(why))
        self.abort(list(self._streams))

    def abort(self, request_ids: Sequence[str], index: int | None = None) -> None:
        """Drop requests, or only their answer ``index``, in the engine. Nothing more comes for them but what is under
        way: whoever reads them stops by itself.
        """
        if self._link is not None and request_ids:
            self._link.send(Aborted(list(request_ids), index))

    def load_adapter(self, adapter: LoRARequest) -> asyncio.Future[None]:
        """Send a LoRA adapter, ahead of all requests from now on; done once it is loaded.

        The future ends with a ``ParameterError`` or ``ModelError`` where it cannot be, and with ``EngineDeadError``.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.state is not EngineState.READY or self._link is None:
            future.set_exception(EngineDeadError(unavailable(self.state, self.failure)))
        else:
            self._loads[adapter.lora_int_id] = future
            self._link.send(LoadAdapter(adapter))
        return future

    def drop_adapter(self, number: int) -> None:
        """Have the engine let an adapter go once no request uses it; an engine that starts again has none."""
        if self._link is not None:
            self._link.send(DropAdapter(number))

    def _loaded(self, message: AdapterDone) -> None:
        future = self._loads.pop(message.number, None)
        if future is None or future.done():
            return
        if message.error is None:
            future.set_result(None)
        else:
            future.set_exception(rebuild_error(message.error))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        """Yield what the engine makes for ``request`` until all its sequences have finished.

        Leaving the iterator early aborts the request in the engine. Raises ``EngineDeadError``, ``OverloadedError``,
        ``ParameterError`` and what else the engine refuses with, and ``KernelError`` when its computation failed.
        """
        if self.state is not EngineState.READY or self._link is None:
            raise EngineDeadError(unavailable(self.state, self.failure))
        if request.request_id in self._streams:
            raise ParameterError("request_id", f"{request.request_id!r} is already running")
        stream = Mailbox()
        self._streams[request.request_id] = stream
        if self._asked <= self._heard:
            self._asked = time.monotonic()
        self._link.send(Submit(request))
        running = set(range(request.params.n))
        backlog = 0
        try:
            while running:
                item = stream.take()
                backlog = 0 if item is None else backlog + 1
                if item is None:
                    item = await stream.wait()
                elif backlog % FAIR_EVERY == 0:
                    await asyncio.sleep(0)  # others must have a turn
                if isinstance(item, QiaoError):
                    raise item
                if item.finish_reason == "late":
                    running.clear()
                    raise DeadlineError("the request's deadline passed while it waited; nothing was computed")
                if item.finish_reason == "error":
                    running.clear()
                    raise item.failure()
                if item.finish_reason is not None:
                    running.discard(item.index)
                yield item
        finally:
            self._streams.pop(request.request_id, None)
            if running:
                self.abort([request.request_id])

    async def _supervise(self) -> None:
        short, failed = 0, 0
        while True:
            error = await self._run_once()
            served = None if self._ready_at is None else time.monotonic() - self._ready_at
            self._after_end(error)
            if self._stopping or (self._info is None and not self._source.lasting):
                self._give_up(error)
                return
            failed = failed + 1 if served is None else 0
            short = 0 if served is not None and served >= HEALTHY_SECONDS else short + 1
            if failed >= self._max_restarts and not self._source.lasting:
                self._give_up(error)
                logger.error("the engine could not be started %d times in a row; giving up: %s", failed, error)
                return
            pause = min(MAX_PAUSE_SECONDS, self._backoff * 2 ** max(0, short - 1))
            logger.error("the engine ended and will be started again in %.1f s: %s", pause, error)
            await asyncio.sleep(pause)
            self.restarts += self._info is not None

    def _give_up(self, error: QiaoError) -> None:
        self.state = EngineState.DEAD
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    def _after_end(self, error: QiaoError) -> None:
        self._ready_at = None
        self._failure = error
        self._stats = EngineStats()
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STARTING
        for stream in self._streams.values():
            stream.put(EngineDeadError(f"the engine ended while it worked on this request: {error}"))
        for future in self._loads.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"the engine ended while it loaded an adapter: {error}"))
        self._loads.clear()

    async def _run_once(self) -> QiaoError:
        """Open one engine and serve it to its end; why it ended."""
        self._link = link = await self._source.open(self._take)
        if self._stopping:
            link.kill()
        watch = asyncio.create_task(self._watch(link), name="engine-watch")
        try:
            error = await link.wait()
            return watch.result() if watch.done() else error
        finally:
            watch.cancel()
            link.close()
            self._link = None

    async def _watch(self, link: Link) -> QiaoError:
        """Kill the engine at ``link`` when it hangs, and return what is wrong; until then this does not return.

        An engine with work says something at each step or fifth of a second, whichever is later. One without may be
        silent, however long its answers are not read.
        """
        limit, awake = self._source.step_timeout, 0.0
        if not limit:
            await asyncio.get_running_loop().create_future()
        while True:
            before = time.monotonic()
            await asyncio.sleep(limit / LOOKS)
            now = time.monotonic()
            if now - before > 2 * limit / LOOKS:
                awake = now  # this process stood still, so that it could not hear
            since = now - max(self._silent_since(now), awake)
            if self._ready_at is not None and since > limit:
                link.kill()
                hint = "; --step-timeout is the limit, where steps are so long"
                return EngineDeadError(f"the engine has said nothing about its work for {since:.0f} s{hint}")

    def _silent_since(self, now: float) -> float:
        """When the engine last said something or got work, ``now`` where it owes nothing; seconds."""
        if self._stats.running + self._stats.waiting > 0:
            return self._heard
        return self._asked if self._asked > self._heard else now

    def _take(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Ready):
            self._info, self.state, self._ready_at = message.info, EngineState.READY, time.monotonic()
            assert self._started is not None
            if not self._started.done():
                self._started.set_result(message.info)
            if self.on_ready is not None:
                self.on_ready()
        elif isinstance(message, Refused):
            if (stream := self._streams.get(message.request_id)) is not None:
                stream.put(rebuild_error(message.error))
        elif isinstance(message, AdapterDone):
            self._loaded(message)
        elif isinstance(message, Draining):
            self.state = EngineState.DRAINING
        elif isinstance(message, Step):
            self._stats = message.stats or self._stats
            for output in message.outputs:
                self._deliver(output)

    def _deliver(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if len(stream) >= self._max_unread:
            del self._streams[output.request_id]
            self.abort([output.request_id])
            stream.put(OverloadedError("the client reads more slowly than the engine writes; request ended"))
        else:
            stream.put(output)
