"""What each tenant did. Its label has at most ``MAX_TENANTS`` values and two more, so the series are bounded."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from qiao.observability import names

MAX_TENANTS = 100
"""Tenants with a label of their own, in order of appearance; the rest are ``other``."""

DEFAULT_LABEL = "default"
OTHER_LABEL = "other"

REASONS = ("stop", "length", "abort", "error", "other")


class TenantMetrics:
    """Counters and the time to the first token, by tenant and model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        self._known: set[str] = set()
        keys = ["tenant", "model_name"]
        self._requests = Counter(
            names.TENANT_REQUESTS, "Ended sequences of a tenant.", [*keys, "finished_reason"], registry=registry
        )
        self._prompt = Counter(names.TENANT_PROMPT_TOKENS, "Prompt tokens of a tenant.", keys, registry=registry)
        self._generated = Counter(names.TENANT_GENERATION_TOKENS, "Tokens made for a tenant.", keys, registry=registry)
        self._ttft = Histogram(
            names.TENANT_TTFT,
            "Seconds from arrival to the first token, by tenant.",
            keys,
            buckets=names.TTFT_BUCKETS,
            registry=registry,
        )
        self._refusals = Counter(
            names.TENANT_REFUSALS, "Requests that a tenant's limits turned away.", [*keys, "reason"], registry=registry
        )

    def label(self, tenant: str) -> str:
        """The label's value for a tenant."""
        if not tenant:
            return DEFAULT_LABEL
        if tenant not in self._known:
            if len(self._known) >= MAX_TENANTS:
                return OTHER_LABEL
            self._known.add(tenant)
        return f"{tenant} " if tenant in (DEFAULT_LABEL, OTHER_LABEL) else tenant

    def finished(self, tenant: str, reasons: Sequence[str], prompt: int, generated: int, ttft: float | None) -> None:
        """Count one ended request."""
        keys = (self.label(tenant), self._model)
        for reason in reasons:
            self._requests.labels(*keys, reason if reason in REASONS else "other").inc()
        self._prompt.labels(*keys).inc(prompt)
        self._generated.labels(*keys).inc(generated)
        if ttft is not None:
            self._ttft.labels(*keys).observe(max(0.0, ttft))

    def refused(self, tenant: str, reason: str) -> None:
        """Count one refusal; ``reason`` comes from a fixed set of codes."""
        self._refusals.labels(self.label(tenant), self._model, reason).inc()
