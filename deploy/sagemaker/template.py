"""The CloudFormation template of a configuration: one stack with all of a deployment in it.

Only the endpoint and its components have names of their own, and the scaling is named after them. CloudFormation names
the rest, so that it can make a new model and a new endpoint configuration beside the old ones when something changes.
What a template's user changes most is a parameter: name, model, image, role, instance type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from container.settings.properties import masked
from deploy.sagemaker import instances
from deploy.sagemaker.configuration import Adapter, Autoscaling, Component, Configuration, Rollout, adapter_component
from deploy.sagemaker.roles import OF_STACK, execution_policy, trust_policy
from deploy.sagemaker.uploads import ecr_image

VARIANT = "AllTraffic"
SCALING_TYPES = frozenset(
    {
        "AWS::ApplicationAutoScaling::ScalableTarget",
        "AWS::ApplicationAutoScaling::ScalingPolicy",
        "AWS::CloudWatch::Alarm",
    }
)
"""What scales the endpoint and its components."""

_FROM_ZERO_COOLDOWN = 60
_ALARM_PERIOD = 60
_NAME = {"Ref": "Name"}

Resource = dict[str, Any]


def template(configuration: Configuration) -> dict[str, Any]:
    """The template, as JSON's values."""
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "A language model on Amazon SageMaker, served by Slipway",
        "Parameters": _declarations(configuration),
        "Resources": dict(_resources(configuration)),
        "Outputs": {"EndpointName": {"Value": {"Fn::GetAtt": ["Endpoint", "EndpointName"]}}},
    }


def as_yaml(value: dict[str, Any]) -> str:
    """A template for people."""
    import yaml  # not needed by `slipway serve`, whose command line this is imported for as well

    # CloudFormation reads no YAML aliases, which yaml writes for an object that occurs twice.
    unshared = json.loads(json.dumps(value))
    return str(yaml.safe_dump(unshared, sort_keys=False, allow_unicode=True, width=120))


def parameter_values(configuration: Configuration) -> dict[str, str]:
    """The value of each parameter, credentials included."""
    values = _visible_parameters(configuration)
    found = {name: value for name, (value, _) in values.items()}
    return found | {name: configuration.env[variable] for variable, name in _secrets(configuration).items()}


def alarm_name(endpoint: str) -> str:
    """The alarm on requests that found no capacity."""
    return f"{endpoint}-no-capacity"


def variant_target(endpoint: str) -> dict[str, Any]:
    """What Application Auto Scaling calls the instances of an endpoint."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def component_target(component: str) -> dict[str, Any]:
    """What Application Auto Scaling calls the copies of an inference component."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"inference-component/{component}",
        "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
    }


def _visible_parameters(configuration: Configuration) -> dict[str, tuple[str, str]]:
    """Value and description of each parameter that is no credential."""
    found = {"Name": (configuration.name, "Name of the endpoint")}
    # The policy of a role that is made is for this model and this image.
    if not (configuration.create_role and configuration.from_s3):
        found["ModelSource"] = (_model_source(configuration), "Hub id or S3 location of the model")
    if not configuration.create_role:
        found["Image"] = (configuration.image, "Image in ECR")
    if configuration.role:
        found["RoleArn"] = (configuration.role, "Execution role of the containers")
    if configuration.instance_type:
        found["InstanceType"] = (configuration.instance_type, "Instance type")
    return found


def _secrets(configuration: Configuration) -> dict[str, str]:
    """The parameter of each environment variable that looks like a credential."""
    found: dict[str, str] = {}
    for variable, value in configuration.env.items():
        if masked(variable, value) != value:
            name = "Env" + "".join(word.capitalize() for word in variable.split("_"))
            found[variable] = name if name not in found.values() else f"{name}{len(found)}"
    return found


def _declarations(configuration: Configuration) -> dict[str, Any]:
    declared: dict[str, Any] = {
        name: {"Type": "String", "Default": value, "Description": description}
        for name, (value, description) in _visible_parameters(configuration).items()
    }
    for variable, name in _secrets(configuration).items():
        declared[name] = {"Type": "String", "NoEcho": True, "Description": f"Environment variable {variable}"}
    return declared


