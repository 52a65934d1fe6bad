"""IAM: what an execution role needs and whether a given one has it, and what someone who deploys needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.aws import error_in_words, is_denied
from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.uploads import ecr_image

PRINCIPAL = "sagemaker.amazonaws.com"
"""SageMaker, in every partition."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ARNs of a policy point: fields as they stand in an ARN."""

    partition: str
    region: str
    account: str

    @classmethod
    def of_role(cls, role: str, region: str) -> Place:
        """The partition and the account of a role's ARN."""
        _, partition, _, _, account, _ = role.split(":", 5)
        return cls(partition, region, account)


OF_STACK = Place("${AWS::Partition}", "${AWS::Region}", "${AWS::AccountId}")
"""Wherever the stack is: CloudFormation's own parameters, for `Fn::Sub`."""


def trust_policy() -> dict[str, Any]:
    """Lets SageMaker take the role."""
    return _document({"Effect": "Allow", "Principal": {"Service": PRINCIPAL}, "Action": "sts:AssumeRole"})


def execution_policy(configuration: Configuration, place: Place) -> dict[str, Any]:
    """The least that the execution role of this deployment needs."""
    arn = f"arn:{place.partition}"
    statements = [
        _allow("Logs", _LOGS, f"{arn}:logs:{place.region}:{place.account}:log-group:/aws/sagemaker/*"),
        _allow("Metrics", ["cloudwatch:PutMetricData"], "*"),
    ]
    image = ecr_image(configuration.image)
    if image:
        repository = f"{arn}:ecr:{image.region}:{image.account}:repository/{image.repository}"
        statements += [_allow("Registry", ["ecr:GetAuthorizationToken"], "*"), _allow("Image", _PULL, repository)]
    read = [configuration.model] if configuration.from_s3 else []
    read += [adapter.source for adapter in configuration.adapters]
    if read:
        buckets = sorted({location.removeprefix("s3://").partition("/")[0] for location in read})
        listed = [f"{arn}:s3:::{bucket}" for bucket in buckets]
        statements += [
            _allow("List", ["s3:GetBucketLocation", "s3:ListBucket"], listed),
            _allow("Read", ["s3:GetObject"], [_objects(arn, location) for location in read]),
        ]
    written = [configuration.capture.destination] if configuration.capture else []
    topics = []
    if configuration.asynchronous:
        written += _given(configuration.asynchronous.output, configuration.asynchronous.failure)
        topics = _given(configuration.asynchronous.success_topic, configuration.asynchronous.error_topic)
    if written:
        statements.append(_allow("Write", ["s3:PutObject"], [_objects(arn, location) for location in written]))
    if topics:
        statements.append(_allow("Notify", ["sns:Publish"], topics))
    if configuration.vpc:
        statements.append(_allow("Network", _NETWORK, "*"))
    if configuration.kms_key:
        statements.append(_allow("Keys", _KEYS, _key(configuration.kms_key, place)))
    return _document(*statements)


def caller_policy(role: str, region: str, account: str) -> dict[str, Any]:
    """What `slipway deploy | status | invoke | logs | update | destroy` need, for one account and region.

    CloudFormation makes the resources with the caller's permissions. `sagemaker:CallWithBearerToken` is what OpenAI's
    clients need on an endpoint's /openai/v1 routes.
    """
    place = Place(role.split(":")[1], region, account)
    arn, here = f"arn:{place.partition}", f"{region}:{account}"
    kinds = ("model", "endpoint-config", "endpoint", "inference-component")
    return _document(
        _allow("Stack", _STACK, f"{arn}:cloudformation:{here}:stack/slipway-*/*"),
        _allow("Hosting", _HOSTING, [f"{arn}:sagemaker:{here}:{kind}/*" for kind in kinds]),
        _allow("Lists", _LISTS, "*"),
        _allow("Invoke", _INVOKE, [f"{arn}:sagemaker:{here}:{kind}/*" for kind in kinds[2:]]),
        {
            **_allow("PassRole", ["iam:PassRole"], role),
            "Condition": {"StringEquals": {"iam:PassedToService": PRINCIPAL}},
        },
        _allow("CheckRole", ["iam:GetRole", "iam:SimulatePrincipalPolicy"], role),
        _allow("Scaling", _SCALING, "*"),
        {
            **_allow("ScalingRole", ["iam:CreateServiceLinkedRole"], f"{arn}:iam::*:role/aws-service-role/*"),
            "Condition": {"StringLike": {"iam:AWSServiceName": "sagemaker.application-autoscaling.amazonaws.com"}},
        },
        _allow("Alarms", _ALARMS, f"{arn}:cloudwatch:{here}:alarm:*"),
        _allow("Logs", ["logs:FilterLogEvents"], f"{arn}:logs:{here}:log-group:/aws/sagemaker/*"),
    )


