"""The CloudFormation template for a configuration: one stack with all resources of a deployment.

The endpoint, its components, its scaling policies and its alarm have fixed names. CloudFormation chooses all other
names, so it can create a new model and a new endpoint configuration before it deletes the old ones.
"""

from __future__ import annotations

import re
from typing import Any

from container.settings.environment import read_environment
from container.settings.values import masked
from container.sources.location import name_of_url
from deploy.sagemaker.configuration import (
    AdapterComponent,
    Asynchronous,
    Autoscaling,
    Capacity,
    Component,
    Configuration,
    ConfigurationError,
    DataCapture,
    Metrics,
    PrefixAwareRouting,
    Rollout,
    merge_tables,
)
from deploy.sagemaker.execution_role import execution_policy, trust_policy

VARIANT = "AllTraffic"
# The `InferenceAmiVersion` with the newest driver (CUDA 13.x), which also runs images for any older CUDA. GPU instances
# get it by default. With an older driver, the image may need a newer CUDA than the driver supports. The endpoint would
# then stay in `Creating`, and log nothing.
MACHINE_IMAGE = "al2023-ami-sagemaker-inference-gpu-4-1"
_GPU_INSTANCE = re.compile(r"ml\.[gp]\d")
_MODEL_NAME = {"Fn::GetAtt": ["Model", "ModelName"]}
# Variables that set the model's names or choose another model. `read_environment` adds them for aliases, such as
# `SM_VLLM_MODEL` of AWS's vLLM image.
_NAMING = frozenset(
    {"OPTION_SERVED_MODEL_NAME", "SERVING_MODEL_NAME", "SERVING_LOAD_MODELS"}
    | {"HF_MODEL_ID", "OPTION_MODEL_ID", "OPTION_MODEL"}
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")

Properties = dict[str, Any]


def template(configuration: Configuration) -> dict[str, Any]:
    """Return the template as JSON values. Credentials become parameters of the template.

    Raises:
        ConfigurationError: `properties` names a resource that is not in the template.
    """
    parameters = {
        parameter: {"Type": "String", "NoEcho": True, "Description": f"Environment variable {variable}"}
        for variable, parameter in secrets(configuration).items()
    }
    document = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "A language model on Amazon SageMaker, served by Slipway",
        "Parameters": parameters or None,
        "Resources": _resources(configuration),
        "Outputs": {"EndpointName": {"Value": {"Fn::GetAtt": ["Endpoint", "EndpointName"]}}},
    }
    return dict(_without_none(document))


def secrets(configuration: Configuration) -> dict[str, str]:
    """Return a parameter for each environment variable that looks like a credential."""
    found = [name for name, value in configuration.environment.items() if masked(name, value) != value]
    return {variable: f"Secret{number}" for number, variable in enumerate(found, start=1)}


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _resources(configuration: Configuration) -> dict[str, Any]:
    resources = {
        "Role": None if configuration.role else _resource("AWS::IAM::Role", _role(configuration)),
        "Model": _resource("AWS::SageMaker::Model", _model(configuration)),
        "EndpointConfiguration": _resource("AWS::SageMaker::EndpointConfig", _endpoint_configuration(configuration)),
        "Endpoint": _resource("AWS::SageMaker::Endpoint", _endpoint(configuration)),
    }
    component, scaling = configuration.component, configuration.autoscaling
    if component:
        kind = "AWS::SageMaker::InferenceComponent"
        resources["InferenceComponent"] = _resource(kind, _component(configuration, component), "Endpoint")
        for adapter in configuration.adapters:
            properties = _adapter(configuration.name, adapter)
            resources[adapter.resource_name] = _resource(kind, properties, "InferenceComponent")
    if scaling:
        resources |= _scaling(configuration, scaling)
    for name, properties in configuration.properties.items():
        if not (resource := resources.get(name)):
            found = ", ".join(name for name, resource in resources.items() if resource)
            raise ConfigurationError(f"properties.{name}: the template has no such resource; expected one of {found}")
        resource["Properties"] = merge_tables(resource["Properties"], properties)
    return resources


def _resource(kind: str, properties: Properties, after: str | None = None) -> dict[str, Any]:
    """Return a resource. If `after` names another resource, CloudFormation creates that resource first."""
    return {"Type": kind, "DependsOn": after, "Properties": properties}


def _role(configuration: Configuration) -> Properties:
    return {
        "Description": f"Execution role of the endpoint {configuration.name}",
        "AssumeRolePolicyDocument": trust_policy(),
        "Policies": [{"PolicyName": "slipway", "PolicyDocument": execution_policy(configuration)}],
    }


