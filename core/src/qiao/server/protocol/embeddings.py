"""``/v1/embeddings``, and ``/v1/score`` and ``/v1/rerank`` in vLLM's, Jina's and Cohere's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema, model_validator

from qiao.errors import ParameterError
from qiao.server.protocol.common import Body, Entries, Refusal, asked
from qiao.server.protocol.prompts import MAX_PROMPTS, PromptValue, prompt_check, separate

MAX_INPUTS = 2048
"""Most inputs of one request, as at OpenAI."""

MAX_CHARACTERS = 1 << 22

Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]

Texts = Annotated[
    Entries[Text],
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string", "maxLength": MAX_CHARACTERS},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        }
    ),
]
"""Its bounds are checked by the body, whose errors say more than those of a union."""


Document = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}),
]


class PoolingFields(Body):
    """What all requests for vectors share. ``truncate_prompt_tokens`` keeps the last so many tokens, -1 what fits."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, json_schema_extra={"not": {"const": 0}})
    priority: int = Field(default=0, ge=-(2**62), lt=2**62)
    deadline_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    request_id: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    cache_salt: str = Field(default="", max_length=1024)
    add_special_tokens: bool = True

    @classmethod
    def refused_fields(cls) -> Mapping[str, Refusal]:
        """Fields of vLLM that would change a vector."""
        return {"mm_processor_kwargs": asked, "embed_dtype": lambda v: v != "float32", "softmax": asked}


class EmbeddingRequest(PoolingFields):
    """``input`` is a text, a list of texts, a list of token ids, or a list of such lists.

    ``dimensions`` keeps that many numbers of each vector. ``normalize`` overrides the model's own choice.
    """

    input: Annotated[PromptValue, prompt_check("input", MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None

    def inputs(self) -> list[str | list[int]]:
        """Each input by itself."""
        return separate(self.input)


class Embedding(BaseModel):
    """One vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class PoolingUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingResponse(BaseModel):
    """A vector for each input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class ScoreRequest(PoolingFields):
    """``text_1`` against each of ``text_2``, or pair by pair where both are lists of one length.

    vLLM's other names for the two are ``queries`` and ``documents`` (or ``items``), and ``data_1`` and ``data_2``.
    """

    text_1: Text | Texts
    text_2: Text | Texts

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, data: Any) -> Any:
        if isinstance(data, dict):
            names = {"text_1": ("queries", "data_1"), "text_2": ("documents", "items", "data_2")}
            for name, others in names.items():
                for other in others:
                    if name not in data and other in data:
                        data = {**data, name: data[other]}
        return data

    @model_validator(mode="after")
    def _check(self) -> ScoreRequest:
        first, second = _listed(self.text_1), _listed(self.text_2)
        if not first or not second:
            raise ParameterError("text_1" if not first else "text_2", "must not be an empty list")
        if max(len(first), len(second)) > MAX_PROMPTS:
            raise ParameterError("text_2", f"at most {MAX_PROMPTS} texts, got {max(len(first), len(second))}")
        if len(first) not in (1, len(second)):
            raise ParameterError("text_1", f"must be one text or as many as text_2 ({len(second)}), got {len(first)}")
        return self

    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides as lists; the first may have a single entry."""
        return _listed(self.text_1), _listed(self.text_2)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


class Score(BaseModel):
    """One pair's similarity: the cosine of both vectors, -1 to 1."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    """A score for each pair, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankRequest(PoolingFields):
    """``documents`` are texts or objects with a ``text``; the ``top_n`` best come back, all where it is 0 or absent."""

    query: Text
    documents: Entries[Text | Document] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int = Field(default=0, ge=0)
    return_documents: bool = True

    def texts(self) -> list[str]:
        """The documents' texts. Raises ``ParameterError`` for an object without one."""
        found = []
        for i, document in enumerate(self.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                raise ParameterError("documents", f'entry {i} must be a text, or an object with a text in "text"')
            found.append(text)
        return found


class RerankDocument(BaseModel):
    """A document as it was given."""

    text: str


class RerankResult(BaseModel):
    """``index`` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(BaseModel):
    """Documents, best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
