"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from qiao.errors import ParameterError
from qiao.sampling_params import MAX_N
from qiao.server.protocol.common import (
    NOT_SUPPORTED,
    FinishReason,
    PromptLogprobs,
    Refusal,
    SamplingFields,
    Usage,
)
from qiao.server.protocol.prompts import MAX_PROMPTS, PromptValue, prompt_check, separate


class CompletionRequest(SamplingFields):
    """``prompt`` is a text, a list of texts, a list of token ids, or a list of such lists."""

    prompt: Annotated[PromptValue, prompt_check("prompt")]
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=-1)
    add_special_tokens: bool = True

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """As for chat, and ``suffix``."""
        return {**NOT_SUPPORTED, "suffix": lambda value: value not in (None, "")}

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
        return separate(self.prompt)


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
