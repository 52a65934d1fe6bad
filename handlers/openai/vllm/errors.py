"""Answers the exceptions of vLLM's front end. The messages contain no file paths and no memory addresses.

This module relies on these internals of vLLM, which tests/live/test_openai_internals.py checks:

- `create_error_response(error)` decides the status of an exception.
- The modules in `_WITH_ERRORS` call `sanitize_message` with the text of an error. The function's patterns are repeated
  below.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from typing import Any

import regex
import vllm.entrypoints.anthropic.serving
import vllm.entrypoints.serve.exception_handling.error_response
import vllm.entrypoints.serve.exception_handling.handlers.http
import vllm.entrypoints.serve.exception_handling.handlers.validation
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError

from engines.vllm.arguments.table import FRONT_END
from engines.vllm.parsers.choice import TOOLS, allowed_names
from handlers.contract import Reply
from handlers.openai.constraints import MESSAGES, RESPONSES
from handlers.openai.current_call import current_call
from handlers.openai.routes import error_reply
from handlers.openai.vllm.body_faults import body_fault

logger = logging.getLogger(__name__)

_WITH_ERRORS: tuple[Any, ...] = (
    vllm.entrypoints.anthropic.serving,
    vllm.entrypoints.serve.exception_handling.error_response,
    vllm.entrypoints.serve.exception_handling.handlers.http,
    vllm.entrypoints.serve.exception_handling.handlers.validation,
)
# The patterns of vLLM's `sanitize_message`, changed so that they take time proportional to the length of the text.
_ADDRESS = regex.compile(r" at 0x[0-9a-fA-F]+>")
_FRAME = regex.compile(r'(?:(?<!\s)|\G)\s*+File "[^"]+", line \d+, in \S+(\n\s+.*)?')
_SYSTEM_PATH = regex.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+")
_PATH = regex.compile(r"((?:/[\w\-]++){2,}+)(\.\w+)?")
# An argument of `vllm serve`, as it appears in messages.
_ARGUMENT = regex.compile(r"(?<![\w-])--([a-z][a-z-]*+)(?!\w)")
_ARGUMENTS = FRONT_END | {field.name for field in dataclasses.fields(AsyncEngineArgs)}
# How vLLM's refusal of a chat with tools ends, after `sanitized` has renamed the option.
_WITHOUT_PARSER = "option.tool_call_parser to be set"


def bound_errors() -> None:
    """Make vLLM's error handlers use `sanitized`."""
    for module in _WITH_ERRORS:
        module.sanitize_message = sanitized


def sanitized(message: str) -> str:
    """Return an error's message without memory addresses, stack frames and paths, as vLLM's `sanitize_message` does.

    Arguments of `vllm serve` are replaced with Slipway's names.

    A message may quote 20,000 characters from a client, such as an unknown model's name. For such a message, vLLM's
    function takes minutes, and blocks the event loop.
    """
    message = _FRAME.sub("", _ADDRESS.sub(">", message))
    message = _SYSTEM_PATH.sub("<path>", message)
    message = _PATH.sub(lambda found: "<path>" if found[2] else found[0], message)
    named: str = _ARGUMENT.sub(_as_option, message).strip()
    return f"{named}; allowed: {allowed_names(TOOLS)}" if named.endswith(_WITHOUT_PARSER) else named


def _as_option(argument: regex.Match[str]) -> str:
    name = argument[1].replace("-", "_")
    return f"option.{name}" if name in _ARGUMENTS else argument[0]


def answer_stumbling_readers(app: FastAPI) -> None:
    """Answer Python's built-in errors as client errors until the call has submitted a prompt.

    Until then, FastAPI and vLLM read the body. Some of vLLM's checks run before Pydantic's checks and expect an object,
    but a client may send something else. Some conversions read the first item of a list that may be empty.

    A RecursionError is also a client error. It may come from the arguments of a tool call: they are JSON in a string,
    so the limit on a body's depth does not apply to them. Or a chat template calls itself for each level of a message.
    """

    async def refuse(_: Request, error: Exception) -> Response:
        if current_call.get().submitted:
            raise error
        place = traceback.extract_tb(error.__traceback__)[-1]
        logger.info("a body cannot be used: %s in %s:%s", type(error).__name__, place.filename, place.lineno)
        refusal = create_error_response(VLLMValidationError(f"the body has a value that cannot be used: {error}"))
        return JSONResponse(refusal.model_dump(), refusal.error.code)

    for kind in (AttributeError, TypeError, KeyError, IndexError, RecursionError):
        app.add_exception_handler(kind, refuse)


def name_faults(app: FastAPI) -> None:
    """If Pydantic refuses a body, name the one field that is wrong, as OpenAI and Anthropic do.

    vLLM's answer lists the first ten of Pydantic's errors. Chats, completions and query parameters keep vLLM's answer.
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


def is_clients(error: BaseException) -> bool:
    """Return True if vLLM answers the exception as a client error or a missing feature.

    GracefulHTTPError with any status counts, too. vLLM raises it for a full queue, for example.
    """
    if not isinstance(error, Exception):
        return False
    return isinstance(error, GracefulHTTPError | NotImplementedError) or create_error_response(error).error.code < 500


def refusal(error: BaseException) -> Reply | None:
    """Return the answer to an exception that the application raised after the reply had begun.

    vLLM begins the stream of a response before it generates, so it can no longer send a refusal itself.

    Returns:
        The answer, or None if the exception is a server error.
    """
    # If an exception has a handler but the reply has begun, Starlette raises a RuntimeError, caused by the exception.
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, VLLMClientError | GracefulHTTPError):
        return None
    info = create_error_response(error).error
    return error_reply(info.message, info.type, info.code, info.param)
