"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from qiao.errors import ParameterError
from qiao.server.protocol.common import (
    NOT_SUPPORTED,
    Body,
    Entries,
    FinishReason,
    PromptLogprobs,
    Refusal,
    SamplingFields,
    Usage,
    asked,
    given,
)
from qiao.server.protocol.tools import AnsweredCall, CallChunk, read_choice, read_tools

MAX_MESSAGES = 10_000

CHAT_NOT_SUPPORTED: Mapping[str, Refusal] = {
    **NOT_SUPPORTED,
    "audio": given,
    "modalities": lambda v: v != ["text"],
    "functions": asked,
    "function_call": lambda v: v != "none",
    "prediction": given,
    "web_search_options": given,
    "verbosity": lambda v: v != "medium",
    "documents": asked,
    "chat_template": asked,
    "mm_processor_kwargs": asked,
    "media_io_kwargs": asked,
    "return_prompt_text": asked,
    "best_of": lambda v: v != 1,
}


class ChatMessage(Body):
    """One turn. ``content`` is a text or a list of text parts; other keys go to the chat template as they are."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Entries[str | dict[str, Any]] | None = None

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """A reference to an earlier audio answer would be dropped."""
        return {"audio": asked}

    def plain(self) -> dict[str, Any]:
        """As the client sent it, without nulls; the front end checks and joins the parts."""
        return {"role": self.role, "content": self.content, **(self.model_extra or {})}


class ChatRequest(SamplingFields):
    """``max_completion_tokens`` wins over ``max_tokens``. ``logprobs`` is a boolean here, ``top_logprobs`` a number."""

    messages: Entries[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    echo: bool = False
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """OpenAI's and vLLM's chat fields that are not supported yet."""
        return CHAT_NOT_SUPPORTED

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        read_choice(self.tool_choice, read_tools(self.tools))
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "needs logprobs=true")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ParameterError("continue_final_message", "excludes add_generation_prompt=true")
        return self

    def given_sampling(self) -> dict[str, Any]:
        """Chat's token limit and logprobs under the names of ``SamplingParams``; no limit means up to the context."""
        given = super().given_sampling()
        given["max_tokens"] = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given


class TopLogprob(BaseModel):
    """One candidate. ``bytes`` are the token's raw bytes, also where they are half a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The sampled token and its best alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[TokenLogprob] | None
    refusal: None = None


class AssistantMessage(BaseModel):
    """The answer. ``reasoning`` is also there under its old name."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(BaseModel):
    """One whole answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """The answer to a call that does not stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(BaseModel):
    """What is new. The first of a choice carries the role."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallChunk] | None = None


class ChunkChoice(BaseModel):
    """The new part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
