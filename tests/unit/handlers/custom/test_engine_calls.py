"""A `handle` that gets each request first. It may call the engine, or leave the request to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.interface import EngineStartError
from handlers.contract import Call, ContractError, Reply, ReplyWriter, Running
from handlers.custom.custom_handler import CustomHandler
from tests.unit.handlers.custom.harness import MODELS, Client, Recorder, settings_for
from tests.waiting import until

SERVICE = "djl_python.lmi_vllm.vllm_async_service"
LINES = "application/jsonlines"


class Engine:
    """Implements `Handler`: answers with the request."""

    request_id = "r"

    def __init__(self) -> None:
        self.loads = 0
        self.failure = ""
        self.calls: list[Call] = []
        self.writer: ReplyWriter | None = None
        self.cancelled = asyncio.Event()

    async def load(self) -> Engine:
        self.loads += 1
        if self.failure:
            raise EngineStartError(self.failure)
        return self

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        self.calls.append(call)
        document = json.loads(call.body)
        if "refuse" in document:
            raise ContractError(Reply(429, "text/plain", b"no", (("X-Why", "full"),)), "full")
        if not document.get("stream"):
            writer.reply(Reply(200, "application/json", json.dumps({"engine": document}).encode() + b"\n"))
            return None
        writer.start(200, LINES)
        for word in document["inputs"].split():
            writer.write(json.dumps({"token": word}).encode() + b"\n")
        if document.get("endless"):
            self.writer = writer
            return self
        writer.end(b"\n")
        return None

    def cancel(self) -> None:
        self.cancelled.set()


@contextlib.asynccontextmanager
async def before_engine(
    engine: Engine | None, model: str | Path = "before_engine", **properties: str
) -> AsyncIterator[Client]:
    config = settings_for(MODELS / model, entry_point=SERVICE, async_mode=True, properties=properties)
    handler = CustomHandler(
        config, queue_size=100, overload_status=529, grace=0.2, load_engine=engine.load if engine is not None else None
    )
    await handler.start()
    try:
        yield Client(handler)
    finally:
        await handler.stop()


async def ask(client: Client, **document: Any) -> Recorder:
    writer, _ = await client.send(json.dumps(document), content_type="application/json")
    return await writer.done()


async def test_every_request_comes_to_the_handler_first() -> None:
    engine = Engine()
    async with before_engine(engine) as client:
        assert engine.loads == 1, "the handler has left the first call, which loads, to the engine"
        answer = await ask(client, do="answer", inputs="Hi")
        stream = await ask(client, do="stream", inputs="a b")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert answer.body == b'{"custom_handler_used": true, "inputs": "Hi"}\n'
    assert (stream.streamed, stream.content_type) == (True, LINES)
    assert stream.body == b'{"word": "a"}\n{"word": "b"}\n\n'
    assert not engine.calls


async def test_what_the_handler_answers_with_none_is_the_engines() -> None:
    engine = Engine()
    async with before_engine(engine) as client:
        writer, _ = await client.send(
            '{"inputs": "Hi"}', content_type="application/json", query={"adapter": "a"}, headers={"X-Mine": "b"}
        )
        answer = await writer.done()
        stream = await ask(client, inputs="a b", stream=True)
        refused = await ask(client, inputs="x", refuse=1)
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert answer.body == b'{"engine": {"inputs": "Hi"}}\n'
    assert (stream.streamed, stream.content_type) == (True, LINES)
    assert stream.body == b'{"token": "a"}\n{"token": "b"}\n\n'
    assert (refused.status, refused.content_type, refused.body) == (429, "text/plain", b"no")
    assert refused.headers["X-Why"] == "full"
    first = engine.calls[0]
    assert first.content_type == "application/json"
    assert first.request_id.startswith("id-")
    assert first.query == (("adapter", "a"),)
    assert first.headers[b"x-mine"] == b"b"


async def test_the_handler_may_call_the_engine_and_change_what_goes_in_and_out() -> None:
    engine = Engine()
    async with before_engine(engine) as client:
        called = await ask(client, do="call", inputs="hi")
        wrapped = await ask(client, do="wrap", inputs="a b", stream=True)
    assert called.body == b'{"engine": {"inputs": "HI"}}\n'
    assert wrapped.body == b'{"custom_handler_used": true}\n{"token": "A"}\n{"token": "B"}\n\n'


async def test_each_call_of_the_engine_has_the_salt_of_its_requests_api_key_which_the_handler_does_not_get(
    tmp_path: Path,
) -> None:
    code = (
        "import asyncio\n"
        "from djl_python import Input\n"
        "from djl_python.async_utils import create_non_stream_output\n"
        "from djl_python.lmi_vllm.vllm_async_service import service\n"
        "orders = asyncio.Queue()\n"
        "def request(text):\n"
        "    inputs = Input()\n"
        "    inputs.content.add('data', '{\"inputs\": \"%s\"}' % text)\n"
        "    return inputs\n"
        "async def serve_orders():\n"
        "    while True:\n"
        "        text, done = await orders.get()\n"
        "        await service.inference(request(text))\n"
        "        done.set()\n"
        "async def handle(inputs):\n"
        "    global background\n"
        "    if inputs.is_empty():\n"
        "        background = asyncio.create_task(serve_orders())\n"
        "        return None\n"
        "    match inputs.get_as_json()['inputs']:\n"
        "        case 'mine':\n"
        "            await service.inference(request('mine'))\n"
        "        case 'child':\n"
        "            await asyncio.create_task(service.inference(request('child')))\n"
        "        case 'background':\n"
        "            done = asyncio.Event()\n"
        "            orders.put_nowait(('background', done))\n"
        "            await done.wait()\n"
        "        case _:\n"
        "            return None\n"
        "    return create_non_stream_output(str(inputs))\n"
    )
    engine = Engine()
    async with before_engine(engine, write_model(tmp_path, code)) as client:

        async def ask_with(text: str, salt: str) -> Recorder:
            return await client.ask(json.dumps({"inputs": text}), content_type="application/json", key_salt=salt)

        def salts(text: str) -> list[str]:
            return sorted(call.key_salt for call in engine.calls if json.loads(call.body) == {"inputs": text})

        await ask_with("background", "")
        assert salts("background") == [""], "a server without keys has no salts"
        engine.calls.clear()
        texts = ("mine", "child", "left to the engine", "background")
        answers = await asyncio.gather(*(ask_with(text, salt) for text in texts for salt in ("secret-a", "secret-b")))
    assert [answer.status for answer in answers] == [200] * 8
    assert not any(b"secret" in answer.body for answer in answers)
    for text in ("mine", "left to the engine"):
        assert salts(text) == ["secret-a", "secret-b"]
    for text in ("child", "background"):  # These tasks may serve several calls.
        assert len({"", "secret-a", "secret-b", *salts(text)}) == 5


async def test_a_call_to_the_engine_has_the_deadline_of_the_call_in_which_it_is_made(tmp_path: Path) -> None:
    code = (
        "from djl_python import Input\n"
        "from djl_python.async_utils import create_non_stream_output\n"
        "from djl_python.lmi_vllm.vllm_async_service import service\n"
        "async def handle(inputs):\n"
        "    if inputs.is_empty():\n"
        "        return None\n"
        "    mine = Input()\n"
        "    mine.content.add('data', '{\"inputs\": \"x\"}')\n"
        "    mine.properties = inputs.get_as_json()['headers']\n"
        "    await service.inference(mine)\n"
        "    return create_non_stream_output('done')\n"
    )
    engine, began = Engine(), time.monotonic()
    async with before_engine(engine, write_model(tmp_path, code)) as client:
        for own, limit in (("", 7.0), ("3", 7.0), ("9", 7.0), ("", None)):
            body = {"inputs": "x", "headers": {"X-Slipway-Deadline": own} if own else {}}
            answer = await client.ask(json.dumps(body), content_type="application/json", time_limit=limit)
            assert answer.status == 200, answer.body
    assert [call.time_limit for call in engine.calls] == [7.0, 3.0, 7.0, None]
    assert all(call.from_handler for call in engine.calls)
    arrivals = [call.arrived_at for call in engine.calls]
    assert began < arrivals[0] <= arrivals[1] <= arrivals[2] <= arrivals[3] < time.monotonic()


async def test_a_handler_that_raises_fails_its_request_with_lmis_error() -> None:
    async with before_engine(Engine()) as client:
        answer = await ask(client, do="fail", inputs="x")
        internals = await ask(client, do="internals", inputs="x")
    assert (answer.status, answer.content_type) == (424, "application/json")
    assert answer.body == b'{"error":"Custom handler failed: Custom handler intentional failure","code":424}'
    assert b"has no attribute" in internals.body


async def test_a_client_that_leaves_ends_the_generation() -> None:
    engine = Engine()
    async with before_engine(engine) as client:
        order = json.dumps({"inputs": "a b", "stream": True, "endless": True})
        writer, running = await client.send(order, content_type="application/json")
        await until(lambda: writer.body.count(b"\n") == 2)
        running.cancel()
        await until(engine.cancelled.is_set)


async def test_a_handler_that_drops_a_stream_ends_the_generation() -> None:
    engine = Engine()
    async with before_engine(engine) as client:
        answer = await ask(client, do="first", inputs="a b", stream=True, endless=True)
        assert answer.body == b'{"token": "A"}\n'
        await until(engine.cancelled.is_set)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stream_that_the_handler_does_not_read_ends(tmp_path: Path, leaves: bool) -> None:
    code = (
        "import asyncio\n"
        "from djl_python.async_utils import create_non_stream_output\n"
        "from djl_python.lmi_vllm.vllm_async_service import service\n"
        "async def handle(inputs):\n"
        "    if inputs.is_empty():\n"
        "        return None\n"
        "    stream = await service.inference(inputs)\n"
        "    if inputs.get_as_json().get('waits'):\n"
        "        open('waiting', 'w').close()\n"
        "        await asyncio.sleep(600)\n"
        "    return create_non_stream_output('unread')\n"
    )
    engine = Engine()
    async with before_engine(engine, write_model(tmp_path, code)) as client:
        order = json.dumps({"inputs": "a", "stream": True, "endless": True, "waits": leaves})
        writer, running = await client.send(order, content_type="application/json")
        if leaves:
            await until((tmp_path / "waiting").exists)
            running.cancel()
        await until(engine.cancelled.is_set)
        assert writer.body == (b"" if leaves else b"unread\n")


async def test_a_worker_that_ends_ends_its_generations() -> None:
    engine = Engine()
    async with before_engine(engine) as client:
        order = json.dumps({"inputs": "a", "stream": True, "endless": True})
        writer, _ = await client.send(order, content_type="application/json")
        await until(lambda: writer.body.count(b"\n") == 1)
    assert engine.cancelled.is_set()


async def test_a_handler_that_answers_the_first_call_has_a_model_of_its_own_and_may_still_call_the_engine() -> None:
    engine = Engine()
    async with before_engine(engine, own_model="yes") as client:
        assert (await ask(client, do="answer", inputs="Hi")).status == 200
        assert engine.loads == 0
        assert (await ask(client, do="call", inputs="hi")).body == b'{"engine": {"inputs": "HI"}}\n'
        assert engine.loads == 2, "once to load it, once for the call"


async def test_a_request_cannot_choose_the_model_of_the_services_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text(
        "class AutoTokenizer:\n"
        "    @staticmethod\n"
        "    def from_pretrained(path, **options):\n"
        "        return {'path': path, **options}\n"
    )
    code = (
        "from djl_python.async_utils import create_non_stream_output\n"
        "from djl_python.lmi_vllm.vllm_async_service import service\n"
        "async def handle(inputs):\n"
        "    if not inputs.is_empty():\n"
        "        if not inputs.get_as_json().get('tokenizer'):\n"
        "            return None\n"
        "        await service.initialize(inputs.get_properties())\n"
        "    return create_non_stream_output({'tokenizer': service.tokenizer})\n"
    )
    chosen = "model_id=evil/repo;revision=evil;trust_remote_code=true;TRUST_REMOTE_CODE=true"
    headers = {"X-Amzn-Sagemaker-Custom-Attributes": chosen, "model_id": "evil/repo", "trust_remote_code": "true"}
    options = {"model_id": "org/model", "revision": "v1"}
    for own in ({}, options, {**options, "trust_remote_code": "True"}):
        async with before_engine(Engine(), write_model(tmp_path, code), **own) as client:
            for body in ('{"inputs": "x"}', '{"tokenizer": true}'):
                writer, _ = await client.send(body, content_type="application/json", headers=headers)
                answer = await writer.done()
        trusted = "trust_remote_code" in own
        expected = {"path": str(tmp_path), "trust_remote_code": trusted}
        if own:
            expected = {"path": "org/model", "trust_remote_code": trusted, "revision": "v1"}
        assert json.loads(answer.body) == {"tokenizer": expected}


async def test_an_engine_that_cannot_be_loaded_fails_the_load() -> None:
    engine = Engine()
    engine.failure = "no room"
    with pytest.raises(EngineStartError, match="no room"):
        async with before_engine(engine):
            pass


def write_model(directory: Path, code: str) -> Path:
    (directory / "model.py").write_text(code)
    return directory


async def test_a_handler_that_fails_at_the_first_call_fails_requests_and_not_the_load(tmp_path: Path) -> None:
    engine = Engine()
    code = 'async def handle(inputs):\n    raise RuntimeError("Custom handler intentional failure")\n'
    async with before_engine(engine, write_model(tmp_path, code)) as client:
        answer = await ask(client, inputs="x")
    assert (answer.status, engine.loads) == (424, 0)
    assert b"Custom handler failed: Custom handler intentional failure" in answer.body


async def test_a_file_without_a_handle_leaves_everything_to_the_engine(tmp_path: Path) -> None:
    engine = Engine()
    async with before_engine(engine, write_model(tmp_path, "def some_other_function():\n    return 1\n")) as client:
        assert (await ask(client, inputs="Hi")).body == b'{"engine": {"inputs": "Hi"}}\n'


async def test_a_handler_may_answer_the_first_call_with_a_stream(tmp_path: Path) -> None:
    code = (
        "from djl_python.async_utils import create_stream_chunk_output\n"
        "async def words():\n"
        "    yield create_stream_chunk_output('a', False)\n"
        "    yield create_stream_chunk_output('b', True)\n"
        "async def handle(inputs):\n"
        "    return words()\n"
    )
    engine = Engine()
    async with before_engine(engine, write_model(tmp_path, code)) as client:
        assert (await ask(client, inputs="x")).body == b"a\nb\n"
    assert engine.loads == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "from no_such_module import x\n\nasync def handle(inputs):\n    pass\n",
            r"no_such_module.*\(model\.py, line 1\)",
        ),
        ("async def handle(inputs)\n    pass\n", r"SyntaxError: .*model\.py, line 1"),
    ],
)
async def test_a_file_that_cannot_be_imported_fails_the_load(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        async with before_engine(Engine(), write_model(tmp_path, code)):
            pass


async def test_without_an_engine_a_call_to_it_says_what_is_needed(tmp_path: Path) -> None:
    code = (
        "from djl_python.lmi_vllm.vllm_async_service import VLLMHandler\n"
        "async def handle(inputs):\n"
        "    if not inputs.is_empty():\n"
        "        await VLLMHandler().initialize(inputs.get_properties())\n"
    )
    config = settings_for(write_model(tmp_path, code), async_mode=True)
    handler = CustomHandler(config, queue_size=100, overload_status=529, grace=2)
    await handler.start()
    try:
        answer = await ask(Client(handler), inputs="x")
    finally:
        await handler.stop()
    assert answer.status == 424
    assert b"option.entryPoint=djl_python.lmi_vllm.vllm_async_service" in answer.body
