"""OpenAI's API for responses, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from qiao.errors import ParameterError, QiaoError, QuotaError
from qiao.server.call import Call
from qiao.server.protocol.responses import ResponseObject
from qiao.server.responses import service
from qiao.server.responses.answer import Answer, Event
from qiao.server.responses.service import Responses, Running, _until, encoded
from qiao.server.responses.store import Bounds, ResponseStore, Stored
from qiao.tenants import DailyUsage, Tenant, TenantQuota

from tests.support.server import RunningServer, scripted

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
TEXTS = {
    "text": "It is fine.",
    "call": f"I look.\n{CALL}",
    "thought": "<think>\nhm\n</think>\n\nYes.",
    "all": f"<think>\nhm\n</think>\n\nI look.\n{CALL}",
    "json": '{"a": 1}',
    "long": "abcdefghij" * 30,
    "nothing": "",
    "fault": "It\0",
}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]"
    "{% endfor %}{% endfor %}{{ (tools or [])|length }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("responses")


@pytest.fixture(scope="module")
def served(rand_folder: Path, folder: Path) -> Iterator[RunningServer]:
    (folder / "chat.jinja").write_text(TEMPLATE)
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    flags += ("--audit-log", str(folder / "audit.jsonl"), "--audit-content", "full")
    flags += ("--chat-template", str(folder / "chat.jinja"), "--responses-db", str(folder / "kept.db"))
    with scripted(*flags, model=rand_folder, texts=TEXTS, pause=0.001) as running:
        yield running


@pytest.fixture
def client(served: RunningServer) -> openai.OpenAI:
    return served.openai()


def asked(text: str, /, **more: Any) -> dict[str, Any]:
    return {"model": "M", "input": "hi", "extra_body": {"cache_salt": text}, **more}


def prompt_length(client: openai.OpenAI, **more: Any) -> int:
    return client.responses.input_tokens.count(model="M", **more).input_tokens


def test_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **asked("text", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=100)
    )
    assert response.output_text == "It is fine."
    assert [(item.type, item.status) for item in response.output] == [("message", "completed")]
    assert (response.status, response.model, response.object, response.store) == ("completed", "M", "response", True)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (response.max_output_tokens, response.text.format.type) == (100, "text")
    prompt, made = len("system:Be brief.user:hi0"), len("It is fine.") + 1
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, made, prompt + made)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "fault"])
def test_a_stream_tells_what_the_whole_answer_says(client: openai.OpenAI, name: str) -> None:
    tools = [TOOL] if name in ("call", "all") else openai.omit
    whole = client.responses.create(**asked(name, tools=tools))
    with client.responses.stream(**asked(name, tools=tools)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert plain(final) == plain(whole)
    # What the deltas say, item by item, is what the items say in the end.
    for place, item in enumerate(final.output):
        told = "".join(e.delta for e in events if e.type.endswith(".delta") and e.output_index == place)
        assert told == (item.arguments if item.type == "function_call" else item.content[0].text)
        begun = [e for e in events if e.type == "response.output_item.added" and e.output_index == place]
        assert [e.item.id for e in begun] == [item.id]


def plain(response: Any) -> list[Any]:
    def without_ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id") and not k.startswith("parsed")
            }
        return [without_ids(one) for one in value] if isinstance(value, list) else value

    return without_ids([item.to_dict() for item in response.output])


def test_the_order_of_events(served: RunningServer) -> None:
    """As OpenAI's reference has it, for an answer with all kinds of items."""
    body = {**asked("all", tools=[TOOL]), "stream": True}
    body |= body.pop("extra_body")
    text = served.http().post("/v1/responses", json=body).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    kinds = []
    for name, data in blocks:
        kind = json.loads(data.removeprefix("data: "))["type"]
        assert name == f"event: {kind}"
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    item = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    expected = [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", *end),
        *(*item, "output_text.delta", "output_text.done", *end),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert kinds == [f"response.{kind}" for kind in expected]


def test_reasoning_is_an_item_and_counts(client: openai.OpenAI) -> None:
    response = client.responses.create(**asked("thought"))
    thought, said = response.output
    assert (thought.type, thought.content[0].text.strip(), thought.summary) == ("reasoning", "hm", [])
    assert said.content[0].text.strip() == "Yes."
    assert response.usage.output_tokens_details.reasoning_tokens >= len("hm")
    assert response.usage.output_tokens_details.reasoning_tokens <= len("<think>\nhm\n</think>")


def test_a_call_and_its_output(client: openai.OpenAI) -> None:
    first = client.responses.create(**asked("all", tools=[TOOL]))
    thought, said, call = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Köln", "days": 2},
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    expected = f"user:hiassistant:({thought.content[0].text}){said.content[0].text}[weather Köln]tool:sunny1"
    again = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), output]
    assert prompt_length(client, input=again, tools=[TOOL]) == len(expected.encode())
    assert prompt_length(client, input=[output], previous_response_id=first.id, tools=[TOOL]) == len(expected.encode())


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("none", 0),
        ("auto", 1),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}, 1),
    ],
)
def test_which_tools_the_model_is_shown(client: openai.OpenAI, choice: Any, tools: int) -> None:
    other = {**TOOL, "name": "other"}
    shown = 2 if choice == "auto" else tools
    length = prompt_length(client, input="hi", tools=[TOOL, other], tool_choice=choice)
    assert length == len(f"user:hi{shown}")
    # The last character is the count itself, which a length does not show; a single tool shows in the response.
    response = client.responses.create(**asked("text", tools=[TOOL, other], tool_choice=choice))
    assert len(response.tools) == (1 if isinstance(choice, dict) else 2)


