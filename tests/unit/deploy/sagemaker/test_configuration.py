from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from hypothesis import example, given
from hypothesis import strategies as st

from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    merge_tables,
    read_configuration,
    read_options,
)
from deploy.sagemaker.template import template
from tests.unit.deploy.sagemaker.configurations import VALUES, configuration

_PREFIX = {"prefix_length": 4096, "concurrency_threshold": 32}
_CAPTURE = {"destination": "s3://captured/", "percent": 1}
_SERVERLESS = {"ServerlessConfig": {"MemorySizeInMB": 6144, "MaxConcurrency": 2}}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "my_llm"}, "name: expected at most 63 letters, digits and hyphens, such as my-endpoint"),
    ({"name": "x" * 64}, "name: expected at most 63 letters"),
    ({"model": "a b"}, "model: expected the name of a model on the Hugging Face hub"),
    ({"model": 7}, "model: expected the name of a model on the Hugging Face hub"),
    ({"model": None}, "model: missing; expected the name of a model"),
    ({"image": None}, "image: missing; expected an image in a registry"),
    (
        {"image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/slipway"},
        "image is in us-east-1; expected one in eu-west-1",
    ),
    ({"image": "foo"}, "image: expected an image in a registry, such as 123456789012.dkr.ecr."),
    ({"push": "slipway:gpu", "image": "docker.io/slipway"}, "push: expected an image in ECR in the field image"),
    ({"instance_type": "g5.xlarge"}, "instance_type: expected an instance type, such as ml.g6e.xlarge"),
    ({"instance_type": None}, "instance_type: missing; expected a type such as ml.g6e.xlarge"),
    ({"properties": {"Model": 1}}, "properties[...]: expected a table"),
    ({"startup_timeout": 10}, "startup_timeout: expected an integer from 60 to 3600"),
    ({"instances": True}, "instances: expected an integer of at least 1"),
    ({"component": {"gpus": 1, "cpus": float("nan")}}, "component.cpus: expected a number above 0"),
    ({"component": {"copies": 1}}, "component.gpus: missing; expected an integer of at least 0"),
    ({"env": ["X"]}, "env: expected a table"),
    ({"autoscaling": {"min": 0, "max": 2, "target": 1}}, "only inference components"),
    ({"answer_deadline": float("inf")}, "answer_deadline"),
    ({"stream_deadline": 1e12}, "stream_deadline"),
    ({"autoscaling": {"min": 3, "max": 2, "target": 1}}, "expected at least min, which is 3"),
    (
        {"autoscaling": {"min": 0, "max": 2, "target": 1}, "component": {"gpus": 1}},
        "expected capacity.min = 0, too",
    ),
    (
        {"instance_type": None, "properties": {"EndpointConfiguration": {"ProductionVariants": {"VolumeSizeInGB": 9}}}},
        "instance_type: missing; expected a type such as ml.g6e.xlarge",
    ),
    (
        {"component": {"gpus": 1}, "adapters": [{"name": "a" * 60, "source": "s3://b/a.tar.gz"}]},
        "adapters[0].name: the component ",
    ),
    ({"autoscaling": {"min": 1, "max": 2}}, "autoscaling.target: missing; expected a number above 0"),
    (
        {"adapters": [{"name": "a", "source": "s3://b/a.tar.gz"}]},
        "an adapter is an inference component on top of another one",
    ),
    ({"component": {"gpus": 1}, "adapters": [{"name": "a", "source": "s3://b/a.zip"}]}, "adapters[0].source: "),
    (
        {
            "component": {"gpus": 1},
            "adapters": [{"name": name, "source": "s3://b/a.tar.gz"} for name in ("a-b", "a-B")],
        },
        "expected names that differ",
    ),
    (
        {"component": {"gpus": 1, "path": "/other"}},
        "component.path: there is no such field; expected one of gpus, copies, cpus, memory_mb",
    ),
    ({"upload": "model/"}, "upload: expected an s3:// prefix as model"),
    ({"rollout": {"strategy": "fast"}}, "rollout.strategy: expected blue-green, canary, linear or rolling"),
    (
        {"async": {"output": "https://a/"}},
        "async.output: expected an S3 prefix of at most 512 characters, such as s3://bucket/prefix/",
    ),
    ({"async": {"output": "s3://a/" + "b" * 506}}, "async.output: expected an S3 prefix of at most 512 characters"),
    (
        {"async": {"output": "s3://a/", "error_topic": "errors"}},
        "async.error_topic: expected the ARN of an SNS topic",
    ),
    ({"async": {"output": "s3://a/"}, "component": {"gpus": 1}}, "asynchronous calls cannot name a component"),
    (
        {"async": {"output": "s3://a/"}, "instances": 2, "prefix_aware_routing": _PREFIX},
        "routes by prefix on real-time endpoints only",
    ),
    ({"prefix_aware_routing": _PREFIX}, "prefix_aware_routing: expected at least 2 instances, not 1"),
    (
        {"prefix_aware_routing": _PREFIX, "component": {"gpus": 1}, "autoscaling": {"min": 1, "max": 4, "target": 1}},
        "prefix_aware_routing: expected at least 2 instances, not 1",
    ),
    (
        {"prefix_aware_routing": {"prefix_length": 4096}},
        "prefix_aware_routing.concurrency_threshold: missing; expected an integer from 1 to 1024",
    ),
    ({"data_capture": {"destination": "a", "percent": 1}}, "data_capture.destination: expected an S3 prefix"),
    ({"data_capture": {"percent": 1}}, "data_capture.destination: missing; expected an S3 prefix"),
    ({"data_capture": {**_CAPTURE, "modes": []}}, "data_capture.modes: expected Input or Output"),
    ({"data_capture": {**_CAPTURE, "modes": ["Both"]}}, "data_capture.modes[0]: expected Input or Output"),
    ({"metrics": {"interval": 20}}, "metrics.interval is 20; expected one of 10, 30, 60, 120, 180, 240, 300"),
    ({"metrics": {"path": "/metrics"}}, "metrics.path: expected a [component] table"),
    ({"metrics": {"path": "/a/../b"}, "component": {"gpus": 1}}, "metrics.path: expected a path, such as /metrics"),
    (
        {"metrics": {"path": "/metrics", "detailed": False}, "component": {"gpus": 1}},
        "expected metrics.detailed = true",
    ),
    ({"properties": {"EndpointConfiguration": {"ProductionVariants": _SERVERLESS}}}, "expected no ServerlessConfig"),
    ({"properties": {"EndpointConfiguration": {"ProductionVariants": [_SERVERLESS]}}}, "expected no ServerlessConfig"),
    ({"reservation": "gpus"}, "reservation: expected the ARN of a capacity reservation, such as arn:aws:sagemaker:"),
    ({"inference_ami_version": "newest one"}, "inference_ami_version: expected a version of SageMaker's machine image"),
    (
        {"capacity": {"min": 1, "max": 2, "scale_in": "all"}},
        "capacity.scale_in: expected idle-release or consolidation",
    ),
    (
        {"component": {"gpus": 1}, "capacity": {"min": 1, "max": 2, "scale_in_step": 2}},
        'capacity.scale_in_step: expected capacity.scale_in = "consolidation", too',
    ),
    ({"component": {"gpus": 1, "placement": "any"}}, "component.placement: expected spread or binpack"),
    (
        {"component": {"gpus": 1, "max_memory_mb": 512}},
        "component.max_memory_mb is 512; expected at least memory_mb, which is 1024",
    ),
    ({"nmae": "x"}, "nmae: there is no such field; did you mean name?"),
]


