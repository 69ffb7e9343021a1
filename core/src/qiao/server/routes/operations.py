"""Health, version, load and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qiao.server.errors import ApiError
from qiao.server.protocol.models import Load, Version
from qiao.server.routes.shared import ERRORS
from qiao.server.state import state_of
from qiao.transport import EngineState

router = APIRouter()


async def _health(request: Request) -> Response:
    state = state_of(request)
    if state.healthy:
        return Response(status_code=200)
    why = "the server is shutting down" if state.draining else f"the engine is {state.client.state.value}"
    cause = f": {state.client.failure}" if state.client.failure else ""
    raise ApiError(503, why + cause, code="not_ready")


@router.get("/health", response_class=Response, responses={503: ERRORS[503]})
async def health(request: Request) -> Response:
    """200 with an empty body when new requests are taken, else 503 that says why."""
    return await _health(request)


@router.get("/health/live", response_class=Response, responses={503: ERRORS[503]})
async def live(request: Request) -> Response:
    """200 unless nothing but a restart can help: the engine has failed for good."""
    state = state_of(request)
    if state.client.state is EngineState.DEAD and not state.draining:
        raise ApiError(503, f"the engine has ended: {state.client.failure or 'see the log'}", code="not_live")
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


@router.get("/version", responses={401: ERRORS[401]})
async def version() -> Version:
    """The server's version."""
    from importlib.metadata import version as installed

    return Version(version=installed("qiao"))


@router.get("/load", responses={401: ERRORS[401]})
async def load(request: Request) -> Load:
    """How many requests are being answered."""
    return Load(server_load=state_of(request).serving)


@router.get("/metrics", response_class=Response, responses={401: ERRORS[401]})
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    content, content_type = state_of(request).metrics.render()
    return Response(content, headers={"Content-Type": content_type})
