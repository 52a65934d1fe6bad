"""IAM policies: of the execution role, and of those who deploy."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.uploads import ecr_image

PRINCIPAL = "sagemaker.amazonaws.com"
"""SageMaker, in every partition."""

_ARN = "arn:${AWS::Partition}"
_HERE = "${AWS::Region}:${AWS::AccountId}"
"""Wherever the stack is: CloudFormation's own parameters, for `Fn::Sub`."""


def trust_policy() -> dict[str, Any]:
    """Lets SageMaker take the role."""
    return _document({"Effect": "Allow", "Principal": {"Service": PRINCIPAL}, "Action": "sts:AssumeRole"})


def execution_policy(configuration: Configuration) -> dict[str, Any]:
    """The least that the execution role of this deployment needs, with CloudFormation's parameters in it."""
    statements = [
        _allow("Logs", _LOGS, f"{_ARN}:logs:{_HERE}:log-group:/aws/sagemaker/*"),
        _allow("Metrics", ["cloudwatch:PutMetricData"], "*"),
    ]
    image = ecr_image(configuration.image)
    if image:
        repository = f"{_ARN}:ecr:{image.region}:{image.account}:repository/{image.repository}"
        statements += [_allow("Registry", ["ecr:GetAuthorizationToken"], "*"), _allow("Image", _PULL, repository)]
    read = [configuration.model] if configuration.from_s3 else []
    read += [adapter.source for adapter in configuration.adapters]
    if read:
        buckets = sorted({location.removeprefix("s3://").partition("/")[0] for location in read})
        listed = [f"{_ARN}:s3:::{bucket}" for bucket in buckets]
        statements += [
            _allow("List", ["s3:GetBucketLocation", "s3:ListBucket"], listed),
            _allow("Read", ["s3:GetObject"], [_objects(location) for location in read]),
        ]
    written = [configuration.capture.destination] if configuration.capture else []
    if asynchronous := configuration.asynchronous:
        written += [location for location in (asynchronous.output, asynchronous.failure) if location]
        if topics := [topic for topic in (asynchronous.success_topic, asynchronous.error_topic) if topic]:
            statements.append(_allow("Notify", ["sns:Publish"], topics))
    if written:
        statements.append(_allow("Write", ["s3:PutObject"], [_objects(location) for location in written]))
    if configuration.vpc:
        statements.append(_allow("Network", _NETWORK, "*"))
    if configuration.kms_key:
        statements.append(_allow("Keys", _KEYS, _key(configuration.kms_key)))
    return _document(*statements)


def caller_policy(account: str, region: str, role: str | None = None, repository: str | None = None) -> dict[str, Any]:
    """What `slipway deploy | status | invoke | logs | update | destroy` need, for one account and region.

    CloudFormation makes the resources with the caller's permissions. Without `role`, these include roles of stacks;
    with `repository`, what `slipway deploy --push` needs. `sagemaker:CallWithBearerToken` is what OpenAI's clients need
    on an endpoint's /openai/v1 routes.

    Raises:
        botocore.exceptions.UnknownRegionError: there is no such region.
    """
    import botocore.session

    arn = f"arn:{botocore.session.get_session().get_partition_for_region(region)}"
    here = f"{region}:{account}"
    kinds = ("model", "endpoint-config", "endpoint", "inference-component")
    roles = role or f"{arn}:iam::{account}:role/slipway-*"
    statements = [
        _allow("Stack", _STACK, f"{arn}:cloudformation:{here}:stack/slipway-*/*"),
        _allow("Hosting", _HOSTING, [f"{arn}:sagemaker:{here}:{kind}/*" for kind in kinds]),
        _allow("Lists", _LISTS, "*"),
        _allow("Invoke", _INVOKE, [f"{arn}:sagemaker:{here}:{kind}/*" for kind in kinds[2:]]),
        {
            **_allow("PassRole", ["iam:PassRole"], roles),
            "Condition": {"StringEquals": {"iam:PassedToService": PRINCIPAL}},
        },
        _allow("Scaling", _SCALING, "*"),
        {
            **_allow("ScalingRole", ["iam:CreateServiceLinkedRole"], f"{arn}:iam::*:role/aws-service-role/*"),
            "Condition": {"StringLike": {"iam:AWSServiceName": "sagemaker.application-autoscaling.amazonaws.com"}},
        },
        _allow("Alarms", _ALARMS, f"{arn}:cloudwatch:{here}:alarm:*"),
        _allow("Logs", ["logs:FilterLogEvents"], f"{arn}:logs:{here}:log-group:/aws/sagemaker/*"),
    ]
    if role is None:
        statements.append(_allow("MakeRole", _MAKE_ROLE, roles))
    if repository:
        statements += [
            _allow("Registry", ["ecr:GetAuthorizationToken"], "*"),
            _allow("Repository", _REPOSITORY, f"{arn}:ecr:{here}:repository/{repository}"),
        ]
    return _document(*statements)


