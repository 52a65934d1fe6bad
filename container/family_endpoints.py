"""Endpoints for the routes that the families of clients declare."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor

import msgspec

from container.endpoint import Endpoint, Scope, Site, Target
from handlers.contracts.family import OWN_HANDLER, Family, Forwards, Generates, Route, Tells
from handlers.contracts.protocol import Call, Reply
from handlers.errors import NotServed
from handlers.reply import Handler, ReplyWriter, Running

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"

_LONG_TEXT = 4096
"""Bytes above which a body is answered in a thread: tokenizing takes longer than reading."""
_THREADS = 2
"""As many long bodies are answered at a time, whatever number of clients ask: each may take seconds, and a quarter of a
gigabyte."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def family_endpoints(site: Site, families: Iterable[Family]) -> dict[tuple[str, str], Endpoint]:
    """An endpoint for each path and method. Targets with `where` are asked first."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    targets: defaultdict[tuple[str, str], list[Target]] = defaultdict(list)
    for family in families:
        for route in family.routes:
            target = _target(site, family, route, threads)
            for method in route.methods:
                place = targets[route.path, method]
                place.insert(0, target) if _where(route) else place.append(target)
    return {key: Endpoint(site, key[0], place) for key, place in targets.items()}


def _target(site: Site, family: Family, route: Route, threads: Executor) -> Target:
    match route:
        case Tells():
            return _telling(site, family, route, threads)
        case Generates():
            return _generating(site, family, route)
        case Forwards():
            return _forwarding(site, family)


def _telling(site: Site, family: Family, route: Tells, threads: Executor) -> Target:
    async def answer(call: Call, writer: ReplyWriter) -> None:
        view = site.lifecycle.view()
        if len(call.body) < _LONG_TEXT:
            writer.reply(route.tell(call, view))
        else:
            writer.reply(await asyncio.get_running_loop().run_in_executor(threads, route.tell, call, view))

    where = route.where
    if where is None:
        return Target(answer, family.refuse)
    return Target(answer, family.refuse, wanted=lambda body: _has_field(body, where))


def _generating(site: Site, family: Family, route: Generates) -> Target:
    async def answer(call: Call, writer: ReplyWriter) -> Running:
        service = site.service()
        handler = service.generation.get(route.path)
        if handler is None:
            raise NotServed(_UNUSABLE if service.custom is None else OWN_HANDLER)
        return await handler.handle(call, writer)

    def early(scope: Scope, _: dict[bytes, bytes]) -> Reply | None:
        if route.refuse_path is not None:
            refusal = route.refuse_path(scope.get("path_params", {}), site.lifecycle.model)
            if refusal is not None:
                return refusal
        _when_ready(site)
        return None

    return Target(answer, family.refuse, early=early)


def _forwarding(site: Site, family: Family) -> Target:
    async def answer(call: Call, writer: ReplyWriter) -> Running:
        service = site.service()
        handler: Handler | None = service.openai
        if handler is None:
            raise NotServed(_NOT_VLLM if service.custom is None else OWN_HANDLER)
        return await handler.handle(call, writer)

    return Target(answer, family.refuse, early=lambda *_: _when_ready(site))


def _when_ready(site: Site) -> None:
    """A body that nobody is going to read need not be waited for."""
    site.service()


def _where(route: Route) -> str | None:
    return route.where if isinstance(route, Tells) else None


def _has_field(body: bytes, name: str) -> bool:
    """Whether the body is a JSON object with this field."""
    if f'"{name}"'.encode() not in body:
        return False
    try:
        return name in _fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
