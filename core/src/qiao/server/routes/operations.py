"""Health, version, load and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qiao.server.errors import ApiError
from qiao.server.fleet import fleet_of
from qiao.server.protocol.models import Load, Version
from qiao.server.routes.shared import ERRORS
from qiao.transport import EngineState

router = APIRouter()


async def _health(request: Request) -> Response:
    fleet = fleet_of(request)
    if fleet.healthy:
        return Response(status_code=200)
    why, state = "the server is shutting down", next(iter(fleet), None)
    if not fleet.draining:
        why = f"the engine is {state.client.state.value}" if state is not None else "no model is loaded"
    cause = f": {state.client.failure}" if state is not None and state.client.failure else ""
    raise ApiError(503, why + cause, code="not_ready")


@router.get("/health", response_class=Response, responses={503: ERRORS[503]})
async def health(request: Request) -> Response:
    """200 with an empty body when some model takes new requests, else 503 that says why."""
    return await _health(request)


@router.get("/health/live", response_class=Response, responses={503: ERRORS[503]})
async def live(request: Request) -> Response:
    """200 unless nothing but a restart can help: every engine has failed for good."""
    fleet = fleet_of(request)
    states = list(fleet)
    if states and not fleet.draining and all(state.client.state is EngineState.DEAD for state in states):
        raise ApiError(503, f"the engine has ended: {states[0].client.failure or 'see the log'}", code="not_live")
    return Response(status_code=200)


@router.get("/health/ready", response_class=Response, responses={503: ERRORS[503]})
async def ready(request: Request) -> Response:
    """The same as ``/health``."""
    return await _health(request)


@router.get("/ping", response_class=Response, responses={503: ERRORS[503]})
async def ping(request: Request) -> Response:
    """The same as ``/health``, under SageMaker's name."""
    return await _health(request)


@router.post("/ping", response_class=Response, responses={503: ERRORS[503]})
async def ping_post(request: Request) -> Response:
    """The same as ``/health``, under SageMaker's name."""
    return await _health(request)


@router.get("/version")
async def version() -> Version:
    """The server's version."""
    from importlib.metadata import version as installed

    return Version(version=installed("qiao"))


@router.get("/load")
async def load(request: Request) -> Load:
    """How many requests are being answered."""
    return Load(server_load=fleet_of(request).serving)


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    content, content_type = fleet_of(request).metrics.render()
    return Response(content, headers={"Content-Type": content_type})
