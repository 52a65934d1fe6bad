"""How SageMaker is told to replace what runs: parameters of updates, which a CloudFormation template has as well."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker.configuration import Configuration, Rollout


def deployment_config(rollout: Rollout) -> dict[str, Any]:
    """`DeploymentConfig` of update_endpoint."""
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    config: dict[str, Any]
    if rollout.strategy == "rolling":
        config = {"RollingUpdatePolicy": {"MaximumBatchSize": step, "WaitIntervalInSeconds": rollout.wait}}
    else:
        kinds = {"blue-green": "ALL_AT_ONCE", "canary": "CANARY", "linear": "LINEAR"}
        routing: dict[str, Any] = {"Type": kinds[rollout.strategy], "WaitIntervalInSeconds": rollout.wait}
        if rollout.strategy == "canary":
            routing["CanarySize"] = step
        if rollout.strategy == "linear":
            routing["LinearStepSize"] = step
        config = {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing, "TerminationWaitInSeconds": 0}}
    return config | _alarms(rollout)


def component_deployment_config(rollout: Rollout) -> dict[str, Any]:
    """`DeploymentConfig` of update_inference_component, which knows rolling updates alone."""
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    policy = {"MaximumBatchSize": step, "WaitIntervalInSeconds": rollout.wait}
    return {"RollingUpdatePolicy": policy, **_alarms(rollout)}


def retained_properties(configuration: Configuration) -> dict[str, Any]:
    """What an update of the endpoint leaves as the scaling has it, where there is one."""
    if not configuration.autoscaling or configuration.component:
        return {}
    # Else an update takes back what the scaling has added.
    return {
        "RetainAllVariantProperties": True,
        "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DataCaptureConfig"}],
    }


def _alarms(rollout: Rollout) -> dict[str, Any]:
    if not rollout.alarms:
        return {}
    return {"AutoRollbackConfiguration": {"Alarms": [{"AlarmName": name} for name in rollout.alarms]}}
