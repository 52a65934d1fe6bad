"""What LMI's management API is asked, and how it refuses. Source: contracts/lmi.md sections 1.6, 1.7 and 1.10."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.contracts.json_fault import json_fault
from handlers.contracts.lmi.errors import JSON, front_end_reply
from handlers.contracts.protocol import Call, ContractError

MAX_LISTED = 100
MAX_WORKERS = 128
"""A process each; more than any machine has use for."""
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,200}")
"""Not `.` or `..`: clients resolve them in a path, and could never unload such a model."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
_MODEL_KEYS = {
    "engine": "engine",
    "device": "load_on_devices",
    "job_queue_size": "job_queue_size",
    "batch_size": "batch_size",
    "max_batch_delay": "max_batch_delay",
    "max_idle_time": "max_idle_time",
    "min_worker": "minWorkers",
    "max_worker": "maxWorkers",
}
"""Parameters of a registration, and the keys of serving.properties that they go before."""


@dataclass(frozen=True, slots=True)
class Registration:
    """`POST /models`, understood."""

    url: str
    name: str | None
    version: str | None
    settings: Mapping[str, str]
    """Keys of the model with their values, as in serving.properties."""
    synchronous: bool


def refused(status: int, kind: str, message: str) -> ContractError:
    """A call that is answered with the front end's error; `kind` is a class name of LMI's."""
    return ContractError(front_end_reply(status, kind, message), message)


def bad_request(message: str) -> ContractError:
    """400: a parameter is missing or wrong."""
    return refused(400, "BadRequestException", message)


def read_registration(call: Call) -> Registration:
    """Understand `POST /models`: query parameters or, with a JSON content type, an object with the same names.

    Parameters that are not known are ignored.

    Raises:
        ContractError: 400; a parameter is missing or wrong, and is named.
    """
    in_json = call.content_type.partition(";")[0].strip().lower() == JSON
    given = _json_parameters(call.body) if in_json else dict(call.query)
    url, name = given.get("url", "").strip(), given.get("model_name")
    if not url:
        raise bad_request("Parameter url is required.")
    if name is None and in_json:
        raise bad_request("Parameter model_name is required.")
    return Registration(
        url,
        _name("model_name", name),
        _name("model_version", given.get("model_version") or None),
        {key: given[parameter] for parameter, key in _MODEL_KEYS.items() if parameter in given},
        _boolean("synchronous", given.get("synchronous", "true")),
    )


def read_scale(call: Call, current: tuple[int, int]) -> tuple[int, int]:
    """`min_worker` and `max_worker` of a PUT; one that is not given stays, as far as the other lets it.

    Raises:
        ContractError: 400; none is given, or one is wrong.
    """
    given = dict(call.query)
    least, most = (_workers(given, name) for name in ("min_worker", "max_worker"))
    if least is None and most is None:
        raise bad_request("Parameter min_worker or max_worker is required.")
    if least is None or most is None:
        least = min(current[0], most) if least is None and most is not None else least or 0
        most = max(current[1], least) if most is None else most
    if most < least:
        raise bad_request(f"Parameter max_worker is {most}; allowed: an integer of at least min_worker ({least})")
    return least, most


def read_page(call: Call) -> tuple[int, int]:
    """Where a list begins and how long it is at most, of `next_page_token` and `limit`.

    Raises:
        ContractError: 400; one of them is no integer in its range.
    """
    given = dict(call.query)
    limit = _integer("limit", given.get("limit", str(MAX_LISTED)), 1)
    return _integer("next_page_token", given.get("next_page_token", "0"), 0), min(limit, MAX_LISTED)


def _json_parameters(body: bytes) -> dict[str, str]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {json_fault(body, error)}") from None
    if not isinstance(document, dict):
        raise bad_request("The body is not a JSON object.")
    return {name: _text(name, value) for name, value in document.items() if value is not None and _is_ours(name)}


def _is_ours(name: str) -> bool:
    return name in _MODEL_KEYS or name in ("url", "model_name", "model_version", "synchronous")


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise bad_request(f"Parameter {name} is no string or number.")


def _name(parameter: str, text: str | None) -> str | None:
    if text is not None and not _NAME.fullmatch(text):
        raise bad_request(
            f'Parameter {parameter} is "{text[:200]}"; allowed: up to 200 letters, digits and _ . -, not . or ..'
        )
    return text


def _boolean(parameter: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise bad_request(f'Parameter {parameter} is "{text[:200]}"; allowed: true, false')
    return text.strip().lower() == "true"


def _workers(given: Mapping[str, str], parameter: str) -> int | None:
    return _integer(parameter, given[parameter], 0, MAX_WORKERS) if parameter in given else None


def _integer(parameter: str, text: str, least: int, most: int | None = None) -> int:
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"an integer from {least} to {most}" if most is not None else f"an integer of at least {least}"
        raise bad_request(f'Parameter {parameter} is "{text[:200]}"; allowed: {allowed}')
    return number
