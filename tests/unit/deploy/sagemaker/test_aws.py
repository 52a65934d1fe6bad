"""boto3's clients: how often they send a call, and which settings they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError
from botocore.httpsession import URLLib3Session

from deploy.sagemaker.aws import Aws
from deploy.sagemaker.configuration import ConfigurationError


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of boto3. None of them gets an answer."""
    sent = []

    def send(session: Any, request: Any) -> Any:
        sent.append(request)
        raise ReadTimeoutError(endpoint_url=request.url)

    monkeypatch.setattr(URLLib3Session, "send", send)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return sent


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_call_is_sent_as_often_as_it_may_be(sent: list[Any], attempts: int) -> None:
    with pytest.raises(ReadTimeoutError):
        Aws("eu-west-1").client("sagemaker-runtime", attempts=attempts).invoke_endpoint(EndpointName="e", Body=b"")
    assert len(sent) == attempts


@pytest.mark.parametrize("key", [None, "sk-one"])
def test_a_key_is_sent_beside_the_signature(sent: list[Any], key: str | None) -> None:
    client = Aws("eu-west-1").client("sagemaker-runtime", attempts=1, key=key)
    with pytest.raises(ReadTimeoutError):
        client.invoke_endpoint(EndpointName="e", Body=b"")
    (request,) = sent
    assert request.headers.get("x-api-key") == (key and key.encode())
    assert request.headers["Authorization"].startswith(b"AWS4")


def test_an_address_that_is_no_url_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "127.0.0.1:8080")
    with pytest.raises(ConfigurationError) as raised:
        Aws("eu-west-1").client("sagemaker-runtime")
    assert raised.value.problems == ("AWS: Invalid endpoint: 127.0.0.1:8080",)
