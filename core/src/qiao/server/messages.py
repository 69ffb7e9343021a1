"""Between Anthropic's messages and a chat request: the same call in other words."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any

from pydantic import ValidationError

from qiao.answers import Parts
from qiao.errors import ParameterError
from qiao.outputs import RequestOutput
from qiao.server.errors import anthropic_error, renamed, validation_error
from qiao.server.protocol.chat import ChatRequest
from qiao.server.protocol.messages import (
    CountRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from qiao.server.streaming import Ending

_NAMES = (("stop", "stop_sequences"),)
"""Chat's field names, and what they are called here."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountRequest) -> ChatRequest:
    """The chat request that asks for the same; an answer that the client has begun is gone on with.

    Raises ``ParameterError`` or an ``ApiError`` that name the field.
    """
    given: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body.system), *_turns(body)],
        "tools": [_tool(tool, i) for i, tool in enumerate(body.tools)] if body.tools else None,
        **_choice(body.tool_choice),
    }
    if body.thinking is not None:
        given["chat_template_kwargs"] = {"enable_thinking": body.thinking.get("type") != "disabled"}
    if isinstance(body, MessagesRequest):
        given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "temperature": body.temperature}
        given |= {"top_p": body.top_p, "top_k": body.top_k, "stream": body.stream}
        given |= {"priority": body.priority, "cache_salt": body.cache_salt}
    if body.messages[-1].role == "assistant" and "tool_calls" not in given["messages"][-1]:
        given |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        problems = list(error.errors())
        with own_names():
            if isinstance(cause := (problems[0].get("ctx") or {}).get("error"), ParameterError):
                raise cause from None
        raise validation_error(problems) from None


def own_names() -> AbstractContextManager[None]:
    """Errors that name a field of chat name that of messages instead."""
    return renamed(_NAMES)


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    text = system if isinstance(system, str) else _texts(system or (), "system")
    return [{"role": "system", "content": text}] if text else []


def _texts(blocks: Sequence[Mapping[str, Any]], field: str) -> str:
    """The text of blocks that must all be text."""
    found = []
    for block in blocks:
        if block.get("type", "text") != "text" or not isinstance(block.get("text"), str):
            raise ParameterError(field, f"holds a block of the type {block.get('type')!r}; only text is served")
        found.append(block["text"])
    return "\n".join(found)


def _turns(body: CountRequest) -> Iterator[dict[str, Any]]:
    for i, message in enumerate(body.messages):
        field = f"messages[{i}].content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, field)
        else:
            yield from _user(message.content, field)


def _user(blocks: Sequence[Mapping[str, Any]], field: str) -> Iterator[dict[str, Any]]:
    """Results of tools are turns of their own, before what the user says."""
    said = []
    for block in blocks:
        if block.get("type") != "tool_result":
            said.append(block)
            continue
        content = block.get("content") or ""
        text = content if isinstance(content, str) else _texts(content, field)
        yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}
    if said or not blocks:
        yield {"role": "user", "content": _texts(said, field)}


def _assistant(blocks: Sequence[Mapping[str, Any]], field: str) -> dict[str, Any]:
    thoughts = [str(b.get("thinking", "")) for b in blocks if b.get("type") == "thinking"]
    calls = [b for b in blocks if b.get("type") == "tool_use"]
    other = ("thinking", "redacted_thinking", "tool_use")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _texts([b for b in blocks if b.get("type") not in other], field),
    }
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {"name": str(call.get("name", "")), "arguments": json.dumps(call.get("input") or {})},
            }
            for call in calls
        ]
    return message


