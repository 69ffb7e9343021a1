"""The FastAPI application: routes, error shape and middleware over one ``Fleet``."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from qiao.server import errors
from qiao.server.access import Access
from qiao.server.args import ServerArgs
from qiao.server.auditing import Audit
from qiao.server.document import Application
from qiao.server.fleet import Fleet
from qiao.server.middleware import HeadAsGet, LimitBody, Observe
from qiao.server.routes import (
    admin,
    chat,
    completions,
    console,
    embeddings,
    lora,
    messages,
    models,
    operations,
    responses,
    tokenize,
)
from qiao.server.streaming import CLIENT_GONE, ClientGoneError

RATE_HEADERS = [
    f"x-ratelimit-{fact}-{what}" for fact in ("limit", "remaining", "reset") for what in ("requests", "tokens")
]

DESCRIPTION = """\
OpenAI's API and vLLM's extras. Errors have OpenAI's shape on every route.

Routes that compute read three more headers: `X-Priority`, an integer (lower is sooner) or the name of a class, where
the key allows it; `X-Deadline-Ms`, the milliseconds within which a request must begin, else it is 504; `X-Session-Id`,
whose requests one arm of an alias answers."""


def create_app(fleet: Fleet) -> FastAPI:
    """The application over ``fleet``."""
    args = fleet.server_args
    documented = not args.disable_fastapi_docs
    app = Application(
        title="Qiao",
        version=version("qiao"),
        description=DESCRIPTION,
        root_path=args.root_path,
        openapi_url="/openapi.json" if documented else None,
        docs_url="/docs" if documented else None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the address that the client gave, which may be a proxy's
        middleware=_middleware(fleet, args),
    )
    app.state.qiao = fleet
    app.closed = fleet.tenants.closed
    errors.install(app)
    app.add_exception_handler(ClientGoneError, _gone)
    modules = [completions, chat, responses, messages, embeddings, models, lora, tokenize, operations, console]
    if args.admin_key is not None:
        modules.append(admin)
    routers = [module.router for module in modules]
    app.state.routes = [route for router in routers for route in router.routes]
    for router in routers:
        app.include_router(router)
    return app


def _middleware(fleet: Fleet, args: ServerArgs) -> list[Middleware]:
    """Outermost first. CORS lies before the key: a browser's preflight never carries one."""
    log = not args.disable_access_log
    echo = args.enable_request_id_headers
    layers = [Middleware(Observe, record=fleet.metrics.http, log=log, echo_request_id=echo)]
    if args.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(args.allowed_origins),
                allow_credentials=args.allow_credentials,
                allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
                allow_headers=[
                    "Authorization",
                    "Content-Type",
                    "X-Request-Id",
                    "X-Priority",
                    "X-Deadline-Ms",
                    "X-Session-Id",
                ],
                expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
            )
        )
    if fleet.auditor is not None:
        layers.append(Middleware(Audit, auditor=fleet.auditor))
    deadline = None if args.queue_deadline_ms is None else args.queue_deadline_ms / 1000.0
    layers.append(
        Middleware(
            Access,
            tenants=fleet.tenants,
            refused=fleet.refused,
            admin_key=args.admin_key,
            queue_deadline=deadline,
        )
    )
    seconds = args.request_read_timeout or None
    layers += [Middleware(LimitBody, limit=args.max_body_bytes, seconds=seconds), Middleware(HeadAsGet)]
    return layers


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