def _role_arn(configuration: Configuration) -> Any:
    return configuration.role or {"Fn::GetAtt": ["Role", "Arn"]}


def _model(configuration: Configuration) -> Properties:
    model, archive = configuration.model, configuration.is_archive
    parameters = secrets(configuration)
    environment: dict[str, Any] = {} if configuration.from_s3 else {"HF_MODEL_ID": model}
    given = read_environment(configuration.environment).variables.keys()
    if not given & _NAMING:
        environment["OPTION_SERVED_MODEL_NAME"] = ",".join(_names(configuration))
    environment |= {name: value for name, value in _deadlines(configuration).items() if name not in given}
    for variable, value in configuration.environment.items():
        environment[variable] = {"Ref": parameters[variable]} if variable in parameters else value
    source = {
        "S3Uri": model if archive or model.endswith("/") else model + "/",
        "S3DataType": "S3Object" if archive else "S3Prefix",
        "CompressionType": "Gzip" if archive else "None",
    }
    container = {
        "Image": configuration.image,
        "Environment": environment or None,
        "ModelDataSource": {"S3DataSource": source} if configuration.from_s3 else None,
    }
    return {"PrimaryContainer": container, "ExecutionRoleArn": _role_arn(configuration)}


def _deadlines(configuration: Configuration) -> dict[str, str]:
    """Return the variables for the deadlines, which end an answer before SageMaker drops it."""
    if configuration.asynchronous:
        return {}
    deadlines = {
        "OPTION_ANSWER_DEADLINE": configuration.answer_deadline,
        "OPTION_STREAM_DEADLINE": configuration.stream_deadline,
    }
    return {name: repr(seconds) for name, seconds in deadlines.items() if seconds}


def _names(configuration: Configuration) -> list[str]:
    """Return the model's names for OpenAI clients: its own names, and the name of the endpoint.

    SageMaker's OpenAI path calls `/v1/chat/completions`, which refuses other names. Without these names, each model
    from S3 would be called `model`, after its directory in a SageMaker container.
    """
    names = [configuration.model]
    if configuration.from_s3:
        name = configuration.model.rstrip("/").rpartition("/")[2].removesuffix(".tar.gz").removesuffix(".tgz")
        # The second name is the name that a local server would use.
        names = [name for name in (name, name_of_url(name)) if _PLAIN_NAME.fullmatch(name)]
    return list(dict.fromkeys([*names, configuration.name]))


def _endpoint_configuration(configuration: Configuration) -> Properties:
    metrics, through, capture = configuration.metrics, configuration.asynchronous, configuration.data_capture
    return {
        "ProductionVariants": [_variant(configuration)],
        "MetricsConfig": {
            "EnableDetailedObservability": metrics.detailed,
            "MetricPublishFrequencyInSeconds": metrics.interval,
        },
        "ExecutionRoleArn": _role_arn(configuration) if configuration.component else None,
        "AsyncInferenceConfig": _asynchronous(through) if through else None,
        "DataCaptureConfig": _data_capture(capture) if capture else None,
    }


def _asynchronous(through: Asynchronous) -> Properties:
    topics = {"SuccessTopic": through.success_topic, "ErrorTopic": through.error_topic}
    return {
        "OutputConfig": {
            "S3OutputPath": through.output,
            "S3FailurePath": through.failure,
            "NotificationConfig": topics if any(topics.values()) else None,
        },
        "ClientConfig": through.concurrency and {"MaxConcurrentInvocationsPerInstance": through.concurrency},
    }


def _data_capture(capture: DataCapture) -> Properties:
    return {
        "EnableCapture": True,
        "InitialSamplingPercentage": capture.percent,
        "DestinationS3Uri": capture.destination,
        "CaptureOptions": [{"CaptureMode": mode} for mode in capture.modes],
        # Other types, such as streams, are recorded as base64.
        "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
    }


def _variant(configuration: Configuration) -> Properties:
    instance_type, capacity = configuration.instance_type, configuration.capacity
    has_gpu = instance_type is None or _GPU_INSTANCE.match(instance_type)
    variant = {
        "VariantName": VARIANT,
        "InstanceType": instance_type,
        "InitialInstanceCount": configuration.instances,
        "RoutingConfig": _routing(configuration.prefix_aware_routing),
        "InferenceAmiVersion": configuration.inference_ami_version or (MACHINE_IMAGE if has_gpu else None),
        "ManagedInstanceScaling": _capacity(capacity) if capacity else None,
        "VolumeSizeInGB": configuration.volume_gb,
        "EnableSSMAccess": configuration.ssm_access or None,
        "CoreDumpConfig": configuration.core_dumps and {"DestinationS3Uri": configuration.core_dumps},
        "CapacityReservationConfig": configuration.reservation
        and {
            "CapacityReservationPreference": "capacity-reservations-only",
            "MlReservationArn": configuration.reservation,
        },
    }
    if configuration.component:
        return variant
    return {**variant, "ModelName": _MODEL_NAME, "InitialVariantWeight": 1.0, **_timeouts(configuration)}


