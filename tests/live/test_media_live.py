"""Images over HTTP: a model that takes them, on every route with messages."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.pictures import bomb, chat, data_url, encoded
from tests.live.server import Server, hosted, write_model
from tests.live.small_vision_model import prepare_small_vision_model

IMAGE = data_url(encoded(100, 80))
JPEG = data_url(encoded(100, 80, "JPEG"), "image/jpeg")
TOKENS_OF_AN_IMAGE = 7  # Four, and three marks around them.


@pytest.fixture(scope="module")
def vision(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, object] = {
        "model_id": prepare_small_vision_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
        "max_rolling_batch_size": 8,
        "max_request_pixels": 1_000_000,
        "limit_mm_per_prompt": '{"image": 3}',
    }
    with hosted(host, write_model(tmp_path_factory.mktemp("vision") / "model", **options)) as model:
        yield model


def ask(vision: Server, *urls: str, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = chat(*urls) | fields
    if path.startswith("/v1/"):
        body["model"] = vision.name
    return vision.client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_images_are_a_part_of_the_prompt(vision: Server, path: str) -> None:
    tokens = []
    for urls in ((), (IMAGE,), (JPEG,), (IMAGE, JPEG)):
        answer = ask(vision, *urls, path=path)
        assert answer.status_code == 200, answer.text
        tokens.append(answer.json()["usage"]["prompt_tokens"])
    text = tokens[0]
    assert tokens == [text, text + TOKENS_OF_AN_IMAGE, text + TOKENS_OF_AN_IMAGE, text + 2 * TOKENS_OF_AN_IMAGE]


def test_images_are_streamed_over(vision: Server) -> None:
    answer = ask(vision, IMAGE, stream=True)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_responses_and_messages_take_images(vision: Server) -> None:
    parts = [{"type": "input_image", "image_url": IMAGE, "detail": "auto"}, {"type": "input_text", "text": "x"}]
    body: dict[str, Any] = {"model": vision.name, "max_output_tokens": 4, "input": [{"role": "user", "content": parts}]}
    answer = vision.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    parts[0]["image_url"] = data_url(bomb(9000, 9000))
    refused = vision.client.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "image_url")
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "x"}]
    body = {"model": vision.name, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    answer = vision.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    source["data"] = data_url(bomb(9000, 9000)).partition(",")[2]
    refused = vision.client.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert "9000x9000" in refused.text


@pytest.mark.parametrize(
    ("urls", "param", "message"),
    [
        ([data_url(bomb(13000, 13000))], "image_url", "at most 64000000 pixels are taken (option.max_image_pixels)"),
        ([data_url(encoded(700, 700))] * 3, "image_url", "1000000 pixels together (option.max_request_pixels)"),
        ([IMAGE] * 4, "image", "At most 3 image(s) may be provided in one prompt."),
        (["data:image/png;base64,AAAA"], "image_url", "is no image; taken are PNG, JPEG, WebP, GIF, BMP, TIFF"),
    ],
)
def test_images_beyond_a_limit_are_refused_by_its_name(
    vision: Server, urls: list[str], param: str, message: str
) -> None:
    answer = ask(vision, *urls)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    of_lmi = ask(vision, *urls, path="/invocations")
    assert of_lmi.status_code == 424
    assert message in of_lmi.json()["error"]


def test_an_inner_address_looks_the_same_whether_something_listens_there_or_not(vision: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [listening.getsockname()[1], closed.getsockname()[1], vision.port]
        urls = [f"http://127.0.0.1:{port}/ping" for port in ports]
        urls += ["http://169.254.169.254/latest/meta-data/", f"http://[::ffff:127.0.0.1]:{vision.port}/ping"]
        answers = [ask(vision, url) for url in urls]
        assert {(answer.status_code, answer.text) for answer in answers} == {(422, answers[0].text)}
        assert "option.allowed_media_networks" in answers[0].text
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_files_of_the_machine_are_not_read(vision: Server) -> None:
    answer = ask(vision, "file:///etc/passwd")
    assert answer.status_code == 400
    assert "Cannot load local files" in answer.json()["error"]["message"]
