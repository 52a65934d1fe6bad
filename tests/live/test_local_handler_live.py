"""The local endpoint of a container with a custom handler: headers on the wire, clients that leave, signals.

The test controls the events in the container.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.live.server import START_SECONDS, Server
from tests.waiting import wait_until

ECHO = Path(__file__).parents[1] / "fixtures" / "handlers" / "echo"
FORM = "application/x-www-form-urlencoded"
NAME = "my-endpoint"
BASE = {"InferenceComponentName": "base"}


@dataclass
class Local:
    """A container with a local endpoint, and a client."""

    container: Server
    runtime: Any

    def invoke(self, more: dict[str, str] | None = None, **query: object) -> bytes:
        answer = self.runtime.invoke_endpoint(
            EndpointName=NAME, ContentType=FORM, Body=urlencode(query), **(more or {})
        )
        with answer["Body"] as stream:
            data: bytes = stream.read()
        return data

    def stream(self, more: dict[str, str] | None = None, **query: object) -> Any:
        return self.runtime.invoke_endpoint_with_response_stream(
            EndpointName=NAME, ContentType=FORM, Body=urlencode(query), **(more or {})
        )["Body"]


Start = Callable[..., contextlib.AbstractContextManager[Local]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    @contextlib.contextmanager
    def started(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Local]:
        directory = tmp_path_factory.mktemp("local-command")
        model = shutil.copytree(ECHO, directory / "model", ignore=shutil.ignore_patterns("__pycache__"))
        # One worker may still be sleeping for a call that was given up.
        (model / "serving.properties").write_text("minWorkers=2\nmaxWorkers=2\n")
        container = Server(
            model,
            directory / "container.log",
            environment or {},
            arguments=("--local-endpoint", NAME, *arguments),
            name=None,
        )
        try:
            wait_until(container.ping, START_SECONDS)
            with contextlib.closing(_client("sagemaker-runtime", container.url)) as runtime:
                _wait_until_ready(runtime)
                yield Local(container, runtime)
        finally:
            container.stop()

    return started


@pytest.fixture(scope="module")
def local(start: Start) -> Iterator[Local]:
    with start("--adapter", "french", "--component", "base") as running:
        yield running


def _client(service: str, url: str) -> Any:
    session = boto3.session.Session(aws_access_key_id="local", aws_secret_access_key="local", region_name="us-east-1")
    return session.client(service, endpoint_url=url, config=Config(retries={"total_max_attempts": 1}))


def _wait_until_ready(runtime: Any) -> None:
    """Ask again while the model is not ready, as a script on SageMaker would."""
    deadline = time.monotonic() + START_SECONDS
    component = BASE
    while True:
        try:
            runtime.invoke_endpoint(EndpointName=NAME, Body=b"x", **component)["Body"].close()
            return
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "ValidationError":
                component = {}  # an endpoint without components
            elif code != "ModelNotReadyException":
                raise
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_container_sees_the_calls_parameters_and_nothing_else(local: Local) -> None:
    more = {
        "InferenceComponentName": "french",
        "CustomAttributes": "trace=1",
        "InferenceId": "id-1",
        "Accept": "text/plain",
        "SessionId": "s-1",
        "TargetVariant": "AllTraffic",
    }
    properties = json.loads(local.invoke(more, inspect=1))["properties"]
    seen = {name.lower(): value for name, value in properties.items()}
    relevant = ("x-amz", "accept", "authorization", "trace")
    assert {name: value for name, value in seen.items() if name.startswith(relevant)} == {
        "accept": "text/plain",
        "x-amzn-sagemaker-adapter-identifier": "french",
        "trace": "1",  # LMI shows custom attributes to a handler
        "x-amzn-sagemaker-forwarded-api": "InvokeEndpoint",
        "x-amzn-sagemaker-inference-id": "id-1",
        "x-amzn-sagemaker-session-id": "s-1",
    }
    base = json.loads(local.invoke(BASE, inspect=1))["properties"]
    assert not [name for name in base if "adapter" in name.lower()]


def test_a_stream_comes_as_the_handler_made_it(local: Local) -> None:
    assert b"".join(e["PayloadPart"]["Bytes"] for e in local.stream(BASE, stream=1)) == b"".join(
        b"t-%d\n" % i for i in range(5)
    )


def test_a_component_has_to_be_named_where_there_are_any(local: Local) -> None:
    with pytest.raises(ClientError, match="Inference Component Name header is required"):
        local.invoke(inspect=1)


def test_a_client_that_leaves_ends_the_handlers_stream(local: Local, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    stream = local.stream(BASE, endless=1000, journal=journal)
    next(iter(stream))
    stream.close()
    wait_until(Path(f"{journal}.closed").exists)


def test_sigterm_lets_a_running_answer_out(start: Start, tmp_path: Path) -> None:
    with start() as local, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(local.invoke, wait=tmp_path / "go")
        local.container.wait_for_metric("slipway_workers_busy", 1)
        local.container.process.terminate()
        wait_until(lambda: local.container.ping() == 503)
        (tmp_path / "go").touch()
        assert answer.result() == b"waited"
        assert local.container.process.wait(60) == 0