def _capacity(capacity: Capacity) -> Properties:
    policy = {
        "Strategy": {"idle-release": "IDLE_RELEASE", "consolidation": "CONSOLIDATION", None: None}[capacity.scale_in],
        "MaximumStepSize": capacity.scale_in_step,
        "CooldownInMinutes": capacity.scale_in_cooldown,
    }
    return {
        "Status": "ENABLED",
        "MinInstanceCount": capacity.min,
        "MaxInstanceCount": capacity.max,
        "ScaleInPolicy": policy if capacity.scale_in else None,
    }


def _routing(prefix_aware: PrefixAwareRouting | None) -> Properties:
    if not prefix_aware:
        return {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    return {
        "RoutingStrategy": "PREFIX_AWARE",
        "PrefixAwareRoutingConfig": {
            "PrefixLength": prefix_aware.prefix_length,
            "ConcurrencyThreshold": prefix_aware.concurrency_threshold,
        },
    }


def _timeouts(configuration: Configuration) -> Properties:
    return {
        "ModelDataDownloadTimeoutInSeconds": configuration.download_timeout,
        "ContainerStartupHealthCheckTimeoutInSeconds": configuration.startup_timeout,
    }


def _endpoint(configuration: Configuration) -> Properties:
    # Without this property, an update would remove instances that the scaling has added.
    retained = bool(configuration.autoscaling and not configuration.component) or None
    return {
        "EndpointName": configuration.name,
        "EndpointConfigName": {"Fn::GetAtt": ["EndpointConfiguration", "EndpointConfigName"]},
        "DeploymentConfig": _rollout(configuration.rollout),
        "RetainAllVariantProperties": retained,
        "ExcludeRetainedVariantProperties": retained and [{"VariantPropertyType": "DataCaptureConfig"}],
    }


def _rollout(rollout: Rollout | None, *, component: bool = False) -> Properties | None:
    """Return the policy for updates of the endpoint or of a component. A component supports only rolling updates."""
    if rollout is None:
        return None
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    alarms = [{"AlarmName": name} for name in rollout.alarms]
    rollback = {"Alarms": alarms} if alarms else None
    if component or rollout.strategy == "rolling":
        rolling = {
            "MaximumBatchSize": step,
            "WaitIntervalInSeconds": rollout.wait,
            "MaximumExecutionTimeoutInSeconds": rollout.timeout,
        }
        return {"RollingUpdatePolicy": rolling, "AutoRollbackConfiguration": rollback}
    routing = {
        "Type": {"blue-green": "ALL_AT_ONCE", "canary": "CANARY", "linear": "LINEAR"}[rollout.strategy],
        "WaitIntervalInSeconds": rollout.wait,
        "CanarySize": step if rollout.strategy == "canary" else None,
        "LinearStepSize": step if rollout.strategy == "linear" else None,
    }
    policy = {
        "TrafficRoutingConfiguration": routing,
        "TerminationWaitInSeconds": 0,
        "MaximumExecutionTimeoutInSeconds": rollout.timeout,
    }
    return {"BlueGreenUpdatePolicy": policy, "AutoRollbackConfiguration": rollback}


def _component(configuration: Configuration, component: Component) -> Properties:
    """Return the properties of the model's component, which has the same name as the endpoint."""
    return {
        "InferenceComponentName": configuration.name,
        "EndpointName": configuration.name,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": _MODEL_NAME,
            "Container": _scraped(configuration.metrics),
            "StartupParameters": _timeouts(configuration),
            "ComputeResourceRequirements": {
                "MinMemoryRequiredInMb": component.memory_mb,
                "MaxMemoryRequiredInMb": component.max_memory_mb,
                "NumberOfAcceleratorDevicesRequired": component.gpus or None,
                "NumberOfCpuCoresRequired": component.cpus,
            },
            # CloudFormation requires both properties. With PERMISSIVE, a copy is placed even if the
            # zones are not balanced.
            "SchedulingConfig": component.placement
            and {
                "PlacementStrategy": component.placement.upper(),
                "AvailabilityZoneBalance": {"EnforcementMode": "PERMISSIVE"},
            },
            # The instances keep the image and the model in a cache, so that the component scales out faster.
            "DataCacheConfig": {"EnableCaching": True},
        },
        "RuntimeConfig": {"CopyCount": component.copies},
        "DeploymentConfig": _rollout(configuration.rollout, component=True),
    }


