"""The Serve application: the number of replicas, their resources, and how they start and stop."""

from __future__ import annotations

import os
from typing import Any, Self

import ray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve

from container.models.placement import gpus_asked_for
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.replica import Replica, command_line

NAME = "slipway"  # The name of the application and of its deployment.
# The maximum number of concurrent calls that Serve sends to a replica. By default, the replica's own queue is smaller.
# So the queue refuses excess calls, with the contract's own error.
_MOST_CALLS = 10_000
_STOP_SECONDS = 15.0  # How long a drained replica may take to free its engine.
_DRAINING = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"


class Options(BaseModel):
    """The options of the replicas: options of `slipway ray`, and `args` in Serve's configuration file."""

    model_config = ConfigDict(extra="forbid")

    model_dir: str | None = None
    model_name: str | None = None
    replicas: int = Field(default=1, ge=1)
    min_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    target: float = Field(default=16.0, gt=0)  # The average number of requests per replica that scaling aims for.
    # Replicas are added after `upscale_delay` seconds with too many requests, and removed after `downscale_delay`
    # seconds with too few.
    upscale_delay: float = Field(default=10.0, ge=0)
    downscale_delay: float = Field(default=300.0, ge=0)
    # The GPUs of each replica. None: as many as the models' settings need, or 0 if the cluster has no GPU.
    gpus: int | None = Field(default=None, ge=0)
    cpus: float = Field(default=1.0, ge=0)  # The processors that Ray reserves for each replica.
    # The additional replicas during an update, in percent of the replicas. 0: an old replica is stopped before a new
    # one starts.
    surge: int = Field(default=0, ge=0, le=100)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError("min_replicas and max_replicas: give both or neither")
        if self.min_replicas is not None and self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}; expected at most max_replicas, which is {self.max_replicas}"
            )
        return self


def application(args: dict[str, Any]) -> serve.Application:
    """Build the application for `serve run deploy.ray:application model_dir=...`.

    Raises:
        ValidationError: An option is unknown or invalid.
        SettingsError: The settings of the model or of the server are invalid.
    """
    options = Options(**args)
    startup = load_startup(options.model_dir, os.environ, command_line(options.model_name))
    drain = max(model.settings.server_config.drain_timeout for model in startup.models) if startup.models else 0.0
    deployment = serve.deployment(Replica, name=NAME).options(
        **_replicas(options),
        **_resources(options, startup),
        max_ongoing_requests=_MOST_CALLS,
        graceful_shutdown_timeout_s=float(os.environ.get(_DRAINING, "30")) + drain + _STOP_SECONDS,
        max_surge_percent=options.surge,
        logging_config={"enable_access_log": False},  # The server has its own access log.
    )
    return deployment.bind(options.model_dir, options.model_name)


def _replicas(options: Options) -> dict[str, Any]:
    if options.min_replicas is None:
        return {"num_replicas": options.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target,
            "upscale_delay_s": options.upscale_delay,
            "downscale_delay_s": options.downscale_delay,
        }
    }


def _resources(options: Options, startup: Startup) -> dict[str, Any]:
    """Return the resources of each replica.

    If vLLM uses its Ray executor, the GPUs are in a placement group, which may span machines. Otherwise they are on one
    machine.
    """
    gpus = _gpus(startup) if options.gpus is None else options.gpus
    arguments = [model.settings.config.engine_arguments for model in startup.models]
    if not any(one.get("distributed_executor_backend") == "ray" for one in arguments):
        return {"ray_actor_options": {"num_cpus": options.cpus, "num_gpus": gpus}}
    # The replica uses the processors of the first bundle. vLLM places its workers on the GPUs of all bundles.
    bundles: list[dict[str, float]] = [{"CPU": options.cpus} | ({"GPU": 1} if gpus else {})]
    bundles += [{"GPU": 1}] * (gpus - 1)
    return {
        "ray_actor_options": {"num_cpus": options.cpus},
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",
    }


def _gpus(startup: Startup) -> int:
    """Return the number of GPUs that the settings of the models need. 0 if the cluster has no GPU."""
    if not ray.is_initialized() or not ray.cluster_resources().get("GPU"):
        return 0
    needed = 0
    for config in (one.settings.config for one in startup.models):
        if config.tensor_parallel_max:
            raise ValueError(
                "option.tensor_parallel_degree=max: set the option `gpus` to the number of GPUs of each replica"
            )
        needed += gpus_asked_for(config)
    return needed
