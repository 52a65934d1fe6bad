"""One replica: a model server whose application Ray Serve calls.

Serve runs `Replica` in a thread that lives as long as the process. The fork server for vLLM's processes needs this,
because the kernel kills it when the thread that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace

import httpx
from ray import serve

from container.http.router import Application
from container.observability import logs
from container.server import ModelServer, prepared
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.replica_application import ReplicaApplication, merged_metrics

logger = logging.getLogger(__name__)

_METRICS_SECONDS = 5.0


@serve.ingress()
class Replica:
    """A model server.

    It loads its models before Serve sends requests, is healthy while /ping answers 200, and is drained before it stops.
    """

    def __init__(self, model_dir: str | None = None, model_name: str | None = None) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._all = serve.get_deployment_handle(context.deployment, context.app_name)
        self._given = model_dir, model_name
        self._stop = contextlib.AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> Application:
        """Load the models, and return the application that serves them."""
        model_dir, model_name = self._given
        startup = without_local_sessions(load_startup(model_dir, os.environ, command_line(model_name)))
        logging_as = startup.server_config.log_format, startup.server_config.log_level, self._name
        logs.configure(*logging_as)
        logs.configure_vllm(*logging_as)
        self._stop.enter_context(prepared(startup))
        server = ModelServer(startup)
        self._stop.push_async_callback(server.stop)
        await server.load()
        watching = asyncio.create_task(server.watch())
        self._stop.callback(watching.cancel)
        applications = server.applications
        transport = httpx.ASGITransport(applications.router)
        self._own = httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None)
        application = ReplicaApplication(self.metrics, applications.router, startup.server_config)
        return applications.guarded(application)

    async def __del__(self) -> None:
        await self._stop.aclose()

    async def check_health(self) -> None:
        """Check /ping.

        Raises:
            RuntimeError: /ping does not answer 200.
        """
        answer = await self._own.get("/ping")
        if answer.status_code != 200:
            raise RuntimeError(f"/ping is {answer.status_code}: {answer.text}")

    async def own_metrics(self) -> tuple[str, str]:
        """Return the name and the metrics of this replica."""
        return self._name, (await self._own.get("/metrics")).text

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas that answer in time."""
        texts = [await self.own_metrics()]
        try:
            asked = self._all.broadcast("own_metrics")
            texts += await asked.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        except Exception as error:
            logger.warning("the metrics of the other replicas are missing: %r", error)
        return merged_metrics(dict(one for one in texts if not isinstance(one, BaseException)))


def command_line(model_name: str | None) -> dict[str, str]:
    """Return the server's command line options that were given."""
    return {} if model_name is None else {"model_name": model_name}


def without_local_sessions(startup: Startup) -> Startup:
    """Return the settings, with sessions turned off if they are stored only in the default directory.

    That directory is on one machine, so replicas on other machines do not see it.
    """
    models = []
    for model in startup.models:
        config = model.settings.config
        if config.lmi.enable_stateful_sessions and not config.lmi.sessions_path and not config.lmi.sessions_s3url:
            config = replace(config, lmi=replace(config.lmi, enable_stateful_sessions=False))
        models.append(replace(model, settings=replace(model.settings, config=config)))
    return replace(startup, models=tuple(models))
