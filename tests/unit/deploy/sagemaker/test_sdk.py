from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import boto3
import pytest

from deploy.sagemaker import sdk
from deploy.sagemaker.stack import StackConflict
from tests.unit.deploy.sagemaker.fake_cloudformation import FakeCloudFormation

ROOT = Path(__file__).parents[4]
# The SDK's imports cause deprecation warnings of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore")


class Session(boto3.Session):
    """A session with a CloudFormation in memory."""

    def __init__(self, cloudformation: FakeCloudFormation) -> None:
        super().__init__("testing", "testing", region_name="eu-west-1")
        self.client = lambda service: {"cloudformation": cloudformation.client}[service]


@pytest.fixture
def cloudformation() -> FakeCloudFormation:
    return FakeCloudFormation()


@pytest.mark.parametrize("status", ["CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"])
def test_the_sdk_gives_the_endpoint_of_a_finished_stack(
    status: str, cloudformation: FakeCloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sagemaker.core.resources as resources

    class Client:
        def describe_endpoint(self, **parameters: Any) -> dict[str, Any]:
            return {**parameters, "EndpointArn": "arn", "EndpointStatus": "InService"}

    monkeypatch.setattr(resources.Base, "get_sagemaker_client", lambda *args, **kwargs: Client())
    cloudformation.there(status)
    endpoint = sdk.endpoint("my-llm", Session(cloudformation))
    assert type(endpoint).__module__ == "sagemaker.core.resources"
    assert (endpoint.endpoint_name, endpoint.endpoint_status) == ("my-llm", "InService")


@pytest.mark.parametrize("status", [None, "CREATE_IN_PROGRESS", "ROLLBACK_COMPLETE", "CREATE_FAILED"])
def test_a_stack_that_is_not_finished_has_no_endpoint(status: str | None, cloudformation: FakeCloudFormation) -> None:
    if status:
        cloudformation.there(status)
    with pytest.raises(StackConflict, match="slipway-my-llm"):
        sdk.endpoint("my-llm", Session(cloudformation))


def test_the_pages_code_gets_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (ROOT / "docs" / "deploy.md").read_text().split("```python\n")[1].split("```")[0]
    asked: list[str] = []
    monkeypatch.setattr(sdk, "endpoint", lambda name, session: asked.append(name))
    exec(compile(code, "docs/deploy.md", "exec"), {})
    assert asked == ["my-llm"]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker.core.resources", None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with pytest.raises(ImportError) as caught:
        sdk.endpoint("my-llm", boto3.Session(region_name="eu-west-1"))
    command = f'pip install "{extras["sagemaker"][0]}"'
    assert str(caught.value).endswith(command)
    assert command in (ROOT / "docs" / "deploy.md").read_text()
