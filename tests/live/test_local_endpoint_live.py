"""SageMaker's runtime API on this machine. Its real, unmodified clients need no AWS account and no network."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from huggingface_hub import InferenceClient
from openai import OpenAI

from tests.live.lora import make_adapter
from tests.live.partly_held import FORM, PLACE
from tests.live.server import START_SECONDS, Server, free_port, records, write_model
from tests.live.small_model import ENDLESS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"
JSON = "application/json"
NAME = "my-endpoint"
MESSAGES = [{"role": "user", "content": "Say hello."}]
RUNNING, ABORTED = "slipway_engine_running", "slipway_generations_aborted_total"
BEGUN = "slipway_generations_total"


def environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION_NAME": "us-east-1",
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_EC2_METADATA_DISABLED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start `slipway serve --local-endpoint my-endpoint`, which has the API's routes."""
    directory = tmp_path_factory.mktemp("local")
    model = write_model(directory / "model", enable_lora="true", max_loras=2, **small_options)
    for seed, name in enumerate(("red", "blue"), start=1):
        make_adapter(model / "adapters" / name, Path(str(small_options["model_id"])), seed, scale=3.0)
    arguments = ("--local-endpoint", NAME, "--adapter", "red", "--adapter", "blue")
    with Server(model, directory / "server.log", arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module", params=["serve", "local"])
def url(request: pytest.FixtureRequest, container: Server) -> Iterator[str]:
    """Return the address of the API, either in the container or in a `slipway local` in front of it."""
    if request.param == "serve":
        yield container.url
        return
    with local(container.url) as before_it:
        yield before_it


@contextlib.contextmanager
def local(container: str, *more: str, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = ["--container", container, "--port", str(port), "--timeout", str(START_SECONDS)]
    options += ["--adapter", "red", "--adapter", "blue", *more]
    command = [sys.executable, "-m", "slipway", "local", *options]
    process = subprocess.Popen(command, env={**os.environ, **(variables or {})})
    try:
        wait_until(lambda: answers(url), START_SECONDS)
        yield url
    finally:
        process.terminate()
        assert process.wait(60) == 0


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/endpoints/nope").status_code == 404
    except httpx.TransportError:
        return False


@pytest.fixture
def aws(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the variables that the clients read."""
    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)
    return url


@pytest.fixture
def runtime(aws: str) -> Iterator[Any]:
    with contextlib.closing(runtime_client()) as client:
        yield client


def runtime_client(connections: int = 10) -> Any:
    config = Config(retries={"total_max_attempts": 1}, read_timeout=START_SECONDS, max_pool_connections=connections)
    return boto3.session.Session().client("sagemaker-runtime", config=config)


def document(stream: bool | None = None, **parameters: object) -> str:
    body: dict[str, object] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, **parameters}}
    return json.dumps(body if stream is None else body | {"stream": stream})


def invoke(client: Any, body: str, **more: str) -> bytes:
    answer = client.invoke_endpoint(EndpointName=NAME, ContentType=JSON, Body=body, **more)
    with answer["Body"] as stream:
        data: bytes = stream.read()
    return data


def streamed(client: Any, body: str, **more: str) -> bytes:
    answer = client.invoke_endpoint_with_response_stream(EndpointName=NAME, ContentType=JSON, Body=body, **more)
    return b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])


@pytest.mark.parametrize(
    "more", [{}, {"details": True}, {"output_formatter": "jsonlines"}, {"output_formatter": "sse"}]
)
def test_boto3_gets_the_very_bytes_of_the_container(container: Server, runtime: Any, more: dict[str, object]) -> None:
    for body in (document(**more), document(stream=True, **more)):
        # The first answer fills the prefix cache. With this cache, the last digits of log probabilities change.
        whole, again = (
            container.client.post("/invocations", content=body, headers={"content-type": JSON}) for _ in "12"
        )
        assert whole.status_code == again.status_code == 200
        assert invoke(runtime, body) == again.content
        assert streamed(runtime, body) == again.content


def test_boto3_sees_types_ids_and_the_variant(runtime: Any) -> None:
    answer = runtime.invoke_endpoint(EndpointName=NAME, ContentType=JSON, Accept=JSON, Body=document())
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == (JSON, "AllTraffic")
    assert len(answer["ResponseMetadata"]["RequestId"]) == 36
    answer["Body"].close()
    stream = runtime.invoke_endpoint_with_response_stream(
        EndpointName=NAME, ContentType=JSON, Accept="*/*", Body=document(stream=True)
    )
    assert (stream["ContentType"], stream["InvokedProductionVariant"]) == ("application/jsonlines", "AllTraffic")
    assert list(stream["Body"])


def test_boto3_sees_the_parts_of_a_schema_that_are_not_held(runtime: Any) -> None:
    call = {"EndpointName": NAME, "ContentType": JSON, "Body": document(max_new_tokens=60, response_format=FORM)}
    streamed = call | {"Body": document(stream=True, max_new_tokens=60, response_format=FORM)}
    assert runtime.invoke_endpoint(**call)["CustomAttributes"] == f"X-Slipway-Not-Held={PLACE}"
    answer = runtime.invoke_endpoint_with_response_stream(**streamed)
    assert answer["CustomAttributes"] == f"X-Slipway-Not-Held={PLACE}"
    assert list(answer["Body"])


@pytest.mark.parametrize("call", [invoke, streamed])
def test_boto3_raises_what_it_raises_on_sagemaker(runtime: Any, call: Any) -> None:
    with pytest.raises(runtime.exceptions.ModelError) as refused:
        call(runtime, '{"inputs": 5}')
    response = refused.value.response
    assert response["Error"]["Code"] == "ModelError"
    assert response["OriginalStatusCode"] == 424
    assert "inputs" in json.loads(response["OriginalMessage"])["error"]
    assert response["LogStreamArn"].endswith(f"/aws/sagemaker/Endpoints/{NAME}")
    with pytest.raises(ClientError, match="Inference component nope of account 000000000000 not found") as unknown:
        call(runtime, document(), InferenceComponentName="nope")
    assert unknown.value.response["Error"]["Code"] == "ValidationError"
    with pytest.raises(ClientError, match="Endpoint other of account 000000000000 not found"):
        runtime.invoke_endpoint(EndpointName="other", Body=b"{}")


def test_an_adapter_is_an_inference_component(container: Server, runtime: Any) -> None:
    own = invoke(runtime, document())
    red = invoke(runtime, document(), InferenceComponentName="red")
    by_body = container.client.post("/invocations", json=json.loads(document()) | {"adapters": "red"})
    assert red == by_body.content != own
    tgi = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 5}})
    routed = invoke(runtime, tgi, CustomAttributes="route=/generate", InferenceComponentName="red")
    assert json.loads(routed)["generated_text"] == json.loads(red)["generated_text"]
    text = records(streamed(runtime, document(stream=True), InferenceComponentName="red").decode())[-1]
    assert text["generated_text"] == json.loads(red)["generated_text"]


def test_a_session_begins_goes_on_and_ends(runtime: Any) -> None:
    def ask(session: str, body: str) -> Any:
        answer = runtime.invoke_endpoint(EndpointName=NAME, ContentType=JSON, Body=body, SessionId=session)
        with answer["Body"] as stream:
            stream.read()
        return answer

    session, _, expires = ask("NEW_SESSION", '{"requestType": "NEW_SESSION"}')["NewSessionId"].partition("; Expires=")
    assert expires.endswith("Z")
    assert "NewSessionId" not in ask(session, document())
    assert streamed(runtime, document(stream=True), SessionId=session)
    assert ask(session, '{"requestType": "CLOSE"}')["ClosedSessionId"] == session
    with pytest.raises(runtime.exceptions.ModelError) as closed:
        ask(session, document())
    assert 400 <= closed.value.response["OriginalStatusCode"] < 500


def test_slipway_invoke_asks_the_local_endpoint(container: Server) -> None:
    """docs/tasks/sagemaker.md has the other commands."""

    def printed(*arguments: str) -> str:
        finished = subprocess.run(
            [sys.executable, "-m", "slipway", "invoke", NAME, "--prompt", PROMPT, "--max-new-tokens", "5", *arguments],
            env=os.environ | environment(container.url),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    red = container.client.post("/invocations", json=json.loads(document()) | {"adapters": "red"}).json()
    assert records(printed("--stream", "--component", "red"))[-1]["generated_text"] == red["generated_text"]
    assert json.loads(printed("--chat"))["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_example_with_litellm_runs_as_it_stands(sample_server: Server) -> None:
    """README's quick start and docs/tasks/sagemaker.md have the other examples."""
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "local_litellm.py"],
        env=os.environ | environment(sample_server.url),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    shown = dict(line.partition(":")[::2] for line in finished.stdout.splitlines() if ":" in line)
    for provider in ("sagemaker", "sagemaker_chat"):
        assert shown[f"{provider}, whole"].strip() == shown[f"{provider}, streamed"].strip() != ""


@pytest.mark.parametrize("url", ["serve"], indirect=True)
def test_sagemakers_own_sdk_invokes_the_endpoint(aws: str) -> None:
    from sagemaker.core.resources import Endpoint

    answer = Endpoint(endpoint_name=NAME).invoke(body=document(), content_type=JSON, custom_attributes="trace=1")
    assert answer.invoked_production_variant == "AllTraffic"
    assert json.loads(answer.body.read())["generated_text"]


def test_openais_client_and_the_hubs_speak_to_the_openai_path(url: str) -> None:
    base = f"{url}/endpoints/{NAME}/openai/v1"
    with OpenAI(base_url=base, api_key="a-bearer-token", max_retries=0) as client:
        arguments: dict[str, Any] = {"model": "", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.0}
        whole = client.chat.completions.create(**arguments).choices[0].message.content
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    hub = InferenceClient(base_url=base, api_key="a-bearer-token")
    assert hub.chat_completion(MESSAGES, max_tokens=5, temperature=0).choices[0].message.content == whole


def test_the_openai_path_of_an_inference_component_has_its_adapter(container: Server, url: str) -> None:
    def text(base: str, model: str = "") -> str:
        with OpenAI(base_url=base, api_key="a-bearer-token", max_retries=0) as client:
            answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, temperature=0)
        return answer.choices[0].text

    own = text(f"{url}/endpoints/{NAME}/openai/v1")
    red = text(f"{url}/endpoints/{NAME}/inference-components/red/openai/v1")
    assert red == text(f"{container.url}/v1", "red") != own


def test_the_containers_own_routes_are_there_too(container: Server, url: str) -> None:
    with httpx.Client(base_url=url, timeout=START_SECONDS) as client:
        assert client.get("/ping").json() == container.client.get("/ping").json()
        assert "slipway_ready 1" in client.get("/metrics").text
        assert client.get("/endpoints/nope").headers["x-amzn-errortype"] == "UnknownOperationException"


def test_64_threads_stream_at_a_time_and_one_that_leaves_ends_its_own_generation_alone(
    container: Server, aws: str
) -> None:
    aborted, begun, crowd = container.metric(ABORTED), container.metric(BEGUN), 64
    with contextlib.closing(runtime_client(crowd + 1)) as client, ThreadPoolExecutor(crowd) as pool:
        leaver = client.invoke_endpoint_with_response_stream(
            EndpointName=NAME, ContentType=JSON, Body=document(stream=True, **ENDLESS)
        )
        next(iter(leaver["Body"]))
        bodies = pool.map(lambda _: streamed(client, document(stream=True, max_new_tokens=12)), range(crowd))
        wait_until(lambda: container.metric(BEGUN) > begun + crowd // 2)
        leaver["Body"].close()
        answers = [records(body.decode()) for body in bodies]
        container.wait_for_metric(ABORTED, aborted + 1)
        texts = {answer[-1]["generated_text"] for answer in answers}
    assert len(texts) == 1, texts
    assert all("".join(r["token"]["text"] for r in answer) == answer[-1]["generated_text"] for answer in answers)
    container.wait_for_metric(RUNNING, 0)
    assert container.metric(ABORTED) == aborted + 1
