"""A customer's formatters around a real engine, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.server import Server, copy_model, hosted, start_copy

FORMATTERS = Path(__file__).parents[1] / "fixtures" / "formatters"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def both(host: Server, tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("both") / "model"
    with hosted(host, copy_model(FORMATTERS / "both", directory, rolling_batch="vllm", **engine_options)) as model:
        yield model


def test_both_formatters_speak_the_customers_own_format(both: Server) -> None:
    response = both.client.post("/invocations", json={"question": PROMPT})
    assert response.json() == {"custom_formatter_applied": " Paris.\n\n", "reason": "length", "tokens": 4}
    assert "content-type" not in response.headers


def test_a_formatted_stream_has_one_record_for_each_token(both: Server) -> None:
    response = both.client.post("/invocations", json={"question": PROMPT, "stream": True})
    records = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(record["custom_formatter_applied"] for record in records) == " Paris.\n\n"
    assert [(record["first"], record["last"]) for record in records] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_a_request_that_the_input_formatter_cannot_read_is_refused(both: Server) -> None:
    response = both.client.post("/invocations", json={"inputs": "x"})
    assert response.status_code == 424
    assert response.json() == {"error": "Custom formatter failed: 'question'", "code": 424}


def test_formatted_requests_do_not_mix(both: Server) -> None:
    def ask(number: int) -> str:
        body = {"question": f"Count: {number} {number + 1}", "length": 3 + number % 4}
        text: str = both.client.post("/invocations", json=body).text
        return text

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_an_older_formatter_gets_tokens_one_by_one(
    host: Server, tmp_path: Path, engine_options: dict[str, object]
) -> None:
    model = copy_model(FORMATTERS / "older", tmp_path / "model", rolling_batch="vllm", **engine_options)
    with hosted(host, model) as server:
        body = server.invoke(PROMPT, max_new_tokens=3, details=True).text
        assert body == "< Paris><.><\n>| Paris.\n|length"
        assert server.invoke(PROMPT, max_new_tokens=3).text == "< Paris><.><\n>| Paris.\n|None"


def test_a_formatter_may_be_named_in_the_settings(
    host: Server, tmp_path: Path, engine_options: dict[str, object]
) -> None:
    options = {**engine_options, "rolling_batch": "vllm", "output_formatter": "shout"}
    with hosted(host, copy_model(FORMATTERS / "named", tmp_path / "model", **options)) as server:
        assert server.invoke(PROMPT, max_new_tokens=3).text == " PARIS.\n"
        asked = server.invoke(PROMPT, max_new_tokens=3, output_formatter="json")
        assert asked.json() == {"generated_text": " Paris.\n"}


def test_errors_of_formatters_fail_their_own_request_alone(
    host: Server, tmp_path: Path, engine_options: dict[str, object]
) -> None:
    model = copy_model(FORMATTERS / "failing", tmp_path / "model", rolling_batch="vllm", **engine_options)
    with hosted(host, model) as server:
        with ThreadPoolExecutor(8) as pool:
            good = [pool.submit(server.invoke, PROMPT, stream=True, max_new_tokens=20) for _ in range(4)]
            unread = pool.submit(server.invoke, "read this")
            unwritten = pool.submit(server.client.post, "/invocations", json={"inputs": "write this"})
            midway = pool.submit(
                server.client.post, "/invocations", json={"inputs": "write this", "parameters": {"stream": True}}
            )
        assert unread.result().status_code == 424
        assert unread.result().json()["error"] == "Custom formatter failed: no such question"
        for response in (unwritten.result(), midway.result()):
            assert response.text.endswith('{"error":"Custom formatter failed: \\u0027answer\\u0027","code":424}')
        assert len({future.result().text for future in good}) == 1
        assert good[0].result().status_code == 200
        assert server.ping() == 200
        assert "Traceback" not in midway.result().text
        assert "KeyError: 'answer'" in server.log_text()
        server.wait_for_metric("slipway_engine_running", 0)


def test_a_formatter_that_hangs_fails_its_request_and_stops_nothing_else(
    host: Server, tmp_path: Path, engine_options: dict[str, object]
) -> None:
    model = copy_model(FORMATTERS / "hanging", tmp_path / "model", predict_timeout=6, **engine_options)
    with hosted(host, model) as server, ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(server.invoke, "hang here")
        assert server.ping() == 200
        assert stuck.result().status_code == 424
        assert "did not return within predict_timeout" in stuck.result().json()["error"]
        started = time.monotonic()
        assert server.invoke(PROMPT, max_new_tokens=3).text == " Paris.\n"
        assert time.monotonic() - started < 6, "it waited for what is left of the request that had hung"


def test_formatters_that_cannot_be_imported_fail_the_load(tmp_path: Path, engine_options: dict[str, object]) -> None:
    fixture = tmp_path / "broken"
    fixture.mkdir()
    (fixture / "model.py").write_text("import os\nimport no_such_package\n")
    server = start_copy(fixture, tmp_path, **engine_options)
    try:
        assert server.process.wait(60) == 1
        assert (
            "model.py cannot be imported: ModuleNotFoundError: No module named 'no_such_package'" in server.log_text()
        )
        assert "(model.py, line 2)" in server.log_text()
    finally:
        server.stop()
