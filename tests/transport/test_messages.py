"""Messages survive the wire, and errors keep class, field and text."""

from __future__ import annotations

import msgspec
import pytest
from qiao import errors
from qiao.engine.request import EngineInfo, EngineRequest, EngineStats, FallbackCount, SequenceOutput, TokenLogprobs
from qiao.sampling_params import RequestOutputKind, SamplingParams
from qiao.transport.messages import Failed, FromEngine, Ready, Step, Submit, ToEngine, describe_error, rebuild_error


def test_round_trip() -> None:
    params = SamplingParams(n=2, logit_bias={5: -1.5}, stop=["a"], output_kind=RequestOutputKind.DELTA, seed=-7)
    request = EngineRequest(request_id="é", prompt_token_ids=[1, 2**31], params=params, arrival=1.25, cache_salt="s")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(request)), type=ToEngine) == Submit(request)
    logprobs = [None, TokenLogprobs([1, 2], [-0.5, float("-inf")], 1)]
    step = Step(
        [SequenceOutput(request_id="é", token_ids=[3], prompt_logprobs=logprobs, finish_reason="stop")],
        EngineStats(running=1, fallbacks=[FallbackCount("attention", 3, 4, 5, 0.5)]),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=FromEngine) == step
    facts = {"device": "cpu", "dtype": "float32", "plan": {"rows": [1]}}
    numbers = ("max_model_len", "vocab_size", "block_size", "num_blocks", "max_num_seqs", "max_num_queued")
    info = Ready(EngineInfo(**facts, **dict.fromkeys(numbers, 1)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=FromEngine) == info


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n not in ("ParameterError", "OverloadedError")])
def test_errors_keep_their_class(name: str) -> None:
    wire = msgspec.msgpack.encode(Failed(describe_error(getattr(errors, name)("what and remedy"))))
    rebuilt = rebuild_error(msgspec.msgpack.decode(wire, type=Failed).error)
    assert type(rebuilt).__name__ == name
    assert str(rebuilt) == "what and remedy"


def test_errors_keep_field_and_delay() -> None:
    field = rebuild_error(describe_error(errors.ParameterError("top_p", "must be 1")))
    assert isinstance(field, errors.ParameterError)
    assert (field.field, str(field)) == ("top_p", "top_p: must be 1")
    full = rebuild_error(describe_error(errors.OverloadedError("full", 7)))
    assert isinstance(full, errors.OverloadedError)
    assert full.retry_after == 7
    assert str(rebuild_error(describe_error(KeyError("x")))) == "KeyError: 'x'"
