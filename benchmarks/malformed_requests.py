"""A seeded stream of malformed HTTP requests: wrong bodies, headers and JSON, bombs, cut and slow connections.

Each is bytes to send, in pieces, and what to do then; nothing here opens a connection.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from benchmarks import malformed_bodies as bodies
except ImportError:  # run as a script
    import malformed_bodies as bodies  # type: ignore[no-redef]

READ, CUT, PEEK, WAIT = "read", "cut", "peek", "wait"
"""Read the answer to its end; close without reading; close after its first piece; read what comes, for a second or two.

The last is for what may look unfinished to the server, which then rightly waits for more.
"""


@dataclass(frozen=True)
class Bad:
    """One request: ``pieces`` are sent with ``pause`` seconds between, then ``end`` says what becomes of the answer."""

    kind: str
    what: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    end: str = READ


@dataclass(frozen=True)
class Route:
    """A POST route and the fields of its body, from the server's document."""

    path: str
    fields: tuple[str, ...]


def post_routes(document: dict[str, Any]) -> list[Route]:
    """Every POST route of an OpenAPI document, but the administrator's, which start engines."""
    found = []
    for path, operations in sorted(document["paths"].items()):
        if "post" in operations and not path.startswith("/admin"):
            content = operations["post"].get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            found.append(Route(path, tuple(sorted(_resolved(document, schema).get("properties", {})))))
    return found


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


WEIGHTS = {
    **{"field": 24, "place": 14, "json": 12, "large": 4, "oversized": 1, "regex": 4, "grammar": 4, "schema": 5},
    **{"template": 4, "token ids": 4, "header": 9, "broken http": 7, "path": 4, "cut": 6, "slow": 2},
}
"""How often each kind comes."""


def requests(seed: int, count: int, routes: Sequence[Route], limit: int) -> Iterator[Bad]:
    """``count`` requests, the same for the same arguments; ``limit`` is the server's bound on bodies, in bytes."""
    rng = random.Random(seed)
    makers = {
        **{"oversized": lambda: _oversized(rng, limit), "header": lambda: _header(rng), "path": lambda: _path(rng)},
        **{"broken http": lambda: _broken(rng), "cut": lambda: _cut(rng), "slow": lambda: _slow(rng)},
    }
    for kind in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count):
        yield makers[kind]() if kind in makers else _with_body(rng, kind, rng.choice(routes))


def post(path: str, body: bytes, *headers: str, length: int | None = None, kind: str = "application/json") -> bytes:
    """A POST request that asks the server to close the connection behind the answer."""
    lines = [f"POST {path} HTTP/1.1", "Host: bad", "Connection: close", f"Content-Type: {kind}", *headers]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def encoded(value: Any) -> bytes:
    """JSON text; NaN and unpaired surrogates as Python writes them, which is not JSON."""
    return json.dumps(value).encode()


def _with_body(rng: random.Random, kind: str, route: Route) -> Bad:
    path = route.path.replace("{response_id}", "resp_nobody")
    if kind in ("regex", "grammar", "schema", "template"):
        path = "/v1/chat/completions"
        body = encoded(bodies.template(rng) if kind == "template" else bodies.constrained(rng, kind))
    elif kind == "token ids":
        path, value = bodies.token_ids(rng)
        body = encoded(value)
    elif kind == "large":
        path = rng.choice(bodies.GENERATING)
        body = encoded(bodies.large(rng, path))
    elif kind == "field":
        body = encoded(bodies.spoiled_field(rng, route.path, list(route.fields)))
    elif kind == "place":
        body = encoded(bodies.spoiled_place(rng, route.path))
    else:
        body = _json(rng, encoded(rng.choice(bodies.BASES.get(route.path, [{}]))))
    return Bad(kind, f"POST {path} {body[:300]!r}", (post(path, body),))


def _json(rng: random.Random, good: bytes) -> bytes:
    """A text that is nearly JSON, or JSON that is a bomb."""
    n = rng.choice((100, 5_000, 200_000))
    inside = good[1:-1] or b'"a": 1'
    return rng.choice(
        [
            *(b"", b" ", b"null", b"true", b"7", b'"text"', b"[]", b"[" * n, b'{"a":' * n, b"{" * n, b"]", b"}"),
            *(b"[" * n + b"]" * n, b'{"a":' * n + b"1" + b"}" * n, good[: rng.randrange(1, len(good))], good + good),
            *(
                good + b",",
                b"{" + inside + b",}",
                b"\xef\xbb\xbf" + good,
                good.decode().encode("utf-16"),
                b"\xff" + good,
            ),
            *(good.replace(b'"', b"'"), b"// x\n" + good, good.replace(b":", b"=", 1), b"\x00" * 100, b"{" + inside),
            *(b"{" + inside + b', "temperature": NaN}', b"{" + inside + b', "temperature": -Infinity}'),
            *(b"{" + inside + b', "temperature": 1e999}', b"{" + inside + b', "seed": ' + b"9" * n + b"}"),
            *(b"{" + inside + b', "user": "\\ud800"}', b"{" + inside + b', "user": "\\udc00\\ud800", "\\ud800": 1}'),
            *(b"{" + inside + b', "user": "\xed\xa0\x80"}', b"{" + inside + b', "user": "\xc3\x28"}'),
            *(b"{" + inside + b', "user": "a\nb"}', b"{" + inside + b', "user": "\\x41"}', b"{" + inside + b", 1: 2}"),
            *(b"{" + b", ".join([inside] * min(n, 2000)) + b"}", b"{" + inside + b', "x": 0001}'),
            *(b"{" + inside + b', "' + b"k" * n + b'": 1}', b"{" + inside + b', "x": ' + b"[" * n + b"]" * n + b"}"),
            *(b"{" + inside + b', "x": 1e-' + b"9" * min(n, 5000) + b"}", b"[" + b",".join([good] * 50) + b"]"),
        ]
    )


