from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import EventStreamError
from typer.testing import CliRunner

from deploy.local_endpoint.event_stream import payload_part
from deploy.sagemaker import endpoint
from deploy.sagemaker.aws import Aws
from slipway.cli import app
from tests.unit.deploy.sagemaker.fake_cloudformation import SESSION


class Stream:
    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield {"PayloadPart": {"Bytes": event}}

    def close(self) -> None:
        self.closed = True


class Runtime:
    def __init__(self, body: Any) -> None:
        self.body = body
        self.calls: list[dict[str, Any]] = []

    def invoke_endpoint(self, **parameters: Any) -> dict[str, Any]:
        self.calls.append(parameters)
        return {"Body": self.body, "OutputLocation": "s3://answers/1"}

    invoke_endpoint_with_response_stream = invoke_endpoint_async = invoke_endpoint


def test_an_answer_is_given_as_it_came() -> None:
    runtime = Runtime(io.BytesIO(b'{"generated_text": "x"}'))
    request = endpoint.body("Hi", max_new_tokens=3, chat=False, stream=False)
    assert endpoint.invoke(runtime, "e", request, "c") == b'{"generated_text": "x"}'
    assert runtime.calls[0] == {
        "EndpointName": "e",
        "Body": b'{"inputs": "Hi", "parameters": {"max_new_tokens": 3}}',
        "ContentType": "application/json",
        "InferenceComponentName": "c",
    }


def test_a_route_is_sent_as_a_custom_attribute() -> None:
    runtime = Runtime(io.BytesIO(b"{}"))
    endpoint.invoke(runtime, "e", b"{}", route="/generate")
    list(endpoint.invoke_stream(Runtime(Stream([])), "e", b"{}", route="/generate"))
    endpoint.invoke_asynchronously(runtime, "e", location="s3://in/1.json", route="/generate")
    assert [call["CustomAttributes"] for call in runtime.calls] == ["route=/generate"] * 2


def test_a_chat_is_asked_in_a_chats_form() -> None:
    asked = json.loads(endpoint.body("Hi", max_new_tokens=3, chat=True, stream=True))
    assert asked == {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}


def test_a_stream_gives_its_pieces_and_is_closed() -> None:
    stream = Stream([b"a", b"b"])
    assert list(endpoint.invoke_stream(Runtime(stream), "e", b"{}")) == [b"a", b"b"]
    assert stream.closed


def test_a_stream_that_breaks_says_so_after_what_came() -> None:
    broken = EventStreamError({"Error": {"Code": "ModelStreamError", "Message": "out of time"}}, "Invoke")
    pieces = endpoint.invoke_stream(Runtime(Stream([b"a", broken])), "e", b"{}")
    assert next(pieces) == b"a"
    with pytest.raises(EventStreamError, match="out of time"):
        next(pieces)


def test_a_connection_that_breaks_within_a_stream_breaks_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    part = payload_part(b"a")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.amazon.eventstream\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(part), part))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name, value in (
            ("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", f"http://127.0.0.1:{listener.getsockname()[1]}"),
            ("AWS_ACCESS_KEY_ID", "local"),
            ("AWS_SECRET_ACCESS_KEY", "local"),
        ):
            monkeypatch.setenv(name, value)
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        pieces = endpoint.invoke_stream(Aws("eu-west-1").client("sagemaker-runtime"), "e", b"{}")
        assert next(pieces) == b"a"
        with pytest.raises(endpoint.StreamBroken):
            next(pieces)
        server.join(10)


def test_an_asynchronous_answer_is_where_sagemaker_says() -> None:
    runtime = Runtime(None)
    assert endpoint.invoke_asynchronously(runtime, "e", location="s3://in/1") == endpoint.Places("s3://answers/1", None)
    endpoint.invoke_asynchronously(runtime, "e", request=b"{}")
    call = {"EndpointName": "e", "ContentType": "application/json"}
    assert runtime.calls == [call | {"InputLocation": "s3://in/1"}, call | {"Body": b"{}"}]


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        status, media_type, body = 200, "application/json", b'{"echo": ' + asked + b"}"
        if self.path == "/endpoints/refused/invocations":
            status, body = 424, b'{"Message": "no", "OriginalStatusCode": 424, "OriginalMessage": "wrong"}'
        if self.path == "/endpoints/my-llm/invocations-response-stream":
            media_type = "application/vnd.amazon.eventstream"
            body = payload_part(b'{"token": {"text": " Pa') + payload_part(b'ris"}}\n')
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        if status != 200:
            self.send_header("x-amzn-ErrorType", "ModelError")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is its own."""


@pytest.fixture
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("_runtime")
def test_a_local_endpoint_is_asked_as_sagemakers() -> None:
    plain = CliRunner().invoke(app, ["invoke", "my-llm", "--prompt", "Hi", "--max-new-tokens", "3"])
    assert plain.stdout == '{"echo": {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}}\n'
    streamed = CliRunner().invoke(app, ["invoke", "my-llm", "--prompt", "Hi", "--stream"])
    assert streamed.stdout == '{"token": {"text": " Paris"}}\n\n'
    refused = CliRunner().invoke(app, ["invoke", "refused", "--body", "{}"])
    assert refused.exit_code == 1
    assert "ModelError" in refused.stderr


class Group:
    """A log group. Each look at it gives the next of `looks`; None, and any further look, finds no group."""

    def __init__(self, *looks: list[tuple[str, int]] | None) -> None:
        self.looks = list(looks)
        self.client: Any = SESSION.client("logs")
        self.client.meta.events.register("before-call.cloudwatch-logs", self._answer)

    def _answer(self, params: dict[str, Any], **more: Any) -> tuple[Any, dict[str, Any]]:
        events = self.looks.pop(0) if self.looks else None
        if events is None:
            return SimpleNamespace(status_code=400), {"Error": {"Code": "ResourceNotFoundException", "Message": "no"}}
        lines = [{"eventId": id, "timestamp": when, "message": f"line {id}\n"} for id, when in events]
        next_page = {"nextToken": "more"} if self.looks and self.looks[0] and self.looks[0][0][0] == "page" else {}
        return SimpleNamespace(status_code=200), {"events": lines, **next_page}


def test_a_log_is_read_page_after_page() -> None:
    group = Group([("1", 1000)], [("page", 2000)])
    assert [line for _, line in endpoint.log_lines(group.client, "g", 0)] == [
        "1970-01-01 00:00:01 line 1",
        "1970-01-01 00:00:02 line page",
    ]


def test_of_a_group_that_is_not_there_it_is_said() -> None:
    with pytest.raises(endpoint.NoLog, match=" g "):
        list(endpoint.log_lines(Group().client, "g", 0))
