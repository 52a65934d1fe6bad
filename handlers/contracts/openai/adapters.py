"""vLLM's own routes for adapters. Source: vLLM's OpenAI-compatible server, `serve/lora`."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from handlers.adapters import AdapterOrder
from handlers.contracts.json_fault import json_fault
from handlers.contracts.openai.family import error_reply, refuse
from handlers.contracts.protocol import Call, Reply
from handlers.errors import (
    AdapterConflict,
    AdapterError,
    InvalidParameter,
    InvalidRequest,
    NoRoomForAdapter,
    NotServed,
    RequestError,
    UnknownAdapter,
)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_TEXT = "text/plain; charset=utf-8"
T = TypeVar("T")


class LoadOrder(msgspec.Struct, frozen=True):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    @property
    def order(self) -> AdapterOrder:
        """The same as the registry takes it."""
        return AdapterOrder(name=self.lora_name, src=self.lora_path)


class UnloadOrder(msgspec.Struct, frozen=True):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def read_load(call: Call) -> LoadOrder:
    """What is to be loaded.

    Raises:
        InvalidRequest: the body is not what it should be.
    """
    body = _read(call, LoadOrder)
    if not body.lora_name or not body.lora_path:
        raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
    if body.is_3d_lora_weight:
        raise InvalidParameter("is_3d_lora_weight", "cannot be true: adapters of that layout are not served")
    return body


def read_unload(call: Call) -> UnloadOrder:
    """What is to be removed.

    Raises:
        InvalidRequest: the body is not what it should be.
    """
    body = _read(call, UnloadOrder)
    if not body.lora_name:
        raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
    return body


def loaded(name: str) -> Reply:
    """The answer to what was loaded."""
    return Reply(200, _TEXT, f"Success: LoRA adapter '{name}' added successfully.".encode())


def unloaded(name: str) -> Reply:
    """The answer to what was removed."""
    return Reply(200, _TEXT, f"Success: LoRA adapter '{name}' removed successfully.".encode())


def refuse_adapter(error: RequestError) -> Reply:
    """The answer to what went wrong, with vLLM's statuses."""
    match error:
        case UnknownAdapter():
            return error_reply(f"The lora adapter '{error.name}' cannot be found.", "NotFoundError", 404)
        case NotServed():
            return error_reply(error.message, "NotFoundError", 404)
        case AdapterConflict():
            return error_reply(error.message, "InvalidUserInput", 400)
        case NoRoomForAdapter():
            return error_reply(error.message, "ServiceUnavailableError", 503)
        case AdapterError():
            return error_reply(error.message, "BadRequestError", 400)
        case _:
            return refuse(error)


def _read(call: Call, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(call.body, type=shape)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {json_fault(call.body, error)}") from None
