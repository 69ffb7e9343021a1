"""The FastAPI application: routes, error shape and middleware over one ``ServerState``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from qiao.server import errors
from qiao.server.access import Access
from qiao.server.args import ServerArgs
from qiao.server.auditing import Audit
from qiao.server.middleware import HeadAsGet, LimitBody, Observe
from qiao.server.routes import chat, completions, console, embeddings, messages, models, operations, tokenize
from qiao.server.state import ServerState
from qiao.server.streaming import CLIENT_GONE, ClientGoneError

RATE_HEADERS = [
    f"x-ratelimit-{fact}-{what}" for fact in ("limit", "remaining", "reset") for what in ("requests", "tokens")
]

DESCRIPTION = "OpenAI's API and vLLM's extras. Errors have OpenAI's shape on every route."


class _Application(FastAPI):
    """FastAPI whose document does not claim status 422: wrong bodies get 400, as at OpenAI."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(state: ServerState) -> FastAPI:
    """The application over ``state``."""
    args = state.server_args
    documented = not args.disable_fastapi_docs
    app = _Application(
        title="Qiao",
        version=version("qiao"),
        description=DESCRIPTION,
        root_path=args.root_path,
        openapi_url="/openapi.json" if documented else None,
        docs_url="/docs" if documented else None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the address that the client gave, which may be a proxy's
        middleware=_middleware(state, args),
    )
    app.state.qiao = state
    errors.install(app)
    app.add_exception_handler(ClientGoneError, _gone)
    routers = [
        module.router for module in (completions, chat, messages, embeddings, models, tokenize, operations, console)
    ]
    app.state.routes = [route for router in routers for route in router.routes]
    for router in routers:
        app.include_router(router)
    return app


def _middleware(state: ServerState, args: ServerArgs) -> list[Middleware]:
    """Outermost first. CORS lies before the key: a browser's preflight never carries one."""
    log = not args.disable_access_log
    echo = args.enable_request_id_headers
    layers = [Middleware(Observe, record=state.metrics.http, log=log, echo_request_id=echo)]
    if args.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(args.allowed_origins),
                allow_credentials=args.allow_credentials,
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id", "X-Priority", "X-Deadline-Ms"],
                expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
            )
        )
    if state.auditor is not None:
        layers.append(Middleware(Audit, auditor=state.auditor))
    deadline = None if args.queue_deadline_ms is None else args.queue_deadline_ms / 1000.0
    priorities = state.engine_args.scheduling_policy == "priority"
    refused = state.metrics.tenant_refused
    layers.append(
        Middleware(Access, tenants=state.tenants, priorities=priorities, refused=refused, queue_deadline=deadline)
    )
    layers += [Middleware(LimitBody, limit=args.max_body_bytes), Middleware(HeadAsGet)]
    return layers


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
