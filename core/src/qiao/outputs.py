"""Results as vLLM's users read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qiao.lora.request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """One candidate of one position: natural log-probability, rank from 1, and the token's text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, ``time.time()`` in seconds; None until known."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's answers. ``logprobs[i]`` maps candidates to ``Logprob``, the sampled one among them."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All of one request. ``prompt_logprobs`` has one entry per prompt token, the first None.

    ``lora_request`` is the adapter that ``LLM`` was asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What ``LLM.embed`` gives for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """One similarity, -1 to 1."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """What ``LLM.score`` gives for one pair; the ids are those of both texts, one after the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: ``tokens`` with the prompt's before them, and their ``text``; ``logprobs`` of the new ones."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
