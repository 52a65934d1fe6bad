"""A customer's formatters in the asynchronous mode. They change bodies and vLLM's replies."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from handlers.contract import Call, ContractError, Reply, ReplyWriter, Running
from handlers.custom.formatters import Formatters
from handlers.formatter_thread import FormatterThread
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.chat_answers import AsyncForm
from handlers.lmi.formatters.async_formatters import FormattedReply
from handlers.lmi.invocations import InvocationsHandler
from handlers.lmi.sessions import Sessions
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL, call
from tests.freed import bytes_in_cycles
from tests.settings import configured
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.scripted_engine import ScriptedEngine
from tests.waiting import until

Write = Callable[[Any], Any]
ASYNCHRONOUS = configured(MODEL, async_mode=True)
ERROR = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
FAILED = b'{"error":"Custom formatter failed: no answer","code":424}'


def marked(response: Any) -> Any:
    """Add a field to an object or to the data of an event, like a formatter in the tests of LMI."""
    if isinstance(response, dict):
        return {**response, "processed_by": "test"}
    if response.strip() == "data: [DONE]":
        return response
    return f"data: {json.dumps({**json.loads(response[6:]), 'processed_by': 'test'})}"


@pytest.fixture(autouse=True)
def _answer_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Represent whole answers as dicts, instead of vLLM's objects. Importing vLLM takes long."""
    models = SimpleNamespace(answer_object=lambda path, body: {"path": path, **json.loads(body)})
    monkeypatch.setitem(sys.modules, "handlers.openai.vllm.request_models", models)


def formatters(write: Write | None, read: Write | None = None, time_limit: float = 60) -> Formatters:
    return Formatters(FormatterThread(time_limit), read, write)


class Cancelled:
    """Implements `Running`."""

    request_id = "r"

    def __init__(self) -> None:
        self.times = 0

    def cancel(self) -> None:
        self.times += 1


def formatted(write: Write, shape: AsyncForm | None = None) -> tuple[FormattedReply, CollectedReply, Cancelled]:
    client, running = CollectedReply(), Cancelled()
    reply = FormattedReply(client, formatters(write), shape or AsyncForm(), "/v1/completions")
    reply.follow(running)
    return reply, client, running


async def test_a_stream_in_one_piece_is_a_stream_for_the_formatter() -> None:
    data = b'data: {"id":"x"}\n\ndata: [DONE]\n\n'
    whole, client, _ = formatted(marked)
    whole.reply(Reply(200, "text/event-stream; charset=utf-8", data))
    streamed, other, _ = formatted(marked)
    streamed.start(200, "text/event-stream; charset=utf-8")
    streamed.write(data)
    streamed.end(b"")
    await until(lambda: client.ended and other.ended)
    assert client.body == other.body
    assert b'"processed_by": "test"' in client.body


async def test_an_error_in_place_of_a_stream_is_the_reply() -> None:
    reply, client, running = formatted(marked)
    reply.reply(Reply(200, "text/event-stream", b"data: " + ERROR + b"\n\n"))
    await until(lambda: client.whole is not None)
    assert client.whole is not None
    assert (client.whole.status, client.whole.body) == (400, b'{"error":"too long","code":400}')
    assert running.times == 1


async def test_a_whole_answer_reaches_the_formatter_as_vllms_object_and_the_client_as_a_line() -> None:
    reply, client, _ = formatted(marked)
    reply.reply(Reply(200, "application/json", b'{"id":"x"}', (("x-y", "z"),)))
    await until(lambda: client.whole is not None)
    body = b'{"path": "/v1/completions", "id": "x", "processed_by": "test"}\n'
    assert client.whole == Reply(200, "application/json", body, (("x-y", "z"),))


async def test_each_event_of_a_stream_reaches_the_formatter_as_vllm_sent_it() -> None:
    seen = []
    reply, client, _ = formatted(lambda response: seen.append(response) or marked(response))
    reply.start(200, "text/event-stream")
    reply.write(b'data: {"n":1}\n\n: a comment\n\n')
    reply.write(b'data: {"n":2}\n\ndata: {"n":3}\n\n')
    reply.end(b"data: [DONE]\n\n")
    await until(lambda: client.ended)
    assert seen == ['data: {"n":1}\n\n', 'data: {"n":2}\n\n', 'data: {"n":3}\n\n', "data: [DONE]\n\n"]
    assert (client.status, client.content_type) == (200, "application/jsonlines")
    assert b"".join(client.parts) == (
        b'data: {"n": 1, "processed_by": "test"}\ndata: {"n": 2, "processed_by": "test"}\n'
        b'data: {"n": 3, "processed_by": "test"}\ndata: [DONE]\n\n\n\n'
    )


