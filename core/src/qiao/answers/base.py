"""What tool parsers are made of."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. ``arguments`` is JSON text of an object, empty where ``ArgumentsDelta`` pieces follow."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the last call."""

    text: str


Piece = str | ToolCall | ArgumentsDelta
"""A part of an answer, in order; a text is content."""


class ToolParser(ABC):
    """Finds the calls in one answer. ``tools`` maps each function's name to the schema of its parameters.

    A call that is not well formed stays content, word for word. A call is given once it is complete.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools

    @staticmethod
    def new_id() -> str:
        """An id for a call, in OpenAI's form."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @classmethod
    def marks_looked_for(cls) -> tuple[str, ...]:
        """The marks of a call. Where a tokenizer has them as special tokens, these must not be left out of the text."""
        return ()

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """What this next part of the answer brings."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """What is left at the end of the answer."""


def longest_start(text: str, marks: Iterable[str]) -> int:
    """Where the longest tail of ``text`` begins that is the beginning of one of ``marks``; its length if none."""
    cut = len(text)
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:length]):
                cut = min(cut, len(text) - length)
                break
    return cut


def loads(text: str) -> Any:
    """A strict JSON value. Raises ``ValueError``, for whatever reason."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def leading_value(text: str) -> tuple[Any, str]:
    """The JSON value that ``text`` begins with, and the rest behind it. Raises ``ValueError``."""
    bare = text.lstrip()
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(bare)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, bare[end:].lstrip()


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _refuse(digits)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dumps(value: Any) -> str:
    """JSON text that can be sent: characters as they are, unless one of them is half a surrogate pair.

    Raises ``ValueError`` for what has no JSON form.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def call_of(value: Any, keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall:
    """The call that ``{"name": ..., "arguments": {...}}`` means; arguments may also be JSON text, or be left out.

    Raises ``ValueError``.
    """
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping) and "name" not in value:
        value = value["function"]
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    arguments: Any = next((value[key] for key in keys if value.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments of a call are an object")
    return ToolCall(name, dumps(arguments))


def typed(text: str, schema: Any) -> Any:
    """An argument written without quotes, as the type that ``schema`` gives it: JSON where that fits, else the text."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = loads(text)
    except ValueError:
        return text
    return value if not kinds or kinds & _kinds_of(value) else text


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = found.union(*map(_kinds, schema[key]))
    if not found and isinstance(schema.get("enum"), list):
        found = found.union(*map(_kinds_of, schema["enum"]))
    return found


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}
