"""From chat messages to a prompt."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qiao.errors import ParameterError
from qiao.frontend.template import ChatTemplate

if TYPE_CHECKING:
    from qiao.loading.text_tokenizer import AnyTokenizer

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
_CONTENT = r"""(?:\[\s*['"]content['"]\s*\]|\.content\b)"""
_LOOP = re.compile(r"\bfor\s+\w+\s+in\s+\w+" + _CONTENT)
_TEXT_CASE = re.compile(_CONTENT + r"\s+is\s+string")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends, however the template treats spaces (transformers' device)."""


class ChatRenderer:
    """A model's chat template.

    ``template`` overrides the tokenizer's: the template's text, or the path of a file with it.
    """

    def __init__(self, tokenizer: AnyTokenizer, template: str | None = None) -> None:
        self._tokens = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        found = read_template(template) if template else tokenizer.chat_template
        named = found if isinstance(found, dict) else {"default": found}
        self._sources: dict[str, str] = {name: text for name, text in named.items() if isinstance(text, str)}
        self._compiled: dict[str, ChatTemplate] = {}

    @property
    def available(self) -> bool:
        """Whether the model has a chat template at all."""
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens included: tokenize it without adding any.

        Text parts of a message are joined without a separator, for every role; with ``content_format`` "openai" the
        template receives them as a list, with "auto" where it is written for lists alone. ``variables`` go to the
        template too. Raises ``ParameterError`` naming the field.
        """
        if continue_final_message and add_generation_prompt:
            raise ParameterError("continue_final_message", "excludes add_generation_prompt; set that to false")
        if content_format not in ("auto", "string", "openai"):
            raise ParameterError("chat_template_content_format", f"auto, string or openai, got {content_format!r}")
        source = chat_template if chat_template is not None else self._source(bool(tools))
        keeps = wants_parts(source) if content_format == "auto" else content_format == "openai"
        chat = normalise_messages(messages, keep_parts=keeps)
        if "developer" not in source:
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"
        if continue_final_message:
            _mark_end(chat[-1])
        text = self._template(source).render(
            {
                **self._tokens,
                **variables,
                **(chat_template_kwargs or {}),
                "messages": chat,
                "tools": _copied(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _source(self, tools: bool) -> str:
        if not self._sources:
            raise ParameterError(
                "messages", "this model has no chat template. Use completions, or start with --chat-template FILE"
            )
        wanted = "tool_use" if tools and "tool_use" in self._sources else "default"
        if wanted not in self._sources:
            raise ParameterError("messages", f"the model has only the chat templates {', '.join(self._sources)}")
        return self._sources[wanted]

    def _template(self, source: str) -> ChatTemplate:
        if source in self._compiled:
            return self._compiled[source]
        template = ChatTemplate(source)
        if source in self._sources.values():  # a request's own template is not kept
            self._compiled[source] = template
        return template


def read_template(text: str) -> str:
    """A template given as text or as the path of a file. Raises ``ParameterError``."""
    if re.search(r"[{}\n]", text):
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            "chat_template", f"{text!r} is neither a template nor a readable file ({error})"
        ) from error


def wants_parts(source: str) -> bool:
    """Whether a template goes through the parts of a content and has no case for a content that is text."""
    return bool(_LOOP.search(source)) and not _TEXT_CASE.search(source)


def normalise_messages(messages: Sequence[Mapping[str, Any]], keep_parts: bool = False) -> list[dict[str, Any]]:
    """Checked copies with string contents (or lists of text parts), ready for a template.

    Raises ``ParameterError`` naming the message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ParameterError("messages", "must be a list with at least one message")
    chat: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ParameterError(where, f"must be an object with role and content, got {message!r:.100}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ParameterError(f"{where}.role", f"must be a non-empty string, got {role!r}")
        clean = {key: value for key, value in message.items() if value is not None or key == "content"}
        parts = _parts(message.get("content"), f"{where}.content", required=role in ("user", "system", "developer"))
        clean["content"] = [{"type": "text", "text": t} for t in parts] if keep_parts else "".join(parts)
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            clean["reasoning_content"] = reasoning
        if clean.get("tool_calls"):
            clean["tool_calls"] = _tool_calls(clean["tool_calls"], f"{where}.tool_calls")
        else:
            clean.pop("tool_calls", None)  # templates ask whether the key is there
        chat.append(clean)
    return chat


def _parts(content: Any, where: str, required: bool) -> list[str]:
    if content is None and not required:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ParameterError(where, f"must be text or a list of parts, got {content!r:.100}")
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise ParameterError(f"{where}[{i}]", f"this model takes text parts only, got the type {kind!r}")
        text = part.get(kind, part.get("text"))
        if not isinstance(text, str):
            raise ParameterError(f"{where}[{i}]", f"a {kind} part needs a string, got {text!r:.100}")
        if kind != "thinking":
            texts.append(text)
    return texts


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Copies whose arguments are objects, as templates expect, and not JSON text, as clients send."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ParameterError(where, f"must be a list, got {calls!r:.100}")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ParameterError(f"{where}[{i}]", "must have a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise ParameterError(f"{where}[{i}].function.arguments", f"is not JSON: {error}") from error
            except RecursionError:
                raise ParameterError(f"{where}[{i}].function.arguments", "is nested too deeply") from None
        result.append({**call, "function": {**function, "arguments": arguments if arguments is not None else {}}})
    return result


def _copied(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A copy that a template may change."""
    try:
        return copy.deepcopy(list(tools))
    except RecursionError:
        raise ParameterError("tools", "are nested too deeply") from None


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
    elif content:
        content[-1]["text"] += _CONTINUE
    else:
        message["content"] = [{"type": "text", "text": _CONTINUE}]


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise ParameterError("continue_final_message", "the chat template does not show the final message")
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()
