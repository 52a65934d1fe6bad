"""OpenAI's and Anthropic's routes: the routes of vLLM's own server, the list of models, errors, and adapter routes.

Source: vLLM, `vllm/entrypoints/openai`, `vllm/entrypoints/anthropic` and `vllm/entrypoints/serve/lora`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from engines import errors
from engines.adapters import AdapterOrder
from handlers.contract import JSON, Call, ContractError, Reply
from handlers.management import Management, ManagementOperation
from handlers.openai import anthropic
from handlers.openai.constraints import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES
from handlers.openai.media.speech import SPEECH
from handlers.openapi_schemas import OBJECT
from handlers.parsing.json_fields import json_fault
from handlers.parsing.json_limits import JsonDecoder
from handlers.route_declarations import (
    ContractRoutes,
    GenerationRoute,
    InfoRoute,
    ManagementRoute,
    ModelView,
    Operation,
    error_body,
)

EMBEDDINGS = "/v1/embeddings"
# Every call of these paths needs a place in the queue.
QUEUED = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, *SPEECH})
ALIASED = "/openai"  # The prefix of paths on which any `model` is accepted.
SHORT_EMBEDDINGS = "/embeddings"  # TEI's other path for /v1/embeddings. It also accepts any `model`.
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

_TEXT = "text/plain; charset=utf-8"
_TOO_LARGE = "Request Entity Too Large"  # The reason phrase of 413. Since Python 3.13, `HTTPStatus` has another phrase.

T = TypeVar("T")


def models(call: Call, views: Sequence[ModelView]) -> Reply:
    """GET /v1/models: all names of all models, and their adapters. The list includes models that are not loaded.

    The list has OpenAI's or Anthropic's form.
    """
    created = int(time.time())
    cards = [card for view in views for card in _cards(view, created)]
    document = anthropic.model_list(cards) if anthropic.is_anthropics(call) else {"object": "list", "data": cards}
    return Reply(200, JSON, msgspec.json.encode(document))


def model(call: Call, views: Sequence[ModelView]) -> Reply:
    """GET /v1/models/<id>: one entry of the list of models. vLLM itself has no such route.

    Raises:
        UnknownModel: No entry has this id.
        ContractError: No entry has this id, and the call comes from a client of Anthropic's API.
    """
    wanted, created = call.path_parameters["id"], int(time.time())
    for card in (card for view in views for card in _cards(view, created)):
        if card["id"] == wanted:
            document = anthropic.model_info(card) if anthropic.is_anthropics(call) else card
            return Reply(200, JSON, msgspec.json.encode(document))
    unknown = errors.UnknownModel(wanted, f"The model `{wanted[: errors.SHOWN]}` does not exist.")
    if anthropic.is_anthropics(call):
        raise ContractError(refuse_message(unknown), unknown.message)
    raise unknown


def _cards(view: ModelView, created: int) -> list[dict[str, Any]]:
    max_model_len = view.loaded.max_model_len if view.loaded is not None else None
    base = view.config.public_names[0]
    return [
        *(_card(name, created, max_model_len, view.config.model_id) for name in view.config.public_names),
        *(_card(adapter.name, created, None, adapter.src, base) for adapter in view.adapters),
    ]


def _card(
    name: str, created: int, max_model_len: int | None, root: str, parent: str | None = None
) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def error_reply(message: str, kind: str, status: int, parameter: str | None = None) -> Reply:
    """Return a reply with vLLM's error object.

    Args:
        kind: The error's type, such as "BadRequestError".
    """
    safe = message.encode("utf-8", "replace").decode()  # lone surrogates cannot be encoded
    return Reply(status, JSON, error_body(safe, kind, status, parameter))


def refuse(error: errors.RequestError) -> Reply:
    """Return the reply to an error, with the status and type that vLLM has for it."""
    match error:
        case errors.Unauthorized():
            return Reply(401, JSON, b'{"error":"Unauthorized"}')  # vLLM's middleware also sends no error object
        case errors.UnknownModel() | errors.UnknownAdapter():
            return error_reply(error.message, "NotFoundError", 404, "model")
        case errors.NotServed():
            return error_reply(error.message, "NotImplementedError", 501)
        case errors.NotReady() | errors.Overloaded():
            return error_reply(error.message, HTTPStatus.SERVICE_UNAVAILABLE.phrase, 503)
        case errors.BodyTooLarge():
            return error_reply(error.message, _TOO_LARGE, 413)
        case errors.BodyTimeout():
            return error_reply(error.message, HTTPStatus.REQUEST_TIMEOUT.phrase, 408)
        case errors.InvalidParameter():
            return error_reply(error.message, "BadRequestError", 400, error.parameter)
        case errors.AdapterUnusable():
            return error_reply(error.message, "BadRequestError", 400, "model")
        case errors.DeadlineExceeded():
            return error_reply(error.message, HTTPStatus.GATEWAY_TIMEOUT.phrase, 504)
        case errors.EngineDead() | errors.GenerationFailed():
            return error_reply(error.message, "InternalServerError", 500)
        case _:
            return error_reply(error.message, "BadRequestError", 400)


def refuse_message(error: errors.RequestError) -> Reply:
    """Return the reply to an error on the routes of Anthropic's messages."""
    reply = refuse(error)
    if isinstance(error, errors.Unauthorized):  # `refuse` would send another message
        reply = error_reply(error.message, "", reply.status)
    return anthropic.error_reply(reply)


