"""Formats in which a call is the whole answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from qiao.answers.base import Piece, ToolCall, ToolParser, call_of, leading_value


class WholeParser(ToolParser):
    """An answer that begins with one of ``starts`` may be a call: it is kept until its end, and content if it is none.

    Only functions that there are can be called, since any other JSON is an answer like others.
    """

    starts: ClassVar[tuple[str, ...]] = ("{", "[", "```")

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._buffer = ""
        self._plain = False

    @classmethod
    def marks_looked_for(cls) -> tuple[str, ...]:
        """See ``ToolParser``."""
        return cls.starts

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        if self._plain:
            return [text] if text else []
        self._buffer += text
        begin = self._buffer.lstrip()
        if not begin or any(s.startswith(begin) or begin.startswith(s) for s in self.starts):
            return []
        self._plain = True
        return [self._buffer]

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        if self._plain or not self._buffer:
            return []
        try:
            return list(self.calls(self._buffer.strip()))
        except ValueError:
            return [self._buffer]

    def calls(self, body: str) -> list[ToolCall]:
        """The calls of a whole answer. Raises ``ValueError`` where it is not made of calls alone."""
        fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", body, re.DOTALL)
        rest, found = fenced[1] if fenced else body, []
        while rest:
            value, rest = leading_value(rest)
            found += [call_of(one) for one in (value if isinstance(value, list) else [value])]
            rest = rest.removeprefix(";").lstrip()
        if not found or any(call.name not in self.tools for call in found):
            raise ValueError("not a call")
        return found


class JsonParser(WholeParser):
    """``{"name": ..., "arguments": {...}}``, a list of such, or several in turn; also in a code fence."""


class Llama3Parser(WholeParser):
    """Llama 3's ``{"name": ..., "parameters": {...}}``, several with ``;`` between, maybe behind ``<|python_tag|>``."""

    starts = ("{", "[", "<|python_tag|>")

    def calls(self, body: str) -> list[ToolCall]:
        """See ``WholeParser``."""
        return super().calls(body.removeprefix("<|python_tag|>").lstrip())
