"""/v1/chat/completions over the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import RunningServer

USER = [{"role": "user", "content": "hi"}]


def ask(rand: RunningServer, **body: Any) -> dict[str, Any]:
    given = {"model": "M", "messages": USER, "max_tokens": 4, **body}
    answer = rand.http().post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_streamed_usage_covers_all_choices(rand: RunningServer) -> None:
    """B013."""
    asked: dict[str, Any] = {
        "model": "M",
        "messages": USER,
        "n": 3,
        "max_tokens": 5,
        "extra_body": {"ignore_eos": True},
    }
    client = rand.openai()
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    final = chunks[-1]
    assert final.choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert final.usage is not None
    plain = client.chat.completions.create(**asked).usage
    assert plain is not None
    assert final.usage.completion_tokens == plain.completion_tokens == 15
    assert final.usage.prompt_tokens == plain.prompt_tokens
    assert final.usage.total_tokens == final.usage.prompt_tokens + 15


def test_continuous_usage_only_grows(rand: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "M", "messages": USER, "n": 2, "max_tokens": 5, "ignore_eos": True, "stream": True}
    stream = rand.openai().chat.completions.create(
        model="M",
        messages=USER,
        n=2,
        max_tokens=5,
        stream=True,
        stream_options=options,
        extra_body={"ignore_eos": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert len(counts) > 3
    assert body["stream"]


def test_parts_are_joined_for_every_role(rand: RunningServer) -> None:
    """B015."""
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    first, second = (ask(rand, messages=m, temperature=0) for m in (parts, plain))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_the_newer_token_limit_wins(rand: RunningServer) -> None:
    """B018."""
    for extra in ({}, {"max_tokens": 9}):
        got = rand.http().post(
            "/v1/chat/completions",
            json={"model": "M", "messages": USER, "ignore_eos": True, "max_completion_tokens": 3, **extra},
        )
        assert got.json()["usage"]["completion_tokens"] == 3
        assert got.json()["choices"][0]["finish_reason"] == "length"


def test_logprobs_have_openais_shape(rand: RunningServer) -> None:
    got = rand.openai().chat.completions.create(
        model="M", messages=USER, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = got.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content if entry.token != "</s>")
    assert raw.decode("utf-8", "replace") == got.choices[0].message.content
    for entry in logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])  # greedy: the sampled one is the best
    none = ask(rand, logprobs=True, temperature=0)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in none)
    assert ask(rand, temperature=0)["choices"][0]["logprobs"] is None


def test_stream_has_the_role_first_and_joins_to_the_plain_answer(rand: RunningServer) -> None:
    asked: dict[str, Any] = {
        **{"model": "M", "messages": USER, "n": 2, "seed": 5, "max_tokens": 12},
        **{"logprobs": True, "top_logprobs": 1},
    }
    client = rand.openai()
    plain = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", "assistant"]
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in plain.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        streamed = [entry for c in mine if c.logprobs for entry in c.logprobs.content or []]
        assert streamed == choice.logprobs.content


def test_continuing_a_message_and_echo(rand: RunningServer) -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure"}]
    options = {"add_generation_prompt": False, "continue_final_message": True, "temperature": 0}
    continued = ask(rand, messages=messages, **options)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure"
    completion = rand.http().post(
        "/v1/completions",
        json={"prompt": text, "max_tokens": 4, "temperature": 0, "add_special_tokens": False},
    )
    answer = completion.json()["choices"][0]["text"]
    assert continued["choices"][0]["message"]["content"] == answer
    assert ask(rand, messages=messages, echo=True, **options)["choices"][0]["message"]["content"] == "Sure" + answer


def test_harmless_fields_are_accepted(rand: RunningServer) -> None:
    plain = ask(rand, temperature=0)
    extra = ask(
        rand,
        temperature=0,
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        some_future_field={"x": 1},
    )
    assert extra["choices"] == plain["choices"]


def test_seed_repeats_and_n_differ(rand: RunningServer) -> None:
    first, again = (ask(rand, seed=11, n=3, max_tokens=8) for _ in range(2))
    assert first["choices"] == again["choices"]
    assert len({choice["message"]["content"] for choice in first["choices"]}) > 1
