"""Anthropic's forms of errors and of the list of models, on OpenAI's routes.

Source: Anthropic's API reference, and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from handlers.contract import JSON, Call, Reply

VERSION_HEADER = "Anthropic-Version"  # Every client of Anthropic's API sends this header.
ID_HEADER = "request-id"  # Anthropic's clients read the id of a request from this header.

# Other client errors have the type `invalid_request_error`. Other server errors have the type `api_error`.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_anthropics(call: Call) -> bool:
    """Return True if the call comes from a client of Anthropic's API."""
    return call.header(VERSION_HEADER) is not None


def error_reply(reply: Reply) -> Reply:
    """Convert a reply with an error of OpenAI's routes to Anthropic's form."""
    error = msgspec.json.decode(reply.body)["error"]
    message = error["message"] if isinstance(error, dict) else error
    kind = _TYPES.get(reply.status, "invalid_request_error" if reply.status < 500 else "api_error")
    document = {"type": "error", "error": {"type": kind, "message": message}}
    return Reply(reply.status, JSON, msgspec.json.encode(document), reply.headers)


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return Anthropic's list of models for OpenAI's model objects. All models are on one page."""
    data = [model_info(card) for card in cards]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


def model_info(card: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's model object for OpenAI's model object."""
    created = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }
