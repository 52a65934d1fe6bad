"""Calls of an ASGI application in this process, without vLLM: replies, streams, faults and disconnects."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engines.errors import DeadlineExceeded, GenerationFailed, InvalidChat, InvalidRequest, Overloaded, UnknownAdapter
from engines.statistics import EngineStatistics
from handlers.contract import Call, Reply
from handlers.deadline import DeadlineConfig
from handlers.openai.constraints import RENDER
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.handler import OpenAIHandler
from handlers.openai.routes import error_reply
from handlers.openai.vllm_call import VllmApp
from handlers.queue import EngineQueue
from handlers.route_declarations import RenderedChat
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.request_headers import request_headers
from tests.waiting import until


class NoEngine:
    def __init__(self) -> None:
        self.statistics = EngineStatistics()
        self.max_model_len = 1000


def queue_of(limit: int = 4) -> EngineQueue:
    return EngineQueue(NoEngine(), limit)  # type: ignore[arg-type]


CALL = Call(
    body=b"{}",
    content_type="application/json",
    request_id="id-1",
    headers=request_headers(("Authorization", "Bearer x"), ("X-Request-Id", "theirs"), ("Content-Length", "99")),
    query=(("a", "b c"),),
    path="/openai/v1/x",
)


async def served(app: Any, call: Call = CALL, limit: int = 4) -> tuple[CollectedReply, EngineQueue]:
    writer, handler = CollectedReply(), queue_of(limit)
    running = await OpenAIHandler(VllmApp(app, None), handler).handle(call, writer)
    await until(lambda: writer.whole is not None or writer.ended)
    await asyncio.sleep(0)
    if running is not None:
        running.cancel()
    return writer, handler


def start(status: int = 200) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2"), (b"x-a", b"b")]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


EVENT_STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
Step = dict[str, Any] | Exception | Callable[[OpenAICall], None]


def sending(*steps: Step) -> Any:
    """Return an application. In each step, it sends a message, raises an exception, or does something with its call."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if callable(step):
                step(current_call.get())
            else:
                await send(step)

    return app


def engine_dies(call: OpenAICall) -> None:
    call.failed = "the engine has died"


begin = OpenAICall.begin
WHOLE = sending(start(), part(b"{}"))


async def test_the_application_sees_the_call_with_our_request_id() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope, message=await receive(), any_model=current_call.get().any_model)
        await send(start(201))
        await send(part(b"{}"))

    writer, _ = await served(app)
    assert (seen["path"], seen["query_string"], seen["method"]) == ("/v1/x", b"a=b+c", "POST")
    assert sorted(seen["headers"]) == [
        (b"authorization", b"Bearer x"),
        (b"content-length", b"2"),
        (b"content-type", b"application/json"),
        (b"x-request-id", b"id-1"),
    ]
    assert seen["message"] == {"type": "http.request", "body": b"{}", "more_body": False}
    assert seen["any_model"] is True
    assert writer.whole is not None
    assert (writer.whole.status, writer.whole.content_type, writer.whole.body) == (201, "application/json", b"{}")
    assert writer.whole.headers == (("x-a", "b"),)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b'{"token_ids":[1,2],"text":"ab"}', RenderedChat([1, 2], "ab")),
        (400, b'{"error":{"message":"no message"}}', InvalidChat),
        (500, b'{"error":{"message":"a fault"}}', GenerationFailed),
    ],
)
async def test_a_chat_is_rendered_for_other_contracts(status: int, body: bytes, expected: Any) -> None:
    paths: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await send(start(status))
        await send(part(body))

    rendering = OpenAIHandler(VllmApp(app, None), queue_of()).render(CALL)
    if isinstance(expected, RenderedChat):
        assert await rendering == expected
    else:
        with pytest.raises(expected):
            await rendering
    assert paths == [RENDER]


async def test_a_chat_whose_client_leaves_is_not_rendered_further() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive(), await receive()])

    rendering = asyncio.create_task(OpenAIHandler(VllmApp(app, None), queue_of()).render(CALL))
    await asyncio.sleep(0)
    rendering.cancel()
    await until(lambda: len(seen) == 2)
    assert seen[1] == {"type": "http.disconnect"}


