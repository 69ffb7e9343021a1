"""Everything that ``/metrics`` shows. Label values come from fixed sets, so the number of series is bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from qiao.observability import names
from qiao.observability.alias_metrics import AliasMetrics
from qiao.observability.ended import REASONS
from qiao.observability.snapshot import Snapshot, SnapshotCollector
from qiao.observability.tenant_metrics import TenantMetrics

_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """One ended request: lengths in tokens, times in seconds (None where it never came so far).

    ``cached_tokens`` of the prompt were not computed.
    ``longest`` is the length of the longest of its ``n`` answers; None for that of the only one.
    """

    finish_reasons: Sequence[str]
    prompt_tokens: int
    generation_tokens: int
    n: int
    max_tokens: int | None
    e2e: float
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    longest: int | None = None
    cached_tokens: int = 0


class Tally(Collector):
    """One histogram under one or more names.

    The library's own takes a lock twice an observation, and again for each name; this one is for one thread and costs a
    search in a list, because it counts every token.
    """

    def __init__(self, aliases: Sequence[str], text: str, buckets: Sequence[float], labels: dict[str, str]) -> None:
        self._aliases = aliases
        self._text = text
        self._labels = labels
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value`` into the first bucket that is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The histogram under each of its names."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        for name in self._aliases:
            family = HistogramMetricFamily(name, self._text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family


class Metrics:
    """The metrics of one model, in a registry of their own.

    ``snapshots`` gives the latest counters of each engine, ``engine_up`` how many of them are ready, ``restarts`` how
    often they were started again, ``waiting`` how many requests wait for that.
    """

    def __init__(
        self,
        model_name: str,
        snapshots: Callable[[], Sequence[Snapshot]],
        *,
        max_model_len: int,
        cache_info: dict[str, str],
        max_loras: int = 0,
        engine_up: Callable[[], float] = lambda: 1.0,
        restarts: Callable[[], float] = lambda: 0.0,
        waiting: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry.register(SnapshotCollector(snapshots, model_name, max_loras))
        self._add_request_histograms(max_model_len)
        self._add_counters()
        self._tenants = TenantMetrics(self._registry, model_name)
        self._aliases = AliasMetrics(self._registry, model_name)
        info = Gauge(names.CACHE_INFO, "Cache settings as labels.", ["engine", *cache_info], registry=self._registry)
        info.labels(engine="0", **cache_info).set(1)
        self._gauge(names.ENGINE_UP, "Engines that are ready.", engine_up)
        self._gauge(names.ENGINE_RESTARTS, "How often engines were started again.", restarts)
        self._gauge(names.WAITING_FOR_ENGINE, "Requests that wait for an engine to start again.", waiting)

    def first_token(self, seconds: float) -> None:
        """Time from arrival to a request's first token."""
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Time between two successive outputs of one sequence."""
        self._itl.observe(seconds)

    def finished(self, record: FinishedRequest) -> None:
        """Count one ended request."""
        for reason in record.finish_reasons:
            self._success.labels(finished_reason=reason if reason in REASONS else "error", **self._labels).inc()
        self._prompt.observe(record.prompt_tokens)
        self._computed.observe(max(0, record.prompt_tokens - record.cached_tokens))
        self._generation.observe(record.generation_tokens)
        self._longest.observe(record.generation_tokens if record.longest is None else record.longest)
        self._n.observe(record.n)
        if record.max_tokens is not None:
            self._max_tokens.observe(record.max_tokens)
        self._e2e.observe(record.e2e)
        pairs = ((self._queue, record.queue), (self._prefill, record.prefill), (self._decode, record.decode))
        for histogram, value in pairs:
            if value is not None:
                histogram.observe(max(0.0, value))
        if record.prefill is not None and record.decode is not None:
            self._inference.observe(max(0.0, record.prefill + record.decode))
            per_sequence = record.generation_tokens / record.n
            if per_sequence > 1:
                self._tpot.observe(max(0.0, record.decode / (per_sequence - 1)))

    def tenant_finished(
        self, tenant: str, reasons: Sequence[str], prompt: int, generated: int, ttft: float | None
    ) -> None:
        """Count one ended request of a tenant."""
        self._tenants.finished(tenant, reasons, prompt, generated, ttft)

    def tenant_refused(self, tenant: str, reason: str) -> None:
        """Count a request that a tenant's limits turned away."""
        self._tenants.refused(tenant, reason)

    def rejected(self) -> None:
        """Count a request that the full queue refused."""
        self._rejections.labels(reason="max_num_queued_reqs", model_name=self._labels["model_name"]).inc()

    def alias_finished(
        self, alias: str, reasons: Sequence[str], prompt: int, generated: int, ttft: float | None, e2e: float
    ) -> None:
        """Count one ended request that an alias brought here."""
        self._aliases.finished(alias, reasons, prompt, generated, ttft, e2e)

    def collect(self) -> Iterator[Metric]:
        """Everything, for a page."""
        return iter(self._registry.collect())

    def _histogram(self, aliases: str | Sequence[str], text: str, buckets: Sequence[float]) -> Tally:
        made = Tally([aliases] if isinstance(aliases, str) else aliases, text, buckets, self._labels)
        self._registry.register(made)
        return made

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, list(self._labels), registry=self._registry).labels(**self._labels).set_function(value)

    def _add_request_histograms(self, max_model_len: int) -> None:
        latency, tokens = names.LATENCY_BUCKETS, names.token_buckets(max_model_len)
        self._ttft = self._histogram(names.TTFT, "Seconds from arrival to the first token.", names.TTFT_BUCKETS)
        self._itl = self._histogram(names.ITL, "Seconds between two tokens of a sequence.", names.ITL_BUCKETS)
        self._tpot = self._histogram(names.TPOT, "Mean seconds per token after the first.", names.ITL_BUCKETS)
        self._e2e = self._histogram(names.E2E, "Seconds from arrival to the end.", latency)
        self._queue = self._histogram(names.QUEUE, "Seconds from arrival to the first step.", latency)
        self._prefill = self._histogram(names.PREFILL, "Seconds from the first step to the first token.", latency)
        self._decode = self._histogram(names.DECODE, "Seconds from the first token to the last.", latency)
        self._inference = self._histogram(names.INFERENCE, "Seconds from the first step to the last token.", latency)
        self._prompt = self._histogram(names.REQUEST_PROMPT, "Prompt tokens of a request.", tokens)
        self._computed = self._histogram(
            names.REQUEST_COMPUTED, "Prompt tokens of a request that were computed.", tokens
        )
        self._generation = self._histogram(names.REQUEST_GENERATION, "Generated tokens of a request.", tokens)
        self._longest = self._histogram(names.REQUEST_LONGEST, "Tokens of a request's longest answer.", tokens)
        self._n = self._histogram(names.PARAMS_N, "The n of a request.", names.N_BUCKETS)
        self._max_tokens = self._histogram(names.PARAMS_MAX_TOKENS, "The max_tokens of a request.", tokens)

    def _add_counters(self) -> None:
        registry, keys = self._registry, list(self._labels)
        self._success = Counter(
            names.SUCCESS, "Ended sequences by reason.", [*keys, "finished_reason"], registry=registry
        )
        self._rejections = Counter(
            names.REJECTED, "Requests refused by a full queue.", ["model_name", "reason"], registry=registry
        )
        for reason in REASONS:
            self._success.labels(finished_reason=reason, **self._labels)


