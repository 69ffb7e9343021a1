"""One engine process and its socket, from spawn to reap."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from qiao.config import EngineArgs
from qiao.errors import EngineDeadError, QiaoError
from qiao.transport.channel import LoopChannel
from qiao.transport.messages import Failed, FromEngine, Start, Stop, ToEngine, rebuild_error

HOST_MODULE = "qiao.transport.host"

LAST_WORDS_SECONDS = 1.0
"""How long to wait for the cause from a child that has exited by itself."""


@dataclass(frozen=True)
class HostOptions:
    """How to start the child: its module (with ``main()``) and its logging."""

    module: str = HOST_MODULE
    log_level: str = "info"
    log_json: bool = False


@dataclass(frozen=True)
class Launched:
    """A child that has been started, and our end of the socket pair to it, which nobody else can reach: it has no
    name. What it says before anybody listens waits in the socket.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket


def launch(args: EngineArgs, options: HostOptions) -> Launched:
    """Start the child and hand it its arguments as one line of JSON on standard input.

    Needs no loop, so that the engine can load while the caller still imports what it serves with. To be called by the
    main thread: the child ends with the thread that started it.
    """
    ours, theirs = socket.socketpair()
    # ``-c`` instead of ``-m``, and the working directory off the path: a folder named like a library must not
    # shadow it.
    code = f"import sys; sys.path[:1] = []; from {options.module} import main; main()"
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[fd])  # noqa: S603
    start = Start(fd=fd, args=args, log_level=options.log_level, log_json=options.log_json)
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
    return Launched(process, ours)


class EngineProcess:
    """A child and the channel to it, used from one loop."""

    def __init__(self, launched: Launched, received: Callable[[FromEngine], None]) -> None:
        self._process = launched.process
        self._received = received
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._channel = LoopChannel(self._take)
        self._ended = _end_of(self._process)
        self._cause: asyncio.Future[QiaoError] = asyncio.get_running_loop().create_future()

    @classmethod
    async def attach(cls, launched: Launched, received: Callable[[FromEngine], None]) -> EngineProcess:
        """Listen to a child: ``received`` gets each message, from the loop; one that cannot be read ends the child."""
        made = cls(launched, received)
        await asyncio.get_running_loop().create_connection(lambda: made._channel, sock=launched.connection)
        return made

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message to the child without waiting. What a dying child no longer takes is dropped."""
        self._channel.send(self._encoder.encode(message))

    async def wait(self) -> QiaoError:
        """Until the child has ended: why."""
        status = await asyncio.shield(self._ended)
        if status > 0:
            await asyncio.wait([self._cause], timeout=LAST_WORDS_SECONDS)
        return self._cause.result() if self._cause.done() else EngineDeadError(_explain_exit(status))

    def stop(self) -> None:
        """Ask it to end."""
        self.send(Stop())

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Kill it if it runs, close the socket, and the pipe by whose end a child knows that its parent is gone."""
        self.kill()
        self._channel.close()
        if self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.close()

    def _take(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
            if not isinstance(message, Failed):
                self._received(message)
            elif not self._cause.done():
                self._cause.set_result(rebuild_error(message.error))
        except Exception:  # the stream cannot be trusted any more, and a child without a reader would hang
            self.kill()
            raise


class LocalSource:
    """An engine process of this host; see ``EngineClient``. ``launched`` is the first one, where it runs already."""

    lasting = False
    """A model that cannot be loaded once cannot be loaded at all."""

    def __init__(self, args: EngineArgs, options: HostOptions, launched: Launched | None = None) -> None:
        self._args = args
        self._options = options
        self._launched = launched
        self.step_timeout = args.step_timeout

    async def open(self, received: Callable[[FromEngine], None]) -> EngineProcess:
        """A new process."""
        launched, self._launched = self._launched or launch(self._args, self._options), None
        return await EngineProcess.attach(launched, received)


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The exit status, once there is one. A thread waits, since not every loop watches processes it did not start."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def wait() -> None:
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(tell, status)

    threading.Thread(target=wait, name="engine-wait", daemon=True).start()
    return ended


def _explain_exit(status: int) -> str:
    if status >= 0:
        return f"the engine process ended with status {status}; its log says why"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; often the kernel, for lack of memory" if name == "SIGKILL" else ""
    return f"the engine process was ended by {name}{hint}"
