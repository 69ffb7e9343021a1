"""Streamed text over the scripted engine, whose tokens are known: nothing early, nothing lost, nothing twice."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.server import FAULT, FULL, RunningServer


def chunks(server: RunningServer, table: str, **body: Any) -> list[dict[str, Any]]:
    given = {"prompt": "x", "max_tokens": 20, "temperature": 0, "cache_salt": table, "stream": True, **body}
    with server.http().stream("POST", "/v1/completions", json=given) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def pieces(server: RunningServer, table: str, **body: Any) -> list[str]:
    return [chunk["choices"][0]["text"] for chunk in chunks(server, table, **body)]


def plain(server: RunningServer, table: str, **body: Any) -> dict[str, Any]:
    given = {"prompt": "x", "max_tokens": 20, "temperature": 0, "cache_salt": table, **body}
    return server.http().post("/v1/completions", json=given).json()["choices"][0]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["DEFGHIJ"], "", "stop"),
        (["DEFZ"], "DEFGHIJk", "stop"),
        (["GHI"], "DEF", "stop"),
        (["Jkz"], "DEFGHIJk", "stop"),
    ],
)
def test_stop_strings_never_show(chained: RunningServer, stop: list[str], text: str, reason: str) -> None:
    """B019."""
    got = chunks(chained, "stop", stop=stop)
    assert "".join(c["choices"][0]["text"] for c in got) == text == plain(chained, "stop", stop=stop)["text"]
    assert got[-1]["choices"][0]["finish_reason"] == reason


def test_text_held_back_comes_out_at_the_length_limit(chained: RunningServer) -> None:
    """B019, last part."""
    got = chunks(chained, "stop", stop=["FGZ"], max_tokens=4)
    assert "".join(c["choices"][0]["text"] for c in got) == "DEFG"
    assert got[-1]["choices"][0]["finish_reason"] == "length"


def test_half_a_character_at_the_prompts_end(chained: RunningServer) -> None:
    """B022."""
    body = {"prompt": [97, 98, 226, 130], "max_tokens": 2}
    streamed = "".join(pieces(chained, "euro", **body))
    assert streamed == plain(chained, "euro", **body)["text"]
    assert streamed == "€!"


def test_characters_over_several_tokens(chained: RunningServer) -> None:
    """B023, on both routes."""
    got = pieces(chained, "wide")
    assert not any("\ufffd" in piece for piece in got)
    assert [piece for piece in got if piece] == ["é", "漢", "😀", "y"]
    stream = chained.openai().chat.completions.create(
        **{"model": "M", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "stream": True},
        logprobs=True,
        extra_body={"cache_salt": "wide"},
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert [c.delta.content for c in choices if c.delta.content] == ["é", "漢", "😀", "y"]
    raw = [entry.bytes for c in choices if c.logprobs for entry in c.logprobs.content or []]
    assert [b for entry in raw[:-1] for b in entry or []] == list("é漢😀y".encode())
    assert all(len(entry or []) == 1 for entry in raw[:-1])


def test_a_leading_space_stays(chained: RunningServer) -> None:
    """B027."""
    assert (
        "".join(pieces(chained, "space", max_tokens=8)) == plain(chained, "space", max_tokens=8)["text"] == " leading"
    )


def test_text_without_spaces_flows(chained: RunningServer) -> None:
    """B029."""
    got = pieces(chained, "long", max_tokens=40)
    assert "".join(got) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcd"
    assert len(got) >= 40
    assert got[0] == "A"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_match_tokens_when_a_stop_string_is_cut(chained: RunningServer, stream: bool) -> None:
    """B032."""
    body = {"stop": ["STOP"], "logprobs": 1, "max_tokens": 12}
    found = [c["choices"][0] for c in chunks(chained, "word", **body)] if stream else [plain(chained, "word", **body)]
    lists = {key: [x for c in found for x in c["logprobs"][key]] for key in found[0]["logprobs"]}
    assert "".join(c["text"] for c in found) == "ab"
    assert len({len(entries) for entries in lists.values()}) == 1
    assert lists["tokens"] == list("abSTOP")
    assert lists["text_offset"] == list(range(6))
    chat = chained.http().post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "stop": ["STOP"], "logprobs": True, "cache_salt": "word"},
    )
    choice = chat.json()["choices"][0]
    assert choice["message"]["content"] == "ab"
    assert choice["stop_reason"] == "STOP"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list("abSTOP")


def test_a_stop_string_ends_the_work(chained: RunningServer) -> None:
    before = chained.metric("vllm:request_success_total", finished_reason="stop")
    assert plain(chained, "endless", stop=["aaa"], max_tokens=400)["finish_reason"] == "stop"
    chained.wait_for(lambda: chained.metric("vllm:num_requests_running") == 0)
    assert chained.metric("vllm:request_success_total", finished_reason="stop") == before + 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_connection_ends_the_work(chained: RunningServer, path: str, stream: bool) -> None:
    """B042 and its streamed relative."""
    body = {"cache_salt": "endless", "max_tokens": 450, "ignore_eos": True, "stream": stream, "n": 2}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    aborted = chained.metric("vllm:request_success_total", finished_reason="abort")
    with chained.http() as client:
        request = client.build_request("POST", path, json=body)
        if stream:
            answer = client.send(request, stream=True)
            next(answer.iter_lines())
            answer.close()
        else:
            with pytest.raises(Exception, match="timed out"):
                client.post(path, json=body, timeout=0.1)
    chained.wait_for(lambda: chained.metric("vllm:request_success_total", finished_reason="abort") == aborted + 2)
    chained.wait_for(lambda: chained.metric("vllm:num_requests_running") == 0)
    assert chained.metric("vllm:kv_cache_usage_perc") == 0
    assert chained.http().get("/load").json() == {"server_load": 0}


def test_a_failing_operator_is_a_clear_error(chained: RunningServer) -> None:
    body = {"prompt": [FAULT], "max_tokens": 2}
    for stream in (False, True):
        answer = chained.http().post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "operator attention raised: boom"
        assert answer.json()["error"]["code"] == "kernel_error"
    with pytest.raises(openai.InternalServerError, match="boom"):
        chained.openai().completions.create(model="M", prompt=[FAULT])


def test_a_failure_in_mid_stream_is_an_event(chained: RunningServer) -> None:
    """The second prompt fails after the first has begun."""
    body = {"prompt": [[120], [FAULT]], "cache_salt": "long", "stream": True, "max_tokens": 10}
    with chained.http().stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    if answer.status_code == 200:
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["error"]["message"] == "operator attention raised: boom"
    else:
        assert json.loads(lines[0])["error"]["message"] == "operator attention raised: boom"


def test_a_full_queue_is_503_with_retry_after(chained: RunningServer) -> None:
    before = (
        chained.metric("vllm:admission_rejections_total")
        if "admission_rejections_total{" in chained.http().get("/metrics").text
        else 0.0
    )
    answer = chained.http().post("/v1/completions", json={"prompt": [FULL], "stream": True})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "overloaded"
    assert chained.metric("vllm:admission_rejections_total") == before + 1
