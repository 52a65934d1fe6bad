"""Configurations that tests share: one for each kind of deployment, and random mixtures of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from deploy.sagemaker.configuration import Configuration, ConfigurationError, merge_tables, read_configuration

ACCOUNT, REGION = "111122223333", "eu-west-1"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/models"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/slipway:0.3.0-cu130"

_BASE: dict[str, Any] = {
    "name": "my-llm",
    "model": "s3://models/llama/",
    "image": IMAGE,
    "role": ROLE,
    "region": REGION,
    "instance_type": "ml.g6e.xlarge",
}
_COMPONENT = {"component": {"gpus": 1}, "capacity": {"min": 0, "max": 2}}
_ZERO = {"autoscaling": {"min": 0, "max": 2, "target": 8}}

VALUES: dict[str, dict[str, Any]] = {
    "real_time": {
        **_BASE,
        "model": "org/model-7b",
        "env": {"OPTION_MAX_MODEL_LEN": 8192, "HF_TOKEN": "hf_abcdefghijklmnop"},
        "tags": {"team": "search"},
        "autoscaling": {"min": 1, "max": 4, "target": 12.5},
    },
    "asynchronous": {
        **_BASE,
        **_ZERO,
        "async": {
            "output": "s3://answers/out/",
            "failure": "s3://answers/failed/",
            "input": "s3://questions/",
            "concurrency": 16,
            "success_topic": "arn:aws:sns:eu-west-1:111122223333:answers",
            "error_topic": "arn:aws:sns:eu-west-1:111122223333:answers",
        },
    },
    "scale_to_zero": {**_BASE, **_COMPONENT, **_ZERO},
    "adapters": {
        **_BASE,
        **_COMPONENT,
        "env": {"OPTION_ENABLE_LORA": True},
        "adapters": [
            {"name": "french", "source": "s3://adapters/french.tar.gz"},
            {"name": "german", "source": "s3://adapters/german.tar.gz"},
        ],
    },
    "private": {
        **_BASE,
        "instances": 2,
        "prefix_aware_routing": {"prefix_length": 4096, "concurrency_threshold": 32},
        "data_capture": {"destination": "s3://captured/", "percent": 20},
        "properties": {
            "Model": {
                "EnableNetworkIsolation": True,
                "VpcConfig": {
                    "Subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"],
                    "SecurityGroupIds": ["sg-0123456789abcdef0"],
                },
            },
            "EndpointConfiguration": {
                "KmsKeyId": "1234abcd-12ab-34cd-56ef-1234567890ab",
                "ProductionVariants": {
                    "VolumeSizeInGB": 200,
                },
            },
        },
    },
    "everything": {
        **{key: value for key, value in _BASE.items() if key not in ("instance_type", "role")},
        **_COMPONENT,
        **_ZERO,
        "push": "slipway:gpu",
        "component": {"gpus": 1, "cpus": 2.0, "max_memory_mb": 4096, "placement": "binpack"},
        "capacity": {
            "min": 0,
            "max": 2,
            "scale_in": "consolidation",
            "scale_in_step": 2,
            "scale_in_cooldown": 5,
        },
        "inference_ami_version": "al2-ami-sagemaker-inference-gpu-3-1",
        "volume_gb": 256,
        "reservation": "arn:aws:sagemaker:eu-west-1:111122223333:training-plan/gpus",
        "ssm_access": True,
        "core_dumps": "s3://dumps/llm/",
        "rollout": {"strategy": "rolling", "timeout": 7200},
        "prefix_aware_routing": {"prefix_length": 1024, "concurrency_threshold": 1},
        "data_capture": {"destination": "s3://captured/all", "percent": 100, "modes": ["Output"]},
        "metrics": {"interval": 10, "path": "/metrics"},
        "adapters": [{"name": "french", "source": "s3://adapters/french.tar.gz"}],
        "properties": {
            "EndpointConfiguration": {
                "ProductionVariants": {
                    "InstancePools": [
                        {"InstanceType": "ml.g6e.xlarge", "Priority": 1},
                        {"InstanceType": "ml.g5.2xlarge", "Priority": 2},
                    ],
                    "VariantInstanceProvisionTimeoutInSeconds": 900,
                }
            },
            "Role": {"ManagedPolicyArns": ["arn:aws:iam::aws:policy/AmazonS3ReadOnlyAccess"]},
        },
    },
}


def configuration(name: str, /, **changes: Any) -> Configuration:
    """Return one of `VALUES`, with changes."""
    return read_configuration(merge_tables(VALUES[name], changes))


_PARTITIONS = (
    (REGION, "aws", "amazonaws.com"),
    ("cn-north-1", "aws-cn", "amazonaws.com.cn"),
    ("us-gov-west-1", "aws-us-gov", "amazonaws.com"),
    ("eusc-de-east-1", "aws-eusc", "amazonaws.eu"),
)
_ROLLOUTS = [{"strategy": strategy, "timeout": 600} for strategy in ("blue-green", "canary", "linear", "rolling")]


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Return a configuration that can be deployed: one of `VALUES`, or a mixture of two without some fields."""
    kinds = st.sampled_from([_BASE | VALUES[name] | {"properties": {}} for name in VALUES])
    values = draw(kinds) | draw(st.fixed_dictionaries({}, optional={"rollout": st.sampled_from(_ROLLOUTS)}))
    mixed = draw(kinds) | values
    for field in draw(st.sets(st.sampled_from(sorted(mixed.keys() - _BASE.keys() | {"role"})))):
        del mixed[field]
    region, aws, domain = draw(st.sampled_from(_PARTITIONS))
    fewer = {key: value for key, value in mixed.items() if key not in ("prefix_aware_routing", "component", "adapters")}
    for candidate in (mixed, fewer, values):
        text = json.dumps(candidate).replace(REGION, region).replace("arn:aws:", f"arn:{aws}:")
        try:
            return read_configuration(json.loads(text.replace("amazonaws.com", domain)))
        except ConfigurationError:
            continue
    raise AssertionError(values)
