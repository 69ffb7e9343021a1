"""An engine for front ends on other hosts: what ``qiao engine`` runs.

The engine itself is a process of its own behind ``EngineClient``, exactly as with ``qiao serve``, and started again
like there. Here its requests come from, and its outputs go to, any number of front ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from qiao.engine.request import EngineRequest, SequenceOutput
from qiao.errors import EngineDeadError, ParameterError, QiaoError
from qiao.lora.request import LoRARequest
from qiao.transport.client import EngineClient, EngineState
from qiao.transport.curve import EngineKeys
from qiao.transport.messages import (
    PROTOCOL,
    Aborted,
    AdapterDone,
    Alive,
    Draining,
    DropAdapter,
    Failed,
    FromEngine,
    Hello,
    LoadAdapter,
    Ready,
    Refused,
    Step,
    Submit,
    ToEngine,
    describe_error,
)
from qiao.transport.remote import ALIVE_SECONDS, SILENT_SECONDS

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02

UNKNOWN = 2**62
"""No adapter's number."""


class _Session:
    """One front end's connection."""

    def __init__(self, peer: bytes, number: int, send: Callable[[bytes, FromEngine], None]) -> None:
        self._peer = peer
        self._send = send
        self._outputs: list[SequenceOutput] = []
        self.number = number
        self.heard = time.monotonic()
        self.ready = False
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.adapters: dict[int, int] = {}
        """The engine's numbers of the front end's adapters: several front ends count for themselves."""

    def send(self, message: FromEngine) -> None:
        """Send, behind all outputs so far."""
        self.flush()
        self._send(self._peer, message)

    def add(self, output: SequenceOutput) -> None:
        """Send an output together with the others of this turn of the loop."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outputs.append(output)

    def flush(self) -> None:
        """Send what has been added."""
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._send(self._peer, Step(outputs))

    def end(self) -> None:
        """Nobody waits any more: abort what runs."""
        for task in self.tasks.values():
            task.cancel()


class EngineService:
    """``client``'s engine at ``address``, for those whose keys are in ``keys``."""

    def __init__(self, client: EngineClient, address: str, keys: EngineKeys) -> None:
        self._client = client
        self._keys = keys
        self._sessions: dict[bytes, _Session] = {}
        self._count = 0
        self._adapter_numbers = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._context = zmq.asyncio.Context()
        self._gate = AsyncioAuthenticator(self._context)
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._socket = self._context.socket(zmq.ROUTER)
        self._bind(address)

    def _bind(self, address: str) -> None:
        socket = self._socket
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.linger = 1000
        socket.sndhwm = socket.rcvhwm = 0
        socket.router_mandatory = True
        self._gate.start()
        self._gate.configure_curve_callback("*", self)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ParameterError("--listen", f"cannot bind {address}: {error.strerror}") from None

    @property
    def address(self) -> str:
        """Where it listens; a port of 0 as the one that the system chose."""
        return str(self._socket.get_string(zmq.LAST_ENDPOINT))

    @property
    def serving(self) -> int:
        """Requests that are being answered."""
        return sum(len(session.tasks) for session in self._sessions.values())

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by ZeroMQ's authenticator with a client's public key."""
        known = key in self._keys.clients
        if not known:
            logger.warning("refused a front end with the unknown key %s", key.decode())
        return known

    async def run(self) -> None:
        """Serve until cancelled."""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._look_after())]
        await asyncio.gather(*self._tasks)

    async def drain(self, timeout: float) -> None:
        """Tell front ends to send no more, and wait until nothing runs, at most ``timeout`` seconds."""
        self._draining = True
        for session in self._sessions.values():
            session.send(Draining())
        end = time.monotonic() + timeout
        while self.serving and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        self._drop_all(EngineDeadError("the engine was stopped"))

    def close(self) -> None:
        """Close the socket; what was sent still has a second to leave."""
        for task in self._tasks:
            task.cancel()
        self._gate.stop()
        self._context.destroy(linger=1000)

    def _send(self, peer: bytes, message: FromEngine) -> None:
        sent = asyncio.ensure_future(self._socket.send_multipart([peer, self._encoder.encode(message)]))

        def look(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is not None:  # the front end is gone
                self._drop(peer)

        sent.add_done_callback(look)

    async def _receive(self) -> None:
        while True:
            peer, payload = await self._socket.recv_multipart()
            try:
                message = self._decoder.decode(payload)
            except (msgspec.MsgspecError, QiaoError) as error:
                self._send(peer, Failed(describe_error(QiaoError(f"no message of version {PROTOCOL}: {error}"))))
                self._drop(peer)
                continue
            self._take(peer, message)

    def _take(self, peer: bytes, message: ToEngine) -> None:
        session = self._sessions.get(peer)
        if isinstance(message, Hello):
            self._welcome(peer, message)
        elif session is None:
            if not isinstance(message, Alive):
                self._send(
                    peer, Failed(describe_error(EngineDeadError("the engine has no such session; connect anew")))
                )
        else:
            session.heard = time.monotonic()
            if isinstance(message, Submit):
                self._submit(session, message.request)
            elif isinstance(message, Aborted):
                self._abort(session, message)
            elif isinstance(message, LoadAdapter):
                self._load(session, message.request)
            elif isinstance(message, DropAdapter) and message.number in session.adapters:
                self._client.drop_adapter(session.adapters.pop(message.number))

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            text = f"the engine speaks version {PROTOCOL} and the front end {hello.protocol}; install the same Qiao"
            self._send(peer, Failed(describe_error(QiaoError(text))))
            return
        self._count += 1
        self._sessions[peer] = session = _Session(peer, self._count, self._send)
        self._introduce(session)

    def _introduce(self, session: _Session) -> None:
        """Say that the engine is ready, once it is."""
        if not session.ready and self._client.state is EngineState.READY:
            session.ready = True
            session.send(Ready(self._client.info))
            if self._draining:
                session.send(Draining())

    def _submit(self, session: _Session, request: EngineRequest) -> None:
        if request.request_id not in session.tasks:
            task = asyncio.create_task(self._answer(session, request))
            session.tasks[request.request_id] = task
            task.add_done_callback(lambda _: session.tasks.pop(request.request_id, None))

    def _load(self, session: _Session, adapter: LoRARequest) -> None:
        own = dataclasses.replace(adapter, lora_int_id=next(self._adapter_numbers))
        session.adapters[adapter.lora_int_id] = own.lora_int_id

        def tell(future: asyncio.Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            session.send(AdapterDone(adapter.lora_int_id, describe_error(error) if error is not None else None))

        self._client.load_adapter(own).add_done_callback(tell)

    async def _answer(self, session: _Session, request: EngineRequest) -> None:
        own = msgspec.structs.replace(request, request_id=f"{session.number}/{request.request_id}")
        if request.adapter:  # the front end has sent it before, and sends no request for one that it has dropped
            own.adapter = session.adapters.get(request.adapter, UNKNOWN)
        try:
            async with aclosing(self._client.generate(own)) as outputs:
                async for output in outputs:
                    session.add(msgspec.structs.replace(output, request_id=request.request_id))
        except EngineDeadError as error:
            self._drop_all(error)
        except QiaoError as error:
            session.send(Refused(request.request_id, describe_error(error)))

    def _abort(self, session: _Session, message: Aborted) -> None:
        if message.index is not None:
            self._client.abort([f"{session.number}/{one}" for one in message.request_ids], message.index)
            return
        for request_id in message.request_ids:
            if (task := session.tasks.get(request_id)) is not None:
                task.cancel()

    async def _look_after(self) -> None:
        """Heartbeats with the counters; end sessions when the engine has ended or nobody is heard."""
        last = now = time.monotonic()
        while True:
            before = now
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - before > ALIVE_SECONDS:  # this process stood still, so that it could not hear
                for session in self._sessions.values():
                    session.heard = now
            if self._client.state is not EngineState.READY and any(s.ready for s in self._sessions.values()):
                self._drop_all(EngineDeadError(f"the engine ended: {self._client.failure}"))
            for peer, session in list(self._sessions.items()):
                self._introduce(session)
                if now - session.heard > SILENT_SECONDS:
                    self._drop(peer)
            if now - last >= ALIVE_SECONDS:
                last = now
                for session in self._sessions.values():
                    session.send(Step(stats=self._client.stats()))

    def _drop_all(self, error: QiaoError) -> None:
        for peer, session in list(self._sessions.items()):
            session.send(Failed(describe_error(error)))
            self._drop(peer)

    def _drop(self, peer: bytes) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            session.end()
            for number in session.adapters.values():
                self._client.drop_adapter(number)


async def serve_until(service: EngineService, stop: asyncio.Event, timeout: float) -> None:
    """Serve until ``stop``, then drain for ``timeout`` seconds."""
    work = asyncio.create_task(service.run())
    ended = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([work, ended], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        await service.drain(timeout)
    finally:
        ended.cancel()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
