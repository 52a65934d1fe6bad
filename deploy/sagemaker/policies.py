"""IAM policy documents: what the execution role may do, who may take it, and what someone who deploys may do."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker import images
from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.partitions import partition

PRINCIPAL = "sagemaker.amazonaws.com"


def trust_policy() -> dict[str, Any]:
    """Lets SageMaker take the role."""
    return _document({"Effect": "Allow", "Principal": {"Service": PRINCIPAL}, "Action": "sts:AssumeRole"})


def execution_policy(configuration: Configuration) -> dict[str, Any]:
    """The least that the execution role of this deployment needs."""
    aws, region, account = partition(configuration.region), configuration.region, configuration.account
    statements = [
        _allow("Logs", _LOGS, f"arn:{aws}:logs:{region}:{account}:log-group:/aws/sagemaker/*"),
        _allow("Metrics", ["cloudwatch:PutMetricData"], "*"),
    ]
    image = images.ecr_image(configuration.image)
    if image:
        repository = f"arn:{aws}:ecr:{image.region}:{image.account}:repository/{image.repository}"
        statements += [_allow("Registry", ["ecr:GetAuthorizationToken"], "*"), _allow("Image", _PULL, repository)]
    read = [place for place in (configuration.model, *_adapters(configuration)) if place.startswith("s3://")]
    if read:
        statements += _reading(aws, read)
    written = _written(configuration)
    if written:
        statements.append(_allow("Write", ["s3:PutObject"], [_objects(aws, place) for place in written]))
    topics = _topics(configuration)
    if topics:
        statements.append(_allow("Notify", ["sns:Publish"], topics))
    if configuration.vpc:
        statements.append(_allow("Network", _NETWORK, "*"))
    if configuration.kms_key:
        statements.append(_allow("Keys", _KEYS, _key(configuration)))
    return _document(*statements)


def caller_policy(account: str, region: str, role: str) -> dict[str, Any]:
    """What `slipway deploy | status | invoke | logs | update | destroy` need, for one account and region.

    `sagemaker:CallWithBearerToken` is what OpenAI's clients need on an endpoint's /openai/v1 routes.
    """
    aws = partition(region)
    sagemaker = f"arn:{aws}:sagemaker:{region}:{account}"
    kinds = ("model", "endpoint-config", "endpoint", "inference-component")
    return _document(
        _allow("Hosting", _HOSTING, [f"{sagemaker}:{kind}/*" for kind in kinds]),
        _allow("Lists", ["sagemaker:ListModels", "sagemaker:ListEndpointConfigs", *_LISTS], "*"),
        _allow("Invoke", _INVOKE, [f"{sagemaker}:endpoint/*", f"{sagemaker}:inference-component/*"]),
        {
            **_allow("PassRole", ["iam:PassRole"], role),
            "Condition": {"StringEquals": {"iam:PassedToService": PRINCIPAL}},
        },
        _allow("CheckRole", ["iam:GetRole", "iam:SimulatePrincipalPolicy"], role),
        _allow("Scaling", _SCALING, "*"),
        {
            **_allow("ScalingRole", ["iam:CreateServiceLinkedRole"], f"arn:{aws}:iam::*:role/aws-service-role/*"),
            "Condition": {"StringLike": {"iam:AWSServiceName": "sagemaker.application-autoscaling.amazonaws.com"}},
        },
        _allow("Alarms", _ALARMS, f"arn:{aws}:cloudwatch:{region}:{account}:alarm:*"),
        _allow("Logs", ["logs:FilterLogEvents"], f"arn:{aws}:logs:{region}:{account}:log-group:/aws/sagemaker/*"),
    )


def push_policy(account: str, region: str, repository: str) -> dict[str, Any]:
    """What `slipway deploy --push` needs beyond `caller_policy`."""
    arn = f"arn:{partition(region)}:ecr:{region}:{account}:repository/{repository}"
    return _document(
        _allow("Registry", ["ecr:GetAuthorizationToken"], "*"),
        _allow("Repository", _REPOSITORY, arn),
    )


_LOGS = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
_PULL = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
_KEYS = ["kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"]
_NETWORK = [
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
]
_LISTS = ["sagemaker:ListInferenceComponents", "cloudwatch:DescribeAlarms", "sts:GetCallerIdentity"]
_HOSTING = [
    *(
        f"sagemaker:{verb}{noun}"
        for noun in ("Model", "EndpointConfig", "Endpoint", "InferenceComponent")
        for verb in ("Create", "Describe", "Delete")
    ),
    "sagemaker:UpdateEndpoint",
    "sagemaker:UpdateInferenceComponent",
    "sagemaker:AddTags",
    "sagemaker:ListTags",
]
_INVOKE = [
    "sagemaker:InvokeEndpoint",
    "sagemaker:InvokeEndpointAsync",
    "sagemaker:InvokeEndpointWithResponseStream",
    "sagemaker:CallWithBearerToken",
]
_SCALING = [
    "application-autoscaling:DeleteScalingPolicy",
    "application-autoscaling:DeregisterScalableTarget",
    "application-autoscaling:DescribeScalableTargets",
    "application-autoscaling:DescribeScalingPolicies",
    "application-autoscaling:ListTagsForResource",
    "application-autoscaling:PutScalingPolicy",
    "application-autoscaling:RegisterScalableTarget",
    "application-autoscaling:TagResource",
]
_ALARMS = [
    "cloudwatch:DeleteAlarms",
    "cloudwatch:ListTagsForResource",
    "cloudwatch:PutMetricAlarm",
    "cloudwatch:TagResource",
]
_REPOSITORY = [
    *_PULL,
    "ecr:CompleteLayerUpload",
    "ecr:CreateRepository",
    "ecr:DeleteRepository",
    "ecr:DescribeRepositories",
    "ecr:InitiateLayerUpload",
    "ecr:ListTagsForResource",
    "ecr:PutImage",
    "ecr:TagResource",
    "ecr:UploadLayerPart",
]


def _document(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(name: str, actions: list[str], resources: str | list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}


def _adapters(configuration: Configuration) -> list[str]:
    return [adapter.source for adapter in configuration.adapters]


def _written(configuration: Configuration) -> list[str]:
    places = [configuration.capture.destination] if configuration.capture else []
    if configuration.asynchronous:
        places.append(configuration.asynchronous.output)
        places += [configuration.asynchronous.failure] if configuration.asynchronous.failure else []
    return places


def _topics(configuration: Configuration) -> list[str]:
    found = configuration.asynchronous
    return [topic for topic in (found.success_topic, found.error_topic) if topic] if found else []


def _reading(aws: str, places: list[str]) -> list[dict[str, Any]]:
    buckets = sorted({place.removeprefix("s3://").partition("/")[0] for place in places})
    return [
        _allow("List", ["s3:GetBucketLocation", "s3:ListBucket"], [f"arn:{aws}:s3:::{name}" for name in buckets]),
        _allow("Read", ["s3:GetObject"], [_objects(aws, place) for place in places]),
    ]


def _objects(aws: str, place: str) -> str:
    location = place.removeprefix("s3://")
    if "/" not in location:
        location += "/"
    return f"arn:{aws}:s3:::{location}" if location.endswith(".tar.gz") else f"arn:{aws}:s3:::{location}*"


def _key(configuration: Configuration) -> str:
    key = configuration.kms_key or ""
    if key.startswith("arn:") and ":alias/" not in key:
        return key
    arn = f"arn:{partition(configuration.region)}:kms:{configuration.region}:{configuration.account}:key"
    # A policy cannot name a key by its alias.
    return f"{arn}/*" if "alias/" in key else f"{arn}/{key}"
