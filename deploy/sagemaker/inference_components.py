"""Inference components: the model as one, and each adapter as another on top of it."""

from __future__ import annotations

from typing import Any

from deploy.sagemaker import instances
from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.configuration import Adapter, Component, Configuration
from deploy.sagemaker.naming import VARIANT, adapter_component
from deploy.sagemaker.resource import SAGEMAKER


def base_component(
    configuration: Configuration, component: Component, model_name: str, timeouts: dict[str, int]
) -> ApiCall:
    """The model's component, which is named like the endpoint. `timeouts` are its StartupParameters."""
    specification: dict[str, Any] = {
        "ModelName": model_name,
        "StartupParameters": timeouts,
        "ComputeResourceRequirements": _resources(configuration, component),
        "DataCacheConfig": {"EnableCaching": component.cache},
    }
    if component.placement:
        specification["SchedulingConfig"] = {"PlacementStrategy": component.placement}
    return ApiCall(
        SAGEMAKER,
        "create_inference_component",
        {
            "InferenceComponentName": configuration.name,
            "EndpointName": configuration.name,
            "VariantName": VARIANT,
            "Specification": specification,
            "RuntimeConfig": {"CopyCount": component.copies},
        },
    )


def adapter_call(configuration: Configuration, adapter: Adapter) -> ApiCall:
    """An adapter's component: it takes the base component's resources and copies."""
    return ApiCall(
        SAGEMAKER,
        "create_inference_component",
        {
            "InferenceComponentName": adapter_component(configuration.name, adapter.name),
            "EndpointName": configuration.name,
            "Specification": {
                "BaseInferenceComponentName": configuration.name,
                "Container": {"ArtifactUrl": adapter.source},
            },
        },
    )


def _resources(configuration: Configuration, component: Component) -> dict[str, Any]:
    resources: dict[str, Any] = {"MinMemoryRequiredInMb": component.memory_mb}
    gpus = component.gpus or configuration.gpus or instances.gpus(configuration.main_instance_type)
    if gpus:
        resources["NumberOfAcceleratorDevicesRequired"] = gpus
    if component.cpus:
        resources["NumberOfCpuCoresRequired"] = component.cpus
    return resources
