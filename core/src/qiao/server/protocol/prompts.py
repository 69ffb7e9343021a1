"""What stands where a prompt goes: a text, a list of texts, a list of token ids, or a list of such lists."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from qiao.errors import ParameterError

MAX_PROMPTS = 1024
"""Most prompts in one request, and most answers in all."""

PromptValue = str | list[str] | list[int] | list[list[int]]

_MAX_ID = 2**31


def prompt_check(field: str, most: int = MAX_PROMPTS) -> PlainValidator:
    """The validator of ``field`` with at most so many prompts.

    By hand, because one bad entry in a long list must cost one error, not one per entry and per type.
    """
    return PlainValidator(lambda value: _check(field, value, most), json_schema_input_type=_described(most))


def _described(most: int) -> Any:
    """The type for the schema alone."""
    ids = Annotated[list[Annotated[int, Field(ge=0, lt=_MAX_ID)]], Field(min_length=1)]
    several = Field(min_length=1, max_length=most)
    return str | Annotated[list[str], several] | ids | Annotated[list[ids], several]


def separate(prompt: PromptValue) -> list[str | list[int]]:
    """Each prompt by itself."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def _check(field: str, value: Any, most: int) -> PromptValue:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ParameterError(field, "must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not value:
        raise ParameterError(field, "must not be an empty list")
    if not isinstance(value[0], str | list):
        return _check_ids(field, value)
    if len(value) > most:
        raise ParameterError(field, f"at most {most} prompts in one request, got {len(value)}")
    if isinstance(value[0], str):
        if not all(isinstance(one, str) for one in value):
            raise ParameterError(field, "the first entry is a text, so all must be")
        return value
    return [_check_ids(field, one) for one in value]


def _check_ids(field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ParameterError(field, "a list of token ids must be a list with at least one entry")
    for token in value:
        if not _is_id(token):
            raise ParameterError(field, f"token ids are integers from 0, got {str(token)[:40]}")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ID
