"""The CloudFormation template of a configuration: one stack with all of a deployment in it.

Only the endpoint and its components have names of their own, and the scaling is named after them. CloudFormation names
the rest, so that it can make a new model and a new endpoint configuration beside the old ones when something changes.
What a template's user changes most is a parameter: name, model, image, role, instance type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from container.settings.values import masked
from deploy.sagemaker import instances
from deploy.sagemaker.configuration import Adapter, Autoscaling, Component, Configuration, Rollout
from deploy.sagemaker.roles import execution_policy, trust_policy
from deploy.sagemaker.uploads import ecr_image

VARIANT = "AllTraffic"
SCALING_TYPES = ("AWS::ApplicationAutoScaling::", "AWS::CloudWatch::Alarm")
"""How the types begin of what scales the endpoint and its components."""

_NAME = {"Ref": "Name"}

Resource = dict[str, Any]


def template(configuration: Configuration) -> dict[str, Any]:
    """The template, as JSON's values."""
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "A language model on Amazon SageMaker, served by Slipway",
        "Parameters": {name: declaration for name, _, declaration in _parameters(configuration)},
        "Resources": _without_none(dict(_resources(configuration))),
        "Outputs": {"EndpointName": {"Value": {"Fn::GetAtt": ["Endpoint", "EndpointName"]}}},
    }


def as_yaml(value: Mapping[str, Any]) -> str:
    """A template, or other JSON values, for people."""
    import yaml  # not needed by `slipway serve`, whose command line this is imported for as well

    # CloudFormation reads no YAML aliases, which yaml writes for an object that occurs twice.
    unshared = json.loads(json.dumps(value))
    return str(yaml.safe_dump(unshared, sort_keys=False, allow_unicode=True, width=120))


def parameter_values(configuration: Configuration) -> dict[str, str]:
    """The value of each parameter, credentials included."""
    return {name: value for name, value, _ in _parameters(configuration)}


def alarm_name(endpoint: str) -> str:
    """The alarm on requests that found no capacity."""
    return f"{endpoint}-no-capacity"


def scaled_target(name: str, *, component: bool) -> dict[str, Any]:
    """What Application Auto Scaling calls the copies of an inference component, or the instances of an endpoint."""
    resource, dimension = f"endpoint/{name}/variant/{VARIANT}", "variant:DesiredInstanceCount"
    if component:
        resource, dimension = f"inference-component/{name}", "inference-component:DesiredCopyCount"
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource,
        "ScalableDimension": f"sagemaker:{dimension}",
    }


def _parameters(configuration: Configuration) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, value and declaration of each parameter."""
    found = [("Name", configuration.name, "Name of the endpoint")]
    # The policy of a role that is made is for this model and this image.
    if configuration.role or not configuration.from_s3:
        found.append(("ModelSource", _model_source(configuration), "Hub id or S3 location of the model"))
    if configuration.role:
        found.append(("Image", configuration.image, "Image in ECR"))
        found.append(("RoleArn", configuration.role, "Execution role of the containers"))
    if configuration.instance_type:
        found.append(("InstanceType", configuration.instance_type, "Instance type"))
    for name, value, description in found:
        yield name, value, {"Type": "String", "Default": value, "Description": description}
    for variable, name in _secrets(configuration).items():
        declaration = {"Type": "String", "NoEcho": True, "Description": f"Environment variable {variable}"}
        yield name, configuration.env[variable], declaration


def _secrets(configuration: Configuration) -> dict[str, str]:
    """The parameter of each environment variable that looks like a credential."""
    found: dict[str, str] = {}
    for variable, value in configuration.env.items():
        if masked(variable, value) != value:
            name = "Env" + "".join(word.capitalize() for word in variable.split("_"))
            found[variable] = name if name not in found.values() else f"{name}{len(found)}"
    return found


def _resources(configuration: Configuration) -> Iterator[tuple[str, Resource]]:
    policy = None
    if configuration.role is None:
        role = {
            "Description": {"Fn::Sub": "Execution role of the endpoint ${Name}"},
            "AssumeRolePolicyDocument": trust_policy(),
        }
        yield "Role", _resource(configuration, "AWS::IAM::Role", role)
        policy, resource = _policy(configuration)
        yield policy, resource
    yield "Model", _resource(configuration, "AWS::SageMaker::Model", _model(configuration), policy)
    config = _endpoint_configuration(configuration)
    yield "EndpointConfiguration", _resource(configuration, "AWS::SageMaker::EndpointConfig", config, policy)
    yield "Endpoint", _resource(configuration, "AWS::SageMaker::Endpoint", _endpoint(configuration))
    component = configuration.component
    if component:
        properties = _component(configuration, component)
        kind = "AWS::SageMaker::InferenceComponent"
        yield "InferenceComponent", _resource(configuration, kind, properties, "Endpoint")
        for adapter in configuration.adapters:
            yield adapter.resource, _resource(configuration, kind, _adapter(adapter), "InferenceComponent")
    if configuration.autoscaling:
        scaled = "InferenceComponent" if component else "Endpoint"
        yield from _scaling(configuration, configuration.autoscaling, scaled)


def _resource(
    configuration: Configuration, kind: str, properties: dict[str, Any], after: str | None = None
) -> Resource:
    """A resource with the deployment's tags, made after another one that it does not refer to."""
    tags = [{"Key": key, "Value": value} for key, value in configuration.tags.items()]
    return {"Type": kind, "DependsOn": after, "Properties": {**properties, "Tags": tags or None}}


