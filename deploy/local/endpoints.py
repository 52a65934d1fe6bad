"""Which endpoints, inference components, adapters and target models there are, and where in the container they lead."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.local.container_client import ContainerClient
from deploy.local.errors import ACCOUNT, endpoint_not_found, validation_error
from deploy.local.parameters import ENDPOINT_NAME, VARIANT, Parameters
from deploy.local.settings import LocalSettings
from deploy.local.target_models import TargetModels

_ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes in the container."""

    path: str
    headers: tuple[tuple[str, str], ...]


class Endpoints:
    """All that can be invoked."""

    def __init__(self, settings: LocalSettings, container: ContainerClient) -> None:
        self._settings = settings
        self.target_models = TargetModels(settings.models_dir, container) if settings.models_dir is not None else None

    def check_name(self, name: str) -> None:
        """See that there is such an endpoint.

        Raises:
            RuntimeApiError: ValidationError, there is none, or there cannot be one.
        """
        ENDPOINT_NAME.check(name)
        if name not in self._settings.endpoints:
            raise endpoint_not_found(name)

    async def route(self, name: str, parameters: Parameters) -> Route:
        """The container's route for a call of an endpoint, and the headers that it gets.

        Raises:
            RuntimeApiError: ValidationError, something named is not there; ModelError, a model cannot be loaded.
            TimeoutError: a target model takes too long to load.
        """
        variant = parameters.get("targetVariant")
        if variant not in (None, VARIANT):
            raise validation_error(f"Variant {variant} of endpoint {name} not found; it has {VARIANT} alone.")
        if (host := parameters.get("targetContainerHostname")) is not None:
            raise validation_error(f"TargetContainerHostname {host}: endpoint {name} has one container, not several.")
        headers = parameters.forwarded + self._adapter(parameters.get("inferenceComponentName"))
        model = parameters.get("targetModel")
        if model is None:
            return Route("/invocations", headers)
        if self.target_models is None:
            raise validation_error(f"TargetModel {model}: endpoint {name} is not a multi-model endpoint.")
        return Route(await self.target_models.path(name, model), headers)

    def loading(self, parameters: Parameters) -> bool:
        """Whether the target model of a call is being loaded."""
        model = parameters.get("targetModel")
        return model is not None and self.target_models is not None and self.target_models.loading(model)

    async def lost(self, parameters: Parameters) -> bool:
        """Whether a call's target model is not in the container any more; `route` has it loaded again."""
        model = parameters.get("targetModel")
        return model is not None and self.target_models is not None and await self.target_models.gone(model)

    async def close(self) -> None:
        """Wait for no target model any more."""
        if self.target_models is not None:
            await self.target_models.close()

    def _adapter(self, component: str | None) -> tuple[tuple[str, str], ...]:
        if component is None:
            if self._settings.components:
                raise validation_error(_COMPONENT_MISSING, "INFERENCE_COMPONENT_NAME_MISSING")
            return ()
        if component in self._settings.adapters:
            return ((_ADAPTER_HEADER, component),)
        if component in self._settings.components:
            return ()
        raise validation_error(f"Inference component {component} of account {ACCOUNT} not found.")
