"""``GET /console``: the web console, and what it cannot learn from ``/metrics``."""

from __future__ import annotations

from importlib import resources
from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from qiao.server.console import FILES
from qiao.server.errors import ApiError
from qiao.server.fleet import fleet_of
from qiao.server.routes.shared import ERRORS

router = APIRouter()

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The page loads nothing from elsewhere, and no other page may frame it."""


@router.get("/console", include_in_schema=False)  # a page and its files, not an API
async def console(request: Request) -> Response:
    """The page, at the address that its own links are relative to."""
    return RedirectResponse(request.scope.get("root_path", "") + "/console/", status_code=307)


@router.get("/console/state", responses={503: ERRORS[503]})
async def console_state(request: Request) -> Response:
    """Facts about this server: its models, each with engine and placement plan, their adapters, and aliases."""
    fleet = fleet_of(request)
    models = [
        {
            "name": state.spec.name,
            "names": state.spec.names,
            "adapters": list(state.client.adapters.loaded),
            "created": state.created,
            "engine": "draining" if fleet.draining else state.client.state.value,
            "failure": str(state.client.failure) if state.client.failure else None,
            "info": state.client.info,
        }
        for state in fleet
    ]
    body = {"version": version("qiao"), "created": fleet.created, "models": models, "aliases": list(fleet.aliases)}
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"Cache-Control": "no-store"})


@router.get("/console/{name:path}", include_in_schema=False)
async def console_file(name: str) -> Response:
    """One of the page's files."""
    name = name or "index.html"
    if name not in FILES:
        raise ApiError(404, "the console has no such file", code="not_found")
    data = resources.files("qiao.server.console").joinpath(name).read_bytes()
    return Response(data, media_type=FILES[name], headers=HEADERS)
