"""Asynchronous calls and data capture of the local endpoint: real clients, the real engine, S3's stand-in."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import boto3
import httpx
import pytest
from openai import OpenAI

from tests.engine_arguments import ANY_CORE
from tests.live.server import START_SECONDS, Server, free_port
from tests.live.test_local_endpoint_live import NAME, environment, local
from tests.runtime_client import runtime_at
from tests.stand_ins.s3 import BUCKET, CREDENTIALS, moto, put
from tests.waiting import wait_until

JSON = "application/json"
INPUT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 5}}
MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]


class Objects(Protocol):
    """The operations of S3 that the tests use."""

    def put(self, key: str, body: bytes) -> str: ...

    def get(self, url: str) -> bytes | None: ...


@dataclass
class Folder:
    """A folder that stands for S3."""

    root: Path

    def put(self, key: str, body: bytes) -> str:
        path = self.root / BUCKET / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        return f"s3://{BUCKET}/{key}"

    def get(self, url: str) -> bytes | None:
        path = self.root / url.removeprefix("s3://")
        return path.read_bytes() if path.exists() else None


@dataclass
class S3:
    """S3's stand-in."""

    address: str

    def put(self, key: str, body: bytes) -> str:
        put(self.address, {key: body})
        return f"s3://{BUCKET}/{key}"

    def get(self, url: str) -> bytes | None:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        with contextlib.closing(
            boto3.client(
                "s3",
                endpoint_url=self.address,
                region_name="us-east-1",
                aws_access_key_id="testing",
                aws_secret_access_key="testing",
            )
        ) as client:
            try:
                return client.get_object(Bucket=bucket, Key=key)["Body"].read()
            except (client.exceptions.NoSuchKey, client.exceptions.NoSuchBucket):
                return None


@dataclass
class Endpoint:
    """A running local endpoint."""

    url: str
    objects: Objects
    captured: Path  # The directory of `slipway local`'s records. Other tests check the records of `slipway serve`.

    def invoke(self, **parameters: Any) -> Any:
        with contextlib.closing(runtime_at(self.url)) as client:
            return client.invoke_endpoint_async(EndpointName=NAME, ContentType=JSON, **parameters)

    def result(self, accepted: Any) -> tuple[bytes | None, bytes | None]:
        """Return the answer and the failure. One of them is None."""
        places = accepted["OutputLocation"], accepted["FailureLocation"]
        found: list[tuple[bytes | None, bytes | None]] = []

        def is_there() -> bool:
            found[:] = [(self.objects.get(places[0]), self.objects.get(places[1]))]
            return found[0] != (None, None)

        wait_until(is_there)
        return found[0]

    def record(self, inference_id: str) -> dict[str, Any]:
        """Return the captured record of a call."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            lines = [line for file in self.captured.rglob("*.jsonl") for line in file.read_text().splitlines()]
            found[:] = [record for line in lines if inference_id in line and (record := json.loads(line))]
            return bool(found)

        wait_until(is_there)
        return found[0]


@pytest.fixture(scope="module", params=["serve", "local"])
def endpoint(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    """The endpoint: the container itself with a folder, or `slipway local` in front of it with S3's stand-in."""
    if request.param == "serve":
        directory = server.log.parent
        yield Endpoint(server.url, Folder(directory / "s3"), directory)
        return
    captured = tmp_path_factory.mktemp("captured")
    with moto() as address:
        variables = CREDENTIALS | {"AWS_ENDPOINT_URL_S3": address}
        with local(server.url, "--capture", str(captured), variables=variables) as url:
            yield Endpoint(url, S3(address), captured)


def test_boto3_calls_asynchronously_with_a_body_or_an_object(server: Server, endpoint: Endpoint) -> None:
    body = json.dumps(INPUT).encode()
    expected = server.client.post("/invocations", content=body, headers={"content-type": JSON}).json()
    source = endpoint.objects.put("in/a.json", body)
    for place in ({"Body": body}, {"InputLocation": source}):
        accepted = endpoint.invoke(**place)
        assert accepted["ResponseMetadata"]["HTTPStatusCode"] == 202
        assert accepted["OutputLocation"].endswith(f"/{accepted['InferenceId']}.out")
        answer, failure = endpoint.result(accepted)
        assert failure is None
        assert json.loads(answer or b"") == expected