def _policy(configuration: Configuration) -> tuple[str, Resource]:
    """What the role may do.

    Its names follow its content, so that an update puts a new policy beside the old one: the old model is read until
    the rollout has ended.
    """
    document = execution_policy(configuration)
    digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()[:10]
    properties = {
        "PolicyName": f"slipway-{digest}",
        "Roles": [{"Ref": "Role"}],
        "PolicyDocument": _substituted(document),
    }
    return f"Policy{digest}", {"Type": "AWS::IAM::Policy", "Properties": properties}


def _substituted(value: Any) -> Any:
    """Has CloudFormation replace `${AWS::Partition}` and the like in texts, and nothing else that looks like it."""
    if isinstance(value, dict):
        return {key: _substituted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_substituted(item) for item in value]
    if isinstance(value, str) and "${AWS::" in value:
        return {"Fn::Sub": value.replace("${", "${!").replace("${!AWS::", "${AWS::")}
    return value


def _role_arn(configuration: Configuration) -> Any:
    return {"Ref": "RoleArn"} if configuration.role else {"Fn::GetAtt": ["Role", "Arn"]}


def _without_none(value: Any) -> Any:
    """Properties that are None are not given."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _model(configuration: Configuration) -> dict[str, Any]:
    archive = configuration.is_archive
    source = {
        "S3Uri": {"Ref": "ModelSource"} if configuration.role else _model_source(configuration),
        "S3DataType": "S3Object" if archive else "S3Prefix",
        "CompressionType": "Gzip" if archive else "None",
        "ModelAccessConfig": {"AcceptEula": True} if configuration.accept_eula else None,
    }
    container = {
        "Image": {"Ref": "Image"} if configuration.role else configuration.image,
        "Environment": _environment(configuration) or None,
        "ImageConfig": {"RepositoryAccessMode": "Vpc"} if ecr_image(configuration.image) is None else None,
        "ModelDataSource": {"S3DataSource": source} if configuration.from_s3 else None,
    }
    properties: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": _role_arn(configuration)}
    # The containers of components take their network from the endpoint's configuration.
    return properties if configuration.component else properties | _network(configuration)


def _model_source(configuration: Configuration) -> str:
    model = configuration.model
    prefix = configuration.from_s3 and not configuration.is_archive and not model.endswith("/")
    return model + "/" if prefix else model


def _environment(configuration: Configuration) -> dict[str, Any]:
    secrets = _secrets(configuration)
    environment: dict[str, Any] = {} if configuration.from_s3 else {"HF_MODEL_ID": {"Ref": "ModelSource"}}
    for variable, value in configuration.env.items():
        environment[variable] = {"Ref": secrets[variable]} if variable in secrets else value
    return environment


def _network(configuration: Configuration) -> dict[str, Any]:
    vpc = configuration.vpc
    return {
        "EnableNetworkIsolation": configuration.network_isolation or None,
        "VpcConfig": vpc and {"Subnets": list(vpc.subnets), "SecurityGroupIds": list(vpc.security_groups)},
    }


def _endpoint_configuration(configuration: Configuration) -> dict[str, Any]:
    metrics, key = configuration.metrics, configuration.kms_key
    properties: dict[str, Any] = {
        "ProductionVariants": [_variant(configuration)],
        "MetricsConfig": {
            "EnableDetailedObservability": metrics.detailed,
            "MetricPublishFrequencyInSeconds": metrics.period,
            "EnableEnhancedMetrics": metrics.enhanced or None,
        },
        "KmsKeyId": key,
    }
    if configuration.component:
        properties |= {"ExecutionRoleArn": _role_arn(configuration), **_network(configuration)}
    if capture := configuration.capture:
        modes = {"input": ["Input"], "output": ["Output"], "both": ["Input", "Output"]}[capture.mode]
        properties["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": capture.percent,
            "DestinationS3Uri": capture.destination,
            "CaptureOptions": [{"CaptureMode": mode} for mode in modes],
            "KmsKeyId": key,
        }
    if through := configuration.asynchronous:
        topics = {"SuccessTopic": through.success_topic, "ErrorTopic": through.error_topic}
        properties["AsyncInferenceConfig"] = {
            "OutputConfig": {
                "S3OutputPath": through.output,
                "S3FailurePath": through.failure,
                "KmsKeyId": key,
                "NotificationConfig": topics if any(topics.values()) else None,
            },
            "ClientConfig": through.concurrency and {"MaxConcurrentInvocationsPerInstance": through.concurrency},
        }
    return properties


def _variant(configuration: Configuration) -> dict[str, Any]:
    prefix, reservation, capacity = configuration.prefix_length, configuration.reservation, configuration.capacity
    pools = [{"InstanceType": pool.instance_type, "Priority": pool.priority} for pool in configuration.pools]
    variant = {
        "VariantName": VARIANT,
        "InstanceType": {"Ref": "InstanceType"} if configuration.instance_type else None,
        "InstancePools": pools or None,
        "InitialInstanceCount": configuration.instances,
        "RoutingConfig": {
            "RoutingStrategy": configuration.routing,
            "PrefixAwareRoutingConfig": prefix and {"PrefixLength": prefix},
        },
        "InferenceAmiVersion": configuration.ami
        or instances.machine_image(configuration.cuda_version, configuration.instance_types[0]),
        "VolumeSizeInGB": configuration.volume_gb,
        "VariantInstanceProvisionTimeoutInSeconds": configuration.provision_timeout,
        "EnableSSMAccess": configuration.ssm or None,
        "CapacityReservationConfig": reservation
        and {"CapacityReservationPreference": "capacity-reservations-only", "MlReservationArn": reservation},
        "ManagedInstanceScaling": capacity
        and {
            "Status": "ENABLED",
            "MinInstanceCount": capacity.minimum,
            "MaxInstanceCount": capacity.maximum,
            "ScaleInPolicy": capacity.strategy and {"Strategy": capacity.strategy},
        },
    }
    if configuration.component:
        return variant
    model = {"Fn::GetAtt": ["Model", "ModelName"]}
    return {**variant, "ModelName": model, "InitialVariantWeight": 1.0, **_timeouts(configuration)}


def _timeouts(configuration: Configuration) -> dict[str, int]:
    return {
        "ModelDataDownloadTimeoutInSeconds": configuration.download_timeout,
        "ContainerStartupHealthCheckTimeoutInSeconds": configuration.startup_timeout,
    }


def _endpoint(configuration: Configuration) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "EndpointName": _NAME,
        "EndpointConfigName": {"Fn::GetAtt": ["EndpointConfiguration", "EndpointConfigName"]},
        "DeploymentConfig": _deployment(configuration.rollout),
    }
    if configuration.autoscaling and not configuration.component:
        # Else an update takes back what the scaling has added.
        properties["RetainAllVariantProperties"] = True
        properties["ExcludeRetainedVariantProperties"] = [{"VariantPropertyType": "DataCaptureConfig"}]
    return properties


def _deployment(rollout: Rollout) -> dict[str, Any] | None:
    if rollout == Rollout() or rollout.strategy == "rolling":
        return _rolling(rollout)
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    kinds = {"blue-green": "ALL_AT_ONCE", "canary": "CANARY", "linear": "LINEAR"}
    routing = {
        "Type": kinds[rollout.strategy],
        "WaitIntervalInSeconds": rollout.wait,
        "CanarySize": step if rollout.strategy == "canary" else None,
        "LinearStepSize": step if rollout.strategy == "linear" else None,
    }
    policy = {"TrafficRoutingConfiguration": routing, "TerminationWaitInSeconds": 0}
    return {"BlueGreenUpdatePolicy": policy, "AutoRollbackConfiguration": _rollback(rollout)}


def _rolling(rollout: Rollout) -> dict[str, Any] | None:
    """The only way in which inference components are updated."""
    if rollout == Rollout():
        return None
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    policy = {"MaximumBatchSize": step, "WaitIntervalInSeconds": rollout.wait}
    return {"RollingUpdatePolicy": policy, "AutoRollbackConfiguration": _rollback(rollout)}


def _rollback(rollout: Rollout) -> dict[str, Any] | None:
    alarms = [{"AlarmName": name} for name in rollout.alarms]
    return {"Alarms": alarms} if alarms else None


def _component(configuration: Configuration, component: Component) -> dict[str, Any]:
    """The model's component, which is named like the endpoint."""
    gpus = component.gpus or configuration.gpus or instances.gpus(configuration.instance_types[0])
    return {
        "InferenceComponentName": _NAME,
        "EndpointName": _NAME,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": {"Fn::GetAtt": ["Model", "ModelName"]},
            "StartupParameters": _timeouts(configuration),
            "ComputeResourceRequirements": {
                "MinMemoryRequiredInMb": component.memory_mb,
                "NumberOfAcceleratorDevicesRequired": gpus or None,
                "NumberOfCpuCoresRequired": component.cpus,
            },
            "DataCacheConfig": {"EnableCaching": component.cache},
        },
        "RuntimeConfig": {"CopyCount": component.copies},
        "DeploymentConfig": _rolling(configuration.rollout),
    }


