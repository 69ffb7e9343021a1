"""The fields that say what an answer must look like: OpenAI's, vLLM's, and vLLM's old ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qiao.errors import ParameterError
from qiao.structured_outputs import StructuredOutputsParams

GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Old name to new."""

CONSTRAINT_NAMES = ("response_format", "structured_outputs", *GUIDED, "guided_whitespace_pattern")

_NO_EFFECT = ("backend", "_backend", "_backend_was_auto", "disable_fallback")
"""Keys of ``structured_outputs`` that choose vLLM's library."""


def constraint_of(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The constraint of a body with the fields ``given``; None where it asks for plain text.

    Raises ``ParameterError`` naming the field.
    """
    found = {name: one for name in CONSTRAINT_NAMES if (one := _read(name, given)) is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise ParameterError(second, f"cannot be combined with {first}; give one of them")
    return next(iter(found.values()), None)


def _read(name: str, given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    value = given.get(name)
    if value is None or name == "guided_whitespace_pattern" or (name == "guided_json_object" and not value):
        return None
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        fields = {key: one for key, one in value.items() if key not in _NO_EFFECT and one is not None}
        unknown = set(fields) - set(StructuredOutputsParams.__struct_fields__) | {"origin"} & set(fields)
        if unknown:
            raise ParameterError(f"structured_outputs.{min(unknown)}", "is not a field of structured_outputs")
        return StructuredOutputsParams(**fields) if fields else None
    spaces = given.get("guided_whitespace_pattern")
    return StructuredOutputsParams(**{GUIDED[name]: value}, whitespace_pattern=spaces, origin=name)


def _response_format(value: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if kind == "text":
        return None
    schema = value.get("schema")  # where llama.cpp and others have it
    if schema is not None and kind in ("json_object", "json_schema") and value.get("json_schema") is None:
        if not isinstance(schema, Mapping):
            raise ParameterError("response_format.schema", f"must be a schema, an object, got {schema!r:.100}")
        return StructuredOutputsParams(json=dict(schema), origin="response_format.schema")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, origin="response_format")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(dict(value)), origin="response_format")
    if kind != "json_schema":
        raise ParameterError(
            "response_format.type", f"must be text, json_object, json_schema or structural_tag, got {kind!r:.100}"
        )
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(schema, Mapping):
        raise ParameterError("response_format.json_schema", "must be an object with a name and a schema, an object")
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ParameterError("response_format.json_schema.strict", f"must be true or false, got {strict!r:.100}")
    for name in ("name", "description"):
        if not isinstance(described.get(name, ""), str | None):
            raise ParameterError(f"response_format.json_schema.{name}", "must be a string")
    return StructuredOutputsParams(
        json=dict(schema), lenient=strict is False, origin="response_format.json_schema.schema"
    )
