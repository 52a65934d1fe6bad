"""A handler that takes one call at a time, in real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from handlers.contract import ContractError
from handlers.custom.batching import dynamic
from handlers.custom.worker_process.socket_protocol import CREDIT_BYTES
from tests.unit.handlers.custom.harness import MODELS, Recorder, serving
from tests.waiting import pass_time, until, wait_until_still

E3 = '{{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":"{}"\n}}'


async def test_a_request_is_answered_with_the_handlers_content() -> None:
    async with serving("echo") as client:
        answer = await client.ask(b"\x00binary\xff", content_type="image/png")
    assert (answer.status, answer.content_type, answer.body) == (200, "image/png", b"\x00binary\xff")
    assert not answer.streamed


async def test_a_large_body_comes_back_whole() -> None:
    body = os.urandom(20_000_000)
    async with serving("echo") as client:
        assert (await client.ask(body)).body == body


async def test_what_the_handler_does_decides_status_and_body(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, str], int, str, str]] = [
        ({"exception": 'a "bad" <thing>'}, 424, "application/json", E3.format('a \\"bad\\" <thing>')),
        ({"exception": "zwei\nZeilen: ü"}, 424, "application/json", E3.format("zwei\\nZeilen: ü")),
        ({"wrong_type": "1"}, 424, "application/json", E3.format("Invalid output type: <class 'str'>")),
        ({"oom": "CUDA"}, 507, "", ""),
        ({"nothing": "1"}, 204, "", ""),
        ({"code": "418"}, 418, "", "body"),
        ({"code": "204"}, 204, "", ""),
        ({"code": "7"}, 424, "application/json", E3.format("Invalid status code: 7")),
        ({"several": "1"}, 200, "", "second"),
        ({"empty_stream": "1"}, 200, "", ""),
        ({"failing_stream": "0"}, 424, "application/json", E3.format("the stream broke")),
        ({"failing_stream": "2"}, 200, "", "t-0\nt-1\nthe stream broke"),
        ({"bodiless_stream": "1"}, 204, "", ""),
        ({"number": "1"}, 200, "", "5"),
    ]
    async with serving("echo") as client:
        for switch, status, content_type, body in rows:
            with subtests.test(switch=switch):
                answer = await client.ask(query=switch)
                assert (answer.status, answer.content_type, answer.body.decode()) == (status, content_type, body)
                assert (await client.ask(b"next")).body == b"next"
                assert client.handler.pool.failures == 0


async def test_streams_come_in_order_with_the_outputs_headers() -> None:
    async with serving("echo") as client:
        answer = await client.ask(query={"stream": "1"})
        lines = await client.ask(query={"jsonlines": "1"})
    assert answer.streamed
    assert (answer.status, answer.headers) == (200, {"X-Stream": "yes"})
    assert answer.body == b"t-0\nt-1\nt-2\nt-3\nt-4\n"
    assert lines.body == b'{"outputs": "\\u00e4"}\n{"outputs": 1}\n'


async def test_headers_of_the_handler_cannot_break_the_reply() -> None:
    async with serving("echo") as client:
        odd = await client.ask(query={"header": "1"})
        headers = {"Content-Length": "3", "Transfer-Encoding": "chunked", "Connection": "close", "X-Mine": "kept"}
        echoed = await client.ask(b"abc", query={"echo_properties": "1"}, headers=headers, content_type="text/plain")
    assert odd.headers == {"X-Odd": "a X-Injected: b ü?"}
    assert echoed.content_type == "text/plain"
    assert echoed.headers["X-Mine"] == "kept"
    assert not {"Content-Length", "Transfer-Encoding", "Connection"} & echoed.headers.keys()


async def test_the_handler_sees_headers_query_and_body_as_lmi_gives_them() -> None:
    async with serving("echo", environment={"FIXTURE_VARIABLE": "from option.env"}) as client:
        answer = await client.ask(
            b"the body",
            query={"inspect": "1", "key": "värde"},
            headers={"X-One": "1", "X-Amzn-SageMaker-Custom-Attributes": "a = b=c; x-priority=1;junk"},
            content_type="text/plain",
        )
    seen: dict[str, Any] = json.loads(answer.body)
    assert seen["contents"] == [["inspect", "1"], ["key", "värde"], ["data", "the body"]]
    properties = seen["properties"]
    assert properties.pop("requestId").startswith("id-")
    assert properties == {
        "X-One": "1",
        "a": "b=c",
        "x-priority": "1",
        "Content-Type": "text/plain",
        "handler": "handle",
        "model_dir": str(MODELS / "echo"),
        "device_id": "-1",
    }
    assert seen["function"] == "handle"
    assert seen["cwd"] == seen["path0"] == str(MODELS / "echo")
    assert seen["environment"] == "from option.env"
    assert seen["executable"] == sys.executable


async def test_the_initializing_call_has_the_models_properties_and_siblings_can_be_imported() -> None:
    async with serving("success", properties={"tensor_parallel_degree": "2"}, devices=("1",)) as client:
        seen = json.loads((await client.ask()).body)
    assert seen["greeting"] == "custom_handler_used"
    assert seen["configuration"] == {
        "tensor_parallel_degree": "2",
        "device_id": "1",
        "model_dir": str(MODELS / "success"),
        "handler": "handle",
    }


async def test_an_entry_point_may_be_a_module_of_the_models_folder() -> None:
    async with serving("echo", entry_point="model") as client:
        assert (await client.ask(b"x")).body == b"x"


async def test_a_request_names_a_function_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("echo") as client:
        with pytest.raises(ContractError) as refused:
            await client.send(headers={"Handler": "other"})
        assert refused.value.reply.status == 400
        assert b'"type": "BadRequestException"' in refused.value.reply.body
        monkeypatch.setenv("ALLOW_REQUEST_HANDLER_OVERRIDE", "true")
        assert (await client.ask(headers={"handler": "other"})).body == b"other"
        missing = await client.ask(headers={"handler": "none_such"})
    assert (missing.status, b"none_such" in missing.body) == (424, True)


async def test_the_finalize_function_runs_after_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "finalized"
    async with serving("echo") as client:
        assert (await client.ask(query={"finalize": str(path)})).body == b"sent"
        await client.ask(b"next")
    assert path.read_text() == "finalized"


async def test_an_async_function_without_async_mode_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "async def other():\n    pass\n\ndef handle(inputs):\n    return None if inputs.is_empty() else other()\n"
    )
    async with serving(tmp_path) as client:
        answer = await client.ask(b"x")
    assert (answer.status, b"option.async_mode=true" in answer.body) == (424, True)


SLOW_FINALIZE = """
import time
from pathlib import Path
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add(b"sent").finalize(finish, Path(inputs.get_as_string()))

