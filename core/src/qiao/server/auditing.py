"""One audit line for each request that asks for work or is turned away. Pure ASGI."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qiao.observability.audit import AuditLog, audit_key
from qiao.observability.redaction import Redaction
from qiao.server.access import CALL
from qiao.server.call import Call
from qiao.server.middleware import clean_request_id

_OUTCOMES = {401: "unauthenticated", 403: "forbidden", 429: "over_quota", 499: "client_gone", 504: "deadline"}


@dataclass(frozen=True)
class Auditor:
    """Where lines go and what they hold; ``key`` makes the hashes of contents useless for guessing them."""

    log: AuditLog
    policy: str
    redaction: Redaction
    key: bytes

    @classmethod
    def open(cls, path: str, policy: str, rules: tuple[str, ...], max_bytes: int) -> Auditor:
        """A log that is appended to. Raises ``ParameterError``."""
        key = audit_key()
        return cls(AuditLog(path, max_bytes, key), policy, Redaction(rules), key)

    def digest(self, data: bytes) -> str:
        """The hash of a content."""
        if self.key:
            return hmac.new(self.key, data, hashlib.sha256).hexdigest()
        return hashlib.sha256(data).hexdigest()

    def write(self, record: dict[str, object], body: bytes | None, call: Call | None) -> None:
        """A line with what the policy says of a request's body, where there is one, and of the answers.

        Hashes and redaction are made on the log's thread: they take long where texts are, and must hold up nobody.
        """
        if self.policy == "none" or call is None:  # what a stranger sends is not kept
            self.log.write(record)
            return
        answers = [call.answers[key] for key in sorted(call.answers)]
        held = len(body or b"") + sum(map(len, answers))
        self.log.write(record, partial(self._content, body, answers), held)

    def _content(self, body: bytes | None, answers: Sequence[str]) -> dict[str, object]:
        found: dict[str, object] = {"answer_hash": self.digest("\0".join(answers).encode("utf-8", "replace"))}
        if body is not None:
            found["request_hash"] = self.digest(body)
            if self.policy == "full":
                found["request"] = self.redaction.apply(body.decode("utf-8", "replace"))
        if self.policy == "full":
            found["answers"] = [self.redaction.apply(answer) for answer in answers]
        return found

    def background(self, call: Call, response_id: str, status: str, began: float) -> None:
        """The line of a response that ended without a client; the line of its request has come before."""
        record: dict[str, object] = {
            "event": "background",
            "response": response_id,
            "tenant": call.tenant.name,
            "key": call.key_id,
            "outcome": {"completed": "ok", "incomplete": "ok", "cancelled": "client_gone"}.get(status, "failed"),
            **_tokens(call),
            "time": _moment(began),
            "seconds": round(time.time() - began, 6),
        }
        self.write(record, None, call)


class Audit:
    """Notes each exchange that is not a plain successful GET."""

    def __init__(self, app: ASGIApp, *, auditor: Auditor) -> None:
        self._app = app
        self._auditor = auditor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and write a line at the end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, clock, status, body = time.time(), time.perf_counter(), 499, bytearray()

        async def receiving() -> Message:
            message = await receive()
            if self._auditor.policy != "none":
                body.extend(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        failed = True
        try:
            await self._app(scope, receiving, sending)
            failed = False
        finally:
            call: Call | None = scope.get(CALL)
            if scope["method"] in ("POST", "PUT", "DELETE") or status in (401, 403, 429):
                record = _facts(scope, call, status, failed)
                record["time"] = _moment(began)
                record["seconds"] = round(time.perf_counter() - clock, 6)
                self._auditor.write(record, bytes(body), call)


def _facts(scope: Scope, call: Call | None, status: int, failed: bool) -> dict[str, object]:
    outcome = _OUTCOMES.get(status) or ("ok" if status < 400 else "refused" if status < 500 else "failed")
    reasons = call.finish_reasons if call is not None else []
    if outcome == "ok" and (failed or "error" in reasons or "abort" in reasons):
        outcome = "client_gone" if "abort" in reasons and "error" not in reasons else "failed"
    record: dict[str, object] = {
        "event": "request",
        "request_id": clean_request_id(Headers(scope=scope).get("x-request-id")) or "",
        "tenant": call.tenant.name if call is not None else "",
        "key": call.key_id if call is not None else "",
        "client": (scope.get("client") or ("", 0))[0],
        "method": scope["method"],
        "route": getattr(scope.get("route"), "path", "other"),
        "status": status,
        "outcome": outcome,
    }
    return record if call is None else {**record, **_tokens(call)}


def _tokens(call: Call) -> dict[str, object]:
    return {
        "model": call.model,
        **({"alias": call.alias} if call.alias else {}),
        "prompt_tokens": call.prompt_tokens,
        "answer_tokens": call.answer_tokens,
        "finish_reasons": list(call.finish_reasons),
        "first_token_seconds": call.first_token_seconds,
        "queue_seconds": call.queue_seconds,
    }


def _moment(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"
