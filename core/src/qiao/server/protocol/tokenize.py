"""``/tokenize`` and ``/detokenize``, vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qiao.errors import ParameterError
from qiao.server.protocol.chat import MAX_MESSAGES, ChatMessage
from qiao.server.protocol.common import Body, Entries, one_of
from qiao.server.protocol.tools import read_tools


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages``. ``add_special_tokens`` is true for a prompt and false for messages by
    default.
    """

    model_config = ConfigDict(json_schema_extra=one_of("prompt", "messages"))

    model: str | None = None
    prompt: str | None = None
    messages: Entries[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ParameterError("prompt", "give either prompt or messages")
        read_tools(self.tools)
        return self


class TokenizeResponse(BaseModel):
    """``count`` tokens of at most ``max_model_len``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids of the model's vocabulary."""

    model: str | None = None
    tokens: Entries[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=1_000_000)


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str
