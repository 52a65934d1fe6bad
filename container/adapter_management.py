"""The routes that manage LoRA adapters: LMI's and vLLM's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from container.http.body_limits import BodyReader, Receive
from container.http.refusals import connection_headers
from container.http.reply import NO_CACHE, Headers, HttpReply
from container.http.route import AppState, HttpRoute
from container.models.registry import Model
from container.settings.settings import ServerSettings
from engines.adapters import AdapterRegistry
from engines.errors import AdapterFailed, NotReady, NotServed, RequestError
from handlers.contract import Call, Reply
from handlers.lmi import adapter_management as lmi
from handlers.openai import routes as openai

MAX_BODY = 256 * 1024  # Bytes.
_PREFIXES = ("", "/models/{model}")


@dataclass(frozen=True, slots=True)
class _Api:
    """The form of an API for adapters."""

    refuse: Callable[[RequestError], Reply]
    wrong_method: Callable[[Call], Reply]
    headers: Headers | None  # Of every reply.


_LMI = _Api(lmi.refuse, lmi.wrong_method, NO_CACHE)
_VLLM = _Api(openai.refuse_adapter, openai.wrong_method, None)

_Operation = Callable[[Call, AdapterRegistry], Awaitable[Reply]]


class AdapterRoute(HttpRoute):
    """A route that manages adapters of a model. It takes all methods."""

    def __init__(self, state: AppState, path: str, api: _Api, operations: Mapping[str, _Operation]) -> None:
        """`operations` has the operation of each method."""
        super().__init__(state, path, headers=api.headers, same_site=True, max_body=MAX_BODY)
        self._api, self._operations = api, operations

    def refuse(self, error: RequestError) -> Reply:
        return self._api.refuse(error)

    async def answer(self, call: Call, reply: HttpReply, _: Model | None) -> None:
        operation = self._operations.get(call.method)
        if operation is None:
            reply.reply(self._api.wrong_method(call))
        else:
            reply.reply(await operation(call, self._registry(call)))

    def _registry(self, call: Call) -> AdapterRegistry:
        """Return the adapters of the model that the path names, or of the startup model.

        Raises:
            NotServed: The model has no adapters, or several versions: a call would change only one of them.
        """
        models, name = self.state.models, call.path_parameters.get("model")
        model = models.startup() if name is None else models.choose(name)
        if len(models.versions(model.name)) > 1:
            raise NotServed(f"model {model.name} has several versions; adapters are managed only for a model with one")
        registry = model.service().adapters
        if registry is None:
            raise NotServed(lmi.DISABLED)
        return registry


def adapter_routes(state: AppState) -> Iterator[tuple[str, AdapterRoute]]:
    """Yield the path and the route of each operation on adapters."""
    for prefix in _PREFIXES:
        path = f"{prefix}/adapters"
        yield path, AdapterRoute(state, path, _LMI, {"GET": _list, "POST": _register})
        yield f"{path}/{{adapter}}", AdapterRoute(state, path, _LMI, {"GET": _describe, "DELETE": _unregister})
        yield f"{path}/{{adapter}}/update", AdapterRoute(state, path, _LMI, {"POST": _update})
    yield openai.LOAD, AdapterRoute(state, openai.LOAD, _VLLM, {"POST": _load})
    yield openai.UNLOAD, AdapterRoute(state, openai.UNLOAD, _VLLM, {"POST": _unload})


async def _register(call: Call, registry: AdapterRegistry) -> Reply:
    order = lmi.read_registration(call)
    return lmi.confirmation(call, order.name, "registered", await registry.register(order))


async def _update(call: Call, registry: AdapterRegistry) -> Reply:
    order = lmi.read_update(call)
    return lmi.confirmation(call, order.name, "updated", await registry.update(order))


async def _unregister(call: Call, registry: AdapterRegistry) -> Reply:
    name = call.path_parameters["adapter"]
    return lmi.confirmation(call, name, "unregistered", await registry.unregister(name, lmi.alias(call)))


async def _describe(call: Call, registry: AdapterRegistry) -> Reply:
    return lmi.description(registry.get(call.path_parameters["adapter"]))


async def _list(call: Call, registry: AdapterRegistry) -> Reply:
    return lmi.adapter_list(call, registry.all())


async def _load(call: Call, registry: AdapterRegistry) -> Reply:
    body = openai.read_load(call)
    await registry.register(body.order, replacing=body.load_inplace)
    return openai.loaded(body.lora_name)


async def _unload(call: Call, registry: AdapterRegistry) -> Reply:
    body = openai.read_unload(call)
    await registry.unregister(body.lora_name)
    return openai.unloaded(body.lora_name)


class Refusal(NamedTuple):
    """A reply to a call that changes nothing."""

    status: int
    headers: Headers
    body: bytes


async def read_adapter_call(scope: Any, receive: Receive, settings: ServerSettings) -> bytes | Refusal | None:
    """Read the body of a call of `adapter_routes`.

    For servers that pass the call to several replicas.

    Returns:
        The body; the reply if the body cannot be read; None if the client left.
    """
    limit = min(MAX_BODY, settings.max_request_size)
    try:
        return await BodyReader(None).read(dict(scope["headers"]), receive, limit, settings.request_read_timeout)
    except RequestError as error:
        return _refused_adapter_call(scope["raw_path"], error)


def adapter_call_failed(path: bytes, message: str, *, again: bool) -> Refusal:
    """Return the reply for a call of `adapter_routes` that failed on one of several replicas.

    Args:
        again: The client may repeat the call at once.
    """
    return _refused_adapter_call(path, NotReady(message) if again else AdapterFailed(message))


def _refused_adapter_call(path: bytes, error: RequestError) -> Refusal:
    refuse = openai.refuse_adapter if path.decode() in (openai.LOAD, openai.UNLOAD) else lmi.refuse
    reply = refuse(error)
    headers = [(b"content-type", reply.content_type.encode()), *connection_headers(error, body_read=False)]
    return Refusal(reply.status, headers, reply.body)