async def test_a_stream_is_passed_on_part_by_part_at_the_clients_pace() -> None:
    writer, _ = await served(sending(start(), part(b"a", more=True), part(b"b", more=True), part(b"")))
    assert (writer.status, writer.parts, writer.ended) == (200, [b"a", b"b", b""], True)
    assert writer.drained == 3


@pytest.mark.parametrize("app", [sending(RuntimeError("secret")), sending()])
async def test_a_fault_before_the_reply_is_an_error_object(app: Any) -> None:
    writer, _ = await served(app)
    assert writer.whole is not None
    assert writer.whole.status == 500
    assert writer.whole.body == (
        b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'
    )


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "BadRequestError"), ("/openai/v1/messages", "invalid_request_error")],
)
async def test_a_body_of_more_messages_than_are_read_at_once_is_refused_unread(path: str, kind: str) -> None:
    def body(messages: int, name: bytes = b"messages") -> bytes:
        return b'{"%b": [%b]}' % (name, b",".join([b'{"role": "user", "content": "x"}'] * messages))

    writer, _ = await served(WHOLE, replace(CALL, path=path, body=body(13_000)))
    assert writer.whole is not None
    assert writer.whole.status == 200
    writer, _ = await served(WHOLE, replace(CALL, path=path, body=body(14_000)))
    assert writer.whole is not None
    error = json.loads(writer.whole.body)["error"]
    assert (writer.whole.status, error["type"]) == (400, kind)
    writer, _ = await served(WHOLE, replace(CALL, path="/v1/completions", body=body(14_000, b"prompt")))
    assert writer.whole is not None
    assert writer.whole.status == 200


async def test_text_without_bytes_is_the_clients_fault() -> None:
    writer, _ = await served(sending(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "a surrogate")))
    assert writer.whole is not None
    assert writer.whole.status == 400


CREATED = b'event: response.created\ndata: {"response":{"id":"r"},"sequence_number":0}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"\\ndata: x","sequence_number":7}\n\n'
DATA = b"data: a\n\n"
OPENAIS_ERROR = (
    b'data: {"error":{"message":"%b","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
)
ANTHROPICS_ERROR = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"%b"}}\n\n'
FAULT, DEATH = b"Internal server error", b"the engine has died"


@pytest.mark.parametrize(
    ("path", "steps", "sent", "end", "logged"),
    [
        ("/v1/x", (start(), part(b"a", more=True), RuntimeError()), b"a", b"", True),
        (
            "/v1/chat/completions",
            (begin, EVENT_STREAM, part(DATA, more=True), RuntimeError()),
            DATA,
            OPENAIS_ERROR % FAULT,
            True,
        ),
        (
            "/openai/v1/messages",
            (begin, EVENT_STREAM, part(DATA, more=True), RuntimeError()),
            DATA,
            ANTHROPICS_ERROR % FAULT,
            True,
        ),
        ("/v1/x", (EVENT_STREAM, part(DATA, more=True), engine_dies, ValueError()), DATA, OPENAIS_ERROR % DEATH, False),
        (
            "/v1/messages",
            (EVENT_STREAM, begin, part(DATA, more=True), engine_dies, ValueError()),
            DATA,
            ANTHROPICS_ERROR % DEATH,
            False,
        ),
        (
            "/openai/v1/responses",
            (EVENT_STREAM, part(CREATED, more=True), begin, part(DELTA, more=True), KeyError()),
            CREATED + DELTA,
            b'event: error\ndata: {"type":"error","code":"server_error","message":"Internal server error","param":null,'
            b'"sequence_number":8}\n\n'
            b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"r","status":"failed","error":'
            b'{"code":"server_error","message":"Internal server error"}},"sequence_number":9}\n\n',
            True,
        ),
    ],
)
async def test_a_fault_in_a_stream_ends_it_in_the_form_of_the_route(
    caplog: pytest.LogCaptureFixture, path: str, steps: tuple[Step, ...], sent: bytes, end: bytes, logged: bool
) -> None:
    writer, _ = await served(sending(*steps), replace(CALL, path=path))
    assert (b"".join(writer.parts), writer.parts[-1], writer.ended) == (sent + end, end, True)
    assert bool(caplog.records) is logged


