"""Keys, CORS and limits on an application in this process; its engine never starts."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from qiao.config import EngineArgs
from qiao.engine.request import EngineInfo
from qiao.frontend import Frontend
from qiao.lora.request import RUNTIME_VARIABLES
from qiao.server.access import PUBLIC_PATHS
from qiao.server.app import create_app
from qiao.server.args import ServerArgs
from qiao.server.fleet import Load
from qiao.server.loader import make_fleet, make_state
from qiao.server.setup import ModelSpec, Setup
from qiao.server.state import ServerState
from qiao.tenants import KeyStore, Tenant
from qiao.transport import EngineClient, EnginePool, EngineState
from qiao.transport.process import HostOptions, LocalSource
from transformers import AutoTokenizer

from tests.support.tokenizers import byte_tokenizer

KEY = "SECRET"
AUTH = {"Authorization": f"Bearer {KEY}"}


@functools.cache
def tokenizer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(byte_tokenizer(folder))


async def never(spec: ModelSpec) -> ServerState:
    raise AssertionError("no test here loads a model")


def app(chat_template: str | None = None, load: Load = never, **options: Any) -> FastAPI:
    numbers = {"max_model_len": 512, "vocab_size": 320, "block_size": 16, "num_blocks": 64, "max_num_seqs": 8}
    info = EngineInfo(device="cpu", dtype="float32", max_num_queued=8, **numbers)
    args = EngineArgs(model="M", chat_template=chat_template)
    engine = EngineClient(LocalSource(args, HostOptions()))
    engine._info, engine.state = info, EngineState.READY
    frontend = Frontend(tokenizer(), info, args, {}, [257])
    server = ServerArgs(**options)
    fleet = make_fleet(Setup.single(args, server), load)
    fleet.add(make_state(EnginePool([engine], patience=0.0), frontend, ModelSpec(args, server), info))
    return create_app(fleet)


def call(made: FastAPI, *requests: Callable[[httpx.AsyncClient], Any]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=made, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await request(client) for request in requests]

    return asyncio.run(run())


def test_every_route_needs_the_key_but_the_published_few() -> None:
    """B106: walks the application's own route table."""
    made = app(api_key=(KEY,))
    seen = set()
    routes = [(r.path, m) for r in flat(made.router.routes) for m in getattr(r, "methods", None) or ()]
    assert len(routes) > 14
    for path, method in routes:
        url = path.replace("{model:path}", "x")
        without, wrong, right = call(
            made,
            lambda c, m=method, u=url: c.request(m, u),
            lambda c, m=method, u=url: c.request(m, u, headers={"Authorization": "Bearer WRONG"}),
            lambda c, m=method, u=url: c.request(m, u, headers=AUTH),
        )
        if path in PUBLIC_PATHS:
            assert without.status_code == (307 if path == "/console" else 200), path
            continue
        seen.add(path)
        assert without.status_code == wrong.status_code == 401, path
        assert right.status_code != 401, path
        if method != "HEAD":
            kind, word = ("type", "authentication_error") if "/messages" in path else ("code", "invalid_api_key")
            assert without.json()["error"][kind] == word
            assert without.headers["www-authenticate"] == "Bearer"
    assert {"/v1/completions", "/tokenize", "/detokenize", "/metrics", "/openapi.json", "/docs", "/load"} <= seen
    console = {
        "/console",
        "/console/",
        *(f"/console/{name}.js" for name in ("app", "metrics", "views", "play", "words")),
    }
    console |= {"/console/index.html", "/console/style.css"}
    assert {"/health", "/health/live", "/health/ready", "/ping"} == PUBLIC_PATHS - console
    assert "/console/state" not in PUBLIC_PATHS


def flat(routes: list[Any]) -> list[Any]:
    found = []
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        found += flat(inner) if inner else [route]
    return found


@pytest.mark.parametrize(
    "path",
    [
        "/invocations",
        "//v1/completions",
        "/V1/completions",
        "/v1/completions/",
        "/health/",
        "//health",
        "/health/../metrics",
        "/%68ealth2",
        "/",
    ],
)
def test_odd_paths_are_closed(path: str) -> None:
    (answer,) = call(app(api_key=(KEY,)), lambda c: c.post(path, json={"prompt": "a"}))
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Bearer  {KEY}", f"Bearer {KEY} ", f"bearer{KEY}", f"Basic {KEY}", KEY, f"Bearer {KEY}x",
     "Bearer SECRE", f"Bearer {KEY.lower()}", f"Bearer {KEY},{KEY}", "Bearer \xff"],
)  # fmt: skip
def test_odd_keys_are_refused(value: str) -> None:
    raw = value.encode("latin-1")
    if raw.endswith(b" "):  # the client library strips it, as servers do
        return
    (answer,) = call(app(api_key=(KEY,)), lambda c: c.get("/v1/models", headers=[(b"Authorization", raw)]))
    assert answer.status_code == 401


