"""The handler of OpenAI's routes.

Slipway's contract answers common calls. vLLM's front end answers all other calls. It also answers calls that the
contract understands but the engine refuses, so that the errors are vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from engines.engine_choice import is_vllm
from engines.errors import (
    AdapterUnusable,
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidChat,
    Overloaded,
    RequestError,
    UnknownAdapter,
)
from engines.vllm.parsers.choice import is_named
from handlers.contract import (
    LONG_BODY,
    Call,
    Exchange,
    Reply,
    ReplyWriter,
    Running,
    adapter_header,
    ended_at_deadline,
)
from handlers.explanation import Explained, explaining, prepare
from handlers.model_config import ModelConfig
from handlers.openai.answer import VLLM_FORM, AnswerForm
from handlers.openai.body import Body
from handlers.openai.constraints import CHAT, COMPLETIONS, COUNT_TOKENS, RENDER
from handlers.openai.contract import OpenAIContract
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.embeddings import EmbeddingsContract
from handlers.openai.error_forms import error_form
from handlers.openai.load_report import LoadReportWriter, report_format
from handlers.openai.media.limits import MediaMemory
from handlers.openai.routes import ALIASED, EMBEDDINGS, QUEUED, SHORT_EMBEDDINGS, refuse
from handlers.openai.vllm_call import VllmApp, VllmCall
from handlers.parsing.images import ImageLoader
from handlers.queue import EngineQueue
from handlers.route_declarations import RenderedChat, is_address
from handlers.running_call import RunningCall

_PROMPTS_PER_TURN = 2  # After this number of tokenized prompts, other work gets a turn on the event loop.
_LONG_CHAT = 16 * 1024  # Bytes. Longer chats are parsed in a thread, since their templates may be slow.
# vLLM's front end answers with these statuses if the engine fails. 501 is left out, because the body causes it.
_FAILED = (500, 503)
# An answer's id consists of a prefix and the HTTP request's id. If a call has several prompts, a number follows.
_PREFIXES = ("chatcmpl-", "cmpl-", "transcribe-", "translate-")
_ONE_OF_MANY = re.compile(r"[-_]\d+$")


def import_front_end(config: ModelConfig) -> None:
    """Import vLLM's front end if it will serve the model. Call this in a thread, because it takes a second."""
    if is_vllm(config):
        from handlers.openai.vllm import engine_client  # noqa: F401
        from handlers.openai.vllm.app import routers

        routers()


async def openai_handler(queue: EngineQueue, config: ModelConfig, aliases: Sequence[str]) -> OpenAIHandler | None:
    """Create the handler for a loaded model.

    Args:
        queue: The queue of the model's engine.
        config: The model's settings.
        aliases: Further names that a request may use for the model.

    Returns:
        The handler, or None if the engine is not vLLM.

    Raises:
        EngineStartError: vLLM's front end refuses an option of the model.
    """
    if not is_vllm(config):
        return None
    from handlers.openai.media.connector import SOUND_MIB, VllmImages
    from handlers.openai.vllm.app import build
    from handlers.openai.vllm.common_calls import chunks_long_prompts, front_end
    from handlers.openai.vllm.engine_client import EngineClient
    from handlers.openai.vllm.errors import refusal

    engine: Any = queue.engine
    adapters = engine.adapters
    names, public = config.public_names, adapters.public if adapters is not None else {}
    accepted = frozenset({*aliases, *names, config.name, config.model_id})

    def accepts(name: str) -> bool:
        return name in accepted or is_address(name)

    app = await build(
        EngineClient(engine, config),
        engine.frontend_arguments,
        names=names,
        accepts=lambda name: accepts(name) or current_call.get().any_model,
        adapters=adapters.public if adapters is not None else None,
        tasks=engine.tasks,
        parses_only_tools=not is_named(config),
    )
    contract: OpenAIContract | EmbeddingsContract | None = None
    if engine.pooling is not None:
        as_they_are = not (engine.pooling.lower_case or chunks_long_prompts(engine.async_llm.vllm_config))
        if engine.pooling.task == "embed" and as_they_are:
            contract = EmbeddingsContract(names[0], accepts, public)
    elif (common := front_end(app, engine.async_llm.vllm_config, names[0], accepts, public)) is not None:
        contract = OpenAIContract(common)
    parses_tools = bool(app.state.args.tool_call_parser)
    media = MediaMemory(config)
    vllm_app = VllmApp(
        app,
        engine.async_llm,
        parses_tools,
        media,
        VllmImages(engine.async_llm, media),
        most_sound_mib=SOUND_MIB,
        refusal=refusal,
    )
    return OpenAIHandler(vllm_app, queue, contract, names[0], public)


