"""Checks an execution role before a deployment depends on it: that it is there, who may take it, what it may do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Cloud
from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.policies import PRINCIPAL, execution_policy
from deploy.sagemaker.service_errors import in_words, is_denied, is_missing


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the role. Only a problem stops a deployment."""

    problem: bool
    text: str


def check_role(cloud: Cloud, configuration: Configuration) -> tuple[Finding, ...]:
    """What is wrong with the role, and what could not be checked; nothing for a role that is about to be made.

    Raises:
        botocore.exceptions.BotoCoreError: IAM was not reached.
    """
    if configuration.create_role:
        return ()
    return tuple(_findings(cloud, configuration))


def _findings(cloud: Cloud, configuration: Configuration) -> Iterator[Finding]:
    from botocore.exceptions import ClientError

    name = configuration.role.rpartition("/")[2]
    try:
        role = cloud.call(ApiCall("iam", "get_role", {"RoleName": name}))["Role"]
    except ClientError as error:
        if is_missing(error):
            yield Finding(True, f'role is "{configuration.role}"; there is no such role')
        else:
            yield Finding(False, f"the role could not be checked: {in_words(error)}")
        return
    if not _trusts_sagemaker(role.get("AssumeRolePolicyDocument", {})):
        yield Finding(True, f'role is "{configuration.role}"; its trust policy must let {PRINCIPAL} do sts:AssumeRole')
    yield from _denied(cloud, configuration)
    yield from _pass_role(cloud, configuration)


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


def _denied(cloud: Cloud, configuration: Configuration) -> Iterator[Finding]:
    """Each statement of the policy that the role should have, simulated."""
    for statement in execution_policy(configuration)["Statement"]:
        resources = statement["Resource"]
        answer = _simulate(cloud, configuration.role, statement["Action"], _sample(resources))
        if isinstance(answer, Finding):
            yield answer
            return
        denied = sorted({each["EvalActionName"] for each in answer if each["EvalDecision"] != "allowed"})
        if denied:
            where = ", ".join([resources] if isinstance(resources, str) else resources)
            # Logs and metrics are missed; without the others nothing starts.
            optional = statement["Sid"] in ("Logs", "Metrics")
            yield Finding(not optional, f"the role may not do {', '.join(denied)} on {where}")


def _pass_role(cloud: Cloud, configuration: Configuration) -> Iterator[Finding]:
    from botocore.exceptions import ClientError

    try:
        caller = str(cloud.call(ApiCall("sts", "get_caller_identity"))["Arn"])
    except ClientError as error:
        yield Finding(False, f"who is calling could not be found out: {in_words(error)}")
        return
    if ":assumed-role/" in caller or caller.endswith(":root"):
        yield Finding(False, f"not checked: that {caller} may do iam:PassRole on {configuration.role}")
        return
    answer = _simulate(cloud, caller, ["iam:PassRole"], [configuration.role])
    if isinstance(answer, Finding):
        yield answer
    elif any(each["EvalDecision"] != "allowed" for each in answer):
        yield Finding(True, f"{caller} may not do iam:PassRole on {configuration.role}")


def _simulate(cloud: Cloud, source: str, actions: list[str], resources: list[str]) -> Finding | list[dict[str, Any]]:
    from botocore.exceptions import ClientError

    parameters = {"PolicySourceArn": source, "ActionNames": actions, "ResourceArns": resources}
    try:
        answer = cloud.call(ApiCall("iam", "simulate_principal_policy", parameters))
    except ClientError as error:
        why = "iam:SimulatePrincipalPolicy is not allowed" if is_denied(error) else in_words(error)
        return Finding(False, f"permissions of {source} could not be checked: {why}")
    results: list[dict[str, Any]] = answer["EvaluationResults"]
    return results


def _sample(resources: str | list[str]) -> list[str]:
    """Something that the pattern of a policy covers."""
    given = [resources] if isinstance(resources, str) else resources
    return [each if each == "*" else each.replace("*", "slipway-check") for each in given]
