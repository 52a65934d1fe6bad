"""vLLM's OpenAI front end as an ASGI application. Only this module depends on how vLLM builds the application.

vLLM's `build_app` would add parts that `container` already has: a listener, authentication, CORS, and the routes for
health, metrics and management. This module uses only the parts that answer OpenAI's clients: the routers, the exception
handlers, and the state that `init_app_state` makes around an engine client. The other modules of this package change
these parts.

`engines.vllm.internals` has the names of vLLM on which the module relies. The module relies on these facts about them:

- Each router module that is named below has an APIRouter `router`. Its routes find their serving objects in
  `app.state`.
- `init_app_state(engine_client, state, args, supported_tasks)` makes these objects.
- `OpenAIServingModels.is_base_model(name)` says whether a request's `model` is served. The names in `lora_requests` are
  served, too.
- The serving objects run beam searches with their method `beam_search(prompt, request_id, params, ...)`. The serving
  objects of transcriptions and translations decode a file with `_decode_and_chunk_speech_async(data)`.
- `PoolingIOProcessor` renders prompts in threads. Its module's `make_async` turns the method `render` into a function
  that runs `render` in a thread.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import vllm.entrypoints.pooling.base.io_processor
from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.pooling.factories import register_pooling_api_routers
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.tasks import POOLING_TASKS
from vllm.utils.async_utils import make_async

from engines.interface import EngineStartError
from engines.vllm.internals import check_names
from engines.vllm.parsers.classes import parsers_for
from handlers.openai.constraints import RENDER, TOKENIZE
from handlers.openai.media.connector import bound_media, counted_speech
from handlers.openai.vllm.chat_prompts import of_copies
from handlers.openai.vllm.error_log import lower_client_errors
from handlers.openai.vllm.errors import answer_stumbling_readers, bound_errors, name_faults
from handlers.openai.vllm.messages import change_messages
from handlers.openai.vllm.request_models import leave_out_turns, stop_at_first_faults
from handlers.openai.vllm.responses import change_responses
from handlers.openai.vllm.tokenize import render, tokenize
from handlers.openai.vllm.tool_parsers import parse_only_tools, without_calls

# vLLM's routers. If a router takes JSON bodies, the module `protocol` next to it has the models of its requests.
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
_POOLING = frozenset(POOLING_TASKS)
_TASKS = _POOLING | {"generate", "transcription"}  # The tasks that Slipway serves.


def routers(tasks: Collection[str] = ("generate",)) -> list[Any]:
    """Import vLLM's routers for a model, and return them. The routers of pooling are not included.

    Args:
        tasks: The tasks that the model supports, by vLLM's names.
    """
    with_bodies = (*(_OF_TEXT if "generate" in tasks else ()), _OF_TOKENS)
    leave_out_turns()
    stop_at_first_faults(with_bodies)
    of_speech = _OF_SPEECH if "transcription" in tasks else ()
    return [importlib.import_module(name).router for name in (*with_bodies, *_WITHOUT_BODIES, *of_speech)]


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
        names: The names of the model. Answers have the first name.
        accepts: Returns True for further names that a request may use.
        adapters: vLLM's requests for adapters, by name. The mapping changes as adapters are loaded and unloaded.
        tasks: The tasks of the model, by vLLM's names.
        parses_only_tools: True if the settings do not name the tool-call parser. The parser then parses only
            answers to calls with tools. It is left out if it does not support the model's tokenizer.

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
        # These routes are added before vLLM's routes, so that they take the calls of these paths.
        for path, answer in ((TOKENIZE, tokenize), (RENDER, render)):
            app.post(path, dependencies=[Depends(validate_json_request)])(answer)
        for router in found:
            app.include_router(router)
        if _POOLING.intersection(tasks):
            stop_at_first_faults(_OF_POOLING)
            register_pooling_api_routers(app, tasks, client.vllm_config.model_config)
        init_exception_handler(app)
        # Starlette raises HTTPException, for example if a body is nested too deeply. Without this handler, the
        # reply would have another form.
        app.add_exception_handler(HTTPException, http_exception_handler)
        answer_stumbling_readers(app)
        name_faults(app)
        app.state.args = args
        # A stand-in for vLLM's server. vLLM stops that server when its engine has died. In Slipway, `fail_fast` decides
        # whether the server stops.
        app.state.server = SimpleNamespace(should_exit=False)
        with parsers_for(client.vllm_config.structured_outputs_config.backend):
            plain = without_calls(args, client) if parses_only_tools and "generate" in tasks else None
            await init_app_state(client, app.state, args, supported_tasks=tasks)
        check_names()  # The serving classes are imported now.
        if "generate" in tasks:
            change_responses(app.state.openai_serving_responses)
            if parses_only_tools and args.tool_call_parser:
                parse_only_tools(app.state, plain)
            change_messages(app.state.anthropic_serving_messages)
            batches = app.state.openai_serving_chat_batch
            batches.render_batch_chat_request = partial(of_copies, batches.render_batch_chat_request)
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


def render_in_context() -> None:
    """Pass the current call to the threads that render pooled prompts.

    The limits and the salt of the call apply to the media of the prompts.
    """

    def in_context(render: Callable[..., Any], executor: Any = None) -> Callable[..., Awaitable[Any]]:
        run = make_async(lambda context, *prompts: context.run(render, *prompts), executor)
        return lambda *prompts: run(copy_context(), *prompts)

    vllm.entrypoints.pooling.base.io_processor.make_async = in_context
