"""What a tenant may do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from qiao.errors import ParameterError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_COUNTS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests")


class PriorityClass(NamedTuple):
    """``priority`` is added to each request's own (lower is served first); ``weight`` is the share of a tenant of this
    class when tenants of one priority compete.
    """

    priority: int
    weight: float


CLASSES: Mapping[str, PriorityClass] = MappingProxyType(
    {"urgent": PriorityClass(-1000, 4.0), "standard": PriorityClass(0, 2.0), "low": PriorityClass(1000, 1.0)}
)
"""Priorities count under ``--scheduling-policy priority`` alone, weights always."""

DEFAULT_TENANT = ""
"""Name of the tenant of everybody without a key of the file: no limits, and whatever priority a request asks for."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one tenant; None is no limit. Tokens are those of prompts and answers together.

    ``kv_share`` is the most of the KV cache that its running requests may hold, above 0 and up to 1. ``models`` are
    served names, empty for all. ``may_set_priority`` lets its requests name a priority. ``share_prefixes`` lets it
    find, and be found by, other tenants' cached prefixes; by default a tenant finds its own alone.

    Raises ``ParameterError`` naming the field.
    """

    name: str
    priority_class: str = "standard"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None
    kv_share: float | None = None
    models: tuple[str, ...] = ()
    may_set_priority: bool = False
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.name != DEFAULT_TENANT and not _NAME.fullmatch(self.name):
            raise ParameterError("tenant", f"must be 1 to 64 letters, digits, dots, - or _, got {self.name[:80]!r}")
        if self.priority_class not in CLASSES:
            raise ParameterError("class", f"must be one of {', '.join(CLASSES)}, got {self.priority_class!r}")
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ParameterError(field, f"must be at least 1, got {value}; `qiao keys revoke` closes a tenant")
        if self.kv_share is not None and not 0.0 < self.kv_share <= 1.0:
            raise ParameterError("kv_share", f"must be above 0 and at most 1, got {self.kv_share}")

    @property
    def cls(self) -> PriorityClass:
        """Priority and weight."""
        return CLASSES[self.priority_class]

    def allows(self, model: str) -> bool:
        """Whether requests may name ``model``."""
        return not self.models or model in self.models

    @property
    def cache_scope(self) -> str:
        """What keeps its cached prefixes apart from others'."""
        return "" if self.share_prefixes else self.name
