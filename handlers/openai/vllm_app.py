"""vLLM's OpenAI front end as an ASGI application. No other module depends on how vLLM builds it.

vLLM's `build_app` would add a listener, health, metrics and management routes, authentication and CORS, which
`container` has already. This module takes the parts that answer OpenAI's clients: the routers, the exception handlers,
and the state that `init_app_state` makes around an engine client.

The module relies on these internals of vLLM, which tests/live/test_openai_internals.py checks:

- Each module of a router, named below, has an APIRouter `router`. Its routes find their serving objects in `app.state`.
- `init_app_state(engine_client, state, args, supported_tasks)` makes these objects.
- `create_error_response(error)` gives an exception its status.
- `OpenAIServingResponses.background_tasks` gets each task of a response in the background, in the context of its call.
  `response_store` has the state of the response, and `event_store` the events of its stream, with the signal of a new
  one. `responses_background_stream_generator` reads them.
- `OpenAIServingModels.is_base_model(name)` says if a request's `model` is served, unless `lora_requests` has the name.
- A router of JSON bodies has a module `protocol` beside it, with Pydantic's models of its requests.
  Pydantic keeps the schema of a model in `__pydantic_core_schema__`, and its validator in `__pydantic_validator__`.
- The serving objects search beams with their method `beam_search(prompt, request_id, params, ...)`. Those of
  transcriptions and translations decode a file with `_decode_and_chunk_speech_async(data)`
  (tests/live/test_media_internals.py).
- `PoolingIOProcessor` renders prompts in threads, with what `make_async` of its module makes of its method `render`.
- `OnlineRenderer.parser` is the class whose `adjust_request` constrains the calls of tools. The objects that serve
  responses have such a `parser`, and those of chats and messages a `parser_cls`. They read it for each call. None:
  there is no parser.
- The modules in `_WITH_ERRORS` call `sanitize_message` with the text of an error. Its patterns are repeated below.
- The serving objects have the attributes that `front_end` reads. `OnlineRenderer.preprocess_chat` makes a prompt from
  messages in the steps that `chat_renderer` repeats. `OnlineRenderer.render_chat` checks `tool_choice`, and makes the
  prompt of a chat. `ServingTokenization` answers `/tokenize` with `prompt`, and `_check_model` checks a body's `model`
  (tests/live/test_tgi_live.py).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import json
import logging
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextvars import copy_context
from copy import deepcopy
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import regex
import vllm.entrypoints.anthropic.serving
import vllm.entrypoints.pooling.base.io_processor
import vllm.entrypoints.serve.exception_handling.error_response
import vllm.entrypoints.serve.exception_handling.handlers.http
import vllm.entrypoints.serve.exception_handling.handlers.validation
import vllm.envs as envs
import vllm.tokenizers.hf
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from openai.types.responses import ResponseFailedEvent, ResponseIncompleteEvent
from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import SchemaValidator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.pooling.factories import register_pooling_api_routers
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.protocol import (
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.renderers import merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import (
    HfRenderer,
    resolve_chat_template,
    resolve_chat_template_content_format,
    resolve_chat_template_kwargs,
)
from vllm.tasks import POOLING_TASKS
from vllm.utils.async_utils import make_async

from engines.interface import EngineStartError
from engines.vllm.arguments.table import FRONT_END
from engines.vllm.internals import check_names
from engines.vllm.parsers.choice import TOOLS, allowed_names
from engines.vllm.parsers.classes import parsers_for
from handlers.contract import JSON, Reply
from handlers.openai.body_faults import body_fault
from handlers.openai.constraints import CHAT, MESSAGES, RENDER, RESPONSES, TOKENIZE
from handlers.openai.contract import FrontEnd
from handlers.openai.current_call import current_call
from handlers.openai.media_connector import bound_media, counted_speech
from handlers.openai.routes import error_reply
from handlers.route_declarations import RenderedChat

logger = logging.getLogger(__name__)

# The loggers whose records are about one request.
_OF_REQUESTS = (
    *("vllm.entrypoints.openai.", "vllm.entrypoints.anthropic.", "vllm.entrypoints.serve.tokenize."),
    "vllm.entrypoints.pooling.",
    *("vllm.entrypoints.serve.exception_handling.", "vllm.renderers.", "vllm.tool_parsers.", "vllm.reasoning."),
    "vllm.entrypoints.speech_to_text.",
)
_LONGEST = 200  # Characters of a record about a client's error.
# Chats that are rendered in two ways, to compare the results.
_TRIALS: tuple[list[Any], ...] = (
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": " <b>a</b>\n"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "\u4f60"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c "},
        {"role": "user", "name": "d", "content": "e"},
    ],
)


# vLLM's routers. The requests of those that take a JSON body are in a module `protocol` beside them.
_OF_TEXT = (
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
)
_OF_TOKENS = "vllm.entrypoints.serve.tokenize.api_router"
_WITHOUT_BODIES = ("vllm.entrypoints.openai.models.api_router", "vllm.entrypoints.serve.instrumentator.basic")
_OF_SPEECH = tuple(f"vllm.entrypoints.speech_to_text.{name}.api_router" for name in ("transcription", "translation"))
_OF_POOLING = tuple(
    f"vllm.entrypoints.pooling.{kind}.api_router" for kind in ("pooling", "classify", "embed", "scoring")
)
_WITH_ERRORS: tuple[Any, ...] = (
    vllm.entrypoints.anthropic.serving,
    vllm.entrypoints.serve.exception_handling.error_response,
    vllm.entrypoints.serve.exception_handling.handlers.http,
    vllm.entrypoints.serve.exception_handling.handlers.validation,
)
_POOLING = frozenset(POOLING_TASKS)
_TASKS = _POOLING | {"generate", "transcription"}  # That Slipway serves.


def answer_object(path: str, body: bytes) -> Any:
    """Return vLLM's object for the body of an answer. `path` is a path of its front end."""
    kind = ChatCompletionResponse if path == CHAT else CompletionResponse
    return kind.model_validate_json(body)


