"""What a user can set about the HTTP side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qiao.errors import ParameterError
from qiao.observability.logs import LEVELS
from qiao.observability.redaction import Redaction
from qiao.observability.tracing import check_installed

CONTENT_FORMATS = ("auto", "string", "openai")

KEY_VARIABLES = ("QIAO_API_KEY", "VLLM_API_KEY")
"""Environment variables that hold a key when no ``--api-key`` is given."""

_MOST_SECONDS = 86_400.0

AUDIT_CONTENTS = ("none", "hash", "full")
"""What an audit line says of the content: nothing, hashes of the request's body and of the answers, also the texts."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """One field per server flag of ``qiao serve``.

    The default host is this machine only; give ``0.0.0.0`` to serve others, with ``api_key``. Times are in seconds,
    sizes in bytes. ``shutdown_timeout`` is how long SIGTERM lets running requests go on. ``keys`` is the file of
    tenants that ``qiao keys`` manages. With ``admin_key`` there are routes that load and unload models.
    ``engine`` are addresses of engines on other hosts, used instead of one here, with the key files in ``engine_keys``.
    ``queue_deadline_ms`` ends requests that have waited so many milliseconds. ``request_read_timeout`` is how long a
    request's head, and then its body, may take to arrive. ``engine_wait`` is how long a request without output waits
    for an engine that ended and starts again.
    ``responses_db`` is ``memory``, ``off`` or a file; the bounds are for each tenant.
    ``otlp_traces_endpoint`` is a collector's address (see ``qiao.observability.tracing``).
    Raises ``ParameterError`` naming the field.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    keys: str | None = None
    admin_key: str | None = None
    engine: tuple[str, ...] = ()
    engine_keys: str | None = None
    queue_deadline_ms: float | None = None
    responses_db: str = "memory"
    responses_max_count: int = 1000
    responses_max_age: float = 30 * 86_400.0
    responses_max_bytes: int = 64 * 1024 * 1024
    audit_log: str | None = None
    audit_content: str = "hash"
    audit_redact: tuple[str, ...] = ()
    audit_max_bytes: int = 100 * 1024 * 1024
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    otlp_traces_endpoint: str | None = None
    uvicorn_log_level: str = "info"
    log_json: bool = False
    disable_access_log: bool = False
    disable_fastapi_docs: bool = False
    enable_request_id_headers: bool = False
    enable_force_include_usage: bool = False
    shutdown_timeout: float = 30.0
    sse_keep_alive_interval: float = 0.0
    max_body_bytes: int = 32 * 1024 * 1024
    request_read_timeout: float = 60.0
    engine_wait: float = 60.0
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ParameterError("port", f"must be between 0 and 65535, got {self.port}")
        if any(not key.strip() or not key.isascii() or any(c.isspace() for c in key) for key in self.api_key):
            raise ParameterError("api_key", "must be ASCII, not empty, and have no spaces")
        if self.admin_key is not None and (not self.admin_key.isascii() or self.admin_key in self.api_key):
            raise ParameterError("admin_key", "must be ASCII and another one than api_key")
        if self.admin_key is not None and (not self.admin_key or any(c.isspace() for c in self.admin_key)):
            raise ParameterError("admin_key", "must not be empty and have no spaces; leave it out for no such routes")
        if self.engine and self.engine_keys is None:
            raise ParameterError("engine_keys", "is missing: engines on other hosts are reached with keys only")
        if self.audit_content not in AUDIT_CONTENTS:
            raise ParameterError("audit_content", f"must be one of {', '.join(AUDIT_CONTENTS)}")
        if self.audit_max_bytes < 1:
            raise ParameterError("audit_max_bytes", f"must be at least 1, got {self.audit_max_bytes}")
        Redaction(self.audit_redact)
        for name in ("responses_max_count", "responses_max_age", "responses_max_bytes"):
            if not getattr(self, name) > 0:
                raise ParameterError(name, f"must be above 0, got {getattr(self, name)}; --responses-db off keeps none")
        if self.queue_deadline_ms is not None and not self.queue_deadline_ms > 0:
            raise ParameterError("queue_deadline_ms", f"must be above 0, got {self.queue_deadline_ms}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ParameterError("allow_credentials", "cannot be combined with the origin *; name the origins")
        if self.allow_credentials and not self.allowed_origins:
            raise ParameterError("allow_credentials", "does nothing without allowed_origins; name the origins")
        if self.otlp_traces_endpoint is not None:
            check_installed(self.otlp_traces_endpoint)
        if not 0 <= self.shutdown_timeout <= _MOST_SECONDS:
            raise ParameterError("shutdown_timeout", f"must be 0 to {_MOST_SECONDS:.0f}, got {self.shutdown_timeout}")
        if not 0 <= self.sse_keep_alive_interval <= _MOST_SECONDS:
            raise ParameterError("sse_keep_alive_interval", "must be 0 (off) or more seconds")
        if self.max_body_bytes < 1:
            raise ParameterError("max_body_bytes", f"must be at least 1, got {self.max_body_bytes}")
        if not 0 <= self.request_read_timeout < float("inf"):
            raise ParameterError("request_read_timeout", "must be 0 (no limit) or more seconds")
        if not 0 <= self.engine_wait < float("inf"):
            raise ParameterError("engine_wait", "must be 0 (no wait) or more seconds")
        self._check_parsers()
        if self.uvicorn_log_level not in LEVELS:
            raise ParameterError("uvicorn_log_level", f"must be one of {', '.join(LEVELS)}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ParameterError("ssl_certfile", "a certificate and its key go together: give ssl_keyfile too")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ParameterError("ssl_ca_certs", "clients show certificates over TLS only; give ssl_certfile too")

    def _check_parsers(self) -> None:
        if self.chat_template_content_format not in CONTENT_FORMATS:
            raise ParameterError("chat_template_content_format", f"must be one of {', '.join(CONTENT_FORMATS)}")
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ParameterError("enable_auto_tool_choice", "needs tool_call_parser, the form of the model's calls")
        if self.tool_call_parser is None and self.reasoning_parser is None:
            return
        from qiao.answers import REASONING_PARSERS, TOOL_PARSERS

        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ParameterError(name, f"must be one of {', '.join(sorted(known))}, got {value!r}")

    def __repr__(self) -> str:
        hidden = "***" if self.api_key else "none"
        where = f"host={self.host!r}, port={self.port}, uds={self.uds!r}"
        return f"ServerArgs({where}, api_key={hidden}, keys={self.keys!r})"


ADMIN_KEY_VARIABLE = "QIAO_ADMIN_KEY"
"""Environment variable that holds the administrator's key when there is no ``--admin-key``."""


def admin_key_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in ``QIAO_ADMIN_KEY``; None where it is not set."""
    return environment.get(ADMIN_KEY_VARIABLE)


def keys_from_environment(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The key in ``QIAO_API_KEY`` or ``VLLM_API_KEY``.

    A variable that is set but empty raises ``ParameterError``: a server that was meant to be closed must not start
    open.
    """
    for name in KEY_VARIABLES:
        if name in environment:
            if not environment[name]:
                raise ParameterError(name, "is set but empty; unset it to serve without a key")
            return (environment[name],)
    return ()
