from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import get_session
from cfnlint.api import lint
from cfnlint.config import ManualArgs
from hypothesis import Phase, given, settings

from container.settings.load import load_startup
from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    merge_tables,
    read_configuration,
    read_file,
)
from deploy.sagemaker.template import MACHINE_IMAGE, secrets, template
from deploy.yaml_text import as_yaml
from handlers.model_config import ModelConfig
from tests.unit.deploy.sagemaker.configurations import REGION, VALUES, configuration, configurations

ROOT = Path(__file__).parents[4]
_LINT = ManualArgs(regions=["eu-west-1", "us-east-1"])


def _properties(name: str, resource: str = "EndpointConfiguration", /, **changes: Any) -> dict[str, Any]:
    """Return the properties of a resource in the template of a configuration."""
    found: dict[str, Any] = template(configuration(name, **changes))["Resources"][resource]["Properties"]
    return found


def _variant(name: str, /, **changes: Any) -> dict[str, Any]:
    (variant,) = _properties(name, **changes)["ProductionVariants"]
    found: dict[str, Any] = variant
    return found


@pytest.mark.parametrize("name", VALUES)
def test_a_template_is_what_cloudformation_allows(name: str) -> None:
    assert lint(as_yaml(template(configuration(name))), config=_LINT) == []


