"""Requests constrained answers, and reports the answers that do not obey their constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    if response.status_code != 200 or b'"error"' in response.content:
        return response, ""
    if not route.stream:
        return response, route.text(response.json()) or ""
    lines = [line for line in response.text.splitlines() if line.startswith(("data:", "{")) and "[DONE]" not in line]
    return response, route.text(records("\n".join(line.removeprefix("data:") for line in lines))) or ""


def _answers(server: Server, route: Route, requests: Iterable[Fields]) -> list[tuple[httpx.Response, str]]:
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        return list(clients.map(lambda fields: answer(server, route, fields), requests))


def disobeyed(server: Server, route: Route, cases: Checked) -> Iterator[str]:
    """Yield a line for each case whose answer does not obey, with the text of the answer."""
    answers = _answers(server, route, [fields for fields, _ in cases.values()])
    for (name, (_, check)), (response, text) in zip(cases.items(), answers, strict=True):
        if not check(text):
            yield f"{name}: {text!r} of {response.status_code} {response.text[:300]}"


def accepted(server: Server, route: Route, cases: Mapping[str, tuple[Fields, str]]) -> Iterator[str]:
    """Yield a line for each case that is not refused, or whose refusal lacks the expected words."""
    answers = _answers(server, route, [fields for fields, _ in cases.values()])
    for (name, (_, words)), (response, text) in zip(cases.items(), answers, strict=True):
        if text or response.status_code >= 500 or words not in response.text:
            yield f"{name}: {text!r} of {response.status_code} {response.text[:300]}"
