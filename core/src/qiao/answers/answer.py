"""One answer's text, cut into reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qiao.answers.base import ArgumentsDelta, Piece, ToolCall, ToolParser
from qiao.answers.reasoning import ReasoningSplitter


@dataclass(slots=True)
class CallDelta:
    """News of call ``index``: its ``id`` and ``name`` the first time, and more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """What a part of an answer brings, or of a whole one."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add(self, more: Parts) -> None:
        """Append ``more``, and join what belongs to one call."""
        self.reasoning += more.reasoning
        self.content += more.content
        for call in more.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(CallDelta(call.index, call.id, call.name, call.arguments))


class AnswerParser:
    """``reasoning`` and ``tools`` are the parsers of one answer, None for none. ``several``: more than one call counts.

    ``new_id`` names calls. White space beside calls is dropped.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None = None,
        tools: ToolParser | None = None,
        several: bool = True,
        new_id: Callable[[], str] = ToolParser.new_id,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._several = several
        self._new_id = new_id
        self._spaces = ""
        self.calls = 0

    def push(self, text: str) -> Parts:
        """What ``text`` brings."""
        reasoning, content = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        return self._parts(reasoning, self._tools.push(content) if self._tools is not None else [content])

    def finish(self) -> Parts:
        """What is left at the end."""
        reasoning, content = self._reasoning.finish() if self._reasoning is not None else ("", "")
        if self._tools is None:
            return Parts(reasoning, content)
        parts = self._parts(reasoning, [*self._tools.push(content), *self._tools.finish()])
        parts.content += "" if self.calls else self._spaces
        self._spaces = ""
        return parts

    def _parts(self, reasoning: str, pieces: Iterable[Piece]) -> Parts:
        parts = Parts(reasoning)
        for piece in pieces:
            if isinstance(piece, str):
                parts.content += piece if self._tools is None else self._text(piece)
                continue
            self._spaces = ""
            if isinstance(piece, ArgumentsDelta):
                parts.add(Parts(calls=[CallDelta(self.calls - 1, arguments=piece.text)]))
            elif self._several or not self.calls:
                parts.calls.append(self._call(piece))
        return parts

    def _call(self, call: ToolCall) -> CallDelta:
        self.calls += 1
        return CallDelta(self.calls - 1, self._new_id(), call.name, call.arguments)

    def _text(self, text: str) -> str:
        """``text`` but for the white space at its end, which a call may follow."""
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        return kept