def finish(directory):
    while not (directory / "go").exists():
        time.sleep(0.05)
    (directory / "done").touch()
"""


async def test_the_finalize_function_may_take_longer_than_the_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.py").write_text(SLOW_FINALIZE)
    async with serving(tmp_path, predict_timeout=60.0) as client:
        assert (await client.ask(str(tmp_path).encode())).body == b"sent"
        await pass_time(61)
        (tmp_path / "go").touch()
        await until((tmp_path / "done").exists)
    assert "predict_timeout" not in caplog.text


async def test_what_the_handler_prints_goes_to_the_log_by_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "handlers.custom"):
        async with serving("echo") as client:
            assert (await client.ask(query={"print": "1"})).body == b"printed"
            await until(lambda: "worker 1: to stderr" in caplog.messages)
    assert "worker 1: to stdout" in caplog.messages
    assert sum(len(message) - len("worker 1: ") for message in caplog.messages if message.endswith("xxx")) == 200_000


async def test_numpy_arrays_go_in_and_out() -> None:
    numpy = pytest.importorskip("numpy")
    from djl_python.np_util import from_nd_list, to_nd_list

    async with serving("numpy_io") as client:
        answer = await client.ask(bytes(to_nd_list([numpy.arange(3, dtype="float32")])), content_type="tensor/ndlist")
    assert answer.content_type == "tensor/ndlist"
    assert from_nd_list(answer.body)[0].tolist() == [0.0, 2.0, 4.0]


async def test_a_slow_client_stops_the_generator_instead_of_filling_memory(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    writer = Recorder()
    writer.taking.clear()
    async with serving("echo", predict_timeout=60.0) as client:
        _, running = await client.send(query={"endless": "100000", "journal": str(journal)}, writer=writer)
        await until(lambda: len(writer.body) >= CREDIT_BYTES)
        await pass_time(61)  # The predict timeout does not apply here.
        await asyncio.to_thread(wait_until_still, journal)
        assert len(writer.body) <= 600_000
        assert not writer.finished.is_set()
        held = int(journal.read_text())
        writer.taking.set()
        await until(lambda: len(writer.body) > 3_000_000)
        assert held <= 6
        running.cancel()
        await until((tmp_path / "journal.closed").exists)
        assert (await client.ask(b"free again")).body == b"free again"


async def test_a_handler_has_its_whole_time_after_a_slow_client_has_read(tmp_path: Path) -> None:
    writer = Recorder()
    writer.taking.clear()
    async with serving("echo", predict_timeout=60.0) as client:
        _, running = await client.send(query={"endless": "100000", "journal": str(tmp_path / "journal")}, writer=writer)
        await until(lambda: len(writer.body) >= CREDIT_BYTES)
        await asyncio.to_thread(wait_until_still, tmp_path / "journal")
        await pass_time(40)
        for pid in client.pids:
            os.kill(pid, signal.SIGSTOP)
        writer.taking.set()
        for _ in range(10):
            await asyncio.sleep(0)  # The worker gets its credit.
        await pass_time(30)
        read = len(writer.body)
        for pid in client.pids:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: len(writer.body) > read)
        assert not writer.finished.is_set()
        running.cancel()


async def test_a_client_that_goes_away_while_it_waits_costs_nothing(tmp_path: Path) -> None:
    async with serving("slow") as client:
        first, _ = await client.send(str(tmp_path / "go"))
        waiting, running = await client.send(b"never read")
        assert client.handler.pool.queue_length == 1
        running.cancel()
        assert client.handler.pool.queue_length == 0
        (tmp_path / "go").touch()
        await first.done()
        assert (await client.ask("0")).body == b"done"
    assert waiting.status == 0


async def test_a_hundred_clients_that_leave_mid_stream_leave_nothing_running(tmp_path: Path) -> None:
    async with serving("echo", min_workers=2, max_workers=2) as client:
        pids = client.pids
        for index in range(100):
            query = {"endless": "1000", "journal": str(tmp_path / str(index))}
            writer, running = await client.send(query=query)
            await writer.progress.wait()
            running.cancel()
        assert (await client.ask(b"next")).body == b"next"
        await until(lambda: client.handler.pool.busy == 0)
        assert sum((tmp_path / f"{index}.closed").exists() for index in range(100)) == 100
        assert (client.pids, client.handler.pool.failures) == (pids, 0)


async def test_a_client_that_takes_nothing_for_too_long_frees_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "CLIENT_PATIENCE", 0.5)
    async with serving("echo") as client:
        stalled = Recorder()
        stalled.taking.clear()
        query = {"endless": "100000", "journal": str(tmp_path / "journal")}
        await client.send(query=query, writer=stalled)
        await stalled.done()
        assert b"the client took nothing for 0.5 seconds" in stalled.body
        assert (await client.ask(b"next")).body == b"next"
        assert (tmp_path / "journal.closed").exists()
        assert client.handler.pool.failures == 0


@pytest.mark.parametrize(
    ("query", "error"),
    [({"exception": "\udcff or \ud800"}, b"? or ?"), ({"odd_exception": "1"}, b'"error":"Odd"')],
)
async def test_an_exception_whose_text_cannot_be_sent_is_an_answer_like_any_other(
    query: dict[str, str], error: bytes
) -> None:
    async with serving("surrogates" if "exception" in query else "echo") as client:
        answer = await client.ask(query=dict.fromkeys(query, "1"))
        assert answer.status == 424
        assert error in answer.body
        assert (await client.ask(b"next", query={"fine": "1"})).status == 200
        assert client.handler.pool.failures == 0


async def test_a_stream_that_is_cancelled_from_within_ends_its_call_alone() -> None:
    async with serving("echo") as client:
        assert (await client.ask(query={"cancelled_stream": "1"})).body.startswith(b"t-0\n")
        assert (await client.ask(b"next")).body == b"next"
        assert client.handler.pool.failures == 0


async def test_a_client_cannot_make_its_request_look_like_a_batch_or_the_initializing_call() -> None:
    async with serving("echo") as client:
        headers = {"batch_size": "3", "X-Amzn-SageMaker-Custom-Attributes": "batch_size=100000000;MODEL_DIR=/x"}
        assert (await client.ask(query={"batches": "1"}, headers=headers)).body == b"1"
        seen = json.loads((await client.ask(query={"inspect": "1"}, headers=headers)).body)["properties"]
        assert "batch_size" not in seen
        assert seen["model_dir"].endswith("echo")
    async with serving("stateful") as client:
        form = "application/x-www-form-urlencoded"
        for _ in range(2):
            answer = await client.ask(b"", content_type=form)
            assert answer.status == 200
        assert json.loads(answer.body)["told"] == ["", ""]


async def test_a_stalled_client_does_not_hide_a_handler_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "CLIENT_PATIENCE", 0.3)
    async with serving("stalling", predict_timeout=60) as client:
        stalled = Recorder()
        stalled.taking.clear()
        _, running = await client.send(query={"stall": "1"}, writer=stalled)
        await stalled.done()
        running.cancel()
        waiting, _ = await client.send(b"next")
        await pass_time(61)
        assert (await waiting.done()).body == b"next"
        assert client.handler.pool.failures == 1


FORMATTERS = """
from djl_python import Output
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
def read(given, **keywords): ...

@output_formatter
def write(output): ...

loaded = {}

def handle(inputs):
    found = {key: inputs.get_property(key) for key in ("input_formatter", "output_formatter")}
    names = {key: getattr(value, "__name__", value) for key, value in found.items()}
    if inputs.is_empty():
        loaded.update(names)
        return None
    return Output().add_as_json([loaded, names])
"""


@pytest.mark.parametrize(
    ("properties", "output"),
    [({}, "write"), ({"output_formatter": "jsonlines", "input_formatter": "mine"}, "jsonlines")],
)
async def test_the_output_formatter_of_the_settings_goes_before_the_decorated_one(
    tmp_path: Path, properties: dict[str, str], output: str
) -> None:
    (tmp_path / "model.py").write_text(FORMATTERS)
    async with serving(tmp_path, properties=properties) as client:
        loaded, of_call = json.loads((await client.ask(b"x", headers={"output_formatter": "sse"})).body)
    assert loaded == {"input_formatter": "read", "output_formatter": output}
    assert of_call == {"input_formatter": "read", "output_formatter": "write"}, "as in LMI"
