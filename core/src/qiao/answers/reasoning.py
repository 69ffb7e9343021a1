"""Reasoning, which some models write before their answer, told apart from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qiao.answers.base import longest_start


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning. ``implicit``: an answer without a start mark begins with reasoning all the same."""

    start: str = "<think>"
    end: str = "</think>"
    implicit: bool = False

    def begins_in(self, prompt: str, thinking: bool | None = None) -> bool | None:
        """Whether an answer to ``prompt`` begins inside reasoning; None where only the answer tells.

        A template may open or close the reasoning itself. ``thinking`` is what the request says about it.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.end):
            return False
        if tail.endswith(self.start):
            return True
        return False if thinking is False else None


REASONING_PARSERS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": ReasoningFormat(implicit=True),
        "qwen3": ReasoningFormat(),
        "glm45": ReasoningFormat(),
    }
)
"""The names of ``--reasoning-parser``."""


class ReasoningSplitter:
    """Cuts one answer into reasoning and what follows; white space beside the marks belongs to neither.

    ``inside`` is what ``ReasoningFormat.begins_in`` says.
    """

    def __init__(self, form: ReasoningFormat, inside: bool | None) -> None:
        self._form = form
        self._inside = inside
        self._buffer = ""
        self._edge = inside is True
        """Whether white space at the beginning of what comes next is dropped."""
        self._spaces = ""

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that ``text`` brings."""
        self._buffer += text
        reasoning = ""
        if self._inside is None and not self._decide():
            return "", ""
        if self._inside:
            reasoning = self._reasoning()
        return reasoning, "" if self._inside else self._content()

    def finish(self) -> tuple[str, str]:
        """What is left at the end of the answer. Reasoning that was not closed stays reasoning."""
        if self._inside is None:
            self._inside = self._form.implicit and bool(self._buffer.strip())
        rest, self._buffer = self._buffer, ""
        if self._inside:
            return self._trimmed(rest), ""
        return "", rest

    def _decide(self) -> bool:
        """Whether the beginning tells where the answer begins."""
        begin, form = self._buffer.lstrip(), self._form
        if begin.startswith(form.start):
            self._inside, self._edge, self._buffer = True, True, begin[len(form.start) :]
            return True
        if form.start.startswith(begin):
            return False
        self._inside = self._edge = form.implicit
        return True

    def _reasoning(self) -> str:
        at = self._buffer.find(self._form.end)
        if at < 0:
            cut = longest_start(self._buffer, (self._form.end,))
            text, self._buffer = self._buffer[:cut], self._buffer[cut:]
            return self._trimmed(text)
        text, self._buffer = self._trimmed(self._buffer[:at]), self._buffer[at + len(self._form.end) :]
        self._inside, self._edge, self._spaces = False, True, ""
        return text

    def _content(self) -> str:
        text, self._buffer = self._buffer, ""
        if self._edge:
            text = text.lstrip()
            self._edge = not text
        return text

    def _trimmed(self, text: str) -> str:
        """``text`` without white space at the beginning of the reasoning; that at its end waits for more."""
        if self._edge:
            text = text.lstrip()
            self._edge = not text
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        return kept
