"""What the two generating routes share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Protocol, cast

from fastapi import Request

from qiao.outputs import CompletionOutput, RequestOutput
from qiao.sampling_params import SamplingParams
from qiao.server.call import current_call
from qiao.server.middleware import clean_request_id
from qiao.server.protocol.common import FinishReason, PromptTokensDetails, StreamOptions, Usage
from qiao.server.protocol.errors import ErrorBody
from qiao.server.state import ServerState

FINGERPRINT = f"qiao-{version('qiao')}"
"""``system_fingerprint``: equal seeds give equal answers under equal fingerprints."""

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; param names the field"},
    401: {"model": ErrorBody, "description": "No key or a wrong one"},
    403: {"model": ErrorBody, "description": "The key does not allow it"},
    404: {"model": ErrorBody, "description": "Unknown model"},
    408: {"model": ErrorBody, "description": "The request did not arrive in time"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    429: {"model": ErrorBody, "description": "A quota of the key is used up; see Retry-After"},
    500: {"model": ErrorBody, "description": "Internal error"},
    503: {"model": ErrorBody, "description": "Full queue, engine not running, or shutting down; see Retry-After"},
    504: {"model": ErrorBody, "description": "The deadline passed while the request waited; nothing was computed"},
}
"""Documented answers other than 200."""

STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; events with stream=true", "content": {"text/event-stream": {"schema": {}}}}
}
"""Of routes that can stream, beside the JSON that ``response_model`` tells of."""


class HasRequestId(Protocol):
    """A body that may name its request."""

    @property
    def request_id(self) -> str | None:
        """The client's own id."""
        ...


def public_id(prefix: str, body: HasRequestId, request: Request) -> str:
    """``prefix`` and the client's own id (body or ``X-Request-Id``), or a new one."""
    own = body.request_id or clean_request_id(request.headers.get("x-request-id"))
    return f"{prefix}-{own or uuid.uuid4().hex}"


class HasDeadline(Protocol):
    """A body that may say how long its request may wait."""

    @property
    def deadline_ms(self) -> float | None:
        """Milliseconds."""
        ...


def limit_wait(body: HasDeadline) -> None:
    """``deadline_ms`` of the body, into the call."""
    current_call().limit_wait(None if body.deadline_ms is None else body.deadline_ms / 1000.0)


def sampling_params(state: ServerState, given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """Checked parameters: what the client gave, over the checkpoint's defaults, over ``max_tokens`` and vLLM's."""
    values = {"max_tokens": max_tokens, **state.frontend.sampling_defaults}
    values.update({name: value for name, value in given.items() if value is not None})
    return SamplingParams(**values)


def finish_reason(answer: CompletionOutput) -> FinishReason:
    """Why ``answer`` ended, in the protocol's words."""
    return cast("FinishReason", answer.finish_reason)


@contextmanager
def counted(state: ServerState) -> Iterator[None]:
    """Counts one request as being served."""
    state.serving += 1
    try:
        yield
    finally:
        state.serving -= 1


class UsageCounter:
    """Counts tokens over several prompts and answers; each prompt counts once."""

    def __init__(self) -> None:
        self._latest: dict[int, RequestOutput] = {}

    def note(self, place: int, result: RequestOutput) -> None:
        """The newest cumulative result of prompt ``place``."""
        self._latest[place] = result

    def total(self) -> Usage:
        """Usage so far."""
        results = self._latest.values()
        prompt = sum(len(r.prompt_token_ids) for r in results)
        made = sum(len(answer.token_ids) for r in results for answer in r.outputs)
        cached = sum(r.num_cached_tokens or 0 for r in results)
        details = PromptTokensDetails(cached_tokens=cached)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=made,
            total_tokens=prompt + made,
            prompt_tokens_details=details,
        )


def wants_usage(options: StreamOptions | None, forced: bool) -> tuple[bool, bool]:
    """Whether a last chunk carries the usage, and whether every chunk does."""
    each = options is not None and options.continuous_usage_stats
    return forced or each or (options is not None and options.include_usage), each


class Sent:
    """How far one answer has been sent. ``prompt`` is text that goes before it; ``fresh`` until the first chunk."""

    def __init__(self, shows_tokens: bool, prompt: str = "") -> None:
        self._shows_tokens = shows_tokens
        self._prompt = prompt
        self._characters = 0
        self.tokens = 0
        self.fresh = True
        self._ended = False

    def has_news(self, answer: CompletionOutput) -> bool:
        """Whether a chunk is due: new text, new tokens that the client asked to see, or the end."""
        if self._ended:
            return False
        grown = len(answer.text) > self._characters or (self._shows_tokens and len(answer.token_ids) > self.tokens)
        return grown or answer.finish_reason is not None or (self.fresh and bool(self._prompt))

    def text(self, answer: CompletionOutput) -> str:
        """The new text, behind the prompt the first time."""
        new = answer.text[self._characters :]
        return self._prompt + new if self.fresh else new

    def advance(self, answer: CompletionOutput) -> None:
        """All of ``answer`` has been sent."""
        self._characters, self.tokens, self.fresh = len(answer.text), len(answer.token_ids), False
        self._ended = answer.finish_reason is not None
