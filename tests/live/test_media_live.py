"""Images over HTTP: a model that accepts images, in every contract that has images."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import peak_memory
from tests.live.bare_media import MediaPrompt, bare_texts
from tests.live.pictures import bomb, chat, data_url, drawn, encoded
from tests.live.server import START_SECONDS, Server, hosted, records, serving, write_model
from tests.live.small_vision_model import prepare_small_vision_model
from tests.waiting import wait_until

IMAGE = data_url(encoded(100, 80))
JPEG = data_url(encoded(100, 80, "JPEG"), "image/jpeg")
TOKENS_OF_AN_IMAGE = 7  # Four tokens, and three marks around them.
PICTURES = [drawn(3), drawn(200)]
URLS = [data_url(picture) for picture in PICTURES]
MARK = "<image>"
TEXT = "Compare {0} and {1}: they are"
LENGTH = 6


def options() -> dict[str, object]:
    return {
        "model_id": prepare_small_vision_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
        "max_rolling_batch_size": 8,
        "max_request_pixels": 1_000_000,
        "limit_mm_per_prompt": '{"image": 3}',
    }


@pytest.fixture(scope="module")
def vision(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with hosted(host, write_model(tmp_path_factory.mktemp("vision") / "model", **options())) as model:
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
        assert ask(vision, *urls, path="/tokenize", model=vision.name).json()["count"] == tokens[-1]
    text = tokens[0]
    assert tokens == [text, text + TOKENS_OF_AN_IMAGE, text + TOKENS_OF_AN_IMAGE, text + 2 * TOKENS_OF_AN_IMAGE]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_a_prompt_with_an_image_is_explained_and_can_be_sent_afterwards(vision: Server, path: str) -> None:
    image = data_url(drawn(len(path)))
    body = chat(image) | {"model": vision.name, "max_tokens": 1, "temperature": 0.5}
    explained = vision.client.post(path, json=body, headers={"x-slipway-explain": "1"})
    assert explained.status_code == 200, explained.text
    found = explained.json()
    assert found["parameters"]["temperature"] == {"value": 0.5, "from": None}
    assert found["origins_known"] is False
    answer = ask(vision, image, path=path, max_tokens=1)
    assert answer.status_code == 200, answer.text
    (prompt,) = found["prompts"]
    assert prompt["tokens"] == len(prompt["token_ids"]) == answer.json()["usage"]["prompt_tokens"]


def test_an_image_in_tgis_prompt_is_explained_and_can_be_sent_afterwards(vision: Server) -> None:
    inputs = f"![]({data_url(drawn(55))})Hello"
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 1, "decoder_input_details": True, "details": True}}
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/generate; explain=1"}
    explained = vision.client.post("/invocations", json=body, headers=headers)
    assert explained.status_code == 200, explained.text
    (prompt,) = explained.json()["prompts"]
    answer = tgi(vision, "/generate", inputs, max_new_tokens=1, decoder_input_details=True, details=True)
    assert answer.status_code == 200, answer.text
    prefill = (answer.json()[0] if isinstance(answer.json(), list) else answer.json())["details"]["prefill"]
    assert prompt["token_ids"] == [token["id"] for token in prefill]


def test_an_image_of_a_refused_prompt_can_be_sent_again(vision: Server) -> None:
    refusals: list[dict[str, Any]] = [{"structured_outputs": {"regex": "("}}, {"temperature": -1}, {"max_tokens": 5000}]
    for number, fields in enumerate(refusals):
        image = data_url(drawn(77 + number))
        refused = ask(vision, image, **fields)
        assert refused.status_code == 400, refused.text
        answer = ask(vision, image, max_tokens=1)
        assert answer.status_code == 200, answer.text
    inputs = f"![]({data_url(drawn(99))})Hello"
    refused = tgi(vision, "/generate", inputs, truncate=3)
    assert (refused.status_code, "cannot be cut to 3 tokens" in refused.text) == (422, True), refused.text
    assert tgi(vision, "/generate", inputs, max_new_tokens=1).status_code == 200


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


def test_files_of_the_machine_are_not_read(vision: Server) -> None:
    answer = ask(vision, "file:///etc/passwd")
    assert answer.status_code == 400
    assert "Cannot load local files" in answer.json()["error"]["message"]


CHAT = f"<|im_start|>user\n{MARK}{MARK}What is this?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def bare() -> dict[str, str]:
    """The texts that bare vLLM generates for three prompts.

    `text` is for TEXT. `turned` is for TEXT with the pictures in the opposite order. `chat` is for CHAT.
    """
    files = tuple(base64.b64encode(picture).decode() for picture in PICTURES)
    text = TEXT.format(MARK, MARK)
    prompts = [MediaPrompt(text, files), MediaPrompt(text, files[::-1]), MediaPrompt(CHAT, files)]
    texts = bare_texts(
        prepare_small_vision_model(), prompts, max_model_len=2048, kv_cache_memory_bytes=64 << 20, max_num_seqs=8
    )
    assert len(set(texts)) == 3, "the pictures make no difference"
    return dict(zip(("text", "turned", "chat"), texts, strict=True))


def tgi(vision: Server, path: str, inputs: str, **parameters: Any) -> httpx.Response:
    """Call one of TGI's routes.

    The server has several models, so `route` names the path, and the query names the model.
    """
    body = {"inputs": inputs, "parameters": {"max_new_tokens": LENGTH, **parameters}}
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"}
    return vision.client.post("/invocations", json=body, headers=headers)


def triton(vision: Server, path: str, text: str, images: Any, **fields: Any) -> httpx.Response:
    body = {"text_input": text, "image": images, "max_tokens": LENGTH, "temperature": 0, **fields}
    return vision.client.post(f"/v2/models/{vision.name}/{path}", json=body)


def test_chats_answer_as_bare_vllm(vision: Server, bare: dict[str, str]) -> None:
    whole = ask(vision, *URLS, max_tokens=LENGTH)
    assert whole.json()["choices"][0]["message"]["content"] == bare["chat"]
    of_lmi = ask(vision, *URLS, path="/invocations", max_tokens=LENGTH)
    assert of_lmi.json()["choices"][0]["message"]["content"] == bare["chat"]
    streamed = ask(vision, *URLS, path="/invocations", max_tokens=LENGTH, stream=True)
    assert streamed.headers["content-type"] == "application/jsonlines"
    deltas = [choice["delta"] for record in records(streamed.text) for choice in record["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == bare["chat"]


def test_tgis_markdown_answers_as_bare_vllm(vision: Server, bare: dict[str, str]) -> None:
    inputs = TEXT.format(*(f"![]({url})" for url in URLS))
    answer = tgi(vision, "/generate", inputs)
    assert answer.json() == {"generated_text": bare["text"]}
    turned = tgi(vision, "/generate", TEXT.format(*(f"![]({url})" for url in URLS[::-1])))
    assert turned.json() == {"generated_text": bare["turned"]}
    events = tgi(vision, "/generate_stream", inputs).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data:"))["generated_text"] == bare["text"]
    assert tgi(vision, "/", inputs).json() == [{"generated_text": inputs + bare["text"]}]
    sampled = tgi(vision, "/generate", inputs, best_of=2, do_sample=True, details=True)
    assert len(sampled.json()["details"]["best_of_sequences"]) == 1
    details = tgi(vision, "/generate", inputs, decoder_input_details=True).json()["details"]
    assert [token["text"] for token in details["prefill"]].count(MARK) == 2 * 4


def test_tritons_images_answer_as_bare_vllm(vision: Server, bare: dict[str, str]) -> None:
    text, files = TEXT.format(MARK, MARK), [base64.b64encode(picture).decode() for picture in PICTURES]
    whole = triton(vision, "generate", text, files, exclude_input_in_output=True)
    assert whole.json()["text_output"] == bare["text"]
    turned = triton(vision, "generate", text, files[::-1], return_num_input_tokens=True)
    assert turned.json()["text_output"] == text + bare["turned"]
    streamed = triton(vision, "generate_stream", text, files, stream=True)
    assert "".join(record["text_output"] for record in records(streamed.text)) == bare["text"]


@pytest.mark.slow
def test_images_that_grow_are_refused_in_bounded_memory(vision: Server) -> None:
    """The first image would take 300 MiB. The other images would take 190 MiB together."""
    tgi(vision, "/generate", f"![]({IMAGE})")  # imports the decoders
    urls = [data_url(encoded(9000, 9000)), *[data_url(encoded(4000, 4000))] * 3]
    peak_memory.reset(vision.process.pid)
    before = peak_memory.peak_mib(vision.process.pid)
    for wrong in (urls[:1], urls[1:]):
        answers = [
            ask(vision, *wrong),
            tgi(vision, "/generate", "".join(f"![]({url})" for url in wrong)),
            triton(vision, "generate", MARK * len(wrong), [url.partition(",")[2] for url in wrong]),
        ]
        assert [answer.status_code for answer in answers] == [400, 422, 400]
        assert all("_pixels)" in answer.text for answer in answers)
    assert peak_memory.peak_mib(vision.process.pid) - before < 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_a_call_with_an_image_has_a_deadline(vision: Server, path: str) -> None:
    body = {"inputs": f"![]({IMAGE})"} if path == "/generate" else chat(IMAGE) | {"model": vision.name}
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}; deadline=0.0001"}
    answer = vision.client.post("/invocations", json=body, headers=headers)
    assert answer.status_code == 504, answer.text
    assert "the call had no answer at its deadline" in answer.text


def test_images_are_not_searched_with_beams_and_count_in_the_context(vision: Server) -> None:
    beams = triton(vision, "generate", MARK, IMAGE.partition(",")[2], beam_width=2, max_tokens=4)
    assert (beams.status_code, "beam search takes text only" in beams.json()["error"]) == (400, True)
    long = tgi(vision, "/generate", f"![]({IMAGE})" + "hello " * 3000)
    assert (long.status_code, "must be <= 2048. Given: 3" in long.json()["error"]) == (422, True)


@pytest.mark.slow
def test_images_that_a_dead_engine_knew_are_sent_to_the_next(tmp_path: Path) -> None:
    with serving(tmp_path, {"SERVING_ENGINE_RESTART": "3"}, **options()) as server:
        server.client.timeout = httpx.Timeout(START_SECONDS)  # A call waits until the next engine is loaded.
        assert ask(server, IMAGE, max_tokens=1).status_code == 200
        os.kill(server.engine_process(), signal.SIGKILL)
        wait_until(lambda: "calls wait for it" in server.log_text())
        for _ in range(2):
            answer = ask(server, IMAGE, max_tokens=1)
            assert answer.status_code == 200, answer.text
