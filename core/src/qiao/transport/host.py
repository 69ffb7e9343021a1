"""The engine process: receive requests, step while there is work, sleep on the socket when there is none.

Started by ``EngineClient``. The first line of standard input is JSON: the socket and the engine's arguments.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo, EngineRequest, EngineStats, SequenceOutput
from qiao.errors import QiaoError
from qiao.loading.heap import give_back
from qiao.lora.request import LoRARequest
from qiao.observability.logs import configure_logging
from qiao.transport.channel import BlockingChannel
from qiao.transport.messages import (
    Aborted,
    AdapterDone,
    DropAdapter,
    Failed,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    Start,
    Step,
    Stop,
    Submit,
    ToEngine,
    describe_error,
)
from qiao.transport.orphan import end_with_parent, ignore_terminal_signals
from qiao.transport.priority import run_at_once

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.2
"""Seconds between two snapshots of the counters while the engine is busy."""

TIDY_INTERVAL = 30.0
"""Seconds between two returns of freed memory, which an engine without work makes: it takes some milliseconds."""


class HostedAdapters(Protocol):
    """What the loop needs of ``qiao.engine.adapters.AdapterPool``."""

    def read(self, request: LoRARequest) -> Any:
        """Read an adapter's files, on any thread, or raise a ``QiaoError``."""
        ...

    def add(self, request: LoRARequest, file: Any) -> None:
        """Load an adapter from what ``read`` gave, or raise a ``QiaoError``."""
        ...

    def remove(self, number: int) -> object:
        """Let an adapter go once no request uses it."""
        ...


class HostedEngine(Protocol):
    """What the loop needs of ``qiao.engine.Engine``."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request, or raise a ``QiaoError``."""
        ...

    def abort(self, request_ids: Sequence[str], index: int | None = None) -> object:
        """Drop requests, or only their sequence ``index``; unknown ids are ignored."""
        ...

    @property
    def adapters(self) -> HostedAdapters:
        """Its LoRA adapters; raises a ``QiaoError`` where there are none."""
        ...

    def step(self) -> list[SequenceOutput]:
        """Run one step."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        ...

    def stats(self) -> EngineStats:
        """Counters now."""
        ...


Build = Callable[[EngineArgs], tuple[HostedEngine, EngineInfo]]


class EngineLoop:
    """One engine at one socket."""

    def __init__(self, engine: HostedEngine, channel: BlockingChannel) -> None:
        self._engine = engine
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._last_stats = 0.0
        self._last_tidy = time.monotonic()
        self._untidy = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loads: dict[int, tuple[LoRARequest, Future[Any]]] = {}

    def send(self, message: FromEngine) -> None:
        """Blocks while the front end is a socket buffer behind."""
        self._channel.send(self._encoder.encode(message))

    def run(self) -> None:
        """Return when the front end says stop. Raises what a step raised."""
        while True:
            if not self._engine.has_work():
                self._tidy()
            if not self._receive(wait=not self._engine.has_work()):
                return
            self._untidy = True
            self._finish_loads(wait=not self._engine.has_work())
            outputs = self._engine.step() if self._engine.has_work() else []
            idle = not self._engine.has_work()
            now = time.monotonic()
            if idle or now - self._last_stats >= STATS_INTERVAL:
                self._last_stats = now
                self.send(Step(outputs, self._engine.stats()))
            elif outputs:
                self.send(Step(outputs))

    def _tidy(self) -> None:
        """Return what has been freed to the system, else the largest of all steps and grammars stays for ever."""
        now = time.monotonic()
        if self._untidy and now - self._last_tidy >= TIDY_INTERVAL:
            give_back()
            self._untidy, self._last_tidy = False, now

    def _receive(self, wait: bool) -> bool:
        """Take in all waiting messages, at least one if ``wait``. False when told to stop, or nobody is there."""
        payloads = self._channel.receive(wait)
        if payloads is None:
            return False
        for payload in payloads:
            message = self._decoder.decode(payload)
            if isinstance(message, Stop):
                return False
            self._handle(message)
        return True

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Aborted):
            self._engine.abort(message.request_ids, message.index)
        elif isinstance(message, DropAdapter):
            self._finish_loads(wait=message.number in self._loads)
            with contextlib.suppress(QiaoError):  # an engine without adapters has none to drop
                self._engine.adapters.remove(message.number)
        elif isinstance(message, LoadAdapter):
            read = self._reader.submit(self._read_adapter, message.request)
            self._loads[message.request.lora_int_id] = (message.request, read)

    def _read_adapter(self, request: LoRARequest) -> Any:
        return self._engine.adapters.read(request)

    def _finish_loads(self, wait: bool) -> None:
        """Load the adapters whose files have been read beside the steps; all of them where the caller has to ``wait``.

        Nothing runs while this waits for lack of work, and whoever needs one that is on its way waits for it.
        """
        for number, (request, read) in list(self._loads.items()):
            if not (wait or read.done()):
                return
            del self._loads[number]
            try:
                self._engine.adapters.add(request, read.result())
            except Exception as error:  # files from outside, and a device that may be full: the engine itself is well
                if not isinstance(error, QiaoError):
                    logger.exception("the adapter %s could not be loaded", request.lora_name)
                self.send(AdapterDone(number, describe_error(error)))
            else:
                self.send(AdapterDone(number))

    def _submit(self, message: Submit) -> None:
        if self._loads:
            self._finish_loads(wait=message.request.adapter in self._loads)
        try:
            self._engine.add_request(message.request)
        except QiaoError as error:
            self.send(Refused(message.request.request_id, describe_error(error)))


def build(args: EngineArgs) -> tuple[HostedEngine, EngineInfo]:
    """The real engine; imported late because it pulls in torch."""
    gc.disable()  # what is imported stays: looking at it again and again takes a tenth of the time
    try:
        from qiao.build import build_engine
    finally:
        gc.freeze()
        gc.enable()
    built = build_engine(args)
    gc.collect()
    give_back()  # a checkpoint's header alone is some megabytes
    return built.engine, built.info


def main(build: Build = build) -> None:
    """Entry of the engine process. Tests give another ``build``."""
    ignore_terminal_signals()
    run_at_once()
    start = msgspec.json.decode(_first_line(0), type=Start)
    end_with_parent(0)
    os.dup2(2, 1)  # what libraries print must not mix with the parent's own output
    configure_logging(start.log_level, json_lines=start.log_json)
    channel = BlockingChannel(socket.socket(fileno=start.fd))
    status = 0
    try:
        engine, info = build(start.args)
        gc.collect()
        gc.freeze()  # the model and the libraries stay: no collection during a step need look at them again
        loop = EngineLoop(engine, channel)
        loop.send(Ready(info))
        loop.run()
    except Exception as error:
        status = 1
        if not isinstance(error, QiaoError):
            traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send(msgspec.msgpack.encode(Failed(describe_error(error))))
    channel.close()
    sys.stderr.flush()
    os._exit(status)  # native runtimes may hang in their exit handlers


def _first_line(fd: int) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            raise SystemExit("qiao engine: the front end ended before it sent the arguments")
        line += chunk
    return bytes(line)


if __name__ == "__main__":
    main()
