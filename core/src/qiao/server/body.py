"""Reading JSON bodies strictly: what is not exactly JSON is refused with a reason before anything else sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from qiao.server.errors import ApiError

MAX_DEPTH_TEXT = "the JSON is nested too deeply"


def parse_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    NaN and Infinity, numbers out of range, unpaired surrogates, raw control characters, invalid UTF-8 and deep nesting
    raise ``ApiError`` 400 that says which, and for surrogates where.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, MAX_DEPTH_TEXT, code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise _explain(body, error) from None


EXPLAINED_BYTES = 1 << 20
"""Longest body that is read a second time to say better what is wrong with it; that takes its time on the loop."""


def _explain(body: bytes, error: Exception) -> ApiError:
    if len(body) > EXPLAINED_BYTES:
        return ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as bad:
        return ApiError(400, f"the body is not UTF-8: {bad.reason} at byte {bad.start}", code="invalid_json")
    except RecursionError:
        return ApiError(400, MAX_DEPTH_TEXT, code="invalid_json")
    except ValueError as bad:
        return ApiError(400, f"the body is not valid JSON: {bad}", code="invalid_json")
    try:
        path = _surrogate_path(value)
    except RecursionError:
        return ApiError(400, MAX_DEPTH_TEXT, code="invalid_json")
    if path is not None:
        field = path.strip(".")
        message = f"{field}: contains an unpaired surrogate, which is not a character"
        return ApiError(400, message, param=field.partition(".")[0], code="invalid_value")
    return ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _surrogate_path(value: Any) -> str | None:
    if isinstance(value, str):
        return "" if any("\ud800" <= c <= "\udfff" for c in value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if _surrogate_path(key) is not None:
                return ".(a key)"
            if (found := _surrogate_path(item)) is not None:
                return f".{key}{found}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _surrogate_path(item)) is not None:
                return f".{index}{found}"
    return None


class StrictRequest(Request):
    """A request whose ``json()`` is ``parse_json``."""

    async def json(self) -> Any:
        """The parsed body."""
        return parse_json(await self.body())


class StrictRoute(APIRoute):
    """Demands a JSON content type where there is a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the checks."""
        handler = super().get_route_handler()
        needs_json = self.body_field is not None

        async def strict(request: Request) -> Response:
            if needs_json and not _is_json(request.headers.get("content-type", "")):
                raise ApiError(400, "send the header Content-Type: application/json", code="invalid_content_type")
            if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise ApiError(400, "send the body without Content-Encoding", code="unsupported_encoding")
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
