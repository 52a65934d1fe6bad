"""One replica: a model server whose application Ray Serve calls.

Serve runs the class below in a thread of its own that lives as long as the process, so that vLLM's fork server, which
ends with the thread that started it, can be started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import httpx
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from container import logs
from container.adapter_management import Refusal, adapter_call_failed
from container.http.cross_site import passed_on
from container.http.router import Application
from container.server import ModelServer, prepared
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.replica_application import ReplicaApplication
from deploy.ray.adapter_changes import AdapterName, Change, Follower, Leader, Log, Made

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"
"""The actor that orders the changes of adapters."""
_CHANGE_SECONDS = 600.0
"""How long replicas may take to load an adapter."""
_METRICS_SECONDS = 5.0
_FIND_SECONDS = 30.0
"""How long the leader may take to learn which replicas there are."""
_FIND_PAUSE = 0.1
_OF_THE_CONNECTION = (b"connection", b"content-length", b"host", b"transfer-encoding")
_UNKNOWN = "the process that orders the changes of adapters has ended: the change may have been made or not; try again"
_UNDONE = "one of the replicas has not replied: the change was undone on the others"


class AdapterLeader(Leader):
    """The actor that Serve keeps for the deployment; all replicas of one version of it have the same."""

    def __init__(self) -> None:
        super().__init__(self._tell_replicas)
        self._context = serve.get_deployment_actor_context()

    async def _tell_replicas(self, log: Log, change: Change | None) -> list[Made | BaseException]:
        try:
            told = await self._told(log, change)
        except (TimeoutError, RayServeException) as error:
            logger.warning("the replicas have not changed an adapter: %r", error)
            return [error]
        replies: list[Made | BaseException] = []
        for answer in told:
            if isinstance(answer, ActorDiedError):  # another one starts in its place, and follows the log
                logger.warning("a replica has ended while an adapter was changed: %s", answer)
            elif isinstance(answer, BaseException):
                logger.error("a replica has not changed an adapter: %r", answer)
                replies.append(answer)
            elif answer is not None:  # a replica of another version of the deployment has another leader
                replies.append(answer)
        return replies

    async def _told(self, log: Log, change: Change | None) -> list[Made | BaseException | None]:
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        begun = time.monotonic()
        while True:
            try:
                return await _from_all(handle, _CHANGE_SECONDS, "follow", self._context.code_version, log, change)
            except DeploymentUnavailableError:  # the handle may be new, and not know the replicas yet
                if time.monotonic() - begun > _FIND_SECONDS:
                    raise
                await asyncio.sleep(_FIND_PAUSE)


async def _from_all(handle: DeploymentHandle, seconds: float, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all replicas; return what each returns or raises.

    Raises:
        TimeoutError: not all have ended in `seconds`.
        DeploymentUnavailableError: there is no replica.
    """
    asked = handle.broadcast(method, *arguments)
    answers: list[Any] = await asked.results_async(timeout_s=seconds, return_exceptions=True)
    return answers


@serve.ingress()
class Replica:
    """A model server: loaded before Serve gives it requests, healthy while its /ping is 200, stopped when drained."""

    def __init__(self, model_dir: str | None = None, model_name: str | None = None) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._version = context.code_version
        self._all = serve.get_deployment_handle(context.deployment, context.app_name)
        self._given = model_dir, model_name
        self._stop = contextlib.AsyncExitStack()
        self._catching_up: asyncio.Task[None] | None = None

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
        applications = server.applications
        transport = httpx.ASGITransport(applications.router)
        self._own = httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None)
        names = {model.name for model in server.models}
        self._model = names.pop() if len(names) == 1 else ""
        self._follower = Follower(self._own, self._name, _adapters(server))
        await self._catch_up()
        application = ReplicaApplication(self._change, self.metrics, applications.router, startup.server)
        return applications.guarded(application)

    async def __del__(self) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()
        await self._stop.aclose()

    async def check_health(self) -> None:
        """Raise an error while /ping is not 200; and have changes made that this replica has missed.

        Serve ends a replica that takes long to answer here, so that this never waits for an adapter.
        """
        answer = await self._own.get("/ping")
        if answer.status_code != 200:
            raise RuntimeError(f"/ping is {answer.status_code}: {answer.text}")
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up_in_time())

    async def _catch_up_in_time(self) -> None:
        try:
            await self._catch_up()
        except (RayError, ValueError) as error:  # the actor is being started again
            logger.warning("the adapters of the other replicas are not known: %s", error)
        except Exception:
            logger.exception("the adapters of the other replicas are not known")

    async def _catch_up(self) -> None:
        log: Log = await serve.get_deployment_actor(ADAPTERS).log.remote(self._follower.known)
        await self._follower.follow(log)

    async def _change(self, method: str, target: bytes, headers: Any, body: bytes) -> Made | Refusal:
        """Have all replicas make a change that a client asks this one for; return what the client gets."""
        kept = tuple((name, value) for name, value in passed_on(headers) if name not in _OF_THE_CONNECTION)
        change = Change(method, target, kept, body, self._model)
        path = target.partition(b"?")[0]
        try:
            made: Made | None = await serve.get_deployment_actor(ADAPTERS).change.remote(change, self._follower.known)
        except (RayError, ValueError) as error:
            logger.error("adapter %s: %s", change.adapter[1], error)
            return adapter_call_failed(path, _UNKNOWN, again=True)
        return made if made is not None else adapter_call_failed(path, _UNDONE, again=False)

    async def follow(self, version: str, log: Log, change: Change | None) -> Made | None:
        """Follow the leader's log, and make a change; None if it leads another version of the deployment."""
        if version != self._version:
            return None
        if change is not None:
            return await self._follower.make(log, change)
        await self._follower.follow(log)
        return None

    async def own_metrics(self) -> tuple[str, str]:
        """The name of this replica, and its metrics."""
        return self._name, (await self._own.get("/metrics")).text

    async def metrics(self) -> bytes:
        """The metrics of all replicas that tell them in time."""
        told = [await self.own_metrics()]
        try:
            told += await _from_all(self._all, _METRICS_SECONDS, "own_metrics")
        except Exception as error:
            logger.warning("the metrics of other replicas are not there: %r", error)
        return merged_metrics(dict(one for one in told if not isinstance(one, BaseException)))


def _adapters(server: ModelServer) -> dict[AdapterName, str]:
    """The `src` of each adapter that is registered."""
    services = [(model.name, model.lifecycle.service) for model in server.models]
    registries = [(name, service.adapters) for name, service in services if service is not None and service.adapters]
    return {(name, adapter.name): adapter.src for name, registry in registries for adapter in registry.all()}


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