async def test_a_refusal_in_a_stream_of_events_is_an_event_and_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refusal(error: BaseException) -> Reply | None:
        return error_reply("cannot be followed", "BadRequestError", 400, error.args[0])

    app, writer = sending(EVENT_STREAM, part(CREATED, more=True), KeyError("text.format")), CollectedReply()
    running = await OpenAIHandler(VllmApp(app, None, refusal=refusal), queue_of()).handle(CALL, writer)
    await until(lambda: writer.ended)
    running.cancel()
    assert writer.parts[-1] == (
        b'data: {"error":{"message":"cannot be followed","type":"BadRequestError","param":"text.format","code":400}}'
        b"\n\ndata: [DONE]\n\n"
    )
    assert not caplog.records


async def test_a_client_that_goes_away_is_told_to_the_application_and_gets_nothing_more() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        current_call.get().take(2)
        assert (await receive())["type"] == "http.disconnect"
        with pytest.raises(asyncio.CancelledError):
            await send(start())
        ended.set()

    writer, handler = CollectedReply(), queue_of()
    running = await OpenAIHandler(VllmApp(app, None), handler).handle(CALL, writer)
    await until(lambda: handler.open_sequences == 2)
    running.cancel()
    await asyncio.wait_for(ended.wait(), 60)
    await asyncio.sleep(0)
    assert writer.whole is None
    assert handler.open_sequences == 0
    assert (handler.engine.statistics.calls.succeeded, handler.engine.statistics.calls.failed) == (0, 0)


async def test_a_stream_whose_client_goes_away_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        await send(part(b"a", more=True))
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    writer = CollectedReply()
    running = await OpenAIHandler(VllmApp(app, None), queue_of()).handle(CALL, writer)
    await until(lambda: writer.parts)
    running.cancel()
    await asyncio.wait_for(cancelled.wait(), 60)
    assert (writer.body, writer.ended) == (b"a", False)


@pytest.mark.parametrize("dies", [False, True])
async def test_calls_that_generate_are_counted_and_give_their_places_back(dies: bool) -> None:
    steps = (lambda call: call.take(3), *([engine_dies] if dies else []), start(), part(b"{}"))
    _, handler = await served(sending(*steps))
    calls = handler.engine.statistics.calls
    assert (handler.open_sequences, calls.succeeded, calls.failed) == (0, not dies, dies)


async def test_a_response_begins_when_the_engine_has_begun_it() -> None:
    accepts = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(EVENT_STREAM)
        await send(part(CREATED, more=True))
        await accepts.wait()
        current_call.get().begin()
        assert writer.parts == [CREATED]
        await send(part(DELTA, more=True))
        await send(part(b""))

    writer = CollectedReply()
    call = replace(CALL, path="/v1/responses")
    running = await OpenAIHandler(VllmApp(app, None), queue_of()).handle(call, writer)
    await asyncio.sleep(0)
    assert writer.parts == []
    accepts.set()
    await until(lambda: writer.ended)
    running.cancel()
    assert writer.parts == [CREATED, DELTA, b""]


async def test_a_response_that_the_engine_refuses_is_refused_with_its_status() -> None:
    app = sending(EVENT_STREAM, part(CREATED, more=True), KeyError())
    writer, _ = await served(app, replace(CALL, path="/v1/responses"))
    assert writer.whole is not None
    assert (writer.whole.status, json.loads(writer.whole.body)["error"]["code"]) == (500, 500)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_that_the_engine_refuses_is_refused_with_its_status(path: str) -> None:
    error = {"message": "no", "type": "BadRequestError", "param": "guided_regex", "code": 422}
    event = f"data: {json.dumps({'error': error})}\n\n".encode()
    app = sending(EVENT_STREAM, part(event, more=True), part(b"data: [DONE]\n\n", more=True), part(b""))
    writer, _ = await served(app, replace(CALL, path=path))
    assert writer.whole is not None
    assert (writer.whole.status, writer.whole.content_type) == (422, "application/json")
    assert json.loads(writer.whole.body) == {"error": error}


@pytest.mark.parametrize(
    ("first", "sent"),
    [
        (part(b": keep-alive\n\n", more=True), b": keep-alive\n\n"),  # The comment begins the stream.
        (begin, b""),
    ],
)
async def test_an_error_of_a_stream_that_has_begun_stays_in_it(first: Step, sent: bytes) -> None:
    error, done = b'data: {"error":{"code":400}}\n\n', b"data: [DONE]\n\n"
    app = sending(EVENT_STREAM, first, part(error, more=True), part(done))
    writer, _ = await served(app, replace(CALL, path="/v1/completions"))
    assert b"".join(writer.parts) == sent + error + done