def test_a_conversation_goes_on_from_the_response_before(client: openai.OpenAI) -> None:
    first = client.responses.create(**asked("text", instructions="Be brief."))
    second = client.responses.create(**asked("text", input="and?", previous_response_id=first.id))
    third = client.responses.create(**asked("text", input="so?", previous_response_id=second.id))
    expected = "user:hiassistant:It is fine.user:and?assistant:It is fine.user:so?0"  # instructions do not carry over
    assert third.usage.input_tokens == len(expected)
    assert third.previous_response_id == second.id
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id):
        client.responses.create(**asked("text", input="so?", previous_response_id=second.id))


def test_what_is_kept_can_be_fetched_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(
        **asked("text", input=[{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}])
    )
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    listed = client.responses.input_items.list(made.id, order="asc")
    assert [item.content[0].text for item in listed] == ["hi", "ho"]
    page = client.responses.input_items.list(made.id, limit=1)
    assert ([item.content[0].text for item in page.data], page.has_more) == (["ho"], True)
    client.responses.delete(made.id)
    for gone in (made.id, "resp_never"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(gone)


def test_store_false_leaves_nothing(client: openai.OpenAI) -> None:
    made = client.responses.create(**asked("text", store=False))
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked("text", previous_response_id=made.id))


def test_a_json_schema_is_kept_to(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(**asked("json", text=text))
    assert json.loads(response.output_text) == {"a": 1}
    assert response.text.format.to_dict() == text["format"]
    bad = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
        client.responses.create(**asked("json", text=bad))


def test_an_answer_that_was_cut_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(**asked("long", max_output_tokens=5))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("abcde", "incomplete")
    with client.responses.stream(**asked("long", max_output_tokens=5)) as stream:
        last = list(stream)[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", "abcde")


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(**asked("text", include=["message.output_text.logprobs"], top_logprobs=2))
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries[:-1]) == "It is fine."  # the last one ended the answer
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in entries)
    with client.responses.stream(**asked("text", top_logprobs=2)) as stream:
        told = [one.token for event in stream if event.type == "response.output_text.delta" for one in event.logprobs]
    assert told == [entry.token for entry in entries]


def test_in_the_background(client: openai.OpenAI, served: RunningServer, folder: Path) -> None:
    queued = client.responses.create(**asked("text", background=True))
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    served.wait_for(lambda: client.responses.retrieve(queued.id).status == "completed")
    assert client.responses.retrieve(queued.id).output_text == "It is fine."
    assert client.responses.cancel(queued.id).status == "completed"

    def audited() -> list[Any]:
        lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("response") == queued.id]

    served.wait_for(lambda: bool(audited()))  # the last that happens
    (line,) = audited()
    assert (line["event"], line["outcome"], line["answers"]) == ("background", "ok", ["It is fine."])
    assert line["answer_tokens"] == len("It is fine.") + 1


def test_a_response_of_the_background_is_cancelled_in_the_engine(client: openai.OpenAI, served: RunningServer) -> None:
    running = client.responses.create(**asked("long", background=True))
    served.wait_for(lambda: client.responses.retrieve(running.id).output_text != "")
    with pytest.raises(openai.BadRequestError, match="not complete"):
        client.responses.create(**asked("text", previous_response_id=running.id))
    cancelled = client.responses.cancel(running.id)
    assert cancelled.status == "cancelled"
    assert 0 < len(cancelled.output_text) < 300
    assert client.responses.retrieve(running.id).to_dict() == cancelled.to_dict()
    served.wait_for(lambda: served.metric("vllm:num_requests_running") == 0)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(**asked("text")).id)