def test_slipway_invoke_calls_asynchronously(endpoint: Endpoint) -> None:
    source = endpoint.objects.put("in/b.json", json.dumps(INPUT).encode())
    finished = subprocess.run(
        [sys.executable, "-m", "slipway", "invoke", NAME, "--input-location", source],
        env=os.environ | environment(endpoint.url),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    place = finished.stdout.strip()
    wait_until(lambda: endpoint.objects.get(place) is not None)
    assert json.loads(endpoint.objects.get(place) or b"")["generated_text"]


@pytest.mark.parametrize("endpoint", ["local"], indirect=True)
def test_calls_of_every_kind_are_captured_with_their_whole_output(endpoint: Endpoint) -> None:
    name = type(endpoint.objects).__name__
    body = json.dumps(INPUT)
    with contextlib.closing(runtime_at(endpoint.url)) as client:
        call = {"EndpointName": NAME, "ContentType": JSON, "Body": body}
        whole = client.invoke_endpoint(**call, InferenceId=f"whole-{name}")["Body"].read()
        stream = call | {"Body": json.dumps(INPUT | {"stream": True})}
        events = client.invoke_endpoint_with_response_stream(**stream, InferenceId=f"stream-{name}")["Body"]
        streamed = b"".join(event["PayloadPart"]["Bytes"] for event in events)
    record = endpoint.record(f"whole-{name}")
    given, answer = record["captureData"]["endpointInput"], record["captureData"]["endpointOutput"]
    assert given == {"observedContentType": JSON, "mode": "INPUT", "data": body, "encoding": "JSON"}
    assert answer == {"observedContentType": JSON, "mode": "OUTPUT", "data": whole.decode(), "encoding": "JSON"}
    output = endpoint.record(f"stream-{name}")["captureData"]["endpointOutput"]
    assert output["encoding"] == "BASE64"
    assert base64.b64decode(output["data"]) == streamed

    answer, _ = endpoint.result(endpoint.invoke(Body=body, InferenceId=f"async-{name}"))
    assert endpoint.record(f"async-{name}")["captureData"]["endpointOutput"]["data"] == (answer or b"").decode()

    headers = {"X-Amzn-SageMaker-Inference-Id": f"openai-{name}"}
    base = f"{endpoint.url}/endpoints/{NAME}/openai/v1"
    with OpenAI(base_url=base, api_key="any", max_retries=0, default_headers=headers) as openai:
        chat = openai.chat.completions.create(model="", messages=MESSAGES, max_tokens=5)
    output = endpoint.record(f"openai-{name}")["captureData"]["endpointOutput"]
    assert json.loads(output["data"])["choices"][0]["message"]["content"] == chat.choices[0].message.content


def _status(client: httpx.Client, url: str) -> int | None:
    """Return the status of a GET. None if nothing listens."""
    try:
        return client.get(url).status_code
    except httpx.ConnectError:
        return None


def test_batch_transform_finds_its_parameters(server: Server) -> None:
    expected = {"MaxConcurrentTransforms": 16, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 6}
    assert server.client.get("/execution-parameters").json() == expected


def test_a_csv_that_batch_transform_has_split_by_line_gets_an_object_for_each_line(server: Server) -> None:
    lines = [b'"One, two,"', b"Once upon a time"]
    csv = [server.client.post("/invocations", content=line, headers={"content-type": "text/csv"}) for line in lines]
    texts = [server.invoke(prompt).json() for prompt in ("One, two,", "Once upon a time")]
    assert [answer.json() for answer in csv] == texts
    joined = server.client.post("/invocations", content=b"\n".join(lines), headers={"content-type": "text/csv"})
    assert joined.status_code == 424


@pytest.mark.long
def test_plain_vllm_answers_behind_the_local_endpoint(sample_model: Path, tmp_path: Path) -> None:
    bare = f"http://127.0.0.1:{(port := free_port())}"
    options = ("--model", str(sample_model), "--served-model-name", "bare", "--port", str(port), "--dtype", "float32")
    small = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(512 << 20), "--enforce-eager")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, *small]
    with (tmp_path / "vllm.log").open("wb") as log:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ANY_CORE
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def texts(base: str) -> tuple[str | None, str]:
        with OpenAI(base_url=base, api_key="any", max_retries=0) as client:
            arguments: dict[str, Any] = {"model": "bare", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.0}
            whole = client.chat.completions.create(**arguments).choices[0].message.content
            chunks = list(client.chat.completions.create(**arguments, stream=True))
        return whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    try:
        with httpx.Client(timeout=START_SECONDS) as client, local(bare) as url:
            wait_until(lambda: _status(client, f"{url}/ping") == 200, START_SECONDS)
            direct = texts(f"{bare}/v1")
            assert direct[0] == direct[1]
            assert texts(f"{url}/endpoints/{NAME}/openai/v1") == direct
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
