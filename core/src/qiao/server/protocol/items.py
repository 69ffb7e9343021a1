"""What a client sends inside ``input`` and ``tools`` of ``/v1/responses``, with the types of OpenAI's document.

Whatever the server has no use for is checked too: a wrong type is a mistake of the client, who would not see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from qiao.errors import ParameterError
from qiao.server.protocol.common import Body, Entries, Refusal

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class Sent(Body):
    """Part of a body. Every field may be left out unless what is made of it needs it, so only types are checked."""

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """Nothing."""
        return {}


class FileCitation(Sent):
    """An annotation that names a file."""

    type: Literal["file_citation"]
    file_id: str
    index: int
    filename: str


class UrlCitation(Sent):
    """An annotation that names a page."""

    type: Literal["url_citation"]
    url: str
    title: str
    start_index: int
    end_index: int


class ContainerFileCitation(Sent):
    """An annotation that names a file of a container."""

    type: Literal["container_file_citation"]
    container_id: str
    file_id: str
    filename: str
    start_index: int
    end_index: int


class FilePath(Sent):
    """An annotation that names where a file is."""

    type: Literal["file_path"]
    file_id: str
    index: int


Annotation = Annotated[FileCitation | UrlCitation | ContainerFileCitation | FilePath, Field(discriminator="type")]


class SentTopLogprob(Sent):
    """One candidate. ``bytes`` may be null, as this server answers where a token has none."""

    token: str
    logprob: float
    bytes: Entries[int] | None = None


class SentLogprob(SentTopLogprob):
    """A token with its candidates."""

    top_logprobs: Entries[SentTopLogprob]


class CacheBreakpoint(Sent):
    """Where a prefix ends that is worth keeping; here all are kept."""

    mode: Literal["explicit"]


class ContentPart(Sent):
    """Part of a message or of a function's output. Its ``type`` and text are checked where they are read."""

    annotations: Entries[Annotation] | None = None
    logprobs: Entries[SentLogprob] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class SummaryPart(Sent):
    """Part of a reasoning's summary."""

    type: Literal["summary_text"]
    text: str


class Direct(Sent):
    """A function that the model called."""

    type: Literal["direct"]


class FromProgram(Sent):
    """A function that a program called."""

    type: Literal["program"]
    caller_id: str = Field(min_length=1, max_length=64)


Caller = Annotated[Direct | FromProgram, Field(discriminator="type")]


class SentItem(Sent):
    """What all items have."""

    id: str | None = None
    status: ItemStatus | None = None


class SentMessage(SentItem):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    phase: Literal["commentary", "final_answer"] | None = None


class SentReasoning(SentItem):
    """What the model thought before."""

    encrypted_content: str | None = None
    summary: Entries[SummaryPart] | None = None
    content: list[Any] | None = None


class SentCall(SentItem):
    """A call of a function."""

    caller: Caller | None = None
    namespace: str | None = None


class SentOutput(SentCall):
    """What a function returned."""

    call_id: str | None = Field(default=None, min_length=1, max_length=64)
    name: str | None = Field(default=None, min_length=1, max_length=128)
    namespace: str | None = Field(default=None, min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")


class FunctionTool(Sent):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Entries[Literal["direct", "programmatic"]] | None = None


ITEMS: Mapping[str, type[Sent]] = {
    "message": SentMessage,
    "reasoning": SentReasoning,
    "function_call": SentCall,
    "function_call_output": SentOutput,
}
"""The items that are served, by ``type``."""


def check_types(shape: type[Sent], value: Any, field: str) -> None:
    """Raises ``ParameterError`` naming the place inside ``field`` where ``value`` is not a ``shape``."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise ParameterError(field + path, first["msg"]) from None
