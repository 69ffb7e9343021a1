"""Every failure as OpenAI's error object, or on its routes as Anthropic's, with the right status."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from qiao import errors
from qiao.server.paths import route_path, speaks_anthropic
from qiao.server.protocol.errors import AnthropicError, AnthropicErrorDetail, ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 2000

_BY_STATUS = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "request_timeout"),
    409: ("conflict_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "service_unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Anthropic's words by status."""

_TYPE_WORDS = frozenset({"str", "int", "float", "bool", "list", "dict"})
"""Words that pydantic adds to a path to tell the members of a union apart."""


class ApiError(HTTPException):
    """An HTTP failure with OpenAI's ``param`` and ``code``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers=headers)
        self.param = param
        self.code = code


def to_api_error(error: errors.QiaoError) -> ApiError:
    """Qiao's exceptions as HTTP. The texts are meant for users; anything else is an internal error without detail."""
    message = str(error)
    if isinstance(error, errors.ParameterError):
        return ApiError(400, message, param=error.field, code="invalid_value")
    if isinstance(error, errors.PromptTooLongError):
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, errors.UsageError):
        return ApiError(400, message)
    if isinstance(error, errors.NotFoundError):
        return ApiError(404, message, param="model", code="model_not_found")
    if isinstance(error, errors.ForbiddenError):
        return ApiError(403, message)
    if isinstance(error, errors.QuotaError):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        return ApiError(429, message, code=error.code, headers=retry)
    if isinstance(error, errors.DeadlineError):
        return ApiError(504, message)
    if isinstance(error, errors.OverloadedError):
        retry = {"Retry-After": str(math.ceil(error.retry_after))}
        return ApiError(503, message, code="overloaded", headers=retry)
    if isinstance(error, errors.EngineDeadError):
        return ApiError(503, message, code="engine_unavailable", headers={"Retry-After": "5"})
    return ApiError(500, message, code="kernel_error" if isinstance(error, errors.KernelError) else None)


def error_body(error: HTTPException) -> ErrorBody:
    """The body for ``error``; a wrapped plain ``HTTPException`` gets the words of its status."""
    kind, code = _BY_STATUS.get(
        error.status_code, ("invalid_request_error" if error.status_code < 500 else "server_error", None)
    )
    message = str(error.detail)[:_MAX_MESSAGE].encode("utf-8", "replace").decode()
    param = getattr(error, "param", None)
    detail = ErrorDetail(message=message, type=kind, param=param, code=getattr(error, "code", None) or code)
    return ErrorBody(error=detail, message=message, type=kind, param=param, code=error.status_code)


def anthropic_error(body: ErrorBody) -> AnthropicError:
    """An error as Anthropic's clients read it."""
    kind = _ANTHROPIC.get(body.code, "invalid_request_error" if body.code < 500 else "api_error")
    return AnthropicError(error=AnthropicErrorDetail(type=kind, message=body.error.message))


def error_response(error: HTTPException, scope: Scope) -> Response:
    """The answer for ``error``, in the shape of the API that was asked."""
    body = error_body(error)
    shaped = anthropic_error(body) if speaks_anthropic(route_path(scope)) else body
    return Response(
        shaped.model_dump_json(),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


def internal_error(error: BaseException) -> ApiError:
    """What a client learns of a bug: that it happened. The log has the rest."""
    logger.error("internal error while answering a request", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def validation_error(problems: list[Any]) -> ApiError:
    """The first problem that pydantic found, with the field's path."""
    first = problems[0]
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, errors.QiaoError):
        return to_api_error(cause)
    path = [str(part) for part in first.get("loc", ()) if part != "body"]
    field = ".".join(part for part in path if (part.isidentifier() and part not in _TYPE_WORDS) or part.isdigit())
    message = str(first.get("msg", "invalid"))
    if first.get("type") == "missing" and not path:
        return ApiError(400, "the request needs a JSON body")
    if not path or not field:
        return ApiError(400, message)
    return ApiError(400, f"{field}: {message}", param=path[0], code="invalid_type")


@contextmanager
def renamed(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """A ``ParameterError`` whose field begins with the first of a pair of ``names`` has the second there instead."""
    try:
        yield
    except errors.ParameterError as error:
        for theirs, own in names:
            if error.field.startswith(theirs):
                raise errors.ParameterError(own + error.field.removeprefix(theirs), error.detail) from None
        raise


def allowed_methods(request: Request) -> list[str]:
    """What the path takes, over all routes of the first template that fits; the framework names only the first's."""
    methods: set[str] = set()
    template = ""
    for route in request.app.state.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE and route.path == (template := template or route.path):
            methods |= route.methods or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def install(app: FastAPI) -> None:
    """Register the handlers."""

    async def on_qiao(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.QiaoError)
        return error_response(to_api_error(error), request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            error.headers = {"Allow": ", ".join(allowed_methods(request))}
        return error_response(error, request.scope)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(list(error.errors())), request.scope)

    async def on_bug(request: Request, error: Exception) -> Response:
        return error_response(internal_error(error), request.scope)

    app.add_exception_handler(errors.QiaoError, on_qiao)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)
