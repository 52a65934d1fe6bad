from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deploy.sagemaker.configuration import (
    LONGEST_NAME,
    Configuration,
    ConfigurationError,
    laid_over,
    name_from_model,
    read_configuration,
    read_file,
    read_options,
)
from deploy.sagemaker.template import template
from tests.unit.deploy.sagemaker.configurations import VALUES, configuration

ROOT = Path(__file__).parents[4]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "my_llm"}, 'name is "my_llm"; expected letters, digits and hyphens'),
    ({"name": "x" * 49}, "at most 48"),
    ({"model": "a b"}, 'model is "a b"; expected a hub id such as org/model, or an s3:// prefix'),
    ({"model": 7}, 'model is "7"; expected a hub id'),
    ({"role": "models"}, 'role is "models"; expected the ARN of an IAM role'),
    ({"role": None, "create_role": False}, "role: missing; expected the ARN of an execution role, as create_role is"),
    ({"image": "docker.io/slipway"}, "SageMaker takes other registries only through a vpc"),
    (
        {"image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/slipway"},
        "image is in us-east-1; expected one in eu-west-1",
    ),
    ({"push": "slipway:gpu"}, "expected none, as push says which image it is"),
    ({"instance_type": "g5.xlarge"}, 'instance_type is "g5.xlarge"; expected an instance type such as'),
    ({"instance_type": "ml.p3.2xlarge"}, "too old for CUDA 13.0"),
    ({"instance_type": "ml.inf2.xlarge"}, "has Neuron accelerators"),
    ({"pools": [{"instance_type": "ml.g5.xlarge"}]}, "expected none, as there are pools"),
    ({"instance_type": None}, "instance_type: missing"),
    ({"pools": ["ml.g5.xlarge"]}, 'pools[0] is "ml.g5.xlarge"; expected a table'),
    ({"cuda": "14.0"}, "CUDA 14.0 is newer than any driver"),
    ({"cuda": "thirteen"}, "expected a version such as 13.0"),
    ({"startup_timeout": 10}, 'startup_timeout is "10"; expected a whole number from 60 to 3600'),
    ({"instances": True}, 'instances is "True"; expected a whole number from 1 to 1000'),
    ({"component": {"cpus": float("nan")}}, "expected a number above 0"),
    ({"network_isolation": "yes"}, "expected true or false"),
    ({"network_isolation": True}, "as network_isolation keeps the container from reaching a hub"),
    ({"env": {"HF_MODEL_ID": "x/y"}}, "the field model says which model it is"),
    *(
        ({"env": {name: "x/y"}}, f"env.{name} is set; expected no such variable")
        for name in ("MODEL_ID", "SM_VLLM_MODEL", "OPTION_MODEL_ID")
    ),
    ({"env": {"1X": "x"}}, "env.1X"),
    ({"env": ["X"]}, "expected a table"),
    ({"tags": {"slipway:endpoint": "x"}}, "tags.slipway:endpoint"),
    ({"autoscaling": {"min": 0, "max": 2, "target": 1}}, "only inference components"),
    ({"autoscaling": {"min": 3, "max": 2, "target": 1}}, "at least min, which is 3"),
    ({"autoscaling": {"min": 1, "max": 2}}, "autoscaling.target: missing"),
    ({"capacity": {"min": 0, "max": 2}}, "only inference components have it"),
    ({"adapters": [{"name": "a", "source": "s3://b/a.tar.gz"}]}, "an adapter is a component on another"),
    (
        {
            "component": {},
            "env": {"OPTION_ENABLE_LORA": False},
            "adapters": [{"name": "a", "source": "s3://b/a.tar.gz"}],
        },
        "expected OPTION_ENABLE_LORA = true in env beside it",
    ),
    ({"component": {"gpus": 2}}, "component.gpus is 2; expected at most 1, which ml.g6e.xlarge has"),
    ({"component": {}, "instance_type": "ml.g7.2xlarge"}, "component.gpus: missing; expected a number"),
    ({"component": {}, "async": {"output": "s3://b/"}}, "SageMaker has no asynchronous components"),
    ({"component": {}, "adapters": [{"name": "a", "source": "s3://b/a.zip"}]}, "adapters[0].source"),
    (
        {
            "component": {},
            "env": {"OPTION_ENABLE_LORA": True},
            "adapters": [{"name": name, "source": "s3://b/a.tar.gz"} for name in ("a-b", "a-B")],
        },
        "expected different names",
    ),
    ({"routing": "KV_AWARE"}, "expected one of LEAST_OUTSTANDING_REQUESTS, RANDOM, PREFIX_AWARE"),
    ({"metrics": {"path": "/other"}}, "metrics.path: there is no such field"),
    ({"component": {"placement": "SPREAD"}}, "component.placement: there is no such field"),
    ({"image": None, "role": None, "push": "slipway:gpu"}, "account: missing"),
    ({"upload": "model/"}, "upload is set; expected an s3:// prefix as model"),
    ({"vpc": {"subnets": ["subnet-1"]}}, "vpc.security_groups: missing"),
    ({"metrics": {"period": 15}}, "expected one of 10, 30, 60"),
    ({"rollout": {"strategy": "fast"}}, "expected one of blue-green, canary, linear, rolling"),
    ({"nmae": "x"}, "nmae: there is no such field"),
    ({"vpc": {"subnet": []}}, "vpc.subnet: there is no such field; there are security_groups, subnets"),
]