@pytest.mark.slow
@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(configurations())
def test_a_template_of_any_configuration_is_what_cloudformation_allows(read: Configuration) -> None:
    assert lint(as_yaml(template(read)), config=_LINT) == []


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("real_time", "blue-green"), ("adapters", "canary"), ("real_time", "linear"), ("adapters", "rolling")],
)
def test_every_rollout_is_what_cloudformation_allows(name: str, strategy: str) -> None:
    made = template(configuration(name, rollout={"strategy": strategy, "step_percent": 25, "alarms": ["errors"]}))
    assert lint(as_yaml(made), config=_LINT) == []
    config = made["Resources"]["Endpoint"]["Properties"]["DeploymentConfig"]
    assert config["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "errors"}]}


RESOURCES = {
    "real_time": ["Model", "EndpointConfiguration", "Endpoint", "ScalableTarget", "ScalingPolicyTracking"],
    "asynchronous": [
        *("Model", "EndpointConfiguration", "Endpoint", "ScalableTarget"),
        *("ScalingPolicyTracking", "ScalingPolicyFromZero", "Alarm"),
    ],
    "scale_to_zero": [
        *("Model", "EndpointConfiguration", "Endpoint", "InferenceComponent", "ScalableTarget"),
        *("ScalingPolicyTracking", "ScalingPolicyFromZero", "Alarm"),
    ],
    "adapters": [
        *("Model", "EndpointConfiguration", "Endpoint", "InferenceComponent", "AdapterFrench", "AdapterGerman"),
    ],
    "private": ["Model", "EndpointConfiguration", "Endpoint"],
}


@pytest.mark.parametrize("name", RESOURCES)
def test_a_template_has_all_of_a_deployment(name: str) -> None:
    made = template(configuration(name))
    assert list(made["Resources"]) == RESOURCES[name]
    assert yaml.safe_load(as_yaml(made)) == made
    assert "&id" not in as_yaml(made)


def test_a_role_that_is_made_has_its_policy_and_no_name() -> None:
    made = template(configuration("everything"))["Resources"]
    assert "RoleName" not in made["Role"]["Properties"]
    assert len(made["Role"]["Properties"]["Policies"]) == 1
    for name in ("Model", "EndpointConfiguration"):
        assert made[name]["Properties"]["ExecutionRoleArn"] == {"Fn::GetAtt": ["Role", "Arn"]}


def test_nothing_that_is_replaced_has_a_name_of_its_own() -> None:
    for name in VALUES:
        made = template(configuration(name))["Resources"]
        for resource, key in (("Model", "ModelName"), ("EndpointConfiguration", "EndpointConfigName")):
            assert key not in made[resource]["Properties"]


def test_scaling_comes_after_what_is_scaled_and_adapters_after_the_model() -> None:
    made = template(configuration("everything"))["Resources"]
    after = {name: each.get("DependsOn") for name, each in made.items()}
    assert after["InferenceComponent"] == "Endpoint"
    assert after["AdapterFrench"] == after["ScalableTarget"] == "InferenceComponent"
    assert after["ScalingPolicyTracking"] == after["ScalingPolicyFromZero"] == "ScalableTarget"
    assert made["Alarm"]["Properties"]["AlarmActions"] == [{"Ref": "ScalingPolicyFromZero"}]
    assert template(configuration("real_time"))["Resources"]["ScalableTarget"]["DependsOn"] == "Endpoint"


@given(configurations())
def test_a_rollout_is_how_an_update_replaces_what_runs(read: Configuration) -> None:
    for each in template(read)["Resources"].values():
        rolls = each["Type"] == "AWS::SageMaker::Endpoint" or "ModelName" in each["Properties"].get("Specification", {})
        assert ("DeploymentConfig" in each["Properties"]) is (rolls and read.rollout is not None)


@given(configurations())
def test_every_arn_and_image_is_of_the_regions_partition(read: Configuration) -> None:
    text = json.dumps(template(read))
    aws = {"cn-north-1": "aws-cn", "us-gov-west-1": "aws-us-gov", "eusc-de-east-1": "aws-eusc"}.get(read.region, "aws")
    assert set(re.findall(r"arn:(aws[a-z-]*|\$\{AWS::Partition\}):", text)) <= {aws, "${AWS::Partition}"}
    assert (".amazonaws.com.cn/" in text) is (aws == "aws-cn")


DEADLINES = {"OPTION_ANSWER_DEADLINE": "55", "OPTION_STREAM_DEADLINE": "450"}


def _environment(read: Configuration) -> dict[str, str]:
    """Return the environment of the container, with the values of the parameters."""
    container = template(read)["Resources"]["Model"]["Properties"]["PrimaryContainer"]
    values = {parameter: read.environment[variable] for variable, parameter in secrets(read).items()}
    return {
        name: values[value["Ref"]] if isinstance(value, dict) else value
        for name, value in container.get("Environment", {}).items()
    }


@given(configurations())
def test_the_container_gets_its_environment(read: Configuration) -> None:
    made = _environment(read)
    names = made.pop("OPTION_SERVED_MODEL_NAME").split(",")
    assert names[-1] == read.name
    hub = {} if read.from_s3 else {"HF_MODEL_ID": read.model}
    deadlines = {} if read.asynchronous else DEADLINES
    assert made == hub | deadlines | read.environment


def _served(tmp_path: Path, read: Configuration) -> ModelConfig:
    """Return the settings of the container's model. The container finds models of S3 in the directory `model`."""
    directory = tmp_path / "model"
    directory.mkdir()
    if read.from_s3:
        (directory / "config.json").write_text("{}")
    (model,) = load_startup(directory, _environment(read), {}).models
    assert not model.settings.warnings
    return model.settings.config


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("org/model-7b", ("org/model-7b", "my-llm")),
        ("s3://models/llama", ("llama", "my-llm")),
        ("s3://models/llama-3.1/", ("llama-3.1", "llama_3_1", "my-llm")),
        ("s3://models/my-llm/", ("my-llm", "my_llm")),
        ("s3://models/llama.tar.gz", ("llama", "my-llm")),
        ("s3://models/a,b/", ("a_b", "my-llm")),
        ("s3://models", ("models", "my-llm")),
    ],
)
def test_a_deployed_model_keeps_its_name_and_has_the_endpoints(
    model: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    assert _served(tmp_path, configuration("private", model=model)).public_names == names


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("s3://models/llama", ("s3://models/llama/", "S3Prefix", "None")),
        ("s3://models/llama/", ("s3://models/llama/", "S3Prefix", "None")),
        ("s3://models/llama.tar.gz", ("s3://models/llama.tar.gz", "S3Object", "Gzip")),
    ],
)
def test_sagemaker_fetches_a_folder_of_s3_or_unpacks_an_archive(model: str, source: tuple[str, str, str]) -> None:
    found = _properties("private", "Model", model=model)["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert (found["S3Uri"], found["S3DataType"], found["CompressionType"]) == source


@pytest.mark.parametrize(
    "env",
    [
        {"OPTION_SERVED_MODEL_NAME": "theirs"},
        {"SM_VLLM_SERVED_MODEL_NAME": "theirs"},
        {"SERVING_MODEL_NAME": "theirs"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_a_name_of_the_environment_is_kept(env: dict[str, str], tmp_path: Path) -> None:
    assert _served(tmp_path, configuration("private", env=env)).public_names == ("theirs",)


@pytest.mark.parametrize("variable", ["HF_MODEL_ID", "SM_VLLM_MODEL", "OPTION_MODEL_ID", "SERVING_LOAD_MODELS"])
def test_another_model_of_the_environment_does_not_get_the_names(variable: str) -> None:
    made = _environment(configuration("private", env={variable: "org/other"}))
    assert made == DEADLINES | {variable: "org/other"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (55.0, 450.0)),
        ({"answer_deadline": 30, "stream_deadline": 100.5}, (30.0, 100.5)),
        ({"answer_deadline": 1234567.5, "stream_deadline": 1e9}, (1234567.5, 1e9)),
        ({"answer_deadline": 0, "stream_deadline": 0}, (None, None)),
        ({"env": {"OPTION_ANSWER_DEADLINE": "9"}}, (9.0, 450.0)),
        ({"env": {"SM_VLLM_STREAM_DEADLINE": "9"}}, (55.0, 9.0)),
        ({"async": {"output": "s3://bucket/answers/"}, "prefix_aware_routing": None}, (None, None)),
    ],
)
def test_answers_end_before_sagemaker_drops_them(
    fields: dict[str, Any], expected: tuple[float | None, float | None], tmp_path: Path
) -> None:
    deadlines = _served(tmp_path, configuration("private", **fields)).deadlines
    assert (deadlines.answer, deadlines.stream) == expected


def test_the_machine_image_is_one_of_sagemakers_with_a_driver_for_the_gpu_images_cuda() -> None:
    known: Any = get_session().get_service_model("sagemaker").shape_for("ProductionVariantInferenceAmiVersion")
    assert MACHINE_IMAGE in known.enum
    lock = (ROOT / "requirements/gpu.txt").read_text()
    assert re.search(r"^nvidia-cuda-runtime==13\.", lock, re.M)


@pytest.mark.parametrize(
    ("changes", "machine_image"),
    [
        ({"instance_type": "ml.g6e.xlarge"}, MACHINE_IMAGE),
        ({"instance_type": "ml.p5.48xlarge"}, MACHINE_IMAGE),
        ({"instance_type": "ml.c7i.xlarge"}, None),
    ],
)
def test_the_machine_image_is_stated_for_gpus(changes: dict[str, str], machine_image: str | None) -> None:
    assert _variant("private", **changes).get("InferenceAmiVersion") == machine_image


def test_properties_go_before_those_of_the_template() -> None:
    variant = _variant("private")
    assert (variant["VolumeSizeInGB"], variant["InstanceType"]) == (200, "ml.g6e.xlarge")
    variants = {"ProductionVariants": {"RoutingConfig": {"RoutingStrategy": "RANDOM"}}}
    variant = _variant("real_time", properties={"EndpointConfiguration": variants})
    assert variant["RoutingConfig"] == {"RoutingStrategy": "RANDOM"}


def test_prefix_aware_routing_and_data_capture_are_in_the_endpoints_configuration() -> None:
    made = _properties("private")
    assert made["ProductionVariants"][0]["RoutingConfig"] == {
        "RoutingStrategy": "PREFIX_AWARE",
        "PrefixAwareRoutingConfig": {"PrefixLength": 4096, "ConcurrencyThreshold": 32},
    }
    assert made["DataCaptureConfig"] == {
        "EnableCapture": True,
        "InitialSamplingPercentage": 20,
        "DestinationS3Uri": "s3://captured/",
        "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
        "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
    }


def test_the_instances_have_the_reservation_the_driver_and_the_disk_that_are_given() -> None:
    expected = {
        "InferenceAmiVersion": "al2-ami-sagemaker-inference-gpu-3-1",
        "VolumeSizeInGB": 256,
        "EnableSSMAccess": True,
        "CoreDumpConfig": {"DestinationS3Uri": "s3://dumps/llm/"},
        "CapacityReservationConfig": {
            "CapacityReservationPreference": "capacity-reservations-only",
            "MlReservationArn": "arn:aws:sagemaker:eu-west-1:111122223333:training-plan/gpus",
        },
        "ManagedInstanceScaling": {
            "Status": "ENABLED",
            "MinInstanceCount": 0,
            "MaxInstanceCount": 2,
            "ScaleInPolicy": {"Strategy": "CONSOLIDATION", "MaximumStepSize": 2, "CooldownInMinutes": 5},
        },
    }
    assert _variant("everything").items() >= expected.items()
    assert _variant("real_time").keys().isdisjoint(expected.keys() - {"InferenceAmiVersion"})
    component = _properties("everything", "InferenceComponent")
    assert component["Specification"]["SchedulingConfig"]["PlacementStrategy"] == "BINPACK"
    assert component["Specification"]["ComputeResourceRequirements"]["MaxMemoryRequiredInMb"] == 4096
    assert component["DeploymentConfig"]["RollingUpdatePolicy"]["MaximumExecutionTimeoutInSeconds"] == 7200


def test_an_asynchronous_endpoint_has_its_places_topics_and_bound() -> None:
    topic = "arn:aws:sns:eu-west-1:111122223333:answers"
    assert _properties("asynchronous")["AsyncInferenceConfig"] == {
        "OutputConfig": {
            "S3OutputPath": "s3://answers/out/",
            "S3FailurePath": "s3://answers/failed/",
            "NotificationConfig": {"SuccessTopic": topic, "ErrorTopic": topic},
        },
        "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 16},
    }


def test_the_containers_metrics_are_read_from_the_components_path() -> None:
    assert _properties("everything")["MetricsConfig"] == {
        "EnableDetailedObservability": True,
        "MetricPublishFrequencyInSeconds": 10,
    }
    container = _properties("everything", "InferenceComponent")["Specification"]["Container"]
    read = {"MetricsEndpointPath": "/metrics", "MetricPublishFrequencyInSeconds": 10}
    assert container == {"ContainerMetricsConfig": {"MetricsEndpoints": [read]}}
    off = {"metrics": {"detailed": False}}
    assert _properties("scale_to_zero", **off)["MetricsConfig"]["EnableDetailedObservability"] is False
    assert "Container" not in _properties("scale_to_zero", "InferenceComponent", **off)["Specification"]


def test_properties_of_a_resource_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"properties\.Role: .*Model, "):
        template(configuration("private", properties={"Role": {"Path": "/"}}))


def test_secrets_of_similar_names_stay_apart() -> None:
    env = {"HF_TOKEN": "first", "HF__TOKEN": "second"}
    assert _environment(configuration("private", env=env)).items() >= env.items()


def test_a_hundred_adapters_are_short_enough() -> None:
    adapters = [{"name": f"adapter-{index}", "source": f"s3://adapters/{index}.tar.gz"} for index in range(100)]
    made = json.dumps(template(configuration("adapters", adapters=adapters)), separators=(",", ":"))
    assert len(made) < 51_200


def test_a_template_holds_no_credentials() -> None:
    made = template(configuration("real_time"))
    assert "hf_abcdefghijklmnop" not in as_yaml(made)
    assert made["Parameters"]["Secret1"]["NoEcho"] is True
    assert secrets(configuration("real_time")) == {"HF_TOKEN": "Secret1"}


def test_the_template_in_the_repository_is_that_of_the_example() -> None:
    values = merge_tables(read_file(ROOT / "examples/deploy/real_time.toml"), {"region": REGION})
    written = (ROOT / "deploy/templates/endpoint.yaml").read_text()
    assert written == as_yaml(template(read_configuration(values)))