def lower_client_errors() -> None:
    """Make every handler of the root logger lower the records of clients' errors. It may be called several times."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(client_error_filter)


def client_error_filter(record: logging.LogRecord) -> bool:
    """Lower the record of a client's error to INFO, without its traceback.

    The record of a request whose engine has failed is lowered too: the failure is logged once for all requests. Records
    of other failures of the server pass unchanged.

    Returns:
        False if the lowered record is not logged.
    """
    if record.levelno < logging.ERROR or not record.name.startswith(_OF_REQUESTS):
        return True
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not (_is_clients(error) or isinstance(error, GenerationError)):
        return True
    text = record.getMessage()[:_LONGEST]
    # The exception's text may repeat the client's data.
    record.msg = text if error is None else f"{text} ({type(error).__name__})"
    record.args = record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return logging.getLogger().isEnabledFor(logging.INFO)


def routers(tasks: Collection[str] = ("generate",)) -> list[Any]:
    """Import vLLM's routers for a model, and return them. Those of pooling are not among them.

    Args:
        tasks: The tasks that the model supports, by vLLM's names.
    """
    with_bodies = (*(_OF_TEXT if "generate" in tasks else ()), _OF_TOKENS)
    leave_out_turns()
    stop_at_first_faults(with_bodies)
    of_speech = _OF_SPEECH if "transcription" in tasks else ()
    return [importlib.import_module(name).router for name in (*with_bodies, *_WITHOUT_BODIES, *of_speech)]


def leave_out_turns() -> None:
    """Leave the lists of counts of turns out of the `usage` of responses.

    OpenAI's contract has numbers only, and OpenAI's agents in JavaScript refuse anything else.
    """
    for details in (InputTokensDetails, OutputTokensDetails):
        for name, field in details.model_fields.items():
            if name.endswith("_per_turn"):
                field.exclude = True
    of_responses = (ResponsesResponse, ResponseCompletedEvent, ResponseCreatedEvent, ResponseInProgressEvent)
    for kind in (
        *(InputTokensDetails, OutputTokensDetails, ResponseUsage),
        *of_responses,
        *(_ResponseFailed, _ResponseIncomplete),
    ):
        kind.model_rebuild(force=True)


def stop_at_first_faults(names: Sequence[str]) -> None:
    """Call `stop_at_first_fault` for the models of the requests of these routers."""
    done: set[type] = set()
    for name in names:
        protocol = importlib.import_module(name.replace(".api_router", ".protocol"))
        for kind in vars(protocol).values():
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                stop_at_first_fault(kind, done)


def stop_at_first_fault(kind: type[BaseModel], done: set[type]) -> None:
    """Make a model of requests refuse a list at its first wrong item, and leave no reference cycles.

    Call it before FastAPI uses the model. Otherwise Pydantic describes the fault of every item, in up to 5 ms for each,
    while the event loop waits.

    Args:
        kind: The model.
        done: The models that were changed already. The model and the models of its fields are added.
    """
    if kind in done or not kind.__pydantic_complete__:
        return
    done.add(kind)
    root: Any = kind.__pydantic_core_schema__
    waiting: list[Any] = [root]
    iterators: list[dict[str, Any]] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("type") == "list":
                node["fail_fast"] = True
            elif node.get("type") == "generator":
                iterators.append(node)
            elif node.get("type") == "model" and issubclass(node["cls"], BaseModel):
                stop_at_first_fault(node["cls"], done)  # Pydantic uses this model's validator unchanged.
            waiting += [value for key, value in node.items() if key not in ("metadata", "serialization")]
        elif isinstance(node, list | tuple):
            waiting += node
    for iterator in reversed(iterators):  # An inner iterator comes before the outer one.
        _validate_apart(iterator, root.get("definitions", ()))
    kind.__pydantic_complete__ = False  # Otherwise Pydantic keeps the old validator.
    kind.__pydantic_validator__ = SchemaValidator(kind.__pydantic_core_schema__)
    kind.__pydantic_complete__ = True


def _validate_apart(iterator: dict[str, Any], definitions: Sequence[Any]) -> None:
    """Change the schema of an iterator, so that it does not hold the object whose field it is.

    Pydantic validates the items of an `Iterable`, such as the parts of a message, when they are iterated over. For
    that, its iterator holds the object: a reference cycle, with all pictures of the message.

    Args:
        iterator: The schema.
        definitions: The definitions to which it refers.
    """
    schema: Any = dict(iterator)
    apart: Any = {"type": "definitions", "schema": schema, "definitions": definitions}
    function = {"type": "no-info", "function": SchemaValidator(apart).validate_python}
    iterator.clear()
    iterator |= {"type": "function-plain", "function": function}
    iterator["metadata"] = {"pydantic_js_functions": [lambda _, handler: handler(schema)]}  # for the API description


class _ResponseFailed(ResponseFailedEvent):
    """The last event of a response in the background that has failed or was cancelled."""

    response: ResponsesResponse


class _ResponseIncomplete(ResponseIncompleteEvent):
    """The last event of a response that `max_output_tokens` has cut."""

    response: ResponsesResponse


class _BackgroundTasks(dict[str, "asyncio.Task[None]"]):
    """The tasks of vLLM's responses in the background, by the ids of the responses.

    A task keeps the resources of its call. If it fails, the response gets the status `failed`: vLLM would leave it at
    `queued`.
    """

    def __init__(self, serving: Any) -> None:
        super().__init__()
        self._responses: Mapping[str, Any] = serving.response_store
        self._events: Mapping[str, tuple[Sequence[Any], asyncio.Event]] = serving.event_store

    def __setitem__(self, response_id: str, task: asyncio.Task[None]) -> None:
        super().__setitem__(response_id, task)
        current_call.get().goes_on_in(task)
        task.add_done_callback(partial(self._ended, response_id))

    def _ended(self, response_id: str, task: asyncio.Task[None]) -> None:
        response = self._responses[response_id]
        if response.status in ("queued", "in_progress"):
            response.status = "failed"
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a response in the background failed: %s", type(error).__name__)
        self.pop(response_id, None)
        if response_id in self._events:
            self._events[response_id][1].set()

    async def events(self, response_id: str, starting_after: int | None = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a response. vLLM's generator would wait for ever if the response fails.

        Raises:
            VLLMValidationError: It has no events.
        """
        if response_id not in self._events:
            raise VLLMValidationError(f"Unknown response_id: {response_id}", parameter="response_id", value=response_id)
        events, arrived = self._events[response_id]
        place = 0 if starting_after is None else max(starting_after + 1, 0)
        while True:
            arrived.clear()
            while place < len(events):
                yield events[place]
                place += 1
            if response_id not in self:
                break
            await arrived.wait()
        response = self._responses[response_id]
        if response.status in ("failed", "cancelled"):
            yield _ResponseFailed(type="response.failed", sequence_number=len(events), response=response)


