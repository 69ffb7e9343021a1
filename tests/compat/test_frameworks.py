"""langchain-openai and litellm, as applications use them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.compat.conftest import salted
from tests.support.server import RunningServer

pytestmark = pytest.mark.compat


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int = 1


TOOL = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}


class TestLangChain:
    @pytest.fixture
    def make(self, served: RunningServer) -> Any:
        chat = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (make compat)")

        def chat_model(name: str, **more: Any) -> Any:
            return chat.ChatOpenAI(
                base_url=served.url + "/v1", api_key="none", model="M", extra_body=salted(name), max_retries=0, **more
            )

        return chat_model

    def test_invoke_and_batch(self, make: Any) -> None:
        answer = make("text").invoke([("system", "Be brief."), ("user", "hi")])
        assert answer.content == "It is fine."
        assert answer.usage_metadata["output_tokens"] == len("It is fine.") + 1
        assert [one.content for one in make("text").batch(["a", "b", "c"])] == ["It is fine."] * 3

    def test_stream(self, make: Any) -> None:
        chunks = list(make("text", stream_usage=True).stream("hi"))
        assert "".join(chunk.content for chunk in chunks) == "It is fine."
        assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == len("It is fine.") + 1

    def test_tools_and_their_answers(self, make: Any) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = make("call").bind_tools([TOOL])
        call = bound.invoke("hi")
        assert [(one["name"], one["args"]) for one in call.tool_calls] == [("weather", {"city": "Köln", "days": 2})]
        streamed = None
        for chunk in bound.stream("hi"):
            streamed = chunk if streamed is None else streamed + chunk
        assert [one["args"] for one in streamed.tool_calls] == [{"city": "Köln", "days": 2}]
        answer = ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])
        assert make("text").bind_tools([TOOL]).invoke([HumanMessage("hi"), call, answer]).content == "It is fine."

    @pytest.mark.parametrize("method", ["json_schema", "json_mode"])
    def test_structured_output(self, make: Any, method: str) -> None:
        assert make("json").with_structured_output(Weather, method=method).invoke("hi") == Weather(city="Köln", days=2)

    def test_the_responses_api(self, make: Any) -> None:
        model = make("text", use_responses_api=True)
        first = model.invoke("hi")
        assert first.text == "It is fine."
        second = model.invoke("and?", previous_response_id=first.response_metadata["id"])
        assert second.text == "It is fine."
        assert "".join(chunk.text for chunk in model.stream("hi")) == "It is fine."
        called = make("call", use_responses_api=True).bind_tools([TOOL]).invoke("hi")
        assert [one["args"] for one in called.tool_calls] == [{"city": "Köln", "days": 2}]

    def test_embeddings(self, real: RunningServer) -> None:
        openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (make compat)")
        vectors = openai.OpenAIEmbeddings(
            base_url=real.url + "/v1", api_key="none", model="M", check_embedding_ctx_length=False
        )
        found = vectors.embed_documents(["a bridge", "a river"])
        assert [len(one) for one in found] == [64, 64]
        assert vectors.embed_query("a bridge") == pytest.approx(found[0], abs=1e-5)


class TestLiteLlm:
    @pytest.fixture
    def litellm(self) -> Any:
        module = pytest.importorskip("litellm", reason="litellm is not installed (make compat)")
        module.telemetry = False
        return module

    @pytest.fixture
    def given(self, served: RunningServer) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        return {"api_base": served.url + "/v1", "api_key": "none", "messages": messages, "num_retries": 0}

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_whole_streamed_and_reasoned(self, litellm: Any, given: dict[str, Any], provider: str) -> None:
        model = f"{provider}/M"
        whole = litellm.completion(model=model, **given, extra_body=salted("text"))
        assert whole.choices[0].message.content == "It is fine."
        chunks = list(litellm.completion(model=model, stream=True, **given, extra_body=salted("text")))
        rebuilt = litellm.stream_chunk_builder(chunks)
        assert rebuilt.choices[0].message.content == "It is fine."
        thought = litellm.completion(model=model, **given, extra_body=salted("thought")).choices[0].message
        assert (thought.reasoning_content.strip(), thought.content.strip()) == ("hm", "Yes.")

    @pytest.mark.parametrize("stream", [False, True])
    def test_calls(self, litellm: Any, given: dict[str, Any], stream: bool) -> None:
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
        made = litellm.completion(model="hosted_vllm/M", tools=[tool], stream=stream, **given, extra_body=salted("two"))
        if stream:
            made = litellm.stream_chunk_builder(list(made))
        calls = made.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln", "days": 2}] * 2

    def test_other_routes(self, litellm: Any, real: RunningServer, given: dict[str, Any]) -> None:
        there = {"api_base": real.url + "/v1", "api_key": "none"}
        vectors = litellm.embedding(model="openai/M", input=["a", "b"], **there)
        assert len(vectors.data) == 2
        text = litellm.text_completion(model="text-completion-openai/M", prompt="x", max_tokens=3, **there)
        assert text.usage.completion_tokens <= 3
        response = litellm.responses(
            model="openai/M", input="hi", api_base=given["api_base"], api_key="none", extra_body=salted("text")
        )
        assert response.output[0].content[0].text == "It is fine."

    def test_errors_keep_their_kind(self, litellm: Any, given: dict[str, Any]) -> None:
        with pytest.raises(litellm.exceptions.NotFoundError):
            litellm.completion(model="openai/other", **given)
        with pytest.raises(litellm.exceptions.BadRequestError):
            litellm.completion(model="openai/M", temperature=9.0, **given)
