"""Every parameter that the server supports, in one call, checked as the SDK's own tests do.

Runs inside the SDK's tests (``openai_sdk_suite.py`` copies it there), in place of those that send all that OpenAI has.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from tests.utils import assert_matches_type  # type: ignore[import-not-found]  # the SDK's own helpers

both = pytest.mark.parametrize("client", [False, True], indirect=True, ids=["loose", "strict"])

SHARED: dict[str, Any] = {
    "frequency_penalty": -2,
    "logit_bias": {"1": 0},
    "n": 1,
    "presence_penalty": -2,
    "stop": "\n",
    "temperature": 1,
    "top_p": 1,
    "user": "user-1234",
}
COMPLETION: dict[str, Any] = {**SHARED, "best_of": 1, "max_tokens": 16, "seed": 0}
ECHO: dict[str, Any] = {**COMPLETION, "echo": True}
LOGPROBS: dict[str, Any] = {**COMPLETION, "logprobs": 2}
"""Not both at once: the first echoed token has no log-probability, which OpenAI's API and this server say with a null,
and the SDK's strict type does not allow."""
CHAT: dict[str, Any] = {
    **SHARED,
    "function_call": "none",
    "logprobs": True,
    "max_completion_tokens": 16,
    "max_tokens": 16,
    "metadata": {"foo": "string"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "prompt-cache-key-1234",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": "safety-identifier-1234",
    "seed": -9007199254740991,
    "service_tier": "auto",
    "store": True,
    "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "name", "parameters": {"foo": "bar"}, "strict": True}}],
    "top_logprobs": 2,
}
loose = pytest.mark.parametrize("client", [False], indirect=True, ids=["loose"])
"""For streams: a chunk's finish_reason is null until the end, which the SDK's strict type does not allow."""

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_obfuscation": True, "include_usage": True}}
MESSAGES: list[Any] = [{"content": "string", "role": "developer", "name": "name"}]


@both
def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="gpt-3.5-turbo-instruct", prompt="This is a test.", **ECHO)
    assert_matches_type(Completion, answer, path=["response"])
    assert answer.choices[0].text.startswith("This is a test.")
    assert answer.usage is not None


@both
def test_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model="gpt-3.5-turbo-instruct", prompt="This is a test.", **LOGPROBS)
    assert_matches_type(Completion, answer, path=["response"])
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or ()) == len(logprobs.token_logprobs or ()) > 0


@loose
@pytest.mark.parametrize("parameters", [ECHO, LOGPROBS], ids=["echo", "logprobs"])
def test_completion_stream(client: OpenAI, parameters: dict[str, Any]) -> None:
    stream = client.completions.create(model="gpt-3.5-turbo-instruct", prompt="This is a test.", **parameters, **STREAM)
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")


@both
def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-6-astra", messages=MESSAGES, **CHAT)
    assert_matches_type(ChatCompletion, answer, path=["response"])
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content or ())


@loose
def test_chat_stream(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="gpt-6-astra", messages=MESSAGES, **CHAT, **STREAM))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 16
