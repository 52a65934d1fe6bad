from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import EventStreamError
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.local.invocation import payload_part
from deploy.sagemaker import invoke, logs
from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.aws import AwsCloud
from tests.unit.deploy.cloud import TurnedClock, error


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
        self.calls: list[ApiCall] = []

    def call(self, call: ApiCall) -> dict[str, Any]:
        self.calls.append(call)
        return {"Body": self.body, "OutputLocation": "s3://answers/1"}


def test_an_answer_is_given_as_it_came() -> None:
    runtime = Runtime(io.BytesIO(b'{"generated_text": "x"}'))
    request = invoke.body("Hi", max_new_tokens=3, chat=False, stream=False)
    assert invoke.invoke(runtime, "e", request, "c") == b'{"generated_text": "x"}'
    assert runtime.calls[0].parameters == {
        "EndpointName": "e",
        "Body": b'{"inputs": "Hi", "parameters": {"max_new_tokens": 3}}',
        "ContentType": "application/json",
        "InferenceComponentName": "c",
    }


def test_a_chat_is_asked_in_a_chats_form() -> None:
    asked = json.loads(invoke.body("Hi", max_new_tokens=3, chat=True, stream=True))
    assert asked == {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}


def test_a_stream_gives_its_pieces_and_is_closed() -> None:
    stream = Stream([b"a", b"b"])
    assert list(invoke.invoke_stream(Runtime(stream), "e", b"{}")) == [b"a", b"b"]
    assert stream.closed


def test_a_stream_that_breaks_says_so_after_what_came() -> None:
    broken = EventStreamError({"Error": {"Code": "ModelStreamError", "Message": "out of time"}}, "Invoke")
    pieces = invoke.invoke_stream(Runtime(Stream([b"a", broken])), "e", b"{}")
    assert next(pieces) == b"a"
    with pytest.raises(invoke.StreamBroken, match="out of time"):
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
        pieces = invoke.invoke_stream(AwsCloud("eu-west-1"), "e", b"{}")
        assert next(pieces) == b"a"
        with pytest.raises(invoke.StreamBroken, match="the connection broke"):
            next(pieces)
        server.join(10)


def test_an_asynchronous_answer_is_where_sagemaker_says() -> None:
    assert invoke.invoke_asynchronously(Runtime(None), "e", "s3://in/1.json") == "s3://answers/1"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (b'{"token": {"id": 1, "text": " Paris"}}\n{"token": {"text": "."}, "generated_text": " Paris."}\n', " Paris."),
        (b'data: {"token": {"text": "a"}}\n\ndata: {"token": {"text": "b"}}\n\n', "ab"),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n', "a"),
        (b'{"choices": [{"text": "a"}]}\n', "a"),
        (b"not json", "not json\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_texts_come_out_of_every_format_however_it_is_cut(lines: bytes, text: str, size: int) -> None:
    pieces = (lines[start : start + size] for start in range(0, len(lines), size))
    assert "".join(invoke.texts(pieces)) == text


@pytest.mark.parametrize(
    "record",
    [
        b'{"error": "no", "code": 424}',
        b'{"token": {"id": -1, "text": ""}, "details": {"finish_reason": "error"}, "error": "no", "code": 424}',
        b'data: {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}], "error": "no"}',
        b'data: {"error": {"message": "no", "code": 500}}',
    ],
)
def test_an_error_of_the_models_within_a_stream_breaks_it_after_what_came(record: bytes) -> None:
    texts = invoke.texts(iter([b'{"token": {"text": "a"}}\n', record]))
    assert next(texts) == "a"
    with pytest.raises(invoke.StreamBroken, match=r'the model failed: .*"no"'):
        next(texts)


@settings(deadline=None)
@given(st.lists(st.binary()))
def test_texts_of_anything_are_texts(pieces: list[bytes]) -> None:
    assert "".join(invoke.texts(iter(pieces))).encode("utf-8", "surrogatepass") is not None


class Group:
    """A log group that grows with each look."""

    def __init__(self, *looks: list[tuple[str, int]]) -> None:
        self.looks = list(looks)
        self.starts: list[int] = []

    def call(self, call: ApiCall) -> dict[str, Any]:
        self.starts.append(call.parameters["startTime"])
        if not self.looks:
            raise error("filter_log_events", "The specified log group does not exist.", "ResourceNotFoundException")
        events = self.looks.pop(0)
        return {
            "events": [
                {"eventId": id, "timestamp": when, "logStreamName": "s", "message": f"line {id}\n"}
                for id, when in events
            ],
            **({"nextToken": "more"} if self.looks and self.looks[0] and self.looks[0][0][0] == "page" else {}),
        }


def test_a_log_is_read_page_after_page() -> None:
    group = Group([("1", 1000)], [("page", 2000)])
    assert [str(line) for line in logs.read(group, "g", 0)] == [
        "1970-01-01 00:00:01 line 1",
        "1970-01-01 00:00:02 line page",
    ]


def test_of_a_group_that_is_not_there_it_is_said() -> None:
    with pytest.raises(logs.NoLog, match="there is no log group g: nothing has logged there yet"):
        list(logs.read(Group(), "g", 0))
    assert logs.last_lines(Group(), "g", 5, 0.0) == ["(there is no log group g: nothing has logged there yet)"]


def test_following_waits_for_a_group_that_is_not_there_yet() -> None:
    class Late(Group):
        def call(self, call: ApiCall) -> dict[str, Any]:
            if len(self.starts) < 2:
                self.starts.append(0)
                raise error("filter_log_events", "does not exist", "ResourceNotFoundException")
            return super().call(call)

    assert next(logs.follow(Late([("1", 1000)]), "g", 0, TurnedClock())).id == "1"


def test_following_gives_each_line_once_and_late_ones_too() -> None:
    group = Group([("1", 100_000)], [("1", 100_000), ("2", 90_000)], [("3", 101_000)])
    clock = TurnedClock()
    lines = logs.follow(group, "g", 50_000, clock)
    assert [next(lines).id for _ in range(3)] == ["1", "2", "3"]
    assert group.starts == [50_000, 40_000, 40_000]
    assert clock.now() == 2 * logs.FOLLOW_INTERVAL


def test_a_log_that_cannot_be_read_says_why() -> None:
    class Denied:
        def call(self, call: ApiCall) -> dict[str, Any]:
            raise error(call.operation, "no", "AccessDeniedException")

    assert logs.last_lines(Denied(), "g", 5, 0.0) == [
        "(the log cannot be read: filter_log_events: AccessDeniedException: no)"
    ]