def test_good_keys() -> None:
    made = app(api_key=("other", KEY))
    scheme = {"Authorization": f"bearer {KEY}"}
    twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
    answers = call(
        made,
        lambda c: c.get("/v1/models", headers=AUTH),
        lambda c: c.get("/v1/models", headers=scheme),
        lambda c: c.get("/v1/models", headers={"Authorization": "Bearer other"}),
        lambda c: c.get("/v1/models", headers=twice),
    )
    assert [a.status_code for a in answers] == [200, 200, 200, 401]
    assert [a.status_code for a in call(app(), lambda c: c.get("/v1/models"))] == [200]


def preflight(origin: str) -> Callable[[httpx.AsyncClient], Any]:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return lambda c: c.options("/v1/chat/completions", headers=headers)


def test_cors() -> None:
    """B107."""
    made = app(api_key=(KEY,), allowed_origins=("https://app.example",))
    good, evil, refused, real = call(
        made,
        preflight("https://app.example"),
        preflight("https://evil.example"),
        lambda c: c.get("/v1/models", headers={"Origin": "https://app.example"}),
        lambda c: c.get("/v1/models", headers={"Origin": "https://app.example", **AUTH}),
    )
    assert good.status_code in (200, 204)
    assert good.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in good.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in evil.headers
    assert refused.status_code == 401
    assert real.status_code == 200
    assert real.headers["access-control-allow-origin"] == "https://app.example"
    any_origin = app(allowed_origins=("*",))
    (answer,) = call(any_origin, preflight("https://x.example"))
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
    (closed,) = call(app(), preflight("https://x.example"))
    assert "access-control-allow-origin" not in closed.headers


def test_health_follows_engine_and_drain() -> None:
    made = app()
    fleet = made.state.qiao
    (state,) = fleet
    (engine,) = state.client.engines
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        assert call(made, lambda c, p=path: c.get(p))[0].status_code == 200
    engine.state = EngineState.STARTING
    (starting,) = call(made, lambda c: c.get("/health"))
    assert starting.status_code == 503
    assert "starting" in starting.json()["error"]["message"]
    live, ready = call(made, lambda c: c.get("/health/live"), lambda c: c.get("/health/ready"))
    assert (live.status_code, ready.status_code) == (200, 503), "a restart would not help"
    (no_engine,) = call(made, lambda c: c.post("/v1/completions", json={"prompt": "a"}))
    assert no_engine.status_code == 503
    assert no_engine.json()["error"]["code"] == "engine_unavailable"
    engine.state = EngineState.DEAD
    assert [a.status_code for a in call(made, lambda c: c.get("/health/live"))] == [503]
    engine.state, fleet.draining = EngineState.READY, True
    for request in (
        lambda c: c.get("/health"),
        lambda c: c.post("/v1/completions", json={"prompt": "a"}),
        lambda c: c.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}),
    ):
        (answer,) = call(made, request)
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]


def test_bugs_are_500_without_details() -> None:
    made = app()

    def broken() -> str:
        raise RuntimeError("secret detail")

    made.router.routes.append(APIRoute("/broken", broken, methods=["GET"]))
    (answer,) = call(made, lambda c: c.get("/broken"))
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3,
        "{{ 'a' * 10 ** 9 }}",
        "{% for",
    ],
)
def test_a_hostile_template_is_a_4xx_and_the_server_goes_on(template: str) -> None:
    """B109."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    bad, health = call(
        app(chat_template=template),
        lambda c: c.post("/v1/chat/completions", json=body),
        lambda c: c.get("/health"),
    )
    assert 400 <= bad.status_code < 500, bad.text
    assert "uid=" not in bad.text
    assert health.status_code == 200


def test_adapters_come_and_go_only_where_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is read with the server's rights: closed by default, and to tenants always."""
    store = KeyStore(tmp_path / "keys.db")
    store.create()
    store.put_tenant(Tenant(name="acme"))
    tenant = {"Authorization": f"Bearer {store.add_key('acme').text}"}
    made = app(api_key=(KEY,), keys=str(store.path))

    def statuses(headers: dict[str, str]) -> list[int]:
        body = {"lora_name": "a", "lora_path": "/etc"}
        paths = [f"/v1/{what}_lora_adapter" for what in ("load", "unload")]
        answers = call(made, *(lambda c, p=p: c.post(p, json=body, headers=headers) for p in paths))
        return [answer.status_code for answer in answers]

    for name in RUNTIME_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert statuses(AUTH) == statuses(tenant) == [404, 404]
    for name in RUNTIME_VARIABLES:
        monkeypatch.setenv(name, "0")
        assert statuses(AUTH) == [404, 404]
        monkeypatch.setenv(name, "1")
        assert statuses(tenant) == [403, 403]
        assert statuses(AUTH) == [400, 400], "the server runs without --enable-lora"
        monkeypatch.delenv(name)


