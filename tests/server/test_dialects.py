"""What vLLM renamed or dropped: the old form and the new one mean the same here (``docs/migrating-from-vllm.md``)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from qiao import SamplingParams
from qiao.config import EngineArgs
from qiao.errors import ParameterError
from qiao.frontend.chat import normalise_messages
from qiao.llm.arguments import engine_args
from qiao.server.flags import ParsedFlags, parse
from qiao.server.protocol.chat import ChatRequest
from qiao.server.protocol.completions import CompletionRequest

from tests.support.server import RunningServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = [{"role": "user", "content": "hi"}]

BODIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
    ({"guided_json_object": True}, {"structured_outputs": {"json_object": True}}),
    ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?", "guided_decoding_backend": "outlines"},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
    ),
    ({"top_k": -1}, {"top_k": 0}),
    ({"max_tokens": 5}, {"max_completion_tokens": 5}),
]
"""Fields of a request, old and new."""


def meaning(body: dict[str, Any]) -> Any:
    """What a chat request asks of the engine, whatever its fields were called."""
    request = ChatRequest.model_validate({"messages": USER, **body})
    constraint = request.constraint()
    shown = (
        None
        if constraint is None
        else {n: getattr(constraint, n) for n in constraint.__struct_fields__ if n != "origin"}
    )
    given = {name: value for name, value in request.given_sampling().items() if value is not None}
    params = SamplingParams(**given)
    params.top_k = max(params.top_k, 0)  # both are off
    return params, shown


@pytest.mark.parametrize(("old", "new"), BODIES, ids=[", ".join(old) for old, _ in BODIES])
def test_fields_of_a_request(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert repr(meaning(old)) == repr(meaning(new))
    assert repr(meaning(old)) != repr(meaning({})) or "top_k" in old


FLAGS: list[tuple[list[str], list[str]]] = [
    (["--override-pooler-config", '{"pooling_type": "MEAN"}'], ["--pooler-config", '{"pooling_type": "MEAN"}']),
    (
        ["--rope-scaling", '{"rope_type": "linear", "factor": 2}'],
        ["--hf-overrides", '{"rope_scaling": {"rope_type": "linear", "factor": 2}}'],
    ),
    (["--rope-theta", "1000000"], ["--hf-overrides", '{"rope_theta": 1000000}']),
    (["--task", "generate"], ["--runner", "generate"]),
    (["--task", "embed"], ["--runner", "pooling", "--convert", "embed"]),
    (["--device", "cpu"], ["--device=cpu"]),
    (["--quantization", "gguf"], ["-q", "gguf"]),
    *(
        ([*flag.split()], [])
        for flag in (
            "--swap-space 4",
            "--preemption-mode recompute",
            "--num-scheduler-steps 8",
            "--use-v2-block-manager",
            "--max-seq-len-to-capture 8192",
            "--disable-async-output-proc",
            "--enable-reasoning",
            "--disable-log-requests",
            "--disable-frontend-multiprocessing",
            "--guided-decoding-backend xgrammar",
        )
    ),
]
"""Flags of ``vllm serve``, old and new; what has become a matter of course is nothing."""


def parsed(argv: list[str]) -> ParsedFlags:
    return parse(["M", "--api-key", "x", *argv])


@pytest.mark.parametrize(("old", "new"), FLAGS, ids=[old[0] for old, _ in FLAGS])
def test_flags_of_the_server(old: list[str], new: list[str]) -> None:
    before, after = parsed(old), parsed(new)
    assert (before.engine, before.server) == (after.engine, after.server)
    assert bool(before.notes) == (not new)  # what has no effect is said
    underscored = [word.replace("-", "_").replace("__", "--", 1) if word.startswith("--") else word for word in old]
    assert parsed(underscored).engine == before.engine


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"override_pooler_config": {"pooling_type": "MEAN"}}, {"pooler_config": {"pooling_type": "MEAN"}}),
        ({"rope_theta": 5.0}, {"hf_overrides": {"rope_theta": 5.0}}),
        ({"task": "embed"}, {"runner": "pooling", "convert": "embed"}),
        ({"swap_space": 4, "max_seq_len_to_capture": 8192, "disable_async_output_proc": True}, {}),
    ],
    ids=str,
)
def test_arguments_of_the_offline_class(
    old: dict[str, Any], new: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert engine_args("M", old) == engine_args("M", new)
    assert engine_args("M", new) != EngineArgs(model="M") or "override" not in str(old)
    assert [name for name in old if name in caplog.text] == ([] if new else list(old))


def test_a_file_of_flags_takes_the_old_names_too(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: M\nrope-scaling:\n  rope_type: linear\n  factor: 2\nrope_theta: 5\nswap-space: 4\n")
    assert parse(["--config", str(path)]).engine.hf_overrides == {
        "rope_scaling": {"rope_type": "linear", "factor": 2},
        "rope_theta": 5,
    }


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_names_of_the_reasoning_in_a_message(name: str) -> None:
    """Answers carry both (``tests/server/test_tools.py``)."""
    turns = [*USER, {"role": "assistant", "content": "b", name: "because"}]
    assert normalise_messages(turns)[1]["reasoning_content"] == "because"


def test_shapes_of_an_error(chained: RunningServer) -> None:
    answer = chained.http().post("/v1/completions", json={"model": "M", "prompt": "x", "temperature": -1})
    body = answer.json()
    nested = body["error"]
    assert (body["object"], body["code"]) == ("error", answer.status_code)
    assert [body[name] for name in ("message", "type", "param")] == [nested[n] for n in ("message", "type", "param")]
    assert (nested["param"], nested["code"]) == ("temperature", "invalid_value")


def test_per_request_processors_are_refused_and_best_of_is_not() -> None:
    with pytest.raises(ValueError, match="logits_processors"):
        CompletionRequest.model_validate({"prompt": "x", "logits_processors": ["a.b"]})
    assert CompletionRequest.model_validate({"prompt": "x", "best_of": 2}).best_of == 2
    with pytest.raises(ParameterError, match="top_k"):
        SamplingParams(top_k=-2)
