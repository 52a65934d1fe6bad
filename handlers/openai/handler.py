"""OpenAI's routes: our own contract for what is common, and for all else vLLM's front end around our engine.

vLLM's front end also answers what our contract understands but the engine refuses, so that errors are vLLM's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engines.choice import is_vllm
from engines.errors import InvalidRequest, Overloaded, RequestError, UnknownAdapter
from engines.model_settings import ModelSettings
from handlers.contract import LONG_BODY, Call, Exchange, ReplyWriter, Running, adapter_header
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.contract import OpenAIContract
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.media_limits import MediaMemory
from handlers.openai.routes import ALIASED, refuse
from handlers.openai.vllm_call import VllmApp, VllmCall, check_body
from handlers.queue import EngineQueue
from handlers.running_call import RunningCall

_LONG_CHAT = 16 * 1024  # Bytes; a template may be slow, so that longer ones are parsed in a thread.
_PREFIXES = ("chatcmpl-", "cmpl-")  # Before the HTTP request's id in those of vLLM's answers.
_ONE_OF_MANY = re.compile(r"[-_]\d+$")  # After it, in the requests of an answer to several prompts or conversations.


def import_front_end(settings: ModelSettings) -> None:
    """Import vLLM's front end where it will serve the model; takes a second, and not of the event loop's time."""
    if is_vllm(settings):
        from handlers.openai import engine_client, vllm_app  # noqa: F401

        vllm_app.routers()


async def openai_handler(queue: EngineQueue, settings: ModelSettings, aliases: Sequence[str]) -> OpenAIHandler | None:
    """What serves OpenAI's routes for a loaded model; None where the engine is not vLLM. `aliases`: further names that
    a request may call the model by. Raises EngineStartError: vLLM's front end refuses an option of the model."""
    if not is_vllm(settings):
        return None
    from handlers.openai.engine_client import EngineClient
    from handlers.openai.vllm_app import build, front_end, refusal

    engine: Any = queue.engine
    adapters = engine.adapters
    accepted = frozenset({*aliases, settings.name, settings.model_id})
    names, public = settings.public_names, adapters.public if adapters is not None else {}
    app = await build(
        EngineClient(engine, settings),
        engine.frontend_arguments,
        names=names,
        accepts=lambda name: name in accepted or current_call.get().any_model,
        adapters=adapters.public if adapters is not None else None,
    )
    served = accepted.union(names)
    common = front_end(app, engine.async_llm.vllm_config, names[0], served.__contains__, public)
    parses_tools = bool(engine.frontend_arguments.get("tool_call_parser"))
    vllm_app = VllmApp(app, engine.async_llm, parses_tools, MediaMemory(settings), refusal)
    contract = OpenAIContract(common) if common is not None else None
    return OpenAIHandler(vllm_app, queue, contract, names[0], public)


class OpenAIHandler:
    """Implements `Handler`: answers common calls by our contract, and hands the others to vLLM's front end."""

    def __init__(
        self,
        vllm: VllmApp,
        queue: EngineQueue,
        contract: OpenAIContract | None = None,
        model: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        """`contract`: None: everything goes to vLLM's front end. `model`, `adapters`: names in bodies; adapters come
        and go."""
        self._vllm, self._queue, self._contract, self._model, self._adapters = vllm, queue, contract, model, adapters
        # One long body at a time: vLLM's renderer copies its tokenizer for each thread that uses it.
        self._long = asyncio.Lock()
        self._aborting: set[asyncio.Task[None]] = set()

    def openapi(self) -> dict[str, Any]:
        """vLLM's own description of its routes, as an OpenAPI document."""
        document: dict[str, Any] = self._vllm.app.openapi()
        return document

    def abort(self, request_id: str) -> None:
        """End the requests whose answer (`chatcmpl-...`) or HTTP request has this id. Their clients get what there is
        of the answer, with the finish reason `abort`."""
        ids = [known for known in self._vllm.llm.output_processor.external_req_ids if _belongs(known, request_id)]
        if ids and not self._vllm.llm.errored:
            task = asyncio.create_task(self._vllm.llm.abort(ids))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def handle(self, call: Call, writer: ReplyWriter) -> Running:
        path = call.path.removeprefix(ALIASED)
        if path in (CHAT, COMPLETIONS):
            self._queue.check_place()
        return await self.begin(call, writer, path, any_model=path != call.path, adapter=adapter_header(call))

    async def begin(
        self, call: Call, writer: ReplyWriter, path: str, *, any_model: bool, adapter: str | None = None
    ) -> Running:
        """Answer the call as one to `path`. `any_model`: no `model` in its body is refused. `adapter`: takes the place
        of that `model`; "" is the model itself. Raises UnknownAdapter: it is not registered."""
        if adapter and call.body and adapter not in self._adapters:
            raise UnknownAdapter(adapter)
        if (exchange := await self._understood(call, path, any_model, adapter)) is not None:
            running = RunningCall(self._queue, exchange, writer, call.request_id)
            try:
                await running.submit()
                return running
            except Overloaded as full:
                self._queue.engine.meter.calls.count(0.0, failed=True)
                writer.reply(refuse(full))  # not raised: `/invocations` has a writer that gives it LMI's form
                return running
            except RequestError:
                pass  # vLLM's front end says why
        model = (adapter or self._model) if adapter is not None and call.body else None
        return VllmCall(self._vllm, OpenAICall(self._queue, any_model, self._vllm.media), call, writer, path, model)

    async def _understood(self, call: Call, path: str, any_model: bool, adapter: str | None) -> Exchange | None:
        if self._contract is None:
            return None
        contract = self._contract

        def parsed() -> Exchange | None:
            if len(call.body) >= LONG_BODY:
                try:
                    check_body(call.body, path, self._queue.engine.max_model_len)
                except InvalidRequest:
                    return None  # it is refused where it would go to vLLM
            return contract.parse(call, path, any_model=any_model, adapter=adapter)

        if len(call.body) < (_LONG_CHAT if path == CHAT else LONG_BODY):
            exchange = parsed()
        else:
            async with self._long:
                exchange = await asyncio.to_thread(parsed)
        if exchange is None or len(exchange.requests) == 1:
            return exchange
        return await self._tokenized(exchange)

    async def _tokenized(self, exchange: Exchange) -> Exchange | None:
        """The same with token ids for prompts; None if one is refused, which must show before another has begun."""
        tokenize = self._queue.engine.prompt_token_ids
        try:
            prompts = [tuple(await tokenize(request)) for request in exchange.requests]
        except RequestError:
            return None
        pairs = zip(exchange.requests, prompts, strict=True)
        requests = tuple([msgspec.structs.replace(request, prompt=prompt) for request, prompt in pairs])
        return replace(exchange, requests=requests)


def _belongs(known: str, request_id: str) -> bool:
    """Whether vLLM's id of a request is of the answer with this id; many prompts and conversations have one each."""
    names = (known, _ONE_OF_MANY.sub("", known))
    return known.startswith(_PREFIXES) and any(request_id in (name, name.partition("-")[2]) for name in names)