def _parameter_or(configuration: Configuration, name: str, value: Any) -> Any:
    return {"Ref": name} if name in _visible_parameters(configuration) else value


def _resources(configuration: Configuration) -> Iterator[tuple[str, Resource]]:
    policy = None
    if configuration.create_role:
        policy, *_ = made = dict(_policy(configuration))
        yield "Role", _resource(configuration, "AWS::IAM::Role", _role())
        yield from made.items()
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
            words = "".join(word.capitalize() for word in adapter.name.split("-"))
            yield f"Adapter{words}", _resource(configuration, kind, _adapter(adapter), "InferenceComponent")
    if configuration.autoscaling:
        scaled = "InferenceComponent" if component else "Endpoint"
        yield from _scaling(configuration, configuration.autoscaling, scaled)


def _resource(
    configuration: Configuration, kind: str, properties: dict[str, Any], after: str | None = None
) -> Resource:
    """A resource with the deployment's tags, made after another one that it does not refer to."""
    if configuration.tags:
        tags = [{"Key": key, "Value": value} for key, value in configuration.tags.items()]
        properties = {**properties, "Tags": tags}
    return {"Type": kind, **({"DependsOn": after} if after else {}), "Properties": properties}


def _role() -> dict[str, Any]:
    return {
        "Description": {"Fn::Sub": "Execution role of the endpoint ${Name}"},
        "AssumeRolePolicyDocument": trust_policy(),
    }


def _policy(configuration: Configuration) -> Iterator[tuple[str, Resource]]:
    """What the role may do.

    Its names follow its content, so that an update puts a new policy beside the old one: the old model is read until
    the rollout has ended.
    """
    document = execution_policy(configuration, OF_STACK)
    digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()[:10]
    properties = {
        "PolicyName": f"slipway-{digest}",
        "Roles": [{"Ref": "Role"}],
        "PolicyDocument": _substituted(document),
    }
    yield f"Policy{digest}", {"Type": "AWS::IAM::Policy", "Properties": properties}


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
    return {"Fn::GetAtt": ["Role", "Arn"]} if configuration.create_role else {"Ref": "RoleArn"}


def _model(configuration: Configuration) -> dict[str, Any]:
    container: dict[str, Any] = {"Image": _parameter_or(configuration, "Image", configuration.image)}
    if environment := _environment(configuration):
        container["Environment"] = environment
    if ecr_image(configuration.image) is None:
        container["ImageConfig"] = {"RepositoryAccessMode": "Vpc"}
    if configuration.from_s3:
        archive = configuration.is_archive
        source: dict[str, Any] = {
            "S3Uri": _parameter_or(configuration, "ModelSource", _model_source(configuration)),
            "S3DataType": "S3Object" if archive else "S3Prefix",
            "CompressionType": "Gzip" if archive else "None",
        }
        if configuration.accept_eula:
            source["ModelAccessConfig"] = {"AcceptEula": True}
        container["ModelDataSource"] = {"S3DataSource": source}
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
    properties: dict[str, Any] = {"EnableNetworkIsolation": True} if configuration.network_isolation else {}
    if configuration.vpc:
        properties["VpcConfig"] = {
            "Subnets": list(configuration.vpc.subnets),
            "SecurityGroupIds": list(configuration.vpc.security_groups),
        }
    return properties


def _endpoint_configuration(configuration: Configuration) -> dict[str, Any]:
    metrics = configuration.metrics
    properties: dict[str, Any] = {
        "ProductionVariants": [_variant(configuration)],
        "MetricsConfig": {
            "EnableDetailedObservability": metrics.detailed,
            "MetricPublishFrequencyInSeconds": metrics.period,
            **({"EnableEnhancedMetrics": True} if metrics.enhanced else {}),
        },
    }
    if configuration.component:
        properties["ExecutionRoleArn"] = _role_arn(configuration)
        properties |= _network(configuration)
    if configuration.capture:
        modes = {"input": ["Input"], "output": ["Output"], "both": ["Input", "Output"]}[configuration.capture.mode]
        properties["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": configuration.capture.percent,
            "DestinationS3Uri": configuration.capture.destination,
            "CaptureOptions": [{"CaptureMode": mode} for mode in modes],
            **_key(configuration),
        }
    if configuration.asynchronous:
        properties["AsyncInferenceConfig"] = _asynchronous(configuration)
    return properties | _key(configuration)


