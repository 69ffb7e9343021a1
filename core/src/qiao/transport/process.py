"""One engine process and its socket, from spawn to reap."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from qiao.config import EngineArgs
from qiao.transport.channel import LoopChannel
from qiao.transport.messages import FromEngine, Start, ToEngine

HOST_MODULE = "qiao.transport.host"


@dataclass(frozen=True)
class HostOptions:
    """How to start the child: its module (with ``main()``) and its logging."""

    module: str = HOST_MODULE
    log_level: str = "info"
    log_json: bool = False


class EngineProcess:
    """A spawned child and the socket pair to it, which nobody else can reach: it has no name."""

    def __init__(self, process: asyncio.subprocess.Process, channel: LoopChannel) -> None:
        self._process = process
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def spawn(
        cls, args: EngineArgs, options: HostOptions, received: Callable[[FromEngine], None]
    ) -> EngineProcess:
        """Start the child and hand it its arguments as one line of JSON on standard input.

        ``received`` gets each message, from the loop; a message that cannot be read ends the child.
        """
        ours, theirs = socket.socketpair()
        # ``-c`` instead of ``-m``, and the working directory off the path: a folder named like a library must not
        # shadow it.
        code = f"import sys; sys.path[:1] = []; from {options.module} import main; main()"
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, pass_fds=[theirs.fileno()]
            )
            fd = theirs.fileno()
        start = Start(fd=fd, args=args, log_level=options.log_level, log_json=options.log_json)
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            await process.stdin.drain()
        channel = LoopChannel(_decoding(received, process))
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
        return cls(process, channel)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message to the child without waiting. What a dying child no longer takes is dropped."""
        self._channel.send(self._encoder.encode(message))

    async def wait(self) -> int:
        """Until the child has ended: its exit status."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()


def _decoding(received: Callable[[FromEngine], None], process: asyncio.subprocess.Process) -> Callable[[bytes], None]:
    decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def take(payload: bytes) -> None:
        try:
            received(decoder.decode(payload))
        except Exception:  # the stream cannot be trusted any more, and a child without a reader would hang
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise

    return take
