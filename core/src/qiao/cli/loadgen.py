"""Load on an OpenAI-compatible server: what to send, sending it, and the figures. Used by ``qiao bench``.

TTFT is the time from sending a request to its first text, TPOT the decode time per token after the first,
ITL the gap between two chunks of one stream. All in seconds, from ``time.perf_counter``.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from qiao.cli.client import DONE, is_loopback, text_of
from qiao.errors import UsageError

if TYPE_CHECKING:
    import httpx

_WORDS = (
    "the of and to in is was for that on with as are at be this have from or had by but not what all were when we "
    "there can an your which their said if will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down"
)
"""Common words, about one token each in most vocabularies."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send. ``rate`` is requests a second (Poisson arrivals); None keeps ``concurrency`` requests running."""

    requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    input_words: int = 128
    output_tokens: int = 64
    shared_words: int = 0
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "input_words", "output_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.rate is not None and self.rate <= 0:
            raise UsageError(f"--rate must be above 0 requests a second, got {self.rate}")

    def prompts(self) -> list[str]:
        """Random prompts, a different one for each request; the first ``shared_words`` words are common to all."""
        rng = random.Random(self.seed)  # noqa: S311 - a workload, not a secret
        words = _WORDS.split()
        shared = rng.choices(words, k=self.shared_words)
        return [" ".join(shared + rng.choices(words, k=self.input_words)) for _ in range(self.requests)]

    def arrivals(self) -> list[float]:
        """Seconds after the start at which each request is sent; all 0 in a closed loop."""
        if self.rate is None:
            return [0.0] * self.requests
        rng = random.Random(self.seed + 1)  # noqa: S311 - a workload, not a secret
        times, now = [], 0.0
        for _ in range(self.requests):
            now += rng.expovariate(self.rate)
            times.append(now)
        return times


@dataclass(slots=True)
class Timing:
    """One request. ``ttft`` is None where no text came."""

    seconds: float = 0.0
    ttft: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    def note(self, event: dict[str, Any], elapsed: float) -> None:
        """Take in one chunk that arrived ``elapsed`` seconds after the request was sent."""
        usage = event.get("usage")
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.completion_tokens = usage.get("completion_tokens") or 0
        if not text_of(event):
            return
        if self.ttft is None:
            self.ttft = elapsed
        else:
            self.gaps.append(elapsed - self.last)
        self.last = elapsed

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.ttft is None or self.completion_tokens < 2:
            return None
        return (self.last - self.ttft) / (self.completion_tokens - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share``-th percentile (0 to 100) of at least one value, interpolated as ``numpy.percentile`` does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds, or None without values."""
    if not values:
        return None
    figures = {"mean": statistics.fmean(values)} | {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {name: round(value * 1000, 3) for name, value in figures.items()}


def summarise(load: Load, timings: Sequence[Timing], wall: float) -> dict[str, Any]:
    """The figures of a run that took ``wall`` seconds, ready for JSON; times in milliseconds."""
    good = [t for t in timings if t.error is None]
    out = sum(t.completion_tokens for t in good)
    return {
        "load": asdict(load),
        "completed": len(good),
        "failed": len(timings) - len(good),
        "errors": sorted({t.error for t in timings if t.error is not None})[:5],
        "seconds": round(wall, 3),
        "prompt_tokens": sum(t.prompt_tokens for t in good),
        "completion_tokens": out,
        "requests_per_second": round(len(good) / wall, 3),
        "output_tokens_per_second": round(out / wall, 3),
        "ttft_ms": spread([t.ttft for t in good if t.ttft is not None]),
        "tpot_ms": spread([t.tpot for t in good if t.tpot is not None]),
        "itl_ms": spread([gap for t in good for gap in t.gaps]),
        "e2e_ms": spread([t.seconds for t in good]),
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as a table for a person."""
    lines = [
        f"{figures['completed']} requests completed, {figures['failed']} failed, in {figures['seconds']:.2f} s",
        f"{figures['requests_per_second']:.2f} requests/s, {figures['output_tokens_per_second']:.1f} output tokens/s",
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))),
    ]
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if figures[key]:
            lines.append(f"{key[:-3].upper():<6}" + "".join(f"{value:>10.2f}" for value in figures[key].values()))
    lines += [f"error: {text}" for text in figures["errors"]]
    return "\n".join(lines)


async def _one(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Timing:
    timing = Timing()
    start = time.perf_counter()
    ended = False
    try:
        async with http.stream("POST", url, json=body) as response:
            if response.status_code >= 400:
                timing.error = f"{response.status_code} {(await response.aread()).decode(errors='replace')[:200]}"
                return timing
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    data = line[5:].strip()
                    ended = data == DONE
                    if ended:
                        break
                    event = json.loads(data)
                    if event.get("error"):
                        timing.error = str(event["error"])[:200]
                    timing.note(event, time.perf_counter() - start)
    except Exception as error:  # a failed request is a figure, not the end of the run
        timing.error = f"{type(error).__name__}: {error}"[:200]
    if timing.error is None and not ended:
        timing.error = "the stream ended early"
    timing.seconds = time.perf_counter() - start
    return timing


async def run_load(url: str, model: str, api_key: str | None, load: Load) -> dict[str, Any]:
    """Send ``load`` to the server at ``url`` (ending in ``/v1``) and return ``summarise``'s figures."""
    import httpx

    path = url + ("/chat/completions" if load.chat else "/completions")
    common = {
        "model": model,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # In an open loop the arrivals alone limit what is in flight.
    gate = asyncio.Semaphore(load.concurrency if load.rate is None else load.requests)
    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None),  # a loaded server may take long; that is what is measured
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency),
        trust_env=not is_loopback(url),
    ) as http:
        start = time.perf_counter()

        async def at(moment: float, prompt: str) -> Timing:
            await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
            what = {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
            async with gate:
                return await _one(http, path, common | what)

        timings = await asyncio.gather(*(at(t, p) for t, p in zip(load.arrivals(), load.prompts(), strict=True)))
    return summarise(load, timings, time.perf_counter() - start)
