"""What each tenant did. Its label has at most ``MAX_TENANTS`` values and two more, so the series are bounded."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from qiao.observability import names
from qiao.observability.ended import EndedNames, EndedRequests

MAX_TENANTS = 100
"""Tenants with a label of their own, in order of appearance; the rest are ``other``."""

DEFAULT_LABEL = "default"
OTHER_LABEL = "other"

_FAMILIES = EndedNames(
    requests=names.TENANT_REQUESTS,
    prompt_tokens=names.TENANT_PROMPT_TOKENS,
    generation_tokens=names.TENANT_GENERATION_TOKENS,
    ttft=names.TENANT_TTFT,
)


class TenantMetrics:
    """Counters and the time to the first token, by tenant and model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        self._known: set[str] = set()
        self._ended = EndedRequests(registry, _FAMILIES, "tenant", model_name, other="other")
        self._refusals = Counter(
            names.TENANT_REFUSALS,
            "Requests that a tenant's limits turned away.",
            ["tenant", "model_name", "reason"],
            registry=registry,
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
        self._ended.finished(self.label(tenant), reasons, prompt, generated, ttft)

    def refused(self, tenant: str, reason: str) -> None:
        """Count one refusal; ``reason`` comes from a fixed set of codes."""
        self._refusals.labels(self.label(tenant), self._model, reason).inc()
