"""Explanations of calls on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.recorded_requests import RECORDED
from tests.live.server import Server, copy_model, hosted, write_model
from tests.live.small_model import MAX_MODEL_LEN
from tests.live.small_pooling_models import prepare_small_encoder
from tests.waiting import wait_until

EXPLAIN = {"x-slipway-explain": "1"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
LMI = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 2, "temperature": 0.7, "seed": 1, "typical_p": 0.9},
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", LMI),
    ("/invocations", {**LMI, "stream": True}),
    ("/invocations", {**LMI, "parameters": {"max_new_tokens": 2, "details": True, "response_format": RESPONSE_FORMAT}}),
    ("/invocations", {**CHAT, "max_tokens": 2, "top_p": 0.9}),
    (
        "/generate",
        {"inputs": "Once upon", "parameters": {"max_new_tokens": 2, "do_sample": True, "top_k": 5, "seed": 1}},
    ),
    ("/generate_stream", {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 2, "truncate": 2}}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "logprobs": 2, "frequency_penalty": 0.5}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "echo": True, "min_p": 0.1, "bad_words": ["time"]}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "logit_bias": {"5": 1.0}}),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 2, "temperature": 0.5}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream": True, "unknown": 1}),
    (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 2, "response_format": RESPONSE_FORMAT, "parallel_tool_calls": True},
    ),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "tools": TOOLS, "tool_choice": "none"}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ("/v1/messages", {"model": "model", **CHAT, "max_tokens": 2}),
    ("/v2/models/model/generate", {"text_input": "Once", "parameters": {"max_tokens": 2, "temperature": 0.5}}),
    ("/v1/generate", {"prompt": "Once", "max_tokens": 2, "presence_penalty": 0.5}),
    ("/invocations", {"inputs": ["Once", "upon"], "parameters": {"max_new_tokens": 2}}),
    ("/v1/completions", {"prompt": ["Once", "upon"], "max_tokens": 2, "unknown": 1}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "n": 2, "temperature": 1.0, "seed": 1, "priority": 3}),
    ("/generate", {"inputs": "Once", "parameters": {"max_new_tokens": 2, "do_sample": True, "details": True}}),
]
BEAMS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": "Once", "parameters": {"max_new_tokens": 2, "num_beams": 2}}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2, "use_beam_search": True, "n": 2}),
]


def counts(server: Server) -> list[str]:
    """Return the lines of the metrics that count prompts, tokens and calls of the model."""
    lines = server.client.get("/metrics").text.splitlines()
    names = ("slipway_prompt_tokens", "slipway_generated_tokens", "vllm:", "tgi_", "nv_inference", "slipway_engine")
    gone = ("process_", "_seconds")
    return [line for line in lines if line.startswith(names) and not any(part in line for part in gone)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, Any]) -> Iterator[tuple[Server, Path]]:
    """Start a server that records the requests that its engine gets."""
    directory = tmp_path_factory.mktemp("recorded")
    file = directory / "requests.jsonl"
    model = write_model(directory / "model", **small_options | {"rolling_batch": "lmi-dist"})
    program = ("tests.live.recorded_requests", "serve")
    with Server(model, directory / "server.log", {RECORDED: str(file)}, program=program) as server:
        yield server, file


@pytest.mark.slow
def test_an_explanation_has_what_the_engine_gets(recorded: tuple[Server, Path]) -> None:
    server, file = recorded
    for path, body in CALLS:
        before = file.read_text().splitlines()
        explained = server.explain(path, body)
        assert file.read_text().splitlines() == before, "nothing was sent to the engine"
        reply = server.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        requests = [json.loads(line) for line in file.read_text().splitlines()[len(before) :]]
        sent, told = requests[0], {name: found["value"] for name, found in explained["parameters"].items()}
        shown = [prompt["token_ids"] for prompt in explained["prompts"] for _ in range(told["n"])]
        assert shown == [request["token_ids"] for request in requests], path
        got = {name: value for name, value in sent["parameters"].items() if value not in (None, [], {})}
        if told["n"] > 1:  # Each sequence is a request, with a seed of its own.
            assert got.pop("n") == 1
            got.pop("seed")
        if explained["parameters"].get("seed") == {"value": None, "from": "random"}:
            assert got.pop("seed") is not None
        assert {name: told.get(name) for name in got} == got, (path, body)
        assert explained["priority"]["value"] == sent["priority"]


def test_nothing_is_generated_and_no_place_is_taken(server: Server) -> None:
    before = counts(server)
    for path, body in CALLS + BEAMS:
        found = server.explain(path, body)
        assert found["limits"]["free_places"] == found["limits"]["queue_places"], path
    assert counts(server) == before
    assert server.metric("slipway_engine_running") == server.metric("slipway_engine_waiting") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_prompt_is_the_one_that_vllm_reports(server: Server, path: str) -> None:
    body = {"max_tokens": 1, "return_token_ids": True} | (CHAT if "chat" in path else {"prompt": "Once upon"})
    (prompt,) = server.explain(path, body)["prompts"]
    (common,) = server.explain(path, {**body, "return_token_ids": None})["prompts"]
    reply = server.client.post(path, json=body).json()
    reported = reply["prompt_token_ids"] if "chat" in path else reply["choices"][0]["prompt_token_ids"]
    assert prompt["token_ids"] == common["token_ids"] == reported
    assert prompt["text"] == common["text"]
    assert prompt["tokens"] == reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"inputs": "a " * 70000}),
        ("/invocations", {**CHAT, "temperature": -1}),
        ("/generate", {"inputs": "a", "parameters": {"temperature": 0}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
        ("/v1/chat/completions", {**CHAT, "model": "no-such-model"}),
        ("/v1/chat/completions", {"messages": "Hello"}),
        ("/v1/responses", {"input": 1}),
    ],
)
def test_a_refusal_is_the_same_as_without_the_header(server: Server, path: str, body: dict[str, Any]) -> None:
    headers = {"x-request-id": "one"}
    refused = server.client.post(path, json=body, headers=headers)
    explained = server.client.post(path, json=body, headers=headers | EXPLAIN)
    assert refused.status_code >= 400
    assert (explained.status_code, explained.text) == (refused.status_code, refused.text)


@pytest.fixture(scope="module")
def overridden(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, Any]
) -> Iterator[Server]:
    override = {"temperature": 0.25, "max_new_tokens": 7, "top_k": 9}
    options = small_options | {"override_generation_config": json.dumps(override)}
    with hosted(host, write_model(tmp_path_factory.mktemp("overridden") / "model", **options)) as model:
        yield model


def test_the_origins_are_told_apart(overridden: Server) -> None:
    body = {**CHAT, "top_k": 9, "top_p": 0.5, "seed": 3, "unknown": 1}
    found = overridden.explain("/invocations", body, **{"x-vllm-priority": "2", "x-cache-salt": "mine"})
    common = overridden.explain("/invocations", {**CHAT, "top_p": 0.5})
    lmi = overridden.explain("/invocations", {"inputs": "a"})
    assert found["parameters"]["temperature"] == {"value": 0.25, "from": "option.override_generation_config"}
    assert found["parameters"]["max_tokens"] == {"value": 7, "from": "option.override_generation_config"}
    assert found["parameters"]["top_k"] == {"value": 9, "from": "body", "fields": ["top_k"]}
    assert found["parameters"]["top_p"] == {"value": 0.5, "from": "body", "fields": ["top_p"]}
    assert found["parameters"]["repetition_penalty"] == {"value": 1.0, "from": "default"}
    assert found["without_effect"] == ["unknown"]
    assert found["effect_unknown"] == ["messages"]
    assert found["priority"] == {"value": 2, "from": "header"}
    assert found["cache_salt"] == "header"
    assert common["parameters"]["temperature"] == found["parameters"]["temperature"]
    assert common["parameters"]["top_p"] == found["parameters"]["top_p"]
    # LMI's contract does not follow the model's own defaults.
    assert lmi["parameters"]["temperature"] == {"value": 0.0, "from": "default"}
    assert lmi["parameters"]["max_tokens"] == {"value": 30, "from": "default"}


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}])
def test_a_limit_that_the_context_cuts_is_told(server: Server, search: dict[str, int]) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1 << 20, **search}}
    found = server.explain("/invocations", body)
    (prompt,) = found["prompts"]
    assert prompt["new_tokens"] == MAX_MODEL_LEN - prompt["tokens"]
    parameters = server.explain("/v1/chat/completions", CHAT)["parameters"]
    assert parameters["max_tokens"]["from"] == "context"


def test_a_long_prompt_is_cut(server: Server) -> None:
    text = "one two three " * 9000
    found = server.explain("/invocations", {"inputs": text, "parameters": {"max_new_tokens": 3, "top_p": 0.5}})
    (prompt,) = found["prompts"]
    assert (prompt["characters"], len(prompt["text"])) == (len(text), 100_000)
    assert prompt["tokens"] > len(prompt["token_ids"]) == 10_000
    assert found["parameters"]["max_tokens"]["from"] == "body"
    assert found["parameters"]["top_p"]["from"] == "body"


def test_a_response_in_the_background_is_explained(overridden: Server) -> None:
    body = {"model": overridden.name, "input": "Hello", "background": True, "max_output_tokens": 2}
    found = overridden.explain("/v1/responses", {**body, "request_id": "resp_explained"})
    assert found["parameters"]["max_tokens"]["value"] == 2
    assert overridden.client.get("/v1/responses/resp_explained").status_code == 404
    assert overridden.metric("slipway_engine_running") == 0


def test_a_custom_handler_is_named_and_not_called(host: Server, tmp_path: Path) -> None:
    fixture = Path(__file__).parents[1] / "fixtures" / "handlers" / "echo"
    with hosted(host, copy_model(fixture, tmp_path / "model")) as model:
        found = model.explain("/invocations", {"inputs": "a"})
        own = {"x-amzn-sagemaker-custom-attributes": "explain=1"}
        answered = model.client.post("/invocations", json={"inputs": "a"}, headers=own)
        refused = model.client.post("/invocations", json={"inputs": "a"}, headers={"x-slipway-explain": "yes"})
    assert (answered.status_code, "because" in answered.text) == (200, False), "the attribute is the customer's"
    assert refused.status_code == 400
    assert "X-Slipway-Explain" in refused.text
    assert found["because"][-1] == "the model's own handler takes every body: model.py, function handle"
    assert found["prompts"] == []


def test_the_command_prints_json_and_takes_a_header_and_a_path(server: Server, tmp_path: Path) -> None:
    """docs/explain.md shows the table, and test_task_pages_live.py runs its command."""
    (body := tmp_path / "body.json").write_text(json.dumps(LMI))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "slipway", "explain", str(body), "--to", server.url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    # A busy machine may end one of the two searches for origins, but not all of them.
    wait_until(lambda: json.loads(run("--json").stdout) == server.explain("/invocations", LMI))
    routed = run("--json", "--header", "X-Amzn-SageMaker-Custom-Attributes: route=/generate")
    assert json.loads(routed.stdout)["contract"] == "tgi"
    refused = run("--path", "/v1/completions")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the server refuses the request (400)" in refused.stderr


def test_vectors_are_explained_whoever_makes_the_request(host: Server, tmp_path: Path) -> None:
    options = {"rolling_batch": "vllm", "kv_cache_memory_bytes": 16 << 20, "model_id": prepare_small_encoder()}
    with hosted(host, write_model(tmp_path / "model", **options)) as model:
        body = {"model": model.name, "input": ["a", "b c"]}
        ours = model.explain("/v1/embeddings", body)
        vllms = model.explain("/v1/embeddings", {**body, "unknown": 1})
        route = {"x-amzn-sagemaker-custom-attributes": "route=/embed"}
        tei = model.explain("/invocations", {"inputs": ["a", "b c"], "normalize": False}, **route)
        usage = model.client.post("/v1/embeddings", json=body).json()["usage"]
    ids = [[prompt["token_ids"] for prompt in found["prompts"]] for found in (ours, vllms, tei)]
    assert ids[0] == ids[1] == ids[2]
    assert sum(map(len, ids[0])) == usage["prompt_tokens"]
    assert ours["parameters"]["task"] == vllms["parameters"]["task"] == {"value": "embed", "from": "default"}
    assert "unknown" in vllms["without_effect"]
    assert tei["parameters"]["use_activation"] == {"value": False, "from": "body", "fields": ["normalize"]}


@pytest.mark.parametrize(("path", "body"), BEAMS)
def test_a_beam_search_is_explained(server: Server, path: str, body: dict[str, Any]) -> None:
    found = server.explain(path, body, **{"x-cache-salt": "mine"})
    assert found["because"][-1] == "a beam search: each step is requests for all copies"
    assert found["cache_salt"] == "header"
    assert found["parameters"]["beam_width"]["value"] == 2
    assert found["parameters"]["max_tokens"]["value"] == found["prompts"][0]["new_tokens"] == 2


def test_priority_and_salt_of_a_body_come_from_it(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 2, "priority": 3, "cache_salt": "mine"}
    found = server.explain("/v1/completions", body)
    assert found["priority"] == {"value": 3, "from": "body", "fields": ["priority"]}
    assert found["cache_salt"] == "body"
    assert not {"priority", "cache_salt"} & {*found["without_effect"]}


def test_a_body_that_another_contract_would_take_tells_nothing(server: Server) -> None:
    found = server.explain("/invocations", {**CHAT, "inputs": "a", "temperature": 0.5})
    assert found["effect_unknown"] == ["messages"]
    assert found["without_effect"] == ["inputs"]
    assert found["parameters"]["temperature"] == {"value": 0.5, "from": "body", "fields": ["temperature"]}
    assert found["parameters"]["top_p"]["from"] == "default"


def test_a_number_that_json_lacks_is_null(server: Server) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "vllm_xargs": {"a": 1e400}}'
    headers = EXPLAIN | {"content-type": "application/json"}
    reply = server.client.post("/v1/completions", content=body, headers=headers)
    if reply.status_code == 200:
        json.loads(reply.content, parse_constant=pytest.fail)
    else:
        assert reply.status_code == 400
