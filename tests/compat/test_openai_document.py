"""OpenAI's published document, cut down to our routes, against what the server answers and takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs  # schemathesis' own, far faster than jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.compat.conftest import salted
from tests.support.server import RunningServer

DOCUMENT = Path(__file__).with_name("openai.json")
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "w", "parameters": PARAMETERS, "strict": False},
}
FLAT = {"type": "function", "name": "weather", "description": "w", "parameters": PARAMETERS, "strict": False}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def nullable(value: Any) -> Any:
    """The document's ``nullable: true``, a word of OpenAPI 3.0, as JSON Schema says it."""
    if isinstance(value, list):
        return [nullable(one) for one in value]
    if not isinstance(value, dict):
        return value
    plain = {k: nullable(v) for k, v in value.items() if k != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if value.get("nullable") is True else plain


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = nullable(json.loads(DOCUMENT.read_text(encoding="utf-8")))
    return found


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


# generated requests -------------------------------------------------------------------------------------------------

CHECKS = (
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
)
FUZZ = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
published = schemathesis.openapi.from_dict(nullable(json.loads(DOCUMENT.read_text(encoding="utf-8"))))


def bounded(body: Any) -> Any:
    """A generated body for the model that is served, with a short answer, so that many are good requests."""
    if isinstance(body, dict):
        body = {**body, "model": "M"}
        limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        body |= {name: 4 for name in limits if isinstance(body.get(name), int)}
    return body


@pytest.mark.compat
@published.parametrize()
@FUZZ
def test_anything_that_openai_s_document_allows(case: Any, real: RunningServer) -> None:
    """No server error, and what is answered with 200 is what the document says. A refusal is 400 and says why."""
    case.body = bounded(case.body)
    if case.path == "/completions" and isinstance(case.body, dict):
        case.body["stream"] = False  # the document has no words for what comes then
    if case.path == "/embeddings" and isinstance(case.body, dict):
        case.body["encoding_format"] = "float"  # nor for vectors in base64, which OpenAI's own client asks for
    case.headers = {**(case.headers or {}), "Authorization": "Bearer none"}
    response = case.call(base_url=real.url + "/v1", timeout=60)
    case.validate_response(response, checks=CHECKS if response.status_code == 200 else CHECKS[:1])
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
