"""The clients of OpenAI and Anthropic where they do more than send and read: helpers that parse, collect and call."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.compat.conftest import salted
from tests.support.server import RunningServer

USER: list[Any] = [{"role": "user", "content": "hi"}]


class Weather(BaseModel):
    """A trip."""

    city: str
    days: int


@pytest.fixture
def client(served: RunningServer) -> openai.OpenAI:
    return served.openai()


def test_parsed_answers(client: openai.OpenAI) -> None:
    expected = Weather(city="Köln", days=2)
    chat = client.chat.completions.parse(model="M", messages=USER, response_format=Weather, extra_body=salted("json"))
    assert chat.choices[0].message.parsed == expected
    response = client.responses.parse(model="M", input="hi", text_format=Weather, extra_body=salted("json"))
    assert response.output_parsed == expected
    with client.responses.stream(model="M", input="hi", text_format=Weather, extra_body=salted("json")) as stream:
        assert stream.get_final_response().output_parsed == expected


def test_collected_streams_of_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    body = salted("two")
    with client.chat.completions.stream(model="M", messages=USER, tools=[tool], extra_body=body) as stream:
        for _ in stream:
            pass
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls or ()] == [{"city": "Köln", "days": 2}] * 2


def test_a_loop_with_tools_by_the_agents_pattern(client: openai.OpenAI) -> None:
    """What agent frameworks do: answer every call, and go on from the response before."""
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
    first = client.responses.create(model="M", input="hi", tools=[tool], extra_body=salted("two"))
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert len(outputs) == 2
    second = client.responses.create(
        model="M", input=outputs, tools=[tool], previous_response_id=first.id, extra_body=salted("text")
    )
    assert second.output_text == "It is fine."


def test_many_asynchronous_calls_at_once(served: RunningServer) -> None:
    async def run() -> list[str]:
        transport = httpx.AsyncClient(timeout=60, trust_env=False)
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", http_client=transport) as client:

            async def one(number: int) -> str:
                stream = await client.responses.create(
                    model="M", input=f"hi {number}", stream=True, extra_body=salted("text")
                )
                return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

            return await asyncio.gather(*(one(number) for number in range(16)))

    assert asyncio.run(run()) == ["It is fine."] * 16


def test_anthropic_s_collected_message(served: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "input_schema": {"type": "object"}}
    given: Any = {"model": "M", "messages": USER, "max_tokens": 300, "tools": [tool], "extra_body": salted("call")}
    with client.messages.stream(**given) as stream:
        message = stream.get_final_message()
    assert [(block.type, block.input) for block in message.content] == [("tool_use", {"city": "Köln", "days": 2})]