def _key(configuration: Configuration) -> dict[str, Any]:
    return {"KmsKeyId": configuration.kms_key} if configuration.kms_key else {}


def _asynchronous(configuration: Configuration) -> dict[str, Any]:
    given = configuration.asynchronous
    assert given is not None
    output: dict[str, Any] = {"S3OutputPath": given.output, **_key(configuration)}
    if given.failure:
        output["S3FailurePath"] = given.failure
    topics = {"SuccessTopic": given.success_topic, "ErrorTopic": given.error_topic}
    notification = {key: topic for key, topic in topics.items() if topic}
    if notification:
        output["NotificationConfig"] = notification
    if given.concurrency is None:
        return {"OutputConfig": output}
    return {"OutputConfig": output, "ClientConfig": {"MaxConcurrentInvocationsPerInstance": given.concurrency}}


def _variant(configuration: Configuration) -> dict[str, Any]:
    routing: dict[str, Any] = {"RoutingStrategy": configuration.routing}
    if configuration.prefix_length:
        routing["PrefixAwareRoutingConfig"] = {"PrefixLength": configuration.prefix_length}
    variant: dict[str, Any] = {"VariantName": VARIANT}
    if configuration.instance_type:
        variant["InstanceType"] = {"Ref": "InstanceType"}
    else:
        pools = configuration.pools
        variant["InstancePools"] = [{"InstanceType": pool.instance_type, "Priority": pool.priority} for pool in pools]
    variant |= {"InitialInstanceCount": configuration.instances, "RoutingConfig": routing}
    if not configuration.component:
        model = {"Fn::GetAtt": ["Model", "ModelName"]}
        variant |= {"ModelName": model, "InitialVariantWeight": 1.0, **_timeouts(configuration)}
    image = instances.machine_image(configuration.cuda_version, configuration.main_instance_type)
    optional: dict[str, Any] = {
        "InferenceAmiVersion": configuration.ami or image,
        "VolumeSizeInGB": configuration.volume_gb,
        "VariantInstanceProvisionTimeoutInSeconds": configuration.provision_timeout,
        "EnableSSMAccess": configuration.ssm or None,
    }
    variant |= {key: value for key, value in optional.items() if value is not None}
    if configuration.reservation:
        variant["CapacityReservationConfig"] = {
            "CapacityReservationPreference": "capacity-reservations-only",
            "MlReservationArn": configuration.reservation,
        }
    if configuration.capacity:
        variant["ManagedInstanceScaling"] = {
            "Status": "ENABLED",
            "MinInstanceCount": configuration.capacity.minimum,
            "MaxInstanceCount": configuration.capacity.maximum,
        }
        if configuration.capacity.strategy:
            variant["ManagedInstanceScaling"]["ScaleInPolicy"] = {"Strategy": configuration.capacity.strategy}
    return variant


def _timeouts(configuration: Configuration) -> dict[str, int]:
    size = configuration.model_size_gb or instances.model_size(configuration.main_instance_type)
    start = instances.startup_timeout(size, container_downloads=not configuration.from_s3)
    return {
        "ModelDataDownloadTimeoutInSeconds": configuration.download_timeout or instances.download_timeout(size),
        "ContainerStartupHealthCheckTimeoutInSeconds": configuration.startup_timeout or start,
    }


def _endpoint(configuration: Configuration) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "EndpointName": _NAME,
        "EndpointConfigName": {"Fn::GetAtt": ["EndpointConfiguration", "EndpointConfigName"]},
    }
    rollout = configuration.rollout
    if rollout != Rollout():
        properties["DeploymentConfig"] = _deployment(rollout)
    if configuration.autoscaling and not configuration.component:
        # Else an update takes back what the scaling has added.
        properties["RetainAllVariantProperties"] = True
        properties["ExcludeRetainedVariantProperties"] = [{"VariantPropertyType": "DataCaptureConfig"}]
    return properties


