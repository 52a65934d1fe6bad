"""The execution role that a stack creates by default: which service may assume it, and its minimal permissions."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.ecr import ecr_image

Statement = dict[str, Any]

_OF_INTERFACES = (
    "CreateNetworkInterface CreateNetworkInterfacePermission DeleteNetworkInterface DeleteNetworkInterfacePermission "
    "DescribeDhcpOptions DescribeNetworkInterfaces DescribeSecurityGroups DescribeSubnets DescribeVpcs"
)


def trust_policy() -> dict[str, Any]:
    """Return the policy that lets SageMaker assume the role."""
    principal = {"Service": "sagemaker.amazonaws.com"}  # The name is the same in every partition.
    return _document({"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"})


def execution_policy(configuration: Configuration) -> dict[str, Any]:
    """Return the permissions of the containers. CloudFormation inserts the partition, the region and the account."""
    logs = _arn("logs:${AWS::Region}:${AWS::AccountId}:log-group:/aws/sagemaker/*")
    statements = [
        _allow("Logs", "logs", "CreateLogGroup CreateLogStream DescribeLogStreams PutLogEvents", logs),
        _allow("Metrics", "cloudwatch", "PutMetricData", "*"),
    ]
    if image := ecr_image(configuration.image):
        repository = _arn(f"ecr:{image.region}:{image.account}:repository/{image.repository}")
        statements += [
            _allow("Registry", "ecr", "GetAuthorizationToken", "*"),
            _allow("Image", "ecr", "BatchCheckLayerAvailability BatchGetImage GetDownloadUrlForLayer", repository),
        ]
    if any(configuration.properties.get(name, {}).get("VpcConfig") for name in ("Model", "EndpointConfiguration")):
        # SageMaker uses this role to connect a container to the VPC.
        statements.append(_allow("Network", "ec2", _OF_INTERFACES, "*"))
    read = [configuration.model] if configuration.from_s3 else []
    read += [adapter.source for adapter in configuration.adapters]
    asynchronous, capture = configuration.asynchronous, configuration.data_capture
    read += [asynchronous.input] if asynchronous and asynchronous.input else []
    if read:
        buckets = sorted({location.removeprefix("s3://").partition("/")[0] for location in read})
        listed = [_arn(f"s3:::{bucket}") for bucket in buckets]
        statements += [
            _allow("List", "s3", "GetBucketLocation ListBucket", listed),
            _allow("Read", "s3", "GetObject", [_objects(location) for location in read]),
        ]
    written = [asynchronous.output, asynchronous.failure] if asynchronous else []
    written += [capture.destination] if capture else []
    written += [configuration.core_dumps] if configuration.core_dumps else []
    if places := [_objects(location) for location in written if location]:
        statements.append(_allow("Write", "s3", "AbortMultipartUpload PutObject", places))
    topics = (asynchronous.success_topic, asynchronous.error_topic) if asynchronous else ()
    if named := sorted({topic for topic in topics if topic}):
        statements.append(_allow("Notify", "sns", "Publish", named))
    return _document(*statements)


def _document(*statements: Statement) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(name: str, service: str, actions: str, resources: Any) -> Statement:
    named = [f"{service}:{action}" for action in actions.split()]
    return {"Sid": name, "Effect": "Allow", "Action": named, "Resource": resources}


def _arn(rest: str) -> dict[str, str]:
    return {"Fn::Sub": "arn:${AWS::Partition}:" + rest}


def _objects(location: str) -> dict[str, str]:
    path = location.removeprefix("s3://")
    return _arn(f"s3:::{path}" if path.endswith((".tar.gz", ".tgz")) else f"s3:::{path.rstrip('/')}/*")
