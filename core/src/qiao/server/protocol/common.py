"""What completions and chat share: sampling fields, usage, and the refusal of fields that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from qiao.errors import ParameterError
from qiao.sampling_params import MAX_LOGIT_BIAS, MAX_N, MAX_STOP_STRINGS
from qiao.server.protocol.constraints import CONSTRAINT_NAMES, constraint_of
from qiao.structured_outputs import StructuredOutputsParams

MAX_IDS = 100_000
"""Most entries of a list of token ids other than a prompt."""

T = TypeVar("T")

Entries = Annotated[list[T], Field(fail_fast=True)]
"""A list of a body. Its first wrong entry ends its check: else a body of 1 MB can make a million errors, which take
gigabytes and hold up everybody for seconds, though the client is told of one.
"""

Refusal = Callable[[Any], bool]
"""Whether a value would change the answer. A field whose value asks for nothing is let through."""


def asked(value: Any) -> bool:
    """Refusal of everything but false, zero and empty."""
    return bool(value)


def few(field: str, most: int) -> BeforeValidator:
    """For a mapping: more than ``most`` entries raise ``ParameterError`` for ``field`` before any is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ParameterError(field, f"at most {most} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


def given(value: Any) -> bool:
    """Refusal of everything: the empty value is wrong in itself."""
    return True


NOT_SUPPORTED: Mapping[str, Refusal] = {
    "use_beam_search": asked,
    "prompt_embeds": asked,
    "structural_tag": asked,
    "grammar": asked,
    "logits_processors": asked,
    "logprob_token_ids": asked,
    "repetition_detection": asked,
    "thinking_token_budget": lambda v: v != -1,
    "kv_transfer_params": asked,
    "vllm_xargs": asked,
    "length_penalty": lambda v: v != 1,
    "truncation_side": lambda v: v != "left",
    "early_stopping": asked,
}
"""Fields of OpenAI, vLLM and its forks that would change the answer. Each is refused by name, never dropped."""


class Body(BaseModel):
    """A request body. Types are strict (a boolean is no number), and null means absent for every field.

    Fields that this server does not know are accepted and ignored, except those in ``refused_fields``. ``5.0`` is an
    integer, as in JSON schemas: some languages have no other numbers.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """Names to refuse, each with its test."""
        return NOT_SUPPORTED

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        required = schema.get("required", ())
        for name, field in schema.get("properties", {}).items():
            options = field.get("anyOf", [field])
            if name not in required and {"type": "null"} not in options:
                schema["properties"][name] = {"anyOf": [*options, {"type": "null"}]}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {
            key: int(value) if isinstance(value, float) and value.is_integer() and key in cls.model_fields else value
            for key, value in data.items()
            if value is not None
        }
        for field, refuses in cls.refused_fields().items():
            if field in given and refuses(given[field]):
                raise ParameterError(field, "is not supported by this server yet; leave it out")
        return given


def one_of(*names: str) -> dict[str, Any]:
    """For a schema: exactly one of these fields is given, and null is absent."""

    def only(name: str) -> dict[str, Any]:
        others = {other: {"type": "null"} for other in names if other != name}
        return {"required": [name], "properties": {name: {"not": {"type": "null"}}, **others}}

    return {"anyOf": [only(name) for name in names]}


class StreamOptions(Body):
    """``include_usage`` adds a last chunk with the counts; ``continuous_usage_stats`` puts them in every chunk.

    ``include_obfuscation`` pads events at OpenAI, and has no effect here.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingFields(Body):
    """The sampling fields of OpenAI and vLLM; ranges are checked by ``qiao.SamplingParams``."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Entries[str] | None = Field(default=None, max_length=None)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, few("logit_bias", MAX_LOGIT_BIAS)] = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Entries[int] | None = Field(default=None, max_length=MAX_IDS)
    allowed_token_ids: Entries[int] | None = Field(default=None, max_length=MAX_IDS)
    bad_words: Entries[str] | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = Field(default=0, ge=-(2**62), lt=2**62)
    deadline_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    request_id: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    cache_salt: str = Field(default="", max_length=1024)
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Entries[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _check(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "is only allowed with stream=true")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if self.stream and self.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", "is not available with stream=true")
        return self

    def given_sampling(self) -> dict[str, Any]:
        """The sampling fields that the client set, under the names of ``SamplingParams``."""
        values = {name: getattr(self, name) for name in SAMPLING_NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def constraint(self) -> StructuredOutputsParams | None:
        """What the answer must look like, by whichever name. Raises ``ParameterError`` naming it."""
        return constraint_of(self.model_dump(include=set(CONSTRAINT_NAMES), exclude_none=True))


SAMPLING_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "allowed_token_ids"),
    *("bad_words", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens"),
)
"""Fields that go to ``SamplingParams`` under their own name."""


FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"] | None
"""Why an answer ended; null while it goes on."""


class PromptTokensDetails(BaseModel):
    """``cached_tokens`` were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of the whole request; the prompt counts once however many answers there are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(BaseModel):
    """One candidate of one prompt position (vLLM's shape)."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
