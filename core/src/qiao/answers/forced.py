"""Calls that a request demands: the constraint that makes the model write them as JSON, and the parsers of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qiao.answers.base import ArgumentsDelta, Piece, ToolCall, ToolParser, call_of, leading_value
from qiao.structured_outputs import StructuredOutputsParams

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def forced_constraint(
    tools: Mapping[str, Mapping[str, Any]], name: str | None, several: bool, strict: bool
) -> StructuredOutputsParams:
    """What an answer must look like that calls ``name``, or for None at least one of ``tools`` (``several``: or more).

    The first is the arguments alone; the second a list of objects with name and parameters, as in vLLM. Keywords of the
    schemas that cannot be enforced are left out of account unless ``strict``.
    """
    if name is not None:
        return _constraint(dict(tools[name] or _ANY_OBJECT), strict)
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for one, parameters in tools.items():
        schema = dict(parameters or _ANY_OBJECT)
        for key in ("$defs", "definitions"):
            shared.setdefault(key, {}).update(schema.pop(key, {}))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": one}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    items.update({key: value for key, value in shared.items() if value})
    if not several:
        items["maxItems"] = 1
    return _constraint(items, strict)


def _constraint(schema: dict[str, Any], strict: bool) -> StructuredOutputsParams:
    """With at most one space between tokens: nobody reads the calls, and a model may get lost in spaces."""
    return StructuredOutputsParams(json=schema, whitespace_pattern=" ?", lenient=not strict, origin="tools")


class NamedParser(ToolParser):
    """The answer is the arguments of the one function that may be called, given on as they come."""

    def __init__(self, name: str) -> None:
        super().__init__({})
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        if not text:
            return []
        begun, self._begun = self._begun, True
        return [ArgumentsDelta(text)] if begun else [ToolCall(self._name, ""), ArgumentsDelta(text)]

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        return []


class RequiredParser(ToolParser):
    """The answer is a JSON list of calls, each given as it is complete."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._buffer = ""
        self._found = 0

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        self._buffer += text
        pieces: list[Piece] = []
        while "}" in self._buffer and text:
            begin = self._buffer.lstrip()
            try:
                if begin[0] not in "[,":
                    break
                value, rest = leading_value(begin[1:])
                pieces.append(call_of(value))
            except ValueError:
                break
            self._buffer, self._found = rest, self._found + 1
        return pieces

    def finish(self) -> list[Piece]:
        """A call that was cut off is content."""
        rest = self._buffer.strip()
        return [] if not rest or (rest == "]" and self._found) else [self._buffer]
