"""Spans: their names and numbers with the in-memory exporter, and a whole server that sends them to a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from qiao import ParameterError
from qiao.observability import tracing
from qiao.observability.metrics import FinishedRequest
from qiao.observability.tracing import PROTOCOL, TracedRequest, Tracing
from qiao.server.args import ServerArgs

from tests.support.server import RunningServer, chain, scripted

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def ended(parent: dict[str, str], **record: Any) -> TracedRequest:
    values: dict[str, Any] = {"prompt_tokens": 3, "generation_tokens": 5, "n": 2, "max_tokens": 8, "e2e": 1.5}
    made = FinishedRequest(finish_reasons=["stop", "length"], **{**values, **record})
    common: dict[str, Any] = {"request_id": "r", "model": "m", "temperature": 0.5, "top_p": 0.9, "first_token": 0.25}
    return TracedRequest(parent=parent, arrival=1000.0, record=made, **common)


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(memory: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return Tracing(provider)


def test_attributes_and_parent(traced: Tracing, memory: InMemorySpanExporter) -> None:
    traced.request(ended({"traceparent": TRACEPARENT}, queue=0.125, prefill=0.125, decode=1.25))
    (span,) = memory.get_finished_spans()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert (span.name, span.kind.name, span.start_time, span.end_time) == (
        "llm_request",
        "SERVER",
        10**12,
        1001500000000,
    )
    assert dict(span.attributes) == {
        "gen_ai.request.id": "r",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.latency.e2e": 1.5,
        "gen_ai.latency.time_in_queue": 0.125,
        "gen_ai.latency.time_to_first_token": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.125,
        "gen_ai.latency.time_in_model_decode": 1.25,
        "gen_ai.latency.time_in_model_inference": 1.375,
    }


@pytest.mark.parametrize("parent", [{}, {"traceparent": "nonsense"}, {"traceparent": "00-0-0-00", "tracestate": "a=b"}])
def test_no_parent_a_trace_of_its_own(parent: dict[str, str], traced: Tracing, memory: InMemorySpanExporter) -> None:
    traced.request(ended(parent))
    (span,) = memory.get_finished_spans()
    assert span.parent is None
    assert span.context.trace_id
    assert "gen_ai.latency.time_in_queue" not in span.attributes


def test_a_parent_that_is_not_sampled_has_no_spans(traced: Tracing, memory: InMemorySpanExporter) -> None:
    traced.request(ended({"traceparent": TRACEPARENT[:-1] + "0"}))
    assert not memory.get_finished_spans()


def test_what_is_not_installed_is_told_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r"otlp_traces_endpoint: needs pip install 'qiao\[otel\]'"):
        ServerArgs(otlp_traces_endpoint="http://localhost:4317")
    monkeypatch.setenv(PROTOCOL, "carrier pigeon")
    with pytest.raises(ParameterError, match=f"{PROTOCOL}: must be grpc or http/protobuf"):
        ServerArgs(otlp_traces_endpoint="http://localhost:4317")
    with pytest.raises(ParameterError, match="otlp_traces_endpoint: must begin with http"):
        ServerArgs(otlp_traces_endpoint="localhost:4317")


class Collector:
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        spans: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = ExportTraceServiceRequest.FromString(body)
                spans.extend(s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.spans = spans
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def running(collector: Collector, rand_folder: Path) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        flags = ("--otlp-traces-endpoint", collector.url)
        with scripted(*flags, model=rand_folder, tables={"": chain("x>abc")}) as one:
            yield one


def test_a_server_sends_a_span_for_each_request(running: RunningServer, collector: Collector) -> None:
    client = running.openai(default_headers={"traceparent": TRACEPARENT, "x-request-id": "mine"})
    client.completions.create(model="M", prompt="secret x", max_tokens=20)
    list(client.completions.create(model="org/M", prompt=["x", "x"], max_tokens=2, stream=True))
    running.wait_for(lambda: len(collector.spans) == 3)
    assert {(s.trace_id.hex(), s.parent_span_id.hex()) for s in collector.spans} == {(TRACE, PARENT)}
    first = {a.key: a.value for a in collector.spans[0].attributes}
    assert first["gen_ai.usage.prompt_tokens"].int_value == 8
    assert first["gen_ai.usage.completion_tokens"].int_value == 4
    assert first["gen_ai.response.model"].string_value == "M"
    assert first["gen_ai.request.id"].string_value == "cmpl-mine"
    assert 0.0 < first["gen_ai.latency.time_to_first_token"].double_value <= first["gen_ai.latency.e2e"].double_value
    assert {a.value.string_value for s in collector.spans[1:] for a in s.attributes if a.key.endswith("model")} == {
        "org/M"
    }
    assert "secret" not in str(collector.spans)
