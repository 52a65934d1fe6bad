"""LMI's, SageMaker's and vLLM's routes for managing adapters.

Source: contracts/lmi.md sections 1.2 and 9.1; contracts/sagemaker_hosting.md section 6.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from container.endpoint import Endpoint, Site, Target
from container.response_headers import NO_CACHE
from handlers.adapters import AdapterRegistry
from handlers.contracts.lmi import adapters as lmi
from handlers.contracts.openai import adapters as openai
from handlers.contracts.openai.family import wrong_method
from handlers.contracts.protocol import Call, Reply
from handlers.entry_point import Service
from handlers.errors import NotServed
from handlers.reply import ReplyWriter

ANY_METHOD = "*"
_PREFIXES = ("", "/models/{model}")
_Answer = Callable[[Call, AdapterRegistry], Awaitable[Reply]]


def adapter_routes(site: Site) -> Iterator[tuple[str, str, Endpoint]]:
    """Path, method and endpoint of each route."""
    for prefix in _PREFIXES:
        path = f"{prefix}/adapters"
        yield path, ANY_METHOD, _lmi(site, path, {"GET": _list, "POST": _register})
        yield f"{path}/{{adapter}}", ANY_METHOD, _lmi(site, path, {"GET": _describe, "DELETE": _unregister})
        yield f"{path}/{{adapter}}/update", ANY_METHOD, _lmi(site, path, {"POST": _update})
    yield openai.LOAD, ANY_METHOD, _vllm(site, openai.LOAD, _load)
    yield openai.UNLOAD, ANY_METHOD, _vllm(site, openai.UNLOAD, _unload)


def _service(site: Site, call: Call) -> Service:
    """What serves the model that the path names, or the one that was there at the start.

    Raises:
        UnknownModel: it is not served, or none is named and there are several.
        NotReady: it is not loaded.
    """
    name = call.path_parameters.get("model")
    return site.service() if name is None else site.models.choose(name).service()


def _registry(site: Site, call: Call) -> AdapterRegistry:
    registry = _service(site, call).adapters
    if registry is None:
        raise NotServed(lmi.DISABLED)
    return registry


def _lmi(site: Site, route: str, answers: dict[str, _Answer]) -> Endpoint:
    async def answer(call: Call, writer: ReplyWriter) -> None:
        if (chosen := answers.get(call.method)) is None:
            writer.reply(lmi.wrong_method(call.method, call.path))
            return
        writer.reply(await chosen(call, _registry(site, call)))

    return Endpoint(site, route, [Target(answer, lmi.refuse)], NO_CACHE)


async def _register(call: Call, registry: AdapterRegistry) -> Reply:
    order = lmi.registration(call)
    return lmi.done(call, order.name, "registered", await registry.register(order))


async def _update(call: Call, registry: AdapterRegistry) -> Reply:
    order = lmi.change(call)
    return lmi.done(call, order.name, "updated", await registry.update(order))


async def _unregister(call: Call, registry: AdapterRegistry) -> Reply:
    name = call.path_parameters["adapter"]
    return lmi.done(call, name, "unregistered", await registry.unregister(name, lmi.alias(call)))


async def _describe(call: Call, registry: AdapterRegistry) -> Reply:
    return lmi.described(registry.get(call.path_parameters["adapter"]))


async def _list(call: Call, registry: AdapterRegistry) -> Reply:
    return lmi.listed(call, registry.all())


def _vllm(site: Site, route: str, carry_out: _Answer) -> Endpoint:
    async def answer(call: Call, writer: ReplyWriter) -> None:
        writer.reply(wrong_method(call) if call.method != "POST" else await carry_out(call, _registry(site, call)))

    return Endpoint(site, route, [Target(answer, openai.refuse_adapter)])


async def _load(call: Call, registry: AdapterRegistry) -> Reply:
    body = openai.read_load(call)
    await registry.register(body.order, replacing=body.load_inplace)
    return openai.loaded(body.lora_name)


async def _unload(call: Call, registry: AdapterRegistry) -> Reply:
    body = openai.read_unload(call)
    await registry.unregister(body.lora_name)
    return openai.unloaded(body.lora_name)
