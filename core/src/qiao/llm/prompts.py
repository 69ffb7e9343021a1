"""The shapes in which vLLM's users hand over prompts, messages and parameters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from qiao.errors import ParameterError


class TextPrompt(TypedDict, total=False):
    """A prompt as text; ``cache_salt`` separates prefix caches."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; ``prompt`` is its text, if known."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list; a list of integers is one prompt."""
    if prompts is None:
        raise ParameterError("prompts", "are missing")
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise ParameterError("prompts", f"must be one prompt or a list of them, got {prompts!r:.100}")
    items = list(prompts)
    if items and all(_is_id(item) for item in items):
        return [_ids(items)]
    return items


def prompt_parts(prompt: Any) -> tuple[str | list[int], str | None, str]:
    """What to run, its text if known, and the cache salt."""
    if isinstance(prompt, str):
        return prompt, prompt, ""
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data") or prompt.get("prompt_embeds") is not None:
            raise ParameterError("prompts", "only text and token ids are supported")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        salt = prompt.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise ParameterError("cache_salt", f"must be a string, got {salt!r:.100}")
        if ids is not None:
            return _ids(ids), text, salt
        if isinstance(text, str):
            return text, text, salt
    elif isinstance(prompt, Iterable) and not _is_id(prompt):
        return _ids(prompt), None, ""
    raise ParameterError("prompts", f"each is text, token ids, or a dict with one of them; got {prompt!r:.100}")


def _is_id(item: Any) -> bool:
    """Whether ``item`` is an integer of Python, numpy or torch."""
    if isinstance(item, bool) or getattr(item, "ndim", 0) != 0:
        return False
    try:
        operator.index(item)
    except TypeError:
        return False
    return True


def _ids(items: Any) -> list[int]:
    """Token ids as Python's integers, which is what can be sent and compared."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ParameterError("prompts", f"token ids are a list of integers, got {items!r:.100}")
    found = list(items)
    for item in found:
        if not _is_id(item):
            raise ParameterError("prompts", f"token ids are integers, got {item!r:.100}")
    return [operator.index(item) for item in found]


def conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or many as a list. Raises ``ParameterError``."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        return [cast(Sequence[Message], messages)]
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ParameterError("messages", "must be a conversation (a list of messages) or a list of conversations")
    return list(messages)


def for_each(given: Any, kind: type, default: Any, count: int, field: str = "sampling_params") -> list[Any]:
    """One value for each prompt. Raises ``ParameterError`` when the numbers differ."""
    if given is None:
        given = default
    if isinstance(given, kind):
        return [given] * count
    one = kind.__name__
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ParameterError(field, f"must be one {one} or a list of them, got {given!r:.100}")
    values = list(given)
    for value in values:
        if not isinstance(value, kind):
            raise ParameterError(field, f"must hold {one} objects, got {value!r:.100}")
    if len(values) != count:
        raise ParameterError(field, f"{len(values)} were given for {count} prompts; give one, or one for each")
    return values
