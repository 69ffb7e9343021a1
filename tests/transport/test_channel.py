"""Messages over a stream socket, however the stream is cut."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.transport.channel import BlockingChannel, LoopChannel, Unframer, framed


@settings(derandomize=True, deadline=None)
@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30), min_size=1))
def test_messages_do_not_depend_on_how_the_stream_is_cut(messages: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(framed, messages))
    unframer, found, at, turn = Unframer(), [], 0, 0
    while at < len(stream):
        end = at + sizes[turn % len(sizes)]
        found += unframer.push(stream[at:end])
        at, turn = end, turn + 1
    assert found == messages


def pair() -> tuple[BlockingChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    return BlockingChannel(ours), theirs


def test_receive_takes_all_that_is_there_and_does_not_wait() -> None:
    channel, other = pair()
    assert channel.receive(wait=False) == []
    other.sendall(framed(b"a") + framed(b"") + framed(b"cd")[:5])
    assert channel.receive(wait=False) == [b"a", b""]
    assert channel.receive(wait=False) == []
    other.sendall(framed(b"cd")[5:])
    assert channel.receive(wait=True) == [b"cd"]
    channel.close()
    other.close()


def test_the_end_of_the_other_side_is_none_after_its_last_message() -> None:
    channel, other = pair()
    other.sendall(framed(b"last") + b"\x09\x00\x00\x00half")
    other.close()
    assert channel.receive(wait=True) == [b"last"]
    assert channel.receive(wait=True) is None
    assert channel.receive(wait=False) is None
    with pytest.raises(OSError, match=r"."):
        channel.send(b"x")
    channel.close()


def test_large_messages_pass_both_ways_in_order() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        engine = BlockingChannel(theirs)
        arrived: asyncio.Queue[bytes] = asyncio.Queue()
        channel = LoopChannel(arrived.put_nowait)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
        messages = [bytes([i]) * size for i, size in enumerate((0, 1, 255, 70_000, 3_000_000))]

        def echo() -> None:
            left = len(messages)
            while left:
                for message in engine.receive(wait=True) or ():
                    engine.send(message)
                    left -= 1

        work = asyncio.create_task(asyncio.to_thread(echo))
        for message in messages:
            channel.send(message)
        assert [await arrived.get() for _ in messages] == messages
        await work
        channel.close()
        channel.send(b"dropped")
        engine.close()

    asyncio.run(scenario())