def _plain(**changes: Any) -> dict[str, Any]:
    values = {key: value for key, value in VALUES["real_time"].items() if key != "autoscaling"}
    return {key: value for key, value in merge_tables(values, changes).items() if value is not None}


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_said_with_its_field_and_what_was_expected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(**changes))
    assert said in "\n".join(raised.value.problems)


def test_all_fields_that_do_not_go_together_are_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(instance_type=None, upload="model/"))
    assert len(raised.value.problems) == 2


def test_all_wrong_fields_and_settings_are_said_at_once_with_the_names_that_are_meant() -> None:
    wrong = {
        "name": "my endpoint",
        "instance_typ": "ml.g5.xlarge",
        "instances": 0,
        "image": None,
        "autoscaling": {"min": "one", "max": 2},
        "env": {"OPTION_DTYPE": "bf17", "OPTION_QUANTISE": "awq", "OTHER": "x"},
    }
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(**wrong))
    problems = raised.value.problems
    places = {problem.partition(":")[0]: problem for problem in problems}
    assert places.keys() == {
        *("name", "instance_typ", "instances", "image", "autoscaling.min", "autoscaling.target"),
        *('option.dtype is "bf17" (environment', "option.quantise (environment"),
    }
    assert len(problems) == len(places)
    assert "did you mean instance_type?" in places["instance_typ"]
    assert "did you mean bf16?" in places['option.dtype is "bf17" (environment']
    assert "did you mean OPTION_QUANTIZE?" in places["option.quantise (environment"]


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"OPTION_MINE": "1", "OPTION_ENTRYPOINT": "my_module"}},  # the handler may read it
        {"env": {"OPTION_MINE": "1"}, "model": "s3://bucket/model/"},  # the model may have a handler
        {"env": {"OPTION_MINE": "1", "SERVING_ALLOW_UNKNOWN_SETTINGS": "true"}},
        {"env": {"OPTION_SWAP_SPACE": "4", "SERVING_SERVICE_HOST": "10.0.0.1"}},
        {"env": {"SERVING_API_KEYS_FILE": "/opt/ml/keys"}},  # a path in the container
        {"env": {"OPTION_TASK": "fill-mask", "OPTION_DTYPE": "int8"}, "model": "s3://bucket/model.tar.gz"},
        {"env": {"OPTION_ENGINE": "OnnxRuntime", "OPTION_MINE": "true"}},
        {"env": {"OPTION_MAX_MODEL_LEN": "{{resolve:ssm:length}}", "OPTION_DTYPE": "{{resolve:ssm:dtype}}"}},
        {"env": {"OPTION_ROLLING_BATCH": "disable", "OPTION_KV_CACHE_DTYPE": "int8"}},
    ],
)
def test_settings_that_somebody_may_know_are_not_refused(changes: dict[str, Any]) -> None:
    assert read_configuration(_plain(**changes)).environment.items() >= changes["env"].items()