def _scraped(metrics: Metrics) -> Properties | None:
    """Return the route for the container's metrics. CloudFormation supports this property for components only."""
    if not metrics.path:
        return None
    scraped = {"MetricsEndpointPath": metrics.path, "MetricPublishFrequencyInSeconds": metrics.interval}
    return {"ContainerMetricsConfig": {"MetricsEndpoints": [scraped]}}


def _adapter(endpoint: str, adapter: AdapterComponent) -> Properties:
    return {
        "InferenceComponentName": f"{endpoint}-{adapter.name}",
        "EndpointName": endpoint,
        "Specification": {"BaseInferenceComponentName": endpoint, "Container": {"ArtifactUrl": adapter.source}},
    }


def scaled_target(name: str, *, component: bool) -> Properties:
    """Return Application Auto Scaling's names for the copies of a component, or for the instances of an endpoint."""
    resource, dimension = f"endpoint/{name}/variant/{VARIANT}", "variant:DesiredInstanceCount"
    if component:
        resource, dimension = f"inference-component/{name}", "inference-component:DesiredCopyCount"
    return {"ServiceNamespace": "sagemaker", "ResourceId": resource, "ScalableDimension": f"sagemaker:{dimension}"}


def _scaling(configuration: Configuration, scaling: Autoscaling) -> dict[str, Any]:
    """Return the resources for scaling with the load and for scaling up from zero.

    Target tracking cannot scale up from zero, because nothing is measured while nothing runs. If the minimum is zero,
    the result also has a step policy. An alarm triggers this policy when a request finds no capacity. Source:
    SageMaker's guide, "Scale an endpoint to zero instances".
    """
    name, component = configuration.name, configuration.component is not None
    target = scaled_target(name, component=component)
    limits = {**target, "MinCapacity": scaling.min, "MaxCapacity": scaling.max}
    tracking = {
        "PolicyName": f"{name}-tracking",
        **target,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": scaling.target,
            **_metric(configuration),
            "ScaleInCooldown": scaling.scale_in_cooldown,
            "ScaleOutCooldown": scaling.scale_out_cooldown,
        },
    }
    policy = "AWS::ApplicationAutoScaling::ScalingPolicy"
    resources = {
        "ScalableTarget": _resource(
            "AWS::ApplicationAutoScaling::ScalableTarget", limits, "InferenceComponent" if component else "Endpoint"
        ),
        "ScalingPolicyTracking": _resource(policy, tracking, "ScalableTarget"),
    }
    if scaling.min:
        return resources
    step = {
        "PolicyName": f"{name}-from-zero",
        **target,
        "PolicyType": "StepScaling",
        "StepScalingPolicyConfiguration": {
            "AdjustmentType": "ChangeInCapacity",
            "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
            "Cooldown": 60,
            "MetricAggregationType": "Maximum",
        },
    }
    alarm = {
        "AlarmName": f"{name}-no-capacity",
        "AlarmDescription": f"Requests find {name} scaled to zero",
        "AlarmActions": [{"Ref": "ScalingPolicyFromZero"}],
        "Namespace": "AWS/SageMaker",
        "MetricName": "NoCapacityInvocationFailures" if component else "HasBacklogWithoutCapacity",
        "Dimensions": [{"Name": "InferenceComponentName" if component else "EndpointName", "Value": name}],
        "Statistic": "Maximum",
        "Period": 60,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
    }
    return {
        **resources,
        "ScalingPolicyFromZero": _resource(policy, step, "ScalableTarget"),
        "Alarm": _resource("AWS::CloudWatch::Alarm", alarm),
    }


def _metric(configuration: Configuration) -> Properties:
    if configuration.asynchronous:
        return {
            "CustomizedMetricSpecification": {
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Namespace": "AWS/SageMaker",
                "Dimensions": [{"Name": "EndpointName", "Value": configuration.name}],
                "Statistic": "Average",
            }
        }
    scaled = "VariantConcurrentRequestsPerModel"
    if configuration.component:
        scaled = "InferenceComponentConcurrentRequestsPerCopy"
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": f"SageMaker{scaled}HighResolution"}}