def push_policy(role: str, region: str, account: str, repository: str) -> dict[str, Any]:
    """What `slipway deploy --push` needs beyond `caller_policy`."""
    arn = f"arn:{role.split(':')[1]}:ecr:{region}:{account}:repository/{repository}"
    return _document(
        _allow("Registry", ["ecr:GetAuthorizationToken"], "*"),
        _allow("Repository", _REPOSITORY, arn),
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the role. Only a problem stops a deployment."""

    problem: bool
    text: str


def check_role(iam: Any, sts: Any, configuration: Configuration) -> Iterator[Finding]:
    """What is wrong with the role that is given, and what could not be checked, with boto3's clients of IAM and STS.

    Raises:
        botocore.exceptions.BotoCoreError: IAM was not reached.
    """
    from botocore.exceptions import ClientError

    role = configuration.role
    if role is None:
        return
    try:
        found = iam.get_role(RoleName=role.rpartition("/")[2])["Role"]
    except iam.exceptions.NoSuchEntityException:
        yield Finding(True, f'role is "{role}"; there is no such role')
        return
    except ClientError as error:
        yield Finding(False, f"the role could not be checked: {error_in_words(error)}")
        return
    if not _trusts_sagemaker(found.get("AssumeRolePolicyDocument", {})):
        yield Finding(True, f'role is "{role}"; its trust policy must let {PRINCIPAL} do sts:AssumeRole')
    yield from _denied(iam, role, configuration)
    yield from _pass_role(iam, sts, role)


def _trusts_sagemaker(policy: object) -> bool:
    document = json.loads(policy) if isinstance(policy, str) else policy
    statements = document.get("Statement", []) if isinstance(document, Mapping) else []
    for statement in [statements] if isinstance(statements, Mapping) else statements:
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, Mapping) else [PRINCIPAL]
        services = [services] if isinstance(services, str) else services
        actions = statement.get("Action", [])
        actions = [actions] if isinstance(actions, str) else actions
        may_assume = any(action in ("sts:AssumeRole", "sts:*", "*") for action in actions)
        if statement.get("Effect") == "Allow" and PRINCIPAL in services and may_assume:
            return True
    return False


def _denied(iam: Any, role: str, configuration: Configuration) -> Iterator[Finding]:
    """Each statement of the policy that the role should have, simulated."""
    for statement in execution_policy(configuration, Place.of_role(role, configuration.region))["Statement"]:
        resources = statement["Resource"]
        resources = [resources] if isinstance(resources, str) else resources
        answer = _simulate(iam, role, statement["Action"], resources)
        if isinstance(answer, Finding):
            yield answer
            return
        denied = sorted({each["EvalActionName"] for each in answer if each["EvalDecision"] != "allowed"})
        if denied:
            # Logs and metrics are missed; without the others nothing starts.
            optional = statement["Sid"] in ("Logs", "Metrics")
            yield Finding(not optional, f"the role may not do {', '.join(denied)} on {', '.join(resources)}")


def _pass_role(iam: Any, sts: Any, role: str) -> Iterator[Finding]:
    from botocore.exceptions import ClientError

    try:
        caller = str(sts.get_caller_identity()["Arn"])
    except ClientError as error:
        yield Finding(False, f"who is calling could not be found out: {error_in_words(error)}")
        return
    if ":assumed-role/" in caller or caller.endswith(":root"):
        yield Finding(False, f"not checked: that {caller} may do iam:PassRole on {role}")
        return
    answer = _simulate(iam, caller, ["iam:PassRole"], [role])
    if isinstance(answer, Finding):
        yield answer
    elif any(each["EvalDecision"] != "allowed" for each in answer):
        yield Finding(True, f"{caller} may not do iam:PassRole on {role}")


def _simulate(iam: Any, source: str, actions: list[str], resources: list[str]) -> Finding | list[dict[str, Any]]:
    from botocore.exceptions import ClientError

    # Something that the pattern of a policy covers.
    samples = [each if each == "*" else each.replace("*", "slipway-check") for each in resources]
    try:
        answer = iam.simulate_principal_policy(PolicySourceArn=source, ActionNames=actions, ResourceArns=samples)
    except ClientError as error:
        why = "iam:SimulatePrincipalPolicy is not allowed" if is_denied(error) else error_in_words(error)
        return Finding(False, f"permissions of {source} could not be checked: {why}")
    results: list[dict[str, Any]] = answer["EvaluationResults"]
    return results


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


def _given(*values: str | None) -> list[str]:
    return [value for value in values if value]


def _objects(arn: str, location: str) -> str:
    path = location.removeprefix("s3://")
    if "/" not in path:
        path += "/"
    return f"{arn}:s3:::{path}" if path.endswith(".tar.gz") else f"{arn}:s3:::{path}*"


def _key(key: str, place: Place) -> str:
    if key.startswith("arn:") and ":alias/" not in key:
        return key
    arn = f"arn:{place.partition}:kms:{place.region}:{place.account}:key"
    # A policy cannot name a key by its alias.
    return f"{arn}/*" if "alias/" in key else f"{arn}/{key}"
