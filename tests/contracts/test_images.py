"""Images in the requests of TGI and Triton."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import SHOWN, UnusableImage
from handlers.contract import Reply
from handlers.tgi.images import with_marks
from handlers.tgi.routes import TGI
from handlers.triton.routes import TRITON
from tests.contracts import tgi_exchange, triton_exchange

URL = "https://host/a.png"


def numbered(number: int) -> str:
    return f"<|image_{number}|>"


def test_tgis_markdown_becomes_the_models_marks_in_place() -> None:
    document = {"inputs": f"Is ![]({URL}) or ![](data:image/png;base64,aGk=) a cat?"}
    exchange = tgi_exchange.parse("/generate", document, image_mark=numbered)
    assert exchange.requests[0].prompt == "Is <|image_1|> or <|image_2|> a cat?"
    assert exchange.images == (URL, "data:image/png;base64,aGk=")
    assert exchange.requests[0].images == ()


@pytest.mark.parametrize(
    "inputs", [f"![a]({URL})", f"[]({URL})", "![](", f"!({URL})", f"![ ]({URL})", "!\\[]()", "![](" * 100_000]
)
def test_other_markdown_is_text(inputs: str) -> None:
    assert with_marks(inputs, numbered) == (inputs, ())


@given(st.lists(st.text(), min_size=1), st.data())
def test_texts_between_images_do_not_change(texts: list[str], data: Any) -> None:
    texts = [text.replace("![](", "") for text in texts]
    inputs = f"![]({URL})".join(texts)
    prompt, urls = with_marks(inputs, lambda _: "\0image\0")
    assert prompt == "\0image\0".join(texts)
    assert urls == (URL,) * (len(texts) - 1)


@pytest.mark.parametrize("url", ["", "ftp://host/a", "file:///etc/passwd", "HTTP://host", "x" * 1000])
def test_tgi_refuses_other_urls(url: str) -> None:
    body = (
        b'{"error":"Input validation error: invalid image content: expected ![](URL) with http, https or data, got '
        + f"![]({url})".encode()[:SHOWN]
        + b'","error_type":"validation"}'
    )
    refused = tgi_exchange.attempt("/generate", {"inputs": f"a ![]({url})"}, image_mark=numbered)
    assert refused == Reply(422, "application/json", body)
    streamed = tgi_exchange.attempt("/generate_stream", {"inputs": f"a ![]({url})"}, image_mark=numbered)
    assert isinstance(streamed, Reply)
    assert (streamed.status, streamed.body) == (200, b"data:" + body + b"\n\n")


@pytest.mark.parametrize(
    ("error", "of_tgi", "of_triton"),
    [
        (UnusableImage("fetch", "cannot be fetched"), "Could not fetch image: cannot be fetched", "cannot be fetched"),
        (UnusableImage("base64", "is wrong"), "base64 encoding is invalid: is wrong", "is wrong"),
        (UnusableImage("content", "is no image"), "invalid image content: is no image", "is no image"),
    ],
)
def test_each_contract_words_the_faults_of_images(error: UnusableImage, of_tgi: str, of_triton: str) -> None:
    body = f'{{"error":"Input validation error: {of_tgi}","error_type":"validation"}}'.encode()
    assert TGI.refuse(error) == Reply(422, "application/json", body)
    body = f'{{"error":"Error generating stream: `image` {of_triton}"}}'.encode()
    assert TRITON.refuse(error) == Reply(400, "application/json", body)


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize("images", ["aGk=", ["aGk=", "aG8="]])
def test_tritons_images_are_base64_and_the_prompt_has_their_marks(route: str, images: Any) -> None:
    document = {"text_input": "Is <|image_1|> a cat?", "image": images}
    exchange = triton_exchange.parse(document, route, image_mark=numbered)
    assert exchange.requests[0].prompt == "Is <|image_1|> a cat?"
    count = 2 if isinstance(images, list) else 1
    assert exchange.images == ("data:image/png;base64,aGk=", "data:image/png;base64,aG8=")[:count]


def test_triton_refuses_images_for_a_model_of_text_but_takes_none() -> None:
    assert triton_exchange.parse({"text_input": "a", "image": []}).images == ()
    refused = triton_exchange.refused({"text_input": "a", "image": "aGk="})
    body = b'{"error":"Error generating stream: `image` cannot be used: this model takes text only"}'
    assert refused == Reply(400, "application/json", body)
    refused = triton_exchange.refused({"text_input": "a", "image": [1]}, image_mark=numbered)
    assert refused.status == 400
    assert b"attempt to access JSON non-string as string (input 'image')" in refused.body
