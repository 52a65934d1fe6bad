"""A server that requires API keys. Each contract's clients call it, both with a key in their usual place and without a
key.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import botocore.exceptions
import huggingface_hub.errors
import openai
import pytest
from huggingface_hub import InferenceClient
from text_generation import Client
from text_generation.errors import UnknownError

from tests.live.server import START_SECONDS, Server, write_model
from tests.runtime_client import runtime_at

KEY, FROM_FILE = "sk-live,first", "sk-live-from-a-file"
BEARER = {"authorization": f"Bearer {KEY}"}
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]

SHOWING = """
import os
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    return Output().add_as_json({"environment": dict(os.environ), "headers": dict(inputs.get_properties())})
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def asking(directory: Path, small_options: dict[str, object]) -> Iterator[Server]:
    """A server with vLLM's own setting for a key, more keys in a file, and a local endpoint."""
    (directory / "keys").write_text(f"# of another team\n{FROM_FILE}\n")
    model = write_model(directory / "model", enable_prompt_tokens_details="true", **small_options)
    environment = {"VLLM_API_KEY": KEY, "SERVING_API_KEYS_FILE": str(directory / "keys")}
    arguments = ("--local-endpoint", "my-endpoint")
    with Server(model, directory / "server.log", environment, arguments=arguments) as running:
        yield running


@pytest.mark.parametrize("key", [KEY, FROM_FILE], ids=["of the variable", "of the file"])
def test_openais_client(asking: Server, key: str) -> None:
    arguments: dict[str, Any] = {"model": "model", "max_tokens": 4, "temperature": 0.0}
    with openai.OpenAI(base_url=f"{asking.url}/v1", api_key=key, max_retries=0) as client:
        whole = client.completions.create(prompt="a", **arguments).choices[0].text
        assert "".join(e.choices[0].text for e in client.completions.create(prompt="a", stream=True, **arguments))
        assert whole
        assert client.models.list().data[0].id == "model"
    with openai.OpenAI(base_url=f"{asking.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        for stream in (False, True):
            with pytest.raises(openai.AuthenticationError) as refused:
                stranger.completions.create(prompt="a", stream=stream, **arguments)
            assert refused.value.body == "Unauthorized"
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_anthropics_client(asking: Server) -> None:
    arguments: dict[str, Any] = {"model": "model", "max_tokens": 4, "messages": MESSAGES}
    stranger = anthropic.Anthropic(base_url=asking.url, api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**arguments)
    with anthropic.Anthropic(base_url=asking.url, api_key=KEY, max_retries=0) as client:
        assert client.messages.create(**arguments).usage.output_tokens
        with client.messages.stream(**arguments) as stream:
            assert stream.get_final_message().usage.output_tokens


def test_the_hubs_client_and_tgis(asking: Server) -> None:
    client = InferenceClient(model=asking.url, token=KEY, timeout=120)
    assert client.text_generation("a", max_new_tokens=4, return_full_text=False)
    assert list(client.text_generation("a", max_new_tokens=4, stream=True))
    stranger = InferenceClient(model=asking.url, token="sk-wrong", timeout=120)
    for stream in (False, True):
        with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="401"):
            list(stranger.text_generation("a", max_new_tokens=4, stream=stream))
    assert Client(asking.url, headers={"Authorization": f"Bearer {KEY}"}).generate("a", max_new_tokens=4).details
    with pytest.raises((UnknownError, ValueError)):
        Client(asking.url).generate("a", max_new_tokens=4)


def test_boto3_on_the_local_endpoint(asking: Server) -> None:
    call = {
        "EndpointName": "my-endpoint",
        "ContentType": "application/json",
        "Body": json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 4}}),
    }
    knowing, stranger = runtime_at(asking.url), runtime_at(asking.url)
    knowing.meta.events.register("before-sign", lambda request, **_: request.headers.add_header("x-api-key", KEY))
    assert json.loads(knowing.invoke_endpoint(**call)["Body"].read())["generated_text"]
    events = knowing.invoke_endpoint_with_response_stream(**call)["Body"]
    assert b"".join(event["PayloadPart"]["Bytes"] for event in events)
    with pytest.raises(botocore.exceptions.ClientError) as refused:
        stranger.invoke_endpoint(**call)
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 401
    with openai.OpenAI(base_url=f"{asking.url}/endpoints/my-endpoint/openai/v1", api_key=KEY) as through:
        assert through.completions.create(model="", prompt="a", max_tokens=4).choices[0].text


CALLS: list[tuple[str, dict[str, object]]] = [
    ("/invocations", {"inputs": "a", "parameters": {"max_new_tokens": 4}}),
    ("/invocations", {"inputs": "a", "parameters": {"max_new_tokens": 4}, "stream": True}),
    ("/v2/models/model/generate", {"text_input": "a", "max_tokens": 4}),
    ("/v2/models/model/generate_stream", {"text_input": "a", "max_tokens": 4, "stream": True}),
    ("/v1/generate", {"prompt": "a", "max_tokens": 4}),
    ("/v1/generate_stream", {"prompt": "a", "max_tokens": 4}),
]