def test_a_stream_of_the_background_can_be_taken_up_again(client: openai.OpenAI, served: RunningServer) -> None:
    seen = []
    stream = client.responses.create(**asked("long", background=True, stream=True))
    for event in stream:
        seen.append(event)
        if len(seen) == 20:
            break
    stream.close()
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    name = seen[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    whole = [*seen, *rest]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert "".join(e.delta for e in whole if e.type == "response.output_text.delta") == TEXTS["long"]
    assert whole[-1].response.output_text == TEXTS["long"]
    served.wait_for(lambda: client.responses.retrieve(name).status == "completed")
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in whole]
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(client.responses.create(**asked("text")).id, stream=True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"background": True, "store": False}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["everything"]}, "include"),
        ({"max_output_tokens": 100_000}, "maximum context length"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"previous_response_id": "resp_other"}, "previous_response_id"),
    ],
)
def test_refusals_name_the_field(client: openai.OpenAI, body: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked("text", **body))
    assert field in refused.value.body["message"]


def test_a_fault_in_the_engine_is_a_failed_response(served: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="boom"):
        client.responses.create(**asked("fault"))
    *_, last = client.responses.create(**asked("fault", stream=True))
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert (last.response.output_text, last.response.output[0].status) == ("It", "incomplete")
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()
    *_, last = client.responses.create(**asked("fault", stream=True, background=True))
    assert (last.type, last.response.output_text) == ("response.failed", "It")
    served.wait_for(lambda: client.responses.retrieve(last.response.id).status == "failed")


# the database -------------------------------------------------------------------------------------------------------


def stored(name: str, *, tenant: str = "a", previous: str | None = None, **more: Any) -> Stored:
    response = {"id": name, "previous_response_id": previous, "status": "completed", "output": [f"out {name}"]}
    return Stored(tenant, {**response, **more}, [f"in {name}"])  # type: ignore[list-item]


def test_one_tenant_never_meets_another_s() -> None:
    store = ResponseStore("memory", Bounds(2, 100.0, 1 << 20))
    store.put(stored("x"))
    store.put(stored("x", tenant="b", previous="y"))
    store.put(stored("y"))
    assert store.history("a", "x") == ["in x", "out x"]
    with pytest.raises(ParameterError, match="y is gone"):
        store.history("b", "x")  # the y that there is belongs to another
    assert store.get("b", "y") is None
    assert not store.delete("b", "y")
    for name in "pqrst":  # a flood
        store.put(stored(name, tenant="b"))
    assert store.get("a", "x") is not None
    assert [name for name in "pqrst" if store.get("b", name)] == ["s", "t"]


def test_what_is_kept_is_bounded_by_count_bytes_and_age() -> None:
    now = [0.0]
    store = ResponseStore("memory", Bounds(3, 10.0, 2000), lambda: now[0])

    def kept() -> str:
        return "".join(name for name in "abcdefg" if store.get("a", name))

    for name in "abc":
        now[0] += 1.0
        store.put(stored(name))
    store.put(stored("d", previous="c"))
    assert kept() == "bcd"
    now[0] += 5.0
    store.history("a", "d")  # use keeps the whole conversation
    now[0] += 6.0
    assert kept() == "cd"
    store.put(stored("e", output=["x" * 1900]))
    assert kept() == "e"
    with pytest.raises(QiaoError, match="bytes"):
        store.put(stored("f", output=["x" * 2000]))
    assert kept() == "e"
    now[0] += 11.0
    with pytest.raises(ParameterError, match="may have expired"):
        store.history("a", "e")  # what is too old is not made young by asking for it
    assert kept() == ""


def test_an_end_that_cannot_be_kept_leaves_nothing_that_says_it_runs() -> None:
    store = ResponseStore("memory", Bounds(9, 100.0, 1000))
    events = [encoded({"type": "delta", "delta": "x" * 900})]

    async def work() -> None:
        responses = Responses(store)
        for name, output, kept in (("a", "short", True), ("b", "x" * 1000, False)):
            assert await responses.keep(stored(name, status="in_progress"))
            await responses._keep_end(replace(stored(name, output=[output]), events=events))
            found = store.get("a", name)
            assert (found is not None) == kept
            assert found is None or (found.response["status"], found.events) == ("completed", None)
        await responses.close()

    asyncio.run(work())


