"""One replica: a model server whose application Ray Serve calls.

Serve runs the class below in a thread that lives as long as the process. This matters for vLLM's fork server, which
ends with the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

import httpx
from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from container.http.cross_site import passed_on
from container.http.router import Application
from container.observability import logs
from container.replicated_calls import Refusal, adapter_call_failed
from container.server import ModelServer, prepared
from container.settings.load import load_startup
from container.settings.settings import Startup
from deploy.ray.adapter_changes import AdapterChange, AdapterName, ChangeLog, Follower, Leader, ReplicaReply
from deploy.ray.metrics import merged_metrics
from deploy.ray.replica_application import ReplicaApplication

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"  # The name of the actor that orders the changes of adapters.
_CHANGE_SECONDS = 600.0  # Replicas may take this long to load an adapter.
_METRICS_SECONDS = 5.0
_FIND_SECONDS = 30.0  # The leader may take this long to find the replicas.
_FIND_PAUSE = 0.1
_CONNECTION_HEADERS = (b"connection", b"content-length", b"host", b"transfer-encoding")
_UNKNOWN = "the process that orders the changes of adapters has ended: the change may have been made or not; try again"
_UNDONE = "one of the replicas has not replied: the change was undone on the others"


class AdapterLeader(Leader):
    """The actor that Serve keeps for the deployment. All replicas of one version of the deployment share it."""

    def __init__(self) -> None:
        super().__init__(self._send_to_replicas)
        self._context = serve.get_deployment_actor_context()

    async def _send_to_replicas(
        self, log: ChangeLog, change: AdapterChange | None
    ) -> list[ReplicaReply | BaseException]:
        try:
            answers = await self._answers(log, change)
        except (TimeoutError, RayServeException) as error:
            logger.warning("the replicas did not change an adapter: %r", error)
            return [error]
        replies: list[ReplicaReply | BaseException] = []
        for answer in answers:
            if isinstance(answer, ActorDiedError):  # Serve starts another replica, which follows the log.
                logger.warning("a replica ended while an adapter was changed: %s", answer)
            elif isinstance(answer, BaseException):
                logger.error("a replica did not change an adapter: %r", answer)
                replies.append(answer)
            elif answer is not None:  # None: a replica of another version, which has another leader.
                replies.append(answer)
        return replies

    async def _answers(self, log: ChangeLog, change: AdapterChange | None) -> list[ReplicaReply | BaseException | None]:
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        begun = time.monotonic()
        while True:
            try:
                return await _from_all(handle, _CHANGE_SECONDS, "follow", self._context.code_version, log, change)
            except DeploymentUnavailableError:  # A new handle may not know the replicas yet.
                if time.monotonic() - begun > _FIND_SECONDS:
                    raise
                await asyncio.sleep(_FIND_PAUSE)


async def _from_all(handle: DeploymentHandle, seconds: float, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all replicas.

    Returns:
        The result or the exception of each replica.

    Raises:
        TimeoutError: A replica took longer than `seconds`.
        DeploymentUnavailableError: The deployment has no replica.
    """
    asked = handle.broadcast(method, *arguments)
    answers: list[Any] = await asked.results_async(timeout_s=seconds, return_exceptions=True)
    return answers


@serve.ingress()
class Replica:
    """A model server.

    It is loaded before Serve sends requests, is healthy while its /ping is 200, and is stopped after it is drained.
    """

    def __init__(self, model_dir: str | None = None, model_name: str | None = None) -> None:
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        self._version = context.code_version
        self._all = serve.get_deployment_handle(context.deployment, context.app_name)
        self._given = model_dir, model_name
        self._stop = contextlib.AsyncExitStack()
        self._catching_up: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Application:
        """Load the models, and return the application that serves them."""
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
        """Check /ping, and start to make changes that this replica has missed.

        Serve ends a replica that takes long to answer. So this function does not wait for an adapter.

        Raises:
            RuntimeError: The status of /ping is not 200.
        """
        answer = await self._own.get("/ping")
        if answer.status_code != 200:
            raise RuntimeError(f"/ping is {answer.status_code}: {answer.text}")
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up_in_time())

    async def _catch_up_in_time(self) -> None:
        try:
            await self._catch_up()
        except (RayError, ValueError) as error:  # The actor is being started again.
            logger.warning("this replica does not know the adapters of the other replicas: %s", error)
        except Exception:
            logger.exception("this replica does not know the adapters of the other replicas")

    async def _catch_up(self) -> None:
        log: ChangeLog = await serve.get_deployment_actor(ADAPTERS).log.remote(self._follower.known)
        await self._follower.follow(log)

    async def _change(self, method: str, target: bytes, headers: Any, body: bytes) -> ReplicaReply | Refusal:
        """Have all replicas make a client's change. Return the reply for the client."""
        kept = tuple((name, value) for name, value in passed_on(headers) if name not in _CONNECTION_HEADERS)
        change = AdapterChange(method, target, kept, body, self._model)
        path = target.partition(b"?")[0]
        try:
            made: ReplicaReply | None = await serve.get_deployment_actor(ADAPTERS).change.remote(
                change, self._follower.known
            )
        except (RayError, ValueError) as error:
            logger.error("adapter %s: %s", change.adapter[1], error)
            return adapter_call_failed(path, _UNKNOWN, again=True)
        return made if made is not None else adapter_call_failed(path, _UNDONE, again=False)

    async def follow(self, version: str, log: ChangeLog, change: AdapterChange | None) -> ReplicaReply | None:
        """Follow the leader's log, and make a change. Return None if the leader belongs to another version of the
        deployment.
        """
        if version != self._version:
            return None
        if change is not None:
            return await self._follower.make(log, change)
        await self._follower.follow(log)
        return None

    async def own_metrics(self) -> tuple[str, str]:
        """Return the name of this replica, and its metrics."""
        return self._name, (await self._own.get("/metrics")).text

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas that answer in time."""
        texts = [await self.own_metrics()]
        try:
            texts += await _from_all(self._all, _METRICS_SECONDS, "own_metrics")
        except Exception as error:
            logger.warning("the metrics of the other replicas are missing: %r", error)
        return merged_metrics(dict(one for one in texts if not isinstance(one, BaseException)))


def _adapters(server: ModelServer) -> dict[AdapterName, str]:
    """Return the `src` of each registered adapter."""
    services = [(model.name, model.lifecycle.service) for model in server.models]
    registries = [(name, service.adapters) for name, service in services if service is not None and service.adapters]
    return {(name, adapter.name): adapter.src for name, registry in registries for adapter in registry.all()}


def command_line(model_name: str | None) -> dict[str, str]:
    """Return the given options of the server's command line."""
    return {} if model_name is None else {"model_name": model_name}


def without_local_sessions(startup: Startup) -> Startup:
    """Return the settings without sessions that other replicas cannot see.

    Sessions are turned off if they would be stored on one machine.
    """
    models = []
    for model in startup.models:
        settings = model.settings.model
        if settings.enable_stateful_sessions and not settings.sessions_path and not settings.sessions_s3url:
            settings = replace(settings, enable_stateful_sessions=False)
        models.append(replace(model, settings=replace(model.settings, model=settings)))
    return replace(startup, models=tuple(models))