class OpenAIHandler:
    """Answers common calls with Slipway's contract, and passes other calls to vLLM's front end."""

    def __init__(
        self,
        vllm: VllmApp,
        queue: EngineQueue,
        contract: OpenAIContract | EmbeddingsContract | None = None,
        model: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        """Create the handler.

        Args:
            vllm: vLLM's front end.
            queue: The queue of the model's engine.
            contract: Slipway's contract. If None, vLLM's front end answers all calls.
            model: The model's name in bodies.
            adapters: The names of adapters in bodies. The collection changes as adapters are loaded and unloaded.
        """
        self._vllm, self._queue, self._contract, self._model, self._adapters = vllm, queue, contract, model, adapters
        # Only one long body is read at a time, because vLLM's renderer copies its tokenizer for each thread that uses
        # it.
        self._long = asyncio.Lock()
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def images(self) -> ImageLoader | None:
        """Loads images for other contracts. These images share the memory limit with images of chats."""
        return self._vllm.images

    def openapi(self) -> dict[str, Any]:
        """Return vLLM's description of its routes, as an OpenAPI document."""
        document: dict[str, Any] = self._vllm.app.openapi()
        return document

    def abort(self, request_id: str) -> None:
        """End the requests whose answer (`chatcmpl-...`) or HTTP request has this id.

        Their clients get the answer so far, with the finish reason `abort`.
        """
        from engines.vllm.async_llm import abort, request_ids  # OpenAI's routes can be described without vLLM

        ids = [known for known in request_ids(self._vllm.llm) if _belongs(known, request_id)]
        if ids:
            task = asyncio.create_task(abort(self._vllm.llm, ids, internal=False))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        path = EMBEDDINGS if call.path == SHORT_EMBEDDINGS else call.path.removeprefix(ALIASED)
        if path in QUEUED:
            queue = self._queue if call.explanation is None else explaining(self._queue, call)
            queue.refuse_if_full()
        return await self.begin(call, writer, path, any_model=path != call.path, adapter=adapter_header(call))

    async def render(self, call: Call) -> RenderedChat:
        """Return the prompt of a chat. Other contracts call this for their routes that tokenize a chat.

        Args:
            call: A call with the body of a chat.

        Raises:
            InvalidChat: The chat cannot become a prompt.
            GenerationFailed: The front end failed.
        """
        whole = _WholeReply()
        running = await self.begin(call, whole, RENDER, any_model=True)
        try:
            reply = await whole.received
        finally:
            if running is not None:
                running.cancel()
        if reply.status == 200:
            return msgspec.json.decode(reply.body, type=RenderedChat)
        message = msgspec.json.decode(reply.body)["error"]["message"]
        raise InvalidChat(message) if reply.status < 500 else GenerationFailed(message)

    async def begin(
        self,
        call: Call,
        writer: ReplyWriter,
        path: str,
        *,
        any_model: bool,
        adapter: str | None = None,
        form: AnswerForm = VLLM_FORM,
        body: Body | None = None,
    ) -> Running | None:
        """Begin to answer a call.

        Args:
            call: The call.
            writer: Sends the reply.
            path: The path of OpenAI's API that the call is for. On `/invocations`, the call itself has
                another path.
            any_model: True accepts every `model` in the body.
            adapter: Replaces the `model` in the body. An empty string means the model itself.
            form: The form of the answer.
            body: The body, if it was decoded.

        Returns:
            The running call, or None if the reply is complete.

        Raises:
            UnknownAdapter: The adapter is not registered.
        """
        if adapter and call.body and adapter not in self._adapters:
            raise UnknownAdapter(adapter)
        if call.steering_fault is not None:
            writer.reply(form.refusal(error_form(path).whole(refuse(call.steering_fault))))
            return None
        if path in (CHAT, COMPLETIONS) and (report := report_format(call)):
            writer = LoadReportWriter(writer, self._queue.engine, report)
        queue = self._queue if call.explanation is None else explaining(self._queue, call)
        exchange = None
        if self._contract is not None:
            parse = partial(
                self._contract.parse, call, path, any_model=any_model, adapter=adapter, form=form, body=body
            )
            if len(call.body) < (_LONG_CHAT if path == CHAT else LONG_BODY):
                exchange = parse()
            else:
                async with self._long:
                    exchange = await asyncio.to_thread(parse)
            explains_one = call.explanation is not None and call.explanation.variant
            if exchange is not None and len(exchange.requests) > 1 and not explains_one:
                tokenizing, deadline = self._tokenized(exchange), queue.deadline_of(exchange, call)
                with contextlib.suppress(DeadlineExceeded):  # `RunningCall.submit` answers such a call.
                    exchange = await (tokenizing if deadline is None else deadline.limit(tokenizing))
        if exchange is not None:
            began = time.monotonic()
            try:
                if call.explanation is not None:
                    await prepare(queue, exchange, call)
                running = RunningCall(queue, exchange, writer, call)
                await running.submit()
                return running
            except (Overloaded, GenerationFailed, EngineDead, AdapterUnusable, DeadlineExceeded) as failure:
                # vLLM's front end would wait as long, and fail too. Only `prepare` raises DeadlineExceeded here.
                queue.statistics.calls.count(time.monotonic() - began, failed=True)
                reply = form.refusal(refuse(failure))
                writer.reply(ended_at_deadline(reply) if isinstance(failure, DeadlineExceeded) else reply)
                return None
            except RequestError:
                pass  # vLLM's front end refuses the call in vLLM's words
        model = (adapter or self._model) if adapter is not None and call.body else None
        openai_call = OpenAICall(queue, any_model, self._vllm.media, call, only_counts=path == COUNT_TOKENS)
        if call.explanation is not None:
            await self._explain(call, openai_call, writer, path, form, model)
            return None
        return VllmCall(self._vllm, openai_call, call, form.of_vllm(writer, call), path, model)

    async def _explain(
        self, call: Call, openai_call: OpenAICall, writer: ReplyWriter, path: str, form: AnswerForm, model: str | None
    ) -> None:
        """Let vLLM's front end make the requests of a call, but do not send them to the engine.

        Raises:
            Explained: The front end has made requests. If the front end has made no requests, its reply goes to
                `writer`.
        """
        assert call.explanation is not None
        call.explanation.because.append("vLLM's front end makes the requests")
        explained = openai_call.explained = asyncio.get_running_loop().create_future()
        openai_call.explains_one = call.explanation.variant
        whole = _WholeReply()
        running = VllmCall(self._vllm, openai_call, call, whole, path, model)
        try:
            await asyncio.wait({explained, whole.received}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
        if explained.done():
            raise Explained(explained.result(), self._queue)
        reply = whole.received.result()
        call.explanation.failed = reply.status in _FAILED
        form.of_vllm(writer, call).reply(reply)

    async def _tokenized(self, exchange: Exchange) -> Exchange | None:
        """Replace the prompts with their token ids if the queue has room for them now.

        Returns:
            None if the call needs more places than the queue has, or if a prompt is refused. No prompt has been
            submitted then, so vLLM's front end can refuse the call.
        """
        tokenize = self._queue.engine.prompt_token_ids
        places = sum([request.sequences_in_engine for request in exchange.requests])
        if places > self._queue.limit:
            return None
        if self._queue.open_sequences + places > self._queue.limit:
            return exchange
        prompts: list[tuple[int, ...]] = []
        try:
            for request in exchange.requests:
                if prompts and len(prompts) % _PROMPTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                prompts.append(tuple(await tokenize(request)))
        except RequestError:
            return None
        pairs = zip(exchange.requests, prompts, strict=True)
        requests = tuple([msgspec.structs.replace(request, prompt=prompt) for request, prompt in pairs])
        return replace(exchange, requests=requests)


class _WholeReply:
    """Implements `ReplyWriter` for a reply that is not streamed, and keeps the reply."""

    def __init__(self) -> None:
        self.received: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def reply(self, reply: Reply) -> None:
        if not self.received.done():
            self.received.set_result(reply)

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        raise AssertionError("the reply is whole")

    def write(self, data: bytes) -> None:
        raise AssertionError("the reply is whole")

    def write_latest(self, part: Callable[[], bytes]) -> None:
        raise AssertionError("the reply is whole")

    def end(self, data: bytes) -> None:
        raise AssertionError("the reply is whole")

    async def drain(self) -> None:
        return


def _belongs(known: str, request_id: str) -> bool:
    """Return True if a request of vLLM belongs to an answer or to an HTTP request.

    Args:
        known: vLLM's id of its request.
        request_id: The id of the answer or of the HTTP request.
    """
    names = (known, _ONE_OF_MANY.sub("", known))
    return known.startswith(_PREFIXES) and any(request_id in (name, name.partition("-")[2]) for name in names)
