"""Quotas against what a log of admitted work says, with time that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.errors import QuotaError
from qiao.tenants import DailyUsage, Tenant, TenantQuota
from qiao.tenants.quota import Bucket, duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quota(clock: Clock, **limits: object) -> TenantQuota:
    return TenantQuota(Tenant(name="t", **limits), DailyUsage(None, clock), clock, clock)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(limit=st.integers(1, 50), waits=st.lists(st.floats(0, 30), max_size=60))
def test_no_window_has_more_requests_than_the_limit_allows(limit: int, waits: list[float]) -> None:
    """In any window of t seconds at most limit * (1 + t / 60) requests start: a full bucket and what refills."""
    clock = Clock()
    made = quota(clock, requests_per_minute=limit)
    admitted: list[float] = []
    for wait in waits:
        clock.now += wait
        try:
            made.begin()
        except QuotaError as error:
            clock.now += error.retry_after * 1.000001
            made.begin()  # what Retry-After says is enough
        admitted.append(clock.now)
        made.end()
    for i, start in enumerate(admitted):
        for j in range(i, len(admitted)):
            assert j - i + 1 <= limit * (1 + (admitted[j] - start) / 60) + 1e-6


work = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 300), st.floats(0, 1), st.floats(0, 40)), min_size=1, max_size=40
)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(minute=st.integers(50, 1000), day=st.integers(50, 3000), items=work)
def test_tokens_stay_within_minute_and_day(minute: int, day: int, items: list[tuple[int, int, float, float]]) -> None:
    """Answers are at most as long as was asked, so neither limit is passed; and the whole day can be used."""
    clock = Clock()
    made = quota(clock, tokens_per_minute=minute, tokens_per_day=day)
    used: list[tuple[float, int]] = []
    for prompt, answer, share, wait in items:
        clock.now += wait
        try:
            held = made.reserve(prompt, answer)
        except QuotaError as error:
            assert error.code in ("rate_limit_exceeded", "daily_quota_exceeded", "request_too_large")
            assert error.retry_after > 0
            continue
        real = prompt + int(answer * share)
        made.settle(held, real)
        used.append((clock.now, real))
        for start, _ in used:
            tokens = sum(n for at, n in used if at >= start)
            # one request may be larger than the whole bucket, which then owes
            assert tokens <= minute * (1 + (clock.now - start) / 60) + 600
    total = sum(n for _, n in used)
    assert total <= day + 600
    if all(p + a <= min(minute, day) for p, a, _, _ in items):
        assert total <= day


def test_refused_work_is_not_counted_and_settled_work_is_given_back() -> None:
    clock = Clock()
    made = quota(clock, tokens_per_minute=100, requests_per_minute=2, concurrent_requests=1)
    made.begin()
    with pytest.raises(QuotaError) as caught:
        made.begin()
    assert caught.value.code == "concurrency_limit_exceeded"
    assert made.headers()["x-ratelimit-remaining-requests"] == "1"
    held = made.reserve(30, 50)
    assert made.headers()["x-ratelimit-remaining-tokens"] == "20"
    with pytest.raises(QuotaError):
        made.reserve(10, 20)
    assert made.headers()["x-ratelimit-remaining-tokens"] == "20"
    made.settle(held, 31)
    assert made.headers()["x-ratelimit-remaining-tokens"] == "69"
    made.settle(held, 31)
    assert made.headers()["x-ratelimit-remaining-tokens"] == "69"
    made.end()
    made.begin()
    with pytest.raises(QuotaError, match="prompts have 101 tokens"):
        made.reserve(101, 1)


def test_changed_limits_keep_what_is_used() -> None:
    clock = Clock()
    made = quota(clock, requests_per_minute=10)
    for _ in range(4):
        made.begin()
    made.update(Tenant(name="t", requests_per_minute=5, tokens_per_minute=7))
    assert made.headers()["x-ratelimit-remaining-requests"] == "1"
    assert made.headers()["x-ratelimit-remaining-tokens"] == "7"
    assert made.running == 4
    made.update(Tenant(name="t"))
    assert made.headers() == {}


def test_headers_and_durations_are_openais() -> None:
    clock = Clock()
    made = quota(clock, requests_per_minute=60, tokens_per_minute=6000)
    made.begin()
    made.reserve(500, 500)
    assert made.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5000",
        "x-ratelimit-reset-tokens": "10s",
    }
    assert [duration(s) for s in (0, 0.0121, 1.51, 59.99, 60, 361)] == ["0ms", "13ms", "1.6s", "60s", "1m0s", "6m1s"]
    bucket = Bucket(60, clock)
    bucket.take(90)
    assert bucket.seconds_until(1) == pytest.approx(31)
