"""The engine process's loop, over a socket that the test holds the other end of."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest
from qiao.config import EngineArgs
from qiao.engine.request import EngineRequest
from qiao.sampling_params import SamplingParams
from qiao.transport import host
from qiao.transport.channel import BlockingChannel
from qiao.transport.messages import FromEngine, Step, Stop, Submit, ToEngine

from tests.support.server import EOS, ScriptedEngine, chain


def test_an_idle_engine_gives_memory_back_once_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    engine = ScriptedEngine(EngineArgs(model="scripted", hf_overrides={"table": chain("x>horse")}))
    busy: list[bool] = []
    monkeypatch.setattr(host, "TIDY_INTERVAL", 0.0)
    monkeypatch.setattr(host, "give_back", lambda: busy.append(engine.has_work()))
    loop = host.EngineLoop(engine, BlockingChannel(theirs))
    thread = threading.Thread(target=loop.run)
    thread.start()
    channel = BlockingChannel(ours)

    def send(message: ToEngine) -> None:
        channel.send(msgspec.msgpack.encode(message))

    def answer() -> list[int]:
        found: list[int] = []
        while EOS not in found:
            for payload in channel.receive(wait=True) or ():
                message = msgspec.msgpack.decode(payload, type=FromEngine)
                assert isinstance(message, Step)
                found += [token for output in message.outputs for token in output.token_ids]
        return found

    for name in ("a", "b"):
        params = SamplingParams(max_tokens=16)
        asked = EngineRequest(
            request_id=name, prompt_token_ids=[ord("x")], params=params, arrival=0.0, eos_token_ids=[EOS]
        )
        send(Submit(asked))
        assert answer() == [*b"horse", EOS]
    send(Stop())
    thread.join(60)
    assert not thread.is_alive()
    assert busy == [False, False], "after each piece of work, never while it works"
    ours.close()
