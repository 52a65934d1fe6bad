"""`option.otlp_traces_endpoint`: a span of each sequence reaches a collector, as part of the client's trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.live.server import Server, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"
TOKENS = 5
BEAMS = 2
PARENT, STATE = "00f067aa0ba902b7", "vendor=opaque"
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Asked:
    """A request, and the expected contents of its spans."""

    path: str
    body: dict[str, Any]
    spans: int = 1
    tokens: int = TOKENS
    """Tokens of each span."""


def _lmi(inputs: object = PROMPT, stream: bool = False, **parameters: object) -> dict[str, Any]:
    streamed = {"stream": True} if stream else {}
    return {"inputs": inputs, "parameters": {"max_new_tokens": TOKENS, **parameters}, **streamed}


def _openai(**fields: object) -> dict[str, Any]:
    return {"model": "model", "max_tokens": TOKENS, **fields}


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
STEPS = 1 + BEAMS * (TOKENS - 1)
"""The number of requests that Slipway's beam search makes. Each request is for one token."""
# Requests that reach the engine in different ways. vLLM's front end answers all OpenAI requests to a traced model.
REQUESTS = {
    "LMI, streamed": Asked("/invocations", _lmi(stream=True)),
    "LMI, several prompts": Asked("/invocations", _lmi([PROMPT, "The sea is"]), spans=2),
    "LMI, beams": Asked("/invocations", _lmi(num_beams=BEAMS), spans=STEPS, tokens=1),
    "LMI, chat": Asked("/invocations", {"messages": MESSAGES, "max_tokens": TOKENS}),
    "completions, several prompts": Asked(COMPLETIONS, _openai(prompt=[PROMPT, "The sea is"]), spans=2),
    "chat, several sequences": Asked(CHAT, _openai(messages=MESSAGES, n=2), spans=2),
    "chat, a field of vLLM's": Asked(CHAT, _openai(messages=MESSAGES, echo=True)),
    "responses": Asked(RESPONSES, {"model": "model", "input": PROMPT, "max_output_tokens": TOKENS}),
    "messages, streamed": Asked("/v1/messages", _openai(messages=MESSAGES, stream=True)),
    "TGI, several sequences": Asked("/generate", _lmi(best_of=2, do_sample=True), spans=2),
    "Triton": Asked("/v2/models/model/generate", {"text_input": PROMPT, "max_tokens": TOKENS}),
    "happy_vllm": Asked("/v1/generate", {"prompt": PROMPT, "max_tokens": TOKENS}),
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
    """Start a server that sends its spans to the collector as soon as they end."""
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "300",
    }
    address = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with serving(
        tmp_path_factory.mktemp("traced"), environment, otlp_traces_endpoint=address, **small_options
    ) as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_each_sequence_of_a_request_has_a_span_in_its_clients_trace(
    traced: Server, collector: Collector, name: str
) -> None:
    asked = REQUESTS[name]
    trace = f"{list(REQUESTS).index(name) + 1:032x}"

    def spans() -> list[Any]:
        return [span for span in collector.spans.get(trace, ()) if span.name == "llm_request"]

    headers = {"traceparent": f"00-{trace}-{PARENT}-01", "tracestate": STATE}
    answer = traced.client.post(asked.path, json=asked.body, headers=headers)
    assert answer.status_code == 200, answer.text
    wait_until(lambda: len(spans()) >= asked.spans, about=lambda: f"{len(spans())} spans of {asked.spans}")
    assert len(spans()) == asked.spans
    for span in spans():
        assert (span.parent_span_id.hex(), span.trace_state) == (PARENT, STATE)
        values = {value.key: value.value.int_value for value in span.attributes}
        assert values["gen_ai.usage.completion_tokens"] == asked.tokens
        assert values["gen_ai.usage.prompt_tokens"] > 0


def test_no_span_is_outside_the_traces_of_the_clients(traced: Server, collector: Collector) -> None:
    """A last request has no trace. Its span begins a new trace, and is the only span outside the clients' traces."""
    given = {f"{place + 1:032x}" for place in range(len(REQUESTS))}
    assert traced.invoke(PROMPT, max_new_tokens=1).status_code == 200
    wait_until(lambda: collector.spans.keys() - given)
    others = [span for trace in collector.spans.keys() - given for span in collector.spans[trace]]
    assert [span.name for span in others if span.name == "llm_request"] == ["llm_request"]
