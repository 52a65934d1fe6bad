"""Random configurations of every kind, for tests of properties that all configurations have."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from deploy.sagemaker.configuration import Configuration, ConfigurationError, read_configuration

ACCOUNT = "111122223333"
_PARTITIONS = {
    "eu-west-1": ("aws", "amazonaws.com"),
    "cn-north-1": ("aws-cn", "amazonaws.com.cn"),
    "us-gov-west-1": ("aws-us-gov", "amazonaws.com"),
    "eusc-de-east-1": ("aws-eusc", "amazonaws.eu"),
}
_TYPES = ("ml.g5.xlarge", "ml.g6e.12xlarge", "ml.p5.48xlarge", "ml.g4dn.xlarge", "ml.c7i.4xlarge", "ml.m6gd.xlarge")
_NAMES = ("my-llm", "a", "endpoint", "inference", "slipway", "variant", "x" * 48)
_PAIRS = {
    "OPTION_MAX_MODEL_LEN": 8192,
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "OPTION_ENABLE_LORA": True,
    "Image": "my-llm",
}


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Return a configuration that can be deployed. Fields that contradict others are left out."""

    def maybe(field: str, values: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {field: draw(values)} if draw(st.booleans()) else {}

    region = draw(st.sampled_from(sorted(_PARTITIONS)))
    aws, domain = _PARTITIONS[region]
    image = f"{ACCOUNT}.dkr.ecr.{region}.{domain}/team/slipway:0.3.0-cu128"
    made = draw(st.booleans())
    serves = draw(st.sampled_from(["endpoint", "component", "async"]))
    values: dict[str, Any] = {
        "name": draw(st.sampled_from(_NAMES)),
        "model": draw(st.sampled_from(["org/model-7b", "s3://models/llama", "s3://models/llama.tar.gz"])),
        "region": region,
        "image": image,
        "env": {name: _PAIRS[name] for name in draw(st.sets(st.sampled_from(sorted(_PAIRS))))},
        **({} if made else {"role": f"arn:{aws}:iam::{ACCOUNT}:role/path/to/models"}),
        "instance_type": draw(st.sampled_from(_TYPES)),
        "instances": draw(st.sampled_from([1, 2, 7])),
        **maybe("tags", st.just({"team": "search", "app": "my-llm"})),
        **maybe("download_timeout", st.sampled_from([60, 3600])),
        **maybe("startup_timeout", st.sampled_from([60, 3600])),
        **maybe("inference_ami_version", st.just("al2-ami-sagemaker-inference-gpu-3-1")),
        **maybe("volume_gb", st.sampled_from([1, 512])),
        **maybe("reservation", st.just(f"arn:{aws}:sagemaker:{region}:{ACCOUNT}:training-plan/gpus")),
        **maybe("ssm_access", st.booleans()),
        **maybe("core_dumps", st.just("s3://dumps")),
        **maybe("rollout", _rollouts()),
        **maybe("autoscaling", _ranges({"target": 3.5})),
        **maybe("data_capture", _captures()),
        **maybe("metrics", st.sampled_from([{"detailed": False}, {"interval": 300}])),
        **maybe("prefix_aware_routing", st.just({"prefix_length": 65536, "concurrency_threshold": 1024})),
    }
    if serves == "component":
        values["component"] = {"gpus": draw(st.integers(0, 8)), "copies": draw(st.integers(0, 2))}
        values |= maybe("capacity", _ranges({}))
        values |= maybe("metrics", st.just({"interval": 10, "path": "/server/metrics-1.0"}))
        values |= maybe("adapters", st.just([{"name": "french-2", "source": "s3://adapters/french.tar.gz"}]))
    if serves == "async":
        values["async"] = {
            "output": "s3://answers/out/",
            **maybe("failure", st.just("s3://answers/failed/")),
            **maybe("concurrency", st.sampled_from([1, 1000])),
            **maybe("input", st.just("s3://questions")),
            **maybe("error_topic", st.just(f"arn:{aws}:sns:{region}:{ACCOUNT}:errors")),
        }
    for left_out in ((), *_RARE):
        try:
            return read_configuration({key: value for key, value in values.items() if key not in left_out})
        except ConfigurationError:
            continue
    raise AssertionError(values)


# Fields that often contradict others. The first combination that gives a valid configuration is left out.
_RARE = (
    ("prefix_aware_routing",),
    ("prefix_aware_routing", "adapters"),
    ("prefix_aware_routing", "adapters", "autoscaling"),
    ("prefix_aware_routing", "adapters", "autoscaling", "capacity"),
)


def _ranges(more: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([(0, 2), (1, 8), (2, 2)]).map(lambda ends: {"min": ends[0], "max": ends[1], **more})


def _captures() -> st.SearchStrategy[dict[str, Any]]:
    modes = st.sampled_from([["Input"], ["Output", "Input"]])
    return st.fixed_dictionaries(
        {"destination": st.just("s3://captured"), "percent": st.sampled_from([0, 100])}, optional={"modes": modes}
    )


def _rollouts() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "strategy": st.sampled_from(["blue-green", "canary", "linear", "rolling"]),
            "step_percent": st.sampled_from([10, 50]),
            "alarms": st.just(["my-llm-errors"]),
            "timeout": st.sampled_from([600, 28800]),
        }
    )