def _actions(service: str, names: str) -> list[str]:
    return [f"{service}:{name}" for name in names.split()]


_LOGS = _actions("logs", "CreateLogGroup CreateLogStream DescribeLogStreams PutLogEvents")
_PULL = _actions("ecr", "BatchCheckLayerAvailability BatchGetImage GetDownloadUrlForLayer")
_KEYS = _actions("kms", "CreateGrant Decrypt DescribeKey GenerateDataKey")
_NETWORK = _actions(
    "ec2",
    "CreateNetworkInterface CreateNetworkInterfacePermission DeleteNetworkInterface DeleteNetworkInterfacePermission "
    "DescribeDhcpOptions DescribeNetworkInterfaces DescribeSecurityGroups DescribeSubnets DescribeVpcs",
)
_STACK = _actions(
    "cloudformation",
    "CreateChangeSet DeleteChangeSet DeleteStack DescribeChangeSet DescribeStackEvents DescribeStacks "
    "ExecuteChangeSet GetTemplate ListStackResources TagResource",
)
_HOSTING = _actions(
    "sagemaker",
    "CreateModel DescribeModel DeleteModel CreateEndpointConfig DescribeEndpointConfig DeleteEndpointConfig "
    "CreateEndpoint DescribeEndpoint DeleteEndpoint UpdateEndpoint CreateInferenceComponent "
    "DescribeInferenceComponent DeleteInferenceComponent UpdateInferenceComponent "
    "UpdateInferenceComponentRuntimeConfig AddTags DeleteTags ListTags",
)
_LISTS = ["sagemaker:ListInferenceComponents", "cloudwatch:DescribeAlarms", "sts:GetCallerIdentity"]
_INVOKE = _actions(
    "sagemaker", "InvokeEndpoint InvokeEndpointAsync InvokeEndpointWithResponseStream CallWithBearerToken"
)
_SCALING = _actions(
    "application-autoscaling",
    "DeleteScalingPolicy DeregisterScalableTarget DescribeScalableTargets DescribeScalingPolicies "
    "DescribeScheduledActions ListTagsForResource PutScalingPolicy RegisterScalableTarget TagResource UntagResource",
)
_MAKE_ROLE = _actions(
    "iam",
    "CreateRole DeleteRole DeleteRolePolicy GetRole GetRolePolicy ListAttachedRolePolicies ListRolePolicies "
    "PutRolePolicy TagRole UntagRole UpdateAssumeRolePolicy UpdateRoleDescription",
)
_ALARMS = _actions("cloudwatch", "DeleteAlarms ListTagsForResource PutMetricAlarm TagResource UntagResource")
_REPOSITORY = _PULL + _actions(
    "ecr",
    "CompleteLayerUpload CreateRepository DeleteRepository DescribeRepositories InitiateLayerUpload "
    "ListTagsForResource PutImage TagResource UploadLayerPart",
)


def _document(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(name: str, actions: list[str], resources: str | list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}


def _objects(location: str) -> str:
    path = location.removeprefix("s3://")
    if "/" not in path:
        path += "/"
    return f"{_ARN}:s3:::{path}" if path.endswith(".tar.gz") else f"{_ARN}:s3:::{path}*"


def _key(key: str) -> str:
    if key.startswith("arn:") and ":alias/" not in key:
        return key
    # A policy cannot name a key by its alias.
    return f"{_ARN}:kms:{_HERE}:key/" + ("*" if "alias/" in key else key)
