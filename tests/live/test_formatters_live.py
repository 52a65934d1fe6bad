"""A customer's formatters, and a customer's `handle`, around a real engine, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.lora import make_adapter
from tests.live.partly_held import ATTRIBUTES, FORM, NOT_HELD, PLACE
from tests.live.server import START_SECONDS, Server, copy_model, hosted, records, serving_copy

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATTERS = FIXTURES / "formatters"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def both(host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("both") / "model"
    with hosted(host, copy_model(FORMATTERS / "both", directory, **small_options)) as model:
        yield model


def completion(server: Server, **fields: object) -> dict[str, Any]:
    """Return the model's greedy answer to PROMPT on a route that no formatter changes."""
    body = {"model": server.name, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, **fields}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert choice["text"]
    return choice


def test_both_formatters_speak_the_customers_own_format(both: Server) -> None:
    response = both.client.post("/invocations", json={"question": PROMPT})
    text = completion(both, max_tokens=4)["text"]
    assert response.json() == {"custom_formatter_applied": text, "reason": "length", "tokens": 4}
    assert "content-type" not in response.headers


def test_a_formatted_stream_has_one_record_for_each_token(both: Server) -> None:
    response = both.client.post("/invocations", json={"question": PROMPT, "stream": True})
    records = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(record["custom_formatter_applied"] for record in records) == completion(both, max_tokens=4)["text"]
    assert [(record["first"], record["last"]) for record in records] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.slow
def test_errors_of_formatters_fail_their_own_request_alone(
    host: Server, tmp_path: Path, small_options: dict[str, object]
) -> None:
    model = copy_model(FORMATTERS / "failing", tmp_path / "model", **small_options)
    with hosted(host, model) as server:
        with ThreadPoolExecutor(8) as pool:
            good = [pool.submit(server.invoke, PROMPT, stream=True, max_new_tokens=200) for _ in range(4)]
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
        server.wait_for_log("KeyError: 'answer'")
        server.wait_for_metric("slipway_engine_running", 0)


CHAT = {"messages": [{"role": "user", "content": "Say yes"}], "max_tokens": 4, "temperature": 0}
PARTLY_HELD = {"max_new_tokens": 60, "response_format": FORM}
GREEDY = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "do_sample": False}}
COMPLETION = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}


