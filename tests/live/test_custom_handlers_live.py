"""A customer's handlers over HTTP, in the model directories that LMI's documentation and tests describe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from tests.live.server import METRIC_SECONDS, START_SECONDS, Server, copy_model, hosted, serving_copy
from tests.waiting import SECONDS, wait_until

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
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "a=b; c=d", "x-request-id": "r1"}
    seen = echo.client.post("/invocations?inspect=1&q=%C3%BC", content=b"body", headers=headers).json()
    assert seen["contents"] == [["inspect", "1"], ["q", "ü"], ["data", "body"]]
    assert seen["properties"].items() >= {"a": "b", "c": "d", "requestId": "r1"}.items()


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


def test_a_handler_that_cannot_be_loaded_fails_the_model_and_says_where(tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "import_error", tmp_path / "model")
    server = Server(model, tmp_path / "server.log", program=("tests.live.failed_start", "slipway", "serve"))
    try:
        wait_until(lambda: server.ping() in (200, 500), START_SECONDS, about=server.log_text)
        assert server.ping() == 500
        state = server.client.get("/ping").json()["model"]
        assert state["status"] == "FAILED"
        assert server.client.post("/invocations", json={}).status_code == 503
        for text in ("model.py", "line 1", "no_such_package_anywhere"):
            assert text in state["reason"]
            server.wait_for_log(text)
        assert server.stop() == 1
    finally:
        server.stop()


def test_a_stop_lets_a_call_finish_and_leaves_no_process(tmp_path: Path) -> None:
    with serving_copy(HANDLERS / "slow", tmp_path, {"SERVING_DRAIN_TIMEOUT": "600"}) as server:
        workers = psutil.Process(server.process.pid).children(recursive=True)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(server.client.post, "/invocations", content=str(tmp_path / "go"))
            server.wait_for_metric("slipway_workers_busy", 1)
            os.kill(server.process.pid, 15)
            wait_until(lambda: server.ping() == 503)
            (tmp_path / "go").touch()
            assert call.result().text == "done"
        assert server.process.wait(SECONDS) == 0
        _, alive = psutil.wait_procs(workers, timeout=METRIC_SECONDS)
        assert workers
        assert not alive
