"""Checks of forms with audio, before vLLM's front end reads the forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.errors import InvalidParameter, InvalidRequest
from handlers.contract import Call
from handlers.openai.media.speech import SPEECH, check_form
from handlers.parsing.forms import form_text
from tests.stand_ins.request_headers import request_headers
from tests.unit.handlers.openai.test_handler import served

FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\xc3\xa9\r\n--b--\r\n'
KIND = "multipart/form-data; boundary=b"


def form(body: bytes = FORM, *headers: tuple[str, str]) -> Call:
    return Call(body=body, content_type=KIND, request_id="r", headers=request_headers(*headers), path=SPEECH[0])


def test_a_form_larger_than_the_largest_file_is_refused_unread() -> None:
    check_form(form(bytes(3 << 20)), 2)
    with pytest.raises(InvalidParameter, match="2 MiB") as refused:
        check_form(form(bytes((3 << 20) + 1)), 2)
    assert refused.value.parameter == "file"


@pytest.mark.parametrize("separator", [b"&", b";"])
def test_a_long_form_that_can_have_no_file_is_refused_unread(separator: bytes) -> None:
    check_form(form(separator * 1001), 25)
    urlencoded = "application/x-www-form-urlencoded"
    check_form(replace(form(separator * 1000), content_type=urlencoded), 25)
    with pytest.raises(InvalidParameter, match="`file`"):
        check_form(replace(form(separator * 1001), content_type=urlencoded), 25)


def test_an_adapter_outside_of_the_form_is_refused() -> None:
    check_form(form(FORM, ("X-Amzn-Sagemaker-Adapter-Identifier", "")), 25)
    with pytest.raises(InvalidRequest, match="`model`"):
        check_form(form(FORM, ("X-Amzn-Sagemaker-Adapter-Identifier", "a")), 25)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (FORM, KIND, "m\xe9"),
        (b"a=1&model=b+c&model=d", "application/x-www-form-urlencoded", "b c"),
        (b'{"model": "a"}', "application/json", None),
        (FORM.replace(b"model", b"other"), KIND, None),
        (FORM[:-8], KIND, None),
        (FORM, "multipart/form-data", None),
    ],
)
def test_a_field_of_a_form_is_found(body: bytes, kind: str, text: str | None) -> None:
    assert form_text(body, kind, "model") == text


async def test_bytes_that_look_like_costly_json_reach_the_application_unchanged() -> None:
    body = FORM + b"{[" * 200_000
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((dict(scope["headers"])[b"content-type"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    writer, _ = await served(app, form(body))
    assert seen == [(KIND.encode(), body)]
    assert writer.whole is not None
    assert writer.whole.status == 200
