"""Changes a running deployment: new model and endpoint configuration beside the old, a rollout, then the old ones go.

SageMaker itself goes back to the old configuration when the rollout fails or one of its alarms rings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.autoscaling import variant_target
from deploy.sagemaker.configuration import Configuration, Rollout
from deploy.sagemaker.destroy import component_names, listed_versions, role_policies, scaling_candidates
from deploy.sagemaker.executor import Conflict, Executor, Failed, Hook, tell_log
from deploy.sagemaker.naming import FINGERPRINT_TAG, VARIANT, tag_list
from deploy.sagemaker.plan import Plan
from deploy.sagemaker.presence import (
    FAILED,
    IN_SERVICE,
    Found,
    NotGone,
    NotInService,
    Surroundings,
    call_until_seen,
    find,
    remove,
    wait_until_in_service,
)
from deploy.sagemaker.resource import (
    ALARM,
    COMPONENT,
    ENDPOINT,
    ENDPOINT_CONFIG,
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
    fingerprint_of,
)
from deploy.sagemaker.rollout import component_deployment_config, deployment_config, retained_properties
from deploy.sagemaker.service_errors import in_words, is_missing

_CONTENT_KINDS = (REPOSITORY, ROLE, ROLE_POLICY, MODEL, ENDPOINT_CONFIG)
_SCALING_KINDS = (SCALABLE_TARGET, SCALING_POLICY, ALARM)
_EXECUTION_LIMIT = 28800
"""Seconds that SageMaker allows for a rollout at most."""


@dataclass(frozen=True, slots=True)
class Updated:
    """What changed, and which old resources could not be removed, by `Resource.key`."""

    changed: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]


def update(
    around: Surroundings, plan: Plan, configuration: Configuration, hooks: Mapping[str, Hook] | None = None
) -> Updated:
    """Bring a deployment to what the plan says; `hooks` as those of the `Executor`.

    Raises:
        Conflict: there is no such endpoint, it is not ours, or something else is going on with it.
        Failed: the rollout failed; the endpoint runs as before, or the message says how.
        botocore.exceptions.ClientError: what is there could not be looked up.
    """
    return _Update(around, plan, configuration, hooks).run()


def update_calls(plan: Plan, configuration: Configuration) -> tuple[ApiCall, ...]:
    """The calls of an update in which everything changes, for a dry run."""
    made = [resource.create for resource in plan.resources if resource.kind in _CONTENT_KINDS]
    endpoint = endpoint_update(plan, configuration)
    components = [component_update(resource, configuration.rollout) for resource in plan.of(COMPONENT)]
    scaling = [resource.create for resource in plan.resources if resource.kind in _SCALING_KINDS]
    return (*made, endpoint, *components, *scaling)


def endpoint_update(plan: Plan, configuration: Configuration) -> ApiCall:
    """The call that brings the endpoint to the plan's configuration."""
    parameters: dict[str, Any] = {
        "EndpointName": plan.name,
        "EndpointConfigName": plan.of(ENDPOINT_CONFIG)[0].name,
        "DeploymentConfig": deployment_config(configuration.rollout),
    }
    parameters |= retained_properties(configuration)
    return ApiCall(SAGEMAKER, "update_endpoint", parameters)


def component_update(resource: Resource, rollout: Rollout) -> ApiCall:
    """The call that brings a component to its specification; its copies stay as the scaling has them."""
    created = resource.create.parameters
    parameters: dict[str, Any] = {
        "InferenceComponentName": created["InferenceComponentName"],
        "Specification": created["Specification"],
    }
    if "BaseInferenceComponentName" not in created["Specification"]:
        parameters["DeploymentConfig"] = component_deployment_config(rollout)
    return ApiCall(SAGEMAKER, "update_inference_component", parameters)