# The patterns of vLLM's `sanitize_message`, changed so that they take a time in proportion to the text.
_ADDRESS = regex.compile(r" at 0x[0-9a-fA-F]+>")
_FRAME = regex.compile(r'(?:(?<!\s)|\G)\s*+File "[^"]+", line \d+, in \S+(\n\s+.*)?')
_SYSTEM_PATH = regex.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+")
_PATH = regex.compile(r"((?:/[\w\-]++){2,}+)(\.\w+)?")


# The arguments of `vllm serve` as they are in messages.
_ARGUMENT = regex.compile(r"(?<![\w-])--([a-z][a-z-]*+)(?!\w)")
_ARGUMENTS = FRONT_END | {field.name for field in dataclasses.fields(AsyncEngineArgs)}


_WITHOUT_PARSER = "option.tool_call_parser to be set"  # vLLM's refusal of a chat with tools ends with it.


def _as_option(argument: regex.Match[str]) -> str:
    name = argument[1].replace("-", "_")
    return f"option.{name}" if name in _ARGUMENTS else argument[0]


def sanitized(message: str) -> str:
    """Return the text of an error without addresses, stack frames and paths, as vLLM's `sanitize_message`.

    Arguments of `vllm serve` get the names that they have here.

    vLLM's function takes minutes for a message that repeats 20,000 characters of a client, such as an unknown model,
    and stops the event loop.
    """
    message = _FRAME.sub("", _ADDRESS.sub(">", message))
    message = _SYSTEM_PATH.sub("<path>", message)
    message = _PATH.sub(lambda found: "<path>" if found[2] else found[0], message)
    named: str = _ARGUMENT.sub(_as_option, message).strip()
    return f"{named}; allowed: {allowed_names(TOOLS)}" if named.endswith(_WITHOUT_PARSER) else named