def _plain(**changes: Any) -> dict[str, Any]:
    values = {key: value for key, value in VALUES["real_time"].items() if key != "autoscaling"}
    return {key: value for key, value in laid_over(values, changes).items() if value is not None}


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_said_with_field_value_and_what_was_expected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(**changes))
    assert said in "\n".join(raised.value.problems)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(name="_", instances=0, nmae=1))
    assert len(raised.value.problems) == 3


def test_what_is_wrong_on_the_command_line_is_said_as_in_a_file() -> None:
    options = read_options({"instance_type": "g5", "set": ["autoscaling.max=-1"]})
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(laid_over(VALUES["real_time"], options))
    assert 'instance_type is "g5"; ' in raised.value.problems[0]
    assert 'autoscaling.max is "-1"; ' in raised.value.problems[1]


def test_a_wrong_credential_is_not_shown() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_configuration(_plain(env={"HF_TOKEN": ["hf_abcdefghijklmnop"]}))
    assert "abcdefghijklmnop" not in str(raised.value)


def test_a_model_from_s3_may_name_its_directory_and_bring_its_own_settings() -> None:
    adapters = [{"name": "a", "source": "s3://b/a.tar.gz"}]
    env = {"OPTION_MODEL_ID": "/opt/ml/model/weights"}
    read = read_configuration(_plain(model="s3://b/m/", component={}, adapters=adapters, env=env))
    assert read.env["OPTION_MODEL_ID"] == "/opt/ml/model/weights"


def test_options_go_before_the_file() -> None:
    options = read_options(
        {
            "name": "other",
            "role": None,
            "instances": 2,
            "env": ["A=1", "B=x=y"],
            "tag": ["team=ads"],
            "set": ["autoscaling.max=9", "routing=RANDOM", 'vpc={subnets=["s"], security_groups=["g"]}'],
        }
    )
    read = read_configuration(laid_over(VALUES["real_time"], options))
    assert (read.name, read.env["A"], read.env["B"], read.tags["team"]) == ("other", "1", "x=y", "ads")
    assert read.env["OPTION_MAX_MODEL_LEN"] == "8192"
    assert read.autoscaling is not None
    assert (read.autoscaling.maximum, read.routing, read.instances) == (9, "RANDOM", 2)
    assert read.vpc is not None


@pytest.mark.parametrize("options", [{"env": ["A"]}, {"tag": ["=x"]}, {"set": ["a"]}, {"set": ["a="]}])
def test_options_that_cannot_be_taken_apart_are_refused(options: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        read_options(options)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigurationError, match="not a TOML file"):
        read_file(tmp_path / "bad.toml")


def test_the_account_comes_from_the_role_and_is_that_of_the_registry() -> None:
    read = configuration("real_time", image=None, push="slipway:gpu")
    assert read.account == "111122223333"
    assert read.image == "111122223333.dkr.ecr.eu-west-1.amazonaws.com/slipway:gpu"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.sampled_from(
    [
        *Configuration.__struct_fields__,
        *("async", "adapters", "nonsense"),
    ]
)


@settings(deadline=None)
@example({"instance_type": None})
@example({"vpc": {"subnets": None, "security_groups": ["sg-1"]}})
@given(st.dictionaries(_FIELDS, _VALUES, max_size=4))
def test_whatever_a_file_says_is_read_or_refused_with_reasons(changes: dict[str, Any]) -> None:
    problems: tuple[str, ...] = ()
    try:
        made = template(read_configuration(laid_over(VALUES["scale_to_zero"], changes)))
    except ConfigurationError as error:
        made, problems = {}, error.problems
    assert bool(made) is not bool(problems)
    assert all(problem.isprintable() for problem in problems)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-1-8b-instruct"),
        ("s3://bucket/models/llama/", "llama"),
        ("s3://bucket/llama.tar.gz", "llama"),
        ("s3://bucket/", "bucket"),
        ("s3://bucket", "bucket"),
        ("___", ""),
    ],
)
def test_a_name_is_made_of_the_model(model: str, name: str) -> None:
    assert name_from_model(model) == name


@settings(deadline=None)
@given(st.text())
def test_whatever_the_model_its_name_is_one_or_empty(model: str) -> None:
    name = name_from_model(model)
    assert not name or (re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9])*", name) and len(name) <= LONGEST_NAME)


def test_every_example_is_toml_with_its_own_command_in_it() -> None:
    examples = sorted((ROOT / "examples/deploy").glob("*.toml"))
    assert len(examples) == 6
    for path in examples:
        text = path.read_text()
        assert tomllib.loads(text)["name"]
        assert f"slipway deploy examples/deploy/{path.name} --dry-run" in text