def chat(server: Server) -> Any:
    """Return the model's answer to CHAT on a route that no formatter changes."""
    answer = server.client.post("/v1/chat/completions", json={**CHAT, "model": server.name})
    return answer.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def payload(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("payload") / "model"
    with hosted(host, copy_model(FORMATTERS / "payload", directory, async_mode="true", **small_options)) as model:
        yield model


@pytest.mark.parametrize("path", ["/invocations", "/predictions/{name}"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (GREEDY, "text_completion"),
        ({"inputPrompt": PROMPT, "parameters": GREEDY["parameters"]}, "text_completion"),
        (COMPLETION, "text_completion"),
        (CHAT, "chat.completion"),
        ({"ask": "Say yes", "max_tokens": 4, "temperature": 0}, "chat.completion"),
    ],
)
def test_formatters_of_the_asynchronous_mode_change_every_kind_of_body_and_answer(
    payload: Server, path: str, body: dict[str, object], kind: str
) -> None:
    response = payload.client.post(path.format(name=payload.name), json=body)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json"), response.text
    answer = response.json()
    assert (answer["object"], answer["model"], answer["processed_by"]) == (kind, payload.name, "payload")
    choice = answer["choices"][0]
    text = choice["message"]["content"] if kind == "chat.completion" else choice["text"]
    expected = chat(payload) if kind == "chat.completion" else completion(payload)["text"]
    assert text == expected


@pytest.mark.parametrize("body", [GREEDY, COMPLETION, CHAT])
def test_formatters_of_the_asynchronous_mode_get_each_event_of_a_stream(
    payload: Server, body: dict[str, object]
) -> None:
    whole = payload.client.post("/invocations", json=body).json()["choices"][0]
    response = payload.client.post("/invocations", json={**body, "stream": True})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/jsonlines")
    assert response.text.endswith("\ndata: [DONE]\n\n\n\n")
    chunks = records(response.text.replace("data: [DONE]", ""))
    assert {chunk["processed_by"] for chunk in chunks} == {"payload"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if "messages" in body:
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["message"]["content"]
    else:
        # vLLM joins tokens into one record if the engine is faster than the front end.
        assert "".join(choice["text"] for choice in choices) == completion(payload)["text"]
    if "inputs" in body:
        expected = completion(payload, logprobs=0, return_tokens_as_token_ids=True)["logprobs"]["tokens"]
        tokens = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
        assert tokens == expected, "details of tokens are there, as in LMI"


def test_a_handle_comes_before_the_engine_and_may_call_it(
    host: Server, tmp_path: Path, small_options: dict[str, object]
) -> None:
    options = {**small_options, "entryPoint": "djl_python.lmi_vllm.vllm_async_service", "rolling_batch": "disable"}
    model = copy_model(FIXTURES / "handlers" / "before_engine", tmp_path / "model", **options)
    with hosted(host, model) as server:

        def ask(**body: object) -> httpx.Response:
            return server.client.post("/invocations", json=body)

        own = ask(do="answer", inputs="Hi")
        assert own.text == '{"custom_handler_used": true, "inputs": "Hi"}\n'
        assert ask(do="stream", inputs="a b").text == '{"word": "a"}\n{"word": "b"}\n\n'
        choice = completion(server, logprobs=0)
        assert ask(**GREEDY).text == json.dumps({"generated_text": choice["text"]}, ensure_ascii=False) + "\n"
        chat = ask(**CHAT)
        assert (chat.json()["object"], chat.headers["content-type"]) == ("chat.completion", "application/json")
        stream = ask(**GREEDY, stream=True)
        assert [record["token"]["text"] for record in records(stream.text)] == choice["logprobs"]["tokens"]
        assert stream.text.endswith("}\n\n\n")
        assert stream.headers["content-type"] == "application/jsonlines"
        called = ask(do="call", **GREEDY, stream=False)
        assert "generated_text" in called.json()
        for body in ({**CHAT, "response_format": FORM}, {"do": "call", "inputs": "x", "parameters": PARTLY_HELD}):
            partly = ask(**body)
            assert (partly.status_code, partly.headers[NOT_HELD]) == (200, PLACE)
            assert partly.headers[ATTRIBUTES] == f"X-Slipway-Not-Held={PLACE}"
        wrapped = records(ask(do="wrap", **GREEDY, stream=True).text)
        assert wrapped[0] == {"custom_handler_used": True}
        assert len(wrapped) == 4
        failed = ask(do="fail", inputs="x")
        assert (failed.status_code, failed.text) == (
            424,
            '{"error":"Custom handler failed: Custom handler intentional failure","code":424}',
        )
        refused = ask(inputs="x", parameters={"max_new_tokens": -1})
        assert (refused.status_code, refused.json()["code"]) == (424, 424)
        long = {"prompt": PROMPT, "max_tokens": 65000, "ignore_eos": True, "stream": True}
        aborted = server.metric("slipway_generations_aborted_total")
        with server.client.stream("POST", "/invocations", json=long) as left:
            next(left.iter_lines())
        server.wait_for_metric("slipway_generations_aborted_total", aborted + 1)
        server.wait_for_metric("slipway_engine_running", 0)
        models = server.client.get("/v1/models").json()
        assert models["data"], "the engine's other routes are served, too"


@pytest.mark.slow
def test_a_handle_with_a_model_of_its_own_loads_the_engine_when_it_first_calls_it(
    host: Server, tmp_path: Path, small_options: dict[str, object]
) -> None:
    options = {**small_options, "entryPoint": "djl_python.lmi_vllm.vllm_async_service"}
    model = copy_model(FIXTURES / "handlers" / "before_engine", tmp_path / "model", **options)
    with (model / "serving.properties").open("a") as file:
        file.write("own_model=yes\n")
    with hosted(host, model) as server:
        assert server.client.post("/invocations", json={"do": "answer", "inputs": "Hi"}).status_code == 200
        assert server.client.post("/v1/completions", json={**COMPLETION, "model": server.name}).status_code == 501
        engine_metric = f'slipway_engine_running{{model="{server.name}"}}'
        assert engine_metric not in server.client.get("/metrics").text
        called = server.client.post("/invocations", json={"do": "call", **GREEDY})
        assert "generated_text" in called.json()
        assert server.ping() == 200


@pytest.mark.slow
def test_each_adapter_brings_its_own_formatters_in_the_asynchronous_mode(
    host: Server, tmp_path: Path, small_options: dict[str, object]
) -> None:
    lora = {"enable_lora": "true", "max_loras": 2, "max_lora_rank": 8, "async_mode": "true"}
    model = copy_model(FORMATTERS / "payload", tmp_path / "model", **lora, **small_options)
    code = (model / "model.py").read_text()
    for seed, name in enumerate(("red", "blue"), start=1):
        adapter = make_adapter(model / "adapters" / name, Path(str(small_options["model_id"])), seed, scale=0.9)
        (adapter / "model.py").write_text(code.replace("'payload'", f"'{name}'").replace('"payload"', f'"{name}"'))
    with hosted(host, model) as server:

        def ask(adapter: str, stream: bool) -> tuple[str, set[str]]:
            """Return the text, and the marks of the formatters that it went through."""
            body = {"ask": "Say yes", "max_tokens": 12, "temperature": 0, "adapters": adapter, "stream": stream}
            response = server.client.post("/invocations", json=body)
            assert response.status_code == 200, response.text
            answers = records(response.text.replace("data: [DONE]", ""))
            choices = [choice for answer in answers for choice in answer["choices"]]
            texts = [choice["delta" if stream else "message"].get("content") or "" for choice in choices]
            return "".join(texts), {answer["processed_by"] for answer in answers}

        whole = {name: ask(name, stream=False) for name in ("", "red", "blue")}
        assert {name: marks for name, (_, marks) in whole.items()} == {
            "": {"payload"},
            "red": {"red"},
            "blue": {"blue"},
        }
        assert len({text for text, _ in whole.values()}) == 3, "an adapter says what the model says"
        assert {name: ask(name, stream=True) for name in whole} == whole
        assert server.client.delete(f"/models/{server.name}/adapters/red").status_code == 200
        body = {"ask": "Say yes", "max_tokens": 4, "adapters": "red"}
        assert server.client.post("/invocations", json=body).status_code == 424
        assert ask("blue", stream=False) == whole["blue"]


def test_formatters_that_cannot_be_imported_fail_the_load(tmp_path: Path, small_options: dict[str, object]) -> None:
    fixture = tmp_path / "broken"
    fixture.mkdir()
    (fixture / "model.py").write_text("import os\nimport no_such_package\n")
    server = serving_copy(fixture, tmp_path, **small_options)
    try:
        assert server.process.wait(START_SECONDS) == 1
        server.wait_for_log("model.py cannot be imported: ModuleNotFoundError: No module named 'no_such_package'")
        server.wait_for_log("(model.py, line 2)")
    finally:
        server.stop()
