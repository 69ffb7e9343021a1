"""``/v1/responses``: OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from qiao.errors import ParameterError
from qiao.server.protocol.chat import MAX_MESSAGES, TokenLogprob
from qiao.server.protocol.common import NOT_SUPPORTED, Body, Refusal, SamplingFields, asked, few, given
from qiao.server.protocol.items import ItemStatus, Sent

MAX_METADATA = 16

INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)
"""What ``include`` may name. All but the last ask for details of what does not occur here."""

RESPONSES_NOT_SUPPORTED: Mapping[str, Refusal] = {
    **NOT_SUPPORTED,
    "n": lambda v: v != 1,
    "conversation": given,
    "prompt": given,
    "context_management": given,
    "moderation": given,
    "personality": given,
    "prompt_logprobs": given,
    "return_token_ids": asked,
    "truncation": lambda v: v != "disabled",
    "chat_template": asked,
    "enable_response_messages": asked,
    "previous_input_messages": asked,
}

Item = dict[str, Any]
"""One item of a conversation, as the client sent it or as it was answered."""


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Sent):
    """``effort`` goes to the chat template. There are no summaries, the reasoning itself is shown."""

    effort: str | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class TextConfig(Body):
    """``format`` is text, json_object, or json_schema with its ``schema``."""

    format: dict[str, Any] | None = None

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """A length that nothing here could keep to."""
        return {"verbosity": lambda v: v != "medium"}


class CacheOptions(Sent):
    """How OpenAI's prefix cache is to keep a prompt; here all are kept while there is room."""

    ttl: Literal["30m"] | None = None
    mode: Literal["implicit", "explicit"] | None = None


class InputTokensRequest(SamplingFields):
    """What makes up a prompt: ``input`` is a text or a list of items, behind those of ``previous_response_id``."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """OpenAI's and vLLM's fields that would change the answer."""
        return RESPONSES_NOT_SUPPORTED


class ResponsesRequest(InputTokensRequest):
    """The sampling fields of chat are taken too. ``store`` keeps the response, if the server does."""

    background: bool = False
    include: list[str] = Field(default_factory=list, max_length=64)
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1)
    metadata: Annotated[dict[str, str] | None, few("metadata", MAX_METADATA)] = Field(
        default=None, max_length=MAX_METADATA
    )
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = Field(default=None, max_length=64)
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    store: bool = True
    top_logprobs: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        for name in self.include:
            if name not in INCLUDABLE:
                raise ParameterError("include", f"must hold names of {', '.join(INCLUDABLE)}, got {name!r:.100}")
        if self.background and not self.store:
            raise ParameterError("store", "must be true with background=true: the response is fetched later")
        for key, value in (self.metadata or {}).items():
            if len(key) > 64 or len(value) > 512:
                raise ParameterError("metadata", "keys have at most 64 characters and values at most 512")
        return self

    @property
    def shows_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in self.include


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[dict[str, Any]] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class MessageItem(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class ReasoningText(BaseModel):
    """Text of a reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class ReasoningItem(BaseModel):
    """What the model thought before."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[dict[str, Any]] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = None


class FunctionCallItem(BaseModel):
    """A call; ``arguments`` is JSON text. ``call_id`` is what the output of the function names."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """``cached_tokens`` were found in the prefix cache. Writing it costs nothing, so none counts as that."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """``reasoning_tokens`` are those of reasoning items."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """A response, with what asked for it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None

    def plain(self) -> dict[str, Any]:
        """As it is sent and kept. Of the fields that may be null, OpenAI's document leaves two out instead."""
        found = self.model_dump(mode="json")
        return {k: v for k, v in found.items() if v is not None or k not in ("usage", "user")}


class DeletedResponse(BaseModel):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """The items that a response was asked with."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    """How long a prompt is."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
