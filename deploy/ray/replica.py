"""One replica: a model server whose application Ray Serve calls.

Serve runs the class below in a thread of its own that lives as long as the process, so that vLLM's fork server, which
ends with the thread that started it, can be started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import httpx
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayError

from container import logs
from container.app import Application
from container.http.cross_site import KnownHosts
from container.server import ModelServer, prepared
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.asgi import ReplicaApplication
from deploy.ray.changes import Change, Failure, ReplicaChanges

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"
"""The actor that has the changes of adapters."""
_CHANGE_SECONDS = 600.0
"""How long the other replicas may take to load an adapter."""
_METRICS_SECONDS = 5.0


class _Log:
    """The changes in the actor that Serve keeps for the deployment; it is looked up anew in case it was replaced."""

    async def add(self, change: Change) -> int:
        number: int = await serve.get_deployment_actor(ADAPTERS).add.remote(change)
        return number

    async def since(self, number: int) -> tuple[int, list[tuple[int, Change]]]:
        changes: tuple[int, list[tuple[int, Change]]] = await serve.get_deployment_actor(ADAPTERS).since.remote(number)
        return changes

    async def restore(self, last: int, changes: list[tuple[int, Change]]) -> None:
        await serve.get_deployment_actor(ADAPTERS).restore.remote(last, changes)


@serve.ingress()
class Replica:
    """A model server: loaded before Serve gives it requests, healthy while its /ping is 200, stopped when drained."""

    def __init__(self, model_dir: str | None = None, model_name: str | None = None) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._all = serve.get_deployment_handle(context.deployment, context.app_name)
        self._given = model_dir, model_name
        self._stop = contextlib.AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> Application:
        """Load the models; return the application that serves them."""
        model_dir, model_name = self._given
        startup = without_local_sessions(load_startup(model_dir, os.environ, command_line(model_name)))
        logging_as = startup.server.log_format, startup.server.log_level, self._name
        logs.configure(*logging_as)
        logs.configure_vllm(*logging_as)
        self._stop.enter_context(prepared(startup))
        server = ModelServer(startup)
        self._stop.push_async_callback(server.stop)
        await server.load()
        watching = asyncio.create_task(server.watch())
        self._stop.callback(watching.cancel)
        transport = httpx.ASGITransport(server.applications.main)
        self._own = httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None)
        self._changes = ReplicaChanges(self._own, _Log(), self._tell)
        await self._changes.catch_up()
        hosts = KnownHosts(startup.server.allowed_hosts)
        return ReplicaApplication(self._changes.change, self.metrics, server.applications.main, hosts)

    async def __del__(self) -> None:
        await self._stop.aclose()

    async def check_health(self) -> None:
        """Raise an error while /ping is not 200; and carry out changes that this replica has missed."""
        answer = await self._own.get("/ping")
        if answer.status_code != 200:
            raise RuntimeError(f"/ping is {answer.status_code}: {answer.text}")
        with contextlib.suppress(RayError, ValueError):  # the actor is being started again
            await self._changes.catch_up()

    async def catch_up(self) -> list[Failure]:
        """Carry out the changes of adapters that this replica has not yet; return what could not be done."""
        return await self._changes.catch_up()

    async def _tell(self) -> list[list[Failure] | BaseException]:
        told = self._all.broadcast("catch_up").results_async(timeout_s=_CHANGE_SECONDS, return_exceptions=True)
        answers: list[list[Failure] | BaseException] = await told
        return answers

    async def own_metrics(self) -> tuple[str, str]:
        """The name of this replica, and its metrics."""
        return self._name, (await self._own.get("/metrics")).text

    async def metrics(self) -> bytes:
        """The metrics of all replicas that tell them in time."""
        told = [await self.own_metrics()]
        try:
            asked = self._all.broadcast("own_metrics")
            told += await asked.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        except Exception as error:
            logger.warning("the metrics of other replicas are not there: %r", error)
        return merged_metrics(dict(one for one in told if not isinstance(one, BaseException)))


def command_line(model_name: str | None) -> dict[str, str]:
    """The server's keys that are given."""
    return {} if model_name is None else {"model_name": model_name}


def without_local_sessions(startup: Startup) -> Startup:
    """Return the settings with sessions off where they would be kept on one machine, which others do not see."""
    models = []
    for model in startup.models:
        settings = model.settings.model
        if settings.enable_stateful_sessions and not settings.sessions_path and not settings.sessions_s3url:
            settings = replace(settings, enable_stateful_sessions=False)
        models.append(replace(model, settings=replace(model.settings, model=settings)))
    return replace(startup, models=tuple(models))


class _Merged(Collector):
    """The metrics of all replicas, each series with the label `replica`."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for metric in text_string_to_metric_families(text):
                whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                whole.samples += [
                    sample._replace(labels={"replica": replica, **sample.labels}) for sample in metric.samples
                ]
        return merged.values()


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Prometheus' text for what each replica's own /metrics says."""
    return generate_latest(_Merged(texts))
