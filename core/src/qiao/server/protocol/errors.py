"""The error body of every route."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """``code`` is OpenAI's short word, for example ``model_not_found``; ``param`` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's envelope, and beside it the flat error of vLLM before 0.10, whose ``code`` is the status."""

    error: ErrorDetail
    object: Literal["error"] = "error"
    message: str
    type: str
    param: str | None
    code: int


class AnthropicErrorDetail(BaseModel):
    """``type`` is one of Anthropic's words."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Anthropic's envelope."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