def bound_errors() -> None:
    """Let vLLM's error handlers use `sanitized`."""
    for module in _WITH_ERRORS:
        module.sanitize_message = sanitized


def render_in_context() -> None:
    """Let the threads that render pooled prompts know their call, whose limits and salt hold for its media."""

    def in_context(render: Callable[..., Any], executor: Any = None) -> Callable[..., Awaitable[Any]]:
        run = make_async(lambda context, *prompts: context.run(render, *prompts), executor)
        return lambda *prompts: run(copy_context(), *prompts)

    vllm.entrypoints.pooling.base.io_processor.make_async = in_context


async def build(
    client: Any,
    arguments: Mapping[str, Any],
    names: Sequence[str],
    accepts: Callable[[str], bool],
    adapters: dict[str, Any] | None = None,
    tasks: Sequence[Any] = ("generate",),
    parses_only_tools: bool = False,
) -> Any:
    """Build the application.

    Args:
        client: The engine client.
        arguments: The arguments of vLLM's front end.
        names: The names of the model. Answers have the first one.
        accepts: Returns True for further names that a request may use.
        adapters: vLLM's requests for adapters, by their names. It changes as adapters are loaded and unloaded.
        tasks: The tasks of the model, by vLLM's names.
        parses_only_tools: Nobody named the parser of tool calls. It is left out if the model's tokenizer does not fit
            it, and parses only the answers to calls with tools.

    Raises:
        EngineStartError: vLLM refuses an argument.
    """
    lower_client_errors()
    bound_errors()
    bound_media()
    render_in_context()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    args = argparse.Namespace(
        **arguments,
        model=names[0],
        served_model_name=list(names),
        enable_log_requests=False,
        disable_log_stats=True,
        structured_outputs_config=client.vllm_config.structured_outputs_config,
    )
    try:
        tasks = tuple(task for task in tasks if task in _TASKS)
        found = routers(tasks)
        stop_at_first_fault(CountedChat, set())
        for path, answer in ((TOKENIZE, _tokenize), (RENDER, _render)):  # In place of vLLM's, since the first counts.
            app.post(path, dependencies=[Depends(validate_json_request)])(answer)
        for router in found:
            app.include_router(router)
        if _POOLING.intersection(tasks):
            stop_at_first_faults(_OF_POOLING)
            register_pooling_api_routers(app, tasks, client.vllm_config.model_config)
        init_exception_handler(app)
        # Starlette raises it, for example if a body is nested too deeply. vLLM would leave the reply in another form.
        app.add_exception_handler(HTTPException, http_exception_handler)
        answer_stumbling_readers(app)
        name_faults(app)
        app.state.args = args
        # vLLM stops its server when its engine has died. Here the setting `fail_fast` decides that.
        app.state.server = SimpleNamespace(should_exit=False)
        with parsers_for(client.vllm_config.structured_outputs_config.backend):
            plain = _without_calls(args, client) if parses_only_tools and "generate" in tasks else None
            await init_app_state(client, app.state, args, supported_tasks=tasks)
        check_names()  # It has imported the serving classes.
        if "generate" in tasks:
            _change_responses(app.state.openai_serving_responses)
            if parses_only_tools and args.tool_call_parser:
                _parse_only_tools(app.state, plain)
            _change_messages(app.state.anthropic_serving_messages)
            batches = app.state.openai_serving_chat_batch
            batches.render_batch_chat_request = partial(_of_copies, batches.render_batch_chat_request)
            for name in ("chat", "chat_batch", "completion"):
                serving = getattr(app.state, f"openai_serving_{name}")
                serving.beam_search = client.searching(serving.beam_search)
        if "transcription" in tasks:
            for serving in (app.state.openai_serving_transcription, app.state.openai_serving_translation):
                serving.beam_search = client.searching(serving.beam_search)
                serving._decode_and_chunk_speech_async = counted_speech(serving._decode_and_chunk_speech_async)
        models = app.state.openai_serving_models
        served = models.is_base_model
        models.is_base_model = lambda name: served(name) or accepts(name)
        if adapters is not None:
            models.lora_requests = adapters
    except Exception as error:
        raise EngineStartError(f"vLLM's OpenAI front end cannot be started: {error}") from error
    return app


