"""Malformed requests against a real server: a seeded sample of those that ``benchmarks/malformed.py`` sends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from qiao.errors import ParameterError
from qiao.server.body import parse_json
from qiao.server.errors import ApiError
from qiao.server.protocol import chat, completions, embeddings, items, messages, responses, tokenize
from qiao.server.protocol.common import Body

from benchmarks.malformed_client import Outcome, Tally, bombard, judge
from benchmarks.malformed_requests import CUT, READ, WEIGHTS, Bad, Route, post_routes, requests
from tests.support.server import RunningServer

LIMIT = 8 << 20


def test_a_sample_of_every_kind(rand: RunningServer) -> None:
    routes = post_routes(rand.http().get("/openapi.json").json())
    assert len(routes) > 12
    assert all(route.fields for route in routes if route.path not in ("/ping", "/v1/responses/{response_id}/cancel"))
    good = {"model": "M", "prompt": "hi", "max_tokens": 4, "temperature": 0}
    before = rand.http().post("/v1/completions", json=good).json()["choices"]
    tally = Tally()
    asyncio.run(bombard(rand.url, requests(7, 250, routes, LIMIT), rate=0.0, at_once=4, done=tally.note))
    assert tally.faults == []
    assert set(tally.by_kind) == set(WEIGHTS)
    statuses = {status for found in tally.by_kind.values() for status in found}
    assert {"200", "400", "404", "413"} <= statuses
    assert rand.http().post("/v1/completions", json=good).json()["choices"] == before
    rand.wait_for(lambda: rand.metric("vllm:num_requests_running") == 0)
    assert rand.metric("qiao:engine_restarts") == 0


BODIES = [
    chat.ChatRequest,
    chat.ChatMessage,
    completions.CompletionRequest,
    embeddings.EmbeddingRequest,
    embeddings.ScoreRequest,
    embeddings.RerankRequest,
    messages.MessagesRequest,
    responses.ResponsesRequest,
    tokenize.TokenizeRequest,
    tokenize.DetokenizeRequest,
    *(items.ContentPart, items.SentReasoning, items.FunctionTool, items.SentLogprob),
]

LONG = [
    *([7] * 20_000, ["x"] * 20_000, [{}] * 20_000, [[]] * 20_000, [{}] * 900, [7] * 900),
    *({str(i): [] for i in range(20_000)}, {str(i): "x" for i in range(20_000)}, {f"k{i}": 7 for i in range(20_000)}),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_long_value_makes_few_errors(body: type[Body]) -> None:
    """Pydantic would make one for each wrong entry: 600 MB and three seconds for 200,000."""
    for name in body.model_fields:
        for value in LONG:
            try:
                body.model_validate({name: value})
            except ValidationError as error:
                assert error.error_count() < 20, (name, str(value)[:40])
            except ParameterError:
                pass


def test_large_bodies_are_not_explained() -> None:
    """They would be walked through in Python, while everybody waits."""
    for size, said in ((10, "user: contains an unpaired surrogate"), (2 << 20, "the body is not valid JSON")):
        with pytest.raises(ApiError) as caught:
            parse_json(b'{"user": "\\ud800' + b"a" * size + b'"}')
        assert (caught.value.status_code, str(caught.value.detail)[: len(said)]) == (400, said)


def test_the_same_seed_gives_the_same_requests() -> None:
    routes = [Route("/v1/completions", ("model", "n"))]
    first, second, third = (list(requests(seed, 60, routes, 1000)) for seed in (1, 1, 2))
    assert first == second != third


def answer(status: int, body: str, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} Some Words\r\ncontent-type: x\r\n{headers}\r\n{body}".encode()


GOOD = '{"error": {"message": "no"}}'
STREAM = "content-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (answer(500, GOOD), "status 500"),
        (answer(503, GOOD), "status 503"),
        (answer(503, GOOD, "Retry-After: 1\r\n"), ""),
        (answer(504, GOOD), ""),
        (answer(200, "{}") + answer(502, ""), "status 502"),
        (answer(400, "{}"), "an error without an error object"),
        (answer(400, '{"error": {"message": ""}}'), "an error without a message"),
        (answer(400, "Invalid HTTP request received."), ""),
        (answer(400, GOOD), ""),
        (answer(200, "{}"), ""),
        (answer(200, 'data: {"error": {}, "code": 500}\n', STREAM), "an error of 500 within the stream"),
        (answer(200, 'data: {"error": {}, "code": 400}\n', STREAM), ""),
        (b"", "closed without an answer"),
    ],
)
def test_what_counts_as_a_fault(data: bytes, wrong: str) -> None:
    outcome = Outcome(Bad("field", "x", (b"",), end=READ))
    judge(outcome, data)
    assert outcome.wrong == wrong


def test_a_client_that_leaves_needs_no_answer() -> None:
    outcome = Outcome(Bad("cut", "x", (b"",), end=CUT))
    judge(outcome, b"")
    assert outcome.wrong == ""
    tally: Any = Tally()
    tally.note(outcome)
    assert tally.by_kind == {"cut": {"none": 1}}