@pytest.mark.parametrize(("path", "document"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_other_contract_takes_both_headers(asking: Server, path: str, document: dict[str, object]) -> None:
    assert asking.client.post(path, json=document).status_code == 401
    for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
        with asking.client.stream("POST", path, json=document, headers=headers) as reply:
            assert reply.status_code == 200
            assert reply.read()


# Each prompt is longer than a block of the KV cache.
def _long_prompt(start: str) -> str:
    return start + ", and so on" * 100


_WARMING: list[tuple[str, Any]] = [
    ("/invocations", lambda prompt: {"inputs": prompt, "parameters": {"max_new_tokens": 1}}),
    ("/generate", lambda prompt: {"inputs": prompt, "parameters": {"max_new_tokens": 1}}),
    ("/v2/models/model/generate", lambda prompt: {"text_input": prompt, "max_tokens": 1}),
    ("/v1/generate", lambda prompt: {"prompt": prompt, "max_tokens": 1}),
    ("/v1/completions", lambda prompt: {"prompt": prompt, "max_tokens": 1}),
]


def _cached(server: Server, prompt: str, key: str, **fields: Any) -> int:
    """Return the number of the prompt's tokens that a call with this key finds in the KV cache."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        usage = client.completions.create(model="model", prompt=prompt, max_tokens=1, extra_body=fields).usage
    assert usage is not None
    return (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details else 0


@pytest.mark.parametrize(("path", "document"), _WARMING, ids=lambda value: value if isinstance(value, str) else "")
def test_keys_share_no_cached_prompts(asking: Server, path: str, document: Any) -> None:
    prompt = _long_prompt(f"Once for {path}")
    assert asking.client.post(path, json=document(prompt), headers=BEARER).status_code == 200
    assert _cached(asking, prompt, FROM_FILE) == 0
    assert _cached(asking, prompt, KEY) > 0


@pytest.mark.parametrize(("path", "document"), _WARMING, ids=lambda value: value if isinstance(value, str) else "")
def test_the_salt_of_a_request_goes_before_that_of_its_key(asking: Server, path: str, document: Any) -> None:
    prompt = _long_prompt(f"Salted for {path}")
    headers = BEARER | {"x-cache-salt": "team"}
    assert asking.client.post(path, json=document(prompt), headers=headers).status_code == 200
    assert _cached(asking, prompt, KEY) == 0
    assert _cached(asking, prompt, FROM_FILE, cache_salt="team") > 0


def test_probes_need_no_key_and_what_tells_of_the_server_does(asking: Server) -> None:
    probes = ("/ping", "/health", "/", "/liveness", "/readiness", "/v2/health/live", "/v2/health/ready", "/console")
    for path in probes:
        assert asking.client.get(path).status_code == 200, path
    for path in ("/metrics", "/openapi.json", "/docs", "/console/state", "/models", "/adapters", "/v1/models", "/info"):
        assert asking.client.get(path).status_code == 401, path
    assert asking.client.get("/metrics", headers=BEARER).status_code == 200


def test_a_refusal_leaves_the_connection_to_the_next_call(asking: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", asking.port, timeout=60)
    try:
        body = json.dumps({"prompt": "a", "max_tokens": 4}).encode()
        headers = {"content-type": "application/json"}
        statuses = []
        connection.connect()
        socket = connection.sock
        for more in ({}, BEARER, {"x-api-key": "sk-wrong"}, BEARER):
            connection.request("POST", "/v1/completions", body, headers | more)
            reply = connection.getresponse()
            reply.read()
            statuses.append(reply.status)
        assert statuses == [401, 200, 401, 200]
        assert connection.sock is socket
    finally:
        connection.close()


def test_curl_without_a_key_sends_no_large_body(asking: Server, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b'{"inputs": "' + b"a" * (32 << 20) + b'"}')
    command = ["curl", "-sS", "-H", "Expect: 100-continue", "--expect100-timeout", "100", "--data-binary", f"@{large}"]
    done = subprocess.run(
        [*command, f"{asking.url}/invocations", "-w", "%{http_code} %{size_upload}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    status, sent = done.stdout.rpartition("}\n")[2].split()
    assert status == "401"
    assert int(sent) < large.stat().st_size


@pytest.mark.parametrize("where", ["environment", "headers"])
def test_no_handler_gets_a_key_and_no_log_has_one(asking: Server, directory: Path, where: str) -> None:
    model = directory / where / "model"
    model.mkdir(parents=True)
    (model / "model.py").write_text(SHOWING)
    query = {"url": str(model), "model_name": where, "synchronous": "true"}
    assert asking.client.post("/models", params=query).status_code == 401
    assert asking.client.post("/models", params=query, headers=BEARER).status_code == 200
    try:
        headers = {**BEARER, "x-mine": "1"}
        shown = asking.client.post(f"/predictions/{where}", content=b"a", headers=headers)
        assert shown.status_code == 200
        assert shown.json()[where]
        assert "sk-live" not in shown.text
    finally:
        asking.client.delete(f"/models/{where}", headers=BEARER)
    for process in asking.children():
        assert "sk-live" not in str(process.environ())
    assert "sk-live" not in asking.log_text()
    asking.wait_for_log("callers need one of 2 API keys")


@pytest.mark.slow
def test_keys_that_are_missing_end_the_start(directory: Path) -> None:
    model = directory / "echo"
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "handlers" / "echo", model)
    server = Server(model, directory / "refused.log", {"SERVING_API_KEYS_FILE": str(directory / "missing")})
    try:
        assert server.process.wait(START_SECONDS) == 2
        assert "SERVING_API_KEYS_FILE" in server.log_text()
        assert "No such file" in server.log_text()
    finally:
        server.stop()


def test_an_explanation_needs_a_key(asking: Server) -> None:
    for headers in ({"x-slipway-explain": "1"}, {"x-amzn-sagemaker-custom-attributes": "explain=1"}):
        reply = asking.client.post("/invocations", json={"inputs": "a"}, headers=headers)
        assert (reply.status_code, "prompts" in reply.text) == (401, False)
        given = headers | {"authorization": f"Bearer {KEY}"}
        explained = asking.client.post("/invocations", json={"inputs": "a"}, headers=given).json()
        assert explained["cache_salt"] == "key"
        assert KEY not in str(explained)
