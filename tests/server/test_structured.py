"""Structured outputs over HTTP and the real engine, by every name that clients use."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.server import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "北京"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "hi"}]


def chat(rand: RunningServer, **body: Any) -> str:
    answer = rand.http().post("/v1/chat/completions", json={"model": "M", "messages": USER, "max_tokens": 300, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def complete(rand: RunningServer, **body: Any) -> str:
    answer = rand.http().post("/v1/completions", json={"model": "M", "prompt": "hi", "max_tokens": 300, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


JSON_FIELDS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?", "guided_decoding_backend": "xgrammar"},
]
OTHERS = [
    ({"structured_outputs": {"regex": "a[bc]d"}}, {"abd", "acd"}),
    ({"guided_regex": "a[bc]d"}, {"abd", "acd"}),
    ({"structured_outputs": {"choice": ["ja", "nein"], "backend": "auto"}}, {"ja", "nein"}),
    ({"guided_choice": ["ja", "nein"]}, {"ja", "nein"}),
    ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, {"x", "yy"}),
    ({"guided_grammar": 'root ::= "x" | "yy"'}, {"x", "yy"}),
]


@pytest.mark.parametrize("route", [chat, complete])
def test_every_name_of_a_schema(rand: RunningServer, route: Any) -> None:
    for i, fields in enumerate(JSON_FIELDS):
        jsonschema.validate(json.loads(route(rand, seed=i, **fields)), SCHEMA)


@pytest.mark.parametrize("route", [chat, complete])
def test_every_name_of_the_others(rand: RunningServer, route: Any) -> None:
    for i, (fields, allowed) in enumerate(OTHERS):
        assert route(rand, seed=i, **fields) in allowed


def test_any_json_object(rand: RunningServer) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ):
        body = {"model": "M", "messages": USER, "max_tokens": 40, "logit_bias": {str(ord("}")): 30}, **fields}
        answer = rand.http().post("/v1/chat/completions", json=body).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) == {}


def test_schemas_in_the_places_of_other_servers(rand: RunningServer) -> None:
    """llama.cpp's server and hosts of open models take these; without the schema any object would do."""
    for kind in ("json_object", "json_schema"):
        fields = {"response_format": {"type": kind, "schema": SCHEMA}}
        jsonschema.validate(json.loads(chat(rand, seed=3, **fields)), SCHEMA)
        body = {"model": "M", "messages": USER, "response_format": {"type": kind, "schema": "x"}}
        answer = rand.http().post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["param"]) == (400, "response_format.schema")


def test_a_stream_gives_the_same(rand: RunningServer) -> None:
    """Letters of several bytes are split over tokens of one byte here."""
    asked = {"model": "M", "messages": USER, "max_tokens": 300, "seed": 5, "n": 3, **JSON_FIELDS[0]}
    client = rand.openai()
    whole = client.chat.completions.create(**asked)
    pieces = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == list(pieces.values())
    for text in pieces.values():
        jsonschema.validate(json.loads(text), SCHEMA)


class Point(BaseModel):
    """As people give it to the client's ``parse``."""

    model_config = ConfigDict(extra="forbid")
    on: bool
    kind: str | None


def test_the_client_parses_into_classes(rand: RunningServer) -> None:
    answer = rand.openai().chat.completions.parse(
        model="M", messages=USER, response_format=Point, max_tokens=200, seed=1, logit_bias={str(ord('"')): 8}
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


def test_log_probabilities_and_penalties_go_with_it(rand: RunningServer) -> None:
    answer = rand.openai().chat.completions.create(
        model="M", messages=USER, logprobs=True, top_logprobs=2, frequency_penalty=1.0, extra_body=OTHERS[0][0]
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content


def schema(**keys: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": keys}}}


def deep(levels: int) -> Any:
    return {"type": "array", "items": deep(levels - 1)} if levels else {"type": "null"}


WRONG = [
    (schema(type="array", uniqueItems=True), "response_format.json_schema.schema", "uniqueItems"),
    (schema(**{"not": {"type": "string"}}), "response_format.json_schema.schema", "not"),
    (schema(type="nothing"), "response_format.json_schema.schema", "nothing"),
    (schema(**{"$ref": "http://127.0.0.1:1/x"}), "response_format.json_schema.schema", "127.0.0.1"),
    (schema(items=deep(200)), "response_format.json_schema.schema", "nested"),
    (schema(properties={f"p{i}": {} for i in range(2000)}), "response_format.json_schema.schema", "2000 properties"),
    (schema(anyOf=[{"const": i} for i in range(1001)]), "response_format.json_schema.schema", "1001 branches"),
    (schema(enum=["x" * 1000] * 200), "response_format.json_schema.schema", "characters"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": "json"}, "response_format", ""),
    ({"structured_outputs": {"regex": "(?=x)a"}}, "structured_outputs.regex", "look-around"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", ""),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"grammar": 'start: "a" b'}}, "structured_outputs.grammar", "b"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structures"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json"),
]


def test_what_cannot_be_enforced_is_refused_by_name(rand: RunningServer) -> None:
    for path, base in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "a"})):
        for body, field, word in WRONG:
            answer = rand.http().post(path, json={"model": "M", "max_tokens": 2, **base, **body})
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert error["param"] == field, error
            assert word in error["message"]


def test_keywords_that_cannot_be_enforced_are_ignored_where_the_client_says_so(rand: RunningServer) -> None:
    described = {"name": "n", "schema": {"enum": [1, 2], "not": {"const": 3}}, "strict": False}
    assert chat(rand, response_format={"type": "json_schema", "json_schema": described}) in ("1", "2")


def test_structural_tags(rand: RunningServer) -> None:
    """Free text, and behind a begin the schema."""
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": [7]}, "end": "</f>"}], "triggers": ["<f"]}
    body = {"model": "M", "prompt": "a", "max_tokens": 60, "seed": 0, "logit_bias": {"60": 40, "102": 40}}
    answer = rand.http().post(
        "/v1/completions", json={**body, "structured_outputs": {"structural_tag": json.dumps(tag)}}
    )
    text = answer.json()["choices"][0]["text"]
    at = text.index("<f")
    assert text[at : at + 8] == "<f>7</f>"
