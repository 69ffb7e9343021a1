"""Quotas of one tenant: counted before work starts, settled after it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from qiao.errors import QuotaError
from qiao.tenants.tenant import Tenant
from qiao.tenants.usage import DailyUsage, until_midnight


class Bucket:
    """A token bucket: holds ``limit`` at most and refills so many a minute. It may owe, if more was used than asked."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    @property
    def level(self) -> float:
        """What it holds now."""
        now = self._clock()
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / 60.0)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take out ``amount``, below nothing if need be; a negative one puts back."""
        self._level = min(float(self.limit), self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """How long until it holds ``amount``."""
        return max(0.0, (amount - self.level) * 60.0 / self.limit)

    def resize(self, limit: int) -> None:
        """Another limit; what has been used stays used."""
        used = self.limit - self.level
        self.limit, self._level = limit, limit - used


@dataclass
class Reservation:
    """Tokens that were set aside for requests that run."""

    tokens: int


class TenantQuota:
    """What one tenant has left. Used from one thread.

    ``clock`` is for minutes, in seconds from anywhere; ``now`` is ``time.time()``, for the day.
    """

    def __init__(
        self,
        tenant: Tenant,
        usage: DailyUsage,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.tenant = tenant
        self._usage = usage
        self._clock = clock
        self._now = now
        self.running = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.update(tenant)

    def update(self, tenant: Tenant) -> None:
        """Take over changed limits; what is used and what runs stays counted."""
        self.tenant = tenant
        self._requests = self._resized(self._requests, tenant.requests_per_minute)
        self._tokens = self._resized(self._tokens, tenant.tokens_per_minute)

    def _resized(self, bucket: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        if bucket is None:
            return Bucket(limit, self._clock)
        bucket.resize(limit)
        return bucket

    def begin(self) -> None:
        """Count one request that starts; ``end`` is due when it is over.

        Raises ``QuotaError``, and then nothing is counted.
        """
        most = self.tenant.concurrent_requests
        if most is not None and self.running >= most:
            raise QuotaError(
                f"{self.running} requests of this key's tenant run, the limit is {most}; wait for one to end",
                1.0,
                code="concurrency_limit_exceeded",
            )
        bucket = self._requests
        if bucket is not None:
            if (wait := bucket.seconds_until(1.0)) > 0.0:
                raise QuotaError(f"the limit is {bucket.limit} requests a minute; try again in {wait:.1f} s", wait)
            bucket.take(1.0)
        self.running += 1

    def hold(self) -> None:
        """A request that has begun goes on without its client; another ``end`` is due."""
        self.running += 1

    def end(self) -> None:
        """A request is over."""
        self.running -= 1

    def reserve(self, prompt: int, answer: int) -> Reservation:
        """Set tokens aside for a prompt and the longest answer. Raises ``QuotaError``; nothing is counted then."""
        for limit, period in ((self.tenant.tokens_per_minute, "minute"), (self.tenant.tokens_per_day, "day")):
            if limit is not None and prompt > limit:
                raise QuotaError(
                    f"the prompts have {prompt} tokens, and the limit is {limit} tokens a {period}; shorten them",
                    60.0,
                    code="request_too_large",
                )
        self._check_minute(prompt + answer)
        self._check_day(prompt + answer)
        self._count(prompt + answer)
        return Reservation(prompt + answer)

    def _check_minute(self, wanted: int) -> None:
        bucket = self._tokens
        if bucket is None:
            return
        wait = bucket.seconds_until(min(wanted, bucket.limit))
        if wait > 0.0:
            raise QuotaError(
                f"the limit is {bucket.limit} tokens a minute, {max(0, int(bucket.level))} are left, and up to "
                f"{wanted} are needed; try again in {wait:.1f} s, shorten the prompt or lower max_tokens",
                wait,
            )

    def _check_day(self, wanted: int) -> None:
        limit = self.tenant.tokens_per_day
        used = self._usage.total(self.tenant.name)
        if limit is not None and used + min(wanted, limit) > limit:
            raise QuotaError(
                f"the limit is {limit} tokens a day, {used} are used or set aside, and up to {wanted} are needed; "
                "the day begins at midnight UTC",
                until_midnight(self._now()),
                code="daily_quota_exceeded",
            )

    def settle(self, reservation: Reservation, used: int) -> None:
        """What was set aside becomes what was used."""
        self._count(used - reservation.tokens)
        reservation.tokens = used

    def _count(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)
        self._usage.add(self.tenant.name, tokens)

    def headers(self) -> dict[str, str]:
        """The state under OpenAI's names, for the limits that there are."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.limit))
        return found


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