def _adapter(adapter: Adapter) -> dict[str, Any]:
    """An adapter's component, which takes the resources and the copies of the model's."""
    return {
        "InferenceComponentName": {"Fn::Sub": adapter.component("${Name}")},
        "EndpointName": _NAME,
        "Specification": {"BaseInferenceComponentName": _NAME, "Container": {"ArtifactUrl": adapter.source}},
    }


def _scaling(configuration: Configuration, scaling: Autoscaling, scaled: str) -> Iterator[tuple[str, Resource]]:
    """Scaling with the load, and out of zero.

    Target tracking cannot leave zero, as nothing is measured where nothing runs. So where zero is allowed, an alarm on
    the requests that found no capacity drives a step policy (SageMaker's guide, "Scale an endpoint to zero instances").
    """
    target = scaled_target("${Name}", component=configuration.component is not None)
    target["ResourceId"] = {"Fn::Sub": target["ResourceId"]}
    limits = {"MinCapacity": scaling.minimum, "MaxCapacity": scaling.maximum}
    kind, policy = "AWS::ApplicationAutoScaling::ScalableTarget", "AWS::ApplicationAutoScaling::ScalingPolicy"
    yield "ScalableTarget", _resource(configuration, kind, {**target, **limits}, scaled)
    tracking = {
        "PolicyName": {"Fn::Sub": "${Name}-tracking"},
        **target,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": scaling.target,
            **_metric(configuration),
            "ScaleInCooldown": scaling.scale_in_cooldown,
            "ScaleOutCooldown": scaling.scale_out_cooldown,
        },
    }
    yield "ScalingPolicyTracking", {"Type": policy, "DependsOn": "ScalableTarget", "Properties": tracking}
    if scaling.minimum:
        return
    step = {
        "PolicyName": {"Fn::Sub": "${Name}-from-zero"},
        **target,
        "PolicyType": "StepScaling",
        "StepScalingPolicyConfiguration": {
            "AdjustmentType": "ChangeInCapacity",
            "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
            "Cooldown": 60,
            "MetricAggregationType": "Maximum",
        },
    }
    yield "ScalingPolicyFromZero", {"Type": policy, "DependsOn": "ScalableTarget", "Properties": step}
    yield "Alarm", _resource(configuration, "AWS::CloudWatch::Alarm", _alarm(configuration))