def _without_calls(args: argparse.Namespace, client: Any) -> Any:
    """Return the class of the model's parser without a parser of tool calls; None if nothing is left of it.

    The parser of tool calls is removed from the arguments if it needs a token or a package that is missing.
    """
    config, tokenizer = client.model_config, client.renderer.tokenizer
    get = partial(
        ParserManager.get_parser,
        reasoning_parser_name=args.structured_outputs_config.reasoning_parser,
        model_name=config.model,
        is_harmony=config.hf_config.model_type == "gpt_oss",
        tool_strict_level=args.tool_strict_level,
        tokenizer=tokenizer,
    )
    try:
        get(tool_parser_name=args.tool_call_parser, enable_auto_tools=args.enable_auto_tool_choice)
    except TypeError as error:
        logger.warning("tool_call_parser=%s is left out: %s: %s", args.tool_call_parser, error, error.__cause__)
        args.tool_call_parser, args.enable_auto_tool_choice = None, False
    return get()


def _parse_only_tools(state: Any, plain: Any) -> None:
    """Let the answers to calls without tools be those of a model without a parser of tool calls.

    With such a parser, vLLM leaves empty parts out of streams, and some parsers show special tokens.

    Args:
        state: The application's.
        plain: The class of the parser for these calls; None: there is none.
    """
    online = state.online_renderer
    _choose_by_call(online, "parser", None if plain is None else _hiding_constraints(plain))
    _choose_by_call(state.openai_serving_responses, "parser", plain)
    for name in ("openai_serving_chat", "openai_serving_chat_batch", "anthropic_serving_messages"):
        _choose_by_call(getattr(state, name), "parser_cls", plain)


def _choose_by_call(owner: Any, name: str, plain: Any) -> None:
    whole, kind = getattr(owner, name), type(owner)

    def parser(_: Any) -> Any:
        call = current_call.get(None)
        return whole if call is not None and call.uses_tools else plain

    owner.__class__ = type(kind.__name__, (kind,), {name: property(parser)})


def _change_responses(responses: Any) -> None:
    """Change the serving object of responses: failures, the events at the end of a stream, and constraints."""
    responses.background_tasks = tasks = _BackgroundTasks(responses)
    responses.responses_background_stream_generator = tasks.events
    responses._convert_generation_error_to_streaming_response = _reraise
    responses.responses_stream_generator = _telling_incomplete(responses.responses_stream_generator)
    responses.create_responses = partial(with_own_id, responses.create_responses, tasks, set())
    renderer = responses.online_renderer
    if renderer.parser is not None:
        renderer.parser = _hiding_constraints(renderer.parser)


async def with_own_id(
    create: Callable[..., Awaitable[Any]],
    running: Collection[str],
    beginning: set[str],
    request: ResponsesRequest,
    *rest: Any,
) -> Any:
    """Create a response, unless one with the same id is being made in the background: its record would be replaced.

    Args:
        create: Creates it. A response in the background is among the running ones when this returns.
        running: The ids of the responses in the background.
        beginning: The ids of those that are not among the running ones yet.
        request: The request for the response.
        rest: Further arguments of `create`.

    Raises:
        VLLMValidationError: There is one.
    """
    own = request.request_id
    if own in running or own in beginning:
        raise VLLMValidationError("`request_id` is that of a response that is being made", parameter="request_id")
    if not request.background:
        return await create(request, *rest)
    beginning.add(own)
    try:
        return await create(request, *rest)
    finally:
        beginning.discard(own)


def _reraise(error: Exception) -> str:
    """Raise the error of a stream. vLLM's event for it is none of OpenAI's, and fails vLLM's own validation."""
    raise error


