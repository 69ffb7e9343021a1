"""The OpenAPI document: what FastAPI knows of the routes, and what the layers around them answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from qiao.server.paths import ADMIN_PREFIX, PUBLIC_PATHS, speaks_anthropic
from qiao.server.protocol.errors import AnthropicError, AnthropicErrorDetail, ErrorBody, ErrorDetail
from qiao.server.routes.shared import ERRORS

SHAPES = (ErrorBody, ErrorDetail, AnthropicError, AnthropicErrorDetail)

EVERYWHERE = (400, 401, 408, 413, 500)
"""What any request but those of ``PUBLIC_PATHS`` can meet before its route: wrong headers, the key, a large
or a slow body.
"""

HEADERS: dict[int, tuple[str, dict[str, Any], bool]] = {
    401: ("WWW-Authenticate", {"type": "string"}, True),
    429: ("Retry-After", {"type": "integer", "minimum": 0}, True),
    503: ("Retry-After", {"type": "integer", "minimum": 0}, False),
}
"""By status: name, schema, and whether it is always there (not where a health route says that it is not ready)."""

SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients do"},
    "administrator": {"type": "http", "scheme": "bearer", "description": "The key of --admin-key"},
}

_REF = "#/components/schemas/{model}"


class Application(FastAPI):
    """FastAPI with a complete document. ``closed``: whether the server asks for keys."""

    closed = False

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi(), self.closed)
        return self.openapi_schema


def complete(document: dict[str, Any], closed: bool) -> dict[str, Any]:
    """``document`` with what no route declares: keys, and the answers of the layers around it.

    Wrong bodies get 400, as at OpenAI, so status 422 goes. Errors are JSON whatever a route answers otherwise, on the
    routes of Anthropic's API in its shape.
    """
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for shape in SHAPES:
        schema = shape.model_json_schema(ref_template=_REF)
        schema.pop("$defs", None)
        schemas[shape.__name__] = schema
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(path, method, operation)
            if closed or path.startswith(ADMIN_PREFIX):
                operation["security"] = _security(path)
    if closed or any(path.startswith(ADMIN_PREFIX) for path in document["paths"]):
        document["components"]["securitySchemes"] = SCHEMES
    return document


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    for status in _around(path, method):
        answers.setdefault(str(status), {"description": ERRORS[status]["description"]})
    shape = (AnthropicError if speaks_anthropic(path) else ErrorBody).__name__
    for status, answer in answers.items():
        if int(status) < 400:
            continue
        answer["content"] = {"application/json": {"schema": {"$ref": _REF.format(model=shape)}}}
        if int(status) in HEADERS:
            name, schema, always = HEADERS[int(status)]
            answer["headers"] = {name: {"schema": schema, "required": always}}
    operation["responses"] = dict(sorted(answers.items()))


def _around(path: str, method: str) -> tuple[int, ...]:
    if path in PUBLIC_PATHS:
        return ()
    if path.startswith(ADMIN_PREFIX):
        return EVERYWHERE
    return (*EVERYWHERE, 403, 429) if method == "post" else (*EVERYWHERE, 403)


def _security(path: str) -> list[dict[str, list[str]]]:
    if path in PUBLIC_PATHS:
        return []
    if path.startswith(ADMIN_PREFIX):
        return [{"administrator": []}]
    return [{"bearer": []}, {"x-api-key": []}]