def _metric(configuration: Configuration) -> dict[str, Any]:
    if configuration.asynchronous:
        return {
            "CustomizedMetricSpecification": {
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Namespace": "AWS/SageMaker",
                "Dimensions": [{"Name": "EndpointName", "Value": _NAME}],
                "Statistic": "Average",
            }
        }
    scaled = (
        "InferenceComponentConcurrentRequestsPerCopy"
        if configuration.component
        else ("VariantConcurrentRequestsPerModel")
    )
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": f"SageMaker{scaled}HighResolution"}}


def _alarm(configuration: Configuration) -> dict[str, Any]:
    metric, dimension = "NoCapacityInvocationFailures", "InferenceComponentName"
    if configuration.asynchronous:
        metric, dimension = "HasBacklogWithoutCapacity", "EndpointName"
    return {
        "AlarmName": {"Fn::Sub": alarm_name("${Name}")},
        "AlarmDescription": {"Fn::Sub": "Requests find ${Name} scaled to zero"},
        "AlarmActions": [{"Ref": "ScalingPolicyFromZero"}],
        "Namespace": "AWS/SageMaker",
        "MetricName": metric,
        "Dimensions": [{"Name": dimension, "Value": _NAME}],
        "Statistic": "Maximum",
        "Period": 60,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
    }
