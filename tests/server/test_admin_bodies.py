"""Wrong values for every field of a model and an alias, sent to the administrator's routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from qiao.errors import ParameterError
from qiao.server.setup import ModelSpec
from qiao.server.state import ServerState

from benchmarks.malformed_bodies import WRONG
from tests.server.test_security import app, call

KEY = "administrator"


async def nothing(spec: ModelSpec) -> ServerState:
    raise ParameterError("model", "is not loaded here")


def wrong_bodies() -> Iterator[tuple[str, str, Any]]:
    """Method, path and body."""
    good = {"name": "N", "model": "/nowhere/at/all"}
    weights = {"weights": {"M": 1}, "sticky": ["user"]}
    for value in WRONG:
        for field in ("name", "model", "memory", "dtype", "max-model-len", "hf-overrides", "lora-modules", "nonsense"):
            yield "POST", "/admin/models", {**good, field: value}
        yield "PUT", "/admin/models/M", {**good, "kv-cache-memory-bytes": value}
        yield "PUT", "/admin/models/M?drain_seconds=nan", {**good, "name": value}
        for field in weights:
            yield "PUT", "/admin/aliases/A", {**weights, field: value}
        yield "PUT", "/admin/aliases/A", {**weights, "weights": {"M": value}}
        yield "PUT", "/admin/aliases/A", {**weights, "sticky": [value]}
        yield "POST", "/admin/models", value
        yield "PUT", "/admin/aliases/A", value
    for name in ("%00", "%ff", "..%2f..", "a" * 5000, "%ed%a0%80", ""):
        for kind in ("models", "aliases"):
            yield "DELETE", f"/admin/{kind}/{name}", None
            yield "PUT", f"/admin/{kind}/{name}", {"model": "/nowhere"} if kind == "models" else weights


def test_a_wrong_body_is_refused_by_name_and_changes_nothing() -> None:
    made = app(load=nothing, admin_key=KEY)

    def one(method: str, path: str, body: Any) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        return lambda client: client.request(method, path, content=content, headers=headers)

    sent = list(wrong_bodies())
    answers: list[httpx.Response] = call(made, *(one(*what) for what in sent))
    for (method, path, body), answer in zip(sent, answers, strict=True):
        told = f"{method} {path[:80]} {json.dumps(body)[:200]}: {answer.status_code} {answer.text[:200]}"
        assert answer.status_code in (200, 400, 404, 405), told
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], told
        if answer.status_code == 200:
            assert "/aliases/" in path, told
    fleet = made.state.qiao
    assert [state.spec.name for state in fleet] == ["M"]
    assert not fleet.loading
    (listed,) = call(made, one("GET", "/admin/models", None))
    assert listed.status_code == 200
