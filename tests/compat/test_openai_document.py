"""OpenAI's published document, cut down to our routes, against what the server answers and takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs  # schemathesis' own, far faster than jsonschema
import pytest

from tests.compat.conftest import KEY, salted
from tests.compat.document import answered_well, as_answered, published, schemathesis
from tests.support.server import RunningServer

USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "w", "parameters": PARAMETERS, "strict": False},
}
FLAT = {"type": "function", "name": "weather", "description": "w", "parameters": PARAMETERS, "strict": False}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return published()


def check(document: dict[str, Any], schema: str, answer: Any) -> None:
    """``answer`` is what OpenAI's document calls ``schema``."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": document["components"]}
    for error in jsonschema_rs.Draft202012Validator(whole).iter_errors(answer):
        raise AssertionError(f"{schema} {list(error.instance_path)}: {error.message[:800]}")


def event_schema(document: dict[str, Any], event: Any) -> str:
    """The schema of an event of a streamed response, by its ``type``."""
    schemas = document["components"]["schemas"]
    for one in schemas["ResponseStreamEvent"]["anyOf"]:
        name = one["$ref"].rpartition("/")[2]
        if event["type"] in schemas[name].get("properties", {}).get("type", {}).get("enum", ()):
            return str(name)
    raise AssertionError(f"OpenAI knows no event {event['type']}")


CHATS: dict[str, dict[str, Any]] = {
    "text": {},
    "text, two": {"n": 2, "max_completion_tokens": 5},
    "text, logprobs": {"logprobs": True, "top_logprobs": 2},
    "call": {"tools": [TOOL]},
    "two": {"tools": [TOOL]},
    "thought": {},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
    "text, cut": {"max_output_tokens": 5},
    "text, logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "call": {"tools": [FLAT]},
    "two": {"tools": [FLAT], "tool_choice": "auto"},
    "thought": {},
    "json": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}}},
}


def events(text: str) -> Iterator[Any]:
    """The objects of a stream."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("name", CHATS)
def test_chat(served: RunningServer, document: dict[str, Any], name: str) -> None:
    body = {"model": "M", "messages": USER, **salted(name.partition(",")[0]), **CHATS[name]}
    answer = served.http().post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    check(document, "CreateChatCompletionResponse", answer.json())
    streamed = served.http().post("/v1/chat/completions", json={**body, "stream": True}).text
    found = list(events(streamed))
    assert len(found) > 1
    for event in found:
        check(document, "CreateChatCompletionStreamResponse", event)


@pytest.mark.parametrize("body", [{}, {"n": 2, "logprobs": 2}, {"echo": True, "max_tokens": 3}], ids=str)
def test_completions(served: RunningServer, document: dict[str, Any], body: dict[str, Any]) -> None:
    given = {"model": "M", "prompt": "x", **salted("text"), **body}
    answer = served.http().post("/v1/completions", json=given)
    check(document, "CreateCompletionResponse", answer.json())
    assert list(events(served.http().post("/v1/completions", json={**given, "stream": True}).text))


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(served: RunningServer, document: dict[str, Any], name: str) -> None:
    body = {"model": "M", "input": "hi", **salted(name.partition(",")[0]), **RESPONSES[name]}
    answer = served.http().post("/v1/responses", json=body).json()
    check(document, "Response", answer)
    kept = served.http().get(f"/v1/responses/{answer['id']}").json()
    assert kept == answer
    again = [USER[0], *answer["output"], {"role": "user", "content": [{"type": "input_text", "text": "so?"}]}]
    again += [{"role": "assistant", "content": "hm"}, {"role": "developer", "content": "Be brief."}]
    longer = served.http().post("/v1/responses", json={**body, "input": again}).json()
    items = served.http().get(f"/v1/responses/{longer['id']}/input_items").json()
    check(document, "ResponseItemList", items)
    found = list(events(served.http().post("/v1/responses", json={**body, "stream": True}).text))
    assert len(found) > 4
    for event in found:
        check(document, event_schema(document, event), event)
    queued = served.http().post("/v1/responses", json={**body, "background": True}).json()
    check(document, "Response", queued)


def test_models_and_errors(served: RunningServer, document: dict[str, Any]) -> None:
    check(document, "ListModelsResponse", served.http().get("/v1/models").json())
    check(document, "Model", served.http().get("/v1/models/M").json())
    wrong = served.http().post("/v1/chat/completions", json={"model": "M"})
    check(document, "ErrorResponse", wrong.json())


@pytest.mark.compat
@pytest.mark.timeout(1300)
def test_anything_that_openai_s_document_allows_or_not(keyed: RunningServer) -> None:
    """What is answered with 200 is what the document says, what it forbids is refused, and refusals have its shape."""
    document, before = as_answered(), answered_well(keyed, KEY)
    said = schemathesis(keyed, document, key=KEY, base="/v1")
    assert f"Tested: {sum(map(len, document['paths'].values()))}" in said
    good = answered_well(keyed, KEY) - before
    print(good)
    for path in (
        "/chat/completions",
        "/completions",
        "/embeddings",
        "/responses",
        "/responses/input_tokens",
        "/models",
    ):
        assert good["/v1" + path], f"no answer of {path} was looked at"