@pytest.mark.parametrize(
    ("body", "headers", "seen"),
    [
        (b'{"request_id": "abc"}', (), b"abc"),
        (b'{"request_id": null}', (), b"id-1"),
        (b'{"request_id": "abc"}', (("X-Request-Id", "id-1"),), b"id-1"),
    ],
)
async def test_the_body_may_have_the_id_if_no_header_has_it(
    body: bytes, headers: tuple[tuple[str, str], ...], seen: bytes
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (b"x-request-id", seen) in scope["headers"]
        await send(start())
        await send(part(b"{}"))

    writer, _ = await served(app, replace(CALL, body=body, headers=request_headers(*headers)))
    assert writer.whole is not None
    assert (("x-request-id", "abc") in writer.whole.headers) == (seen == b"abc")


@pytest.mark.parametrize("given", ["x" * 129, "a b", "a\n", "é"])
async def test_an_id_that_is_not_safe_in_headers_is_refused(given: str) -> None:
    writer, _ = await served(None, replace(CALL, body=json.dumps({"request_id": given}).encode()))
    assert writer.whole is not None
    assert (writer.whole.status, json.loads(writer.whole.body)["error"]["param"]) == (400, "request_id")


def test_a_call_holds_places_until_it_ends() -> None:
    handler = queue_of(3)
    call = OpenAICall(handler)
    call.take(2)
    with pytest.raises(Overloaded):
        OpenAICall(handler).take(2)
    with pytest.raises(InvalidRequest):
        call.take(2)
    call.release(1)
    assert handler.open_sequences == 1
    call.close()
    call.release(1)
    call.close()
    assert handler.open_sequences == 0
    with pytest.raises(InvalidRequest):
        call.take(1)


async def test_what_goes_on_in_the_background_keeps_the_calls_places_until_it_ends() -> None:
    ends = asyncio.Event()

    async def background() -> None:
        current_call.get().take(2)
        await ends.wait()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.create_task(background())
        current_call.get().goes_on_in(task)
        await send(start())
        await send(part(b"{}"))

    _, handler = await served(app)
    await until(lambda: handler.open_sequences == 2)
    ends.set()
    await until(lambda: handler.open_sequences == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/completions"])
async def test_sagemakers_header_takes_the_place_of_the_bodys_model(path: str) -> None:
    bodies: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(json.loads((await receive())["body"]))
        await send(start())
        await send(part(b"{}"))

    async def asked(name: str, body: bytes = b'{"model": "x", "n": 1}') -> Any:
        writer = CollectedReply()
        headers = request_headers(("X-Amzn-SageMaker-Adapter-Identifier", name))
        call = replace(CALL, path=path, headers=headers, body=body)
        running = await OpenAIHandler(VllmApp(app, None), queue_of(), None, "base", {"mine"}).handle(call, writer)
        await until(lambda: writer.whole is not None)
        running.cancel()
        return bodies.pop()

    assert await asked("mine") == {"model": "mine", "n": 1}
    assert await asked("") == {"model": "base", "n": 1}
    assert await asked("mine", b"{}") == {"model": "mine"}
    assert await asked("mine", b"[1]") == [1]
    with pytest.raises(UnknownAdapter, match="other"):
        await asked("other")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_has_no_request_yet_ends_at_its_deadline(streams: bool) -> None:
    left: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if streams:
            await send(start() | {"headers": [(b"content-type", b"text/event-stream")]})
            await send(part(b"data: {}\n\n", more=True))
        try:
            assert (await receive())["type"] == "http.disconnect"
        finally:
            left.append("left")

    body = b'{"stream": true}' if streams else b"{}"
    writer, handler = await served(app, replace(CALL, path="/v1/chat/completions", body=body, time_limit=0.01))
    assert writer.whole is not None
    assert writer.whole.status == 504
    assert b"the call had no answer at its deadline" in writer.whole.body
    await until(lambda: bool(left))
    assert (handler.open_sequences, handler.engine.statistics.deadlines) == (0, {"partial": 0, "nothing": 1})


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/json"])
async def test_a_transcription_that_is_streamed_has_the_deadline_of_streams(kind: bytes) -> None:
    queue, writer = EngineQueue(NoEngine(), 4, deadlines=DeadlineConfig(answer=60.0, stream=450.0)), CollectedReply()  # type: ignore[arg-type]
    deadlines: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (start() | {"headers": [(b"content-type", kind)]}, part(b"data: {}\n\n")):
            deadline = current_call.get().deadline
            assert deadline is not None
            deadlines.append(deadline.seconds)
            await send(message)

    form = replace(CALL, path="/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x", body=b"")
    await OpenAIHandler(VllmApp(app, None), queue).handle(form, writer)
    await until(lambda: writer.whole is not None or writer.ended)
    assert deadlines == [60.0, 450.0 if b"event" in kind else 60.0]


@dataclass(eq=False)
class Open:
    """A request in the engine."""

    begun: bool
    ended: bool = False

    def end_at_deadline(self) -> None:
        self.ended = True


async def test_requests_without_a_token_end_with_those_that_have_one() -> None:
    missed: list[DeadlineExceeded] = []
    call = OpenAICall(queue_of(), call=replace(CALL, time_limit=0.01))
    first, waiting, late = Open(True), Open(False), Open(False)
    call.start_deadline(missed.append)
    call.add(first)
    call.add(waiting)
    await until(lambda: first.ended)
    assert waiting.ended
    call.add(late)
    assert late.ended
    assert (missed, call.failed) == ([], "")


async def test_a_call_without_a_token_gets_one_error_and_its_requests_are_not_ended_one_by_one() -> None:
    missed: list[DeadlineExceeded] = []
    call = OpenAICall(queue_of(), call=replace(CALL, time_limit=0.01))
    waiting = Open(False)
    call.start_deadline(missed.append)
    call.add(waiting)
    await until(lambda: bool(missed))
    call.end_at_deadline(missed[0])
    assert len(missed) == 1
    assert not waiting.ended


@pytest.mark.parametrize("begun", [False, True])
async def test_a_response_in_the_background_has_only_the_clients_own_deadline(begun: bool) -> None:
    missed: list[DeadlineExceeded] = []
    queue = EngineQueue(NoEngine(), 4, deadlines=DeadlineConfig(answer=0.01))  # type: ignore[arg-type]
    without, limited = OpenAICall(queue, call=CALL), OpenAICall(queue, call=replace(CALL, time_limit=0.01))
    requests = Open(begun), Open(begun)
    tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in requests]
    for call, request, task in zip((without, limited), requests, tasks, strict=True):
        call.start_deadline(missed.append)
        call.leave_client()
        call.goes_on_in(task)
        call.add(request)
        call.close()
    assert without.deadline is None
    await until(lambda: requests[1].ended if begun else tasks[1].done())
    assert [request.ended for request in requests] == [False, begun]
    assert [task.done() for task in tasks] == [False, not begun]
    assert missed == []
    tasks[0].cancel()


class Hold:
    request = None

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_a_call_keeps_its_adapter_once_and_until_it_ends() -> None:
    call = OpenAICall(queue_of())
    first, second, late = Hold(), Hold(), Hold()
    keep: Any = call.keep
    assert keep("a", first) is first
    assert keep("a", second) is first
    assert (first.released, second.released) == (0, 1)
    call.close()
    assert first.released == 1
    assert keep("a", late) is late
    assert late.released == 1


@pytest.mark.parametrize("request_id", ["a-b", "chatcmpl-a-b"])
async def test_an_abort_ends_all_requests_of_an_answer(request_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["chatcmpl-a-b_0", "chatcmpl-a-b_1", "chatcmpl-a-bc_0"]
    async_llm = Mock(request_ids=Mock(return_value=ids), abort=AsyncMock())
    monkeypatch.setitem(sys.modules, "engines.vllm.async_llm", async_llm)  # An import of vLLM takes seconds.
    OpenAIHandler(VllmApp(None, "the engine"), queue_of()).abort(request_id)
    await until(lambda: async_llm.abort.await_count)
    async_llm.abort.assert_awaited_once_with("the engine", ids[:2], internal=False)
