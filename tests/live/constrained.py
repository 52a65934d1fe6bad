"""Requests constrained answers, and reports the answers that do not obey their constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema

from tests.constrained import TOKENWISE, Fields, Route
from tests.live.server import Server, records

AT_A_TIME = 16

Check = Callable[[str], bool]
Checked = Mapping[str, tuple[Fields, Check]]
"""The fields of each request, and the check of its text."""
TOKEN_CHECKS: dict[str, Check] = {
    "logit_bias": lambda text: not text.startswith(" Paris"),
    "bad_words": lambda text: "Paris" not in text,
    "allowed_token_ids": lambda text: text != "" and "Paris" not in text,
    "stop": lambda text: text == " ",
    "stop_token_ids": lambda text: text.strip() in ("", "Paris"),
    "min_tokens": lambda text: len(text) > 6,
}
"""The sample model's greedy answer to the prompt, " Paris. ...", breaks all constraints but the last."""
CHECKED_TOKENS: Checked = {name: (fields, TOKEN_CHECKS[name]) for name, fields in TOKENWISE.items()}


def obeys(form: Fields, text: str) -> bool:
    """Return True if a text obeys a form. `form`: its kind, under vLLM's name, and its value."""
    ((kind, value),) = form.items()
    match kind:
        case "regex":
            return re.fullmatch(value, text) is not None
        case "choice":
            return text in value
        case "grammar":
            return text in re.findall('"(.+?)"', value)
        case "json_object":
            return text.lstrip().startswith("{")
    try:
        document = json.loads(text)
        jsonschema.validate(document, value)
    except (ValueError, jsonschema.ValidationError):
        return False
    return isinstance(document, dict)


def checked(forms: Mapping[str, tuple[Fields, Fields]]) -> Checked:
    return {
        name: (fields, lambda text, form=form: obeys(form, text))  # type: ignore[misc]
        for name, (fields, form) in forms.items()
    }


def answer(server: Server, route: Route, fields: Fields) -> tuple[httpx.Response, str]:
    """Return the response and its text. The text of a refused request is empty."""
    response = server.client.post(route.path, json=route.body(fields))
    return response, text_in(route, response)


def text_in(route: Route, response: httpx.Response) -> str:
    """Return the text of an answer. The text of a refused request is empty."""
    if response.status_code != 200 or b'"error"' in response.content:
        return ""
    if not route.stream:
        return route.text(response.json()) or ""
    lines = [line for line in response.text.splitlines() if line.startswith(("data:", "{")) and "[DONE]" not in line]
    return route.text(records("\n".join(line.removeprefix("data:") for line in lines))) or ""


def disobeyed(server: Server, route: Route, cases: Checked, at_a_time: int = AT_A_TIME) -> Iterator[str]:
    """Yield a line for each case whose answer does not obey, with the text of the answer."""
    with ThreadPoolExecutor(at_a_time) as clients:
        for name, (response, text) in zip(
            cases, clients.map(lambda case: answer(server, route, case[0]), cases.values()), strict=True
        ):
            if not cases[name][1](text):
                yield f"{name}: {text!r} of {response.status_code} {response.text[:300]}"


def accepted(
    server: Server, route: Route, cases: Mapping[str, tuple[Fields, str]], at_a_time: int = AT_A_TIME
) -> Iterator[str]:
    """Yield a line for each case that is not refused, or whose refusal lacks the expected words."""
    with ThreadPoolExecutor(at_a_time) as clients:
        for name, (response, text) in zip(
            cases, clients.map(lambda case: answer(server, route, case[0]), cases.values()), strict=True
        ):
            if text or response.status_code >= 500 or cases[name][1] not in response.text:
                yield f"{name}: {text!r} of {response.status_code} {response.text[:300]}"