def _tool(tool: Any, place: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise ParameterError(f"tools[{place}]", "must be a tool of your own, with name and input_schema")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        wanted = _CHOICES[kind]
    else:
        raise ParameterError("tool_choice", f"type must be auto, any, tool or none, got {kind!r}")
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


async def answer(
    call_id: str, model: str, pieces: AsyncGenerator[tuple[Parts, RequestOutput], None]
) -> MessagesResponse:
    """The whole answer of ``pieces``, its blocks in the order of a stream's: text may come behind calls."""
    found: list[Parts] = []
    result: RequestOutput | None = None
    async with aclosing(pieces):
        async for parts, now in pieces:
            result = now
            for one in _separate(parts):
                if found and _kind(found[-1]) == _kind(one):
                    found[-1].add(one)
                else:
                    found.append(one)
    assert result is not None, "the engine ended a request without any output"
    reason, sequence = stop_reason(result, any(parts.calls for parts in found))
    content = [_block(parts) for parts in found]
    return MessagesResponse(
        id=call_id, model=model, content=content, stop_reason=reason, stop_sequence=sequence, usage=usage(result)
    )


def _separate(parts: Parts) -> Iterator[Parts]:
    """Parts of one kind each, in the order of a stream's events."""
    if parts.reasoning:
        yield Parts(reasoning=parts.reasoning)
    if parts.content:
        yield Parts(content=parts.content)
    for call in parts.calls:
        yield Parts(calls=[call])


def _kind(parts: Parts) -> tuple[str, int]:
    """The kind of block that ``parts`` of one kind are, and the number of a call."""
    if parts.calls:
        return "tool_use", parts.calls[0].index
    return ("thinking", 0) if parts.reasoning else ("text", 0)


def _block(parts: Parts) -> TextBlock | ThinkingBlock | ToolUseBlock:
    if parts.reasoning:
        return ThinkingBlock(thinking=parts.reasoning)
    if not parts.calls:
        return TextBlock(text=parts.content)
    (call,) = parts.calls
    return ToolUseBlock(id=call.id or "", name=call.name or "", input=_arguments(call.arguments))


def _arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; a model that wrote none, or something else, gets what it wrote under one key."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {"arguments": text}
    return found if isinstance(found, dict) else {"arguments": found}


def stop_reason(result: RequestOutput, calls: bool) -> tuple[StopReason, str | None]:
    """Why the answer ended, and the stop sequence that ended it."""
    first = result.outputs[0]
    if first.finish_reason == "length":
        return "max_tokens", None
    if calls:
        return "tool_use", None
    if isinstance(first.stop_reason, str):
        return "stop_sequence", first.stop_reason
    return "end_turn", None


def usage(result: RequestOutput) -> MessagesUsage:
    """Counts so far."""
    cached = result.num_cached_tokens or 0
    return MessagesUsage(
        input_tokens=len(result.prompt_token_ids) - cached,
        output_tokens=sum(len(a.token_ids) for a in result.outputs),
        cache_read_input_tokens=cached,
    )


def sse(kind: str, data: Mapping[str, Any]) -> bytes:
    """One event with its name."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data}, ensure_ascii=False)}\n\n".encode()


ENDING = Ending(b"", lambda body: sse("error", anthropic_error(body).model_dump()))
"""Anthropic's streams end with their last event; an error is an event of its own."""


class Events:
    """The events of one streamed answer: blocks one after the other, each begun, filled and closed."""

    def __init__(self, call_id: str, model: str) -> None:
        self._id, self._model = call_id, model
        self._kind: tuple[str, int] | None = None
        self._index = -1
        self._calls = False

    async def of(self, pieces: AsyncGenerator[tuple[Parts, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """The events of ``pieces``."""
        result: RequestOutput | None = None
        async with aclosing(pieces):
            async for parts, now in pieces:
                if result is None:
                    yield self._start(now)
                result = now
                for event in self._piece(parts):
                    yield event
        assert result is not None, "the engine ended a request without any output"
        for event in self._stop():
            yield event
        reason, sequence = stop_reason(result, self._calls)
        counts = usage(result).model_dump()
        yield sse("message_delta", {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": counts})
        yield sse("message_stop", {})

    def _start(self, result: RequestOutput) -> bytes:
        counts = usage(result).model_copy(update={"output_tokens": 0})
        message = MessagesResponse(
            id=self._id, model=self._model, content=[], stop_reason=None, stop_sequence=None, usage=counts
        )
        return sse("message_start", {"message": message.model_dump()})

    def _piece(self, parts: Parts) -> Iterator[bytes]:
        if parts.reasoning:
            yield from self._block("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": parts.reasoning})
        if parts.content:
            yield from self._block("text", 0, {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": parts.content})
        for call in parts.calls:
            self._calls = True
            start: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._block("tool_use", call.index, start)
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _block(self, kind: str, number: int, start: Mapping[str, Any]) -> Iterator[bytes]:
        """Close the block that is open and begin another, unless this one is open."""
        if self._kind == (kind, number):
            return
        yield from self._stop()
        self._kind = (kind, number)
        self._index += 1
        yield sse("content_block_start", {"index": self._index, "content_block": start})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return sse("content_block_delta", {"index": self._index, "delta": delta})

    def _stop(self) -> Iterator[bytes]:
        if self._kind is not None:
            self._kind = None
            yield sse("content_block_stop", {"index": self._index})
