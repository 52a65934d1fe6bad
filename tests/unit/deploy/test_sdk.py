from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from deploy.sagemaker import sdk
from deploy.sagemaker.executor import Failed
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.progress import Progress
from tests.unit.deploy.cloud import MemoryCloud, TurnedClock
from tests.unit.deploy.configurations import VALUES, planned
from tests.unit.deploy.test_moto import OF_MOTO, SESSION, MotoCloud

# The SDK's own imports warn of what pydantic has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


def _drop_what_is_empty(parsed: dict[str, Any], **more: Any) -> None:
    # moto describes what was never set as {}; SageMaker leaves it out, and the SDK counts on that.
    if not parsed.get("DataCaptureConfig"):
        parsed.pop("DataCaptureConfig", None)


for _operation in ("DescribeEndpoint", "DescribeEndpointConfig"):
    SESSION.events.register(f"after-call.sagemaker.{_operation}", _drop_what_is_empty)


def _around(cloud: Any) -> Surroundings:
    clock = TurnedClock()
    return Surroundings(cloud, Progress(io.StringIO(), clock), clock)


def test_the_sdk_gives_its_endpoint_in_service() -> None:
    with mock_aws():
        session = SESSION
        plan = planned("private", capture=None, **OF_MOTO)
        endpoint = sdk.deploy(plan, session, _around(MotoCloud()))
        assert type(endpoint).__module__ == "sagemaker.core.resources"
        assert (endpoint.endpoint_name, endpoint.endpoint_status) == ("my-llm", "InService")
        assert endpoint.endpoint_config_name == plan.resources[1].name
        # What the SDK sent is what boto3 would have sent.
        client: Any = session.client("sagemaker")
        found = client.describe_endpoint_config(EndpointConfigName=plan.resources[1].name)
        planned_variant = plan.resources[1].create.parameters["ProductionVariants"][0]
        assert found["ProductionVariants"][0].items() >= planned_variant.items()
        assert sdk.deploy(plan, session, _around(MotoCloud())).endpoint_name == "my-llm"


def test_the_pages_code_deploys_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    code = (root / "docs/deploy.md").read_text().split("```python\n")[1].split("```")[0]
    deployed: list[str] = []
    monkeypatch.setattr(sdk, "deploy", lambda plan, session, around: deployed.append(plan.name))
    monkeypatch.chdir(root)
    exec(compile(code, "docs/deploy.md", "exec"), {})
    assert deployed == ["private-llm"]


@pytest.mark.parametrize("name", VALUES)
def test_the_sdk_sends_what_was_planned_or_is_not_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sagemaker.core.resources as resources

    sent: list[tuple[str, dict[str, Any]]] = []

    class Client:
        def __getattr__(self, operation: str) -> Any:
            def call(**parameters: Any) -> dict[str, Any]:
                sent.append((operation, parameters))
                return {}

            return call

    monkeypatch.setattr(resources.Base, "get_sagemaker_client", lambda *args, **kwargs: Client())
    calls = [call for call in planned(name).calls if call.service == "sagemaker" and sdk.is_faithful(call)]
    assert len(calls) >= 2
    for call in calls:
        made = getattr(resources, sdk._CLASSES[call.operation])
        monkeypatch.setattr(made, "get", classmethod(lambda cls, **kwargs: None))
        made.create(**sdk.arguments(call))
    assert sent == [(call.operation, call.parameters) for call in calls]


@pytest.mark.parametrize("name", ["scale_to_zero", "everything"])
def test_a_minimum_of_zero_does_not_get_lost_in_the_sdk(name: str) -> None:
    config = next(call for call in planned(name).calls if call.operation == "create_endpoint_config")
    assert not sdk.is_faithful(config)


def test_a_failure_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import sagemaker.core.resources as resources

    with mock_aws():

        def fail(**parameters: Any) -> None:
            raise RuntimeError("no capacity")

        monkeypatch.setattr(resources.Endpoint, "create", fail)
        session = SESSION
        with pytest.raises(Failed, match="no capacity"):
            sdk.deploy(planned("private", capture=None, **OF_MOTO), session, _around(MotoCloud()))
        client: Any = session.client("sagemaker")
        assert client.list_models()["Models"] == []


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker.core.resources", None)
    with pytest.raises(sdk.SdkMissing, match=r'pip install "slipway\[sagemaker\]"'):
        sdk.deploy(planned("private"), boto3.Session(region_name="eu-west-1"), _around(MemoryCloud()))
