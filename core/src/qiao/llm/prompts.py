"""The shapes in which vLLM's users hand over prompts, messages and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    items = list(prompts)
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
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
        if ids is not None:
            return list(ids), text, salt
        if isinstance(text, str):
            return text, text, salt
    elif isinstance(prompt, Sequence):
        return list(prompt), None, ""
    raise ParameterError("prompts", f"each is text, token ids, or a dict with one of them; got {prompt!r:.100}")


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
    values = list(given)
    if len(values) != count:
        raise ParameterError(field, f"{len(values)} were given for {count} prompts; give one, or one for each")
    return values
