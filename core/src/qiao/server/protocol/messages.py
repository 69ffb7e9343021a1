"""``/v1/messages``: Anthropic's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from qiao.server.protocol.chat import MAX_MESSAGES
from qiao.server.protocol.common import Body, Entries, Refusal, asked


class InputMessage(Body):
    """One turn: a text, or blocks of the types text, tool_use, tool_result and thinking."""

    role: Literal["user", "assistant"]
    content: str | Entries[dict[str, Any]]


class CountRequest(Body):
    """What the prompt is made of; all that ``/v1/messages/count_tokens`` takes."""

    model: str | None = None
    messages: Entries[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Entries[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """``stop_sequences`` are stop strings; ``thinking`` switches the reasoning of models whose template can.

    ``priority``, ``deadline_ms`` and ``cache_salt`` are those of the other routes.
    """

    max_tokens: int = Field(ge=1)
    stop_sequences: Entries[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    priority: int = Field(default=0, ge=-(2**62), lt=2**62)
    deadline_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    cache_salt: str = Field(default="", max_length=1024)

    @property
    def user(self) -> str | None:
        """Anthropic's place for what OpenAI calls ``user``."""
        found = (self.metadata or {}).get("user_id")
        return found if isinstance(found, str) else None

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """Anthropic's services that are not here."""
        return {"mcp_servers": asked, "container": asked, "context_management": asked, "output_format": asked}


class TextBlock(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """Reasoning; there is nothing to sign it with."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A call; ``input`` are its arguments."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(BaseModel):
    """``input_tokens`` are those that were not in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None


class MessagesResponse(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int