async def test_what_vllm_refuses_never_reaches_the_formatter() -> None:
    for shape, status in ((AsyncForm(), 400), (AsyncForm(refusal_status=424), 424)):
        reply, client, _ = formatted(marked, shape)
        reply.reply(Reply(400, "application/json", ERROR))
        assert client.whole == Reply(status, "application/json", b'{"error":"too long","code":%d}' % status)
        reply, client, _ = formatted(marked, shape)
        reply.start(200, "text/event-stream")
        reply.end(b"data: " + ERROR + b"\n\ndata: [DONE]\n\n")
        await until(lambda client=client: client.whole is not None)
        assert client.whole == Reply(status, "application/json", b'{"error":"too long","code":%d}' % status)


async def test_an_error_in_mid_stream_is_the_last_record_as_without_a_formatter() -> None:
    reply, client, _ = formatted(marked)
    reply.start(200, "text/event-stream")
    reply.write(b'data: {"n":1}\n\n')
    reply.end(b"data: " + ERROR + b"\n\ndata: [DONE]\n\n")
    await until(lambda: client.ended)
    assert b"".join(client.parts) == b'data: {"n": 1, "processed_by": "test"}\n' + ERROR + b"\n"


def failing_at(event: str) -> Write:
    def write(response: Any) -> Any:
        if event in str(response):
            raise ValueError("no answer")
        return response

    return write


async def test_a_formatter_that_fails_ends_the_reply_and_the_generation() -> None:
    reply, client, running = formatted(failing_at("2"))
    reply.start(200, "text/event-stream")
    reply.write(b'data: {"n":1}\n\n')
    reply.write(b'data: {"n":2}\n\n')
    reply.write(b'data: {"n":3}\n\n')
    await until(lambda: client.ended)
    assert b"".join(client.parts) == b'data: {"n":1}\n\n\n' + FAILED
    assert running.times == 1
    reply.write(b'data: {"n":4}\n\n')  # vLLM sends this before it notices the cancellation.
    reply.end(b"data: [DONE]\n\n")
    await reply.drain()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_formatter_that_fails_at_once_is_an_error_and_no_stream(stream: bool) -> None:
    reply, client, _ = formatted(failing_at("n"))
    if stream:
        reply.start(200, "text/event-stream")
        reply.write(b'data: {"n":1}\n\n')
    else:
        reply.reply(Reply(200, "application/json", b'{"n":1}'))
    await until(lambda: client.whole is not None)
    assert client.whole == Reply(424, "application/json", FAILED)


async def test_a_call_that_begins_after_its_formatter_has_failed_is_cancelled() -> None:
    client, running = CollectedReply(), Cancelled()
    reply = FormattedReply(client, formatters(failing_at("n")), AsyncForm(), "/v1/completions")
    reply.start(200, "text/event-stream")
    reply.write(b'data: {"n":1}\n\n')
    await until(lambda: client.whole is not None)
    reply.follow(running)
    assert running.times == 1


async def test_nothing_more_is_formatted_for_a_client_that_has_gone() -> None:
    begun, release, seen = threading.Event(), threading.Event(), []

    def write(response: str) -> str:
        seen.append(response)
        begun.set()
        release.wait()
        return response

    reply, client, running = formatted(write)
    reply.start(200, "text/event-stream")
    reply.write(b'data: {"n":1}\n\n')
    await until(begun.is_set)
    reply.write(b'data: {"n":2}\n\n')
    reply.cancel()
    release.set()
    reply.write(b'data: {"n":3}\n\n')  # vLLM sends this before it notices the cancellation.
    reply.end(b"")
    following, other, _ = formatted(marked)
    following.reply(Reply(200, "application/json", b"{}"))
    await until(lambda: other.whole is not None)
    assert seen == ['data: {"n":1}\n\n']
    assert (running.times, client.status, client.parts) == (1, 0, [])