@pytest.mark.parametrize("code", ["model.py", "code/inference.py"])
def test_options_of_an_uploaded_model_with_code_are_its_own(tmp_path: Path, code: str) -> None:
    (tmp_path / code).parent.mkdir(exist_ok=True)
    (tmp_path / code).write_text("def handle(inputs): ...\n")
    (tmp_path / "serving.properties").write_text("option.task=fill-mask\noption.dtype=int8\noption.seed=auto\n")
    read_configuration(_plain(upload=str(tmp_path), model="s3://bucket/model/"))


def test_the_settings_of_an_uploaded_directory_are_checked(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("# mine\noption.dtype=bf17\n")
    with pytest.raises(ConfigurationError, match=r'option.dtype is "bf17" \(serving.properties, line 2\)'):
        read_configuration(_plain(upload=str(tmp_path), model="s3://bucket/model/"))


def test_a_wrong_credential_is_not_shown() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(env={"HF_TOKEN": ["hf_abcdefghijklmnop"]}))
    assert "abcdefghijklmnop" not in str(raised.value)


def test_options_go_before_the_file() -> None:
    options = read_options(
        {
            "name": "other",
            "role": None,
            "env": ["A=1", "B=x=y"],
            "set": [
                "instances=2",
                "tags.team=ads",
                "autoscaling.max=9",
                'properties.Model.VpcConfig={Subnets=["s"], SecurityGroupIds=["g"]}',
            ],
        }
    )
    read = read_configuration(merge_tables(VALUES["real_time"], options))
    assert (read.name, read.labels) == ("other", {"team": "ads"})
    environment = {"OPTION_MAX_MODEL_LEN": "8192", "HF_TOKEN": "hf_abcdefghijklmnop", "A": "1", "B": "x=y"}
    assert read.environment == environment
    assert read.autoscaling is not None
    assert (read.autoscaling.max, read.instances) == (9, 2)
    assert read.properties["Model"]["VpcConfig"] == {"Subnets": ["s"], "SecurityGroupIds": ["g"]}


