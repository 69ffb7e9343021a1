"""Metrics of the KV cache behind the prefix cache: how long blocks stay, and what is kept beside the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import Metric

from qiao.observability import names
from qiao.observability.families import Families, HistogramTotals


class OffloadTotals(Protocol):
    """KV blocks beside the device; see ``qiao.engine.request.OffloadStats``."""

    queries: int
    host_hits: int
    disk_hits: int
    host_bytes: int
    host_capacity: int
    disk_bytes: int
    store_bytes: int
    store_seconds: float
    load_bytes: int
    load_seconds: float
    load_blocks: int
    save_outcomes: dict[str, int]
    failures: int
    pending_blocks: int
    pending_bytes: int
    fetched_blocks: int
    fetched_bytes: int
    transfer_capacity: int
    fetches: dict[str, int]

    @property
    def store_sizes(self) -> HistogramTotals:
        """Bytes of a store."""
        ...

    @property
    def load_sizes(self) -> HistogramTotals:
        """Bytes of a load."""
        ...

    @property
    def lookups(self) -> HistogramTotals:
        """Seconds of a look-up."""
        ...

    @property
    def waits(self) -> HistogramTotals:
        """Seconds that a request waited for files."""
        ...


class ResidencyTotals(Protocol):
    """How long sampled blocks stay, in seconds."""

    @property
    def lifetime(self) -> HistogramTotals:
        """From allocation to eviction."""
        ...

    @property
    def idle(self) -> HistogramTotals:
        """From the last use to eviction."""
        ...

    @property
    def reuse_gap(self) -> HistogramTotals:
        """Between two prefix hits."""
        ...


def residency(make: Families, totals: ResidencyTotals | None) -> Iterator[Metric]:
    """Empty histograms where nothing is sampled."""
    sampled = " of cached blocks that are sampled (--kv-cache-metrics; empty without it)."
    found = (None, None, None) if totals is None else (totals.lifetime, totals.idle, totals.reuse_gap)
    texts = (
        (names.BLOCK_LIFETIME, "Seconds from allocation to eviction"),
        (names.BLOCK_IDLE, "Seconds from the last use, or the allocation, to eviction"),
        (names.BLOCK_REUSE, "Seconds between the last uses by a prefix hit, noted at eviction,"),
    )
    for (name, text), one in zip(texts, found, strict=True):
        yield make.histogram(name, text + sampled, names.RESIDENCY_BUCKETS, one)


def offload(make: Families, device_hits: int, kept: OffloadTotals | None) -> Iterator[Metric]:
    """Zeros where evicted blocks are lost."""
    found = {"device": device_hits}
    if kept is not None:
        found |= {"host": kept.host_hits, "disk": kept.disk_hits}
    text = "Prompt tokens that were not computed, by where their keys and values were."
    yield make.counter(names.CACHED_BY_SOURCE, text, found, "source")
    yield make.counter(names.CACHED, "Prompt tokens that were not computed.", sum(found.values()))
    outside = 0 if kept is None else kept.host_hits + kept.disk_hits
    text = "Prompt tokens looked up beside the device, behind a prefix hit (--kv-offloading-size)."
    yield make.counter(names.EXTERNAL_QUERIES, text, 0 if kept is None else kept.queries)
    yield make.counter(names.EXTERNAL_HITS, "Prompt tokens found there.", outside)
    share = kept.host_bytes / kept.host_capacity if kept is not None and kept.host_capacity else 0.0
    yield make.gauge(names.HOST_KV_USAGE, "Share of --kv-offloading-size in use, 0 to 1.", share)
    if kept is not None:
        sizes = {"host": kept.host_bytes, "disk": kept.disk_bytes}
        yield make.gauge(names.OFFLOAD_BYTES, "Bytes of KV blocks kept beside the device.", sizes, "tier")
    yield from _transfers(make, kept)
    yield from _tiers(make, kept)


def _transfers(make: Families, kept: OffloadTotals | None) -> Iterator[Metric]:
    """Copies between the device and host memory, which happen within a step, and the way to them."""
    totals = (0, 0.0, 0, 0.0)
    sizes: tuple[HistogramTotals | None, ...] = (None, None, None, None)
    if kept is not None:
        totals = (kept.store_bytes, kept.store_seconds, kept.load_bytes, kept.load_seconds)
        sizes = (kept.store_sizes, kept.load_sizes, kept.lookups, kept.waits)
    counters = (
        (names.STORE_BYTES, "Bytes of evicted KV blocks copied from the device (--kv-offloading-size)."),
        (names.STORE_TIME, "Seconds of those copies."),
        (names.LOAD_BYTES, "Bytes of KV blocks copied back to the device."),
        (names.LOAD_TIME, "Seconds of those copies, without reading files."),
    )
    for (name, text), value in zip(counters, totals, strict=True):
        yield make.counter(name, text, value)
    histograms = (
        (names.STORE_SIZE, "Bytes of one copy from the device.", names.TRANSFER_BUCKETS),
        (names.LOAD_SIZE, "Bytes of one copy to the device.", names.TRANSFER_BUCKETS),
        (names.LOOKUP_SYNC, "Seconds of one look-up beside the device.", names.LOOKUP_BUCKETS),
        (names.LOOKUP_ASYNC, "Seconds that a request waited for files to be read.", names.WAIT_BUCKETS),
    )
    for (name, text, bounds), found in zip(histograms, sizes, strict=True):
        yield make.histogram(name, text, bounds, found)


def _tiers(make: Families, kept: OffloadTotals | None) -> Iterator[Metric]:
    """What is on its way to files and back, and what found no place."""
    text = (
        "KV blocks for which no tier had room: larger than the memory, too many waiting for the disk, or not written."
    )
    yield make.counter(names.ALLOCATION_FAILURES, text, 0 if kept is None else kept.failures)
    writing, reading = (0, 0) if kept is None else (kept.pending_bytes, kept.fetched_bytes)
    room = 1 if kept is None else kept.transfer_capacity
    for name, what, count in (
        (names.PINNED, "Bytes on their way to files and back", writing + reading),
        (names.PINNED_WRITE, "Bytes waiting to be written to files", writing),
        (names.PINNED_READ, "Bytes read from files for a request that has not started", reading),
    ):
        text = f"{what}, as a share of those that may wait to be written; what finds no room there is lost."
        yield make.gauge(name, text, count / room)
    outcomes = dict.fromkeys(names.SAVE_OUTCOMES, 0) | ({} if kept is None else kept.save_outcomes)
    yield make.counter(
        names.SAVES, "Evicted KV blocks by what became of them; others are always 0.", outcomes, "outcome"
    )
    text = "KV blocks copied back to the device."
    yield make.counter(names.LOAD_BLOCKS, text, {"completed": 0 if kept is None else kept.load_blocks}, "phase")
    pinned = 0 if kept is None else kept.pending_blocks + kept.fetched_blocks
    yield make.gauge(names.USED_BLOCKS, "KV blocks on their way to files and back.", pinned)
    yield make.gauge(
        names.PENDING_STORES, "KV blocks waiting to be written to files.", 0 if kept is None else kept.pending_blocks
    )
    stages = dict.fromkeys(names.FETCH_STAGES, 0) | ({} if kept is None else kept.fetches)
    text = "Waiting requests whose KV blocks are in files: not being read yet, being read, read and not started."
    yield make.gauge(names.KV_FETCH, text, stages, "stage")
