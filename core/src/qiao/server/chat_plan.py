"""What a chat answer may hold beside text, and how that is told apart."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from qiao.answers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    NamedParser,
    ReasoningSplitter,
    RequiredParser,
    ToolParser,
    forced_constraint,
)
from qiao.errors import ParameterError
from qiao.server.args import ServerArgs
from qiao.server.protocol.chat import ChatRequest
from qiao.server.protocol.tools import are_strict, read_choice, read_tools


class ChatPlan:
    """Reads the tools, the constraint and the reasoning of one request.

    ``constraint`` is what the answer must look like: the calls that ``tool_choice`` demands, or what the body says.
    Raises ``ParameterError`` naming the field.
    """

    def __init__(self, body: ChatRequest, args: ServerArgs) -> None:
        self._schemas = read_tools(body.tools)
        self._choice, self._name = read_choice(body.tool_choice, self._schemas)
        self._several = body.parallel_tool_calls is not False
        self._form = REASONING_PARSERS.get(args.reasoning_parser or "")
        self._kwargs = {**args.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
        self._made = self._tool_parser(args)
        self._inside: bool | None = None
        self.tools = body.tools if self._choice != "none" else None
        self.constraint = body.constraint()
        if self._choice in ("required", "named"):
            self.constraint = forced_constraint(self._schemas, self._name, self._several, are_strict(body.tools))

    def _tool_parser(self, args: ServerArgs) -> type[ToolParser] | None:
        if self._choice == "auto" and not (args.enable_auto_tool_choice and args.tool_call_parser):
            raise ParameterError(
                "tool_choice", "auto needs a server started with --enable-auto-tool-choice and --tool-call-parser NAME"
            )
        return TOOL_PARSERS.get(args.tool_call_parser or "")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template: the request's over the server's."""
        return dict(self._kwargs)

    @property
    def plain(self) -> bool:
        """Whether all of an answer is content."""
        return self._form is None and self._choice == "none"

    @property
    def named(self) -> bool:
        """Whether one function must be called, by its name."""
        return self._choice == "named"

    @property
    def reasons(self) -> bool:
        """Whether answers are looked through for reasoning."""
        return self._form is not None

    def shows_special_tokens(self, specials: Collection[str]) -> bool:
        """Whether any of the marks to look for is one of the tokenizer's ``specials``: some models have them so."""
        marks = [] if self._form is None else [self._form.start, self._form.end]
        if self._choice == "auto" and self._made is not None:
            marks += self._made.marks_looked_for()
        return any(special in mark for mark in marks for special in specials)

    def begin(self, prompt: str) -> None:
        """Note the prompt's text, in which the template may have begun the reasoning."""
        if self._form is not None:
            said = self._kwargs.get("enable_thinking", self._kwargs.get("thinking"))
            self._inside = self._form.begins_in(prompt, said if isinstance(said, bool) else None)

    @property
    def grammar_after(self) -> str:
        """What the model writes before an answer that must follow a grammar; empty where it answers at once."""
        return self._form.end if self._form is not None and self._inside is not False else ""

    @property
    def grammar_before(self) -> str:
        """What an answer begins with that has ``grammar_after`` in it; empty where each has."""
        form = self._form
        return form.start if form is not None and self._inside is None and not form.implicit else ""

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        reasoning = ReasoningSplitter(self._form, self._inside) if self._form is not None else None
        new_id = self._made.new_id if self._made is not None else ToolParser.new_id
        return AnswerParser(reasoning, self._calls(), self._several, new_id)

    def _calls(self) -> ToolParser | None:
        if self._name is not None:
            return NamedParser(self._name)
        if self._choice == "required":
            return RequiredParser(self._schemas)
        return self._made(self._schemas) if self._choice == "auto" and self._made is not None else None
