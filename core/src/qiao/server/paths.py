"""What a path says by itself: who may ask for it, and whose API it belongs to."""

from __future__ import annotations

from starlette.types import Scope

from qiao.server.console import PATHS

PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"}) | PATHS
"""Answered without a key: liveness probes carry none, nor do the console's files. Everything else needs one."""

ADMIN_PREFIX = "/admin/"
"""What only the administrator may call."""

ANTHROPIC_PREFIX = "/v1/messages"


def route_path(scope: Scope) -> str:
    """The path that routes are found by: without the prefix of ``--root-path``, which a proxy may have left on."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def speaks_anthropic(path: str) -> bool:
    """Whether errors have Anthropic's shape there."""
    return path == ANTHROPIC_PREFIX or path.startswith(ANTHROPIC_PREFIX + "/")
