"""A vision model whose processors need torchvision, in every contract. Its images come from an allowed network."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.bare_media import MediaPrompt, bare_texts
from tests.live.media_host import hosting
from tests.live.pictures import chat, data_url, drawn, encoded
from tests.live.server import Server, hosted, write_model
from tests.live.small_qwen_model import MARK, prepare_small_qwen_model

pytestmark = pytest.mark.slow

PICTURES = [drawn(3), drawn(200)]
FILES = tuple(base64.b64encode(picture).decode() for picture in PICTURES)
TEXT = "Compare {0} and {1}: they are"
CHAT = f"<|im_start|>user\n{MARK}{MARK}What is this?<|im_end|>\n<|im_start|>assistant\n"
LENGTH = 6
ARGUMENTS: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def qwen(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, object] = {
        "model_id": prepare_small_qwen_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_rolling_batch_size": 8,
        "allowed_media_networks": "127.0.0.0/8",
        "max_media_download_mb": 1,
        **ARGUMENTS,
    }
    with hosted(host, write_model(tmp_path_factory.mktemp("qwen") / "model", **options)) as model:
        yield model


@pytest.fixture(scope="module")
def bare() -> tuple[str, str]:
    """The texts of bare vLLM for TEXT and for a chat."""
    prompts = [MediaPrompt(TEXT.format(MARK, MARK), FILES), MediaPrompt(CHAT, FILES)]
    text, of_chat = bare_texts(prepare_small_qwen_model(), prompts, max_num_seqs=8, **ARGUMENTS)
    return text, of_chat


def ask(qwen: Server, *urls: str) -> Any:
    return qwen.client.post("/v1/chat/completions", json=chat(*urls) | {"model": qwen.name, "max_tokens": LENGTH})


def tgi(qwen: Server, inputs: str) -> Any:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/generate"}
    body = {"inputs": inputs, "parameters": {"max_new_tokens": LENGTH}}
    return qwen.client.post("/invocations", json=body, headers=headers)


def test_every_contract_answers_as_bare_vllm(qwen: Server, bare: tuple[str, str]) -> None:
    text, of_chat = bare
    with hosting(PICTURES[0]) as url:
        urls = (url, data_url(PICTURES[1]))
        assert ask(qwen, *urls).json()["choices"][0]["message"]["content"] == of_chat
        of_lmi = qwen.client.post("/invocations", json=chat(*urls) | {"max_tokens": LENGTH})
        assert of_lmi.json()["choices"][0]["message"]["content"] == of_chat
        markdown = TEXT.format(*(f"![]({each})" for each in urls))
        assert tgi(qwen, markdown).json() == {"generated_text": text}
    body = {"text_input": TEXT.format(MARK, MARK), "image": FILES, "max_tokens": LENGTH, "temperature": 0}
    answer = qwen.client.post(f"/v2/models/{qwen.name}/generate", json=body | {"exclude_input_in_output": True})
    assert answer.json()["text_output"] == text


def test_an_image_that_the_models_processor_refuses_is_the_clients_fault(qwen: Server) -> None:
    """Qwen2-VL refuses images that are very long and narrow."""
    strip = data_url(encoded(3000, 1))
    of_tgi = tgi(qwen, f"![]({strip})")
    assert (of_tgi.status_code, "does not fit its images" in of_tgi.text) == (422, True), of_tgi.text
    assert ask(qwen, strip).status_code == 400
