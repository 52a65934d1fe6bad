"""Removes a deployment, from whatever state it is in: by its names, its lists and its tags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Cloud
from deploy.sagemaker.autoscaling import Target, alarm_name, component_target, policy_names, variant_target
from deploy.sagemaker.naming import is_versioned, role_name
from deploy.sagemaker.presence import Found, NotGone, Surroundings, find, remove
from deploy.sagemaker.resource import (
    ALARM,
    CLOUDWATCH,
    COMPONENT,
    ECR,
    ENDPOINT,
    ENDPOINT_CONFIG,
    IAM,
    MODEL,
    REPOSITORY,
    ROLE,
    ROLE_POLICY,
    SAGEMAKER,
    SCALABLE_TARGET,
    SCALING,
    SCALING_POLICY,
    Kind,
    Resource,
)
from deploy.sagemaker.service_errors import in_words, is_denied

REMOVAL_LIMIT = 7200.0
"""Seconds for one resource: an endpoint that is being created can only be removed afterwards."""
_MOST_PAGES = 100


@dataclass(frozen=True, slots=True)
class Destroyed:
    """What was removed, what was not (with the reason), and what is not ours, by `Resource.key`."""

    removed: tuple[str, ...]
    left: tuple[str, ...]
    foreign: tuple[str, ...]


def destroy(
    around: Surroundings, name: str, *, untagged: bool = False, repository: str | None = None, dry_run: bool = False
) -> Destroyed:
    """Remove all that belongs to the deployment `name`: what carries its tag, or with `untagged` its name.

    `repository` is removed as well, with its images, if it carries the tag.

    Raises:
        botocore.exceptions.ClientError: what there is could not be looked up.
    """
    removed: list[str] = []
    left: list[str] = []
    foreign: list[str] = []
    seen: set[str] = set()
    staying: str | None = None
    for resource in _candidates(around.cloud, name, repository, untagged):
        found = find(around.cloud, resource)
        if found is None or resource.key in seen:
            continue
        seen.add(resource.key)
        ours = _is_ours(resource, found, name, untagged)
        if not ours:
            foreign.append(resource.key)
        elif staying:
            left.append(f"{resource.key}: kept, as {staying} is still there")
        elif not dry_run and (reason := _remove(around, resource)):
            left.append(f"{resource.key}: {reason}")
        else:
            removed.append(resource.key)
            continue
        if resource.kind is COMPONENT or (resource.kind is ENDPOINT and ours):
            # An endpoint cannot go before its components; and what serves needs its configuration, model, role, image.
            staying = staying or resource.key
    return Destroyed(tuple(removed), tuple(left), tuple(foreign))


def _is_ours(resource: Resource, found: Found, name: str, untagged: bool) -> bool:
    if resource.kind is REPOSITORY:
        # Its name is not the deployment's, and what it has is gone for every endpoint that pulls from it.
        return found.belongs_to(name)
    # What has no tags is named after the deployment and hangs on something that has them.
    return untagged or resource.kind.tags is None or found.belongs_to(name)


def _remove(around: Surroundings, resource: Resource) -> str | None:
    from botocore.exceptions import BotoCoreError, ClientError

    around.progress.say(f"removing {resource.key}")
    try:
        remove(around, resource, REMOVAL_LIMIT)
    except (NotGone, BotoCoreError, ClientError) as error:
        around.progress.say(f"{resource.key} is left: {in_words(error)}")
        return in_words(error)
    return None


def _candidates(cloud: Cloud, name: str, repository: str | None, untagged: bool) -> Iterator[Resource]:
    """All that the deployment may consist of, in the order in which it can be removed."""
    components = component_names(cloud, name)
    yield from scaling_candidates(cloud, name, untagged=untagged)
    # Adapters first: their base cannot be removed before them.
    for component in sorted(components, key=lambda component: component == name):
        yield _named(COMPONENT, "create_inference_component", "InferenceComponentName", component)
    yield _named(ENDPOINT, "create_endpoint", "EndpointName", name)
    for config in listed_versions(cloud, "list_endpoint_configs", "EndpointConfigs", "EndpointConfigName", name):
        yield _named(ENDPOINT_CONFIG, "create_endpoint_config", "EndpointConfigName", config)
    for model in listed_versions(cloud, "list_models", "Models", "ModelName", name):
        yield _named(MODEL, "create_model", "ModelName", model)
    yield from _role(cloud, name)
    if repository:
        yield Resource(REPOSITORY, ApiCall(ECR, "create_repository", {"repositoryName": repository}))


def component_names(cloud: Cloud, endpoint: str) -> list[str]:
    """The inference components on an endpoint."""
    parameters = {"EndpointNameEquals": endpoint}
    return _pages(cloud, "list_inference_components", parameters, "InferenceComponents", "InferenceComponentName")


def _named(kind: Kind, operation: str, key: str, name: str) -> Resource:
    return Resource(kind, ApiCall(SAGEMAKER, operation, {key: name}))


def scaling_candidates(cloud: Cloud, name: str, *, untagged: bool = False) -> Iterator[Resource]:
    """The alarm, the policies and the scalable targets that a deployment may have."""
    yield Resource(ALARM, ApiCall(CLOUDWATCH, "put_metric_alarm", {"AlarmName": alarm_name(name)}))
    for target in (component_target(name), variant_target(name)):
        yield from _scaling(cloud, name, target, untagged)


def _scaling(cloud: Cloud, name: str, target: Target, untagged: bool) -> Iterator[Resource]:
    scalable = Resource(SCALABLE_TARGET, ApiCall(SCALING, "register_scalable_target", target.parameters))
    found = find(cloud, scalable)
    if found is None:  # its policies went with it
        return
    if untagged or found.belongs_to(name):
        for policy in policy_names(name):
            parameters = {"PolicyName": policy, **target.parameters}
            yield Resource(SCALING_POLICY, ApiCall(SCALING, "put_scaling_policy", parameters))
    yield scalable


def _role(cloud: Cloud, name: str) -> Iterator[Resource]:
    from botocore.exceptions import ClientError

    role = Resource(ROLE, ApiCall(IAM, "create_role", {"RoleName": role_name(name)}))
    try:
        found = find(cloud, role)
    except ClientError as error:
        if is_denied(error):  # who may not look at roles has not made one either
            return
        raise
    if found is not None and found.belongs_to(name):
        yield from role_policies(cloud, name)
        yield role


def role_policies(cloud: Cloud, name: str) -> Iterator[Resource]:
    """The policies within the role that was made for the deployment."""
    role = {"RoleName": role_name(name)}
    for policy in cloud.call(ApiCall(IAM, "list_role_policies", role))["PolicyNames"]:
        if is_versioned(policy, name):
            yield Resource(ROLE_POLICY, ApiCall(IAM, "put_role_policy", {**role, "PolicyName": policy}))


def listed_versions(cloud: Cloud, operation: str, entries: str, key: str, name: str) -> list[str]:
    """Names that a deployment of this name gives; whose they are, their tags say."""
    found = _pages(cloud, operation, {"NameContains": name}, entries, key)
    return [each for each in found if is_versioned(each, name)]


def _pages(cloud: Cloud, operation: str, parameters: dict[str, Any], entries: str, key: str) -> list[str]:
    found: list[str] = []
    token: dict[str, Any] = {}
    for _ in range(_MOST_PAGES):
        answer = cloud.call(ApiCall(SAGEMAKER, operation, {**parameters, **token}))
        found += [str(entry[key]) for entry in answer.get(entries, ())]
        if not answer.get("NextToken"):
            break
        token = {"NextToken": answer["NextToken"]}
    return found