class _Update:
    def __init__(
        self, around: Surroundings, plan: Plan, configuration: Configuration, hooks: Mapping[str, Hook] | None
    ) -> None:
        self._around = around
        self._hooks = hooks
        self._begun = time.time()
        self._plan = plan
        self._configuration = configuration
        self._limit = plan.wait_limit + _EXECUTION_LIMIT
        self._changed: list[str] = []

    def run(self) -> Updated:
        endpoint, found = self._running()
        self._make(*_CONTENT_KINDS)
        self._roll_out(endpoint, found)
        self._bring_components()
        self._make(*_SCALING_KINDS)
        removed, left = self._remove_old()
        return Updated(tuple(self._changed), tuple(removed), tuple(left))

    def _running(self) -> tuple[Resource, Found]:
        endpoint = self._plan.of(ENDPOINT)[0]
        found = find(self._around.cloud, endpoint)
        if found is None:
            raise Conflict((f"{endpoint.key} is not there; `slipway deploy` makes it",))
        if not found.belongs_to(self._plan.name):
            raise Conflict((f"{endpoint.key} does not belong to a deployment of Slipway (it has no such tag)",))
        if found.status == FAILED:
            raise Conflict((f"{endpoint.key} is {FAILED} and cannot be updated; `slipway deploy` makes it anew",))
        if found.status != IN_SERVICE:
            raise Conflict((f"{endpoint.key} is {found.status}; it can be updated once it is {IN_SERVICE}",))
        return endpoint, found

    def _make(self, *kinds: Kind) -> None:
        """Make new resources of some kinds; those that are there are kept, scaling is set anew."""
        resources = tuple(resource for resource in self._plan.resources if resource.kind in kinds)
        part = Plan(self._plan.name, resources, self._plan.wait_limit)
        self._changed += Executor(self._around, hooks=self._hooks).deploy(part).created

    def _roll_out(self, endpoint: Resource, found: Found) -> None:
        wanted = endpoint.create.parameters["EndpointConfigName"]
        if found.description["EndpointConfigName"] == wanted:
            return
        scaling = self._release_scaling(found)
        self._around.progress.say(f"updating {endpoint.key} to {wanted}")
        try:
            call_until_seen(self._around, endpoint_update(self._plan, self._configuration), _unseen)
            now = wait_until_in_service(self._around, endpoint, self._limit)
            if now.description["EndpointConfigName"] != wanted:
                reason = now.reason or "the rollout failed, or one of its alarms rang"
                raise NotInService(f"{endpoint.key} went back to {now.description['EndpointConfigName']}: {reason}")
        except KeyboardInterrupt:
            released = ""
            if scaling and self._plan.of(SCALABLE_TARGET):
                released = "; nothing scales it until `slipway update` has been run again"
            raise Failed(f"interrupted; SageMaker goes on with the rollout{released}", (), interrupted=True) from None
        except Exception as error:
            raise self._rolled_back(endpoint, scaling, error) from error
        self._changed.append(endpoint.key)

    def _release_scaling(self, found: Found) -> bool:
        """Before another instance type comes, the variant may not be a scalable target: whether it was one."""
        target = Resource(
            SCALABLE_TARGET, ApiCall(SCALING, "register_scalable_target", variant_target(self._plan.name).parameters)
        )
        old = _named(ENDPOINT_CONFIG, "EndpointConfigName", found.description["EndpointConfigName"])
        if self._instance_types(find(self._around.cloud, old)) == set(self._configuration.instance_types):
            return False
        # It may be there although the new configuration has no scaling.
        scaled = find(self._around.cloud, target)
        if scaled is None or not scaled.belongs_to(self._plan.name):
            return False
        self._around.progress.say(f"releasing {target.key} while the instance type changes")
        return remove(self._around, target, self._limit)

    def _instance_types(self, config: Found | None) -> set[str]:
        variants = config.description["ProductionVariants"] if config else []
        ours = [each for each in variants if each["VariantName"] == VARIANT]
        pools = [*ours, *(pool for each in ours for pool in each.get("InstancePools", ()))]
        return {str(each["InstanceType"]) for each in pools if "InstanceType" in each}

    def _rolled_back(self, endpoint: Resource, scaling: bool, error: Exception) -> Failed:
        """Remove the new model and configuration, unless the endpoint uses them."""
        self._tell(endpoint, error)
        left: list[str] = []
        try:
            if scaling:
                self._make(*_SCALING_KINDS)
            found = find(self._around.cloud, endpoint)
        except Exception as again:  # the first error is the one to report
            return Failed(f"{in_words(error)} (and then {in_words(again)})", tuple(self._changed))
        if scaling and not self._plan.of(SCALABLE_TARGET):
            # Its old policies went with the target, and the new configuration has none to put in their place.
            self._around.progress.say(
                f"{endpoint.key} is not scaled any more; `slipway update` with the old file sets it"
            )
        used = found.description["EndpointConfigName"] if found else ""
        if used == endpoint.create.parameters["EndpointConfigName"] or (found and found.status != IN_SERVICE):
            return Failed(in_words(error), tuple(self._changed))
        made = [each for kind in _CONTENT_KINDS for each in self._plan.of(kind) if each.key in self._changed]
        for resource in reversed(made):
            left += self._removed(resource)[1]
        return Failed(in_words(error), tuple(left))

    def _tell(self, resource: Resource, error: Exception) -> None:
        self._around.progress.say(f"failed: {in_words(error)}")
        if isinstance(error, NotInService):
            tell_log(self._around, resource, self._begun)

    def _bring_components(self) -> None:
        wanted = self._plan.of(COMPONENT)
        for resource in wanted:
            found = find(self._around.cloud, resource)
            if found is None:
                part = Plan(self._plan.name, (resource,), self._plan.wait_limit)
                self._changed += Executor(self._around).deploy(part).created
            elif not resource.kind.same(resource.create.parameters, found.description, found.tags):
                self._change(resource, found.description)

    def _change(self, resource: Resource, description: Mapping[str, Any]) -> None:
        self._around.progress.say(f"updating {resource.key}")
        tags = tag_list({FINGERPRINT_TAG: fingerprint_of(resource.create.parameters)})
        arn = description["InferenceComponentArn"]
        try:
            call_until_seen(self._around, component_update(resource, self._configuration.rollout), _unseen)
            wait_until_in_service(self._around, resource, self._limit)
            self._around.cloud.call(ApiCall(SAGEMAKER, "add_tags", {"ResourceArn": arn, "Tags": tags}))
        except KeyboardInterrupt:
            raise Failed("interrupted; SageMaker goes on with the rollout", (), interrupted=True) from None
        except Exception as error:
            self._tell(resource, error)
            raise Failed(f"{in_words(error)}; `slipway update` again goes on from here", ()) from error
        self._changed.append(resource.key)

    def _remove_old(self) -> tuple[list[str], list[str]]:
        """What carries the deployment's tag and is not in the plan any more."""
        cloud, name = self._around.cloud, self._plan.name
        keep = {resource.key for resource in self._plan.resources}
        old = [
            *scaling_candidates(cloud, name),
            *(_named(COMPONENT, "InferenceComponentName", each) for each in component_names(cloud, name)),
            *(
                _named(ENDPOINT_CONFIG, "EndpointConfigName", each)
                for each in listed_versions(
                    cloud, "list_endpoint_configs", "EndpointConfigs", "EndpointConfigName", name
                )
            ),
            *(
                _named(MODEL, "ModelName", each)
                for each in listed_versions(cloud, "list_models", "Models", "ModelName", name)
            ),
        ]
        if self._configuration.create_role:
            old += role_policies(cloud, name)
        removed: list[str] = []
        left: list[str] = []
        for resource in old:
            if resource.key in keep:
                continue
            found = find(cloud, resource)
            if found is not None and (resource.kind.tags is None or found.belongs_to(name)):
                gone, stayed = self._removed(resource)
                removed += gone
                left += stayed
        return removed, left

    def _removed(self, resource: Resource) -> tuple[list[str], list[str]]:
        from botocore.exceptions import BotoCoreError, ClientError

        self._around.progress.say(f"removing {resource.key}")
        try:
            remove(self._around, resource, self._plan.wait_limit)
        except (NotGone, BotoCoreError, ClientError) as error:
            self._around.progress.say(f"{resource.key} is left: {in_words(error)}")
            return [], [resource.key]
        return [resource.key], []


def _unseen(error: Any) -> str | None:
    return "what was just made" if is_missing(error) else None


def _named(kind: Kind, key: str, name: str) -> Resource:
    return Resource(kind, ApiCall(SAGEMAKER, kind.lookup({key: name}).operation, {key: name}))
