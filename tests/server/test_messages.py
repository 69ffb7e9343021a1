"""Anthropic's API, through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.server import RunningServer, scripted

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
TEXTS = {
    "text": "It is fine.",
    "call": f"I look.\n{CALL}",
    "thought": "<think>\nhm\n</think>\n\nYes.",
    "behind": f"I look.\n{CALL} It rains. {CALL}",
    "long": "word " * 40,
}
TOOL = {"name": "weather", "description": "w", "input_schema": {"type": "object", "properties": {}}}
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served(rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}{% endfor %}"
        "{{ (tools or [])|length }}{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with scripted(*flags, "--chat-template", str(template), model=rand_folder, texts=TEXTS) as running:
        yield running


@pytest.fixture
def client(served: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "M", "messages": USER, "max_tokens": 300, "extra_body": {"cache_salt": text}, **more}


def test_text(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked("text", system="Be brief."))
    assert [(block.type, block.text) for block in message.content] == [("text", "It is fine.")]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "M")
    assert message.usage.output_tokens == len("It is fine.") + 1
    prompt = len("system:Be brief.user:hi0")
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == prompt
    counted = client.messages.count_tokens(model="M", system="Be brief.", messages=USER)
    assert counted.input_tokens == prompt


@pytest.mark.parametrize("name", ["text", "call", "thought", "behind"])
def test_a_stream_gives_the_same_message(client: anthropic.Anthropic, name: str) -> None:
    tools = [TOOL] if name in ("call", "behind") else anthropic.omit
    whole = client.messages.create(**asked(name, tools=tools))
    with client.messages.stream(**asked(name, tools=tools)) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)

    def plain(message: Any) -> list[Any]:
        return [{k: v for k, v in block.to_dict().items() if k != "id" and v is not None} for block in message.content]

    assert plain(streamed) == plain(whole)
    if name == "behind":
        assert [block.type for block in whole.content] == ["text", "tool_use", "text", "tool_use"]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**asked("call", tools=[TOOL]))
    text, call = first.content
    assert (text.type, text.text, call.type) == ("text", "I look.", "tool_use")
    assert (call.name, call.input, first.stop_reason) == ("weather", {"city": "Köln", "days": 2}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    again = [
        *USER,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    counted = client.messages.count_tokens(model="M", messages=again, tools=[TOOL])
    expected = "user:hiassistant:I look.[weather Köln]tool:sunnyuser:and?1"
    assert counted.input_tokens == len(expected.encode())


def test_thinking_is_a_block_and_can_be_switched_off(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked("thought"))
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking.strip(), message.content[1].text.strip()) == ("hm", "Yes.")
    off = client.messages.count_tokens(model="M", messages=USER, thinking={"type": "disabled"})
    on = client.messages.count_tokens(model="M", messages=USER)
    assert off.input_tokens - on.input_tokens == len("<think></think>")


def test_why_an_answer_ended(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(**asked("long", max_tokens=5))
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(**asked("text", stop_sequences=["fine"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "fine")
    assert stopped.content[0].text == "It is "


def test_an_answer_that_the_client_began_is_gone_on_with(client: anthropic.Anthropic, chained: RunningServer) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is x"}]
    theirs = anthropic.Anthropic(base_url=chained.url, api_key="none", max_retries=0)
    message = theirs.messages.create(**asked("stop", messages=begun))
    assert [block.text for block in message.content] == ["DEFGHIJk"]
    prompts = [client.messages.count_tokens(model="M", messages=m).input_tokens for m in (begun, USER)]
    assert prompts[0] == len("user:hiassistant:It is x")
    assert prompts[1] == len("user:hi0")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences: must not"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: at most 16"),
        ({"model": "other"}, "does not exist"),
        ({"max_tokens": 5000}, "max_tokens"),
    ],
)
def test_refusals_have_anthropic_s_shape(client: anthropic.Anthropic, body: dict[str, Any], words: str) -> None:
    kind = anthropic.NotFoundError if "model" in body else anthropic.BadRequestError
    with pytest.raises(kind) as refused:
        client.messages.create(**{**asked("text"), **body})
    error = refused.value.body
    assert error["type"] == "error"
    assert words in error["error"]["message"]
    assert error["error"]["type"] == ("not_found_error" if "model" in body else "invalid_request_error")


def test_a_missing_field_is_named(served: RunningServer) -> None:
    answer = served.http().post("/v1/messages", json={"model": "M", "messages": USER})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert "max_tokens" in answer.json()["error"]["message"]


def test_events_are_named_and_no_done_follows(served: RunningServer) -> None:
    body = {**asked("text"), "stream": True}
    body |= body.pop("extra_body")
    text = served.http().post("/v1/messages", json=body).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in events:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in text
