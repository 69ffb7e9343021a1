"""Tools and reasoning over HTTP: what OpenAI's own client sees, streamed and whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, ConfigDict

from tests.support.checkpoints import chain_checkpoint, rand_checkpoint
from tests.support.server import EOS, RunningServer, scripted, server

USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "北京"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'
TEXTS = {
    "one": CALL,
    "two": f"I look.\n{CALL}\n{NOW}",
    "none": "It is <b>fine</b>. ",
    "bad": '<tool_call>{"name": </tool_call>',
    "thought": f"<think>\nhm, {NOW}?\n</think>\n\n{CALL}",
    "answer": "<think>\nhm\n</think>\n\nYes.",
    "short": "Yes.",
}


MARKS = {310: "<think>", 312: "</think>", 313: "<tool_call>", 315: "</tool_call>"}
"""Tokens of the tokenizer, which some models have as special ones."""
SPECIAL = [*b"2", 310, 311, 312, 313, 314, 315, EOS]
"""What follows the prompt with two tools."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = {**MARKS, 311: "hm", 314: '{"name": "now"}'}
    made = rand_checkpoint(tmp_path_factory.mktemp("tools") / "rand", tokenizer={"extra_tokens": tokens})
    file = made / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] |= token["id"] in MARKS
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def tools(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}\n{% endfor %}"
        "{{ (tools or [])|length }}{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    table = dict(itertools.pairwise(SPECIAL))
    with scripted(*flags, "--chat-template", str(template), model=folder, texts=TEXTS, table=table) as running:
        yield running


def asked(text: str, **more: Any) -> dict[str, Any]:
    extra = {"cache_salt": text, **more.pop("extra_body", {})}
    return {"model": "M", "messages": USER, "max_tokens": 300, "tools": TOOLS, "extra_body": extra, **more}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


KOELN = ("weather", {"city": "Köln", "days": 2})


def test_calls_of_the_models_own_choice(tools: RunningServer) -> None:
    create = tools.openai().chat.completions.create
    for text, content, calls, reason in (
        ("one", None, [KOELN], "tool_calls"),
        ("two", "I look.", [KOELN, ("now", {})], "tool_calls"),
        ("none", TEXTS["none"], [], "stop"),
        ("bad", TEXTS["bad"], [], "stop"),
    ):
        (choice,) = create(**asked(text)).choices
        assert (choice.message.content, calls_of(choice.message)) == (content, calls)
        assert choice.finish_reason == reason
        ids = [call.id for call in choice.message.tool_calls or ()]
        assert len({*ids}) == len(calls)
    (choice,) = create(**asked("two", parallel_tool_calls=False)).choices
    assert calls_of(choice.message) == [KOELN]
    (choice,) = create(**asked("one", tool_choice="none")).choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    (choice,) = create(**asked("one", max_tokens=20)).choices
    assert (choice.message.content, choice.finish_reason) == (CALL[:20], "length")


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_a_stream_gives_the_same(tools: RunningServer, text: str) -> None:
    create = tools.openai().chat.completions.create
    whole = create(**asked(text, n=2)).choices[1]
    content, reasoning, old, reason = "", "", "", None
    calls: dict[int, list[str]] = {}
    for chunk in create(**asked(text, n=2), stream=True):
        (choice,) = chunk.choices
        if choice.index != 1:
            continue
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        old += getattr(choice.delta, "reasoning_content", None) or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.index not in calls:
                assert call.id
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    assert (content or None, reason) == (whole.message.content, whole.finish_reason)
    assert reasoning == old == (whole.message.reasoning or "")  # type: ignore[attr-defined]
    assert list(calls.values()) == [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or ()]


def test_the_clients_stream_helper(tools: RunningServer) -> None:
    with tools.openai().chat.completions.stream(**asked("two")) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [KOELN, ("now", {})]
    assert calls_of(final.choices[0].message) == [KOELN, ("now", {})]


def test_reasoning_has_both_names(tools: RunningServer) -> None:
    create = tools.openai().chat.completions.create
    message = create(**asked("answer")).choices[0].message
    assert (message.reasoning, message.reasoning_content, message.content) == ("hm", "hm", "Yes.")  # type: ignore[attr-defined]
    message = create(**asked("thought")).choices[0].message
    assert message.reasoning == f"hm, {NOW}?"  # type: ignore[attr-defined]
    assert calls_of(message) == [KOELN]
    message = create(**asked("short")).choices[0].message
    assert (message.reasoning, message.content) == (None, "Yes.")  # type: ignore[attr-defined]
    message = create(**asked("answer", extra_body={"include_reasoning": False})).choices[0].message
    assert (message.reasoning, message.content) == (None, "Yes.")  # type: ignore[attr-defined]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = create(**asked("answer", extra_body=off)).choices[0].message
    assert message.content == TEXTS["answer"]


