"""Metrics that are read from the engine's latest counters when Prometheus asks, so that a step pays nothing for
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from qiao.observability import names
from qiao.observability.absent import absent
from qiao.observability.families import Families, HistogramTotals
from qiao.observability.kv_metrics import OffloadTotals, ResidencyTotals, offload, residency


class FallbackTotals(Protocol):
    """Running totals of one operator on the host."""

    operator: str
    calls: int
    bytes_to_host: int
    bytes_to_device: int
    seconds: float


class WorkTotals(Protocol):
    """Estimated work of all steps."""

    flops: int
    read_bytes: int
    write_bytes: int


class Snapshot(Protocol):
    """What ``qiao.engine.request.EngineStats`` has; this layer may not import it."""

    running: int
    waiting: int
    waiting_by_class: dict[str, int]
    kv_blocks_total: int
    kv_blocks_used: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
    captured_steps: int
    prompt_tokens: int
    prompt_from_device: int
    prompt_from_outside: int
    generation_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    utilization: float | None
    prompt_budget: int | None
    running_adapters: list[str] | None
    waiting_adapters: list[str]

    @property
    def step_sizes(self) -> HistogramTotals:
        """Tokens of the steps, in the buckets of ``names.STEP_BUCKETS``."""
        ...

    @property
    def offload(self) -> OffloadTotals | None:
        """None where evicted blocks are lost."""
        ...

    @property
    def residency(self) -> ResidencyTotals | None:
        """None where no blocks are sampled."""
        ...

    @property
    def work(self) -> WorkTotals | None:
        """None where work is not estimated."""
        ...

    @property
    def fallbacks(self) -> Sequence[FallbackTotals]:
        """One record per operator on the host."""
        ...


class SnapshotCollector(Collector):
    """Reads ``snapshots()``, one for each engine, at each scrape. Totals restart from zero with the engine, which
    Prometheus expects of counters.
    """

    def __init__(self, snapshots: Callable[[], Sequence[Snapshot]], model_name: str, max_loras: int = 0) -> None:
        self._snapshots = snapshots
        self._model = model_name
        self._max_loras = max_loras
        self._make = Families({})

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters of the moment."""
        families: dict[str, Metric] = {}
        for number, stats in enumerate(self._snapshots()):
            self._make = Families({"model_name": self._model, "engine": str(number)})
            for family in self._of(stats):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return iter(families.values())

    def _of(self, stats: Snapshot) -> Iterator[Metric]:
        yield from self._gauges(stats)
        yield from self._counters(stats)
        accepted = {str(position): count for position, count in enumerate(stats.accepted_per_position)}
        text = "Tokens that came true, by their position in a guess."
        yield self._make.counter(names.ACCEPTED_PER_POSITION, text, accepted, "position")
        text = "Tokens of a step of the engine."
        yield self._make.histogram(names.STEP_TOKENS, text, names.STEP_BUCKETS, stats.step_sizes)
        yield self._sources(stats)
        yield from offload(self._make, stats.prefix_hits, stats.offload)
        yield from residency(self._make, stats.residency)
        yield from self._work(stats.work)
        yield from absent(self._make)
        yield from self._fallbacks(stats.fallbacks)
        if stats.running_adapters is not None:
            yield self._adapters(stats.running_adapters, stats.waiting_adapters)

    def describe(self) -> list[Metric]:
        """Nothing: keeps the registry from scraping while it registers."""
        return []

    def _gauges(self, stats: Snapshot) -> Iterator[Metric]:
        yield self._make.gauge(names.RUNNING, "Requests in the running batch.", stats.running)
        yield self._make.gauge(names.WAITING, "Requests waiting for their first or next step.", stats.waiting)
        yield self._make.gauge(
            names.WAITING_BY_PRIORITY,
            "Waiting requests by the nearest priority class; promoted: waited too long, next whatever their priority.",
            stats.waiting_by_class,
            "priority",
        )
        yield self._make.gauge(
            names.WAITING_BY_REASON,
            "Those that wait, by reason: for room in the batch or the cache; nothing is deferred.",
            {"capacity": stats.waiting, "deferred": 0},
            "reason",
        )
        states = {state: int(state == "awake") for state in names.SLEEP_STATES}
        yield self._make.gauge(names.SLEEP_STATE, "1 for awake: engines do not sleep.", states, "sleep_state")
        yield self._make.gauge(names.ACTIVE_SEQS, "Sequences in the running batch.", stats.running)
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        for name in names.KV_USAGE:
            yield self._make.gauge(name, "Share of KV cache blocks in use, 0 to 1.", usage)
        rate = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        for name in names.HIT_RATE:
            yield self._make.gauge(name, "Share of prompt tokens found in the prefix cache since start, 0 to 1.", rate)
        yield self._make.gauge(names.SWAPPED, "Always 0: preemption is by recompute.", 0)
        if stats.prompt_budget is not None:
            yield self._make.gauge(
                names.PROMPT_BUDGET,
                "Prompt tokens that the last step might take (--tpot-target-ms).",
                stats.prompt_budget,
            )
        if stats.utilization is not None:
            yield self._make.gauge(
                names.UTILIZATION, "Device utilisation as the plugin reports it, 0 to 1.", stats.utilization
            )

    def _adapters(self, running: Sequence[str], waiting: Sequence[str]) -> Metric:
        """vLLM's form: the labels tell, the value is the time. One series an engine, the one of the moment."""
        labels = {
            **self._make.labels,
            "max_lora": str(self._max_loras),
            "waiting_lora_adapters": ",".join(waiting),
            "running_lora_adapters": ",".join(running),
        }
        text = "LoRA adapters of running and waiting requests; the value is the time."
        return Families(labels).gauge(names.LORA_INFO, text, time.time())

    def _counters(self, stats: Snapshot) -> Iterator[Metric]:
        rows: list[tuple[tuple[str, ...], str, int]] = [
            ((names.PROMPT_TOKENS,), "Prompt tokens taken in.", stats.prompt_tokens),
            ((names.GENERATION_TOKENS,), "Tokens generated.", stats.generation_tokens),
            ((names.PREEMPTIONS,), "Sequences put back to waiting for lack of blocks.", stats.preemptions),
            ((names.STEPS,), "Steps of the engine.", stats.steps),
            ((names.CAPTURED_STEPS,), "Steps among them that replayed a recorded program.", stats.captured_steps),
            ((names.DRAFTS,), "Guesses at next tokens that were tried.", stats.drafts),
            ((names.DRAFT_TOKENS,), "Tokens of those guesses.", stats.draft_tokens),
            ((names.ACCEPTED_TOKENS,), "Tokens of those guesses that came true.", stats.accepted_tokens),
            (names.PREFIX_QUERIES, "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            (names.PREFIX_HITS, "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ]
        for aliases, text, value in rows:
            for name in aliases:
                yield self._make.counter(name, text, value)

    def _sources(self, stats: Snapshot) -> Metric:
        """The three add up to the prompt tokens."""
        found = {
            "local_compute": stats.prompt_tokens - stats.prompt_from_device - stats.prompt_from_outside,
            "local_cache_hit": stats.prompt_from_device,
            "external_kv_transfer": stats.prompt_from_outside,
        }
        text = "Prompt tokens by how a request came to their keys and values when it first ran; external: host or disk."
        return self._make.counter(names.PROMPT_BY_SOURCE, text, found, "source")

    def _work(self, work: WorkTotals | None) -> Iterator[Metric]:
        for name, what, value in (
            (names.FLOPS, "floating point operations", work and work.flops),
            (names.READ_BYTES, "bytes read: weights once a step, and the cache", work and work.read_bytes),
            (names.WRITE_BYTES, "bytes written to the cache", work and work.write_bytes),
        ):
            yield self._make.counter(name, f"Estimated {what} (--enable-mfu-metrics; 0 without it).", value or 0)

    def _fallbacks(self, fallbacks: Sequence[FallbackTotals]) -> Iterator[Metric]:
        calls = {one.operator: one.calls for one in fallbacks}
        yield self._make.counter(names.FALLBACK_CALLS, "Calls of an operator placed on the host.", calls, "operator")
        seconds = {one.operator: one.seconds for one in fallbacks}
        text = "Seconds spent in it, copies included."
        yield self._make.counter(names.FALLBACK_SECONDS, text, seconds, "operator")
        keys = [*self._make.labels, "operator", "direction"]
        text = "Bytes copied for it; direction is to_host or to_device."
        moved = CounterMetricFamily(names.FALLBACK_BYTES, text, labels=keys)
        for one in fallbacks:
            values = [*self._make.labels.values(), one.operator]
            moved.add_metric([*values, "to_host"], one.bytes_to_host)
            moved.add_metric([*values, "to_device"], one.bytes_to_device)
        yield moved