def _telling_incomplete(stream: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """Return a generator of events that ends an incomplete response as OpenAI does. vLLM calls it completed."""

    async def events(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        async for event in stream(*args, **options):
            if event.type == "response.completed" and event.response.status == "incomplete":
                number, response = event.sequence_number, event.response
                yield _ResponseIncomplete(type="response.incomplete", sequence_number=number, response=response)
            else:
                yield event

    return events


class _Message(AnthropicMessagesResponse):  # type: ignore[misc]
    """A whole answer of `/v1/messages`. It has all fields of Anthropic's contract, also those that are null."""

    @model_serializer(mode="wrap")
    def _with_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {**fields, "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}


def _change_messages(messages: Any) -> None:
    """Change the serving object of Anthropic's messages: begun turns, nulls of whole answers, and errors of streams."""
    whole, stream = messages.messages_full_converter, messages.message_stream_converter
    messages.to_chat_completion_request = partial(_continuing, messages.to_chat_completion_request)
    messages.messages_full_converter = lambda answer: _Message.model_construct(**dict(whole(with_whole_calls(answer))))
    messages.message_stream_converter = partial(_raising, stream)


def with_whole_calls(answer: ChatCompletionResponse) -> ChatCompletionResponse:
    """Return an answer whose call that was cut is text, because vLLM decodes the arguments of each call."""
    message = answer.choices[0].message
    for call in [*message.tool_calls]:
        try:
            json.loads(call.function.arguments)
        except ValueError:
            message.tool_calls.remove(call)
            message.content = (message.content or "") + call.function.arguments
    return answer


async def _of_copies(render: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Make the prompts of a batch of copies of its messages.

    vLLM decodes the arguments of calls in place for the template, and cannot read the messages a second time then.
    """
    request.messages = _without_iterators(request.messages)
    return await render(request.model_copy(update={"messages": deepcopy(request.messages)}))


def _without_iterators(value: Any) -> Any:
    """Return a value with lists in the place of Pydantic's iterators, which can be neither copied nor read twice."""
    if isinstance(value, dict):
        return {key: _without_iterators(member) for key, member in value.items()}
    return [_without_iterators(item) for item in value] if isinstance(value, list | Iterator) else value


def _continuing(convert: Callable[..., ChatCompletionRequest], request: Any, **options: Any) -> ChatCompletionRequest:
    """Convert a request of Anthropic's to a chat. The answer continues a text of the assistant at the end.

    So does Anthropic's API. Its clients begin an answer to give it a form. vLLM begins another turn.
    """
    chat = convert(request, **options)
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
        chat.add_generation_prompt, chat.continue_final_message = False, True
    return chat


async def _raising(
    convert: Callable[[AsyncIterator[str]], AsyncGenerator[str, None]], chunks: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Convert the chunks of a chat to events of a message, and raise an error that ends the chat.

    vLLM's converter expects no error among the chunks. Its events for errors have types that are not Anthropic's.

    Raises:
        GracefulHTTPError: The chat ended with an error.
    """
    errors: list[dict[str, Any]] = []

    async def until_error() -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            if chunk.startswith('data: {"error":'):
                errors.append(json.loads(chunk.removeprefix("data: "))["error"])
                return
            yield chunk

    async for event in convert(until_error()):
        if event.startswith("event: error\n"):
            errors.append({"message": "Internal server error", "code": 500})
            break
        yield event
    if errors:
        raise GracefulHTTPError(errors[0]["message"], HTTPStatus(errors[0]["code"]))


def _hiding_constraints(parser: Any) -> Any:
    """Return a class of parsers that constrains the calls of tools, and leaves the request's `text` as it was.

    vLLM's class puts the schema of a forced call into `text`. The answer repeats this field of the request.
    """

    class Parser(parser):  # type: ignore[misc]
        def adjust_request(self, request: Any) -> Any:
            text = getattr(request, "text", None)
            request = super().adjust_request(request)
            if isinstance(request, ResponsesRequest) and request.text is not text:
                request.structured_outputs = request.extract_structured_outputs()
                request.text = text
            return request

    return Parser


def front_end(
    app: FastAPI, config: Any, model: str, accepts: Callable[[str], bool], adapters: Collection[str]
) -> FrontEnd | None:
    """Return the settings for the contract of common requests.

    Args:
        app: The application that `build` returned.
        config: vLLM's configuration.
        model: The model's name in answers.
        accepts: Returns True if a name is the model's.
        adapters: The names of the adapters.

    Returns:
        The settings. None if vLLM's answers have more content than the contract's, or the model answers no prompts.
    """
    if not hasattr(app.state, "openai_serving_chat"):
        return None
    chat, completions = app.state.openai_serving_chat, app.state.openai_serving_completion
    if not isinstance(chat.renderer, HfRenderer) or _shows_more(completions, config):
        return None
    if getattr(app.state.args, "sse_keep_alive_interval", 0):
        return None
    return FrontEnd(
        model=model,
        accepts=accepts,
        adapters=adapters,
        fingerprint=completions.system_fingerprint,
        role=chat.response_role,
        default_sampling=completions.default_sampling_params,
        most_new_tokens=completions.override_max_tokens,
        max_model_len=completions.model_config.max_model_len,
        most_prompts=envs.VLLM_MAX_COMPLETION_PROMPTS,
        most_sequences=envs.VLLM_MAX_N_SEQUENCES,
        most_stop_strings=envs.VLLM_MAX_STOP_STRINGS,
        # vLLM parses an answer for tool calls or reasoning if there is a parser.
        render=chat_renderer(chat) if chat.parser_cls is None and not chat.online_renderer.use_harmony else None,
    )


class CountedChat(ChatCompletionRequest, TokenizeChatRequest):  # type: ignore[misc]
    """A chat whose prompt is counted. The prompt may be longer than the model's context."""

    build_tok_params = TokenizeChatRequest.build_tok_params


@with_cancellation  # type: ignore[untyped-decorator]
async def _tokenize(request: TokenizeCompletionRequest | CountedChat, raw_request: Request) -> JSONResponse:
    """Answer `/tokenize`."""
    state = raw_request.app.state
    if isinstance(request, TokenizeCompletionRequest):
        answer = await state.serving_tokenization.create_tokenize(request, raw_request)
    elif isinstance(answer := await _rendered(request, state), RenderedChat):
        ids = answer.token_ids
        tokenizer = state.online_renderer.renderer.get_tokenizer()
        answer = TokenizeResponse(
            count=len(ids),
            max_model_len=state.online_renderer.model_config.max_model_len,
            tokens=ids,
            token_strs=tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None,
        )
    return JSONResponse(answer.model_dump(), answer.error.code if isinstance(answer, ErrorResponse) else 200)


@with_cancellation  # type: ignore[untyped-decorator]
async def _render(request: CountedChat, raw_request: Request) -> Response:
    """Answer `RENDER`."""
    answer = await _rendered(request, raw_request.app.state)
    if isinstance(answer, RenderedChat):
        return Response(msgspec.json.encode(answer), media_type=JSON)
    return JSONResponse(answer.model_dump(), answer.error.code)


async def _rendered(request: CountedChat, state: Any) -> RenderedChat | ErrorResponse:
    """Return the prompt that vLLM's `/v1/chat/completions` makes of a chat.

    vLLM's own `/tokenize` prepares messages in another way, and does not read all fields.
    """
    online = state.online_renderer
    if (refused := await state.serving_tokenization._check_model(request)) is not None:
        return refused
    if request.tool_choice != "none" and getattr(online.parser, "tool_parser_cls", None) is None:
        request.tool_choice = None  # To count a prompt with tools, no parser of their calls is needed.
    found = await online.render_chat(request, skip_mm_cache=True)
    if isinstance(found, ErrorResponse):
        return found
    (prompt,) = found[1]
    return RenderedChat(list(prompt.get("prompt_token_ids") or ()), prompt.get("prompt"))


def chunks_long_prompts(config: Any) -> bool:
    """Return True if vLLM's front end makes the vector of a long text from those of its parts."""
    pooler = config.model_config.pooler_config
    return bool(pooler.enable_chunked_processing or pooler.max_embed_len)


def _shows_more(serving: Any, config: Any) -> bool:
    """Return True if options add to the answers, or to the generated text."""
    model = config.model_config
    return any(
        (
            serving.enable_prompt_tokens_details,
            serving.enable_force_include_usage,
            serving.enable_per_request_metrics,
            serving.return_tokens_as_token_ids,
            serving.request_logger is not None,
            model.enable_prompt_embeds,
            config.aux_output_config.enabled,
            model.return_sampling_mask,
            model.is_encoder_decoder,
            model.is_diffusion,
            (model.encoder_config or {}).get("do_lower_case", False),
            config.speculative_config,
            config.kv_transfer_config,
            config.ec_transfer_config,
            config.watermark_config,
            config.observability_config.otlp_traces_endpoint,
            config.scheduler_config.stream_interval != 1,
        )
    )


def chat_renderer(chat: Any) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function that makes a prompt from messages of text.

    The result is that of `OnlineRenderer.preprocess_chat` for a request without options.
    """
    online, renderer = chat.online_renderer, chat.renderer
    media = chat.model_config.multimodal_config
    plain = ChatCompletionRequest(messages=_TRIALS[0])
    params = plain.build_chat_params(online.chat_template, online.chat_template_content_format).with_defaults(
        merge_kwargs(online.default_chat_template_kwargs, {"tools": None, "tokenize": False}),
        default_media_io_kwargs=media.media_io_kwargs if media else None,
    )

    def render(messages: list[dict[str, Any]]) -> str:
        _, prompt = renderer.render_messages(messages, params)
        text: str = prompt["prompt"]
        return text

    try:
        direct = _direct_renderer(renderer, params)
        same = all(direct(messages) == render(messages) for messages in _TRIALS)
    except Exception as error:  # A template is code of the model, and may raise any exception.
        logger.debug("chats are rendered by vLLM's renderer: %s", error)
        return render
    return direct if same else render


def _direct_renderer(renderer: HfRenderer, params: Any) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function like `renderer.render_messages` that takes a fifth of the time.

    All work that is the same for every request is done once, here.

    Raises:
        Exception: The model or its template needs other work.
    """
    config, tokenizer = renderer.model_config, renderer.get_tokenizer()
    owners = [owner for owner in type(tokenizer).__mro__ if "apply_chat_template" in vars(owner)]
    if [owner for owner in owners if owner.__module__ != vllm.tokenizers.hf.__name__] != [PreTrainedTokenizerBase]:
        raise TypeError("the tokenizer has another method for chats")
    given = params.get_apply_chat_template_kwargs()
    template = resolve_chat_template(
        tokenizer, chat_template=given.pop("chat_template", None), tools=None, model_config=config
    )
    if template is None or given.pop("continue_final_message", False):
        raise ValueError("there is no template, or the template continues the last message")
    content_format = resolve_chat_template_content_format(
        chat_template=params.chat_template,
        tools=None,
        given_format=params.chat_template_content_format,
        tokenizer=tokenizer,
        model_config=config,
    )
    given = {name: value for name, value in given.items() if name not in ("tokenize", "return_dict")}
    variables = {
        **tokenizer.special_tokens_map,
        **resolve_chat_template_kwargs(tokenizer=tokenizer, chat_template=template, chat_template_kwargs=given),
    }

    def render(messages: list[dict[str, Any]]) -> str:
        conversation, *_ = parse_chat_messages(messages, config, content_format=content_format)
        (text,), _ = render_jinja_template([conversation], chat_template=template, **variables)
        return str(text)

    return render


def answer_stumbling_readers(app: FastAPI) -> None:
    """Answer Python's own errors as the client's fault if they come from code that reads the body.

    Some checks of vLLM run before Pydantic's and expect an object, but a client may send something else. Some
    conversions take the first item of a list that may be empty.
    """

    async def refuse(_: Request, error: Exception) -> Response:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        while modules[-1].startswith("pydantic."):  # Pydantic raises these errors for readers that miss a field.
            modules.pop()
        if _reads_body(modules):
            error = VLLMValidationError(f"the body has a value that cannot be used: {error}")
        elif not _is_clients(error) or modules[-1].startswith(("handlers.", "engines.")):
            raise error
        refusal = create_error_response(error)
        return JSONResponse(refusal.model_dump(), refusal.error.code)

    for kind in (AttributeError, TypeError, KeyError, IndexError, RecursionError):
        app.add_exception_handler(kind, refuse)


def name_faults(app: FastAPI) -> None:
    """Answer a body that Pydantic refuses with the one field that is wrong, as the owners of the two APIs do.

    vLLM's answer has the first ten of Pydantic's faults. Chats, completions and parameters of a query keep it.
    """

    async def refuse(request: Request, error: RequestValidationError) -> Response:
        path = request.url.path
        faults = error.errors()
        of_query = isinstance(faults[0], dict) and faults[0]["loc"][0] == "query"
        if of_query or not path.startswith((MESSAGES, RESPONSES)):
            theirs: Response = await validation_exception_handler(request, error)
            return theirs
        fault = body_fault(faults, error.body)
        place = fault.dotted if path.startswith(MESSAGES) else f"`{fault.indexed}`"
        message = sanitized(f"{place}: {fault.message}" if fault.path else fault.message)
        reply = error_reply(message, "BadRequestError", 400, fault.indexed or None)
        return Response(reply.body, reply.status, media_type=reply.content_type)

    app.add_exception_handler(RequestValidationError, refuse)  # type: ignore[arg-type]


def _reads_body(modules: Sequence[str]) -> bool:
    """Return True if FastAPI or vLLM raised an error while it read a body, before anything was generated.

    Args:
        modules: The modules that the error passed through. The last one raised it.
    """
    if any(name.startswith("fastapi._compat") for name in modules):
        return True
    call = current_call.get(None)
    return call is not None and not call.submitted and modules[-1].startswith(_OF_REQUESTS)


def _is_clients(error: BaseException) -> bool:
    """Return True if vLLM answers the exception as a fault of the client, or as a missing feature."""
    if not isinstance(error, Exception):
        return False
    return isinstance(error, GracefulHTTPError | NotImplementedError) or create_error_response(error).error.code < 500


def refusal(error: BaseException) -> Reply | None:
    """Return the answer to an exception that the application raised after a reply had begun.

    vLLM begins the stream of a response before it generates, and cannot answer a refusal after that.

    Returns:
        The answer. None if the exception is the server's fault.
    """
    # Starlette raises a RuntimeError from an exception that has a handler.
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, VLLMClientError | GracefulHTTPError):
        return None
    info = create_error_response(error).error
    return error_reply(info.message, info.type, info.code, info.param)
