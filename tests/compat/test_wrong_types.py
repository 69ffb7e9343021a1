"""Every field that OpenAI's document describes for responses, with a value of a wrong type: each is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import pytest

from tests.compat.conftest import salted
from tests.compat.document import as_answered
from tests.support.server import RunningServer

LEFT_OUT = object()
WRONG = ({"x": 1}, [], [7], "?", "", "x" * 2000, 7, 0.5, True, LEFT_OUT)
"""Tried in each place; those that the document allows there are left out."""

Path = tuple[str | int, ...]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "w",
    "parameters": PARAMETERS,
    "strict": False,
    "allowed_callers": ["direct"],
}
LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97]}
ANNOTATIONS = [
    {"type": "file_citation", "file_id": "f", "index": 0, "filename": "a.txt"},
    {"type": "url_citation", "url": "http://a.example/", "title": "t", "start_index": 0, "end_index": 1},
    {
        "type": "container_file_citation",
        "container_id": "c",
        "file_id": "f",
        "start_index": 0,
        "end_index": 1,
        "filename": "a.txt",
    },
    {"type": "file_path", "file_id": "f", "index": 0},
]
SAID = {
    "type": "output_text",
    "text": "b",
    "annotations": ANNOTATIONS,
    "logprobs": [LOGPROB | {"top_logprobs": [LOGPROB]}],
}
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
ITEMS: list[Any] = [
    {"role": "user", "content": "a"},
    {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [SAID]},
    {
        "type": "message",
        "id": "n",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "refusal", "refusal": "no"}],
    },
    {
        "type": "reasoning",
        "id": "r",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "t"}],
    },
    CALL | {"caller": {"type": "direct"}},
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    CALL | {"call_id": "d", "caller": {"type": "program", "caller_id": "p"}},
    {
        "type": "function_call_output",
        "call_id": "d",
        "output": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        "caller": {"type": "program", "caller_id": "p"},
    },
]
ASKED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "stream": True,
    "stream_options": {},
    "prompt_cache_options": {},
}
"""What only a request for an answer has."""

BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "hi", "reasoning": {}, "text": {"format": {"type": "text"}}},
    "items": {"input": ITEMS},
    "function": {"input": "hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
    "allowed": {
        "input": "hi",
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    },
    "json": {"input": "hi", "text": {"format": {"type": "json_object"}}},
    "schema": {
        "input": "hi",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": False}},
    },
}


class Places:
    """The document's schemas, and where in a body they say what a value must be."""

    def __init__(self) -> None:
        self.document = as_answered()
        self._valid = cache(self._validator)

    def body(self, path: str) -> Any:
        """The schema of a route's body."""
        return self.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    def _validator(self, name: str) -> Any:
        whole = {"$ref": f"#/components/schemas/{name}", "components": self.document["components"]}
        return jsonschema_rs.Draft202012Validator(whole)

    def allows(self, schema: Any, value: Any) -> bool:
        """Whether ``value`` is what ``schema`` says."""
        if "$ref" in schema:
            return bool(self._valid(schema["$ref"].rpartition("/")[2]).is_valid(value))
        for key, combine in (("anyOf", any), ("allOf", all)):
            if key in schema:
                return combine(self.allows(one, value) for one in schema[key])
        whole = {**schema, "components": self.document["components"]}
        return bool(jsonschema_rs.Draft202012Validator(whole).is_valid(value))

    def _shapes(self, schema: Any, value: Any) -> Iterator[Any]:
        """The plain schemas that ``value`` follows."""
        if "$ref" in schema:
            yield from self._shapes(self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], value)
        elif "anyOf" in schema or "allOf" in schema:
            options = [one for one in schema.get("anyOf", ()) if self.allows(one, value)]
            for one in [*options, *schema.get("allOf", ())]:
                yield from self._shapes(one, value)
        else:
            yield schema

    def below(self, schema: Any, value: Any, path: Path = ()) -> Iterator[Path]:
        """Each field that ``value`` has or might have, and each entry of a list."""
        for shape in self._shapes(schema, value):
            inside: list[tuple[str | int, Any]] = []
            if isinstance(value, dict):
                fields, others = shape.get("properties", {}), shape.get("additionalProperties")
                inside = list(fields.items())
                if isinstance(others, dict):
                    inside += [(name, others) for name in value if name not in fields]
            elif isinstance(value, list) and "items" in shape:
                inside = [(i, shape["items"]) for i in range(len(value))]
            for name, one in inside:
                yield (*path, name)
                if isinstance(name, int) or name in value:
                    yield from self.below(one, value[name], (*path, name))


def changed(body: Any, path: Path, value: Any) -> Any:
    """``body`` with ``value`` at ``path``."""
    *above, last = path
    copied = place = copy.deepcopy(body)
    for name in above:
        place = place[name]
    if value is not LEFT_OUT:
        place[last] = value
    elif isinstance(place, list):
        place.pop()
    else:
        place.pop(last, None)
    return copied


@pytest.fixture(scope="module")
def places() -> Places:
    return Places()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/responses", "/responses/input_tokens"])
def test_a_wrong_type_anywhere_is_refused(served: RunningServer, places: Places, path: str, name: str) -> None:
    schema = places.body(path)
    good = {"model": "M", **BODIES[name], **(ASKED if path == "/responses" else {})}
    taken, tried, fields = [], 0, dict.fromkeys(places.below(schema, good))
    with served.http() as client:
        answer = client.post("/v1" + path, json=good | salted("json"))
        assert answer.status_code == 200, answer.text
        assert places.allows(schema, good)
        for field in fields:
            for value in WRONG:
                bad = changed(good, field, value)
                if places.allows(schema, bad):
                    continue
                tried += 1
                status = client.post("/v1" + path, json=bad | salted("json")).status_code
                if status != 400:
                    taken.append((".".join(map(str, field)), "left out" if value is LEFT_OUT else value, status))
    print(len(fields), tried)
    assert not taken, "\n".join(map(str, taken))
    assert tried > len(fields)
