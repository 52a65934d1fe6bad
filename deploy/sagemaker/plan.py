"""The pure heart of deploying: from a configuration to the calls that make it so, in their order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker import cuda, timeouts
from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.asynchronous import asynchronous_config
from deploy.sagemaker.autoscaling import scaling_resources
from deploy.sagemaker.configuration import Capture, Configuration
from deploy.sagemaker.images import ecr_image
from deploy.sagemaker.inference_components import adapter_call, base_component
from deploy.sagemaker.naming import (
    ENDPOINT_TAG,
    FINGERPRINT_TAG,
    VARIANT,
    role_description,
    role_name,
    tag_list,
    versioned,
)
from deploy.sagemaker.policies import execution_policy, trust_policy
from deploy.sagemaker.resource import (
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
    Kind,
    Resource,
    fingerprint_of,
)

_PROVISIONING = 1800
"""Seconds that SageMaker may need for instances, unless the configuration says."""
_MARGIN = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """All resources of a deployment, in the order in which they are made; they are removed in the opposite one."""

    name: str
    resources: tuple[Resource, ...]
    wait_limit: float
    """Seconds after which an endpoint or a component that is not in service counts as failed."""

    @property
    def calls(self) -> tuple[ApiCall, ...]:
        """The calls that make everything."""
        return tuple(resource.create for resource in self.resources)

    def of(self, kind: Kind) -> tuple[Resource, ...]:
        """The resources of one kind."""
        return tuple(resource for resource in self.resources if resource.kind is kind)

    def shown(self) -> str:
        """The calls as JSON, without credentials."""
        return json.dumps([call.shown() for call in self.calls], indent=2)


def plan(configuration: Configuration) -> Plan:
    """What to call to have the configuration deployed. Nothing is called, nothing is looked up."""
    limits = _Limits.of(configuration)
    model = _versioned(configuration, MODEL, "ModelName", _model(configuration))
    config = _versioned(
        configuration, ENDPOINT_CONFIG, "EndpointConfigName", _endpoint_config(configuration, model.name, limits)
    )
    endpoint = ApiCall(
        SAGEMAKER, "create_endpoint", {"EndpointName": configuration.name, "EndpointConfigName": config.name}
    )
    resources = [*_prerequisites(configuration), model, config, _tagged(configuration, ENDPOINT, endpoint)]
    if configuration.component:
        base = base_component(configuration, configuration.component, model.name, limits.parameters())
        calls = [base, *(adapter_call(configuration, adapter) for adapter in configuration.adapters)]
        resources += [_tagged(configuration, COMPONENT, call) for call in calls]
    if configuration.autoscaling:
        resources += scaling_resources(configuration, configuration.autoscaling, tags(configuration))
    return Plan(configuration.name, tuple(resources), limits.wait(configuration))


def tags(configuration: Configuration) -> dict[str, str]:
    """The tags of everything that belongs to a deployment."""
    return {**configuration.tags, ENDPOINT_TAG: configuration.name}


@dataclass(frozen=True, slots=True)
class _Limits:
    download: int
    startup: int

    @classmethod
    def of(cls, configuration: Configuration) -> _Limits:
        size = timeouts.size_estimate(configuration.main_instance_type, configuration.model_size_gb)
        startup = timeouts.startup_timeout(size, container_downloads=not configuration.from_s3)
        return cls(
            configuration.download_timeout or timeouts.download_timeout(size),
            configuration.startup_timeout or startup,
        )

    def parameters(self) -> dict[str, int]:
        return {
            "ModelDataDownloadTimeoutInSeconds": self.download,
            "ContainerStartupHealthCheckTimeoutInSeconds": self.startup,
        }

    def wait(self, configuration: Configuration) -> float:
        return (configuration.provision_timeout or _PROVISIONING) + self.download + self.startup + _MARGIN


def _versioned(configuration: Configuration, kind: Kind, key: str, call: ApiCall) -> Resource:
    named = {key: versioned(configuration.name, call.parameters), **call.parameters}
    return _tagged(configuration, kind, ApiCall(call.service, call.operation, named))


def _tagged(configuration: Configuration, kind: Kind, call: ApiCall, key: str = "Tags") -> Resource:
    found = {**tags(configuration), FINGERPRINT_TAG: fingerprint_of(call.parameters)}
    return Resource(kind, ApiCall(call.service, call.operation, {**call.parameters, key: tag_list(found)}))


def _prerequisites(configuration: Configuration) -> list[Resource]:
    resources = []
    if configuration.push:
        repository = {
            "repositoryName": configuration.repository,
            "imageScanningConfiguration": {"scanOnPush": True},
        }
        resources.append(_tagged(configuration, REPOSITORY, ApiCall(ECR, "create_repository", repository), "tags"))
    if configuration.create_role:
        name = role_name(configuration.name)
        role = {
            "RoleName": name,
            "AssumeRolePolicyDocument": json.dumps(trust_policy()),
            "Description": role_description(configuration.name),
        }
        document = execution_policy(configuration)
        policy = {
            "RoleName": name,
            # An update puts the new one beside the old, as the old model is read until the rollout has ended.
            "PolicyName": versioned(configuration.name, document),
            "PolicyDocument": json.dumps(document),
        }
        resources += [
            _tagged(configuration, ROLE, ApiCall(IAM, "create_role", role)),
            Resource(ROLE_POLICY, ApiCall(IAM, "put_role_policy", policy)),
        ]
    return resources


def _model(configuration: Configuration) -> ApiCall:
    container: dict[str, Any] = {"Image": configuration.image}
    if environment := _environment(configuration):
        container["Environment"] = environment
    if ecr_image(configuration.image) is None:
        container["ImageConfig"] = {"RepositoryAccessMode": "Vpc"}
    if configuration.from_s3:
        container["ModelDataSource"] = {"S3DataSource": _s3_source(configuration)}
    if configuration.metrics.detailed:
        endpoint = {
            "MetricsEndpointPath": configuration.metrics.path,
            "MetricPublishFrequencyInSeconds": configuration.metrics.period,
        }
        container["ContainerMetricsConfig"] = {"MetricsEndpoints": [endpoint]}
    parameters: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": configuration.role}
    # The containers of components take their network from the endpoint's configuration.
    if not configuration.component:
        parameters |= _network(configuration)
    return ApiCall(SAGEMAKER, "create_model", parameters)


def _environment(configuration: Configuration) -> Mapping[str, str]:
    if configuration.from_s3:
        return dict(configuration.env)
    return {"HF_MODEL_ID": configuration.model, **configuration.env}


def _s3_source(configuration: Configuration) -> dict[str, Any]:
    archive = configuration.model.endswith((".tar.gz", ".tgz"))
    prefix = configuration.model if configuration.model.endswith("/") else configuration.model + "/"
    source: dict[str, Any] = {
        "S3Uri": configuration.model if archive else prefix,
        "S3DataType": "S3Object" if archive else "S3Prefix",
        "CompressionType": "Gzip" if archive else "None",
    }
    if configuration.accept_eula:
        source["ModelAccessConfig"] = {"AcceptEula": True}
    return source


def _network(configuration: Configuration) -> dict[str, Any]:
    parameters: dict[str, Any] = {"EnableNetworkIsolation": True} if configuration.network_isolation else {}
    if configuration.vpc:
        parameters["VpcConfig"] = {
            "Subnets": list(configuration.vpc.subnets),
            "SecurityGroupIds": list(configuration.vpc.security_groups),
        }
    return parameters


def _endpoint_config(configuration: Configuration, model_name: str, limits: _Limits) -> ApiCall:
    parameters: dict[str, Any] = {
        "ProductionVariants": [_variant(configuration, model_name, limits)],
        "MetricsConfig": {
            "EnableDetailedObservability": configuration.metrics.detailed,
            "MetricPublishFrequencyInSeconds": configuration.metrics.period,
            **({"EnableEnhancedMetrics": True} if configuration.metrics.enhanced else {}),
        },
    }
    if configuration.component:
        parameters["ExecutionRoleArn"] = configuration.role
        parameters |= _network(configuration)
    if configuration.capture:
        parameters["DataCaptureConfig"] = _capture(configuration.capture, configuration.kms_key)
    if configuration.asynchronous:
        parameters["AsyncInferenceConfig"] = asynchronous_config(configuration.asynchronous, configuration.kms_key)
    if configuration.kms_key:
        parameters["KmsKeyId"] = configuration.kms_key
    return ApiCall(SAGEMAKER, "create_endpoint_config", parameters)


def _variant(configuration: Configuration, model_name: str, limits: _Limits) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        **_instances(configuration),
        "InitialInstanceCount": configuration.instances,
        "RoutingConfig": _routing(configuration),
    }
    if not configuration.component:
        variant |= {"ModelName": model_name, "InitialVariantWeight": 1.0, **limits.parameters()}
    optional: dict[str, Any] = {
        "InferenceAmiVersion": configuration.ami or _machine_image(configuration),
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
        scaling: dict[str, Any] = {
            "Status": "ENABLED",
            "MinInstanceCount": configuration.capacity.minimum,
            "MaxInstanceCount": configuration.capacity.maximum,
        }
        if configuration.capacity.strategy:
            scaling["ScaleInPolicy"] = {"Strategy": configuration.capacity.strategy}
        variant["ManagedInstanceScaling"] = scaling
    return variant


def _instances(configuration: Configuration) -> dict[str, Any]:
    if configuration.instance_type:
        return {"InstanceType": configuration.instance_type}
    pools = [{"InstanceType": pool.instance_type, "Priority": pool.priority} for pool in configuration.pools]
    return {"InstancePools": pools}


def _machine_image(configuration: Configuration) -> str | None:
    version = configuration.cuda or cuda.cuda_of_image(configuration.image)
    return cuda.machine_image(version, configuration.main_instance_type)


def _routing(configuration: Configuration) -> dict[str, Any]:
    routing: dict[str, Any] = {"RoutingStrategy": configuration.routing}
    if configuration.prefix_length:
        routing["PrefixAwareRoutingConfig"] = {"PrefixLength": configuration.prefix_length}
    return routing


def _capture(capture: Capture, kms_key: str | None) -> dict[str, Any]:
    modes = {"input": ["Input"], "output": ["Output"], "both": ["Input", "Output"]}[capture.mode]
    parameters: dict[str, Any] = {
        "EnableCapture": True,
        "InitialSamplingPercentage": capture.percent,
        "DestinationS3Uri": capture.destination,
        "CaptureOptions": [{"CaptureMode": mode} for mode in modes],
    }
    return parameters | ({"KmsKeyId": kms_key} if kms_key else {})
