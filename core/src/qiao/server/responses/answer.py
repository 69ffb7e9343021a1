"""A response as it grows, and the events that tell of it. A whole answer is the last state of the streamed one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from qiao.answers import CallDelta, Parts
from qiao.outputs import CompletionOutput, RequestOutput
from qiao.server.protocol.chat import TokenLogprob
from qiao.server.protocol.errors import ErrorBody
from qiao.server.protocol.items import ItemStatus
from qiao.server.protocol.responses import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)

Event = dict[str, Any]
"""``type``, ``sequence_number``, and what the type has."""

Logprobs = Callable[[CompletionOutput, int], list[TokenLogprob]]
"""The entries of an answer's tokens from a place on; none where nobody asked for them."""

_ERROR_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


class Answer:
    """Takes what each step brings and gives the events of it; ``response`` is the state so far.

    A token belongs to the item whose text it completed, so one that ended the reasoning counts with what came next.
    """

    def __init__(self, response: ResponseObject, logprobs: Logprobs) -> None:
        self.response = response
        self._logprobs = logprobs
        self._numbers = 0
        self._open: tuple[str, int] | None = None
        self._placed = 0
        self._reasoning_tokens = 0

    def state(self, kind: str) -> Event:
        """An event that carries the whole response."""
        return self._event(f"response.{kind}", response=self.response.plain())

    def begin(self) -> Iterator[Event]:
        """The first events. A response of the background has had the first of them when it was queued."""
        queued, self.response.status = self.response.status == "queued", "in_progress"
        if not queued:
            yield self.state("created")
        yield self.state("in_progress")

    def add(self, parts: Parts, result: RequestOutput) -> Iterator[Event]:
        """What one step brought; ``result`` is all so far."""
        answer = result.outputs[0]
        if parts.reasoning:
            self._reasoning_tokens += len(answer.token_ids) - self._placed
            self._placed = len(answer.token_ids)
            yield from self._reasoned(parts.reasoning)
        if parts.content:
            shown = self._logprobs(answer, self._placed)
            self._placed = len(answer.token_ids)
            yield from self._said(parts.content, shown)
        for call in parts.calls:
            self._placed = len(answer.token_ids)
            yield from self._called(call)

    def finish(self, result: RequestOutput) -> Iterator[Event]:
        """The answer is complete: what closes its items. The status is set, and ``last`` tells of it."""
        answer = result.outputs[0]
        cut = answer.finish_reason == "length"
        rest = self._logprobs(answer, self._placed)
        if not self.response.output or (self._open == ("message", 0) and rest):
            yield from self._said("", rest)
        yield from self._close("incomplete" if cut else "completed")
        self._count(result)
        self.response.completed_at = None if cut else int(time.time())
        self.response.incomplete_details = IncompleteDetails() if cut else None
        self.response.status = "incomplete" if cut else "completed"

    def last(self) -> Event:
        """The event that ends a stream, once ``finish`` or ``fail`` have set the status."""
        return self.state(self.response.status)

    def fail(self, body: ErrorBody) -> None:
        """The answer ended with an error. Items stay as far as they came."""
        self._leave_open()
        code = _ERROR_CODES.get(body.error.type, "server_error")
        self.response.error = ResponseError(code=code, message=body.error.message)
        self.response.status = "failed"

    def cancel(self) -> None:
        """The answer was not wanted any more."""
        self._leave_open()
        self.response.status = "cancelled"

    def _leave_open(self) -> None:
        if self._open is not None:
            self.response.output[-1].status = "incomplete"
            self._open = None

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._numbers = self._numbers, self._numbers + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        """An event about the item that is open."""
        place = len(self.response.output) - 1
        return self._event(kind, item_id=self.response.output[-1].id, output_index=place, **fields)

    def _about_item(self, kind: str) -> Event:
        """An event that carries the item that is open."""
        place = len(self.response.output) - 1
        return self._event(kind, output_index=place, item=self.response.output[-1].model_dump(mode="json"))

    def _begin_item(self, kind: tuple[str, int], make: Callable[[], OutputItem]) -> Iterator[Event]:
        """Close the item that is open and begin another, unless this one is open."""
        if self._open == kind:
            return
        yield from self._close("completed")
        self._open = kind
        self.response.output.append(make())
        yield self._about_item("response.output_item.added")

    def _begin_part(self, content: list[Any], part: OutputText | ReasoningText) -> Iterator[Event]:
        if not content:
            shown = part.model_dump(mode="json")
            content.append(part)
            yield self._of_item("response.content_part.added", content_index=0, part=shown)

    def _reasoned(self, text: str) -> Iterator[Event]:
        yield from self._begin_item(("reasoning", 0), lambda: ReasoningItem(id=_new_id("rs")))
        item = self.response.output[-1]
        assert isinstance(item, ReasoningItem)
        yield from self._begin_part(item.content, ReasoningText())
        item.content[0].text += text
        yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _said(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield from self._begin_item(("message", 0), lambda: MessageItem(id=_new_id("msg")))
        item = self.response.output[-1]
        assert isinstance(item, MessageItem)
        yield from self._begin_part(item.content, OutputText())
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        if text or logprobs:
            shown = [one.model_dump() for one in logprobs]
            yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=shown)

    def _called(self, call: CallDelta) -> Iterator[Event]:
        def make() -> OutputItem:
            return FunctionCallItem(id=_new_id("fc"), call_id=call.id or _new_id("call"), name=call.name or "")

        yield from self._begin_item(("call", call.index), make)
        item = self.response.output[-1]
        assert isinstance(item, FunctionCallItem)
        if call.arguments:
            item.arguments += call.arguments
            yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        item = self.response.output[-1]
        item.status = status
        if isinstance(item, FunctionCallItem):
            yield self._of_item("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            part = item.content[0]
            done: Event = {"content_index": 0, "text": part.text}
            if isinstance(part, OutputText):
                done["logprobs"] = [one.model_dump() for one in part.logprobs]
            yield self._of_item(f"response.{part.type}.done", **done)
            shown = part.model_dump(mode="json")
            yield self._of_item("response.content_part.done", content_index=0, part=shown)
        yield self._about_item("response.output_item.done")
        self._open = None

    def _count(self, result: RequestOutput) -> None:
        prompt, made = len(result.prompt_token_ids), sum(len(one.token_ids) for one in result.outputs)
        self.response.usage = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=result.num_cached_tokens or 0),
            output_tokens=made,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning_tokens),
            total_tokens=prompt + made,
        )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
