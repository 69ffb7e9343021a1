"""From a constraint to a grammar of llguidance, checked and bounded, before the engine sees it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qiao.errors import ParameterError
from qiao.frontend.patterns import check_pattern
from qiao.structured_outputs import MAX_CHARACTERS, MAX_DEPTH, StructuredOutputsParams, parser_limits

MAX_KEPT = 256
"""Checked grammars that are remembered."""

MAX_KEPT_CHARACTERS = 1 << 22
"""Characters of all of them together; the largest are a hundred thousand each."""

MAX_PROPERTIES = 1000
"""Properties of all objects of a JSON schema together; the work grows with their square."""

MAX_BRANCHES = 1000
"""Entries of all ``anyOf``, ``oneOf`` and ``allOf`` of a JSON schema together; 3,000 that lead to themselves take more
than a minute to compile.
"""

_BRANCHES = ("anyOf", "oneOf", "allOf")

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""What may stand between the tokens of JSON. It is bounded, because a model that has lost its way writes spaces."""


@dataclass(frozen=True)
class _Refused:
    """Why a constraint cannot be enforced: what a ``ParameterError`` says. The exception itself would keep the frames
    that it passed through, and with them every part of the schema.
    """

    field: str
    detail: str


class GrammarChecker:
    """Makes the grammar of a constraint, and remembers the last ones, ``MAX_KEPT`` and ``MAX_KEPT_CHARACTERS`` at
    most. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, str | _Refused] = OrderedDict()
        self._characters = 0

    @property
    def kept(self) -> int:
        """Characters of all that is remembered."""
        return self._characters

    def grammar(self, params: StructuredOutputsParams) -> str:
        """The grammar's text for the engine.

        Raises ``ParameterError`` naming the field, and the keyword or place that cannot be enforced.
        """
        key = hashlib.sha256(repr(params).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            try:
                found = _checked(params)
            except ParameterError as error:
                found = _Refused(error.field, error.detail)
            with self._lock:
                self._remember(key, found)
        if isinstance(found, _Refused):
            raise ParameterError(found.field, found.detail)
        return found

    def _remember(self, key: bytes, found: str | _Refused) -> None:
        self._characters += _size(found) - _size(self._known.get(key, ""))
        self._known[key] = found
        while len(self._known) > MAX_KEPT or self._characters > MAX_KEPT_CHARACTERS:
            self._characters -= _size(self._known.popitem(last=False)[1])


def _size(found: str | _Refused) -> int:
    return len(found) if isinstance(found, str) else len(found.detail)


def _checked(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    where = params.where(params.kind)
    try:
        text = _source(params, where)
    except ParameterError:
        raise
    except ValueError as error:  # the library's: numbers out of range, a bare true or false
        raise ParameterError(where, _plain(str(error))) from None
    wrong, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=parser_limits())
    if wrong:
        raise ParameterError(where, _plain(messages[0]))
    return text


def _source(params: StructuredOutputsParams, where: str) -> str:
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        check_pattern(params.regex, where)
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in params.choice)
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    if params.structural_tag is not None:
        return _structural_tag(params.structural_tag, where)
    schema = {"type": "object"} if params.json_object else read_schema(params.json, where)
    if params.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE, "lenient": params.lenient}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False, "lenient": params.lenient}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]


def read_schema(schema: Any, where: str) -> Any:
    """A JSON schema from an object or from text, within the bounds. Raises ``ParameterError`` for ``where``."""
    if isinstance(schema, str):
        if len(schema) > MAX_CHARACTERS:
            raise ParameterError(where, f"has {len(schema)} characters, at most {MAX_CHARACTERS}")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ParameterError(where, f"is not a JSON schema: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ParameterError(where, f"must be a JSON schema, an object, got {schema!r:.100}")
    _check_size(schema, where)
    return schema


def _check_size(schema: Any, where: str) -> None:
    level, depth, properties, branches = [schema], 0, 0, 0
    while level:
        depth += 1
        if depth > 2 * MAX_DEPTH:  # a level of a schema is two of JSON: {"properties": {"a": {
            raise ParameterError(where, f"is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                named = one.get("properties")
                properties += len(named) if isinstance(named, Mapping) else 0
                branches += sum(len(part) for key in _BRANCHES if isinstance(part := one.get(key), list))
                below += one.values()
            elif isinstance(one, list):
                below += one
        level = below
    if properties > MAX_PROPERTIES:
        raise ParameterError(where, f"has {properties} properties, at most {MAX_PROPERTIES}")
    if branches > MAX_BRANCHES:
        raise ParameterError(where, f"has {branches} branches in {', '.join(_BRANCHES)}, at most {MAX_BRANCHES}")
    size = len(json.dumps(schema))
    if size > MAX_CHARACTERS:
        raise ParameterError(where, f"has {size} characters, at most {MAX_CHARACTERS}")


def _closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties`` false wherever an object names properties and says nothing of others."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _structural_tag(text: str, where: str) -> str:
    """vLLM's ``{"structures": [{"begin", "schema", "end"}], "triggers": [..]}``: free text, and JSON behind a begin."""
    from llguidance import StructTag

    try:
        value = json.loads(text)
        triggers = [str(one) for one in value["triggers"]]
        parts = [(str(s["begin"]), s["schema"], str(s["end"])) for s in value["structures"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(where, f"needs structures (begin, schema, end) and triggers: {error!r}") from None
    tags = []
    for begin, schema, end in parts:
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise ParameterError(where, f"no trigger begins {begin!r:.100}")
        checked = json.dumps(read_schema(schema, where))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=checked, end=end))
    if not tags:
        raise ParameterError(where, "needs at least one structure")
    return StructTag.to_grammar(tags, assume_special=False)


def _plain(message: str) -> str:
    """The library's message on one line, without the excerpt of a generated grammar."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not set(line) <= {"^"} and not line.split("|")[0].strip().isdigit()]
    return "cannot be enforced: " + " ".join(kept)[:400]
