"""What each model did under each alias, to compare the arms of a trial. The operator sets aliases: there are few."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from qiao.observability import names

_REASONS = ("stop", "length", "abort", "error")


class AliasMetrics:
    """Counters and times by alias and model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        keys = ["alias", "model_name"]
        self._requests = Counter(
            names.ALIAS_REQUESTS, "Ended sequences under an alias.", [*keys, "finished_reason"], registry=registry
        )
        self._prompt = Counter(names.ALIAS_PROMPT_TOKENS, "Prompt tokens under an alias.", keys, registry=registry)
        self._generated = Counter(names.ALIAS_GENERATION_TOKENS, "Tokens made under an alias.", keys, registry=registry)
        self._ttft = Histogram(
            names.ALIAS_TTFT,
            "Seconds from arrival to the first token, by alias.",
            keys,
            buckets=names.TTFT_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            names.ALIAS_E2E,
            "Seconds from arrival to the end, by alias.",
            keys,
            buckets=names.LATENCY_BUCKETS,
            registry=registry,
        )

    def finished(
        self, alias: str, reasons: Sequence[str], prompt: int, generated: int, ttft: float | None, e2e: float
    ) -> None:
        """Count one ended request."""
        keys = (alias, self._model)
        for reason in reasons:
            self._requests.labels(*keys, reason if reason in _REASONS else "error").inc()
        self._prompt.labels(*keys).inc(prompt)
        self._generated.labels(*keys).inc(generated)
        if ttft is not None:
            self._ttft.labels(*keys).observe(max(0.0, ttft))
        self._e2e.labels(*keys).observe(max(0.0, e2e))
