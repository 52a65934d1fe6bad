"""`option.otlp_traces_endpoint`: a span of each request reaches a collector, in the trace of its client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.live.server import Server, serving
from tests.waiting import wait_until

PROMPT = "Once upon a time"
TOKENS = 5
MESSAGES = [{"role": "user", "content": PROMPT}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "LMI": ("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}}),
    "LMI, streamed": ("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}, "stream": True}),
    "LMI, one token": ("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}),
    "LMI, a chat": ("/invocations", {"messages": MESSAGES, "max_tokens": TOKENS}),
    "completions": ("/v1/completions", {"model": "model", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}),
    "chat": ("/v1/chat/completions", {"model": "model", "messages": MESSAGES, "max_tokens": TOKENS}),
    # These fields send it to vLLM's own front end.
    "vLLM's chat": (
        "/v1/chat/completions",
        {"model": "model", "messages": MESSAGES, "max_tokens": TOKENS, "echo": True},
    ),
    "TGI": ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}}),
    "Triton": ("/v2/models/model/generate", {"text_input": PROMPT, "max_tokens": TOKENS}),
    "happy_vllm": ("/v1/generate", {"prompt": PROMPT, "max_tokens": TOKENS}),
}


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector that keeps the spans it gets, by trace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Export)
        self.spans: dict[str, list[Any]] = {}


class _Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.server.spans.setdefault(span.trace_id.hex(), []).append(span)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def traced(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector, small_options: dict[str, object]
) -> Iterator[Server]:
    """A server that sends its spans to the collector as soon as they end."""
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    address = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with serving(
        tmp_path_factory.mktemp("traced"), environment, otlp_traces_endpoint=address, **small_options
    ) as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_a_requests_span_is_in_its_clients_trace(traced: Server, collector: Collector, name: str) -> None:
    path, body = REQUESTS[name]
    trace = f"{list(REQUESTS).index(name) + 1:032x}"
    answer = traced.client.post(path, json=body, headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    assert answer.status_code == 200, answer.text
    wait_until(lambda: any(span.name == "llm_request" for span in collector.spans.get(trace, ())))
    span = next(span for span in collector.spans[trace] if span.name == "llm_request")
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"
    values = {value.key: value.value.int_value for value in span.attributes}
    assert values["gen_ai.usage.completion_tokens"] == (1 if name == "LMI, one token" else TOKENS)
    assert values["gen_ai.usage.prompt_tokens"] > 0


def test_the_engine_and_its_metrics_live_on(traced: Server) -> None:
    assert traced.ping() == 200
    assert traced.metric("slipway_generated_tokens_total") >= TOKENS
