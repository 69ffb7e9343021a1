"""Figures of a run out of its requests, and of several runs out of each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Timing:
    """One request as the client saw it: ``sent`` in seconds since the run began, then in seconds since it was sent the
    first text ``ttft``, the ``last`` text and the end. ``cut`` says that the client closed the connection before it.
    """

    sent: float = 0.0
    ttft: float | None = None
    last: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None
    cut: bool = False

    @property
    def texts(self) -> int:
        """Pieces of text that came."""
        return 0 if self.ttft is None else len(self.gaps) + 1

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, or None for a single token."""
        if self.ttft is None or self.completion_tokens < 2:
            return None
        return (self.last - self.ttft) / (self.completion_tokens - 1)

    def tokens_until(self, moment: float) -> float:
        """Tokens that had come ``moment`` seconds after the run began. Each text counts for as many as any other."""
        if self.ttft is None:
            return 0.0
        at, come = self.sent + self.ttft, 0
        for gap in (*self.gaps, 0.0):
            if at > moment:
                break
            at, come = at + gap, come + 1
        return self.completion_tokens * come / self.texts

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file; times in milliseconds."""
        return {
            "sent_s": round(self.sent, 4),
            "ttft_ms": None if self.ttft is None else round(self.ttft * 1e3, 3),
            "tpot_ms": None if self.tpot is None else round(self.tpot * 1e3, 4),
            "seconds": round(self.seconds, 4),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "error": self.error,
            "cut": self.cut,
        }


def estimate_cut(timings: Sequence[Timing]) -> None:
    """Give those that were cut, whose usage never came, their tokens: texts times the tokens a text of the others."""
    whole = [t for t in timings if t.error is None and not t.cut]
    texts = sum(t.texts for t in whole)
    per_text = sum(t.completion_tokens for t in whole) / texts if texts else 1.0
    for timing in timings:
        if timing.cut:
            timing.completion_tokens = round(timing.texts * per_text)


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share``-th percentile (0 to 100) of at least one value, interpolated as ``numpy.percentile`` does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is not None; None without any."""
    kept = [value for value in values if value is not None]
    return statistics.fmean(kept) if kept else None


def full_rate(timings: Sequence[Timing]) -> float | None:
    """Tokens a second from the begin of a run until its last request was sent: all streams run until then.

    None where all were sent at once. What comes later says how long the longest answers are, not how many streams a
    server keeps up with.
    """
    end = max((t.sent for t in timings), default=0.0)
    if end < 0.1:  # seconds
        return None
    return sum(t.tokens_until(end) for t in timings if t.error is None) / end


def summarise(timings: Sequence[Timing], wall: float) -> dict[str, Any]:
    """The figures of one run that took ``wall`` seconds. Rates are tokens a second, times milliseconds.

    ``output_rate`` counts every token over the whole run, prefill included; ``full_rate`` those that came while all
    streams ran; ``decode_rate`` is that of one stream after
    its first token; ``prefill_rate`` is prompt tokens over the time to the end of the request (meant for answers of one
    token).
    """
    good = [t for t in timings if t.error is None]
    ttfts = [t.ttft for t in good if t.ttft is not None]
    gaps = [gap for t in good for gap in t.gaps]
    tpot = mean(t.tpot for t in good)
    return {
        "completed": sum(not t.cut for t in good),
        "cut": sum(t.cut for t in good),
        "failed": len(timings) - len(good),
        "errors": sorted({t.error for t in timings if t.error is not None})[:3],
        "wall_s": round(wall, 3),
        "output_tokens": sum(t.completion_tokens for t in good),
        "prompt_tokens": sum(t.prompt_tokens for t in good),
        "output_rate": sum(t.completion_tokens for t in good) / wall,
        "full_rate": full_rate(good),
        "decode_rate": 1 / tpot if tpot else None,
        "prefill_rate": statistics.median(t.prompt_tokens / t.seconds for t in good) if good else None,
        "tpot_ms": tpot * 1e3 if tpot else None,
        "ttft_mean_ms": statistics.fmean(ttfts) * 1e3 if ttfts else None,
        "ttft_p95_ms": percentile(ttfts, 95) * 1e3 if ttfts else None,
        "itl_p95_ms": percentile(gaps, 95) * 1e3 if gaps else None,
    }


def median_of(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    """The median of a figure over rounds, without the rounds that lack it."""
    values = [run[key] for run in runs if run.get(key) is not None]
    return statistics.median(values) if values else None


def pooled_ttft(runs: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Mean and 95th percentile, in milliseconds, of the time to first token over the requests of all rounds together.

    One round has too few requests for a percentile of its own.
    """
    values = [r["ttft_ms"] for run in runs for r in run["requests"] if r["error"] is None and r["ttft_ms"] is not None]
    return (statistics.fmean(values), percentile(values, 95)) if values else None
