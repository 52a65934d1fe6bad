"""A customer's handlers over HTTP, in the model directories that LMI's documentation and tests describe."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest

from djl_python.np_util import from_nd_list, to_nd_list
from tests.live.server import METRIC_SECONDS, START_SECONDS, Server, copy_model, hosted, serving_copy, start_copy
from tests.waiting import wait_until, wait_until_still

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    properties = "minWorkers=2\nmaxWorkers=2\nretry_threshold=1000"
    with serving_copy(HANDLERS / "echo", tmp_path_factory.mktemp("echo"), properties=properties) as running:
        yield running


def test_a_body_comes_back_with_its_content_type(echo: Server) -> None:
    for path in ("/invocations", "/predictions/model", "/predictions/model/1", "/v1/chat/completions"):
        response = echo.client.post(path, content=b"\x00\xff", headers={"content-type": "application/x-mine"})
        assert (response.status_code, response.content) == (200, b"\x00\xff")
        assert response.headers["content-type"] == "application/x-mine"
        assert response.headers["content-length"] == "2"


def test_a_handler_sees_query_headers_and_attributes_as_lmi_shows_them(echo: Server) -> None:
    headers = {
        "X-Amzn-SageMaker-Custom-Attributes": "a=b; c=d",
        "X-Amzn-SageMaker-Session-Id": "s",
        "x-request-id": "r1",
    }
    seen = echo.client.post("/invocations?inspect=1&q=%C3%BC", content=b"body", headers=headers).json()
    assert seen["contents"] == [["inspect", "1"], ["q", "ü"], ["data", "body"]]
    properties = seen["properties"]
    assert (properties["a"], properties["c"], properties["requestId"]) == ("b", "d", "r1")
    assert properties["X-Amzn-SageMaker-Session-Id"] == "s"
    assert "X-Amzn-SageMaker-Custom-Attributes" not in properties


def test_a_wrong_deadline_is_refused_and_an_attribute_of_that_name_may_be_the_customers(echo: Server) -> None:
    wrong = echo.client.post(
        "/invocations", headers={"X-Slipway-Deadline": "soon", "x-amzn-sagemaker-custom-attributes": "deadline=2"}
    )
    own = echo.client.post(
        "/invocations", content=b"body", headers={"x-amzn-sagemaker-custom-attributes": "deadline=Monday"}
    )
    message = "`X-Slipway-Deadline` must be seconds, a number above 0, at most 1000000000; got 'soon'"
    assert (wrong.status_code, wrong.json()) == (400, {"code": 400, "type": "BadRequestException", "message": message})
    assert (own.status_code, own.content) == (200, b"body")


def test_a_chat_reaches_the_handler_by_openais_client_and_other_contracts_say_that_they_do_not(echo: Server) -> None:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none") as client:
        chat = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/chat/completions", body=chat, cast_to=object) == chat
        with pytest.raises(openai.InternalServerError, match="this model has a handler of its own") as refused:
            client.completions.create(model="any", prompt="x")
        assert refused.value.status_code == 501


def test_a_script_of_sagemaker_is_served_from_its_code_directory(host: Server, tmp_path: Path) -> None:
    with hosted(host, copy_model(HANDLERS / "script", tmp_path / "model")) as script:
        csv = {"content-type": "text/csv", "accept": "application/json"}
        answer = script.client.post("/invocations", content=b"1,2\n3,4\n", headers=csv)
        assert (answer.status_code, answer.json()) == (200, [[3, 5], [7, 9]])
        assert answer.headers["content-type"] == "application/json"
        refused = script.client.post("/invocations", content=b"x", headers={"content-type": "image/png"})
        assert (refused.status_code, refused.json()["code"]) == (415, 415)


def test_forms_and_files_become_content(echo: Server) -> None:
    form = echo.client.post("/invocations", data={"inspect": "1", "b": "2"}).json()
    assert form["contents"] == [["inspect", "1"], ["b", "2"]]
    files = {"inspect": (None, "1"), "data": ("x.txt", b"file")}
    assert echo.client.post("/invocations", files=files).json()["contents"] == [["inspect", "1"], ["data", "file"]]
    broken = {"content-type": "multipart/form-data; boundary=x"}
    response = echo.client.post("/invocations", content=b"--x\r\nnonsense", headers=broken)
    assert response.status_code == 400
    assert "multipart" in response.json()["message"]


def test_any_method_is_a_call(echo: Server) -> None:
    assert echo.client.get("/invocations?inspect=1").json()["contents"] == [["inspect", "1"], ["data", ""]]


def test_a_stream_comes_in_order_and_in_chunks(echo: Server) -> None:
    with echo.client.stream("POST", "/invocations?stream=1") as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert response.headers["x-stream"] == "yes"
        assert "".join(response.iter_text()) == "".join(f"t-{i}\n" for i in range(5))


@pytest.mark.parametrize(
    ("query", "status", "body"),
    [
        (
            "exception=why",
            424,
            b'{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":"why"\n}',
        ),
        ("nothing=1", 204, b""),
        ("oom=1", 507, b""),
        ("code=418", 418, b"body"),
        ("several=1", 200, b"second"),
    ],
)
def test_what_a_handler_returns_or_raises_is_the_answer(echo: Server, query: str, status: int, body: bytes) -> None:
    response = echo.client.post(f"/invocations?{query}")
    assert (response.status_code, response.content) == (status, body)


def test_a_header_of_a_handler_cannot_add_another(echo: Server) -> None:
    response = echo.client.post("/invocations?header=1")
    assert response.text == "ok"
    assert "x-injected" not in response.headers
    assert "X-Injected" in response.headers["x-odd"]


def test_a_request_may_not_choose_the_function(echo: Server) -> None:
    assert echo.client.post("/invocations", headers={"handler": "other"}).status_code == 400


def test_a_worker_that_crashes_is_replaced_and_its_client_told(echo: Server) -> None:
    failures = echo.metric("slipway_worker_failures_total")
    for query in ("exit=1", "abort=1"):
        response = echo.client.post(f"/invocations?{query}")
        assert response.status_code == 503
        assert response.json()["type"]
        assert "worker" in response.json()["message"]
        assert echo.client.post("/invocations", content=b"on").content == b"on"
    assert echo.metric("slipway_worker_failures_total") == failures + 2
    echo.wait_for_metric("slipway_workers", 2)
    assert echo.ping() == 200


def test_clients_that_leave_free_their_workers(echo: Server, tmp_path: Path) -> None:
    def leave(number: int) -> None:
        journal = tmp_path / str(number)
        with echo.client.stream("POST", f"/invocations?endless=1000&journal={journal}") as response:
            next(response.iter_raw())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(24)))
    echo.wait_for_metric("slipway_workers_busy", 0)
    echo.wait_for_metric("slipway_open_requests", 0)
    assert len(list(tmp_path.glob("*.closed"))) == 24
    assert echo.client.post("/invocations", content=b"on").content == b"on"


def test_a_client_that_reads_slowly_holds_its_stream_back(echo: Server, tmp_path: Path) -> None:
    journal = tmp_path / "slow"
    # Without a fixed size, the system enlarges the receive buffer while the client reads.
    buffer = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)]
    transport = httpx.HTTPTransport(socket_options=buffer)
    client = httpx.Client(base_url=echo.client.base_url, transport=transport, timeout=START_SECONDS)
    with client, client.stream("POST", f"/invocations?endless=100000&journal={journal}") as response:
        parts = response.iter_raw()  # httpx closes the connection when this iterator is gone
        next(parts)
        wait_until_still(journal)
        held_back = int(journal.read_text())
        assert held_back * 100_000 < 20_000_000
        read = 0
        while read < held_back * 100_000:
            read += len(next(parts))
        wait_until(lambda: int(journal.read_text() or 0) > held_back)


def test_arrays_go_in_and_out(host: Server, tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2], dtype=np.int64)]
    model = copy_model(HANDLERS / "numpy_io", tmp_path / "model")
    with hosted(host, model) as server:
        nd_list = server.client.post(
            "/invocations", content=bytes(to_nd_list(arrays)), headers={"content-type": "tensor/ndlist"}
        )
        assert nd_list.headers["content-type"] == "tensor/ndlist"
        file = io.BytesIO()
        np.savez(file, *arrays)
        npz = server.client.post("/invocations", content=file.getvalue(), headers={"content-type": "tensor/npz"})
        for response in (nd_list, npz):
            doubled = from_nd_list(response.content)
            assert all(np.array_equal(one * 2, two) for one, two in zip(arrays, doubled, strict=True))
        broken = server.client.post("/invocations", content=b"NDAR", headers={"content-type": "tensor/ndlist"})
        assert broken.status_code == 424
        assert broken.json()["message"] == "invoke handler failure"
        assert "Traceback" not in broken.text


def test_async_handlers_serve_many_at_once(host: Server, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "async_echo", tmp_path / "model", async_mode="true")
    with hosted(host, model) as server:

        def ask(number: int) -> str:
            document = {"do": "stream", "count": 5, "delay": 0.5, "text": f"n{number}"}
            text: str = server.client.post("/invocations", json=document).text
            return text

        started = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        assert answers == ["".join(f"n{number}-{i}\n" for i in range(5)) for number in range(20)]
        assert time.monotonic() - started < 40, "twenty calls of 2.5 s each did not run together"
        refused = server.client.post("/invocations", json={"do": "raise"})
        assert (refused.status_code, refused.json()["code"]) == (424, 424)


def test_dynamic_batches_reach_the_handler_together(host: Server, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "batch_echo", tmp_path / "model", properties="batch_size=4\nmax_batch_delay=60000")
    with hosted(host, model) as server:

        def ask(number: int) -> str:
            text: str = server.client.post("/invocations", content=f"n{number}").text
            return text

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(ask, range(4))) == [f"n{number} of 4" for number in range(4)]


def test_a_handler_with_a_rolling_batch_serves_requests_as_they_come(host: Server, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "rolling", tmp_path / "model", rolling_batch="auto", max_rolling_batch_size=3)
    with hosted(host, model) as server:

        def ask(number: int) -> httpx.Response:
            return server.client.post("/invocations", json={"text": f"n{number}-", "tokens": 1 + number % 4})

        with ThreadPoolExecutor(9) as pool:
            for number, response in enumerate(pool.map(ask, range(9))):
                assert response.headers["content-type"] == "application/jsonlines"
                assert response.text == "".join(f"n{number}-{i + 1}s/0 " for i in range(1 + number % 4))


def test_the_model_directory_is_where_the_handler_runs_and_imports(host: Server, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "success", tmp_path / "model", mine="a b", model_id="org/name")
    with hosted(host, model) as server:
        answer = server.invoke("x").json()
        assert answer["greeting"] == "custom_handler_used"
        assert answer["configuration"]["mine"] == "a b"
        assert answer["configuration"]["model_id"] == "org/name"


@pytest.mark.parametrize(
    ("fixture", "code", "expected"),
    [
        ("import_error", None, ["model.py", "line 1", "no_such_package_anywhere"]),
        pytest.param("missing_handle", None, ["model.py", "handle"], marks=pytest.mark.slow),
        pytest.param(
            *("success", "def handle(inputs):\n    return (\n", ["SyntaxError", "model.py", "line 2"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_handler_that_cannot_be_loaded_fails_the_model_and_says_where(
    tmp_path: Path, fixture: str, code: str | None, expected: list[str]
) -> None:
    source = HANDLERS / fixture
    if code is not None:
        source = tmp_path / "source"
        source.mkdir()
        (source / "model.py").write_text(code)
    server = start_copy(source, tmp_path)
    try:
        wait_until(lambda: server.ping() in (200, 500), START_SECONDS, about=server.log_text)
        assert server.ping() == 500
        state = server.client.get("/ping").json()["model"]
        assert state["status"] == "FAILED"
        assert server.client.post("/invocations", json={}).status_code == 503
        assert server.process.wait(60) == 1
        for text in expected:
            assert text in state["reason"]
            server.wait_for_log(text)
    finally:
        server.stop()


def test_a_crash_beyond_the_threshold_fails_the_health_check_and_the_handler_still_serves(tmp_path: Path) -> None:
    with serving_copy(HANDLERS / "echo", tmp_path) as server:
        assert server.client.post("/invocations?abort=1").status_code == 503
        response = server.client.get("/ping")
        assert (response.status_code, response.json()["model"]["status"]) == (500, "FAILED")
        assert response.json()["model"]["reason"]
        assert server.client.post("/invocations", content=b"on").content == b"on"


def test_a_handler_that_hangs_is_ended_and_its_client_told(host: Server, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "slow", tmp_path / "model", properties="retry_threshold=5", predict_timeout=3)
    with hosted(host, model) as server:
        started = time.monotonic()
        response = server.client.post("/invocations", content=b"600")
        assert (response.status_code, time.monotonic() - started < 60) == (503, True)
        assert "predict" in response.json()["message"]
        assert server.client.post("/invocations", content=b"0").text == "done"
        assert server.ping() == 200


def test_a_stop_lets_a_call_finish_and_leaves_no_process(tmp_path: Path) -> None:
    server = start_copy(HANDLERS / "slow", tmp_path)
    try:
        server.wait_until_ready()
        workers = psutil.Process(server.process.pid).children(recursive=True)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(server.client.post, "/invocations", content=str(tmp_path / "go"))
            server.wait_for_metric("slipway_workers_busy", 1)
            os.kill(server.process.pid, 15)
            wait_until(lambda: server.ping() == 503)
            (tmp_path / "go").touch()
            assert call.result().text == "done"
        assert server.process.wait(60) == 0
        _, alive = psutil.wait_procs(workers, timeout=METRIC_SECONDS)
        assert workers
        assert not alive
    finally:
        server.stop()


def test_a_killed_server_leaves_no_worker_behind(tmp_path: Path) -> None:
    server = start_copy(HANDLERS / "success", tmp_path)
    try:
        server.wait_until_ready()
        workers = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=METRIC_SECONDS)
        assert workers
        assert not alive
    finally:
        server.stop()


def test_a_full_queue_is_refused_at_once(host: Server, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "slow", tmp_path / "model", properties="job_queue_size=1")
    with hosted(host, model) as server:
        with ThreadPoolExecutor(6) as pool:
            calls = [pool.submit(server.client.post, "/invocations", content=str(tmp_path / "go")) for _ in range(6)]
            first, _ = wait(calls, METRIC_SECONDS, FIRST_COMPLETED)
            (tmp_path / "go").touch()
        assert [call.result().status_code for call in first] == [503] * len(first) != []
        assert first.pop().result().json()["type"] == "WlmCapacityException"
        assert {call.result().status_code for call in calls} == {200, 503}
        assert server.client.post("/invocations", content=b"0").text == "done"