@pytest.mark.usefixtures("no_collection_by_itself")
@pytest.mark.parametrize("write", [marked, failing_at("x")])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_that_has_ended_is_in_no_cycle(write: Write, stream: bool) -> None:
    async def ask() -> None:
        reply, client, running = formatted(write)
        if stream:
            reply.start(200, "text/event-stream")
            reply.end(b'data: {"x":"%b"}\n\ndata: [DONE]\n\n' % (b"x" * 100_000))
        else:
            reply.reply(Reply(200, "application/json", b'{"x":"%b"}' % (b"x" * 100_000)))
        running.writer = reply  # type: ignore[attr-defined]  # as every running call has
        await until(lambda: client.finished)

    await ask()
    bytes_in_cycles()
    await ask()
    assert bytes_in_cycles() < 100_000


async def test_vllm_waits_for_a_formatter_that_lags() -> None:
    release = threading.Event()
    reply, client, _ = formatted(lambda response: release.wait() and response)
    reply.start(200, "text/event-stream")
    reply.write(b'data: {"n":1}\n\n' * 200)
    waiting = asyncio.ensure_future(reply.drain())
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    release.set()
    await waiting
    reply.end(b"data: [DONE]\n\n")
    await until(lambda: client.ended)
    assert b"".join(client.parts).count(b'"n"') == 200


class OpenAI:
    """A stand-in for vLLM's front end that keeps the call."""

    def __init__(self) -> None:
        self.path = ""
        self.call: Call | None = None
        self.writer: ReplyWriter | None = None

    async def begin(self, call: Call, writer: ReplyWriter, path: str, **_: Any) -> Running:
        self.call, self.writer, self.path = call, writer, path
        return Cancelled()


async def asked(document: Any, write: Write | None, read: Write | None = None) -> OpenAI:
    openai = OpenAI()
    handler = InvocationsHandler(
        None,  # type: ignore[arg-type]
        openai,  # type: ignore[arg-type]
        ASYNCHRONOUS,
        EngineQueue(ScriptedEngine(), 10),
        Sessions(None, 503),
        contract=LmiAsyncContract(ASYNCHRONOUS),
        formatters=formatters(write, read),
    )
    await handler.handle(call(document), CollectedReply())
    return openai


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"inputs": "x"}, "/v1/completions"),
        ({"prompt": "x"}, "/v1/completions"),
        ({"messages": []}, "/v1/chat/completions"),
    ],
)
async def test_every_kind_of_body_goes_to_vllm_where_there_is_an_output_formatter(document: Any, path: str) -> None:
    openai = await asked(document, marked)
    assert openai.path == path
    assert isinstance(openai.writer, FormattedReply)


async def test_inputs_beside_other_fields_are_the_prompt_of_the_completion() -> None:
    openai = await asked({"inputs": "x", "messages": [], "adapters": "a"}, marked)
    assert openai.path == "/v1/completions"
    assert openai.call is not None
    assert openai.call.fields is not None  # `adapters` is no field of OpenAI's.
    assert bytes(openai.call.fields["prompt"]) == b'"x"'


async def test_the_input_formatter_decides_what_kind_a_body_is() -> None:
    openai = await asked({"question": "x"}, None, lambda payload: {"messages": [payload["question"]]})
    assert openai.path == "/v1/chat/completions"
    assert openai.call is not None
    assert openai.call.body == b'{"messages": ["x"]}'
    assert not isinstance(openai.writer, FormattedReply)


async def test_parameters_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await asked({"inputs": "x", "parameters": {"watermark": True}}, marked)
    assert "parameters without effect: watermark" in caplog.text


async def test_a_hanging_input_formatter_refuses_its_request() -> None:
    release = threading.Event()
    given = formatters(marked, lambda payload: payload if release.wait() else {}, time_limit=0.2)
    queue, sessions = EngineQueue(ScriptedEngine(), 10), Sessions(None, 503)
    handler = InvocationsHandler(None, OpenAI(), ASYNCHRONOUS, queue, sessions, formatters=given)  # type: ignore[arg-type]
    asked = call({"inputs": "x"})
    with pytest.raises(ContractError, match="predict_timeout") as caught:
        await handler.handle(asked, CollectedReply())
    with pytest.raises(ContractError, match="deadline") as late:
        await handler.handle(replace(asked, time_limit=0.01), CollectedReply())
    release.set()
    assert caught.value.reply.status == late.value.reply.status == 424
    assert (queue.statistics.deadlines, queue.statistics.calls.failed) == ({"partial": 0, "nothing": 1}, 1)
