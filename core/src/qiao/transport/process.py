"""One engine process and its socket, from spawn to reap."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from qiao.config import EngineArgs
from qiao.transport.messages import FromEngine, Start, ToEngine

HOST_MODULE = "qiao.transport.host"


@dataclass(frozen=True)
class HostOptions:
    """How to start the child: its module (with ``main()``) and its logging."""

    module: str = HOST_MODULE
    log_level: str = "info"
    log_json: bool = False


class EngineProcess:
    """A spawned child. The socket lies in a directory that only this user can enter (mode 0700)."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: str) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def spawn(cls, context: zmq.asyncio.Context, args: EngineArgs, options: HostOptions) -> EngineProcess:
        """Start the child and hand it its arguments as one line of JSON on standard input."""
        folder = tempfile.mkdtemp(prefix="qiao-")
        address = f"ipc://{folder}/engine"
        socket = context.socket(zmq.DEALER)
        socket.bind(address)
        # ``-c`` instead of ``-m``, and the working directory off the path: a folder named like a library must not
        # shadow it.
        code = f"import sys; sys.path[:1] = []; from {options.module} import main; main()"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)
        start = Start(address=address, args=args, log_level=options.log_level, log_json=options.log_json)
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            await process.stdin.drain()
        return cls(process, socket, folder)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message to the child without waiting. What a dying child no longer takes is dropped."""
        sent = asyncio.ensure_future(self._socket.send(self._encoder.encode(message)))
        sent.add_done_callback(_ignore)

    async def receive(self) -> FromEngine:
        """The child's next message."""
        return self._decoder.decode(await self._socket.recv())

    async def wait(self) -> int:
        """Until the child has ended: its exit status."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Close the socket and remove its directory."""
        self._socket.close(linger=0)
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the socket's directory."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _ignore(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()
