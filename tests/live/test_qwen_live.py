"""A vision model whose processors need torchvision, in every contract. Its images come from an allowed network."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.media_host import hosting
from tests.live.pictures import chat, data_url, drawn, encoded
from tests.live.server import Server, hosted, write_model
from tests.live.small_qwen_model import MARK, prepare_small_qwen_model

pytestmark = pytest.mark.slow

PICTURES = [drawn(3), drawn(200)]
FILES = tuple(base64.b64encode(picture).decode() for picture in PICTURES)
TEXT = "Compare {0} and {1}: they are"
CHAT = "<|im_start|>user\n{0}{1}What is this?<|im_end|>\n<|im_start|>assistant\n"
LENGTH = 6


@pytest.fixture(scope="module")
def qwen(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, object] = {
        "model_id": prepare_small_qwen_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_rolling_batch_size": 8,
        "allowed_media_networks": "127.0.0.0/8",
        "max_media_download_mb": 1,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
    }
    with hosted(host, write_model(tmp_path_factory.mktemp("qwen") / "model", **options)) as model:
        yield model


def ask(qwen: Server, *urls: str) -> Any:
    fields = {"model": qwen.name, "max_tokens": LENGTH, "logprobs": True}
    return qwen.client.post("/v1/chat/completions", json=chat(*urls) | fields)


def tgi(qwen: Server, inputs: str) -> Any:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/generate"}
    body = {"inputs": inputs, "parameters": {"max_new_tokens": LENGTH}}
    return qwen.client.post("/invocations", json=body, headers=headers)


def test_the_contracts_give_the_same_answers_which_depend_on_the_images(qwen: Server) -> None:
    with hosting(PICTURES[0]) as url:
        urls = (url, data_url(PICTURES[1]))
        (choice,), (turned,) = (ask(qwen, *given).json()["choices"] for given in (urls, urls[::-1]))
        assert choice["logprobs"] != turned["logprobs"]
        of_lmi = qwen.client.post("/invocations", json=chat(*urls) | {"max_tokens": LENGTH})
        assert of_lmi.json()["choices"][0]["message"]["content"] == choice["message"]["content"]
        images = [f"![]({each})" for each in urls]
        assert tgi(qwen, CHAT.format(*images)).json()["generated_text"] == choice["message"]["content"]
        text = tgi(qwen, TEXT.format(*images)).json()["generated_text"]
    body = {"text_input": TEXT.format(MARK, MARK), "image": FILES, "max_tokens": LENGTH, "temperature": 0}
    answer = qwen.client.post(f"/v2/models/{qwen.name}/generate", json=body | {"exclude_input_in_output": True})
    assert answer.json()["text_output"] == text


def test_an_image_that_the_models_processor_refuses_is_the_clients_fault(qwen: Server) -> None:
    """Qwen2-VL refuses images that are very long and narrow."""
    strip = data_url(encoded(3000, 1))
    of_tgi = tgi(qwen, f"![]({strip})")
    assert (of_tgi.status_code, "does not fit its images" in of_tgi.text) == (422, True), of_tgi.text
    assert ask(qwen, strip).status_code == 400