def wrong_method(call: Call) -> Reply:
    """Return the reply to a method that the route does not have."""
    return _of_status(HTTPStatus.METHOD_NOT_ALLOWED)


def not_found(call: Call) -> Reply:
    """Return the reply to a path that nothing serves."""
    return _of_status(HTTPStatus.NOT_FOUND)


def _of_status(status: HTTPStatus) -> Reply:
    return error_reply(status.phrase, status.phrase, status)


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def read_load(call: Call) -> LoadAdapterRequest:
    """Return the adapter to load.

    Raises:
        InvalidRequest: The body is invalid.
    """
    body = _read(call, LoadAdapterRequest)
    if not body.lora_name or not body.lora_path:
        raise errors.InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
    if body.is_3d_lora_weight:
        raise errors.InvalidParameter("is_3d_lora_weight", "cannot be true: adapters of that layout are not served")
    return body


def read_unload(call: Call) -> UnloadAdapterRequest:
    """Return the adapter to remove.

    Raises:
        InvalidRequest: The body is invalid.
    """
    body = _read(call, UnloadAdapterRequest)
    if not body.lora_name:
        raise errors.InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
    return body


def _read(call: Call, shape: type[T]) -> T:
    try:
        return JsonDecoder(shape).decode(call.body)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(str(error)) from None
    except msgspec.DecodeError as error:
        raise errors.InvalidRequest(f"the body is not valid JSON: {json_fault(call.body, error)}") from None


async def load_adapter(call: Call, management: Management) -> Reply:
    """`POST /v1/load_lora_adapter`."""
    registry = management.adapters(None)
    body = read_load(call)
    order = AdapterOrder(name=body.lora_name, src=body.lora_path)
    await registry.register(order, replacing=body.load_inplace)
    return Reply(200, _TEXT, f"Success: LoRA adapter '{body.lora_name}' added successfully.".encode())


async def unload_adapter(call: Call, management: Management) -> Reply:
    """`POST /v1/unload_lora_adapter`."""
    registry = management.adapters(None)
    body = read_unload(call)
    await registry.unregister(body.lora_name)
    return Reply(200, _TEXT, f"Success: LoRA adapter '{body.lora_name}' removed successfully.".encode())


