"""From a request for a response to the chat request that asks for the same, so that all that follows exists once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pydantic import ValidationError

from qiao.errors import ParameterError
from qiao.server.errors import renamed, validation_error
from qiao.server.protocol.chat import ChatRequest
from qiao.server.protocol.common import SamplingFields
from qiao.server.protocol.items import ITEMS, ContentPart, FunctionTool, check_types
from qiao.server.protocol.responses import InputTokensRequest, Item, ResponsesRequest

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_NOT_PASSED_ON = frozenset({"n", "stream", "stream_options", "prompt_logprobs", "return_token_ids", "request_id"})

_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
)
"""Beginnings of chat's field names, and what they are called here."""


def items_of(body: InputTokensRequest) -> list[Item]:
    """``input`` as items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    return body.input


def listed(items: Sequence[Item], response_id: str) -> list[Item]:
    """``items`` as OpenAI lists them: each with an id, and messages with parts where the client sent a plain text."""
    return [{**_in_parts(item), "id": str(item.get("id") or f"{response_id}_{i}")} for i, item in enumerate(items)]


def _in_parts(item: Item) -> Item:
    if item.get("type", "message") != "message":
        return item
    item = {"status": "completed", **item, "type": "message"}
    if isinstance(item["content"], str):
        said = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if said else "input_text", "text": item["content"]}
        item["content"] = [{**part, "annotations": [], "logprobs": []} if said else part]
    return item


def chat_request(body: InputTokensRequest, history: Sequence[Item]) -> ChatRequest:
    """The chat request behind ``history``, the items of earlier responses.

    Raises ``ParameterError`` or an ``ApiError`` that name the field.
    """
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given: dict[str, Any] = {
        name: getattr(body, name)
        for name in SamplingFields.model_fields
        if name in body.model_fields_set and name not in _NOT_PASSED_ON
    }
    tools = tools_of(body)
    given |= {
        "messages": [*system, *turns([*history, *items_of(body)], len(history))],
        "tools": [_chat_tool(tool) for tool in tools] or None,
        "tool_choice": _chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
    }
    if (wanted := _response_format(body)) is not None:
        given["response_format"] = wanted
    if isinstance(body, ResponsesRequest):
        given["max_completion_tokens"] = body.max_output_tokens
        if body.shows_logprobs:
            given |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        with own_names():
            return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise validation_error(list(error.errors())) from None


def own_names() -> AbstractContextManager[None]:
    """Errors that name a field of chat name that of responses instead."""
    return renamed(_NAMES)


def turns(items: Sequence[Item], earlier: int = 0) -> list[dict[str, Any]]:
    """Messages of chat. The reasoning, text and calls that belong together become one turn of the assistant.

    The first ``earlier`` items are not the request's own, and errors count without them.
    """
    found: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        _add(found, item, f"input[{i - earlier}]")
    return found


def _add(found: list[dict[str, Any]], item: Item, field: str) -> None:
    kind = item.get("type", "message")
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if not isinstance(kind, str) or kind not in ITEMS:
        raise ParameterError(f"{field}.type", f"{kind!r:.100} is not served; messages, reasoning and functions are")
    check_types(ITEMS[kind], item, field)
    if kind == "message":
        role = item["role"]
        content = _content(item.get("content"), f"{field}.content")
        if role == "assistant" and last is not None and last["content"] is None and "tool_calls" not in last:
            last["content"] = content  # its reasoning came before
        else:
            found.append({"role": role, "content": content})
    elif kind == "reasoning":
        thought = _joined(item.get("content") or item.get("summary") or [], f"{field}.content")
        if thought:
            found.append({"role": "assistant", "content": None, "reasoning_content": thought})
    elif kind == "function_call":
        if last is None:
            last = {"role": "assistant", "content": ""}
            found.append(last)
        last["content"] = last["content"] or ""
        last.setdefault("tool_calls", []).append(_call(item, field))
    else:
        call_id = _text_of(item, "call_id", field)
        found.append({"role": "tool", "tool_call_id": call_id, "content": _output(item.get("output"), field)})


def _call(item: Item, field: str) -> dict[str, Any]:
    function = {"name": _text_of(item, "name", field), "arguments": _text_of(item, "arguments", field)}
    return {"id": _text_of(item, "call_id", field), "type": "function", "function": function}


def _text_of(item: Item, name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ParameterError(f"{field}.{name}", f"must be a string, got {value!r:.100}")
    return value


def _content(content: Any, field: str) -> str | list[dict[str, Any]]:
    """Content as chat's own parts, which the chat path joins."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ParameterError(field, f"must be a text or a list of parts, got {content!r:.100}")
    return [{"type": "text", "text": text} for text in _texts(content, field)]


def _texts(parts: Sequence[Any], field: str) -> Iterator[str]:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise ParameterError(f"{field}[{i}]", f"has the type {kind!r:.100}; only text is served")
        if not isinstance(text, str):
            raise ParameterError(f"{field}[{i}].text", f"must be a string, got {text!r:.100}")
        check_types(ContentPart, part, f"{field}[{i}]")
        yield text


def _joined(parts: Any, field: str) -> str:
    if not isinstance(parts, list):
        raise ParameterError(field, f"must be a list of parts, got {parts!r:.100}")
    return "".join(_texts(parts, field))


def _output(output: Any, field: str) -> str:
    return output if isinstance(output, str) else _joined(output, f"{field}.output")


def tools_of(body: InputTokensRequest) -> list[dict[str, Any]]:
    """The functions that may be called, as they are shown in the response."""
    allowed = _allowed_names(body.tool_choice)
    found = []
    for i, tool in enumerate(body.tools or ()):
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise ParameterError(f"tools[{i}]", "must be an object of the type function; there are no built-in tools")
        check_types(FunctionTool, tool, f"tools[{i}]")
        shown = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
        if allowed is None or shown["name"] in allowed:
            found.append({"type": "function", **shown})
    return found


def _allowed_names(choice: Any) -> set[Any] | None:
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise ParameterError("tool_choice.tools", "must be a list of functions, each with its name")
    return {tool.get("name") for tool in tools if isinstance(tool.get("name"), str)}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _chat_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and choice.get("mode", "auto") in ("auto", "required"):
        return choice.get("mode", "auto")
    raise ParameterError("tool_choice", "must be none, auto, required, a function by name, or allowed_tools")


def _response_format(body: InputTokensRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type" and v is not None}}