def test_documents_can_be_turned_off() -> None:
    made = app(disable_fastapi_docs=True)
    assert [a.status_code for a in call(made, lambda c: c.get("/docs"), lambda c: c.get("/openapi.json"))] == [404, 404]


def test_the_openapi_document_declares_errors_and_models() -> None:
    (answer,) = call(app(), lambda c: c.get("/openapi.json"))
    paths = answer.json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert {"200", "400", "401", "404", "413", "500", "503"} <= set(paths[path]["post"]["responses"])
        assert "422" not in paths[path]["post"]["responses"], path
    fields = answer.json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert all({"type": "null"} in field["anyOf"] for name, field in fields.items() if name != "prompt")


def test_the_openapi_document_tells_of_keys_and_of_errors_in_their_shapes() -> None:
    made = app(api_key=(KEY,), admin_key="admin")
    (answer,) = call(made, lambda c: c.get("/openapi.json", headers=AUTH))
    document = answer.json()
    schemes = set(document["components"]["securitySchemes"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            named = {name for choice in operation["security"] for name in choice}
            assert named <= schemes
            wanted = (
                set() if path in PUBLIC_PATHS else {"administrator"} if "/admin/" in path else {"bearer", "x-api-key"}
            )
            assert named == wanted, path
            shape = "AnthropicError" if path.startswith("/v1/messages") else "ErrorBody"
            for status, described in operation["responses"].items():
                if status >= "400":
                    (content,) = described["content"].items()
                    assert content == ("application/json", {"schema": {"$ref": f"#/components/schemas/{shape}"}}), path
    answers = document["paths"]["/v1/responses"]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert answers["429"]["headers"]["Retry-After"]["required"]
    open_document = call(app(), lambda c: c.get("/openapi.json"))[0].json()
    assert "securitySchemes" not in open_document["components"]
    assert all("security" not in one for found in open_document["paths"].values() for one in found.values())


def test_anthropic_s_routes_refuse_in_its_shape_wherever_it_happens() -> None:
    made = app(api_key=(KEY,), max_body_bytes=100)
    body = {"model": "M", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    calls = [
        ({"headers": {"Authorization": "Bearer WRONG"}, "json": body}, 401, "authentication_error"),
        ({"headers": AUTH, "content": b"x" * 101}, 413, "request_too_large"),
        ({"headers": {**AUTH, "X-Priority": "no"}, "json": body}, 400, "invalid_request_error"),
        ({"headers": AUTH, "json": {**body, "model": "other"}}, 404, "not_found_error"),
        ({"headers": AUTH, "json": {**body, "deadline_ms": 1e-9}}, 504, "timeout_error"),
    ]
    for given, status, kind in calls:
        (answer,) = call(made, lambda c, given=given: c.post("/v1/messages", **given))
        error = answer.json()
        assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), error
        assert set(error) == {"type", "error"} and set(error["error"]) == {"type", "message"}
    (other,) = call(made, lambda c: c.post("/v1/completions", json={}))
    assert other.json()["error"]["code"] == "invalid_api_key"


def test_allow_names_the_methods_of_the_path_itself() -> None:
    answers = call(
        app(),
        lambda c: c.options("/v1/responses/input_tokens"),
        lambda c: c.put("/v1/responses/resp_1"),
        lambda c: c.patch("/ping"),
    )
    assert [(a.status_code, a.headers["allow"]) for a in answers] == [
        (405, "POST"),
        (405, "DELETE, GET, HEAD"),
        (405, "GET, HEAD, POST"),
    ]


def test_http_metrics_use_route_templates() -> None:
    made = app()
    page = call(
        made,
        lambda c: c.get("/v1/models/M"),
        lambda c: c.get("/random/path/1"),
        lambda c: c.get("/random/path/2"),
        lambda c: c.get("/metrics"),
    )[-1].text
    assert 'http_requests_total{handler="/v1/models/{model:path}",method="GET",status="2xx"} 1.0' in page
    assert 'http_requests_total{handler="other",method="GET",status="4xx"} 2.0' in page
