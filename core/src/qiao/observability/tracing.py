"""OpenTelemetry spans of requests, with vLLM's attribute names and the caller's span as parent (W3C trace context).

The libraries are those of the extra ``qiao[otel]``, and are imported only where traces are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qiao.errors import ParameterError

if TYPE_CHECKING:
    from qiao.observability.metrics import FinishedRequest

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of the W3C trace context."""

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""OpenTelemetry's variable: ``grpc``, as in vLLM the default, or ``http/protobuf``, the default for an endpoint that
ends in ``HTTP_PATH``.
"""

HTTP_PATH = "/v1/traces"

_EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}
"""Protocol to the exporter's package."""

_NANO = 1e9


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """One ended request: what ``record`` does not say. ``arrival`` is ``time.time()``, ``first_token`` is in seconds
    after it.

    ``parent`` holds the trace headers that came with it. Nothing of the content is in a span.
    """

    request_id: str
    model: str
    parent: Mapping[str, str]
    arrival: float
    temperature: float
    top_p: float
    first_token: float | None
    record: FinishedRequest


def check_installed(endpoint: str) -> None:
    """Raises ``ParameterError`` where the libraries for ``endpoint`` are not there, before a model is loaded for
    nothing, and where it is no address.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ParameterError("otlp_traces_endpoint", f"must begin with http:// or https://, got {endpoint!r:.200}")
    for module in ("opentelemetry.sdk.trace", f"opentelemetry.exporter.otlp.proto.{_EXPORTERS[_protocol(endpoint)]}"):
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ParameterError("otlp_traces_endpoint", f"needs pip install 'qiao[otel]' (there is no {module})")


class Tracing:
    """Makes a span of each ended request. ``provider`` is OpenTelemetry's, and ``close`` ends it."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("qiao")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def open(cls, endpoint: str) -> Tracing:
        """Spans go in batches, from a thread, to the collector at ``endpoint``. Raises as ``check_installed``."""
        check_installed(endpoint)
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource.create({} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "qiao"})
        provider = TracerProvider(resource=named)
        provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        return cls(provider)

    def request(self, ended: TracedRequest) -> None:
        """Export one span."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(ended.parent)),
            kind=SpanKind.SERVER,
            start_time=int(ended.arrival * _NANO),
            attributes=_attributes(ended),
        )
        if "error" in ended.record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(int((ended.arrival + ended.record.e2e) * _NANO))

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""
        self._provider.shutdown()


def _protocol(endpoint: str) -> str:
    given = os.environ.get(PROTOCOL) or ("http/protobuf" if endpoint.endswith(HTTP_PATH) else "grpc")
    if given not in _EXPORTERS:
        raise ParameterError(PROTOCOL, f"must be {' or '.join(_EXPORTERS)}, got {given!r}")
    return given


def _exporter(endpoint: str) -> Any:
    if _protocol(endpoint) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)


def _attributes(ended: TracedRequest) -> dict[str, Any]:
    record = ended.record
    inference = None if record.prefill is None or record.decode is None else record.prefill + record.decode
    found = {
        "gen_ai.request.id": ended.request_id,
        "gen_ai.request.n": record.n,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": ended.temperature,
        "gen_ai.request.top_p": ended.top_p,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.generation_tokens,
        "gen_ai.usage.num_sequences": record.n,
        "gen_ai.latency.e2e": record.e2e,
        "gen_ai.latency.time_in_queue": record.queue,
        "gen_ai.latency.time_to_first_token": ended.first_token,
        "gen_ai.latency.time_in_model_prefill": record.prefill,
        "gen_ai.latency.time_in_model_decode": record.decode,
        "gen_ai.latency.time_in_model_inference": inference,
    }
    return {name: value for name, value in found.items() if value is not None}
