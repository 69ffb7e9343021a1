"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, model_validator

from qiao.errors import ParameterError
from qiao.sampling_params import MAX_N
from qiao.server.protocol.common import (
    NOT_SUPPORTED,
    FinishReason,
    PromptLogprobs,
    Refusal,
    SamplingFields,
    Usage,
    asked,
)

MAX_PROMPTS = 1024
"""Most prompts in one request, and most answers in all."""

_MAX_ID = 2**31


def _check_prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    """By hand, because one bad entry in a long list must cost one error, not one per entry and per type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ParameterError("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise ParameterError("prompt", "must not be an empty list")
    if _is_id(value[0]):
        return _check_ids(value)
    if len(value) > MAX_PROMPTS:
        raise ParameterError("prompt", f"at most {MAX_PROMPTS} prompts in one request, got {len(value)}")
    if isinstance(value[0], str):
        if not all(isinstance(one, str) for one in value):
            raise ParameterError("prompt", "the first entry is a text, so all must be")
        return value
    return [_check_ids(one) for one in value]


def _check_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ParameterError("prompt", "a list of token ids must be a list with at least one entry")
    for token in value:
        if not _is_id(token):
            raise ParameterError("prompt", f"token ids are integers from 0, got {str(token)[:40]}")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ID


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(SamplingFields):
    """``prompt`` is a text, a list of texts, a list of token ids, or a list of such lists."""

    prompt: Prompt
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=-1)
    add_special_tokens: bool = True

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """As for chat, and ``suffix``."""
        return {**NOT_SUPPORTED, "suffix": asked}

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ParameterError("best_of", "above n is not available with stream=true")
        if len(self.prompts()) * (self.best_of or self.n) > MAX_PROMPTS:
            raise ParameterError("prompt", f"prompts times n must not exceed {MAX_PROMPTS}")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry a token. A first prompt token has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One answer, or the new part of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """The whole answer, and with the same shape each chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
