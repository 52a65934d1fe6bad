"""`slipway replay` with a real server: its own capture, the recorded suites, and a SageMaker endpoint."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import Server, write_model
from tests.live.test_local_endpoint_live import NAME, environment, local
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SUITES = sorted((ROOT / "examples" / "replay").glob("*.jsonl"))
GREEDY: dict[str, Any] = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5, "do_sample": False}}
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 5,
    "temperature": 0,
}
COMPLETION: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, "details": True}
# Each call of the same request gets another text, and may get another number of tokens.
SAMPLED_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": "Once", "parameters": SAMPLED}),
    ("/invocations", {"inputs": "Once", "parameters": SAMPLED, "stream": True}),
    ("/invocations", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}),
    ("/generate", {"inputs": "Once", "parameters": SAMPLED | {"top_n_tokens": 2, "decoder_input_details": True}}),
    ("/generate", {"inputs": "Once", "parameters": SAMPLED | {"best_of": 2}}),
    ("/generate_stream", {"inputs": "Once", "parameters": SAMPLED}),
    ("/v1/completions", {"model": "model", "prompt": "Once", "max_tokens": 8, "logprobs": 2}),
    ("/v1/completions", {"model": "model", "prompt": "Once", "max_tokens": 8, "logprobs": 2, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
    ("/v1/messages", {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
    ("/v1/responses", {"model": "model", "input": "Hi", "max_output_tokens": 8, "stream": True}),
    ("/v2/models/model/generate_stream", {"text_input": "Once", "max_tokens": 8, "temperature": 1, "stream": True}),
    ("/v1/generate_stream", {"prompt": "Once", "max_tokens": 8, "temperature": 1}),
]
# A request of each contract, whole and streamed.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", GREEDY),
    ("/invocations", GREEDY | {"stream": True}),
    ("/predictions/model", GREEDY),
    ("/invocations", {name: value for name, value in CHAT.items() if name != "model"} | {"stream": True}),
    ("/generate", GREEDY),
    ("/generate", {"inputs": ""}),
    ("/generate_stream", GREEDY | {"parameters": {**GREEDY["parameters"], "details": True}}),
    ("/", GREEDY),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", COMPLETION | {"model": "model", "stream": True}),
    (
        "/v1/messages",
        {"model": "model", "messages": CHAT["messages"], "max_tokens": 5, "temperature": 0, "stream": True},
    ),
    ("/v2/models/model/generate", {"text_input": "Once", "max_tokens": 5, "temperature": 0}),
    ("/v2/models/model/generate_stream", {"text_input": "Once", "max_tokens": 5, "temperature": 0, "stream": True}),
    ("/v1/generate", COMPLETION),
    ("/v1/generate_stream", COMPLETION),
    ("/tokenize", {"inputs": "Once upon a time"}),
]


@dataclass
class Recording:
    """A server that records its requests."""

    server: Server
    captured: Path

    def records(self) -> list[dict[str, Any]]:
        lines = [line for file in self.captured.rglob("*.jsonl") for line in file.read_text().splitlines()]
        return [record for line in lines if "id" in (record := json.loads(line))]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Recording]:
    directory = tmp_path_factory.mktemp("recording")
    model = write_model(directory / "model", **small_options)
    captured = directory / "captured"
    arguments = ("--capture", str(captured), "--local-endpoint", NAME)
    with Server(model, directory / "server.log", arguments=arguments) as server:
        yield Recording(server, captured)


@pytest.fixture(scope="module")
def capture(recording: Recording) -> Path:
    """Send a request of each contract, and return a copy of the server's capture of these requests."""
    for number, (path, body) in enumerate(REQUESTS):
        headers = {"x-auth-token": "secret", "x-request-id": f"mine-{number}"}
        reply = recording.server.client.post(f"{path}?code=secret", json=body, headers=headers)
        assert reply.status_code == (422 if body.get("inputs") == "" else 200), reply.text

    def own() -> list[dict[str, Any]]:  # Other tests call the server, too.
        return [record for record in recording.records() if record["id"].startswith("mine-")]

    wait_until(lambda: len(own()) >= len(REQUESTS))
    copy = recording.captured.parent / "copy.jsonl"
    copy.write_text("".join(json.dumps(record) + "\n" for record in own()))
    return copy


def replay(source: Path, output: Path, *arguments: str, **variables: str) -> tuple[int, str, dict[str, Any]]:
    """Run the command, and return its exit code, its output and its report."""
    command = [sys.executable, "-m", "slipway", "replay", str(source), "--output", str(output), *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False)
    report = output / "report.json"
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.exists() else {}


