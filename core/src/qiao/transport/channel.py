"""Messages over a stream socket: four bytes of length, little endian, and then the message.

A plain socket and no message queue: a queue's own thread would wake up on both sides for each step, on processors that
the kernels use, and cost more than encoding the message. It may be a local socket pair or a TCP connection alike.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

_LENGTH = 4
MAX_BYTES = (1 << (8 * _LENGTH)) - 1
"""The largest message."""

_READ = 256 * 1024


def framed(payload: bytes) -> bytes:
    """``payload`` as it goes over the wire. Raises ``ValueError`` above ``MAX_BYTES``."""
    if len(payload) > MAX_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes does not fit the wire's {MAX_BYTES}")
    return len(payload).to_bytes(_LENGTH, "little") + payload


class Unframer:
    """Cuts what arrives, in whatever pieces, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        messages, at = [], 0
        while len(buffer) - at >= _LENGTH:
            end = at + _LENGTH + int.from_bytes(buffer[at : at + _LENGTH], "little")
            if end > len(buffer):
                break
            messages.append(bytes(buffer[at + _LENGTH : end]))
            at = end
        del buffer[:at]
        return messages


class BlockingChannel:
    """A thread's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unframer = Unframer()

    def send(self, payload: bytes) -> None:
        """Blocks while the reader is a socket buffer behind. Raises ``OSError`` where there is no reader any more."""
        self._socket.sendall(framed(payload))

    def receive(self, wait: bool) -> list[bytes] | None:
        """All messages that have arrived, at least one if ``wait``; None where the other side is gone."""
        messages: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(_READ, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                return messages or None
            messages += self._unframer.push(data)
            if len(data) < _READ and (messages or not wait):
                return messages

    def close(self) -> None:
        """Close the socket; what was sent still arrives."""
        self._socket.close()


class LoopChannel(asyncio.Protocol):
    """An asyncio loop's end: ``received`` is called with each message, in order, from the loop."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for message in self._unframer.push(data):
            self._received(message)

    def send(self, payload: bytes) -> None:
        """Queue a message without waiting. What a reader that is gone no longer takes is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(payload))

    def close(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()