def _deployment(rollout: Rollout) -> dict[str, Any]:
    if rollout.strategy == "rolling":
        return _rolling(rollout)
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    kinds = {"blue-green": "ALL_AT_ONCE", "canary": "CANARY", "linear": "LINEAR"}
    routing: dict[str, Any] = {"Type": kinds[rollout.strategy], "WaitIntervalInSeconds": rollout.wait}
    if rollout.strategy == "canary":
        routing["CanarySize"] = step
    if rollout.strategy == "linear":
        routing["LinearStepSize"] = step
    policy = {"TrafficRoutingConfiguration": routing, "TerminationWaitInSeconds": 0}
    return {"BlueGreenUpdatePolicy": policy, **_rollback(rollout)}


def _rolling(rollout: Rollout) -> dict[str, Any]:
    """The only way in which inference components are updated."""
    step = {"Type": "CAPACITY_PERCENT", "Value": rollout.step_percent}
    policy = {"MaximumBatchSize": step, "WaitIntervalInSeconds": rollout.wait}
    return {"RollingUpdatePolicy": policy, **_rollback(rollout)}


def _rollback(rollout: Rollout) -> dict[str, Any]:
    if not rollout.alarms:
        return {}
    return {"AutoRollbackConfiguration": {"Alarms": [{"AlarmName": name} for name in rollout.alarms]}}


def _component(configuration: Configuration, component: Component) -> dict[str, Any]:
    """The model's component, which is named like the endpoint."""
    compute: dict[str, Any] = {"MinMemoryRequiredInMb": component.memory_mb}
    gpus = component.gpus or configuration.gpus or instances.gpus(configuration.main_instance_type)
    if gpus:
        compute["NumberOfAcceleratorDevicesRequired"] = gpus
    if component.cpus:
        compute["NumberOfCpuCoresRequired"] = component.cpus
    properties: dict[str, Any] = {
        "InferenceComponentName": _NAME,
        "EndpointName": _NAME,
        "VariantName": VARIANT,
        "Specification": {
            "ModelName": {"Fn::GetAtt": ["Model", "ModelName"]},
            "StartupParameters": _timeouts(configuration),
            "ComputeResourceRequirements": compute,
            "DataCacheConfig": {"EnableCaching": component.cache},
        },
        "RuntimeConfig": {"CopyCount": component.copies},
    }
    if configuration.rollout != Rollout():
        properties["DeploymentConfig"] = _rolling(configuration.rollout)
    return properties


def _adapter(adapter: Adapter) -> dict[str, Any]:
    """An adapter's component, which takes the resources and the copies of the model's."""
    return {
        "InferenceComponentName": {"Fn::Sub": adapter_component("${Name}", adapter.name)},
        "EndpointName": _NAME,
        "Specification": {"BaseInferenceComponentName": _NAME, "Container": {"ArtifactUrl": adapter.source}},
    }


def _scaling(configuration: Configuration, scaling: Autoscaling, scaled: str) -> Iterator[tuple[str, Resource]]:
    """Scaling with the load, and out of zero.

    Target tracking cannot leave zero, as nothing is measured where nothing runs. So where zero is allowed, an alarm on
    the requests that found no capacity drives a step policy (SageMaker's guide, "Scale an endpoint to zero instances").
    """
    target = (component_target if configuration.component else variant_target)("${Name}")
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
            "Cooldown": _FROM_ZERO_COOLDOWN,
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
    metric = (
        "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
        if configuration.component
        else "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    )
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": metric}}


def _alarm(configuration: Configuration) -> dict[str, Any]:
    if configuration.asynchronous:
        metric, dimension = "HasBacklogWithoutCapacity", "EndpointName"
    else:
        metric, dimension = "NoCapacityInvocationFailures", "InferenceComponentName"
    return {
        "AlarmName": {"Fn::Sub": alarm_name("${Name}")},
        "AlarmDescription": {"Fn::Sub": "Requests find ${Name} scaled to zero"},
        "AlarmActions": [{"Ref": "ScalingPolicyFromZero"}],
        "Namespace": "AWS/SageMaker",
        "MetricName": metric,
        "Dimensions": [{"Name": dimension, "Value": _NAME}],
        "Statistic": "Maximum",
        "Period": _ALARM_PERIOD,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
    }
