"""Spans over gRPC, which is what an endpoint without a path means, to a collector made of gRPC's own server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import chain, scripted

grpc = pytest.importorskip("grpc", reason="run make compat")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="run make compat")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_spans_arrive_over_grpc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    got: list[Any] = []

    class Collector(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            got.append(request)
            return messages.ExportTraceServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")
    try:
        flags = ("--otlp-traces-endpoint", f"http://127.0.0.1:{port}")
        with scripted(*flags, model=folder, tables={"": chain("x>abc")}) as running:
            client = running.openai(default_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
            client.completions.create(model="M", prompt="secret x", max_tokens=20)
            running.wait_for(lambda: bool(got))
    finally:
        collector.stop(None).wait()
    (resource,) = got[0].resource_spans
    (span,) = resource.scope_spans[0].spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "qiao"
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert {a.key: a.value.int_value for a in span.attributes}["gen_ai.usage.prompt_tokens"] == 8
    assert "secret" not in str(got)