def test_the_capture_has_each_request_whole_and_no_credential(recording: Recording, capture: Path) -> None:
    records = {(found["path"], found["body"]): found for found in map(json.loads, capture.read_text().splitlines())}
    assert len(records) == len(REQUESTS)
    assert "secret" not in capture.read_text()
    for path, body in REQUESTS:
        found = records[path, httpx.Request("POST", "http://x", json=body).content.decode()]
        assert found["answer"]["complete"] is True
        again = recording.server.client.post(path, json=body)
        assert found["answer"]["status"] == again.status_code
        assert found["answer"]["headers"].get("content-type") == again.headers.get("content-type")
        assert len(found["answer"]["body"]) > 0
        if path == "/generate_stream":
            assert found["answer"]["body"] == again.text
    modes = {stat.S_IMODE(file.stat().st_mode) for file in recording.captured.rglob("*.jsonl")}
    assert modes == {0o600}


def test_a_call_of_the_local_endpoint_is_captured_once_and_in_sagemakers_form(recording: Recording) -> None:
    for path, name in ((f"/endpoints/{NAME}/invocations", "endpoint"), ("/invocations", "direct")):
        headers = {"X-Amzn-SageMaker-Inference-Id": name}
        assert recording.server.client.post(path, json=GREEDY, headers=headers).status_code == 200

    def lines(name: str) -> list[dict[str, Any]]:
        found = [line for file in recording.captured.rglob("*.jsonl") for line in file.read_text().splitlines()]
        return [json.loads(line) for line in found if f'"{name}"' in line]

    wait_until(lambda: lines("endpoint") and lines("direct"))
    assert [record["eventMetadata"]["inferenceId"] for record in lines("endpoint")] == ["endpoint"]
    assert [record["path"] for record in lines("direct")] == ["/invocations"]


def test_a_capture_against_two_equal_servers_and_its_own_answers_has_no_difference(
    recording: Recording, capture: Path, tmp_path: Path
) -> None:
    url = recording.server.url
    other = url.replace("127.0.0.1", "localhost")
    one_by_one = ("--concurrency", "1")
    for name, arguments in (("both", ("--against", other)), ("recorded", ("--recorded",))):
        code, output, report = replay(capture, tmp_path / name, "--to", url, *one_by_one, *arguments)
        assert report["differences"] == [], output
        assert (code, report["equal"]) == (0, len(REQUESTS))


@pytest.mark.slow
def test_sampled_answers_of_two_equal_servers_have_no_difference_but_their_texts(
    recording: Recording, tmp_path: Path
) -> None:
    source = tmp_path / "sampled.jsonl"
    source.write_text("".join(json.dumps({"path": path, "body": body}) + "\n" for path, body in SAMPLED_REQUESTS * 3))
    url = recording.server.url
    code, output, report = replay(source, tmp_path / "out", "--to", url, "--against", url)
    assert report["differences"] == [], output
    assert (code, report["equal"]) == (0, 3 * len(SAMPLED_REQUESTS))
    assert report["text_similarity"]["mean"] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.stem)
def test_every_difference_of_a_documented_example_is_explained(
    recording: Recording, suite: Path, tmp_path: Path
) -> None:
    arguments = ("--to", recording.server.url, "--recorded", "--other-model")
    code, output, report = replay(suite, tmp_path / "out", *arguments)
    unexplained = [group for group in report["differences"] if group["explanation"] is None]
    assert unexplained == [], output
    assert code == 0
    assert report["compared"] == report["requests"] > 5


@pytest.mark.slow
def test_a_sagemaker_endpoint_is_asked_for_every_contract(recording: Recording, capture: Path, tmp_path: Path) -> None:
    captured = tmp_path / "captured"
    with local(recording.server.url, "--capture", str(captured)) as runtime:
        variables = environment(runtime)
        code, output, report = replay(
            capture, tmp_path / "out", "--to", "my-endpoint", "--against", recording.server.url, **variables
        )
        assert report["differences"] == [], output
        assert code == 0
        count = len(REQUESTS) - 1  # SageMaker does not capture calls that fail.
        wait_until(lambda: sum(file.read_text().count("\n") for file in captured.rglob("*.jsonl")) >= count)
        code, output, report = replay(
            captured, tmp_path / "again", "--to", "my-endpoint", "--recorded", "--concurrency", "1", **variables
        )
    assert report["differences"] == [], output
    assert code == 0
    assert report["compared"] == count