class ServerMetrics:
    """The page of one server: its process, its HTTP exchanges, and its ``models``, by name."""

    def __init__(self) -> None:
        self.models: dict[str, Metrics] = {}
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._http = Counter(
            names.HTTP_REQUESTS, "HTTP exchanges.", ["handler", "method", "status"], registry=self._registry
        )
        self._http_seconds = Histogram(
            names.HTTP_SECONDS, "Seconds to the end of the answer.", ["handler", "method"], registry=self._registry
        )

    def collect(self) -> Iterator[Metric]:
        """Every family once, with the samples of all models."""
        families: dict[str, Metric] = {}
        for family in chain(self._registry.collect(), *(model.collect() for model in self.models.values())):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
        return iter(families.values())

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP exchange; ``handler`` is a route's template, never a raw path. Statuses are counted by class,
        ``2xx``, as vLLM's boards ask for them.
        """
        known = method if method in _METHODS else "other"
        self._http.labels(handler=handler, method=known, status=f"{status // 100}xx").inc()
        self._http_seconds.labels(handler=handler, method=known).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """The page in Prometheus's text format, and its content type.

        Always this format: the library's OpenMetrics turns the colon of ``vllm:`` into ``_`` for Prometheus 2, which
        would break every board.
        """
        return generate_latest(cast("CollectorRegistry", self)), CONTENT_TYPE_PLAIN_0_0_4
