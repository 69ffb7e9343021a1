"""Formats that put a call between marks, in the midst of text."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from qiao.answers.base import Piece, ToolCall, ToolParser, call_of, dumps, leading_value, loads, longest_start, typed


class MarkedParser(ToolParser):
    """Text, and calls between a start mark and an end mark. ``marks`` maps the first to the second, which is empty for
    calls that go on to the end of the answer. ``dropped`` marks mean nothing by themselves.
    """

    marks: ClassVar[Mapping[str, str]]
    dropped: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._buffer = ""
        self._start: str | None = None
        self._seen = 0

    @classmethod
    def marks_looked_for(cls) -> tuple[str, ...]:
        """See ``ToolParser``."""
        return (*cls.marks, *filter(None, cls.marks.values()), *cls.dropped)

    def calls(self, body: str) -> list[ToolCall]:
        """The calls between a start mark and its end. Raises ``ValueError`` where ``body`` is not well formed."""
        raise NotImplementedError

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        self._buffer += text
        return self._scan(final=False)

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        return self._scan(final=True)

    def _scan(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._buffer or (final and self._start is not None):
            found = self._inside(final) if self._start is not None else self._outside(final)
            if found is None:
                break
            pieces += found
        return [piece for piece in pieces if piece != ""]

    def _outside(self, final: bool) -> list[Piece] | None:
        """Content up to the next mark; None where that is still open."""
        places = [(at, mark) for mark in (*self.marks, *self.dropped) if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places, key=lambda place: (place[0], -len(place[1])))
            content, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            if mark in self.marks:
                self._start, self._seen = mark, 0
            return [content]
        cut = len(self._buffer) if final else longest_start(self._buffer, (*self.marks, *self.dropped))
        content, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return [content] if content else None

    def _inside(self, final: bool) -> list[Piece] | None:
        """The calls up to the first end mark that makes them well formed: an argument may hold the mark as text."""
        assert self._start is not None
        end = self.marks[self._start]
        while end and (at := self._buffer.find(end, self._seen)) >= 0:
            self._seen = at + 1
            try:
                found = self.calls(self._buffer[:at])
            except ValueError:
                continue
            self._buffer, self._start = self._buffer[at + len(end) :], None
            return list(found)
        return self._give_up(end) if final else None

    def _give_up(self, end: str) -> list[Piece]:
        """At the end of the answer: a call without an end mark may be complete; else up to the end mark is content."""
        assert self._start is not None
        start, body = self._start, self._buffer
        self._start = None
        try:
            found = self.calls(body)
        except ValueError:
            at = body.find(end) if end else -1
            cut = len(body) if at < 0 else at + len(end)
            self._buffer = body[cut:]
            return [start + body[:cut]]
        self._buffer = ""
        return list(found)


class HermesParser(MarkedParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    marks = MappingProxyType({"<tool_call>": "</tool_call>"})

    def calls(self, body: str) -> list[ToolCall]:
        """See ``MarkedParser``."""
        return [call_of(loads(body))]


class Qwen3Parser(MarkedParser):
    """Hermes' form, and that of Qwen3-Coder: ``<function=NAME><parameter=KEY>VALUE</parameter></function>``, which may
    also stand without ``<tool_call>``.
    """

    marks = MappingProxyType({"<tool_call>": "</tool_call>", "<function=": "</function>"})
    dropped = ("</tool_call>",)

    _FUNCTION = re.compile(r"\s*(?:<function=)?([^<>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>]+)>(.*?)</parameter>\s*", re.DOTALL)

    def calls(self, body: str) -> list[ToolCall]:
        """See ``MarkedParser``."""
        if body.lstrip().startswith("{"):
            return [call_of(loads(body))]
        match = self._FUNCTION.fullmatch(body)
        if match is None:
            raise ValueError("not a function")
        schema = _properties(self.tools, match[1])
        arguments, at, inner = {}, 0, match[2]
        while at < len(inner) and inner[at:].strip():
            parameter = self._PARAMETER.match(inner, at)
            if parameter is None:
                raise ValueError("not a parameter")
            value = parameter[2].removeprefix("\n").removesuffix("\n")
            arguments[parameter[1]] = typed(value, schema.get(parameter[1]))
            at = parameter.end()
        return [ToolCall(match[1], dumps(arguments))]


class Glm4Parser(MarkedParser):
    """GLM-4.5's ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``; and GLM-4's older
    name, newline and JSON, between the same marks.
    """

    marks = MappingProxyType({"<tool_call>": "</tool_call>"})

    _PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
    _NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*(.*)", re.DOTALL)

    def calls(self, body: str) -> list[ToolCall]:
        """See ``MarkedParser``."""
        match = self._NAME.fullmatch(body)
        if match is None:
            raise ValueError("not a name")
        name, rest = match[1], match[2]
        if rest.startswith("{"):
            return [call_of({"name": name, "arguments": loads(rest)})]
        schema = _properties(self.tools, name)
        arguments, at = {}, 0
        while at < len(rest):
            pair = self._PAIR.match(rest, at)
            if pair is None:
                raise ValueError("not an argument")
            key = pair[1].strip()
            arguments[key] = typed(pair[2], schema.get(key))
            at = pair.end()
        return [ToolCall(name, dumps(arguments))]


class DeepSeekParser(MarkedParser):
    """DeepSeek V3 and R1 (a type, a name and fenced JSON) and V3.1 (a name and JSON) between DeepSeek's own marks."""

    marks = MappingProxyType({"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"})
    dropped = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

    _FENCED = re.compile(r"\s*([^\n`]+)\n```(?:json)?\n(.*)\n```\s*", re.DOTALL)

    def calls(self, body: str) -> list[ToolCall]:
        """See ``MarkedParser``."""
        head, separator, rest = body.partition("<｜tool▁sep｜>")
        if not separator:
            raise ValueError("not a call")
        fenced = self._FENCED.fullmatch(rest)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head, rest)
        return [call_of({"name": name.strip(), "arguments": loads(arguments)})]


class MistralParser(MarkedParser):
    """``[TOOL_CALLS]`` and a JSON list, or for each call ``[TOOL_CALLS]NAME[ARGS]{...}``, to the end of the answer."""

    marks = MappingProxyType({"[TOOL_CALLS]": ""})

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: Mistral's templates take no other."""
        return uuid.uuid4().hex[:9]

    _HEAD = re.compile(r"\s*(?:\[TOOL_CALLS\])?([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?")

    def calls(self, body: str) -> list[ToolCall]:
        """See ``MarkedParser``."""
        if body.lstrip().startswith(("[{", "[ ", "[\n")):
            values, rest = leading_value(body)
            if rest or not values:
                raise ValueError("text behind the calls")
            return [call_of(value) for value in values]
        found = []
        while body.strip():
            head = self._HEAD.match(body)
            if head is None:
                raise ValueError("not a name")
            arguments, body = leading_value(body[head.end() :])
            found.append(call_of({"name": head[1], "arguments": arguments}))
        if not found:
            raise ValueError("no call")
        return found


class InternLMParser(MarkedParser):
    """InternLM2's ``<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>``."""

    marks = MappingProxyType({"<|action_start|><|plugin|>": "<|action_end|>"})

    def calls(self, body: str) -> list[ToolCall]:
        """See ``MarkedParser``."""
        return [call_of(loads(body), ("parameters", "arguments"))]


def _properties(tools: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    found = tools.get(name, {}).get("properties")
    return found if isinstance(found, Mapping) else {}
