"""A front end's connection to an engine on another host: the messages of the local one over ZeroMQ with CURVE.

One socket is one TCP connection, which is never taken up again: what was under way on it is lost to both sides, and
both know. A new one starts from nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from qiao.errors import EngineDeadError, ParameterError, QiaoError
from qiao.transport.curve import GatewayKeys
from qiao.transport.messages import (
    PROTOCOL,
    Alive,
    Failed,
    FromEngine,
    Hello,
    ToEngine,
    rebuild_error,
)

ALIVE_SECONDS = 1.0
"""How often each side lets the other hear from it."""

SILENT_SECONDS = 6.0
"""A side that has not been heard of for so long is taken for gone."""

_ENDS = {
    int(zmq.Event.DISCONNECTED): "the connection broke",
    int(zmq.Event.CLOSED): "nothing listens there",
    int(zmq.Event.CONNECT_RETRIED): "nothing listens there",
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know this gateway's key (--engine-keys)",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "it has another key, or is no engine (--engine-keys)",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has another key, or is no engine (--engine-keys)",
}
"""What the socket tells of its end, in words."""

_BEFORE_WORDS = {
    int(zmq.Event.DISCONNECTED): "it closed the connection at once; it may have another key (--engine-keys)"
}
"""The same of a side that has not said a word."""


def check_address(field: str, address: str) -> str:
    """``tcp://HOST:PORT``. Raises ``ParameterError``."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ParameterError(field, f"must be tcp://HOST:PORT, got {address!r}")
    return address


class RemoteEngine:
    """One connection, used from one loop."""

    def __init__(self, address: str, keys: GatewayKeys, received: Callable[[FromEngine], None]) -> None:
        self._address = address
        self._received = received
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.asyncio.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.engine
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # what waits is bounded by the requests, and nothing may be dropped
        socket.reconnect_ivl = -1
        self._monitor = socket.get_monitor_socket()
        self._heard = time.monotonic()
        self._met = False
        self._ended: asyncio.Future[QiaoError] = asyncio.get_running_loop().create_future()
        socket.connect(address)
        self.send(Hello(PROTOCOL))
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._watch, self._keep_alive)]

    @property
    def pid(self) -> int | None:
        """The engine's process is not ours."""
        return None

    def send(self, message: ToEngine) -> None:
        """Queue a message without waiting."""
        if not self._socket.closed:
            _forgotten(self._socket.send(self._encoder.encode(message)))

    async def wait(self) -> QiaoError:
        """Until the connection has ended: why."""
        return await asyncio.shield(self._ended)

    def stop(self) -> None:
        """Leave; the engine goes on for others."""
        self._end("the front end has left it")

    def kill(self) -> None:
        """The same."""
        self.stop()

    def close(self) -> None:
        """Close the socket."""
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _end(self, why: str | QiaoError) -> None:
        if not self._ended.done():
            error = EngineDeadError(f"the engine at {self._address}: {why}") if isinstance(why, str) else why
            self._ended.set_result(error)

    async def _receive(self) -> None:
        while True:
            payload = await self._socket.recv()
            self._heard, self._met = time.monotonic(), True
            try:
                message = self._decoder.decode(payload)
            except msgspec.MsgspecError as error:
                self._end(f"sent what is no message of version {PROTOCOL}: {error}")
                return
            if isinstance(message, Failed):
                self._end(rebuild_error(message.error))
                return
            self._received(message)

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            why = _ENDS.get(int(event["event"]))
            if why is not None:
                self._end(why if self._met else _BEFORE_WORDS.get(int(event["event"]), why))

    async def _keep_alive(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(ALIVE_SECONDS)
            self.send(Alive())
            now = time.monotonic()
            if now - before > 2 * ALIVE_SECONDS:  # this process stood still, so that it could not hear
                self._heard = now
            elif now - self._heard > SILENT_SECONDS:
                self._end(f"it has been silent for {SILENT_SECONDS:.0f} s")


class RemoteSource:
    """Where an engine on another host is; see ``EngineClient``."""

    lasting = True
    """It may come and go, whoever looks after it: a front end waits for it without end."""

    step_timeout = 0.0
    """Its own host looks after that."""

    def __init__(self, address: str, keys: Path) -> None:
        self._address = check_address("--engine", address)
        self._keys = GatewayKeys.read(keys)

    async def open(self, received: Callable[[FromEngine], None]) -> RemoteEngine:
        """A new connection."""
        return RemoteEngine(self._address, self._keys, received)


def _forgotten(sent: Any) -> None:
    """A message that cannot be sent any more is dropped; the connection's end says so."""
    asyncio.ensure_future(sent).add_done_callback(lambda future: future.cancelled() or future.exception())