def refuse_adapter(error: errors.RequestError) -> Reply:
    """Return the reply to an error on the adapter routes."""
    match error:
        case errors.CrossSite():
            return error_reply(error.message, HTTPStatus.FORBIDDEN.phrase, 403)
        case errors.UnknownAdapter():
            return error_reply(f"The lora adapter '{error.name}' cannot be found.", "NotFoundError", 404)
        case errors.NotServed() | errors.AdapterMissing():
            return error_reply(error.message, "NotFoundError", 404)
        case errors.InvalidParameter(parameter="src"):
            message = f"`lora_path`{error.message.removeprefix('`src`')}"
            return error_reply(message, "BadRequestError", 400, "lora_path")
        case errors.AdapterTaken():
            return error_reply(
                f"The lora adapter '{error.name}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                "InvalidUserInput",
                400,
            )
        case errors.AdapterConflict():
            return error_reply(error.message, "InvalidUserInput", 400)
        case errors.NoRoomForAdapter():
            return error_reply(error.message, "ServiceUnavailableError", 503)
        case errors.AdapterError():
            return error_reply(error.message, "InternalServerError", 500)
        case _:
            return refuse(error)


_MODELS = Operation(summary="List the names of the models", answers={"200": ("OpenAI's list of models", {JSON: {}})})
_MODEL = Operation(
    summary="Describe one of the names",
    answers={"200": ("OpenAI's object for a model", {JSON: {}}), "404": ("No model has this name", {JSON: {}})},
)


def _route(path: str, method: str = "POST", *, own_handler: bool = False, by_attribute: bool = True) -> GenerationRoute:
    queued = path in QUEUED
    return GenerationRoute(
        path=path, methods=(method,), queued=queued, own_handler=own_handler, by_attribute=by_attribute
    )


_VERSIONED = (
    _route(CHAT, own_handler=True),  # In LMI, this is another name for /invocations.
    *map(_route, ("/v1/chat/completions/batch", COMPLETIONS, "/v1/responses", EMBEDDINGS, "/v1/score", "/v1/rerank")),
    *map(_route, SPEECH),
    _route("/v1/responses/{response_id}/cancel", by_attribute=False),
    _route("/v1/responses/{response_id}", "GET", by_attribute=False),
)
_MESSAGES = tuple(map(_route, (MESSAGES, COUNT_TOKENS)))


def _aliased(routes: Sequence[GenerationRoute]) -> tuple[GenerationRoute, ...]:
    """Return the routes with the prefix `ALIASED`. These routes accept any `model`."""
    return tuple(replace(route, path=ALIASED + route.path) for route in routes)


def _adapter_route(path: str, operation: ManagementOperation) -> ManagementRoute:
    return ManagementRoute(path=path, operations={"POST": operation}, refuse=refuse_adapter, wrong_method=wrong_method)


OPENAI = ContractRoutes(
    name="openai",
    routes=(
        *_VERSIONED,
        *_aliased(_VERSIONED),
        InfoRoute.of_all("/v1/models", models, about=_MODELS),
        InfoRoute.of_all(ALIASED + "/v1/models", models, about=_MODELS),
        InfoRoute.of_all("/v1/models/{id:path}", model, about=_MODEL),
        InfoRoute.of_all(ALIASED + "/v1/models/{id:path}", model, about=_MODEL),
        *map(_route, ("/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/v2/embed", SHORT_EMBEDDINGS)),
        *map(_route, ("/tokenize", "/detokenize")),
        _route("/version", "GET", by_attribute=False),
        _adapter_route(LOAD, load_adapter),
        _adapter_route(UNLOAD, unload_adapter),
    ),
    refuse=refuse,
    error=OBJECT,
    wrong_method=wrong_method,
    body_names_model=True,
    prefixes=("/v1/", ALIASED + "/"),
    not_found=not_found,
    redirects=True,
)

# Anthropic's routes have their own errors, and otherwise are like OpenAI's.
ANTHROPIC = ContractRoutes(
    name="anthropic",
    routes=(*_MESSAGES, *_aliased(_MESSAGES)),
    refuse=refuse_message,
    error=OBJECT,
    wrong_method=lambda call: anthropic.error_reply(wrong_method(call)),
    body_names_model=True,
    id_header=anthropic.ID_HEADER,
    prefixes=(f"{MESSAGES}/", f"{ALIASED}{MESSAGES}/"),
    not_found=lambda call: anthropic.error_reply(not_found(call)),
    redirects=True,
)
