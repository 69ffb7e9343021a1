"""Bad input: refused at once, by the field's name, in OpenAI's shape; and the server still answers afterwards."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"model": "M", "prompt": "a", "max_tokens": 2},
}


@pytest.fixture(autouse=True)
def still_alive(rand: RunningServer) -> Iterator[None]:
    yield
    answer = rand.http().post(TEXT, json=BASE[TEXT])
    assert answer.status_code == 200


def check(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    flat = answer.json()
    error = flat.pop("error")
    assert flat == {"object": "error", **{k: error[k] for k in ("message", "type", "param")}, "code": status}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    return error


BOTH: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-1, 2.5, "hot", True, [1])),
    *({"top_p": value} for value in (0, 1.5, "x")),
    *({"n": value} for value in (0, 100000, True, 1.5, "2")),
    *({"top_k": value} for value in (-2, 1.5)),
    *({"max_tokens": value} for value in (-1, 1.5, "3", True, 10**30)),
    *({"stop": value} for value in ("", [""], 3, [3], ["a"] * 100)),
    *({"seed": value} for value in (2**70, "s", 1.5)),
    *({"logit_bias": value} for value in ({"abc": 1}, {"5": "x"}, {"99999": 1}, [1], {str(i): 1 for i in range(2000)})),
    *({"stop_token_ids": value} for value in ([151645], [-3], [True], "x")),
    *({"allowed_token_ids": value} for value in ([], [400])),
    *({"bad_words": value} for value in ([""], ["w"] * 50000)),
    *({"stream": value} for value in ("yes", 1)),
    *({"stream_options": value} for value in ({"include_usage": True}, "x")),
    *({"min_tokens": value} for value in (-1, 5)),
    *({"min_p": value} for value in (-0.1, 2)),
    *({"repetition_penalty": value} for value in (0, -1, 1e-320, 1e300)),
    *({"presence_penalty": value} for value in (3, "x")),
    *({"truncate_prompt_tokens": value} for value in (0, -2, 100000)),
    *({"priority": value} for value in (1, 2**70, "high")),
    *({"cache_salt": value} for value in ("s" * 2000, 5)),
    *({"request_id": value} for value in ("", "a b", "x" * 200)),
    *({"prompt_logprobs": value} for value in (-2, 50, True)),
    *({field: value} for field, value in {
        "guided_json": {"not": {}}, "guided_regex": "(", "guided_choice": [""], "guided_grammar": "x",
        "use_beam_search": True,
        "logits_processors": ["x"], "kv_transfer_params": {"a": 1}, "prompt_embeds": "x", "length_penalty": 2.0,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_both_routes_refuse(rand: RunningServer, path: str) -> None:
    """B006, B007, B111, B113: each wrong or unsupported value is a 400 with its field in ``param``."""
    http = rand.http()
    for wrong in BOTH:
        (field,) = wrong
        answer = http.post(path, json={**BASE[path], **wrong})
        assert answer.status_code == 400, (wrong if len(str(wrong)) < 100 else field, answer.text[:300])
        check(answer, 400, field)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"suffix": "s"}, "suffix"),
        ({"suffix": {}}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 50}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 100000}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 100}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"stop": ["a"] * 500000}, "stop"),
    ],
)
def test_completions_refuse(rand: RunningServer, wrong: dict[str, Any], field: str) -> None:
    check(rand.http().post(TEXT, json={**BASE[TEXT], **wrong}), 400, field)


def test_a_wrong_first_token_is_told(rand: RunningServer) -> None:
    for wrong in (-1, 2**40, None, 1.5):
        error = check(rand.http().post(TEXT, json={**BASE[TEXT], "prompt": [wrong, 5]}), 400, "prompt")
        assert str(wrong) in error["message"]


def parts(kind: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"stop_token_ids": list(range(320)), "min_tokens": 1}, "stop_token_ids"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ],
)
def test_chat_refuses(rand: RunningServer, wrong: dict[str, Any], field: str) -> None:
    check(rand.http().post(CHAT, json={**BASE[CHAT], **wrong}), 400, field)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "nonsense"])
def test_parts_that_are_not_text_are_refused(rand: RunningServer, kind: str) -> None:
    """B015, last part."""
    error = check(rand.http().post(CHAT, json={**BASE[CHAT], **parts(kind)}), 400)
    assert kind in error["message"]
    assert error["param"].startswith("messages")


LONE = "a\\ud800b"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, '{"model":"M","max_tokens":2,"messages":[{"role":"user","content":"%s"}]}', "messages.0.content"),
        (CHAT, '{"model":"M","stream":true,"messages":[{"role":"user","content":"%s"}]}', "messages.0.content"),
        (TEXT, '{"model":"M","max_tokens":2,"prompt":"%s"}', "prompt"),
        (TEXT, '{"model":"M","max_tokens":2,"prompt":["b","%s"]}', "prompt.1"),
        (TEXT, '{"model":"M","max_tokens":2,"prompt":"a","stop":["%s"]}', "stop.0"),
        ("/tokenize", '{"model":"M","prompt":"%s"}', "prompt"),
    ],
)
def test_unpaired_surrogates(rand: RunningServer, path: str, body: str, field: str) -> None:
    """B026: refused before anything streams, by name; a proper pair is accepted."""
    headers = {"Content-Type": "application/json"}
    error = check(rand.http().post(path, content=body % LONE, headers=headers), 400, field.partition(".")[0])
    assert field in error["message"]
    assert "surrogate" in error["message"]
    assert rand.http().post(path, content=body % "\\ud83d\\ude00", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b'{"model":"M","prompt":"a","temperature":NaN}',
        b'{"model":"M","prompt":"a","temperature":Infinity}',
        b'{"model":"M","prompt":"a","temperature":1e999}',
        b'{"model":"M","prompt":"\xff"}',
        b'{"model":"M","prompt":"a\x00b"}',
        b'{"model":"M","prompt":' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"a":' * 50000 + b"1" + b"}" * 50000,
    ],
)
def test_bodies_that_are_not_json(rand: RunningServer, body: bytes) -> None:
    answer = rand.http().post(TEXT, content=body, headers={"Content-Type": "application/json"})
    check(answer, 400)


def test_content_type_method_route_and_size(rand: RunningServer) -> None:
    http = rand.http()
    body = json.dumps(BASE[TEXT])
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": content_type} if content_type else {}
        assert "Content-Type" in check(http.post(TEXT, content=body, headers=headers), 400)["message"]
    assert http.post(TEXT, content=body, headers={"Content-Type": "application/json; charset=utf-8"}).status_code == 200
    check(http.get(TEXT), 405)
    check(http.get("/nowhere"), 404)
    check(http.post(TEXT + "/", json=BASE[TEXT]), 404)
    compressed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (
        "Content-Encoding"
        in check(http.post(TEXT, content=gzip.compress(body.encode()), headers=compressed), 400)["message"]
    )
    check(http.post("/v1/nothing", json={}), 404)
    check(http.post(TEXT, content=b" " * (9 << 20), headers={"Content-Type": "application/json"}), 413)
    chunked = (b" " * (1 << 20) for _ in range(9))
    check(http.post(TEXT, content=chunked, headers={"Content-Type": "application/json"}), 413)


def test_head_and_the_allowed_methods(rand: RunningServer) -> None:
    http = rand.http()
    for path in ("/health", "/ping", "/v1/models", "/v1/models/M", "/version", "/metrics"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        if path not in ("/ping", "/health", "/metrics"):
            assert int(answer.headers["content-length"]) == len(http.get(path).content)
    assert http.head(TEXT).status_code == 405
    assert http.delete("/ping").headers["allow"] == "GET, HEAD, POST"
    assert http.put(TEXT).headers["allow"] == "POST"
    assert http.post("/v1/models").headers["allow"] == "GET, HEAD"


def test_long_prompts_are_refused_with_the_numbers(rand: RunningServer) -> None:
    for path, body in ((TEXT, {"prompt": "a" * 600}), (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})):
        error = check(rand.http().post(path, json={**BASE[path], **body}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [97]}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["yes", "no"]}, "bad_words": ["y", "n"]}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["yes"]}, "stop_token_ids": [101], "min_tokens": 3}, "structured_outputs"),
    ({"allowed_token_ids": [97], "bad_words": ["aa"]}, "allowed_token_ids"),
]
"""What leaves no token to choose from, sooner or later."""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("wishes", "field"), CONTRADICTIONS)
def test_wishes_that_exclude_each_other(
    rand: RunningServer, wishes: dict[str, Any], field: str, temperature: float
) -> None:
    body = {**BASE[TEXT], "max_tokens": 8, "temperature": temperature, **wishes}
    message = check(rand.http().post(TEXT, json=body), 400, field)["message"]
    assert "no token is left" in message
    assert all(name in message for name in wishes if name not in ("structured_outputs", "stop_token_ids"))


def test_tokenize_refuses(rand: RunningServer) -> None:
    http = rand.http()
    check(http.post("/tokenize", json={"model": "M"}), 400, "prompt")
    check(http.post("/tokenize", json={"model": "no", "prompt": "a"}), 404)
    check(http.post("/detokenize", json={"tokens": [5000]}), 400, "tokens")
    check(http.post("/detokenize", json={"tokens": [-1]}), 400, "tokens")
    check(http.post("/detokenize", json={"tokens": "x"}), 400, "tokens")


def test_a_neighbour_is_not_disturbed(rand: RunningServer) -> None:
    """B006: bad ids beside a running request change nothing in it."""
    body = {**BASE[TEXT], "prompt": "neighbour", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = rand.http().post(TEXT, json=body).json()["choices"]
    seen = ""
    with rand.http().stream("POST", TEXT, json={**body, "stream": True}) as answer:
        for number, line in enumerate(line for line in answer.iter_lines() if line):
            if number % 10 == 0:
                wrong = {**BASE[TEXT], "stop_token_ids": [151645], "min_tokens": 2}
                check(rand.http().post(TEXT, json=wrong), 400, "stop_token_ids")
            if line != "data: [DONE]":
                seen += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert seen == alone[0]["text"]
