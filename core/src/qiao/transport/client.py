"""The front end's side of an engine process: start it, talk to it, notice its end, start it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from enum import Enum
from typing import Any

from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo, EngineRequest, EngineStats, SequenceOutput
from qiao.errors import DeadlineError, EngineDeadError, OverloadedError, ParameterError, QiaoError
from qiao.transport.messages import Aborted, Failed, FromEngine, Ready, Refused, Step, Stop, Submit, rebuild_error
from qiao.transport.process import EngineProcess, HostOptions, Launched, launch

logger = logging.getLogger(__name__)

HEALTHY_SECONDS = 60.0
"""An engine that served this long may fail anew: its restarts are counted from zero again."""

LAST_WORDS_SECONDS = 1.0
"""How long to wait for the cause from a child that has exited by itself."""

MAX_UNREAD = 8192
"""Outputs that may wait for one reader; a client that lets more pile up loses its request."""

FAIR_EVERY = 16
"""Outputs that one reader may take from a backlog before the others have a turn."""

LOADING_NOTE_SECONDS = 30.0
"""Every so often a log line says that the engine is still loading."""


class EngineState(Enum):
    """``DEAD`` is final: the engine failed again and again, or was stopped."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


_Item = SequenceOutput | QiaoError


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


class EngineClient:
    """One engine process, used from one asyncio loop.

    After a first good start an engine that ends is started again, ``max_restarts`` times in a row with a pause that
    doubles from ``backoff`` seconds. ``launched`` is the first one where it has been started before. Requests that were
    running fail with ``EngineDeadError``; they are not repeated, because a part of the answer may have been sent.
    """

    def __init__(
        self,
        args: EngineArgs,
        options: HostOptions | None = None,
        *,
        launched: Launched | None = None,
        max_restarts: int = 3,
        backoff: float = 0.5,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        self._args = args
        self._options = options or HostOptions()
        self._launched = launched
        self._max_restarts = max_restarts
        self._backoff = backoff
        self._max_unread = max_unread
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, Mailbox] = {}
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._failure: QiaoError | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._stopping = False
        self._ready_at: float | None = None
        self.state = EngineState.STARTING
        self.restarts = 0

    @property
    def info(self) -> EngineInfo:
        """Facts fixed at start; known once ``start`` has returned."""
        assert self._info is not None, "start() has not returned yet"
        return self._info

    @property
    def pid(self) -> int | None:
        """The engine's process id, None while there is none."""
        return self._process.pid if self._process else None

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
        if self._process is not None:
            self._process.send(Stop())
        if self._supervisor is not None:
            done, _ = await asyncio.wait([self._supervisor], timeout=timeout)
            if not done:
                self.kill()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._supervisor

    def kill(self) -> None:
        """End the engine at once, without waiting."""
        self._stopping = True
        if self._process is not None:
            self._process.kill()
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
        if self._process is not None and request_ids:
            self._process.send(Aborted(list(request_ids), index))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceOutput, None]:
        """Yield what the engine makes for ``request`` until all its sequences have finished.

        Leaving the iterator early aborts the request in the engine. Raises ``EngineDeadError``, ``OverloadedError``,
        ``ParameterError`` and what else the engine refuses with, and ``KernelError`` when its computation failed.
        """
        if self.state is not EngineState.READY or self._process is None:
            raise EngineDeadError(self._unavailable())
        if request.request_id in self._streams:
            raise ParameterError("request_id", f"{request.request_id!r} is already running")
        stream = Mailbox()
        self._streams[request.request_id] = stream
        self._process.send(Submit(request))
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

    def _unavailable(self) -> str:
        cause = f": {self.failure}" if self.failure else ""
        if self.state is EngineState.STARTING:
            return f"the engine is starting; try again in a moment{cause}"
        return f"the engine is not running{cause}"

    async def _supervise(self) -> None:
        tries = 0
        while True:
            error = await self._run_once()
            served = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            self._after_end(error)
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(error)
            if self._stopping or self._info is None:
                self.state = EngineState.DEAD
                return
            tries = 1 if served >= HEALTHY_SECONDS else tries + 1
            if tries > self._max_restarts:
                self.state = EngineState.DEAD
                logger.error("the engine ended %d times in a row; giving up: %s", tries, error)
                return
            pause = self._backoff * 2 ** (tries - 1)
            logger.error("the engine ended and will be started again in %.1f s: %s", pause, error)
            await asyncio.sleep(pause)
            self.restarts += 1

    def _after_end(self, error: QiaoError) -> None:
        self._ready_at = None
        self._failure = error
        self._stats = EngineStats()
        if self.state is EngineState.READY:
            self.state = EngineState.STARTING
        for stream in self._streams.values():
            stream.put(EngineDeadError(f"the engine ended while it worked on this request: {error}"))

    async def _run_once(self) -> QiaoError:
        """Spawn one engine and serve it to its end; why it ended."""
        cause: asyncio.Future[QiaoError] = asyncio.get_running_loop().create_future()

        def received(message: FromEngine) -> None:
            if not isinstance(message, Failed):
                self._take(message)
            elif not cause.done():
                cause.set_result(rebuild_error(message.error))

        launched, self._launched = self._launched or launch(self._args, self._options), None
        self._process = process = await EngineProcess.attach(launched, received)
        if self._stopping:
            process.kill()
        try:
            status = await process.wait()
            if status > 0:
                await asyncio.wait([cause], timeout=LAST_WORDS_SECONDS)
            return cause.result() if cause.done() else EngineDeadError(_explain_exit(status))
        finally:
            process.kill()
            process.close()
            self._process = None

    def _take(self, message: Ready | Refused | Step) -> None:
        if isinstance(message, Ready):
            self._info, self.state, self._ready_at = message.info, EngineState.READY, time.monotonic()
            assert self._started is not None
            if not self._started.done():
                self._started.set_result(message.info)
        elif isinstance(message, Refused):
            if (stream := self._streams.get(message.request_id)) is not None:
                stream.put(rebuild_error(message.error))
        else:
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


def _explain_exit(status: int) -> str:
    if status >= 0:
        return f"the engine process ended with status {status}; its log says why"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; often the kernel, for lack of memory" if name == "SIGKILL" else ""
    return f"the engine process was ended by {name}{hint}"