def _oversized(rng: random.Random, limit: int) -> Bad:
    if rng.random() < 0.5:
        declared = rng.choice((limit + 1, 10**12, 2**63, 10**25))
        return Bad("oversized", f"declared {declared}", (post("/v1/completions", b"{", length=declared),), end=WAIT)
    head = post("/v1/completions", b"", "Transfer-Encoding: chunked", length=-1)
    size = 1 << 16
    chunk = b"%x\r\n" % size + b"a" * size + b"\r\n"
    return Bad("oversized", "chunked beyond the limit", (head, *[chunk] * (limit // size + 2), b"0\r\n\r\n"))


HEADERS = (
    *("Authorization: ", "Authorization: Bearer", "Authorization: Bearer \xff\xfe", "Authorization: Basic eDp5"),
    *("Authorization: Bearer " + "k" * 8000, "X-Priority: urgent", "X-Priority: \x01", "X-Priority: -999999999999"),
    *("X-Deadline-Ms: nan", "X-Deadline-Ms: -1", "X-Deadline-Ms: 1e400", "X-Deadline-Ms: abc", "X-Request-Id: \x7f"),
    *("X-Request-Id: " + "r" * 4000, "X-Session-Id: " + "s" * 8000, "X-Session-Id: \xe9\xe9", "Content-Type: text/xml"),
    *("traceparent: 00-0-0-0", "traceparent: " + "f" * 5000, "tracestate: =,=,=", "Expect: 100-continue"),
    *(
        "Expect: the worst",
        "Content-Encoding: gzip",
        "Content-Encoding: br, gzip",
        "Accept: */*;q=NaN",
        "Range: bytes=-1",
    ),
    *("Cookie: " + "c=1; " * 900, "Origin: null", "Upgrade: h2c", "Upgrade: websocket", "Connection: upgrade"),
    *("Forwarded: for=_x", "X-Forwarded-For: 127.0.0.1", "X-HTTP-Method-Override: DELETE", "Host: other", "Host: a b"),
    *("Accept-Encoding: " + "gzip," * 500, "If-None-Match: *", "Content-Length: 3", "Trailer: Content-Length"),
)


def _header(rng: random.Random) -> Bad:
    body = encoded(bodies.COMPLETION)
    path = "/v1/completions"
    if rng.random() < 0.5:
        header = rng.choice(HEADERS)
        return Bad("header", header[:80], (post(path, body, header),))
    long = "\r\n".join(f"X-{i}: {i}" for i in range(rng.choice((100, 5000))))
    chunked = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: bad\r\n\r\n"
    whole = {
        "many headers": post(path, body, long),
        "one huge header": post(path, body, "X: " + "y" * rng.choice((20_000, 200_000))),
        "negative length": post(path, body, length=-7),
        "two lengths": post(path, body, "Content-Length: 1"),
        "length is no number": post(path, body, "Content-Length: 1e3", length=-1),
        "length with a sign": post(path, body, f"Content-Length: +{len(body)}", length=-1),
        "length too short": post(path, body, length=5),
        "no length": post(path, body, length=-1),
        "chunked and length": post(path, chunked + smuggled, "Transfer-Encoding: chunked"),
        "unknown coding": post(path, chunked, "Transfer-Encoding: xchunked", length=-1),
        "coding twice": post(path, chunked, "Transfer-Encoding: chunked", "Transfer-Encoding: identity", length=-1),
        "coding in odd letters": post(path, chunked, "Transfer-Encoding:\x0bchunked", length=-1),
        "bad chunk size": post(path, b"zz\r\n" + body, "Transfer-Encoding: chunked", length=-1),
        "huge chunk size": post(path, b"f" * 40 + b"\r\n", "Transfer-Encoding: chunked", length=-1),
        "form": post(path, b"a=b&c=d", kind="application/x-www-form-urlencoded"),
        "multipart": post(path, b"--x\r\n\r\n--x--", kind="multipart/form-data; boundary=x"),
        "strange charset": post(path, body, kind="application/json; charset=utf-7"),
        "content type of nothing": post(path, body, kind=";;;;"),
        "folded header": post(path, body, "X: a\r\n b"),
        "header without a name": post(path, body, ": a"),
        "header with a null": post(path, body, "X: \x00"),
        "space before the colon": post(path, body, "X : a"),
    }
    name = rng.choice(list(whole))
    return Bad("header", name, (whole[name],), end=WAIT)


def _broken(rng: random.Random) -> Bad:
    trash = bytes(rng.randrange(256) for _ in range(rng.choice((1, 50, 3000))))
    rest = b"Host: bad\r\nConnection: close\r\n\r\n"
    whole = {
        "trash": trash,
        "trash and an end": trash + b"\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + trash,
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        "HTTP/0.9": b"GET /\r\n\r\n",
        "HTTP/9.9": b"GET / HTTP/9.9\r\n" + rest,
        "no version": b"POST /v1/completions\r\n" + rest,
        "odd method": b"BREW /v1/completions HTTP/1.1\r\n" + rest,
        "small method": b"post /v1/completions HTTP/1.1\r\n" + rest,
        "CONNECT": b"CONNECT a:1 HTTP/1.1\r\n" + rest,
        "TRACE": b"TRACE /v1/completions HTTP/1.1\r\n" + rest,
        "OPTIONS *": b"OPTIONS * HTTP/1.1\r\n" + rest,
        "PUT": b"PUT /v1/completions HTTP/1.1\r\n" + rest,
        "bare line feeds": b"GET /health HTTP/1.1\nHost: bad\nConnection: close\n\n",
        "bare returns": b"GET /health HTTP/1.1\rHost: bad\r\r",
        "long target": b"GET /" + b"a" * rng.choice((5_000, 100_000)) + b" HTTP/1.1\r\n" + rest,
        "no host": b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n",
        "absolute target": b"GET http://else.where/v1/models HTTP/1.1\r\n" + rest,
        "many requests at once": b"GET /v1/models HTTP/1.1\r\nHost: bad\r\n\r\n" * 200
        + b"GET /nope HTTP/1.1\r\n"
        + rest,
        "websocket": b"GET /v1/completions HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n" + rest,
    }
    name = rng.choice(list(whole))
    return Bad("broken http", name, (whole[name],), end=WAIT)


def _path(rng: random.Random) -> Bad:
    method = rng.choice(("GET", "DELETE", "POST", "HEAD", "OPTIONS", "PATCH"))
    odd = rng.choice(("%00", "%ff%fe", "..%2f..%2fetc%2fpasswd", "a" * 3000, "%", "%zz", "%F0%9F%A7%A8", "a//b", "{x}"))
    path = rng.choice(
        [
            *(f"/v1/responses/{odd}", f"/v1/responses/{odd}/cancel", f"/v1/responses/{odd}/input_items?limit=-1"),
            *(f"/v1/responses/resp_x?stream=true&starting_after={odd}", f"/v1/models/{odd}", f"/console/{odd}"),
            *(f"/{odd}", f"//{odd}", f"/v1/../{odd}", "/v1/completions/", "/V1/COMPLETIONS", f"/metrics?{odd}={odd}"),
            *(
                "/console/../../../etc/passwd",
                "/docs/../openapi.json",
                "/v1/completions?" + "a=b&" * 3000,
                "/?x[$ne]=1",
            ),
            *("/v1/completions;x=y", "/v1/completions#x", "/v1/models?limit=" + "9" * 400, f"/admin/models/{odd}"),
        ]
    )
    text = f"{method} {path} HTTP/1.1\r\nHost: bad\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    return Bad("path", f"{method} {path[:120]}", (text.encode("latin-1"),))


def _cut(rng: random.Random) -> Bad:
    """A connection that its client closes too early: in the request, before the answer, in the stream."""
    path = rng.choice(bodies.GENERATING)
    body = {**bodies.BASES[path][0], "max_tokens": 200, "ignore_eos": True, "stream": rng.random() < 0.6}
    data = post(path, encoded(body))
    how = rng.choice(("in the request", "before the answer", "in the answer"))
    if how == "in the request":
        return Bad("cut", how, (data[: rng.randrange(1, len(data))],), end=CUT)
    return Bad("cut", how, (data,), end=CUT if how == "before the answer" else PEEK)


def _slow(rng: random.Random) -> Bad:
    """A request that comes byte by byte, or stops coming."""
    data = post("/v1/completions", encoded(bodies.COMPLETION))
    count = rng.choice((5, 20))
    size = -(-len(data) // count)
    pieces = tuple(data[i : i + size] for i in range(0, len(data), size))
    if rng.random() < 0.5:
        return Bad("slow", "whole in the end", pieces, pause=0.05)
    return Bad("slow", "stops on its way", pieces[: count // 2], pause=0.05, end=CUT)
