"""Who may come in: keys, the quota of requests, and the headers that tell of both. Pure ASGI.

Denies by default: with keys, every path but ``PUBLIC_PATHS`` needs one, as ``Authorization: Bearer KEY`` or, as
Anthropic's clients send it, ``x-api-key: KEY``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qiao.errors import ForbiddenError, ParameterError, QiaoError
from qiao.observability.tracing import TRACE_HEADERS
from qiao.server.call import CURRENT, MAX_DEADLINE_MS, Call
from qiao.server.errors import ApiError, error_response, to_api_error
from qiao.server.paths import ADMIN_PREFIX, PUBLIC_PATHS, route_path
from qiao.tenants import CLASSES, DEFAULT_TENANT, DailyUsage, KeyRing, KeyStore, Tenant, TenantQuota

ADMINISTRATOR = "qiao.administrator"
"""Where the scope says that the administrator's key was given: routes of the administrator look for it."""

CALL = "qiao.call"
"""Where the scope keeps its call, for the layers outside of this one."""

_REFUSALS: Mapping[int, str] = {403: "forbidden", 429: "quota", 504: "deadline"}
"""Statuses that a tenant's own limits lead to, and their names in the metrics."""

_INTEGER = re.compile(r"[+-]?\d{1,9}")


class Tenants:
    """The tenants of a running server: their keys and what each has left.

    ``api_keys`` are those of ``--api-key``; their callers, and everybody where there are no keys at all, are the
    default tenant, which has no limits.
    """

    def __init__(self, api_keys: Sequence[str] = (), store: KeyStore | None = None) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._store = store
        self._ring = KeyRing.read(store) if store is not None else None
        self.usage = DailyUsage(store)
        self._quotas: dict[str, TenantQuota] = {}
        self._default = Tenant(name=DEFAULT_TENANT, may_set_priority=True)

    @property
    def closed(self) -> bool:
        """Whether a key is needed."""
        return bool(self._digests) or self._ring is not None

    @property
    def stored(self) -> bool:
        """Whether there is a file of keys."""
        return self._store is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The tenants of the file."""
        return tuple(self._ring.tenants) if self._ring is not None else ()

    def read(self) -> KeyRing | None:
        """The file as it is now, for ``use``; None without one. Blocks, and raises ``ParameterError``."""
        return KeyRing.read(self._store) if self._store is not None else None

    def use(self, ring: KeyRing | None) -> None:
        """Take over what ``read`` gave. Calls that run go on; new ones meet the new keys and limits."""
        self._ring = ring
        for name, quota in self._quotas.items():
            if ring is not None and name in ring.tenants:
                quota.update(ring.tenants[name])

    def quota(self, tenant: Tenant) -> TenantQuota:
        """What a tenant has left."""
        if tenant.name not in self._quotas:
            self._quotas[tenant.name] = TenantQuota(tenant, self.usage)
        return self._quotas[tenant.name]

    def call(self, headers: Headers) -> Call:
        """Who calls. Raises ``ApiError`` 401."""
        tenant, key_id = self._caller(headers)
        return Call(tenant, self.quota(tenant), key_id)

    def _caller(self, headers: Headers) -> tuple[Tenant, str]:
        if not self.closed:
            return self._default, ""
        text = _key_text(headers)
        found = self._ring.find(text) if self._ring is not None else None
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        if text and found is not None:
            return found
        if text and any(matches):
            return self._default, ""
        raise _unknown("API key")


def _unknown(what: str) -> ApiError:
    text = f"missing or wrong {what}; send Authorization: Bearer KEY"
    return ApiError(401, text, headers={"WWW-Authenticate": "Bearer"})


def _key_text(headers: Headers) -> str:
    """The key that was sent, empty where there is none or more than one."""
    bearer, plain = headers.getlist("authorization"), headers.getlist("x-api-key")
    if len(bearer) == 1 and not plain:
        scheme, _, key = bearer[0].partition(" ")
        return key if scheme.lower() == "bearer" else ""
    return plain[0] if len(plain) == 1 and not bearer else ""


class Access:
    """Finds the caller, counts its request, and sends ``x-ratelimit-*`` headers.

    ``refused`` counts refusals by caller and reason. What is under ``/admin/`` needs ``admin_key`` and takes no other.
    ``queue_deadline`` is in seconds, for requests that name no shorter one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenants: Tenants,
        refused: Callable[[Call, str], None],
        admin_key: str | None = None,
        queue_deadline: float | None = None,
    ) -> None:
        self._app = app
        self._refused = refused
        self._tenants = tenants
        self._admin_key = admin_key
        self._queue_deadline = queue_deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, 403 or 429, or pass on."""
        if scope["type"] == "lifespan" or (path := route_path(scope)) in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._admin_key is not None and path.startswith(ADMIN_PREFIX):
            await self._administer(_key_text(headers), scope, receive, send)
            return
        try:
            call = self._tenants.call(headers)
            call.trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope[CALL] = call
        token = CURRENT.set(call)
        try:
            await self._pass(call, headers, scope, receive, send)
        finally:
            CURRENT.reset(token)
            call.end()

    async def _administer(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._admin_key is not None
        if hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._admin_key.encode()):
            scope[ADMINISTRATOR] = True
            await self._app(scope, receive, send)
        else:
            await _refuse(_unknown("the administrator's key"), scope, receive, send)

    async def _pass(self, call: Call, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        works = scope["method"] == "POST" and not scope["path"].endswith("/cancel")  # which makes room for work
        send = _with_headers(send, call, self._refused)
        try:
            read_priority(call, headers.get("x-priority"))
            read_deadline(call, headers.get("x-deadline-ms"), self._queue_deadline)
            if works:
                call.quota.begin()
        except QiaoError as error:
            refusal = to_api_error(error)
            await _refuse(refusal, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if works:
                call.quota.end()


def read_priority(call: Call, wish: str | None) -> None:
    """``X-Priority``, an integer or the name of a class, into its call.

    Raises ``ForbiddenError`` where the key does not allow it, and ``ParameterError``.
    """
    if wish is None:
        return
    if not call.tenant.may_set_priority:
        raise ForbiddenError("this key may not set a priority; leave out X-Priority")
    if wish in CLASSES:
        call.priority = CLASSES[wish].priority
    elif _INTEGER.fullmatch(wish):
        call.priority = int(wish)
    else:
        raise ParameterError("X-Priority", f"must be an integer or {', '.join(CLASSES)}, got {wish[:40]!r}")


def read_deadline(call: Call, wish: str | None, longest: float | None) -> None:
    """``X-Deadline-Ms`` into its call, or ``longest`` in seconds if that is sooner. Raises ``ParameterError``."""
    if longest is not None:
        call.limit_wait(longest)
    if wish is not None:
        if not _INTEGER.fullmatch(wish) or not 1 <= int(wish) <= MAX_DEADLINE_MS:
            raise ParameterError("X-Deadline-Ms", f"must be 1 to {MAX_DEADLINE_MS} milliseconds, got {wish[:40]!r}")
        call.limit_wait(int(wish) / 1000.0)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await error_response(error, scope)(scope, receive, send)


def _with_headers(send: Send, call: Call, refused: Callable[[Call, str], None]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] in _REFUSALS:
                refused(call, _REFUSALS[message["status"]])
            headers = MutableHeaders(scope=message)
            for name, value in call.quota.headers().items():
                headers[name] = value
        await send(message)

    return sending