async def growing(answer: Answer, count: int, gate: asyncio.Event | None = None) -> AsyncGenerator[Event, None]:
    """An answer of ``count`` events with 1,000 bytes each; the last waits for ``gate``."""
    for event in answer.begin():
        yield event
    for number in range(count):
        if gate is not None and number == count - 1:
            await gate.wait()
        yield {"type": "delta", "sequence_number": number, "delta": "x" * 1000}
    answer.response.status = "completed"
    yield answer.last()


def background(responses: Responses, name: str, tenant: str = "a") -> Running:
    asked = ResponseObject.model_construct(
        id=name, status="queued", background=True, output=[], error=None, previous_response_id=None
    )
    one = Tenant(name=tenant)
    call = Call(one, TenantQuota(one, DailyUsage(None)))
    return Running(call, Answer(asked, lambda *_: []), [], True, lambda: None, responses.share(tenant))


def test_events_of_the_background_are_bounded_for_each_tenant() -> None:
    """One tenant's stream that grows too large fails and says why; what it held is free again, and others go on."""
    responses = Responses(ResponseStore("memory", Bounds(9, 100.0, 20_000)))

    async def work() -> None:
        gate = asyncio.Event()
        small, large, other = (background(responses, *names) for names in (("s",), ("l",), ("o", "b")))
        await responses.start(small, growing(small.answer, 10, gate))
        await responses.start(other, growing(other.answer, 15))
        await _until(other)
        await responses.start(large, growing(large.answer, 1000))
        told = [json.loads(chunk.split(b"data: ")[1]) async for chunk in large.follow(-1)]
        assert [event["type"] for event in told[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert told[-1]["type"] == "response.failed"
        assert "--responses-max-bytes" in told[-1]["response"]["error"]["message"]
        assert 5 < len(told) < 15
        await _until(large)
        gate.set()
        await _until(small)
        for tenant, name, status, events in (("a", "s", "completed", 14), ("b", "o", "completed", 19)):
            kept = await responses.get(tenant, name)
            assert isinstance(kept, Stored)
            assert (kept.response["status"], len(kept.events or ())) == (status, events)
        assert [(share.running, share.bytes) for share in map(responses.share, "ab")] == [(0, 0), (0, 0)]
        await responses.close()

    asyncio.run(work())


def test_the_number_in_the_background_is_bounded_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_RUNNING", 2)
    responses = Responses(ResponseStore("memory", Bounds(9, 100.0, 1 << 20)))

    async def work() -> None:
        gate = asyncio.Event()
        running = [background(responses, *names) for names in (("1",), ("2",), ("3", "b"))]
        for one in running:
            await responses.start(one, growing(one.answer, 2, gate))
        more = background(responses, "4")
        with pytest.raises(QuotaError, match="2 responses of this key"):
            await responses.start(more, growing(more.answer, 2))
        gate.set()
        for one in running:
            await _until(one)
        await responses.start(more, growing(more.answer, 2))
        await _until(more)
        assert isinstance(await responses.get("a", "4"), Stored)
        await responses.close()

    asyncio.run(work())


def test_a_file_outlives_the_server_and_what_was_running_has_failed(tmp_path: Path) -> None:
    path, bounds = str(tmp_path / "kept.db"), Bounds(10, 100.0, 1 << 20)
    store = ResponseStore(path, bounds)
    store.put(stored("x"))
    store.put(stored("y", status="in_progress"))
    with pytest.raises(ParameterError, match="locked"):
        ResponseStore(path, bounds)
    store.close()
    assert (tmp_path / "kept.db").stat().st_mode & 0o077 == 0
    store = ResponseStore(path, bounds)
    first, second = store.get("a", "x"), store.get("a", "y")
    assert first is not None and first.response["status"] == "completed"
    assert second is not None and second.response["status"] == "failed"
    assert "the server ended" in second.response["error"]["message"]
    store.close()


@pytest.mark.parametrize("kind", ["text", "version", "folder", "missing"])
def test_a_file_that_is_no_database_of_responses_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kept.db"
    if kind == "text":
        path.write_text("hello " * 500)
    elif kind == "folder":
        path.mkdir()
    elif kind == "missing":
        path = tmp_path / "no" / "kept.db"
    else:
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
    with pytest.raises(ParameterError, match="--responses-db"):
        ResponseStore(str(path), Bounds(10, 100.0, 1 << 20))
