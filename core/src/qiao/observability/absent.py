"""What vLLM's boards ask for and Qiao has no such thing of: exported as zero, so that a panel shows no error.

Each text says that it is always zero, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from qiao.observability import names
from qiao.observability.families import Families

_NO_MEDIA = "models take text only"
_NO_SLEEP = "engines do not sleep"
_NO_RL = "weights are not updated while a server runs"
_NO_NIXL = "engines do not send each other their caches"
_NO_THRESHOLD = "no store waits for a content to be asked for again"


@dataclass(frozen=True, slots=True)
class Absent:
    """A metric without observations. ``bounds`` makes it a histogram, else it is a counter.

    ``operations`` are the values of its label ``operation``, where it has that.
    """

    name: str
    what: str
    why: str
    bounds: tuple[float, ...] = ()
    operations: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Its help text."""
        return f"Always 0: {self.why}. In vLLM: {self.what}."


ABSENT = (
    Absent("vllm:mm_cache_queries", "items looked up in the multimodal cache", _NO_MEDIA),
    Absent("vllm:mm_cache_hits", "items found in the multimodal cache", _NO_MEDIA),
    Absent("vllm:kv_offload_stores_skipped", "stores below the reuse threshold", _NO_THRESHOLD),
    Absent(
        "vllm:sleep_mode_operation_duration_seconds",
        "seconds of a sleep or wake",
        _NO_SLEEP,
        names.OPERATION_BUCKETS,
        ("sleep", "release_kv_cache_memory", "wake"),
    ),
    Absent(
        "vllm:rl_weight_update_operation_duration_seconds",
        "seconds of a step of a weight update",
        _NO_RL,
        names.OPERATION_BUCKETS,
        ("init", "start", "update", "finish"),
    ),
    Absent("vllm:nixl_xfer_time_seconds", "seconds of a NIXL transfer", _NO_NIXL, names.NIXL_TIME_BUCKETS),
    Absent("vllm:nixl_post_time_seconds", "seconds to post a NIXL transfer", _NO_NIXL, names.NIXL_TIME_BUCKETS),
    Absent("vllm:nixl_bytes_transferred", "bytes of a NIXL transfer", _NO_NIXL, names.TRANSFER_BUCKETS),
    Absent("vllm:nixl_num_descriptors", "descriptors of a NIXL transfer", _NO_NIXL, names.NIXL_COUNT_BUCKETS),
    Absent("vllm:nixl_num_failed_transfers", "NIXL transfers that failed", _NO_NIXL),
    Absent("vllm:nixl_num_failed_notifications", "NIXL notifications that failed", _NO_NIXL),
    Absent("vllm:nixl_num_kv_expired_reqs", "requests whose cache expired before it was fetched", _NO_NIXL),
    Absent("vllm:nixl_num_notifications_after_expiry", "notifications that came after that", _NO_NIXL),
)
"""All of them."""


def absent(make: Families) -> Iterator[Metric]:
    """Their families."""
    for one in ABSENT:
        if not one.bounds:
            yield make.counter(one.name, one.text, 0)
            continue
        makers = [Families({**make.labels, "operation": name}) for name in one.operations] or [make]
        family, *others = (maker.histogram(one.name, one.text, one.bounds) for maker in makers)
        for other in others:
            family.samples += other.samples
        yield family
