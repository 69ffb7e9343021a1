"""What each model did under each alias, to compare the arms of a trial. The operator sets aliases: there are few."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram

from qiao.observability import names
from qiao.observability.ended import EndedNames, EndedRequests

_FAMILIES = EndedNames(
    requests=names.ALIAS_REQUESTS,
    prompt_tokens=names.ALIAS_PROMPT_TOKENS,
    generation_tokens=names.ALIAS_GENERATION_TOKENS,
    ttft=names.ALIAS_TTFT,
)


class AliasMetrics:
    """Counters and times by alias and model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        self._ended = EndedRequests(registry, _FAMILIES, "alias", model_name)
        self._e2e = Histogram(
            names.ALIAS_E2E,
            "Seconds from arrival to the end, by alias.",
            ["alias", "model_name"],
            buckets=names.LATENCY_BUCKETS,
            registry=registry,
        )

    def finished(
        self, alias: str, reasons: Sequence[str], prompt: int, generated: int, ttft: float | None, e2e: float
    ) -> None:
        """Count one ended request."""
        self._ended.finished(alias, reasons, prompt, generated, ttft)
        self._e2e.labels(alias, self._model).observe(max(0.0, e2e))
