"""The target that is a SageMaker endpoint."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from replay.request import RecordedRequest
from replay.targets import NoAnswer, SageMakerTarget, Unreachable


class Stream(list[Any]):
    def close(self) -> None: ...


class Runtime:
    """Stands for boto3's client."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self._error = error

    def invoke_endpoint(self, **parameters: Any) -> dict[str, Any]:
        self.calls.append(parameters)
        if self._error is not None:
            raise self._error
        return {"Body": io.BytesIO(b"{}"), "ContentType": "application/json"}

    def invoke_endpoint_with_response_stream(self, **parameters: Any) -> dict[str, Any]:
        parts = [{"PayloadPart": {"Bytes": part}} for part in (b"a\n", b"b\n")]
        return {"Body": Stream(parts), "ContentType": "application/jsonlines"}


def request(path: str = "/invocations", body: bytes = b"{}", **headers: str) -> RecordedRequest:
    pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return RecordedRequest("1", "a:1", "POST", path, pairs, body)


def target(runtime: Runtime, **paths: str) -> SageMakerTarget:
    return SageMakerTarget(runtime, "my-endpoint", 10, paths, None)


async def test_a_call_that_hangs_does_not_hold_up_the_next_one() -> None:
    go = threading.Event()

    class Hanging(Runtime):
        def invoke_endpoint(self, **parameters: Any) -> dict[str, Any]:
            if parameters["Body"] == b"hang":
                go.wait(60)
            return super().invoke_endpoint(**parameters)

    runtime = Hanging()
    impatient = SageMakerTarget(runtime, "my-endpoint", 0.1, {}, None)
    patient = SageMakerTarget(runtime, "my-endpoint", 60, {}, None)
    with pytest.raises(NoAnswer):
        await impatient.ask(request(body=b"hang"))
    try:
        assert (await patient.ask(request())).status == 200
    finally:
        go.set()


async def test_headers_become_parameters_and_other_paths_a_route() -> None:
    runtime = Runtime()
    asked = target(runtime)
    reply = await asked.ask(request(content_type="application/json", x_amzn_sagemaker_session_id="s"))
    assert (reply.status, reply.body, reply.content_type) == (200, b"{}", "application/json")
    assert not reply.headers_known
    await asked.ask(request("/generate", x_amzn_sagemaker_custom_attributes="model_name=a"))
    await asked.ask(request("/invocations", x_amzn_sagemaker_custom_attributes="route=/embed"))
    await asked.close()
    first, second, third = runtime.calls
    assert first == {"EndpointName": "my-endpoint", "Body": b"{}", "ContentType": "application/json", "SessionId": "s"}
    assert second["CustomAttributes"] == "route=/generate,model_name=a"
    assert third["CustomAttributes"] == "route=/embed"


async def test_the_model_of_a_query_or_a_header_goes_into_the_attributes() -> None:
    runtime = Runtime()
    asked = target(runtime)
    await asked.ask(request("/invocations?model_name=b&model_version=2", x_amzn_sagemaker_custom_attributes="a=1"))
    await asked.ask(RecordedRequest("1", "a:1", "POST", "/invocations", (("model_name", "b"),), b"{}"))
    await asked.ask(request("/generate?model_name=b"))
    with pytest.raises(NoAnswer, match="adapter red"):
        await asked.ask(request(x_amzn_sagemaker_adapter_identifier="red"))
    await asked.close()
    first, second, third = runtime.calls
    assert first["CustomAttributes"] == "model_name=b;model_version=2;a=1"
    assert second["CustomAttributes"] == "model_name=b"
    assert third["CustomAttributes"] == "route=/generate", "the route does not read the query"


async def test_a_request_for_a_stream_is_sent_as_one() -> None:
    reply = await target(Runtime()).ask(request(body=b'{"stream": true}'))
    assert (reply.body, reply.content_type) == (b"a\nb\n", "application/jsonlines")
    assert reply.first_byte is not None


async def test_an_error_of_the_model_is_its_reply_and_others_are_no_answer() -> None:
    failed = {"Error": {"Code": "ModelError"}, "OriginalStatusCode": 424, "OriginalMessage": '{"error":"x"}'}
    reply = await target(Runtime(ClientError(failed, "InvokeEndpoint"))).ask(request())
    assert (reply.status, reply.body) == (424, b'{"error":"x"}')
    refused = ClientError({"Error": {"Code": "ThrottlingException", "Message": "slow down"}}, "InvokeEndpoint")
    with pytest.raises(NoAnswer, match="slow down"):
        await target(Runtime(refused)).ask(request())
    with pytest.raises(Unreachable):
        await target(Runtime(EndpointConnectionError(endpoint_url="http://x"))).ask(request())
