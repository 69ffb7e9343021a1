"""The exception tree.

::

    QiaoError                     anything Qiao raises on purpose
    ├── UsageError                the caller can mend it (HTTP 400, exit status 2)
    │   ├── ParameterError        one named field or flag is wrong
    │   ├── ModelError            a checkpoint, config or tokenizer is wrong
    │   └── PromptTooLongError    the prompt cannot fit the context or the cache
    ├── NotFoundError             an unknown model or resource (HTTP 404)
    ├── PluginError               a backend is missing, broken or ambiguous
    │   ├── PlanRefusedError      the fallback policy forbids this placement
    │   └── KernelError           a bound operator raised at run time
    ├── ForbiddenError            the caller's key does not allow it (HTTP 403)
    ├── QuotaError                the caller's quota is used up (HTTP 429)
    ├── DeadlineError             the request's deadline passed while it waited (HTTP 504)
    ├── OverloadedError           the queue is full (HTTP 503)
    └── EngineDeadError           the engine process ended (HTTP 503)

Each message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "DeadlineError",
    "EngineDeadError",
    "ForbiddenError",
    "KernelError",
    "ModelError",
    "NotFoundError",
    "OverloadedError",
    "ParameterError",
    "PlanRefusedError",
    "PluginError",
    "PromptTooLongError",
    "QiaoError",
    "QuotaError",
    "UsageError",
]


class QiaoError(Exception):
    """Root of everything that Qiao raises on purpose."""


class UsageError(QiaoError):
    """The caller can mend it: HTTP 400 in the server, exit status 2 in the command line."""


class ParameterError(UsageError, ValueError):
    """One named field or flag is wrong.

    ``field`` is the name as the user wrote it, for example ``top_p`` or ``--block-size``.
    It is also a ``ValueError``, which is what vLLM's users catch.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.detail = message

    def __reduce__(self) -> tuple[type[ParameterError], tuple[str, str]]:
        return type(self), (self.field, self.detail)


class ModelError(UsageError):
    """A checkpoint, config or tokenizer is wrong; the text names the file or the tensor."""


class PromptTooLongError(UsageError, ValueError):
    """The prompt cannot fit the model's context or the KV cache."""


class NotFoundError(QiaoError):
    """An unknown model or resource."""


class PluginError(QiaoError):
    """A backend is missing, broken or ambiguous; the text names the package and the remedy."""


class PlanRefusedError(PluginError):
    """The fallback policy forbids this placement; the text lists the operators and their price."""


class KernelError(PluginError):
    """A bound operator raised. It is never retried elsewhere; the request fails."""


class ForbiddenError(QiaoError):
    """The caller is known, and its key does not allow what it asks for."""


class QuotaError(QiaoError):
    """A quota of the caller is used up. ``retry_after`` is in seconds; ``code`` says which kind of quota."""

    def __init__(self, message: str, retry_after: float = 1.0, code: str = "rate_limit_exceeded") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class DeadlineError(QiaoError):
    """The request's deadline passed before any of it had run; nothing was computed."""


class OverloadedError(QiaoError):
    """The bounded queue is full. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(QiaoError):
    """The engine process ended; the text carries the child's own cause."""