def test_a_conversation_with_tools_goes_through_the_template(tools: RunningServer) -> None:
    """Arguments are an object for the template; a result of a tool is a message like others."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    body = {"model": "M", "messages": messages, "tools": TOOLS, "cache_salt": "short", "return_token_ids": True}
    answer = tools.http().post("/v1/chat/completions", json=body).json()
    prompt = bytes(answer["prompt_token_ids"]).decode()
    asked_for = {key: body[key] for key in ("messages", "tools")}
    assert tools.http().post("/tokenize", json=asked_for).json()["tokens"] == answer["prompt_token_ids"]
    assert prompt == "user:hiassistant:[weather Köln]tool:52"


def test_a_structured_output_begins_behind_the_reasoning(tmp_path: Path) -> None:
    """A model that writes ``AB</think>`` and would go on with an end; the grammar makes it say more."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[-1].content }}")
    model = chain_checkpoint(tmp_path / "model", dict(itertools.pairwise(b"xAB</think>")))
    flags = ("--reasoning-parser", "deepseek_r1", "--chat-template", str(template), "--threads", "1")
    with server(model, "--num-gpu-blocks-override", "16", *flags) as running:
        create = running.openai().chat.completions.create
        body = {"model": "M", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 200}
        (choice,) = create(**body, extra_body={"structured_outputs": {"choice": ["yes"]}}).choices
        assert (choice.message.reasoning, choice.message.content) == ("AB", "yes")  # type: ignore[attr-defined]
        (choice,) = create(**body, tools=TOOLS[:1], tool_choice="required").choices
        assert choice.message.reasoning == "AB"  # type: ignore[attr-defined]
        jsonschema.validate(calls_of(choice.message)[0][1], WEATHER)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
    ],
)
def test_mistakes_are_named(tools: RunningServer, wrong: dict[str, Any], field: str) -> None:
    body = {"model": "M", "messages": USER, "max_tokens": 2, "tools": TOOLS, **wrong}
    answer = tools.http().post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_structured_output_of_a_model_that_does_not_reason(rand_folder: Path) -> None:
    """The parser's form leaves it to the answer whether it reasons, and a random model does not."""
    with server(rand_folder, "--reasoning-parser", "qwen3", "--num-gpu-blocks-override", "16", "--threads", "1") as one:
        for seed in range(3):
            extra = {
                "structured_outputs": {"choice": ["yes", "no"]},
                "logit_bias": {str(i): -100 for i in b"< \t\n\v\f\r"},
            }
            body = {"model": "M", "messages": USER, "max_tokens": 20, "seed": seed, **extra}
            message = one.http().post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            assert message["content"] in ("yes", "no")
            assert message["reasoning"] is None


def test_marks_that_are_special_tokens_are_seen(tools: RunningServer) -> None:
    """Some models have them so. Who asks to skip special tokens gets what is left."""
    (choice,) = tools.openai().chat.completions.create(**asked("")).choices
    assert (choice.message.reasoning, choice.message.content) == ("hm", None)
    assert (calls_of(choice.message), choice.finish_reason) == ([("now", {})], "tool_calls")
    skipping = {"extra_body": {"skip_special_tokens": True}}
    (choice,) = tools.openai().chat.completions.create(**asked("", **skipping)).choices
    assert choice.message.content == 'hm{"name": "now"}'


def test_required_calls_follow_their_schemas(rand: RunningServer) -> None:
    """A random model, which has no choice; the server has no parser, as none is needed."""
    create = rand.openai().chat.completions.create
    for seed in range(3):
        body = {"model": "M", "messages": USER, "max_tokens": 400, "seed": seed, "temperature": 0.3}
        only = {"tools": TOOLS[:1], "parallel_tool_calls": False}
        (choice,) = create(**body, **only, tool_choice="required").choices
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "weather"  # type: ignore[union-attr]
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)  # type: ignore[union-attr]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        named = {"type": "function", "function": {"name": "weather"}}
        (choice,) = create(**body, tools=TOOLS, tool_choice=named).choices
        assert choice.finish_reason == "stop", "as OpenAI's, where the function was named"
        (call,) = choice.message.tool_calls or ()
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)  # type: ignore[union-attr]
        streamed = ""
        for chunk in create(**body, tools=TOOLS, tool_choice=named, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                streamed += part.function.arguments or ""
        assert chunk.choices[0].finish_reason == "stop"
        assert streamed == call.function.arguments  # type: ignore[union-attr]


class Weather(BaseModel):
    """As people give it to the client."""

    model_config = ConfigDict(extra="forbid")
    hot: bool
    wet: bool | None


def test_the_client_parses_calls_into_classes(rand: RunningServer) -> None:
    answer = rand.openai().chat.completions.parse(
        model="M", messages=USER, tools=[pydantic_function_tool(Weather)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=400, seed=0,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_models_own_choice_needs_a_parser(rand: RunningServer) -> None:
    answer = rand.http().post("/v1/chat/completions", json={"model": "M", "messages": USER, "tools": TOOLS})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert "--enable-auto-tool-choice" in answer.json()["error"]["message"]


def test_strict_tools_may_not_ask_for_what_cannot_be_enforced(rand: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1], "not": {}}}, "required": ["a"]}
    for strict, status in ((True, 400), (None, 200)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        body = {"model": "M", "messages": USER, "tools": [tool], "tool_choice": "required", "max_tokens": 5}
        answer = rand.http().post("/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert answer.json()["error"]["param"] == "tools"
            assert "not" in answer.json()["error"]["message"]
