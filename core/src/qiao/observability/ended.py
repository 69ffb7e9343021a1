"""What ended requests came to, by a label that tells them apart: counters and the time to the first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from qiao.observability import names

REASONS = ("stop", "length", "abort", "error")
"""Values of ``finished_reason``."""


@dataclass(frozen=True, kw_only=True)
class EndedNames:
    """Names of the families, without the endings that Prometheus' client adds."""

    requests: str
    prompt_tokens: str
    generation_tokens: str
    ttft: str


class EndedRequests:
    """Counters and the time to the first token by the label ``by`` and the model.

    ``other`` is the ``finished_reason`` of what is none of ``REASONS``.
    """

    def __init__(
        self, registry: CollectorRegistry, families: EndedNames, by: str, model_name: str, other: str = "error"
    ) -> None:
        self._model, self._other = model_name, other
        keys = [by, "model_name"]
        self._requests = Counter(
            families.requests, f"Ended sequences by {by}.", [*keys, "finished_reason"], registry=registry
        )
        self._prompt = Counter(families.prompt_tokens, f"Prompt tokens by {by}.", keys, registry=registry)
        self._generated = Counter(families.generation_tokens, f"Tokens made by {by}.", keys, registry=registry)
        self._ttft = Histogram(
            families.ttft,
            f"Seconds from arrival to the first token, by {by}.",
            keys,
            buckets=names.TTFT_BUCKETS,
            registry=registry,
        )

    def finished(self, label: str, reasons: Sequence[str], prompt: int, generated: int, ttft: float | None) -> None:
        """Count one ended request; ``reasons`` has one for each of its sequences, ``ttft`` is in seconds."""
        keys = (label, self._model)
        for reason in reasons:
            self._requests.labels(*keys, reason if reason in REASONS else self._other).inc()
        self._prompt.labels(*keys).inc(prompt)
        self._generated.labels(*keys).inc(generated)
        if ttft is not None:
            self._ttft.labels(*keys).observe(max(0.0, ttft))