def test_truth_values_and_numbers_of_the_environment_are_written_as_in_a_properties_file() -> None:
    read = configuration("private", env={"OPTION_ENABLE_LORA": True, "OPTION_WATERMARK": 0.5, "OPTION_SEED": 7})
    assert read.environment == {"OPTION_ENABLE_LORA": "true", "OPTION_WATERMARK": "0.5", "OPTION_SEED": "7"}


_LIMITS = [
    ("PrefixAwareRoutingConfig", "PrefixLength", "prefix_aware_routing.prefix_length"),
    ("PrefixAwareRoutingConfig", "ConcurrencyThreshold", "prefix_aware_routing.concurrency_threshold"),
    ("AsyncInferenceClientConfig", "MaxConcurrentInvocationsPerInstance", "async.concurrency"),
    ("DataCaptureConfig", "InitialSamplingPercentage", "data_capture.percent"),
    ("ProductionVariant", "VolumeSizeInGB", "volume_gb"),
    ("ProductionVariantManagedInstanceScalingScaleInPolicy", "MaximumStepSize", "capacity.scale_in_step"),
    ("ProductionVariantManagedInstanceScalingScaleInPolicy", "CooldownInMinutes", "capacity.scale_in_cooldown"),
    ("RollingUpdatePolicy", "MaximumExecutionTimeoutInSeconds", "rollout.timeout"),
]


def _holds(kind: str, path: str) -> bool:
    """Return True if a configuration has the table of a field."""
    return "." not in path or path.partition(".")[0] in VALUES[kind]


@pytest.mark.parametrize(("shape", "member", "path"), _LIMITS, ids=[path for _, _, path in _LIMITS])
def test_the_limits_of_a_number_are_those_of_sagemakers_service_model(shape: str, member: str, path: str) -> None:
    known: Any = get_session().get_service_model("sagemaker").shape_for(shape)
    least, most = (known.members[member].metadata[end] for end in ("min", "max"))
    kind = next(kind for kind in ("private", "asynchronous", "everything") if _holds(kind, path))

    def read(number: int) -> Configuration:
        return read_configuration(merge_tables(VALUES[kind], read_options({"set": [f"{path}={number}"]})))

    assert read(least) != read(most)
    for number in (least - 1, most + 1):
        with pytest.raises(ConfigurationError, match=rf"^{re.escape(path)}: .*{least} to {most}$"):
            read(number)


@pytest.mark.parametrize(
    "instances",
    [
        {"instances": 2},
        {"autoscaling": {"min": 1, "max": 2, "target": 1}},
        {"component": {"gpus": 1}, "capacity": {"min": 1, "max": 2}},
    ],
    ids=["instances", "autoscaling", "capacity"],
)
def test_prefixes_are_routed_where_two_instances_can_run(instances: dict[str, Any]) -> None:
    assert read_configuration(_plain(prefix_aware_routing=_PREFIX, **instances)).most_instances == 2


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.sampled_from([*Configuration.__struct_fields__, "async", "adapters", "nonsense"])


@example({"instance_type": None})
@example({"properties": {"EndpointConfiguration": {"ProductionVariants": {"VolumeSizeInGB": 1}}}})
@given(st.dictionaries(_FIELDS, _VALUES, max_size=4))
def test_whatever_a_file_says_is_read_or_refused_with_reasons(changes: dict[str, Any]) -> None:
    problems: tuple[str, ...] = ()
    try:
        made = template(read_configuration(merge_tables(VALUES["scale_to_zero"], changes)))
    except ConfigurationError as error:
        made, problems = {}, error.problems
    assert bool(made) is not bool(problems)
